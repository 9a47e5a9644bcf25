"""No attribute that a class does not declare comes from a file, whatever its name.

Notebooks, NumPy and what makes JSON ask any object for attributes of certain names, and call what they get. A file
could put one of the functions there that it may name.
"""

import dataclasses
import enum
import functools
import itertools
import json
from typing import Any, NamedTuple

import equinox as eqx
import hypothesis
import hypothesis.strategies as hs
import jax
import pytest

import sharedtree as st

from .containers import file_of
from .drafts import Draft

RELU = ["function", "jax.nn:relu"]

ASKED = [
    "_repr_html_", "_repr_mimebundle_", "_repr_pretty_", "_repr_png_", "_ipython_display_",
    "_ipython_key_completions_", "_ipython_canary_method_should_not_exist_", "__array__", "__array_interface__",
    "__array_struct__", "__array_ufunc__", "__array_priority__", "__array_namespace__", "__array_function__",
    "__jax_array__", "__call__", "__len__", "__get__", "__iter__", "__index__", "__fspath__", "__deepcopy__",
    "__copy__", "__reduce__", "__reduce_ex__", "__getstate__", "__getattr__", "__class__", "__dict__", "__slots__",
    "__html__", "__rich__", "__rich_repr__", "__treescope_repr__", "__pretty__", "__wrapped__", "__signature__",
    "__dlpack__", "__cuda_array_interface__", "__geo_interface__", "__annotations__", "__sharedtree_migrate__",
    "__sharedtree_names__", "_asdict", "_replace", "_make", "tolist", "for_json", "to_json", "to_dict", "_mpl_repr_",
    "getdoc", "to_numpy", "_sympy_", "_latex_",
]  # fmt: skip
PLAIN = ["x", "cache", "_x", "shape", "dtype", "keys", "items", "fileno", "read", "item", "ö"]


class Module(eqx.Module):
    w: Any


class Child(Module):
    pass


@dataclasses.dataclass
class Data:
    w: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    w: Any


@dataclasses.dataclass
class WithValues:
    """Plain values of a class declare attributes, but none for which notebooks ask."""

    w: Any
    _repr_html_ = None
    cache = None
    x = 3


class _Named(NamedTuple):
    w: Any


class Named(_Named):
    pass


class Mutable(st.Module):
    def __init__(self):
        self.w = 1


class Listing(eqx.Module):
    w: Any
    __sharedtree_attributes__ = "cache", "_repr_html_", "__array__"


class ListingChild(Listing):
    v: Any
    __sharedtree_attributes__ = "x"


class Flags(enum.Flag):
    A = 1
    B = 2


MADE = {
    Module: "module", Child: "module", Data: "dataclass", Frozen: "dataclass", WithValues: "dataclass",
    Named: "namedtuple",
}  # fmt: skip
LIBRARIES = {
    "equinox.nn:Identity": "module",
    "optax:EmptyState": "namedtuple",
    "equinox.nn._shared:SharedNode": "placeholder",
}


def type_of(cls, kind, **more):
    return {"name": f"{__name__}:{cls.__qualname__}", "kind": kind, "fields": ["w"], **more}


def is_declared(cls, name):
    return cls is WithValues and name in ("cache", "x")


def refused(nodes, types, **options):
    """Whether all ways to load a file refuse it."""
    data = file_of(nodes, types=types)
    for like in (False, True):
        with pytest.raises(st.SharedTreeError) as caught:
            st.load(data, trusted=__name__, **options, **({"like": Module(1), "strict": False} if like else {}))
        if not isinstance(caught.value, st.errors.FormatError | st.errors.StructureMismatchError):
            return False
    return True


def forged_with(name, value=RELU):
    """Files of each kind of class, in which an instance has one attribute more, wherever a file could say so."""
    for cls, kind in MADE.items():
        if not is_declared(cls, name):
            yield [["object", 0, [["int", "1"], value]]], [type_of(cls, kind, extra=[name])]
        yield [["object", 0, [["int", "1"], value]]], [type_of(cls, kind, fields=["w", name])]
        if kind == "module":
            yield [["wrapper", 0, [RELU, value], "w"]], [type_of(cls, kind, extra=[name])]
    for cls, kind in LIBRARIES.items():
        yield [["object", 0, [value]]], [{"name": cls, "kind": kind, "fields": [], "extra": [name]}]
        yield [["object", 0, [value]]], [{"name": cls, "kind": kind, "fields": [name]}]


@pytest.mark.slow
@pytest.mark.parametrize("value", [RELU, ["int", "1"], None, "text"], ids=str)
def test_no_undeclared_attribute_of_any_kind(value):
    import optax  # noqa: F401

    for name in (*ASKED, *PLAIN):
        for nodes, types in forged_with(name, value):
            assert refused(nodes, types), (name, types)


@hypothesis.given(hs.text(min_size=1, max_size=12) | hs.sampled_from(ASKED).map(lambda name: f"_{name}"))
@hypothesis.settings(deadline=None)
@pytest.mark.slow
def test_whatever_the_name(name):
    wrappers = ("__module__", "__name__", "__qualname__", "__doc__")
    hypothesis.assume(name != "w" and name not in wrappers and name.isprintable())
    for nodes, types in itertools.islice(forged_with(name), 13):
        assert refused(nodes, types), (name, types)


