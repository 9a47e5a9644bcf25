"""What a file may name: nothing outside of the allow-list is imported, looked up or handed out."""

import contextlib
import importlib
import itertools
import sys
import textwrap
import types
from importlib.util import find_spec

import equinox as eqx
import jax
import jax.numpy as jnp
import optax  # noqa: F401 -- files may name it, and are not to be blamed for what it imports
import pytest

import sharedtree as st
from sharedtree.serialise.trust import _allow_list, _trusted_names
from sharedtree.serialise.trust._trusted_names import Trust

from . import strategies
from .containers import file_of, naming
from .hostile_json import GADGETS
from .strategies import Layer, Pair, activate, make

MODULE = strategies.__name__


def gadget_in(where, name):
    """A file that has a name in one of the places where names are looked up."""
    if where == "class of a type":
        return file_of([["registered", 0, None, [], []]], types=[{"name": name, "kind": "registered"}])
    if where == "default factory":
        return file_of([["defaultdict", ["class", name], [], []]])
    if where == "partial":
        return file_of([["partial", ["function", name], ["true"], [], [], None]])
    if where == "method":
        return file_of([["method", ["class", name], "__init__"]])
    return naming([where, name])


TRUSTED = [(), ("numpy", "jax", "equinox", "sharedtree", "my_models"), (MODULE, Layer)]


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("where", ["class", "function", "class of a type", "default factory", "partial", "method"])
def test_gadgets_are_refused(where):
    before, wrong = set(sys.modules), []
    for name, trusted in itertools.product(GADGETS, TRUSTED):
        data = gadget_in(where, name)
        try:
            wrong.append(f"{name}: {st.from_bytes(data, trusted=trusted)}")
        except st.errors.UntrustedTypeError as error:
            if not any(each.startswith(name) for each in error.names):
                wrong.append(f"{name}: {error}")
        except st.errors.StructureMismatchError as error:
            # In modules on the list, and in trusted ones, there is no such thing.
            if "holds nothing of that name" not in str(error) or (where == "function" and MODULE not in name):
                wrong.append(f"{name}: {error}")
        found = [request for request in st.audit(data, trusted=trusted).requests if request.name.startswith(name)]
        if not found or any(request.allowed and request.found for request in found):
            wrong.append(f"{name}: {found}")
        st.inspect(data)
    assert not wrong, "\n".join(wrong)
    assert {module.partition(".")[0] for module in set(sys.modules) - before} <= _allow_list.PACKAGES


def test_all_names_are_listed_with_paths_and_an_allow_list():
    data = st.to_bytes({"a": make(Layer, weight=1), "b": [make(Layer, weight=activate)], "c": Pair(1)})
    with pytest.raises(st.errors.UntrustedTypeError) as caught:
        st.from_bytes(data)
    error = caught.value
    assert dict(zip(error.names, error.paths, strict=True)) == {
        f"{MODULE}:Layer": "['a']", f"{MODULE}:activate": "['b'][0].weight", f"{MODULE}:Pair": "['c']",
    }  # fmt: skip
    assert f"{MODULE}.Layer" in str(error)
    assert 'trusted=["tests"]' in str(error)
    with pytest.raises(st.errors.UntrustedTypeError, match="do not load") as caught:
        st.from_bytes(naming(["function", "os:system"]))
    assert "trusted=" not in str(caught.value)


def test_ways_to_trust(monkeypatch):
    model = [make(Layer, weight=activate, child=Pair(1))]
    data = st.to_bytes(model)
    names = [f"{MODULE}:{name}" for name in ("Layer", "Pair", "activate")]
    for options in (
        *({"trusted": each} for each in ([Layer, Pair, activate], names, ["tests"], MODULE, st.audit(data).allow_list)),
        {"like": model},
    ):
        (back,) = st.from_bytes(data, **options)
        assert back.weight is activate
        assert type(back.child) is Pair
    monkeypatch.setattr(_trusted_names, "_process_wide", [])
    with pytest.raises(st.errors.UntrustedTypeError):
        st.from_bytes(data)
    st.trust(Layer, Pair, activate)
    assert type(st.from_bytes(data)[0]) is Layer


