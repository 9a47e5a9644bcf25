"""`make_with_state` and `inference_mode`: Equinox's where nothing is shared, one state for a layer that is."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sharedtree as st
from tests.strategies import Pair


class Counter(eqx.Module):
    index: eqx.nn.StateIndex

    def __init__(self):
        self.index = eqx.nn.StateIndex({"n": jnp.array(0.0), "last": jnp.zeros(3)})

    def __call__(self, x, state):
        old = state.get(self.index)
        return x + old["n"], state.set(self.index, {"n": old["n"] + 1, "last": old["last"] + 1})


LAYERS = {
    "batch": lambda key: eqx.nn.BatchNorm(3, axis_name="batch", mode="batch"),
    "ema": lambda key: eqx.nn.BatchNorm(3, axis_name="batch", mode="ema"),
    "spectral": lambda key: eqx.nn.SpectralNorm(eqx.nn.Linear(3, 3, key=key), "weight", key=key),
    "index": lambda key: Counter(),
}


class Net(eqx.Module):
    """Two linear layers with a stateful layer after each."""

    linears: list
    norms: list
    dropout: eqx.nn.Dropout

    def __init__(self, kind, is_shared, seed=0):
        keys = jax.random.split(jax.random.key(seed), 4)
        self.linears = [eqx.nn.Linear(3, 3, key=keys[0]), eqx.nn.Linear(3, 3, key=keys[1])]
        norm = LAYERS[kind](keys[2])
        self.norms = [norm, norm] if is_shared else [norm, LAYERS[kind](keys[3])]
        self.dropout = eqx.nn.Dropout(0.5, inference=True)

    def __call__(self, x, state):
        for linear, norm in zip(self.linears, self.norms, strict=True):
            x, state = norm(jnp.tanh(linear(x)), state)
        return x, state


class Twin(eqx.Module):
    """The same with the stateful layer once, written by hand."""

    linears: list
    norm: Any

    def __init__(self, kind):
        net = Net(kind, True)
        self.linears, self.norm = net.linears, net.norms[0]

    def __call__(self, x, state):
        for linear in self.linears:
            x, state = self.norm(jnp.tanh(linear(x)), state)
        return x, state


def indexes(model):
    is_index = lambda x: isinstance(x, eqx.nn.StateIndex)
    return [x for x in jax.tree.leaves(model, is_leaf=is_index) if is_index(x)]


@pytest.mark.slow
def test_equals_that_of_equinox_where_nothing_is_shared_and_a_shared_layer_has_one_state():
    for kind in LAYERS:
        ours, theirs = st.make_with_state(Net)(kind, False), eqx.nn.make_with_state(Net)(kind, False)
        assert eqx.tree_equal(ours, theirs, typematch=True), kind
        assert not st.ties(ours[0])
        assert [x.marker for x in indexes(ours[0])] == [x.marker for x in indexes(theirs[0])]
        model, state = st.make_with_state(Net)(kind, is_shared=True)
        twin, twin_state = eqx.nn.make_with_state(Twin)(kind)
        assert model.norms[0] is model.norms[1]
        assert [x.paths for x in st.ties(model)] == [(".norms[0]", ".norms[1]")]
        assert len(jax.tree.leaves(state)) == len(jax.tree.leaves(twin_state))
        assert len({x.marker for x in indexes(model)}) == len(indexes(twin))
        again, state_again = st.make_with_state(Net)(kind, is_shared=True)  # two calls are compatible
        assert st.tree.structure(again) is st.tree.structure(model)
        assert jax.tree.structure(state_again) == jax.tree.structure(state)


def train(transforms, model, state, tx, steps=3):
    """The train step of Equinox's example of stateful layers, with these transforms."""

    def loss(model, state, xs):
        run = transforms.vmap(lambda m, x, s: m(x, s), in_axes=(None, 0, None), out_axes=(0, None), axis_name="batch")
        ys, state = run(model, xs, state)
        return ((ys - 1) ** 2).mean(), state

    @transforms.jit
    def step(model, state, opt_state, xs):
        (value, state), grads = transforms.value_and_grad(loss, has_aux=True)(model, state, xs)
        updates, opt_state = tx.update(grads, opt_state, transforms.parameters(model))
        return transforms.apply_updates(model, updates), state, opt_state, value

    opt_state = tx.init(transforms.parameters(model))
    values = []
    for i in range(steps):
        xs = jax.random.normal(jax.random.key(i), (4, 3))
        model, state, opt_state, value = step(model, state, opt_state, xs)
        values.append(value)
    return values, model, state


class Ours:
    jit, vmap, value_and_grad = st.jit, st.vmap, st.value_and_grad
    apply_updates, parameters = st.apply_updates, staticmethod(lambda model: model)


class Theirs:
    jit, value_and_grad = eqx.filter_jit, staticmethod(eqx.filter_value_and_grad)
    apply_updates = eqx.apply_updates
    vmap = staticmethod(lambda f, **kwargs: eqx.filter_vmap(f, **kwargs))
    parameters = staticmethod(lambda model: eqx.filter(model, eqx.is_inexact_array))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["batch", "index", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("ema", "spectral"))]
)
def test_training_a_shared_layer_equals_training_the_single_copy(kind):
    model, state = st.make_with_state(Net)(kind, is_shared=True)
    values, model, state = train(Ours, model, state, st.optimizer(optax.adam(0.05)))
    twin, twin_state = eqx.nn.make_with_state(Twin)(kind)
    expected, twin, twin_state = train(Theirs, twin, twin_state, optax.adam(0.05))
    np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-6)
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(twin_state), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    assert model.norms[0] is model.norms[1]
    np.testing.assert_allclose(model.linears[0].weight, twin.linears[0].weight, rtol=1e-3, atol=1e-5)


