"""Training: many steps in one compiled program, many seeds at once, with checkpoints and resumption."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from numpy.typing import NDArray

from deepssm import checkpoints
from deepssm.data.sequences import Sequences
from deepssm.errors import DeepSSMError
from deepssm.models.base import Model
from deepssm.objectives import Constrained, Elbo, Objective, distortion_baseline

GROUPS = ("observation", "dynamics")
"""theta and phi; psi, psi_0 and phi_0. Each group has its own learning rate."""


@dataclass(frozen=True)
class TrainingConfig:
    """How long, how fast and from which seeds to train."""

    steps: int = 8000
    """Optimiser steps."""
    batch: int = 500
    """Sequences in a step; at most those there are."""
    learning_rate: float = 1e-3
    """Adam's rate for encoder and decoder."""
    dynamics_rate: float = 1e-2
    """Adam's rate for transition, noise and prior."""
    weight_decay: float = 0.1
    """Decay of the weights of encoder and decoder (AdamW), against learning the noise of the training frames."""
    decay: Literal["cosine", "constant"] = "cosine"
    """How the two rates change over the run."""
    seed: int = 0
    """The first seed."""
    seeds: int = 1
    """Number of seeds, trained in the same program."""
    baseline_steps: int = 2000
    """Steps of the classical run that finds D_max."""
    chunk: int = 100
    """Steps between two looks at the run: progress, log, checkpoint."""
    checkpoint_seconds: float = 30.0
    """Least time between two checkpoints."""

    def rate(self, group: str, step: Array) -> Array:
        rates = {"observation": self.learning_rate, "dynamics": self.dynamics_rate}
        fraction = 0.5 * (1 + jnp.cos(jnp.pi * step / self.steps)) if self.decay == "cosine" else jnp.ones(())
        return rates[group] * fraction

    @property
    def all_seeds(self) -> tuple[int, ...]:
        return tuple(range(self.seed, self.seed + self.seeds))


@runtime_checkable
class ModelConfig(Protocol):
    """Anything that builds a model for observations of a shape and a number of controls."""

    def build(self, shape: tuple[int, ...], controls: int, key: Array) -> Model: ...


class State(NamedTuple):
    """Everything that changes during training. No random key: noise is a function of seed and step."""

    parameters: dict[str, Array]
    """By group, each one vector: an optimiser step is then a few kernels, not a few for each array of the model."""
    optimisers: dict[str, Any]
    objective: Any
    step: Array


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
"""Called after each chunk with the stage ("baseline" or "training"), the steps done, all steps, and the metrics."""


