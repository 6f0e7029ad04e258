"""The pendulum's physics, pictures, data set and environment."""

import dataclasses

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from deepssm import DeepSSMError
from deepssm.data.pendulum import PendulumData
from deepssm.environments.pendulum import Pendulum, PendulumEnv


def test_energy_is_kept_without_friction_and_lost_with_it():
    def energies(friction: float) -> np.ndarray:
        pendulum = Pendulum(friction=friction, dt=0.01)
        state = np.array([[1.0, 0.5], [3.0, -2.0]])
        path = [state]
        for _ in range(500):
            path.append(pendulum.step(path[-1], np.zeros(2)))
        angle, velocity = np.moveaxis(np.array(path), -1, 0)
        return 0.5 * velocity**2 + 9.81 * np.cos(angle)

    np.testing.assert_allclose(energies(0.0), np.broadcast_to(energies(0.0)[0], (501, 2)), rtol=1e-6)
    assert np.all(energies(0.5)[-1] < energies(0.5)[0])


def test_runge_kutta_is_of_fourth_order():
    def end(dt: float) -> np.ndarray:
        state, pendulum = np.array([2.0, 3.0]), Pendulum(dt=dt)
        for _ in range(round(0.4 / dt)):
            state = pendulum.step(state, np.array(1.5))
        return state

    exact = end(0.4 / 1024)
    ratio = np.abs(end(0.1) - exact).max() / np.abs(end(0.05) - exact).max()
    assert 12 < ratio < 24


def test_upright_is_at_the_top_and_a_quarter_turn_to_the_right():
    pendulum = Pendulum()
    rows, columns = np.mgrid[:16, :16]
    for angle, (row, column) in [(0.0, (3.0, 7.5)), (np.pi / 2, (7.5, 12.0)), (np.pi, (12.0, 7.5))]:
        picture = pendulum.picture(np.array(angle))
        assert 0 <= picture.min() <= picture.max() <= 1
        centre = [(weight * picture).sum() / picture.sum() for weight in (rows, columns)]
        np.testing.assert_allclose(centre, (row, column), atol=0.3)


def test_data_have_the_variances_of_the_original():
    """Karl et al. (2016): 0.52, 0.475 and 13.6; each split has 500 sequences of 15 frames of 16 x 16."""
    dataset = PendulumData().generate()
    for part in dataset[:3]:
        assert part.x.shape == (500, 15, 16, 16)
        assert part.x.dtype == np.float32
        angle, velocity = np.moveaxis(part.state, -1, 0)
        variances = [np.sin(angle).var(), np.cos(angle).var(), velocity.var()]
        np.testing.assert_allclose(variances, [0.52, 0.475, 13.6], rtol=0.055)
    whole = np.concatenate([part.state for part in dataset[:3]])
    variances = [np.sin(whole[..., 0]).var(), np.cos(whole[..., 0]).var(), whole[..., 1].var()]
    np.testing.assert_allclose(variances, [0.52, 0.475, 13.6], rtol=0.05)
    noise = dataset.test.x - Pendulum().picture(dataset.test.state[..., 0].astype(float))
    assert noise.std() == pytest.approx(0.01, rel=0.01)


def test_data_are_a_function_of_their_seed():
    small = PendulumData(sequences=3, frames=4)
    one, same = small.generate(), small.generate()
    other = dataclasses.replace(small, data_seed=1).generate()
    for name in ("train", "validation", "test"):
        np.testing.assert_array_equal(getattr(one, name).x, getattr(same, name).x)
        assert not np.array_equal(getattr(one, name).x, getattr(other, name).x)
    assert not np.array_equal(one.train.x, one.validation.x)


def test_data_follow_the_simulator_and_their_parameters():
    config = PendulumData(sequences=50, frames=6, torque=9.0, velocity=2.0)
    part = config.generate().train
    assert 8 < np.abs(part.u).max() <= 9
    assert np.abs(part.state[:, 0, 1]).max() <= 2
    after = config.pendulum.step(part.state[:, 2].astype(float), part.u[:, 2, 0].astype(float))
    np.testing.assert_allclose(after, part.state[:, 3], atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*Box observation space.*")
@pytest.mark.filterwarnings("ignore:.*recommend using a symmetric and normalized.*")
@pytest.mark.parametrize("observation", ["picture", "state"])
def test_environment_keeps_the_interface(observation):
    check_env(PendulumEnv(observation), skip_render_check=True)


def test_environment_moves_like_the_data():
    env = PendulumEnv("state", torque=3.0)
    _, info = env.reset(seed=1, options={"state": [0.3, -1.0]})
    np.testing.assert_array_equal(info["state"], [0.3, -1.0])
    seen, reward, ended, cut, _ = env.step(np.array([99.0], np.float32))
    np.testing.assert_allclose(seen, Pendulum().step(np.array([0.3, -1.0]), np.array(3.0)), rtol=1e-6)
    assert (reward, ended, cut) == (0.0, False, False)
    assert PendulumEnv(render_mode="rgb_array").render().shape == (256, 256, 3)
    assert isinstance(env, gymnasium.Env)
    with pytest.raises(DeepSSMError, match="picture"):
        PendulumEnv("sound")
