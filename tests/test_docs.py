"""The documentation speaks of things that exist, and data flows one way."""

import ast
import importlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepssm.tables import FOUND

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "deepssm"

STREAM = """errors files environments data slow linalg gaussian convolutions networks kalman transitions priors models
objectives program headstart checkpoints training evaluation runs experiments progress tables reporting studies cluster
cli"""


def named(text: str) -> list[str]:
    return re.findall(r"`(deepssm(?:\.\w+)+)`", text)


@pytest.mark.parametrize("page", [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"], ids=lambda p: p.name)
def test_names_in_the_documentation_exist(page):
    for name in named(page.read_text()):
        parts = name.split(".")
        for length in range(len(parts), 0, -1):
            try:
                thing = importlib.import_module(".".join(parts[:length]))
                break
            except ModuleNotFoundError:
                continue
        for part in parts[length:]:
            assert hasattr(thing, part), f"{page.name}: {name}"
            thing = getattr(thing, part)


def test_every_equation_has_its_place():
    rows = [line for line in (ROOT / "docs" / "equations.md").read_text().splitlines() if line.startswith("| ")]
    assert len(rows) > 20
    assert all(named(row) for row in rows[1:])


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_follow_the_stream(path):
    rooms = STREAM.split()
    room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if room in ("__init__", "__main__"):
        return
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module == "deepssm":
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("deepssm."):
            names = [node.module.split(".")[1]]
        for name in names:
            assert rooms.index(name) <= rooms.index(room), f"{room} imports {name} against the stream"


def test_links_between_pages_lead_somewhere():
    for page in [*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_figures_in_the_readme_are_those_of_the_results():
    rows = {row["row"]: row["runs"] for name in ("table1a", "table2") for row in _results(name)}
    lines = [line.split(" | ") for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| ")]
    shown = {cells[0].removeprefix("| "): cells for cells in lines}
    for name, runs in rows.items():
        assert len(runs) >= 10
        _, found, *cells = shown[name]
        assert found == f"{sum(run['r2']['velocity'] > FOUND for run in runs)} of {len(runs)}"
        errors = [f"mse_predict_{kind}" for kind in ("smoothed", "iterated", "filtered")]
        values = [[run["elbo"] for run in runs]]
        values += [[run["r2"][variable] for run in runs] for variable in ("angle", "velocity")]
        values += [[run[error] for run in runs] for error in errors]
        for cell, measured in zip(cells, values, strict=True):
            if cell.strip():  # iterated is left out where it is the same as smoothed
                middle = np.median(measured)
                rounding = 0.0 if "e" in cell else 6e-4  # R² has three digits
                assert float(cell.split()[0]) == pytest.approx(middle, rel=5e-3, abs=rounding), name


def test_figures_of_the_reacher_are_those_of_the_results():
    lines = [line.split(" | ") for line in (ROOT / "docs" / "reacher.md").read_text().splitlines() if line[:2] == "| "]
    shown = {cells[0].removeprefix("| "): cells[1:] for cells in lines}
    rows = {row["row"]: row["runs"] for row in _results("table1b")}
    assert all(len(runs) >= 10 for runs in rows.values())
    for name, runs in [*rows.items(), *((f"{row['row']}, pictures", row["runs"]) for row in _results("table1c"))]:
        angles, velocities, error = shown[name]
        found = [text for cell in (angles, velocities) for text in cell.split("*(")[0].split(" / ")]
        for variable, text in zip(runs[0]["r2"], found, strict=True):
            assert float(text) == pytest.approx(np.median([run["r2"][variable] for run in runs]), abs=6e-4), name
        middle = np.median([run["mse_predict_smoothed"] for run in runs])
        assert float(error.split()[0]) == pytest.approx(middle, rel=0.05), name


def _results(name: str) -> list[dict[str, Any]]:
    return json.loads((ROOT / "results" / f"{name}.json").read_text())["rows"]
