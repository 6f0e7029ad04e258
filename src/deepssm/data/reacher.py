"""The reacher data set of the paper, from DeepMind's control suite: a deterministic function of its seed.

Sequences are made in parts of a hundred, each with random numbers of its own, by several processes at once. Parts that
are finished stay on disk until the whole file is written, so an interrupted run goes on where it was.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepssm import files
from deepssm.data import sequences
from deepssm.data.sequences import SPLITS, About, Dataset, Sequences, Variable
from deepssm.environments.reacher import WRIST, Observation, Reacher, ReacherEnv
from deepssm.errors import DeepSSMError

PART = 100
"""Sequences in a part."""
Watch = Callable[[int, int], None]
"""Called with the sequences done and all sequences."""


class Task(NamedTuple):
    """A part to be made: which random numbers, how many sequences, where to."""

    split: int
    part: int
    size: int
    path: Path


@dataclass(frozen=True)
class ReacherData:
    """2000 training sequences of 30 frames, cut out of longer episodes, and 500 each for validation and test.

    An episode begins at rest anywhere. Each torque is uniform in [-1, 1] and changes with probability 1 / hold at each
    frame, the wrist's also where it would press it against its limit: it is then drawn from those that lead away. The
    window begins after `before` frames, when the velocities have spread.
    """

    observation: Observation = "angle"
    """The two joint angles, or pictures of 64 x 64 x 3 bytes."""
    sequences: int = 2000
    """Training sequences."""
    test_sequences: int = 500
    """Sequences for each of validation and test."""
    frames: int = 30
    """Frames in a sequence."""
    before: int = 100
    """Frames of an episode before the sequence begins."""
    hold: float = 25.0
    """Frames that a torque is held on average."""
    margin: float = 0.04
    """How close to its limit, in radians, the wrist is led away from it; 0: it never is."""
    data_seed: int = 0
    """Seed of the data."""
    reacher: Reacher = field(default_factory=Reacher)
    """Physics and camera."""

    @property
    def about(self) -> About:
        shoulder = Variable("angle_1", "rad", circular=self.observation == "rgb")
        angles = (shoulder, Variable("angle_2", "rad"))
        return About(
            "reacher",
            self.reacher.dt,
            (*angles, Variable("velocity_1", "rad/s"), Variable("velocity_2", "rad/s")),
            controls=(Variable("torque_1", "0.05 N m"), Variable("torque_2", "0.05 N m")),
            observations=angles if self.observation == "angle" else (),
            source=f"dm_control, seed {self.data_seed}",
        )

    def generate(self) -> Dataset:
        """The data set, made once and kept in the folder of `deepssm.files.cache`."""
        return sequences.load(self.prepare())

    def prepare(self, watch: Watch = lambda done, total: None) -> Path:
        """Make the file that `generate` reads, unless it is there."""
        path = files.cache() / "data" / f"reacher-{self.observation}-{files.digest(asdict(self), 12)}.npz"
        if not path.exists():
            self.write(path, watch)
        return path

    def write(self, path: Path, watch: Watch = lambda done, total: None, processes: int | None = None) -> Dataset:
        """Make the file; returns what is in it.

        Unless `processes` is given, pictures are drawn by as many as there are cores.
        """
        if min(self.sequences, self.test_sequences, self.frames, self.hold) < 1:
            raise DeepSSMError("Sequences, test sequences, frames and hold must all be at least 1.")
        folder = path.with_name(path.name + ".parts")
        self._claim(folder)
        tasks = list(self._tasks(folder))
        done = sum(task.size for task in tasks if task.path.exists())
        total = self.sequences + 2 * self.test_sequences
        watch(done, total)
        left = [task for task in tasks if not task.path.exists()]
        workers = min(len(left), processes or ((os.cpu_count() or 1) if self.observation == "rgb" else 1))
        if workers > 1:
            with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
                for count in pool.map(self.make, left):
                    watch(done := done + count, total)
        else:
            for task in left:
                watch(done := done + self.make(task), total)
        train, validation, test = (_join([task.path for task in tasks if task.split == index]) for index in range(3))
        dataset = Dataset(train, validation, test, self.about)
        sequences.save(dataset, path)
        shutil.rmtree(folder)
        return dataset

    def make(self, task: Task) -> int:
        """Simulate one part and write it; returns the number of its sequences."""
        generator = np.random.default_rng([self.data_seed, task.split, task.part])
        environment = ReacherEnv(self.observation, reacher=self.reacher)
        try:
            episodes = [self._episode(environment, generator) for _ in range(task.size)]
        finally:
            environment.close()
        x, u, state = (np.stack(arrays) for arrays in zip(*episodes, strict=True))
        files.write_arrays(task.path, {"x": x, "u": u, "state": state})
        return task.size

    def _episode(
        self, environment: ReacherEnv, generator: np.random.Generator
    ) -> tuple[NDArray, NDArray[np.float32], NDArray[np.float32]]:
        """Observations, torques and states of one sequence."""
        angles = generator.uniform([-np.pi, -WRIST], [np.pi, WRIST])
        environment.place([*angles, 0.0, 0.0])
        u = generator.uniform(-1.0, 1.0, 2)
        x, torques, states = [], [], []
        for t in range(self.before + self.frames):
            if t == self.before:  # each sequence begins in the first turn
                turns = 2 * np.pi * np.round(environment.state[0] / (2 * np.pi))
                environment.place(environment.state - [turns, 0.0, 0.0, 0.0])
            state = environment.state
            change = generator.uniform(size=2) < 1 / self.hold
            u = np.where(change, generator.uniform(-1.0, 1.0, 2), u)
            if self.margin and abs(state[1]) > WRIST - self.margin and u[1] * state[1] > 0:
                u[1] = -np.sign(state[1]) * generator.uniform()
            if t >= self.before:
                x.append(environment.observe())
                torques.append(u)
                states.append(state)
            environment.advance(u)
        return np.stack(x), np.stack(torques).astype(np.float32), np.stack(states).astype(np.float32)

    def _tasks(self, folder: Path) -> Iterator[Task]:
        for split, size in enumerate((self.sequences, self.test_sequences, self.test_sequences)):
            for part in range(math.ceil(size / PART)):
                yield Task(split, part, min(PART, size - part * PART), folder / f"{SPLITS[split]}-{part:04}.npz")

    def _claim(self, folder: Path) -> None:
        """Parts of other data in the folder are not ours."""
        config = folder / "config.json"
        if config.exists() and files.read_json(config) != asdict(self):
            shutil.rmtree(folder)
        files.write_json(config, asdict(self))


def _join(paths: list[Path]) -> Sequences:
    """The sequences of some parts."""
    names, remedy = ("x", "u", "state"), "Delete it and run the same command again."
    parts = [files.read_arrays(path, remedy, names) for path in paths]
    x, u, state = (np.concatenate([part[name] for part in parts]) for name in names)
    return Sequences(x, u, np.ones(x.shape[:2], bool), state)
