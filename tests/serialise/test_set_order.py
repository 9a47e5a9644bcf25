"""Files are the same byte for byte in every process, whatever order Python's sets have there."""

import equinox as eqx
import jax
import pytest

import sharedtree as st
from sharedtree.serialise.values import _all_kinds_of_nodes
from tests.processes import program, run


class Holder:
    """Equal only to itself, and registered with what it holds as auxiliary data."""


jax.tree_util.register_pytree_node(Holder, lambda holder: ((), holder.members), lambda _, __: Holder())


@pytest.mark.slow
def test_files_do_not_depend_on_the_hashes_of_texts():
    first, second = (run(program("digests_of_sets"), PYTHONHASHSEED=str(seed)).split() for seed in (1, 2))
    assert len(first) == 8
    assert first == second


def in_other_order(members):
    """An equal set in a larger table, in which the members come in another order."""
    other = {*range(1_000, 1_200), *members}
    for number in range(1_000, 1_200):
        other.remove(number)
    return other


def test_equal_sets_make_equal_files():
    members = {(8 * i, frozenset({8 * i, 8 * i + 64})) for i in range(20)}
    other = in_other_order(members)
    assert list(other) != list(members)
    assert st.to_bytes(other) == st.to_bytes(members)
    assert st.from_bytes(st.to_bytes(other)) == members


def test_a_member_that_is_elsewhere_too_is_one_object():
    layer = eqx.nn.Identity()
    loaded = st.from_bytes(st.to_bytes([{layer, ("a", layer)}, layer]))
    assert all(member is loaded[1] or member[1] is loaded[1] for member in loaded[0])


def test_what_cannot_be_saved_is_listed_once():
    with pytest.raises(st.errors.UnserialisableError) as caught:
        st.to_bytes({("a", jax.make_jaxpr), ("b", lambda x: x), ("c", 1)})
    assert len(caught.value.paths) == len(set(caught.value.paths))


def test_a_cycle_through_a_set_is_told_with_both_paths():
    holder = Holder()
    holder.members = {("x", 1), holder}
    with pytest.raises(st.errors.CycleError) as caught:
        st.to_bytes({"h": [holder]})
    assert len(caught.value.paths) == 2
    assert caught.value.paths[1].startswith(caught.value.paths[0])


def test_each_member_of_nested_sets_is_looked_at_once(monkeypatch):
    nested = frozenset({"a", ("b",)})
    for i in range(400):
        nested = frozenset({nested, (i,)})
    seen = []
    take = _all_kinds_of_nodes.TAKERS[tuple]
    monkeypatch.setitem(_all_kinds_of_nodes.TAKERS, tuple, lambda obj: seen.append(obj) or take(obj))
    data = st.to_bytes(nested)
    assert len(seen) == 2 * 401  # once for the order, and once to be written
    assert st.from_bytes(data) == nested
