"""Names are proved by looking them up, and looking up runs no code."""

import importlib.util
import sys
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from sharedtree.serialise.trust._names import NamelessError, find, is_well_formed, name_of


class Outer:
    class Inner:
        def method(self):
            pass

        @staticmethod
        def static():
            pass


def shadowed():
    pass


first = shadowed


def shadowed():  # noqa: F811
    pass


held = lambda x: x  # a lambda that a module holds has a name after all


@pytest.mark.parametrize(
    ("obj", "name"),
    [
        (jax.nn.relu, "jax.nn:relu"),
        (jax.nn.gelu, "jax.nn:gelu"),
        (jnp.tanh, "jax.numpy:tanh"),
        (jnp.add, "jax.numpy:add"),
        (jax.lax.add, "jax.lax:add"),
        (np.tanh, "numpy:tanh"),
        (jax.scipy.special.erf, "jax.scipy.special:erf"),
        (jax.nn.initializers.zeros, "jax.nn.initializers:zeros"),
        (eqx.nn.Linear, "equinox.nn:Linear"),
        (eqx.nn.MLP(1, 1, 1, 1, key=jax.random.key(0)).final_activation, "equinox.nn._mlp:_identity"),
        (jnp.float32, "jax.numpy:float32"),
        (np.float32, "numpy:float32"),
        (ml_dtypes.bfloat16, "ml_dtypes:bfloat16"),
        (jax.Array, "jax:Array"),
        (int, "builtins:int"),
        (Outer.Inner, f"{__name__}:Outer.Inner"),
        (Outer.Inner.method, f"{__name__}:Outer.Inner.method"),
        (Outer.Inner.static, f"{__name__}:Outer.Inner.static"),
        (held, f"{__name__}:held"),
        (shadowed, f"{__name__}:shadowed"),
        (first, f"{__name__}:first"),
    ],
)
def test_names(obj, name):
    assert name_of(obj) == name
    assert find(name) is obj
    assert name_of(obj) == name  # remembered


def test_names_are_proved_again(monkeypatch):
    outer = Outer
    assert name_of(Outer) == f"{__name__}:Outer"
    monkeypatch.setitem(globals(), "Outer", int)
    assert name_of(second) == f"{__name__}:second"
    monkeypatch.setitem(globals(), "second", int)
    with pytest.raises(NamelessError):
        name_of(outer)


second = Outer


def test_main(monkeypatch):
    main = types.ModuleType("__main__")
    exec("class Model: pass", main.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert name_of(main.Model) == "__main__:Model"


def local():
    def function():
        pass

    class Class:
        pass

    return function, Class, lambda: 0


@pytest.mark.parametrize(
    ("which", "words"), [(0, "function defined inside"), (1, "class defined inside"), (2, "lambda")]
)
def test_local_objects_have_no_names(which, words):
    with pytest.raises(NamelessError, match=words) as caught:
        name_of(local()[which])
    assert "module level" in caught.value.fix


def test_impostors_have_no_names():
    impostor = types.FunctionType((lambda: 0).__code__, {}, "relu")
    impostor.__module__, impostor.__qualname__ = "jax.nn", "relu"
    with pytest.raises(NamelessError, match="does not lead back"):
        name_of(impostor)


def test_looking_up_runs_no_code(tmp_path):
    (tmp_path / "lazy_one.py").write_text("raise RuntimeError('loaded')")
    spec = importlib.util.spec_from_file_location("lazy_one", tmp_path / "lazy_one.py")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules["lazy_one"] = module
    try:
        spec.loader.exec_module(module)
        with pytest.raises(LookupError):
            find("lazy_one:thing")
    finally:
        del sys.modules["lazy_one"]
    module = types.ModuleType("with_getattr")
    module.__getattr__ = lambda name: pytest.fail("was called")
    sys.modules["with_getattr"] = module
    try:
        with pytest.raises(LookupError):
            find("with_getattr:thing")
    finally:
        del sys.modules["with_getattr"]


@pytest.mark.parametrize(
    "name", ["", "a", ":", "a:", ":b", "a:b:c", "a b:c", "a:b()", "a:<lambda>", "a..b:c", "a:b.", "../a:b"]
)
def test_malformed_names(name):
    assert not is_well_formed(name)


@pytest.mark.parametrize("name", ["os:path.join", "nothing:here", "os:nothing", "jax:nn.relu"])
def test_find_walks_through_classes_only(name):
    with pytest.raises(LookupError):
        find(name)
