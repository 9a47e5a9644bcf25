"""What two sharings imply together, against partitions of the unfolded paths that are worked out by brute force."""

import collections
import itertools

import hypothesis
import hypothesis.strategies as hst
import jax
import jax.numpy as jnp
import pytest

import sharedtree as st
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


@hypothesis.given(two_sharings())
def test_same_sharing_and_retie_agree_with_the_partitions(pair):
    a, b = pair
    assert st.same_sharing(a, b) is (partition(a) == partition(b))
    assert partition(st.retie(a, like=b)) == brute_join(partition(a), partition(b))


def test_shapes_that_differ_are_an_error():
    one, two = [jnp.ones(2), [jnp.ones(2)]], [jnp.ones(2), [1, 2]]
    with pytest.raises(st.errors.SharingMismatchError, match=r"differ in shape at `\[1\]`"):
        st.retie(one, like=two)


@jax.tree_util.register_pytree_with_keys_class
class Named:
    """A node whose instances have children of any names."""

    def __init__(self, **children):
        self.children = children

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey(key), value) for key, value in self.children.items()], tuple(self.children)

    @classmethod
    def tree_unflatten(cls, keys, children):
        return cls(**dict(zip(keys, children, strict=True)))


OF_TWO_TREES = {
    "retie": lambda a, b: st.retie(a, like=b),
    "assert_same_sharing": st.assert_same_sharing,
    "tree.map": lambda a, b: st.tree.map(jnp.add, a, b),
    "apply_updates": st.apply_updates,
}


@pytest.mark.parametrize("call", OF_TWO_TREES)
@pytest.mark.parametrize("make", [dict, collections.OrderedDict, Named])
def test_children_of_other_names_are_of_another_shape(call, make):
    """As in JAX: what is called otherwise is not the same child, wherever it stands."""
    one, other = ({"m": make(a=jnp.ones(2), **{name: jnp.ones(2)})} for name in ("b", "c"))
    with pytest.raises(ValueError):
        jax.tree.map(jnp.add, one, other)
    with pytest.raises(st.errors.SharingMismatchError, match=r"at `\['m'\]`") as caught:
        OF_TWO_TREES[call](one, other)
    own, others = ("`.b`", "`.c`") if make is Named else ("`['b']`", "`['c']`")
    text = str(caught.value)
    assert f"({own} in this one only)" in text
    assert f"({others} in this one only)" in text


def test_trees_that_differ_at_the_root_say_so():
    with pytest.raises(st.errors.SharingMismatchError, match="differ in shape at the root: .* `dict` .* `list`"):
        st.retie({"a": jnp.ones(2)}, like=[jnp.ones(2)])
