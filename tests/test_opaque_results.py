"""What a transform without an adapter may return: values beside the function's, things like the arguments, parts.

The oracle is vanilla JAX on the untied twin, whose gradients of tied leaves are summed by hand; where no right answer
can be had, the error that says so.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharedtree as st
from tests.strategies import Mutable, Pair

W, U, V = jnp.arange(1.0, 4.0), jnp.array([2.0, 0.0, 1.0]), jnp.array([5.0, 6.0, 7.0])


def loss(one, two):
    return (jnp.sin(one.first) * one.second + 3 * jnp.cos(two.first) * two.second).sum()


def gradients(f, *args):
    return jax.grad(f, argnums=tuple(range(len(args))))(*args)


LAYOUTS = {
    "one after the other": lambda g, m: (g, m),
    "the other way round": lambda g, m: [m, g],
    "pairs": lambda g, m: list(zip(g, m, strict=True)),
    "pairs the other way round": lambda g, m: list(zip(m, g, strict=True)),
    "a dict of each": lambda g, m: {"a": g[0], "b": m[0], "c": g[1], "d": m[1]},
    "the second only": lambda g, m: g[1],
    "the first only": lambda g, m: g[0],
    "the first of each": lambda g, m: (g[0], m[0]),
    "the second of each": lambda g, m: (g[1], m[1]),
    "all and one more": lambda g, m: (g, m[1]),
    "a gradient and a parameter": lambda g, m: (g[0], m[1]),
    "a parameter and a gradient": lambda g, m: {"frozen": m[0], "gradient": g[1]},
}


REFUSED = (
    "pairs",
    "pairs the other way round",
    "a dict of each",
    "the second only",
    "the second of each",
    "all and one more",
    "a gradient and a parameter",
    "a parameter and a gradient",
)
"""Of these it cannot be known what is shared with the second."""


def transform_for(layout):
    def transform(f):
        return lambda *args: layout(gradients(f, *args), args)

    st.register_transform(transform)
    return transform


def shared():
    return Pair(W, U), Pair(W, V)


def separate():
    return Pair(W, U), Pair(V, U + 1)


@pytest.mark.parametrize("make", [shared, separate])
@pytest.mark.parametrize("name", LAYOUTS)
def test_things_like_the_arguments_are_right_or_refused(name, make):
    layout, (one, two) = LAYOUTS[name], make()
    g_one, g_two = jax.grad(loss, argnums=(0, 1))(one, two)
    if make is shared:
        whole = g_one.first + g_two.first
        g_one, g_two = Pair(whole, g_one.second), Pair(whole, g_two.second)
    expected = layout((g_one, g_two), (one, two))
    wrapped = st.preserve_identities(transform_for(layout))(loss)
    if make is shared and name in REFUSED:
        with pytest.raises(st.errors.SharingMismatchError, match=r"    f\(sharedtree.Dag\(") as caught:
            wrapped(one, two)
        assert caught.value.paths
        return
    result = wrapped(one, two)
    assert jax.tree.structure(result) == jax.tree.structure(expected)
    for found, value in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(found, value, rtol=1e-6)


def test_the_fix_gives_the_gradient_of_what_belongs_together():
    def of_the_dag(f):
        return lambda dag: [(jax.grad(f)(dag), dag)]

    ((gradient, _),) = st.preserve_identities(of_the_dag)(lambda dag: loss(*dag.tree))(st.Dag(shared()))
    g_one, g_two = jax.grad(loss, argnums=(0, 1))(*shared())
    one, two = gradient.tree
    np.testing.assert_allclose(one.first, g_one.first + g_two.first, rtol=1e-6)
    assert one.first is two.first


def beside(f):
    def g(*args):
        return f(*args), 7.0

    return g


def named(f):
    return lambda *args: {"time": 3.0, "result": [jax.jit(f)(*args)]}


def twice(f):
    return lambda *args: (f(*args), f(*args))


def dropped(f):
    def g(*args):
        f(*args)
        return 1.0

    return g


for transform in (beside, named, twice, dropped):
    st.register_transform(transform)


def count(model):
    model.first = model.first + 1
    return model.first * 2, model


@pytest.mark.parametrize(
    ("transform", "expected"), [(beside, lambda r: (r, 7.0)), (named, lambda r: {"time": 3.0, "result": [r]})]
)
def test_what_a_transform_adds_stays_beside_the_result_in_place(transform, expected):
    model = Mutable(first=W, second=[U])
    result = st.preserve_identities(transform, in_place=True)(count)(model)
    wanted = expected((2 * (W + 1), model))
    assert jax.tree.structure(result) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(result), jax.tree.leaves(wanted))
    np.testing.assert_array_equal(model.first, W + 1)
    np.testing.assert_array_equal(model.second[0], U)


@pytest.mark.parametrize("transform", [twice, dropped])
def test_changes_that_do_not_come_back_once_are_an_error_in_place(transform):
    model = Mutable(first=W, second=[U])
    with pytest.raises(
        st.errors.SharingMismatchError, match="drops the function's result, or returns it twice"
    ) as caught:
        st.preserve_identities(transform, in_place=True)(count)(model)
    assert model.first is W
    (code,) = re.findall(r"^    (f = .*)$", str(caught.value), re.MULTILINE)
    names = {"sharedtree": st, "transform": transform, "f": count}
    exec(code, names)
    names["f"](model)
    assert model.first is W
