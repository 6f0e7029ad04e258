"""Presets, one for each row of the paper's tables, and the tables themselves."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deepssm import files, runs
from deepssm.errors import DeepSSMError
from deepssm.models.dks import DKSConfig
from deepssm.models.dvbs import DVBSConfig
from deepssm.models.ekvae import EKVAEConfig
from deepssm.models.kvae import KVAEConfig
from deepssm.models.rssm import RSSMConfig
from deepssm.objectives import Annealed, Constrained
from deepssm.program import TrainingConfig
from deepssm.runs import Experiment

PENDULUM = TrainingConfig(steps=10_000, batch=125)
"""The same for all rows of Table 1(a). About 3 minutes a seed on two CPU cores."""

ANNEALED = Annealed(5000)
"""Half of the run. Schedules from 5% to 75% of it, slower transitions and more weight decay ended alike."""

ROWS = (
    ("pendulum-vhp-ekvae-co", "VHP-EKVAE (CO)", EKVAEConfig(), Constrained()),
    ("pendulum-ekvae-co", "EKVAE (CO)", EKVAEConfig(prior="gaussian"), Constrained()),
    ("pendulum-ekvae-annealing", "EKVAE (annealing)", EKVAEConfig(prior="gaussian"), ANNEALED),
    ("pendulum-vhp-dvbs-co", "VHP-DVBS (CO)", DVBSConfig(), Constrained()),
    ("pendulum-dvbs-co", "DVBS (CO)", DVBSConfig(prior="network"), Constrained()),
    ("pendulum-dvbs-annealing", "DVBS (annealing)", DVBSConfig(prior="network"), ANNEALED),
    ("pendulum-vhp-dks-co", "VHP-DKS (CO)", DKSConfig(), Constrained()),
    ("pendulum-dks-co", "DKS (CO)", DKSConfig(prior="gaussian"), Constrained()),
    ("pendulum-dks-annealing", "DKS (annealing)", DKSConfig(prior="gaussian"), ANNEALED),
    ("pendulum-vhp-kvae-co", "VHP-KVAE (CO)", KVAEConfig(), Constrained()),
    ("pendulum-kvae-annealing", "KVAE (annealing)", KVAEConfig(prior="gaussian"), ANNEALED),
    ("pendulum-vhp-rssm-co", "VHP-RSSM (CO)", RSSMConfig(), Constrained()),
    ("pendulum-rssm-annealing", "RSSM (annealing)", RSSMConfig(prior="gaussian"), ANNEALED),
)

PRESETS = {
    name: Experiment(name, row, model=model, objective=objective, training=PENDULUM)
    for name, row, model, objective in ROWS
}


@dataclass(frozen=True)
class Table:
    """A table of the paper: its title, and the paper's figures for each preset."""

    title: str
    rows: dict[str, dict[str, Any]]


def _pendulum(elbo: float | None, angle: float, velocity: float, *mse: float) -> dict[str, Any]:
    """The paper's figures: test ELBO, R^2, MSE smoothed and filtered, where it gives them."""
    figures = {"r2": {"angle": angle, "velocity": velocity}}
    errors = zip(("mse_predict_smoothed", "mse_predict_filtered"), mse, strict=False)
    return {**({} if elbo is None else {"elbo": elbo}), **figures, **dict(errors)}


TABLES = {
    "table1a": Table(
        "Table 1(a): pendulum (image data)",
        {
            "pendulum-vhp-ekvae-co": _pendulum(807.3, 0.992, 0.998, 1.99e-4),
            "pendulum-ekvae-co": _pendulum(805.9, 0.957, 0.991, 3.53e-4),
            "pendulum-ekvae-annealing": _pendulum(804.2, 0.687, 0.339, 1.94e-3),
            "pendulum-vhp-dvbs-co": _pendulum(804.3, 0.992, 0.989, 5.63e-4),
            "pendulum-dvbs-co": _pendulum(803.8, 0.985, 0.980, 9.41e-4),
            "pendulum-dvbs-annealing": _pendulum(803.1, 0.795, 0.237, 4.67e-3),
            "pendulum-vhp-dks-co": _pendulum(804.7, 0.973, 0.990, 1.73e-3),
            "pendulum-dks-co": _pendulum(804.1, 0.912, 0.962, 2.36e-3),
            "pendulum-dks-annealing": _pendulum(804.0, 0.330, 0.040, 2.12e-2),
        },
    ),
    "table2": Table(
        "Table 2: transitions with a recurrent network, pendulum (image data)",
        {
            "pendulum-vhp-kvae-co": _pendulum(None, 0.989, 0.043, 2.87e-3, 4.24e-4),
            "pendulum-kvae-annealing": _pendulum(None, 0.652, 0.134, 3.16e-3, 6.67e-4),
            "pendulum-vhp-rssm-co": _pendulum(None, 0.915, 0.086, 3.10e-3, 4.80e-4),
            "pendulum-rssm-annealing": _pendulum(None, 0.158, 0.060, 3.23e-3, 6.94e-4),
        },
    ),
}


