"""In place, under `vmap`: what moves between arguments that are mapped along different axes."""

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


@given(
    hst.tuples(AXES, AXES),
    hst.permutations(NAMES),
    hst.lists(hst.booleans(), min_size=4, max_size=4),
)
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
    if what != "copy" and one % 3 != two % 3:
        with pytest.raises(st.InconsistentSharingError) as error:
            call()
        assert "sharedtree.copy(layer)" in str(error.value)
        assert len(set(error.value.paths)) == 2
        assert (m.layer, n.layer) == layers
        np.testing.assert_array_equal(layers[0].x, square)
        np.testing.assert_array_equal(layers[1].x, square + 10)
        return
    call()
    np.testing.assert_array_equal(layers[0].x, square + changes)
    if what == "swap":
        assert (n.layer, m.layer) == layers
        np.testing.assert_array_equal(layers[1].x, square + 10)
    elif what == "attach":
        assert m.layer is n.layer is layers[0]
    else:
        assert n.layer is not m.layer
        np.testing.assert_array_equal(jnp.moveaxis(n.layer.x, two, 0), jnp.moveaxis(square + changes, one, 0))
