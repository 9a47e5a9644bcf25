"""Calls in C do what those in Python do: on random arguments, on those changed since, whatever their classes."""

import collections
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as hst

import sharedtree as st
from sharedtree.core._call_arguments import Arguments
from sharedtree.core._pack_and_unpack import Tags, pack
from sharedtree.core._walk import Rules
from sharedtree.transforms._leaf_groups import LeafSelection
from tests.counting import Counting
from tests.kinds import Slots, W
from tests.strategies import (
    Layer,
    Mutable,
    Pair,
    Point,
    Record,
    arguments,
    copy_dag,
    is_array,
    mutate,
    partition,
    paths,
)
from tests.walks import assert_walked_alike, calls_in_python, in_python, natively

RULES = [
    Rules(convention="outside", arrays=bool(arrays), containers=bool(containers), filtered=bool(filtered))
    for arrays, containers, filtered in ((1, 0, 0), (0, 0, 0), (1, 1, 0), (1, 0, 1))
]


def as_one(args, kwargs=None, static=()):
    kwargs = kwargs or {}
    return Arguments(tuple([f"arg{i}" for i in range(len(args))]), args, kwargs, static)


@natively
@given(args=arguments(), rules=hst.sampled_from(RULES))
def test_arguments_are_walked_alike(args, rules):
    half = len(args) // 2
    named = {f"name{9 - i}": arg for i, arg in enumerate(args[half:])}
    for each in (as_one(args), as_one(args[:half], named), as_one(args[:half], named, ("name9",) if named else ())):
        assert_walked_alike([each], rules, num_walks=2)
    assert_walked_alike([as_one(copy_dag(args))], rules, num_walks=2)


@natively
@given(args=arguments(), rules=hst.sampled_from(RULES), data=hst.data())
def test_arguments_that_changed_since_are_walked_alike(args, rules, data):
    args = copy_dag(args)
    mutable = [arg for arg in args if isinstance(arg, (Pair, Layer, Mutable, Record, list, dict))]
    for _ in range(6 if mutable else 1):
        assert_walked_alike([as_one(args)], rules, num_walks=2)
        if mutable:
            mutate(data.draw, data.draw(hst.sampled_from(mutable)))


def assert_alike(found, expected):
    """Results of two calls of one function with one argument: sharing, classes, static values and arrays."""
    assert partition(found) == partition(expected)
    for (path, x, _), (other, y, _) in zip(paths(found), paths(expected), strict=True):
        assert path == other
        assert type(x) is type(y)
        if is_array(x):
            np.testing.assert_array_equal(x, y)
        elif isinstance(x, (Layer, Record)):
            assert [vars(x).get(name) for name in ("width", "name")] == [
                vars(y).get(name) for name in ("width", "name")
            ]


def more(args):
    return st.tree.map(lambda x: x + 1 if jnp.issubdtype(jnp.asarray(x).dtype, jnp.number) else x, args)


@pytest.mark.parametrize("keep", [True, False], ids=["passed through", "new"])
@given(args=arguments())
def test_results_are_built_alike(keep, args):
    args = tuple([arg for arg in args if not isinstance(arg, (str, type(None)))])

    def function(*args):
        return args if keep else more(list(args))

    with in_python():
        expected = st.jit(function)(*args)
    f = st.jit(function)
    for _ in range(3):
        found = f(*args)
        assert_alike(found, expected)
        if keep:
            # What passes through is the very object, in C as in Python.
            both = zip(paths(list(found)), paths(list(expected)), paths(list(args)), strict=True)
            assert all((x is z) == (y is z) for (_, x, _), (_, y, _), (_, z, _) in both if isinstance(z, Layer | Pair))


def added(m, x):
    return st.tree.map(lambda w: w + x, m)


def by_name(f):
    return lambda m, x: f(m, x=x)


CALLS = {
    "plain": lambda: st.jit(added),
    "donated": lambda: st.jit(added, donate_argnums=0),
    "static": lambda: st.jit(added, static_argnums=1),
    "static, by name": lambda: by_name(st.jit(added, static_argnames="x")),
    "a namedtuple": lambda: st.jit(lambda m, x: Point(m.first + x, m.second)),
    "a shard": lambda: st.jit(added, out_shardings=jax.sharding.SingleDeviceSharding(jax.devices()[0])),
    "passed through": lambda: st.jit(lambda m, x: m),
    "vmap": lambda: st.vmap(added, in_axes=(0, None)),
    "axes inside": lambda: st.vmap(added, in_axes=(Pair(0, 0), None)),
    "grad": lambda: st.grad(lambda m, x: (m.first * m.second * x).sum()),
    "value_and_grad": lambda: st.value_and_grad(lambda m, x: (m.first * x).sum()),
    "checkpoint": lambda: st.checkpoint(added),
    "filter_jit": lambda: by_name(st.filter_jit(added)),
    "filter_jit, by name only": lambda: by_name(st.filter_jit(lambda m, *, x: added(m, x))),
}


@natively
@pytest.mark.parametrize("name", CALLS)
def test_a_warm_call_asks_python_for_nothing(name):
    def results():
        f = CALLS[name]()
        models = [Pair(w, w) for w in (jnp.arange(2.0), jnp.ones(2), jnp.zeros(2))]
        return [f(model, 2.0) for model in models]

    with calls_in_python() as left:
        found = results()
    assert len(left) == 1
    with in_python():
        assert_alike(found, results())


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
    # With half of a surrogate pair, which JAX cannot print; so `jit` takes none.
    g = st.vmap(lambda m, **options: m.first * options["\ud800"])
    for i in range(3):
        np.testing.assert_array_equal(g(Pair(jnp.arange(2), None), **{"\ud800": jnp.full(2, i)}), [0, i])


