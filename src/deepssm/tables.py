"""Tables for people: medians over seeds with their spread, beside the paper's figures."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

FOUND = 0.95
"""R^2 from which on a velocity counts as found."""


class Column(NamedTuple):
    title: str
    path: tuple[str, ...]
    """Where its figure is in a run's results."""
    form: str


def columns(rows: list[dict[str, Any]]) -> list[Column]:
    """What was measured in some run: R^2 of each known variable, and the errors."""
    names = dict.fromkeys(name for row in rows for run in row["runs"] for name in run.get("r2", {}))
    return [
        Column("ELBO / frame", ("elbo",), ".1f"),
        *(Column(f"R² {name}", ("r2", name), ".4f") for name in names),
        Column("MSE smoothed", ("mse_predict_smoothed",), ".2e"),
        Column("MSE iterated", ("mse_predict_iterated",), ".2e"),
        Column("MSE filtered", ("mse_predict_filtered",), ".2e"),
    ]


def look_up(results: dict[str, Any] | None, path: tuple[str, ...]) -> float | None:
    for part in path:
        results = results.get(part) if results else None
    return results  # type: ignore[return-value]


def velocities(run: dict[str, Any]) -> list[float]:
    """R^2 of each velocity."""
    return [value for name, value in run.get("r2", {}).items() if name.startswith("velocity")]


def cells(row: dict[str, Any], known: list[Column]) -> list[tuple[str, str]]:
    """For each column our median with quartiles, and the paper's figure."""
    pairs = []
    for _, path, form in known:
        values = [value for run in row["runs"] if (value := look_up(run, path)) is not None]
        theirs = look_up(row["paper"], path)
        low, middle, high = np.nanpercentile(values, [25, 50, 75]) if values else [np.nan] * 3
        spread = f" ({low:{form}} – {high:{form}})" if len(values) > 1 else ""
        pairs.append((f"{middle:{form}}{spread}", "" if theirs is None else f"{theirs:{form}}"))
    return pairs


def markdown(title: str, rows: list[dict[str, Any]]) -> str:
    """A table of medians with quartiles, the paper's figures beneath."""
    known = columns(rows)
    velocity = any(velocities(run) for row in rows for run in row["runs"])
    head = ["model", "seeds", *(["velocity found"] if velocity else []), *(column.title for column in known)]
    lines = [f"# {title}", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        found = np.mean([min(velocities(run), default=0.0) > FOUND for run in row["runs"]])
        ours, theirs = zip(*cells(row, known), strict=True)
        first = [row["row"], str(len(row["runs"])), *([f"{100 * found:.0f}%"] if velocity else [])]
        lines.append("| " + " | ".join([*first, *ours]) + " |")
        if row["paper"]:
            lines.append("| " + " | ".join(["*paper*", *[""] * (len(first) - 1), *theirs]) + " |")
    floors = {run["noise_floor"] for row in rows for run in row["runs"] if run["noise_floor"]}
    floor = f" The noise in the data puts the floor of every MSE at {floors.pop():.1e}." if len(floors) == 1 else ""
    lines += [
        "",
        "Medians over seeds with quartiles."
        + (f" Velocity found: seeds with an R² of each velocity above {FOUND}." if velocity else ""),
        "MSE smoothed is the paper's: prediction from z_1 smoothed over five frames; iterated: the same, the smoother",
        "linearised again around its own result where a model can; filtered: from z_5." + floor,
        "",
        *(f"- {row['row']}: {made_with(row['runs'][0])}" for row in rows),
        "",
    ]
    return "\n".join(lines)


def made_with(run: dict[str, Any]) -> str:
    """What a row was made with."""
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    return f"{run['steps']} steps, {run['device']}, {versions}, commit {run['commit']}."
