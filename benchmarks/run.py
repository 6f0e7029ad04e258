"""Speed on the pendulum, as ratios taken in one run: machines are shared and noisy, absolute times mean little.

    python benchmarks/run.py            all that this machine can measure
    python benchmarks/run.py --quick    fewer repetitions

Every ratio compares medians of rounds that take turns. Results go to results/benchmarks-DEVICE.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepssm import files, kalman
from deepssm.experiments import PRESETS
from deepssm.gaussian import Gaussian
from deepssm.objectives import Constrained
from deepssm.program import Program, TrainingConfig
from deepssm.runs import Experiment, provenance

CHUNK = 10
EXPERIMENT = PRESETS["pendulum-vhp-ekvae-co"]
DATA = EXPERIMENT.data.generate().train


def race(rounds: int, **contestants: Callable[[], Any]) -> dict[str, float]:
    """Median seconds of each contestant, the contestants taking turns."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for contestant in contestants.values():
        contestant()
    for _ in range(rounds):
        for name, contestant in contestants.items():
            began = time.perf_counter()
            contestant()
            times[name].append(time.perf_counter() - began)
    return {name: float(np.median(values)) for name, values in times.items()}


def prepare(seeds: int, experiment: Experiment = EXPERIMENT) -> tuple[Program, Any, tuple[jax.Array, ...]]:
    training = TrainingConfig(seeds=seeds, batch=len(DATA.x))
    program = Program(
        lambda seed: experiment.model.build((16, 16), 1, jax.random.key(seed)), Constrained(-730.0), training
    )
    return program, program.start(), tuple(jnp.asarray(part) for part in DATA[:3])


def our_step(seeds: int, experiment: Experiment = EXPERIMENT) -> Callable[[], Any]:
    """CHUNK steps of training on all 500 sequences for some seeds."""
    program, state, arrays = prepare(seeds, experiment)
    return lambda: jax.block_until_ready(program.run(state, arrays, length=CHUNK))


def matmul_floor(experiment: Experiment = EXPERIMENT) -> Callable[[], Any]:
    """CHUNK times the matrix products of one step, forward and backward, alone: each weight with all frames at once.

    The prior's weights meet the first frames only, and pictures need no gradient. That a recurrent network has to take
    one frame after the other is ignored.
    """
    model = experiment.model.build((16, 16), 1, jax.random.key(0))
    leaves = [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(model)]
    W = [leaf for name, leaf in leaves if name.endswith(".W") and leaf.size]
    sequences, frames, pixels = DATA.x.shape[0], DATA.x.shape[0] * DATA.x.shape[1], DATA.x[0, 0].size
    widths = [sequences if name.startswith(".prior") else frames for name, leaf in leaves if name.endswith(".W")]
    X = [jnp.ones((len(w), width)) for w, width in zip(W, widths, strict=True)]
    G = [jnp.ones((w.shape[1], width)) for w, width in zip(W, widths, strict=True)]

    def body(carry: Any, _: None) -> tuple[Any, None]:
        X, G, _ = carry
        forward = [w.T @ x for w, x in zip(W, X, strict=True)]
        backward = [
            x.at[0, 0].set(f[0, 0]) if len(w) >= pixels else w @ g for w, x, g, f in zip(W, X, G, forward, strict=True)
        ]
        return (backward, forward, [x @ g.T for x, g in zip(X, G, strict=True)]), None

    run = jax.jit(lambda X, G: jax.lax.scan(body, (X, G, W), length=CHUNK))
    return lambda: jax.block_until_ready(run(X, G))


def torch_step(steps: int) -> Callable[[], Any]:
    """Steps of the same model in eager PyTorch on the same device."""
    import torch
    from torch_ekvae import TorchEKVAE

    device = "cuda" if jax.default_backend() == "gpu" else "cpu"
    model = TorchEKVAE().to(device)
    adam = torch.optim.Adam(model.parameters(), 1e-3)
    x = torch.tensor(DATA.x.reshape(*DATA.x.shape[:2], -1), device=device)
    u = torch.tensor(DATA.u, device=device)

    def run() -> None:
        for _ in range(steps):
            adam.zero_grad()
            distortion, rate = model(x, u)
            (rate + 0.5 * distortion).backward()
            adam.step()
        if device == "cuda":
            torch.cuda.synchronize()

    return run


