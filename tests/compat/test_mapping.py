"""The `jax.tree_map` of treeo: JAX's values, calls and errors, and the sharing of the tree in the result."""

import collections

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, strategies as hst

import sharedtree as st
from sharedtree.compat._tree_map import tree_map

from ..deep import Link, in_a_thread, link
from ..strategies import MODULES, Mutable, Pair, carries_identity, children, copy_dag, dags, is_array, partition, twin

NODES = (*MODULES, list, tuple, dict, type(None))


def double(x):
    return jnp.multiply(x, 2) if is_array(x) else x


def recording(calls, f=double):
    def called(*xs):
        calls.append(xs)
        return f(*xs)

    return called


def same_objects(calls, others):
    return len(calls) == len(others) and all(
        len(xs) == len(ys) and all(x is y for x, y in zip(xs, ys, strict=True))
        for xs, ys in zip(calls, others, strict=True)
    )


def leaves_once(tree, stops=lambda _: False):
    """The leaves in JAX's order, those below an object that was there before left out."""
    seen, found = {}, []

    def visit(obj, within):
        is_object = isinstance(obj, MODULES) or (within and carries_identity(obj))
        if stops(obj):
            found.append((obj,))
            return
        if is_object and id(obj) in seen:  # alive in `seen`
            return
        if is_object:
            seen[id(obj)] = obj
        if not isinstance(obj, NODES):
            found.append((obj,))
        for _, child in children(obj):
            visit(child, within or isinstance(obj, MODULES))

    visit(tree, within=False)
    return found


def assert_equal_leaves(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert (jnp.array_equal(x, y) and x.dtype == y.dtype) if is_array(x) else x is y or x == y


@given(dags())
def test_values_are_those_of_jax_and_sharing_is_that_of_the_tree(dag):
    for tree in (dag, [dag, dag.first], {"b": dag, "a": (jnp.ones(2), dag)}):
        result = tree_map(double, tree)
        assert_equal_leaves(result, jax.tree.map(double, twin(tree)))
        assert partition(result, inside=False) == partition(tree, inside=False)


@given(dags())
def test_a_tree_without_sharing_is_mapped_by_the_same_calls(dag):
    tree, ours, theirs = twin(dag), [], []
    tree_map(recording(ours), tree)
    jax.tree.map(recording(theirs), tree)
    assert same_objects(ours, theirs)


@given(dags())
def test_each_leaf_of_an_object_is_seen_once_and_in_order(dag):
    calls = []
    tree_map(recording(calls), dag)
    assert same_objects(calls, leaves_once(dag))


@given(dags(), hst.sampled_from([list, Pair, Mutable, dict, tuple, jax.Array]))
def test_what_counts_as_a_leaf(dag, cls):
    def is_leaf(x):
        return isinstance(x, cls)

    ours, calls = [], []
    result = tree_map(recording(calls, lambda x: x), dag, is_leaf=is_leaf)
    tree_map(recording(ours, lambda x: x), twin(dag), is_leaf=is_leaf)
    assert len(ours) == len(jax.tree.leaves(twin(dag), is_leaf=is_leaf))
    assert jax.tree.structure(result) == jax.tree.structure(dag)
    if cls is not jax.Array:
        assert same_objects(calls, leaves_once(dag, is_leaf))


@given(dags())
def test_companions_that_are_tied_alike_keep_the_tie_and_others_cut_it(dag):
    def add(x, y):
        return jnp.add(x, y) if is_array(x) else x

    alike, untied = copy_dag(dag), twin(dag)
    expected = jax.tree.map(add, twin(dag), untied)
    for tree, rest, shares in [(dag, alike, dag), (dag, untied, untied), (untied, dag, untied), (dag, dag, dag)]:
        result = tree_map(add, tree, rest)
        assert_equal_leaves(result, expected)
        assert partition(result) == partition(shares)


def test_one_object_becomes_as_many_as_it_has_different_companions():
    a, b, c = (Mutable(w=jnp.full(2, value)) for value in (1.0, 2.0, 3.0))
    result = tree_map(lambda x, y: x + y, [a, a, a, a], [b, c, b, c])
    assert result[0] is result[2]
    assert result[1] is result[3]
    assert (result[0].w[0], result[1].w[0]) == (3, 4)


@given(dags(), dags())
def test_trees_that_do_not_match_are_refused_as_by_jax_and_before_the_first_call(dag, other):
    for rest in ([other], [dag, {"a": dag}]):
        calls, outcomes = [], []
        for mapped in (tree_map, jax.tree.map):
            try:
                outcomes.append(jax.tree.structure(mapped(recording(calls, lambda *_: 0), dag, *rest)))
            except ValueError as error:
                outcomes.append(str(error))
                assert calls == []
        assert outcomes[0] == outcomes[1]


def test_a_module_that_contains_itself_and_what_jax_does_not_take_apart():
    module = Mutable(a=jnp.ones(2), b=None)
    module.b = [module]
    finite = Mutable(a=jnp.ones(2), b=[Mutable(a=jnp.ones(2), b=[3])])
    for trees in ([module], [(1, module)], [module, module], [module, finite]):
        with pytest.raises(st.errors.CycleError, match="it sits at"):
            tree_map(lambda x, *_: x, *trees)
    queue = collections.deque([jnp.ones(2)])
    tree, ours, theirs = Pair(queue, [queue]), [], []
    tree_map(recording(ours, lambda x: x), tree)
    jax.tree.map(recording(theirs, lambda x: x), tree)
    assert same_objects(ours, theirs)
    # Errors of the function pass.
    with pytest.raises(KeyError, match="mine"):
        tree_map({}.pop, {"a": "mine"})


@pytest.mark.parametrize("depth", [100, 900])
def test_modules_may_be_nested_deeply(depth):
    def mapped():
        model = None
        for _ in range(depth):
            model = link(jnp.float32(1), model)
        model = link(model, model)
        result = tree_map(lambda x: x + 1, model)
        scales, node = [], result.next
        while node is not None:
            scales.append(float(node.scale))
            node = node.next
        return isinstance(result, Link), result.scale is result.next, scales == [2.0] * depth

    assert in_a_thread(mapped) == (True, True, True)
