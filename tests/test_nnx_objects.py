"""Flax NNX's objects come out as NNX's own functions have them, whether these are called or not."""

import functools
import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given

import sharedtree as st
from sharedtree.core import _classes_in_native_walk
from sharedtree.core._pack_and_unpack import native
from sharedtree.core._walk import Rules
from sharedtree.libraries import _nnx_layouts
from tests import in_jax
from tests.kinds import OwnDict
from tests.processes import program, run
from tests.strategies import Pair, pools_of_classes
from tests.walks import RULES, assert_alike, knows, natively

pytest.importorskip("flax", minversion="0.12.1")  # before, some of these objects could not be made
nnx: Any = pytest.importorskip("flax.nnx")
optax: Any = pytest.importorskip("optax")


def w(value=1.0):
    return jnp.full(2, value)


class Block(nnx.Module):
    def __init__(self, value=None, *, size=2, note=None):
        self.weight = nnx.Param(w() if value is None else value)
        self.size = size
        self.note = note


ones = jax.nn.initializers.ones


ObjectState = type(Block()._pytree__state)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(2, 2, kernel_init=ones, rngs=rngs) for _ in range(12)])
        self.by_name = nnx.Dict(b=nnx.BatchNorm(2, rngs=rngs), a=nnx.Dropout(0.5, rngs=rngs))
        self.tied = self.layers[0]
        self.rngs = rngs
        self.activation = jax.nn.relu
        self.parts = nnx.data([Block(), (Block(), {"c": w()})])


class OfIntegers(nnx.Pytree):
    _pytree__has_int_keys = True

    def __init__(self, names):
        for i, name in enumerate(names):
            setattr(self, name, nnx.Param(w(i)))


class WithProperty(Block):
    size = property(lambda self: 1, lambda self, value: None)


class OwnVariable(nnx.Variable):
    pass


class Kind(nnx.Param):
    __slots__ = ("more",)


def with_hooks():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nnx.Param(w(), on_get_value=lambda _, value: value * 0, on_set_value=lambda _, value: value * 0)


def changed(obj, **attributes):
    for name, value in attributes.items():
        object.__setattr__(obj, name, value)
    return obj


def with_attributes(obj, change):
    change(vars(obj))
    return obj


def state_of(**flags):
    block = Block()
    for name, value in flags.items():
        setattr(block._pytree__state, name, value)
    return block


READ = {
    "a module": lambda: Block(),
    "statics": lambda: Block(size=(1, "a"), note=jnp.sin),
    "a linear layer": lambda: nnx.Linear(2, 3, kernel_init=ones, rngs=nnx.Rngs(0)),
    "a model": lambda: nnx.Sequential(nnx.Linear(2, 3, kernel_init=ones, rngs=nnx.Rngs(0)), jax.nn.relu),
    "a list": lambda: nnx.List([nnx.Param(w(i)) for i in range(13)]),
    "a list of leaves": lambda: nnx.List([w(), w(2), None]),
    "an empty list": lambda: nnx.List([]),
    "a dict": lambda: nnx.Dict(b=nnx.Param(w()), a=1, c=Block()),
    "rngs": lambda: nnx.Rngs(0, params=1),
    "a variable": lambda: nnx.Param(w()),
    "a variable of one's own": lambda: OwnVariable(w(), tag="a", nested=("b", (1,))),
    "a variable of a tree": lambda: nnx.Param({"b": w(), "a": [w(2), None]}),
    "hooks": with_hooks,
    "more slots": lambda: changed(Kind(w()), more=5),
    "names as numbers": lambda: OfIntegers(["2", "10", "a", "1"]),
    "a property": lambda: WithProperty(),
    "an attribute that nobody marked": lambda: changed(Block(), beyond=3),
    "an attribute less": lambda: with_attributes(Block(), lambda x: x.pop("note")),
    "another order": lambda: with_attributes(Block(), lambda x: x.update(size=x.pop("size"))),
    "names that are not interned": lambda: with_attributes(Block(), lambda x: x.update({"".join(["an", "other"]): 3})),
    "flags": lambda: state_of(_initializing=True, _is_setup=True),
    "a metric": lambda: nnx.metrics.Average(),
    "attention": lambda: nnx.MultiHeadAttention(2, 4, kernel_init=ones, rngs=nnx.Rngs(0), decode=False),
}


