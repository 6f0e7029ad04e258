"""Training: seeds, groups, phases, divergence, checkpoints, resumption after SIGKILL."""

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from deepssm import DeepSSMError, checkpoints, runs
from deepssm.models.ekvae import EKVAEConfig
from deepssm.objectives import Annealed, Constrained, Elbo
from deepssm.program import Program, TrainingConfig
from deepssm.training import fit

DATA = tiny.DATA.generate().train


def leaves(model: object) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))]


def same(one: object, two: object) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(leaves(one), leaves(two), strict=True))


def train(objective=None, **changes):
    options = {key: changes.pop(key) for key in ("folder", "resume", "header", "watch") if key in changes}
    data = changes.pop("data", DATA)
    return fit(tiny.MODEL, objective or Elbo(), dataclasses.replace(tiny.TRAINING, **changes), data, **options)


def test_training_lowers_the_loss_and_several_seeds_are_each_their_own():
    seen = []
    together = train(Elbo(), seeds=2, steps=60, watch=lambda stage, done, steps, metrics: seen.append(metrics))
    assert seen[-1]["distortion"].shape == (2, 5)
    assert np.all(seen[-1]["elbo"].mean(1) > seen[0]["elbo"].mean(1))
    assert not same(together.models[0], together.models[1])
    alone = train(Elbo(), seed=1, steps=60)
    assert same(alone.models[0], together.models[1])


def test_transition_and_prior_rest_in_the_initial_phase():
    before = tiny.MODEL.build((8, 8), 1, jax.random.key(0))
    for baseline, moves in ((-1e9, False), (1e9, True)):
        (after,) = train(Constrained(baseline), steps=5).models
        assert not same(before.encoder, after.encoder)
        assert not same(before.decoder, after.decoder)
        for part in ("transition", "prior", "log_R", "start_m", "start_log_P"):
            pairs = zip(leaves(getattr(before, part)), leaves(getattr(after, part)), strict=True)
            # Compiled and plain initialisation may differ in the last bit; a step of Adam moves by the learning rate.
            assert all(np.allclose(a, b, atol=1e-5) for a, b in pairs) != moves, part


def test_gradient_is_taken_under_the_new_multiplier():
    """Alg. 1 updates lambda with the distortion of the batch before it optimises."""
    seen = []
    train(Constrained(-100.0, lam_0=0.5, bound=0.1), steps=3, chunk=1, watch=lambda *args: seen.append(args[-1]))
    lams = [float(metrics["lambda"][0, 0]) for metrics in seen]
    np.testing.assert_allclose(lams, 0.5 * np.exp([0.1, 0.2, 0.3]), rtol=1e-5)


def test_every_other_sequence_is_cut_once_the_transition_learns():
    training = dataclasses.replace(tiny.TRAINING, shortest=3)
    program = Program(lambda seed: tiny.MODEL.build((8, 8), 1, jax.random.key(seed)), Constrained(-100.0), training)
    state, seen = program.start(), jnp.ones((400, 7), bool)

    def lengths(initial: bool) -> np.ndarray:
        objective = jax.tree.map(lambda leaf: leaf[0], state.objective)._replace(initial=jnp.asarray(initial))
        one = jax.tree.map(lambda leaf: leaf[0], state)._replace(objective=objective)
        return np.asarray(program._cut(jnp.asarray(0), one, seen).sum(1))

    assert np.all(lengths(initial=True) == 7)
    cut = lengths(initial=False)
    assert np.all(cut[1::2] == 7)
    assert set(cut[::2]) == {3, 4, 5, 6, 7}
    with pytest.raises(DeepSSMError, match="The shortest cut is 8 frames, but the sequences have 7"):
        train(shortest=8)


def test_decay_takes_the_weights_of_networks_alone():
    without, held = (train(steps=5, dynamics_decay=decay).models[0] for decay in (0.0, 10.0))
    assert np.all(np.abs(held.transition.g.layers[0].W).mean() < np.abs(without.transition.g.layers[0].W).mean())
    for part in ("F", "log_Q"):
        np.testing.assert_allclose(getattr(held.transition, part), getattr(without.transition, part), atol=0.05)


