"""Slow and obviously right: linear Gaussian state-space models as one dense joint Gaussian, in NumPy float64."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class System(NamedTuple):
    """z_t+1 = F_t z_t + b_t + N(0, Q_t), a_t = H z_t + N(0, R), z_1 ~ N(m, P)."""

    m: Array
    P: Array
    F: Array
    b: Array
    Q: Array
    H: Array
    R: Array

    @property
    def joint(self) -> tuple[Array, Array]:
        """Mean and covariance of (z_1, ..., z_T)."""
        T, n = len(self.F), len(self.m)
        mean, noise = np.zeros((T, n)), np.zeros((T, n, T, n))
        mean[0] = self.m
        spread = np.zeros((T, n, T, n))  # z_t as a linear function of the noises
        spread[0, :, 0] = np.eye(n)
        noise[0, :, 0] = self.P
        for t in range(1, T):
            mean[t] = self.F[t - 1] @ mean[t - 1] + self.b[t - 1]
            spread[t] = np.einsum("ij,jsk->isk", self.F[t - 1], spread[t - 1])
            spread[t, :, t] = np.eye(n)
            noise[t, :, t] = self.Q[t - 1]
        G, N = spread.reshape(T * n, T * n), noise.reshape(T * n, T * n)
        return mean.reshape(-1), G @ N @ G.T

    def condition(self, a: Array, seen: NDArray[np.bool_]) -> tuple[Array, Array, float]:
        """Posterior means (T, n) and covariances (T, n, n) given the seen a, and their log-likelihood."""
        T, n = len(self.F), len(self.m)
        mean, P = self.joint
        H = np.kron(np.eye(T), self.H)
        R = np.kron(np.eye(T), self.R)
        rows = np.repeat(seen, len(self.H))
        H, R, y = H[rows], R[np.ix_(rows, rows)], a.reshape(-1)[rows]
        S = H @ P @ H.T + R
        innovation = y - H @ mean
        K = np.linalg.solve(S, H @ P).T
        m = (mean + K @ innovation).reshape(T, n)
        C = (P - K @ H @ P).reshape(T, n, T, n)
        likelihood = -0.5 * (innovation @ np.linalg.solve(S, innovation) + np.linalg.slogdet(2 * np.pi * S)[1])
        return m, np.stack([C[t, :, t] for t in range(T)]), likelihood


def random_system(generator: np.random.Generator, T: int = 6, n: int = 3, n_a: int = 2) -> System:
    def positive(size: int) -> Array:
        root = generator.normal(size=(size, size))
        return root @ root.T + 0.1 * np.eye(size)

    return System(
        m=generator.normal(size=n),
        P=positive(n),
        F=np.eye(n) + 0.3 * generator.normal(size=(T, n, n)),
        b=generator.normal(size=(T, n)),
        Q=np.stack([positive(n) for _ in range(T)]),
        H=generator.normal(size=(n_a, n)),
        R=positive(n_a),
    )
