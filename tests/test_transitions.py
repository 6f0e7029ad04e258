"""Transitions before training: velocities move positions, whatever the kind of network."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepssm.models.dks import DKSConfig
from deepssm.transitions import Integrating, LocallyLinear, Residual, turned


def test_untrained_velocity_turns_the_features_the_same_way_all_round():
    turns = []
    for seed in range(10):
        transition = LocallyLinear(3, 1, 16, (64,), 2, 0.3, -3.0, jax.random.key(seed))
        angle = jnp.linspace(0, 2 * jnp.pi, 60)
        z = jnp.stack([jnp.cos(angle), jnp.sin(angle), jnp.zeros_like(angle)])
        F, _, _ = transition(z, jnp.zeros((1, 60)))
        turns.append(F[1, 2] * jnp.cos(angle) - F[0, 2] * jnp.sin(angle))
    turns = jnp.stack(turns)
    assert float(jnp.mean(turns > 0)) > 0.99
    assert float(turns.mean()) == pytest.approx(0.3, rel=0.25)


def test_as_many_velocities_as_positions_start_as_constant_velocity():
    transition = LocallyLinear(4, 2, 400, (8,), 2, 0.3, -3.0, jax.random.key(0))
    mean = transition.F.mean(0)
    np.testing.assert_allclose(mean, jnp.eye(4) + 0.3 * jnp.eye(4, k=2), atol=0.02)


def test_velocities_turn_a_circle_or_move_as_many_positions():
    z = jnp.asarray([[2.0], [1.0], [0.5]])
    np.testing.assert_allclose(turned(z, 2)[:, 0], [-0.5, 1.0, 0.0])
    np.testing.assert_allclose(turned(jnp.asarray([2.0, 1.0, 0.5, 0.1]), 2), [0.5, 0.1, 0.0, 0.0])
    # A circle and a line, as for the joints of the reacher.
    np.testing.assert_allclose(turned(jnp.asarray([2.0, 1.0, 7.0, 0.5, 0.1]), 3), [-0.5, 1.0, 0.1, 0.0, 0.0])
    np.testing.assert_allclose(turned(jnp.asarray([2.0, 1.0, 0.0, 3.0, 0.5, 2.0]), 4), [-0.5, 1.0, -6.0, 0.0, 0.0, 0.0])


@pytest.mark.parametrize(("states", "positions"), [(3, 2), (4, 2)])
def test_untrained_network_moves_positions_as_velocities_do(states, positions):
    transition = Residual(states, 1, (128, 128), positions, 0.2, -3.0, jax.random.key(0))
    z, u = jax.random.normal(jax.random.key(1), (states, 500)), jax.random.normal(jax.random.key(2), (1, 500))
    change, wanted = transition.next(z, u).m - z, 0.2 * turned(z, positions)
    for k in range(positions):
        assert np.corrcoef(change[k], wanted[k])[0, 1] > 0.9
    np.testing.assert_allclose(change[positions:], 0.0, atol=1e-6)
    np.testing.assert_allclose(transition.next(z, u).v, np.exp(-3.0), rtol=1e-5)


def test_decoder_begins_blind_to_velocities_and_learns_to_see_them():
    model = DKSConfig().build((8, 8), 1, jax.random.key(0))
    z = jax.random.normal(jax.random.key(1), (5, 3))
    np.testing.assert_array_equal(model.decode(z), model.decode(z.at[:, 2].add(3.0)))
    slope = jax.grad(lambda W: jnp.sum(jnp.tensordot(W, z, (0, 1)) ** 2))(model.decoder.network.layers[0].W)
    assert np.any(slope[2] != 0)


def integrating(kind):
    key = jax.random.key(3)
    if kind is Integrating:
        transition = Integrating(5, 2, 8, (16,), 3, 0.1, -3.0, key)
        noise = jax.random.normal(key, transition.F.shape), jax.random.normal(key, transition.B.shape)
        parts = lambda transition: (transition.F, transition.B)  # noqa: E731
        return eqx.tree_at(parts, transition, (transition.F + 0.1 * noise[0], 0.1 * noise[1]))
    transition = Residual(5, 2, (16,), 3, 0.1, -3.0, key, integrating=True)
    last = lambda transition: transition.network.mlp.layers[-1].W  # noqa: E731
    return eqx.tree_at(last, transition, 0.1 * jax.random.normal(key, last(transition).shape))


@pytest.mark.parametrize("kind", [Integrating, Residual])
def test_only_velocities_move_positions_round_a_circle_and_along_a_line(kind):
    transition, key = integrating(kind), jax.random.key(1)
    z, u = jax.random.normal(key, (5, 100)), jax.random.normal(key, (2, 100))
    moved = transition.next(z, u).m
    turn, slide = 0.1 * moved[3:]
    assert float(jnp.abs(moved[3:] - z[3:]).max()) > 0.1
    cosine, sine = jnp.cos(turn), jnp.sin(turn)
    np.testing.assert_allclose(moved[0], cosine * z[0] - sine * z[1], atol=1e-5)
    np.testing.assert_allclose(moved[1], sine * z[0] + cosine * z[1], atol=1e-5)
    np.testing.assert_allclose(moved[2], z[2] + slide, atol=1e-6)


def test_the_filter_and_the_prediction_use_the_same_system():
    transition = integrating(Integrating)
    z, u = jax.random.normal(jax.random.key(1), (5, 20)), jax.random.normal(jax.random.key(2), (2, 20))
    F, b, Q = transition(z, u)
    following = transition.next(z, u)
    np.testing.assert_allclose(jnp.einsum("ijk,jk->ik", F, z) + b, following.m, atol=1e-5)
    np.testing.assert_allclose(jnp.einsum("iik->ik", Q), following.v, rtol=1e-6)
