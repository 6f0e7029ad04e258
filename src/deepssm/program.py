"""The compiled part of training: one program for a chunk of steps of all seeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from deepssm import files
from deepssm.errors import DeepSSMError
from deepssm.models.base import Trainable
from deepssm.objectives import Objective

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
    dynamics_decay: float = 0.0
    """The same for the networks in transition and prior."""
    shortest: int = 0
    """In the main phase, cut every other sequence of a step to a random length from this one on; 0: never.
    A recognition network that reads ahead otherwise knows only sequences as long as those of the data, and errs about
    the first few frames of one."""
    decay: Literal["cosine", "constant"] = "cosine"
    """How the two rates change over the run."""
    warm_up: int = 0
    """Steps in which the rates rise from zero. Adam's first steps are as long as any: too long for a good start."""
    precision: Literal["float32", "tensorfloat32"] = "float32"
    """Of matrix products in training. TensorFloat-32 is faster on NVIDIA accelerators and the same elsewhere;
    models are measured in float32."""
    devices: Literal["one", "all"] = "one"
    """Train on one device, or split the sequences of each step over all of them, those of other machines too
    (`deepssm.program.join`)."""
    seed: int = 0
    """The first seed."""
    seeds: int = 1
    """Number of seeds, trained in the same program."""
    head_start: int = 0
    """Steps of each stage of the head start (`deepssm.headstart`), for EKVAE and KVAE; 0: none."""
    baseline_steps: int = 2000
    """Steps of the classical run that finds D_max."""
    chunk: int = 100
    """Steps between two looks at the run: progress, log, checkpoint."""
    checkpoint_seconds: float = 30.0
    """Least time between two checkpoints."""

    def rate(self, group: str, step: Array) -> Array:
        rates = {"observation": self.learning_rate, "dynamics": self.dynamics_rate}
        fraction = 0.5 * (1 + jnp.cos(jnp.pi * step / self.steps)) if self.decay == "cosine" else jnp.ones(())
        return rates[group] * fraction * jnp.minimum((step + 1) / (self.warm_up + 1), 1.0)

    @property
    def all_seeds(self) -> tuple[int, ...]:
        return tuple(range(self.seed, self.seed + self.seeds))


class State(NamedTuple):
    """Everything that changes during training. No random key: noise is a function of seed and step."""

    parameters: dict[str, Array]
    """By group, each one vector: an optimiser step is then a few kernels, not a few for each array of the model."""
    optimisers: dict[str, Any]
    objective: Any
    step: Array


