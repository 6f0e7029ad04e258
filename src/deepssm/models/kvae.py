"""Kalman VAE (Fraccaro et al. 2017): an LSTM over a_1:t weighs the base matrices, given which the system is linear.

The paper's point about it: the LSTM may keep the velocity to itself, and z_t is then no state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import PRNGKeyArray

from deepssm import kalman
from deepssm.gaussian import Diagonal, Gaussian
from deepssm.models.kalman_vae import KalmanConfig, KalmanVAE
from deepssm.transitions import Recurrent


@dataclass(frozen=True)
class KVAEConfig(KalmanConfig):
    """Sizes and choices of a Kalman VAE; the defaults are the paper's for the pendulum."""

    emission: Literal["disentangled", "learned"] = "learned"
    memory: int = 64
    """Size of the LSTM."""

    def build(self, shape: tuple[int, ...], controls: int, key: PRNGKeyArray) -> KVAE:
        return KVAE(self, shape, controls, key)


class KVAE(KalmanVAE):
    def __init__(self, config: KVAEConfig, shape: tuple[int, ...], controls: int, key: PRNGKeyArray):
        key, transition_key = jax.random.split(key)
        sizes = (config.states, controls, config.auxiliary, config.bases, config.memory, config.alpha)
        super().__init__(config, shape, Recurrent(*sizes, config.log_noise, transition_key), key)

    @property
    def memory_size(self) -> int:
        return 2 * self.config.memory

    def memories(self, a: Array, seen: Array) -> Array:
        flag = seen[None].astype(a.dtype)
        return self.transition.lstm.read(jnp.concatenate([a * flag, flag]))

    def remember(self, memory: Array, a: Array, seen: Array) -> Array:
        flag = seen[None].astype(a.dtype)
        return self.transition.lstm.step(memory, jnp.concatenate([a * flag, flag]))

    def inputs(self, u: Array, memory: Array) -> Array:
        return self.transition.inputs(u, memory)

    def rate(
        self, q_a: Diagonal, a: Array, inputs: Array, seen: Array, forward: kalman.Forward, key: PRNGKeyArray
    ) -> dict[str, Array]:
        """E[log q(a | x) - log p(a | z) - log p(z) + log p(z | a)] with z integrated out.

        The smoother is exact for a start N(m, P), so p(a | z) p(z) / p(z | a) is the filter's likelihood of a, times
        p(z_1) / N(z_1; m, P) for the prior. Filter version: z_1 given a_1 alone.
        """
        z_key, prior_key = jax.random.split(key)
        q_z = kalman.smooth(forward) if self.config.posterior == "smoother" else forward.filtered
        z = Gaussian(q_z.m[:, 0], q_z.P[:, :, 0]).sample(z_key)
        start = Gaussian(self.start_m[:, None], self.z_start.P[..., None])
        likelihood = kalman.log_likelihood(forward, a, seen, self.H, self.R)
        return {
            "emission": -jnp.where(seen, q_a.entropy(), 0.0).sum(0) - likelihood,
            "prior": start.log_prob(z) - self.prior.bound(z, prior_key),
        }
