"""Loading runs nothing by the word of a file, whatever the file makes of the classes that it may name."""

import dataclasses
import functools
import itertools
import sys
import typing
from importlib.util import find_spec
from typing import Any

import equinox as eqx
import jax
import pytest

import sharedtree as st

from .containers import file_of, naming
from .drafts import Draft
from .vanilla import Wrapper

RELU = ["function", "jax.nn:relu"]
BOUND_METHOD = {"name": "equinox._module._prebuilt:BoundMethod", "kind": "module", "fields": ["__func__", "__self__"]}
calls: list[Any] = []


def note(*args: Any, **kwargs: Any) -> None:
    calls.append((args, kwargs))


class Net(eqx.Module):
    w: Any

    def check(self) -> str:
        return "the class's own"

    def plain(self) -> Any:
        return self.w

    @property
    def __wrapped__(self) -> Any:
        calls.append("a property was read")
        return self.w

    def __getattr__(self, name: str) -> Any:
        calls.append(name)
        raise AttributeError(name)


class Stranger:
    def inherited(self) -> str:
        return "from elsewhere"


Stranger.__module__ = Stranger.inherited.__module__ = "another_package"


class Mixed(Stranger, eqx.Module):
    w: Any


class Quiet(eqx.Module):
    w: Any

    def double(self) -> Any:
        return 2 * self.w


def described(x: Any) -> Any:
    """A documented function."""
    return x


@pytest.fixture(autouse=True)
def nothing_is_called():
    calls.clear()
    yield
    assert calls == []


def name_of(cls: type) -> str:
    return f"{__name__}:{cls.__qualname__}"


def load(nodes, classes=(), trusted=()):
    return st.from_bytes(file_of(nodes, types=list(classes)), trusted=trusted)


def net(**more):
    return {"name": name_of(Net), "kind": "module", "fields": ["w"], **more}


def test_attributes_of_partials_that_other_code_would_call():
    for name in ("__get__", "__call__", "__set_name__", "__doc", ["int", "1"]):
        nodes = [["dict", [name], [["function", "jax.numpy:zeros"]]], ["partial", RELU, [], [], [], 0]]
        with pytest.raises(st.errors.FormatError):
            load(nodes)
        with pytest.raises(st.errors.FormatError):
            load([*nodes, ["wrapper", 0, [1, ["int", "7"]], "__func__"]], [BOUND_METHOD])
    partial = functools.update_wrapper(functools.partial(described), described)
    back = st.from_bytes(st.to_bytes(partial), trusted=__name__)
    assert vars(back) == vars(partial)
    assert back.__wrapped__ is described
    partial.__get__ = note
    with pytest.raises(st.errors.UnserialisableError, match="stands in for a method"):
        st.to_bytes(partial)


EVALUATED = [["dict", ["x", "return"], ["note('evaluated')", "note('evaluated')"]], ["dict", ["__annotations__"], [0]]]
"""Annotations that `typing.get_type_hints` would evaluate, alone and as the attributes of something."""


@pytest.mark.parametrize(
    ("nodes", "classes"),
    [
        ([["partial", RELU, [], [], [], 1]], []),
        ([["partial", ["function", f"{__name__}:described"], [], [], [], 1]], []),
        ([["dict", ["__type_params__"], [0]], ["partial", RELU, [], [], [], 2]], []),
        ([["tuple", [0]], ["dict", ["__type_params__"], [2]], ["partial", RELU, [], [], [], 3]], []),
        ([["object", 0, [None, 0]]], [net(extra=["__annotations__"])]),
        ([["wrapper", 0, [RELU, 0], "w"]], [net(extra=["__annotations__"])]),
        ([["object", 0, [0]]], [net(fields=["__annotations__"], missing=["w"])]),
        ([["object", 0, [RELU, None, 0]]], [{**BOUND_METHOD, "extra": ["__annotations__"]}]),
    ],
)
def test_no_text_of_a_file_becomes_an_annotation(nodes, classes):
    with pytest.raises((st.errors.FormatError, st.errors.StructureMismatchError)):
        load([*EVALUATED, *nodes], classes, [Net, described])


def annotated(x: "int", y: "Any" = None) -> "str":
    """A function whose annotations are texts, but those of its module."""
    return str((x, y))


def test_annotations_come_from_code():
    partial = functools.update_wrapper(functools.partial(annotated, 1), annotated)
    wrapper = eqx.module_update_wrapper(Wrapper(annotated))
    twice = eqx.filter_grad(eqx.module_update_wrapper(Wrapper(annotated)))
    data = st.to_bytes([partial, wrapper, twice, eqx.filter_value_and_grad(eqx.nn.Identity())])
    assert b"__annotations__" not in data
    back = st.from_bytes(data, trusted="tests")
    for each in back[:3]:
        assert each.__annotations__ == annotated.__annotations__
        assert typing.get_type_hints(each, vars(sys.modules[__name__])) == {"x": int, "y": Any, "return": str}
    assert back[3].__annotations__ is eqx.nn.Identity.__annotations__
    assert vars(back[0]) == vars(partial)


