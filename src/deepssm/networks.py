"""Neural networks: dense layers, and the encoders and decoders of single frames.

Features lead and batch axes trail, as in `deepssm.linalg`; frames themselves come as flat lists ``(frames, *shape)``,
so that all frames of all sequences go through one large matrix product.
"""

from __future__ import annotations

import math
from itertools import accumulate, pairwise

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

    def __call__(self, x: Float[Array, "inputs *batch"]) -> Float[Array, "outputs *batch"]:
        return jnp.tensordot(self.W, x, (0, 0)) + self.b.reshape(-1, *(1,) * (x.ndim - 1))


class MLP(eqx.Module):
    """Dense layers with ReLU in between; `gain` scales the last layer at the start."""

    layers: tuple[Dense, ...]

    def __init__(self, inputs: int, hidden: tuple[int, ...], outputs: int, key: PRNGKeyArray, gain: float = 1.0):
        shapes = list(pairwise((inputs, *hidden, outputs)))
        ends = list(accumulate(math.prod(shape) for shape in shapes))
        draws = jnp.split(jax.random.normal(key, (ends[-1],)), ends[:-1])  # one draw: each takes a while to compile
        gains = [math.sqrt(2)] * len(hidden) + [gain]
        self.layers = tuple(
            Dense(gain * draw.reshape(shape) / math.sqrt(max(shape[0], 1)), jnp.zeros(shape[1]))
            for shape, draw, gain in zip(shapes, draws, gains, strict=True)
        )

    def features(self, x: Float[Array, "inputs *batch"]) -> Float[Array, "hidden *batch"]:
        """All layers but the last."""
        for layer in self.layers[:-1]:
            x = jax.nn.relu(layer(x))
        return x

    def __call__(self, x: Float[Array, "inputs *batch"]) -> Float[Array, "outputs *batch"]:
        return self.layers[-1](self.features(x))


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

    network: MLP
    shape: tuple[int, ...] = eqx.field(static=True)
    sigma: float = eqx.field(static=True)

    def __init__(self, inputs: int, hidden: tuple[int, ...], shape: tuple[int, ...], sigma: float, key: PRNGKeyArray):
        self.network = MLP(inputs, hidden, math.prod(shape), key)
        self.shape = shape
        self.sigma = sigma

    def _flat(self, a: Float[Array, "n frames"]) -> Float[Array, "frames pixels"]:
        # Frames first straight out of the product, as the data are: transposing all pixels costs more.
        last = self.network.layers[-1]
        return jnp.tensordot(self.network.features(a), last.W, (0, 0)) + last.b

    def __call__(self, a: Float[Array, "n frames"]) -> Float[Array, "frames *shape"]:
        """The mean picture."""
        return self._flat(a).reshape(-1, *self.shape)

    def log_prob(self, x: Float[Array, "frames *shape"], a: Float[Array, "n frames"]) -> Float[Array, " frames"]:
        error = (x.reshape(len(x), -1) - self._flat(a)) / self.sigma
        return -0.5 * jnp.sum(error**2, axis=1) - math.prod(self.shape) * (math.log(self.sigma) + 0.5 * LOG_2PI)
