"""Names are proved by looking them up, and looking up runs no code."""

import importlib.util
import sys
import types

import equinox as eqx
import equinox.nn._mlp
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import sharedtree as st

from .containers import naming


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


NAMES = [
    (jax.nn.relu, "jax.nn:relu"), (jax.nn.gelu, "jax.nn:gelu"), (jnp.tanh, "jax.numpy:tanh"),
    (jnp.add, "jax.numpy:add"), (jax.lax.add, "jax.lax:add"), (np.tanh, "numpy:tanh"),
    (jax.scipy.special.erf, "jax.scipy.special:erf"),
    (jax.nn.initializers.zeros, "jax.nn.initializers:zeros"), (eqx.nn.Linear, "equinox.nn:Linear"),
    (equinox.nn._mlp._identity, "equinox.nn._mlp:_identity"), (jnp.float32, "jax.numpy:float32"),
    (np.float32, "numpy:float32"), (ml_dtypes.bfloat16, "ml_dtypes:bfloat16"), (jax.Array, "jax:Array"),
    (int, "builtins:int"), (Outer.Inner, f"{__name__}:Outer.Inner"),
    (Outer.Inner.method, f"{__name__}:Outer.Inner.method"),
    (Outer.Inner.static, f"{__name__}:Outer.Inner.static"), (held, f"{__name__}:held"),
    (shadowed, f"{__name__}:shadowed"), (first, f"{__name__}:first"),
]  # fmt: skip


def name_of(obj):
    (request,) = st.audit(st.to_bytes([obj])).requests
    return request.name


@pytest.mark.parametrize(("obj", "name"), NAMES)
def test_names(obj, name):
    assert name_of(obj) == name
    assert name_of(obj) == name  # remembered
    if name != f"{__name__}:Outer.Inner":  # which is of no kind that is built
        assert st.from_bytes(st.to_bytes([obj]), trusted="tests")[0] is obj


def test_names_are_proved_again(monkeypatch):
    outer = Outer
    assert name_of(Outer) == f"{__name__}:Outer"
    monkeypatch.setitem(globals(), "Outer", int)
    assert name_of(second) == f"{__name__}:second"
    monkeypatch.setitem(globals(), "second", int)
    with pytest.raises(st.errors.UnserialisableError):
        name_of(outer)


second = Outer


def test_main(monkeypatch):
    main = types.ModuleType("__main__")
    exec("class Model: pass", main.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert name_of(main.Model) == "__main__:Model"


def test_impostors_have_no_names():
    impostor = types.FunctionType((lambda: 0).__code__, {}, "relu")
    impostor.__module__, impostor.__qualname__ = "jax.nn", "relu"
    with pytest.raises(st.errors.UnserialisableError, match="does not lead back"):
        name_of(impostor)


def test_looking_up_runs_no_code(tmp_path, monkeypatch):
    (tmp_path / "lazy_one.py").write_text("raise RuntimeError('loaded')")
    spec = importlib.util.spec_from_file_location("lazy_one", tmp_path / "lazy_one.py")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    lazy = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "lazy_one", lazy)
    spec.loader.exec_module(lazy)
    asking = types.ModuleType("with_getattr")
    asking.__getattr__ = lambda name: pytest.fail("was called")
    monkeypatch.setitem(sys.modules, "with_getattr", asking)
    for name in ("lazy_one", "with_getattr"):
        for tag in ("class", "function"):
            with pytest.raises(st.errors.StructureMismatchError, match="nothing of that name"):
                st.from_bytes(naming([tag, f"{name}:thing"]), trusted=name)
