"""`Context`: what several flattens and unflattens share, and what they must not."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharedtree as st
from sharedtree.core._structure import leaf_paths
from tests.strategies import Pair


def test_objects_are_shared_across_trees():
    w, shared = jnp.ones(2), Pair(jnp.zeros(3), None)
    with st.Context():
        leaves1, s1 = st.tree.flatten({"m": shared, "w": w})
        leaves2, s2 = st.tree.flatten([shared, w, jnp.full(1, 5.0)])
        leaves3, s3 = st.tree.flatten(shared.first)
    assert [x.shape for x in leaves1] == [(3,), (2,)]
    assert [x.shape for x in leaves2] == [(1,)]
    assert leaves3 == []
    with st.Context():
        one = st.tree.unflatten(s1, leaves1)
        two = st.tree.unflatten(s2, leaves2)
        three = st.tree.unflatten(s3, leaves3)
    assert one["m"] is two[0]
    assert one["w"] is two[1] is w
    assert three is shared.first
    assert one["m"] is not shared


def test_paths_in_a_later_tree():
    w = jnp.ones(2)
    with st.Context():
        _, structure = st.tree.flatten(Pair(w, w))
        _, later_structure = st.tree.flatten(Pair(w, Pair(w, jnp.zeros(3))))
    assert leaf_paths(structure) == [".first"]
    assert leaf_paths(later_structure) == [".second.second"]


def test_the_same_context_can_unflatten_and_goes_on_when_entered_again():
    shared = [jnp.ones(2)]
    context = st.Context()
    with context:
        leaves1, s1 = st.tree.flatten({"a": shared})
    with context:
        leaves2, s2 = st.tree.flatten({"b": shared})
        assert (len(leaves1), len(leaves2)) == (1, 0)
        one, two = st.tree.unflatten(s1, leaves1), st.tree.unflatten(s2, leaves2)
        assert one["a"] is two["b"]
        again = st.tree.unflatten(s1, leaves1)
        assert again["a"] is not one["a"]
        assert st.tree.unflatten(s2, leaves2)["b"] is again["a"]


def test_structures_are_unflattened_in_their_order_and_context():
    def several(count):
        shared = jnp.ones(2)
        with st.Context():
            return [st.tree.flatten([shared, jnp.ones(1)]) for _ in range(count)]

    def unflattened(packed):
        return st.tree.unflatten(packed[1], packed[0])

    (first, second, third), other = several(3), several(2)
    assert unflattened(first)[0] is first[0][0]  # the first one anywhere
    with pytest.raises(st.errors.ContextMismatchError, match="The tree is unflattened out of order") as caught:
        unflattened(second)
    assert "with sharedtree.Context():" in str(caught.value)
    assert isinstance(caught.value, ValueError)
    with st.Context(), pytest.raises(st.errors.ContextMismatchError):
        unflattened(second)
    with st.Context():
        one = unflattened(first)
        with pytest.raises(st.errors.ContextMismatchError):
            unflattened(third)
        with pytest.raises(st.errors.ContextMismatchError, match="The tree is unflattened out of order"):
            unflattened(other[1])
        with pytest.raises(ValueError, match="1 traced leaves, but 0"):
            st.tree.unflatten(second[1], [])
        assert unflattened(second)[0] is unflattened(third)[0] is one[0]


def test_structures_know_their_context_and_those_made_alone_have_none():
    tree = [jnp.ones(2)]
    alone = st.tree.structure(tree)
    found = []
    for _ in range(2):
        with st.Context():
            found.append(st.tree.flatten(tree)[1])
            assert st.tree.structure(tree) is alone
            assert len(st.tree.leaves(tree)) == len(st.tree.leaves_with_path(tree)) == 1
    assert found[0] is not found[1]
    assert found[0] != found[1]
    assert alone is st.tree.flatten(tree)[1]


def test_contexts_nest_and_one_entered_twice_does_not_lose_the_one_in_between():
    outer, inner = st.Context(st.Policy(arrays=False)), st.Context(st.Policy(arrays=True))
    w = jnp.ones(2)
    count = lambda: len(st.tree.leaves([w, w]))
    with outer:
        assert count() == 2
        with inner:
            assert count() == 1
            with outer:
                assert count() == 2
            assert count() == 1
        assert count() == 2
    assert count() == 1
    flattened = lambda: len(st.tree.flatten([w])[0])
    with st.Context() as outer:
        assert flattened() == 1
        with st.Context():
            assert flattened() == 1
        assert flattened() == 0
        with outer:
            assert flattened() == 0
        assert flattened() == 0


def test_contexts_belong_to_their_thread():
    w = jnp.ones(2)
    lengths = []

    def work():
        lengths.append(len(st.tree.flatten([w, w])[0]))
        with st.Context():
            lengths.append(len(st.tree.flatten([w])[0]))
            lengths.append(len(st.tree.flatten([w])[0]))

    with st.Context(st.Policy(arrays=False)):
        st.tree.flatten([w])
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert len(st.tree.flatten([w, w])[0]) == 2
    assert lengths == [1, 1, 0]


def test_a_failed_flatten_leaves_nothing_behind_and_forgets_nothing():
    class Raises:
        def __eq__(self, other):
            raise RuntimeError("no")

        __hash__ = None

    w, v = jnp.ones(2), jnp.zeros(2)
    cycle = [v, w]
    cycle.append(cycle)
    with st.Context():
        leaves1, s1 = st.tree.flatten([w])
        for bad in ([v, w, Pair(Raises(), None)], cycle):
            with pytest.raises(st.SharedTreeError):
                st.tree.flatten(bad)
        leaves2, s2 = st.tree.flatten([w, v])
    assert len(leaves2) == 1
    assert leaves2[0] is v
    with st.Context():
        one, two = st.tree.unflatten(s1, leaves1), st.tree.unflatten(s2, leaves2)
    assert one[0] is two[0] is w
    assert two[1] is v


def test_inner_contexts_inherit_the_policy_and_an_exception_leaves_them():
    w = jnp.ones(2)
    with pytest.raises(RuntimeError), st.Context(st.Policy(arrays=False)), st.Context():
        assert len(st.tree.leaves([w, w])) == 2
        with st.Context(st.Policy()):
            assert len(st.tree.leaves([w, w])) == 1
        raise RuntimeError
    assert len(st.tree.leaves([w, w])) == 1


def test_transforms_take_the_policy_of_the_context_but_one_of_their_own_wins():
    w = jnp.ones(2)
    model = Pair(w, w)
    lose = lambda m: (m.first is m.second, jax.tree.map(lambda x: x + 1, m))
    f = st.jit(lose)
    with pytest.warns(st.UntiedWarning):
        is_one, _ = f(model)
    assert bool(is_one) is True
    with st.Context(st.Policy(on_untie="error")):
        with pytest.raises(st.errors.UntiedError) as caught:
            f(model)
        assert len(caught.value.paths) == 2
        ignoring = st.preserve_identities(jax.jit, policy=st.Policy(on_untie="ignore"))(lose)
        assert ignoring(model)[1].first is not None
    with st.Context(st.Policy(on_untie="ignore")):
        _, new = f(model)
        assert new.first is not new.second


def test_transforms_inside_a_context_do_not_join_its_tags():
    box = Pair(jnp.ones(2), None)
    with st.Context():
        st.tree.flatten(box)
        out = st.jit(lambda m: Pair(m.first + 1, None))(box)
        np.testing.assert_array_equal(out.first, [2.0, 2.0])
        assert len(st.tree.flatten(box)[0]) == 0


@pytest.mark.parametrize("value", ["raise", True, None])
def test_policies_are_checked(value):
    with pytest.raises(ValueError, match="`on_untie` is"):
        st.Policy(on_untie=value)
    assert hash(st.Policy()) == hash(st.Policy(on_untie="warn"))
