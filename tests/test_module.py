"""`sharedtree.Module`: which attributes JAX sees, what becomes of assignments, and how modules are copied and printed.

What JAX sees is asked of vanilla JAX; what a model computes is compared with functions of bare arrays.
"""

import collections
import copy
import dataclasses
import functools
import itertools
import logging
import pickle
import re
import types
from typing import Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sharedtree as st
from tests.serialise.drafts import Draft
from tests.walks import in_python

T = TypeVar("T")


class Linear(st.Module):
    def __init__(self, inputs, outputs, *, key):
        self.weight = st.parameter(jax.random.normal(key, (inputs, outputs)))
        self.bias = st.parameter(jnp.zeros(outputs))
        self.calls = st.state_field(jnp.array(0))
        self.activation = jax.nn.relu

    def __call__(self, x):
        self.calls = self.calls + 1
        return self.activation(x @ self.weight + self.bias)


class Net(st.Module):
    """Two layers that are one, and an array of its own."""

    def __init__(self, key):
        linear = Linear(3, 3, key=key)
        self.layers = [linear, linear]
        self.mean = jnp.zeros(3)
        self.name = "net"

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        self.mean = 0.5 * self.mean + 0.5 * x
        return x.sum()


class Holder(st.Module):
    """Anything that a test puts into it."""

    def __init__(self, **attributes):
        for name, value in attributes.items():
            setattr(self, name, value)


@dataclasses.dataclass(eq=False, repr=False)
class Declared(st.Module):
    weight: jax.Array = st.parameter()  # noqa: RUF009 -- declares a field
    count: int = st.state_field(default=0)
    table: list = eqx.field(static=True, default_factory=lambda: [1, 2])  # noqa: RUF009
    width: int = 3


class Typed(st.Module, Generic[T]):
    def __init__(self, value: T):
        self.value = value


def net():
    return Net(jax.random.key(0))


def paths(tree):
    """What vanilla JAX sees."""
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


# --- kinds ---------------------------------------------------------------------------------------------------------


def test_reading_an_attribute_gives_the_value_itself():
    weight = jnp.ones(2)
    holder = Holder(a=st.parameter(weight), b=st.state_field(weight))
    assert holder.a is weight
    assert holder.b is weight
    assert vars(holder) == {"a": weight, "b": weight}


VALUES = {
    "an array": (lambda: jnp.ones(2), [".x"]),
    "a NumPy array": (lambda: np.ones(2), [".x"]),
    "a key": (lambda: jax.random.key(0), [".x"]),
    "a shape": (lambda: jax.ShapeDtypeStruct((2,), "float32"), [".x"]),
    "a module": (lambda: Holder(y=jnp.ones(2)), [".x.y"]),
    "a list": (lambda: [jnp.ones(2), {"a": jnp.ones(2)}], [".x[0]", ".x[1]['a']"]),
    "Equinox": (lambda: eqx.nn.Linear(2, 2, key=jax.random.key(0)), [".x.weight", ".x.bias"]),
    "a partial": (lambda: jax.tree_util.Partial(jnp.sin, jnp.ones(2)), [".x[<flat index 0>][0]"]),
    "an empty list": (list, []),
    "a dictionary of None": (lambda: {"a": None}, []),
    "a number": (lambda: 3, []),
    "a NumPy number": (lambda: np.float32(3), []),
    "a string": (lambda: "text", []),
    "a function": (lambda: jax.nn.relu, []),
    "a tuple of numbers": (lambda: (1, 2.0), []),
    "a list of texts": (lambda: ["a", "b"], []),
    "texts in an array": (lambda: np.array(["a"]), []),
    "a set of numbers": (lambda: {1, 2}, []),
    "an object": (lambda: object(), []),
    "None": (lambda: None, []),
    "a marked number": (lambda: st.state_field(3), [".x"]),
    "a marked list": (lambda: st.parameter([jnp.ones(2), 1.5]), [".x[0]", ".x[1]"]),
    "marked None": (lambda: st.parameter(None), []),
}


