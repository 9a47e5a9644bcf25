"""In place, under `vmap`: what moves between arguments that are mapped along different axes."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as hst

import sharedtree as st
from tests.strategies import Mutable

AXES = hst.sampled_from([0, 1, 2, -1])
SIZE = 2  # along every axis, so that a wrong one would fit
NAMES = ["a", "b", "c", "d"]


@given(hst.tuples(AXES, AXES), hst.permutations(NAMES), hst.lists(hst.booleans(), min_size=4, max_size=4))
def test_arrays_that_move_have_the_axes_of_their_places(axes, order, changes):
    start = dict(zip(NAMES, jax.random.normal(jax.random.key(0), (4, SIZE, SIZE, SIZE)), strict=True))

    def step(a, b, c, d):
        values = dict(zip(NAMES, (a, b, c, d), strict=True))
        return tuple([values[name] + 1 if yes else values[name] for name, yes in zip(order, changes, strict=True)])

    one, two = axes
    each = (one, one, two, two)
    expected = jax.vmap(step, in_axes=each, out_axes=each)(*start.values())

    def in_place(m, n):
        m.a, m.b, n.c, n.d = step(m.a, m.b, n.c, n.d)

    m, n = Mutable(a=start["a"], b=start["b"]), Mutable(c=start["c"], d=start["d"])
    st.vmap(in_place, in_axes=axes, in_place=True)(m, n)
    for found, value in zip((m.a, m.b, n.c, n.d), expected, strict=True):
        np.testing.assert_array_equal(found, value)


@given(AXES, AXES, hst.booleans(), hst.sampled_from(["swap", "attach", "copy"]))
def test_an_object_stays_where_its_axis_is(one, two, changes, what):
    square = jnp.arange(8.0).reshape(2, 2, 2)
    layers = Mutable(x=square), Mutable(x=square + 10)
    m, n = (Mutable(layer=layer) for layer in layers)

    def move(m, n):
        if changes:
            m.layer.x = m.layer.x + 1
        if what == "swap":
            m.layer, n.layer = n.layer, m.layer
        else:
            n.layer = m.layer if what == "attach" else st.copy(m.layer)

    call = lambda: st.vmap(move, in_axes=(one, two), in_place=True)(m, n)
    if what == "attach" and one % 3 != two % 3:
        with pytest.raises(st.errors.InconsistentSharingError) as error:
            call()
        assert "sharedtree.copy(layer)" in str(error.value)
        assert len(set(error.value.paths)) == 2
        assert (m.layer, n.layer) == layers
        np.testing.assert_array_equal(layers[0].x, square)
        np.testing.assert_array_equal(layers[1].x, square + 10)
        return
    call()
    if what == "swap":  # each goes out along the axis of its place
        assert (n.layer, m.layer) == layers
        np.testing.assert_array_equal(jnp.moveaxis(layers[0].x, two, 0), jnp.moveaxis(square + changes, one, 0))
        np.testing.assert_array_equal(jnp.moveaxis(layers[1].x, one, 0), jnp.moveaxis(square + 10, two, 0))
        return
    np.testing.assert_array_equal(layers[0].x, square + changes)
    if what == "attach":
        assert m.layer is n.layer is layers[0]
    else:
        assert n.layer is not m.layer
        np.testing.assert_array_equal(jnp.moveaxis(n.layer.x, two, 0), jnp.moveaxis(square + changes, one, 0))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Counter:
    """Its fields have names, which `Mutable` does not tell JAX."""

    layer: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Point:
    x: Any


def add(model, x):
    model.layer.x = model.layer.x + x


def add_mean(model, x):
    model.layer.x = model.layer.x + jax.lax.pmean(x, "batch")


# The function's arguments and `in_axes`, and what the path to the model begins with.
UNMAPPED = {
    "an argument": (lambda f: f, lambda m, x: (m, x), (None, 0), "model"),
    "in a container": (lambda f: lambda m, x: f(m["a"][0], x), lambda m, x: ({"a": [m]}, x), (None, 0), "m['a'][0]"),
    "behind another": (lambda f: lambda n, m, x: f(m, x), lambda m, x: (counter(), m, x), (None, None, 0), "m"),
    "inside the module": (lambda f: f, lambda m, x: (m, x), (Counter(Point(x=None)), 0), "model"),
    "the last one": (lambda f: lambda x, m: f(m, x), lambda m, x: (x, m), (0, None), "m"),
}
WRAPPERS = {
    "vmap": st.vmap,
    "filter_vmap": st.preserve_identities(eqx.filter_vmap),
    "under jit": lambda f, **options: st.jit(st.vmap(f, **options), in_place=True),
}


def counter():
    return Counter(Point(jnp.zeros(())))


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_what_is_not_mapped_and_gets_a_value_for_each_element(wrapper):
    wrap, x = WRAPPERS[wrapper], jnp.arange(3.0)
    for adapt, arguments, in_axes, begin in UNMAPPED.values():
        model = counter()
        with pytest.raises(ValueError, match="has `in_axes` None") as caught:
            wrap(adapt(add), in_axes=in_axes, in_place=True)(*arguments(model, x))
        assert str(caught.value).startswith(f"`{begin}.layer.x` has `in_axes` None")
        assert "out_axes" not in str(caught.value)
        assert model.layer.x == 0
        mapped = wrap(adapt(add_mean), in_axes=in_axes, in_place=True, axis_name="batch")
        mapped(*arguments(model, x))
        assert model.layer.x == 1


def test_results_have_the_paths_of_the_function_in_place_too():
    """And what is said of a vanilla transform inside is what it says."""

    def message(call):
        with pytest.raises(ValueError, match="got axis spec None") as caught:
            call()
        return str(caught.value)

    x = jnp.ones(2)
    for out_axes in (None, {"a": (0, None)}):
        f = lambda m, x: {"a": (x, x)}
        options = {"in_axes": (None, 0), "out_axes": out_axes}
        expected = message(lambda f=f, options=options: jax.vmap(f, **options)(x, x))
        assert message(lambda f=f, options=options: st.vmap(f, in_place=True, **options)(counter(), x)) == expected
        inside = lambda m, x, f=f, options=options: jax.vmap(f, **options)(x, x)
        call = st.vmap(inside, in_axes=(None, 0), in_place=True)
        assert message(lambda call=call: call(counter(), jnp.ones((2, 2)))) == expected
