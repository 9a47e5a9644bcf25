"""Crossings in C agree with those in Python: on random DAGs, and on DAGs mutated since they were met."""

import collections
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as hst

import sharedtree as st
from sharedtree import _native_walk
from sharedtree._graph import Rules
from sharedtree.transforms._crossed import Names, packed_in
from sharedtree.transforms._packing import pack_call, unpack_result
from tests.strategies import Layer, Mutable, Pair, Record, arguments, copy_dag, is_array, mutate, partition, paths
from tests.walks import in_python

NAMES = Names(lambda *args: None)
RULES = [Rules(), Rules(arrays=False), Rules(containers=True)]


def packed(args, kwargs, rules):
    return pack_call(args, kwargs, (), rules, NAMES)


def assert_packed_alike(args, kwargs, rules):
    """In C, the second time from what it knows, as in Python."""
    with in_python():
        expected = packed(args, kwargs, rules)
    for _ in range(2):
        found = packed(args, kwargs, rules)
        assert jax.tree.structure(found[:2]) == jax.tree.structure(expected[:2])
        ours, theirs = jax.tree.leaves(found[:2]), jax.tree.leaves(expected[:2])
        assert all(a is b for a, b in zip(ours, theirs, strict=True))
        assert len(found.tags.objects) == len(expected.tags.objects)
        for ours, theirs in zip(found.tags.objects, expected.tags.objects, strict=True):
            assert found.tags.number_of(ours) == expected.tags.number_of(theirs)
        if found.is_separate:
            assert not any(reach_back(found))
    return expected


def reach_back(call):
    """Whether each argument holds an object of an earlier one."""
    start = 0
    for position, value in call.items():
        records = [record for each in packed_in(value, position) for record in each.packed.structure.records]
        roots = [each.packed.structure.root for each in packed_in(value, position)]
        yield any(number < start for number in [*roots, *[child for _, children in records for child in children]])
        start += len(records)


@given(args=arguments(), rules=hst.sampled_from(RULES))
def test_arguments_are_packed_alike(args, rules):
    assert_packed_alike(args, {}, rules)
    assert_packed_alike(copy_dag(args), {}, rules)
    half = len(args) // 2
    assert_packed_alike(args[:half], {f"name{9 - i}": arg for i, arg in enumerate(args[half:])}, rules)


@pytest.mark.skipif(_native_walk.native is None, reason="the native walk is not in use")
@given(args=arguments())
def test_that_no_argument_reaches_into_another_is_known(args):
    """Of what is met again; otherwise it is left to those who look."""
    for _ in range(2):
        call = packed(args, {}, Rules())
    assert call.is_separate == (not any(reach_back(call)))


@given(args=arguments(), rules=hst.sampled_from(RULES), data=hst.data())
def test_arguments_that_changed_since_are_packed_alike(args, rules, data):
    args = copy_dag(args)
    assert_packed_alike(args, {}, rules)
    mutable = [arg for arg in args if isinstance(arg, (Pair, Layer, Mutable, Record, list, dict))]
    for _ in range(6 if mutable else 0):
        mutate(data.draw, data.draw(hst.sampled_from(mutable)))
        assert_packed_alike(args, {}, rules)


@given(args=arguments())
def test_results_are_unpacked_alike(args):
    result = packed(args, {}, Rules()).args
    with in_python():
        expected = unpack_result(result, lambda _: None)
    found = unpack_result(result, lambda _: None)
    assert partition(list(found)) == partition(list(expected))
    leaves = [leaf for each in packed_in(result, 0) for leaf in each.packed.leaves]
    are_kept = len({id(leaf) for leaf in leaves}) == len(leaves)  # alive in `leaves`; else the second becomes a copy
    for (path, x, _), (other, y, _) in zip(paths(found), paths(expected), strict=True):
        assert path == other
        assert type(x) is type(y)
        assert not (is_array(x) and are_kept) or x is y
        if isinstance(x, (Layer, Record)):
            assert {k: v for k, v in vars(x).items() if k in ("width", "name")} == {
                k: v for k, v in vars(y).items() if k in ("width", "name")
            }


def test_two_leaves_that_are_one_object_are_parted():
    shared = jnp.ones(2)
    (pair,) = packed((Pair(jnp.ones(2), jnp.zeros(2)),), {}, Rules()).args
    pair.leaves = [shared, shared]
    made = unpack_result({"a": (pair,)}, lambda _: None)["a"][0]
    assert made.first is shared
    assert made.second is not shared
    np.testing.assert_array_equal(made.second, shared)


