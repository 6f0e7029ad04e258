"""Neural networks: dense layers, and the encoders and decoders of single frames.

Features lead and batch axes trail, as in `deepssm.linalg`; frames themselves come as flat lists ``(frames, *shape)``,
so that all frames of all sequences go through one large matrix product.
"""

from __future__ import annotations

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, PRNGKeyArray

from deepssm.gaussian import LOG_2PI, Diagonal


class Dense(eqx.Module):
    """W' x + b."""

    W: Float[Array, "inputs outputs"]
    b: Float[Array, " outputs"]

    def __init__(self, inputs: int, outputs: int, key: PRNGKeyArray, gain: float = 1.0):
        self.W = gain * jax.random.normal(key, (inputs, outputs)) / math.sqrt(max(inputs, 1))
        self.b = jnp.zeros(outputs)

    def __call__(self, x: Float[Array, "inputs *batch"]) -> Float[Array, "outputs *batch"]:
        return jnp.tensordot(self.W, x, (0, 0)) + self.b.reshape(-1, *(1,) * (x.ndim - 1))


class MLP(eqx.Module):
    """Dense layers with ReLU in between; `gain` scales the last layer at the start."""

    layers: tuple[Dense, ...]

    def __init__(self, inputs: int, hidden: tuple[int, ...], outputs: int, key: PRNGKeyArray, gain: float = 1.0):
        sizes = (inputs, *hidden, outputs)
        keys = jax.random.split(key, len(sizes) - 1)
        gains = [math.sqrt(2)] * len(hidden) + [gain]
        self.layers = tuple(map(Dense, sizes[:-1], sizes[1:], keys, gains))

    def __call__(self, x: Float[Array, "inputs *batch"]) -> Float[Array, "outputs *batch"]:
        for layer in self.layers[:-1]:
            x = jax.nn.relu(layer(x))
        return self.layers[-1](x)


class GaussianMLP(eqx.Module):
    """An MLP that returns a diagonal Gaussian."""

    mlp: MLP

    def __init__(self, inputs: int, hidden: tuple[int, ...], outputs: int, key: PRNGKeyArray, gain: float = 1.0):
        self.mlp = MLP(inputs, hidden, 2 * outputs, key, gain)

    def __call__(self, x: Float[Array, "inputs *batch"]) -> Diagonal:
        m, log_v = jnp.split(self.mlp(x), 2)
        return Diagonal(m, jnp.exp(log_v))


class Encoder(eqx.Module):
    """q(a | x) for flat lists of frames."""

    network: GaussianMLP

    def __init__(self, shape: tuple[int, ...], hidden: tuple[int, ...], outputs: int, key: PRNGKeyArray):
        self.network = GaussianMLP(math.prod(shape), hidden, outputs, key)

    def __call__(self, x: Float[Array, "frames *shape"]) -> Diagonal:
        return self.network(x.reshape(len(x), -1).T)


class Decoder(eqx.Module):
    """p(x | a) = N(mean(a), sigma^2 I) for flat lists of frames."""

    hidden: MLP
    last: Dense
    shape: tuple[int, ...] = eqx.field(static=True)
    sigma: float = eqx.field(static=True)

    def __init__(self, inputs: int, hidden: tuple[int, ...], shape: tuple[int, ...], sigma: float, key: PRNGKeyArray):
        hidden_key, last_key = jax.random.split(key)
        self.hidden = MLP(inputs, hidden[:-1], hidden[-1], hidden_key)
        self.last = Dense(hidden[-1], math.prod(shape), last_key)
        self.shape = shape
        self.sigma = sigma

    def _flat(self, a: Float[Array, "n frames"]) -> Float[Array, "frames pixels"]:
        # Frames first straight out of the product, as the data are: transposing all pixels costs more.
        return jnp.tensordot(jax.nn.relu(self.hidden(a)), self.last.W, (0, 0)) + self.last.b

    def __call__(self, a: Float[Array, "n frames"]) -> Float[Array, "frames *shape"]:
        """The mean picture."""
        return self._flat(a).reshape(-1, *self.shape)

    def log_prob(self, x: Float[Array, "frames *shape"], a: Float[Array, "n frames"]) -> Float[Array, " frames"]:
        error = (x.reshape(len(x), -1) - self._flat(a)) / self.sigma
        return -0.5 * jnp.sum(error**2, axis=1) - math.prod(self.shape) * (math.log(self.sigma) + 0.5 * LOG_2PI)
