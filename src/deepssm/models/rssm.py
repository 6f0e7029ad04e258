"""Recurrent state-space model (Hafner et al. 2019) as in the paper's table: the decoder sees z alone.

An LSTM over z_1:t-1 and u_1:t-1 carries the transition. The paper's point about it: the LSTM may keep the velocity to
itself, and z_t is then no state.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import PRNGKeyArray

from deepssm.gaussian import Diagonal
from deepssm.models.stepwise import Stepwise, StepwiseConfig
from deepssm.networks import LSTM, GaussianMLP, Reading, Recogniser


@dataclass(frozen=True)
class RSSMConfig(StepwiseConfig):
    """Sizes and choices of a recurrent state-space model; the defaults are the paper's for the pendulum."""

    positions: int = 3
    memory: int = 64
    """Size of the LSTM that carries the transition."""
    transition: tuple[int, ...] = (128, 128, 128)
    """Hidden layers of p(z_t | h_t-1)."""

    def build(self, shape: tuple[int, ...], controls: int, key: PRNGKeyArray) -> RSSM:
        return RSSM(self, shape, controls, key)


class RSSM(Stepwise):
    lstm: LSTM
    transition: GaussianMLP
    recognition: Recogniser

    observation_parts = ("reader", "recognition", "decoder")

    def __init__(self, config: RSSMConfig, shape: tuple[int, ...], controls: int, key: PRNGKeyArray):
        key, lstm_key, transition_key, recognition_key = jax.random.split(key, 4)
        reading: Reading = "backward" if config.posterior == "smoother" else "frame"
        super().__init__(config, reading, shape, controls, key)
        n = config.states
        self.lstm = LSTM(n + controls, config.memory, lstm_key)
        self.transition = GaussianMLP(config.memory, config.transition, n, transition_key)
        self.recognition = Recogniser(
            config.memory + config.reader, config.recognition, n, shape, recognition_key, config.sigma**2
        )

    @property
    def memory_size(self) -> int:
        return 2 * self.config.memory

    def first(self, features: Array) -> Diagonal:
        nothing = jnp.zeros((self.config.memory, *features.shape[1:]))
        return self.recognition(jnp.concatenate([nothing, features]))

    def predict(self, z: Array, u: Array, memory: Array) -> tuple[Diagonal, Array]:
        memory = self.lstm.step(memory, jnp.concatenate([z, u]))
        return self.transition(self.lstm.output(memory)), memory

    def correct(self, z: Array, u: Array, memory: Array, p: Diagonal, features: Array) -> Diagonal:
        """q(z_t | h_t-1, x_t:T, u_t:T)."""
        return self.recognition(jnp.concatenate([self.lstm.output(memory), features]))
