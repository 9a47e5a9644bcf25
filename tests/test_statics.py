"""What is not traced is compared strictly, copied when it can be mutated, and refused where it cannot be compared."""

import collections
import copy
import dataclasses
import enum
import functools
import gc
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as hst

import sharedtree as st
from sharedtree.core import _static_values
from sharedtree.core._printing import shown
from sharedtree.core._static_values import Static, distinguishing_text, new_static_memo
from tests.garbage import collect_all
from tests.kinds import ByContent, Keyed, OwnDict, Unhashable, made
from tests.models import StaticField
from tests.strategies import Pair, Record


class Field:
    """A value in the auxiliary data. (Equinox, whose static fields are the same, warns of NumPy arrays in them.)"""

    def __init__(self, value):
        self.value = value


jax.tree_util.register_pytree_node(Field, lambda m: ((), m.value), lambda value, _: Field(value))


class Leaf(eqx.Module):
    """A value that is no array in an ordinary field: a static leaf."""

    value: object


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass(frozen=True)
class Config:
    scale: object


@dataclasses.dataclass(unsafe_hash=True)
class Hashable:
    """Can be hashed and mutated."""

    scale: int


Point = collections.namedtuple("Point", ["x", "y"])
Other = collections.namedtuple("Other", ["x", "y"])

NAN = float("nan")

DIFFERENT = [
    (1, True), (1, 1.0), (0.0, -0.0), (0j, -0j), (complex(0.0, 0.0), complex(0.0, -0.0)), (NAN, 1.0), ("a", b"a"),
    (range(2), range(3)), (slice(0, 1), slice(0, True)), ((1, 2), (1, 2.0)), ((1, 2), [1, 2]), ((1, 2), Point(1, 2)),
    (Point(1, 2), Other(1, 2)), (frozenset({1}), frozenset({True})), (frozenset({1}), {1}), (np.float32, np.float64),
    (np.sin, np.cos), (Color.RED, Color.BLUE), (ByContent(1), ByContent(2)), (Unhashable([1]), Unhashable([2])),
    (bytearray(b"a"), bytearray(b"b")), (2**80, 2**81), (Config(1), Config(1.0)),
    (Config(Config((1,))), Config(Config((1.0,)))), (Hashable(1), Hashable(2)),
    (functools.partial(max, 1, key=abs), functools.partial(max, 1.0, key=abs)),
    (functools.partial(max, 1, key=abs), functools.partial(max, 1, key=float)),
]  # fmt: skip

ONLY_IN_FIELDS = [  # elsewhere these are nodes, or traced
    ([1], [True]), ({"a": 1}, {"a": 1.0}), ({"a": 1}, {"b": 1}), ({1: "a"}, {True: "a"}),
    ({"a": 1}, collections.OrderedDict(a=1)),
    # A function can see the order, so a trace may depend on it.
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ({"a": 1}, OwnDict(a=1)), (OwnDict(a=1), OwnDict(a=True)),
    (collections.OrderedDict([("a", 1), ("b", 2)]), collections.OrderedDict([("b", 2), ("a", 1)])),
    (collections.defaultdict(int), collections.defaultdict(float)),
    (collections.deque([1], 2), collections.deque([1], 3)), ({1}, {True}), (np.zeros(2), np.zeros(2, np.float32)),
    (np.zeros(2), np.zeros((2, 1))), (np.zeros(2), -np.zeros(2)), (np.zeros(2), np.ones(2)),
    (np.float32(1), np.float64(1)), (np.float32(1), 1.0), (np.array([1, "x"], object), np.array([True, "x"], object)),
    ({"a": [1, {"b": (2,)}]}, {"a": [1, {"b": (2.0,)}]}), ((np.zeros(1),), (np.ones(1),)),
]  # fmt: skip

# Beside each of these, which is compared with a copy of itself. A copy of a number would be that number.
EQUAL = [
    lambda: float("nan"),
    lambda: complex(float("nan"), -0.0),
    lambda: "text" * 2,
    lambda: (1, (2.0, "x")),
    # A copy of a jitted function is another one.
    lambda: jnp.sin,
]

