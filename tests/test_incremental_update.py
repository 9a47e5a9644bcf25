"""`st.incremental_update`: optax's average of the distinct arrays, with ties, and with what is no float from `new`."""

import re

import equinox as eqx
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import sharedtree as st
from tests.strategies import Pair, copy_dag, dags, partition

W, V = jnp.array([3.0, 4.0]), jnp.array([1.0, 0.0])


@hypothesis.given(dags())
def test_it_is_that_of_optax_with_the_same_ties(tree):
    old = copy_dag(tree, lambda x: 2 * x + 1 if eqx.is_inexact_array_like(x) else x + 5)
    average = st.incremental_update(tree, old, 0.25)
    assert partition(average) == partition(tree)
    assert jax.tree.structure(average) == jax.tree.structure(tree)
    for found, new, before in zip(*map(jax.tree.leaves, (average, tree, old)), strict=True):
        if eqx.is_inexact_array_like(new):
            expected = optax.incremental_update(new, before, 0.25)
            np.testing.assert_allclose(found, expected, rtol=1e-6)
            assert jnp.asarray(found).dtype == jnp.asarray(expected).dtype
        else:
            assert found is new


MIXED = {
    "a bf16 model, an average in fp32": (W.astype(jnp.bfloat16), V, 0.5),
    "a step that is an array": (W, V, jnp.array(0.25)),
    "complex numbers": (W * 1j, V * (1 + 0j), 0.25),
    "no step": (W, V, 0),
    "a whole step": (W, V, 1),
    "NumPy": (np.array(W), np.array(V), 0.25),
    "Python numbers": (3.0, 1.0, 0.25),
    "a weak type": (jnp.asarray(3.0), jnp.asarray(1.0), 0.25),
}


@pytest.mark.parametrize(("new", "old", "step_size"), MIXED.values(), ids=MIXED)
def test_dtypes_are_those_of_optax(new, old, step_size):
    ours = st.incremental_update([new, new], [old, old], step_size)
    theirs = optax.incremental_update(new, old, step_size)
    np.testing.assert_array_equal(ours[0], theirs)
    assert ours[0] is ours[1] or isinstance(new, float)
    one, two = jnp.asarray(ours[0]), jnp.asarray(theirs)
    assert (one.dtype, one.weak_type, type(ours[0])) == (two.dtype, two.weak_type, type(theirs))


def test_keys_counters_statics_and_none_are_those_of_the_new():
    key = jax.random.key(1)
    new = {"w": W, "key": key, "step": jnp.array(7), "name": "new", "none": None, "mask": jnp.array([True])}
    old = {"w": V, "key": jax.random.key(0), "step": jnp.array([6, 6]), "name": "old", "none": V, "mask": None}
    average = st.incremental_update(new, old, 0.5)
    np.testing.assert_allclose(average["w"], [2, 2])
    assert all(average[name] is new[name] for name in new if name != "w")


class Net(nnx.Module):
    def __init__(self, value):
        self.embed = nnx.Param(jnp.full(2, value))
        self.head = self.embed
        self.mean = nnx.BatchStat(jnp.full(3, value))
        self.rngs = nnx.Rngs(dropout=int(value))


def test_of_nnx():
    new, old = Net(1.0), Net(0.0)
    new.rngs.dropout()
    average = st.jit(st.incremental_update)(new, old, 0.25)
    assert type(average) is Net
    assert average.embed is average.head
    assert type(average.mean) is nnx.BatchStat
    np.testing.assert_allclose(average.embed[...], 0.25)
    np.testing.assert_allclose(average.mean[...], 0.25)
    assert int(average.rngs.dropout.count[...]) == 1
    assert average.rngs.dropout.key[...] == new.rngs.dropout.key[...]


def test_a_target_follows_in_one_line_without_a_retrace():
    traces = []

    @st.jit(donate_argnums=1)
    def follow(model, target):
        traces.append(1)
        return st.incremental_update(model, target, 0.1)

    layer = Pair(W, jnp.array(2))
    model = Pair(layer, [layer])
    target = st.copy(model)
    expected = W
    for step in range(3):
        model = st.tree.map(lambda x, step=step: x + step, model)
        target = follow(model, target)
        expected = 0.1 * model.first.first + 0.9 * expected
    assert target.first is target.second[0]
    np.testing.assert_allclose(target.first.first, expected, rtol=1e-6)
    assert int(target.first.second) == int(model.first.second)
    assert len(traces) == 1


def test_what_was_untied_on_purpose_may_be_tied_in_the_old():
    for new, old in (
        (st.untie([W, W]), [V, V]),
        ([W, W + 1], st.untie([V, V])),
        ([jnp.array(1), jnp.array(2)], [jnp.array(3)] * 2),  # an average takes integers from `new`
    ):
        average = st.incremental_update(new, old, 0.5)
        expected = optax.incremental_update(new, old, 0.5) if jnp.issubdtype(new[0].dtype, jnp.floating) else new
        jax.tree.map(np.testing.assert_array_equal, average, expected)
        assert average[0] is not average[1]


def test_two_variables_of_nnx_with_one_array_are_no_tie():
    class Two(nnx.Module):
        def __init__(self, one, two):
            self.one, self.two = nnx.Param(one), nnx.Param(two)

    average = st.incremental_update(Two(W, W + 1), Two(V, V), 0.5)
    np.testing.assert_allclose(average.two[...], (W + 1 + V) / 2)


WRONG = {
    "another shape of an array": ([W], [W[:1]], r"`\[0\]` has the shape \(2,\) in `new`, and \(1,\) in `old`"),
    "no array": ({"a": W}, {"a": None}, r"`\['a'\]` is a floating-point leaf in `new`, and None in `old`"),
    "a text": ({"a": W}, {"a": "text"}, "and 'text' in `old`"),
    "an integer": ({"a": W}, {"a": jnp.arange(2)}, "floating-point leaf in `new`"),
    "a node": ({"a": W}, {"a": [W]}, "floating-point leaf in `new`"),
    "another node": ([W], (W,), "differ in shape at the root: `new` has a `list`"),
    "other keys": ({"a": W}, {"b": W}, "differ in shape"),
    "a tie that is lost": ([W, W], [V, V + 1], r"`\[0\]` and `\[1\]` are one leaf in `new`, but two objects in `old`"),
    "a tie that the new one lacks": (
        [W, W + 1],
        [V, V],
        r"`\[0\]` and `\[1\]` are one leaf in `old`, but two objects in `new`",
    ),
    "a layer that the new one has twice": (
        Pair(Pair(W, V), Pair(W + 1, V + 1)),
        Pair(*[Pair(V, W)] * 2),
        r"`\.first\.first` and `\.second\.first` are one leaf in `old`",
    ),
}


@pytest.mark.parametrize(("new", "old", "text"), WRONG.values(), ids=WRONG)
def test_an_update_of_another_shape_is_refused_with_its_path(new, old, text):
    with pytest.raises(st.errors.SharingMismatchError, match=text) as caught:
        st.incremental_update(new, old, 0.5)
    assert caught.value.paths
    code = re.findall(r"^    (old = .*)$", str(caught.value), re.MULTILINE)
    for line in code:
        names = {"sharedtree": st, "new": new, "old": old}
        if "retie" not in line:
            exec(line, names)
            st.incremental_update(new, names["old"], 0.5)
