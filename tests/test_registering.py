"""`register_transform`: for transforms of a function, and with `takes_operands` for those that are given operands."""

import inspect
import textwrap

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharedtree as st
from sharedtree.transforms._function_transform import FunctionTransform
from tests.strategies import Pair


def integrate(f, y0, ts, *, order=1):
    """Integrates."""
    del order

    def step(y, now):
        t, dt = now
        y = jax.tree.map(lambda y, dy: y + dt * dy, y, f(y, t))
        return y, y

    return jax.lax.scan(step, y0, (ts[:-1], jnp.diff(ts)))[1]


given = []


def adapter(call, f, y0, ts, **options):
    given.append((call.policy, options))
    y0, ts = call.enter(f, {"y0": y0, "ts": ts}, {"y0": "integrated", "ts": "a time"})
    return call.leave(call.apply(call.function(f, packed_slope), y0, ts))


def packed_slope(trace, y, t):
    return trace.like(y, trace.call(y, t))


@pytest.fixture(autouse=True)
def registered():
    st.register_transform(integrate, adapter, takes_operands=True)
    given.clear()


def tied():
    w = jnp.arange(1.0, 4.0)
    return Pair(w, [w])


def decay(model, t):
    return st.tree.map(lambda w: -w * (1 + t), model)


TS = jnp.linspace(0.0, 1.0, 4)


def test_a_transform_with_operands():
    seen = []

    def f(model, t):
        seen.append(model.first is model.second[0])
        return decay(model, t)

    ys = st.preserve_identities(integrate)(f, tied(), TS)
    assert ys.first is ys.second[0]
    assert seen
    assert all(seen)
    expected = integrate(lambda w, t: -w * (1 + t), jnp.arange(1.0, 4.0), TS)
    np.testing.assert_allclose(ys.first, expected, rtol=1e-6)


@pytest.mark.slow
def test_under_other_transforms():
    solve = st.preserve_identities(integrate)

    def final(model):
        return (solve(decay, model, TS).first[-1] ** 2).sum()

    def by_hand(w):
        return (integrate(lambda w, t: -w * (1 + t), w, TS)[-1] ** 2).sum()

    w = jnp.arange(1.0, 4.0)
    for gradient in (st.grad(final)(tied()), st.jit(st.grad(final))(tied()), st.grad(st.jit(final))(tied())):
        assert gradient.first is gradient.second[0]
        np.testing.assert_allclose(gradient.first, jax.grad(by_hand)(w), rtol=1e-5)


def test_policies_and_options_come_apart():
    solve = st.preserve_identities(integrate, order=2)
    solve(decay, tied(), TS, in_place=False, policy=st.Policy(on_untie="ignore", in_place=True))
    solve(decay, tied(), ts=TS, order=3)
    assert given == [(st.Policy(on_untie="ignore", in_place=False), {"order": 2}), (st.Policy(), {"order": 3})]
    assert inspect.signature(solve) == inspect.signature(integrate)


def test_it_is_not_called_in_place():
    solve = st.preserve_identities(integrate)
    with pytest.raises(ValueError, match="`.*integrate` does not support `in_place=True`"):
        solve(decay, tied(), TS, in_place=True)
    with st.Context(st.Policy(in_place=True)):
        with pytest.raises(ValueError, match="in_place=False"):
            solve(decay, tied(), TS)
        solve(decay, tied(), TS, in_place=False)
    assert len(given) == 1


def once_more(function):
    return lambda *args: function(*args)


class OnceMoreTransform(FunctionTransform):
    writes = False


def test_an_adapter_of_a_function_states_that_it_cannot_write_back():
    st.register_transform(once_more, OnceMoreTransform)
    f = st.preserve_identities(once_more)(decay)
    for _ in range(2):
        with (
            st.Context(st.Policy(in_place=True)),
            pytest.raises(ValueError, match="`.*once_more` does not support `in_place=True`"),
        ):
            f(tied(), 1.0)
        result = f(tied(), 1.0)
        assert result.first is result.second[0]


def test_a_module_with_two_treatments():
    model = tied()
    with pytest.raises(st.errors.InconsistentSharingError, match="integrated") as caught:
        st.preserve_identities(integrate)(decay, model, model)
    assert set(caught.value.treatments) == {"integrated", "a time"}
    assert caught.value.paths == ("y0.first", "y0.second[0]", "ts.first", "ts.second[0]")
    st.preserve_identities(integrate)(decay, model, TS)


def test_an_error_of_the_body_and_the_next_call():
    solve = st.preserve_identities(integrate)
    with pytest.raises(st.errors.SharingMismatchError, match="first"):
        solve(lambda m, t: Pair(m.first * 1, [m.first * 2]), tied(), TS, policy=st.Policy(on_untie="ignore"))
    with pytest.raises(TypeError, match="missing"):
        solve(decay, tied())
    assert solve(decay, tied(), TS).first.shape == (3, 3)


def test_like_one_that_is_known():
    def scan(f, init, xs, length=None):
        return jax.lax.scan(f, init, xs, length)

    for options in ({}, {"takes_operands": True}):
        st.register_transform(scan, jax.lax.scan, **options)
        carry, ys = st.preserve_identities(scan)(lambda m, x: (decay(m, x), m), tied(), TS)
        assert carry.first is carry.second[0]
        assert ys.first is ys.second[0]


def test_what_is_no_adapter():
    operands = {"takes_operands": True}
    for wrong, options in ((3, {}), ([], {}), *((wrong, operands) for wrong in (3, None, jax.jit, jax.vmap))):
        transform = lambda f, x: f(x)
        with pytest.raises(TypeError, match="`adapter` must be|takes_operands=True"):
            st.register_transform(transform, wrong, **options)
        with pytest.raises(TypeError, match="does not know how it passes"):
            st.preserve_identities(transform)(decay, tied())


REFUSED = [
    jax.lax.custom_root,
    jax.lax.custom_linear_solve,
    jax.closure_convert,
    jax.pure_callback,
    jax.debug.callback,
    eqx.filter_closure_convert,
    eqx.filter_custom_vjp,
    eqx.filter_pmap,
]


@pytest.mark.parametrize("transform", REFUSED, ids=lambda transform: transform.__name__)
def test_what_is_refused_is_refused_without_an_adapter(transform):
    """With the same recipe, and nothing is registered."""
    for register in (st.register_transform, lambda transform: st.register_transform(transform, None)):
        with pytest.raises(TypeError) as caught:
            register(transform)
        with pytest.raises(TypeError) as of_preserving:
            st.preserve_identities(transform)
        assert str(caught.value) == str(of_preserving.value)


def test_the_adapter_in_the_docstring_of_calls_with_operands():
    doc = st.transforms._calls_with_operands.__doc__
    names = {}
    exec(textwrap.dedent(doc[doc.index("    def ") :]), names)
    scale = lambda f, xs: jax.lax.map(f, xs)
    st.register_transform(scale, names["map_over"], takes_operands=True)
    w = jnp.arange(3.0)
    ys = st.preserve_identities(scale)(lambda pair: st.tree.map(lambda x: 2 * x, pair), Pair(w, w))
    assert ys.first is ys.second
    np.testing.assert_array_equal(ys.first, 2 * w)