def preset(name: str) -> Experiment:
    if name not in PRESETS:
        raise DeepSSMError(f"There is no preset {name!r}{_nearest(name, PRESETS)}. Presets: {', '.join(PRESETS)}.")
    return PRESETS[name]


def table(name: str) -> Table:
    if name not in TABLES:
        raise DeepSSMError(f"There is no table {name!r}{_nearest(name, TABLES)}. Tables: {', '.join(TABLES)}.")
    return TABLES[name]


def paper(experiment: Experiment) -> dict[str, Any] | None:
    """The paper's figures for an experiment's row."""
    for known in TABLES.values():
        for name, figures in known.rows.items():
            if PRESETS[name].row == experiment.row:
                return figures
    return None


def reproduce(
    name: str,
    training: Callable[[TrainingConfig], TrainingConfig],
    work: Path,
    out: Path,
    begin: Callable[[Experiment], Any],
    only: tuple[str, ...] = (),
) -> list[dict[str, Any]]:
    """Train the rows of a table, all or `only` some presets, and write NAME.json and NAME.md into `out`.

    A row that was already trained and measured the same way is not trained again; its results.json and config.json
    are enough, so rows can come from several machines.
    """
    presets = table(name).rows
    for wanted in only:
        if wanted not in presets:
            raise DeepSSMError(f"{name} has no row {wanted!r}{_nearest(wanted, presets)}. Rows: {', '.join(presets)}.")
    rows: list[dict[str, Any]] = []
    for known, figures in presets.items():
        experiment = preset(known)
        experiment = dataclasses.replace(experiment, training=training(experiment.training))
        folder = work / name / known
        results = runs.finished(experiment, folder)
        if results is None and known not in (only or presets):
            continue
        if results is None:
            with begin(experiment) as watch:
                results = runs.train(experiment, folder, (folder / "checkpoint.deepssm").exists(), watch).results
        rows.append({"row": experiment.row, "paper": figures, "runs": results["runs"]})
        files.write_json(out / f"{name}.json", {"rows": rows})
        files.write_text(out / f"{name}.md", markdown(table(name).title, rows))
    return rows


COLUMNS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("ELBO / frame", ("elbo",), ".1f"),
    ("R² angle", ("r2", "angle"), ".4f"),
    ("R² velocity", ("r2", "velocity"), ".4f"),
    ("MSE smoothed", ("mse_predict_smoothed",), ".2e"),
    ("MSE iterated", ("mse_predict_iterated",), ".2e"),
    ("MSE filtered", ("mse_predict_filtered",), ".2e"),
)
"""Title, path in a run's results, format."""


def look_up(results: dict[str, Any] | None, path: tuple[str, ...]) -> float | None:
    for part in path:
        results = results.get(part) if results else None
    return results  # type: ignore[return-value]


def cells(row: dict[str, Any]) -> list[tuple[str, str]]:
    """For each column our median with quartiles, and the paper's figure."""
    pairs = []
    for _, path, form in COLUMNS:
        values = [value for run in row["runs"] if (value := look_up(run, path)) is not None]
        theirs = look_up(row["paper"], path)
        low, middle, high = np.nanpercentile(values, [25, 50, 75]) if values else [np.nan] * 3
        spread = f" ({low:{form}} – {high:{form}})" if len(values) > 1 else ""
        pairs.append((f"{middle:{form}}{spread}", "" if theirs is None else f"{theirs:{form}}"))
    return pairs


def markdown(title: str, rows: list[dict[str, Any]]) -> str:
    """A table for people: medians with quartiles, the paper's figures beneath."""
    head = ["model", "seeds", "velocity found", *(name for name, _, _ in COLUMNS)]
    lines = [f"# {title}", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        found = [run["r2"]["velocity"] > 0.95 for run in row["runs"]]
        ours, theirs = zip(*cells(row), strict=True)
        lines.append(f"| {row['row']} | {len(found)} | {100 * np.mean(found):.0f}% | " + " | ".join(ours) + " |")
        lines.append("| *paper* | | | " + " | ".join(theirs) + " |")
    run = rows[0]["runs"][0]
    lines += [
        "",
        "Medians over seeds with quartiles. Velocity found: seeds with R² velocity above 0.95. MSE smoothed is the",
        "paper's: prediction from z_1 smoothed over five frames; iterated: the same with "
        f"{run['iterations']} re-linearisations of",
        f"the smoother; filtered: from z_5. Pixel noise puts the floor of every MSE at {run['noise_floor']:.1e}.",
        "",
        *(f"- {row['row']}: {_made(row['runs'][0])}" for row in rows),
        "",
    ]
    return "\n".join(lines)


def _made(run: dict[str, Any]) -> str:
    """What a row was made with."""
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    return f"{run['steps']} steps, {run['device']}, {versions}, commit {run['commit']}."


def _nearest(name: str, known: dict[str, Any]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {near[0]!r}" if near else ""
