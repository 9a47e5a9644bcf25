"""Classes change: fields come and go, names change, and old files stay readable or say what to do."""

import abc
import dataclasses
import enum
import json
import sys
import types
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import sharedtree as st
from sharedtree._errors import FormatError, StructureMismatchError, UntrustedTypeError
from sharedtree.serialise.trust import _trust
from sharedtree.serialise.trust._trust import Trust
from sharedtree.serialise.values._decoding import decode
from sharedtree.serialise.values._encoding import encode
from sharedtree.serialise.values._manifest import parse_manifest


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


def saved(tree):
    return json.dumps(encode(tree).manifest)


def load(text, trusted=("evolving",), arrays=(), **options):
    return decode(parse_manifest(text), lambda i: arrays[i], Trust(trusted), **options)


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
    text = saved([(one := module.put(type(before.__name__, (before,), {}) if before is Before else before))(1, 2)] * 2)
    after = module.put(after)
    first, second = load(text)
    assert first is second
    assert type(first) is after
    assert (first.a, first.b, first.c, list(first.d)) == (1, 2, 5, [])
    assert one is not after


def test_default_factories_are_called_for_each(module):
    module.put(Before)
    text = saved([Before(1), Before(2)])
    module.put(After)
    first, second = load(text)
    assert first.d == second.d == []
    assert first.d is not second.d


def test_an_added_field_without_default(module):
    module.put(Before)
    text = saved(Before(1))

    class New(eqx.Module):
        a: Any
        b: Any
        depth: Any

    module.put(New)
    with pytest.raises(StructureMismatchError, match="has the field `depth`") as caught:
        load(text)
    assert 'renames={"evolving:Model.<its old name>": "depth"}' in str(caught.value)


class Smaller(eqx.Module):
    a: Any


def test_a_removed_field_is_an_error_until_dropped(module):
    module.put(Before)
    text = saved(Before(1, 7))
    module.put(Smaller)
    with pytest.raises(StructureMismatchError, match='renames={"evolving:Model.b": None}'):
        load(text)
    assert vars(load(text, renames={"evolving:Model.b": None})) == {"a": 1}


def test_renamed_fields_and_classes(module):
    module.put(Before)
    text = saved(Before(1, 7))
    del module.Model

    class New(eqx.Module):
        kernel: Any
        b: Any

    module.put(New, "New")
    with pytest.raises(StructureMismatchError, match="nothing of that name"):
        load(text)
    for target in ("evolving:New", New):
        back = load(text, renames={"evolving:Model": target, "evolving:Model.a": "kernel"})
        assert (type(back), back.kernel, back.b) == (New, 1, 7)
    back = load(text, trusted=(), renames={"evolving:Model": New, "evolving:New.a": "kernel"})
    assert back.kernel == 1
    with pytest.raises(UntrustedTypeError):
        load(text, trusted=(), renames={"evolving:Model": "evolving:New"})
    with pytest.raises(UntrustedTypeError):
        load(text, renames={"evolving:Model": "os:system"})


def test_nonsense_in_renames(module):
    module.put(Before)
    text = saved(Before(1))
    for renames in ({"evolving:Model": None}, {"evolving:Model.a": "b"}, {"evolving:Model.a": "no name"}):
        with pytest.raises(StructureMismatchError):
            load(text, renames=renames)


def test_a_new_name_that_leads_nowhere(module):
    module.put(Before)
    text = saved(Before(1))
    with pytest.raises(StructureMismatchError, match="`evolving:Typo`: `evolving` holds nothing") as caught:
        load(text, renames={"evolving:Model": "evolving:Typo"})
    assert 'renames={"evolving:Model": "new_module:NewName"}' in str(caught.value)


def test_a_class_lists_its_former_names(module):
    module.put(Before)
    text = saved(Before(1))
    del module.Model

    class New(eqx.Module):
        __sharedtree_names__ = ("evolving:Model",)
        a: Any
        b: Any

    module.put(New, "New")
    assert type(load(text)) is New
    assert type(load(text, trusted=[New])) is New
    with pytest.raises(UntrustedTypeError):
        load(text, trusted=())