def test_what_jax_sees_follows_from_the_value():
    for name, (make, expected) in VALUES.items():
        holder = Holder(x=make())
        assert paths(holder) == expected, name
        leaves, treedef = jax.tree.flatten(holder)
        again = jax.tree.unflatten(treedef, leaves)
        assert type(again) is Holder
        assert jax.tree.structure(again) == treedef
        assert all(a is b for a, b in zip(jax.tree.leaves(again), leaves, strict=True))


def test_a_mark_stays_with_the_attribute():
    holder = Holder(x=st.parameter(jnp.ones(2)))
    holder.x = jnp.zeros(2)
    assert paths(holder.parameters()) == [".x"]
    holder.x = None
    holder.x = 1.5
    assert paths(holder.parameters()) == [".x"]
    holder.x = st.state_field(jnp.ones(2))
    assert paths(holder.parameters()) == []
    del holder.x
    holder.x = "text"
    assert paths(holder) == []


def test_an_array_that_becomes_a_number_is_traced_still():
    holder = Holder(count=jnp.array(3))
    for number in (0, 1, np.float32(2), True, np.bool_(False), jnp.array(1), 2.5):
        holder.count = number
        assert jax.tree.leaves(holder) == [number]
    holder.count = "many"
    assert paths(holder) == []


def test_what_was_static_and_gets_an_array_is_found():
    holder = Holder(cache=None, table={"size": 2}, layers=[])
    assert paths(holder) == []
    holder.cache = jnp.ones(2)
    holder.table["value"] = jnp.ones(2)
    holder.layers.append(Holder(w=jnp.ones(2)))
    assert paths(holder) == [".cache", ".table['size']", ".table['value']", ".layers[0].w"]


def test_what_is_put_past_the_assignment_is_found():
    holder = Holder(a=st.parameter(jnp.ones(2)))
    vars(holder).update(b=jnp.ones(2), c="text")
    assert paths(holder) == [".a", ".b"]
    made = object.__new__(Holder)
    vars(made).update(vars(holder))
    assert paths(made) == [".a", ".b"]


def test_properties_and_caches_are_no_attributes():
    class Cached(st.Module):
        def __init__(self):
            self.weight = jnp.ones(2)

        @property
        def first(self):
            return self.weight[0]

        @first.setter
        def first(self, value):
            self.weight = self.weight.at[0].set(value)

        @functools.cached_property
        def total(self):
            return self.weight.sum()

    module = Cached()
    assert module.total == 2
    module.first = 5.0
    assert module.weight[0] == 5
    assert paths(module) == [".weight"]
    assert "total" not in vars(st.tree.map(lambda x: x, module))


def test_any_objects_can_be_put_in_the_place_of_children():
    structure = jax.tree.structure(net())
    filled = jax.tree.unflatten(structure, [object() for _ in range(structure.num_leaves)])
    assert jax.tree.structure(filled) == structure


# --- transforms ----------------------------------------------------------------------------------------------------


def computed(weight, bias, x, times):
    for _ in range(times):
        x = jax.nn.relu(x @ weight + bias)
    return x


@pytest.mark.parametrize("walk", ["native", "python"])
def test_assignments_are_written_in_place(walk):
    model, x = net(), jnp.ones(3)
    linear = model.layers[0]
    expected = computed(linear.weight, linear.bias, x, 2)
    with in_python() if walk == "python" else st.Context():
        call = st.jit(lambda model, x: model(x), in_place=True)
        np.testing.assert_allclose(call(model, x), expected.sum(), rtol=1e-6)
        np.testing.assert_allclose(call(model, x), expected.sum(), rtol=1e-6)
    assert model.layers[0] is model.layers[1] is linear
    assert linear.calls == 4
    np.testing.assert_allclose(model.mean, 0.75 * expected, rtol=1e-6)


def test_attributes_may_come_and_go_in_place():
    @functools.partial(st.jit, in_place=True)
    def change(holder):
        holder.made = st.parameter(2 * holder.a)
        holder.note = "changed"
        del holder.a

    holder = Holder(a=jnp.ones(2))
    change(holder)
    assert list(vars(holder)) == ["made", "note"]
    assert paths(holder.parameters()) == [".made"]
    np.testing.assert_array_equal(holder.made, [2, 2])