@pytest.mark.parametrize("name", ["__module__", "__name__", "__qualname__", "__doc__"])
def test_the_wrappers_of_equinox_are_the_exception(name):
    module = st.load(file_of([["object", 0, [None, "text"]]], types=[type_of(Module, "module", extra=[name])]),
                     trusted=__name__)  # fmt: skip
    assert vars(module)[name] == "text"
    for cls in (Data, Frozen, WithValues, Named):
        assert refused([["object", 0, [None, "text"]]], [type_of(cls, MADE[cls], extra=[name])])


def open_trees():
    """Of kinds whose instances may have any attribute, one with an attribute, whose name is changed in the file."""
    mutable = Mutable()
    mutable.note = jax.nn.relu
    yield mutable
    partial = functools.partial(jax.nn.relu, 1)
    partial.note = jax.nn.relu
    yield partial
    pytest.importorskip("flax", minversion="0.12.1")  # files know others not
    nnx = pytest.importorskip("flax.nnx")
    layer = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    layer.note = jax.nn.relu
    yield layer
    yield nnx.State({"note": jax.nn.relu})


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.sampled(every=5)
def test_open_kinds_have_no_attribute_that_programs_ask_for(name):
    for tree in open_trees():
        draft = Draft(st.to_bytes(tree))
        back = st.load(draft.file(with_digests=True), trusted=[__name__, "flax"])
        assert back.note is jax.nn.relu
        text = json.dumps(draft.manifest).replace('"note"', f'"{name}"')
        draft.manifest_text = text.replace('".note"', f'".{name}"')
        if isinstance(tree, functools.partial) and name in ("__wrapped__", "__annotations__"):
            continue  # what `functools.update_wrapper` sets, which has tests of its own
        if name.startswith("_") and not name.endswith("_") and name != "_asdict":
            continue  # no other program knows such a name of an object that is no namedtuple
        with pytest.raises(st.errors.FormatError):
            st.load(draft.file(with_digests=True), trusted=[__name__, "flax"])


def test_what_would_not_be_loaded_is_not_saved():
    for name in (*ASKED, *PLAIN):
        for cls in (Module, Child, Data, WithValues):
            obj = object.__new__(cls)
            obj.__dict__.update({"w": 1, name: 2})
            if name == "__annotations__" or is_declared(cls, name):  # the first is never written
                continue
            with pytest.raises(st.errors.UnserialisableError, match="no field of its class") as caught:
                st.to_bytes(obj)
            assert name in str(caught.value)


def test_what_the_class_lists():
    listing = Listing(1)
    object.__setattr__(listing, "cache", [2])
    child = ListingChild(1, 2)
    object.__setattr__(child, "cache", listing)
    object.__setattr__(child, "x", listing)
    back = st.from_bytes(st.to_bytes(child), trusted=__name__)
    assert back.cache is back.x
    assert back.x.cache == [2]
    # A list does not help what other programs ask for, nor methods.
    for name in ("_repr_html_", "__array__", "other"):
        assert refused([["object", 0, [None, RELU]]], [type_of(Listing, "module", extra=[name])])


def test_a_file_of_an_undeclared_attribute_can_be_read_without_it():
    """As older versions wrote it."""
    nodes, types = [["object", 0, [["int", "1"], RELU]]], [type_of(Data, "dataclass", extra=["cache"])]
    with pytest.raises(st.errors.FormatError, match=r"does not declare") as caught:
        st.load(file_of(nodes, types=types), trusted=__name__)
    assert f'renames={{"{__name__}:Data.cache": None}}' in str(caught.value)
    back = st.load(file_of(nodes, types=types), trusted=__name__, renames={f"{__name__}:Data.cache": None})
    assert vars(back) == {"w": 1}
    for new in ("_repr_html_", "other"):
        assert refused(nodes, types, renames={f"{__name__}:Data.cache": new})


# --- flags ------------------------------------------------------------------------------------------------------------


def flags_of(number):
    return enum.Flag("Many", [f"M{i}" for i in range(number)], module=__name__)


def test_combinations_from_files_are_bounded():
    """The class keeps each for ever."""
    many = flags_of(40)
    entry = {"name": f"{__name__}:Many", "kind": "enum"}
    globals()["Many"] = many
    try:
        data = file_of(
            [*[["enum", 0, ["int", format(3 * i, "x")]] for i in range(1, 5000)], ["list", []]], types=[entry]
        )
        before = len(many._value2member_map_)
        for _ in range(3):
            with pytest.raises(st.errors.FormatError, match="too many combinations"):
                st.load(data, trusted=many)
        assert len(many._value2member_map_) - before <= 1100
        # What is there already, or was made by the program, is found all the same.
        own = many.M38 | many.M39 | many.M1
        assert st.from_bytes(st.to_bytes([own]), trusted=many)[0] is own
    finally:
        del globals()["Many"]


def test_a_combination_is_the_one_that_the_program_makes():
    (back,) = st.load(file_of([["enum", 0, ["int", "3"]], ["list", [0]]],
                              types=[{"name": f"{__name__}:Flags", "kind": "enum"}]), trusted=Flags)  # fmt: skip
    assert back is Flags.A | Flags.B


def test_one_combination_is_no_longer_than_flags_are():
    class Open(enum.IntFlag):
        A = 1

    globals()["Open"], Open.__qualname__ = Open, "Open"
    try:
        huge = "1" + "0" * 10_000
        data = file_of(
            [["enum", 0, ["int", huge]], ["list", [0]]], types=[{"name": f"{__name__}:Open", "kind": "enum"}]
        )
        with pytest.raises(st.errors.FormatError, match="too many bits"):
            st.load(data, trusted=Open)
    finally:
        del globals()["Open"]
