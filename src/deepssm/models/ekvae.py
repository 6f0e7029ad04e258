"""Extended Kalman VAE (Sec. 4 of the paper), as smoother or as filter.

    p(z_1) prior,  p(z_t | z_t-1, u_t-1) locally linear,  p(a_t | z_t) = N(H z_t, R),  p(x_t | a_t) decoder
    q(a_t | x_t) encoder,  q(z_t | a_1:T, u_1:T-1) extended Kalman smoother

Inside, components lead, then time, then the batch: a is (n_a, T, N).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, PRNGKeyArray

from deepssm import kalman
from deepssm.gaussian import Diagonal, Gaussian, kl
from deepssm.linalg import diagonal, matmul, matvec, transpose
from deepssm.models.base import Controls, Model, Observations, Posterior, Seen, States, Terms
from deepssm.networks import Decoder, Encoder
from deepssm.priors import VHP, StandardNormal
from deepssm.transitions import LocallyLinear


@dataclass(frozen=True)
class EKVAEConfig:
    """Sizes and choices of an extended Kalman VAE; the defaults are the paper's for the pendulum."""

    states: int = 3
    """Dimensions of z."""
    auxiliary: int = 2
    """Dimensions of a."""
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
    iterations: int = 2
    """Re-linearisations around the smoothed means in `smooth`, never in the loss; 0 is the paper."""
    sigma: float = 0.01
    """Standard deviation of the decoder's Gaussian."""
    coupling: float = 0.2
    """How strongly the unobserved dimensions of z drive the observed ones at the start of training."""
    log_noise: float = -3.0
    """Logarithm of the variances Q and R at the start of training."""

    def build(self, shape: tuple[int, ...], controls: int, key: PRNGKeyArray) -> EKVAE:
        return EKVAE(self, shape, controls, key)


class Belief(NamedTuple):
    """State of the online filter."""

    z: Gaussian
    started: Array


