"""Deep variational Bayes filter and smoother (Karl et al. 2016, 2017), App. A.4 of the paper."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, PRNGKeyArray

from deepssm.gaussian import Diagonal
from deepssm.models.stepwise import Stepwise, StepwiseConfig
from deepssm.networks import Reading, Recogniser
from deepssm.transitions import Integrating, LocallyLinear


@dataclass(frozen=True)
class DVBSConfig(StepwiseConfig):
    """Sizes and choices of a deep variational Bayes smoother or filter; the defaults are the paper's."""

    bases: int = 16
    """Number M of base matrices."""
    alpha: tuple[int, ...] = (64,)
    """Hidden layers of the network that weighs the base matrices."""
    coupling: float = 0.3
    """How strongly velocities drive positions at the start of training."""
    integrating: bool = False
    """Positions are moved by velocities alone (`deepssm.transitions.Integrating`), not by anything in z."""

    def build(self, shape: tuple[int, ...], controls: int, key: PRNGKeyArray) -> DVBS:
        return DVBS(self, shape, controls, key)


class DVBS(Stepwise):
    transition: LocallyLinear | Integrating
    recognition: Recogniser
    """The inverse measurement q(z_t | x_t:T, u_t:T)."""
    log_fusion: Float[Array, " n"]
    """Logarithm of the variances with which the transition's mean enters the posterior."""

    def __init__(self, config: DVBSConfig, shape: tuple[int, ...], controls: int, key: PRNGKeyArray):
        key, transition_key, recognition_key = jax.random.split(key, 3)
        reading: Reading = "backward" if config.posterior == "smoother" else "frame"
        super().__init__(config, reading, shape, controls, key)
        sizes = (config.states, controls, config.bases, config.alpha, config.positions)
        kind = Integrating if config.integrating else LocallyLinear
        self.transition = kind(*sizes, config.coupling, config.log_noise, transition_key)
        self.recognition = Recogniser(
            config.reader, config.recognition, config.states, shape, recognition_key, config.sigma**2
        )
        self.log_fusion = jnp.full(config.states, float(config.log_noise))

    @property
    def observation_parts(self) -> tuple[str, ...]:  # type: ignore[override]
        """The initial network lies on the way from x_1 to its reconstruction, so it cannot rest."""
        parts = ("reader", "recognition", "decoder")
        return (*parts, "prior") if self.config.prior == "network" else parts

    def digest(self, features: Array) -> Array:
        """Mean and variance of the inverse measurement."""
        return jnp.concatenate(self.recognition(features))

    def first(self, features: Array) -> Diagonal:
        return Diagonal(*jnp.split(features, 2))

    def predict(self, z: Array, u: Array, memory: Array) -> tuple[Diagonal, Array]:
        return self.transition.next(z, u), memory

    def correct(self, z: Array, u: Array, memory: Array, p: Diagonal, features: Array) -> Diagonal:
        """Eq. (seq-vhp-dvbs_factorisation): the transition's mean with a variance of its own, times the measurement."""
        m, v = jnp.split(features, 2)
        v_p = jnp.exp(self.log_fusion).reshape(-1, *(1,) * (z.ndim - 1))
        total = v_p + v
        return Diagonal((v * p.m + v_p * m) / total, v * v_p / total)
