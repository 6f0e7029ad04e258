"""Figures of a run: the learned state space and film strips."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from deepssm import files
from deepssm.data.sequences import About, Sequences, intensities
from deepssm.errors import DeepSSMError
from deepssm.evaluation import AT_ONCE, CONDITION, predict
from deepssm.models.base import Model

try:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
except ImportError as error:  # pragma: no cover
    raise DeepSSMError("Figures need Matplotlib: pip install 'deepssm[report]'.") from error

INK = "#222222"
FRAMES = 15
"""Pictures in a row of a film at most."""
DOTS = 15_000
"""States in a picture of the state space at most."""


def state_space(model: Model, data: Sequences, about: About) -> Figure:
    """Smoothed states of all frames in three dimensions, one panel for each ground-truth variable."""
    count = min(len(data.x), max(1, min(DOTS // data.x.shape[1], AT_ONCE // math.prod(data.x.shape[1:]))))
    x, u, seen = (jnp.asarray(part[:count]) for part in data[:3])
    states = np.asarray(model.smooth(x, u, seen).mean)
    points = states.reshape(-1, states.shape[-1])
    if points.shape[1] > 3:
        points = (points - points.mean(0)) @ np.linalg.svd(points - points.mean(0), full_matrices=False)[2][:3].T
    axes_names = ("$z_1$", "$z_2$", "$z_3$") if states.shape[-1] <= 3 else ("PC 1", "PC 2", "PC 3")
    panels = max(1, len(about.states))
    figure = _figure(5.4 * panels, 4.6)
    for column, variable in enumerate(about.states):
        value = data.state[:count, :, column].reshape(-1) if data.state is not None else np.zeros(len(points))
        if variable.circular:
            value = np.mod(value + np.pi, 2 * np.pi) - np.pi
        limit = np.pi if variable.circular else np.abs(value).max()
        axes: Any = figure.add_axes((column / panels, 0.02, 0.8 / panels, 0.9), projection="3d")
        colours = axes.scatter(
            *points.T, c=value, s=5, cmap="twilight_shifted" if variable.circular else "coolwarm",
            vmin=-limit, vmax=limit, linewidths=0, alpha=0.9,
        )  # fmt: skip
        axes.set_xlabel(axes_names[0], labelpad=-6)
        axes.set_ylabel(axes_names[1], labelpad=-6)
        axes.set_zlabel(axes_names[2], labelpad=-6)
        axes.set_title(f"coloured by {variable.name}", fontsize=11, color=INK)
        axes.locator_params(nbins=5)
        axes.tick_params(labelsize=7, pad=-2)
        axes.set_box_aspect((1, 1, 1.1), zoom=1.05)
        axes.view_init(elev=28, azim=-55)
        bar = figure.colorbar(colours, cax=figure.add_axes(((column + 0.83) / panels, 0.2, 0.012, 0.55)))
        bar.set_label(f"{variable.name} [{variable.unit}]", fontsize=9)
        bar.ax.tick_params(labelsize=8)
    return figure


def film(model: Model, data: Sequences, about: About, count: int = 3) -> Figure:
    """Observed, reconstructed and predicted frames of the first test sequences; curves where they are no pictures.

    The prediction starts at z_1 given the first five frames and sees nothing but the controls from there on.
    """
    x, u, seen = (jnp.asarray(part[:count]) for part in data[:3])
    known = (x[:, :CONDITION], u[:, :CONDITION], seen[:, :CONDITION])
    rows = {
        "observed": np.asarray(intensities(x)),
        "reconstructed": np.asarray(model.decode(model.smooth(x, u, seen).mean)),
        "predicted": np.asarray(predict(model, model.smooth(*known), u)),
    }
    return _curves(rows, about) if x.ndim == 3 else _strips(rows)


def _strips(rows: dict[str, NDArray[Any]]) -> Figure:
    """Rows of pictures for each sequence."""
    count, frames = rows["observed"].shape[:2]
    shown = range(0, frames, max(1, -(-frames // FRAMES)))
    figure = _figure(0.62 * len(shown) + 1.2, 0.62 * (len(rows) * count + 0.3 * count) + 0.4)
    grid = figure.add_gridspec(
        (len(rows) + 1) * count - 1, len(shown),
        height_ratios=([1] * len(rows) + [0.3]) * (count - 1) + [1] * len(rows),
        left=1.2 / figure.get_figwidth(), right=0.995, top=0.93, bottom=0.01, wspace=0.06, hspace=0.06,
    )  # fmt: skip
    for sequence in range(count):
        for line, (name, pictures) in enumerate(rows.items()):
            for column, frame in enumerate(shown):
                axes = figure.add_subplot(grid[sequence * (len(rows) + 1) + line, column])
                axes.imshow(np.clip(pictures[sequence, frame], 0, 1), cmap="gray_r", vmin=0, vmax=1)
                axes.set(xticks=[], yticks=[])
                given = name == "predicted" and frame < CONDITION
                for spine in axes.spines.values():
                    spine.set_color("#c46210" if given else "#bbbbbb")
                if frame == 0:
                    axes.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9, color=INK)
                if sequence == line == 0:
                    axes.set_title(str(frame + 1), fontsize=8, color=INK, pad=3)
    return figure


def _curves(rows: dict[str, NDArray[Any]], about: About) -> Figure:
    """A panel for each sequence and each of the first observed quantities."""
    count, frames, quantities = rows["observed"].shape
    quantities = min(quantities, 4)
    figure = _figure(3.6 * count + 0.6, 2.0 * quantities + 0.8)
    grid = figure.subplots(quantities, count, sharex=True, squeeze=False)
    figure.subplots_adjust(
        left=0.09, right=0.99, top=0.9, bottom=0.5 / figure.get_figheight(), wspace=0.22, hspace=0.15
    )
    styles = {"observed": {"color": "#8aa6c1", "linewidth": 3}, "predicted": {"color": "#c46210", "linewidth": 1.4}}
    times = about.dt * np.arange(frames)
    for sequence in range(count):
        for quantity in range(quantities):
            axes = grid[quantity, sequence]
            for name, style in styles.items():
                axes.plot(times, rows[name][sequence, :, quantity], label=name, **style)
            axes.axvspan(0, times[CONDITION - 1], color="#f3e3d3", zorder=0)
            axes.tick_params(labelsize=8)
            if sequence == 0:
                known = about.observations[quantity : quantity + 1]
                axes.set_ylabel(f"{known[0].name} [{known[0].unit}]" if known else f"$x_{quantity + 1}$", fontsize=9)
            if quantity == quantities - 1:
                axes.set_xlabel("time [s]", fontsize=9)
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="upper center", ncols=2, frameon=False, fontsize=9)
    return figure


def spread(title: str, axis: str, rows: list[dict[str, Any]], name: str = "velocity") -> Figure:
    """R^2 of a variable at each point of a study: every seed a dot, with median and quartiles."""
    figure = _figure(1.1 * len(rows) + 1.6, 3.8)
    axes = figure.add_axes((0.9 / figure.get_figwidth(), 0.2, 1 - 1.1 / figure.get_figwidth(), 0.68))
    for place, row in enumerate(rows):
        values = np.sort([run["r2"][name] for run in row["runs"]])
        axes.scatter(
            place + np.linspace(-0.22, 0.22, len(values)), values, s=9, color="#8aa6c1", linewidths=0, zorder=2
        )
        low, middle, high = np.nanpercentile(values, [25, 50, 75])
        axes.plot([place, place], [low, high], color=INK, linewidth=2, zorder=3)
        axes.plot(place, middle, "D", color="#c46210", markersize=7, zorder=4)
    axes.set_xticks(range(len(rows)), [row["row"] for row in rows], fontsize=9)
    axes.set_xlabel(axis, fontsize=10, color=INK)
    axes.set_ylabel(f"R² {name}", fontsize=10, color=INK)
    axes.set_ylim(-0.04, 1.04)
    axes.grid(axis="y", color="#e3e3e3", zorder=0)
    axes.set_title(title, fontsize=11, color=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure


def save(figure: Figure, path: Path) -> None:
    FigureCanvasAgg(figure)
    files.write(path, lambda file: figure.savefig(file, format=path.suffix[1:], dpi=150))


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout=None, facecolor="white")
