"""Sequences of observations with controls, and the files that hold them."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepssm import files
from deepssm.errors import DeepSSMError

FORMAT = "deepssm-data"
VERSION = 2


class Sequences(NamedTuple):
    """N sequences of T frames; u_t acts between x_t and x_t+1."""

    x: NDArray[Any]
    """Observations (N, T, *shape): floats, or bytes that stand for 0..1 (`intensities`)."""
    u: NDArray[Any]
    """Controls (N, T, n_u); zero-width without controls."""
    mask: NDArray[np.bool_]
    """(N, T), True for a seen frame."""
    state: NDArray[Any] | None = None
    """Ground truth (N, T, n_s) where it is known; used for evaluation only."""


@dataclass(frozen=True)
class Variable:
    """A quantity: a column of the ground truth, of the controls, or of observations that are no pictures."""

    name: str
    unit: str
    circular: bool = False
    """An angle that may turn all the way round; regressions use its sine and cosine."""


@dataclass(frozen=True)
class About:
    """What the arrays of a data set mean."""

    name: str
    dt: float
    """Seconds between two frames."""
    states: tuple[Variable, ...] = ()
    """The ground truth."""
    controls: tuple[Variable, ...] = ()
    observations: tuple[Variable, ...] = ()
    """None for pictures."""
    noise: float | None = None
    """Standard deviation of the noise in x where it is known: its square is the floor of every prediction error."""
    source: str = ""


class Dataset(NamedTuple):
    """Training, validation and test sequences."""

    train: Sequences
    validation: Sequences
    test: Sequences
    about: About


SPLITS = ("train", "validation", "test")


def intensities(x: Any) -> Any:
    """Observations as models and errors see them: bytes become floats in 0..1."""
    return x.astype(np.float32) / 255 if x.dtype == np.uint8 else x


def seen_frames(data: Sequences, count: int) -> NDArray[Any]:
    """At most `count` observations that are seen, spread evenly over the data."""
    seen = np.flatnonzero(data.mask)
    chosen = seen[spread(len(seen), count)]
    return data.x[np.unravel_index(chosen, data.mask.shape)]


def spread(length: int, count: int) -> NDArray[np.integer]:
    """At most `count` places, spread evenly over a list."""
    return np.linspace(0, length - 1, min(count, length)).astype(int)


def check(dataset: Dataset) -> Dataset:
    """The data set itself, or a DeepSSMError that names the first thing wrong with it."""
    shape, controls = dataset.train.x.shape[2:], dataset.train.u.shape[2:]
    for name in SPLITS:
        part: Sequences = getattr(dataset, name)
        if part.x.ndim < 3 or 0 in part.x.shape:
            raise DeepSSMError(
                f"{name}/x has shape {part.x.shape}; expected (sequences, frames, ...), none of them zero."
            )
        frames = part.x.shape[:2]
        expected = {"x": (*frames, *shape), "u": (*frames, *controls), "mask": frames}
        if part.u.ndim != 3:
            raise DeepSSMError(
                f"{name}/u has shape {part.u.shape}; expected (sequences, frames, controls): "
                "without controls give it width zero."
            )
        for field, wanted in expected.items():
            got = getattr(part, field).shape
            if got != wanted:
                raise DeepSSMError(f"{name}/{field} has shape {got}; expected {wanted}, as in train and {name}/x.")
        if part.state is not None and part.state.shape != (*frames, len(dataset.about.states)):
            raise DeepSSMError(
                f"{name}/state has shape {part.state.shape}; expected {(*frames, len(dataset.about.states))}: "
                "one column for each variable of the ground truth."
            )
        _check_finite(name, "x", part.x, part.mask)
        _check_finite(name, "u", part.u, np.ones(frames, bool))
    return dataset


def _check_finite(split: str, field: str, array: NDArray[Any], relevant: NDArray[np.bool_]) -> None:
    if array.dtype.kind in "ui":
        return
    finite = np.isfinite(array.reshape(*array.shape[:2], -1)).all(axis=-1) | ~relevant
    if not finite.all():
        sequence, frame = np.argwhere(~finite)[0]
        raise DeepSSMError(
            f"{split}/{field} holds NaN or infinity in sequence {sequence}, frame {frame} "
            f"({int((~finite).sum())} frames in all). Mark unseen frames with False in the mask."
        )


def save(dataset: Dataset, path: Path) -> None:
    """Write a data set as one .npz file: arrays named like train/x, and `about`, a JSON text."""
    check(dataset)
    about = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(dataset.about)}
    arrays = {"about": np.frombuffer(json.dumps(about).encode(), np.uint8)}
    for name in SPLITS:
        part: Sequences = getattr(dataset, name)
        arrays |= {f"{name}/{field}": array for field, array in part._asdict().items() if array is not None}

    files.write_arrays(path, arrays)


def load(path: Path) -> Dataset:
    """Read what `save` wrote."""
    if not Path(path).exists():
        raise DeepSSMError(f"No data file {path}. Make one with 'deepssm data pendulum --out {path}'.")
    arrays = files.read_arrays(path, "Copy or make it again.")
    try:
        about = json.loads(arrays["about"].tobytes())
        if about.pop("format") != FORMAT or about.pop("version") != VERSION:
            raise KeyError("format")
        for kind in ("states", "controls", "observations"):
            about[kind] = tuple(Variable(**variable) for variable in about[kind])
        parts = {
            name: Sequences(
                arrays[f"{name}/x"], arrays[f"{name}/u"], arrays[f"{name}/mask"], arrays.get(f"{name}/state")
            )
            for name in SPLITS
        }
        return check(Dataset(**parts, about=About(**about)))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DeepSSMError(
            f"{path} is not a {FORMAT} file of version {VERSION}: {error} is missing or not understood. "
            "Make it with 'deepssm data' or deepssm.data.sequences.save."
        ) from error
