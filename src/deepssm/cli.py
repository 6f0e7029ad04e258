"""The command `deepssm`."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table as RichTable

from deepssm import experiments, files, program, runs, studies, tables
from deepssm.data import sequences
from deepssm.data.pendulum import PendulumData
from deepssm.data.reacher import ReacherData
from deepssm.data.sequences import Dataset
from deepssm.errors import DeepSSMError
from deepssm.experiments import Study
from deepssm.progress import ProgressBar
from deepssm.runs import DataFile, Experiment, Run

USAGE = """usage: deepssm COMMAND ...

  train PRESET         train a model, measure it, write its report
  evaluate RUN         measure a trained run again
  compare PRESET|RUN.. train several, or take finished runs, and print one table
  reproduce STUDY      train all parts of a table or figure of the paper: {studies}
  data NAME --out FILE write a data set

deepssm COMMAND --help explains each. Presets: {presets}."""

Flat = tyro.conf.OmitArgPrefixes
console = Console(soft_wrap=True)


@dataclass(frozen=True)
class Train:
    """Train a model on all its seeds, measure it, and write results, pictures and a report."""

    experiment: Annotated[Experiment, tyro.conf.AvoidSubcommands]
    out: Path | None = None
    """Folder of the run; runs/PRESET unless given."""
    resume: bool = False
    """Go on with an interrupted run in that folder."""
    data_file: Path | None = None
    """Train on this file instead of the preset's data."""
    coordinator: str | None = None
    """Address of process 0 (host:port), where several processes train together with --devices all."""
    processes: int = 1
    """How many they are."""
    process: int = 0
    """Which of them this is."""


def train(arguments: list[str]) -> None:
    name, rest = _name(arguments, "deepssm train PRESET", experiments.PRESETS)
    chosen = experiments.preset(name)
    options = _parse(Train, rest, f"deepssm train {name}", default=Train(chosen))
    experiment = options.experiment
    if options.data_file:
        experiment = dataclasses.replace(experiment, data=DataFile(str(options.data_file)))
    if options.coordinator:
        program.join(options.coordinator, options.processes, options.process)
        if experiment.training.devices != "all":
            raise DeepSSMError("Several processes train together with --devices all; this one has --devices one.")
    folder = options.out or Path("runs") / name
    with ProgressBar(console) as progress:
        run = runs.train(experiment, folder, options.resume, progress)
    if options.process == 0:
        report(run, folder)


@dataclass(frozen=True)
class Evaluate:
    """Measure a trained run again, on its own test data or on another file's."""

    data_file: Path | None = None
    """A data file whose test sequences are used."""


def evaluate(arguments: list[str]) -> None:
    name, rest = _name(arguments, "deepssm evaluate RUN")
    options = _parse(Evaluate, rest, f"deepssm evaluate {name}")
    folder = Path(name)
    run = runs.load(folder)
    source = DataFile(str(options.data_file)) if options.data_file else run.experiment.data
    kept = {key: run.results[key] for key in ("train_seconds", "baseline")}
    diverged = {result["seed"]: result["diverged"] for result in run.results["runs"]}
    results = runs.measure(run.experiment, run.models, source.generate(), {**kept, "diverged": diverged})
    run = run._replace(results=results)
    if options.data_file:
        show(run)
    else:
        files.write_json(folder / "results.json", results)
        report(run, folder)


@dataclass(frozen=True)
class Several:
    """Options for training several experiments."""

    steps: int | None = None
    """Steps instead of the presets'."""
    work: Path = Path("runs/studies")
    """Folder of the runs; what is finished there is not trained again."""
    backend: Literal["here", "ray"] = "here"
    """Train one after the other in this process, or side by side on a Ray cluster."""
    address: str | None = None
    """Of the Ray cluster; without it, one is started on this machine."""
    run_cpus: float = 1.0
    """Cores that a run takes on the cluster."""
    run_gpus: float | None = None
    """GPUs that a run takes on the cluster; one, where it has any, unless given."""

    @property
    def train(self) -> studies.Backend:
        if self.backend == "ray":
            from deepssm import cluster

            return cluster.on_ray(console, self.address, self.run_cpus, self.run_gpus)
        return studies.here(console)


