"""The reacher's environment and data set, and models of it through the real command."""

import dataclasses
import json
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from dm_control import suite
from gymnasium.utils.env_checker import check_env

from deepssm import DeepSSMError, cli, experiments, runs, slow
from deepssm.data import reacher as reacher_data
from deepssm.data import sequences
from deepssm.data.reacher import ReacherData
from deepssm.environments.reacher import WRIST, Reacher, ReacherEnv

SMALL = ReacherData(sequences=5, test_sequences=2, frames=6, before=4)


@pytest.mark.filterwarnings("ignore:.*alternative render modes.*")
@pytest.mark.filterwarnings("ignore:.*Box observation space.*")
@pytest.mark.parametrize("observation", ["angle", "rgb"])
def test_the_environment_is_one(observation):
    environment = ReacherEnv(observation, target=0.05, render_mode="rgb_array")
    check_env(environment)
    first, _ = environment.reset(seed=3)
    again, _ = environment.reset(seed=3)
    np.testing.assert_array_equal(first, again)
    environment.close()


def test_it_moves_as_in_the_control_suite():
    theirs = suite.load("reacher", "easy", task_kwargs={"random": 0})
    theirs.reset()
    ours = ReacherEnv("angle", reacher=Reacher(repeat=2))
    ours.place(np.concatenate([theirs.physics.data.qpos, theirs.physics.data.qvel]))
    for u in np.random.default_rng(0).uniform(-1, 1, (30, 2)):
        for _ in range(2):
            theirs.step(u)
        ours.step(u)
    np.testing.assert_allclose(ours.state, [*theirs.physics.data.qpos, *theirs.physics.data.qvel], atol=1e-12)


def test_pictures_show_the_arm_and_the_target_only_when_asked():
    hidden, shown = ReacherEnv("rgb"), ReacherEnv("rgb", target=0.05)
    pictures = []
    for state in ([0.0, 0.5, 0, 0], [0.3, 0.5, 0, 0], [0.3, 0.9, 0, 0]):
        hidden.place(state, target=(0.1, 0.1))
        pictures.append(hidden.observe())
        hidden.place(state, target=(-0.1, 0.1))
        np.testing.assert_array_equal(hidden.observe(), pictures[-1])
    assert pictures[0].shape == (64, 64, 3)
    assert pictures[0].dtype == np.uint8
    assert np.abs(pictures[0].astype(int) - pictures[1]).max() > 50
    assert np.abs(pictures[1].astype(int) - pictures[2]).max() > 50
    shown.place([0.0, 0.5, 0, 0], target=(-0.1, -0.1))
    red = shown.observe()[..., 0] > 200
    assert red.sum() > (pictures[0][..., 0] > 200).sum() + 30


def test_the_reward_is_for_touching_the_target():
    environment = ReacherEnv("angle", target=0.015)
    environment.reset(options={"state": [0.2, 0.4, 0, 0]})
    finger = environment.finger
    environment.reset(options={"state": [0.2, 0.4, 0, 0], "target": finger})
    _, reward, *_, info = environment.step(np.zeros(2))
    assert reward == 1.0
    assert info["distance"] < 1e-3
    environment.reset(options={"state": [0.2, 0.4, 0, 0], "target": finger + 0.05})
    assert environment.step(np.zeros(2))[1] == 0.0


def test_mistakes_are_named(monkeypatch):
    with pytest.raises(DeepSSMError, match="expected 'angle' or 'rgb'"):
        ReacherEnv("state")
    with pytest.raises(DeepSSMError, match="shoulder, wrist and their velocities"):
        ReacherEnv("angle").reset(options={"state": [0.0, 1.0]})
    with pytest.raises(DeepSSMError, match="at least 1"):
        dataclasses.replace(SMALL, frames=0).generate()
    monkeypatch.setitem(sys.modules, "dm_control.suite", None)
    with pytest.raises(DeepSSMError, match=r"deepssm\[reacher\]"):
        ReacherEnv("angle")


def test_without_opengl_the_packages_are_named():
    """In a process of its own: dm_control loads OpenGL once."""
    code = "from deepssm.environments.reacher import ReacherEnv; ReacherEnv('rgb')"
    command = ["env", "MUJOCO_GL=none-such", sys.executable, "-c", code]
    failed = subprocess.run(command, capture_output=True, text=True)
    assert failed.returncode
    assert "libegl1" in failed.stderr.splitlines()[-1]
    assert "libosmesa6" in failed.stderr.splitlines()[-1]


def test_data_follow_the_simulator(tmp_path):
    SMALL.write(tmp_path / "data.npz")
    dataset = sequences.load(tmp_path / "data.npz")
    environment = ReacherEnv("angle")
    assert dataset.about.dt == 0.02
    for part, size in zip(dataset[:3], (5, 2, 2), strict=True):
        assert part.x.shape == (size, 6, 2)
        np.testing.assert_array_equal(part.x, part.state[..., :2])
        assert np.abs(part.x[:, 0, 0]).max() <= np.pi
        assert np.abs(part.x[..., 1]).max() < WRIST + 0.3
        for state, u in zip(part.state, part.u, strict=True):
            environment.place(state[0])
            for t in range(5):
                environment.advance(u[t])
                np.testing.assert_allclose(environment.state, state[t + 1], atol=2e-3)


