"""Neural networks: dense layers, and the encoders and decoders of single frames.

Features lead and batch axes trail, as in `deepssm.linalg`; frames themselves come as flat lists ``(frames, *shape)``,
so that all frames of all sequences go through one large matrix product.
"""

from __future__ import annotations

import math
from itertools import accumulate, pairwise
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Num, PRNGKeyArray

from deepssm.convolutions import Convolution, Deconvolution, halved
from deepssm.data.sequences import intensities
from deepssm.gaussian import LOG_2PI, Diagonal

Reading = Literal["forward", "backward", "both", "frame"]


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


def sensors(shape: tuple[int, ...], outputs: int) -> int:
    """How many numbers of an observation go straight past a network: all of them, where dimensions are not fewer."""
    return shape[0] if len(shape) == 1 and shape[0] <= outputs else 0


def straight(inputs: int, outputs: int) -> Dense:
    """The straight way past the hidden layers, for as many sensors as there are dimensions or fewer.

    Sensors often show positions as they are, and this begins as the identity. A network alone, which starts at random,
    bends them, and with them the velocities.
    """
    return Dense(jnp.eye(inputs, outputs), jnp.zeros(outputs))


class Recogniser(eqx.Module):
    """q(. | features) from dense layers. Sensors, the last of the features, go straight to the first means.

    Those start with the `variance` that the decoder expects of sensors: from 1 down to the variance of a precise sensor
    is a long way.
    """

    network: GaussianMLP
    linear: Dense | None

    def __init__(
        self,
        inputs: int,
        hidden: tuple[int, ...],
        outputs: int,
        shape: tuple[int, ...],
        key: PRNGKeyArray,
        variance: float = 1.0,
    ):
        count = sensors(shape, outputs)
        self.linear = straight(count, outputs) if count else None
        network = GaussianMLP(inputs, hidden, outputs, key, gain=0.1 if count else 1.0)
        b = jnp.zeros(2 * outputs).at[outputs : outputs + count].set(math.log(variance))
        self.network = eqx.tree_at(lambda network: network.mlp.layers[-1].b, network, b)

    def __call__(self, features: Float[Array, "inputs *batch"]) -> Diagonal:
        if self.linear is None:
            return self.network(features)
        features, x = jnp.split(features, [len(features) - len(self.linear.W)])
        q = self.network(features)
        return q._replace(m=q.m + self.linear(x))


class Standard(eqx.Module):
    """What convolutions see and make of pictures: differences from the mean one, in units of their standard deviation.

    Both are facts about the data (`knowing`) and not trained.
    """

    mean: Float[Array, "*shape"]
    scale: Float[Array, ""]

    @classmethod
    def unknown(cls, shape: tuple[int, ...]) -> Standard:
        return cls(jnp.zeros(shape), jnp.ones(()))

    def standardised(self, x: Float[Array, "frames *shape"]) -> Float[Array, "frames *shape"]:
        mean, scale = jax.lax.stop_gradient((self.mean, self.scale))
        return (x - mean) / scale

    def restored(self, x: Float[Array, "frames *shape"]) -> Float[Array, "frames *shape"]:
        mean, scale = jax.lax.stop_gradient((self.mean, self.scale))
        return mean + scale * x


def knowing(model: Any, mean: Any, scale: Any) -> Any:
    """The same model, whose networks know the mean picture and the standard deviation of all pixels around it."""

    def know(part: Any) -> Any:
        return Standard(jnp.asarray(mean), jnp.asarray(scale)) if isinstance(part, Standard) else part

    return jax.tree.map(know, model, is_leaf=lambda part: isinstance(part, Standard))


class Encoder(eqx.Module):
    """q(a | x) for flat lists of frames: convolutions where there are `channels`, then dense layers."""

    convolutions: tuple[Convolution, ...]
    network: Recogniser
    standard: Standard | None

    def __init__(
        self,
        shape: tuple[int, ...],
        hidden: tuple[int, ...],
        outputs: int,
        key: PRNGKeyArray,
        channels: tuple[int, ...] = (),
        variance: float = 1.0,
    ):
        self.standard = Standard.unknown(shape) if channels else None
        features = math.prod(halved(shape, channels))
        key, *keys = jax.random.split(key, 1 + len(channels)) if channels else [key]
        sizes = pairwise((shape[-1], *channels))
        self.convolutions = tuple(Convolution(*size, key) for size, key in zip(sizes, keys, strict=True))
        self.network = Recogniser(features, hidden, outputs, shape, key, variance)

    def __call__(self, x: Num[Array, "frames *shape"]) -> Diagonal:
        x = intensities(x) if self.standard is None else self.standard.standardised(intensities(x))
        for layer in self.convolutions:
            x = jax.nn.relu(layer(x))
        x = x.reshape(len(x), -1).T
        return self.network(x if self.network.linear is None else jnp.concatenate([x, x]))


