"""The reacher of DeepMind's control suite: an arm with two joints in the plane, seen from above or as its angles.

The shoulder turns all the way round, the wrist by 160 degrees to either side. Needs the extra `reacher` (dm_control),
and for pictures an OpenGL library that works without a screen.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import gymnasium
import numpy as np
from numpy.typing import NDArray

from deepssm.errors import DeepSSMError

Observation = Literal["angle", "rgb"]
WRIST = np.deg2rad(160.0)
"""Where the wrist ends."""
REACH = (0.05, 0.20)
"""Distances of targets from the shoulder, in metres."""
FLAGS = {"shadow": False, "reflection": False, "skybox": False, "fog": False}
"""What makes pictures slow and shows nothing of the arm."""


@dataclass(frozen=True)
class Reacher:
    """Physics and camera."""

    repeat: int = 1
    """Steps of 0.02 s between two frames; the action is held."""
    size: int = 64
    """Pixels along an edge of the picture."""

    @property
    def dt(self) -> float:
        return 0.02 * self.repeat


class ReacherEnv(gymnasium.Env[NDArray[Any], NDArray[Any]]):
    """The reacher as a Gymnasium environment.

    Observations are the two joint angles (shoulder, wrist; radians, the shoulder's is not wrapped) or pictures
    (size, size, 3) of bytes; actions are torques in [-1, 1]. With a target, a red disc, the reward is 1 while the
    finger touches it; without one it is 0.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 25}  # type: ignore[misc]

    def __init__(
        self,
        observation: str = "rgb",
        target: float | None = None,
        reacher: Reacher | None = None,
        render_mode: str | None = None,
    ):
        """`target` is the radius of the target in metres (0.05 in the suite's easy task, 0.015 in the hard one)."""
        if observation not in ("angle", "rgb"):
            raise DeepSSMError(f"Got the observation {observation!r}; expected 'angle' or 'rgb'.")
        self.reacher = reacher or Reacher()
        self.observation, self.target, self.render_mode = observation, target, render_mode
        self.physics = _physics()
        self.physics.named.model.geom_rgba["target", 3] = 0.0 if target is None else 1.0
        self.physics.named.model.geom_size["target", 0] = target or 0.01
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
        size = self.reacher.size
        self.observation_space = (
            gymnasium.spaces.Box(0, 255, (size, size, 3), np.uint8)
            if observation == "rgb"
            else gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        )

    @property
    def state(self) -> NDArray[np.float64]:
        """Shoulder, wrist and their velocities."""
        return np.concatenate([self.physics.data.qpos, self.physics.data.qvel])

    @property
    def finger(self) -> NDArray[np.float64]:
        """Where the fingertip is, in metres from the shoulder."""
        return self.physics.named.data.geom_xpos["finger", :2].copy()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """At rest anywhere, or at options["state"]; the target anywhere, or at options["target"]."""
        super().reset(seed=seed)
        options = options or {}
        anywhere = [*self.np_random.uniform([-np.pi, -WRIST], [np.pi, WRIST]), 0.0, 0.0]
        angle, distance = self.np_random.uniform([0.0, REACH[0]], [2 * np.pi, REACH[1]])
        somewhere = distance * np.array([np.cos(angle), np.sin(angle)])
        self.place(options.get("state", anywhere), options.get("target", somewhere))
        return self.observe(), self._info()

    def place(self, state: Any, target: Any = 0.0) -> None:
        """Put the arm into a state, and the target somewhere (x, y)."""
        state = np.asarray(state, float)
        if state.shape != (4,):
            raise DeepSSMError(f"Got a state of shape {state.shape}; expected shoulder, wrist and their velocities.")
        with self.physics.reset_context():
            self.physics.data.qpos[:], self.physics.data.qvel[:] = np.split(state, 2)
            self.physics.named.model.geom_pos["target", :2] = target

    def step(self, action: NDArray[Any]) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.advance(action)
        info = self._info()
        touching = self.target is not None and info["distance"] <= self.target + 0.01
        return self.observe(), float(touching), False, False, info

    def advance(self, action: NDArray[Any]) -> None:
        """Move without looking."""
        self.physics.data.ctrl[:] = np.clip(action, -1.0, 1.0)
        self.physics.step(self.reacher.repeat)

    def observe(self) -> NDArray[Any]:
        return self.picture() if self.observation == "rgb" else self.state[:2].astype(np.float32)

    def picture(self, size: int | None = None) -> NDArray[np.uint8]:
        """From above, (size, size, 3)."""
        size = size or self.reacher.size
        try:
            return self.physics.render(size, size, camera_id="fixed", render_flag_overrides=FLAGS)
        except Exception as error:  # whatever a broken OpenGL raises
            raise DeepSSMError(_gl(error)) from error

    def render(self) -> NDArray[np.uint8]:
        return self.picture(256)

    def close(self) -> None:
        self.physics.free()

    def _info(self) -> dict[str, Any]:
        distance = self.physics.finger_to_target_dist() if self.target is not None else np.nan
        return {"state": self.state, "finger": self.finger, "distance": float(distance)}


def _physics() -> Any:
    os.environ.setdefault("MUJOCO_GL", "egl")
    try:
        from dm_control.suite import reacher
    except ModuleNotFoundError as error:
        raise DeepSSMError(
            f"The reacher needs dm_control ({error}). Install it with: pip install 'deepssm[reacher]'"
        ) from error
    except Exception as error:  # dm_control loads OpenGL when it is imported
        raise DeepSSMError(_gl(error)) from error
    return reacher.Physics.from_xml_string(*reacher.get_model_and_assets())


def _gl(error: Exception) -> str:
    return (
        f"Cannot draw the reacher with MUJOCO_GL={os.environ.get('MUJOCO_GL')}: {error}. Drawing without a screen "
        "needs EGL (on Debian: apt install libegl1 libgl1) or, with MUJOCO_GL=osmesa, OSMesa (apt install libosmesa6). "
        "Joint angles alone need neither: set MUJOCO_GL=disabled."
    )
