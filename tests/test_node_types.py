"""Every kind of node: comes apart, goes together again, keeps its ties through `st.jit`, traces the right leaves."""

import collections
import functools
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import tree_util as jtu

import sharedtree as st
from sharedtree.core import _node_types
from tests.models import Box
from tests.strategies import Mutable, Pair, Point, Record


def through_jit(tree):
    return st.jit(lambda m: st.tree.map(lambda x: x + 1, m))(tree)


# --- plain containers ----------------------------------------------------------------------------------------------


CONTAINERS = {
    "list": lambda x, y: [x, y],
    "tuple": lambda x, y: (x, y),
    "dict": lambda x, y: {"a": x, "b": y},
    "OrderedDict": lambda x, y: collections.OrderedDict([("b", x), ("a", y)]),
    "defaultdict": lambda x, y: collections.defaultdict(list, {"a": x, "b": y}),
    "deque": lambda x, y: collections.deque([x, y], maxlen=2),
    "namedtuple": lambda x, y: Point(x, y),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_containers_inside_a_module(kind):
    w = jnp.ones(2)
    box = CONTAINERS[kind](w, [w])
    out = through_jit(Pair(box, box))
    new = out.first
    assert type(new) is type(box)
    values = list(new.values()) if isinstance(new, dict) else list(new)
    assert values[0] is values[1][0]
    np.testing.assert_array_equal(values[0], [2.0, 2.0])
    is_value = kind in ("tuple", "namedtuple")
    assert (out.first is out.second) is not is_value
    assert len(st.ties(Pair(box, box))) == 2 if not is_value else 1


def test_what_containers_carry_besides_their_items_survives():
    box = Box([collections.deque([jnp.ones(2)], maxlen=7), collections.defaultdict(list, a=jnp.ones(2)), Point(1, 3)])
    deque, default, point = through_jit(box).content
    assert deque.maxlen == 7
    assert default.default_factory is list
    assert default["new"] == []
    assert point == Point(1, 3)
    ordered = through_jit(Box(collections.OrderedDict([("b", jnp.ones(1)), ("a", jnp.zeros(1))]))).content
    assert list(ordered) == ["b", "a"]


def test_what_containers_carry_is_part_of_the_structure():
    s = st.tree.structure
    w = jnp.ones(2)
    assert s(Box(collections.deque([w], 1))) is not s(Box(collections.deque([w], 2)))
    assert s(Box({"a": w})) is not s(Box(collections.OrderedDict(a=w)))
    assert s(Box(collections.defaultdict(list, a=w))) is not s(Box(collections.defaultdict(int, a=w)))
    assert s(Box([w])) is not s(Box((w,)))
    assert s(Box({"a": w, "b": 1})) is s(Box({"b": 1, "a": w}))


def test_unorderable_keys_inside_a_module():
    w = jnp.ones(2)
    out = through_jit(Cell({1: w, "x": w, (2, 3): jnp.zeros(2), None: "text"}))
    new = out.weight
    assert set(new) == {1, "x", (2, 3), None}
    assert new[1] is new["x"]
    np.testing.assert_array_equal(new[(2, 3)], [1.0, 1.0])
    assert new[None] == "text"
    assert [tie.paths for tie in st.ties(out)] == [(".weight[1]", ".weight['x']")]
    default = through_jit(Cell(collections.defaultdict(int, {1: w, "x": w}))).weight
    assert default[1] is default["x"]


# --- register_node -------------------------------------------------------------------------------------------------


class Cell:
    def __init__(self, weight, child=None, note=None):
        self.weight, self.child, self.note = weight, child, note


st.register_node(
    Cell,
    lambda cell: ((cell.weight, cell.child), cell.note),
    lambda note, children: Cell(*children, note),
    keys=lambda cell: (jtu.GetAttrKey("weight"), jtu.GetAttrKey("child")),
)


class SubCell(Cell):
    pass


class Positional:
    def __init__(self, *parts):
        self.parts = parts


st.register_node(
    Positional, lambda p: (iter(p.parts), None), lambda _, children: Positional(*children), convention="equinox"
)


def test_a_registered_class_is_a_module():
    w = jnp.ones(2)
    inner = Cell(w, note=["x"])
    out = through_jit({"a": inner, "b": Cell(w, inner)})
    assert type(out["a"]) is Cell
    assert out["b"].child is out["a"]
    assert out["b"].weight is out["a"].weight
    assert out["a"].note == ["x"]
    np.testing.assert_array_equal(out["b"].weight, [2.0, 2.0])
    assert [tie.paths for tie in st.ties([inner, Cell(w, inner)])] == [
        ("[0]", "[1].child"),
        ("[0].weight", "[1].weight"),
    ]
    assert jax.tree.leaves(inner) == [inner]  # vanilla JAX still sees a leaf


def test_conventions_of_registered_classes():
    w = jnp.ones(2)
    assert len(st.tree.leaves(Cell(w, 2.0))) == 2
    assert len(st.tree.leaves(Positional(w, 2.0))) == 1
    assert len(st.tree.leaves(Positional(w, np.float32(2)))) == 2
    assert [tie.paths for tie in st.ties(Positional(w, w))] == [("[0]", "[1]")]


def test_subclasses_are_not_included():
    with pytest.raises(st.errors.UnregisteredTypeError, match="SubCell"):
        st.tree.leaves(SubCell(jnp.ones(2)))


class Tuple2(NamedTuple):
    x: int


def test_known_classes_cannot_be_registered(monkeypatch):
    monkeypatch.setattr(
        _node_types, "node_types_by_class", {Cell: _node_types.node_types_by_class[Cell]}
    )  # whatever was seen before
    plain = list, dict, tuple, type(None), collections.deque
    for cls in (*plain, Tuple2, Box, Mutable, Record, Cell, jtu.Partial, st.Dag):
        reason = "it was registered with sharedtree before" if cls is Cell else "sharedtree reads JAX's registry"
        with pytest.raises(ValueError, match=f"{cls.__qualname__}.* is already a registered node.*{reason}"):
            st.register_node(cls, lambda x: ((), None), lambda aux, children: None)


# --- which leaves are traced ---------------------------------------------------------------------------------------


def test_equinox_traces_arrays_only():
    values = [1, 2.0, True, 1j, "x", None, jnp.sin, jnp.ones(2), np.ones(2), np.float32(1), jax.random.key(0)]
    assert [type(x) for x in st.tree.leaves(Box(values))] == [type(x) for x in values[-4:]]
    assert len(st.tree.leaves(Box(jax.ShapeDtypeStruct((2,), jnp.float32)))) == 1


def test_the_rest_trace_what_jax_can():
    values = [1, 2.0, True, 1j, jnp.ones(2), np.ones(2), np.float32(1), "x", jnp.sin, None]
    for node in (Mutable(x=values), Record(values, 0.5)):
        leaves = st.tree.leaves(node)
        assert all(a is b for a, b in zip(leaves, values[:7], strict=False))
        assert len(leaves) == (7 if isinstance(node, Mutable) else 8)


def test_partial_inherits_the_convention():
    partial = jtu.Partial(max, 2.0, jnp.ones(2))
    assert len(st.tree.leaves(Box(partial))) == 1
    assert len(st.tree.leaves(Mutable(x=partial))) == 2
    assert len(st.tree.leaves(partial)) == 2
    assert len(st.tree.leaves(Box([{"p": partial}]))) == 1
    assert len(st.tree.leaves(Box(Mutable(x=partial)))) == 2
    assert len(st.tree.leaves(Mutable(x=Box(partial)))) == 1


# --- dataclasses and Equinox ---------------------------------------------------------------------------------------


class Scaled(eqx.Module):
    weight: object

    def apply(self, x):
        return self.weight * x + 1


def test_bound_methods_know_their_module():
    model = Scaled(jnp.full(2, 3.0))
    assert [tie.kind for tie in st.ties([model, model.apply])] == ["module"]
    is_one, y = st.jit(lambda m, f, x: (f.__self__ is m, f(x)))(model, model.apply, jnp.ones(()))
    assert bool(is_one) is True
    np.testing.assert_array_equal(y, [4.0, 4.0])
    np.testing.assert_array_equal(st.jit(model.apply)(jnp.ones(())), [4.0, 4.0])
    out = st.jit(lambda f: f)(model.apply)
    np.testing.assert_array_equal(out(jnp.ones(())), [4.0, 4.0])


WRAPPERS = {
    "filter_jit": eqx.filter_jit,
    "filter_vmap": eqx.filter_vmap,
    "filter_grad": lambda f: eqx.filter_grad(jtu.Partial(lambda f, x: f(x).sum(), f)),
    "filter_checkpoint": eqx.filter_checkpoint,
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrapped_functions_as_fields(wrapper):
    w = jnp.array([1.0, 2.0])
    scaled = jtu.Partial(lambda w, x: jnp.sin(w.sum() * x), w)
    f = WRAPPERS[wrapper](scaled)
    x = jnp.array([0.1, 0.2])
    expected = f(x)
    model = Pair(f, [f, w])
    out, y = st.jit(lambda m, x: (st.tree.map(lambda v: v * 1, m), m.first(x)))(model, x)
    np.testing.assert_allclose(y, expected, rtol=1e-6)
    assert type(out.first) is type(f)
    assert out.first is out.second[0]
    np.testing.assert_allclose(out.first(x), expected, rtol=1e-6)
    assert getattr(out.first, "__name__", None) == getattr(f, "__name__", None)
    assert len(st.ties(model)) == 2  # the wrapper, and the array that it holds


def test_functools_partial_is_a_static_leaf():
    f = functools.partial(max, 1)
    assert st.tree.leaves(Box(f)) == []
    assert through_jit(Box([f, jnp.ones(1)])).content[0] is f


def test_keys_that_do_not_fit_the_children_become_positions():
    class Odd:
        def __init__(self, *parts):
            self.parts = parts

    st.register_node(Odd, lambda o: (o.parts, None), lambda _, xs: Odd(*xs), keys=lambda _: (jtu.GetAttrKey("only"),))
    w = jnp.ones(2)
    assert [tie.paths for tie in st.ties(Odd(w, w))] == [("[0]", "[1]")]
