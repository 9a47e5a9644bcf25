"""treeo 0.0.10 by itself: the laws on random DAGs of its trees, its fields and mixins."""

import concurrent.futures
import importlib.util
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as hst

import sharedtree as st

if importlib.util.find_spec("treeo") is None:
    pytest.skip("treeo is not installed", allow_module_level=True)

from sharedtree.compat import treeo as to
from tests import laws
from tests.compat.strategies import Branch, Layer, Weight, trees
from tests.strategies import copy_dag, is_array, partition, paths, unique_arrays

IGNORE = st.Policy(on_untie="ignore")
IN_PLACE = st.Policy(in_place=True)


LAWS = (
    laws.partition_of_what_vmap_maps,
    laws.a_tied_gradient_is_the_sum_over_its_paths,
    laws.a_tied_leaf_is_donated_once,
    laws.other_sharing_retraces_once,
    laws.round_trip,
    laws.in_place_changes_the_callers_objects_and_no_others,
    laws.pass_through_is_what_vanilla_would_return,
)
"""The laws of one tree."""


@pytest.mark.parametrize("law", LAWS)
@given(tree=trees())
def test_laws_of_a_tree(law, tree):
    law(tree)


@given(tree=trees(), data=hst.data())
def test_laws_of_arguments(tree, data):
    """With `pass_through=False` all that comes back is built anew."""
    for name in ("jit", "jit without pass-through"):
        laws.partition_inside_is_that_outside(name, (tree,), data)
        laws.values_are_those_of_the_untied_twin((tree,), name)
    laws.equal_structure_does_not_retrace((tree,))
    laws.a_tied_leaf_is_one_input_and_one_output((tree,))


def shared(tree, containers):
    """Which paths hold one object; those of lists and dictionaries if so asked."""
    at = {path: obj for path, obj, _ in paths(tree)}
    return {each for each in partition(tree) if containers or not isinstance(at[next(iter(each))], list | dict)}


def assert_same(one, other, containers=True):
    """The same sharing (of containers, if so asked), classes, static fields and values."""
    assert shared(one, containers) == shared(other, containers)
    for (path, x, _), (at, y, _) in zip(paths(one), paths(other), strict=True):
        assert path == at
        assert type(x) is type(y)
        if isinstance(x, Branch):
            assert x.name == y.name
        elif isinstance(x, Layer):
            assert (x.width, x.log) == (y.width, y.log)
        elif is_array(x):
            np.testing.assert_array_equal(x, y)


MADE = {
    "unflatten": lambda tree: st.tree.unflatten(*reversed(st.tree.flatten(tree))),
    "copy": lambda tree: tree.copy(),
    "map": lambda tree: tree.map(lambda x: x),
    "map of a kind": lambda tree: tree.map(lambda x: x, Weight),
    "merge": lambda tree: tree.merge(tree),
    "filter and merge": lambda tree: tree.merge(tree.filter(Weight)),
    "apply": lambda tree: tree.apply(lambda node: None),
}


# treeo's `filter` makes the lists and dictionaries of each field anew.
MAKE_CONTAINERS = {"map of a kind", "filter and merge"}


@pytest.mark.parametrize("name", MADE)
@given(tree=trees())
def test_what_is_made_of_a_tree_has_its_sharing(name, tree):
    """Outside, and inside a function."""
    containers = name not in MAKE_CONTAINERS
    before = copy_dag(tree)
    assert_same(MADE[name](tree), tree, containers)
    new = st.jit(lambda tree: st.tree.map(lambda x: x * 2, MADE[name](tree)), policy=IGNORE)(tree)
    assert shared(new, containers) == shared(before, containers)
    assert_same(tree, before)
    for one, other in zip(unique_arrays(new), unique_arrays(before), strict=True):
        np.testing.assert_array_equal(one, 2 * other)


@given(tree=trees())
def test_in_place(tree):
    tree, expected = copy_dag(tree), copy_dag(tree)
    before = [*paths(tree)]

    def add(tree):
        for layer in {id(x): x for _, x, _ in paths(tree) if isinstance(x, Layer)}.values():  # alive in `tree`
            layer.weight = layer.weight + 1

    st.jit(add, policy=st.Policy(in_place=True, on_untie="ignore"))(tree)
    add(expected)
    assert_same(tree, expected)
    for (_, x, _), (_, y, _) in zip(before, paths(tree), strict=True):
        assert x is y or is_array(x) or isinstance(x, tuple)


