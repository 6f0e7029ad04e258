"""Filter, smoother and log-likelihood against the dense joint Gaussian."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepssm import kalman
from deepssm.gaussian import Gaussian
from oracles import System, random_system

T, SEQUENCES = 6, 4


def systems(seed: int) -> list[System]:
    generator = np.random.default_rng(seed)
    one = random_system(generator, T)
    return [random_system(generator, T)._replace(m=one.m, P=one.P, H=one.H, R=one.R) for _ in range(SEQUENCES)]


def masks(pattern: str) -> np.ndarray:
    seen = np.ones((SEQUENCES, T), bool)
    if pattern == "gaps":
        seen = np.random.default_rng(1).random((SEQUENCES, T)) > 0.4
    if pattern == "first and last":
        seen[:, 0] = seen[:, -1] = False
    if pattern == "nothing":
        seen[:] = False
    return seen


def run(batch: list[System], a: np.ndarray, seen: np.ndarray) -> tuple[kalman.Forward, Gaussian, jax.Array]:
    """All systems at once; the control carries the time, by which the transition looks its matrices up."""
    F, b, Q = (jnp.stack([jnp.asarray(getattr(s, name)) for s in batch]) for name in ("F", "b", "Q"))

    def transition(z, u):
        t = u[0].astype(int)
        chosen = (array[jnp.arange(len(batch)), t] for array in (F, b, Q))
        return tuple(jnp.moveaxis(array, 0, -1) for array in chosen)

    one = batch[0]
    time = jnp.broadcast_to(jnp.arange(T, dtype=float)[None, :, None], (1, T, len(batch)))
    start = Gaussian(jnp.asarray(one.m), jnp.asarray(one.P))
    H, R = jnp.asarray(one.H), jnp.asarray(one.R)

    @jax.jit
    def whole(a, seen):
        forward = kalman.filter(start, a, time, seen, transition, H, R)
        return forward, kalman.smooth(forward), kalman.log_likelihood(forward, a, seen, H, R)

    return whole(jnp.transpose(jnp.asarray(a), (2, 1, 0)), jnp.asarray(seen.T))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("pattern", ["everything", "gaps", "first and last", "nothing"])
def test_agrees_with_the_dense_joint_gaussian(pattern):
    batch, seen = systems(0), masks(pattern)
    a = np.random.default_rng(2).normal(size=(SEQUENCES, T, 2))
    forward, smoothed, likelihood = run(batch, a, seen)
    for index, system in enumerate(batch):
        m, P, expected = system.condition(a[index], seen[index])
        np.testing.assert_allclose(smoothed.m[..., index].T, m, atol=1e-10)
        np.testing.assert_allclose(jnp.moveaxis(smoothed.P[..., index], 2, 0), P, atol=1e-10)
        np.testing.assert_allclose(likelihood[index], expected, atol=1e-10)
        for t in range(T):
            until = seen[index] & (np.arange(T) <= t)
            m, P, _ = system.condition(a[index], until)
            np.testing.assert_allclose(forward.filtered.m[:, t, index], m[t], atol=1e-10)
            np.testing.assert_allclose(forward.filtered.P[:, :, t, index], P[t], atol=1e-10)
            before = seen[index] & (np.arange(T) < t)
            m, P, _ = system.condition(a[index], before)
            np.testing.assert_allclose(forward.predicted.m[:, t, index], m[t], atol=1e-10)
            np.testing.assert_allclose(forward.predicted.P[:, :, t, index], P[t], atol=1e-10)


@pytest.mark.usefixtures("float64")
def test_one_sequence_without_batch_axis_equals_the_batch():
    batch = systems(3)
    a = np.random.default_rng(4).normal(size=(SEQUENCES, T, 2))
    _, smoothed, likelihood = run(batch, a, masks("gaps"))
    _, one, alone = run(batch[1:2], a[1:2], masks("gaps")[1:2])
    np.testing.assert_allclose(one.m[..., 0], smoothed.m[..., 1], atol=1e-13)
    np.testing.assert_allclose(alone[0], likelihood[1], atol=1e-12)

    system = batch[1]
    transition = lambda z, u: tuple(jnp.asarray(m)[u[0].astype(int)] for m in (system.F, system.b, system.Q))  # noqa: E731
    forward = kalman.filter(
        Gaussian(jnp.asarray(system.m), jnp.asarray(system.P)),
        jnp.asarray(a[1].T), jnp.arange(T, dtype=float)[None], jnp.asarray(masks("gaps")[1]),
        transition, jnp.asarray(system.H), jnp.asarray(system.R),
    )  # fmt: skip
    np.testing.assert_allclose(kalman.smooth(forward).m, smoothed.m[..., 1], atol=1e-13)


@pytest.mark.usefixtures("float64")
def test_unseen_values_do_not_matter_even_if_nan():
    batch, seen = systems(5), masks("gaps")
    a = np.random.default_rng(6).normal(size=(SEQUENCES, T, 2))
    hidden = np.where(seen[..., None], a, np.nan)
    for one, two in zip(jax.tree.leaves(run(batch, a, seen)), jax.tree.leaves(run(batch, hidden, seen)), strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.usefixtures("float64")
def test_extended_filter_on_a_linear_model_is_the_kalman_filter():
    """Where F, b and Q do not depend on the state, it does not matter where they are evaluated."""
    system = random_system(np.random.default_rng(7), T)
    F, b, Q = (jnp.asarray(part[0])[..., None] for part in (system.F, system.b, system.Q))
    constant = System(*system[:2], *(np.repeat(part[:1], T, 0) for part in system[2:5]), *system[5:])
    a = np.random.default_rng(8).normal(size=(T, 2))
    arguments = (
        Gaussian(jnp.asarray(system.m), jnp.asarray(system.P)),
        jnp.asarray(a.T)[..., None], jnp.zeros((0, T, 1)), jnp.ones((T, 1), bool),
        lambda z, u: (F, b, Q), jnp.asarray(system.H), jnp.asarray(system.R),
    )  # fmt: skip
    plain = kalman.smooth(kalman.filter(*arguments))
    again = kalman.smooth(kalman.filter(*arguments, reference=plain.m + 1.0))
    m, P, _ = constant.condition(a, np.ones(T, bool))
    for smoothed in (plain, again):
        np.testing.assert_allclose(smoothed.m[..., 0].T, m, atol=1e-10)
        np.testing.assert_allclose(jnp.moveaxis(smoothed.P[..., 0], 2, 0), P, atol=1e-10)


@pytest.mark.usefixtures("float64")
def test_relinearisation_is_better_on_a_nonlinear_system():
    """A rotation whose speed is a hidden state: at the first frame the filter cannot know where to linearise."""
    T, speed, dt = 12, 1.5, 0.2
    angle = speed * dt * np.arange(T)
    truth = np.stack([np.cos(angle), np.sin(angle), np.full(T, speed)])

    def transition(z, u):
        x, y, w = z
        one, zero = jnp.ones_like(x), jnp.zeros_like(x)
        F = jnp.stack([jnp.stack([one, zero, -dt * y]), jnp.stack([zero, one, dt * x]), jnp.stack([zero, zero, one])])
        exact = jnp.stack([x * jnp.cos(w * dt) - y * jnp.sin(w * dt), x * jnp.sin(w * dt) + y * jnp.cos(w * dt), w])
        b = exact - jnp.einsum("ij...,j...->i...", F, z)
        return F, b, 1e-6 * jnp.eye(3).reshape(3, 3, *(1,) * x.ndim) * one

    start = Gaussian(jnp.zeros(3), jnp.diag(jnp.asarray([1.0, 1.0, 9.0])))
    a = jnp.asarray(truth[:2])[..., None]
    arguments = (start, a, jnp.zeros((0, T, 1)), jnp.ones((T, 1), bool), transition, jnp.eye(2, 3), 1e-6 * jnp.eye(2))
    plain = kalman.smooth(kalman.filter(*arguments))
    iterated = plain
    for _ in range(3):
        iterated = kalman.smooth(kalman.filter(*arguments, reference=iterated.m))
    errors = [float(abs(z.m[2, 0, 0] - speed)) for z in (plain, iterated)]
    assert errors[1] < 0.5 * errors[0], errors


def test_float32_stays_positive_definite_over_long_precise_sequences():
    """Tiny noise against a wide start, two thousand steps: covariances stay positive, gradients finite."""
    steps, n = 2000, 3
    F = jnp.asarray([[1.0, 0.0, 0.1], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])[..., None]
    Q, R = 1e-9 * jnp.eye(n)[..., None], 1e-8 * jnp.eye(2)
    a = jnp.sin(jnp.linspace(0, 20, steps))[None, :, None] * jnp.ones((2, 1, 1))

    def whole(log_R):
        forward = kalman.filter(
            Gaussian(jnp.zeros(n), 10 * jnp.eye(n)), a, jnp.zeros((0, steps, 1)), jnp.ones((steps, 1), bool),
            lambda z, u: (F, jnp.zeros((n, 1)), Q), jnp.eye(2, n), R * jnp.exp(log_R),
        )  # fmt: skip
        smoothed = kalman.smooth(forward)
        return smoothed.m.sum() + jnp.log(jnp.stack([smoothed.P[i, i] for i in range(n)])).sum(), smoothed

    (value, smoothed), gradient = jax.value_and_grad(whole, has_aux=True)(0.0)
    assert np.isfinite(value)
    assert np.isfinite(gradient)
    eigenvalues = np.linalg.eigvalsh(np.moveaxis(np.asarray(smoothed.P[..., 0], np.float64), 2, 0))
    assert eigenvalues.min() > -1e-12
