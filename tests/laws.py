"""The laws of packing: each is a function that fails if the law does not hold for a DAG, or for a call's arguments.

`test_laws.py` asks them of the DAGs of `tests.strategies`, `compat/test_treeo.py` of trees of treeo. The oracles are
what vanilla JAX does with the untied twin, and what `tests.strategies` knows of its own classes.
"""

import gc

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import assume, strategies as hst

import sharedtree as st
from tests.strategies import (
    MODULES,
    Mutable,
    Pair,
    children,
    copy_dag,
    is_array,
    occurrences,
    partition,
    paths,
    python_numbers,
    twin,
    unique_arrays,
)

IGNORE = st.Policy(on_untie="ignore")


TRANSFORMS = {
    "jit": st.preserve_identities(jax.jit, policy=IGNORE),
    "jit without pass-through": st.preserve_identities(
        jax.jit, policy=st.Policy(pass_through=False, on_untie="ignore")
    ),
    "checkpoint": st.preserve_identities(jax.checkpoint, policy=IGNORE),
    "filter_jit": st.preserve_identities(eqx.filter_jit, policy=IGNORE),
    "filter_checkpoint": st.preserve_identities(eqx.filter_checkpoint, policy=IGNORE),
    "vmap over nothing": st.preserve_identities(jax.vmap, policy=IGNORE, in_axes=None, out_axes=None, axis_size=2),
}


# --- 1. Partition --------------------------------------------------------------------------------------------------


def partition_inside_is_that_outside(name, args, data):
    """Objects that are one outside are one inside, across all arguments, and results likewise."""
    assume(not python_numbers(args))  # values outside, but tracers inside
    seen = {}

    def f(*args):
        seen["arguments"] = partition(args, inside=False)
        again = data.draw(hst.permutations(range(len(args))), label="order")
        result = ({"all": args}, [args[i] for i in again], wrapped(args))
        seen["result"] = partition(result, inside=False)
        return result

    def wrapped(args):
        modules = [x for x in args if isinstance(x, MODULES)]
        return Pair(modules[0], Pair(modules[-1], list(modules))) if modules else None

    result = TRANSFORMS[name](f)(*args)
    assert seen["arguments"] == partition(args, inside=False)
    assert partition(result, inside=False) == seen["result"]


def partition_of_what_vmap_maps(dag):
    """A mapped DAG keeps its ties inside and in both results: the one unchanged, and the one computed."""
    assume(not python_numbers([dag]))  # which have no axis to map, in vanilla JAX neither
    stacked = copy_dag(dag, lambda x: jnp.stack([x, x]))
    seen = []

    def f(x):
        seen.append(partition(x))
        return x, st.tree.map(lambda v: v * 2, x)

    same, doubled = st.preserve_identities(jax.vmap, policy=IGNORE, axis_size=2)(f)(stacked)
    assert seen[0] == partition(dag) == partition(same) == partition(doubled)
    for leaf, original in zip(unique_arrays(doubled), unique_arrays(stacked), strict=True):
        np.testing.assert_array_equal(leaf, original * 2)


# --- 2. Transparency -----------------------------------------------------------------------------------------------


def values_are_those_of_the_untied_twin(args, name):
    """A loss of the DAG is vanilla's loss of a tree of the same values without ties."""
    assume(not python_numbers(args))  # traced here, static under `filter_jit`
    vanilla = loss(*[twin(arg) for arg in args])
    np.testing.assert_allclose(TRANSFORMS[name](loss)(*args), vanilla, rtol=1e-5, atol=1e-5)


def a_tied_gradient_is_the_sum_over_its_paths(dag):
    """Gradients by `jax.grad`, `eqx.filter_grad` and under `jit` pass `assert_gradient`."""
    assume(not python_numbers([dag]))  # of which those of JAX's classes are differentiated, as in `test_leaves.py`
    per_path = eqx.filter_grad(loss)(twin(dag))
    for transform in (jax.grad, eqx.filter_grad):
        assert_gradient(dag, st.preserve_identities(transform)(loss)(dag), per_path)
    value, gradient = st.jit(st.value_and_grad(loss))(dag)
    np.testing.assert_allclose(value, loss(dag), rtol=1e-5, atol=1e-5)
    assert_gradient(dag, gradient, per_path)


# --- 3. Once -------------------------------------------------------------------------------------------------------


def a_tied_leaf_is_one_input_and_one_output(args):
    """The jaxpr has one input for each array of the modules, and one for each path of a bare array."""

    def f(*args):
        return tuple(st.tree.map(lambda v: v + v, arg) if isinstance(arg, MODULES) else arg for arg in args)

    traced = st.preserve_identities(jax.jit, policy=IGNORE)(f).trace(*args)
    bare = [x for arg in args for _, x, within in paths(arg, inside=False) if not within and is_array(x)]
    modules = [m for arg in args for _, m, within in paths(arg, inside=False) if not within and isinstance(m, MODULES)]
    assert len(traced.jaxpr.in_avals) == len(unique_arrays(*modules)) + len(bare) + python_numbers(modules)


def a_tied_leaf_is_donated_once(dag):
    """The program gives one buffer for each array away, and the arrays are deleted."""
    assume(not python_numbers([dag]))
    dag = copy_dag(dag)
    expected = len([x for x in unique_arrays(dag) if isinstance(x, jax.Array)])
    f = st.preserve_identities(jax.jit, policy=IGNORE, donate_argnums=0)(
        lambda x: st.tree.map(lambda v: v + v if is_array(v) else v, x)
    )
    text = f.lower(dag).as_text()
    assert text.count("tf.aliasing_output") + text.count("jax.buffer_donor") == expected
    result = f(dag)
    assert partition(result) == partition(dag)
    assert all(x.is_deleted() for x in unique_arrays(dag) if isinstance(x, jax.Array))


