"""Convolutions that halve pictures, and their transposes, which double them.

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

BLOCK = 4
"""Frames in a block on a CPU, whose windows should stay in its cache."""

Pictures = Float[Array, "_ _ _ _"]
Kernel = Float[Array, "5 5 inputs outputs"]


class Convolution(eqx.Module):
    """5 x 5 with stride 2: halves the size of pictures."""

    W: Kernel
    b: Float[Array, " outputs"]

    def __init__(self, inputs: int, outputs: int, key: PRNGKeyArray):
        self.W = jax.random.normal(key, (5, 5, inputs, outputs)) * math.sqrt(2 / (25 * inputs))
        self.b = jnp.zeros(outputs)

    def __call__(self, x: Float[Array, "frames h w inputs"]) -> Float[Array, "frames h2 w2 outputs"]:
        return (halve if jax.default_backend() == "cpu" else halve_by_stride_1)(x, self.W) + self.b


class Deconvolution(Convolution):
    """The transpose of a convolution from `outputs` to `inputs` channels: doubles the size of pictures."""

    def __init__(self, inputs: int, outputs: int, key: PRNGKeyArray, gain: float = math.sqrt(2)):
        super().__init__(inputs, outputs, key)
        self.W = self.W * (gain * math.sqrt(2))  # with stride 2 a quarter of the kernel meets each pixel

    def __call__(self, x: Float[Array, "frames h w inputs"]) -> Float[Array, "frames h2 w2 outputs"]:
        W = jnp.swapaxes(self.W, 2, 3)
        return (double if jax.default_backend() == "cpu" else double_by_stride_1)(x, W) + self.b


# On a CPU: matrix products of windows, block by block, since XLA's convolutions are slow there inside of loops. Each
# function is the transpose of the other, so the derivative of either is the other; windows are never kept.


@jax.custom_vjp
def halve(x: Pictures, W: Kernel) -> Pictures:
    """The convolution."""
    return _in_blocks(lambda x: windows(x, 5, (1, 2), 2) @ W.reshape(-1, W.shape[3]), x)


@jax.custom_vjp
def double(y: Pictures, W: Kernel) -> Pictures:
    """Its transpose."""
    S = squares(W)
    return _in_blocks(lambda y: spread(windows(y, 3, (1, 1), 1) @ S.reshape(-1, S.shape[3])), y)


def slope(x: Pictures, y: Pictures, W: Kernel) -> Kernel:
    """The derivative of <y, halve(x, W)> = <double(y, W), x> for W."""

    def add(total: Array, block: tuple[Array, Array]) -> tuple[Array, None]:
        seen, y = windows(block[0], 5, (1, 2), 2), block[1]
        return total + seen.reshape(-1, seen.shape[3]).T @ y.reshape(-1, y.shape[3]), None

    return jax.lax.scan(add, jnp.zeros((math.prod(W.shape[:3]), W.shape[3])), (_blocks(x), _blocks(y)))[0].reshape(
        W.shape
    )


halve.defvjp(lambda x, W: (halve(x, W), (x, W)), lambda kept, y: (double(y, kept[1]), slope(kept[0], y, kept[1])))
double.defvjp(lambda y, W: (double(y, W), (y, W)), lambda kept, x: (halve(x, kept[1]), slope(x, *kept)))


def windows(x: Pictures, size: int, padding: tuple[int, int], stride: int) -> Pictures:
    """What each place of a convolution sees."""
    height, width = x.shape[1:3]
    x = jnp.pad(x, ((0, 0), padding, padding, (0, 0)))
    shifts = [(row, column) for row in range(size) for column in range(size)]
    return jnp.concatenate([x[:, r : r + height : stride, c : c + width : stride] for r, c in shifts], axis=-1)


def _blocks(frames: Array) -> Array:
    """As many blocks as it takes, filled up with zeros."""
    size = min(BLOCK, len(frames))
    frames = jnp.pad(frames, ((0, -len(frames) % size), *((0, 0),) * (frames.ndim - 1)))
    return frames.reshape(-1, size, *frames.shape[1:])


def _in_blocks(f: Callable[[Array], Array], frames: Array) -> Array:
    done = jax.lax.map(f, _blocks(frames))
    return done.reshape(-1, *done.shape[2:])[: len(frames)]


# On an accelerator: stride 1 and 3 x 3 on squares of 2 x 2 pixels, several times faster there than stride 2.


def halve_by_stride_1(x: Pictures, W: Kernel) -> Pictures:
    """The convolution."""
    frames, height, width, inputs = x.shape
    grouped = jnp.transpose(x.reshape(frames, height // 2, 2, width // 2, 2, inputs), (0, 1, 3, 2, 4, 5))
    W = jnp.pad(W, ((1, 0), (1, 0), (0, 0), (0, 0))).reshape(3, 2, 3, 2, inputs, -1)
    W = jnp.transpose(W, (0, 2, 1, 3, 4, 5)).reshape(3, 3, 4 * inputs, -1)
    return _stride_1(grouped.reshape(frames, height // 2, width // 2, -1), W)


def double_by_stride_1(y: Pictures, W: Kernel) -> Pictures:
    """Its transpose."""
    return spread(_stride_1(y, squares(W)))


def squares(W: Kernel) -> Float[Array, "3 3 outputs k"]:
    """The kernel of the transpose, 3 x 3 with stride 1, that makes squares of 2 x 2 pixels.

    Even rows of a result come from the odd rows of the kernel, odd ones from the even, both backward; columns alike.
    """
    W = W[::-1, ::-1]
    W = jnp.stack([jnp.pad(W[1::2], ((0, 1), (0, 0), (0, 0), (0, 0))), W[0::2]])
    W = jnp.stack([jnp.pad(W[:, :, 1::2], ((0, 0), (0, 0), (0, 1), (0, 0), (0, 0))), W[:, :, 0::2]])
    W = jnp.transpose(W, (2, 3, 5, 1, 0, 4))  # 3, 3, outputs, row, column, inputs
    return W.reshape(*W.shape[:3], -1)


def spread(y: Pictures) -> Pictures:
    """Squares, laid out."""
    frames, height, width, _ = y.shape
    pixels = jnp.transpose(y.reshape(frames, height, width, 2, 2, -1), (0, 1, 3, 2, 4, 5))
    return pixels.reshape(frames, 2 * height, 2 * width, -1)


def _stride_1(x: Array, W: Array) -> Array:
    return jax.lax.conv_general_dilated(x, W, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def halved(shape: tuple[int, ...], channels: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of what convolutions with these channels make of a picture."""
    times = 2 ** len(channels)
    if channels and (len(shape) != 3 or any(edge % times for edge in shape[:2])):
        raise DeepSSMError(
            f"Convolutions with {len(channels)} layers need pictures (height, width, channels) whose edges are "
            f"multiples of {times}; these have the shape {shape}. Set 'channels' to none for dense layers."
        )
    return (shape[0] // times, shape[1] // times, channels[-1]) if channels else shape