class OwnNew(nnx.Variable):
    @classmethod
    def _new(cls, value, metadata):
        obj = super()._new(value, metadata)
        obj._var_metadata["new"] = True
        return obj


class OwnGetattribute(Block):
    def __getattribute__(self, name):
        return object.__getattribute__(self, name)


class OwnFlatten(Block):
    def _pytree__flatten(self):
        return [self.weight], None

    def _pytree__flatten_with_paths(self):
        return [(jax.tree_util.GetAttrKey("weight"), self.weight)], None

    @classmethod
    def _pytree__unflatten(cls, static, children):
        obj = cls()
        obj.weight = children[0]
        return obj


class Marked(nnx.Module):
    weight: Any = nnx.data()

    def __init__(self):
        self.weight = nnx.Param(w())


LEFT = {
    "attributes of a subclass": lambda: changed(Block(), __dict__=OwnDict(vars(Block()))),
    "no marks": lambda: with_attributes(Marked(), lambda x: x.pop("_pytree__nodes")),
    "other marks": lambda: with_attributes(
        Block(), lambda x: x.update(_pytree__nodes={"weight": True, "_pytree__state": True})
    ),
    "numbers as marks": lambda: with_attributes(
        Block(), lambda x: x.update(_pytree__nodes=type(x["_pytree__nodes"])({"weight": 1, "_pytree__state": 1}))
    ),
    "marked itself": lambda: with_attributes(
        OfIntegers(["1"]), lambda x: x.update(_pytree__nodes=x["_pytree__nodes"].update({"_pytree__nodes": True}))
    ),
    "names as numbers on one object": lambda: with_attributes(
        Block(), lambda x: x.update({"_pytree__has_int_keys": True, "10": 1, "9": 2})
    ),
    "names that are no text": lambda: with_attributes(OfIntegers([]), lambda x: x.update({"1": 3})),
    "metadata of a subclass": lambda: changed(nnx.Param(w()), _var_metadata=OwnDict(b=1, a=2)),
    "metadata by numbers": lambda: changed(nnx.Param(w()), _var_metadata={2: 1, 1: 2}),
    "no metadata": lambda: changed(nnx.Param(w()), _var_metadata={}),
    "mutable metadata": lambda: nnx.Param(w(), note=[1, 2]),
    "a mutable static value": lambda: Block(note=[1, {"a": 2}]),
    "its own _new": lambda: OwnNew(w()),
    "its own __getattribute__": lambda: OwnGetattribute(),
    "its own flatten": lambda: OwnFlatten(),
    "an optimizer": lambda: nnx.Optimizer(Block(), optax.adam(1e-3), wrt=nnx.Param),
    "nothing": lambda: object.__new__(Block),
}
ALL = READ | LEFT

SHARED = {
    "a whole model": lambda: Net(nnx.Rngs(0)),
    "a variable twice": lambda: (lambda v: [Block(), nnx.List([v, v]), v])(nnx.Param(w())),
    "an array in two variables": lambda: (lambda x: nnx.List([nnx.Param(x), nnx.Param(x)]))(w()),
    "modules in containers": lambda: (lambda b: {"a": [b, (b,)], "b": b})(Block()),
    "in a module of another library": lambda: Pair(Block(), [Block(note="x")]),
}


assert_as_in_jax = functools.partial(in_jax.assert_as_in_jax, objects=(nnx.Variable, nnx.Pytree, ObjectState))


@pytest.mark.parametrize("name", sorted(ALL.keys() - {"nothing", "marked itself"}))
def test_an_object_is_what_it_is_in_jax(name):
    obj = ALL[name]()
    assert_as_in_jax(obj)
    assert_as_in_jax([obj, w(5), {"a": ALL[name]()}])
    assert_as_in_jax(jax.tree.map(lambda x: x, obj))


@natively
@pytest.mark.parametrize("name", [*ALL, *SHARED])
def test_both_walks_agree_and_what_is_common_is_known_again(name):
    make = (ALL | SHARED)[name]
    tree, other = make(), make()
    for rules in RULES:
        assert_alike([tree, [tree, other], tree], rules)
    if name not in LEFT:
        leaves, structure = st.tree.flatten(tree)
        built = st.tree.unflatten(structure, leaves)
        assert st.tree.structure(built) is structure
        assert knows(tree)
        assert knows(built)


