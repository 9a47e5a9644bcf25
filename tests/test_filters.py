"""One language of filters for `grad`, `optimizer`, `tree.filter`, `tree.partition`: the same leaves at each place."""

import re
from typing import Any, NamedTuple

import equinox as eqx
import hypothesis
import hypothesis.strategies as hst
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import sharedtree as st
from sharedtree.tree import _asking_filters
from tests.strategies import Layer, Mutable, Pair, dags, paths, tower

A, B, C = (jnp.array([float(i), 1.0]) for i in range(3))


def weighted(tree):
    found = [x for x in st.tree.leaves(tree) if eqx.is_inexact_array(x)]
    return sum((jnp.sin(x).sum() for x in found), jnp.float32(0))


def by_partition(tree, filter_spec):
    return st.tree.partition(tree, filter_spec)[0]


def by_filter(tree, filter_spec):
    return st.tree.filter(tree, filter_spec)


def by_inverse_filter(tree, filter_spec):
    rest = {id(x) for x in st.tree.leaves(st.tree.filter(tree, filter_spec, inverse=True))}  # alive in `tree`
    return st.tree.filter(tree, lambda leaf: id(leaf) not in rest)


def by_grad(tree, filter_spec):
    return st.grad(weighted, wrt=filter_spec)(tree)


def by_grad_of_a_dag(tree, filter_spec):
    return st.grad(lambda dag: weighted(dag.tree), wrt=filter_spec)(st.Dag(tree)).tree


def by_optimizer(tree, filter_spec):
    return st.optimizer(optax.trace(0.9), wrt=filter_spec).init(tree).trace


PLACES = {
    "partition": by_partition,
    "filter": by_filter,
    "inverse": by_inverse_filter,
    "grad": by_grad,
    "grad of a Dag": by_grad_of_a_dag,
    "optimizer": by_optimizer,
}


def selected(tree):
    """The paths of the floating-point leaves that are there, as NNX writes them."""
    flat = jax.tree_util.tree_leaves_with_path(tree)
    keys = lambda path: tuple(getattr(k, "name", getattr(k, "key", getattr(k, "idx", None))) for k in path)
    return {keys(path) for path, leaf in flat if eqx.is_inexact_array(leaf)}


def model():
    return Pair(Layer(A, jnp.tanh, None), {"b": B, "head": Layer(C, abs, [A + 5]), "n": jnp.array(3)})


EVERY = {("first", "weight"), ("second", "b"), ("second", "head", "weight"), ("second", "head", "parts", 0)}
LAYERS = EVERY - {("second", "b")}
LAYER = {("second", "head", "weight")}
HEAD = LAYER | {("second", "head", "parts", 0)}


def is_head(path, value):
    return "head" in path


def is_b(path, value):
    return path[-1] == "b"


B_ONLY = {("second", "b")}
ONE_TRUE = eqx.tree_at(lambda m: m.second["b"], st.tree.filter(model(), False, replace=False), True)