def test_annotations_that_are_not_those_of_what_is_wrapped_are_left_out():
    partial = functools.update_wrapper(functools.partial(annotated, 1), annotated)
    partial.__annotations__ = {"x": "note('evaluated')"}
    model = Net(1)
    object.__setattr__(model, "__annotations__", {"x": "note('evaluated')"})
    data = st.to_bytes([partial, model])
    assert b"evaluated" not in data
    back = st.from_bytes(data, trusted=__name__)
    assert back[0].__annotations__ == annotated.__annotations__
    assert "__annotations__" not in object.__getattribute__(back[1], "__dict__")


def test_no_property_of_an_object_is_read_while_it_is_built():
    nodes = [
        ["object", 0, [None]],
        ["wrapper", 0, [0], "w"],
        ["partial", ["function", f"{__name__}:note"], [], [], [], None],
        ["wrapper", 0, [2], "w"],
        ["tuple", [1, 3]],
    ]
    first, _ = load(nodes, [net()], [Net, note])
    assert object.__getattribute__(first, "__dict__")["__module__"] == __name__


def test_no_attribute_of_what_stands_for_a_dtype_or_a_sharding_is_read():
    for place in (["struct", [], 0, False, None], ["struct", [], ["dtype", "int8"], False, 0]):
        with pytest.raises(st.errors.FormatError):
            load([["object", 0, [None]], place], [net()], Net)


def test_an_attribute_cannot_stand_in_for_a_method():
    for name in ("check", "plain", "__wrapped__", "__class__", "__getattr__"):
        with pytest.raises(st.errors.FormatError):
            load([["object", 0, [None, RELU]]], [net(extra=[name])], Net)
    identity = {"name": "equinox.nn:Identity", "kind": "module", "fields": [], "extra": ["shape"]}
    with pytest.raises(st.errors.FormatError):  # instances of classes of libraries have no other attributes
        load([["object", 0, [None]]], [identity])
    model = Net(1)
    object.__setattr__(model, "check", jax.nn.relu)
    with pytest.raises(st.errors.UnserialisableError, match="no field of its class"):
        st.to_bytes(model)


def test_what_a_wrapper_wraps_is_a_field():
    for field in ("gone", "__wrapped__", ""):
        with pytest.raises(st.errors.FormatError, match="no field"):
            load([["wrapper", 0, [None], field]], [net()], Net)


def test_wrappers_come_back():
    for make in (eqx.filter_grad, eqx.filter_value_and_grad, eqx.filter_vmap):
        for function in (jax.nn.relu, eqx.nn.Identity(), functools.partial(jax.nn.leaky_relu, 0.1)):
            wrapper = make(function)
            data = st.to_bytes([wrapper])
            is_wrapper = any(node[0] == "wrapper" for node in Draft(data).manifest["nodes"])
            assert function is not jax.nn.relu or is_wrapper
            (back,) = st.from_bytes(data)
            for name in ("__name__", "__qualname__", "__module__", "__doc__"):
                assert getattr(back, name, None) == getattr(wrapper, name, None), name
    back = st.from_bytes(st.to_bytes(eqx.module_update_wrapper(Wrapper(described))), trusted="tests")
    assert (back.__doc__, back.__name__, back(3)) == (described.__doc__, "described", 3)


EVALUATORS = """
    jax.export:Exported jax._src.export._export:Exported jax._src.api:VJP jax._src.core:MemorySpace
    jax._src.callback:_FlatCallback jax.experimental.sparse:BCOO flax.linen:Sequential flax.linen:Dense
    flax.linen.module:SetupState chex:dataclass chex:ChexVariantType optax:MultiSteps sharedtree:Exported
    jax.tree_util:Partial jax._src.debugger.core:DebuggerFrame
"""


def test_classes_that_evaluate_what_they_hold_are_not_allowed():
    for name, trusted in itertools.product(
        EVALUATORS.split(), [(), ("jax", "flax", "optax", "chex", "sharedtree", "equinox")]
    ):
        package = name.partition(":")[0].partition(".")[0]
        if package in ("jax", "sharedtree") or find_spec(package):
            for atom in (["class", name], ["function", f"{name}.call"], ["function", f"{name}.__call__"]):
                with pytest.raises((st.errors.UntrustedTypeError, st.errors.StructureMismatchError)):
                    pytest.fail(repr(st.from_bytes(naming(atom), trusted=trusted)))


def test_methods_are_requests():
    data = st.to_bytes({"call": eqx.nn.Identity().__call__, "own": Net(1).plain})
    requests = {r.name: r for r in st.audit(data, trusted=Net).requests if r.kind == "method"}
    assert {name: r.allowed for name, r in requests.items()} == {
        "equinox.nn:Identity.__call__": True,
        f"{name_of(Net)}.plain": True,
    }
    assert requests["equinox.nn:Identity.__call__"].paths == ("['call']",)
    assert {r.name for r in st.audit(data).refused} == {name_of(Net), f"{name_of(Net)}.plain"}


