"""Nothing is left behind by a walk and the way back, however often: no object, no block of memory, no reference.

Blocks and objects are counted, and the references to what all trees share. A debug build of Python counts all
references, if the native walk is compiled with its headers (JAX is not, so that nothing of JAX may run meanwhile).
"""

import gc
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp
import pytest

import sharedtree as st
from sharedtree.core._pack_and_unpack import Tags, build, native, pack, walk
from sharedtree.core._structure import Given, Update, intern
from sharedtree.core._walk import Rules
from tests.kinds import ENDS, KINDS, W
from tests.strategies import Layer, Mutable, Pair, Point, Record
from tests.walks import WRONG_CALLS, WRONG_TREES, natively, with_records, wrong_records

pytestmark = [
    pytest.mark.slow,
    natively,
    pytest.mark.filterwarnings("ignore:A JAX array is being set as static"),
]

REPEATS = 20_000 if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else 1_000
REPEATS_IN_PYTHON = max(REPEATS // 20, 200)
"""Of what is left to the walk in Python, which takes much longer."""

SHARED = (None, True, False, (), 1, "a", W, Layer, Pair, Point, Mutable, Record, jnp.sin)

WITHOUT_JAX = ("nothing", "a leaf", "sequences", "dictionaries", "other containers", "namedtuples", "register_node")
WITHOUT_JAX += ("Equinox", "Equinox, attributes missing", "statics by address", "statics, many", "statics, deep")


def counted(held: Iterable[Any]) -> dict[str, int]:
    """What could grow."""
    gc.collect()
    counts = {f"references to {i}, {type(each)}": sys.getrefcount(each) for i, each in enumerate((*SHARED, *held))}
    return counts | {"blocks": sys.getallocatedblocks(), "objects": len(gc.get_objects())}


def assert_leaves_nothing(act: Callable[[], Any], repeats: int = REPEATS, held: Iterable[Any] = ()) -> None:
    """Counts several times if need be: other parts of the process add something now and then, a leak does each time."""
    for _ in range(10):
        act()
    found = [grown_by(act, repeats, held)]
    while any(found[-1]) and len(found) < 4:
        found.append(grown_by(act, repeats, held))
    assert found[-1] == ({}, {}), found


def grown_by(act: Callable[[], Any], repeats: int, held: Iterable[Any]) -> tuple[dict[str, int], dict[str, int]]:
    """What there is more of, and which references there are fewer of, after so many repeats."""
    noise = max(repeats // 10, 40)  # what is lost at each repeat is more
    before = counted(held)
    for _ in range(repeats):
        act()
    grown = {name: count - before[name] for name, count in counted(held).items()}
    # There may be fewer objects, where other parts of the process let some go, but not fewer references to one.
    lost = {name: more for name, more in grown.items() if more > noise}
    taken = {name: more for name, more in grown.items() if more < -noise and name.startswith("references")}
    return lost, taken


@pytest.mark.parametrize("name", KINDS)
def test_a_walk_and_the_way_back(name):
    """The second walk is of other objects each time, built by a program that is new each time."""
    tree = KINDS[name]()
    leaves, structure = pack(tree, Tags())

    def act():
        walk(tree, Tags())
        structure.program, table = None, []
        build(structure, leaves, table)
        walk(table[structure.root], Tags())

    assert_leaves_nothing(act, held=[tree, type(tree), structure, *leaves, *(op for op, _ in structure.records)])


def references_left(act: Callable[[], Any], repeats: int) -> int:
    """What a debug build of Python says, whose total counts nobody else's."""
    total: Any = getattr(sys, "gettotalrefcount", lambda: 0)
    for _ in range(10):
        act()
    gc.collect()
    before = total()
    for _ in range(repeats):
        act()
    gc.collect()
    return total() - before


@pytest.mark.skipif(not hasattr(sys, "gettotalrefcount"), reason="this interpreter does not count all references")
@pytest.mark.parametrize("name", WITHOUT_JAX)
def test_all_references(name):
    if abs(references_left(Tags, 1_000)) > 100:
        pytest.skip("the native walk was not compiled for a debug build")
    tree = KINDS[name]()
    leaves, structure = pack(tree, Tags())
    assert abs(references_left(lambda: walk(tree, Tags()), REPEATS)) < REPEATS // 10
    assert abs(references_left(lambda: build(structure, leaves, []), REPEATS)) < REPEATS // 10


@pytest.mark.parametrize("rules", [Rules(convention="outside"), Rules(values=True), Rules(convention="any")], ids=str)
def test_other_rules(rules):
    trees = [make() for name, make in KINDS.items() if not ("static" in name or "by numbers" in name)]
    held = pack(trees, Tags(), rules)
    assert_leaves_nothing(lambda: walk(trees, Tags(), rules))
    assert held


def test_several_trees_in_one_crossing():
    trees = [make() for name, make in KINDS.items() if "static" not in name]
    tags = Tags()
    pack([W, [1]], tags)
    held, base = pack(trees, tags), len(tags.objects)

    def act():
        walk(trees, tags)
        tags.forget(base)

    assert_leaves_nothing(act)
    assert held


@pytest.mark.parametrize("name", ENDS)
def test_what_ends_a_walk(name):
    tree = ENDS[name]()

    def act():
        with pytest.raises(Exception, match=".") as caught:
            walk(tree, Tags())
        # The traceback and the frames in it refer to one another.
        caught.value.__traceback__ = None

    assert_leaves_nothing(act, REPEATS_IN_PYTHON)


def test_objects_of_the_other_side():
    node = st.tree.structure([W]).records[-1][0]
    made = intern(((Given(7), ()), (Update(8, node), (0, 0))), 1)
    assert_leaves_nothing(lambda: build(made, [], [], lambda n: n, lambda _, content: content))


def test_builds_that_end():
    wrong = wrong_records()

    def fail(*_):
        raise LookupError

    def act():
        for records in wrong:
            with pytest.raises((TypeError, IndexError, StopIteration, LookupError)):
                native.build(with_records(records), [W], [], fail, fail)

    assert_leaves_nothing(act)


def test_wrong_arguments_and_what_gives_none():
    tags, structure = Tags(), st.tree.structure(W)

    def act():
        for arguments in WRONG_TREES + WRONG_CALLS:
            for function in (native.walk, native.build, native.call, native.group_of, native.group_parts):
                with pytest.raises((TypeError, AttributeError)):
                    function(*arguments)
        assert tags.number_of(W) is tags.forget(0) is native.walk(W, tags, 0, {}) is None
        native.build(structure, [None], [], None, None)

    assert_leaves_nothing(act)


def test_whole_calls():
    """Also those that change their argument in place, raise, or are left to Python."""
    model, mutable = Pair(W, [W, 3]), Mutable(weight=W)

    def change(model):
        model.weight = model.weight + 1

    def fail(hand):
        raise LookupError

    same, changed = st.jit(lambda model: model.first * 2), st.jit(change, policy=st.Policy(in_place=True))
    passed = st.jit(lambda model: model)
    same(model)
    pattern = same.settings.patterns[1]
    failing_functions = dict.fromkeys(pattern.functions, fail)
    failing = same.settings._replace(patterns={1: pattern._replace(functions=failing_functions)})

    def act():
        same(model)
        changed(mutable)
        passed(model)
        with pytest.raises(LookupError):
            native.call(failing, (model,), {})

    assert_leaves_nothing(act)