@natively
def test_the_functions_of_nnx_are_not_called(monkeypatch):
    """Of objects that have names and marks as others had before."""
    tree = [make() for make in READ.values()]
    leaves, structure = st.tree.flatten(tree)
    st.tree.flatten(st.tree.unflatten(structure, leaves))

    def count(frame, event, _):
        if event == "call" and "flax" in frame.f_code.co_filename:
            calls.append(frame.f_code.co_name)

    calls = []
    sys.setprofile(count)
    try:
        built = st.tree.unflatten(structure, leaves)
        again = st.tree.flatten(built)
    finally:
        sys.setprofile(None)
    assert set(calls) <= {"current_jax_trace"}
    assert len(calls) <= 1
    assert again[1] is structure


def test_what_is_read_in_c_and_what_is_left_to_nnx():
    read = {name: make() for name, make in READ.items()}
    assert [name for name, obj in read.items() if _nnx_layouts.facts_of(type(obj)) is None] == []
    objects = {name: obj for name, obj in read.items() if isinstance(obj, nnx.Pytree)}
    assert [name for name, obj in objects.items() if _nnx_layouts.layout_of(obj) is None] == []
    for cls in (OwnNew, OwnGetattribute, OwnFlatten, int, Pair, type(Block()._pytree__state._trace_state)):
        assert _nnx_layouts.facts_of(cls) is None
    no_layout = ("no marks", "other marks", "numbers as marks", "names as numbers on one object")
    for name in (*no_layout, "attributes of a subclass"):
        assert _nnx_layouts.layout_of(LEFT[name]()) is None
    assert _nnx_layouts.layout_of(5) is None


def test_a_trace_is_that_of_where_an_object_is_built():
    model = Net(nnx.Rngs(0))
    leaves, structure = st.tree.flatten(model)

    @jax.jit
    def function(leaves):
        inner = st.tree.unflatten(structure, leaves)
        inner.tied.kernel[...] = inner.tied.kernel[...] * 2
        inner.beyond = 1
        states = [each._trace_state for each in (inner.tied.kernel, inner.tied.bias, inner._pytree__state)]
        assert all(each.is_valid() for each in states)
        assert not model.tied.kernel._trace_state.is_valid()
        with pytest.raises(Exception, match="trace level"):
            model.tied.kernel[...] = jnp.ones((2, 2))
        return st.tree.leaves(inner)

    results = function(leaves)
    outside = st.tree.unflatten(structure, results)
    outside.tied.kernel[...] = outside.tied.kernel[...] + 1
    expected = model.layers[0].kernel[...] * 2 + 1
    assert (outside.layers[0].kernel[...] == expected).all()


def test_metadata_belongs_to_each_object_and_no_hook_is_run():
    leaves, structure = st.tree.flatten([nnx.Param(w(), tag="a"), nnx.Param(w(2), tag="a")])
    one, two = st.tree.unflatten(structure, leaves)
    again, _ = st.tree.unflatten(structure, leaves)
    one.set_metadata(tag="b")
    assert (one.tag, two.tag, again.tag) == ("b", "a", "a")
    variable = with_hooks()
    raw = variable.get_raw_value()
    leaves, structure = st.tree.flatten([variable])
    assert leaves[0] is raw
    assert st.tree.unflatten(structure, leaves)[0].get_raw_value() is raw
    # Of an object that lacks its slots, too.
    for obj in (object.__new__(nnx.Param), object.__new__(ObjectState)):
        for flatten in (jax.tree.flatten, *[st.tree.flatten] * 3):
            with pytest.raises(AttributeError):
                flatten([obj])


def test_an_object_that_is_changed_in_between():
    block = Block()
    for change in (
        lambda: setattr(block, "size", 3),
        lambda: setattr(block, "more", nnx.Param(w(7))),
        lambda: delattr(block, "note"),
        lambda: setattr(block, "note", "again"),
        lambda: block.weight.set_metadata(tag="x"),
        lambda: setattr(block, "weight", nnx.Param({"a": w()})),
        lambda: setattr(block._pytree__state, "_is_setup", True),
        lambda: setattr(block, "size", nnx.data(w(9))),
    ):
        change()
        assert_as_in_jax(block)


def own_getattribute(self, name):
    return {} if name == "__dict__" else object.__getattribute__(self, name)