class Program:
    """The compiled part of training: chunks of steps for all seeds.

    On an accelerator the seeds are one batch; on a CPU, where products with a batch of weights are slow, they take
    turns inside the program.
    """

    def __init__(self, build: Callable[[Array], Model], objective: Objective, training: TrainingConfig):
        self.build, self.objective, self.training = build, objective, training
        shapes, self.static = eqx.partition(eqx.filter_eval_shape(build, jnp.asarray(0)), _is_parameter)
        self.group_of = _groups(shapes)
        self.shapes = {group: self._part(shapes, group) for group in GROUPS}
        matrices = [np.full(leaf.size, leaf.ndim > 1) for leaf in jax.tree.leaves(self.shapes["observation"])]
        self.decayed: dict[str, Any] = {
            "observation": training.weight_decay * np.concatenate(matrices).astype(np.float32),
            "dynamics": 0.0,
        }
        self.adam = optax.scale_by_adam()
        self.seeds = jnp.asarray(training.all_seeds)
        self.run = jax.jit(self._run, static_argnames="length", compiler_options=_compiler_options())

    def start(self) -> State:
        return jax.jit(partial(jax.lax.map, self._start))(self.seeds)

    def models(self, state: State) -> list[Model]:
        def model(index: int) -> Model:
            return self._model({group: vectors[index] for group, vectors in state.parameters.items()})

        return [model(index) for index in range(len(self.seeds))]

    def _start(self, seed: Array) -> State:
        model = self.build(seed)
        parameters = {
            group: jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(self._part(model, group))])
            for group in GROUPS
        }
        optimisers = {group: self.adam.init(vector) for group, vector in parameters.items()}
        state = State(parameters, optimisers, self.objective.init(), jnp.asarray(0))
        # Weakly typed leaves would become strong in the first chunk, and the second would compile again.
        return jax.tree.map(lambda leaf: jax.lax.convert_element_type(leaf, leaf.dtype), state)

    def _run(self, state: State, data: tuple[Array, ...], length: int) -> tuple[State, dict[str, Array]]:
        def one(inputs: tuple[Array, State]) -> tuple[State, dict[str, Array]]:
            seed, state = inputs
            return jax.lax.scan(lambda state, _: self._step(seed, state, data), state, length=length)

        with jax.default_matmul_precision("float32"):
            if jax.default_backend() == "cpu":
                return jax.lax.map(one, (self.seeds, state))
            return jax.vmap(one)((self.seeds, state))

    def _step(self, seed: Array, state: State, data: tuple[Array, ...]) -> tuple[State, dict[str, Array]]:
        """One step of Alg. 1: distortion and rate, the objective's state, then the gradient under its new weights."""
        x, u, seen = self._batch(seed, state.step, data)

        def terms(parameters: dict[str, Array]) -> tuple[tuple[Array, Array], dict[str, Array]]:
            terms = self._model(parameters).terms(x, u, seen, _key(seed, 1, state.step))
            frames = seen.sum()
            per_frame = {name: part.sum() / frames for name, part in terms.parts.items()}
            return (terms.distortion.sum() / frames, terms.rate.sum() / frames), per_frame

        (distortion, rate), pull_back, parts = jax.vjp(terms, state.parameters, has_aux=True)
        objective = self.objective.update(state.objective, distortion)
        weights = jax.grad(self.objective.loss, argnums=(0, 1))(distortion, rate, objective)
        (gradient,) = pull_back(weights)

        parameters, optimisers = {}, {}
        for group, vector in state.parameters.items():
            update, moments = self.adam.update(gradient[group], state.optimisers[group])
            moved = vector - self.training.rate(group, state.step) * (update + self.decayed[group] * vector)
            train = True if group == "observation" else self.objective.trainable(objective)
            parameters[group], optimisers[group] = _select(train, (moved, moments), (vector, state.optimisers[group]))
        metrics = {
            "distortion": distortion,
            "rate": rate,
            "elbo": -distortion - rate,
            **{f"rate/{name}": part for name, part in parts.items()},
            "gradient": jnp.sqrt(sum(jnp.vdot(slope, slope) for slope in gradient.values())),
            **self.objective.metrics(objective),
        }
        return State(parameters, optimisers, objective, state.step + 1), metrics

    def _batch(self, seed: Array, step: Array, data: tuple[Array, ...]) -> tuple[Array, ...]:
        """The sequences of a step: every epoch goes through all of them in a new order."""
        count = len(data[0])
        if self.training.batch >= count:
            return data
        per_epoch = count // self.training.batch
        order = jax.random.permutation(_key(seed, 2, step // per_epoch), count)
        chosen = jax.lax.dynamic_slice_in_dim(order, step % per_epoch * self.training.batch, self.training.batch)
        return tuple(array[chosen] for array in data)

    def _part(self, tree: Any, group: str) -> Any:
        return eqx.filter(tree, jax.tree.map(lambda name: name == group, self.group_of))

    def _model(self, parameters: dict[str, Array]) -> Model:
        """The model of the vectors of its groups."""
        parts = []
        for group, shapes in self.shapes.items():
            leaves, structure = jax.tree.flatten(shapes)
            pieces = jnp.split(parameters[group], np.cumsum([leaf.size for leaf in leaves])[:-1])
            arrays = [piece.reshape(leaf.shape) for piece, leaf in zip(pieces, leaves, strict=True)]
            parts.append(jax.tree.unflatten(structure, arrays))
        return eqx.combine(*parts, self.static)


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
    checkpoint = None if folder is None else Path(folder) / "checkpoint.deepssm"
    saved = checkpoints.read_header(checkpoint) if resume and checkpoint else None
    if isinstance(objective, Constrained) and objective.distortion_baseline == "auto":
        baseline = saved["baseline"] if saved else find_baseline(model_config, training, data, watch)
        objective = dataclasses.replace(objective, distortion_baseline=baseline)

    shape, controls = data.x.shape[2:], data.u.shape[2]
    program = Program(lambda seed: model_config.build(shape, controls, jax.random.key(seed)), objective, training)
    state, diverged, seconds = program.start(), {}, 0.0
    if saved and checkpoint:
        state, seconds = checkpoints.load(checkpoint, state), saved["seconds"]
        diverged = {int(seed): reason for seed, reason in saved["diverged"].items()}
    log = checkpoints.Log(Path(folder) / "metrics.jsonl", int(state.step[0]) if saved else 0) if folder else None

    arrays = tuple(jnp.asarray(part) for part in (data.x, data.u, data.mask))
    began, last_saved = time.monotonic() - seconds, time.monotonic()
    while (step := int(state.step[0])) < training.steps:
        done = min(step + training.chunk, training.steps)
        proposed, values = program.run(state, arrays, length=done - step)
        metrics = {name: np.asarray(value) for name, value in values.items()}
        diverged = _failures(metrics, step, training.all_seeds) | diverged
        if len(diverged) == training.seeds:
            raise DeepSSMError(_divergence(diverged, checkpoint, last=step))
        alive = jnp.asarray([seed not in diverged for seed in training.all_seeds])
        state = _select(alive, proposed, state)._replace(step=proposed.step)
        if log:
            log.write(step, metrics, training.all_seeds)
        if checkpoint and (done == training.steps or time.monotonic() - last_saved >= training.checkpoint_seconds):
            baseline = getattr(objective, "distortion_baseline", None)
            facts = {"step": done, "baseline": baseline, "diverged": diverged, "seconds": time.monotonic() - began}
            checkpoints.save(checkpoint, {**(header or {}), **facts}, state)
            last_saved = time.monotonic()
        watch("training", done, training.steps, metrics)
    return Fit(program.models(state), objective, time.monotonic() - began, diverged)


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
        chunk=50,
    )
    fit(model_config, Elbo(), short, data, watch=note)
    return distortion_baseline(min(distortions))


@cache
def _compiler_options() -> dict[str, Any] | None:
    """On a CPU, options that halve the time to compile and leave the step as fast; None where they are not known."""
    options = {"xla_backend_optimization_level": 1, "xla_cpu_use_fusion_emitters": False}
    if jax.default_backend() != "cpu":
        return None
    try:
        jax.jit(jnp.negative, compiler_options=options)(0.0)
    except jax.errors.JaxRuntimeError:
        return None
    return options


def _key(seed: Array, purpose: int, step: Array) -> Array:
    """A random key of its own for each seed, purpose and step: the two words of a key of Threefry, used directly.

    Folding them into a key one after the other would be the same and take a second longer to compile.
    """
    words = jnp.stack([4 * seed + purpose, step]).astype(jnp.uint32)
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def _is_parameter(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _groups(parameters: Model) -> Any:
    """The name of the group of every parameter."""

    def group(path: Any, leaf: Any) -> str:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return "observation" if name.split(".")[0] in parameters.observation_parts else "dynamics"

    return jax.tree_util.tree_map_with_path(group, parameters)


def _select(condition: Any, new: Any, old: Any) -> Any:
    """Leaf by leaf, new where the condition (a scalar, or one entry a seed) holds."""

    def select(new: Array, old: Array) -> Array:
        keep = jnp.asarray(condition)
        return jnp.where(keep.reshape(keep.shape + (1,) * (new.ndim - keep.ndim)), new, old)

    return jax.tree.map(select, new, old)


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


def _divergence(diverged: dict[int, str], checkpoint: Path | None, last: int) -> str:
    reasons = "; ".join(f"seed {seed}, {reason}" for seed, reason in diverged.items())
    kept = f"The last good checkpoint is kept in {checkpoint}. " if checkpoint and checkpoint.exists() else ""
    return f"Training diverged ({reasons}). {kept}Lower the learning rates, or look for outliers in the data."
