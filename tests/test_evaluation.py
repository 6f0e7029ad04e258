"""What is measured is what is meant."""

import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from deepssm import evaluation
from deepssm.data.sequences import About, Variable
from deepssm.evaluation import evaluate, identification, r_squared

DATASET = tiny.DATA.generate()


def test_r_squared_is_the_regressions():
    generator = np.random.default_rng(0)
    z = generator.normal(size=(4000, 3))
    target = z @ [1.0, -2.0, 0.5] + 3 + generator.normal(size=4000)
    assert r_squared(z, target) == pytest.approx(5.25 / 6.25, abs=0.02)
    assert r_squared(z, z[:, 0] * 7 - 2) == pytest.approx(1.0)
    assert r_squared(z, generator.normal(size=4000)) == pytest.approx(0.0, abs=0.01)
    assert np.isnan(r_squared(np.full((5, 2), np.nan), np.arange(5.0)))


def test_circular_variables_count_as_sine_and_cosine():
    angle = np.random.default_rng(0).uniform(-9, 9, (50, 8))
    truth = np.stack([angle, 2 * angle], axis=-1)
    about = About("x", 0.1, (Variable("angle", "rad", circular=True), Variable("velocity", "rad/s")))
    circle = np.stack([np.cos(angle), np.sin(angle)], axis=-1)
    found = identification(circle, truth, about)
    assert found["angle"] == pytest.approx(1.0)
    assert found["velocity"] < 0.2
    assert identification(circle[..., :1], truth, about)["angle"] == pytest.approx(0.5, abs=0.02)


def test_prediction_errors_frame_by_frame():
    model, test = tiny.model(1), DATASET.test
    results = evaluate(model, test, DATASET.about)
    x, u, seen = (jnp.asarray(part) for part in test[:3])

    def error(z, first):
        errors = []
        for t in range(first, x.shape[1]):
            errors.append(float(jnp.mean((model.decode(z) - x[:, t]) ** 2)))
            z = model.transition.next(z.T, u[:, t].T).m.T
        return errors

    known = (x[:, :5], u[:, :5], seen[:, :5])
    expected = {
        "smoothed": error(model.smooth(*known, iterations=0).mean[:, 0], 0),
        "iterated": error(model.smooth(*known, iterations=2).mean[:, 0], 0),
        "filtered": error(model.filter(*known).mean[:, 4], 4),
    }
    for name, errors in expected.items():
        np.testing.assert_allclose(results[f"horizon_{name}"], errors, rtol=1e-4)
        assert results[f"mse_predict_{name}"] == pytest.approx(np.mean(errors), rel=1e-4)
    assert results["elbo"] == pytest.approx(-results["distortion"] - results["rate"], rel=1e-5)
    assert set(results["r2"]) == {"angle", "velocity"}


def test_large_data_are_measured_in_parts(monkeypatch):
    model, test = tiny.model(1), DATASET.test
    whole = evaluate(model, test, DATASET.about)
    monkeypatch.setattr(evaluation, "AT_ONCE", 5 * test.x[0].size)
    parts = evaluate(model, test, DATASET.about)
    assert set(parts) == set(whole)
    for name in ("r2", "r2_first", "r2_iterated", "r2_positions", "r2_others"):
        assert parts[name] == pytest.approx(whole[name], abs=1e-5)
    for name in ("mse_predict_smoothed", "mse_predict_iterated", "mse_predict_filtered", "horizon_filtered"):
        assert parts[name] == pytest.approx(whole[name], rel=1e-5)
    assert parts["elbo"] == pytest.approx(whole["elbo"], rel=0.3)  # other samples


def test_dimensions_that_pictures_come_from_are_measured_alone():
    model, test = tiny.model(1), DATASET.test
    results = evaluate(model, test, DATASET.about)
    states = np.asarray(model.smooth(*(jnp.asarray(part) for part in test[:3]), iterations=0).mean)
    assert results["r2_others"] == pytest.approx(identification(states[..., 2:], test.state, DATASET.about))
    assert results["r2_positions"] == pytest.approx(identification(states[..., :2], test.state, DATASET.about))
    assert "r2_others" not in evaluate(tiny.model(1, emission="learned"), test, DATASET.about)


def test_unseen_frames_are_not_counted():
    model, test = tiny.model(1), DATASET.test
    mask = test.mask.copy()
    mask[:, -1] = False
    noisy = test.x.copy()
    noisy[:, -1] += 100
    plain = evaluate(model, test._replace(mask=mask), DATASET.about)
    wild = evaluate(model, test._replace(mask=mask, x=noisy), DATASET.about)
    assert plain["elbo"] == pytest.approx(wild["elbo"], rel=1e-6)
    assert plain["horizon_smoothed"][:-1] == pytest.approx(wild["horizon_smoothed"][:-1])
    assert wild["mse_predict_smoothed"] == pytest.approx(plain["mse_predict_smoothed"], rel=1e-6)


def test_without_ground_truth_there_is_no_r2():
    results = evaluate(tiny.model(1), DATASET.test._replace(state=None), DATASET.about)
    assert "r2" not in results
    assert np.isfinite(results["mse_predict_filtered"])
