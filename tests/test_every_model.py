"""The same facts for every model, as filter and smoother, with every prior."""

import dataclasses
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from deepssm import checkpoints
from deepssm.models.base import Model, Posterior, Terms
from deepssm.models.dks import DKSConfig
from deepssm.models.dvbs import DVBSConfig
from deepssm.models.ekvae import EKVAEConfig
from deepssm.models.kvae import KVAEConfig
from deepssm.models.rssm import RSSMConfig
from deepssm.objectives import Annealed, Constrained, Elbo
from deepssm.training import fit

KALMAN: dict[str, Any] = {"encoder": (16,), "decoder": (16,), "bases": 2, "alpha": (8,), "prior_hidden": (8,)}
STEPWISE: dict[str, Any] = {"reader": 8, "recognition": (8,), "decoder": (16,), "prior_hidden": (8,)}
SMALL: dict[str, Callable[..., Any]] = {
    "ekvae": partial(EKVAEConfig, **KALMAN),
    "kvae": partial(KVAEConfig, **KALMAN, memory=4),
    "dks": partial(DKSConfig, **STEPWISE, transition=(8,)),
    "dvbs": partial(DVBSConfig, **STEPWISE, bases=2, alpha=(8,)),
    "rssm": partial(RSSMConfig, **STEPWISE, memory=4, transition=(8,)),
}
INTEGRATING = {f"{name}-integrating": partial(SMALL[name], integrating=True) for name in ("ekvae", "dks", "dvbs")}
CASES = [(name, "smoother", "vhp") for name in INTEGRATING] + [
    (name, posterior, prior)
    for name in SMALL
    for posterior in ("smoother", "filter")
    for prior in (("vhp", "gaussian", "network") if name == "dvbs" else ("vhp", "gaussian"))
]
N, T, STATES = 4, 6, 3
GAP, END = 2, 4
"""An unseen frame of the second sequence; the length of the third, which is padded."""


QUICKLY_COMPILED = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}


class Facts(NamedTuple):
    """What a model says, all of it from one compiled function. Variants: as it is; other values in unseen frames;
    the last two frames unseen."""

    terms: Terms
    slopes: Any
    """Of distortion and rate, stacked."""
    filtered: Posterior
    smoothed: Posterior
    online: tuple[jax.Array, jax.Array]
    follow: jax.Array


class Case(NamedTuple):
    model: Model
    facts: Facts
    x: jax.Array
    u: jax.Array
    seen: jax.Array


def ask(model: Model, x: jax.Array, u: jax.Array, seen: jax.Array, key: jax.Array) -> Facts:
    arrays, rest = eqx.partition(model, eqx.is_inexact_array)

    def terms(arrays: Any) -> tuple[jax.Array, Terms]:
        ask = eqx.combine(arrays, rest).terms
        terms = jax.vmap(lambda x: ask(x, u, seen, key))(jnp.stack([x, jnp.where(seen[..., None, None], x, 7.0)]))
        return jnp.stack([terms.distortion[0].sum(), terms.rate[0].sum()]), terms

    def step(belief: Any, inputs: tuple[jax.Array, ...]) -> tuple[Any, tuple[jax.Array, jax.Array]]:
        belief = model.step(belief, *inputs)
        return belief, (belief.z.m, belief.z.P)

    def online(x: jax.Array, u: jax.Array, seen: jax.Array) -> tuple[jax.Array, jax.Array]:
        before = jnp.roll(u, 1, axis=0)  # what stands before the first frame must not matter
        return jax.lax.scan(step, model.start(), (x, before, seen))[1]

    _, pull_back, both = jax.vjp(terms, arrays, has_aux=True)
    variants = jnp.stack([x, jnp.where(seen[..., None, None], x, 7.0), x])
    masks = jnp.stack([seen, seen, seen.at[:, -2:].set(False)])
    filtered = jax.vmap(lambda x, seen: model.filter(x, u, seen))(variants, masks)
    smoothed = jax.vmap(lambda x, seen: model.smooth(x, u, seen))(variants, masks)
    follow = model.rollout(smoothed.mean[0, :, 1], u, memory=smoothed.memory[0, :, 1])
    return Facts(both, jax.vmap(pull_back)(jnp.eye(2))[0], filtered, smoothed, jax.vmap(online)(x, u, seen), follow)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(case))
def case(request) -> Case:
    name, posterior, prior = request.param
    model = (SMALL | INTEGRATING)[name](posterior=posterior, prior=prior).build((8, 8), 1, jax.random.key(0))
    keys = jax.random.split(jax.random.key(1), 3)
    x, u = jax.random.uniform(keys[0], (N, T, 8, 8)), jax.random.normal(keys[1], (N, T, 1))
    seen = jnp.ones((N, T), bool).at[1, GAP].set(False).at[2, END:].set(False).at[3, 0].set(False)
    arrays, rest = eqx.partition(model, eqx.is_inexact_array)
    if name == "dks-integrating":  # its last layer starts at zero, and layers before it are not reached at first
        arrays = jax.tree.map(lambda array: array + 0.01, arrays)
    model = eqx.combine(arrays, rest)
    asked = jax.jit(lambda arrays, *data: ask(eqx.combine(arrays, rest), *data), compiler_options=QUICKLY_COMPILED)
    return Case(model, asked(arrays, x, u, seen, keys[2]), x, u, seen)


