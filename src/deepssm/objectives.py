"""Objectives: how distortion and rate are weighed during training.

Both are batch averages in nats per frame; so are D_0 and D_max. An objective has

    init() -> state                     at the start of training
    update(state, distortion) -> state  once a step, before the gradient is taken
    loss(distortion, rate, state)       what is minimised
    trainable(state) -> bool            False while the transition and the prior rest (initial phase of Alg. 1)
    metrics(state) -> dict              what to show of the state
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

Scalar = Float[Array, ""]


@runtime_checkable
class Objective(Protocol):
    """What `deepssm.training` asks of an objective."""

    def init(self) -> Any: ...
    def update(self, state: Any, distortion: Scalar) -> Any: ...
    def loss(self, distortion: Scalar, rate: Scalar, state: Any) -> Scalar: ...
    def trainable(self, state: Any) -> Bool[Array, ""]: ...
    def metrics(self, state: Any) -> dict[str, Array]: ...


@dataclass(frozen=True)
class Elbo:
    """The evidence lower bound itself, Eq. (seq-vhp-elbo_RD)."""

    def init(self) -> tuple[()]:
        return ()

    def update(self, state: tuple[()], distortion: Scalar) -> tuple[()]:
        return state

    def loss(self, distortion: Scalar, rate: Scalar, state: tuple[()]) -> Scalar:
        return distortion + rate

    def trainable(self, state: tuple[()]) -> Bool[Array, ""]:
        return jnp.asarray(True)

    def metrics(self, state: tuple[()]) -> dict[str, Array]:
        return {}


class Schedule(NamedTuple):
    """State of `Annealed`."""

    step: Int[Array, ""]
    steps: Int[Array, ""]
    """Until beta stays at 1. Here, like D_0 below, so that runs which differ in it share one compiled program."""


@dataclass(frozen=True)
class Annealed:
    """The rate is weighed by beta, which rises from 0 to 1 on a schedule fixed beforehand (Bowman et al. 2016)."""

    annealing_steps: int = 2000
    """Steps until beta stays at 1."""
    schedule: Literal["linear", "cosine", "cyclic"] = "linear"
    """How beta rises; cyclic: in four ramps, each followed by as long a time at 1 (Fu et al. 2019)."""

    def init(self) -> Schedule:
        return Schedule(jnp.asarray(0), jnp.asarray(self.annealing_steps))

    def update(self, state: Schedule, distortion: Scalar) -> Schedule:
        return state._replace(step=state.step + 1)

    def beta(self, state: Schedule) -> Scalar:
        progress = jnp.minimum(state.step / state.steps, 1.0)
        if self.schedule == "linear":
            return progress
        if self.schedule == "cosine":
            return 0.5 * (1 - jnp.cos(jnp.pi * progress))
        return jnp.where(progress < 1, jnp.minimum(2 * (4 * progress % 1), 1.0), 1.0)

    def loss(self, distortion: Scalar, rate: Scalar, state: Schedule) -> Scalar:
        return distortion + self.beta(state) * rate

    def trainable(self, state: Schedule) -> Bool[Array, ""]:
        return jnp.asarray(True)

    def metrics(self, state: Schedule) -> dict[str, Array]:
        return {"beta": self.beta(state)}


class Multiplier(NamedTuple):
    """State of `Constrained`."""

    lam: Scalar
    distortion: Scalar
    """Moving average of the distortion."""
    initial: Bool[Array, ""]
    """Still in the initial phase."""
    started: Bool[Array, ""]
    """False before the first step, where the moving average begins."""
    D_0: Scalar


@dataclass(frozen=True)
class Constrained:
    """REWO for deep state-space models, Alg. 1: minimise the rate subject to distortion <= D_0.

    The multiplier lambda weighs the distortion. It grows while the constraint is violated and goes to 1 once it is
    met, where the loss is the evidence lower bound again. Transition and prior are trained from the moment the
    constraint is first met (main phase).
    """

    distortion_baseline: float | Literal["auto"] = "auto"
    """D_0 in nats per frame; auto: from D_max of a short classical run (`distortion_baseline`)."""
    factor: float = 1.0
    """D_0 as a multiple of what auto finds."""
    lam_0: float = 1e-4
    """lambda at the first step. Alg. 1 starts at 1; with a sharp decoder the rate then comes too late to order the
    features, so the default lets it lead and the distortion catch up."""
    nu: float = 300.0
    """Speed of lambda, per nat of distortion."""
    tau_1: float = 10.0
    """Slope of the way back to 1."""
    tau_2: float = 0.01
    """Speed of growth, relative to nu."""
    average: float = 0.9
    """Weight alpha of the past in the moving average of the distortion."""
    bound: float = 0.01
    """Largest change of log(lambda) in one step, whatever the unit of the distortion."""

    def init(self) -> Multiplier:
        assert self.distortion_baseline != "auto", "the baseline is found before training starts"
        flags = (jnp.asarray(True), jnp.asarray(False))
        return Multiplier(jnp.asarray(self.lam_0), jnp.asarray(0.0), *flags, jnp.asarray(self.distortion_baseline))

    def update(self, state: Multiplier, distortion: Scalar) -> Multiplier:
        """One step of Alg. 1: moving average, multiplier, phase."""
        average = self.average * state.distortion + (1 - self.average) * distortion
        average = jnp.where(state.started, average, distortion)
        delta = average - state.D_0
        lam = self._multiplier(state.lam, delta)
        return Multiplier(lam, average, state.initial & (delta > 0), jnp.asarray(True), state.D_0)

    def _multiplier(self, lam: Scalar, delta: Scalar) -> Scalar:
        """lambda exp(-nu f(lambda, delta) delta), the step bounded; on its way back to 1 lambda never passes it."""
        step = -self.nu * f_lambda(lam, delta, self.tau_1, self.tau_2) * delta
        log_lam = jnp.log(lam)
        moved = log_lam + jnp.clip(step, -self.bound, self.bound)
        met = jnp.where(log_lam < 0, jnp.minimum(moved, 0.0), jnp.maximum(moved, 0.0))
        return jnp.exp(jnp.where(delta > 0, moved, met))

    def loss(self, distortion: Scalar, rate: Scalar, state: Multiplier) -> Scalar:
        """The Lagrangian, Eq. (seq-vhp-lagrangian)."""
        return rate + state.lam * (distortion - state.D_0)

    def trainable(self, state: Multiplier) -> Bool[Array, ""]:
        return ~state.initial

    def metrics(self, state: Multiplier) -> dict[str, Array]:
        return {"lambda": state.lam, "initial": state.initial.astype(float), "D_0": state.D_0}


def f_lambda(lam: Scalar, delta: Scalar, tau_1: float, tau_2: float) -> Scalar:
    """(1 - H(delta)) tanh(tau_1 (1 / lambda - 1)) - tau_2 H(delta) with the Heaviside function H."""
    return jnp.where(delta > 0, -tau_2, jnp.tanh(tau_1 * (1 / lam - 1)))


def distortion_baseline(best: float, slack: float = 0.1) -> float:
    """D_0 from the best distortion D_max of classical training (App. A.1): ten percent looser.

    The paper's 0.9 D_max is looser than D_max only where D_max is negative, as it is for a sharp Gaussian decoder;
    for a positive D_max the same slack is added.
    """
    return best + slack * abs(best)
