"""Classes change: fields come and go, names change, and old files stay readable or say what to do."""

import abc
import dataclasses
import enum
import importlib
import sys
import types
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import sharedtree as st
from sharedtree.serialise.trust import _trusted_names

from .containers import naming
from .drafts import Draft


@pytest.fixture
def module(monkeypatch):
    """A module of the user's, in which classes are replaced by newer ones."""
    made = types.ModuleType("evolving")
    monkeypatch.setitem(sys.modules, "evolving", made)

    def put(cls, name="Model"):
        cls.__module__, cls.__qualname__, cls.__name__ = "evolving", name, name
        setattr(made, name, cls)
        return cls

    made.put = put
    return made


def load(data, trusted="evolving", **options):
    return st.from_bytes(data, trusted=trusted, **options)


@pytest.fixture
def before(module):
    """The file of a `Before`, as a class of the user's module."""
    return st.to_bytes(module.put(Before)(1, 7))


class Before(eqx.Module):
    a: Any
    b: Any = 2


class After(eqx.Module):
    a: Any
    b: Any
    c: Any = 5
    d: Any = eqx.field(default_factory=list)


@dataclasses.dataclass
class DataAfter:
    b: Any
    a: Any
    c: Any = 5
    d: Any = dataclasses.field(default_factory=list)


class TupleBefore(NamedTuple):
    a: Any
    b: Any


class TupleAfter(NamedTuple):
    b: Any
    a: Any
    c: Any = 5
    d: Any = ()


@pytest.mark.parametrize("after", [After, DataAfter, TupleAfter])
@pytest.mark.parametrize("before", [Before, TupleBefore])
def test_added_fields_take_their_defaults(module, before, after):
    one = module.put(before)(1, 2)
    data = st.to_bytes([one, one])
    module.put(after)
    first, second = load(data)
    assert first is second
    assert type(first) is after
    assert (first.a, first.b, first.c, list(first.d)) == (1, 2, 5, [])


def test_default_factories_are_called_for_each(module):
    module.put(Before)
    data = st.to_bytes([Before(1), Before(2)])
    module.put(After)
    first, second = load(data)
    assert first.d == second.d == []
    assert first.d is not second.d
    model = object.__new__(After)  # fields that were missing are not given defaults
    object.__setattr__(model, "a", 1)
    assert vars(load(st.to_bytes(model))) == {"a": 1}


class Deeper(eqx.Module):
    a: Any
    b: Any
    depth: Any


def test_an_added_field_without_default(module, before):
    module.put(Deeper)
    with pytest.raises(st.errors.StructureMismatchError, match="has the field `depth`") as caught:
        load(before)
    assert 'renames={"evolving:Model.<its old name>": "depth"}' in str(caught.value)


class Smaller(eqx.Module):
    a: Any


def test_a_removed_field_is_an_error_until_dropped(module, before):
    module.put(Smaller)
    with pytest.raises(st.errors.StructureMismatchError, match='renames={"evolving:Model.b": None}'):
        load(before)
    assert vars(load(before, renames={"evolving:Model.b": None})) == {"a": 1}


class Renamed(eqx.Module):
    kernel: Any
    b: Any


def test_renamed_fields_and_classes(module, before):
    del module.Model
    module.put(Renamed, "New")
    with pytest.raises(st.errors.StructureMismatchError, match="nothing of that name"):
        load(before)
    for target in ("evolving:New", Renamed):
        back = load(before, renames={"evolving:Model": target, "evolving:Model.a": "kernel"})
        assert (type(back), back.kernel, back.b) == (Renamed, 1, 7)
    back = load(before, trusted=(), renames={"evolving:Model": Renamed, "evolving:New.a": "kernel"})
    assert back.kernel == 1
    with pytest.raises(st.errors.UntrustedTypeError):
        load(before, trusted=(), renames={"evolving:Model": "evolving:New"})
    with pytest.raises(st.errors.UntrustedTypeError):
        load(before, renames={"evolving:Model": "os:system"})


