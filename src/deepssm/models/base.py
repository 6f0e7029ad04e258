"""What every deep state-space model can do."""

from __future__ import annotations

import abc
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Num, PRNGKeyArray

from deepssm.gaussian import Gaussian

Observations = Num[Array, "N T *shape"]
Controls = Float[Array, "N T n_u"]
Seen = Bool[Array, "N T"]
States = Float[Array, "N T n"]


class Terms(NamedTuple):
    """The two sides of the evidence lower bound, in nats per sequence: ELBO = -(distortion + rate)."""

    distortion: Float[Array, " N"]
    rate: Float[Array, " N"]
    parts: dict[str, Float[Array, " N"]]
    """The summands of the rate by name."""

    @classmethod
    def of(cls, distortion: Float[Array, " N"], parts: dict[str, Float[Array, " N"]]) -> Terms:
        """Distortion, and the rate as the sum of its parts."""
        return cls(distortion, jnp.sum(jnp.stack(list(parts.values())), axis=0), parts)


class Posterior(NamedTuple):
    """Gaussian beliefs about the states of N sequences."""

    mean: Float[Array, "N T n"]
    covariance: Float[Array, "N T n n"]
    memory: Float[Array, "N T k"]
    """What a recurrent network knows beside z_t when the transition is asked for z_t+1; k = 0 in a Markov model."""


def components_first(array: Float[Array, "N T n"]) -> Float[Array, "n T N"]:
    return jnp.transpose(array, (2, 1, 0))


def posterior(z: Gaussian, memory: Float[Array, "k T N"] | None = None) -> Posterior:
    """Beliefs with components first, as users see them."""
    memory = jnp.zeros((0, *z.m.shape[1:])) if memory is None else memory
    return Posterior(components_first(z.m), jnp.transpose(z.P, (3, 2, 0, 1)), components_first(memory))


class Trainable(eqx.Module):
    """What `deepssm.program` asks of what it trains."""

    observation_parts: ClassVar[tuple[str, ...]]
    """Fields with the parameters theta and phi; all others (psi, psi_0, phi_0) rest in the initial phase of Alg. 1."""

    @abc.abstractmethod
    def terms(self, x: Observations, u: Controls, seen: Seen, key: PRNGKeyArray) -> Terms:
        """Distortion and rate of each sequence, with one sample from the recognition model."""


class Model(Trainable):
    """A deep state-space model: p(x_1:T, z_1:T | u_1:T-1) of Eq. (seq-vhp-gen_model) with its recognition model.

    Arrays come sequence first, then time: x (N, T, *shape), floats or bytes that stand for 0..1; u (N, T, n_u);
    seen (N, T) with True for a seen frame.
    u_t acts between x_t and x_t+1.
    """

    @abc.abstractmethod
    def filter(self, x: Observations, u: Controls, seen: Seen) -> Posterior:
        """Beliefs about z_t given x_1:t."""

    @abc.abstractmethod
    def smooth(self, x: Observations, u: Controls, seen: Seen, iterations: int | None = None) -> Posterior:
        """Beliefs about z_t given x_1:T; `iterations` is for models that can linearise more than once."""

    @abc.abstractmethod
    def move(self, z: Array, u: Array, memory: Array, key: PRNGKeyArray | None) -> tuple[Array, Array]:
        """The next state and memory, (n, N) and (k, N): the mean of the transition, or a sample of it."""

    def rollout(
        self,
        z: Float[Array, "N n"],
        u: Controls,
        key: PRNGKeyArray | None = None,
        memory: Float[Array, "N k"] | None = None,
    ) -> States:
        """The states that follow z under the controls u: along the mean of the transition, or a sample of it.

        `memory` is that of the belief z comes from; without it a recurrent network starts empty.
        """
        keys = None if key is None else jax.random.split(key, u.shape[1])
        started = jnp.zeros((self.memory_size, len(z))) if memory is None else memory.T

        def step(carry: tuple[Array, Array], inputs: tuple) -> tuple[tuple[Array, Array], Array]:
            u, key = inputs
            carry = self.move(carry[0], u, carry[1], key)
            return carry, carry[0]

        _, states = jax.lax.scan(step, (z.T, started), (jnp.transpose(u, (1, 2, 0)), keys))
        return jnp.transpose(states, (2, 0, 1))

    @property
    def memory_size(self) -> int:
        """Numbers that a recurrent network keeps beside z."""
        return 0

    @abc.abstractmethod
    def decode(self, z: Float[Array, "*batch n"]) -> Float[Array, "*batch ..."]:
        """Mean observations of states."""

    @abc.abstractmethod
    def sample_initial(self, key: PRNGKeyArray, count: int) -> Float[Array, "count n"]:
        """Samples of z_1 from the prior."""

    @abc.abstractmethod
    def start(self) -> Any:
        """The belief of the online filter before the first observation."""

    @abc.abstractmethod
    def step(
        self, state: Any, x: Num[Array, "*shape"], u_before: Float[Array, " n_u"], seen: bool | Array = True
    ) -> Any:
        """The belief after one more observation; `u_before` acted since the last one and is unused at the first."""
