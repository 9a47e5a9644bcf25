"""`sharedtree.tree`: without ties equal to `jax.tree` and Equinox, with ties to what was worked out by hand."""

import collections
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax import tree_util as jtu

import sharedtree as st
from tests.in_jax import assert_same_tree
from tests.models import Linear
from tests.strategies import Pair, Point, copy_dag, dags, is_array, partition, unique_arrays


def untied_trees():
    one = lambda i: jnp.full(2, float(i))
    return {
        "array": one(0),
        "dict": {"b": one(1), "a": [one(2), (one(3), None)]},
        "ordered": collections.OrderedDict([("b", one(1)), ("a", one(2))]),
        "defaultdict": collections.defaultdict(list, {"z": one(1), "y": one(2)}),
        "namedtuple": Point(one(1), [one(2)]),
        "none": None,
        "empty": {"a": [], "b": (), "c": {}},
        "module": Pair(Linear(one(1), one(2), None), [Linear(one(3), None, None)]),
        "numbers": [1, 2.0, True, 1j],
        "numpy": [np.ones(2), np.zeros((2, 1), np.int8)],
        "partial": jtu.Partial(jnp.add, one(1), out=one(2)),
    }


TREES = untied_trees()


@pytest.fixture(params=TREES)
def untied(request):
    return TREES[request.param]


IS_LEAF = {"default": None, "nodes": lambda x: isinstance(x, (list, Linear)), "none": lambda x: x is None}


@pytest.mark.parametrize("is_leaf", IS_LEAF.values(), ids=IS_LEAF)
def test_all_is_that_of_jax(untied, is_leaf):
    leaves, structure = st.tree.flatten(untied, is_leaf)
    ours, theirs = (library.tree.leaves_with_path(untied, is_leaf) for library in (st, jax))
    for found in (leaves, st.tree.leaves(untied, is_leaf), [leaf for _, leaf in ours]):
        assert all(a is b for a, (_, b) in zip(found, theirs, strict=True))
    assert [jtu.keystr(path) for path, _ in ours] == [jtu.keystr(path) for path, _ in theirs]
    assert_same_tree(st.tree.unflatten(structure, leaves), untied)
    assert st.tree.structure(untied, is_leaf) is structure
    for map_ in ("map", "map_with_path"):
        f = lambda *args: [jtu.keystr(args[0]) if map_ == "map_with_path" else "leaf", *reversed(args[-2:])]
        for trees in ([untied], [untied, untied]):
            ours, theirs = (getattr(library.tree, map_)(f, *trees, is_leaf=is_leaf) for library in (st, jax))
            assert_same_tree(ours, theirs)


def test_rest_of_another_shape_is_an_error_with_its_path():
    tree = {"m": [jnp.ones(2), jnp.ones(3)]}
    for rest in ([1], [1, 2, 3], {"a": 1}, (1, 2), 5):
        with pytest.raises(ValueError):
            jax.tree.map(lambda x, y: x, tree, {"m": rest})
        with pytest.raises(
            st.errors.SharingMismatchError, match=r"differ in shape at `\['m'\]`.*`second_tree`"
        ) as caught:
            st.tree.map(lambda x, y: x, tree, {"m": rest})
        assert caught.value.paths == ("['m']",)


def test_unflatten_with_too_few_or_too_many_leaves():
    leaves, structure = st.tree.flatten([jnp.ones(2), jnp.ones(2)])
    for wrong in (leaves[:1], [*leaves, leaves[0]]):
        with pytest.raises(ValueError, match=f"has 2 traced leaves, but {len(wrong)} were given"):
            st.tree.unflatten(structure, wrong)
    assert_same_tree(st.tree.unflatten(structure, iter(leaves)), leaves)


@given(tree=dags())
def test_every_kind_of_tie_is_kept(tree):
    """By `map`, which calls once for each array, by both halves of a partition, and by what puts them together."""
    calls = []

    def doubled(x):  # of an array without dimensions NumPy makes a number
        return np.asarray(x + x) if isinstance(x, np.ndarray) else x + x

    new = st.tree.map(lambda x: (calls.append(x), doubled(x))[1] if is_array(x) else x, tree)
    assert all(a is b for a, b in zip(calls, unique_arrays(tree), strict=True))
    expected = copy_dag(tree, doubled)
    assert_same_tree(new, expected)
    assert partition(new) == partition(expected)
    halves = st.tree.partition(tree, eqx.is_inexact_array)
    for half, is_inexact in zip(halves, (True, False), strict=True):
        of_half = copy_dag(tree, lambda x, is_inexact=is_inexact: x if eqx.is_inexact_array(x) is is_inexact else None)
        assert partition(half) == partition(of_half)
    joined = st.tree.combine(*halves)
    assert_same_tree(joined, tree)
    assert partition(joined) == partition(tree)


