"""Priors p(z_1) of the first state.

Each has `infer(q, key)`, a sample of z_1 and the rate it costs, where q is what a recognition model says about it;
`mean(q)`, the belief about z_1 itself; and `sample`. Those with a density have `bound(z, key)` <= log p(z).
"""

from __future__ import annotations

import abc
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, PRNGKeyArray

from deepssm.gaussian import Diagonal, Gaussian, kl
from deepssm.networks import MLP, GaussianMLP


def standard_normal(like: Array) -> Diagonal:
    return Diagonal(jnp.zeros_like(like), jnp.ones_like(like))


class Density(eqx.Module):
    """A prior with a density: q is about z_1 itself."""

    n: eqx.AbstractVar[int]

    @abc.abstractmethod
    def bound(self, z: Float[Array, "n *batch"], key: PRNGKeyArray) -> Float[Array, "*batch"]:
        """A lower bound on log p(z)."""

    def infer(self, q: Gaussian | Diagonal, key: PRNGKeyArray) -> tuple[Array, Array]:
        """z_1 ~ q and log q - bound on log p(z_1), the expectation of log q in closed form."""
        z_key, bound_key = jax.random.split(key)
        z = q.sample(z_key)
        return z, -q.entropy() - self.bound(z, bound_key)

    def mean(self, q: Diagonal) -> Diagonal:
        return q

    @abc.abstractmethod
    def sample(self, key: PRNGKeyArray, count: int) -> Float[Array, "n count"]: ...


class StandardNormal(Density):
    """N(0, I)."""

    n: int = eqx.field(static=True)

    def bound(self, z: Float[Array, "n *batch"], key: PRNGKeyArray) -> Float[Array, "*batch"]:
        """log p(z), exactly."""
        return standard_normal(z).log_prob(z)

    def sample(self, key: PRNGKeyArray, count: int) -> Float[Array, "n count"]:
        return jax.random.normal(key, (self.n, count))


class VHP(Density):
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


class Network(eqx.Module):
    """The initial network of DVBF (App. A.4): z_1 = f(zeta) with zeta ~ N(0, I); q is about zeta."""

    bend: MLP
    n: int = eqx.field(static=True)

    def __init__(self, n: int, hidden: tuple[int, ...], key: PRNGKeyArray):
        # Starts near the identity: a random network would mix the velocities into what pictures are decoded from.
        self.bend = MLP(n, hidden, n, key, gain=0.1)
        self.n = n

    def f(self, zeta: Float[Array, "n *batch"]) -> Float[Array, "n *batch"]:
        return zeta + self.bend(zeta)

    def infer(self, q: Diagonal, key: PRNGKeyArray) -> tuple[Array, Array]:
        """f(zeta) with zeta ~ q, and KL(q(zeta) || p(zeta))."""
        return self.f(q.sample(key)), kl(q, standard_normal(q.m))

    def mean(self, q: Diagonal) -> Diagonal:
        """f at the mean of q, with the variance that f carries over to first order."""
        directions = jnp.eye(self.n).reshape(self.n, self.n, *(1,) * (q.m.ndim - 1)) * jnp.sqrt(q.v)
        carried = [jax.jvp(self.f, (q.m,), (direction,))[1] for direction in directions]
        return Diagonal(self.f(q.m), sum(slope**2 for slope in carried) + jnp.finfo(q.v.dtype).eps)

    def sample(self, key: PRNGKeyArray, count: int) -> Float[Array, "n count"]:
        return self.f(jax.random.normal(key, (self.n, count)))


Prior = Density | Network


def build(kind: str, n: int, hidden: tuple[int, ...], key: PRNGKeyArray) -> Any:
    """The prior of a name in a configuration."""
    if kind == "gaussian":
        return StandardNormal(n)
    return VHP(n, hidden, key) if kind == "vhp" else Network(n, hidden, key)
