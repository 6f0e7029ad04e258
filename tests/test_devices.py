"""Training on several devices, and in several processes, is training on one."""

import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest

SCRIPT = """
import json, sys
import numpy as np
from deepssm import program, training
import tiny, dataclasses
from deepssm.models.dks import DKSConfig

devices, *joined = sys.argv[1:]
if joined:
    program.join(joined[0], 2, int(joined[1]))
import jax
found = {"devices": jax.device_count()}
config = dataclasses.replace(tiny.TRAINING, steps=8, devices=devices, seeds=2)
data = tiny.DATA.generate().train
for name, model in {"ekvae": tiny.MODEL, "dks": DKSConfig(reader=8, recognition=(8,), decoder=(8,))}.items():
    seen = []
    fit = training.fit(model, tiny.EXPERIMENT.objective, config, data, watch=lambda *stage: seen.append(stage[3]))
    found[name] = {key: np.concatenate([part[key] for part in seen], 1).tolist() for key in seen[0]}
    found[name]["decoder"] = float(np.abs(fit.models[1].decoder.network.layers[-1].W).sum())
print(json.dumps(found))
"""


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    settings = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.path.dirname(__file__), **environment}
    command = [sys.executable, "-c", SCRIPT, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=settings)


def result(process: subprocess.Popen[str]) -> dict:
    output, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    return json.loads(output.splitlines()[-1])


@pytest.fixture(scope="module")
def alone() -> dict:
    found = result(start("one"))
    assert found["devices"] == 1
    return found


def assert_same(found: dict, alone: dict) -> None:
    for model in ("ekvae", "dks"):
        assert {"distortion", "rate", "gradient"} <= set(found[model])
        for name, values in alone[model].items():
            np.testing.assert_allclose(found[model][name], values, rtol=1e-5, err_msg=f"{model} {name}")


def test_four_devices_are_one(alone):
    found = result(start("all", XLA_FLAGS="--xla_force_host_platform_device_count=4"))
    assert found["devices"] == 4
    assert_same(found, alone)


def test_two_processes_are_one(alone):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    processes = [start("all", address, str(index)) for index in range(2)]
    for found in map(result, processes):
        assert found["devices"] == 2
        assert_same(found, alone)


def test_batches_that_cannot_be_split_are_named(tmp_path):
    command = [sys.executable, "-m", "deepssm", "train", "pendulum-vhp-ekvae-co", "--devices", "all", "--batch", "9"]
    settings = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    failed = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, env=settings)
    assert failed.returncode == 2
    assert "cannot be split evenly over 4 devices" in failed.stderr