def test_a_class_that_is_changed():
    """The change is seen when the next structure is made, and from then on."""
    for name, value in (
        ("size", property(lambda self: 5, lambda self, value: None)),
        ("__getattribute__", own_getattribute),
        ("_pytree__has_int_keys", True),
    ):

        class Changed(nnx.Module):
            def __init__(self):
                self.size = 3
                self.weight = nnx.Param(w())
                setattr(self, "10", 4)
                setattr(self, "9", 4)

        assert_as_in_jax(Changed())
        if native is not None:
            assert Changed in _classes_in_native_walk._layouts_in_use
        obj = Changed()
        setattr(Changed, name, value)
        assert_as_in_jax([obj])
        assert_as_in_jax(obj)
        assert Changed not in _classes_in_native_walk._layouts_in_use


def test_another_nnx_is_not_believed(monkeypatch):
    table = _nnx_layouts._look_up()

    class OtherVariable(table.variable):
        __slots__ = ("_other",)

    class OtherMapping(table.mapping):
        def __init__(self, mapping):
            super().__init__(mapping)
            self.other = 1

    def gone():
        raise KeyError("gone")

    for look_up in (
        lambda: table._replace(variable=OtherVariable),
        lambda: table._replace(mapping=OtherMapping),
        lambda: table._replace(current_trace=lambda: None),
        gone,
    ):
        monkeypatch.setattr(_nnx_layouts, "_cached", [])
        monkeypatch.setattr(_nnx_layouts, "_look_up", look_up)
        assert _nnx_layouts.nnx() is None
        assert _nnx_layouts.facts_of(Block) is None
    monkeypatch.undo()
    # Nor is a registry that does not say.
    monkeypatch.setattr(_nnx_layouts, "registered_functions", lambda _: (None, None))
    for cls in (Block, nnx.Param, nnx.Variable):
        assert _nnx_layouts.facts_of(cls) is None


def block_of(pick, static):
    block = Block(size=static)
    block.more, block.weight = nnx.data(pick()), nnx.data(pick())
    return block


MADE = {
    "parameter": lambda pick, static: nnx.Param(pick(), tag=static),
    "variable": lambda pick, static: OwnVariable(pick(), tag=static),
    "module": block_of,
    "short list": lambda pick, static: nnx.List([nnx.data(pick()) for _ in range(2)]),
    "long list": lambda pick, static: nnx.List([nnx.data(pick()) for _ in range(11)]),
    "empty list": lambda pick, static: nnx.List([]),
    "dict": lambda pick, static: nnx.Dict({name: nnx.data(pick()) for name in "ba"}),
    "dict in order": lambda pick, static: nnx.Dict({name: nnx.data(pick()) for name in "ab"}),
    "changed": lambda pick, static: changed(Block(size=static), beyond=static, weight=pick()),
    "other": None,
}


@natively
@given(pool=pools_of_classes(MADE))
def test_random_dags(pool):
    assert_alike([Pair(pool[-1], list(pool)), pool[-1]], Rules())


LATE = program("late_flax")


@pytest.mark.slow
def test_flax_is_not_imported():
    run(LATE)


@pytest.mark.slow
@natively
def test_many_layouts_of_one_class():
    class Named(nnx.Module):
        def __init__(self, name):
            setattr(self, name, nnx.Param(w()))

    # There may be more than what is learned.
    for count in (300, 2_000):
        model = [Named(f"a{i}") for i in range(count)]
        structure = st.tree.structure(model)
        assert knows(model)
        assert_alike([model, model], RULES[0])
        assert st.tree.structure(model) is structure


@pytest.mark.parametrize("donated", [(), 0, 1, (0, 1)])
@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_a_key_beside_an_optimizer_is_written_back(make_key, donated):
    """A variable answers for its value, and a typed key has a `__dict__`, which is not the variable's."""

    class Noisy(nnx.Module):
        def __init__(self):
            self.key = nnx.Variable(make_key(0))
            self.weight = nnx.Param(jnp.ones(2))

    def step(model, optimizer):
        gradient = st.grad(lambda model: (model.weight[...] ** 2).sum(), wrt=nnx.Param, in_place=True)(model)
        optimizer.update(model, gradient)

    model = Noisy()
    optimizer = nnx.Optimizer(model, optax.sgd(0.25), wrt=nnx.Param)
    for jit in (st.jit(step, in_place=True, donate_argnums=donated),) * 2:
        jit(model, optimizer)
    assert model.weight[...].tolist() == [0.25, 0.25]
    assert int(optimizer.step[...]) == 2
    assert (jax.random.key_data(model.key[...]) == jax.random.key_data(make_key(0))).all()
