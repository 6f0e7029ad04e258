"""What the extended Kalman VAE and the Kalman VAE share.

    p(z_1) prior,  p(z_t | z_t-1, u_t-1) linear given what it depends on,  p(a_t | z_t) = N(H z_t, R),  p(x_t | a_t)
    q(a_t | x_t) encoder,  q(z_t | a_1:T, u_1:T-1) Kalman smoother

Inside, components lead, then time, then the batch: a is (n_a, T, N).
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Num, PRNGKeyArray

from deepssm import kalman, priors
from deepssm.gaussian import Diagonal, Gaussian
from deepssm.linalg import diagonal, matmul, matvec, transpose
from deepssm.models.base import Controls, Model, Observations, Posterior, Seen, Terms, components_first, posterior
from deepssm.networks import Decoder, Encoder
from deepssm.priors import Density


@dataclass(frozen=True)
class KalmanConfig:
    """Sizes and choices; the defaults are the paper's for the pendulum."""

    states: int = 3
    """Dimensions of z."""
    auxiliary: int = 2
    """Dimensions of a."""
    channels: tuple[int, ...] = ()
    """Channels of the convolutions of q(a | x), which those of p(x | a) mirror; none: dense layers only."""
    encoder: tuple[int, ...] = (128, 128, 128)
    """Hidden layers of q(a | x)."""
    decoder: tuple[int, ...] = (128, 128, 128)
    """Hidden layers of p(x | a)."""
    bases: int = 16
    """Number M of base matrices."""
    alpha: tuple[int, ...] = (64,)
    """Hidden layers of the network that weighs the base matrices."""
    prior: Literal["vhp", "gaussian"] = "vhp"
    """Prior of z_1: variational hierarchical prior or standard normal."""
    prior_hidden: tuple[int, ...] = (64, 64)
    """Hidden layers of the two networks of the VHP."""
    posterior: Literal["smoother", "filter"] = "smoother"
    """Recognition model: smoothed or filtered states."""
    emission: Literal["disentangled", "learned"] = "disentangled"
    """H = [I 0], so that the first dimensions of z are a, or a learned matrix."""
    sigma: float = 0.01
    """Standard deviation of the decoder's Gaussian."""
    log_noise: float = -3.0
    """Logarithm of the variances Q and R at the start of training."""


class Belief(NamedTuple):
    """State of the online filter."""

    z: Gaussian
    memory: Array
    started: Array


