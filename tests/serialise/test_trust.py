"""What a file may name: nothing outside of the allow-list is imported, looked up or handed out."""

import json
import os
import pathlib
import subprocess
import sys
import textwrap
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import sharedtree as st
from sharedtree._errors import StructureMismatchError, UntrustedTypeError
from sharedtree.serialise.trust import _allowed, _trust
from sharedtree.serialise.trust._names import find
from sharedtree.serialise.trust._trust import Trust, trust
from sharedtree.serialise.values._decoding import audit, decode
from sharedtree.serialise.values._encoding import encode, names_in
from sharedtree.serialise.values._manifest import parse_manifest

from . import strategies
from .strategies import Layer, Pair, activate, make


def manifest_naming(*atoms):
    whole = {"format": 1, "library": "", "types": [], "arrays": [], "nodes": [["tuple", list(atoms)]], "root": 0}
    return parse_manifest(json.dumps(whole))


def load(manifest, **options):
    return decode(manifest, lambda i: None, **options)


GADGET_NAMES = """
    os:system posix:system subprocess:Popen subprocess:run builtins:eval builtins:exec builtins:getattr builtins:open
    builtins:__import__ builtins:compile importlib:import_module runpy:run_path pickle:loads shutil:rmtree
    socket:socket ctypes:CDLL code:interact webbrowser:open pty:spawn timeit:timeit operator:attrgetter
    operator:methodcaller functools:reduce types:FunctionType types:CodeType numpy:load numpy:save numpy:fromfile
    numpy:memmap numpy:frompyfunc numpy:vectorize numpy:apply_along_axis numpy:loadtxt numpy:genfromtxt
    jax.numpy:load jax.numpy:save jax.numpy:savez jax.numpy:fromfile jax.numpy:frompyfunc jax.numpy:vectorize
    jax.numpy:apply_along_axis jax.numpy:apply_over_axes jax.numpy:piecewise jax.numpy:fromfunction
    jax.numpy:from_dlpack
    numpy.testing:run_module_suite
"""
GADGETS = GADGET_NAMES.split()

LIBRARY_GADGET_NAMES = """
    jax:pure_callback jax.experimental:io_callback jax.debug:callback jax.debug:print jax:jit jax:eval_shape jax:vmap
    jax.lax:map jax.lax:scan jax.lax:while_loop jax.tree_util:tree_map
    jax.profiler:start_trace equinox:tree_deserialise_leaves equinox:tree_serialise_leaves equinox:filter_pure_callback
    equinox.internal:while_loop sharedtree:trust sharedtree:load
    jax.tools.jax_to_ir:main jax._src.lazy_loader:importlib
"""
LIBRARY_GADGETS = LIBRARY_GADGET_NAMES.split()


@pytest.mark.parametrize("tag", ["function", "class"])
@pytest.mark.parametrize("trusted", [(), ("numpy", "jax", "equinox", "my_models"), (strategies.__name__, Layer)])
def test_gadgets_are_refused(tag, trusted):
    before = set(sys.modules)
    for name in GADGETS:
        with pytest.raises(UntrustedTypeError) as caught:
            load(manifest_naming([tag, name]), trust=Trust(trusted))
        assert caught.value.names == (name,)
        assert set(sys.modules) == before, name


@pytest.mark.parametrize("trusted", [(), ("numpy", "jax", "equinox", "sharedtree")])
def test_gadgets_of_libraries_are_refused(trusted):
    before = set(sys.modules)
    for name in LIBRARY_GADGETS:
        with pytest.raises(UntrustedTypeError) as caught:
            load(manifest_naming(["function", name]), trust=Trust(trusted))
        assert caught.value.names == (name,)
        # As a class, the name of a library may be looked up; it is none.
        with pytest.raises((UntrustedTypeError, StructureMismatchError)):
            load(manifest_naming(["class", name]), trust=Trust(trusted))
    assert {module.partition(".")[0] for module in set(sys.modules) - before} <= _allowed.LIBRARIES


def test_nothing_is_imported_for_a_name_that_is_not_allowed(tmp_path):
    (tmp_path / "evil.py").write_text("open('was_imported', 'w').close()")
    code = f"""
        import json, sys
        sys.path.insert(0, {str(tmp_path)!r})
        from sharedtree.serialise.values._decoding import decode
        from sharedtree.serialise.values._decoding import audit
        from sharedtree.serialise.values._manifest import parse_manifest
        nodes = [["tuple", [["class", "evil:A"], ["function", "evil:f"], ["function", "turtle:Turtle"]]]]
        types = [{{"name": "evil:B", "kind": "dataclass", "fields": []}}]
        text = json.dumps({{"format": 1, "library": "", "types": types, "arrays": [], "nodes": nodes, "root": 0}})
        manifest = parse_manifest(text)
        requests = audit(manifest)
        assert [r.allowed for r in requests] == [False] * 4
        try:
            decode(manifest, None)
        except TypeError as error:
            assert set(error.names) == {{"evil:A", "evil:B", "evil:f", "turtle:Turtle"}}, error.names
        else:
            raise AssertionError
        assert "evil" not in sys.modules and "turtle" not in sys.modules
    """
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(st.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, cwd=tmp_path, env=environment)
    assert not (tmp_path / "was_imported").exists()


