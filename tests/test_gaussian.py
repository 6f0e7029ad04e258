"""Densities, entropies, divergences and samples against numpyro and Monte Carlo."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

from deepssm import linalg
from deepssm.gaussian import Diagonal, Gaussian, kl

pytestmark = pytest.mark.usefixtures("float64")


def full(key: int, n: int, batch: int) -> Gaussian:
    m_key, P_key = jax.random.split(jax.random.key(key))
    A = jax.random.normal(P_key, (n, n, batch))
    P = jnp.einsum("ikb,jkb->ijb", A, A) + 0.3 * jnp.eye(n)[:, :, None]
    return Gaussian(jax.random.normal(m_key, (n, batch)), P)


def diagonal(key: int, n: int, batch: int) -> Diagonal:
    m_key, v_key = jax.random.split(jax.random.key(key))
    return Diagonal(jax.random.normal(m_key, (n, batch)), jnp.exp(jax.random.normal(v_key, (n, batch))))


def oracle(p: Gaussian | Diagonal) -> dist.MultivariateNormal:
    P = p.P if isinstance(p, Gaussian) else linalg.diagonal(p.v)
    return dist.MultivariateNormal(p.m.T, covariance_matrix=jnp.moveaxis(P, -1, 0))


@pytest.mark.parametrize("make", [full, diagonal])
def test_log_prob_and_entropy(make):
    p, x = make(1, 3, 5), jax.random.normal(jax.random.key(7), (3, 5))
    np.testing.assert_allclose(p.log_prob(x), oracle(p).log_prob(x.T), rtol=1e-10)
    np.testing.assert_allclose(p.entropy(), oracle(p).entropy(), rtol=1e-10)


@pytest.mark.parametrize("make_p", [full, diagonal])
@pytest.mark.parametrize("make_q", [full, diagonal])
def test_kl(make_q, make_p):
    q, p = make_q(1, 3, 5), make_p(2, 3, 5)
    np.testing.assert_allclose(kl(q, p), dist.kl_divergence(oracle(q), oracle(p)), rtol=1e-9)
    np.testing.assert_allclose(kl(q, q), 0.0, atol=1e-10)
    assert bool((kl(q, p) > 0).all())


@pytest.mark.parametrize("make", [full, diagonal])
def test_samples_have_the_moments(make):
    p = make(3, 3, 1)
    wide = jax.tree.map(lambda array: jnp.broadcast_to(array, (*array.shape[:-1], 200_000)), p)
    draws = wide.sample(jax.random.key(0))
    P = p.P if isinstance(p, Gaussian) else linalg.diagonal(p.v)
    np.testing.assert_allclose(draws.mean(1), p.m[:, 0], atol=0.02)
    np.testing.assert_allclose(jnp.cov(draws), P[:, :, 0], atol=0.06)
