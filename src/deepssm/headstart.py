"""A head start for models of pictures: features that change slowly, found without training, then dynamics for them.

    0. Slow features of the pictures, as positions (`deepssm.slow`).
    1. The encoder learns to say them, frame by frame.
    2. Encoder and dynamics learn their evidence lower bound, with slow features in place of pictures. Those are only
       about right, and the encoder may differ from them: what it says becomes smooth and predictable.
    3. The decoder learns to draw what the encoder says.

Training begins there. An encoder that starts at random may fold the world instead, and no gradient unfolds it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import PRNGKeyArray
from numpy.typing import NDArray

from deepssm import slow
from deepssm.data.sequences import Sequences
from deepssm.errors import DeepSSMError
from deepssm.gaussian import Diagonal
from deepssm.models.base import Controls, Observations, Seen, Terms, Trainable, components_first
from deepssm.models.kalman_vae import KalmanVAE
from deepssm.networks import Decoder, Encoder
from deepssm.objectives import Elbo
from deepssm.program import Program, TrainingConfig
from deepssm.transitions import Integrating

PRECISION = 0.03
"""Standard deviation of the slow features around what the encoder says, as the first stage weighs it."""
TOLERANCE = 0.1
"""The same in the second stage."""
SURE = 0.003
"""Standard deviation that the encoder learns to state. Free to be unsure, it would hide velocities in noise, since slow
features do not ask for precision. Pictures do."""
FRAMES = 32
"""In a step of the first and third stages."""
SEQUENCES = 4
"""In a step of the second."""
WARM_UP = 100
"""Steps in which the rates of a stage rise."""
AT_ONCE = 1000
"""Frames that are encoded at the same time."""

Build = Callable[[Array], Any]
Watch = Callable[[str, int, int, dict[str, NDArray[Any]]], None]
Note = Callable[[str, int, dict[str, Array]], None]


class Parts(Trainable):
    """A Kalman VAE as encoder, decoder and the rest, each of which a stage may train."""

    encoder: Encoder
    decoder: Decoder
    rest: Any
    observation_parts = KalmanVAE.observation_parts

    @classmethod
    def of(cls, model: KalmanVAE) -> Parts:
        rest = eqx.tree_at(lambda model: (model.encoder, model.decoder), model, (None, None))
        return cls(model.encoder, model.decoder, rest)

    @property
    def model(self) -> KalmanVAE:
        parts, absent = (self.encoder, self.decoder), lambda part: part is None
        return eqx.tree_at(lambda model: (model.encoder, model.decoder), self.rest, parts, is_leaf=absent)


class Told(Parts):
    """Single frames x, of which the encoder is told what to say: slow features, instead of u."""

    def terms(self, x: Observations, slow: Controls, seen: Seen, key: PRNGKeyArray) -> Terms:
        q = self.encoder(x[:, 0])
        error = jnp.sum((slow[:, 0].T - q.m) ** 2, axis=0) / (2 * PRECISION**2)
        return Terms.of(jnp.where(seen[:, 0], error, 0.0), {"unsure": jnp.where(seen[:, 0], _unsure(q), 0.0)})


class Moving(Parts):
    """Sequences of pictures that stand for slow features: the last of the controls, after u.

    Velocities follow the same linear system everywhere. Were it another one in other places, it would explain how slow
    features are bent; as it is, the encoder has to straighten them.
    """

    def terms(self, x: Observations, u: Controls, seen: Seen, key: PRNGKeyArray) -> Terms:
        a_key, rate_key = jax.random.split(key)
        model = _uniform(self.model)
        u, slow = jnp.split(components_first(u), [u.shape[2] - model.config.auxiliary])
        q_a = model.encode(x)
        distortion = jnp.sum((slow - q_a.m) ** 2, axis=0) / (2 * TOLERANCE**2) + _unsure(q_a)
        q_a = Diagonal(q_a.m, jnp.full_like(q_a.v, SURE**2))
        parts = model.rates(q_a, q_a.sample(a_key), u, seen.T, rate_key)
        return Terms.of(jnp.where(seen.T, distortion, 0.0).sum(0), parts)


class Drawing(Parts):
    """Single frames, of which the decoder is told what the encoder says, instead of u."""

    def terms(self, x: Observations, said: Controls, seen: Seen, key: PRNGKeyArray) -> Terms:
        distortion = -jnp.where(seen[:, 0], self.decoder.log_prob(x[:, 0], said[:, 0].T), 0.0)
        return Terms(distortion, jnp.zeros_like(distortion), {})


def _uniform(model: KalmanVAE) -> KalmanVAE:
    """All base matrices alike, where they start alike."""
    if not isinstance(model.transition, Integrating):
        return model
    return eqx.tree_at(lambda model: model.transition.g, model, replace_fn=lambda g: jax.tree.map(jnp.zeros_like, g))


def _unsure(q: Diagonal) -> Array:
    """How far the encoder is from stating `SURE`."""
    return jnp.sum((jnp.log(q.v) - 2 * math.log(SURE)) ** 2, axis=0)


def learn(build: Build, training: TrainingConfig, data: Sequences, watch: Watch) -> dict[str, Array]:
    """Parameters of all seeds at the start of training: of models that know slow features and how they move."""
    shapes = eqx.filter_eval_shape(build, jnp.asarray(0))
    if not isinstance(shapes, KalmanVAE):
        raise DeepSSMError(
            f"Got a head start for a model of class {type(shapes).__name__}; expected EKVAE or KVAE, which encode "
            "single frames. Set --head-start 0."
        )
    positions = shapes.config.auxiliary
    circles = max(2 * positions - shapes.config.states, 0)
    targets = slow.positions(slow.slow_features(data, positions), circles)
    found = []
    for index, seed in enumerate(training.all_seeds):

        def note(stage: str, done: int, metrics: dict[str, Array], before: int = index * training.head_start) -> None:
            values = {name: np.asarray(value) for name, value in metrics.items()}
            watch(stage, before + done, training.seeds * training.head_start, values)

        found.append(_learn_one(build, dataclasses.replace(training, seed=seed, seeds=1), data, targets, note))
    return jax.tree.map(lambda *vectors: jnp.concatenate(vectors), *found)


def _learn_one(
    build: Build, training: TrainingConfig, data: Sequences, targets: NDArray[np.floating], note: Note
) -> dict[str, Array]:
    """For one seed."""
    stage = dataclasses.replace(
        training,
        steps=training.head_start,
        decay="cosine",
        warm_up=WARM_UP,
        shortest=0,
        weight_decay=0.0,  # it would shrink what a stage does not train
        dynamics_decay=0.0,
        devices="one",  # steps are too small to be split; several processes do the same
    )
    frame_by_frame = dataclasses.replace(stage, batch=FRAMES, learning_rate=3e-3)
    moving = dataclasses.replace(stage, batch=SEQUENCES, learning_rate=1.5e-3, dynamics_rate=1e-2)

    told = (_frames(data.x), _frames(targets), _frames(data.mask))
    parameters = _train("encoder", lambda seed: Told.of(build(seed)), frame_by_frame, told, None, note)
    sequences = (data.x, np.concatenate([data.u, targets], axis=-1, dtype=np.float32), data.mask)
    parameters = _train("dynamics", lambda seed: Moving.of(build(seed)), moving, sequences, parameters, note)
    (model,) = Program(build, Elbo(), stage).models(parameters)
    said = (_frames(data.x), _frames(_said(model.encoder, data)), _frames(data.mask))
    return _train("decoder", lambda seed: Drawing.of(build(seed)), frame_by_frame, said, parameters, note)


def _train(
    name: str,
    build: Build,
    training: TrainingConfig,
    arrays: tuple[NDArray[Any], ...],
    parameters: dict[str, Array] | None,
    note: Note,
) -> dict[str, Array]:
    program = Program(build, Elbo(), training)
    state = program.start()
    state, arrays = program.on_devices((state._replace(parameters=parameters or state.parameters), arrays))
    for done in range(0, training.steps, training.chunk):
        length = min(training.chunk, training.steps - done)
        state, metrics = program.run(state, arrays, length=length)
        note(name, done + length, metrics)
    return state.parameters


def _frames(array: NDArray[Any]) -> NDArray[Any]:
    """As sequences of one."""
    return array.reshape(-1, 1, *array.shape[2:])


def _said(encoder: Encoder, data: Sequences) -> NDArray[np.float32]:
    """The encoder's means (N, T, n_a)."""
    encode = eqx.filter_jit(lambda x: encoder(x).m.T)
    frames = data.x.reshape(-1, *data.x.shape[2:])
    parts = [np.asarray(encode(frames[first : first + AT_ONCE])) for first in range(0, len(frames), AT_ONCE)]
    return np.concatenate(parts).reshape(*data.x.shape[:2], -1)