def test_all_names_are_listed_with_paths_and_an_allow_list():
    model = {"a": make(Layer, weight=1), "b": [make(Layer, weight=activate)], "c": Pair(1)}
    manifest = parse_manifest(json.dumps(encode(model).manifest))
    with pytest.raises(UntrustedTypeError) as caught:
        load(manifest)
    error, module = caught.value, strategies.__name__
    assert set(error.names) == {f"{module}:Layer", f"{module}:activate", f"{module}:Pair"}
    places = dict(zip(error.names, error.paths, strict=True))
    assert places[f"{module}:Layer"] == "['a']"
    assert places[f"{module}:activate"] == "['b'][0].weight"
    assert places[f"{module}:Pair"] == "['c']"
    assert f"{module}.Layer" in str(error)
    assert 'trusted=["tests"]' in str(error)


def test_names_of_the_standard_library_get_no_allow_list():
    with pytest.raises(UntrustedTypeError, match="do not load") as caught:
        load(manifest_naming(["function", "os:system"]))
    assert "trusted=" not in str(caught.value)


@pytest.mark.parametrize(
    "trusted",
    [
        [Layer, Pair, activate],
        [f"{strategies.__name__}:{name}" for name in ("Layer", "Pair", "activate")],
        ["tests"],
        strategies.__name__,
    ],
)
def test_ways_to_trust(trusted):
    model = [make(Layer, weight=activate, child=Pair(1))]
    manifest = parse_manifest(json.dumps(encode(model).manifest))
    (back,) = load(manifest, trust=Trust(trusted))
    assert back.weight is activate
    assert type(back.child) is Pair


def test_a_template_is_trusted():
    model = [make(Layer, weight=activate, child=lambda x: x)]
    assert set(names_in(model)) == {f"{strategies.__name__}:Layer", f"{strategies.__name__}:activate"}
    model[0] = make(Layer, weight=activate)
    manifest = parse_manifest(json.dumps(encode(model).manifest))
    assert load(manifest, trust=Trust(objects=names_in(model)))[0].weight is activate


def test_trust_for_the_process(monkeypatch):
    monkeypatch.setattr(_trust, "_process_wide", [])
    manifest = parse_manifest(json.dumps(encode(make(Layer)).manifest))
    with pytest.raises(UntrustedTypeError):
        load(manifest)
    trust(Layer)
    assert type(load(manifest)) is Layer


@pytest.mark.parametrize("package", ["os", "builtins", "pathlib", "importlib", "os.path"])
def test_the_standard_library_cannot_be_trusted_as_a_whole(package):
    with pytest.raises(ValueError, match="standard library"):
        Trust([package])


@pytest.mark.parametrize("entry", ["a b", "", "x:", ":y", "a/b"])
def test_texts_that_name_nothing(entry):
    with pytest.raises(ValueError, match="neither a package"):
        Trust([entry])


@pytest.mark.parametrize("entry", [3, True, None, 2.5], ids=repr)
def test_other_things_cannot_be_trusted(entry, tmp_path):
    """Nor does one that is no list of things stand for all that a file names."""
    path = tmp_path / "model.safetensors"
    st.save(path, {"a": 1})
    calls = (
        Trust,
        lambda trusted: st.load(path, trusted=trusted),
        lambda trusted: st.audit(path, trusted=trusted),
        lambda trusted: st.from_bytes(path.read_bytes(), trusted=trusted),
    )
    for call in calls:
        for trusted in (entry, [entry], (entry,), [Layer, entry]):
            with pytest.raises(TypeError, match=f"`{entry!r}` is a `{type(entry).__name__}`, and cannot be trusted"):
                call(trusted)


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


@pytest.mark.parametrize(
    "name", ["system", "Popen", "bound", "os", "Own.run", "pathlib", "Plain", "sys", "nothing", "Own.x", "mark"]
)
def test_trusting_a_package_trusts_what_is_defined_in_it_only(package, name):
    for tag in ("function", "class"):
        with pytest.raises(st.SharedTreeError):
            load(manifest_naming([tag, f"my_package:{name}"]), trust=Trust("my_package"))


@pytest.mark.parametrize("name", ["own", "jitted", "custom", "alias", "Own.method"])
def test_functions_of_a_trusted_package(package, name):
    found = load(manifest_naming(["function", f"my_package:{name}"]), trust=Trust("my_package"))[0]
    assert found is find(f"my_package:{name}")


