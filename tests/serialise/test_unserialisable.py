"""What cannot be saved: all of it is listed at once, with what to do, and no file is touched."""

import collections
import dataclasses
import functools
import importlib.metadata
import io
import os
import threading

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packaging.version import Version

import sharedtree as st
from tests.deep import lists

from .tied import Tied

LAMBDAS = [lambda x: x]  # at module level, and yet without a name


@dataclasses.dataclass
class Config:
    rate: int


@pytest.fixture
def bad():
    """One of each kind of object that cannot be saved."""
    with open(os.devnull) as file:
        yield {**bad_objects(), "file": file}


def bad_objects():
    class Local(eqx.Module):
        x: int = 1

    @dataclasses.dataclass
    class LocalData:
        x: int = 1

    class Unregistered:
        pass

    def local(x):
        return x

    donated, odd, traced = jnp.ones(3), Config(1), []
    donated.delete()
    vars(odd)[1] = 3
    jax.jit(lambda x: traced.append(x))(1.0)
    return {
        "lambda": LAMBDAS[0], "local lambda": lambda x: x, "local function": local, "local module": Local(),
        "local dataclass": LocalData(), "unregistered": Unregistered(), "generator": (i for i in range(3)),
        "lock": threading.Lock(), "thread": threading.Thread(), "module": os, "object array": np.array([{}], object),
        "structured array": np.zeros(2, [("a", "f4")]), "text array": np.array(["a"]), "tracer": traced[0],
        "in a partial": functools.partial(lambda x: x, 1), "as a key": {local: 1}, "iterator": iter([1]),
        "exception": ValueError("x"), "memoryview": memoryview(b"x"), "masked": np.ma.masked_array([1], [True]),
        "donated": donated, "structured dtype": np.dtype([("a", "f4")]),
        "initializer": jax.nn.initializers.glorot_normal(), "subclass of str": type("Str", (str,), {})("x"),
        "counter": collections.Counter("a"), "type with arguments": list[int],
        "reference": jax.new_ref(jnp.ones(2)), "compiled": eqx.filter_jit(lambda x: x), "odd attribute": odd,
        "device": jax.devices()[0], "onto a device": jax.sharding.SingleDeviceSharding(jax.devices()[0]),
    }  # fmt: skip


def test_what_cannot_be_saved_is_listed_at_once(bad, path):
    model = Tied()
    tree = {
        "good": model,
        "bad": [{name: x} for name, x in bad.items()],
        "field": eqx.tree_at(lambda m: m.scale, model, bad["lock"]),
    }
    st.save(path, "old")
    before = path.read_bytes(), path.stat().st_ino
    with pytest.raises(st.errors.UnserialisableError, match="nothing was written") as raised:
        st.save(path, tree)
    paths = raised.value.paths
    for i, name in enumerate(bad):
        assert any(found.startswith(f"['bad'][{i}]") for found in paths), name
        assert f"['bad'][{i}]['{name}']" in str(raised.value), name
    assert len(paths) == len(raised.value.reasons) >= len(bad)
    assert not any(found.startswith("['good']") for found in paths)
    assert (path.read_bytes(), path.stat().st_ino) == before
    assert os.listdir(path.parent) == [path.name]


WORDS = {
    "lambda": "lambda(.|\n)*`def` at module level", "local lambda": "lambda inside a function(.|\n)*module level",
    "local module": "module level", "local function": "module level", "unregistered": "register_pytree_node",
    "generator": "generator(.|\n)*leave it out", "file": "TextIOWrapper(.|\n)*leave it out",
    "lock": "lock(.|\n)*leave it out", "tracer": "tracer", "donated": "donated", "object array": "dtype `object`",
    "text array": "dtype", "structured array": "dtype", "structured dtype": "dtype", "masked": "numpy.asarray",
    "initializer": "inside a function", "subclass of str": "subclass of `str`", "counter": "subclass of `dict`",
    "exception": "ValueError", "module": "module of Python", "type with arguments": "GenericAlias",
    "reference": "freeze", "compiled": "signature|cannot be rebuilt|lambda",
    "odd attribute": "the attribute `1`, which is no field of its class",
}  # fmt: skip


def test_each_says_what_to_do(bad, path):
    for name, words in WORDS.items():
        with pytest.raises(st.errors.UnserialisableError, match=words) as caught:
            st.save(path, {"here": bad[name]})
        assert caught.value.paths[0].startswith("['here']"), name
    assert os.listdir(path.parent) == []
    memory = io.BytesIO(b"precious")
    with pytest.raises(st.errors.UnserialisableError):
        st.save(memory, [lambda: 1])
    assert (memory.getvalue(), memory.tell()) == (b"precious", 0)


def test_cycles(path):
    cycle = [1]
    cycle.append({"again": cycle})
    with pytest.raises(st.errors.CycleError) as raised:
        st.save(path, cycle)
    assert raised.value.paths == ("", "[1]['again']")
    assert os.listdir(path.parent) == []


def test_depth(path):
    st.save(path, lists(30_000, None))
    loaded, depth = st.load(path), 0
    while loaded:
        loaded, depth = loaded[0], depth + 1
    assert depth == 30_000


def test_modules_of_a_flax_that_is_too_old():
    nnx = pytest.importorskip("flax.nnx")
    if Version(importlib.metadata.version("flax")) >= Version("0.12.1"):
        pytest.skip("flax is new enough")
    model = nnx.Dict(scale=nnx.Param(jnp.ones(2)))
    with pytest.raises(st.errors.UnserialisableError, match="flax 0.12.1 or newer"):
        st.to_bytes(model)
    assert st.from_bytes(st.to_bytes(st.state(model))) is not None