@dataclass(frozen=True)
class Reproduce(Several):
    """Train all parts of a table or figure of the paper; write NAME.json with NAME.md or NAME.png."""

    seeds: int = 25
    """Seeds for each part."""
    out: Path = Path("results")
    """Folder of the table or figure."""
    only: tuple[str, ...] = ()
    """Parts to train; all unless given. Parts that are finished are shown anyway."""


def reproduce(arguments: list[str]) -> None:
    name, rest = _name(arguments, "deepssm reproduce STUDY", experiments.STUDIES)
    study = experiments.choose("study", name, experiments.STUDIES)
    options = _parse(Reproduce, rest, f"deepssm reproduce {name}")
    for part in options.only:
        experiments.choose(f"part of {name}", part, study.parts)
    study = studies.sized(study, options.seeds, options.steps)
    rows = studies.carry_out(study, options.work, options.train, studies.writer(study, name, options.out), options.only)
    console.print(tables.markdown(study.title, rows), highlight=False)


@dataclass(frozen=True)
class Compare(Several):
    """Train presets on the same data, or take finished runs, and print one table."""

    seeds: int = 3
    """Seeds for each preset."""
    data_file: Path | None = None
    """Train on this file instead of the presets' data."""
    out: Path | None = None
    """Folder for compare.json and compare.md; only printed unless given."""


def compare(arguments: list[str]) -> None:
    names = list(itertools.takewhile(lambda argument: not argument.startswith("-"), arguments))
    if not names and not {"-h", "--help"} & set(arguments):
        _name([], "deepssm compare PRESET|RUN ...", experiments.PRESETS)
    options = _parse(Compare, arguments[len(names) :], "deepssm compare PRESET|RUN ...")
    folders = {name: Path(name) for name in names if (Path(name) / "results.json").exists()}
    known = {name: runs.decode(files.read_json(folder / "config.json")) for name, folder in folders.items()}
    presets = {name: experiments.preset(name) for name in names if name not in known}
    changes = {"data": DataFile(str(options.data_file))} if options.data_file else {}
    trained = studies.sized(Study("", presets), options.seeds, options.steps, **changes).parts
    parts = {name: known.get(name) or trained[name] for name in names}
    paper = {name: figures for name, part in parts.items() if (figures := experiments.paper(part))}
    study = Study("Comparison", parts, paper)
    write = studies.writer(study, "compare", options.out) if options.out else lambda rows: None
    rows = studies.carry_out(study, options.work, options.train, write, folders=folders)
    console.print(tables.markdown(study.title, rows), highlight=False)


@dataclass(frozen=True)
class PendulumFile:
    """Write the pendulum data set: training, validation and test sequences in one .npz file."""

    out: Path
    """File to write."""
    data: PendulumData = field(default_factory=PendulumData)

    def write(self) -> Dataset:
        dataset = self.data.generate()
        sequences.save(dataset, self.out)
        return dataset


@dataclass(frozen=True)
class ReacherFile:
    """Write the reacher data set: training, validation and test sequences in one .npz file.

    If it is interrupted, the same command goes on where it was.
    """

    out: Path
    """File to write."""
    data: ReacherData = field(default_factory=ReacherData)
    processes: int | None = None
    """Processes that simulate at the same time; for pictures as many as there are cores unless given, else one."""

    def write(self) -> Dataset:
        with ProgressBar(console) as progress:
            return self.data.write(
                self.out, lambda done, total: progress.show("", "data", done, total, "sequences"), self.processes
            )


DATA = {"pendulum": PendulumFile, "reacher": ReacherFile}