def test_methods_of_a_trusted_class(package):
    manifest = manifest_naming(["function", "my_package:Own.method"])
    assert load(manifest, trust=Trust(package.Own))[0] is package.Own.method
    with pytest.raises(UntrustedTypeError):
        load(manifest_naming(["function", "my_package:Own.run"]), trust=Trust(package.Own))
    with pytest.raises(UntrustedTypeError):
        load(manifest_naming(["function", "my_package:own"]), trust=Trust(package.Own))


def test_methods_of_values_are_not_handed_out():
    for path in (["path", "PosixPath", "/x"], ["list", []]):
        nodes = [path, ["method", 0, "unlink" if path[0] == "path" else "append"]]
        whole = {"format": 1, "library": "", "types": [], "arrays": [], "nodes": nodes, "root": 1}
        with pytest.raises(st.SharedTreeError):
            load(parse_manifest(json.dumps(whole)))


def test_classes_are_not_functions_and_functions_no_classes():
    for atom in (["class", "jax.nn:relu"], ["function", "equinox.nn:Linear"], ["class", "jax:nn"]):
        with pytest.raises(st.SharedTreeError):
            load(manifest_naming(atom))


@pytest.mark.parametrize("name", sorted(_allowed.FUNCTIONS))
def test_each_listed_function_is_there_or_was_not_added_yet(name):
    module = name.partition(":")[0]
    if module.partition(".")[0] in ("lineax", "optimistix", "diffrax", "flax"):
        pytest.importorskip(module.partition(".")[0])
    verdict = Trust().resolve(name, "function")
    assert verdict.allowed
    if verdict.found:
        assert callable(verdict.obj) or name.endswith(("use_stepsize_tol", "_tag")) or name in _allowed.TOKENS
    else:
        assert name in MAY_BE_MISSING, name


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


@pytest.mark.parametrize("name", sorted(_allowed.CLASSES))
def test_each_listed_class_is_a_class(name):
    verdict = Trust().resolve(name, "class")
    assert verdict.allowed
    assert not verdict.found or isinstance(verdict.obj, type)


def test_no_listed_function_takes_a_callback():
    forbidden = "callback load save file pyfunc vectorize apply_ eval exec open piecewise scan loop cond switch map"
    for name in _allowed.FUNCTIONS:
        qualname = name.partition(":")[2]
        assert not any(word in qualname for word in forbidden.split()) or name in HARMLESS, name


HARMLESS = {"jax.numpy.linalg:cond", "diffrax._saveat:save_y"}  # a condition number, and the identity of `y`


def test_audit():
    manifest = parse_manifest(json.dumps(encode([eqx.nn.Identity(), Pair(1), jax.nn.relu, jnp.linalg.eigh]).manifest))
    requests = {r.name: r for r in audit(manifest)}
    pair = requests[f"{strategies.__name__}:Pair"]
    assert (pair.kind, pair.paths, pair.allowed, pair.found) == ("class", ("[1]",), False, False)
    assert requests["jax.nn:relu"].paths == ("[2]",)
    assert requests["jax.nn:relu"].found
    assert requests["equinox.nn:Identity"].allowed
    assert {r.allowed for r in audit(manifest, Trust("tests"))} == {True}


def test_a_name_that_leads_nowhere():
    with pytest.raises(StructureMismatchError, match="nothing of that name"):
        load(manifest_naming(["class", "equinox.nn:Gone"]))
    with pytest.raises(StructureMismatchError, match="cannot be imported"):
        load(manifest_naming(["class", "my_gone_package.sub:Gone"]), trust=Trust("my_gone_package"))


def test_instances_of_trusted_classes_that_cannot_be_rebuilt():
    whole = {"format": 1, "library": "", "types": [{"name": "jax:Array", "kind": "registered"}], "arrays": []}
    whole |= {"nodes": [["registered", 0, None, [], []]], "root": 0}
    with pytest.raises(StructureMismatchError):
        load(parse_manifest(json.dumps(whole)))


def test_partial_of_a_listed_function_only():
    nodes = [["partial", ["str", ""], [], [], [], None]]
    whole = {"format": 1, "library": "", "types": [], "arrays": [], "nodes": nodes, "root": 0}
    with pytest.raises(st.SharedTreeError):
        load(parse_manifest(json.dumps(whole)))


def test_a_template_s_function_is_no_class():
    verdict = Trust((), {"jax.nn:relu": jax.nn.relu}).resolve("jax.nn:relu", "class")
    assert not verdict.allowed
    assert verdict.why == "it is not a class"


class WithClassMethod(eqx.Module):
    @classmethod
    def make(cls):
        return cls()


def test_what_cannot_be_called_is_no_function():
    name = f"{__name__}:WithClassMethod.make"
    for trusted in (__name__.partition(".")[0], name):
        verdict = Trust([trusted]).resolve(name, "function")
        assert not verdict.allowed
