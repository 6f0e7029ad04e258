"""Progress of training for people: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from deepssm.training import Metrics

STAGES = {
    "data": "making the data set",
    "baseline": "classical run for D_max",
    "encoder": "head start: encoder",
    "dynamics": "head start: dynamics",
    "decoder": "head start: decoder",
    "training": "training",
}


class ProgressBar:
    """Shows distortion against D_0, rate, ELBO, lambda and phase; medians where there are several seeds.

    One run, or many that go on at the same time, each in a line with its name.
    """

    LINES = 10
    """Lines for a stage where there is no terminal."""

    def __init__(self, console: Console):
        self.console = console
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self.waiting = self.bar.add_task("compiling", total=None, figures="")
        self.tasks: dict[tuple[str, str], TaskID] = {}
        self.began = time.monotonic()
        self.printed: dict[tuple[str, str], int] = {}

    def __enter__(self) -> ProgressBar:
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.bar.stop()

    def __call__(self, stage: str, done: int, steps: int, metrics: Metrics) -> None:
        """Watches one run."""
        self.show("", stage, done, steps, figures(metrics))

    def show(self, name: str, stage: str, done: int, steps: int, figures: str) -> None:
        """Where the run of this name is."""
        task, text = (name, stage), f"{name}: {STAGES[stage]}" if name else STAGES[stage]
        if task not in self.tasks:
            self.bar.update(self.waiting, visible=False)
            self.tasks[task] = self.bar.add_task(text, total=steps, figures="")
        self.bar.update(self.tasks[task], completed=done, figures=figures)
        line = done * self.LINES // steps
        if not self.console.is_terminal and line > self.printed.get(task, 0):
            self.printed[task] = line
            elapsed = time.monotonic() - self.began
            self.console.print(f"{text} {done}/{steps}  {elapsed:.0f} s  {figures}", highlight=False)


def figures(metrics: Metrics) -> str:
    """The last figures of a run in one line."""
    if not metrics:
        return ""
    last = {name: float(np.nanmedian(values[:, -10:].mean(axis=1))) for name, values in metrics.items()}
    baseline = f" (D_0 {last['D_0']:.1f})" if "D_0" in last else ""
    text = f"D {last['distortion']:.1f}{baseline}  R {last['rate']:.2f}  ELBO {last['elbo']:.1f}"
    if "lambda" in last:
        text += f"  lambda {last['lambda']:.2g}  {'initial' if last['initial'] > 0.5 else 'main'} phase"
    return text + (f"  beta {last['beta']:.2f}" if "beta" in last else "")
