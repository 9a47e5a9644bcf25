"""`st.optimizer(tx, wrt=...)`: what a filter selects takes optax's own steps, and the rest is not there for optax."""

import re

import equinox as eqx
import hypothesis
import hypothesis.strategies as hst
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import sharedtree as st
from tests.strategies import Pair, dags, paths

TRANSFORMATIONS = {
    "decayed": lambda: optax.adamw(0.1, weight_decay=0.5),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.5, momentum=0.9)),
    "masked": lambda: optax.masked(optax.sgd(0.5), lambda tree: jax.tree.map(lambda x: True, tree)),
}


def inexact_at(tree):
    return {path: obj for path, obj, _ in paths(tree) if eqx.is_inexact_array(obj)}


@hypothesis.given(dags(), hst.sets(hst.integers(0, 9)), hst.sampled_from(sorted(TRANSFORMATIONS)), hst.booleans())
def test_the_steps_are_those_of_optax_on_a_list_of_what_is_selected(tree, chosen, name, with_all):
    """Whether the gradient is of the selected leaves or of all."""
    at = inexact_at(tree)
    distinct = list({id(x): x for x in at.values()}.values())  # alive in `tree`
    selected = [x for i, x in enumerate(distinct) if i in chosen]
    hypothesis.assume(selected)
    asked = {}  # by the paths that filters are asked about, of which some are not those of the helper
    st.optimizer(optax.identity(), lambda path, value: asked.setdefault(path, value) is value).init(tree)
    wrt = lambda path, value: any(asked[path] is x for x in selected)
    ours, theirs = st.optimizer(TRANSFORMATIONS[name](), wrt), TRANSFORMATIONS[name]()
    state, bare, model, own = ours.init(tree), theirs.init(selected), tree, selected
    for step in (1.0, -2.0):
        gradient = st.tree.map(
            lambda x: (
                jnp.full_like(x, step) if eqx.is_inexact_array(x) and (with_all or any(x is y for y in own)) else None
            ),
            model,
        )
        updates, state = ours.update(gradient, state, model)
        before, model = inexact_at(model), st.apply_updates(model, updates)
        of_own, bare = theirs.update([jnp.full_like(x, step) for x in own], bare, own)
        own = optax.apply_updates(own, of_own)
        now = inexact_at(model)
        for path, old in before.items():
            place = next((i for i, x in enumerate(selected) if x is at[path]), None)
            if place is None:
                assert now[path] is old
            else:
                np.testing.assert_allclose(now[path], own[place], rtol=1e-6)
        own = [next(now[path] for path in at if at[path] is x) for x in selected]
    assert st.same_sharing(model, tree)
    assert len(st.tree.leaves(state)) == len(jax.tree.leaves(bare))


W = jnp.ones(2)
TIED = {"embed": W, "head": W, "bias": jnp.zeros(2)}
AT_ONE = {"the first": ("embed",), "the second": ("head",)}


@pytest.mark.parametrize("path", AT_ONE.values(), ids=AT_ONE)
def test_a_tied_leaf_is_selected_at_all_of_its_paths_or_at_none(path):
    names = {"wrt": lambda at, value: at == path, "model": TIED, "sharedtree": st}
    with pytest.raises(
        st.errors.InconsistentSharingError, match="one parameter of the model, but `wrt` selects"
    ) as caught:
        st.optimizer(optax.sgd(1.0), names["wrt"]).init(TIED)
    other = "head" if path == ("embed",) else "embed"
    assert caught.value.paths == (f"['{path[0]}']", f"['{other}']")
    assert caught.value.treatments == ("selected", "not selected")
    one, two = re.findall("^    (.*)$", str(caught.value), re.MULTILINE)
    exec(one, names)
    state = st.optimizer(optax.sgd(1.0, momentum=0.9), names["wrt"]).init(TIED)
    assert state[0].trace["embed"] is state[0].trace["head"] is not None
    exec(two, names)
    state = st.optimizer(optax.sgd(1.0, momentum=0.9), lambda at, value: at == path).init(names["model"])
    assert state[0].trace[other] is None is not state[0].trace[path[0]]


WITH_SLOTS = {
    "adam": lambda: optax.adam(0.1),
    "adamw": lambda: optax.adamw(0.1),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "rmsprop": lambda: optax.rmsprop(0.1),
    "adabelief": lambda: optax.adabelief(0.1),
}