# --- 4. Stability --------------------------------------------------------------------------------------------------


def equal_structure_does_not_retrace(args):
    """Other objects with equal sharing need no new trace, and have the same structure."""
    traces = []
    f = st.preserve_identities(jax.jit, policy=IGNORE)(lambda *args: traces.append(1))
    f(*args)
    for _ in range(3):
        together = copy_dag(args)
        gc.collect(1)  # what was made here is young
        f(*together)
    assert len(traces) == 1
    assert st.tree.structure(args[0]) is st.tree.structure(copy_dag(args[0]))


def other_sharing_retraces_once(dag):
    """A twin without ties is traced once more, if it shares differently at all."""
    traces = []
    f = st.preserve_identities(jax.jit, policy=IGNORE)(lambda x: traces.append(1))
    f(copy_dag(dag))
    f(copy_dag(dag))
    assert len(traces) == 1
    loose = twin(dag)
    f(loose)
    f(twin(dag))
    assert len(traces) == (1 if partition(loose) == partition(dag) else 2)


# --- 5. Round trip -------------------------------------------------------------------------------------------------


def round_trip(dag):
    """Unflattening gives the same classes, arrays, static values and sharing."""
    leaves, structure = st.tree.flatten(dag)
    again = st.tree.unflatten(structure, leaves)
    assert st.tree.structure(again) is structure
    assert partition(again) == partition(dag)
    before, after = list(paths(dag)), list(paths(again))
    assert [p for p, _, _ in before] == [p for p, _, _ in after]
    for (_, x, _), (_, y, _) in zip(before, after, strict=True):
        assert type(x) is type(y)
        if is_array(x):
            assert x is y
        elif not children(x) and not isinstance(x, (list, dict, tuple, *MODULES)):
            assert x == y
    assert len(leaves) == len(unique_arrays(dag)) + python_numbers([dag])


# --- In place and pass-through -------------------------------------------------------------------------------------


def in_place_changes_the_callers_objects_and_no_others(dag):
    """With `in_place`, the caller's objects get the new values, and the others stay the very objects."""
    dag = copy_dag(dag)
    before = {path: obj for path, obj, _ in paths(dag)}
    model = Mutable(dag=dag, count=jnp.zeros(()), log=[dag])

    def f(model):
        model.count = model.count + 1
        model.log.append(model.count)

    st.preserve_identities(jax.jit, policy=st.Policy(in_place=True))(f)(model)
    assert float(model.count) == 1
    assert model.log[1] is model.count
    assert model.dag is dag is model.log[0]
    for path, obj, _ in paths(dag):
        if occurrences(dag).get(path) is not None:
            assert obj is before[path]


def pass_through_is_what_vanilla_would_return(dag):
    """A model of JAX arrays comes back as the caller's object. Any other comes back with equal arrays of JAX."""
    result = st.jit(lambda x: x)(dag)
    leaves = unique_arrays(dag)
    numbers = python_numbers([dag])
    assert (result is dag) == (all(isinstance(x, jax.Array) for x in leaves) and not numbers)
    for ours, original in zip(unique_arrays(result), leaves, strict=False):
        if not numbers:
            assert isinstance(ours, jax.Array)
            np.testing.assert_array_equal(ours, original)
    assert partition(result) >= partition(dag) or numbers


# --- oracles -------------------------------------------------------------------------------------------------------


def is_floating(obj):
    return is_array(obj) and jnp.issubdtype(obj.dtype, jnp.floating)


def floats(tree):
    """The floating leaves of a tree, one for each path."""
    return [x for x in jax.tree.leaves(tree) if is_floating(x)]


def loss(*trees):
    """A sum to which every path of every floating leaf adds, each with a weight of its own."""
    return sum(((i + 1) * jnp.sin(x).sum() for i, x in enumerate(floats(trees))), jnp.float32(0))


def assert_gradient(dag, gradient, per_path):
    """Compares a gradient with that of the untied twin.

    It has the classes and the sharing of the DAG, and None for leaves that are not floating point. The gradient of a
    leaf is the sum over its paths.
    """
    at = {path: obj for path, obj, _ in paths(dag)}
    of = {path: obj for path, obj, _ in paths(gradient)}
    twins = {path: obj for path, obj, _ in paths(per_path)}
    assert at.keys() == of.keys()
    by_object = {}
    for path, obj in at.items():
        by_object.setdefault(id(obj), []).append(path)
    for path, obj in at.items():
        if is_floating(obj):
            expected = sum(np.asarray(twins[other]) for other in by_object[id(obj)])
            np.testing.assert_allclose(of[path], expected, rtol=1e-5, atol=1e-5)
            assert of[path].dtype == obj.dtype
        elif children(obj) or isinstance(obj, MODULES):
            assert type(of[path]) is type(obj)
        elif not isinstance(obj, (list, dict, tuple)):
            assert of[path] is None
    shared = {frozenset(p for p in each if is_floating(at[p])) for each in partition(dag)} - {frozenset()}
    for each in shared:
        assert len({id(of[p]) for p in each}) == 1
    distinct = [of[min(each, key=str)] for each in shared]
    assert len({id(x) for x in distinct}) == len(distinct)