@pytest.mark.parametrize("make", [lambda: jnp.ones(2), lambda: np.ones(2, np.float32)])
def test_other_kinds_of_arrays_do_not_retrace(make):
    traces = []
    f = st.jit(lambda m: traces.append(1) or st.tree.map(lambda v: v + 1, m))
    for _ in range(4):
        f(Pair(make(), [make()]))
        f(Pair(jnp.ones(2), [jnp.ones(2)]))
    assert len(traces) == 1


def test_arrays_of_other_classes_cross_as_they_are():
    key, scalar = jax.random.key(0), np.float32(2)
    f = st.jit(lambda m, key, more: (m, jax.random.split(key)[0], more))
    for _ in range(3):
        model, new, more = f(Pair(key, [key]), key, {"scalar": scalar, "key": (key, 1.0)})
        assert model.first is model.second[0]
        assert new.dtype == key.dtype
        assert more["key"][0] is not model.first
    ref = jax.new_ref(jnp.ones(2))
    assert st.jit(lambda r, pair: (r is pair[0].first, pair[1] is r))(ref, (Pair(ref, None), ref)) == (True, True)


def test_any_keyword_names():
    f = st.jit(lambda m, **options: st.tree.map(lambda x: x + 1, m), donate_argnums=0)
    model = Pair(jnp.zeros(2), None)
    for _ in range(4):
        model = f(model, **{"x-1": 2.0, "class": 1.0})
    assert model.first[0] == 4


def test_an_attribute_that_is_no_field_stays_where_fields_are_written_in_place():
    record = Record(jnp.ones(2), [jnp.zeros(2)])
    record.kept = "no field"

    def change(record):
        record.left, record.name = record.left + 1, record.name + "!"
        record.right.append(record.left)

    f = st.jit(change, policy=st.Policy(in_place=True))
    for _ in range(3):
        f(record)
    assert record.kept == "no field"
    assert record.name == "record!!!"
    assert record.right[-1] is record.left
    np.testing.assert_array_equal(record.right, [[0, 0], [2, 2], [3, 3], [4, 4]])


@pytest.mark.parametrize("options", [{}, {"donate_argnums": 0}], ids=["kept", "donated"])
def test_what_is_static_where_it_is_stays_static_in_place(options):
    """A list in an Equinox module is walked by Equinox's convention, also where it alone has changed."""
    model = Pair(jnp.ones(2), [3, True, "text"])

    def function(m):
        if m.second[1]:
            m.second[0] += 1
        object.__setattr__(m, "first", m.first + 1)

    f = st.preserve_identities(jax.jit, policy=st.Policy(in_place=True))(function, **options)
    for i in range(3):
        f(model)
        assert model.second == [4 + i, True, "text"]
        assert [type(each) for each in model.second] == [int, bool, str]
        assert model.first[0] == 2 + i


@pytest.mark.slow
def test_a_tuple_that_is_found_while_it_is_filled():
    found = []

    class Finding(Mutable):
        pass

    def flatten(obj):
        found.extend(each for each in gc.get_objects() if type(each) in (tuple, list) and len(each) < 9)
        return (obj.x,), None

    jax.tree_util.register_pytree_node(Finding, flatten, lambda _, children: Finding(x=children[0]))
    f = st.jit(lambda pair, more, **named: (pair[0].x + more, named))
    for i in range(4):
        result, _ = f((Finding(x=jnp.ones(2)), Finding(x=jnp.zeros(i + 1))), 1.0, named=Finding(x=jnp.ones(i + 1)))
        assert result[0] == 2
        found.clear()


def test_a_policy_whose_flag_is_no_bool():
    f = st.jit(lambda x: x + 1, policy=st.Policy(in_place=1))
    assert [float(f(1.0)) for _ in range(3)] == [2.0] * 3


def test_a_class_that_is_written_to_in_python_is_built_once():
    counts = collections.Counter()

    @jax.tree_util.register_pytree_node_class
    class Counting:
        def __init__(self, a):
            self.a = a

        def tree_flatten(self):
            return (self.a,), None

        @classmethod
        def tree_unflatten(cls, aux, children):
            counts["unflatten"] += 1
            return cls(*children)

    def change(model):
        model.a = model.a + 1

    model, f = Counting(jnp.ones(2)), st.jit(change, policy=st.Policy(in_place=True))
    for _ in range(3):
        f(model)
    counts.clear()
    f(model)
    # Another one says which attributes a function gets with such an object.
    assert counts["unflatten"] == 2
    assert (model.a == 5).all()
