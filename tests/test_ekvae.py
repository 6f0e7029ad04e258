"""The extended Kalman VAE against the equations of the paper."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import multivariate_normal, norm

import tiny
from deepssm.models.ekvae import EKVAE
from oracles import System

N, T = 5, 4


def data(seed: int = 0, n: int = N, frames: int = T) -> tuple[jax.Array, jax.Array, jax.Array]:
    x_key, u_key = jax.random.split(jax.random.key(seed))
    x = jax.random.uniform(x_key, (n, frames, 8, 8))
    return x, jax.random.normal(u_key, (n, frames, 1)), jnp.ones((n, frames), bool)


class Asked(NamedTuple):
    """The networks of a model, compiled."""

    model: EKVAE
    encode: Callable
    transition: Callable
    prior_q: Callable
    prior_p: Callable

    @classmethod
    def of(cls, model: EKVAE) -> "Asked":
        parts = [lambda x: model.encode(x[None]), lambda z, u: model.transition(z, u)]
        prior = [lambda z: model.prior.q(z), lambda zeta: model.prior.p(zeta)]
        return cls(model, *(jax.jit(part) for part in parts + prior))


def compiled(method: Callable) -> Callable:
    return jax.jit(lambda *arguments: method(*arguments))


def linearise(asked: Asked, a: np.ndarray, u: np.ndarray, seen: np.ndarray) -> System:
    """The extended filter, step by step in NumPy: the affine system it ends up with."""
    model = asked.model
    H, R = np.asarray(model.H), np.asarray(model.R)
    m, P = (np.asarray(part) for part in model.z_start)
    start, matrices = (m, P), []
    for a_t, u_t, seen_t in zip(a, u, seen, strict=True):
        if seen_t:
            K = P @ H.T @ np.linalg.inv(H @ P @ H.T + R)
            m, P = m + K @ (a_t - H @ m), P - K @ H @ P
        F, b, Q = (np.asarray(part) for part in asked.transition(m, u_t))
        matrices.append((F, b, Q))
        m, P = F @ m + b, F @ P @ F.T + Q
    return System(*start, *(np.stack(part) for part in zip(*matrices, strict=True)), H, R)


def sampled_rate(asked: Asked, x, u, seen, generator: np.random.Generator) -> dict[str, float]:
    """One draw of every summand of Eq. (seq-vhp-ekvae_rate) for one sequence, nothing in closed form."""
    model, q = asked.model, asked.encode(x)
    mean, spread = np.asarray(q.m[..., 0]).T, np.sqrt(np.asarray(q.v[..., 0])).T
    a = mean + spread * generator.normal(size=mean.shape)
    u, seen = np.asarray(u), np.asarray(seen)
    system = linearise(asked, a, u, seen)
    filtered = [system.condition(a, seen & (np.arange(T) <= t)) for t in range(T)]
    m_f, P_f = np.stack([f[0][t] for t, f in enumerate(filtered)]), np.stack([f[1][t] for t, f in enumerate(filtered)])
    m_s, P_s = system.condition(a, seen)[:2] if model.config.posterior == "smoother" else (m_f, P_f)
    z = np.stack([generator.multivariate_normal(m, P) for m, P in zip(m_s, P_s, strict=True)])
    log_q_a = norm(mean, spread).logpdf(a).sum(1)
    H, R = np.asarray(model.H), np.asarray(model.R)

    parts = {"emission": 0.0, "transition": 0.0, "smoothing": 0.0}
    if seen[0]:
        parts["emission"] = log_q_a[0] - multivariate_normal(H @ z[0], R).logpdf(a[0])
    log_s = multivariate_normal(m_s[0], P_s[0]).logpdf(z[0])
    if model.config.prior == "gaussian":
        parts["prior"] = log_s - norm.logpdf(z[0]).sum()
    else:
        q_zeta = asked.prior_q(z[0])
        zeta = np.asarray(q_zeta.m) + np.sqrt(np.asarray(q_zeta.v)) * generator.normal(size=len(z[0]))
        p_z = asked.prior_p(zeta)
        log_p_z = norm(p_z.m, np.sqrt(p_z.v)).logpdf(z[0]).sum()
        log_q_zeta = norm(q_zeta.m, np.sqrt(q_zeta.v)).logpdf(zeta).sum()
        parts["prior"] = log_s - (log_p_z + norm.logpdf(zeta).sum() - log_q_zeta)
    for t in range(1, T):
        if seen[t]:
            F, b, Q = (np.asarray(part) for part in asked.transition(z[t - 1], u[t - 1]))
            p_a = multivariate_normal(H @ (F @ z[t - 1] + b), H @ Q @ H.T + R)
            parts["transition"] += log_q_a[t] - p_a.logpdf(a[t])
            ratio = [multivariate_normal(m[t - 1], P[t - 1]).logpdf(z[t - 1]) for m, P in ((m_s, P_s), (m_f, P_f))]
            parts["smoothing"] += ratio[0] - ratio[1]
    return parts


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("seen", [[1, 1, 1, 1], [0, 1, 0, 1]])
@pytest.mark.parametrize("prior", ["vhp", "gaussian"])
@pytest.mark.parametrize("posterior", ["smoother", "filter"])
def test_every_term_of_the_rate_agrees_with_monte_carlo(posterior, prior, seen):
    emission = "learned" if prior == "vhp" else "disentangled"
    model = tiny.model(3, prior=prior, posterior=posterior, emission=emission, log_noise=-1.0)
    x, u, _ = data(n=1)
    mask = jnp.asarray([seen], bool)
    draws = 300
    generator = np.random.default_rng(0)
    asked = Asked.of(model)
    sampled = [sampled_rate(asked, x[0], u[0], mask[0], generator) for _ in range(draws)]
    ours = jax.jit(jax.vmap(lambda key: model.terms(x, u, mask, key).parts))(jax.random.split(jax.random.key(1), 4000))
    assert set(ours) == {"emission", "prior", "transition"} | ({"smoothing"} if posterior == "smoother" else set())
    for name in ours:
        theirs = np.array([draw[name] for draw in sampled])
        error = np.hypot(theirs.std() / np.sqrt(draws), float(ours[name].std()) / np.sqrt(4000)) + 1e-9
        assert abs(theirs.mean() - float(ours[name].mean())) < 4 * error, name


@pytest.mark.usefixtures("float64")
def test_distortion_is_the_decoders_log_likelihood():
    model = tiny.model(0)
    x, u, seen = data()
    terms = compiled(model.terms)(x, u, seen, jax.random.key(2))
    a = model.encode(x).sample(jax.random.split(jax.random.key(2))[0])
    pictures = model.decode(jnp.concatenate([jnp.transpose(a, (2, 1, 0)), jnp.zeros((N, T, 1))], axis=-1))
    expected = -norm(np.asarray(pictures), model.config.sigma).logpdf(np.asarray(x)).sum((1, 2, 3))
    np.testing.assert_allclose(terms.distortion, expected, rtol=1e-10)
    np.testing.assert_allclose(terms.rate, sum(terms.parts.values()), rtol=1e-12)


def test_a_picture_shows_the_observed_dimensions_alone():
    model = tiny.model(0)
    z = jax.random.normal(jax.random.key(0), (N, T, 3))
    np.testing.assert_array_equal(model.H, np.eye(2, 3))
    np.testing.assert_array_equal(model.decode(z), model.decode(z.at[..., 2].add(3.0)))
    assert not np.allclose(model.decode(z), model.decode(z.at[..., 1].add(3.0)))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("gaps", [False, True])
def test_step_by_step_equals_the_filter(gaps):
    model = tiny.model(1)
    x, u, seen = data(frames=9)
    if gaps:
        seen = jax.random.uniform(jax.random.key(5), seen.shape) > 0.4
    whole = compiled(model.filter)(x, u, seen)
    belief, step = model.start(), compiled(model.step)
    for t in range(9):
        belief = step(belief, x[0, t], u[0, max(t - 1, 0)], seen[0, t])
        np.testing.assert_allclose(belief.z.m, whole.mean[0, t], atol=1e-12)
        np.testing.assert_allclose(belief.z.P, whole.covariance[0, t], atol=1e-12)


@pytest.mark.usefixtures("float64")
def test_unseen_frames_at_the_end_cost_nothing():
    """Padding a sequence changes none of the deterministic parts of its bound."""
    model = tiny.model(1, prior="gaussian", posterior="smoother")
    x, u, seen = data()
    padded = [jnp.concatenate([part, jnp.zeros((N, 3, *part.shape[2:]), part.dtype)], axis=1) for part in (x, u, seen)]
    smooth = compiled(model.smooth)
    short, long = smooth(x, u, seen), smooth(*padded)
    np.testing.assert_allclose(short.mean, long.mean[:, :T], atol=1e-12)
    np.testing.assert_allclose(short.covariance, long.covariance[:, :T], atol=1e-12)


@pytest.mark.usefixtures("float64")
def test_rollout_follows_the_mean_or_samples_it():
    model = tiny.model(2, log_noise=-2.0)
    _, u, _ = data()
    z = jax.random.normal(jax.random.key(3), (N, 3))
    path = model.rollout(z, u)
    F, b, Q = model.transition(z.T, u[:, 0].T)
    np.testing.assert_allclose(path[:, 0].T, jnp.einsum("ijn,jn->in", F, z.T) + b, atol=1e-12)
    draws = jax.vmap(lambda key: model.rollout(z, u, key)[:, 0])(jax.random.split(jax.random.key(4), 20_000))
    np.testing.assert_allclose(draws.mean(0), path[:, 0], atol=0.02)
    np.testing.assert_allclose(draws.var(0), jnp.einsum("iin->ni", Q), rtol=0.1)