def test_what_cannot_be_trusted(tmp_path):
    """Nor does one that is no list of things stand for all that a file names."""
    path = tmp_path / "model.safetensors"
    st.save(path, {"a": 1})
    cases = [(package, "standard library") for package in ("os", "builtins", "pathlib", "importlib", "os.path")]
    for entry, words in (*cases, *[(entry, "neither a package") for entry in ("a b", "", "x:", ":y", "a/b")]):
        with pytest.raises(ValueError, match=words):
            st.load(path, trusted=[entry])
    for entry, call in itertools.product([3, True, None, 2.5], [st.load, st.audit]):
        for trusted in (entry, [entry], (entry,), [Layer, entry]):
            with pytest.raises(TypeError, match=f"`{entry!r}` is a `{type(entry).__name__}`, and cannot be trusted"):
                call(path, trusted=trusted)


@pytest.fixture
def package(monkeypatch):
    """A user's package that imports dangerous things."""
    module = types.ModuleType("my_package")
    code = """
        import dataclasses, functools, jax, os, pathlib, subprocess, sys
        from os import system
        from subprocess import Popen
        import equinox as eqx
        @dataclasses.dataclass
        class Own:
            x: int = 0
            run = staticmethod(os.system)
            def method(self): return self.x
        class Plain: pass
        def own(x): return x
        @jax.jit
        def jitted(x): return x
        @jax.custom_jvp
        def custom(x): return x
        bound = functools.partial(os.system, "true")
        mark = Plain()
        alias = own
    """
    module.__dict__["__name__"] = "my_package"
    exec(textwrap.dedent(code), module.__dict__)
    monkeypatch.setitem(sys.modules, "my_package", module)
    return module


OTHERS = "system Popen bound os Own.run pathlib Plain sys nothing Own.x mark"


def test_trusting_a_package_trusts_what_is_defined_in_it_only(package):
    for name in OTHERS.split():
        for tag in ("function", "class"):
            with pytest.raises(st.SharedTreeError):
                pytest.fail(f"{name}: {st.from_bytes(naming([tag, f'my_package:{name}']), trusted='my_package')}")
    for name in ("own", "jitted", "custom", "alias"):
        data = naming(["function", f"my_package:{name}"])
        assert st.from_bytes(data, trusted="my_package") == (vars(package)[name],)


def test_methods_of_a_trusted_class(package):
    method = naming(["function", "my_package:Own.method"])
    for trusted in ("my_package", package.Own):
        assert st.from_bytes(method, trusted=trusted) == (package.Own.method,)
    for name in ("Own.run", "own"):
        with pytest.raises(st.errors.UntrustedTypeError):
            st.from_bytes(naming(["function", f"my_package:{name}"]), trusted=package.Own)


@pytest.mark.parametrize(
    "data",
    [
        file_of([["path", "PosixPath", "/x"], ["method", 0, "unlink"]]),
        file_of([["list", []], ["method", 0, "append"]]),
        naming(["class", "jax.nn:relu"]),
        naming(["function", "equinox.nn:Linear"]),
        naming(["class", "jax:nn"]),
        file_of([["registered", 0, None, [], []]], types=[{"name": "jax:Array", "kind": "registered"}]),
        file_of([["partial", ["str", ""], [], [], [], None]]),
    ],
)
def test_what_is_none(data):
    """Methods of values, classes as functions and functions as classes, instances that cannot be rebuilt."""
    with pytest.raises(st.SharedTreeError):
        pytest.fail(repr(st.from_bytes(data)))


@pytest.mark.parametrize("name", ["collections:OrderedDict", "collections:defaultdict", "jax.tree_util:Partial"])
def test_values_with_nodes_of_their_own_are_not_rebuilt_as_registered(name):
    """JAX's unflatten functions for these check nothing: any callable would be a factory."""
    type_ = {"name": name, "kind": "registered"}
    nodes = [["tuple", ["a"]], ["tuple", [["function", "jax.nn:relu"], 0]]]
    aux = 1 if name.endswith("defaultdict") else 0
    data = file_of([*nodes, ["registered", 0, aux, [None], ["[0]"]]], types=[type_])
    with pytest.raises(st.errors.StructureMismatchError if "Partial" not in name else st.SharedTreeError):
        pytest.fail(repr(st.from_bytes(data, trusted=[jax.tree_util.Partial])))