def data(arguments: list[str]) -> None:
    name, rest = _name(arguments, "deepssm data NAME --out FILE", DATA)
    options = _parse(experiments.choose("data set", name, DATA), rest, f"deepssm data {name}")
    dataset = options.write()
    shapes = ", ".join(f"{split} {getattr(dataset, split).x.shape}" for split in sequences.SPLITS)
    size = options.out.stat().st_size / 1e6
    console.print(f"Wrote {options.out} ({size:.1f} MB): {shapes}, controls {dataset.train.u.shape[2:]}.")


def report(run: Run, folder: Path) -> None:
    """Print the table and write pictures and the page."""
    from deepssm.reporting import figures, page

    dataset = run.experiment.data.generate()
    drawings = [
        (
            folder / "state-space.png",
            "The learned state space",
            figures.state_space(run.best, dataset.test, dataset.about),
        ),
        (
            folder / "film.png",
            "Observed, reconstructed, and predicted from the frames in orange",
            figures.film(run.best, dataset.test, dataset.about),
        ),
    ]
    for path, _, figure in drawings:
        figures.save(figure, path)
    table = show(run)
    sentence = page.verdict(run.results)
    config = json.dumps(runs.encode(run.experiment), indent=2)
    title = f"{run.experiment.row} on the {dataset.about.name}"
    page.write(folder / "report.html", title, sentence, table, [(path, text) for path, text, _ in drawings], config)
    console.print(f"\n{sentence}\n", style="bold", highlight=False)
    console.print(f"Report:   {folder / 'report.html'}\nPictures: {drawings[0][0]}, {drawings[1][0]}", highlight=False)


def show(run: Run) -> list[list[str]]:
    """Print our figures beside the paper's; returns the table, head first."""
    best = {"row": run.experiment.row, "paper": experiments.paper(run.experiment), "runs": [run.results]}
    everything = {**best, "runs": run.results["runs"]}
    several = len(run.results["runs"]) > 1
    head = ["", f"best seed ({run.results['seed']})", *(["median (quartiles)"] if several else []), "paper"]
    rows, known = [], tables.columns([best])
    for (title, _, _), (ours, theirs), (spread, _) in zip(
        known, tables.cells(best, known), tables.cells(everything, known), strict=True
    ):
        rows.append([title, ours, *([spread] if several else []), theirs])
    floor = run.results.get("noise_floor")
    if floor:
        rows.append(["noise floor of the MSE", f"{floor:.2e}", *([""] if several else []), ""])
    table = RichTable(title=run.experiment.row)
    for index, name in enumerate(head):
        table.add_column(name, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    return [head, *rows]


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "train": train,
    "evaluate": evaluate,
    "compare": compare,
    "reproduce": reproduce,
    "data": data,
}


def _name(arguments: list[str], usage: str, known: dict[str, Any] | None = None) -> tuple[str, list[str]]:
    """The first argument, which names a thing, and the rest."""
    if not arguments or arguments[0].startswith("-"):
        choices = f" One of: {', '.join(known)}." if known else ""
        raise DeepSSMError(f"usage: {usage} [options].{choices}")
    return arguments[0], arguments[1:]


def _parse(kind: Any, arguments: list[str], program: str, **options: Any) -> Any:
    return tyro.cli(kind, args=arguments, prog=program, config=(Flat,), **options)


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help") or arguments[0] not in COMMANDS:
        print(USAGE.format(presets=", ".join(experiments.PRESETS), studies=", ".join(experiments.STUDIES)))
        return 0 if arguments and arguments[0] in ("-h", "--help") else 2
    program.use_compilation_cache()
    try:
        COMMANDS[arguments[0]](arguments[1:])
    except DeepSSMError as error:
        print(f"deepssm: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("deepssm: interrupted; 'deepssm train' goes on from its last checkpoint with --resume.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read the output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains once more when it ends
        return 141
    return 0
