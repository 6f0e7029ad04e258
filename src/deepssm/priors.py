"""Priors p(z_1) of the first state: each gives a lower bound on log p(z_1), and samples."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, PRNGKeyArray

from deepssm.gaussian import Diagonal, kl
from deepssm.networks import GaussianMLP


def standard_normal(like: Array) -> Diagonal:
    return Diagonal(jnp.zeros_like(like), jnp.ones_like(like))


class StandardNormal(eqx.Module):
    """N(0, I)."""

    n: int = eqx.field(static=True)

    def bound(self, z: Float[Array, "n *batch"], key: PRNGKeyArray) -> Float[Array, "*batch"]:
        """log p(z), exactly."""
        return standard_normal(z).log_prob(z)

    def sample(self, key: PRNGKeyArray, count: int) -> Float[Array, "n count"]:
        return jax.random.normal(key, (self.n, count))


class VHP(eqx.Module):
    """Variational hierarchical prior, Eq. (seq-vhp-vhp_bound): p(z_1) = int p(z_1 | zeta) N(zeta; 0, I) d zeta."""

    q: GaussianMLP
    """q(zeta | z_1)."""
    p: GaussianMLP
    """p(z_1 | zeta)."""
    n: int = eqx.field(static=True)

    def __init__(self, n: int, hidden: tuple[int, ...], key: PRNGKeyArray):
        # Both start near N(0, I): the prior rests in the initial phase, and a random one would bend the states.
        q_key, p_key = jax.random.split(key)
        self.q = GaussianMLP(n, hidden, n, q_key, gain=0.1)
        self.p = GaussianMLP(n, hidden, n, p_key, gain=0.1)
        self.n = n

    def bound(self, z: Float[Array, "n *batch"], key: PRNGKeyArray) -> Float[Array, "*batch"]:
        """F_VHP(z) = E_q(zeta|z)[log p(z | zeta)] - KL(q(zeta | z) || p(zeta)), with one sample of zeta."""
        q = self.q(z)
        return self.p(q.sample(key)).log_prob(z) - kl(q, standard_normal(q.m))

    def sample(self, key: PRNGKeyArray, count: int) -> Float[Array, "n count"]:
        zeta_key, z_key = jax.random.split(key)
        return self.p(jax.random.normal(zeta_key, (self.n, count))).sample(z_key)