def test_what_is_shared_elsewhere_stays_so_and_arguments_are_handed_on():
    def make(weight, *, scale):
        counter = Counter()
        return {"one": [counter, weight], "two": (counter, weight * scale, weight)}

    w = jnp.ones(2)
    model, state = st.make_with_state(make)(w, scale=3.0)
    assert model["one"][0] is model["two"][0]
    assert model["one"][1] is model["two"][2] is w
    _, state = model["two"][0](jnp.zeros(3), state)
    out, _ = model["one"][0](jnp.zeros(3), state)
    np.testing.assert_array_equal(out, jnp.ones(3))


class Fixed(eqx.Module):
    inference: bool = eqx.field(static=True, default=False)


def test_inference_mode_equals_that_of_equinox_and_keeps_ties():
    model, tied = Net("batch", is_shared=False), st.make_with_state(Net)("batch", is_shared=True)[0]
    for value in (True, False):
        ours, theirs = st.inference_mode(model, value), eqx.nn.inference_mode(model, value)
        assert jax.tree.structure(ours) == jax.tree.structure(theirs)
        assert all(x is y for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True))
        ours = st.inference_mode(tied, value)
        assert ours.norms[0] is ours.norms[1]
        assert ours.norms[0].inference is ours.dropout.inference is value
        assert ours.linears[0].weight is tied.linears[0].weight
    # A static flag is an error, as in Equinox.
    with pytest.raises((TypeError, ValueError)):
        eqx.nn.inference_mode([Fixed(), jnp.ones(1)])
    with pytest.raises(st.errors.SharingMismatchError, match="not part of the tree"):
        st.inference_mode([Fixed(), jnp.ones(1)])


def batch_loss(model, state, xs):
    run = st.vmap(lambda m, x, s: m(x, s), in_axes=(None, 0, None), out_axes=(0, None), axis_name="batch")
    ys, state = run(model, xs, state)
    return ((ys - 1) ** 2).mean(), state


def of_both(both, xs):
    return batch_loss(*both, xs)


DIFFERENTIATED = {
    "grad": lambda m, s, xs: st.grad(batch_loss, has_aux=True)(m, s, xs)[0],
    "value_and_grad": lambda m, s, xs: st.value_and_grad(batch_loss, has_aux=True)(m, s, xs)[1],
    "filter_grad": lambda m, s, xs: st.preserve_identities(eqx.filter_grad)(batch_loss, has_aux=True)(m, s, xs)[0],
    "jacrev": lambda m, s, xs: st.jacrev(batch_loss, has_aux=True)(m, s, xs)[0],
    "under jit": lambda m, s, xs: st.jit(st.grad(batch_loss, has_aux=True))(m, s, xs)[0],
    "a filter": lambda m, s, xs: st.grad(of_both, has_aux=True, wrt=lambda path, _: path[0] == 0)((m, s), xs)[0][0],
    "a filter in a module": lambda m, s, xs: (
        st.grad(lambda p, xs: of_both((p.first, p.second), xs), has_aux=True, wrt=lambda path, _: path[0] == "first")(
            Pair(m, s), xs
        )[0].first
    ),
}


@pytest.mark.parametrize(("how", "kind"), [*[(how, "ema") for how in DIFFERENTIATED], ("grad", "index")])
@pytest.mark.slow
def test_of_the_arrays_with_which_a_state_begins_no_gradient_is_missed(how, kind):
    """`equinox.nn.State` leaves them in the model, where nobody reads them. The oracle is a state of copies."""
    model, xs = Net(kind, is_shared=True), jnp.arange(6.0).reshape(2, 3)
    state = eqx.nn.State(model)
    assert {id(leaf) for leaf in jax.tree.leaves(state)} & {id(leaf) for leaf in jax.tree.leaves(model)}
    found = DIFFERENTIATED[how](model, state, xs)
    expected = st.grad(batch_loss, has_aux=True)(model, st.copy(state), xs)[0]
    assert found.norms[0] is found.norms[1]
    for x, y in zip(st.tree.leaves(found), st.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_other_ties_beside_a_state_are_told():
    model = Net("ema", is_shared=True)
    state = eqx.nn.State(model)
    weight = model.linears[0].weight
    with pytest.warns(
        st.UntiedWarning, match=r"`model.linears\[0\].weight` lacks what flows through `other.second`"
    ) as caught:
        st.grad(lambda model, state, other: model.linears[0].weight.sum() + other.second.sum())(
            model, state, Pair(None, weight)
        )
    (warning,) = caught
    assert "norms" not in str(warning.message)


def test_a_donated_state_is_told_what_takes_it_out_of_the_model():
    """The fix that the message offers is run in `tests/fix_scenarios.py`."""
    model = Net("batch", is_shared=True)
    for donated in (0, 1):
        step = st.jit(lambda m, s: (m, s), donate_argnums=donated)
        with pytest.raises(
            st.errors.InconsistentSharingError, match=r"sharedtree.make_with_state\(make_model\)"
        ) as caught:
            step(model, eqx.nn.State(model))
        assert any(".init" in path for path in caught.value.paths)
    # What else is in two arguments has nothing to do with the state.
    model, state = st.make_with_state(Net)("batch", is_shared=True)
    with pytest.raises(st.errors.InconsistentSharingError) as caught:
        st.jit(lambda m, s, w: w, donate_argnums=0)(model, state, model.linears[0].weight)
    assert "make_with_state" not in str(caught.value)
