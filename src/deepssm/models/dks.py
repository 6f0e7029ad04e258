"""Deep Kalman filter and smoother (Krishnan et al. 2015), App. A.3 of the paper."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import PRNGKeyArray

from deepssm.gaussian import Diagonal
from deepssm.models.stepwise import Stepwise, StepwiseConfig
from deepssm.networks import MLP, Dense, Reading, Recogniser
from deepssm.transitions import Residual


@dataclass(frozen=True)
class DKSConfig(StepwiseConfig):
    """Sizes and choices of a deep Kalman smoother or filter; the defaults are the paper's for the pendulum."""

    transition: tuple[int, ...] = (128, 128, 128)
    """Hidden layers of p(z_t | z_t-1, u_t-1)."""
    coupling: float = 0.2
    """How strongly velocities drive positions at the start of training."""
    integrating: bool = False
    """Positions are moved by velocities alone (`deepssm.transitions.Integrating`), not by anything in z."""

    def build(self, shape: tuple[int, ...], controls: int, key: PRNGKeyArray) -> DKS:
        return DKS(self, shape, controls, key)


class DKS(Stepwise):
    transition: Residual
    combiner: Dense
    """From z_t-1 and u_t-1 to where they meet what was read."""
    recognition: Recogniser

    observation_parts = ("reader", "combiner", "recognition", "decoder")

    def __init__(self, config: DKSConfig, shape: tuple[int, ...], controls: int, key: PRNGKeyArray):
        key, transition_key, combiner_key, recognition_key = jax.random.split(key, 4)
        reading: Reading = "both" if config.posterior == "smoother" else "forward"
        super().__init__(config, reading, shape, controls, key)
        n, k = config.states, config.reader
        sizes = (n, controls, config.transition, config.positions)
        self.transition = Residual(*sizes, config.coupling, config.log_noise, transition_key, config.integrating)
        (self.combiner,) = MLP(n + controls, (), k, combiner_key).layers
        self.recognition = Recogniser(k, config.recognition, n, shape, recognition_key, config.sigma**2)

    def first(self, features: Array) -> Diagonal:
        return self._recognise(jnp.zeros(()), features)

    def predict(self, z: Array, u: Array, memory: Array) -> tuple[Diagonal, Array]:
        return self.transition.next(z, u), memory

    def correct(self, z: Array, u: Array, memory: Array, p: Diagonal, features: Array) -> Diagonal:
        return self._recognise(jnp.tanh(self.combiner(jnp.concatenate([z, u]))), features)

    def _recognise(self, before: Array, features: Array) -> Diagonal:
        """The mean of what z_t-1 says and what was read on either side, then q(z_t | z_t-1, x_1:T, u_1:T)."""
        read, x = jnp.split(features, [self.config.reader])
        sources = 3 if self.config.posterior == "smoother" else 2
        return self.recognition(jnp.concatenate([(before + read) / sources, x]))
