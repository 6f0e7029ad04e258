"""Transition models p(z_t+1 | z_t, u_t)."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, PRNGKeyArray

from deepssm import linalg
from deepssm.gaussian import Diagonal
from deepssm.networks import LSTM, MLP, GaussianMLP


class Mixture(eqx.Module):
    """Linear systems z' = F z + B u + N(0, Q), mixed from M learned base matrices. Q is diagonal, in log space.

    Untrained, nothing moves by itself: F is near the identity.
    """

    F: Float[Array, "M n n"]
    B: Float[Array, "M n n_u"]
    log_Q: Float[Array, "M n"]

    def __init__(self, states: int, controls: int, bases: int, log_Q: float, key: PRNGKeyArray):
        F_key, B_key = jax.random.split(key)
        self.F = jnp.eye(states) + 0.05 * jax.random.normal(F_key, (bases, states, states))
        self.B = 0.05 * jax.random.normal(B_key, (bases, states, controls))
        self.log_Q = jnp.full((bases, states), log_Q)

    def mix(self, alpha: Float[Array, "M *batch"], u: Float[Array, "n_u *batch"]) -> tuple[Array, Array, Array]:
        """F, B u and the diagonal of Q, Eq. (seq-vhp-alpha)."""
        F, B, Q = (jnp.tensordot(bases, alpha, (0, 0)) for bases in (self.F, self.B, jnp.exp(self.log_Q)))
        return F, linalg.matvec(B, u), Q


class LocallyLinear(Mixture):
    """N(F(z, u) z + B(z, u) u, Q(z, u)), Eq. (seq-vhp-llt), with weights alpha(z, u) = softmax(g(z, u)).

    Untrained, the last dimensions move the `observed` first ones as velocities do (`turned`), `coupling` times.
    """

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
        bases_key, g_key, z_key = jax.random.split(key, 3)
        super().__init__(states, controls, bases, log_Q, bases_key)
        self.g = MLP(states + controls, hidden, bases, g_key)
        if observed < states:
            z, u = _somewhere(states, controls, z_key)
            velocities = jnp.eye(states)[observed:, :, None] * jnp.ones(z.shape[1])
            moves = [turned(z.at[observed:].set(v[observed:]), observed)[:observed] for v in velocities]
            drive = _least_squares(self.alpha(z, u), coupling * jnp.concatenate(moves))
            drive = drive.reshape(bases, states - observed, observed)
            self.F = self.F.at[:, :observed, observed:].add(jnp.swapaxes(drive, 1, 2))

    def alpha(self, z: Float[Array, "n *batch"], u: Float[Array, "n_u *batch"]) -> Float[Array, "M *batch"]:
        return jax.nn.softmax(self.g(jnp.concatenate([z, u])), axis=0)

    def __call__(self, z: Float[Array, "n *batch"], u: Float[Array, "n_u *batch"]) -> tuple[Array, Array, Array]:
        """F, B u and Q at (z, u): what the Kalman filter asks for."""
        F, b, Q = self.mix(self.alpha(z, u), u)
        return F, b, linalg.diagonal(Q)

    def next(self, z: Float[Array, "n *batch"], u: Float[Array, "n_u *batch"]) -> Diagonal:
        """p(z_t+1 | z_t = z, u_t = u)."""
        F, b, Q = self.mix(self.alpha(z, u), u)
        return Diagonal(linalg.matvec(F, z) + b, Q)


class Recurrent(Mixture):
    """The transition of the KVAE: the weights alpha_t = softmax(g(h_t)) follow an LSTM over a_1:t.

    Given the memory the system is linear, so the filter is exact; but what the memory knows is missing in z_t. The
    weights are computed beforehand and take the place of controls: `inputs` is (u_t, alpha_t).
    """

    lstm: LSTM
    g: MLP

    def __init__(
        self,
        states: int,
        controls: int,
        auxiliary: int,
        bases: int,
        size: int,
        hidden: tuple[int, ...],
        log_Q: float,
        key: PRNGKeyArray,
    ):
        bases_key, lstm_key, g_key = jax.random.split(key, 3)
        super().__init__(states, controls, bases, log_Q, bases_key)
        self.lstm = LSTM(auxiliary + 1, size, lstm_key)
        self.g = MLP(size, hidden, bases, g_key)

    def inputs(self, u: Float[Array, "n_u *batch"], memory: Float[Array, "k2 *batch"]) -> Float[Array, "i *batch"]:
        return jnp.concatenate([u, jax.nn.softmax(self.g(self.lstm.output(memory)), axis=0)])

    def __call__(self, z: Float[Array, "n *batch"], inputs: Float[Array, "i *batch"]) -> tuple[Array, Array, Array]:
        u, alpha = jnp.split(inputs, [self.B.shape[2]])
        F, b, Q = self.mix(alpha, u)
        return F, b, linalg.diagonal(Q)

    def next(self, z: Float[Array, "n *batch"], inputs: Float[Array, "i *batch"]) -> Diagonal:
        u, alpha = jnp.split(inputs, [self.B.shape[2]])
        F, b, Q = self.mix(alpha, u)
        return Diagonal(linalg.matvec(F, z) + b, Q)


class Residual(eqx.Module):
    """N(z + m(z, u), v(z, u)) from a fully connected network: the transition of the deep Kalman filter.

    Untrained, the last dimensions move the first `positions` as velocities do (`turned`), `coupling` times.
    """

    network: GaussianMLP
    log_Q: Float[Array, " n"]

    def __init__(
        self,
        states: int,
        controls: int,
        hidden: tuple[int, ...],
        positions: int,
        coupling: float,
        log_Q: float,
        key: PRNGKeyArray,
    ):
        network_key, z_key = jax.random.split(key)
        network = GaussianMLP(states + controls, hidden, states, network_key, gain=0.0)
        z, u = _somewhere(states, controls, z_key)
        W = _least_squares(network.mlp.features(jnp.concatenate([z, u])), coupling * turned(z, positions))
        self.network = eqx.tree_at(lambda network: network.mlp.layers[-1].W, network, jnp.pad(W, ((0, 0), (0, states))))
        self.log_Q = jnp.full(states, log_Q)

    def next(self, z: Float[Array, "n *batch"], u: Float[Array, "n_u *batch"]) -> Diagonal:
        """p(z_t+1 | z_t = z, u_t = u)."""
        change = self.network(jnp.concatenate([z, u]))
        scale = jnp.exp(self.log_Q).reshape(-1, *(1,) * (z.ndim - 1))
        return Diagonal(z + change.m, change.v * scale)


def turned(z: Float[Array, "n *batch"], positions: int) -> Float[Array, "n *batch"]:
    """How velocities, the last dimensions of z, move positions, the first ones.

    A line takes one position, a circle two; so where positions outnumber velocities, the first velocities turn circles,
    a velocity of 1 by a radian, and the others move the positions that are left. Were a velocity to move a circle along
    a line instead, its sign would differ between the two sides, and training gets lost there; were nothing to move, no
    gradient would ask for a velocity.
    """
    p, v = z[:positions], z[positions:]
    circles = max(positions - len(v), 0)
    moves = jnp.zeros_like(z)
    for k in range(min(len(v), positions)):
        if k < circles and 2 * k + 1 < positions:
            moves = moves.at[2 * k].add(-v[k] * p[2 * k + 1]).at[2 * k + 1].add(v[k] * p[2 * k])
        elif k >= circles:
            moves = moves.at[circles + k].add(v[k])
    return moves


def _somewhere(states: int, controls: int, key: PRNGKeyArray) -> tuple[Array, Array]:
    """States and controls to fit the start of a transition to."""
    z, u = jnp.split(1.5 * jax.random.normal(key, (states + controls, 1000)), [states])
    return z, u


def _least_squares(features: Float[Array, "k S"], target: Float[Array, "m S"]) -> Float[Array, "k m"]:
    """W with W' features close to the target, held small."""
    products = features @ features.T
    ridge = 1e-2 * jnp.trace(products) / len(products)
    return jnp.linalg.solve(products + ridge * jnp.eye(len(products)), features @ target.T)