EQUAL_IN_FIELDS = [
    lambda: [1, [2, {"a": {3}}]],
    lambda: {"a": 1, "b": [NAN]},
    lambda: collections.defaultdict(list, {"a": [1]}),
    lambda: np.array([np.nan, 1.0]),
    lambda: np.asarray(np.arange(6).reshape(2, 3).T),
    lambda: np.array([[1], None], object),
    lambda: np.float32("nan"),
    lambda: {"config": (np.arange(2), [1])},
]


def is_one(a, b):
    return st.tree.structure(a) is st.tree.structure(b)


IN = [
    *((pair, module) for pair in DIFFERENT for module in (Field, StaticField, Leaf)),
    *((pair, Field) for pair in ONLY_IN_FIELDS),
]


@pytest.mark.parametrize(("pair", "module"), IN)
def test_different(pair, module):
    assert not is_one(*map(module, pair))
    for each in pair:
        assert is_one(module(each), module(copy.deepcopy(each)))


def test_equal():
    for make in EQUAL:
        for module in (Field, StaticField, Leaf):
            assert is_one(module(make()), module(make()))
            assert not is_one(module(make()), module(jnp.cos))
    for make in EQUAL_IN_FIELDS:
        assert is_one(Field(make()), Field(make()))
    assert is_one(Field({"a", "b", "c"}), Field({"c", "b", "a"}))


MUTATIONS = {
    "list": (lambda: [1, 2], lambda x: x.append(3)),
    "nested": (lambda: {"a": [1]}, lambda x: x["a"].append(2)),
    "in a tuple": (lambda: (1, [2]), lambda x: x[1].append(3)),
    "dict": (lambda: {"a": 1}, lambda x: x.update(b=2)),
    "set": (lambda: {1}, lambda x: x.add(2)),
    "ordered": (lambda: collections.OrderedDict(a=1), lambda x: x.update(b=2)),
    "deque": (lambda: collections.deque([1]), lambda x: x.append(2)),
    "array": (lambda: np.zeros(2), lambda x: x.__setitem__(0, 5.0)),
    "bytearray": (lambda: bytearray(b"a"), lambda x: x.extend(b"b")),
    "object": (lambda: Unhashable([1]), lambda x: x.value.append(2)),
    "hashable": (lambda: Hashable(1), lambda x: setattr(x, "scale", 7)),
    "partial": (lambda: functools.partial(print, {"by": 1}), lambda x: x.args[0].update(by=7)),
}


@pytest.mark.parametrize("kind", MUTATIONS)
def test_a_mutated_static_is_traced_once_more_and_each_trace_has_its_own_copy(kind):
    make, mutate = MUTATIONS[kind]
    seen = []

    @st.jit
    def f(m, x):
        seen.append(m.value)
        if kind not in ("object", "hashable"):
            mutate(m.value)  # of the trace's own copy; nobody else may notice
        return x + 1

    value, x = make(), jnp.zeros(())
    m = Field(value)
    f(m, x)
    f(m, x)
    assert len(seen) == 1
    assert st.tree.structure(m) is st.tree.structure(Field(make()))
    mutate(value)
    f(m, x)
    f(m, x)
    assert len(seen) == 2
    assert seen[0] is not value
    assert seen[1] is not value
    assert seen[1] is not seen[0]
    expected = make()
    mutate(expected)
    assert st.tree.structure(m) is st.tree.structure(Field(expected))
    f(Field(make()), x)
    assert len(seen) == 2


def fails(*_):
    raise RuntimeError("on purpose")


Raises = type("Raises", (), {"__eq__": fails, "__hash__": lambda self: 1})
ReturnsArray = type("ReturnsArray", (), {"__eq__": lambda self, _: np.array([True, False]), "__hash__": lambda self: 1})
CopyRaises = type("CopyRaises", (), {"__eq__": lambda *_: True, "__hash__": None, "__copy__": fails})

