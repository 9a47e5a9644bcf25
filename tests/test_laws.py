"""The laws of packing, which are in `tests/laws.py`, as properties over random DAGs."""

import jax
import pytest
from hypothesis import given, settings, strategies as hst

import sharedtree as st
from tests import laws
from tests.laws import TRANSFORMS
from tests.strategies import arguments, dags, is_array, occurrences, partition

# 1. Partition


@pytest.mark.parametrize("name", TRANSFORMS)
@given(args=arguments(), data=hst.data())
def test_partition(name, args, data):
    laws.partition_inside_is_that_outside(name, args, data)


@given(dag=dags())
def test_partition_without_arrays(dag):
    """`Policy(arrays=False)`: modules and containers keep identity, arrays come apart."""
    policy = st.Policy(arrays=False, on_untie="ignore", pass_through=False)
    result = st.preserve_identities(jax.jit, policy=policy)(lambda x: st.tree.map(lambda v: v, x))(dag)
    nodes = {path: obj for path, obj in occurrences(dag).items() if not is_array(obj)}
    outside = {path: obj for path, obj in occurrences(result).items() if not is_array(obj)}
    for a, x in nodes.items():
        for b, y in nodes.items():
            assert (x is y) == (outside[a] is outside[b])


@given(dag=dags())
def test_partition_of_what_vmap_maps(dag):
    laws.partition_of_what_vmap_maps(dag)


# 2. Transparency: values, on DAGs, against the untied twin


@given(args=arguments(), name=hst.sampled_from(sorted(TRANSFORMS.keys() - {"jit without pass-through"})))
def test_values_are_those_of_the_untied_twin(args, name):
    laws.values_are_those_of_the_untied_twin(args, name)


@given(dag=dags())
def test_a_tied_gradient_is_the_sum_over_its_paths(dag):
    laws.a_tied_gradient_is_the_sum_over_its_paths(dag)


# 3. Once


@given(args=arguments())
def test_a_tied_leaf_is_one_input_and_one_output(args):
    laws.a_tied_leaf_is_one_input_and_one_output(args)


@given(dag=dags())
def test_a_tied_leaf_is_donated_once(dag):
    laws.a_tied_leaf_is_donated_once(dag)


# 4. Stability


@given(args=arguments())
@settings(max_examples=20)
def test_equal_structure_does_not_retrace(args):
    laws.equal_structure_does_not_retrace(args)


@given(dag=dags())
@settings(max_examples=20)
def test_other_sharing_retraces_once(dag):
    laws.other_sharing_retraces_once(dag)


# 5. Round trip


@given(dag=dags())
def test_round_trip(dag):
    laws.round_trip(dag)


@given(args=arguments())
def test_round_trip_in_a_context(args):
    with st.Context():
        packed = [st.tree.flatten(arg) for arg in args]
    with st.Context():
        again = tuple(st.tree.unflatten(structure, leaves) for leaves, structure in packed)
    everything_inside = partition(list(args))
    assert partition(list(again)) == everything_inside


# In place and pass-through


@given(dag=dags())
def test_in_place_changes_the_callers_objects_and_no_others(dag):
    laws.in_place_changes_the_callers_objects_and_no_others(dag)


@given(dag=dags())
def test_pass_through_is_what_vanilla_would_return(dag):
    laws.pass_through_is_what_vanilla_would_return(dag)
