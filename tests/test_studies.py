"""Tables and figures of many experiments: here, from finished runs, and on a Ray cluster that loses a worker."""

import dataclasses
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import ray
from rich.console import Console

import tiny
from deepssm import cli, cluster, experiments, studies, tables
from deepssm.data import sequences
from deepssm.errors import DeepSSMError
from deepssm.experiments import Study
from deepssm.objectives import Annealed, Constrained, Elbo
from test_every_model import STEPWISE

DKS = experiments.preset("pendulum-vhp-dks-co")
SMALL = {
    "one": dataclasses.replace(tiny.EXPERIMENT, preset="one", row="One"),
    "two": dataclasses.replace(
        tiny.EXPERIMENT,
        preset="two",
        row="Two",
        model=dataclasses.replace(DKS.model, **STEPWISE, transition=(8,)),
        objective=Elbo(),
    ),
}


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    figures = experiments.STUDIES["table1a"].paper["pendulum-vhp-ekvae-co"]
    sweep = {
        f"{factor}": dataclasses.replace(SMALL["one"], objective=Constrained(factor=factor)) for factor in (1.0, 2.0)
    }
    monkeypatch.setattr(experiments, "PRESETS", SMALL)
    monkeypatch.setattr(
        experiments,
        "STUDIES",
        {"small": Study("A table", SMALL, {"one": figures}), "fig-small": Study("A figure", sweep, axis="D_0")},
    )


def folders(tmp_path: Path) -> list[str]:
    return ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]


def test_reproduce_writes_the_table_and_goes_on_where_it_was(tmp_path, capsys):
    arguments = ["reproduce", "small", "--seeds", "2", *folders(tmp_path)]
    assert cli.main([*arguments, "--only", "one"]) == 0
    table = json.loads((tmp_path / "out" / "small.json").read_text())
    assert [row["row"] for row in table["rows"]] == ["One"]
    (checkpoint,) = (tmp_path / "work").glob("one-*/checkpoint.deepssm")
    stamp = checkpoint.stat().st_mtime_ns
    assert cli.main(arguments) == 0
    assert checkpoint.stat().st_mtime_ns == stamp
    one, two = json.loads((tmp_path / "out" / "small.json").read_text())["rows"]
    assert one["paper"]["elbo"] == 807.3
    assert two["paper"] is None
    assert [run["seed"] for run in two["runs"]] == [0, 1]
    text = (tmp_path / "out" / "small.md").read_text()
    assert "| *paper* |  |  | 807.3 | 0.9920 | 0.9980 | 1.99e-04 |" in text
    assert text in capsys.readouterr().out


def test_reproduce_draws_a_figure_of_points_that_differ_in_their_baseline(tmp_path):
    assert cli.main(["reproduce", "fig-small", "--seeds", "2", *folders(tmp_path)]) == 0
    one, two = json.loads((tmp_path / "out" / "fig-small.json").read_text())["rows"]
    assert [one["row"], two["row"]] == ["1.0", "2.0"]
    assert two["runs"][0]["baseline"] == pytest.approx(2 * one["runs"][0]["baseline"])
    assert (tmp_path / "out" / "fig-small.png").read_bytes().startswith(b"\x89PNG")


def test_compare_trains_presets_on_a_file_and_takes_finished_runs(tmp_path, capsys):
    file = tmp_path / "data.npz"
    sequences.save(tiny.DATA.generate(), file)
    arguments = ["compare", "two", "--seeds", "1", "--data-file", str(file), *folders(tmp_path)]
    assert cli.main(arguments) == 0
    (run,) = (tmp_path / "work").iterdir()
    capsys.readouterr()
    assert cli.main(["compare", "one", str(run), "--seeds", "2", *folders(tmp_path)]) == 0
    rows = json.loads((tmp_path / "out" / "compare.json").read_text())["rows"]
    assert [(row["row"], len(row["runs"])) for row in rows] == [("One", 2), ("Two", 1)]
    assert "| Two | 1 |" in capsys.readouterr().out