class KalmanVAE(Model):
    encoder: Encoder
    decoder: Decoder
    transition: Any
    prior: Density
    H_learned: Array | None
    log_R: Float[Array, " n_a"]
    start_m: Float[Array, " n"]
    start_log_P: Float[Array, " n"]
    config: Any = eqx.field(static=True)

    observation_parts = ("encoder", "decoder")

    def __init__(self, config: KalmanConfig, shape: tuple[int, ...], transition: Any, key: PRNGKeyArray):
        keys = jax.random.split(key, 4)
        n, n_a = config.states, config.auxiliary
        self.encoder = Encoder(shape, config.encoder, n_a, keys[0], config.channels, config.sigma**2)
        self.decoder = Decoder(n_a, config.decoder, shape, config.sigma, keys[1], config.channels)
        self.transition = transition
        self.prior = priors.build(config.prior, n, config.prior_hidden, keys[2])
        learned = config.emission == "learned"
        self.H_learned = jnp.eye(n_a, n) + 0.05 * jax.random.normal(keys[3], (n_a, n)) if learned else None
        self.log_R = jnp.full(n_a, float(config.log_noise))
        self.start_m = jnp.zeros(n)
        self.start_log_P = jnp.zeros(n)
        self.config = config

    @property
    def H(self) -> Float[Array, "n_a n"]:
        return jnp.eye(self.config.auxiliary, self.config.states) if self.H_learned is None else self.H_learned

    @property
    def R(self) -> Float[Array, "n_a n_a"]:
        return diagonal(jnp.exp(self.log_R))

    @property
    def z_start(self) -> Gaussian:
        """The filter's Gaussian before the first frame: learned, since the VHP's marginal is not Gaussian."""
        return Gaussian(self.start_m, diagonal(jnp.exp(self.start_log_P)))

    def emission(self, z: Gaussian) -> Gaussian:
        """p(a) = int N(a; H z, R) p(z) dz, Eq. (seq-vhp-feature_emission)."""
        R = self.R.reshape(self.R.shape + (1,) * (z.m.ndim - 1))
        return Gaussian(matvec(self.H, z.m), matmul(matmul(self.H, z.P), transpose(self.H)) + R)

    def encode(self, x: Observations) -> Diagonal:
        """q(a_t | x_t), (n_a, T, N)."""
        N, T = x.shape[:2]
        q = self.encoder(x.reshape(N * T, *x.shape[2:]))
        return Diagonal(*(jnp.swapaxes(part.reshape(-1, N, T), 1, 2) for part in q))

    # What the transition sees beside z: the controls, and here no memory.

    def memories(self, a: Array, seen: Array) -> Array:
        """The memory at each t, (k, T, N)."""
        return jnp.zeros((0, *seen.shape))

    def remember(self, memory: Array, a: Array, seen: Array) -> Array:
        """The memory after one more a."""
        return memory

    def inputs(self, u: Array, memory: Array) -> Array:
        return u

    # Distortion and rate.

    def forward(self, a: Array, inputs: Array, seen: Array, reference: Array | None = None) -> kalman.Forward:
        return kalman.filter(self.z_start, a, inputs, seen, self.transition, self.H, self.R, reference)

    def terms(self, x: Observations, u: Controls, seen: Seen, key: PRNGKeyArray) -> Terms:
        """Distortion, Eq. (seq-vhp-ekvae_dist), and rate."""
        a_key, rate_key = jax.random.split(key)
        u, seen = components_first(u), seen.T
        q_a = self.encode(x)
        a = q_a.sample(a_key)
        frames = jnp.swapaxes(a, 1, 2).reshape(len(a), -1)
        log_x = self.decoder.log_prob(x.reshape(-1, *x.shape[2:]), frames).reshape(seen.T.shape)
        return Terms.of(-jnp.where(seen.T, log_x, 0.0).sum(1), self.rates(q_a, a, u, seen, rate_key))

    def rates(self, q_a: Diagonal, a: Array, u: Array, seen: Array, key: PRNGKeyArray) -> dict[str, Array]:
        """The summands of the rate, of features a ~ q_a."""
        inputs = self.inputs(u, self.memories(a, seen))
        return self.rate(q_a, a, inputs, seen, self.forward(a, inputs, seen), key)

    @abc.abstractmethod
    def rate(
        self, q_a: Diagonal, a: Array, inputs: Array, seen: Array, forward: kalman.Forward, key: PRNGKeyArray
    ) -> dict[str, Array]:
        """The summands of the rate by name."""

    # What every model can do.

    def filter(self, x: Observations, u: Controls, seen: Seen) -> Posterior:
        a, memory, inputs = self._prepare(x, u, seen)
        return posterior(self.forward(a, inputs, seen.T).filtered, memory)

    def smooth(self, x: Observations, u: Controls, seen: Seen, iterations: int | None = None) -> Posterior:
        """Beliefs about z_t given x_1:T, re-linearised `iterations` times (the configured number unless given)."""
        iterations = getattr(self.config, "iterations", 0) if iterations is None else iterations
        a, memory, inputs = self._prepare(x, u, seen)
        z = kalman.smooth(self.forward(a, inputs, seen.T))
        for _ in range(iterations):
            z = kalman.smooth(self.forward(a, inputs, seen.T, z.m))
        return posterior(z, memory)

    def _prepare(self, x: Observations, u: Controls, seen: Seen) -> tuple[Array, Array, Array]:
        a = self.encode(x).m
        memory = self.memories(a, seen.T)
        return a, memory, self.inputs(components_first(u), memory)

    def move(self, z: Array, u: Array, memory: Array, key: PRNGKeyArray | None) -> tuple[Array, Array]:
        z_next = self.transition.next(z, self.inputs(u, memory))
        z = z_next.m if key is None else z_next.sample(key)
        return z, self.remember(memory, matvec(self.H, z), jnp.ones(z.shape[1:], bool))

    def decode(self, z: Float[Array, "*batch n"]) -> Float[Array, "*batch ..."]:
        flat = z.reshape(-1, z.shape[-1]).T
        return self.decoder(matvec(self.H, flat)).reshape(*z.shape[:-1], *self.decoder.shape)

    def sample_initial(self, key: PRNGKeyArray, count: int) -> Float[Array, "count n"]:
        return self.prior.sample(key, count).T

    def start(self) -> Belief:
        return Belief(self.z_start, jnp.zeros(self.memory_size), jnp.asarray(False))

    def step(
        self, state: Belief, x: Num[Array, "*shape"], u_before: Float[Array, " n_u"], seen: bool | Array = True
    ) -> Belief:
        moved = kalman.predict(state.z, *self.transition(state.z.m, self.inputs(u_before, state.memory)))
        predicted = jax.tree.map(lambda new, old: jnp.where(state.started, new, old), moved, state.z)
        a, seen = self.encoder(x[None]).m[:, 0], jnp.asarray(seen)
        z = kalman.update(predicted, a, self.H, self.R, seen)
        return Belief(z, self.remember(state.memory, a, seen), jnp.asarray(True))