def test_nonsense_in_renames(before):
    for renames in ({"evolving:Model": None}, {"evolving:Model.a": "b"}, {"evolving:Model.a": "no name"}):
        with pytest.raises(st.errors.StructureMismatchError):
            load(before, renames=renames)
    with pytest.raises(st.errors.StructureMismatchError, match="`evolving:Typo`: `evolving` holds nothing") as caught:
        load(before, renames={"evolving:Model": "evolving:Typo"})
    assert 'renames={"evolving:Model": "new_module:NewName"}' in str(caught.value)


def test_a_class_lists_its_former_names(module, before):
    del module.Model
    new = module.put(type("New", (Before,), {"__sharedtree_names__": ("evolving:Model",)}), "New")
    assert type(load(before)) is new
    assert type(load(before, trusted=[new])) is new
    with pytest.raises(st.errors.UntrustedTypeError):
        load(before, trusted=())


def test_former_names_are_looked_for_once(monkeypatch, tmp_path):
    """Of each module of a trusted package, however many names lead nowhere."""
    package = tmp_path / "evolving_package"
    package.mkdir()
    code = "import equinox as eqx\nclass New(eqx.Module):\n    __sharedtree_names__ = 'evolving_package.{}:Old'\n"
    (package / "__init__.py").write_text(code.format("gone"))
    (package / "later.py").write_text(code.format("later"))
    monkeypatch.syspath_prepend(tmp_path)
    looked_at = []
    former_names_of = _trusted_names._former_names_of
    monkeypatch.setattr(_trusted_names, "_former_names_of", lambda obj: looked_at.append(obj) or former_names_of(obj))
    names = ["gone:Old", *(f"gone:Nothing{i}" for i in range(100)), "later:Old", "later:Nothing"]
    data = naming(*[["class", f"evolving_package.{name}"] for name in names])
    importlib.import_module("evolving_package.later")
    try:
        requests = st.audit(data, trusted="evolving_package").requests
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "evolving_package"]:
            del sys.modules[name]
    assert [request.name.partition(".")[2] for request in requests if request.found] == ["gone:Old", "later:Old"]
    assert len([obj for obj in looked_at if obj is eqx]) == 2  # in each of the two modules


class Versioned(eqx.Module):
    __sharedtree_version__ = 2
    width: Any
    extra: Any = 0

    @classmethod
    def __sharedtree_migrate__(cls, fields, version):
        assert version == 0
        return {"width": fields["a"] * fields["b"]}


def test_migration(module):
    module.put(Before)
    data = st.to_bytes(Before(3, 4))
    module.put(Versioned)
    back = load(data)
    assert (back.width, back.extra) == (12, 0)
    again = st.to_bytes(back)
    assert Draft(again).manifest["types"][0]["version"] == 2
    assert load(again).width == 12


def test_versions_that_nothing_translates(module):
    def fail(cls, fields, version):
        raise KeyError("x")

    def add(cls, fields, version):
        return {"odd": 1, "a": 2}

    def put(version, **hooks):
        hooks = {f"__sharedtree_{name}__": classmethod(hook) for name, hook in hooks.items()}
        return module.put(type("V", (Smaller,), {"__sharedtree_version__": version, **hooks}))

    data = st.to_bytes(put(3)(1))
    for version, hooks, words in (
        (2, {}, "newer code"), (4, {}, "__sharedtree_migrate__"), (4, {"migrate": fail}, "raised KeyError"),
        (4, {"migrate": add}, "`odd`"),
    ):  # fmt: skip
        put(version, **hooks)
        with pytest.raises(st.errors.StructureMismatchError, match=words):
            load(data)


class Kind(enum.Enum):
    A = 1
    B = 2


def test_a_member_of_an_enum_that_is_gone(module):
    module.put(Kind)
    data = st.to_bytes(Kind.B)
    module.put(enum.Enum("Kind", {"A": 1}))
    with pytest.raises(st.errors.StructureMismatchError, match="no member `B`"):
        load(data)
    module.put(enum.Enum("Kind", {"A": 1, "C": 2, "B": 2}))
    assert load(data).name == "C"


