"""The command as people use it, from data to report, and what it says when something is wrong."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from deepssm import cli, experiments, runs
from deepssm.data import sequences

DATA = "--sequences 16 --frames 7 --size 8 --blob 1.0".split()
SMALL = "--encoder 16 --decoder 16 --bases 2 --alpha 8 --prior-hidden 8 --batch 8 --chunk 5 --baseline-steps 10".split()


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("DEEPSSM_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two seeds through the command."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    arguments = ["train", "pendulum-vhp-ekvae-co", *DATA, *SMALL, "--steps", "15", "--seeds", "2", "--out", str(folder)]
    assert cli.main(arguments) == 0
    return folder


def test_a_run_leaves_everything_behind(trained):
    names = {path.name for path in trained.iterdir()}
    pictures = {"state-space.png", "film.png"}
    assert names == {"config.json", "metrics.jsonl", "checkpoint.deepssm", "results.json", "report.html"} | pictures
    results = json.loads((trained / "results.json").read_text())
    assert [run["seed"] for run in results["runs"]] == [0, 1]
    for run in (results, *results["runs"]):
        assert run["row"] == "VHP-EKVAE (CO)"
        assert run["preset"] == "pendulum-vhp-ekvae-co"
        assert run["steps"] == 15
        assert set(run["r2"]) == {"angle", "velocity"}
        assert {"jax", "equinox", "optax", "numpy", "python"} <= set(run["versions"])
        for key in ("elbo", "mse_predict_smoothed", "mse_predict_filtered", "train_seconds", "noise_floor", "baseline"):
            assert np.isfinite(run[key])
        assert run["device"]
        assert run["commit"]
    assert results["validation"] == min(run["validation"] for run in results["runs"])
    for picture in pictures:
        assert (trained / picture).read_bytes().startswith(b"\x89PNG")
    page = (trained / "report.html").read_text()
    assert 'src="data:image/png' in page
    assert "http" not in page.split("<pre>")[0]


def test_a_run_can_be_read_back_and_measured_again(trained, capsys):
    run = runs.load(trained)
    assert run.best is run.models[run.results["seed"]]
    before = json.loads((trained / "results.json").read_text())
    assert cli.main(["evaluate", str(trained)]) == 0
    after = json.loads((trained / "results.json").read_text())
    assert after["runs"] == before["runs"]
    assert "0.9920" in capsys.readouterr().out  # the paper's figure stands beside ours


def test_data_are_written_and_trained_on(tmp_path, trained):
    file = tmp_path / "data.npz"
    assert cli.main(["data", "pendulum", "--out", str(file), *DATA]) == 0
    np.testing.assert_array_equal(sequences.load(file).train.x, tiny.DATA.generate().train.x)
    common = ["train", "pendulum-vhp-ekvae-co", *SMALL, "--steps", "15", "--seeds", "2"]
    assert cli.main([*common, "--data-file", str(file), "--out", str(tmp_path / "run")]) == 0
    one, two = runs.load(tmp_path / "run"), runs.load(trained)
    assert one.results["elbo"] == two.results["elbo"]
    assert cli.main(["evaluate", str(trained), "--data-file", str(file)]) == 0


@pytest.mark.parametrize("page", ["README.md", "docs/pendulum.md"])
def test_examples_in_the_documentation_run(page, trained, tmp_path, monkeypatch):
    monkeypatch.setattr(experiments, "PRESETS", {"pendulum-vhp-ekvae-co": tiny.EXPERIMENT})
    (example,) = re.findall(r"```python\n(.*?)```", (Path(__file__).parent.parent / page).read_text(), re.DOTALL)
    shutil.copytree(trained, tmp_path / "runs" / "pendulum-vhp-ekvae-co")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(example, names)
    assert names["states"].shape == (16, 7, 3)
    assert names["belief"] is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "usage: deepssm train PRESET"),
        (["train", "pendulum-vhp-ekvae"], "did you mean 'pendulum-vhp-ekvae-co'"),
        (["data", "cartpole", "--out", "x"], "There is no data set 'cartpole'"),
        (["evaluate", "nowhere"], "Cannot read the checkpoint"),
        (
            ["train", "pendulum-vhp-ekvae-co", "--data-file", "nowhere.npz", "--out", "{tmp}"],
            "No data file nowhere.npz",
        ),
        (["train", "pendulum-vhp-ekvae-co", "--out", "{tmp}/file/run"], "Cannot write"),
        (["train", "pendulum-vhp-ekvae-co", "--out", "{tmp}/run", "--resume"], "No file"),
        (["train", "pendulum-vhp-ekvae-co", "--steps", "0", "--out", "{tmp}/run"], "at least 1"),
    ],
)
def test_mistakes_get_a_sentence_not_a_traceback(arguments, message, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert cli.main([part.replace("{tmp}", str(tmp_path)) for part in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("deepssm: ")
    assert message in error


def test_a_finished_run_is_not_overwritten_and_resumes_only_as_it_was(trained, capsys):
    again = ["train", "pendulum-vhp-ekvae-co", *DATA, *SMALL, "--steps", "15", "--seeds", "2", "--out", str(trained)]
    assert cli.main(again) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert cli.main([*again, "--resume", "--learning-rate", "0.5"]) == 2
    assert "learning_rate" in capsys.readouterr().err


def test_the_command_itself():
    """In a process of its own: help, unknown commands, unknown options."""

    def deepssm(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "deepssm", *arguments], capture_output=True, text=True)

    help_text = deepssm("--help")
    assert help_text.returncode == 0
    assert "pendulum-vhp-ekvae-co" in help_text.stdout
    assert deepssm("fly").returncode == 2
    options = deepssm("train", "pendulum-vhp-ekvae-co", "--help")
    assert options.returncode == 0
    for option in ("--seeds", "--distortion-baseline", "--iterations", "--resume", "--learning-rate", "--torque"):
        assert option in options.stdout
    assert deepssm("train", "pendulum-vhp-ekvae-co", "--wings", "2").returncode == 2


def test_a_reader_that_goes_away_gets_no_traceback():
    command = [sys.executable, "-m", "deepssm", "train", "pendulum-vhp-ekvae-co", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141
