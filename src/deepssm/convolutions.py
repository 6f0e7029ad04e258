"""Convolutions that halve and double pictures.

Pictures come as flat lists (frames, height, width, channels).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, PRNGKeyArray

from deepssm.errors import DeepSSMError

BLOCK = 256
"""Frames in a block."""


class Convolution(eqx.Module):
    """5 x 5 with stride 2, on flat lists of pictures (frames, height, width, channels): halves their size.

    On a CPU as one matrix product of all windows, since XLA's convolutions are slow there inside of loops.
    """

    W: Float[Array, "5 5 inputs outputs"]
    b: Float[Array, " outputs"]

    def __init__(self, inputs: int, outputs: int, key: PRNGKeyArray):
        self.W = jax.random.normal(key, (5, 5, inputs, outputs)) * math.sqrt(2 / (25 * inputs))
        self.b = jnp.zeros(outputs)

    def __call__(self, x: Float[Array, "frames h w inputs"]) -> Float[Array, "frames h2 w2 outputs"]:
        if jax.default_backend() != "cpu":
            return self.convolve(x) + self.b
        return self.product(x) + self.b

    def convolve(self, x: Array) -> Array:
        """With stride 1 and 3 x 3 on squares of 2 x 2 pixels: several times faster on an accelerator than stride 2."""
        frames, height, width, inputs = x.shape
        squares = jnp.transpose(x.reshape(frames, height // 2, 2, width // 2, 2, inputs), (0, 1, 3, 2, 4, 5))
        W = jnp.pad(self.W, ((1, 0), (1, 0), (0, 0), (0, 0))).reshape(3, 2, 3, 2, inputs, -1)
        W = jnp.transpose(W, (0, 2, 1, 3, 4, 5)).reshape(3, 3, 4 * inputs, -1)
        return stride_1(squares.reshape(frames, height // 2, width // 2, -1), W)

    def product(self, x: Array) -> Array:
        return windows(x, 5, (1, 2), 2) @ self.W.reshape(-1, self.W.shape[3])


class Deconvolution(Convolution):
    """The transpose of a convolution: doubles the size of pictures."""

    def __init__(self, inputs: int, outputs: int, key: PRNGKeyArray, gain: float = math.sqrt(2)):
        super().__init__(inputs, outputs, key)
        self.W = self.W * (gain * math.sqrt(2))  # with stride 2 a quarter of the kernel meets each pixel

    def convolve(self, x: Array) -> Array:
        return self._spread(stride_1(x, self._squares()))

    def product(self, x: Array) -> Array:
        W = self._squares()
        return self._spread(windows(x, 3, (1, 1), 1) @ W.reshape(-1, W.shape[3]))

    def _squares(self) -> Array:
        """The kernel that makes squares of 2 x 2 pixels, 3 x 3 with stride 1.

        Even rows of a result come from the odd rows of the kernel, odd ones from the even; columns alike.
        """
        W = jnp.stack([jnp.pad(self.W[1::2], ((0, 1), (0, 0), (0, 0), (0, 0))), self.W[0::2]])
        W = jnp.stack([jnp.pad(W[:, :, 1::2], ((0, 0), (0, 0), (0, 1), (0, 0), (0, 0))), W[:, :, 0::2]])
        W = jnp.transpose(W, (2, 3, 4, 1, 0, 5))  # 3, 3, inputs, row, column, outputs
        return W.reshape(*W.shape[:3], -1)

    def _spread(self, squares: Array) -> Array:
        frames, height, width, _ = squares.shape
        pixels = jnp.transpose(squares.reshape(frames, height, width, 2, 2, -1), (0, 1, 3, 2, 4, 5))
        return pixels.reshape(frames, 2 * height, 2 * width, -1)


def stride_1(x: Float[Array, "frames h w inputs"], W: Float[Array, "3 3 inputs outputs"]) -> Array:
    return jax.lax.conv_general_dilated(x, W, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def windows(x: Float[Array, "frames h w c"], size: int, padding: tuple[int, int], stride: int) -> Array:
    """What each place of a convolution sees, (frames, h / stride, w / stride, size * size * c)."""
    height, width = x.shape[1:3]
    x = jnp.pad(x, ((0, 0), padding, padding, (0, 0)))
    shifts = [(row, column) for row in range(size) for column in range(size)]
    return jnp.concatenate([x[:, r : r + height : stride, c : c + width : stride] for r, c in shifts], axis=-1)


def in_blocks(f: Callable[[Array], Array], frames: Array) -> Array:
    """f of a list of frames. On a CPU, where windows take much room, block by block: also in the backward pass."""
    if jax.default_backend() != "cpu" or len(frames) <= BLOCK:
        return f(frames)
    return jax.lax.map(jax.checkpoint(lambda frame: f(frame[None])[0]), frames, batch_size=BLOCK)


def halved(shape: tuple[int, ...], channels: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of what convolutions with these channels make of a picture."""
    times = 2 ** len(channels)
    if channels and (len(shape) != 3 or any(edge % times for edge in shape[:2])):
        raise DeepSSMError(
            f"Convolutions with {len(channels)} layers need pictures (height, width, channels) whose edges are "
            f"multiples of {times}; these have the shape {shape}. Set 'channels' to none for dense layers."
        )
    return (shape[0] // times, shape[1] // times, channels[-1]) if channels else shape
