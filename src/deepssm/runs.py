"""Runs: an experiment is trained and measured, and leaves a folder behind.

config.json         the experiment
metrics.jsonl       distortion, rate and their parts over training
checkpoint.deepssm  all seeds, with everything needed to go on
results.json        what was measured, for the best seed and for all of them
"""

from __future__ import annotations

import dataclasses
import os
import platform
import subprocess
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from deepssm import checkpoints, files
from deepssm.data import sequences
from deepssm.data.pendulum import PendulumData
from deepssm.data.reacher import ReacherData
from deepssm.data.sequences import Dataset
from deepssm.environments.pendulum import Pendulum
from deepssm.environments.reacher import Reacher
from deepssm.errors import DeepSSMError
from deepssm.evaluation import evaluate
from deepssm.models.base import Model
from deepssm.models.dks import DKSConfig
from deepssm.models.dvbs import DVBSConfig
from deepssm.models.ekvae import EKVAEConfig
from deepssm.models.kvae import KVAEConfig
from deepssm.models.rssm import RSSMConfig
from deepssm.objectives import Annealed, Constrained, Elbo
from deepssm.program import Program, TrainingConfig
from deepssm.training import Watch, fit


@dataclass(frozen=True)
class DataFile:
    """Data read from a file that `deepssm data` wrote."""

    path: str

    def generate(self) -> Dataset:
        return sequences.load(Path(self.path))


@dataclass(frozen=True)
class Experiment:
    """Data, model, objective and training of one row of a table."""

    preset: str
    row: str
    """Name of the row in the paper."""
    data: PendulumData | ReacherData | DataFile = field(default_factory=PendulumData)
    model: EKVAEConfig | KVAEConfig | DVBSConfig | DKSConfig | RSSMConfig = field(default_factory=EKVAEConfig)
    objective: Constrained | Annealed | Elbo = field(default_factory=Constrained)
    training: TrainingConfig = field(default_factory=TrainingConfig)


class Run(NamedTuple):
    """A trained experiment, read back from its folder."""

    experiment: Experiment
    models: dict[int, Model]
    """By seed."""
    results: dict[str, Any]

    @property
    def best(self) -> Model:
        return self.models[self.results["seed"]]


def train(experiment: Experiment, folder: Path, resume: bool = False, watch: Watch | None = None) -> Run:
    """Train all seeds of an experiment, measure them, and keep everything in a folder."""
    folder = Path(folder)
    checkpoint = folder / "checkpoint.deepssm"
    if resume:
        known = decode(files.read_json(folder / "config.json"))
        if known != experiment:
            raise DeepSSMError(
                f"{folder} holds another experiment: {', '.join(_differences(known, experiment))} differ. "
                "Resume with the options it was started with, or give another --out."
            )
    elif checkpoint.exists():
        raise DeepSSMError(f"{folder} already holds a run. Go on with it by --resume, or give another --out.")
    first = jax.process_index() == 0
    if first:
        files.write_json(folder / "config.json", encode(experiment))
    if isinstance(experiment.data, ReacherData):
        experiment.data.prepare(lambda done, total: watch("data", done, total, {}) if watch else None)
    data = sequences.check(experiment.data.generate())
    header = {
        "experiment": encode(experiment),
        "shape": data.train.x.shape[2:],
        "controls": data.train.u.shape[2],
    }
    trained = fit(
        experiment.model,
        experiment.objective,
        experiment.training,
        data.train,
        folder,
        resume and checkpoint.exists(),
        header,
        **({"watch": watch} if watch else {}),
    )
    models = dict(zip(experiment.training.all_seeds, trained.models, strict=True))
    facts = {"train_seconds": trained.seconds, "baseline": getattr(trained.objective, "distortion_baseline", None)}
    results = measure(experiment, models, data, {"diverged": trained.diverged, **facts})
    if first:
        files.write_json(folder / "results.json", results)
    return Run(experiment, models, results)


def finished(experiment: Experiment, folder: Path) -> dict[str, Any] | None:
    """The results in a folder, if this very experiment was trained there."""
    config, results = Path(folder) / "config.json", Path(folder) / "results.json"
    done = config.exists() and results.exists() and decode(files.read_json(config)) == experiment
    return files.read_json(results) if done else None


