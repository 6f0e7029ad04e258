"""What DKS, DVBS and RSSM share: a posterior that is drawn step by step, q(z_t | z_t-1, what was read around t).

    p(z_1) prior,  p(z_t | z_t-1, u_t-1) transition,  p(x_t | z_t) decoder
    q(z_1:T | x_1:T, u_1:T) = q(z_1 | read_1) prod_t q(z_t | z_t-1, u_t-1, read_t)

Where no frame is seen from t on, q(z_t | .) is the transition itself and costs nothing. A model says what `first`,
`predict` and `correct` are. Inside, components lead, then time, then the batch.
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

from deepssm import priors
from deepssm.gaussian import Diagonal, Gaussian, kl
from deepssm.models.base import Controls, Model, Observations, Posterior, Seen, Terms, components_first, posterior
from deepssm.networks import Decoder, Reader, Reading, sensors, still_seen
from deepssm.priors import Prior


@dataclass(frozen=True)
class StepwiseConfig:
    """Sizes and choices; the defaults are the paper's for the pendulum."""

    states: int = 3
    """Dimensions of z."""
    positions: int = 2
    """Dimensions of z that pictures are decoded from at the start of training; the others may become velocities."""
    reader: int = 128
    """Size of the LSTM (in a filter: of the dense layer) that reads the frames."""
    recognition: tuple[int, ...] = (64,)
    """Hidden layers between it and q(z_t | .)."""
    decoder: tuple[int, ...] = (128, 128, 128)
    """Hidden layers of p(x | z)."""
    prior: Literal["vhp", "gaussian", "network"] = "vhp"
    """Prior of z_1: variational hierarchical prior, standard normal, or the initial network of DVBF."""
    prior_hidden: tuple[int, ...] = (64, 64)
    """Hidden layers of the prior's networks."""
    posterior: Literal["smoother", "filter"] = "smoother"
    """Recognition model: reads the frames after t too, or not."""
    sigma: float = 0.01
    """Standard deviation of the decoder's Gaussian."""
    log_noise: float = -3.0
    """Logarithm of the transition's variances at the start of training."""


class Belief(NamedTuple):
    """State of the online filter."""

    z: Gaussian
    memory: Array
    read: Array
    started: Array


class Path(NamedTuple):
    """A walk through q, components first: states, memory, and what q and p said; the latter from t = 2 on."""

    z: Array
    memory: Array
    q: Diagonal
    p: Diagonal