def test_equal_modules_do_not_retrace_and_others_do():
    traces = []

    @st.jit
    def f(module):
        traces.append(module)
        return module.a.sum()

    f(Holder(a=st.parameter(jnp.ones(2)), b="text"))
    f(Holder(a=st.parameter(jnp.zeros(2)), b="text"))
    assert len(traces) == 1
    f(Holder(a=jnp.zeros(2), b="text"))
    f(Holder(a=st.parameter(jnp.zeros(2)), b="other"))
    f(Holder(b="text", a=st.parameter(jnp.zeros(2))))
    assert len(traces) == 4


def test_state_in_a_scan():
    model, xs = net(), jnp.ones((4, 3))

    def body(model, x):
        return model, model(x)

    after, _ = st.scan(body, model, xs)
    assert after.layers[0] is after.layers[1]
    assert after.layers[0].calls == 8


def test_gradients_of_parameters_are_those_of_bare_arrays():
    model, x = net(), jnp.ones(3)
    linear = model.layers[0]

    def loss(parameters, x):
        return model.merge(parameters)(x)

    gradient = st.grad(loss)(model.parameters(), x)
    expected = jax.grad(lambda w, b: computed(w, b, x, 2).sum(), argnums=(0, 1))(linear.weight, linear.bias)
    np.testing.assert_allclose(gradient.layers[0].weight, expected[0], rtol=1e-5)
    np.testing.assert_allclose(gradient.layers[0].bias, expected[1], rtol=1e-5)
    assert gradient.layers[0] is gradient.layers[1]
    assert gradient.mean is None
    assert linear.calls == 0


# --- parameters and merge ------------------------------------------------------------------------------------------


def test_parameters_of_everything_that_a_module_may_hold():
    inner = Holder(w=st.parameter(jnp.ones(2)), n=jnp.array(0))
    model = Holder(
        several=st.parameter({"a": jnp.ones(2), "b": [jnp.zeros(1)]}),
        bare=[jnp.ones(2)],
        inner=inner,
        inners=(Holder(w=st.parameter(jnp.ones(1))), None),
        frozen=st.state_field(Holder(w=st.parameter(jnp.ones(1)), deep=[eqx.nn.Linear(1, 1, key=jax.random.key(0))])),
        of_equinox=eqx.nn.Linear(2, 2, key=jax.random.key(0)),
        marked_module=st.parameter(Holder(w=st.parameter(jnp.ones(1)), n=jnp.array(0))),
        activation=jax.nn.relu,
    )
    trainable = [
        ".several['a']",
        ".several['b'][0]",
        ".inner.w",
        ".inners[0].w",
        ".of_equinox.weight",
        ".of_equinox.bias",
        ".marked_module.w",
    ]
    parameters = model.parameters()
    assert paths(parameters) == trainable
    assert parameters.activation is jax.nn.relu
    assert parameters.several["a"] is model.several["a"]
    merged = model.merge(parameters)
    assert jax.tree.structure(merged) == jax.tree.structure(model)
    assert all(a is b for a, b in zip(jax.tree.leaves(merged), jax.tree.leaves(model), strict=True))


def test_parameters_of_flax():
    nnx = pytest.importorskip("flax.nnx")
    model = Holder(norm=nnx.BatchNorm(2, rngs=nnx.Rngs(0)))
    sizes = [leaf.shape for leaf in jax.tree.leaves(model.parameters())]
    assert sizes == [(2,), (2,)]
    assert len(jax.tree.leaves(model)) > 2


def test_what_is_tied_is_trainable_if_one_of_its_paths_is():
    shared = Holder(w=st.parameter(jnp.ones(2)))
    model = Holder(target=st.state_field(shared), online=shared)
    parameters = model.parameters()
    assert parameters.target is parameters.online
    assert parameters.online.w is shared.w


