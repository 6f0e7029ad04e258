"""Many runs on many machines: jobs on a Ray cluster.

Each job is one Ray task that trains in a folder of its own machine and sends the files home. When a worker is lost,
Ray starts the task again elsewhere. Workers tell a notice board how far they are; the driver reads it.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from deepssm import files, program, runs
from deepssm.errors import DeepSSMError
from deepssm.progress import ProgressBar, figures
from deepssm.studies import Backend, Job
from deepssm.training import Metrics

RETRIES = 3
"""How often a job whose worker was lost is started again."""

Report = tuple[int, str, int, int, str, int]
"""Job, stage, steps done, all steps, figures, process."""


class Board:
    """Where workers leave their last report."""

    def __init__(self) -> None:
        self.reports: dict[int, Report] = {}

    def put(self, report: Report) -> None:
        self.reports[report[0]] = report

    def take(self) -> list[Report]:
        reports, self.reports = list(self.reports.values()), {}
        return reports


def train(index: int, config: dict[str, Any], board: Any) -> dict[str, bytes]:
    """What a worker does: train, and return the files of the run."""
    program.use_compilation_cache()

    def watch(stage: str, done: int, steps: int, metrics: Metrics) -> None:
        board.put.remote((index, stage, done, steps, figures(metrics), os.getpid()))

    with tempfile.TemporaryDirectory() as folder:
        runs.train(runs.decode(config), Path(folder), watch=watch)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def on_ray(
    console: Console,
    address: str | None = None,
    cpus: float = 1.0,
    gpus: float | None = None,
    watch: Callable[[Report], None] = lambda report: None,
) -> Backend:
    """A backend on the Ray cluster at an address, or on one of this machine's own.

    Every job gets this many cores, and GPUs: one, where the cluster has any, unless given.
    """
    try:
        import ray
    except ImportError as error:
        raise DeepSSMError("Ray is not installed: pip install 'deepssm[ray]'.") from error

    def train_all(jobs: Sequence[Job]) -> Iterator[tuple[Job, dict[str, Any]]]:
        try:
            _knock(address)
            ray.init(address, log_to_driver=False, logging_level="ERROR", ignore_reinit_error=True)
        except (OSError, ValueError, RuntimeError) as error:
            raise DeepSSMError(f"No Ray cluster at {address}: {error}. Start one with 'ray start --head'.") from error
        wanted = {"num_cpus": cpus, "num_gpus": min(1, ray.cluster_resources().get("GPU", 0)) if gpus is None else gpus}
        for resource, amount in (("CPU", cpus), ("GPU", wanted["num_gpus"])):
            have = ray.cluster_resources().get(resource, 0)
            if amount > have:
                raise DeepSSMError(f"A run asks for {amount:g} {resource}s, but the cluster has {have:g} in all.")
        board = ray.remote(num_cpus=0)(Board).remote()
        task = ray.remote(max_retries=RETRIES, **wanted)(train)
        waiting = {
            task.remote(index, runs.encode(job.experiment), board): (index, job) for index, job in enumerate(jobs)
        }
        try:
            with ProgressBar(console) as progress:
                while waiting:
                    done, _ = ray.wait(list(waiting), timeout=0.3)
                    for report in ray.get(board.take.remote()):
                        progress.show(jobs[report[0]].name, *report[1:5])
                        watch(report)
                    for reference in done:
                        _, job = waiting.pop(reference)
                        yield job, _bring_home(ray, reference, job)
        finally:
            for reference in waiting:
                ray.cancel(reference, force=True)
            ray.kill(board)

    return train_all


def _knock(address: str | None) -> None:
    """Whether anybody answers at HOST:PORT; Ray itself would try for minutes."""
    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


def _bring_home(ray: Any, reference: Any, job: Job) -> dict[str, Any]:
    """Write the files of a finished run into its folder; its results."""
    try:
        content: dict[str, bytes] = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, DeepSSMError):
            raise error.cause from error
        raise
    except ray.exceptions.RayError as error:
        raise DeepSSMError(f"{job.name} was lost with its worker {RETRIES + 1} times: {error}.") from error
    for name in sorted(content, key=lambda name: name == "results.json"):  # last: it says that the run is finished
        files.write(job.folder / name, lambda file, name=name: file.write(content[name]))  # type: ignore[misc]
    return files.read_json(job.folder / "results.json")
