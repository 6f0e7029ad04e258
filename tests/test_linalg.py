"""The unrolled routines and their written-out derivatives against NumPy and JAX's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepssm import linalg

SIZES = [1, 2, 3, linalg.SMALL, linalg.SMALL + 2]
BATCHES = [(), (2, 3)]


def matrix(key: int, rows: int, columns: int, batch: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(jax.random.key(key), (rows, columns, *batch))


def positive(key: int, n: int, batch: tuple[int, ...]) -> jax.Array:
    A = matrix(key, n, n, batch)
    return jnp.einsum("ik...,jk...->ij...", A, A) + 0.5 * linalg.identity(n, A)


def last(A: jax.Array) -> jax.Array:
    return jnp.moveaxis(A, (0, 1), (-2, -1))


def first(A: jax.Array) -> jax.Array:
    return jnp.moveaxis(A, (-2, -1), (0, 1))


def reference_cholesky(A: jax.Array) -> jax.Array:
    return first(jnp.linalg.cholesky(last(A)))


def reference_solve(L: jax.Array, B: jax.Array) -> jax.Array:
    return first(jax.scipy.linalg.solve_triangular(last(L), last(B), lower=True))


def reference_cholesky_solve(L: jax.Array, B: jax.Array) -> jax.Array:
    inner = jax.scipy.linalg.solve_triangular(last(L), last(B), lower=True)
    return first(jax.scipy.linalg.solve_triangular(jnp.swapaxes(last(L), -1, -2), inner, lower=False))


def agree(ours, theirs, *arguments):
    """Values and gradients of a random projection agree."""

    @jax.jit
    def both(*arguments):
        results = []
        for function in (ours, theirs):
            value, pull_back = jax.vjp(function, *arguments)
            weight = jnp.cos(jnp.arange(value.size, dtype=value.dtype)).reshape(value.shape)
            results.append((value, pull_back(weight)))
        return results

    (value, slopes), (expected, expected_slopes) = both(*arguments)
    np.testing.assert_allclose(value, expected, rtol=1e-9, atol=1e-10)
    for one, two in zip(slopes, expected_slopes, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-8, atol=1e-9)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("n", SIZES)
def test_routines_and_derivatives(n, batch):
    A, L = positive(1, n, batch), reference_cholesky(positive(2, n, batch))
    B = matrix(3, n, 2, batch)
    agree(linalg.matmul, lambda A, B: jnp.einsum("ik...,kj...->ij...", A, B), A, B)
    # Both derivatives of a symmetric argument are right when they agree after symmetrising.
    agree(lambda A: linalg.cholesky(linalg.symmetrise(A)), lambda A: reference_cholesky(linalg.symmetrise(A)), A)
    lower = jnp.tril(jnp.ones((n, n))).reshape(n, n, *(1,) * len(batch))
    agree(lambda L, B: linalg.solve_lower(L * lower, B), lambda L, B: reference_solve(L * lower, B), L, B)
    agree(lambda L, B: linalg.cholesky_solve(L * lower, B), lambda L, B: reference_cholesky_solve(L * lower, B), L, B)


@pytest.mark.usefixtures("float64")
def test_batch_axes_broadcast():
    H, P = matrix(1, 2, 3, ()), positive(2, 3, (5, 4))
    np.testing.assert_allclose(linalg.matmul(H, P), jnp.einsum("ik,kj...->ij...", H, P), rtol=1e-12)
    np.testing.assert_allclose(linalg.matvec(H, P[:, 0]), jnp.einsum("ik,k...->i...", H, P[:, 0]), rtol=1e-12)
    per_row = matrix(3, 3, 3, (4,))
    np.testing.assert_allclose(linalg.matmul(per_row, P), jnp.einsum("iks,kjts->ijts", per_row, P), rtol=1e-12)


@pytest.mark.usefixtures("float64")
def test_one_matrix_equals_a_batch_of_one_and_vmap():
    A = positive(1, 3, (7,))
    together = linalg.cholesky(A)
    for index in range(7):
        np.testing.assert_array_equal(together[..., index], linalg.cholesky(A[..., index]))
    np.testing.assert_allclose(jax.vmap(linalg.cholesky, -1, -1)(A), together, rtol=1e-14)


def test_nearly_singular_covariance_is_safe_in_float32():
    """Positive definite in exact arithmetic, with pivots far below the resolution of float32."""
    direction = jnp.asarray([1.0, 1.0, 1.0])[:, None]
    A = jnp.outer(direction, direction)[:, :, None] + 1e-12 * linalg.identity(3, jnp.zeros((3, 3, 1)))
    L = linalg.cholesky(A)
    assert bool(jnp.isfinite(L).all())
    np.testing.assert_allclose(linalg.matmul(L, linalg.transpose(L)), A, atol=1e-6)
    gradient = jax.grad(lambda A: linalg.log_determinant(linalg.cholesky(A)).sum())(A)
    assert bool(jnp.isfinite(gradient).all())


@pytest.mark.usefixtures("float64")
def test_log_determinant():
    A = positive(4, 4, (3,))
    expected = jnp.linalg.slogdet(last(A))[1]
    np.testing.assert_allclose(linalg.log_determinant(linalg.cholesky(A)), expected, rtol=1e-12)
