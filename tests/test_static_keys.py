"""Static values that are DAGs of 2^60 paths are compared, hashed, copied and printed as DAGs."""

import collections
import dataclasses
import functools
import gc
from typing import Any, NamedTuple

import equinox as eqx
import pytest

from sharedtree import _static_keys
from sharedtree._static_keys import nothing_known
from sharedtree._statics import Static
from sharedtree._text import shown
from tests.garbage import collect_all


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: Any
    b: Any


@dataclasses.dataclass
class Mutable:
    a: Any
    b: Any


class Pair(NamedTuple):
    a: Any
    b: Any


class Module(eqx.Module):
    a: Any
    b: Any


def module_of(a, b):
    """Equinox's `__init__` flattens what it made."""
    module = object.__new__(Module)
    object.__setattr__(module, "a", a)
    object.__setattr__(module, "b", b)
    return module


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
    "namedtuple": lambda x: Pair(x, x),
    "frozen dataclass": lambda x: Frozen(x, x),
    "dataclass": lambda x: Mutable(x, x),
    "module": lambda x: module_of(x, x),
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
    assert shown(Pair(0, [Pair("a", None)])) == "Pair(a=0, b=[Pair(a='a', b=None)])"
    deep = Pair(0, 0)
    for _ in range(10):
        deep = Pair(0, deep)
    assert shown(deep).endswith("...")


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
    known = nothing_known()
    for value in (parts, shared, copied, (parts, 1)):
        assert Static(value, known) == Static(value)
        assert Static(value, known).is_mutable


def test_rows_are_let_go():
    collect_all()
    before = len(_static_keys._rows.alive)
    held = Static([[i, [i]] for i in range(1_000)])
    assert len(_static_keys._rows.alive) >= before + 2_000
    del held
    gc.collect()
    assert len(_static_keys._rows.alive) <= before
