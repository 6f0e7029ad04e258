"""Kalman filter and smoother on a locally linear Gaussian system, one sequence or many at once.

    z_{t+1} = F_t z_t + b_t + N(0, Q_t),   a_t = H z_t + N(0, R)

Where F, b and Q come from is the caller's business: `filter` asks `transition(z, u)` for them at the filtered mean
(the extended filter of the paper, App. A.5) or at a given reference trajectory (the iterated smoother). Components
lead, then time, then the batch: a is ``(n_a, T, *batch)``, P ``(n, n, T, *batch)``. An unseen frame skips the update.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from deepssm.gaussian import Gaussian
from deepssm.linalg import cholesky, cholesky_solve, identity, matmul, matvec, symmetrise, transpose

Transition = Callable[[Array, Array], tuple[Array, Array, Array]]
"""z (n, *batch), u (n_u, *batch) -> F (n, n, *batch), b (n, *batch), Q (n, n, *batch)."""


class Forward(NamedTuple):
    """What the forward pass leaves behind."""

    predicted: Gaussian
    """p(z_t | a_1:t-1, u_1:t-1); at t = 1 the start."""
    filtered: Gaussian
    """p(z_t | a_1:t, u_1:t-1)."""
    F: Float[Array, "n n T *batch"]
    Q: Float[Array, "n n T *batch"]


def predict(z: Gaussian, F: Array, b: Array, Q: Array) -> Gaussian:
    """Prediction step, Eq. (seq-vhp-mt-) and (seq-vhp-Pt-)."""
    return Gaussian(matvec(F, z.m) + b, matmul(matmul(F, z.P), transpose(F)) + Q)


def update(z: Gaussian, a: Array, H: Array, R: Array, seen: Array | bool = True) -> Gaussian:
    """Update step in Joseph form, which keeps P positive definite in float32; unseen: z itself."""
    P_H = matmul(z.P, transpose(H))
    S = matmul(H, P_H) + _batched(R, z.m)
    K = transpose(cholesky_solve(cholesky(S), transpose(P_H))) * jnp.asarray(seen, z.m.dtype)
    m = z.m + matvec(K, a - matvec(H, z.m))
    A = identity(len(m), z.P) - matmul(K, H)
    P = matmul(matmul(A, z.P), transpose(A)) + matmul(matmul(K, R), transpose(K))
    return Gaussian(m, symmetrise(P))


def retrodict(z: Gaussian, predicted: Gaussian, later: Gaussian, F: Array, Q: Array) -> Gaussian:
    """Backward step of the Rauch-Tung-Striebel smoother: filtered z_t, predicted and smoothed z_t+1 -> smoothed z_t.

    P + G (P_s - P_p) G' turns negative in float32; the same covariance as the sum of two positive parts does not.
    """
    G = transpose(cholesky_solve(cholesky(predicted.P), matmul(F, z.P)))
    A = identity(len(z.m), z.P) - matmul(G, F)
    m = z.m + matvec(G, later.m - predicted.m)
    P = matmul(matmul(A, z.P), transpose(A)) + matmul(matmul(G, later.P + Q), transpose(G))
    return Gaussian(m, symmetrise(P))


def filter(
    start: Gaussian,
    a: Float[Array, "n_a T *batch"],
    u: Float[Array, "n_u T *batch"],
    seen: Bool[Array, "T *batch"],
    transition: Transition,
    H: Float[Array, "n_a n"],
    R: Float[Array, "n_a n_a"],
    reference: Float[Array, "n T *batch"] | None = None,
) -> Forward:
    """Forward pass. The transition is evaluated at the filtered mean, or at the reference where one is given."""

    @jax.checkpoint  # recomputing a step in the backward pass is cheaper than storing it
    def step(predicted: Gaussian, inputs: tuple[Array, ...]) -> tuple[Gaussian, tuple]:
        a, u, seen, *at = inputs
        z = update(predicted, a, H, R, seen)
        F, b, Q = transition(at[0] if at else z.m, u)
        return predict(z, F, b, Q), (predicted, z, F, Q)

    batch = a.shape[2:]
    first = Gaussian(*(jnp.broadcast_to(_batched(s, a[:, 0]), s.shape + batch) for s in start))
    known = [jnp.where(seen, a, 0.0), u] if reference is None else [jnp.where(seen, a, 0.0), u, reference]
    a_first, u_first, *at = (jnp.moveaxis(array, 1, 0) for array in known)
    _, (predicted, filtered, F, Q) = jax.lax.scan(step, first, (a_first, u_first, seen, *at))
    F, Q = (jnp.moveaxis(array, 0, 2) for array in (F, Q))
    return Forward(_time_after_components(predicted), _time_after_components(filtered), F, Q)


def smooth(forward: Forward) -> Gaussian:
    """Backward pass: p(z_t | a_1:T, u_1:T-1) for every t."""

    def step(later: Gaussian, inputs: tuple) -> tuple[Gaussian, Gaussian]:
        z, predicted, F, Q = inputs
        smoothed = retrodict(z, predicted, later, F, Q)
        return smoothed, smoothed

    filtered, predicted = _time_first(forward.filtered), _time_first(forward.predicted)
    F, Q = (jnp.moveaxis(array, 2, 0) for array in (forward.F, forward.Q))
    last = jax.tree.map(lambda array: array[-1], filtered)
    before = jax.tree.map(lambda array: array[:-1], (filtered, F, Q))
    after = jax.tree.map(lambda array: array[1:], predicted)
    _, smoothed = jax.lax.scan(step, last, (before[0], after, *before[1:]), reverse=True)
    return _time_after_components(jax.tree.map(lambda body, end: jnp.concatenate([body, end[None]]), smoothed, last))


def log_likelihood(forward: Forward, a: Array, seen: Array, H: Array, R: Array) -> Float[Array, "*batch"]:
    """log p(a_1:T | u_1:T-1) over the seen frames, from the innovations of the forward pass."""
    predicted = forward.predicted
    S = symmetrise(matmul(matmul(H, predicted.P), transpose(H)) + _batched(R, predicted.m))
    innovation = Gaussian(matvec(H, predicted.m), S)
    return jnp.sum(jnp.where(seen, innovation.log_prob(jnp.where(seen, a, 0.0)), 0.0), axis=0)


def _time_first(z: Gaussian) -> Gaussian:
    return Gaussian(jnp.moveaxis(z.m, 1, 0), jnp.moveaxis(z.P, 2, 0))


def _time_after_components(z: Gaussian) -> Gaussian:
    return Gaussian(jnp.moveaxis(z.m, 0, 1), jnp.moveaxis(z.P, 0, 2))


def _batched(constant: Array, like: Array) -> Array:
    """A constant vector or matrix, ready to be broadcast against the batch axes of a vector `like`."""
    return constant.reshape(constant.shape + (1,) * (like.ndim - 1))