FILTERS: dict[str, tuple[Any, set[Any]]] = {
    "all": (..., EVERY),
    "True": (True, EVERY),
    "a class of modules": (Layer, LAYERS),
    "a class of values": (jax.Array, EVERY),
    "a function of a path and a value": (is_head, HEAD),
    "a function of a path and a value, by the value": (lambda path, value: value is A, {("first", "weight")}),
    "a function of a leaf": (eqx.is_inexact_array, EVERY),
    "a function of a leaf, by the leaf": (lambda leaf: leaf is B, B_ONLY),
    "a filter of NNX": (nnx.PathContains("head"), HEAD),
    "filters of NNX, together": (nnx.All(nnx.PathContains("head"), nnx.Not(nnx.PathContains("weight"))), HEAD - LAYER),
    "several": ([Layer, is_b], EVERY),
    "several, in a tuple, of which one is False": ((False, is_b), B_ONLY),
    "several, nested": (["tag", (is_b, False)], B_ONLY),
    "several functions of a leaf": ([lambda leaf: leaf is B, lambda leaf: leaf is A], B_ONLY | {("first", "weight")}),
    "several functions of a leaf, in a tuple of one": ((lambda leaf: leaf is B,), B_ONLY),
    "several functions of a leaf, in a tree": (
        Pair(False, [lambda leaf: leaf is B, lambda leaf: leaf is C]),
        B_ONLY | LAYER,
    ),
    "several functions of a leaf, at a leaf": (
        Pair(Layer([lambda leaf: leaf is B, lambda leaf: leaf is A], False, None), False),
        {("first", "weight")},
    ),
    "several with a function of a leaf": ((lambda leaf: leaf is B, lambda path, value: False), B_ONLY),
    "a tree of booleans": (Pair(False, {"b": True, "head": False, "n": False}), B_ONLY),
    "a tree of booleans at each leaf": (
        Pair(Layer(True, False, None), {"b": False, "head": Layer(False, False, [True]), "n": False}),
        {("first", "weight"), ("second", "head", "parts", 0)},
    ),
    "a tree made by equinox": (ONE_TRUE, B_ONLY),
    "a tree of filters": (
        Pair(eqx.is_inexact_array, {"b": False, "head": (lambda path, value: path[-1] == 0, False), "n": ...}),
        {("first", "weight"), ("second", "head", "parts", 0)},
    ),
    "a tree of classes": (Pair(False, {"b": jax.Array, "head": Layer, "n": jax.Array}), B_ONLY | HEAD),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize(("spec", "expected"), FILTERS.values(), ids=FILTERS)
@pytest.mark.sampled(every=5)
def test_a_filter_selects_the_same_at_every_place(place, spec, expected):
    assert selected(place(model(), spec)) == expected


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_filters_of_nnx_select_variables(place):
    class Net(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(A)
            self.bias = nnx.Param(B, tag="decay")
            self.mean = nnx.BatchStat(C)
            self.loose = nnx.data(A + 2)

    def names(tree):
        return {name for name in ("kernel", "bias", "mean", "loose") if jax.tree.leaves(getattr(tree, name))}

    for spec, expected in {
        nnx.Param: {"kernel", "bias"},
        nnx.Param[jax.Array]: {"kernel", "bias"},
        nnx.BatchStat: {"mean"},
        "decay": {"bias"},
        (nnx.BatchStat, "decay"): {"mean", "bias"},
        nnx.Not(nnx.Param): {"mean", "loose"},
        (lambda path, value: path == ("mean",) and isinstance(value, nnx.BatchStat)): {"mean"},
        (lambda leaf: leaf is C): {"mean"},
        eqx.is_inexact_array: {"kernel", "bias", "mean", "loose"},
    }.items():
        assert names(place(Net(), spec)) == expected


@hypothesis.given(dags(), hst.sets(hst.integers(0, 9)))
def test_a_partition_by_paths_is_that_by_a_tree_of_booleans_in_equinox(tree, chosen):
    asked = {}
    st.tree.partition(tree, lambda path, value: asked.setdefault(path, value) is value)
    flat = jax.tree_util.tree_leaves_with_path(tree)
    assert len(asked) == len(flat)
    distinct = list({id(leaf): leaf for _, leaf in flat}.values())  # alive in `tree`
    ids = {id(leaf) for i, leaf in enumerate(distinct) if i in chosen}  # as above
    ours = st.tree.partition(tree, lambda path, value: id(asked[path]) in ids)
    theirs = eqx.partition(tree, jax.tree.map(lambda leaf: id(leaf) in ids, tree))
    for mine, expected in zip(ours, theirs, strict=True):
        assert jax.tree.structure(mine) == jax.tree.structure(expected)
        assert all(x is y for x, y in zip(jax.tree.leaves(mine), jax.tree.leaves(expected), strict=True))
    joined = st.tree.combine(*ours)
    assert st.same_sharing(joined, tree)
    assert {path for path, obj, _ in paths(joined) if eqx.is_array(obj)} == {
        path for path, obj, _ in paths(tree) if eqx.is_array(obj)
    }


def test_static_leaves_are_asked_about_in_a_partition():
    seen = {}
    kept, rest = st.tree.partition(model(), lambda path, value: seen.setdefault(path, value) is abs)
    assert seen["second", "head", "activation"] is abs
    assert kept.second["head"].activation is abs
    assert rest.first.activation is jnp.tanh
    assert not st.tree.leaves(kept)


def test_a_list_where_the_tree_has_one_is_a_prefix_as_in_equinox():
    for spec in ([True, False], [eqx.is_array, False], [jax.Array, False], [lambda path, value: True, False]):
        assert st.tree.filter([A, B], spec)[1] is None
    for spec in ((jax.Array, False), [jax.Array, False, False]):
        assert st.tree.filter([A, B], spec)[1] is B
    # An option `wrt` has a list of classes and functions of paths for several, as NNX does, and one of booleans for a
    # tree.
    assert st.grad(weighted, wrt=[jax.Array, False])([A, B])[1] is not None
    assert st.grad(weighted, wrt=[True, False])([A, B])[1] is None


def test_a_tied_leaf_is_selected_at_all_of_its_paths_or_at_none():
    names = {"model": [A, {"b": A}], "filter_spec": lambda path, value: path == (0,)}
    with pytest.raises(
        st.errors.InconsistentSharingError, match=r"`\[0\]` and `\[1\]\['b'\]` are one object"
    ) as caught:
        st.tree.partition(names["model"], names["filter_spec"])
    assert caught.value.treatments == ("selected", "not selected")
    (code,) = re.findall(r"^    (filter_spec = .*)$", str(caught.value), re.MULTILINE)
    exec(code, names)
    kept, rest = st.tree.partition(names["model"], names["filter_spec"])
    assert kept[0] is kept[1]["b"] is A
    assert rest == [None, {"b": None}]
    with pytest.raises(st.errors.InconsistentSharingError, match="`filter_spec` selects one leaf of a `Dag`") as caught:
        st.tree.partition(st.Dag(names["model"]), lambda path, value: path == (0,))
    assert caught.value.treatments == ("selected", "not selected")


def test_trees_of_booleans_that_disagree_at_a_tie():
    spec = {"a": True, "b": False}
    with pytest.raises(st.errors.InconsistentSharingError, match="one parameter of the model, but `wrt` selects"):
        by_optimizer({"a": A, "b": A}, spec)
    with pytest.raises(st.errors.InconsistentSharingError, match="selects one leaf of a `Dag`"):
        by_grad_of_a_dag({"a": A, "b": A}, spec)
    with pytest.raises(st.errors.InconsistentSharingError, match="are one object, but for `filter_spec`"):
        by_partition({"a": A, "b": A}, spec)
    with pytest.warns(st.UntiedWarning, match="lacks what flows through"):
        gradient = st.grad(lambda pair: jnp.sin(pair.first * pair.second).sum(), wrt=Pair(True, False))(Pair(A, A))
    np.testing.assert_allclose(gradient.first, jnp.cos(A * A) * A, rtol=1e-6)


def test_more_paths_than_can_be_walked():
    tree = tower(60, Mutable(a=A, b=B), lambda one, two: Mutable(one=one, two=two))
    booleans = tower(60, Mutable(a=True, b=True), lambda one, two: Mutable(one=one, two=two))
    for spec in (eqx.is_inexact_array, jax.Array, (Mutable, "tag"), booleans, ...):
        assert [leaf is x for leaf, x in zip(st.tree.leaves(by_partition(tree, spec)), (A, B), strict=True)]
        assert len(st.tree.leaves(by_grad(tree, spec))) == 2
    booleans = tower(60, Mutable(a=True, b=False), lambda one, two: Mutable(one=one, two=two))
    assert st.tree.leaves(by_partition(tree, booleans)) == [A]


def mixed(height=60):
    """A model with 2**height paths to two leaves, of which filters select one."""
    return tower(height, Mutable(a=A, b=B), lambda one, two: Mutable(one=one, two=two))


MIXED = {
    "a function of a leaf": lambda: lambda leaf: leaf is A,
    "several functions of a leaf": lambda: [lambda leaf: leaf is A, lambda leaf: False],
    "a tree of booleans": lambda: tower(60, Mutable(a=True, b=False), lambda one, two: Mutable(one=one, two=two)),
    "a tree of functions": lambda: tower(
        60, Mutable(a=lambda leaf: True, b=lambda leaf: False), lambda one, two: Mutable(one=one, two=two)
    ),
    "a tree with a function of a path where there is one": lambda: Mutable(
        one=lambda leaf: leaf is A, two=lambda leaf: leaf is A, other=lambda path, value: value is C
    ),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("spec", MIXED.values(), ids=MIXED)
def test_an_answer_that_is_mixed_below_more_paths_than_can_be_walked(place, spec):
    """One of two leaves of each node is selected: of the 2**60 paths each step is decided once."""
    spec, tree = spec(), mixed()
    if hasattr(spec, "other"):
        tree = Mutable(one=tree, two=tree, other=C)
    made = place(tree, spec)
    leaves = st.tree.leaves(made)
    assert len(leaves) == 1 + hasattr(spec, "other")
    assert all(leaf.shape == A.shape for leaf in leaves)


@pytest.mark.parametrize("name", ["jacfwd", "jacrev", "hessian", "value_and_grad"])
def test_other_transforms_of_a_mixed_answer(name):
    def square(tree):
        while hasattr(tree, "one"):
            tree = tree.one
        return (tree.a**2).sum() + tree.b.sum()

    made = getattr(st, name)(square, wrt=lambda leaf: leaf is A)(mixed())
    made = made[1] if name == "value_and_grad" else made
    inner = made
    while hasattr(inner, "one"):
        inner = inner.one
    assert inner.b is None
    found = inner.a
    if name == "hessian":
        while hasattr(found, "one"):
            found = found.one
        found = found.a
    np.testing.assert_allclose(found, 2 * np.eye(2) if name == "hessian" else 2 * A, rtol=1e-6)


def test_a_mixed_answer_in_dags_on_many_paths():
    dag = st.Dag([A, jnp.array(1)])
    tree = tower(60, Mutable(a=dag, b=B), lambda one, two: Mutable(one=one, two=two))
    found = st.tree.leaves(by_grad(tree, lambda leaf: leaf is A))
    assert len(found) == 1


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("limit", [5_000, pytest.param(_asking_filters.MOST_REPEATED_VISITS, marks=pytest.mark.slow)])
def test_a_function_of_paths_says_that_there_are_too_many(limit, place, monkeypatch):
    """Up to the package's own limit each refusal takes seconds."""
    monkeypatch.setattr(_asking_filters, "MOST_REPEATED_VISITS", limit)
    spec = lambda path, value: path[-1] == 0
    for several in (spec, [spec, "tag"], Mutable(one=spec, two=spec))[: None if place is by_partition else 1]:
        with pytest.raises(
            ValueError, match=r"`(wrt|filter_spec)` is a function of paths, and about 10\*\*18 paths lead"
        ):
            place(mixed(), several)
    # As many as are met in practice are asked.
    assert len(st.tree.leaves(place(mixed(10), spec))) == 1


def test_the_number_of_paths_is_said_however_large(monkeypatch):
    monkeypatch.setattr(_asking_filters, "MOST_REPEATED_VISITS", 5_000)
    with pytest.raises(ValueError, match=r"about 10\*\*180 paths lead to the leaves"):
        by_partition(mixed(600), lambda path, value: path[-1] == 0)


def test_a_tag_in_a_tree_is_told_how_it_is_written():
    class Tagged(nnx.Variable):
        pass

    def tree():
        return {"a": Tagged(A, tag="decay"), "b": Tagged(B), "n": {"c": Tagged(C, tag="decay")}}

    def names(made):
        return {jax.tree_util.keystr(path[:-1]) for path, _ in jax.tree_util.tree_leaves_with_path(made)}

    for place in (by_partition, by_grad, by_grad_of_a_dag, by_optimizer):
        for spec in ({"a": "decay", "b": False, "n": False}, {"a": False, "b": True, "n": "decay"}):
            scope = {"equinox": eqx, "wrt": spec, "filter_spec": spec}
            with pytest.raises(
                st.errors.SharingMismatchError, match="To select by a tag of NNX, put it into a list"
            ) as caught:
                place(tree(), spec)
            (code,) = [line.strip() for line in str(caught.value).split("\n") if line.startswith("    ")]
            exec(code, scope)
            changed = scope[code.partition(" ")[0]]
            made = place(tree(), changed)
            expected = {"['a']"} if spec["a"] else {"['b']", "['n']['c']"}
            assert names(made) == expected


MISFITS = {
    "another class": Pair(True, [True]),
    "other keys": Pair(True, {"b": True, "c": True, "n": False}),
    "no filter at a leaf": Pair(Layer(0, False, None), True),
    "a string at a leaf": Pair(Layer("tag", False, None), True),
    "a prefix that is too deep": Pair(Layer({"w": True}, False, None), True),
}


@pytest.mark.parametrize("place", [by_partition, by_grad, by_grad_of_a_dag, by_optimizer])
@pytest.mark.parametrize("spec", MISFITS.values(), ids=MISFITS)
def test_a_tree_that_does_not_fit_is_refused_with_its_path(place, spec):
    with pytest.raises(st.errors.SharingMismatchError, match=r"`(wrt|filter_spec)` (has|does not fit)") as caught:
        place(model(), spec)
    assert caught.value.paths


WRONG = {
    "of none": lambda: True,
    "of three": lambda path, value, more: True,
    "of none but a keyword": lambda *, leaf: True,
    "several": [lambda path, value: True, lambda: True],
    "what is none, among several": [lambda path, value: True, 3],
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("spec", WRONG.values(), ids=WRONG)
def test_what_is_no_filter_is_one_clear_error(place, spec):
    with pytest.raises(TypeError, match="A filter must take one argument|must be a filter, but is"):
        place(model(), spec)


def test_functions_that_take_one_and_two_are_called_as_ever():
    """In trees with the leaf, as in Equinox; in `wrt` with the path and the value, as in NNX."""
    assert selected(by_filter(model(), lambda leaf, one=B: leaf is one)) == {("second", "b")}
    assert selected(by_grad(model(), lambda path, value=None: path[-1] == "b")) == {("second", "b")}
    assert selected(by_filter(model(), lambda *args: args[0] is B)) == {("second", "b")}
    with pytest.raises(TypeError, match="True or False"):
        by_grad(model(), lambda leaf: leaf.ndim if hasattr(leaf, "ndim") else 0)
    assert selected(by_filter(model(), lambda leaf: getattr(leaf, "ndim", 0))) == EVERY


@pytest.mark.parametrize("place", [by_partition, by_grad, by_grad_of_a_dag, by_optimizer])
def test_a_string_for_a_path_is_told_what_it_is(place):
    tree = {"encoder": {f"w{i}": A + i for i in range(7)}, "head": {"w": B}}
    names = {"sharedtree": st, "model": tree, "f": weighted, "tx": optax.trace(0.9)}
    for spec in ("head", ["head", False], "head.w", "['head']['w']"):
        with pytest.raises(
            ValueError, match="A string selects by a tag of NNX, not by a path. To select by path, use a function"
        ) as caught:
            place(tree, spec)
        lines = str(caught.value).split("\n")
        candidates = [line for line in lines if line.startswith("    `")]
        assert candidates[0].endswith("at ('head', 'w')")
        assert len(candidates) == 5
        assert "    … and 3 more" in lines
        (code,) = [line for line in lines if line.startswith("    sharedtree")]
        made = eval(code.strip(), names)
        if place is by_partition:
            assert jax.tree.leaves(made[0]) == [B]
    with pytest.raises(ValueError, match="A string selects by a tag of NNX"):
        place(tree, "decoder")


def test_a_tag_that_nothing_has_is_no_error_among_filters_that_select():
    assert selected(by_filter(model(), ("tag", Layer))) == LAYERS
    assert st.tree.filter({"n": None}, "tag") == {"n": None}


class Parts(NamedTuple):
    embed: Any
    head: Any


@pytest.mark.parametrize(
    "spec",
    [Parts(..., False), Parts(True, False), Parts(jax.Array, False), Parts(lambda path, value: True, False)],
    ids=["everything", "a boolean", "a class", "a function of paths"],
)
def test_a_namedtuple_is_a_tree_of_filters(spec):
    """It names its parts, so it does not say that one of them must select."""
    gradient = st.grad(lambda parts: (parts.embed * parts.head).sum(), wrt=spec)(Parts(A, B))
    assert gradient.head is None
    assert np.array_equal(gradient.embed, B)
    chosen, rest = st.tree.partition(Parts(A, B), spec)
    assert (chosen.head, rest.embed) == (None, None)