def test_map_calls_once_for_what_is_said_to_be_a_leaf():
    layer, calls = Linear(jnp.ones(2)), []
    is_layer = lambda x: isinstance(x, Linear)
    new = st.tree.map(lambda x: calls.append(x) or "new", Pair([layer], {"layer": layer}), is_leaf=is_layer)
    assert new.first[0] == new.second["layer"] == "new"
    assert [call is layer for call in calls] == [True]


def test_none_and_equal_values_without_identity_in_rest_are_one():
    w, v = jnp.ones(2), jnp.zeros(2)
    got, tree = [], {"a": w, "b": w}
    new = st.tree.map(lambda x, y: got.append(y) or x, tree | {"c": v}, {"a": None, "b": None, "c": 4})
    assert got == [None, 4]
    assert new["a"] is new["b"] is w
    assert st.tree.map(lambda x, y: y, tree, {"a": (0, "x"), "b": (0, "x")}) == {"a": (0, "x"), "b": (0, "x")}
    assert st.tree.map(lambda x, y: y, jtu.Partial(max, w, w), jtu.Partial(max, 2.0, 2.0)).args == (2.0, 2.0)
    for other in ({"a": 0, "b": 1}, {"a": jnp.zeros(2), "b": None}):
        with pytest.raises(st.errors.SharingMismatchError) as caught:
            st.tree.map(lambda x, y: y, tree, other)
        assert caught.value.paths == ("['a']", "['b']")


@pytest.mark.parametrize("level", ["array", "module"])
def test_an_untied_copy_in_rest_is_an_error_naming_both_paths_and_the_fix(level):
    layer = Linear(jnp.ones(2))
    tree = Pair(layer, [layer]) if level == "module" else Pair(layer.weight, [layer.weight])
    copy = jax.tree.map(lambda x: x + 0 if eqx.is_array(x) else x, tree)
    suffix = ".weight" if level == "module" else ""
    with pytest.raises(st.errors.SharingMismatchError) as caught:
        st.tree.map(lambda x, y, z: x, tree, tree, copy)
    assert caught.value.paths == (f".first{suffix}", f".second[0]{suffix}")
    for part in (
        f"`.first{suffix}`",
        f"`.second[0]{suffix}`",
        "third_tree",
        "sharedtree.retie(third_tree, like=first_tree)",
    ):
        assert part in str(caught.value)
    with pytest.raises(ValueError):  # the built-in base class
        st.tree.map(lambda x, y: x, tree, copy)


IN_CONTAINERS = {
    "dict": lambda w: {"a": w, "b": w},
    "module": lambda w: Pair(w, w),
    "dict in a module": lambda w: Pair({"a": w}, {"a": w}),
    "module in a dict": lambda w: {"a": Linear(w), "b": Linear(w)},
    "both": lambda w: {"a": Linear(w), "b": w},
}


@pytest.mark.parametrize("which", IN_CONTAINERS)
def test_what_was_added_up_is_told_what_keeps_ties(which):
    """And of a policy only if a transform would take the tied arrays for values."""
    tree = IN_CONTAINERS[which](jnp.ones(2))
    loose = jax.tree.map(lambda x: x + 0 if eqx.is_array(x) else x, tree)
    with pytest.raises(st.errors.SharingMismatchError) as mapped:
        st.tree.map(jnp.add, tree, loose)
    with pytest.raises(st.errors.SharingMismatchError) as applied:
        st.apply_updates(tree, jax.tree.map(lambda x, y: x + y if eqx.is_array(x) else x, loose, loose))
    assert "    second_tree = sharedtree.tree.map(jnp.add, one, other)" in str(mapped.value)
    for caught in (mapped, applied):
        assert ("Policy" in str(caught.value)) is (which in ("dict", "both"))
        assert len(caught.value.paths) == 2


def stack(*leaves):
    return jnp.stack(leaves)


def blocks_of(shared, count=3):
    return [Pair(jnp.full(2, float(i)), shared) for i in range(count)]