class Abstract(eqx.Module):
    a: Any
    b: Any

    @abc.abstractmethod
    def call(self): ...


def test_a_class_that_became_something_else(module, before):
    for cls, error, words in (
        (type("Plain", (), {}), st.errors.UntrustedTypeError, "neither a registered pytree node"),
        (Kind, st.errors.StructureMismatchError, "is none now"),
        (Abstract, st.errors.StructureMismatchError, "abstract"),
    ):
        module.put(cls)
        with pytest.raises(error, match=words):
            load(before)


# --- `sharedtree.Module`s and those of NNX, which note a kind of each attribute ---------------------------------------


class Averaged(st.Module):
    def __init__(self):
        self.w = st.parameter(jnp.ones(2))
        self.mean = st.state_field(jnp.zeros(2))
        self.n = 3


class OfModules(NamedTuple):
    """A library whose modules note something of each attribute."""

    model: Any
    parameter: Any
    marks: str  # where it is noted
    reserved: tuple[str, ...]  # names that no migration may return
    wrong: tuple[Any, ...]  # attributes that cannot be assigned, the error, and what it says

    def noted(self, model):
        marks = getattr(model, self.marks)
        marks = getattr(marks, "by_name", marks)
        return {name: marks[name] for name in marks if not name.startswith("_")}


def of_sharedtree():
    wrong = {"w": "text"}, st.errors.UnregisteredTypeError, r"`Model\.w` is a parameter, and cannot be 'text'"
    return OfModules(Averaged, st.parameter, "_sharedtree_kinds", ("parameters", "no name", "", 3), wrong)


def of_nnx():
    pytest.importorskip("flax", minversion="0.12.1")
    nnx = pytest.importorskip("flax.nnx")

    class Marked(nnx.Module):
        def __init__(self):
            self.w, self.mean, self.n = nnx.Param(jnp.ones(2)), nnx.data([1.5, 2.5]), 3

    wrong = {"lengths": nnx.data([1.5])}, st.errors.StructureMismatchError, "a declaration as `lengths`"
    return OfModules(Marked, nnx.Param, "_pytree__nodes", ("train", "_pytree__state", "_pytree__other"), wrong)


@pytest.fixture(params=[of_sharedtree, of_nnx])
def library(request):
    return request.param()


def paths(tree):
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def saved(module, model):
    """The file of an instance of a class, as a class of the user's module."""
    return st.to_bytes(module.put(type("Old", (model,), {}))())


def loaded_after(module, library, migrate, renames=(), **attributes):
    """What is loaded of a library's model by a newer class that has this migration."""
    data, base = saved(module, library.model), library.model.__base__
    hook = classmethod(lambda cls, fields, version: migrate(fields))
    module.put(type("New", (base,), {"__sharedtree_version__": 1, "__sharedtree_migrate__": hook, **attributes}))
    return load(data, ["evolving", "flax"], renames=dict(renames))


def test_migration_keeps_what_is_noted_of_attributes(module, library):
    def migrate(fields):
        assert sorted(fields) == ["mean", "n", "w"]
        return {**fields, "n": 4}

    model, twin = loaded_after(module, library, migrate), library.model()
    assert library.noted(model) == library.noted(twin)
    assert paths(model) == paths(twin)
    assert model.n == 4


def test_a_dropped_attribute_leaves_no_note(module, library):
    """A new attribute of its name is noted as what it is."""
    data, twin = saved(module, library.model), library.model()
    module.put(type("New", (library.model.__base__,), {}))
    renames = {"evolving:Model.mean": None, "evolving:Model.n": None}
    model = load(data, ["evolving", "flax"], renames=renames)
    del twin.mean, twin.n
    for each in (model, twin):
        each.mean, each.n = "text", "text"
    assert library.noted(model) == library.noted(twin)
    assert paths(model) == paths(twin)