class EKVAE(Model):
    encoder: Encoder
    decoder: Decoder
    transition: LocallyLinear
    prior: VHP | StandardNormal
    H_learned: Array | None
    log_R: Float[Array, " n_a"]
    start_m: Float[Array, " n"]
    start_log_P: Float[Array, " n"]
    config: EKVAEConfig = eqx.field(static=True)

    observation_parts = ("encoder", "decoder")

    def __init__(self, config: EKVAEConfig, shape: tuple[int, ...], controls: int, key: PRNGKeyArray):
        keys = jax.random.split(key, 5)
        n, n_a = config.states, config.auxiliary
        self.encoder = Encoder(shape, config.encoder, n_a, keys[0])
        self.decoder = Decoder(n_a, config.decoder, shape, config.sigma, keys[1])
        self.transition = LocallyLinear(
            n, controls, config.bases, config.alpha, n_a, config.coupling, config.log_noise, keys[2]
        )
        self.prior = VHP(n, config.prior_hidden, keys[3]) if config.prior == "vhp" else StandardNormal(n)
        learned = config.emission == "learned"
        self.H_learned = jnp.eye(n_a, n) + 0.05 * jax.random.normal(keys[4], (n_a, n)) if learned else None
        self.log_R = jnp.full(n_a, config.log_noise)
        self.start_m = jnp.zeros(n)
        self.start_log_P = jnp.zeros(n)
        self.config = config

    # The equations of Sec. 4.

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

    def infer(self, a: Array, u: Array, seen: Array, iterations: int = 0) -> tuple[Gaussian, Gaussian]:
        """Filtered p(z_t | a_1:t, u_1:t-1) and smoothed p(z_t | a_1:T, u_1:T-1), Eq. (seq-vhp-recognition)."""
        arguments = (self.z_start, a, u, seen, self.transition, self.H, self.R)
        forward = kalman.filter(*arguments)
        filtered, smoothed = forward.filtered, kalman.smooth(forward)
        for _ in range(iterations):
            smoothed = kalman.smooth(kalman.filter(*arguments, reference=smoothed.m))
        return filtered, smoothed

    def terms(self, x: Observations, u: Controls, seen: Seen, key: PRNGKeyArray) -> Terms:
        """Distortion, Eq. (seq-vhp-ekvae_dist), and rate, Eq. (seq-vhp-ekvae_rate) and (seq-vhp-ekvae_rate_init).

        Filter version: Eq. (app:seq-vhp-ekvae_elbo_filter), the same with filtered in place of smoothed states.
        """
        a_key, z_key, prior_key = jax.random.split(key, 3)
        u, seen = _components_first(u), seen.T
        q_a = self.encode(x)
        a = q_a.sample(a_key)
        filtered, smoothed = self.infer(a, u, seen)
        q_z = smoothed if self.config.posterior == "smoother" else filtered
        z = q_z.sample(z_key)

        frames = jnp.swapaxes(a, 1, 2).reshape(len(a), -1)
        log_x = self.decoder.log_prob(x.reshape(-1, *x.shape[2:]), frames).reshape(seen.T.shape)

        z_first = Gaussian(z[:, 0], jnp.zeros_like(q_z.P[:, :, 0]))
        before = jax.tree.map(lambda array: array[..., :-1, :], (q_z, filtered, z, u))
        z_next = self.transition.next(before[2], before[3])
        log_q_a = -q_a.entropy()
        parts = {
            "emission": _where(seen[0], log_q_a[0] - self.emission(z_first).log_prob(a[:, 0])),
            "prior": -jax.tree.map(lambda array: array[..., 0, :], q_z).entropy()
            - self.prior.bound(z[:, 0], prior_key),
            "transition": _where(seen[1:], log_q_a[1:] - self.emission(z_next).log_prob(a[:, 1:])).sum(0),
        }
        if self.config.posterior == "smoother":
            parts["smoothing"] = _where(seen[1:], kl(before[0], before[1])).sum(0)
        return Terms(-_where(seen.T, log_x).sum(1), sum(parts.values()), parts)

    # What every model can do.

    def filter(self, x: Observations, u: Controls, seen: Seen) -> Posterior:
        arguments = (self.z_start, self.encode(x).m, _components_first(u), seen.T, self.transition, self.H, self.R)
        return _posterior(kalman.filter(*arguments).filtered)

    def smooth(self, x: Observations, u: Controls, seen: Seen, iterations: int | None = None) -> Posterior:
        """Beliefs about z_t given x_1:T, re-linearised `iterations` times (the configured number unless given)."""
        iterations = self.config.iterations if iterations is None else iterations
        return _posterior(self.infer(self.encode(x).m, _components_first(u), seen.T, iterations)[1])

    def rollout(self, z: Float[Array, "N n"], u: Controls, key: PRNGKeyArray | None = None) -> States:
        keys = None if key is None else jax.random.split(key, u.shape[1])

        def step(z: Array, inputs: tuple) -> tuple[Array, Array]:
            u, key = inputs
            z_next = self.transition.next(z, u)
            z = z_next.m if key is None else z_next.sample(key)
            return z, z

        _, states = jax.lax.scan(step, z.T, (jnp.transpose(u, (1, 2, 0)), keys))
        return jnp.transpose(states, (2, 0, 1))

    def decode(self, z: Float[Array, "*batch n"]) -> Float[Array, "*batch ..."]:
        flat = z.reshape(-1, z.shape[-1]).T
        return self.decoder(matvec(self.H, flat)).reshape(*z.shape[:-1], *self.decoder.shape)

    def sample_initial(self, key: PRNGKeyArray, count: int) -> Float[Array, "count n"]:
        return self.prior.sample(key, count).T

    def start(self) -> Belief:
        return Belief(self.z_start, jnp.asarray(False))

    def step(
        self, state: Belief, x: Float[Array, "*shape"], u_before: Float[Array, " n_u"], seen: bool | Array = True
    ) -> Belief:
        moved = kalman.predict(state.z, *self.transition(state.z.m, u_before))
        predicted = jax.tree.map(lambda new, old: jnp.where(state.started, new, old), moved, state.z)
        a = self.encoder(x[None]).m[:, 0]
        return Belief(kalman.update(predicted, a, self.H, self.R, seen), jnp.asarray(True))


def _components_first(array: Float[Array, "N T n"]) -> Float[Array, "n T N"]:
    return jnp.transpose(array, (2, 1, 0))


def _posterior(z: Gaussian) -> Posterior:
    return Posterior(jnp.transpose(z.m, (2, 1, 0)), jnp.transpose(z.P, (3, 2, 0, 1)))


def _where(seen: Array, term: Array) -> Array:
    return jnp.where(seen, term, 0.0)
