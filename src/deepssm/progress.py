"""Progress of training for people: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from deepssm.training import Metrics

STAGES = {"baseline": "classical run for D_max", "training": "training"}


class ProgressBar:
    """Shows distortion against D_0, rate, ELBO, lambda and phase; medians where there are several seeds."""

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
        self.tasks = {"compiling": self.bar.add_task("compiling", total=None, figures="")}
        self.began = time.monotonic()
        self.printed: dict[str, int] = {}

    def __enter__(self) -> ProgressBar:
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.bar.stop()

    def __call__(self, stage: str, done: int, steps: int, metrics: Metrics) -> None:
        if stage not in self.tasks:
            self.bar.update(self.tasks["compiling"], visible=False)
            self.tasks[stage] = self.bar.add_task(STAGES[stage], total=steps, figures="")
        figures = _figures(metrics)
        self.bar.update(self.tasks[stage], completed=done, figures=figures)
        line = done * self.LINES // steps
        if not self.console.is_terminal and line > self.printed.get(stage, 0):
            self.printed[stage] = line
            elapsed = time.monotonic() - self.began
            self.console.print(f"{STAGES[stage]} {done}/{steps}  {elapsed:.0f} s  {figures}", highlight=False)


def _figures(metrics: Metrics) -> str:
    last = {name: float(np.nanmedian(values[:, -10:].mean(axis=1))) for name, values in metrics.items()}
    baseline = f" (D_0 {last['D_0']:.1f})" if "D_0" in last else ""
    text = f"D {last['distortion']:.1f}{baseline}  R {last['rate']:.2f}  ELBO {last['elbo']:.1f}"
    if "lambda" in last:
        text += f"  lambda {last['lambda']:.2g}  {'initial' if last['initial'] > 0.5 else 'main'} phase"
    return text + (f"  beta {last['beta']:.2f}" if "beta" in last else "")
