"""The head start of models of pictures."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from deepssm import DeepSSMError, checkpoints, headstart, slow
from deepssm.models.dks import DKSConfig
from deepssm.objectives import Elbo
from deepssm.program import Program
from deepssm.training import fit

DATA = tiny.DATA.generate().train
CIRCLE = np.sqrt(2) * np.stack([np.cos(DATA.state[..., 0]), np.sin(DATA.state[..., 0])], axis=-1)
TRAINING = dataclasses.replace(tiny.TRAINING, head_start=400, seeds=2)


def build(seed: jax.Array) -> object:
    return tiny.MODEL.build((8, 8), 1, jax.random.key(seed))


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Too few frames to find anything: the angle is given instead. `test_slow` is about finding it."""
    monkeypatch.setattr(slow, "slow_features", lambda data, count: CIRCLE)


def test_encoder_dynamics_and_decoder_learn_in_turn():
    stages = {}
    parameters = headstart.learn(
        build, TRAINING, DATA, lambda stage, done, steps, metrics: stages.setdefault(stage, []).append((done, metrics))
    )
    assert [stages[name][-1][0] for name in ("encoder", "dynamics", "decoder")] == [800] * 3  # of both seeds
    elbos = [float(metrics["elbo"].mean()) for _, metrics in stages["dynamics"]]
    assert elbos[79] > elbos[0] + 0.5
    targets = slow.positions(CIRCLE, circles=1).reshape(-1, 2)
    program = Program(build, Elbo(), TRAINING)
    for before, after in zip(program.models(program.start().parameters), program.models(parameters), strict=True):
        x = jnp.asarray(DATA.x.reshape(-1, *DATA.x.shape[2:]))
        errors = [np.mean((model.encoder(x).m.T - targets) ** 2) for model in (before, after)]
        assert errors[1] < 0.1 * errors[0]
        pictures = [np.mean((model.decoder(model.encoder(x).m) - x) ** 2) for model in (before, after)]
        assert pictures[1] < 0.7 * pictures[0]
        assert not np.allclose(before.log_R, after.log_R, atol=0.1)


def test_training_begins_there_and_is_not_begun_again(tmp_path):
    stages = []
    training = dataclasses.replace(TRAINING, seeds=1, head_start=10, steps=10, checkpoint_seconds=1e3)
    options = {"folder": tmp_path, "watch": lambda stage, *rest: stages.append(stage)}

    def interrupted(stage, *rest):
        if stage == "training":
            raise KeyboardInterrupt
        stages.append(stage)

    with pytest.raises(KeyboardInterrupt):
        fit(tiny.MODEL, Elbo(), training, DATA, tmp_path, watch=interrupted)
    assert set(stages) == {"encoder", "dynamics", "decoder"}
    assert checkpoints.read_header(tmp_path / "checkpoint.deepssm")["step"] == 0
    stages.clear()
    resumed = fit(tiny.MODEL, Elbo(), training, DATA, resume=True, **options).models[0]
    assert set(stages) == {"training"}
    whole = fit(tiny.MODEL, Elbo(), training, DATA).models[0]
    for one, other in zip(jax.tree.leaves(resumed), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(one, other)


def test_velocities_follow_one_linear_system_where_positions_are_moved_by_them():
    """However training may mix base matrices later, they leave the head start alike."""
    config = dataclasses.replace(tiny.MODEL, integrating=True)
    training = dataclasses.replace(TRAINING, seeds=1, head_start=30)

    def build(seed: jax.Array) -> object:
        return config.build((8, 8), 1, jax.random.key(seed))

    parameters = headstart.learn(build, training, DATA, lambda *args: None)
    program = Program(build, Elbo(), training)
    before, after = (program.models(found)[0].transition for found in (program.start().parameters, parameters))
    assert not np.allclose(after.F, before.F, atol=1e-3)
    np.testing.assert_allclose(after.F, np.broadcast_to(after.F[:1], after.F.shape), atol=1e-4)
    np.testing.assert_array_equal(after.g.layers[-1].W, before.g.layers[-1].W)


def test_its_small_steps_are_not_split_over_devices(monkeypatch):
    seen = []
    program = Program.__init__
    monkeypatch.setattr(
        Program,
        "__init__",
        lambda self, build, objective, training: (
            seen.append(training.devices) or program(self, build, objective, training)
        ),
    )
    headstart.learn(
        build, dataclasses.replace(TRAINING, seeds=1, head_start=1, devices="all"), DATA, lambda *args: None
    )
    assert set(seen) == {"one"}


def test_only_kalman_models_have_one():
    with pytest.raises(DeepSSMError, match="Got a head start for a model of class DKS; expected EKVAE or KVAE"):
        fit(DKSConfig(reader=8, recognition=(8,), decoder=(8,)), Elbo(), TRAINING, DATA)
