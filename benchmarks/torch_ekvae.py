"""The pendulum's VHP-EKVAE written the usual way in eager PyTorch: what our training step is compared with."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn

LOG_2PI = math.log(2 * math.pi)


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def log_normal(x: Tensor, m: Tensor, P: Tensor) -> Tensor:
    L = torch.linalg.cholesky(P)
    whitened = torch.linalg.solve_triangular(L, (x - m)[..., None], upper=False)[..., 0]
    log_determinant = 2 * torch.diagonal(L, dim1=-2, dim2=-1).log().sum(-1)
    return -0.5 * (whitened.square().sum(-1) + log_determinant + x.shape[-1] * LOG_2PI)


def kl(m_q: Tensor, P_q: Tensor, m_p: Tensor, P_p: Tensor) -> Tensor:
    L_q, L_p = torch.linalg.cholesky(P_q), torch.linalg.cholesky(P_p)
    A = torch.linalg.solve_triangular(L_p, L_q, upper=False)
    d = torch.linalg.solve_triangular(L_p, (m_p - m_q)[..., None], upper=False)[..., 0]
    logs = [torch.diagonal(L, dim1=-2, dim2=-1).log().sum(-1) for L in (L_p, L_q)]
    return 0.5 * (A.square().sum((-2, -1)) + d.square().sum(-1) - m_q.shape[-1]) + logs[0] - logs[1]


class TorchEKVAE(nn.Module):
    def __init__(self, pixels: int = 256, n: int = 3, n_a: int = 2, n_u: int = 1, bases: int = 16, sigma: float = 0.01):
        super().__init__()
        self.n, self.n_a, self.sigma = n, n_a, sigma
        self.encoder, self.decoder = mlp(pixels, 128, 128, 128, 2 * n_a), mlp(n_a, 128, 128, 128, pixels)
        self.g = mlp(n + n_u, 64, bases)
        self.F = nn.Parameter(torch.eye(n) + 0.05 * torch.randn(bases, n, n))
        self.B = nn.Parameter(0.05 * torch.randn(bases, n, n_u))
        self.log_Q = nn.Parameter(torch.full((bases, n), -3.0))
        self.log_R = nn.Parameter(torch.full((n_a,), -3.0))
        self.m_0, self.log_P_0 = nn.Parameter(torch.zeros(n)), nn.Parameter(torch.zeros(n))
        self.q_zeta, self.p_z = mlp(n, 64, 64, 2 * n), mlp(n, 64, 64, 2 * n)
        self.register_buffer("H", torch.eye(n_a, n))
        self.register_buffer("I", torch.eye(n))

    def transition(self, z: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        alpha = torch.softmax(self.g(torch.cat([z, u], -1)), -1)
        F = torch.einsum("...m,mij->...ij", alpha, self.F)
        b = torch.einsum("...m,mij,...j->...i", alpha, self.B, u)
        return F, b, torch.diag_embed(alpha @ self.log_Q.exp())

    def infer(self, a: Tensor, u: Tensor) -> tuple[Tensor, ...]:
        """Extended Kalman filter and smoother over (N, T, n_a)."""
        N, T = a.shape[:2]
        H, R = self.H, torch.diag(self.log_R.exp())
        m, P = self.m_0.expand(N, -1), torch.diag(self.log_P_0.exp()).expand(N, -1, -1)
        filtered, predicted, transitions = [], [], []
        for t in range(T):
            predicted.append((m, P))
            S = H @ P @ H.T + R
            K = torch.cholesky_solve(H @ P, torch.linalg.cholesky(S)).transpose(-1, -2)
            m = m + (K @ (a[:, t] - m @ H.T)[..., None])[..., 0]
            A = self.I - K @ H
            P = A @ P @ A.transpose(-1, -2) + K @ R @ K.transpose(-1, -2)
            filtered.append((m, P))
            F, b, Q = self.transition(m, u[:, t])
            transitions.append((F, Q))
            m, P = (F @ m[..., None])[..., 0] + b, F @ P @ F.transpose(-1, -2) + Q
        smoothed = [filtered[-1]]
        for t in reversed(range(T - 1)):
            (m, P), (m_p, P_p), (F, Q) = filtered[t], predicted[t + 1], transitions[t]
            m_s, P_s = smoothed[0]
            G = torch.cholesky_solve(F @ P, torch.linalg.cholesky(P_p)).transpose(-1, -2)
            A = self.I - G @ F
            P = A @ P @ A.transpose(-1, -2) + G @ (P_s + Q) @ G.transpose(-1, -2)
            smoothed.insert(0, (m + (G @ (m_s - m_p)[..., None])[..., 0], P))
        return tuple(torch.stack(part, 1) for pairs in (filtered, smoothed) for part in zip(*pairs, strict=True))

    def forward(self, x: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """Distortion and rate in nats per frame."""
        mean, log_v = self.encoder(x).chunk(2, -1)
        a = mean + (0.5 * log_v).exp() * torch.randn_like(mean)
        m_f, P_f, m_s, P_s = self.infer(a, u)
        z = m_s + (torch.linalg.cholesky(P_s) @ torch.randn_like(m_s)[..., None])[..., 0]
        log_x = -0.5 * ((x - self.decoder(a)) / self.sigma).square() - math.log(self.sigma) - 0.5 * LOG_2PI
        log_q = -0.5 * (log_v + 1 + LOG_2PI).sum(-1)
        R = torch.diag(self.log_R.exp())
        F, b, Q = self.transition(z[:, :-1], u[:, :-1])
        z_next = (F @ z[:, :-1, :, None])[..., 0] + b
        S = self.H @ Q @ self.H.T + R
        rate = (log_q[:, 1:] - log_normal(a[:, 1:], z_next @ self.H.T, S)).sum()
        rate = rate + kl(m_s[:, :-1], P_s[:, :-1], m_f[:, :-1], P_f[:, :-1]).sum()
        rate = rate + (log_q[:, 0] - log_normal(a[:, 0], z[:, 0] @ self.H.T, R.expand(len(x), -1, -1))).sum()
        m_zeta, log_v_zeta = self.q_zeta(z[:, 0]).chunk(2, -1)
        m_z, log_v_z = self.p_z(m_zeta + (0.5 * log_v_zeta).exp() * torch.randn_like(m_zeta)).chunk(2, -1)
        log_p = -0.5 * ((z[:, 0] - m_z).square() / log_v_z.exp() + log_v_z + LOG_2PI).sum(-1)
        kl_zeta = 0.5 * (log_v_zeta.exp() + m_zeta.square() - 1 - log_v_zeta).sum(-1)
        L = torch.linalg.cholesky(P_s[:, 0])
        entropy = torch.diagonal(L, dim1=-2, dim2=-1).log().sum(-1) + 0.5 * self.n * (1 + LOG_2PI)
        rate = rate + (kl_zeta - log_p - entropy).sum()
        frames = x.shape[0] * x.shape[1]
        return -log_x.sum() / frames, rate / frames
