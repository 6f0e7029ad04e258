"""The report of a run: one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import html
from pathlib import Path
from typing import Any

from deepssm import files
from deepssm.tables import FOUND

STYLE = """
:root { color-scheme: light dark; --ink: #222; --paper: #fff; --line: #ccc; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --paper: #181818; --line: #444; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
       max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.verdict { font-size: 1.1rem; border-left: 4px solid #c46210; padding-left: 1rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; }
td, th { border-bottom: 1px solid var(--line); padding: .3rem .8rem; text-align: right; white-space: nowrap; }
td:first-child, th:first-child { text-align: left; }
img { max-width: 100%; background: #fff; border-radius: 4px; } pre { overflow-x: auto; }
"""


def write(
    path: Path, title: str, verdict: str, table: list[list[str]], pictures: list[tuple[Path, str]], config: str
) -> None:
    """A page with a verdict in plain words, a table (head first), pictures with captions, and the configuration."""
    head, *body = table
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="verdict">{html.escape(verdict)}</p>',
        '<div class="scroll"><table>',
        _row(head, "th"),
        *(_row(row, "td") for row in body),
        "</table></div>",
        *(part for picture, caption in pictures for part in _picture(picture, caption)),
        f"<h2>Configuration</h2><pre>{html.escape(config)}</pre>",
    ]
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head>\n<body>\n"
    )
    files.write_text(path, page + "\n".join(parts) + "\n</body></html>\n")


def verdict(results: dict[str, Any]) -> str:
    """In plain words: were the dynamics found?"""
    if results.get("diverged"):
        return f"Training diverged ({results['diverged']})."
    floor, error = results.get("noise_floor"), results["mse_predict_iterated"]
    against = f", {error / floor:.1f} times the noise floor" if floor else ""
    prediction = f"Predicted from five frames, the observations are off by {error:.1e} (mean squared error){against}."
    constraint = ""
    if results.get("baseline") is not None:
        met = results["distortion"] <= results["baseline"]
        constraint = f" The reconstruction constraint is {'met' if met else 'not met'}."
    if "r2" not in results:
        return prediction + constraint
    lowest = min(results["r2"], key=results["r2"].get)
    figures = ", ".join(f"R² {value:.3f} for {name}" for name, value in results["r2"].items())
    if results["r2"][lowest] > FOUND:
        return f"The model has identified the dynamics: {figures}. {prediction}{constraint}"
    return f"The model has not found {lowest}: {figures}. {prediction}{constraint}"


def _row(cells: list[str], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def _picture(path: Path, caption: str) -> list[str]:
    data = base64.b64encode(path.read_bytes()).decode()
    text = html.escape(caption)
    return [f"<h2>{text}</h2>", f'<img alt="{text}" src="data:image/png;base64,{data}">']