def test_rates_rise_in_the_first_steps():
    rising = TrainingConfig(steps=100, warm_up=9, decay="constant")
    rates = [float(rising.rate("observation", jnp.asarray(step))) for step in range(12)]
    np.testing.assert_allclose(rates, 1e-3 * np.minimum(np.arange(1, 13) / 10, 1), rtol=1e-5)
    moved, started = train(steps=1, warm_up=99).models[0], train(steps=1).models[0]
    before = tiny.model()
    steps = [np.abs(model.encoder.network.network.mlp.layers[0].b).max() for model in (moved, started)]
    assert steps[0] == pytest.approx(0.01 * steps[1], rel=1e-3)
    assert not same(moved, before)


def test_models_of_pictures_know_the_mean_one():
    config = dataclasses.replace(tiny.MODEL, channels=(2,))
    data = tiny.DATA.generate().train._replace(x=np.random.default_rng(0).uniform(size=(4, 7, 8, 8, 3)))
    data = data._replace(x=data.x.astype(np.float32), u=data.u[:4], mask=data.mask[:4])
    model = fit(config, Elbo(), dataclasses.replace(tiny.TRAINING, steps=1), data).models[0]
    for part in (model.encoder.standard, model.decoder.standard):
        np.testing.assert_allclose(part.mean, data.x.mean((0, 1)), atol=1e-5)
        assert part.scale == pytest.approx((data.x - data.x.mean((0, 1))).std(), rel=1e-3)


def test_annealing_reports_beta():
    seen = []
    train(Annealed(10), steps=20, watch=lambda *args: seen.append(args[-1]))
    betas = np.concatenate([metrics["beta"][0] for metrics in seen])
    np.testing.assert_allclose(betas, np.minimum(np.arange(1, 21) / 10, 1), rtol=1e-6)


def test_baseline_is_found_by_a_classical_run():
    stages = []
    result = train(Constrained(), steps=5, watch=lambda stage, *rest: stages.append((stage, rest)))
    assert {stage for stage, _ in stages} == {"baseline", "training"}
    best = min(float(rest[-1]["distortion"].mean()) for stage, rest in stages if stage == "baseline")
    assert result.objective.distortion_baseline == pytest.approx(best + 0.1 * abs(best))


def test_every_epoch_goes_through_all_sequences():
    program = Program(lambda seed: tiny.model(0), Elbo(), dataclasses.replace(tiny.TRAINING, batch=4))
    index = jnp.arange(16)
    epochs = [
        np.concatenate([np.asarray(program._batch(jnp.asarray(3), jnp.asarray(step), (index,))[0]) for step in steps])
        for steps in (range(4), range(4, 8))
    ]
    for epoch in epochs:
        assert sorted(epoch) == list(range(16))
    assert not np.array_equal(*epochs)


def test_divergence_names_step_and_term_and_keeps_the_last_good_checkpoint(tmp_path):
    train(Elbo(), steps=10, folder=tmp_path)
    good = (tmp_path / "checkpoint.deepssm").read_bytes()
    with pytest.raises(DeepSSMError, match=r"seed 0, step 1\d: .* is (nan|inf|-inf).*last good checkpoint is kept"):
        train(Elbo(), steps=400, learning_rate=1e4, folder=tmp_path, resume=True)
    assert (tmp_path / "checkpoint.deepssm").read_bytes() == good


def test_one_lost_seed_does_not_stop_the_others():
    """A seed whose noise hits an outlier... here: one whose start is not finite."""

    class Config:
        def build(self, shape, controls, key):
            model = tiny.MODEL.build(shape, controls, key)
            bad = jnp.where(jax.random.key_data(key)[-1] == 1, jnp.nan, 0.0)
            return eqx.tree_at(lambda m: m.log_R, model, model.log_R + bad)

    result = fit(Config(), Elbo(), dataclasses.replace(tiny.TRAINING, seeds=3), DATA)
    assert list(result.diverged) == [1]
    assert "step 1: rate/" in result.diverged[1]
    assert all(np.isfinite(leaf).all() for index in (0, 2) for leaf in leaves(result.models[index]))


