"""Small-matrix algebra in a form that XLA turns into a few vectorised loops.

Matrix axes lead and batch axes trail: a matrix is ``(rows, columns, *batch)``, a vector ``(rows, *batch)``, so one
sequence and a batch of ten thousand run through the same lines. Up to `SMALL` rows a product is unrolled into
multiply-adds over the batch; above it the library routines take over.

Two measures make this fast. On a CPU each result is materialised once (`optimization_barrier`): otherwise XLA
recomputes the whole chain of products for every output. And each function has its matrix derivative written out:
the derivative of an unrolled product is a sum of padded slices, several times slower than the product itself.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

SMALL = 8
"""Largest number of rows that is unrolled."""

Matrix = Float[Array, "rows columns *batch"]
Square = Float[Array, "n n *batch"]


def transpose(A: Float[Array, "rows columns *batch"]) -> Float[Array, "columns rows *batch"]:
    return jnp.swapaxes(A, 0, 1)


def symmetrise(A: Square) -> Square:
    return 0.5 * (A + transpose(A))


def diagonal(v: Float[Array, "n *batch"]) -> Float[Array, "n n *batch"]:
    """The matrix with v on its diagonal."""
    n = v.shape[0]
    return jnp.eye(n, dtype=v.dtype).reshape(n, n, *(1,) * (v.ndim - 1)) * v[:, None]


def identity(n: int, like: Array) -> Array:
    """The n x n identity, ready to be broadcast against a matrix with the batch axes of `like`."""
    return jnp.eye(n, dtype=like.dtype).reshape(n, n, *(1,) * (like.ndim - 2))


def matvec(A: Float[Array, "rows columns ..."], x: Float[Array, "columns ..."]) -> Array:
    return matmul(A, x[:, None])[:, 0]


def matmul(A: Float[Array, "rows inner ..."], B: Float[Array, "inner columns ..."]) -> Array:
    """A B, the batch axes of the two broadcast against each other."""
    return _matmul(*_align(A, B))


def cholesky(A: Square) -> Square:
    """Lower-triangular L with L L' = A.

    A pivot that rounding has pushed below the resolution of its dtype is set to that resolution, so a covariance
    that is positive definite in exact arithmetic never gives NaN in float32.
    """
    return _cholesky(A)


def cholesky_solve(L: Float[Array, "n n ..."], B: Float[Array, "n columns ..."]) -> Array:
    """X with L L' X = B."""
    return _cholesky_solve(*_align(L, B))


def solve_lower(L: Float[Array, "n n ..."], B: Float[Array, "n columns ..."]) -> Array:
    """X with L X = B for lower-triangular L."""
    return _solve_lower(*_align(L, B))


def log_determinant(L: Float[Array, "n n *batch"]) -> Float[Array, "*batch"]:
    """log |L L'|."""
    return 2 * jnp.sum(jnp.log(jnp.stack([L[i, i] for i in range(L.shape[0])])), axis=0)


def _align(A: Array, B: Array) -> tuple[Array, Array]:
    batch = jnp.broadcast_shapes(A.shape[2:], B.shape[2:])
    return tuple(jnp.broadcast_to(_pad(M, len(batch)), M.shape[:2] + batch) for M in (A, B))  # type: ignore[return-value]


def _pad(M: Array, batch_axes: int) -> Array:
    return M.reshape(M.shape[:2] + (1,) * (batch_axes + 2 - M.ndim) + M.shape[2:])


def _library(routine: Callable[..., Array], *matrices: Array) -> Array:
    """A routine that wants matrix axes last."""
    last = [jnp.moveaxis(M, (0, 1), (-2, -1)) for M in matrices]
    return jnp.moveaxis(routine(*last), (-2, -1), (0, 1))


def _once(result: Array) -> Array:
    """Materialise a result on a CPU; a GPU is better off with the larger fusions (7.3 against 7.9 ms a step)."""
    return jax.lax.optimization_barrier(result) if jax.default_backend() == "cpu" else result


def _product(A: Array, B: Array) -> Array:
    if max(*A.shape[:2], B.shape[1]) > SMALL:
        return _library(jnp.matmul, A, B)
    terms = [A[:, k : k + 1] * B[k : k + 1] for k in range(B.shape[0])]
    return _once(sum(terms[1:], start=terms[0])) if terms else _library(jnp.matmul, A, B)