def test_merge_takes_what_is_there_and_leaves_the_rest():
    model = Holder(a=st.parameter(jnp.ones(2)), b=st.parameter(jnp.ones(2)), n=jnp.array(0), mode="train")
    parameters = model.parameters()
    parameters.a = jnp.zeros(2)
    parameters.b = None
    model.n, model.mode, model.cache = jnp.array(7), "eval", jnp.ones(3)
    merged = model.merge(parameters)
    assert merged.a is parameters.a
    assert merged.b is model.b
    assert (int(merged.n), merged.mode) == (7, "eval")
    assert merged.cache is model.cache


def test_merge_refuses_a_lost_tie_and_another_shape():
    model = net()
    untied = jax.tree.map(lambda x: x + 1, model.parameters())
    with pytest.raises(st.SharingMismatchError, match="one leaf in the module, but two objects") as caught:
        model.merge(untied)
    assert caught.value.paths == (".layers[0].weight", ".layers[1].weight")
    with pytest.raises(st.SharingMismatchError, match="differ in shape from the module at ``"):
        model.merge(Linear(3, 3, key=jax.random.key(0)))
    with pytest.raises(st.SharingMismatchError):
        Holder(w=st.parameter({"a": jnp.ones(2)})).merge(Holder(w=st.parameter({"b": jnp.ones(2)})))
    with pytest.raises(st.SharingMismatchError, match=r"at `\.layers`"):
        parameters = model.parameters()
        parameters.layers = [*parameters.layers, 1.0]
        model.merge(parameters)


# --- copies, pickles, files, text ----------------------------------------------------------------------------------


def isomorphic(one, two):
    return st.same_sharing(one, two) and st.tree.structure(one) is st.tree.structure(two)


def test_copies():
    model = net()
    shallow, deep = copy.copy(model), copy.deepcopy(model)
    assert shallow is not model
    assert shallow.layers is model.layers
    assert isomorphic(model, deep)
    assert deep.layers[0] is deep.layers[1] is not model.layers[0]
    assert deep.layers[0].weight is not model.layers[0].weight
    shallow.extra = st.parameter(jnp.ones(1))
    assert not hasattr(model, "extra")
    assert paths(model.parameters()) == paths(deep.parameters())


def test_pickles():
    model = net()
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(model, protocol))
        assert isomorphic(model, again)
        assert again.layers[0].activation is jax.nn.relu
        np.testing.assert_array_equal(again.layers[0].weight, model.layers[0].weight)
    structure = st.tree.structure(model)
    assert pickle.loads(pickle.dumps(structure)) is structure


def test_saved_and_loaded():
    model = net()
    model.note = (1, "a", None)
    data = st.to_bytes(model)
    for again in (st.from_bytes(data, like=model), st.from_bytes(data, trusted=[Net, Linear])):
        assert isomorphic(model, again)
        assert list(vars(again)) == list(vars(model))
        assert paths(again.parameters()) == paths(model.parameters())
        np.testing.assert_array_equal(again.layers[0].weight, model.layers[0].weight)
    parameters = model.parameters()
    assert isomorphic(parameters, st.from_bytes(st.to_bytes(parameters), trusted=[Net, Linear]))


def test_loading_with_another_name_keeps_the_mark():
    data = st.to_bytes(Holder(old=st.parameter(jnp.ones(2)), rest=jnp.ones(1)))
    name = f"{Holder.__module__}:Holder"
    again = st.from_bytes(data, trusted=[Holder], renames={f"{name}.old": "new", f"{name}.rest": None})
    assert list(vars(again)) == ["new"]
    assert paths(again.parameters()) == [".new"]


def test_a_template_that_differs_in_what_is_static():
    data = st.to_bytes(Holder(w=jnp.ones(2), mode="train"))
    with pytest.raises(st.StructureMismatchError, match=r"\.mode"):
        st.from_bytes(data, like=Holder(w=jnp.ones(2), mode="eval"))