STACKED = {
    "a layer in all": (lambda layer: blocks_of(layer), ".second"),
    "a layer in some": (lambda layer: [*blocks_of(layer, 2), Pair(jnp.ones(2), copy_dag(layer))], ".second"),
    "the very operands": (lambda layer: [layer] * 3, ""),
    "in containers": (lambda layer: [{"own": jnp.ones(2), "net": [layer]} for _ in range(2)], "['net'][0]"),
    "the largest": (lambda layer: blocks_of(Pair(layer, layer)), ".second"),
}


@pytest.mark.parametrize("name", STACKED)
@pytest.mark.parametrize("how", [stack, lambda *leaves: jnp.concatenate(leaves)], ids=["stack", "concatenate"])
def test_a_shared_module_that_is_stacked_with_itself_is_said(name, how):
    build, path = STACKED[name]
    blocks = build(Pair(jnp.arange(2.0), jnp.ones(3)))
    with pytest.warns(st.UntiedWarning, match="has stacked it with itself") as caught:
        stacked = st.tree.map(how, *blocks)
    (warning,) = caught
    assert all(f"`{place}{path}`" in str(warning.message) for place in ("trees[0]", "trees[1]"))
    assert warning.filename == __file__
    assert len(str(warning.message).splitlines()) <= 8
    for ours, theirs in zip(jtu.tree_leaves(stacked), jtu.tree_leaves(jax.tree.map(how, *blocks)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    with st.Context(st.Policy(on_untie="error")), pytest.raises(st.errors.UntiedError) as error:
        st.tree.map(how, *blocks)
    assert error.value.paths[:2] == (f"tree{path}", f"rest[0]{path}")
    with st.Context(st.Policy(on_untie="ignore")):
        st.tree.map(how, *blocks)
    st.tree.map(how, *st.untie(blocks))
    with pytest.warns(st.UntiedWarning, match="cannot|has stacked") as caught:
        st.jit(lambda blocks: st.tree.map(how, *blocks))(blocks)
    assert len(caught) == 1


def test_what_is_not_stacked_or_shared_is_mapped_in_silence():
    layer = Pair(jnp.arange(2.0), jnp.ones(3))
    blocks = blocks_of(layer)
    for f in (
        lambda *leaves: sum(leaves) / 3,  # a mean of models that share a layer shares it as well
        lambda one, two, _: jnp.where(one[0] > 0, one, two),
        lambda *leaves: jnp.linalg.norm(leaves[0] - leaves[1]),
        lambda *leaves: leaves,
    ):
        st.tree.map(f, *blocks)
    w = jnp.ones(2)
    for alike in ([Pair(w, w), Pair(w, w)], [{"a": w}, {"a": w}], [Pair([w], 1), Pair([w], 1)]):  # arrays alias
        st.tree.map(stack, *alike)
    container = [w]
    st.tree.map(stack, Pair(container, 1), Pair(container, 1))
    nothing = Pair(None, jnp.tanh)
    st.tree.map(stack, *blocks_of(nothing))
    st.tree.map(stack, *[Pair(jnp.ones(2), copy_dag(layer)) for _ in range(3)])


def test_a_deque_is_a_container_here_although_a_leaf_for_jax():
    w = jnp.ones(2)
    queue = collections.deque([w, [w]], maxlen=3)
    new = st.tree.map(lambda x: x + 1, queue)
    assert type(new) is collections.deque
    assert new.maxlen == 3
    assert new[0] is new[1][0]
    assert [jtu.keystr(path) for path, _ in st.tree.leaves_with_path(queue)] == ["[0]"]


def test_at_equals_tree_at_where_nothing_is_tied():
    tree = Pair(Linear(jnp.ones(2), jnp.zeros(1)), {"k": [jnp.ones(3), 4]})
    x = jnp.full(2, 7.0)
    for where, replace in [
        (lambda m: m.first.weight, x),
        (lambda m: m.first, x),
        (lambda m: (m.first.weight, m.second["k"][0]), (x, None)),
        (lambda m: [m.second["k"][1], m.first], [5, x]),
        (lambda m: m.first.activation, jnp.sin),
        (lambda m: m.second["k"], (1, 2)),
    ]:
        assert_same_tree(st.tree.at(where, tree, replace), eqx.tree_at(where, tree, replace))
    where = lambda m: (m.first.weight, m.second["k"][0])
    assert_same_tree(
        st.tree.at(where, tree, replace_fn=lambda x: 2 * x), eqx.tree_at(where, tree, replace_fn=lambda x: 2 * x)
    )


def test_at_replaces_none_and_wants_one_replacement_for_each_place():
    tree = Pair(Linear(jnp.ones(2)), None)
    x = jnp.zeros(2)
    bias = lambda m: m.first.bias
    assert_same_tree(st.tree.at(bias, tree, x), eqx.tree_at(bias, tree, x, is_leaf=lambda y: y is None))
    both = st.tree.at(lambda m: (m.first.bias, m.second), tree, (x, 3))
    assert both.first.bias is x
    assert both.second == 3
    assert st.tree.at(lambda m: m.second, tree, 3).first.bias is None
    weight = lambda m: m.first.weight
    assert st.tree.at(weight, tree, None).first.weight is None
    for arguments in ({}, {"replace": 1, "replace_fn": lambda x: x}):
        with pytest.raises(ValueError, match="exactly one"):
            st.tree.at(weight, tree, **arguments)
    with pytest.raises(ValueError, match="returned 2 nodes, but `replace` has 1"):
        st.tree.at(lambda m: (m.first, m.second), tree, (1,))


SPECS = {
    "is_array": eqx.is_array,
    "is_inexact_array": eqx.is_inexact_array,
    "True": True,
    "False": False,
    "prefix": Pair(True, {"i": False, "rest": eqx.is_array}),
}


@pytest.mark.parametrize("spec", SPECS)
def test_filter_and_partition_equal_those_of_equinox(spec):
    rest = [1, "text", None, jnp.ones(1)]
    tree = Pair(Linear(jnp.ones(2), np.zeros(1), jax.nn.relu), {"i": jnp.arange(2), "rest": rest})
    spec = SPECS[spec]
    assert_same_tree(st.tree.filter(tree, spec), eqx.filter(tree, spec))
    assert_same_tree(st.tree.filter(tree, spec, inverse=True), eqx.filter(tree, spec, inverse=True))
    assert_same_tree(st.tree.filter(tree, spec, replace=0), eqx.filter(tree, spec, replace=0))
    ours, theirs = st.tree.partition(tree, spec), eqx.partition(tree, spec)
    for mine, expected in zip(ours, theirs, strict=True):
        assert_same_tree(mine, expected)
    assert_same_tree(st.tree.combine(*ours), eqx.combine(*theirs))
    assert_same_tree(st.tree.combine(*ours), tree)
    assert_same_tree(st.tree.combine(*reversed(ours)), tree)


def test_filter_with_is_leaf_and_combine_as_equinox():
    tree = [None, jnp.ones(2), [1, 2]]
    for is_leaf in (lambda x: x is None, lambda x: isinstance(x, list) and len(x) == 2):
        spec = lambda x: x is None or isinstance(x, list)
        assert_same_tree(
            st.tree.filter(tree, spec, replace=0, is_leaf=is_leaf), eqx.filter(tree, spec, replace=0, is_leaf=is_leaf)
        )
    a, b, c = jnp.ones(2), jnp.zeros(2), jnp.full(2, 2.0)
    trees = [{"x": a, "y": None, "z": None}, {"x": b, "y": b, "z": None}, {"x": None, "y": c, "z": c}]
    assert_same_tree(st.tree.combine(*trees), eqx.combine(*trees))
    assert st.tree.combine(*trees)["x"] is a


def test_a_prefix_that_splits_a_tie_is_an_error():
    w = jnp.ones(2)
    with pytest.raises(st.errors.InconsistentSharingError) as caught:
        st.tree.partition({"a": w, "b": w}, {"a": True, "b": False})
    assert caught.value.paths == ("['a']", "['b']")
    assert caught.value.treatments == ("selected", "not selected")
    assert "sharedtree.untie(model, lambda m: m['b'])" in str(caught.value)
    with pytest.raises(st.errors.InconsistentSharingError) as caught:
        st.tree.filter({"a": w, "b": w}, {"a": False, "b": True})
    assert caught.value.treatments == ("not selected", "selected")


def test_what_does_not_fit_is_an_error_with_its_path():
    for call, message in (
        (lambda: st.tree.filter({"a": [jnp.ones(2)]}, {"a": {"b": True}}), r"does not fit the tree at `\['a'\]`"),
        (lambda: st.tree.combine([jnp.ones(2), [None]], [None, (None,)]), "differ in shape"),
        (lambda: st.tree.combine({"a": 1, "b": None}, {"a": 1, "c": 2}), r"same keys, .*`\['b'\]`.*`\['c'\]`"),
        (lambda: st.tree.at(lambda m: jnp.ones(2), [jnp.ones(2)], 3), r"(?s)not part of the tree.*where=lambda m: \(m"),
    ):
        with pytest.raises(st.errors.SharingMismatchError, match=message):
            call()


def test_combine_ties_only_what_is_tied_in_all_that_have_it():
    shared, one, two = [None, jnp.ones(2)], [jnp.zeros(1), None], [jnp.zeros(1), None]
    joined = st.tree.combine({"a": shared, "b": shared}, {"a": one, "b": two})
    assert joined["a"] is not joined["b"]
    assert joined["a"][1] is joined["b"][1] is shared[1]
    assert joined["a"][0] is one[0]
    assert joined["b"][0] is two[0]


def test_equal_is_that_of_equinox_where_nothing_is_tied():
    arrays = jnp.ones(2), jnp.zeros(2), jnp.ones(3), jnp.ones(2, jnp.int32), jnp.ones(2) + 1e-4, np.ones(2, np.float32)
    tree, others = [jnp.ones(2), {"a": 1}], [[array, {"a": 1}] for array in arrays]
    others += [[jnp.ones(2), {"a": 2}], [jnp.ones(2), {"b": 1}], (jnp.ones(2), {"a": 1}), [jnp.ones(2)]]
    for other, options in itertools.product(others, ({}, {"atol": 1e-3}, {"rtol": 1e-3}, {"typematch": True})):
        assert bool(st.tree.equal(tree, other, **options)) is bool(eqx.tree_equal(tree, other, **options)), other
    assert not st.tree.equal(tree, tree, others[1])


def test_equal_compares_ties_and_statics():
    w, v = jnp.ones(2), jnp.ones(2)
    assert not st.tree.equal({"a": w, "b": w}, {"a": w, "b": v})
    assert st.tree.equal({"a": w, "b": w}, {"a": v, "b": v})
    assert not st.tree.equal(Linear(w, name="one"), Linear(w, name="two"))
    assert not st.tree.equal(Linear(w, 1), Linear(w, 1.0))
    assert not jax.jit(lambda x, y: st.tree.equal([x, x], [y, y]))(w, jnp.zeros(2))


def test_is_leaf_takes_the_path():
    """Against `jax.tree` on a tree without ties; a shared node is asked about at its first path."""
    w, v = jnp.ones(2), jnp.zeros(2)
    tree = {"a": {"b": [w]}, "c": ({"b": [v]}, 3.0)}
    asked = lambda path, node: jax.tree_util.keystr(path) in ("['a']['b']", "['c'][0]")
    options = {"is_leaf": asked, "is_leaf_takes_path": True}
    want = jax.tree.leaves_with_path(tree, **options)
    found = st.tree.leaves_with_path(tree, **options)
    assert [path for path, _ in found] == [path for path, _ in want]
    assert all(one is other for (_, one), (_, other) in zip(found, want, strict=True))
    name = lambda path, leaf: (jax.tree_util.keystr(path), type(leaf).__name__)
    assert st.tree.map_with_path(name, tree, **options) == jax.tree.map_with_path(name, tree, **options)
    seen = []
    st.tree.leaves_with_path([tree["a"], tree["a"]], lambda path, node: seen.append(path), is_leaf_takes_path=True)
    assert list(map(jax.tree_util.keystr, seen)) == ["", "[0]", "[0]['b']", "[0]['b'][0]"]


OTHER_KEYS = {
    "dict": ({"a": 1.0, "b": 2.0}, {"a": 1.0, "c": 2.0}),
    "ordered": (collections.OrderedDict(a=1.0, b=2.0), collections.OrderedDict(b=2.0, a=1.0)),
    "defaultdict": (collections.defaultdict(list, a=1.0), collections.defaultdict(list, b=1.0)),
    "in a module": (Pair({"a": 1.0}, None), Pair({"b": 1.0}, None)),
}


@pytest.mark.parametrize(("one", "two"), OTHER_KEYS.values(), ids=OTHER_KEYS)
def test_trees_with_other_keys_are_of_another_shape(one, two):
    """To JAX, too. Otherwise what stands under one name would be added to what stands under another."""
    one, two = jax.tree.map(jnp.asarray, (one, two))
    with pytest.raises(ValueError):
        jax.tree.map(jnp.add, one, two)
    for call in (
        lambda: st.tree.map(jnp.add, one, two),
        lambda: st.apply_updates(one, two),
        lambda: st.incremental_update(one, two, 0.5),
        lambda: st.retie(one, like=two),
        lambda: st.assert_same_sharing(one, two),
    ):
        with pytest.raises(st.errors.SharingMismatchError, match=r"differ in shape.* with .*\['") as caught:
            call()
        assert caught.value.paths in (("",), (".first",))
    assert not st.same_sharing(one, two)