def test_former_names_are_looked_for_once(monkeypatch, tmp_path):
    """Of each module of a trusted package, however many names lead nowhere; of modules loaded meanwhile, too."""
    package = tmp_path / "evolving_package"
    package.mkdir()
    code = "import equinox as eqx\nclass New(eqx.Module):\n    __sharedtree_names__ = 'evolving_package.{}:Old'\n"
    (package / "__init__.py").write_text(code.format("gone"))
    (package / "later.py").write_text(code.format("later"))
    monkeypatch.syspath_prepend(tmp_path)
    looked_at = []
    former_names_of = _trust._former_names_of
    monkeypatch.setattr(_trust, "_former_names_of", lambda obj: looked_at.append(obj) or former_names_of(obj))
    trust = Trust("evolving_package")
    try:
        found = trust.resolve("evolving_package.gone:Old", "class").obj
        assert found is sys.modules["evolving_package"].New
        for i in range(100):
            assert not trust.resolve(f"evolving_package.gone:Nothing{i}", "class").found
        assert trust.resolve("evolving_package.later:Old", "class").obj is sys.modules["evolving_package.later"].New
        assert not trust.resolve("evolving_package.later:Nothing", "class").found
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "evolving_package"]:
            del sys.modules[name]
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
    text = saved(Before(3, 4))
    module.put(Versioned)
    back = load(text)
    assert (back.width, back.extra) == (12, 0)
    again = saved(back)
    assert json.loads(again)["types"][0]["version"] == 2
    assert load(again).width == 12


def test_versions_that_nothing_translates(module):
    new = module.put(type("V", (Smaller,), {"__sharedtree_version__": 3}))
    text = saved(new(1))
    module.put(type("V", (Smaller,), {"__sharedtree_version__": 2}))
    with pytest.raises(StructureMismatchError, match="newer code"):
        load(text)
    module.put(type("V", (Smaller,), {"__sharedtree_version__": 4}))
    with pytest.raises(StructureMismatchError, match="__sharedtree_migrate__"):
        load(text)

    def fail(cls, fields, version):
        raise KeyError("x")

    module.put(type("V", (Smaller,), {"__sharedtree_version__": 4, "__sharedtree_migrate__": classmethod(fail)}))
    with pytest.raises(StructureMismatchError, match="raised KeyError"):
        load(text)
    unknown = classmethod(lambda cls, fields, version: {"odd": 1, "a": 2})
    module.put(type("V", (Smaller,), {"__sharedtree_version__": 4, "__sharedtree_migrate__": unknown}))
    with pytest.raises(StructureMismatchError, match="`odd`"):
        load(text)


def test_fields_that_were_missing_are_not_given_defaults(module):
    module.put(After)
    model = object.__new__(After)
    object.__setattr__(model, "a", 1)
    assert vars(load(saved(model))) == {"a": 1}


def test_attributes_that_no_save_would_write(module):
    module.put(DataAfter)
    manifest = json.loads(saved(DataAfter(1, 2)))
    manifest["types"][0]["extra"] = ["__class__"]
    manifest["nodes"][-1][2].append(None)
    with pytest.raises(FormatError, match="__class__"):
        load(json.dumps(manifest))


class Kind(enum.Enum):
    A = 1
    B = 2


def test_a_member_of_an_enum_that_is_gone(module):
    module.put(Kind)
    text = saved(Kind.B)
    module.put(enum.Enum("Kind", {"A": 1}))
    with pytest.raises(StructureMismatchError, match="no member `B`"):
        load(text)
    module.put(enum.Enum("Kind", {"A": 1, "C": 2, "B": 2}))
    assert load(text).name == "C"


def test_a_class_that_became_something_else(module):
    module.put(Before)
    text = saved(Before(1))
    module.put(type("Plain", (), {}))
    with pytest.raises(UntrustedTypeError, match="neither a registered pytree node"):
        load(text)
    module.put(Kind)
    with pytest.raises(StructureMismatchError, match="is none now"):
        load(text)


def test_an_abstract_class_has_no_instances(module):
    module.put(Before)
    text = saved(Before(1))

    class Abstract(eqx.Module):
        a: Any
        b: Any

        @abc.abstractmethod
        def call(self): ...

    module.put(Abstract)
    with pytest.raises(StructureMismatchError, match="abstract"):
        load(text)


# --- `sharedtree.Module`s, which have kinds beside their attributes ---------------------------------------------------


class Averaged(st.Module):
    def __init__(self):
        self.w = st.parameter(jnp.ones(2))
        self.mean = st.state_field(jnp.zeros(2))
        self.n = 3


def paths(tree):
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def loaded_after(module, migrate, **attributes):
    """What is loaded of an `Averaged` by a newer class that has this migration."""
    text, arrays = encoded(module.put(type("Averaged", (Averaged,), {}))())
    hook = classmethod(lambda cls, fields, version: migrate(fields))
    module.put(type("New", (st.Module,), {"__sharedtree_version__": 1, "__sharedtree_migrate__": hook, **attributes}))
    return load(text, arrays=arrays)