@pytest.mark.parametrize("around", [lambda step: step, st.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("make", WITH_SLOTS.values(), ids=WITH_SLOTS)
def test_a_gradient_of_less_than_the_optimizer_trains_is_told_of_the_filter(make, around):
    """Optax says that two trees differ, at a path that begins with the name of a parameter of its own, or nothing."""
    tx, model = st.optimizer(make()), Pair(TIED, {"more": jnp.zeros(2)})

    def step(state, model):
        gradient = st.grad(lambda m: (m.first["embed"] * m.first["bias"]).sum(), wrt=lambda path, _: path[0] == "first")
        return tx.update(gradient(model), state, model)

    with pytest.raises(st.errors.SharingMismatchError, match=r"trains `.second\['more'\]`, but the gradient") as caught:
        around(step)(tx.init(model), model)
    assert caught.value.paths == (".second['more']",)
    assert "tx = sharedtree.optimizer(tx, wrt=wrt)" in str(caught.value)


def test_a_gradient_of_less_is_none_of_its_affair_where_there_are_no_slots():
    gradient = {"embed": W, "head": None, "bias": W}
    updates, _ = (tx := st.optimizer(optax.sgd(0.5))).update(gradient, tx.init(gradient), {**gradient, "head": 2 * W})
    assert updates["head"] is None
    np.testing.assert_array_equal(updates["bias"], [-0.5, -0.5])


def test_a_gradient_of_another_shape_is_no_matter_of_filters():
    tx = st.optimizer(optax.masked(optax.adam(0.1), {"first": True, "second": False}))
    model = {"first": jnp.zeros(2), "second": jnp.zeros(2)}
    with pytest.raises((TypeError, ValueError)) as caught:
        tx.update({"first": jnp.ones(3), "second": None}, tx.init(model), model)
    assert "wrt" not in str(caught.value)


NO_FILTERS = {
    "a number": (1, TypeError, "`wrt` must be a filter"),
    "a function of none": (lambda: True, TypeError, "A filter must take one argument"),
    "a function of three": (lambda path, value, more: True, TypeError, "A filter must take one argument"),
    "a tag": ("bias", ValueError, "A string selects by a tag of NNX, not by a path. To select by path, use a function"),
    "a function of arrays": (lambda path, value: value > 0, TypeError, "True or False"),
    "what selects nothing": (lambda path, value: path == ("none",), ValueError, "selects nothing"),
}


@pytest.mark.parametrize(("wrt", "error", "text"), NO_FILTERS.values(), ids=NO_FILTERS)
def test_what_is_no_filter_is_refused_with_code_that_works(wrt, error, text):
    with pytest.raises(error, match=text) as caught:
        st.optimizer(optax.sgd(1.0), wrt).init(TIED)
    code = re.search(r"^    (sharedtree\.optimizer\(.*)$", str(caught.value), re.MULTILINE)[1]
    predicate = lambda value: value.ndim == 1
    eval(code, {"sharedtree": st, "tx": optax.sgd(1.0), "predicate": predicate, "function": predicate}).init(
        {"bias": jnp.ones(2), "embed": W, "matrix": jnp.ones((2, 2))}
    )


@pytest.mark.slow
def test_the_same_steps_as_those_of_nnx():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(3, 2, rngs=rngs)
            self.norm = nnx.BatchNorm(2, rngs=rngs)
            self.head = nnx.Linear(2, 3, rngs=rngs)

        def __call__(self, x):
            return self.head(self.norm(self.embed(x)))

    def loss(net, x):
        return (net(x) ** 2).sum()

    x = jnp.arange(3)
    theirs, ours = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(theirs, optax.adamw(0.1), wrt=nnx.Param)
    tx = st.optimizer(optax.adamw(0.1), wrt=nnx.Param)
    state = tx.init(ours)
    for _ in range(2):
        optimizer.update(theirs, nnx.grad(loss)(theirs, x))
        gradient = st.grad(loss, wrt=nnx.Param, in_place=True)(ours, x)
        updates, state = tx.update(gradient, state, ours)
        ours = st.apply_updates(ours, updates)
    for one, two in zip(jax.tree.leaves(nnx.state(ours)), jax.tree.leaves(nnx.state(theirs)), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5)


def test_optax_finds_the_slots_of_what_is_selected():
    """`optax.tree_map_params` initialises the transformation with a placeholder for the parameters."""
    tx = st.optimizer(optax.adam(0.1), wrt=lambda path, value: path == ("first",))
    state = tx.init(Pair(W, jnp.zeros(3)))
    marked = optax.tree_map_params(tx, lambda slot: slot + 1, state)
    assert marked[0].mu.second is None
    np.testing.assert_array_equal(marked[0].mu.first, [1, 1])
    assert int(marked[0].count) == 0
