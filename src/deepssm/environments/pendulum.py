"""A pendulum with friction, driven by a torque and seen as a small picture or as its state.

    phi'' = -friction phi' + g sin(phi) + u,   phi = 0 upright, mass and length 1

integrated by one Runge-Kutta step of length dt with the torque held.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import gymnasium
import numpy as np
from numpy.typing import NDArray

from deepssm.errors import DeepSSMError

Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Pendulum:
    """Physics and camera."""

    dt: float = 0.1
    """Seconds between two frames."""
    friction: float = 0.5
    """Damping of the velocity."""
    gravity: float = 9.81
    """Gravitational acceleration over length."""
    size: int = 16
    """Pixels along an edge of the picture."""
    blob: float = 1.5
    """Width of the bob in pixels (standard deviation)."""
    noise: float = 0.01
    """Standard deviation of the pixel noise."""

    def step(self, state: Floats, u: Floats) -> Floats:
        """The state (..., 2) of angle and velocity after dt under the torque u (...)."""

        def derivative(s: Floats) -> Floats:
            acceleration = -self.friction * s[..., 1] + self.gravity * np.sin(s[..., 0]) + u
            return np.stack([s[..., 1], acceleration], axis=-1)

        k1 = derivative(state)
        k2 = derivative(state + 0.5 * self.dt * k1)
        k3 = derivative(state + 0.5 * self.dt * k2)
        k4 = derivative(state + self.dt * k3)
        return state + self.dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)

    def picture(self, angle: Floats) -> Floats:
        """Noise-free pictures (..., size, size) in 0..1: a Gaussian blob at the bob, upright at the top."""
        centre = (self.size - 1) / 2
        radius = centre - 2 * self.blob
        row = centre - radius * np.cos(angle)
        column = centre + radius * np.sin(angle)
        pixels = np.arange(self.size)
        vertical = np.exp(-0.5 * ((pixels - row[..., None]) / self.blob) ** 2)
        horizontal = np.exp(-0.5 * ((pixels - column[..., None]) / self.blob) ** 2)
        return vertical[..., :, None] * horizontal[..., None, :]

    def observe(self, angle: Floats, generator: np.random.Generator) -> NDArray[np.float32]:
        clean = self.picture(angle)
        return (clean + self.noise * generator.standard_normal(clean.shape)).astype(np.float32)


class PendulumEnv(gymnasium.Env[NDArray[np.float32], NDArray[np.float32]]):
    """The pendulum as a Gymnasium environment without a reward: a task gives it one.

    Observations are pictures (size, size) or the state (angle, velocity); the action is the torque.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"]}  # type: ignore[misc]

    def __init__(
        self,
        observation: str = "picture",
        torque: float = 7.0,
        velocity: float = 8.0,
        pendulum: Pendulum | None = None,
        render_mode: str | None = None,
    ):
        if observation not in ("picture", "state"):
            raise DeepSSMError(f"Got the observation {observation!r}; expected 'picture' or 'state'.")
        self.pendulum = pendulum or Pendulum()
        self.observation, self.torque, self.velocity, self.render_mode = observation, torque, velocity, render_mode
        self.action_space = gymnasium.spaces.Box(-torque, torque, (1,), np.float32)
        shape = (self.pendulum.size, self.pendulum.size) if observation == "picture" else (2,)
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, shape, np.float32)
        self.state: Floats = np.zeros(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start anywhere, or at options["state"]."""
        super().reset(seed=seed)
        anywhere = self.np_random.uniform([-np.pi, -self.velocity], [np.pi, self.velocity])
        self.state = np.asarray((options or {}).get("state", anywhere), float)
        return self._observe(), {"state": self.state.copy()}

    def step(self, action: NDArray[np.float32]) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        torque = np.asarray(np.clip(float(np.asarray(action).item()), -self.torque, self.torque))
        self.state = self.pendulum.step(self.state, torque)
        return self._observe(), 0.0, False, False, {"state": self.state.copy()}

    def render(self) -> NDArray[np.uint8]:
        grey = (255 * self.pendulum.picture(self._angle)).astype(np.uint8)
        return np.repeat(np.kron(grey, np.ones((16, 16), np.uint8))[..., None], 3, axis=2)

    @property
    def _angle(self) -> Floats:
        return np.asarray(self.state[0])

    def _observe(self) -> NDArray[np.float32]:
        if self.observation == "state":
            return self.state.astype(np.float32)
        return self.pendulum.observe(self._angle, self.np_random)
