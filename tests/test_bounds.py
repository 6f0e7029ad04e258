"""Every model's bound: against its own densities by sampling, and against an exact log-likelihood."""

from functools import cache
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import multivariate_normal, norm

from deepssm.data.sequences import Sequences
from deepssm.models.stepwise import Stepwise
from deepssm.objectives import Constrained
from deepssm.program import TrainingConfig
from deepssm.training import fit
from oracles import System
from test_every_model import SMALL

T = 4


def log_normal(g: Any, value: jax.Array) -> np.ndarray:
    """log N(value; m, v), summed over components."""
    return norm(np.asarray(g.m), np.sqrt(np.asarray(g.v))).logpdf(np.asarray(value)).sum(0)


def sampled_prior(prior: Any, z: jax.Array, key: jax.Array) -> np.ndarray:
    """One draw of a lower bound on log p(z)."""
    if not hasattr(prior, "q"):
        return norm.logpdf(np.asarray(z)).sum(0)
    q = prior.q(z)
    zeta = q.sample(key)
    return log_normal(prior.p(zeta), z) + norm.logpdf(np.asarray(zeta)).sum(0) - log_normal(q, zeta)


def walked(model: Stepwise, x: jax.Array, u: jax.Array, seen: jax.Array) -> dict[str, np.ndarray]:
    """Distortion and rate of a sequence, once for each copy of it, step by step with nothing in closed form."""
    copies = len(x)
    keys = iter(jax.random.split(jax.random.key(7), 3 * T))
    features, informed = model.reader(x, jnp.transpose(u, (2, 1, 0)), seen.T)
    features = model.digest(features)
    q = model.first(features[:, 0])
    if model.config.prior == "network":
        zeta = q.sample(next(keys))
        z, prior = model.prior.f(zeta), log_normal(q, zeta) - norm.logpdf(np.asarray(zeta)).sum(0)
    else:
        z = q.sample(next(keys))
        prior = log_normal(q, z) - sampled_prior(model.prior, z, next(keys))
    memory = jnp.zeros((model.memory_size, copies))
    transition, distortion = np.zeros(copies), np.zeros(copies)
    for t in range(T):
        if t:
            p, memory = model.predict(z, u[:, t - 1].T, memory)
            q = model.correct(z, u[:, t - 1].T, memory, p, features[:, t]) if informed[t, 0] else p
            z = q.sample(next(keys))
            transition += log_normal(q, z) - log_normal(p, z)
        if seen[0, t]:
            picture = np.asarray(model.decode(z.T))
            distortion -= norm(picture, model.config.sigma).logpdf(np.asarray(x[:, t])).sum((1, 2))
    return {"prior": prior, "transition": transition, "distortion": distortion}


def agree(ours: jax.Array, theirs: np.ndarray, what: str) -> None:
    error = np.hypot(float(ours.std()), theirs.std()) / np.sqrt(len(theirs)) + 1e-6 * abs(theirs.mean())
    assert abs(float(ours.mean()) - theirs.mean()) < 4 * error, what


@pytest.mark.parametrize("posterior", ["smoother", "filter"])
@pytest.mark.parametrize("name", ["dks", "dvbs", "rssm"])
def test_terms_of_stepwise_models_agree_with_monte_carlo(name, posterior):
    priors = ("vhp", "gaussian", "network") if name == "dvbs" else ("vhp", "gaussian")
    for prior in priors:
        model = SMALL[name](posterior=posterior, prior=prior, sigma=0.3).build((8, 8), 1, jax.random.key(0))
        x = jnp.repeat(jax.random.uniform(jax.random.key(1), (1, T, 8, 8)), 2000, axis=0)
        u = jnp.repeat(jax.random.normal(jax.random.key(2), (1, T, 1)), 2000, axis=0)
        seen = jnp.ones((2000, T), bool).at[:, 1].set(False)
        ours = eqx.filter_jit(lambda model, *data: model.terms(*data))(model, x, u, seen, jax.random.key(3))
        theirs = walked(model, x, u, seen)
        agree(ours.distortion, theirs["distortion"], f"distortion, {prior}")
        for part in ("prior", "transition"):
            agree(ours.parts[part], theirs[part], f"{part}, {prior}")