REASONS = {
    Raises: "its `==` raised RuntimeError: on purpose",
    type("RaisesUnhashable", (), {"__eq__": fails, "__hash__": None}): "its `==` raised RuntimeError: on purpose",
    ReturnsArray: "its `==` returned ndarray, not bool",
    type("HashRaises", (), {"__hash__": fails}): "raised RuntimeError: on purpose",
    CopyRaises: "raised RuntimeError: on purpose",
}


@pytest.mark.parametrize("cls", REASONS)
def test_what_cannot_be_compared_is_an_error_with_its_path(cls):
    """Of a leaf its own, of a static field that of its module."""
    for call, prefix in ((st.tree.structure, ""), (lambda tree: st.jit(lambda tree: 0)(tree), "tree")):
        with pytest.raises(st.errors.StaticComparisonError) as caught:
            call([Leaf({"a": cls()})])
        assert caught.value.paths == (f"{prefix}[0].value['a']",)
        assert REASONS[cls] in str(caught.value)
        assert cls.__qualname__ in str(caught.value)
        assert "def __eq__(self, other): return type(other) is type(self)" in str(caught.value)
        assert isinstance(caught.value, TypeError)
    for inside in (lambda x: x, lambda x: (1, x), lambda x: {"k": [x]}):
        kept = []
        with pytest.raises(st.errors.StaticComparisonError) as caught:
            for _ in range(2):  # two objects, so that at the latest now one has to be compared with the other
                kept.append(st.tree.structure([1, StaticField(inside(cls()))]))
        assert caught.value.paths == ("[1]",)
        assert REASONS[cls] in str(caught.value)
    with pytest.raises(st.errors.StaticComparisonError):
        kept = [st.tree.structure(Leaf(frozenset([Raises()]))) for _ in range(2)]
    assert is_one(Leaf("usable"), Leaf("usable"))


class Notes:
    """Mutable, unhashable, and holding an array."""

    def __init__(self, array):
        self.array = array

    def __eq__(self, other):
        return isinstance(other, Notes) and np.array_equal(self.array, other.array)

    __hash__ = None


@pytest.mark.parametrize("hold", [lambda x: [x], lambda x: {"a": [x]}, Notes, lambda x: [Notes(x)]])
def test_arrays_in_mutable_statics_stay_arrays_inside(hold):
    """A copy that is made while a function is traced would be a tracer, and leak."""

    def check(x):
        x = x.notes
        while not isinstance(x, jax.Array):
            x = x.array if isinstance(x, Notes) else next(iter(x.values() if isinstance(x, dict) else x))
        assert not isinstance(x, jax.core.Tracer)
        np.testing.assert_array_equal(x, np.ones(2))

    def run(model):
        check(model)
        new = st.tree.map(lambda x: x + 1, model)
        check(new)
        return new

    model = Keyed(jnp.zeros(2), hold(jnp.ones(2)))
    for transform in (st.jit, st.checkpoint, lambda f: st.vmap(f, in_axes=0)):
        check(transform(run)(model))


LEAVES = hst.integers(0, 3) | hst.sampled_from(["relu", "gelu"]) | hst.booleans()
NESTED = hst.recursive(
    LEAVES,
    lambda each: hst.lists(each, max_size=12) | hst.dictionaries(hst.text("ab", max_size=9), each),
    max_leaves=40,
)


@given(NESTED, NESTED, hst.integers(0, 12))
def test_two_values_that_differ_print_differently(one, other, depth):
    for level in range(depth):  # far below what is printed of a value
        around = [("name", level), level, "x" * level]
        one, other = ({"state": [*around, x]} if level % 2 else (*around, x) for x in (one, other))
    if Static(one) != Static(other):
        assert distinguishing_text(one, other) != distinguishing_text(other, one)
    assert distinguishing_text(one, None) == shown(one)


class Hostile(list):
    """Its own code is not called for a text."""

    def __iter__(self):
        raise RuntimeError("nobody has asked for the items")

    __len__ = __iter__


class LikeADict:
    def __repr__(self):
        return "{1: 2}"