def test_an_attribute_in_the_place_of_a_method_is_not_saved():
    holder = Holder()
    vars(holder)["merge"] = jnp.ones(2)
    with pytest.raises(st.UnserialisableError, match="`merge`"):
        st.to_bytes(holder)


def test_the_text_says_what_is_marked_and_each_module_once():
    model = net()
    model.parent = [model]
    assert repr(model) == (
        "Net(\n  layers=[\n    Linear(\n      weight=parameter(f32[3,3]),\n      bias=parameter(f32[3]),\n"
        "      calls=state_field(weak_i32[]),\n      activation=<function relu>\n    ),\n    <Linear, as above>\n  ],\n"
        "  mean=f32[3],\n  name='net',\n  parent=[<recursive>]\n)"
    )


# --- classes -------------------------------------------------------------------------------------------------------


def test_a_dataclass_declares_its_fields():
    module = Declared(jnp.ones(2))
    assert paths(module) == [".weight", ".count"]
    assert paths(module.parameters()) == [".weight"]
    assert repr(module) == "Declared(weight=parameter(f32[2]), count=state_field(0), table=[1, 2], width=3)"
    module.table = [jnp.ones(2)]
    assert paths(module) == [".weight", ".count"]
    again = st.from_bytes(st.to_bytes(module), trusted=[Declared])
    assert paths(again) == [".weight", ".count"]
    assert dataclasses.replace(module, count=5).count == 5


def test_subclasses_are_pytrees_of_their_own():
    class Noisy(Linear):
        def __init__(self, *args, key):
            super().__init__(*args, key=key)
            self.scale = jnp.ones(())

    assert paths(Noisy(2, 2, key=jax.random.key(0))) == [".weight", ".bias", ".calls", ".scale"]
    assert st.jit(lambda m: m)(Noisy(2, 2, key=jax.random.key(0))).activation is jax.nn.relu


def test_generics():
    module = Typed[jax.Array](jnp.ones(2))
    assert paths(module) == [".value"]
    assert st.tree.structure(module) is st.tree.structure(Typed(jnp.ones(2)))
    assert type(st.jit(lambda m: m)(module)) is Typed


def test_modules_inside_of_others():
    model = eqx.nn.Sequential([Linear(2, 2, key=jax.random.key(0)), eqx.nn.Lambda(jnp.tanh)])
    assert paths(model)[0] == ".layers[0].weight"
    assert "weight=parameter(f32[2,2])" in repr(model)


# --- bad input -----------------------------------------------------------------------------------------------------


class Opaque:
    def __init__(self):
        self.weight = jnp.ones(2)


TABLE = {"a": Holder()}
USED_UP = [
    lambda: (jnp.ones(2) for _ in range(2)),
    lambda: map(jnp.sin, [jnp.ones(2)]),
    lambda: [zip([1], [2], strict=True)],
    TABLE.values,
    TABLE.items,
    lambda: iter([*TABLE.values()]),
    lambda: enumerate(TABLE.values()),
    lambda: reversed([*TABLE.values()]),
    lambda: itertools.chain(TABLE.values()),
]

BAD = {
    **{f"used up {i}": (make, "assigned a `.*`, which is no container of its own") for i, make in enumerate(USED_UP)},
    "a set of modules": (lambda: {Holder()}, "a `set` of arrays or modules, which has no order"),
    "an object with an array": (Opaque, "a `Opaque`, which holds an array or a module as `weight`, but is not a reg"),
    "a mark in a list": (lambda: [st.parameter(jnp.ones(2))], "a container with a parameter in it"),
}


def test_what_no_pytree_can_hold():
    for name, (make, message) in BAD.items():
        holder = Holder(before=jnp.ones(1))
        with pytest.raises(st.UnregisteredTypeError, match=message):
            holder.x = make()
        assert paths(holder) == [".before"], name
        assert not hasattr(holder, "x")


def test_a_module_cannot_hold_itself():
    holder = Holder()
    with pytest.raises(st.CycleError, match="is assigned the module itself"):
        holder.me = holder
    holder.them = [holder]
    with pytest.raises(st.CycleError, match="contains itself"):
        st.tree.leaves(holder)