@dataclass
class Parameters(to.Tree, to.Extensions):
    weight: jax.Array = Weight.node()
    bias: jax.Array | None = to.field(None, node=True)
    width: int = to.static(3)
    state: Any = to.field(node=False, default_factory=lambda: {"steps": [1, 2]})


def test_fields():
    one = Parameters(jnp.ones(3), jnp.zeros(3))
    model = Branch(one, one)
    assert (len(jax.tree.leaves(model)), len(st.tree.leaves(model))) == (4, 2)
    traces = []

    @st.jit
    def run(model):
        traces.append(model.left.width)
        assert isinstance(model.left.weight, jax.core.Tracer)
        model.left.state["steps"].append(3)  # a copy of this trace
        return st.tree.map(lambda x: x + 1, model)

    new = run(model)
    assert new.left is new.right
    assert new.right.state == {"steps": [1, 2, 3]}
    assert one.state == {"steps": [1, 2]}
    np.testing.assert_array_equal(new.right.bias, np.ones(3))
    # Static fields are structure.
    for width in (1, 3):
        other = Parameters(jnp.ones(3), jnp.zeros(3), width=width)
        run(Branch(other, other))
    other.state["steps"].append(3)
    run(Branch(other, other))
    assert traces == [3, 1, 3]
    # So is the metadata of fields, which can be changed.
    fewer = Branch(*[one.update_field_metadata("bias", node=False)] * 2)
    assert len(st.tree.leaves(fewer)) == 1
    new = st.tree.map(lambda x: x + 1, fewer)
    assert new.left is new.right
    np.testing.assert_array_equal(new.left.bias, np.zeros(3))


def test_metadata_compares_by_content():
    content = {"node": True, "kind": int, "opaque": False}
    one, same = to.FieldMetadata(**content), to.FieldMetadata(**content)
    assert one == same
    assert hash(one) == hash(same)
    for changed in ({"kind": Weight}, {"opaque": True}, {"node": False}):
        assert one != to.FieldMetadata(**{**content, **changed})
    assert one != "metadata"


def test_a_hashable_is_equal_to_itself_alone():
    """As treeo has it: what it holds may have an `==` with no answer, and may have changed since."""
    for content in ([1], np.ones(2), {"rate": 1}):
        one, other = to.Hashable(content), to.Hashable(content)
        assert one == one
        assert one != other
    seen = []
    run = st.jit(lambda model: seen.append(model.log.value["rate"]) or model.weight * model.log.value["rate"])
    content = {"rate": 1.0}
    run(layer(to.Hashable(content)))
    content["rate"] = 5.0
    np.testing.assert_array_equal(run(layer(to.Hashable({"rate": 5.0}))), np.full(2, 5))
    assert seen == [1.0, 5.0]


def layer(log, value=1.0):
    return Layer(jnp.full(2, value), None, log=log)