class Decoder(eqx.Module):
    """p(x | a) = N(mean(a), sigma^2 I) for flat lists of frames: the encoder's layers in reverse."""

    network: MLP
    deconvolutions: tuple[Deconvolution, ...]
    linear: Dense | None
    standard: Standard | None
    shape: tuple[int, ...] = eqx.field(static=True)
    sigma: float = eqx.field(static=True)

    def __init__(
        self,
        inputs: int,
        hidden: tuple[int, ...],
        shape: tuple[int, ...],
        sigma: float,
        key: PRNGKeyArray,
        channels: tuple[int, ...] = (),
    ):
        self.standard = Standard.unknown(shape) if channels else None
        key, *keys = jax.random.split(key, 1 + len(channels)) if channels else [key]
        self.linear = straight(inputs, *shape) if sensors(shape, inputs) else None
        gain = math.sqrt(2) if channels else 1.0 if self.linear is None else 0.1
        self.network = MLP(inputs, hidden, math.prod(halved(shape, channels)), key, gain)
        sizes = list(pairwise((shape[-1], *channels)))[::-1]
        gains = [math.sqrt(2)] * (len(channels) - 1) + [1.0] * bool(channels)
        self.deconvolutions = tuple(
            Deconvolution(inputs, outputs, key, gain)
            for (outputs, inputs), key, gain in zip(sizes, keys, gains, strict=True)
        )
        self.shape = shape
        self.sigma = sigma

    def _flat(self, a: Float[Array, "n frames"]) -> Float[Array, "frames pixels"]:
        # Frames first straight out of the product, as the data are: transposing all pixels costs more.
        last = self.network.layers[-1]
        x = jnp.tensordot(self.network.features(a), last.W, (0, 0)) + last.b
        if self.deconvolutions:
            start = halved(self.shape, tuple(layer.W.shape[2] for layer in self.deconvolutions[::-1]))
            x = x.reshape(-1, *start)
            for layer in self.deconvolutions:
                x = layer(jax.nn.relu(x))
            x = x.reshape(len(x), -1)
        if self.linear is not None:
            x = x + self.linear(a).T
        if self.standard is not None:
            x = self.standard.restored(x.reshape(-1, *self.shape))
        return x.reshape(len(x), -1)

    def __call__(self, a: Float[Array, "n frames"]) -> Float[Array, "frames *shape"]:
        """The mean picture."""
        return self._flat(a).reshape(-1, *self.shape)

    def log_prob(self, x: Num[Array, "frames *shape"], a: Float[Array, "n frames"]) -> Float[Array, " frames"]:
        error = (intensities(x).reshape(len(x), -1) - self._flat(a)) / self.sigma
        return -0.5 * jnp.sum(error**2, axis=1) - math.prod(self.shape) * (math.log(self.sigma) + 0.5 * LOG_2PI)


class LSTM(eqx.Module):
    """Long short-term memory. What it remembers, h above c, is one array (2 k, *batch)."""

    input: Dense
    W: Float[Array, "k k4"]

    def __init__(self, inputs: int, size: int, key: PRNGKeyArray):
        input_key, memory_key = jax.random.split(key)
        b = jnp.zeros(4 * size).at[size : 2 * size].set(1.0)  # remember at first
        self.input = Dense(jax.random.normal(input_key, (inputs, 4 * size)) / math.sqrt(inputs), b)
        self.W = jax.random.normal(memory_key, (size, 4 * size)) / math.sqrt(size)

    @property
    def size(self) -> int:
        return len(self.W)

    def empty(self, *batch: int) -> Float[Array, "k2 *batch"]:
        """The memory of nothing."""
        return jnp.zeros((2 * self.size, *batch))

    def output(self, memory: Float[Array, "k2 *batch"]) -> Float[Array, "k *batch"]:
        return memory[: self.size]

    def step(self, memory: Float[Array, "k2 *batch"], x: Float[Array, "inputs *batch"]) -> Float[Array, "k2 *batch"]:
        """The memory after one more input."""
        return self._step(memory, self.input(x))

    def read(
        self, x: Float[Array, "inputs T N"], live: Bool[Array, "T N"] | None = None, reverse: bool = False
    ) -> Float[Array, "k2 T N"]:
        """The memory after each input, forward or backward in time; inputs that are not live leave it as it was."""

        def step(memory: Array, inputs: tuple[Array, Array | None]) -> tuple[Array, Array]:
            gates, live = inputs
            new = self._step(memory, gates)
            memory = new if live is None else jnp.where(live, new, memory)
            return memory, memory

        gates = jnp.moveaxis(self.input(x), 1, 0)
        _, memories = jax.lax.scan(step, self.empty(x.shape[2]), (gates, live), reverse=reverse)
        return jnp.moveaxis(memories, 0, 1)

    def _step(self, memory: Array, gates: Array) -> Array:
        h, c = jnp.split(memory, 2)
        i, f, g, o = jnp.split(gates + jnp.tensordot(self.W, h, (0, 0)), 4)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return jnp.concatenate([jax.nn.sigmoid(o) * jnp.tanh(c), c])


