"""Transition models p(z_t+1 | z_t, u_t)."""

from __future__ import annotations

import abc

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, PRNGKeyArray

from deepssm import linalg
from deepssm.gaussian import Diagonal
from deepssm.networks import LSTM, MLP, GaussianMLP


class Linearised(eqx.Module):
    """z' = F z + b + N(0, Q) with F, b and Q that depend on where it is linearised."""

    @abc.abstractmethod
    def system(self, z: Float[Array, "n *batch"], u: Float[Array, "i *batch"]) -> tuple[Array, Array, Array]:
        """F, b and the diagonal of Q at (z, u)."""

    def __call__(self, z: Float[Array, "n *batch"], u: Float[Array, "i *batch"]) -> tuple[Array, Array, Array]:
        """F, b and Q at (z, u): what the Kalman filter asks for."""
        F, b, Q = self.system(z, u)
        return F, b, linalg.diagonal(Q)

    def next(self, z: Float[Array, "n *batch"], u: Float[Array, "i *batch"]) -> Diagonal:
        """p(z_t+1 | z_t = z, u_t = u)."""
        F, b, Q = self.system(z, u)
        return Diagonal(linalg.matvec(F, z) + b, Q)


class Mixture(Linearised):
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
        self.log_Q = jnp.full((bases, states), float(log_Q))

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
            drive = _least_squares(weights(self.g, z, u), coupling * jnp.concatenate(moves))
            drive = drive.reshape(bases, states - observed, observed)
            self.F = self.F.at[:, :observed, observed:].add(jnp.swapaxes(drive, 1, 2))

    def system(self, z: Float[Array, "n *batch"], u: Float[Array, "n_u *batch"]) -> tuple[Array, Array, Array]:
        return self.mix(weights(self.g, z, u), u)


class Integrating(Linearised):
    """Locally linear, with positions that only velocities move: p' = exp(v'_1 L_1 + v'_2 L_2 + ...) p.

    The velocities follow v' = F(z, u) z + B(z, u) u, mixed from M base matrices as in `LocallyLinear`. The generators
    L_k are fixed: a velocity of 1 moves its position by `coupling`, along a line or round a circle (`turned`). So a
    velocity is the same thing all over the state space. A free transition may take for one whatever function of
    position and velocity predicts the next position, and does: it predicts as well, but is bent.

    Q is the same for all bases. Were it mixed too, the base with the smallest one would win every state in the first
    steps, while all are still too large, and the others would never be used again.

    Untrained, velocities stay what they are.
    """

    F: Float[Array, "M v n"]
    B: Float[Array, "M v n_u"]
    log_Q: Float[Array, " n"]
    g: MLP
    positions: int = eqx.field(static=True)
    coupling: float = eqx.field(static=True)

    def __init__(
        self,
        states: int,
        controls: int,
        bases: int,
        hidden: tuple[int, ...],
        positions: int,
        coupling: float,
        log_Q: float,
        key: PRNGKeyArray,
    ):
        velocities = states - positions
        self.F = jnp.tile(jnp.eye(velocities, states, positions), (bases, 1, 1))
        self.B = jnp.zeros((bases, velocities, controls))
        self.log_Q = jnp.full(states, float(log_Q))
        self.g = MLP(states + controls, hidden, bases, key)
        self.positions, self.coupling = positions, coupling

    def system(self, z: Float[Array, "n *batch"], u: Float[Array, "n_u *batch"]) -> tuple[Array, Array, Array]:
        alpha = weights(self.g, z, u)
        F, B = (jnp.tensordot(bases, alpha, (0, 0)) for bases in (self.F, self.B))
        b, L = linalg.matvec(B, u), generators(len(z), self.positions, self.coupling)
        J = moves(L, z[: self.positions], linalg.matvec(F, z) + b)
        stay = jnp.eye(self.positions, len(z)).reshape(self.positions, len(z), *(1,) * (z.ndim - 1))
        positions = stay + linalg.matmul(J, F)
        Q = jnp.broadcast_to(jnp.exp(self.log_Q).reshape(-1, *(1,) * (z.ndim - 1)), z.shape)
        return jnp.concatenate([positions, F]), jnp.concatenate([linalg.matvec(J, b), b]), Q


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

    def system(self, z: Float[Array, "n *batch"], inputs: Float[Array, "i *batch"]) -> tuple[Array, Array, Array]:
        u, alpha = jnp.split(inputs, [self.B.shape[2]])
        return self.mix(alpha, u)


