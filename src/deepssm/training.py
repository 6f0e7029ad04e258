"""Training: the loop around the compiled program, with progress, checkpoints and resumption."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from deepssm import checkpoints, headstart
from deepssm.data.sequences import Sequences, intensities, seen_frames
from deepssm.errors import DeepSSMError
from deepssm.models.base import Model
from deepssm.networks import Standard, knowing
from deepssm.objectives import Constrained, Elbo, Objective, distortion_baseline
from deepssm.program import Program, TrainingConfig, select

STANDARD = 10_000
"""Pictures that tell the mean one."""


@runtime_checkable
class ModelConfig(Protocol):
    """Anything that builds a model for observations of a shape and a number of controls."""

    def build(self, shape: tuple[int, ...], controls: int, key: Array) -> Model: ...


class Fit(NamedTuple):
    """What training leaves behind."""

    models: list[Model]
    """One for each seed."""
    objective: Objective
    """With the baseline that was used."""
    seconds: float
    diverged: dict[int, str]
    """Seeds that met NaN, with step and term; their models are the last good ones."""


Metrics = dict[str, NDArray[Any]]
"""By name, each (seeds, steps)."""
Watch = Callable[[str, int, int, Metrics], None]
"""Called after each chunk with the stage (`deepssm.progress`), the steps done, all steps, and the metrics."""


def fit(
    model_config: ModelConfig,
    objective: Objective,
    training: TrainingConfig,
    data: Sequences,
    folder: Path | None = None,
    resume: bool = False,
    header: dict[str, Any] | None = None,
    watch: Watch = lambda stage, done, steps, metrics: None,
) -> Fit:
    """Train one model for each seed.

    With a folder, metrics.jsonl and checkpoint.deepssm are kept there, with `header` in the checkpoint. With
    `resume`, training goes on from that checkpoint and ends, on a CPU, with the same bits as an uninterrupted run.
    """
    if training.batch < 1 or training.steps < 1 or training.seeds < 1 or training.chunk < 1:
        raise DeepSSMError("Steps, batch, seeds and chunk must all be at least 1.")
    batch = min(training.batch, len(data.x))
    if training.devices == "all" and batch % jax.device_count():
        raise DeepSSMError(
            f"A step's {batch} sequences cannot be split evenly over {jax.device_count()} devices. "
            f"Give a --batch that is a multiple of {jax.device_count()}."
        )
    if training.shortest > data.x.shape[1]:
        raise DeepSSMError(f"The shortest cut is {training.shortest} frames, but the sequences have {data.x.shape[1]}.")
    first = jax.process_index() == 0  # where several processes train together, the first one writes
    checkpoint = None if folder is None else Path(folder) / "checkpoint.deepssm"
    saved = checkpoints.read_header(checkpoint) if resume and checkpoint else None
    if isinstance(objective, Constrained) and objective.distortion_baseline == "auto":
        baseline = saved["baseline"] if saved else objective.factor * find_baseline(model_config, training, data, watch)
        objective = dataclasses.replace(objective, distortion_baseline=baseline)

    shape, controls = data.x.shape[2:], data.u.shape[2]
    build = _knowing(lambda seed: model_config.build(shape, controls, jax.random.key(seed)), data)
    program = Program(build, objective, training)
    state, seconds = program.start(), 0.0
    diverged: dict[int, str] = {}

    def keep(step: int) -> None:
        """What `resume` needs to go on after this step."""
        if checkpoint and first:
            baseline = getattr(objective, "distortion_baseline", None)
            facts = {"step": step, "baseline": baseline, "diverged": diverged, "seconds": time.monotonic() - began}
            checkpoints.save(checkpoint, {**(header or {}), **facts}, state)

    if saved and checkpoint:
        state, seconds = checkpoints.load(checkpoint, state), saved["seconds"]
        diverged = {int(seed): reason for seed, reason in saved["diverged"].items()}
    began = time.monotonic() - seconds
    if training.head_start and not saved:
        state = state._replace(parameters=headstart.learn(build, training, data, watch))
        keep(0)
    step = int(state.step[0])
    log = checkpoints.Log(Path(folder) / "metrics.jsonl", step) if folder and first else None

    state, arrays = program.on_devices((state, (data.x, data.u, data.mask)))
    last_saved = time.monotonic()
    while step < training.steps:
        done = min(step + training.chunk, training.steps)
        proposed, values = program.run(state, arrays, length=done - step)
        metrics = {name: np.asarray(value) for name, value in values.items()}
        diverged = _failures(metrics, step, training.all_seeds) | diverged
        if len(diverged) == training.seeds:
            raise DeepSSMError(_divergence(diverged, checkpoint))
        alive = np.asarray([seed not in diverged for seed in training.all_seeds])
        state = proposed if alive.all() else select(alive, proposed, state)._replace(step=proposed.step)
        if log:
            log.write(step, metrics, training.all_seeds)
        due = done == training.steps or time.monotonic() - last_saved >= training.checkpoint_seconds
        if due:
            keep(done)
            last_saved = time.monotonic()
        watch("training", done, training.steps, metrics)
        step = done
    return Fit(program.models(jax.device_get(state.parameters)), objective, time.monotonic() - began, diverged)


def _knowing(build: Callable[[Array], Model], data: Sequences) -> Callable[[Array], Model]:
    """The same models, which know mean and scale of the pictures if they ask for them."""
    shapes = eqx.filter_eval_shape(build, jnp.asarray(0))
    leaves = jax.tree.leaves(shapes, is_leaf=lambda part: isinstance(part, Standard))
    if not any(isinstance(part, Standard) for part in leaves):
        return build
    sample = intensities(seen_frames(data, STANDARD))
    mean = sample.mean(0)
    scale = np.sqrt(np.mean((sample - mean) ** 2))
    return lambda seed: knowing(build(seed), mean, scale)


def find_baseline(
    model_config: ModelConfig,
    training: TrainingConfig,
    data: Sequences,
    watch: Watch = lambda stage, done, steps, metrics: None,
) -> float:
    """D_0 from the best distortion of a short classical run (App. A.1), averaged over 50 steps.

    The run is kept short by a fourfold learning rate: it need not end well, only show how low the distortion goes. Too
    loose a D_0 costs dearly, since the main phase then begins before the features are in order.
    """
    distortions: list[float] = []

    def note(stage: str, done: int, steps: int, metrics: Metrics) -> None:
        distortions.append(float(metrics["distortion"].mean()))
        watch("baseline", done, steps, metrics)

    short = dataclasses.replace(
        training,
        steps=training.baseline_steps,
        learning_rate=4 * training.learning_rate,
        decay="constant",
        seeds=1,
        head_start=0,
        chunk=50,
    )
    fit(model_config, Elbo(), short, data, watch=note)
    return distortion_baseline(min(distortions))


def _failures(metrics: Metrics, step: int, seeds: tuple[int, ...]) -> dict[int, str]:
    """The seeds with a value that is not finite: the step and the first such term, from the parts to the whole."""
    order = sorted(metrics, key=lambda name: (not name.startswith("rate/"), name in ("rate", "elbo")))
    failures = {}
    for index, seed in enumerate(seeds):
        bad = {name: ~np.isfinite(metrics[name][index]) for name in order}
        any_bad = np.any(list(bad.values()), axis=0)
        if any_bad.any():
            first = int(any_bad.argmax())
            term = next(name for name in order if bad[name][first])
            failures[seed] = f"step {step + first + 1}: {term} is {metrics[term][index, first]}"
    return failures


def _divergence(diverged: dict[int, str], checkpoint: Path | None) -> str:
    reasons = "; ".join(f"seed {seed}, {reason}" for seed, reason in diverged.items())
    kept = f"The last good checkpoint is kept in {checkpoint}. " if checkpoint and checkpoint.exists() else ""
    return f"Training diverged ({reasons}). {kept}Lower the learning rates, or look for outliers in the data."
