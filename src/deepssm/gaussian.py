"""Gaussians, full and diagonal: sample, log_prob, entropy and Kullback-Leibler divergence.

Components lead and batch axes trail, as in `deepssm.linalg`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, PRNGKeyArray

from deepssm import linalg

LOG_2PI = math.log(2 * math.pi)


class Gaussian(NamedTuple):
    """N(m, P) with a full covariance."""

    m: Float[Array, "n *batch"]
    P: Float[Array, "n n *batch"]

    def sample(self, key: PRNGKeyArray) -> Float[Array, "n *batch"]:
        noise = jax.random.normal(key, self.m.shape, self.m.dtype)
        return self.m + linalg.matvec(linalg.cholesky(self.P), noise)

    def log_prob(self, x: Float[Array, "n *batch"]) -> Float[Array, "*batch"]:
        L = linalg.cholesky(self.P)
        whitened = linalg.solve_lower(L, (x - self.m)[:, None])[:, 0]
        return -0.5 * (jnp.sum(whitened**2, axis=0) + linalg.log_determinant(L) + len(self.m) * LOG_2PI)

    def entropy(self) -> Float[Array, "*batch"]:
        return 0.5 * (linalg.log_determinant(linalg.cholesky(self.P)) + len(self.m) * (1 + LOG_2PI))


class Diagonal(NamedTuple):
    """N(m, diag(v))."""

    m: Float[Array, "n *batch"]
    v: Float[Array, "n *batch"]

    def sample(self, key: PRNGKeyArray) -> Float[Array, "n *batch"]:
        return self.m + jnp.sqrt(self.v) * jax.random.normal(key, self.m.shape, self.m.dtype)

    def log_prob(self, x: Float[Array, "n *batch"]) -> Float[Array, "*batch"]:
        return -0.5 * jnp.sum((x - self.m) ** 2 / self.v + jnp.log(self.v) + LOG_2PI, axis=0)

    def entropy(self) -> Float[Array, "*batch"]:
        return 0.5 * jnp.sum(jnp.log(self.v) + 1 + LOG_2PI, axis=0)

    def full(self) -> Gaussian:
        return Gaussian(self.m, linalg.diagonal(self.v))


def kl(q: Gaussian | Diagonal, p: Gaussian | Diagonal) -> Float[Array, "*batch"]:
    """KL(q || p) in nats."""
    if isinstance(q, Diagonal) and isinstance(p, Diagonal):
        ratio = q.v / p.v
        return 0.5 * jnp.sum(ratio + (q.m - p.m) ** 2 / p.v - 1 - jnp.log(ratio), axis=0)
    q, p = (g.full() if isinstance(g, Diagonal) else g for g in (q, p))
    L_q, L_p = linalg.cholesky(q.P), linalg.cholesky(p.P)
    # Tr(P_p^-1 P_q) and the Mahalanobis distance from one triangular solve.
    both = linalg.solve_lower(L_p, jnp.concatenate([L_q, (p.m - q.m)[:, None]], axis=1))
    log_ratio = linalg.log_determinant(L_p) - linalg.log_determinant(L_q)
    return 0.5 * (jnp.sum(both**2, axis=(0, 1)) - len(q.m) + log_ratio)