@pytest.mark.parametrize("prior", ["vhp", "gaussian"])
def test_rate_of_the_kvae_agrees_with_monte_carlo(prior):
    """E[log q(a|x) - log p(a|z) - log p(z) + log q(z|a)] with z drawn from the dense joint posterior."""
    model = SMALL["kvae"](prior=prior, log_noise=-1.0).build((8, 8), 1, jax.random.key(0))
    x, u = jax.random.uniform(jax.random.key(1), (1, T, 8, 8)), jax.random.normal(jax.random.key(2), (1, T, 1))
    seen = np.array([True, False, True, True])
    generator, theirs = np.random.default_rng(0), []
    q_a = jax.tree.map(lambda part: part[..., 0], model.encode(x))
    H, R, start = (np.asarray(part) for part in (model.H, model.R, model.start_m))
    P = np.asarray(model.z_start.P)
    prepare = eqx.filter_jit(
        lambda a: model.transition(
            jnp.zeros((3, T)), model.inputs(u[0].T, model.memories(a[..., None], jnp.asarray(seen)[:, None])[..., 0])
        )
    )
    for draw in range(400):
        a = np.asarray(q_a.m) + np.sqrt(np.asarray(q_a.v)) * generator.normal(size=q_a.m.shape)
        F, b, Q = (np.moveaxis(np.asarray(part, float), -1, 0) for part in prepare(jnp.asarray(a, jnp.float32)))
        system = System(start, P, F, b, Q, H, R)
        mean, cov = system.joint
        rows = np.repeat(seen, 2)
        big_H, big_R = np.kron(np.eye(T), H)[rows], np.kron(np.eye(T), R)[np.ix_(rows, rows)]
        K = np.linalg.solve(big_H @ cov @ big_H.T + big_R, big_H @ cov).T
        m, C = mean + K @ (a.T.reshape(-1)[rows] - big_H @ mean), cov - K @ big_H @ cov
        z = generator.multivariate_normal(m, C)
        states = z.reshape(T, 3)
        log_q = multivariate_normal(m, C, allow_singular=True).logpdf(z)
        log_a = sum(multivariate_normal(H @ states[t], R).logpdf(a[:, t]) for t in range(T) if seen[t])
        moved = [multivariate_normal(F[t] @ states[t] + b[t], Q[t]).logpdf(states[t + 1]) for t in range(T - 1)]
        first = jnp.asarray(states[0], jnp.float32)
        log_first = sampled_prior(model.prior, first[:, None], jax.random.key(draw))[0]
        log_encoder = norm(np.asarray(q_a.m), np.sqrt(np.asarray(q_a.v))).logpdf(a).sum(0)[seen].sum()
        theirs.append(log_encoder - log_a - sum(moved) - log_first + log_q)
    many = jax.random.split(jax.random.key(5), 2000)
    rates = jax.jit(jax.vmap(lambda key: model.terms(x, u, jnp.asarray(seen)[None], key).rate[0]))(many)
    error = np.hypot(float(rates.std()) / np.sqrt(2000), np.std(theirs) / np.sqrt(len(theirs)))
    assert abs(float(rates.mean()) - np.mean(theirs)) < 4 * error


FRAMES, SIGMA = 8, 0.05
F, B = np.array([[0.95, 0.25], [-0.25, 0.95]]), np.array([[0.0], [0.3]])
C = np.random.default_rng(0).normal(size=(16, 2))


def linear_data(count: int, seed: int) -> Sequences:
    """Sequences of a linear Gaussian system seen through 16 sensors."""
    generator = np.random.default_rng(seed)
    u = generator.normal(size=(count, FRAMES, 1))
    z, states = generator.normal(size=(count, 2)), []
    for t in range(FRAMES):
        states.append(z)
        z = z @ F.T + u[:, t] @ B.T + 0.1 * generator.normal(size=z.shape)
    x = np.stack(states, 1) @ C.T + SIGMA * generator.normal(size=(count, FRAMES, 16))
    return Sequences(x.astype(np.float32), u.astype(np.float32), np.ones((count, FRAMES), bool), None)


@cache
def exact_likelihood() -> float:
    """Mean log-likelihood of the test sequences, in nats per frame."""
    test = linear_data(500, 2)
    F_all, Q_all = (np.repeat(matrix[None], FRAMES, 0) for matrix in (F, 0.01 * np.eye(2)))
    likelihoods = [
        System(np.zeros(2), np.eye(2), F_all, u @ B.T, Q_all, C, SIGMA**2 * np.eye(16)).condition(x, seen)[2]
        for x, u, seen in zip(*test[:3], strict=True)
    ]
    return float(np.mean(likelihoods)) / FRAMES


@pytest.mark.parametrize("name", SMALL)
def test_bounds_on_a_linear_system_stay_below_the_exact_likelihood(name):
    train, test, exact = linear_data(2000, 1), linear_data(500, 2), exact_likelihood()
    tight = name in ("ekvae", "kvae")
    options: dict[str, Any] = {"states": 2, "sigma": SIGMA, "prior": "gaussian", "decoder": ()}
    options |= {"encoder": ()} if tight else {"reader": 32, "recognition": (32,)}
    rates = {"learning_rate": 3e-2, "dynamics_rate": 2e-2} if tight else {"learning_rate": 3e-3, "dynamics_rate": 3e-3}
    training = TrainingConfig(steps=4000 if tight else 500, batch=100, weight_decay=0.0, chunk=1000, **rates)
    model = fit(SMALL[name](**options), Constrained(-20.0, bound=0.02), training, train).models[0]
    arguments = (jnp.asarray(part) for part in test[:3])
    terms = eqx.filter_jit(lambda model, *data: model.terms(*data))(model, *arguments, jax.random.key(0))
    elbo = -float((terms.distortion + terms.rate).mean()) / FRAMES
    assert elbo < exact
    if tight:
        assert elbo > exact - 0.01 * abs(exact)