@given(are_tied=hst.lists(hst.booleans(), max_size=6))
def test_calls_that_cut_a_tie_and_calls_that_do_not(are_tied):
    f, vanilla = st.vmap(lambda a, b: a.first * b.first, in_axes=(0, None)), jax.vmap(jnp.multiply, in_axes=(0, None))
    for i, is_tied in enumerate(are_tied):
        w = jnp.arange(2.0) + i
        other = w if is_tied else 3 * w
        np.testing.assert_array_equal(f(Pair(w, None), Pair(other, None)), vanilla(w, other))


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
    """A list in an Equinox module is walked by Equinox's convention, also where it alone has changed.

    The array in it is as it was, also where its buffer was given away.
    """
    model = Pair(jnp.ones(2), [3, True, "text", jnp.ones(2)])

    def function(m):
        if m.second[1]:
            m.second[0] += 1
        object.__setattr__(m, "first", m.first + 1)

    f = st.preserve_identities(jax.jit, policy=st.Policy(in_place=True))(function, **options)
    for i in range(3):
        f(model)
        *statics, array = model.second
        assert statics == [4 + i, True, "text"]
        assert [type(each) for each in statics] == [int, bool, str]
        np.testing.assert_array_equal(array, [1, 1])
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


def test_ordered_dictionaries_deques_and_slots_are_written_in_place():
    named, ends, slots = collections.OrderedDict(x=W), collections.deque([W], 2), Slots(W, "slots")
    model = Mutable(a=named, b=ends, c=slots)

    def change(model):
        model.a["x"], model.a["y"] = model.a["x"] + 1, 0 * model.b[0]
        model.b.append(2 * model.a["x"])
        model.c.w = 3 * model.c.w

    f = st.jit(change, in_place=True)
    for i in range(4):
        f(model)
        assert model.a is named
        assert model.b is ends
        assert model.c is slots
        assert (model.a["x"][0], model.a["y"][0], model.b[-1][0]) == (2 + i, 0, 4 + 2 * i)
        assert (model.c.w[0], model.c.static) == (3 ** (i + 1), "slots")
    assert (list(named), len(ends), ends.maxlen) == (["x", "y"], 2, 2)


@given(calls=hst.lists(hst.tuples(hst.sampled_from(["", "a", "b", "ab"]), hst.integers(0, 2)), max_size=8))
def test_static_arguments_that_are_left_out(calls):
    """Calls of several forms have the same hands, and each has static arguments of its own."""

    def function(m, a=5, b=7):
        assert (type(a), type(b)) == (int, int)
        return Pair(m.first + 10 * a + b, m.first)

    f, m = st.jit(function, static_argnames=("a", "b")), Pair(jnp.zeros(()), None)
    for names, value in calls:
        given = {name: value + place for place, name in enumerate(names)}
        assert f(m, **given).first == function(m, **given).first


def test_selections_of_the_same_leaves_are_one_key():
    _, structure = pack([jnp.ones(2), jnp.ones(2)], Tags())
    assert {LeafSelection(structure): 1, LeafSelection(structure, (0,)): 2}[LeafSelection(structure, (0,))] == 2
    assert LeafSelection(structure, (0,)) != LeafSelection(structure, (1,))
    assert LeafSelection(structure) != structure


def test_a_selection_that_leads_to_itself_is_collected():
    call = Mutable()
    call.selection, reference = LeafSelection(st.tree.structure(jnp.ones(2)), None, call), weakref.ref(call)
    del call
    gc.collect()
    assert reference() is None


def test_a_policy_whose_flag_is_no_bool():
    f = st.jit(lambda x: x + 1, policy=st.Policy(in_place=1))
    assert [float(f(1.0)) for _ in range(3)] == [2.0] * 3


def test_a_class_that_is_written_to_in_python_is_built_once():
    def change(model):
        model.a = model.a + 1

    model, f = Counting(jnp.ones(2), None), st.jit(change, policy=st.Policy(in_place=True))
    for _ in range(3):
        f(model)
    Counting.counts.clear()
    f(model)
    # Another one says which attributes a function gets with such an object.
    assert Counting.counts["unflatten"] == 2
    assert (model.a == 5).all()


@pytest.mark.parametrize("size", [2, 31, 32, 33, 34, 200])
@pytest.mark.parametrize("twice", [False, True])
def test_one_leaf_that_comes_twice_among_many(size, twice):
    """Few are compared pair by pair, many in a table."""

    def function(x):
        arrays = [x + i for i in range(size)]
        return Pair(arrays, arrays[0] if twice else x - 1)

    def shared_with(pair):
        return [i for i, array in enumerate(pair.first) if array is pair.second]

    x = jnp.arange(3.0)
    with in_python():
        expected = st.vmap(function)(x)
    transformed = st.vmap(function)
    for _ in range(3):
        found = transformed(x)
        assert shared_with(found) == shared_with(expected)
        np.testing.assert_array_equal(jnp.stack(found.first), jnp.stack(expected.first))


@pytest.mark.parametrize("sizes", [(3, 200, 3), (200, 3, 200), (600, 150, 5_000, 4)])
def test_trees_of_many_sizes_one_after_the_other(sizes):
    """Each walk has the memory of the one before."""
    step = st.jit(lambda pairs: st.tree.map(lambda x: x + 1, pairs))
    for size in sizes:
        for _ in range(2):
            shared = jnp.ones(2)
            pairs = [Pair(shared, np.float32(i)) for i in range(size)]
            found = step(pairs)
            assert len({id(pair.first) for pair in found}) == 1  # alive in `found`
            assert [float(pair.second) for pair in found] == list(range(1, size + 1))
