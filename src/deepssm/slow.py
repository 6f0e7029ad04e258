"""Slow features: what changes least from frame to frame, found without training.

An encoder that starts at random may fold the world: two states that look alike share a feature, the decoder draws
something in between, and no gradient leads out of it. States of a moving system are what changes slowly, though, and
the slowest functions of a picture have a closed form once it is expanded into enough random features: slow feature
analysis (Wiskott and Sejnowski 2002), here in three stages, each on the slow features of the one before. They say
what to encode; `positions` puts them into the form that transitions expect (`deepssm.headstart`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepssm.data.sequences import Sequences, intensities, spread
from deepssm.errors import DeepSSMError

Floats = NDArray[np.floating]

EDGE = 32
"""Pictures are averaged down to this many pixels, or a little more, along an edge."""
PICTURES = 10_000
"""Frames that tell the principal components."""
COMPONENTS = 60
"""Principal components of the pictures that the first stage sees."""
FEATURES = (3000, 3000, 3000)
"""Random features of each stage."""
KEPT = 30
"""Slow features that each stage hands on. With a few only, the next stage learns the training sequences by heart."""
BANDWIDTH = 1.5
SMALLEST = 3e-3
"""Smallest variance of a combination of random features, relative to the mean; others are not looked at."""
FRAMES = 60_000
"""Frames to learn from; others are only looked at."""
SAMPLE = 4000
"""Frames that tell whether a feature is a function of others."""
OVERTONE = 0.5
"""It is, if so much of its variance is explained by them."""
BINS = 40
"""Parts of a line in which its speed is measured."""
BLOCK = 2000
"""Frames at a time: bounds the memory."""


class Steps(NamedTuple):
    """Frames as a list, and which of them follow one another."""

    frames: Floats
    first: NDArray[np.integer]
    """Each of these frames is followed by the next in the list."""


class Expansion(NamedTuple):
    """Random features cos(W' y + b)."""

    W: Floats
    b: Floats

    def __call__(self, y: Floats) -> Floats:
        return np.cos(y @ self.W + self.b)


class Stage(NamedTuple):
    """Slow functions of y, of unit variance: U' (expand(y) - mean)."""

    expand: Expansion
    mean: Floats
    U: Floats
    slowness: Floats
    """Of each function: the variance of its change from a frame to the next."""

    def __call__(self, y: Floats) -> Floats:
        blocks = (y[start : start + BLOCK] for start in range(0, len(y), BLOCK))
        return np.concatenate([(self.expand(block) - self.mean) @ self.U for block in blocks])


def slow_features(data: Sequences, count: int, seed: int = 0) -> Floats:
    """The `count` slowest features of every frame, (N, T, count), each of unit variance; 0 where nothing is seen."""
    seen = data.mask
    if seen.sum() <= COMPONENTS:
        raise DeepSSMError(
            f"Got {seen.sum()} frames; a head start needs more than {COMPONENTS}. Give more, or set --head-start 0."
        )
    places = np.cumsum(seen.ravel()).reshape(seen.shape) - 1  # of each seen frame in the list
    first = places[:, :-1][seen[:, :-1] & seen[:, 1:]]
    generator = np.random.default_rng(seed)
    y = principal_components(data)
    for features in FEATURES:
        stage = learn_stage(Steps(y, first), features, generator)
        slow = stage(y)
        y = slow / np.sqrt(stage.slowness * np.sum(1 / stage.slowness))  # the slower, the larger; 1 together
    found = np.zeros((*seen.shape, count), np.float32)
    found[seen] = slow[:, new_ones(slow, count, generator)]
    return found


def principal_components(data: Sequences) -> Floats:
    """Of all seen frames, as rows; with a mean square of 1 together."""
    seen = np.flatnonzero(data.mask)
    sample = pooled(data, seen[spread(len(seen), PICTURES)])
    mean = sample.mean(0)
    sample = sample - mean
    axes = np.linalg.eigh(sample.T @ sample)[1][:, ::-1][:, :COMPONENTS]
    blocks = (seen[start : start + BLOCK] for start in range(0, len(seen), BLOCK))
    y = np.concatenate([(pooled(data, block) - mean) @ axes for block in blocks])
    return y / np.sqrt(np.mean(np.sum(y**2, axis=1)))


def pooled(data: Sequences, places: NDArray[np.integer]) -> Floats:
    """Some frames, counted through all sequences, as rows: small pictures, or sensors as they are."""
    return _small(intensities(data.x[np.unravel_index(places, data.mask.shape)])).reshape(len(places), -1)


def _small(pictures: Floats) -> Floats:
    """Means of squares of pixels; an edge that cannot be divided evenly stays."""
    if pictures.ndim < 3:
        return pictures
    frames, *edges = pictures.shape[:3]
    factors = (max(f for f in range(1, max(edge // EDGE, 1) + 1) if edge % f == 0) for edge in edges)
    (h, fh), (w, fw) = ((edge // f, f) for edge, f in zip(edges, factors, strict=True))
    return np.asarray(pictures, np.float32).reshape(frames, h, fh, w, fw, -1).mean((2, 4))


def learn_stage(steps: Steps, features: int, generator: np.random.Generator) -> Stage:
    """Minimise the change from frame to frame over unit variance: D U = C U diag(slowness) with U' C U = I."""
    y, first = steps
    W, b = BANDWIDTH * generator.standard_normal((y.shape[1], features)), generator.uniform(0, 2 * np.pi, features)
    expand = Expansion(W.astype(np.float32), b.astype(np.float32))
    chosen = first[spread(len(first), FRAMES)]
    mean, C, D = np.zeros(features), np.zeros((features, features)), np.zeros((features, features))
    for start in range(0, len(chosen), BLOCK):
        index = chosen[start : start + BLOCK]
        now, then = (expand(y[place]).astype(np.float64) for place in (index, index + 1))
        mean += now.sum(0)
        C += now.T @ now
        D += (then - now).T @ (then - now)
    mean, D = mean / len(chosen), D / len(chosen)
    C = C / len(chosen) - np.outer(mean, mean)
    variances, axes = np.linalg.eigh(C)
    kept = variances > SMALLEST * variances.mean()  # what hardly varies is not slow but nothing
    whiten = axes[:, kept] / np.sqrt(variances[kept])
    slowness, V = np.linalg.eigh(whiten.T @ D @ whiten)
    U = whiten @ V[:, :KEPT]
    return Stage(expand, mean.astype(np.float32), U.astype(np.float32), slowness[:KEPT].astype(np.float32))


def new_ones(slow: Floats, count: int, generator: np.random.Generator) -> list[int]:
    """The `count` slowest features of which none is a function of those before it.

    Where one position changes much more slowly than another, its overtones are slow too: cos 2x is 2 (cos x)^2 - 1.
    """
    sample = slow[spread(len(slow), SAMPLE)]
    chosen = [0]
    for index in range(1, slow.shape[1]):
        if len(chosen) < count and _explained(sample[:, chosen], sample[:, index], generator) < OVERTONE:
            chosen.append(index)
    if len(chosen) < count:
        raise DeepSSMError(
            f"Got pictures in which only {len(chosen)} things change slowly; a head start looks for {count}, one for "
            "each auxiliary variable. Give fewer, or set --head-start 0."
        )
    return chosen


def _explained(features: Floats, target: Floats, generator: np.random.Generator) -> float:
    """How much of a target's variance is a smooth function of some features: half of the frames tell, half test."""
    expand = Expansion(generator.standard_normal((features.shape[1], 200)), generator.uniform(0, 2 * np.pi, 200))
    y = np.column_stack([expand(features), np.ones(len(features))])
    products = y[::2].T @ y[::2]
    weights = np.linalg.solve(products + 1e-3 * len(y) / 2 * np.eye(len(products)), y[::2].T @ target[::2])
    return 1 - float(np.mean((target[1::2] - y[1::2] @ weights) ** 2) / target[1::2].var())


def positions(slow: Floats, circles: int) -> Floats:
    """Slow features as positions: those that lie on a circle first, with radius 1, then those on lines.

    The features of a circle and a line form a cylinder, turned in some way: its axis c is the direction that leaves
    the others on a circle, |y|^2 - (c' y)^2 = constant. Products of two features are fitted to that by least squares.
    """
    n = slow.shape[-1]
    if circles > 1 or (circles and n not in (2, 3)):
        raise DeepSSMError(
            f"A head start knows one circle and at most one line, not {circles} circles in {n} dimensions. "
            "Set --head-start 0."
        )
    if not circles:
        return np.stack([even(feature) for feature in np.moveaxis(slow, -1, 0)], axis=-1)
    y = slow.reshape(-1, n)
    axis = cylinder_axis(y[np.any(y != 0, axis=1)]) if n == 3 else np.zeros((0, n))
    circle = slow @ np.linalg.svd(np.eye(n) - axis.T @ axis)[0][:, :2]
    circle = circle / np.maximum(np.linalg.norm(circle, axis=-1, keepdims=True), 1e-6)
    return np.concatenate([circle, *(even(slow @ direction)[..., None] for direction in axis)], axis=-1)


def even(feature: Floats) -> Floats:
    """A feature (N, T) bent so that it changes as fast everywhere, of unit variance.

    The slowest functions along a line are not straight but turn over at its ends, like half a cosine.
    """
    steps, places = np.diff(feature, axis=1).ravel(), (0.5 * (feature[:, 1:] + feature[:, :-1])).ravel()
    edges = np.unique(np.quantile(places, np.linspace(0, 1, BINS + 1)))
    bins = np.clip(np.searchsorted(edges, places) - 1, 0, len(edges) - 2)
    mean_square = np.bincount(bins, steps**2) / np.bincount(bins)
    lengths = np.diff(edges) / np.sqrt(mean_square)
    first, last = lengths[[0, -1]] / (edges[[1, -1]] - edges[[0, -2]])
    bent = np.interp(feature, edges, np.concatenate([[0.0], np.cumsum(lengths)]))
    bent += first * np.minimum(feature - edges[0], 0) + last * np.maximum(feature - edges[-1], 0)
    return ((bent - bent.mean()) / bent.std()).astype(np.float32)


def cylinder_axis(y: Floats) -> Floats:
    """(1, 3): the axis of the cylinder that the points lie on."""
    best, least = None, np.inf
    square = np.sum(y**2, axis=1)
    for start in np.eye(3):
        c = start
        for _ in range(50):  # Gauss-Newton on the residual |y|^2 - (c'y)^2 - mean, over c of length 1
            along = y @ c
            residual = square - along**2
            slope = -2 * along[:, None] * y
            centred = slope - slope.mean(0)
            step = np.linalg.lstsq(centred, -(residual - residual.mean()), rcond=None)[0]
            c = (c + step) / np.linalg.norm(c + step)
        radius = square - (y @ c) ** 2
        spread_of_radius = radius.var() / radius.mean() ** 2
        if spread_of_radius < least:
            best, least = c, spread_of_radius
    assert best is not None
    return best[None]