def variant(tree: Any, index: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], tree)


def close(one: Any, two: Any, tolerance: float = 1e-5) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance, rtol=tolerance)


def test_shapes(case):
    facts = case.facts
    assert facts.terms.distortion.shape == facts.terms.rate.shape == (2, N)
    for belief in (facts.filtered, facts.smoothed):
        assert belief.mean.shape == (3, N, T, STATES)
        assert belief.covariance.shape == (3, N, T, STATES, STATES)
        assert belief.memory.shape == (3, N, T, case.model.memory_size)
    assert facts.follow.shape == (N, T, STATES)
    assert case.model.decode(facts.follow).shape == (N, T, 8, 8)
    assert case.model.sample_initial(jax.random.key(0), 5).shape == (5, STATES)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(facts))


def test_every_parameter_is_reached_by_a_finite_gradient(case):
    for path, slope in jax.tree_util.tree_leaves_with_path(case.facts.slopes):
        assert np.isfinite(slope).all()
        assert slope.size == 0 or np.any(slope != 0), jax.tree_util.keystr(path)


def test_rate_is_the_sum_of_its_parts_and_divergences_are_not_negative(case):
    terms = case.facts.terms
    np.testing.assert_allclose(terms.rate, sum(np.asarray(part) for part in terms.parts.values()), rtol=1e-5)
    if "smoothing" in terms.parts:
        assert np.all(np.asarray(terms.parts["smoothing"]) >= 0)
    if "emission" not in terms.parts:
        assert np.all(np.asarray(terms.parts["transition"]) >= 0)


def test_values_of_unseen_frames_do_not_matter(case):
    for facts in (case.facts.terms, case.facts.filtered, case.facts.smoothed):
        close(variant(facts, 0), variant(facts, 1))


def test_unseen_frames_do_not_change_earlier_filtered_states(case):
    before, after = (case.facts.filtered.mean[index] for index in (0, 2))
    close(before[:, :-2], after[:, :-2])
    assert not np.allclose(before[0, -1], after[0, -1])


def test_one_frame_at_a_time_equals_the_filter(case):
    close(case.facts.online, variant(case.facts.filtered, 0)[:2])


@pytest.mark.parametrize("posterior", ["smoother", "filter"])
@pytest.mark.parametrize("name", SMALL)
def test_one_sequence_equals_a_batch_of_one_and_padding_changes_nothing(name, posterior):
    model = SMALL[name](posterior=posterior).build((8, 8), 1, jax.random.key(0))
    x, u = jax.random.uniform(jax.random.key(1), (N, T, 8, 8)), jax.random.normal(jax.random.key(2), (N, T, 1))
    seen = jnp.ones((N, T), bool).at[:, END:].set(False)
    smooth = eqx.filter_jit(lambda *arguments: model.smooth(*arguments))
    whole = smooth(x, u, seen)
    short = smooth(x[1:2, :END], u[1:2, :END], seen[1:2, :END])
    close(short, jax.tree.map(lambda leaf: leaf[1:2, :END], whole))


def test_what_is_saved_is_loaded(case, tmp_path):
    arrays, rest = eqx.partition(case.model, eqx.is_inexact_array)
    checkpoints.save(tmp_path / "model", {}, arrays)
    again = eqx.combine(checkpoints.load(tmp_path / "model", jax.tree.map(jnp.zeros_like, arrays)), rest)
    close(again.decode(case.facts.follow), case.model.decode(case.facts.follow), 0.0)


@pytest.mark.parametrize(
    "objective", [Elbo(), Annealed(10), Constrained(100.0, lam_0=1.0)], ids=["elbo", "annealed", "constrained"]
)
@pytest.mark.parametrize("name", SMALL)
def test_every_model_trains_under_every_objective(name, objective):
    seen: list[dict[str, np.ndarray]] = []
    training = dataclasses.replace(tiny.TRAINING, learning_rate=1e-2, chunk=10, steps=40)
    fit(SMALL[name](), objective, training, tiny.DATA.generate().train, watch=lambda *args: seen.append(args[-1]))
    np.testing.assert_allclose(seen[-1]["elbo"], -seen[-1]["distortion"] - seen[-1]["rate"], rtol=1e-4)
    assert seen[-1]["distortion"].mean() < 0.5 * seen[0]["distortion"].mean()


def test_the_sixth_model_of_the_guide_trains():
    guide = (Path(__file__).parent.parent / "docs" / "new_model.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    assert code.count("\n") < 150
    names: dict[str, Any] = {"__name__": "sixth"}
    exec(code, names)
    config = names["LinearConfig"](**STEPWISE)
    seen: list[dict[str, np.ndarray]] = []
    trained = fit(config, Elbo(), tiny.TRAINING, tiny.DATA.generate().train, watch=lambda *args: seen.append(args[-1]))
    assert seen[-1]["distortion"].mean() < seen[0]["distortion"].mean()
    x, u = jnp.ones((2, 5, 8, 8)), jnp.zeros((2, 5, 1))
    assert trained.models[0].smooth(x, u, jnp.ones((2, 5), bool)).mean.shape == (2, 5, 3)
