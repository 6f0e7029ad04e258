"""Slow features: the world of moving pictures, found without training."""

import numpy as np
import pytest

from deepssm import DeepSSMError, slow
from deepssm.data.sequences import Sequences
from deepssm.evaluation import r_squared

GENERATOR = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(slow, "EDGE", 16)
    monkeypatch.setattr(slow, "FEATURES", (400, 300))


def film(sequences: int = 300, frames: int = 20) -> tuple[Sequences, np.ndarray, np.ndarray]:
    """A spot on a circle, whose colour goes from red to green: the angle and the colour move at constant speeds."""
    generator = np.random.default_rng(0)  # the same film for every test, whichever run before
    start, speed = generator.uniform(-np.pi, np.pi, (sequences, 1)), generator.uniform(-0.2, 0.2, (sequences, 1))
    angle = start + speed * np.arange(frames)
    start, end = generator.uniform(0, 1, (2, sequences, 1))
    colour = start + (end - start) * np.arange(frames) / frames
    row, column = np.meshgrid(np.arange(32), np.arange(32), indexing="ij")
    centre = 15.5 + 9 * np.stack([np.sin(angle), np.cos(angle)])[..., None, None]
    spot = np.exp(-((row - centre[0]) ** 2 + (column - centre[1]) ** 2) / 30)
    x = spot[..., None] * np.stack([colour, 1 - colour], -1)[:, :, None, None]
    data = Sequences((255 * x).astype(np.uint8), np.zeros((sequences, frames, 0)), np.ones((sequences, frames), bool))
    return data, angle, colour


def straight(states: np.ndarray, target: np.ndarray) -> float:
    return r_squared(states.reshape(-1, states.shape[-1]), target.ravel())


def test_a_circle_and_a_line_are_found_in_a_film():
    data, angle, colour = film()
    found = slow.positions(slow.slow_features(data, 3), circles=1)
    np.testing.assert_allclose(np.linalg.norm(found[..., :2], axis=-1), 1.0, atol=1e-5)
    assert straight(found[..., :2], np.sin(angle)) > 0.95
    assert straight(found[..., :2], np.cos(angle)) > 0.95
    assert straight(found[..., 2:], colour) > 0.95


def test_frames_that_are_not_seen_do_not_count():
    data, angle, _ = film()
    mask = data.mask.copy()
    mask[:, 15:] = False
    mask[::2, 7] = False
    noise = np.where(mask[..., None, None, None], data.x, GENERATOR.integers(0, 255, data.x.shape, np.uint8))
    found = slow.slow_features(data._replace(x=noise, mask=mask), 3)
    np.testing.assert_array_equal(found, slow.slow_features(data._replace(mask=mask), 3))
    assert np.all(found[~mask] == 0)
    assert straight(found[mask], np.sin(angle[mask])) > 0.95


def test_pictures_are_averaged_over_squares():
    x = GENERATOR.uniform(size=(1, 2, 32, 48, 3)).astype(np.float32)
    data, places = Sequences(x, np.zeros((1, 2, 0)), np.ones((1, 2), bool)), np.arange(2)
    pooled = slow.pooled(data, places).reshape(2, 16, 16, 3)
    np.testing.assert_allclose(pooled[1, 4, 5], x[0, 1, 8:10, 15:18].mean((0, 1)), rtol=1e-5)
    assert slow.pooled(data._replace(x=x[..., :31, :7, :]), places).shape == (2, 31 * 7 * 3)
    assert slow.pooled(data._replace(x=x[..., 0, 0, :]), places[1:]).shape == (1, 3)


def test_the_axis_of_a_cylinder():
    turned = np.linalg.qr(GENERATOR.standard_normal((3, 3)))[0]
    angle, height = GENERATOR.uniform(-np.pi, np.pi, 500), GENERATOR.uniform(-2, 2, 500)
    y = np.stack([np.cos(angle), np.sin(angle), height], axis=1) @ turned.T + 0.01 * GENERATOR.standard_normal((500, 3))
    np.testing.assert_allclose(np.abs(slow.cylinder_axis(y) @ turned[:, 2]), 1.0, atol=1e-3)


def test_overtones_are_not_new():
    x, y = GENERATOR.uniform(0, np.pi, (2, 4000))
    features = np.sqrt(2) * np.stack(
        [np.cos(x), np.cos(2 * x), np.cos(y), np.cos(x) * np.cos(y), np.cos(2 * y)], axis=1
    )
    assert slow.new_ones(features, 2, GENERATOR) == [0, 2]
    with pytest.raises(DeepSSMError, match="only 2 things change slowly; a head start looks for 3"):
        slow.new_ones(features, 3, GENERATOR)


def test_lines_are_bent_straight():
    """The slowest function of a line that is as fast everywhere is half a cosine."""
    line = GENERATOR.uniform(0, 0.9, (300, 1)) + 0.005 * np.arange(20)
    bent = np.cos(np.pi * line)
    assert straight(bent[..., None], line) < 0.995
    assert straight(slow.even(bent)[..., None], line) > 0.999
    np.testing.assert_allclose(slow.positions(bent[..., None], circles=0)[..., 0], slow.even(bent))


def test_what_a_head_start_cannot_do_is_named():
    data, *_ = film(sequences=2)
    with pytest.raises(DeepSSMError, match="Got 40 frames; a head start needs more than 60"):
        slow.slow_features(data, 3)
    with pytest.raises(DeepSSMError, match="not 2 circles in 4 dimensions"):
        slow.positions(np.zeros((5, 5, 4)), circles=2)
