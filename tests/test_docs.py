"""The documentation speaks of things that exist, and data flows one way."""

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "deepssm"

STREAM = """errors files environments data linalg gaussian networks kalman transitions priors models objectives
program checkpoints training evaluation runs experiments progress tables reporting studies cluster cli"""


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


def test_the_table_in_the_readme_is_the_measured_one():
    measured = (ROOT / "results" / "table1a.md").read_text().splitlines()
    shown = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("|")]
    assert len(shown) > 6
    assert all(line in measured for line in shown)
