"""Transition models p(z_t+1 | z_t, u_t)."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, PRNGKeyArray

from deepssm import linalg
from deepssm.gaussian import Gaussian
from deepssm.networks import MLP


class LocallyLinear(eqx.Module):
    """N(F(z, u) z + B(z, u) u, Q(z, u)), Eq. (seq-vhp-llt).

    F, B and Q are mixtures of M learned base matrices with weights alpha(z, u) = softmax(g(z, u)),
    Eq. (seq-vhp-alpha). Q is diagonal and lives in log space. Untrained, nothing moves by itself: F is near the
    identity, and the unobserved dimensions drive the `observed` first ones with a strength `coupling`.
    """

    F: Float[Array, "M n n"]
    B: Float[Array, "M n n_u"]
    log_Q: Float[Array, "M n"]
    g: MLP

    def __init__(
        self,
        states: int,
        controls: int,
        bases: int,
        hidden: tuple[int, ...],
        observed: int,
        coupling: float,
        log_Q: float,
        key: PRNGKeyArray,
    ):
        F_key, B_key, g_key = jax.random.split(key, 3)
        self.g = MLP(states + controls, hidden, bases, g_key)
        drive = jnp.zeros((bases, states, states))
        drive = drive.at[:, :observed, observed:].set(_drive(self.g, observed, states - observed))
        self.F = jnp.eye(states) + coupling * drive + 0.05 * jax.random.normal(F_key, (bases, states, states))
        self.B = 0.05 * jax.random.normal(B_key, (bases, states, controls))
        self.log_Q = jnp.full((bases, states), log_Q)

    def alpha(self, z: Float[Array, "n *batch"], u: Float[Array, "n_u *batch"]) -> Float[Array, "M *batch"]:
        return jax.nn.softmax(self.g(jnp.concatenate([z, u])), axis=0)

    def __call__(self, z: Float[Array, "n *batch"], u: Float[Array, "n_u *batch"]) -> tuple[Array, Array, Array]:
        """F, B u and Q at (z, u): what the Kalman filter asks for."""
        alpha = self.alpha(z, u)
        F, B, Q = (jnp.tensordot(bases, alpha, (0, 0)) for bases in (self.F, self.B, jnp.exp(self.log_Q)))
        return F, linalg.matvec(B, u), linalg.diagonal(Q)

    def next(self, z: Float[Array, "n *batch"], u: Float[Array, "n_u *batch"]) -> Gaussian:
        """p(z_t+1 | z_t = z, u_t = u)."""
        F, b, Q = self(z, u)
        return Gaussian(linalg.matvec(F, z) + b, Q)


def _drive(g: MLP, observed: int, hidden: int) -> Float[Array, "M observed hidden"]:
    """The direction in which each unobserved dimension moves the observed ones in each base matrix, before training.

    Without such a direction no gradient asks the filter for a velocity. As many velocities as positions: each moves
    its own (constant velocity). Fewer, as for a circle in the plane: a velocity must turn the features about their
    centre, or its sign differs from one side of the circle to the other and seeds get lost there. So base m, which
    is used most where the features lie in the direction d_m, the slope of its weight g_m, gets a quarter turn of d_m:
    a velocity of 1 with a coupling of 0.1 turns the features by a tenth of a radian.
    """
    bases = g.layers[-1].W.shape[1]
    if hidden >= observed:
        return jnp.broadcast_to(jnp.eye(observed, hidden), (bases, observed, hidden))
    slope = jnp.eye(g.layers[0].W.shape[0])[:observed]
    for layer in g.layers:
        slope = slope @ layer.W
    slope = (slope - slope.mean(axis=1, keepdims=True)).T * 0.5 ** (len(g.layers) - 1)  # a ReLU lets half through
    slope = slope / jnp.mean(slope**2)  # sum_m alpha_m d_m is then about the features themselves
    columns = []
    for k in range(hidden):
        turned = jnp.zeros((bases, observed))
        turned = turned.at[:, k].set(-slope[:, k + 1]).at[:, k + 1].set(slope[:, k])
        columns.append(turned)
    return jnp.stack(columns, axis=-1)