class Residual(eqx.Module):
    """N(z + m(z, u), v(z, u)) from a fully connected network: the transition of the deep Kalman filter.

    Untrained, the last dimensions move the first `positions` as velocities do (`turned`), `coupling` times; if it is
    `integrating` they do so for ever, as in `Integrating`, and the network moves the velocities alone.
    """

    network: GaussianMLP
    log_Q: Float[Array, " n"]
    positions: int = eqx.field(static=True)
    coupling: float = eqx.field(static=True)
    integrating: bool = eqx.field(static=True)

    def __init__(
        self,
        states: int,
        controls: int,
        hidden: tuple[int, ...],
        positions: int,
        coupling: float,
        log_Q: float,
        key: PRNGKeyArray,
        integrating: bool = False,
    ):
        network_key, z_key = jax.random.split(key)
        network = GaussianMLP(states + controls, hidden, states, network_key, gain=0.0)
        if not integrating:
            z, u = _somewhere(states, controls, z_key)
            W = _least_squares(network.mlp.features(jnp.concatenate([z, u])), coupling * turned(z, positions))
            W = jnp.pad(W, ((0, 0), (0, states)))
            network = eqx.tree_at(lambda network: network.mlp.layers[-1].W, network, W)
        self.network = network
        self.positions, self.coupling, self.integrating = positions, coupling, integrating
        self.log_Q = jnp.full(states, float(log_Q))

    def next(self, z: Float[Array, "n *batch"], u: Float[Array, "n_u *batch"]) -> Diagonal:
        """p(z_t+1 | z_t = z, u_t = u)."""
        change = self.network(jnp.concatenate([z, u]))
        scale = jnp.exp(self.log_Q).reshape(-1, *(1,) * (z.ndim - 1))
        if not self.integrating:
            return Diagonal(z + change.m, change.v * scale)
        p, v = jnp.split(z, [self.positions])
        v = v + change.m[self.positions :]
        J = moves(generators(len(z), self.positions, self.coupling), p, v)
        return Diagonal(jnp.concatenate([p + linalg.matvec(J, v), v]), change.v * scale)


def weights(g: MLP, z: Float[Array, "n *batch"], u: Float[Array, "n_u *batch"]) -> Float[Array, "M *batch"]:
    """alpha(z, u) = softmax(g(z, u)): how much of each base matrix."""
    return jax.nn.softmax(g(jnp.concatenate([z, u])), axis=0)


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


def generators(states: int, positions: int, coupling: float) -> Float[Array, "v p p1"]:
    """L_k for each velocity: what it does to a position (p, 1), as `turned` says, `coupling` times."""
    axes, nowhere = jnp.eye(states), jnp.zeros(states)

    def columns(v: Array) -> list[Array]:
        start = turned(nowhere + v, positions)
        return [*(turned(p + v, positions) - start for p in axes[:positions]), start]

    return coupling * jnp.stack([jnp.stack(columns(v), axis=1)[:positions] for v in axes[positions:]])


def moves(
    L: Float[Array, "v p p1"], p: Float[Array, "p *batch"], v: Float[Array, "v *batch"]
) -> Float[Array, "p v *batch"]:
    """J with exp(v_1 L_1 + v_2 L_2 + ...) p = p + J v: linear in v but for what turning adds, to fifth order."""
    ones = jnp.ones((1, *p.shape[1:]))
    J = start = jnp.swapaxes(jnp.tensordot(L, jnp.concatenate([p, ones]), (2, 0)), 0, 1)
    X = jnp.tensordot(L[:, :, :-1], v, (0, 0))
    for order in (5, 4, 3, 2):
        J = start + linalg.matmul(X, J) / order
    return J


def _somewhere(states: int, controls: int, key: PRNGKeyArray) -> tuple[Array, Array]:
    """States and controls to fit the start of a transition to."""
    z, u = jnp.split(1.5 * jax.random.normal(key, (states + controls, 1000)), [states])
    return z, u


def _least_squares(features: Float[Array, "k S"], target: Float[Array, "m S"]) -> Float[Array, "k m"]:
    """W with W' features close to the target, held small."""
    products = features @ features.T
    ridge = 1e-2 * jnp.trace(products) / len(products)
    return jnp.linalg.solve(products + ridge * jnp.eye(len(products)), features @ target.T)