def load(folder: Path) -> Run:
    """A run that has finished."""
    models, header = load_models(Path(folder) / "checkpoint.deepssm")
    experiment = decode(header["experiment"])
    if header["step"] < experiment.training.steps:
        raise DeepSSMError(
            f"{folder} has done {header['step']} of {experiment.training.steps} steps. Finish it with --resume."
        )
    return Run(experiment, models, files.read_json(Path(folder) / "results.json"))


def load_models(checkpoint: Path) -> tuple[dict[int, Model], dict[str, Any]]:
    """The models of a checkpoint by seed, and its header."""
    header = checkpoints.read_header(checkpoint)
    try:
        experiment: Experiment = decode(header["experiment"])
        shape, controls = tuple(header["shape"]), header["controls"]
    except KeyError as error:
        raise DeepSSMError(f"{checkpoint} was not written by 'deepssm train': {error} is missing.") from error
    objective = experiment.objective
    if isinstance(objective, Constrained):
        objective = dataclasses.replace(objective, distortion_baseline=header["baseline"])

    def build(seed: Any) -> Model:
        return experiment.model.build(shape, controls, jax.random.key(seed))

    program = Program(build, objective, experiment.training)
    state = checkpoints.load(checkpoint, jax.eval_shape(program.start))
    return dict(zip(experiment.training.all_seeds, program.models(state.parameters), strict=True)), header


def measure(experiment: Experiment, models: dict[int, Model], data: Dataset, facts: dict[str, Any]) -> dict[str, Any]:
    """Results of every seed on the test data. The best seed predicts the validation data best: no ground truth."""
    diverged = facts.pop("diverged")
    runs = []
    for seed, model in models.items():
        validation = evaluate(model, data.validation, data.about)
        runs.append(
            {
                "row": experiment.row,
                "preset": experiment.preset,
                "seed": seed,
                "steps": experiment.training.steps,
                **evaluate(model, data.test, data.about),
                "noise_floor": data.about.noise and data.about.noise**2,
                "iterations": getattr(experiment.model, "iterations", 0),
                "validation": validation["mse_predict_iterated"],
                "diverged": diverged.get(seed),
                **facts,
                **provenance(),
            }
        )
    finite = [run for run in runs if np.isfinite(run["validation"])] or runs
    best = min(finite, key=lambda run: run["validation"])
    return {**best, "runs": runs}


def provenance() -> dict[str, Any]:
    """What a figure depends on beyond its configuration."""
    device = jax.devices()[0]
    return {
        "device": platform.processor() or platform.machine() if device.platform == "cpu" else device.device_kind,
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("jax", "equinox", "optax", "numpy")},
        },
        "commit": _commit(),
    }


def _commit() -> str:
    """The commit of the source tree; DEEPSSM_COMMIT where the sources are a copy with another history or none."""
    if named := os.environ.get("DEEPSSM_COMMIT"):
        return named
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


# Configurations as JSON: every dataclass carries its name, every sequence is a tuple.

CONFIGS = {
    kind.__name__: kind
    for kind in (
        Experiment, PendulumData, Pendulum, ReacherData, Reacher, DataFile, EKVAEConfig, KVAEConfig, DVBSConfig,
        DKSConfig, RSSMConfig, Elbo, Annealed, Constrained, TrainingConfig,
    )
}  # fmt: skip


def encode(config: Any) -> Any:
    if dataclasses.is_dataclass(config):
        fields = {part.name: encode(getattr(config, part.name)) for part in dataclasses.fields(config)}
        return {"type": type(config).__name__, **fields}
    return list(config) if isinstance(config, tuple) else config


def decode(content: Any) -> Any:
    if isinstance(content, list):
        return tuple(content)
    if not isinstance(content, dict):
        return content
    fields = {name: decode(value) for name, value in content.items() if name != "type"}
    try:
        return CONFIGS[content["type"]](**fields)
    except (KeyError, TypeError) as error:
        raise DeepSSMError(f"Cannot read the configuration {content}: {error}. Was it made by this version?") from error


def _differences(one: Any, other: Any, name: str = "experiment") -> list[str]:
    if type(one) is not type(other) or not dataclasses.is_dataclass(one):
        return [] if one == other else [name]
    parts = (part.name for part in dataclasses.fields(one))
    return [text for part in parts for text in _differences(getattr(one, part), getattr(other, part), part)]
