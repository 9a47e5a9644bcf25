"""The two walks, in Python and in C: which one is in use, and whether both do the same."""

import contextlib
import types
from unittest import mock

import equinox as eqx
import pytest

import sharedtree as st
from sharedtree.core import _pack_and_unpack, _walk
from sharedtree.core._node_types import node_type_of
from sharedtree.core._pack_and_unpack import Tags, build, native, pack
from sharedtree.core._static_values import Static
from sharedtree.core._structure import Given, Node, Update, intern
from sharedtree.core._walk import Rules
from sharedtree.transforms import _caller_side
from sharedtree.transforms._function_transform import FunctionTransform
from tests.kinds import W
from tests.strategies import Pair

natively = pytest.mark.skipif(native is None, reason="the native walk is not in use")


@contextlib.contextmanager
def in_python():
    """A block in which nothing is done natively, by wrappers that are made in it."""
    with contextlib.ExitStack() as stack:
        for module in (_pack_and_unpack, _caller_side):
            stack.enter_context(mock.patch.object(module, "native", None))
        yield


@contextlib.contextmanager
def calls_in_python():
    """Collects the arguments of each call that is left to Python."""
    left = []
    go_on = FunctionTransform.go_on

    def noting(self, deferred, policy, args, kwargs):
        if deferred == ():
            left.append(args)
        return go_on(self, deferred, policy, args, kwargs)

    with mock.patch.object(FunctionTransform, "go_on", noting):
        yield left


# --- both walks on one tree -----------------------------------------------------------------------------------------

RULES = [
    Rules(), Rules(arrays=False), Rules(containers=True), Rules(convention="any"), Rules(convention="equinox"),
    Rules(values=True), Rules(convention="outside"), Rules(convention="outside", containers=True), Rules(filtered=True),
]  # fmt: skip


def assert_walked_alike(trees, rules, num_walks=1):
    """Compares the two walks over trees of one call. Returns the leaves and the structure of each tree."""
    expected, tags = [], _walk.Tags()
    for tree in trees:
        base = len(tags.objects)
        try:
            leaves, records, root = _walk.walk(tree, tags, rules)
        except ValueError as error:  # JAX's, of keys that have no order
            with pytest.raises(ValueError, match=str(error)):
                pack(tree, Tags(), rules)
            return []
        expected.append((leaves, intern(records, root, base)))
    for _ in range(num_walks):
        own = Tags()
        for tree, (leaves, structure) in zip(trees, expected, strict=True):
            found, its = pack(tree, own, rules)
            assert its is structure
            assert [id(leaf) for leaf in found] == [id(leaf) for leaf in leaves]  # alive in both
        assert [id(obj) for obj in own.objects] == [id(obj) for obj in tags.objects]  # alive in both
        assert [own.number_of(obj) for obj in own.objects] == [tags.number_of(obj) for obj in tags.objects]
    return expected


def assert_alike(trees, rules):
    """Compares the two walks, and the way back. The native walk runs twice, for the first time it only asks Python."""
    for leaves, structure in assert_walked_alike(trees, rules, num_walks=2):
        if not rules.values and structure.base == 0:
            assert_built_alike(structure, leaves)


def assert_built_alike(structure, leaves):
    """Compares what Python and C build of the leaves: classes, order of attributes, sharing and what a walk finds."""
    one, other = [], []
    _walk.build(structure.records, leaves, one)
    build(structure, leaves, other)
    for a, b, (_, children) in zip(one, other, structure.records, strict=True):
        assert type(a) is type(b)
        if isinstance(a, eqx.Module):
            assert list(vars(a)) == list(vars(b))
        assert (a is b) <= (not children or type(a) is tuple)
    again = [_walk.walk(table[structure.root], _walk.Tags()) for table in (one, other)]
    assert again[0][1:] == again[1][1:]
    assert all(a is b for a, b in zip(again[0][0], again[1][0], strict=True))


def with_records(records):
    """A stand-in for a structure, with the attributes that the native part reads."""
    return types.SimpleNamespace(base=0, records=records, given=(), root=0, is_noted=False, updates=False, program=None)


def knows(tree, rules=_walk.DEFAULT_RULES):
    """Whether the native walk knows a tree again, so that no test passes because everything is left to Python."""
    return native.walk(tree, Tags(), _pack_and_unpack.flags_of(rules), _pack_and_unpack._entries) is not None


# --- what no caller passes ------------------------------------------------------------------------------------------

WRONG_TREES = [(), (1, 2, 3, 4), ([], Tags, 0, {}), ([], Tags(), (), {}), ([], Tags(), 0, None)]
WRONG_CALLS = [(), (None, (), {}), ((1,) * 5, (), {}), ((0, 0, {}, False, True, None), [], {}), ((None,) * 6, (), {})]
WRONG_CALLS += [
    ((0, 0, {0: form}, False, True, None), (), {}) for form in (1, (), (1,) * 7, (((), ()), None, (), None, False))
]
"""Arguments that `native.walk` and `native.build`, or `native.call`, refuse."""


def wrong_records():
    """Lists of records that make no sense. Of many of them this shows only when they are built."""
    structure = st.tree.structure(Pair(W, [W]))
    leaf, (node, _), *_, (pair, _) = structure.records[0][0], st.tree.structure([W]).records[-1], *structure.records
    unpaired = Node(node_type_of(Pair(W, W)), Static((("first",), (1,))), ("first",))
    numbers = [(node, (5,)), (node, ("a",)), (node, (-1,)), (pair, (-1, 0)), (pair, (0, 5)), (pair, (0, "a"))]
    given = [(op, (0, 0)) for op in (Given(3), Update(3, pair))]
    return [[(leaf, ()), each] for each in (*numbers, (unpaired, (0,)), (leaf, ()), *given)]