def test_checkpoints_refuse_what_they_should(tmp_path):
    path = tmp_path / "checkpoint.deepssm"
    tree = {"a": jnp.arange(3.0), "b": jnp.zeros((2, 2))}
    checkpoints.save(path, {"step": 7}, tree)
    assert checkpoints.read_header(path) == {"step": 7}
    back = checkpoints.load(path, tree)
    np.testing.assert_array_equal(back["a"], tree["a"])
    whole = path.read_bytes()
    for broken in (whole[:-1], whole[: len(whole) // 2], whole[:30] + b"x" + whole[31:], whole + b"more"):
        path.write_bytes(broken)
        with pytest.raises(DeepSSMError, match="truncated or altered"):
            checkpoints.load(path, tree)
    path.write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(DeepSSMError, match="not a deepssm checkpoint"):
        checkpoints.load(path, tree)
    path.write_bytes(whole)
    for other in ({**tree, "a": jnp.zeros(4)}, {**tree, "c": jnp.zeros(3)}, {"a": jnp.arange(3)}):
        with pytest.raises(DeepSSMError, match="do not fit"):
            checkpoints.load(path, other)
    with pytest.raises(DeepSSMError, match="Cannot read"):
        checkpoints.load(tmp_path / "nothing", tree)


def test_metrics_continue_after_the_checkpoint(tmp_path):
    train(Elbo(), steps=10, folder=tmp_path)
    path = tmp_path / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 15, "seed": 0}\n{"step": 2')
    train(Elbo(), steps=20, folder=tmp_path, resume=True)
    steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert steps == [5, 10, 15, 20]


def test_bad_numbers_are_refused():
    for change in ({"steps": 0}, {"batch": 0}, {"seeds": 0}, {"chunk": 0}):
        with pytest.raises(DeepSSMError, match="at least 1"):
            train(Elbo(), **change)


SCRIPT = """
import dataclasses, sys
sys.path.insert(0, {tests!r})
import jax
jax.config.update("jax_compilation_cache_dir", {cache!r})
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
import tiny
from pathlib import Path
from deepssm import runs
training = dataclasses.replace(tiny.TRAINING, steps=600, seeds=2)
folder = Path(sys.argv[1])
runs.train(dataclasses.replace(tiny.EXPERIMENT, training=training), folder, (folder / "config.json").exists())
"""


def test_killed_at_random_moments_and_resumed_ends_with_the_same_bits(tmp_path):
    cache = tmp_path / "cache"
    script = SCRIPT.format(tests=str(Path(__file__).parent), cache=str(cache))
    command = [sys.executable, "-c", script]
    subprocess.run([*command, str(tmp_path / "whole")], check=True, capture_output=True)

    generator, kills, folder = random.Random(0), 0, tmp_path / "killed"
    for _ in range(12):
        process = subprocess.Popen([*command, str(folder)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        before = _stamp(folder)
        while process.poll() is None and _stamp(folder) == before:
            time.sleep(0.005)
        time.sleep(generator.uniform(0, 0.25))
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        _, errors = process.communicate()
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, errors.decode()
    else:
        subprocess.run([*command, str(folder)], check=True, capture_output=True)
    assert kills >= 3
    whole, killed = (runs.load(tmp_path / name) for name in ("whole", "killed"))
    for seed in (0, 1):
        assert same(whole.models[seed], killed.models[seed])
    one, two = ((tmp_path / name / "checkpoint.deepssm").read_bytes() for name in ("whole", "killed"))
    assert one.split(b"\n", 3)[3] == two.split(b"\n", 3)[3]
    assert whole.results["elbo"] == killed.results["elbo"]
    logs = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("whole", "killed")]
    assert logs[0] == logs[1]


def _stamp(folder: Path) -> float:
    try:
        return (folder / "checkpoint.deepssm").stat().st_mtime_ns
    except FileNotFoundError:
        return 0.0


def test_memory_does_not_grow_with_the_number_of_sequences():
    """Beyond the data themselves, which stay bytes."""
    config = EKVAEConfig(channels=(4, 8), encoder=(16,), decoder=(16,), bases=2, alpha=(8,), prior_hidden=(8,))

    def memory(sequences: int) -> tuple[int, int]:
        program = Program(
            lambda seed: config.build((16, 16, 3), 1, jax.random.key(seed)), Constrained(0.0), TrainingConfig(batch=4)
        )
        kinds = {(16, 16, 3): jnp.uint8, (1,): jnp.float32, (): jnp.bool_}
        data = tuple(jax.ShapeDtypeStruct((sequences, 5, *shape), kind) for shape, kind in kinds.items())
        found = program.run.lower(program.start(), data, length=2).compile().memory_analysis()
        return found.argument_size_in_bytes, found.temp_size_in_bytes

    (few, few_beside), (many, many_beside) = memory(8), memory(1008)
    assert many - few == pytest.approx(1000 * 5 * (16 * 16 * 3 + 4 + 1), rel=0.01)
    assert many_beside - few_beside < 100_000  # the order of an epoch
