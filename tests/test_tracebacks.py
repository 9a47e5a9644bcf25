"""The traceback of an error that leaves a wrapped function has the user's frames, none of JAX's or of the library's."""

import contextlib
import functools
import inspect
import pathlib
import traceback

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import sharedtree as st
from sharedtree.core import _jax_internals
from tests import calls
from tests.strategies import Pair

OWN = str(pathlib.Path(st.__file__).parent)
JAX = str(pathlib.Path(jax.__file__).parent)


class OwnError(Exception):
    pass


def fails(model, *rest):
    raise OwnError("on purpose")


def tied(shape=2):
    w = jnp.ones(shape)
    return Pair(w, w)


def frames_of(call):
    """File and name of each frame of the error that a call raises."""
    try:
        call()
    except Exception as error:
        return [(frame.filename, frame.name) for frame in traceback.extract_tb(error.__traceback__)], error
    raise AssertionError("it did not fail")


@contextlib.contextmanager
def filtering(mode):
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", mode)
    try:
        yield
    finally:
        jax.config.update("jax_traceback_filtering", before)


@pytest.fixture(autouse=True)
def _as_users_have_it():
    """All other tests keep all frames."""
    with filtering("auto"):
        yield


def registered(f):
    return jax.jit(f)


st.register_transform(registered)

RULES = ("custom_vjp", "custom_jvp")
CALLS = {
    **{name: functools.partial(call, fails, tied()) for name, call in calls.CALLS.items() if name != "export"},
    **{name: lambda name=name: st.grad(lambda m: calls.CALLS[name](fails, m))(tied()) for name in RULES},
    **{
        f"{name}, in place": functools.partial(call, fails, tied((1, 2))) for name, call in calls.CALLS_IN_PLACE.items()
    },
    "jit, not plain": lambda: st.jit(fails, donate_argnums=0)(tied()),
    "filter_jit": lambda: st.preserve_identities(eqx.filter_jit)(fails)(tied()),
    "filter_grad": lambda: st.preserve_identities(eqx.filter_grad)(fails)(tied()),
    "not registered": lambda: st.preserve_identities(lambda f: jax.jit(f))(fails)(tied()),
    "registered": lambda: st.preserve_identities(registered)(fails)(tied()),
    "not ready made scan": lambda: st.preserve_identities(jax.lax.scan)(fails, tied(), jnp.ones(2)),
    "not ready made while_loop": lambda: st.preserve_identities(jax.lax.while_loop)(lambda m: True, fails, tied()),
    "lower": lambda: st.jit(fails).lower(tied()),
    "trace": lambda: st.jit(fails).trace(tied()),
    "jit, eval_shape": lambda: st.jit(fails).eval_shape(tied()),
    "nested": lambda: st.jit(st.grad(st.checkpoint(fails)))(tied()),
    "nested in vanilla": lambda: jax.jit(lambda x: st.grad(st.jit(fails))(Pair(x, x)))(jnp.ones(2)),
    "around vanilla": lambda: st.jit(jax.grad(lambda x: fails(x)))(jnp.ones(2)),
}


@pytest.mark.parametrize("name", CALLS)
def test_only_the_users_frames(name):
    frames, error = frames_of(CALLS[name])
    assert type(error) is OwnError
    names = [name for file, name in frames if file == __file__]
    assert names[0] == "frames_of"
    assert names[-1] == "fails"
    assert names.count("fails") == 1
    assert not [frame for frame in frames if frame[0].startswith((OWN, JAX))]


class Static(eqx.Module):
    x: jax.Array = eqx.field(static=True)


ERRORS = {
    "two treatments": lambda: st.grad(lambda a, b: 0.0)(*[tied()] * 2),
    "a static tracer": lambda: st.jit(lambda x: Static(x))(jnp.ones(2)),
    "a call that does not bind": lambda: st.jit(lambda x: x)(1, 2, 3),
    "export, of which JAX shows a frame of its own": lambda: st.export(fails)(tied()),
    "a program for other ties": lambda: st.export(lambda m: m)(tied()).call(Pair(jnp.ones(2), jnp.ones(2))),
    "a program that is none": lambda: st.Exported.deserialize(b"none"),
    "a prefix of places": lambda: st.device_put(tied(), Pair(jax.devices()[0], None)),
    "a cycle": lambda: st.jit(lambda m: m)(cyclic()),
}


def cyclic():
    inner = []
    inner.append(inner)
    return Pair(inner, 1)


@pytest.mark.parametrize("name", ERRORS)
def test_errors_of_the_library_too(name):
    frames, _ = frames_of(ERRORS[name])
    assert [frame for frame in frames if frame[0] == __file__]
    assert not [frame for frame in frames if frame[0].startswith(OWN)]


def test_objects_that_are_called():
    compiled = st.jit(lambda m: m).lower(tied()).compile()
    module = st.preserve_identities(eqx.filter_jit)(eqx.nn.Lambda(fails))
    for call in (lambda: compiled(3.0), lambda: module(tied())):
        frames, _ = frames_of(call)
        assert not [frame for frame in frames if frame[0].startswith((OWN, JAX))]


def test_the_error_keeps_its_cause():
    cause = ValueError("why")

    def chained(model):
        raise OwnError from cause

    for transform in (st.jit, st.grad):
        _, error = frames_of(lambda transform=transform: transform(chained)(tied()))
        assert error.__cause__ is cause


def test_all_frames_where_jax_shows_all():
    with filtering("off"):
        for name in ("jit", "grad", "scan"):
            frames, _ = frames_of(CALLS[name])
            assert [frame for frame in frames if frame[0].startswith(OWN)]
            assert [frame for frame in frames if frame[0].startswith(JAX)]


@pytest.mark.parametrize("name", ["jit", "grad", "scan"])
def test_frames_that_ipython_hides(name):
    with filtering("tracebackhide"):
        try:
            CALLS[name]()
        except OwnError as error:
            shown = [f for f, _ in traceback.walk_tb(error.__traceback__) if "__tracebackhide__" not in f.f_locals]
    assert not [f for f in shown if f.f_code.co_filename.startswith(OWN)]
    assert [f for f in shown if f.f_code.co_name == "fails"]


def test_without_the_names_of_jax_they_show(monkeypatch):
    monkeypatch.setattr(_jax_internals, "_traceback_util", None)
    frames, error = frames_of(CALLS["jit"])
    assert type(error) is OwnError
    assert [frame for frame in frames if frame[0].startswith(OWN)]
    assert inspect.unwrap(_jax_internals.api_boundary(fails)) is fails