def test_a_field_that_has_the_name_of_a_dropped_one_keeps_its_own_kind(module):
    averaged = dataclasses.make_dataclass("Model", ["w", "mean"], bases=(st.Module,))
    old = module.put(averaged)(st.parameter(jnp.ones(2)), st.state_field(jnp.zeros(2)))
    data = st.to_bytes(old)
    module.put(dataclasses.make_dataclass("Model", ["mean"], bases=(st.Module,)))
    for renames in ({"w": "mean", "mean": None}, {"mean": None, "w": "mean"}):
        model = load(data, ["evolving"], renames={f"evolving:Model.{name}": new for name, new in renames.items()})
        assert model.mean.tolist() == [1, 1]
        assert paths(model.parameters()) == [".mean"]


def test_what_migration_returns_is_as_if_assigned(module, library):
    new = {"kernel": library.parameter(jnp.ones(2)), "bias": jnp.ones(3), "mode": "eval"}
    if library.model is Averaged:  # NNX wants another mark for a value of another kind
        new |= {"mean": 0.5, "n": jnp.ones(1)}
    model = loaded_after(module, library, lambda fields: {"mean": fields["mean"], "n": fields["n"], **new})
    twin = library.model()
    del twin.w
    for name, value in new.items():
        setattr(twin, name, value)
    assert library.noted(model) == library.noted(twin)
    assert paths(model) == paths(twin)
    assert model.mode == "eval"
    assert "w" not in vars(model)
    again = load(st.to_bytes(model), ["evolving", "flax"])
    assert jax.tree.structure(again) == jax.tree.structure(model)


def test_what_cannot_be_assigned_cannot_come_from_a_migration(module, library):
    own = {"call": lambda self: 1, "size": property(lambda self: 2)}
    for name in ("call", "size", "__class__", "__dict__", library.marks, *library.reserved):
        with pytest.raises(st.errors.StructureMismatchError, match="has for something else"):
            loaded_after(module, library, lambda fields, name=name: {**fields, name: 1}, **own)
    wrong, error, words = library.wrong
    with pytest.raises(error, match=words):
        loaded_after(module, library, lambda fields: wrong)


@dataclasses.dataclass(eq=False, repr=False)
class DeclaredKinds(st.Module):
    kernel: Any = st.parameter()  # noqa: RUF009 -- declares a field
    count: Any = st.state_field(default=0)  # noqa: RUF009
    sizes: Any = eqx.field(static=True, default=(1, 2))  # noqa: RUF009

    @classmethod
    def __sharedtree_migrate__(cls, fields, version):
        return {"kernel": fields["w"]}


def test_migration_to_declared_kinds(module):
    data = saved(module, Averaged)
    module.put(DeclaredKinds)
    model = load(data)
    assert paths(model) == [".kernel", ".count"]
    assert paths(model.parameters()) == [".kernel"]
    assert model.sizes == (1, 2)


def test_dropping_and_migrating_at_once(module, library):
    def migrate(fields):
        return {"kernel": fields["w"], "mean": fields["mean"]}

    model, twin = loaded_after(module, library, migrate, {"evolving:Model.n": None}), library.model()
    noted = library.noted(twin)
    assert library.noted(model)["mean"] == noted["mean"]
    assert sorted(library.noted(model)) == ["kernel", "mean"]
    assert len(paths(model)) == len(paths(twin))
    data = saved(module, library.model)
    for old, new in ((library.marks, None), (library.marks, "marks"), ("n", library.marks)):
        with pytest.raises(st.errors.StructureMismatchError, match="is no attribute"):
            load(data, ["evolving", "flax"], renames={f"evolving:Model.{old}": new})
    for new in (library.reserved[0], "other"):
        with pytest.raises(st.errors.StructureMismatchError, match="the class declares neither"):
            load(data, ["evolving", "flax"], renames={"evolving:Model.n": new})