class Stepwise(Model):
    reader: Reader
    decoder: Decoder
    prior: Prior
    config: Any = eqx.field(static=True)

    def __init__(
        self, config: StepwiseConfig, reading: Reading, shape: tuple[int, ...], controls: int, key: PRNGKeyArray
    ):
        keys = jax.random.split(key, 3)
        self.reader = Reader(reading, shape, controls, config.reader, keys[0], sensors(shape, config.states))
        decoder = Decoder(config.states, config.decoder, shape, config.sigma, keys[1])
        # Pictures are explained by positions at first: else the circle of an angle may lie across the velocities.
        blind = decoder.network.layers[0].W.at[config.positions :].set(0.0)
        self.decoder = eqx.tree_at(lambda decoder: decoder.network.layers[0].W, decoder, blind)
        self.prior = priors.build(config.prior, config.states, config.prior_hidden, keys[2])
        self.config = config

    def digest(self, features: Array) -> Array:
        """What `first` and `correct` are given of what was read; here is room for what needs no z, all t at once."""
        return features

    @abc.abstractmethod
    def first(self, features: Array) -> Diagonal:
        """q(z_1 | .), or q(zeta | .) where the prior has an initial network."""

    @abc.abstractmethod
    def predict(self, z: Array, u: Array, memory: Array) -> tuple[Diagonal, Array]:
        """p(z_t | z_t-1 = z, u_t-1 = u) and the memory that goes with z_t."""

    @abc.abstractmethod
    def correct(self, z: Array, u: Array, memory: Array, p: Diagonal, features: Array) -> Diagonal:
        """q(z_t | z_t-1 = z, u_t-1 = u, what was read)."""

    def walk(self, features: Array, informed: Array, u: Array, z: Array, noise: Array, go_on: Array) -> Path:
        """From z_1 through q, each step its mean plus `noise` standard deviations; waits where it shall not go on."""

        def step(carry: tuple[Array, Array], inputs: tuple[Array, ...]) -> tuple[tuple[Array, Array], Path]:
            features, informed, u, noise, go_on = inputs
            p, memory = self.predict(carry[0], u, carry[1])
            q = self.correct(carry[0], u, memory, p, features)
            q = jax.tree.map(lambda corrected, predicted: jnp.where(informed, corrected, predicted), q, p)
            z = jnp.where(go_on, q.m + jnp.sqrt(q.v) * noise, carry[0])
            return (z, jnp.where(go_on, memory, carry[1])), Path(z, memory, q, p)

        memory = jnp.zeros((self.memory_size, *z.shape[1:]))
        inputs = (features[:, 1:], informed[1:], u[:, :-1], noise, go_on[1:])
        time_first = (array if array.ndim < 3 else jnp.moveaxis(array, 1, 0) for array in inputs)
        _, path = jax.lax.scan(step, (z, memory), tuple(time_first))
        path = jax.tree.map(lambda array: jnp.moveaxis(array, 0, 1), path)
        return path._replace(
            z=jnp.concatenate([z[:, None], path.z], axis=1),
            memory=jnp.concatenate([memory[:, None], path.memory], axis=1),
        )

    def terms(self, x: Observations, u: Controls, seen: Seen, key: PRNGKeyArray) -> Terms:
        """Distortion and rate, Eq. (seq-vhp-dks_org_dist) and (seq-vhp-dks_org_rate), for any of the priors."""
        z_key, prior_key = jax.random.split(key)
        u, seen = components_first(u), seen.T
        features, informed = self.reader(x, u, seen)
        features = self.digest(features)
        z, initial = self.prior.infer(self.first(features[:, 0]), prior_key)
        noise = jax.random.normal(z_key, (len(z), len(seen) - 1, seen.shape[1]))
        # Behind the last seen frame nothing counts; to go on there, far from all data, would overflow sooner or later.
        counts = still_seen(seen)
        path = self.walk(features, informed, u, z, noise, counts)
        frames = jnp.swapaxes(path.z, 1, 2).reshape(len(z), -1)
        log_x = self.decoder.log_prob(x.reshape(-1, *x.shape[2:]), frames).reshape(seen.T.shape)
        parts = {"prior": initial, "transition": jnp.where(counts[1:], kl(path.q, path.p), 0.0).sum(0)}
        return Terms.of(-jnp.where(seen.T, log_x, 0.0).sum(1), parts)

    # What every model can do.

    def filter(self, x: Observations, u: Controls, seen: Seen) -> Posterior:
        """Along the means, reading nothing after t."""
        return self._posterior(x, u, seen, ahead=False)

    def smooth(self, x: Observations, u: Controls, seen: Seen, iterations: int | None = None) -> Posterior:
        """Along the means."""
        return self._posterior(x, u, seen, ahead=True)

    def _posterior(self, x: Observations, u: Controls, seen: Seen, ahead: bool) -> Posterior:
        u = components_first(u)
        features, informed = self.reader(x, u, seen.T, ahead)
        features = self.digest(features)
        first = self.prior.mean(self.first(features[:, 0]))
        noise = jnp.zeros((len(first.m), u.shape[1] - 1, u.shape[2]))
        path = self.walk(features, informed, u, first.m, noise, jnp.ones_like(informed))
        v = jnp.concatenate([first.v[:, None], path.q.v], axis=1)
        return posterior(Diagonal(path.z, v).full(), path.memory)

    def move(self, z: Array, u: Array, memory: Array, key: PRNGKeyArray | None) -> tuple[Array, Array]:
        p, memory = self.predict(z, u, memory)
        return p.m if key is None else p.sample(key), memory

    def decode(self, z: Float[Array, "*batch n"]) -> Float[Array, "*batch ..."]:
        return self.decoder(z.reshape(-1, z.shape[-1]).T).reshape(*z.shape[:-1], *self.decoder.shape)

    def sample_initial(self, key: PRNGKeyArray, count: int) -> Float[Array, "count n"]:
        return self.prior.sample(key, count).T

    def start(self) -> Belief:
        n = self.config.states
        return Belief(
            Gaussian(jnp.zeros(n), jnp.eye(n)), jnp.zeros(self.memory_size), self.reader.empty(), jnp.asarray(False)
        )

    def step(
        self, state: Belief, x: Num[Array, "*shape"], u_before: Float[Array, " n_u"], seen: bool | Array = True
    ) -> Belief:
        u, seen = jnp.where(state.started, u_before, 0.0), jnp.asarray(seen)
        features, read = self.reader.step(state.read, x, u, seen)
        features = self.digest(features)
        p, memory = self.predict(state.z.m, u, state.memory)
        q = self.correct(state.z.m, u, memory, p, features)
        q = jax.tree.map(lambda corrected, predicted: jnp.where(seen, corrected, predicted), q, p)
        first = self.prior.mean(self.first(features))
        later, now = Belief(q.full(), memory, read, state.started), Belief(first.full(), state.memory, read, seen)
        belief = jax.tree.map(lambda later, now: jnp.where(state.started, later, now), later, now)
        return belief._replace(started=jnp.asarray(True))
