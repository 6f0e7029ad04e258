"""Extended Kalman VAE (Sec. 4 of the paper), as smoother or as filter: the transition is locally linear in z."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import PRNGKeyArray

from deepssm import kalman
from deepssm.gaussian import Diagonal, Gaussian, kl
from deepssm.models.kalman_vae import KalmanConfig, KalmanVAE
from deepssm.transitions import Integrating, LocallyLinear


@dataclass(frozen=True)
class EKVAEConfig(KalmanConfig):
    """Sizes and choices of an extended Kalman VAE; the defaults are the paper's for the pendulum."""

    iterations: int = 2
    """Re-linearisations around the smoothed means in `smooth`, never in the loss; 0 is the paper."""
    coupling: float = 0.2
    """How strongly the unobserved dimensions of z drive the observed ones at the start of training."""
    integrating: bool = False
    """Positions are moved by velocities alone (`deepssm.transitions.Integrating`), not by anything in z."""

    def build(self, shape: tuple[int, ...], controls: int, key: PRNGKeyArray) -> EKVAE:
        return EKVAE(self, shape, controls, key)


class EKVAE(KalmanVAE):
    def __init__(self, config: EKVAEConfig, shape: tuple[int, ...], controls: int, key: PRNGKeyArray):
        key, transition_key = jax.random.split(key)
        sizes = (config.states, controls, config.bases, config.alpha, config.auxiliary)
        kind = Integrating if config.integrating else LocallyLinear
        transition = kind(*sizes, config.coupling, config.log_noise, transition_key)
        super().__init__(config, shape, transition, key)

    def rate(
        self, q_a: Diagonal, a: Array, inputs: Array, seen: Array, forward: kalman.Forward, key: PRNGKeyArray
    ) -> dict[str, Array]:
        """Eq. (seq-vhp-ekvae_rate) and (seq-vhp-ekvae_rate_init).

        Filter version: Eq. (app:seq-vhp-ekvae_elbo_filter), the same with filtered in place of smoothed states.
        """
        z_key, prior_key = jax.random.split(key)
        filtered = forward.filtered
        q_z = kalman.smooth(forward) if self.config.posterior == "smoother" else filtered
        z = q_z.sample(z_key)

        z_first = Gaussian(z[:, 0], jnp.zeros_like(q_z.P[:, :, 0]))
        before = jax.tree.map(lambda array: array[..., :-1, :], (q_z, filtered, z, inputs))
        z_next = self.transition.next(before[2], before[3]).full()
        log_q_a = -q_a.entropy()
        parts = {
            "emission": _where(seen[0], log_q_a[0] - self.emission(z_first).log_prob(a[:, 0])),
            "prior": -jax.tree.map(lambda array: array[..., 0, :], q_z).entropy()
            - self.prior.bound(z[:, 0], prior_key),
            "transition": _where(seen[1:], log_q_a[1:] - self.emission(z_next).log_prob(a[:, 1:])).sum(0),
        }
        if self.config.posterior == "smoother":
            parts["smoothing"] = _where(seen[1:], kl(before[0], before[1])).sum(0)
        return parts


def _where(seen: Array, term: Array) -> Array:
    return jnp.where(seen, term, 0.0)