def smoothers(sequences: int, frames: int) -> dict[str, Callable[[], Any]]:
    """Filter and smoother forward on a linear system: ours and dynamax's."""
    from dynamax.linear_gaussian_ssm import lgssm_smoother
    from dynamax.linear_gaussian_ssm.inference import (
        ParamsLGSSM,
        ParamsLGSSMDynamics,
        ParamsLGSSMEmissions,
        ParamsLGSSMInitial,
    )

    n, n_a = 3, 2
    keys = jax.random.split(jax.random.key(0))
    # Every sequence has its own system, as in a locally linear model; one for all would need only one covariance.
    F = jnp.eye(n) + 0.1 * jnp.eye(n, k=2) + 0.01 * jax.random.normal(keys[0], (sequences, n, n))
    H, Q, R = jnp.eye(n_a, n), 0.01 * jnp.eye(n), 0.1 * jnp.eye(n_a)
    a = jax.random.normal(keys[1], (sequences, frames, n_a))

    def theirs(F: jax.Array, a: jax.Array) -> Any:
        def one(F: jax.Array, a: jax.Array) -> Any:
            parameters = ParamsLGSSM(
                ParamsLGSSMInitial(jnp.zeros(n), jnp.eye(n)),
                ParamsLGSSMDynamics(F, jnp.zeros(n), jnp.zeros((n, 0)), Q),
                ParamsLGSSMEmissions(H, jnp.zeros(n_a), jnp.zeros((n_a, 0)), R),
            )
            return lgssm_smoother(parameters, a)

        smoothed = jax.vmap(one)(F, a)
        return smoothed.smoothed_means, smoothed.smoothed_covariances

    def ours(F: jax.Array, a: jax.Array) -> Any:
        a = jnp.transpose(a, (2, 1, 0))
        constant = (jnp.broadcast_to(m[..., None], (*m.shape, sequences)) for m in (jnp.zeros(n), Q))
        wide = (jnp.transpose(F, (1, 2, 0)), *constant)
        u, seen = jnp.zeros((0, frames, sequences)), jnp.ones((frames, sequences), bool)
        forward = kalman.filter(Gaussian(jnp.zeros(n), jnp.eye(n)), a, u, seen, lambda z, u: wide, H, R)
        smoothed = kalman.smooth(forward)
        return jnp.transpose(smoothed.m, (2, 1, 0)), jnp.transpose(smoothed.P, (3, 2, 0, 1))

    compiled = {"ours": jax.jit(ours), "dynamax": jax.jit(theirs)}
    results = {name: function(F, a) for name, function in compiled.items()}
    for mine, other in zip(*results.values(), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-4)
    return {name: lambda f=function: jax.block_until_ready(f(F, a)) for name, function in compiled.items()}


def compile_seconds() -> float:
    """Seconds to trace and compile the training step of 500 sequences."""
    program, state, arrays = prepare(1)
    began = time.perf_counter()
    program.run.lower(state, arrays, length=1).compile()
    return time.perf_counter() - began


def first_step_seconds(cache: str) -> float:
    """Seconds a fresh process needs to compile and run initialisation and the first step."""
    code = (
        "import time, jax, sys; sys.path.insert(0, 'benchmarks')\n"
        f"jax.config.update('jax_compilation_cache_dir', {cache!r})\n"
        "jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)\n"
        "import run\n"
        "jax.block_until_ready(jax.numpy.ones(3) + 1)\n"
        "began = time.perf_counter(); program, state, arrays = run.prepare(1)\n"
        "jax.block_until_ready(program.run(state, arrays, length=1)); print(time.perf_counter() - began)\n"
    )
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return float(done.stdout.split()[-1])


def pictures(sequences: int, stored: int) -> tuple[Callable[[], Any], float, float]:
    """A training step on RGB pictures of the reacher: the step, its arithmetic (FLOP) and its memory beside the data.

    The arithmetic is that of all convolutions and products with frames, forward and backward.
    """
    experiment = PRESETS["reacher-rgb-vhp-ekvae-co"]
    shape, frames = (64, 64, 3), 30
    training = dataclasses.replace(experiment.training, batch=sequences)
    program = Program(lambda seed: experiment.model.build(shape, 2, jax.random.key(seed)), Constrained(0.0), training)
    generator = np.random.default_rng(0)
    x = generator.integers(0, 256, (stored, frames, *shape), np.uint8)
    data = program.on_devices((x, np.zeros((stored, frames, 2), np.float32), np.ones((stored, frames), bool)))
    state = program.on_devices(program.start())
    compiled = program.run.lower(state, data, length=1).compile()
    model = program.models(state.parameters)[0]
    pixels = [4096 >> 2 * layer for layer in range(4)]  # of a picture before and after each convolution
    convolved = [
        *((layer.W.size, pixels[index + 1]) for index, layer in enumerate(model.encoder.convolutions)),
        *((layer.W.size, pixels[3 - index]) for index, layer in enumerate(model.decoder.deconvolutions)),
    ]
    dense = [W.size for W in jax.tree.leaves((model.encoder, model.decoder)) if W.ndim == 2]
    products = sum(weights * places for weights, places in convolved) + sum(dense)
    arithmetic = 3 * 2 * sequences * frames * products
    memory = compiled.memory_analysis().temp_size_in_bytes
    return lambda: jax.block_until_ready(compiled(state, data)), arithmetic, memory