def still_seen(seen: Bool[Array, "T N"]) -> Bool[Array, "T N"]:
    """Whether a frame is seen at t or later."""
    return jax.lax.cummax(seen.astype(jnp.int32), reverse=True) > 0


class Reader(eqx.Module):
    """Features of the frames and controls around each time step, for recognition models without a Kalman filter.

        forward   LSTM over x_1:t, u_1:t-1
        backward  LSTM over x_t:T, u_t:T-1
        both      the sum of the two
        frame     a dense layer on x_t alone

    An unseen frame is read as zeros with a flag. Reading backward begins at the last seen frame, so that padding
    changes nothing. As many `sensors` of the frame itself follow the features, for a `Recogniser`.
    """

    forward: LSTM | None
    backward: LSTM | None
    frame: Dense | None
    sensors: int = eqx.field(static=True)

    def __init__(
        self, kind: Reading, shape: tuple[int, ...], controls: int, size: int, key: PRNGKeyArray, sensors: int = 0
    ):
        forward_key, backward_key = jax.random.split(key)
        pixels = math.prod(shape)
        inputs = pixels + controls + 1
        self.forward = LSTM(inputs, size, forward_key) if kind in ("forward", "both") else None
        self.backward = LSTM(inputs, size, backward_key) if kind in ("backward", "both") else None
        self.frame = MLP(pixels, (), size, forward_key, math.sqrt(2)).layers[0] if kind == "frame" else None
        self.sensors = sensors

    def __call__(
        self,
        x: Num[Array, "N T *shape"],
        u: Float[Array, "n_u T N"],
        seen: Bool[Array, "T N"],
        ahead: bool = True,
    ) -> tuple[Float[Array, "k T N"], Bool[Array, "T N"]]:
        """Features at each t, and whether they tell of a frame from t on; not `ahead`: nothing after t is read."""
        x = jnp.moveaxis(intensities(x).reshape(*x.shape[:2], -1), (0, 2), (2, 0)) * seen
        if self.frame is not None:
            return self._with_sensors(jax.nn.relu(self.frame(x)), x), seen
        flag, features, informed = seen[None].astype(x.dtype), jnp.zeros(()), seen
        if self.forward is not None:
            before = jnp.concatenate([jnp.zeros_like(u[:, :1]), u[:, :-1]], axis=1)
            features = features + self.forward.output(self.forward.read(jnp.concatenate([x, before, flag])))
        if self.backward is not None and not ahead:
            features = features + self._now(x, u, flag)
        elif self.backward is not None:
            informed = still_seen(seen)
            follows = jnp.concatenate([informed[1:], jnp.zeros_like(informed[:1])])
            memory = self.backward.read(jnp.concatenate([x, u * follows, flag]), informed, reverse=True)
            features = features + self.backward.output(memory)
        return self._with_sensors(features, x), informed

    def empty(self) -> Float[Array, " k2"]:
        """The memory of `step` before the first frame."""
        return jnp.zeros(0) if self.forward is None else self.forward.empty()

    def step(self, memory: Array, x: Array, u_before: Array, seen: Array) -> tuple[Array, Array]:
        """Features of one more frame, and the new memory."""
        x = intensities(x).reshape(-1) * seen
        flag = jnp.asarray(seen, x.dtype)[None]
        if self.frame is not None:
            return self._with_sensors(jax.nn.relu(self.frame(x)), x), memory
        features = jnp.zeros(())
        if self.forward is not None:
            memory = self.forward.step(memory, jnp.concatenate([x, u_before, flag]))
            features = features + self.forward.output(memory)
        if self.backward is not None:
            features = features + self._now(x, u_before, flag)
        return self._with_sensors(features, x), memory

    def _with_sensors(self, features: Array, x: Array) -> Array:
        return jnp.concatenate([features, x]) if self.sensors else features

    def _now(self, x: Array, u: Array, flag: Array) -> Array:
        """What reading backward finds in one frame with nothing after it."""
        assert self.backward is not None
        inputs = jnp.concatenate([x, jnp.zeros_like(u), flag])
        return self.backward.output(self.backward.step(self.backward.empty(*x.shape[1:]), inputs))