def test_of_classes_of_libraries_only_public_methods():
    identity = {"name": "equinox.nn:Identity", "kind": "module", "fields": []}
    for method in ("__init__", "__hash__", "__eq__", "_private"):
        for kind in ("method", "bound"):
            with pytest.raises(st.SharedTreeError):
                load([["object", 0, []], [kind, 0, method]], [identity])
    state = {"name": "optax:ScaleByAdamState", "kind": "namedtuple", "fields": ["count", "mu", "nu"]}
    pytest.importorskip("optax")
    with pytest.raises(st.errors.UntrustedTypeError) as caught:  # and of other libraries none
        load([["object", 0, [None] * 3], ["method", 0, "_asdict"]], [state])
    assert caught.value.names == ("optax:ScaleByAdamState._asdict",)


def test_inherited_methods_are_judged_by_where_they_are_defined():
    nodes = [["object", 0, [None]], ["method", 0, "inherited"]]
    entry = {"name": name_of(Mixed), "kind": "module", "fields": ["w"]}
    for trusted in ([Mixed], [__name__]):
        with pytest.raises(st.errors.UntrustedTypeError, match="another_package"):
            load(nodes, [entry], trusted)
        for more in (Stranger, Stranger.inherited, f"{name_of(Mixed)}.inherited"):
            assert load(nodes, [entry], [*trusted, more])() == "from elsewhere"
    model = {"method": Mixed(1).inherited}  # in a template they are trusted
    assert st.from_bytes(st.to_bytes(model), like=model)["method"]() == "from elsewhere"


@pytest.mark.parametrize(
    "nodes",
    [
        [["method", None, "x"]],
        [["method", RELU, "x"]],
        [["list", []], ["method", 0, "append"]],
        [["partial", RELU, [], [], [], None], ["method", 0, "__call__"]],
        [["bound", ["class", "equinox.nn:Linear"], "__call__"]],
        [["method", ["class", "equinox.nn:Linear"], "a.b"]],
    ],
)
def test_methods_of_what_has_no_class_of_a_known_name(nodes):
    with pytest.raises(st.errors.FormatError, match="class of a known name"):
        load(nodes)


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """A package with modules that do something when they are imported."""
    folder = tmp_path / "package_of_programs"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    for name in ("__main__", "setup", "conftest", "tests"):
        (folder / f"{name}.py").write_text("raise AssertionError('it was run')")
    (folder / "leaving.py").write_text("raise SystemExit(3)")
    (folder / "interrupted.py").write_text("raise KeyboardInterrupt")
    monkeypatch.syspath_prepend(tmp_path)
    yield folder.name
    for name in [name for name in sys.modules if name.partition(".")[0] == folder.name]:
        del sys.modules[name]


@pytest.mark.parametrize("module", ["__main__", "setup", "conftest", "tests", "tests.deeper", "leaving", "interrupted"])
def test_nothing_of_a_trusted_package_is_imported(programs, module):
    """Modules that end the program when they are imported among them."""
    data = naming(["class", f"{programs}.{module}:Model"])
    before = set(sys.modules)
    with pytest.raises(st.errors.UntrustedTypeError, match=f"import {programs}"):
        st.from_bytes(data, trusted=programs)
    (request,) = st.audit(data, trusted=programs).requests
    assert (request.allowed, request.found) == (True, False)
    assert request.not_imported in (f"{programs}.{module}", programs)
    assert not {name for name in set(sys.modules) - before if name.startswith(programs)}


def test_a_bound_method_is_still_what_it_was():
    identity = eqx.nn.Identity()
    back = st.from_bytes(st.to_bytes(identity.__call__))
    assert type(back) is type(identity.__call__)
    assert back(3) == 3
    bound = Quiet(3).double
    assert Draft(st.to_bytes(bound)).manifest["nodes"][-1] == ["bound", 0, "double"]
    for original in (bound, bound.__call__):
        back = st.from_bytes(st.to_bytes(original), trusted=Quiet)
        assert type(back) is type(original)
        assert back() == 6


freed: list[str] = []


class WithFinaliser:
    def __del__(self) -> None:
        freed.append(type(self).__name__)


@dataclasses.dataclass
class DataclassWithFinaliser:
    x: int = 0

    def __del__(self) -> None:
        freed.append(type(self).__name__)


@pytest.mark.parametrize("cls", [WithFinaliser, DataclassWithFinaliser])
def test_no_instance_is_made_of_a_class_that_is_refused(cls, monkeypatch):
    """A blank one would run its `__del__`. Files may name all classes in modules of known libraries."""
    monkeypatch.setitem(vars(eqx), "Held", cls)
    for use in ({"kind": "registered"}, {"kind": "module", "fields": []}, {"kind": "dataclass", "fields": []}):
        data = file_of([["tuple", [["class", "equinox:Held"]]]], types=[{"name": "equinox:Held", **use}])
        for trusted in ((), "equinox"):
            with pytest.raises(st.errors.UntrustedTypeError):
                st.from_bytes(data, trusted=trusted)
            assert not st.audit(data, trusted=trusted).requests[0].allowed
    assert not freed
