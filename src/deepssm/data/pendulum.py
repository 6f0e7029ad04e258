"""The pendulum data set of the paper: pictures of a torque-driven pendulum, a deterministic function of its seed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from deepssm.data.sequences import About, Dataset, Sequences, Variable
from deepssm.environments.pendulum import Pendulum


@dataclass(frozen=True)
class PendulumData:
    """500 sequences of 15 frames for each of training, validation and test.

    The start ranges and the torque are held so that the variances of sin, cos and velocity are those of the data of
    Karl et al. (2016): 0.52, 0.475 and 13.6.
    """

    sequences: int = 500
    """Sequences in each of the three splits."""
    frames: int = 15
    """Frames in a sequence."""
    torque: float = 4.0
    """The torque is uniform in [-torque, torque] and held between two frames."""
    velocity: float = 8.0
    """The first velocity is uniform in [-velocity, velocity]; the first angle anywhere."""
    data_seed: int = 0
    """Seed of the data."""
    pendulum: Pendulum = field(default_factory=Pendulum)
    """Physics and camera."""

    def generate(self) -> Dataset:
        train, validation, test = (self._split(np.random.default_rng([self.data_seed, index])) for index in range(3))
        states = (Variable("angle", "rad", circular=True), Variable("velocity", "rad/s"))
        about = About(
            "pendulum",
            self.pendulum.dt,
            states,
            controls=(Variable("torque", "N m"),),
            noise=self.pendulum.noise,
            source=f"simulated with seed {self.data_seed}",
        )
        return Dataset(train, validation, test, about)

    def _split(self, generator: np.random.Generator) -> Sequences:
        state = np.empty((self.sequences, self.frames, 2))
        u = generator.uniform(-self.torque, self.torque, (self.sequences, self.frames, 1))
        state[:, 0, 0] = generator.uniform(-np.pi, np.pi, self.sequences)
        state[:, 0, 1] = generator.uniform(-self.velocity, self.velocity, self.sequences)
        for t in range(1, self.frames):
            state[:, t] = self.pendulum.step(state[:, t - 1], u[:, t - 1, 0])
        return Sequences(
            x=self.pendulum.observe(state[..., 0], generator),
            u=u.astype(np.float32),
            mask=np.ones((self.sequences, self.frames), bool),
            state=state.astype(np.float32),
        )
