"""Meet and join of two sharings, against partitions of the unfolded paths that are worked out by brute force."""

import itertools

import hypothesis
import hypothesis.strategies as hst
import jax.numpy as jnp
import numpy as np
import pytest

import sharedtree as st
from sharedtree.core._sharing import join, meet
from tests.strategies import partition

# A tree is a nested tuple: () is a leaf, a tuple of trees is a list. Two trees of one shape differ in what is shared.


def shapes():
    return hst.recursive(hst.just(()), lambda child: hst.lists(child, min_size=1, max_size=3).map(tuple), max_leaves=8)


def build(shape, draw, made):
    """A DAG of that shape, of lists and arrays, in which equal subtrees are shared at random."""
    if made and draw(hst.booleans()):
        same = [obj for s, obj in made if s == shape]
        if same:
            return draw(hst.sampled_from(same))
    obj = [build(child, draw, made) for child in shape] if shape else jnp.ones(())
    made.append((shape, obj))
    return obj


@hst.composite
def two_sharings(draw):
    shape = draw(shapes())
    return build(shape, draw, []), build(shape, draw, [])


def class_of(classes):
    return {path: c for c in classes for path in c}


def brute_meet(a, b):
    in_a, in_b = class_of(a), class_of(b)
    return frozenset(frozenset(in_a[path] & in_b[path]) for path in in_a)


def brute_join(a, b):
    """Merge what overlaps, and the children of what was merged, until nothing changes."""
    classes = [set(c) for c in (*a, *b)]
    while True:
        for one, two in itertools.combinations(classes, 2):
            if one & two:
                one |= two
                classes.remove(two)
                break
        else:
            grown = False
            paths = set().union(*classes)
            for c in list(classes):
                for p, q in itertools.combinations(sorted(c), 2):
                    for path in paths:
                        if path[: len(p)] == p and len(path) == len(p) + 1:
                            other = (*q, path[-1])
                            if not any({path, other} <= k for k in classes):
                                classes.append({path, other})
                                grown = True
            if not grown:
                return frozenset(map(frozenset, classes))


def rebuilt(structure):
    return st.tree.unflatten(structure, [np.ones(()) for _ in range(structure.num_leaves)])


@hypothesis.given(two_sharings())
def test_meet_is_what_both_have_in_common_and_join_what_follows_from_both_together(pair):
    a, b = pair
    for of_two, brute in ((meet, brute_meet), (join, brute_join)):
        found = of_two(st.tree.structure(a), st.tree.structure(b))
        assert partition(rebuilt(found)) == brute(partition(a), partition(b))


@hypothesis.given(two_sharings())
def test_laws_of_a_lattice(pair):
    a, b = map(st.tree.structure, pair)
    assert meet(a, b) is meet(b, a)
    assert join(a, b) is join(b, a)
    assert meet(a, a) is a
    assert join(a, a) is a
    assert meet(a, join(a, b)) is a
    assert join(a, meet(a, b)) is a


@hypothesis.given(two_sharings())
def test_same_sharing_and_retie_agree_with_the_partitions(pair):
    a, b = pair
    assert st.same_sharing(a, b) is (partition(a) == partition(b))
    assert partition(st.retie(a, like=b)) == brute_join(partition(a), partition(b))


def test_shapes_that_differ_are_an_error():
    one, two = st.tree.structure([jnp.ones(2), [jnp.ones(2)]]), st.tree.structure([jnp.ones(2), [1, 2]])
    for operation in (meet, join):
        with pytest.raises(st.errors.SharingMismatchError, match=r"differ in shape at `\[1\]`"):
            operation(one, two)


def test_join_of_what_differs_in_statics_is_an_error_and_meet_is_not():
    class Mark:
        def __init__(self, name, w):
            self.name, self.w = name, w

    st.register_node(Mark, lambda m: ((m.w,), m.name), lambda name, children: Mark(name, *children))
    w = jnp.ones(2)
    same = Mark("a", w)
    one, two = st.tree.structure([same, same]), st.tree.structure([Mark("a", w), Mark("b", w)])
    with pytest.raises(st.errors.SharingMismatchError, match="but what is static in them differs") as caught:
        join(two, one)
    assert caught.value.paths == ("[0]", "[1]")
    assert meet(two, one) is two
