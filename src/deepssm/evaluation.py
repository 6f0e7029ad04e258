"""Evaluation: was the system identified, and how well is it predicted?

All errors are means over pixels and sequences. Predictions follow the mean of the transition from a mean state:

    smoothed   z_1 given x_1:5, compared with frames 1..T   (the paper's MSE; plain and with re-linearisation)
    filtered   z_5 given x_1:5, compared with frames 5..T

The last smoothed state is the filtered one; in models with a recurrent network its memory comes along.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import PRNGKeyArray
from numpy.typing import NDArray

from deepssm.data.sequences import About, Sequences, intensities
from deepssm.models.base import Model, Posterior

CONDITION = 5
"""Frames that a prediction is conditioned on."""
AT_ONCE = 20_000_000
"""Pixels that are measured at the same time: bounds the memory."""


def evaluate(model: Model, data: Sequences, about: About, seed: int = 0) -> dict[str, Any]:
    """ELBO (nats per frame), R^2 by name, prediction errors and errors over the horizon."""
    size = max(1, AT_ONCE // math.prod(data.x.shape[1:]))
    parts = []
    for index, begin in enumerate(range(0, len(data.x), size)):
        x, u, seen = (jnp.asarray(part[begin : begin + size]) for part in (data.x, data.u, data.mask))
        with jax.default_matmul_precision("float32"):
            measured = _measure(model, x, u, seen, jax.random.key(seed + index))
        parts.append(jax.tree.map(np.asarray, measured))
    sums: dict[str, Mean] = jax.tree.map(lambda *terms: sum(terms), *(sums for sums, _ in parts))
    results: dict[str, Any] = {name: (mean.total / np.maximum(mean.frames, 1)).tolist() for name, mean in sums.items()}
    states = {name: np.concatenate([states[name] for _, states in parts]) for name in ("plain", "iterated")}
    if data.state is not None:
        results |= {
            "r2": identification(states["plain"], data.state, about),
            "r2_first": identification(states["plain"][:, :1], data.state[:, :1], about),
            "r2_iterated": identification(states["iterated"], data.state, about),
        }
        H = getattr(model, "H", None)
        if H is not None and np.array_equal(H, jnp.eye(*H.shape)):
            # What do the dimensions know that observations come from, and what the others?
            positions, others = np.split(states["plain"], [len(H)], axis=-1)
            results |= {
                "r2_positions": identification(positions, data.state, about),
                "r2_others": identification(others, data.state, about),
            }
    return results


class Mean(NamedTuple):
    """A mean over frames in the making."""

    total: Array
    frames: Array


@eqx.filter_jit
def _measure(
    model: Model, x: Array, u: Array, seen: Array, key: PRNGKeyArray
) -> tuple[dict[str, Mean], dict[str, Array]]:
    terms = model.terms(x, u, seen, key)
    frames = seen.sum()
    states = model.smooth(x, u, seen, iterations=0).mean
    known = (x[:, :CONDITION], u[:, :CONDITION], seen[:, :CONDITION])
    plain, iterated = model.smooth(*known, iterations=0), model.smooth(*known)
    starts = {"smoothed": (0, plain), "iterated": (0, iterated), "filtered": (CONDITION - 1, plain)}
    errors = {"mse_reconstruct": _over_time(_squared_error(model.decode(states), x, seen))}
    for name, (first, belief) in starts.items():
        horizon = _squared_error(predict(model, belief, u, first), x[:, first:], seen[:, first:])
        errors |= {f"mse_predict_{name}": _over_time(horizon), f"horizon_{name}": horizon}
    return {
        "elbo": Mean(-(terms.distortion + terms.rate).sum(), frames),
        "distortion": Mean(terms.distortion.sum(), frames),
        "rate": Mean(terms.rate.sum(), frames),
        **errors,
    }, {"plain": states, "iterated": model.smooth(x, u, seen).mean}


def predict(model: Model, belief: Posterior, u: Array, first: int = 0) -> Array:
    """Mean observations at `first` and at each later step, from the belief at `first` and the controls alone."""
    z, memory = belief.mean[:, first], belief.memory[:, first]
    states = jnp.concatenate([z[:, None], model.rollout(z, u[:, first:-1], memory=memory)], axis=1)
    return model.decode(states)


def _squared_error(prediction: Array, x: Array, seen: Array) -> Mean:
    """Squared error of the seen frames at each time step, averaged over pixels."""
    error = jnp.mean((prediction - intensities(x)) ** 2, axis=tuple(range(2, x.ndim)))
    return Mean(jnp.sum(jnp.where(seen, error, 0.0), axis=0), seen.sum(axis=0))


def _over_time(error: Mean) -> Mean:
    return Mean(error.total.sum(), error.frames.sum())


def identification(states: NDArray[Any], truth: NDArray[Any], about: About) -> dict[str, float]:
    """R^2 of an ordinary least squares regression of each ground-truth variable on the states.

    A circular variable counts as the mean of the R^2 of its sine and its cosine.
    """
    regressors = states.reshape(-1, states.shape[-1]).astype(np.float64)
    columns = truth.reshape(-1, truth.shape[-1]).astype(np.float64).T
    return {
        variable.name: float(np.mean([r_squared(regressors, target) for target in targets]))
        for variable, column in zip(about.states, columns, strict=True)
        for targets in [[np.sin(column), np.cos(column)] if variable.circular else [column]]
    }


def r_squared(regressors: NDArray[Any], target: NDArray[Any]) -> float:
    """1 - residual over total sum of squares of the regression with an intercept."""
    if not np.isfinite(regressors).all():
        return float("nan")
    design = np.column_stack([regressors, np.ones(len(regressors))])
    residual = target - design @ np.linalg.lstsq(design, target, rcond=None)[0]
    return float(1 - np.sum(residual**2) / np.sum((target - target.mean()) ** 2))