def test_only_what_can_be_traced_can_be_marked():
    """What is assigned to a marked attribute is a scenario of `tests/fix_scenarios.py`."""
    for mark in (st.parameter, st.state_field):
        with pytest.raises(st.UnregisteredTypeError, match="is nothing that JAX could trace"):
            mark("text")


def test_a_value_and_the_options_of_a_field():
    with pytest.raises(TypeError, match="not both"):
        st.parameter(jnp.ones(2), default=3)


def test_slots_are_refused():
    with pytest.raises(TypeError, match="has `__slots__`"):

        @dataclasses.dataclass(slots=True)
        class _(st.Module):
            x: int


def test_kinds_in_a_file_that_are_none():
    for kinds in (["sub-tune"], [None], [["int", "7"]], ["static", "static"]):
        draft = Draft(st.to_bytes(Holder(x=jnp.ones(2))))
        (node,) = [node for node in draft.manifest["nodes"] if node[0] == "dict"]
        node[2] = kinds[:1]
        if len(kinds) == 2:
            node[1], node[2] = ["x", ["int", "7"]], kinds
        with pytest.raises(st.FormatError, match="kinds of the attributes of a `Holder` that are none"):
            st.load(draft.file(with_digests=True), trusted=[Holder])


@dataclasses.dataclass(frozen=True)
class Hashing:
    """A class whose instances are asked for their hash, and for nothing in a file."""

    note: int = 0

    def __hash__(self):
        raise AssertionError("an object of a file was asked for its hash")

    def __eq__(self, other):
        raise AssertionError("an object of a file was compared")


@pytest.mark.parametrize("value", [Hashing(), [1], {"a": 1}], ids=["hashing", "list", "dict"])
def test_kinds_in_a_file_are_not_asked_before_they_are_known_to_be_texts(value):
    draft = Draft(st.to_bytes(Holder(x=jnp.ones(2), y=value)))
    of_module = next(node for node in draft.manifest["nodes"] if node[0] == "object" and len(node[2]) == 3)
    kinds, y = next(node for node in draft.manifest["nodes"] if node[:2] == ["dict", ["x", "y"]]), of_module[2][-1]
    kinds[2][0] = y
    with pytest.raises(st.FormatError, match="kinds of the attributes of a `Holder` that are none"):
        st.load(draft.file(with_digests=True), trusted=[Holder, Hashing])


def test_kinds_in_a_file_of_what_is_not_there():
    draft = Draft(st.to_bytes(Holder(x=jnp.ones(2))))
    (node,) = [node for node in draft.manifest["nodes"] if node[0] == "dict"]
    node[1] = ["y"]
    assert paths(st.load(draft.file(with_digests=True), trusted=[Holder])) == [".x"]


def test_attributes_in_a_file_in_the_place_of_what_the_class_defines():
    for name in ("merge", "__class__", "__setattr__"):
        draft = Draft(st.to_bytes(Holder(x=jnp.ones(2))))
        (entry,) = draft.manifest["types"]
        entry["extra"][entry["extra"].index("x")] = name
        with pytest.raises(st.FormatError):
            st.load(draft.file(with_digests=True), trusted=[Holder])


# --- what people write ----------------------------------------------------------------------------------------------


class Free(st.Module):
    """Its attributes are assigned from outside."""


@pytest.mark.parametrize("name", ["merge", "parameters"])
def test_methods_of_the_base_class_are_not_hidden(name):
    with pytest.raises(AttributeError, match=f"`Free.{name}` is a method"):
        setattr(Free(), name, 1)


def test_a_copy_shares_nothing_with_what_was_put_into_a_static_container():
    layer = Free()
    layer.weight = st.parameter(jnp.ones(2))
    module = Free()
    module.table, module.layer = {"size": 1}, layer
    module.table["layer"] = layer
    copied = copy.deepcopy(module)
    assert copied.layer is copied.table["layer"]
    assert copied.layer is not layer
    st.jit(lambda m: setattr(m.layer, "weight", 2 * m.layer.weight), in_place=True)(copied)
    np.testing.assert_array_equal(layer.weight, np.ones(2))