def test_fewer_steps_shorten_the_annealing_with_them():
    study = Study("", {"x": dataclasses.replace(SMALL["one"], objective=Annealed(10))})
    changed = studies.sized(study, seeds=3, steps=10).parts["x"]
    assert changed.objective == Annealed(5)
    assert (changed.training.steps, changed.training.seeds) == (10, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["reproduce", "smal"], "There is no study 'smal'; did you mean 'small'"),
        (["reproduce", "small", "--only", "too"], "There is no part of small 'too'; did you mean 'two'"),
        (["compare"], "usage: deepssm compare"),
        (["compare", "thre"], "There is no preset 'thre'"),
        (["reproduce", "small", "--backend", "ray", "--address", "127.0.0.1:1"], "No Ray cluster at 127.0.0.1:1"),
    ],
)
def test_mistakes_get_a_sentence(arguments, message, tmp_path, capsys):
    assert cli.main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def local_cluster():
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


def comparable(rows: list[dict[str, Any]]) -> Any:
    return [{key: value for key, value in run.items() if key != "train_seconds"} for row in rows for run in row["runs"]]


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("local_cluster")
def test_ray_gives_the_same_results_even_when_a_worker_is_killed(tmp_path, monkeypatch):
    # Long enough to be killed in the middle.
    training = dataclasses.replace(tiny.TRAINING, steps=200, chunk=5)
    parts = {name: dataclasses.replace(experiment, training=training) for name, experiment in SMALL.items()}
    study, console = Study("", parts), Console(quiet=True)
    here = studies.carry_out(study, tmp_path / "here", studies.here(console), lambda rows: None)
    killed, seen = [], set()

    def kill(report: cluster.Report) -> None:
        index, stage, done, _, _, process = report
        seen.add((index, process))
        if index == 0 and stage == "training" and done < 200 and not killed:
            killed.append(process)
            os.kill(process, signal.SIGKILL)

    backend = cluster.on_ray(console, watch=kill)
    there = studies.carry_out(study, tmp_path / "there", backend, lambda rows: None)
    assert killed
    assert len({process for index, process in seen if index == 0}) == 2
    assert comparable(there) == comparable(here)
    for folder in (tmp_path / "here").iterdir():
        assert {path.name for path in folder.iterdir()} == {
            path.name for path in (tmp_path / "there" / folder.name).iterdir()
        }


@pytest.mark.usefixtures("local_cluster")
def test_a_mistake_on_a_worker_comes_home_as_a_sentence(tmp_path):
    broken = dataclasses.replace(SMALL["one"], training=dataclasses.replace(tiny.TRAINING, shortest=99))
    backend = cluster.on_ray(Console(quiet=True))
    with pytest.raises(DeepSSMError, match="The shortest cut is 99 frames"):
        studies.carry_out(Study("", {"one": broken}), tmp_path, backend, lambda rows: None)
    with pytest.raises(DeepSSMError, match="asks for 64 CPUs, but the cluster has 2"):
        studies.carry_out(Study("", SMALL), tmp_path, cluster.on_ray(Console(quiet=True), cpus=64.0), lambda rows: None)


def test_every_velocity_must_be_found():
    def run(*velocities: float) -> dict:
        r2 = {"angle_1": 1.0, **{f"velocity_{index}": value for index, value in enumerate(velocities)}}
        errors = {f"mse_predict_{kind}": 1e-3 for kind in ("smoothed", "iterated", "filtered")}
        made = {"steps": 1, "device": "cpu", "versions": {}, "commit": "x", "noise_floor": None}
        return {"elbo": 1.0, "r2": r2, **errors, **made}

    row = {"row": "model", "paper": None, "runs": [run(0.99, 0.97), run(0.99, 0.5), run(0.2, 0.99), run(0.99, 0.98)]}
    assert "| model | 4 | 50% |" in tables.markdown("title", [row])
