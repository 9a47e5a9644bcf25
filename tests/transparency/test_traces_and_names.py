"""How often a wrapped function is traced, and what it looks like: name, documentation, signature, attributes."""

import functools
import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharedtree as st
from tests.models import Unprintable
from tests.transparency.outcome import TRANSFORMS, Data, Model, Registered, of, outcome, separate, vec

EACH = [pytest.param(transform, id=name) for name, transform in TRANSFORMS.items()]


# What one function is called with, in this order.
GIVEN = {
    "a first time": vec,
    "again": vec,
    "another shape": lambda: vec(4),
    "the first shape": vec,
    "the other shape": lambda: vec(4),
    "another dtype": lambda: vec().astype(jnp.bfloat16),
    "the first dtype": vec,
    "NumPy": lambda: np.ones(3, np.float32),
    "no more of NumPy": vec,
    "weak": lambda: jnp.asarray(1.0),
    "strong": lambda: jnp.float32(1.0),
    "weak again": lambda: jnp.asarray(2.0),
    "a NumPy scalar": lambda: np.float32(1.0),
    "a scalar": lambda: jnp.float32(1.0),
}
NUMPY_FIRST = {"NumPy": GIVEN["NumPy"], "arrays": vec, "NumPy again": GIVEN["NumPy"]}
NUMPY_SCALAR_FIRST = {"a NumPy scalar": GIVEN["a NumPy scalar"], "a scalar": GIVEN["a scalar"]}

ENCLOSED = {
    "bare": lambda x: x,
    "in modules": lambda x: [cls(y) for cls, y in zip((Registered, Data, Model), separate([x] * 3), strict=True)],
}


def count_traces(transform, enclose, given):
    """How often a function has been traced after each call."""
    count = []

    def f(xs):
        count.append(1)
        return sum(jnp.sum(of(x) * 1.0) for x in (xs if isinstance(xs, list) else [xs]))

    wrapped = transform(f)
    counts = {}
    for name, make in given.items():
        outcome(lambda: wrapped(enclose(make())))
        counts[name] = len(count)
    return counts


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("transform", EACH)
def test_traces_as_often(transform):
    for given in (GIVEN, NUMPY_FIRST, NUMPY_SCALAR_FIRST):
        want = count_traces(transform, ENCLOSED["bare"], given)
        for where, enclose in ENCLOSED.items():
            found = count_traces(st.preserve_identities(transform), enclose, given)
            assert found == want, where
            if given is NUMPY_FIRST and transform in (jax.jit, eqx.filter_jit):
                assert set(found.values()) == {1}, where


def documented(x: float, /, y: int = 2, *args: int, key: str = "k", **more: float) -> float:
    """Says what it does."""
    return x


@pytest.mark.parametrize("transform", EACH)
def test_name_documentation_and_signature(transform):
    def f(x):
        return x

    wrapped = st.preserve_identities(transform)(documented)
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(wrapped, name) == getattr(documented, name)
    assert wrapped.__wrapped__ is documented
    assert inspect.signature(wrapped) == inspect.signature(documented)
    partial = functools.partial(documented, y=3)
    assert inspect.signature(st.preserve_identities(transform)(partial)) == inspect.signature(partial)
    # Other attributes of the function are not taken over.
    f.own = 1
    assert not hasattr(st.preserve_identities(transform)(f), "own")


def test_jit_has_what_vanilla_jit_has():
    def own_name(x):
        return x + 1

    for attribute in ("lower", "trace", "eval_shape", "clear_cache"):
        assert hasattr(jax.jit(documented), attribute)
        assert hasattr(st.jit(documented), attribute)
    assert hasattr(eqx.filter_jit(documented), "lower")
    assert hasattr(st.preserve_identities(eqx.filter_jit)(documented), "lower")
    for transform in (jax.jit, st.jit):
        assert "own_name" in str(jax.make_jaxpr(transform(own_name))(1.0))
        assert "own_name" in transform(own_name).lower(1.0).as_text()


class Unnamed(Unprintable):
    """One that answers with an error, too, when it is asked for a name once it is wrapped."""

    is_wrapped = False

    def __getattribute__(self, name):
        if name in ("__name__", "__qualname__") and Unnamed.is_wrapped:
            raise RuntimeError("of the object's own")
        return super().__getattribute__(name)


class Endless(Unprintable):
    def __repr__(self):
        return repr(self)


class Odd(Unprintable):
    def __repr__(self):
        return 1


class Printable(Unprintable):
    def __repr__(self):
        return "<one of these>"


class Transform(Unprintable):
    def __call__(self, f):
        return jax.jit(f)


@pytest.mark.parametrize("transform", EACH)
def test_what_cannot_be_printed_is_named_by_its_class(transform, monkeypatch):
    """Of what vanilla `jax.jit` wraps, `<PjitFunction>` is printed."""
    for cls in (Unprintable, Unnamed, Endless, Odd):
        assert repr(jax.jit(cls())) == "<PjitFunction>"
        wrapped = st.preserve_identities(transform)(cls())
        monkeypatch.setattr(Unnamed, "is_wrapped", True)
        assert f"(<{cls.__qualname__} object>), identities preserved>" in repr(wrapped)
        assert str(wrapped) == f"{wrapped}" == repr(wrapped)
        monkeypatch.undo()


def test_what_is_printed_otherwise():
    assert repr(st.jit(Printable())) == "<jax.jit(<one of these>), identities preserved>"
    assert repr(st.jit(documented)) == "<jax.jit(documented), identities preserved>"
    wrapped = st.preserve_identities(Transform())(documented)
    assert repr(wrapped) == "<<Transform object>(documented), identities preserved>"
    assert wrapped(1.0) == 1.0


class Layer(eqx.Module):
    weight: jax.Array
    __call__, __repr__ = Unprintable.__call__, Unprintable.__repr__


@pytest.mark.parametrize("transform", [eqx.filter_jit, eqx.filter_grad, eqx.filter_vmap, eqx.filter_checkpoint])
def test_a_transformed_module_prints_where_equinox_s_does(transform):
    assert repr(transform(Layer(vec())))
    assert "TransformedModule" in repr(st.preserve_identities(transform)(Layer(vec())))


def test_warnings_and_errors_about_what_cannot_be_printed():
    """They name the function, and none dies of that."""
    weight = vec()

    class Losing(Unprintable):
        def __call__(self, pair):
            return jax.tree.map(lambda x: x + 1, pair)

    with pytest.warns(st.UntiedWarning, match="Losing"):
        st.jit(Losing())(Model((Model(weight), Model(weight))))
    with pytest.raises(TypeError):
        st.grad(Unprintable())("no number")
    assert "traced" in str(st.explain(st.jit(Unprintable()), Model(weight)))