class WithState(st.Module):
    """Pickled as Python's documentation shows it."""

    def __init__(self):
        self.weight, self.handle = st.parameter(jnp.ones(2)), "open"

    def __getstate__(self):
        state = self.__dict__.copy()
        del state["handle"]
        return state


class Restoring(WithState):
    def __setstate__(self, state):
        self.__dict__.update(state)
        self.handle = "open again"


class OnlyRestoring(st.Module):
    def __init__(self):
        self.weight = st.parameter(jnp.ones(2))

    def __setstate__(self, state):
        self.__dict__.update(state)
        self.handle = "open again"


def test_marks_survive_pickling_by_whatever_methods():
    for cls in (WithState, Restoring, OnlyRestoring):
        loaded = pickle.loads(pickle.dumps(cls()))
        (weight,) = jax.tree.leaves(loaded.parameters())
        np.testing.assert_array_equal(weight, np.ones(2))
        assert (vars(loaded).get("handle") == "open again") == (cls is not WithState)


def test_fields_need_a_dataclass():
    class Forgotten(st.Module):
        weight: jax.Array = st.parameter()

        def __init__(self, weight):
            self.weight = weight

    with pytest.raises(TypeError, match=r"Forgotten.weight` declares a field of a dataclass"):
        Forgotten(jnp.ones(2))


def test_arguments_without_an_init():
    with pytest.raises(TypeError, match=r"`Free\(\)` takes no arguments"):
        Free(1)


def test_training_with_an_attribute_that_is_none_at_first():
    """It goes on when that becomes an array, as in vanilla JAX, where it is no parameter."""
    module = Free()
    module.weight, module.last = st.parameter(jnp.ones(2)), None
    tx = st.optimizer(optax.adam(0.1))
    state, vanilla = tx.init(module.parameters()), optax.adam(0.1)
    weight, theirs = module.weight, vanilla.init(module.weight)
    for _ in range(3):
        gradient = st.grad(lambda p, m: (m.merge(p).weight ** 2).sum())(module.parameters(), module)
        module.last = module.weight
        updates, state = tx.update(gradient, state, module.parameters())
        module = module.merge(st.apply_updates(module.parameters(), updates))
        step, theirs = vanilla.update(2 * weight, theirs, weight)
        weight = weight + step
    np.testing.assert_allclose(module.weight, weight, rtol=1e-6)


class Slotted:
    __slots__ = ("inner",)

    def __init__(self, inner):
        self.inner = inner


class OfLayers:
    def __init__(self, layer):
        self.table = {"layers": [(layer,)]}


class Table(dict):
    pass


HIDING = {
    "a subclass of dict": (lambda layer: Table(a=layer), "['a']"),
    "a counter": (lambda layer: collections.Counter(a=layer), "['a']"),
    "a user list": (lambda layer: collections.UserList([layer]), "[0]"),
    "a chain of maps": (lambda layer: collections.ChainMap({"a": layer}), "['a']"),
    "a read-only map": (lambda layer: types.MappingProxyType({"a": layer}), "['a']"),
    "an array of objects": (lambda layer: np.array([layer, None], dtype=object), "[0]"),
    "an object with slots": (Slotted, "inner"),
    "an object with a list": (OfLayers, "table['layers'][0][0]"),
}


def test_what_hides_a_module_or_an_array_is_no_attribute():
    for name, (make, path) in HIDING.items():
        for held in (Free(), jnp.ones(2)):
            module = Free()
            with pytest.raises(st.UnregisteredTypeError, match=re.escape(f"holds an array or a module as `{path}`")):
                module.attribute = make(held)
            assert not hasattr(module, "attribute"), name


def test_objects_without_arrays_are_static():
    module = Free()
    module.table, module.names = Table(a=1), np.array(["a", None], dtype=object)
    module.slotted, module.logger = Slotted([1, {"a": np.ones(2)}]), logging.getLogger("a")
    assert jax.tree.leaves(module) == []