def matmul_peak(size: int, repeat: int) -> tuple[Callable[[], Any], float]:
    """Products of large matrices at the precision of the RGB preset, and their arithmetic (FLOP)."""
    precision = PRESETS["reacher-rgb-vhp-ekvae-co"].training.precision
    A = jnp.ones((size, size)) / size
    run = jax.jit(lambda A: jax.lax.fori_loop(0, repeat, lambda _, B: jnp.matmul(A, B, precision=precision), A))
    return lambda: jax.block_until_ready(run(A)), repeat * 2 * size**3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    rounds = 3 if options.quick else 9
    sys.path.insert(0, str(Path(__file__).parent))
    lines: list[dict[str, Any]] = []
    device = "cpu" if jax.default_backend() == "cpu" else jax.devices()[0].device_kind.lower().replace(" ", "-")

    def note(what: str, value: float, goal: str, detail: str) -> None:
        lines.append({"what": what, "value": value, "goal": goal, "detail": detail})
        print(f"{what:<68} {value:8.2f}   goal {goal:<9} {detail}", flush=True)
        files.write_json(options.out / f"benchmarks-{device}.json", {"lines": lines, **provenance()})

    def milliseconds(times: dict[str, float]) -> str:
        return ", ".join(f"{name} {1e3 * value:.2f} ms" for name, value in times.items())

    def note_pictures(sequences: int, peak_size: int, repeat: int) -> None:
        step, arithmetic, memory = pictures(sequences, 2 * sequences)
        product, product_arithmetic = matmul_peak(peak_size, repeat)
        times = race(rounds, step=step, product=product)
        speed, peak = arithmetic / times["step"], product_arithmetic / times["product"]
        detail = f"{30 * sequences / times['step']:.0f} frames/s, {speed / 1e12:.2f} of {peak / 1e12:.2f} TFLOP/s"
        note(f"RGB step, {sequences} x 30 frames: fraction of the matmul peak", speed / peak, "", detail)
        note(f"RGB step, {sequences} x 30 frames: GB of memory beside the data", memory / 1e9, "", "")

    if jax.default_backend() == "cpu":
        note_pictures(8, 2048, 4)
        note("RGB step, 64 x 30 frames: GB of memory beside the data", pictures(64, 128)[2] / 1e9, "", "")
        with tempfile.TemporaryDirectory() as cache:
            note("seconds to compile the training step", compile_seconds(), "<= 10", "")
            note("seconds to the first training step", first_step_seconds(cache), "", "with initialisation")
            note("the same at the second start", first_step_seconds(cache), "<= 3", "persistent compilation cache")
        times = race(rounds, step=our_step(1), floor=matmul_floor(), torch=torch_step(3))
        each = {"step": times["step"] / CHUNK, "floor": times["floor"] / CHUNK, "torch": times["torch"] / 3}
        note("training step over the matmul floor", each["step"] / each["floor"], "<= 2.3", milliseconds(each))
        note("eager PyTorch step over ours", each["torch"] / each["step"], ">= 1.8", "")
        for name in ("kvae", "dvbs", "dks", "rssm"):
            experiment = PRESETS[f"pendulum-vhp-{name}-co"]
            times = race(rounds, step=our_step(1, experiment), floor=matmul_floor(experiment))
            each = {contestant: value / CHUNK for contestant, value in times.items()}
            note(f"training step over the matmul floor, {name}", each["step"] / each["floor"], "", milliseconds(each))
        for sequences, frames in ((500, 15), (16, 1000)):
            times = race(5 * rounds, **smoothers(sequences, frames))
            what = f"dynamax filter + smoother over ours, {sequences} x {frames}"
            note(what, times["dynamax"] / times["ours"], ">= 1.5", milliseconds(times))
    else:
        note_pictures(64, 8192, 20)
        times = race(rounds, step=our_step(8), torch=torch_step(2))
        each = {"seed-step": times["step"] / CHUNK / 8, "torch": times["torch"] / 2}
        ratio = each["torch"] / each["seed-step"]
        note("eager PyTorch step over our seed-step, 8 seeds", ratio, ">= 40", milliseconds(each))


if __name__ == "__main__":
    main()
