"""Lambda behaves as Alg. 1 says; schedules and baselines are what they claim."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepssm.objectives import Annealed, Constrained, Elbo, Multiplier, Schedule, distortion_baseline, f_lambda

BASELINES = [-730.0, 25.0]


def multiplier(D_0: float, lam: float, distortion: float) -> Multiplier:
    return Multiplier(*(jnp.asarray(value) for value in (lam, distortion, False, True, D_0)))


def run(objective: Constrained, state: Multiplier, distortion: float, steps: int) -> list[float]:
    lams = []
    for _ in range(steps):
        state = objective.update(state, jnp.asarray(distortion))
        lams.append(float(state.lam))
    return lams


@pytest.mark.parametrize("D_0", BASELINES)
@pytest.mark.parametrize("start", [1e-3, 1.0, 7.0])
def test_violated_constraint_lets_lambda_grow(D_0, start):
    lams = run(Constrained(D_0), multiplier(D_0, start, D_0 + 50), D_0 + 50, 40)
    assert np.all(np.diff([start, *lams]) > 0)


@pytest.mark.parametrize("D_0", BASELINES)
@pytest.mark.parametrize("start", [1e-3, 0.5, 0.995])
def test_met_constraint_brings_lambda_to_one_from_below(D_0, start):
    lams = run(Constrained(D_0), multiplier(D_0, start, D_0 - 50), D_0 - 50, 900)
    assert np.all(np.diff([start, *lams]) >= 0)
    assert max(lams) <= 1.0
    assert lams[-1] == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("D_0", BASELINES)
@pytest.mark.parametrize("start", [20.0, 1.5, 1.005])
def test_met_constraint_brings_lambda_to_one_from_above(D_0, start):
    lams = run(Constrained(D_0), multiplier(D_0, start, D_0 - 50), D_0 - 50, 900)
    assert np.all(np.diff([start, *lams]) <= 0)
    assert min(lams) >= 1.0
    assert lams[-1] == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("delta", [0.3, -0.3])
@pytest.mark.parametrize("lam", [0.2, 3.0])
def test_unbounded_step_is_the_printed_formula(lam, delta):
    objective = Constrained(-730.0, nu=2.0, tau_1=1.5, tau_2=0.3, average=0.0, bound=100.0)
    (ours,) = run(objective, multiplier(-730.0, lam, -730.0), -730.0 + delta, 1)
    heaviside = float(delta > 0)
    f = (1 - heaviside) * np.tanh(1.5 * (1 / lam - 1)) - 0.3 * heaviside
    assert float(f_lambda(jnp.asarray(lam), jnp.asarray(delta), 1.5, 0.3)) == pytest.approx(f, rel=1e-6)
    assert ours == pytest.approx(lam * np.exp(-2.0 * f * delta), rel=1e-4)


def test_no_step_is_larger_than_its_bound():
    objective = Constrained(-730.0, bound=0.01)
    for start, distortion in [(1e-3, 1e5), (1e-3, -1e5), (50.0, -1e5)]:
        (lam,) = run(objective, multiplier(-730.0, start, distortion), distortion, 1)
        assert abs(np.log(lam / start)) <= 0.01 + 1e-5


@pytest.mark.parametrize("D_0", BASELINES)
def test_phase_switches_once_and_for_good(D_0):
    objective = Constrained(D_0, average=0.0)
    state = objective.init()
    trainable = []
    for distortion in [D_0 + 9, D_0 + 1, D_0 - 1, D_0 + 9, D_0 + 99]:
        state = objective.update(state, jnp.asarray(distortion))
        trainable.append(bool(objective.trainable(state)))
    assert trainable == [False, False, True, True, True]


def test_moving_average_begins_with_the_first_batch():
    objective = Constrained(-730.0, average=0.9)
    state = objective.update(objective.init(), jnp.asarray(100.0))
    assert float(state.distortion) == 100.0
    state = objective.update(state, jnp.asarray(0.0))
    assert float(state.distortion) == pytest.approx(90.0)


def test_lagrangian_and_its_weights():
    objective = Constrained(-730.0)
    D, R, state = jnp.asarray(-700.0), jnp.asarray(5.0), multiplier(-730.0, 0.25, -700.0)
    assert float(objective.loss(D, R, state)) == pytest.approx(5 + 0.25 * 30)
    assert jax.grad(objective.loss, (0, 1))(D, R, state) == (0.25, 1.0)
    assert float(Elbo().loss(D, R, ())) == -695.0


@pytest.mark.parametrize("schedule", ["linear", "cosine", "cyclic"])
def test_schedules_go_from_zero_to_one(schedule):
    objective = Annealed(100, schedule)
    betas = np.array([float(objective.beta(Schedule(jnp.asarray(step), jnp.asarray(100)))) for step in range(151)])
    assert betas[0] == 0
    assert np.all((betas >= 0) & (betas <= 1))
    assert np.all(betas[100:] == 1)
    if schedule == "cyclic":
        assert [betas[step] for step in (0, 25, 50, 75)] == [0, 0, 0, 0]
        assert [betas[step] for step in (13, 38, 63, 88)] == [1, 1, 1, 1]
    else:
        assert np.all(np.diff(betas) >= 0)
        assert betas[50] == pytest.approx(0.5, abs=1e-6)
    state = objective.update(objective.init(), jnp.asarray(0.0))
    assert float(objective.loss(jnp.asarray(2.0), jnp.asarray(3.0), state)) == pytest.approx(2 + 3 * betas[1])


def test_baseline_is_looser_than_the_best_whatever_its_sign():
    assert distortion_baseline(-811.0) == pytest.approx(0.9 * -811.0)
    assert distortion_baseline(40.0) == pytest.approx(44.0)
