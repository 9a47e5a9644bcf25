"""How a transform is applied: options by position and by name, NumPy integers, static arguments, odd names."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharedtree as st
from tests.models import Unprintable
from tests.strategies import Pair


def tied():
    w = jnp.arange(1.0, 3.0)
    return Pair(w, w)


def total(x, m):
    return (x * m.first * m.second).sum()


def test_options_by_position_are_those_by_name():
    m, x = tied(), jnp.arange(2.0)
    for transform, positional, named in (
        (jax.grad, (1,), {"argnums": 1}),
        (jax.value_and_grad, (1,), {"argnums": 1}),
        (jax.vmap, ((0, None),), {"in_axes": (0, None)}),
        (jax.vmap, ((0, None), 0, "i"), {"in_axes": (0, None), "axis_name": "i"}),
    ):
        ours = st.preserve_identities(transform)
        found = ours(total, *positional)(x, m), ours(total, **named)(x, m), ours(fun=total, **named)(x, m)
        for other in (found[1], found[2], getattr(st, transform.__name__)(total, *positional)(x, m)):
            assert jax.tree.all(jax.tree.map(np.array_equal, found[0], other))
    for transform, positional, options in (
        (jax.jit, (1,), {}),
        (jax.grad, (0, False, False, False, (), 1, 2), {}),
        (jax.grad, (1,), {"argnums": 0}),
        (jax.vmap, (0,), {"in_axes": 0}),
        (jax.checkpoint, (1,), {}),
    ):
        with pytest.raises(TypeError):
            transform(total, *positional, **options)
        with pytest.raises(TypeError) as ours:
            st.preserve_identities(transform)(total, *positional, **options)
        assert "Dag" not in str(ours.value)


def test_operands_are_refused_before_anything_is_called():
    def never(*args):
        raise AssertionError("it was called")

    def applied(function, operand):
        return function(operand)

    for positional in ((never,), (never, tied())):
        with pytest.raises(
            TypeError, match=r"(?s)applied` is called with a function and its arguments at once.*sharedtree.Dag"
        ):
            st.preserve_identities(applied)(*positional)
    # But a user's transform may hand on whatever it is given.
    for transform in (lambda f, *args, **options: jax.jit(f, *args, **options), lambda *args, **o: jax.jit(*args, **o)):
        result = st.preserve_identities(transform)(lambda m: m, inline=True)(tied())
        assert result.first is result.second


def test_integers_of_numpy():
    m, x = tied(), jnp.ones(2)
    expected = st.grad(total, argnums=1)(x, m).first
    for i in (1, np.int32(1), np.uint8(1), np.array(1)):
        np.testing.assert_array_equal(st.grad(total, argnums=i)(x, m).first, expected)
        np.testing.assert_array_equal(st.grad(total, argnums=(i,))(x, m)[0].first, expected)
        for static in (i, (i,)):
            assert st.jit(lambda x, k: x * k, static_argnums=static)(x, 3)[0] == 3
        donated = jnp.ones(2)
        st.jit(lambda m, x: (x + 1, m), donate_argnums=i)(m, donated)
        assert donated.is_deleted()


def test_shardings_beside_static_arguments():
    m = tied()
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for shardings in (place, (place,), (Pair(place, place),)):
        for options in ({"static_argnums": 0}, {"static_argnums": -2}, {"static_argnames": "k"}):
            f = st.jit(lambda k, m: (m.first * k, m), in_shardings=shardings, **options)
            scaled, same = f(3, m)
            assert scaled.tolist() == [3, 6]
            assert same.first is same.second
    for transform in (jax.remat, jax.checkpoint):
        f = st.preserve_identities(transform)(lambda a, b, k: float(a is b) * k, static_argnums=2)
        assert f(m, m, 2) == 2  # a tie between arguments, and one that is static


def test_static_objects_that_cannot_be_printed():
    odd = Unprintable()
    f = st.jit(lambda k, m: m.first, static_argnums=0)
    assert f(odd, tied()).tolist() == [1, 2]
    f(Unprintable(), tied())
    assert "Unprintable" in str(st.explain(f, odd, tied()))
    inside = Pair(odd, jnp.ones(2))
    g = st.jit(lambda m: m.second)
    g(inside)
    g(Pair(Unprintable(), jnp.ones(2)))
    assert "Unprintable" in str(st.explain(g, inside))
    with pytest.raises(st.errors.SharingMismatchError, match="Unprintable"):
        st.tie(inside, lambda m: (m.first, m.second))


class Plain:
    pass


def test_a_static_leaf_that_leads_into_a_graph_of_plain_objects():
    objects = [Plain() for _ in range(100)]
    for obj in objects:
        obj.__dict__.update({f"to{i}": other for i, other in enumerate(objects)})
    calls = 0

    class Counting(dict):
        def items(self):
            nonlocal calls
            calls += 1
            return super().items()

    objects[-1].last = Counting(a=1)
    result = st.jit(lambda m: Pair(m.second, m.first))(Pair(objects[0], jnp.ones(2)))
    assert result.second is objects[0]
    assert calls <= 2

    objects[-1].leak = None

    def leaks(m):
        objects[-1].leak = m.second * 2
        return Pair(objects[0], m.second)

    try:
        with pytest.raises(st.errors.StaticTracerError, match="as the attribute `to99`, as the attribute `leak`"):
            st.jit(leaks)(Pair(1.0, jnp.ones(2)))
    finally:
        objects[-1].leak = None
