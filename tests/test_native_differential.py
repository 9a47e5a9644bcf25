"""The native walk gives what the walk in Python gives, on random DAGs that are changed again and again.

One example is a DAG and fifty changes of it, after each of which both walks are asked: other values, other ties,
other static values, attributes that go and come, other classes. Changes are drawn from a seed, which is a hundred times
faster than drawing each from Hypothesis; it still shrinks the number of changes, and finds the seed again.
"""

import collections
import copy
import os
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as hst

from sharedtree.core import _walk
from sharedtree.core._pack_and_unpack import Tags, build, pack
from sharedtree.core._structure import intern
from sharedtree.core._walk import Rules
from tests.kinds import ByContent, Keyed, Noted, Setting, Unregistered, made
from tests.strategies import Layer, Mutable, Pair, Point, Record
from tests.walks import RULES, assert_walked_alike, natively

pytestmark = [
    natively,
    pytest.mark.filterwarnings("ignore:A JAX array is being set as static"),
]

NUM_CHANGES = 50
NUM_EXAMPLES = {"thorough": 2_000, "deep": 20_000}.get(os.environ.get("HYPOTHESIS_PROFILE", ""), 20)
"""Two thousand DAGs with their changes are 10⁵ walks that are compared, and take about a minute."""


class Twin(Pair):
    """Has the fields of `Pair`, so that an instance of one can become one of the other."""


ARRAYS = [jnp.ones(2), jnp.zeros((), jnp.int32), np.ones(2, np.float32), np.float32(1), jax.random.key(0)]
NUMBERS = [True, 1, 1.0, 0.0, -0.0, float("nan"), 2**80, 1j]
VALUES = [None, *NUMBERS, "text", "\ud800", b"text", jax.nn.relu, np.array(["a"])]
LONG = tuple(range(1_500))


def a_static(draw: random.Random) -> Any:
    """Anything; often a new object that is equal to an earlier one."""
    value = draw.choice([*VALUES, LONG, "x" * 5_000, int, np.dtype("float32"), ByContent(1), ByContent(True)])
    for _ in range(draw.randrange(3)):
        containers = [(value,), [value], {"a": value, 1: 2}, (value, value), collections.OrderedDict(a=value)]
        value = draw.choice([*containers, Setting(value, 1), Point(value, 0.0)])
    return copy.copy(value)


def a_leaf(draw: random.Random) -> Any:
    return draw.choice(ARRAYS) if draw.random() < 0.5 else draw.choice(VALUES)


def a_node(draw: random.Random, pool: list[Any]) -> Any:
    """A new node over what is in the pool, or a leaf."""

    def pick() -> Any:
        return draw.choice(pool) if draw.random() < 0.8 else a_leaf(draw)

    def attributes(*names: str) -> dict[str, Any]:
        return {name: pick() for name in names if draw.random() < 0.9}

    makers = [
        lambda: made(Pair, first=pick(), second=pick()),
        lambda: made(Pair, **attributes("second", "first")),
        lambda: made(Layer, **attributes("weight", "activation", "parts"), width=draw.choice([1, True, 1.0])),
        lambda: made(Noted, weight=pick(), note=a_static(draw)),
        lambda: Mutable(**attributes("b", "a", "c")),
        lambda: Record(pick(), pick(), draw.choice(["one", "two"])),
        lambda: Keyed(pick(), a_static(draw)),
        lambda: Unregistered(*[pick() for _ in range(draw.randrange(3))]),
        lambda: jax.tree_util.Partial(jnp.sin, pick()),
        lambda: [pick() for _ in range(draw.randrange(4))],
        lambda: tuple([pick() for _ in range(draw.randrange(3))]),
        lambda: {name: pick() for name in draw.sample(["b", "a", "c", "\udfff", "ä"], draw.randrange(4))},
        lambda: {name: pick() for name in draw.sample([3, 1, 2, (1, 2), "a", None], draw.randrange(3))},
        lambda: collections.OrderedDict(z=pick(), y=pick()),
        lambda: collections.defaultdict(list, z=pick(), y=pick()),
        lambda: collections.deque([pick()], draw.choice([None, 3])),
        lambda: Point(pick(), pick()),
        lambda: a_leaf(draw),
    ]
    return draw.choice(makers)()


def change(draw: random.Random, pool: list[Any]) -> None:
    """Changes one object. What it gets stands before it in the pool, so that no cycle arises."""
    place = draw.randrange(1, len(pool))
    obj, earlier = pool[place], pool[:place]
    new = draw.choice(earlier) if draw.random() < 0.6 else a_leaf(draw)
    match obj:
        case list():
            obj[: draw.randrange(2)] = [new] * (len(obj) < 5)
        case collections.deque():
            obj.append(new) if len(obj) < 5 else obj.clear()
        case dict():
            if draw.random() < 0.3 and obj:
                obj.pop(draw.choice(list(obj)))
            else:
                obj[draw.choice(["b", "a", "other"])] = new
        case Keyed():
            obj.notes = a_static(draw)
        case Noted():
            object.__setattr__(obj, "note", a_static(draw))
        case Layer():
            object.__setattr__(obj, "width", draw.choice([1, True, 1.0, [1]]))
        case Pair() | Twin():
            if draw.random() < 0.3:
                object.__setattr__(obj, "__class__", draw.choice([Pair, Twin]))
            elif draw.random() < 0.3 and vars(obj):
                vars(obj).pop(draw.choice(list(vars(obj))))
            else:
                vars(obj)[draw.choice(["first", "second", "beyond"])] = new
        case Mutable():
            vars(obj)[draw.choice(["a", "b", "other"])] = new
        case Record():
            obj.left, obj.name = new, draw.choice(["one", "two", 1, True])
        case Unregistered():
            obj.parts = (new,) * draw.randrange(3)
        case _:
            pool[place] = a_node(draw, earlier)


def assert_comes_back(tree: Any) -> None:
    """What is built of a walk comes apart into the same."""
    leaves, structure = pack(tree, Tags())
    table: list[Any] = []
    build(structure.records, leaves, table)
    again, records, root = _walk.walk(table[structure.root], _walk.Tags())
    assert intern(records, root) is structure
    assert [id(leaf) for leaf in again] == [id(leaf) for leaf in leaves]  # alive in both


@settings(max_examples=NUM_EXAMPLES)
@given(seed=hst.integers(0, 2**32), num_changes=hst.integers(0, NUM_CHANGES))
def test_a_dag_that_is_changed_again_and_again(seed, num_changes):
    draw = random.Random(seed)
    pool: list[Any] = [jnp.ones(2)]
    for _ in range(draw.randrange(2, 12)):
        pool.append(a_node(draw, pool))
    for _ in range(num_changes + 1):
        top = (
            made(Pair, first=pool[-1], second=pool[draw.randrange(len(pool)) :][:6])
            if draw.random() < 0.9
            else pool[-1]
        )
        assert_walked_alike([top, [pool[-2], top]], draw.choice([*RULES, Rules(), Rules(), Rules()]))
        if draw.random() < 0.2:
            assert_comes_back(top)
        change(draw, pool)