def _forward(L: Array, B: Array) -> Array:
    """L^-1 B."""
    if L.shape[0] > SMALL:
        return _library(lambda L, B: jax.lax.linalg.triangular_solve(L, B, left_side=True, lower=True), L, B)
    rows: list[Array] = []
    for i in range(L.shape[0]):
        rows.append((B[i] - sum(L[i, k] * rows[k] for k in range(i))) / L[i, i])
    return _once(jnp.stack(rows))


def _backward(L: Array, B: Array) -> Array:
    """L'^-1 B."""
    n = L.shape[0]
    if n > SMALL:
        solve = jax.lax.linalg.triangular_solve
        return _library(lambda L, B: solve(L, B, left_side=True, lower=True, transpose_a=True), L, B)
    rows: dict[int, Array] = {}
    for i in reversed(range(n)):
        rows[i] = (B[i] - sum(L[k, i] * rows[k] for k in range(i + 1, n))) / L[i, i]
    return _once(jnp.stack([rows[i] for i in range(n)]))


def _factor(A: Array) -> Array:
    n = A.shape[0]
    resolution = n * jnp.finfo(A.dtype).eps
    if n > SMALL:
        return _library(jnp.linalg.cholesky, A + resolution * diagonal(jnp.stack([A[i, i] for i in range(n)])))
    zero = jnp.zeros_like(A[0, 0])
    L = [[zero] * n for _ in range(n)]
    for j in range(n):
        pivot = A[j, j] - sum(L[j][k] ** 2 for k in range(j))
        L[j][j] = jnp.sqrt(jnp.maximum(pivot, resolution * A[j, j]))
        for i in range(j + 1, n):
            L[i][j] = (A[i, j] - sum(L[i][k] * L[j][k] for k in range(j))) / L[j][j]
    return _once(jnp.stack([jnp.stack(row) for row in L]))


def _lower(A: Array, diagonal: float = 1.0) -> Array:
    """The lower triangle of A, its diagonal multiplied by a number."""
    n = A.shape[0]
    keep = jnp.tril(jnp.ones((n, n), A.dtype), -1) + diagonal * jnp.eye(n, dtype=A.dtype)
    return A * keep.reshape(n, n, *(1,) * (A.ndim - 2))


@jax.custom_vjp
def _matmul(A: Array, B: Array) -> Array:
    return _product(A, B)


@jax.custom_vjp
def _cholesky(A: Array) -> Array:
    return _factor(A)


@jax.custom_vjp
def _cholesky_solve(L: Array, B: Array) -> Array:
    return _backward(L, _forward(L, B))


@jax.custom_vjp
def _solve_lower(L: Array, B: Array) -> Array:
    return _forward(L, B)


def _matmul_derivative(operands: tuple[Array, Array], G: Array) -> tuple[Array, Array]:
    A, B = operands
    return _product(G, transpose(B)), _product(transpose(A), G)


def _cholesky_derivative(L: Array, G: Array) -> tuple[Array]:
    """Murray (2016), Eq. 10: 1/2 L'^-1 (X + X') L^-1 with X the lower triangle of L' G, its diagonal halved."""
    X = _lower(_product(transpose(L), G), diagonal=0.5)
    half = _backward(L, X + transpose(X))
    return (0.5 * _backward(L, transpose(half)),)


def _cholesky_solve_derivative(result: tuple[Array, Array], G: Array) -> tuple[Array, Array]:
    L, X = result
    G_B = _backward(L, _forward(L, G))
    G_A = -_product(G_B, transpose(X))
    return _lower(_product(G_A + transpose(G_A), L)), G_B


def _solve_lower_derivative(result: tuple[Array, Array], G: Array) -> tuple[Array, Array]:
    L, X = result
    G_B = _backward(L, G)
    return -_lower(_product(G_B, transpose(X))), G_B


def _keep_result(solve: Callable[[Array, Array], Array]) -> Callable[[Array, Array], tuple[Array, tuple[Array, Array]]]:
    def forward(L: Array, B: Array) -> tuple[Array, tuple[Array, Array]]:
        X = solve(L, B)
        return X, (L, X)

    return forward


def _cholesky_forward(A: Array) -> tuple[Array, Array]:
    L = _factor(A)
    return L, L


_matmul.defvjp(lambda A, B: (_product(A, B), (A, B)), _matmul_derivative)
_cholesky.defvjp(_cholesky_forward, _cholesky_derivative)
_cholesky_solve.defvjp(_keep_result(_cholesky_solve), _cholesky_solve_derivative)
_solve_lower.defvjp(_keep_result(_solve_lower), _solve_lower_derivative)
