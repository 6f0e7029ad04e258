"""Studies: many experiments trained, here or on a cluster, and shown in one table or figure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from deepssm import files, runs, tables
from deepssm.errors import DeepSSMError
from deepssm.experiments import Study
from deepssm.objectives import Annealed
from deepssm.progress import ProgressBar
from deepssm.runs import Experiment


class Job(NamedTuple):
    """An experiment to be trained into a folder."""

    name: str
    experiment: Experiment
    folder: Path


Backend = Callable[[Sequence[Job]], Iterator[tuple[Job, dict[str, Any]]]]
"""Trains jobs, and gives each with its results as soon as it is done."""


def job(name: str, experiment: Experiment, work: Path) -> Job:
    """A job in a folder of its own: another configuration never meets what an earlier one left."""
    return Job(name, experiment, work / f"{experiment.preset}-{files.digest(runs.encode(experiment), 8)}")


def here(console: Console) -> Backend:
    """One job after the other in this process, on all its devices, each going on from its last checkpoint."""

    def train(jobs: Sequence[Job]) -> Iterator[tuple[Job, dict[str, Any]]]:
        for job in jobs:
            seeds = job.experiment.training.seeds
            console.print(f"{job.name}, {seeds} seed{'s' * (seeds > 1)}", style="bold", highlight=False)
            with ProgressBar(console) as progress:
                resume = (job.folder / "checkpoint.deepssm").exists()
                yield job, runs.train(job.experiment, job.folder, resume, progress).results

    return train


def carry_out(
    study: Study,
    work: Path,
    backend: Backend,
    write: Callable[[list[dict[str, Any]]], None],
    only: Sequence[str] = (),
    folders: Mapping[str, Path] | None = None,
) -> list[dict[str, Any]]:
    """Train the parts of a study, all or `only` some, and `write` its rows whenever there is a new one.

    A part that is finished is not trained again; its results.json and config.json are enough, so parts can come from
    several machines. `folders` are those of parts that lie elsewhere than in `work`.
    """
    jobs = [job(name, experiment, work) for name, experiment in study.parts.items()]
    jobs = [job._replace(folder=(folders or {}).get(job.name, job.folder)) for job in jobs]
    results = {job.name: runs.finished(job.experiment, job.folder) for job in jobs}

    def rows() -> list[dict[str, Any]]:
        return [
            {"row": study.label(name), "paper": study.paper.get(name), "runs": found["runs"]}
            for name in study.parts
            if (found := results[name])
        ]

    for done, found in backend([job for job in jobs if not results[job.name] and job.name in (only or study.parts)]):
        results[done.name] = found
        write(rows())
    if not rows():
        raise DeepSSMError("Nothing was trained.")
    write(rows())
    return rows()


def writer(study: Study, name: str, out: Path) -> Callable[[list[dict[str, Any]]], None]:
    """Writes NAME.json, and NAME.md for a table or NAME.png for a figure."""

    def write(rows: list[dict[str, Any]]) -> None:
        files.write_json(out / f"{name}.json", {"title": study.title, "rows": rows})
        if not study.axis:
            files.write_text(out / f"{name}.md", tables.markdown(study.title, rows))
            return
        try:
            from deepssm.reporting import figures
        except DeepSSMError:
            return  # without Matplotlib there are the figures as numbers
        figures.save(figures.spread(study.title, study.axis, rows), out / f"{name}.png")

    return write


def sized(study: Study, seeds: int, steps: int | None, **changes: Any) -> Study:
    """The same study with another number of seeds and steps, and other changes to every experiment.

    Annealing takes the same share of the steps.
    """

    def size(experiment: Experiment) -> Experiment:
        training, objective = experiment.training, experiment.objective
        if steps and isinstance(objective, Annealed):
            share = objective.annealing_steps / training.steps
            objective = dataclasses.replace(objective, annealing_steps=max(1, round(share * steps)))
        training = dataclasses.replace(training, seeds=seeds, steps=steps or training.steps)
        return dataclasses.replace(experiment, training=training, objective=objective, **changes)

    return dataclasses.replace(study, parts={name: size(experiment) for name, experiment in study.parts.items()})