def test_the_text_of_a_value_calls_none_of_its_methods():
    one, other = Hostile(range(30)), Hostile([*range(29), 7])
    assert distinguishing_text(one, other) == "29"
    assert distinguishing_text(other, one) == "7"
    for value, counterpart in (({1: 2}, LikeADict()), (LikeADict(), {1: 2})):
        assert distinguishing_text(value, counterpart) == "{1: 2}"


def test_an_error_shows_what_differs_in_long_static_data():
    class Wide(eqx.Module):
        x: jax.Array
        names: tuple = eqx.field(static=True)

    def other(wide, _):
        return Wide(wide.x, (*wide.names[:-1], "last")), None

    names = tuple(f"layer {i}" for i in range(40))
    with pytest.raises(st.errors.SharingMismatchError, match=r"'layer 39', when it ends .*'last'"):
        st.scan(other, Wide(jnp.ones(2), names), length=2)
    f = st.jit(lambda wide: wide.x)
    for each in (names, (*names[:-1], "last")):
        f(Wide(jnp.ones(2), each))
    assert "'layer 39' and is 'last'" in str(st.explain(f, Wide(jnp.ones(2), names)))


# --- DAGs of 2^60 paths, which are compared, hashed, copied and printed as DAGs ---------------------------------------


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: Any
    b: Any


HOLDERS = {
    "tuple": lambda x: (x, x),
    "list": lambda x: [x, x],
    "dict": lambda x: {"a": x, "b": x},
    "OrderedDict": lambda x: collections.OrderedDict(a=x, b=x),
    "defaultdict": lambda x: collections.defaultdict(list, a=x, b=x),
    "deque": lambda x: collections.deque([x, x]),
    "frozenset": lambda x: frozenset({x, (x,)}),
    "slice": lambda x: slice(x, x),
    "partial": lambda x: functools.partial(print, x, y=x),
    "namedtuple": lambda x: Point(x, x),
    "frozen dataclass": lambda x: Frozen(x, x),
    "dataclass": lambda x: Record(x, x),
    "module": lambda x: made(Pair, first=x, second=x),
    "frozen dataclass with lists": lambda x: Frozen(x, [x]),
}


def dag(how, depth=60):
    value: Any = ()
    for _ in range(depth):
        value = HOLDERS[how](value)
    return value


@pytest.mark.parametrize("how", HOLDERS)
def test_a_dag_of_2_to_the_60_paths(how):
    value, same, other = Static(dag(how)), Static(dag(how)), Static(dag(how, 61))
    assert value == same
    assert hash(value) == hash(same)
    assert value != other
    assert Static(value.thaw()) == value
    assert value.is_settled in (True, False)
    assert len(repr(value)) < 200
    assert len(shown(dag(how))) < 200


def test_a_named_tuple_is_shown_with_its_fields():
    assert shown(Point(0, [Point("a", None)])) == "Point(x=0, y=[Point(x='a', y=None)])"
    assert shown(functools.reduce(lambda inner, _: Point(0, inner), range(11), 0)).endswith("...")


@pytest.mark.parametrize("count", [3, 150, 1_000])
def test_keys_do_not_depend_on_sharing(count):
    """Whether the key is nested or a table."""
    parts = list(range(count))
    shared, copied = [parts, parts], [list(parts), list(parts)]
    assert Static(shared) == Static(copied)
    assert hash(Static(shared)) == hash(Static(copied))
    assert Static(shared) != Static([parts, [*parts[:-1], -1]])
    assert Static(tuple(parts)) != Static(parts)
    assert Static([1, *parts]) != Static([True, *parts])
    assert Static({1, *parts}) == Static({*reversed(parts), 1})
    assert Static(shared).is_mutable
    known = new_static_memo()
    for value in (parts, shared, copied, (parts, 1)):
        assert Static(value, known) == Static(value)
        assert Static(value, known).is_mutable


def test_rows_are_let_go():
    collect_all()
    before = len(_static_values._rows.alive)
    held = Static([[i, [i]] for i in range(1_000)])
    assert len(_static_values._rows.alive) >= before + 2_000
    del held
    gc.collect()
    assert len(_static_values._rows.alive) <= before