class Program:
    """Chunks of steps for all seeds.

    On an accelerator the seeds are one batch; on a CPU, where products with a batch of weights are slow, they take
    turns inside the program. So do those of a model with convolutions anywhere: one seed fills an accelerator, and
    convolutions with a batch of weights are very slow there too.
    """

    def __init__(self, build: Callable[[Array], Trainable], objective: Objective, training: TrainingConfig):
        self.build, self.objective, self.training = build, objective, training
        shapes, self.static = eqx.partition(eqx.filter_eval_shape(build, jnp.asarray(0)), _is_parameter)
        self.group_of = _groups(shapes)
        self.shapes = {group: self._part(shapes, group) for group in GROUPS}
        decays = {"observation": training.weight_decay, "dynamics": training.dynamics_decay}
        self.decays = {group: decay * _weights(self.shapes[group]) for group, decay in decays.items()}
        self.adam = optax.scale_by_adam()
        self.seeds = np.asarray(training.all_seeds)
        convolutional = any(leaf.ndim == 4 for leaf in jax.tree.leaves(shapes))
        self.in_turn = convolutional or jax.default_backend() == "cpu"
        self.mesh = Mesh(np.asarray(jax.devices()), ("batch",)) if training.devices == "all" else None
        self.run = jax.jit(
            self._run,
            static_argnames="length",
            compiler_options=_compiler_options(),
            out_shardings=self.mesh and NamedSharding(self.mesh, PartitionSpec()),
        )

    def start(self) -> State:
        parameters, optimisers = jax.jit(partial(jax.lax.map, self._start))(self.seeds)
        objective, step = jax.tree.map(self._for_all_seeds, (self.objective.init(), 0))
        return State(parameters, optimisers, objective, step)

    def on_devices(self, arrays: Any) -> Any:
        """The same arrays on every device that takes part."""
        return jax.device_put(arrays, self.mesh and NamedSharding(self.mesh, PartitionSpec()))

    def models(self, parameters: dict[str, Any]) -> list[Any]:
        """One for each seed, from the parameters of a state."""

        def model(index: int) -> Trainable:
            return self._model({group: jnp.asarray(vectors[index]) for group, vectors in parameters.items()})

        return [model(index) for index in range(len(self.seeds))]

    def _for_all_seeds(self, value: Any) -> Array:
        # Typed: weakly typed leaves would become strong in the first chunk, and the second would compile again.
        value = jnp.asarray(value)
        return jnp.full(len(self.seeds), value, value.dtype)

    def _start(self, seed: Array) -> tuple[dict[str, Array], dict[str, Any]]:
        model = self.build(seed)
        parameters = {
            group: jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(self._part(model, group))])
            for group in GROUPS
        }
        return parameters, {group: self.adam.init(vector) for group, vector in parameters.items()}

    def _run(self, state: State, data: tuple[Array, ...], length: int) -> tuple[State, dict[str, Array]]:
        def one(inputs: tuple[Array, State]) -> tuple[State, dict[str, Array]]:
            seed, state = inputs
            return jax.lax.scan(lambda state, _: self._step(seed, state, data), state, length=length)

        seeds = jnp.asarray(self.seeds)
        with jax.default_matmul_precision(self.training.precision):
            if self.in_turn:
                return jax.lax.map(one, (seeds, state))
            return jax.vmap(one)((seeds, state))

    def _step(self, seed: Array, state: State, data: tuple[Array, ...]) -> tuple[State, dict[str, Array]]:
        """One step of Alg. 1: distortion and rate, the objective's state, then the gradient under its new weights."""
        x, u, seen = self._split(self._batch(seed, state.step, data))
        if self.training.shortest:
            seen = self._cut(seed, state, seen)

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
            moved = vector - self.training.rate(group, state.step) * (update + self.decays[group] * vector)
            train = True if group == "observation" else self.objective.trainable(objective)
            parameters[group], optimisers[group] = select(train, (moved, moments), (vector, state.optimisers[group]))
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

    def _split(self, batch: tuple[Array, ...]) -> tuple[Array, ...]:
        """Over the devices: what follows is computed where its sequence is, and gradients are summed."""
        if self.mesh is None:
            return batch
        return jax.lax.with_sharding_constraint(batch, NamedSharding(self.mesh, PartitionSpec("batch")))

    def _cut(self, seed: Array, state: State, seen: Array) -> Array:
        sequences, frames = seen.shape
        lengths = jax.random.randint(_key(seed, 3, state.step), (sequences, 1), self.training.shortest, frames + 1)
        whole = (jnp.arange(sequences)[:, None] % 2 == 1) | ~self.objective.trainable(state.objective)
        return seen & ((jnp.arange(frames) < lengths) | whole)

    def _part(self, tree: Any, group: str) -> Any:
        return eqx.filter(tree, jax.tree.map(lambda name: name == group, self.group_of))

    def _model(self, parameters: dict[str, Array]) -> Trainable:
        """The model of the vectors of its groups."""
        parts = []
        for group, shapes in self.shapes.items():
            leaves, structure = jax.tree.flatten(shapes)
            pieces = jnp.split(parameters[group], np.cumsum([leaf.size for leaf in leaves])[:-1])
            arrays = [piece.reshape(leaf.shape) for piece, leaf in zip(pieces, leaves, strict=True)]
            parts.append(jax.tree.unflatten(structure, arrays))
        return eqx.combine(*parts, self.static)


def join(coordinator: str, processes: int, process: int) -> None:
    """Become one of several processes, on one machine or on many, that train together (`jax.distributed`)."""
    try:
        jax.distributed.initialize(coordinator, processes, process)
    except (RuntimeError, ValueError) as error:
        raise DeepSSMError(
            f"Process {process} of {processes} cannot join {coordinator}: {error}. Give every process the same address "
            "of process 0 (host:port) and a number of its own from 0 on."
        ) from error


def use_compilation_cache() -> None:
    """Keep compiled programs on disk."""
    jax.config.update("jax_compilation_cache_dir", str(files.cache()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


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


def _groups(parameters: Trainable) -> Any:
    """The name of the group of every parameter."""

    def group(path: Any, leaf: Any) -> str:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return "observation" if name.split(".")[0] in parameters.observation_parts else "dynamics"

    return jax.tree_util.tree_map_with_path(group, parameters)


def _weights(parameters: Any) -> NDArray[np.float32]:
    """1 at the weights of networks and 0 elsewhere, in the vector of a group."""
    leaves = jax.tree_util.tree_leaves_with_path(parameters)
    marks = [np.full(leaf.size, jax.tree_util.keystr(path).endswith(".W"), np.float32) for path, leaf in leaves]
    return np.concatenate(marks)


def select(condition: Any, new: Any, old: Any) -> Any:
    """Leaf by leaf, new where the condition (a scalar, or one entry a seed) holds."""

    def select(new: Array, old: Array) -> Array:
        keep = jnp.asarray(condition)
        return jnp.where(keep.reshape(keep.shape + (1,) * (new.ndim - keep.ndim)), new, old)

    return jax.tree.map(select, new, old)
