"""A head start for models of pictures: features that change slowly, found without training, then dynamics for them.

    1. Slow features of the pictures, as positions (`deepssm.slow`).
    2. Encoder and decoder learn to say and to draw them, by regression.
    3. Transition, noise and prior learn from what the encoder says, which stays as it is; no picture is touched.

Training begins there. An encoder that starts at random may fold the world instead, and no gradient unfolds it.
"""

from __future__ import annotations

import dataclasses
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

TOLERANCE = 0.03
"""Standard deviation of the encoder's means around the slow features, as regression weighs it."""
AT_ONCE = 1000
"""Frames that are encoded at the same time."""

Build = Callable[[Array], Any]
Watch = Callable[[str, int, int, dict[str, NDArray[Any]]], None]
Note = Callable[[str, int, dict[str, Array]], None]


class Parts(Trainable):
    """A Kalman VAE as encoder, decoder and the rest, of which a stage trains some."""

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
    """Single frames, of which the encoder is told what to say and the decoder what was said: the targets, instead of u.

    The distortion is that of the pictures given the targets. The encoder's means are fitted by least squares and its
    variances to what is left: with the likelihood of both, pictures that are hard to read would get large variances
    and count no longer.
    """

    def terms(self, x: Observations, targets: Controls, seen: Seen, key: PRNGKeyArray) -> Terms:
        x, a, seen = x[:, 0], targets[:, 0].T, seen[:, 0]
        distortion = -jnp.where(seen, self.decoder.log_prob(x, a), 0.0)
        q = self.encoder(x)
        error = jnp.sum((a - q.m) ** 2, axis=0) / (2 * TOLERANCE**2)
        surprise = -Diagonal(jax.lax.stop_gradient(q.m), q.v).log_prob(a)
        return Terms.of(distortion, {"told": jnp.where(seen, error + surprise, 0.0)})


class Heard(Parts):
    """Sequences of what the encoder said, means before variances, instead of x."""

    def terms(self, said: Observations, u: Controls, seen: Seen, key: PRNGKeyArray) -> Terms:
        a_key, rate_key = jax.random.split(key)
        q_a = Diagonal(*jnp.split(components_first(said), 2))
        parts = self.model.rates(q_a, q_a.sample(a_key), components_first(u), seen.T, rate_key)
        return Terms.of(jnp.zeros(len(said)), parts)


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
    stage = dataclasses.replace(training, steps=training.head_start, decay="cosine", warm_up=300, shortest=0)
    regression = dataclasses.replace(stage, batch=32, learning_rate=3e-3)
    frames = tuple(part.reshape(-1, 1, *part.shape[2:]) for part in (data.x, targets, data.mask))
    parameters = _train("regression", lambda seed: Told.of(build(seed)), regression, frames, None, note)
    (model,) = Program(build, Elbo(), stage).models(parameters)
    assert isinstance(model, KalmanVAE)
    sequences = (_said(model.encoder, data), data.u, data.mask)
    hearing = dataclasses.replace(stage, batch=128)
    heard = _train("dynamics", lambda seed: Heard.of(build(seed)), hearing, sequences, parameters, note)
    return {**parameters, "dynamics": heard["dynamics"]}


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


def _said(encoder: Encoder, data: Sequences) -> NDArray[np.float32]:
    """Means and variances of all frames (N, T, 2 n_a)."""
    encode = eqx.filter_jit(lambda x: jnp.concatenate(encoder(x)).T)
    frames = data.x.reshape(-1, *data.x.shape[2:])
    parts = [np.asarray(encode(frames[first : first + AT_ONCE])) for first in range(0, len(frames), AT_ONCE)]
    return np.concatenate(parts).reshape(*data.x.shape[:2], -1)
