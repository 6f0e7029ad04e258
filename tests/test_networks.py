"""Encoders and decoders of frames."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepssm import DeepSSMError, convolutions
from deepssm.convolutions import Convolution, Deconvolution
from deepssm.data.sequences import intensities
from deepssm.networks import Decoder, Encoder, Recogniser, knowing

KEY = jax.random.key(0)
SHAPE, CHANNELS = (16, 24, 3), (4, 6)


def test_a_convolution_is_a_sum_over_its_window():
    layer = Convolution(2, 3, KEY)
    x = jax.random.normal(KEY, (1, 8, 8, 2))
    padded = np.pad(np.asarray(x[0]), ((1, 2), (1, 2), (0, 0)))
    wanted = np.einsum("hwi,hwio->o", padded[4:9, 2:7], layer.W) + layer.b
    np.testing.assert_allclose(layer(x)[0, 2, 1], wanted, atol=1e-5)


PICTURES = ("NHWC", "HWIO", "NHWC")


@pytest.mark.parametrize("ours", [convolutions.halve, convolutions.halve_by_stride_1])
def test_halving_is_a_convolution_and_so_are_its_derivatives(ours, monkeypatch):
    monkeypatch.setattr(convolutions, "BLOCK", 2)
    x, W = jax.random.normal(KEY, (5, 8, 12, 3)), jax.random.normal(KEY, (5, 5, 3, 4))

    def theirs(x: jax.Array, W: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(x, W, (2, 2), "SAME", dimension_numbers=PICTURES)

    assert_same(ours, theirs, x, W)


@pytest.mark.parametrize("ours", [convolutions.double, convolutions.double_by_stride_1])
def test_doubling_is_its_transpose_and_so_are_its_derivatives(ours, monkeypatch):
    monkeypatch.setattr(convolutions, "BLOCK", 2)
    y, W = jax.random.normal(KEY, (5, 4, 6, 4)), jax.random.normal(KEY, (5, 5, 3, 4))

    def theirs(y: jax.Array, W: jax.Array) -> jax.Array:
        return jax.lax.conv_transpose(y, W, (2, 2), "SAME", dimension_numbers=PICTURES, transpose_kernel=True)

    assert_same(ours, theirs, y, W)


def assert_same(ours: Callable, theirs: Callable, x: jax.Array, W: jax.Array) -> None:
    """Values and derivatives."""
    found, pull_back = jax.vjp(ours, x, W)
    wanted, pull_back_theirs = jax.vjp(theirs, x, W)
    weights = jax.random.normal(jax.random.key(1), wanted.shape)
    np.testing.assert_allclose(found, wanted, atol=3e-5)
    for mine, yours in zip(pull_back(weights), pull_back_theirs(weights), strict=True):
        np.testing.assert_allclose(mine, yours, atol=1e-4)


def test_deconvolutions_double_and_keep_the_scale():
    x = jax.random.normal(KEY, (4, 16, 16, 32))
    y = Deconvolution(32, 32, KEY)(jax.nn.relu(x))
    assert y.shape == (4, 32, 32, 32)
    assert 0.5 < y.std() < 2


def test_the_decoder_mirrors_the_encoder():
    encoder = Encoder(SHAPE, (10,), 2, KEY, CHANNELS)
    decoder = Decoder(2, (10,), SHAPE, 0.1, KEY, CHANNELS)
    x = jax.random.uniform(KEY, (5, *SHAPE))
    q = encoder(x)
    assert q.m.shape == (2, 5)
    assert decoder(q.m).shape == x.shape
    shapes = [layer.W.shape for layer in encoder.convolutions]
    assert [(*layer.W.shape[:2], *layer.W.shape[:1:-1]) for layer in decoder.deconvolutions[::-1]] == shapes
    error = (np.asarray(x) - decoder(q.m)) / 0.1
    wanted = -0.5 * (error**2).sum((1, 2, 3)) - x[0].size * (np.log(0.1) + 0.5 * np.log(2 * np.pi))
    np.testing.assert_allclose(decoder.log_prob(x, q.m), wanted, rtol=1e-5)


def test_blocks_of_frames_are_all_frames(monkeypatch):
    x = jax.random.uniform(KEY, (7, *SHAPE))
    models = Encoder(SHAPE, (10,), 2, KEY, CHANNELS), Decoder(2, (10,), SHAPE, 0.1, KEY, CHANNELS)

    def loss(models: tuple) -> jax.Array:
        encoder, decoder = models
        return decoder.log_prob(x, encoder(x).m).mean()

    monkeypatch.setattr(convolutions, "BLOCK", 7)
    whole = eqx.filter_jit(eqx.filter_value_and_grad(loss))(models)
    monkeypatch.setattr(convolutions, "BLOCK", 3)
    blocks = eqx.filter_jit(eqx.filter_value_and_grad(lambda models: loss(models)))(models)
    for one, two in zip(jax.tree.leaves(whole), jax.tree.leaves(blocks), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-3)


def test_pictures_are_differences_from_the_mean_one():
    x = 0.5 + 0.1 * jax.random.normal(KEY, (5, *SHAPE))
    mean = jax.random.uniform(KEY, SHAPE)
    unknowing = Encoder(SHAPE, (10,), 2, KEY, CHANNELS), Decoder(2, (10,), SHAPE, 0.1, KEY, CHANNELS)
    encoder, decoder = knowing(unknowing, mean, 0.2)
    a = encoder(x).m
    np.testing.assert_allclose(a, unknowing[0]((x - mean) / 0.2).m, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(decoder(a), mean + 0.2 * unknowing[1](a), rtol=1e-4, atol=1e-5)
    slope = eqx.filter_grad(lambda models: models[1].log_prob(x, models[0](x).m).sum())((encoder, decoder))
    assert all(np.all(part == 0) for model in slope for part in jax.tree.leaves(model.standard))
    dense = Encoder((8, 8), (10,), 2, KEY)
    assert knowing(dense, mean, 0.2).standard is None


def test_bytes_are_intensities():
    encoder = Encoder(SHAPE, (10,), 2, KEY, CHANNELS)
    decoder = Decoder(2, (10,), SHAPE, 0.1, KEY, CHANNELS)
    x = jax.random.randint(KEY, (5, *SHAPE), 0, 256).astype(jnp.uint8)
    assert intensities(x).max() <= 1
    a = encoder(x).m
    np.testing.assert_array_equal(a, encoder(intensities(x)).m)
    np.testing.assert_array_equal(decoder.log_prob(x, a), decoder.log_prob(intensities(x), a))


def test_sensors_start_as_they_are():
    """As many as there are dimensions, or fewer: they have a straight way past the network."""
    x = jax.random.normal(KEY, (50, 2))
    encoder, decoder = Encoder((2,), (20,), 2, KEY), Decoder(4, (20,), (2,), 0.1, KEY)
    assert np.corrcoef(encoder(x).m[0], x[:, 0])[0, 1] > 0.98
    z = jnp.concatenate([x.T, jnp.zeros((2, 50))])
    assert np.corrcoef(decoder(z)[:, 1], x[:, 1])[0, 1] > 0.98
    assert Encoder((8, 8), (20,), 2, KEY).network.linear is None
    assert Encoder((3,), (20,), 2, KEY).network.linear is None
    assert Decoder(2, (20,), (3,), 0.1, KEY).linear is None


def test_recognition_starts_as_sure_of_sensors_as_the_decoder_is_and_unsure_of_the_rest():
    q = Recogniser(5, (20,), 4, (2,), KEY, variance=1e-5)(jax.random.normal(KEY, (5 + 2, 50)))
    np.testing.assert_allclose(np.log(q.v[:2]), np.log(1e-5), atol=1.0)
    np.testing.assert_allclose(np.log(q.v[2:]), 0.0, atol=1.0)


@pytest.mark.parametrize("shape", [(16, 16), (12, 18, 3), (7,)])
def test_pictures_that_cannot_be_halved_are_named(shape):
    with pytest.raises(DeepSSMError, match="multiples of 4"):
        Encoder(shape, (10,), 2, KEY, CHANNELS)