@pytest.mark.parametrize(
    ("preset", "stds", "at_the_limit"), [("rgb", [2.6, 2.65], 0.03), ("angle", [1.9, 2.5], 0.09)], ids=["rgb", "angle"]
)
def test_velocities_spread(preset, stds, at_the_limit, tmp_path):
    """What docs/reacher.md says of them."""
    data = experiments.preset(f"reacher-{preset}-vhp-ekvae-co").data
    dataclasses.replace(data, observation="angle", sequences=200, test_sequences=2).write(tmp_path / "data.npz")
    state = sequences.load(tmp_path / "data.npz").train.state
    np.testing.assert_allclose(state.std((0, 1))[2:], stds, rtol=0.1)
    assert np.mean(np.abs(state[..., 1]) > WRIST - np.radians(2)) == pytest.approx(at_the_limit, abs=0.02)


@pytest.mark.parametrize("observation", ["angle", "rgb"])
def test_data_are_a_function_of_their_seed_whoever_makes_them(observation, tmp_path, monkeypatch):
    monkeypatch.setattr(reacher_data, "PART", 2)
    small = dataclasses.replace(SMALL, observation=observation)
    small.write(tmp_path / "one.npz", processes=1)
    small.write(tmp_path / "two.npz", processes=2)
    one, two = sequences.load(tmp_path / "one.npz"), sequences.load(tmp_path / "two.npz")
    for first, second in zip(one[:3], two[:3], strict=True):
        np.testing.assert_array_equal(first.x, second.x)
        np.testing.assert_array_equal(first.u, second.u)
    assert one.train.x.dtype == (np.uint8 if observation == "rgb" else np.float32)
    assert not np.array_equal(one.train.u[:2], one.train.u[2:4])
    dataclasses.replace(small, data_seed=1).write(tmp_path / "three.npz", processes=1)
    assert not np.array_equal(sequences.load(tmp_path / "three.npz").train.u, one.train.u)


def test_interrupted_data_go_on_where_they_were(tmp_path, monkeypatch):
    monkeypatch.setattr(reacher_data, "PART", 2)
    path, done = tmp_path / "data.npz", []
    make = ReacherData.make

    def interrupted(self, task):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(task.path.name)
        return make(self, task)

    monkeypatch.setattr(ReacherData, "make", interrupted)
    with pytest.raises(KeyboardInterrupt):
        SMALL.write(path)
    assert not path.exists()
    monkeypatch.setattr(ReacherData, "make", lambda self, task: done.append(task.path.name) or make(self, task))
    SMALL.write(path)
    assert len(done) == len(set(done)) == 5
    SMALL.write(tmp_path / "whole.npz")
    np.testing.assert_array_equal(sequences.load(path).train.x, sequences.load(tmp_path / "whole.npz").train.x)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["data.npz", "whole.npz"]


def test_parts_of_other_data_are_not_taken(tmp_path, monkeypatch):
    path, make = tmp_path / "data.npz", ReacherData.make

    def fail(self, task):
        make(self, task)
        raise KeyboardInterrupt

    monkeypatch.setattr(ReacherData, "make", fail)
    with pytest.raises(KeyboardInterrupt):
        dataclasses.replace(SMALL, data_seed=7).write(path)
    monkeypatch.setattr(ReacherData, "make", make)
    SMALL.write(path)
    SMALL.write(tmp_path / "alone.npz")
    np.testing.assert_array_equal(sequences.load(path).train.u, sequences.load(tmp_path / "alone.npz").train.u)


FEW = "--sequences 8 --test-sequences 4 --frames 7 --before 5 --steps 6 --batch 4".split()


@pytest.mark.parametrize("model", ["vhp-ekvae-co", "vhp-dvbs-co", "dks-annealing"])
def test_angles_are_learned_through_the_command(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DEEPSSM_CACHE", str(tmp_path / "cache"))
    options = [*FEW, "--decoder", "8", "--seeds", "2", "--baseline-steps", "50"]
    assert cli.main(["train", f"reacher-angle-{model}", *options, "--out", str(tmp_path / "run")]) == 0
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert list(results["r2"]) == ["angle_1", "angle_2", "velocity_1", "velocity_2"]
    assert len(results["horizon_smoothed"]) == 7
    assert (tmp_path / "run" / "report.html").exists()
    assert "velocity_2" in capsys.readouterr().out


def test_pictures_are_learned_through_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPSSM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(slow, "FEATURES", (100, 100))  # the usual number is for 60 000 frames
    monkeypatch.setattr(slow, "EDGE", 16)
    few = "--sequences 30 --test-sequences 4 --frames 7 --before 5".split()
    assert cli.main(["data", "reacher", "--observation", "rgb", "--out", str(tmp_path / "data.npz"), *few]) == 0
    small = "--channels 4 4 8 --encoder 16 --decoder 16 --steps 6 --head-start 4 --distortion-baseline 0".split()
    options = [*few, *small]
    train = ["train", "reacher-rgb-vhp-ekvae-co", "--observation", "rgb", *options, "--out", str(tmp_path / "run")]
    assert cli.main(train) == 0
    run = runs.load(tmp_path / "run")
    data = run.experiment.data.generate()
    np.testing.assert_array_equal(data.train.x, sequences.load(tmp_path / "data.npz").train.x)
    assert data.train.x.dtype == np.uint8
    assert set(run.results["r2_others"]) == {"angle_1", "angle_2", "velocity_1", "velocity_2"}
    assert (tmp_path / "run" / "film.png").stat().st_size > 10_000
    belief = run.best.step(run.best.start(), jnp.asarray(data.test.x[0, 0]), jnp.asarray(data.test.u[0, 0]))
    assert np.isfinite(belief.z.m).all()
    assert run.best.decode(belief.z.m).shape == (64, 64, 3)