@dataclass
class Stepped(to.Tree, to.Extensions):
    weight: Any = to.node()
    log: Any = to.static(0, opaque=lambda one, other: one.value // 10 == other.value // 10)


@pytest.mark.parametrize(
    ("make", "values", "of_jax"),
    [
        (lambda value: layer(value), ["a", "b", "a", 1, True], ["a", "a", "a", 1, True]),
        (lambda value: Stepped(jnp.ones(2), value), [0, 5, 9, 10, 15, 3, 5], [0, 0, 0, 10, 10, 0, 0]),
    ],
    ids=["opaque", "a predicate"],
)
def test_an_opaque_field_is_part_of_the_structure(make, values, of_jax):
    """Vanilla JAX spares a trace, and gives each model the value that the trace saw. A predicate is for it alone."""
    for jit, expected in ((jax.jit, of_jax), (st.jit, values)):
        traces = []
        run = jit(lambda model: traces.append(None) or model.map(lambda x: x + 1))
        found = [run(make(value)).log for value in values]
        assert list(zip(found, map(type, found), strict=True)) == [(value, type(value)) for value in expected]
        assert len(traces) == len({(value, type(value)) for value in expected})


def test_an_opaque_field_keeps_its_value():
    logs = [object(), object()]
    models = [Branch(*[layer(log)] * 2) for log in logs]
    structures = [st.tree.structure(model) for model in models]
    assert structures[0] is not structures[1]
    for make in [st.copy, lambda model: st.tree.map(lambda x: x + 1, model), lambda model: model.copy(), st.untie]:
        assert [make(model).right.log for model in models] == logs
    assert [st.tree.unflatten(structure, [jnp.ones(2)]).left.log for structure in structures] == logs
    passing, of_dags = st.jit(lambda model: model), jax.jit(lambda dag: st.Dag(st.tree.map(lambda x: x + 1, dag.tree)))
    for log in ["a", "b"]:
        model = Branch(*[layer(log)] * 2)
        assert passing(model) is model
        new = of_dags(st.Dag(model)).tree
        assert new.left is new.right
        assert new.left.log == log


def test_an_opaque_field_is_not_written_in_place_unless_it_was_changed():
    @dataclass
    class Logged(to.Tree):
        weight: Any = to.node()
        log: Any = to.static(None, opaque=True)
        more: Any = to.static(None, opaque=True)

    def run(model):
        model.weight = model.weight + 1
        model.more = "new"

    step = st.jit(run, policy=IN_PLACE)
    models = [Logged(jnp.ones(2), log, "old") for log in ["a", "b", "c"]]
    for model in models:
        step(model)
    assert [model.log for model in models] == ["a", "b", "c"]
    assert [model.more for model in models] == ["new"] * 3
    np.testing.assert_array_equal([model.weight for model in models], np.full((3, 2), 2))


def test_whatever_may_be_opaque():
    """It comes back as itself, or as a copy of what can be mutated."""
    for kept in (np.ones(2), jnp.ones(2), object(), [1], {"a": jnp.ones(1)}, iter([1]), "text"):
        model = Branch(*[layer(kept)] * 2)
        new = st.jit(lambda model: st.tree.map(lambda x: x + 1, model))(model)
        assert new.left is new.right
        for log in (new.left.log, st.copy(model).left.log):
            assert type(log) is type(kept)
            if log is not kept:
                jax.tree.map(np.testing.assert_array_equal, log, kept)


def test_mixins():
    one = layer("log")
    model = Branch(one, one)
    filtered = model.filter(Weight)
    assert filtered.left is filtered.right
    assert isinstance(model.filter(str).left.weight, to.Nothing)

    def widen(node):
        if isinstance(node, Layer):
            node.width += 1

    wider = model.apply(widen)
    assert wider.left is wider.right
    assert one.width == 1
    # treeo visits trees by path, so what is shared is changed as often as it has paths.
    assert wider.left.width == 3
    assert model.to_dict()["left"]["width"] == 1
    assert repr(model) == model.to_string()
    assert repr(st.jit(lambda model: st.tree.map(lambda x: x + 0, model))(model)) == repr(model)


def test_field_info_and_flatten_modes():
    model = Branch(*[layer("log")] * 2)
    with to.add_field_info():
        infos = jax.tree.leaves(model)
    assert [info.kind for info in infos] == [Weight, Weight]
    assert infos[0].value is model.left.weight
    with to.flatten_mode(to.FlattenMode.no_fields):
        assert jax.tree.leaves(model) == []
    with to.flatten_mode(to.FlattenMode.all_fields):
        assert any(leaf == "log" for leaf in jax.tree.leaves(model))
    assert (len(jax.tree.leaves(model)), len(st.tree.leaves(model))) == (2, 1)


def test_compact():
    class Tower(to.Tree, to.Compact):
        @to.compact
        def __call__(self, x):
            one = Branch(x, x)
            assert self.first_run or one is self.branch
            return one.left + x

    tower = Tower()
    tower(jnp.ones(2))
    assert tower.branch.left is tower.branch.right
    assert len(st.tree.leaves(tower)) == 1
    new = st.jit(lambda tower: st.tree.map(lambda x: x + 1, tower))(tower)
    assert new.branch.left is new.branch.right
    np.testing.assert_array_equal(st.jit(lambda tower, x: tower(x))(tower, jnp.ones(2)), np.full(2, 2))


def test_a_mode_that_ends_in_another_thread_changes_nothing_there():
    tree = layer("log")
    normal = jax.tree.structure(tree)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        mode = to.flatten_mode(to.FlattenMode.all_fields)
        pool.submit(mode.__enter__).result()
        assert jax.tree.structure(tree) == normal
        mode.__exit__(None, None, None)
        assert jax.tree.structure(tree) == normal
