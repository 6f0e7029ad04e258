"""Small enough to train in a test."""

import dataclasses

import jax

from deepssm.data.pendulum import PendulumData
from deepssm.environments.pendulum import Pendulum
from deepssm.models.ekvae import EKVAE, EKVAEConfig
from deepssm.objectives import Constrained
from deepssm.program import TrainingConfig
from deepssm.runs import Experiment

DATA = PendulumData(sequences=16, frames=7, pendulum=Pendulum(size=8, blob=1.0))
MODEL = EKVAEConfig(encoder=(16,), decoder=(16,), bases=2, alpha=(8,), prior_hidden=(8,))
TRAINING = TrainingConfig(steps=20, batch=8, chunk=5, checkpoint_seconds=0.0, baseline_steps=50)
EXPERIMENT = Experiment("pendulum-vhp-ekvae-co", "VHP-EKVAE (CO)", DATA, MODEL, Constrained(-100.0), TRAINING)


def model(key: int = 0, **changes: object) -> EKVAE:
    return dataclasses.replace(MODEL, **changes).build((8, 8), 1, jax.random.key(key))