def encoded(tree):
    made = encode(tree)
    return json.dumps(made.manifest), made.arrays


def test_migration_keeps_the_kinds_of_a_module(module):
    seen = []

    def migrate(fields):
        seen.append(sorted(fields))
        return {"w": fields["w"] * 2, "mean": fields["mean"], "n": fields["n"]}

    model = loaded_after(module, migrate)
    assert seen == [["mean", "n", "w"]]
    assert paths(model) == [".w", ".mean"]
    assert paths(model.parameters()) == [".w"]
    assert model.n == 3
    assert model.w.tolist() == [2, 2]
    twin = Averaged()
    assert paths(twin) == paths(model)
    assert paths(twin.parameters()) == paths(model.parameters())


def test_what_migration_returns_is_as_if_assigned(module):
    def migrate(fields):
        return {"kernel": st.parameter(fields["w"]), "n": jnp.ones(1), "mean": 0.5, "bias": jnp.ones(3), "mode": "eval"}

    model = loaded_after(module, migrate)
    twin = Averaged()
    del twin.w
    twin.mean, twin.n = 0.5, jnp.ones(1)
    twin.kernel, twin.bias, twin.mode = st.parameter(jnp.ones(2)), jnp.ones(3), "eval"
    assert paths(model) == paths(twin) == [".mean", ".n", ".kernel", ".bias"]
    assert paths(model.parameters()) == paths(twin.parameters()) == [".kernel"]
    assert model.mode == "eval"
    assert "w" not in vars(model)
    again = st.from_bytes(st.to_bytes(model), trusted=["evolving"])
    assert jax.tree.structure(again) == jax.tree.structure(model)


@pytest.mark.parametrize(
    "name", ["call", "size", "parameters", "_sharedtree_kinds", "__class__", "__dict__", "no name", "", 3]
)
def test_migration_cannot_put_anything_in_the_place_of_what_the_class_defines(module, name):
    own = {"call": lambda self: 1, "size": property(lambda self: 2)}
    with pytest.raises(StructureMismatchError, match="has for something else"):
        loaded_after(module, lambda fields: {**fields, name: 1}, **own)


def test_what_cannot_be_assigned_cannot_come_from_a_migration(module):
    with pytest.raises(st.UnregisteredTypeError, match=r"`Model\.w` is a parameter, and 'text'"):
        loaded_after(module, lambda fields: {"w": "text"})


@dataclasses.dataclass(eq=False, repr=False)
class DeclaredKinds(st.Module):
    kernel: Any = st.parameter()  # noqa: RUF009 -- declares a field
    count: Any = st.state_field(default=0)  # noqa: RUF009
    sizes: Any = eqx.field(static=True, default=(1, 2))  # noqa: RUF009

    @classmethod
    def __sharedtree_migrate__(cls, fields, version):
        return {"kernel": fields["w"]}


def test_migration_to_declared_kinds(module):
    text, arrays = encoded(module.put(type("Averaged", (Averaged,), {}))())
    module.put(DeclaredKinds)
    model = load(text, arrays=arrays)
    assert paths(model) == [".kernel", ".count"]
    assert paths(model.parameters()) == [".kernel"]
    assert model.sizes == (1, 2)


def test_renaming_and_migrating_at_once(module):
    text, arrays = encoded(module.put(type("Averaged", (Averaged,), {}))())
    hook = classmethod(lambda cls, fields, version: {"kernel": fields["kernel"] * 3, "mean": fields["mean"]})
    module.put(type("New", (st.Module,), {"__sharedtree_version__": 1, "__sharedtree_migrate__": hook}))
    model = load(text, arrays=arrays, renames={"evolving:Model.w": "kernel", "evolving:Model.n": None})
    assert paths(model) == [".kernel", ".mean"]
    assert paths(model.parameters()) == [".kernel"]


@pytest.mark.parametrize(
    "pair", [("_sharedtree_kinds", None), ("_sharedtree_kinds", "kinds"), ("n", "_sharedtree_kinds")]
)
def test_renames_cannot_take_the_kinds_away(module, pair):
    text, arrays = encoded(module.put(type("Averaged", (Averaged,), {}))())
    with pytest.raises(StructureMismatchError, match="is no attribute"):
        load(text, arrays=arrays, renames={f"evolving:Model.{pair[0]}": pair[1]})