# Libraries that are imported here first may use what JAX has deprecated.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_each_listed_name_is_there_or_was_not_added_yet():
    for name in sorted(_allow_list.FUNCTIONS):
        package = name.partition(":")[0].partition(".")[0]
        if package not in ("lineax", "optimistix", "diffrax", "flax") or find_spec(package):
            with contextlib.suppress(ImportError):
                importlib.import_module(name.partition(":")[0].partition("._")[0])
            verdict = Trust().resolve(name, "function")
            assert verdict.allowed, name
            assert verdict.found or name in MAY_BE_MISSING, name
            is_called = not (name.endswith(("use_stepsize_tol", "_tag")) or name in _allow_list.TOKENS)
            assert not (verdict.found and is_called) or callable(verdict.obj), name
    for name in sorted(_allow_list.CLASSES):
        verdict = Trust().resolve(name, "class")
        assert verdict.allowed, name
        assert not verdict.found or isinstance(verdict.obj, type), name


MAY_BE_MISSING = {
    "jax.lax:log2", "jax.scipy.special:erfcinv", "jax.scipy.special:loggamma",
    *(f"jax.nn:{name}" for name in ("log1mexp", "logmeanexp", "mish", "squareplus", "hard_tanh")),
    *(f"jax.scipy.special:{name}" for name in ("boxcox", "boxcox1p", "comb", "dawsn", "erfcx", "exp1")),
    "jax.scipy.special:owens_t", "jax.scipy.special:wofz",
    "numpy:matvec", "numpy:vecmat", "jax.numpy:matvec", "jax.numpy:vecmat",
    "equinox.nn._attention:standard_attention", "equinox.nn._weight_norm:_norm_except_axis",
    "lineax.internal:max_norm", "lineax.internal:rms_norm", "lineax.internal:two_norm",
    "lineax:max_norm", "lineax:rms_norm", "lineax:two_norm",
    "diffrax._saveat:save_y", "diffrax._integrate:use_stepsize_tol", "diffrax._root_finder:use_stepsize_tol",
    "diffrax:use_stepsize_tol", "diffrax._root_finder._with_tols:use_stepsize_tol",
    "optimistix._misc:default_verbose", "optimistix._misc:_default_no_verbose",
}  # fmt: skip


def test_no_listed_function_takes_a_callback():
    forbidden = "callback load save file pyfunc vectorize apply_ eval exec open piecewise scan loop cond switch map"
    for name in _allow_list.FUNCTIONS:
        qualname = name.partition(":")[2]
        assert not any(word in qualname for word in forbidden.split()) or name in HARMLESS, name


HARMLESS = {"jax.numpy.linalg:cond", "diffrax._saveat:save_y"}  # a condition number, and the identity of `y`


def test_audit():
    data = st.to_bytes([eqx.nn.Identity(), Pair(1), jax.nn.relu, jnp.linalg.eigh])
    requests = {request.name: request for request in st.audit(data).requests}
    pair = requests[f"{MODULE}:Pair"]
    assert (pair.kind, pair.paths, pair.allowed, pair.found) == ("class", ("[1]",), False, False)
    assert requests["jax.nn:relu"].paths == ("[2]",)
    assert requests["jax.nn:relu"].found
    assert requests["equinox.nn:Identity"].allowed
    assert {request.allowed for request in st.audit(data, trusted="tests").requests} == {True}


def test_what_is_of_another_kind_than_it_is_asked_for_or_nowhere():
    with pytest.raises(st.errors.StructureMismatchError, match="nothing of that name"):
        st.from_bytes(naming(["class", "equinox.nn:Gone"]))
    with pytest.raises(st.errors.StructureMismatchError, match="is not installed"):
        st.from_bytes(naming(["class", "my_gone_package.sub:Gone"]), trusted="my_gone_package")
    with pytest.raises(st.errors.UntrustedTypeError, match="it is not a class"):
        st.from_bytes(naming(["class", "jax.nn:relu"]), like=(jax.nn.relu,))
    name = f"{strategies.__name__}:Layer.make"  # of a class, and not of an instance
    for trusted in ("tests", name):
        with pytest.raises(st.errors.UntrustedTypeError):
            st.from_bytes(naming(["function", name]), trusted=trusted)
