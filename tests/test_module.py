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
import pytest

import sharedtree as st
from tests.kinds import Free, OwnDict
from tests.models import Opaque
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


VALUES = {
    "an array": (lambda: jnp.ones(2), [".x"]),
    "a NumPy array": (lambda: np.ones(2), [".x"]),
    "a key": (lambda: jax.random.key(0), [".x"]),
    "a shape": (lambda: jax.ShapeDtypeStruct((2,), "float32"), [".x"]),
    "a module": (lambda: Free(y=jnp.ones(2)), [".x.y"]),
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


@pytest.mark.parametrize(("make", "expected"), VALUES.values(), ids=VALUES)
def test_what_jax_sees_follows_from_the_value(make, expected):
    holder = Free(x=make())
    assert paths(holder) == expected
    leaves, treedef = jax.tree.flatten(holder)
    again = jax.tree.unflatten(treedef, leaves)
    assert type(again) is Free
    assert jax.tree.structure(again) == treedef
    assert all(a is b for a, b in zip(jax.tree.leaves(again), leaves, strict=True))
    # Any objects can be put in the place of children.
    assert jax.tree.structure(jax.tree.unflatten(treedef, [object() for _ in leaves])) == treedef


def test_a_mark_stays_with_the_attribute_and_an_array_that_becomes_a_number_is_traced_still():
    weight = jnp.ones(2)
    holder = Free(x=st.parameter(weight))
    assert vars(holder)["x"] is holder.x is weight
    holder.count = jnp.array(3)
    for number in (0, 1, np.float32(2), True, np.bool_(False), jnp.array(1), 2.5):
        holder.count = number
        assert jax.tree.leaves(holder)[1:] == [number]
    holder.count = "many"
    holder.x = jnp.zeros(2)
    assert paths(holder.parameters()) == paths(holder) == [".x"]
    holder.x = None
    holder.x = 1.5
    assert paths(holder.parameters()) == [".x"]
    holder.x = st.state_field(jnp.ones(2))
    assert paths(holder.parameters()) == []
    del holder.x
    holder.x = "text"
    assert paths(holder) == []


def test_what_was_static_and_gets_an_array_is_found_and_what_is_put_past_the_assignment():
    holder = Free(cache=None, table={"size": 2}, layers=[])
    assert paths(holder) == []
    holder.cache = jnp.ones(2)
    holder.table["value"] = jnp.ones(2)
    holder.layers.append(Free(w=jnp.ones(2)))
    vars(holder).update(b=jnp.ones(2), c="text")
    found = [".cache", ".table['size']", ".table['value']", ".layers[0].w", ".b"]
    assert paths(holder) == found
    made = object.__new__(Free)
    vars(made).update(vars(holder))
    assert paths(made) == found


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


def computed(weight, bias, x, times):
    for _ in range(times):
        x = jax.nn.relu(x @ weight + bias)
    return x


@pytest.mark.parametrize("walk", ["native", "python"])
def test_a_model_gives_what_functions_of_bare_arrays_give(walk):
    """Its gradients leave it as it was, and assignments are written in place."""
    model, x = net(), jnp.ones(3)
    linear = model.layers[0]
    expected = computed(linear.weight, linear.bias, x, 2)
    slopes = jax.grad(lambda w, b: computed(w, b, x, 2).sum(), argnums=(0, 1))(linear.weight, linear.bias)
    with in_python() if walk == "python" else st.Context():
        gradient = st.grad(lambda parameters: model.merge(parameters)(x))(model.parameters())
        np.testing.assert_allclose(gradient.layers[0].weight, slopes[0], rtol=1e-5)
        np.testing.assert_allclose(gradient.layers[0].bias, slopes[1], rtol=1e-5)
        assert gradient.layers[0] is gradient.layers[1]
        assert gradient.mean is None
        assert linear.calls == 0
        call = st.jit(lambda model, x: model(x), in_place=True)
        np.testing.assert_allclose(call(model, x), expected.sum(), rtol=1e-6)
        np.testing.assert_allclose(call(model, x), expected.sum(), rtol=1e-6)
    assert model.layers[0] is model.layers[1] is linear
    assert linear.calls == 4
    np.testing.assert_allclose(model.mean, 0.75 * expected, rtol=1e-6)


def test_attributes_may_come_and_go_in_place_and_only_other_modules_retrace():
    traces = []

    @functools.partial(st.jit, in_place=True)
    def change(holder):
        traces.append(holder)
        holder.made = st.parameter(2 * holder.a)
        holder.note = "changed"
        del holder.a

    def changed(**attributes):
        holder = Free(**attributes)
        change(holder)
        return holder

    holder = changed(a=st.parameter(jnp.ones(2)), b="text")
    assert list(vars(holder)) == ["b", "made", "note"]
    assert paths(holder.parameters()) == [".made"]
    np.testing.assert_array_equal(holder.made, [2, 2])
    changed(a=st.parameter(jnp.zeros(2)), b="text")
    assert len(traces) == 1
    changed(a=jnp.zeros(2), b="text")
    changed(a=st.parameter(jnp.zeros(2)), b="other")
    changed(b="text", a=st.parameter(jnp.zeros(2)))
    assert len(traces) == 4


def test_parameters_of_everything_that_a_module_may_hold():
    inner = Free(w=st.parameter(jnp.ones(2)), n=jnp.array(0))
    tied = Free(w=st.parameter(jnp.ones(2)))
    model = Free(
        several=st.parameter({"a": jnp.ones(2), "b": [jnp.zeros(1)]}),
        bare=[jnp.ones(2)],
        inner=inner,
        inners=(Free(w=st.parameter(jnp.ones(1))), None),
        frozen=st.state_field(Free(w=st.parameter(jnp.ones(1)), deep=[eqx.nn.Linear(1, 1, key=jax.random.key(0))])),
        of_equinox=eqx.nn.Linear(2, 2, key=jax.random.key(0)),
        marked_module=st.parameter(Free(w=st.parameter(jnp.ones(1)), n=jnp.array(0))),
        activation=jax.nn.relu,
        # What is tied is trainable if one of its paths is.
        target=st.state_field(tied),
        online=tied,
    )
    trainable = """
        .several['a'] .several['b'][0] .inner.w .inners[0].w .of_equinox.weight .of_equinox.bias .marked_module.w
        .target.w .online.w
    """
    parameters = model.parameters()
    assert paths(parameters) == trainable.split()
    assert parameters.target is parameters.online
    assert parameters.activation is jax.nn.relu
    assert parameters.several["a"] is model.several["a"]
    merged = model.merge(parameters)
    assert jax.tree.structure(merged) == jax.tree.structure(model)
    assert all(a is b for a, b in zip(jax.tree.leaves(merged), jax.tree.leaves(model), strict=True))


def test_merge_takes_what_is_there_and_leaves_the_rest():
    model = Free(a=st.parameter(jnp.ones(2)), b=st.parameter(jnp.ones(2)), n=jnp.array(0), mode="train")
    model.last = None
    parameters = model.parameters()
    # With these, an optimizer goes on when what was None at first becomes an array.
    model.last = jnp.ones(2)
    assert jax.tree.structure(model.parameters()) == jax.tree.structure(parameters)
    assert st.tree.structure(model.parameters()) is st.tree.structure(parameters)
    parameters.a = jnp.zeros(2)
    parameters.b = None
    model.n, model.mode, model.cache = jnp.array(7), "eval", jnp.ones(3)
    merged = model.merge(parameters)
    assert merged.last is model.last
    assert merged.a is parameters.a
    assert merged.b is model.b
    assert (int(merged.n), merged.mode) == (7, "eval")
    assert merged.cache is model.cache


def test_merge_refuses_a_lost_tie_and_another_shape():
    model = net()
    untied = jax.tree.map(lambda x: x + 1, model.parameters())
    with pytest.raises(st.errors.SharingMismatchError, match="one leaf in the module, but two objects") as caught:
        model.merge(untied)
    assert caught.value.paths == (".layers[0].weight", ".layers[1].weight")
    with pytest.raises(st.errors.SharingMismatchError, match="The parameters are a `[A-Za-z]*`, where the module is a"):
        model.merge(Linear(3, 3, key=jax.random.key(0)))
    with pytest.raises(st.errors.SharingMismatchError):
        Free(w=st.parameter({"a": jnp.ones(2)})).merge(Free(w=st.parameter({"b": jnp.ones(2)})))
    with pytest.raises(st.errors.SharingMismatchError, match=r"at `\.layers`"):
        parameters = model.parameters()
        parameters.layers = [*parameters.layers, 1.0]
        model.merge(parameters)


MADE_AGAIN = {
    "a deep copy": copy.deepcopy,
    **{
        f"a pickle, protocol {protocol}": lambda model, protocol=protocol: pickle.loads(pickle.dumps(model, protocol))
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)
    },
    "a file, with a template": lambda model: st.from_bytes(st.to_bytes(model), like=model),
    "a file": lambda model: st.from_bytes(st.to_bytes(model), trusted=[Net, Linear]),
}


def test_copies_pickles_and_files():
    model = net()
    model.note = (1, "a", None)
    for name, make in MADE_AGAIN.items():
        again = make(model)
        assert st.same_sharing(model, again), name
        assert st.tree.structure(model) is st.tree.structure(again), name
        assert again.layers[0] is again.layers[1] is not model.layers[0]
        assert again.layers[0].weight is not model.layers[0].weight
        assert again.layers[0].activation is jax.nn.relu
        assert list(vars(again)) == list(vars(model))
        assert paths(again.parameters()) == paths(model.parameters()), name
        np.testing.assert_array_equal(again.layers[0].weight, model.layers[0].weight)
    structure = st.tree.structure(model)
    assert pickle.loads(pickle.dumps(structure)) is structure
    parameters = model.parameters()
    assert st.tree.structure(parameters) is st.tree.structure(MADE_AGAIN["a file"](parameters))
    shallow = copy.copy(model)
    assert shallow is not model
    assert shallow.layers is model.layers
    shallow.extra = st.parameter(jnp.ones(1))
    assert not hasattr(model, "extra")


def test_loading_with_another_name_and_what_cannot_be_loaded_or_saved():
    data = st.to_bytes(Free(old=st.parameter(jnp.ones(2)), rest=jnp.ones(1)))
    name = f"{Free.__module__}:Free"
    with pytest.raises(st.errors.StructureMismatchError, match="declares neither"):
        st.from_bytes(data, trusted=[Free], renames={f"{name}.old": "new"})
    again = st.from_bytes(data, trusted=[Free], renames={f"{name}.rest": None})
    assert list(vars(again)) == ["old"]
    assert paths(again.parameters()) == [".old"]
    with pytest.raises(st.errors.StructureMismatchError, match=r"\.mode"):
        st.from_bytes(st.to_bytes(Free(w=jnp.ones(2), mode="train")), like=Free(w=jnp.ones(2), mode="eval"))
    vars(again)["merge"] = jnp.ones(2)
    with pytest.raises(st.errors.UnserialisableError, match="`merge`"):
        st.to_bytes(again)


def test_the_text_says_what_is_marked_and_each_module_once():
    model = net()
    model.parent = [model]
    assert repr(model) == (
        "Net(\n  layers=[\n    Linear(\n      weight=parameter(f32[3,3]),\n      bias=parameter(f32[3]),\n"
        "      calls=state_field(weak_i32[]),\n      activation=<function relu>\n    ),\n    <Linear, as above>\n  ],\n"
        "  mean=f32[3],\n  name='net',\n  parent=[<recursive>]\n)"
    )


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


def test_subclasses_generics_and_modules_inside_of_others():
    class Noisy(Linear):
        def __init__(self, *args, key):
            super().__init__(*args, key=key)
            self.scale = jnp.ones(())

    noisy, generic = Noisy(2, 2, key=jax.random.key(0)), Typed[jax.Array](jnp.ones(2))
    assert paths(noisy) == [".weight", ".bias", ".calls", ".scale"]
    assert paths(generic) == [".value"]
    assert st.tree.structure(generic) is st.tree.structure(Typed(jnp.ones(2)))
    assert [type(m) for m in st.jit(lambda *ms: ms)(noisy, generic)] == [Noisy, Typed]
    model = eqx.nn.Sequential([noisy, eqx.nn.Lambda(jnp.tanh)])
    assert paths(model)[0] == ".layers[0].weight"
    assert "weight=parameter(f32[2,2])" in repr(model)


class OfLayers:
    def __init__(self, layer):
        self.table = {"layers": [(layer,)]}


class Slotted:
    __slots__ = ("inner",)

    def __init__(self, inner):
        self.inner = inner


TABLE = {"a": Free()}
USED_UP = [
    lambda held: (held for _ in range(2)),
    lambda held: [zip([1], [2], strict=True)],
    lambda held: TABLE.values(),
    lambda held: reversed([held]),
    lambda held: itertools.chain([held]),
]
HIDING = {
    "an object": (Opaque, "weight"),
    "a subclass of dict": (lambda held: OwnDict(a=held), "['a']"),
    "a counter": (lambda held: collections.Counter(a=held), "['a']"),
    "a user list": (lambda held: collections.UserList([held]), "[0]"),
    "a chain of maps": (lambda held: collections.ChainMap({"a": held}), "['a']"),
    "a read-only map": (lambda held: types.MappingProxyType({"a": held}), "['a']"),
    "an array of objects": (lambda held: np.array([held, None], dtype=object), "[0]"),
    "an object with slots": (Slotted, "inner"),
    "an object with a list": (OfLayers, "table['layers'][0][0]"),
}

BAD = {
    **{f"used up {i}": (make, "assigned a `.*`, which is not itself a container") for i, make in enumerate(USED_UP)},
    **{
        name: (make, f"holds an array or a module as `{re.escape(path)}`, but is not a reg")
        for name, (make, path) in HIDING.items()
    },
    "a set of modules": (lambda held: {Free()}, "a `set` of arrays or modules, which has no order"),
    "a mark in a list": (lambda held: [st.parameter(jnp.ones(2))], "a container with a parameter in it"),
}


def test_what_no_pytree_can_hold():
    for name, (make, message) in BAD.items():
        for held in (Free(), jnp.ones(2)):
            holder = Free(before=jnp.ones(1))
            with pytest.raises(st.errors.UnregisteredTypeError, match=message):
                holder.x = make(held)
            assert paths(holder) == [".before"], name
            assert not hasattr(holder, "x")
    holder = Free(table=OwnDict(a=1), names=np.array(["a", None], dtype=object), logger=logging.getLogger("a"))
    holder.slotted = Slotted([1, {"a": np.ones(2)}])
    assert jax.tree.leaves(holder) == []


def test_a_module_cannot_hold_itself():
    holder = Free()
    with pytest.raises(st.errors.CycleError, match="is assigned the module itself"):
        holder.me = holder
    holder.them = [holder]
    with pytest.raises(st.errors.CycleError, match="contains itself"):
        st.tree.leaves(holder)


def test_what_is_no_declaration():
    """What is assigned to a marked attribute is a scenario of `tests/fix_scenarios.py`."""
    for mark in (st.parameter, st.state_field):
        with pytest.raises(
            st.errors.UnregisteredTypeError, match="It must be an array, a number, a module or a container"
        ):
            mark("text")
    with pytest.raises(TypeError, match="not both"):
        st.parameter(jnp.ones(2), default=3)
    with pytest.raises(TypeError, match="has `__slots__`"):

        @dataclasses.dataclass(slots=True)
        class _(st.Module):
            x: int

    class Forgotten(st.Module):
        weight: jax.Array = st.parameter()

        def __init__(self, weight):
            self.weight = weight

    with pytest.raises(TypeError, match=r"Forgotten.weight` declares a field of a dataclass"):
        Forgotten(jnp.ones(2))
    with pytest.raises(TypeError, match=r"`Bare\(\)` takes no arguments"):
        Bare(1)
    for name in ("merge", "parameters"):
        with pytest.raises(AttributeError, match=f"`Bare.{name}` is a method"):
            setattr(Bare(), name, 1)


def forged(names, kinds):
    """A file of a `Free` with one array, with other names and kinds of its attributes."""
    draft = Draft(st.to_bytes(Free(x=jnp.ones(2))))
    (node,) = [node for node in draft.manifest["nodes"] if node[0] == "dict"]
    node[1], node[2] = names, kinds or node[2]
    return draft.file(with_digests=True)


def test_forged_attributes():
    for kinds in (["sub-tune"], [None], [["int", "7"]], ["static", "static"]):
        names = ["x", ["int", "7"]] if len(kinds) == 2 else ["x"]
        with pytest.raises(st.errors.FormatError, match="kinds of the attributes of a `Free` that are none"):
            st.load(forged(names, kinds), trusted=[Free])
    assert paths(st.load(forged(["y"], None), trusted=[Free])) == [".x"]  # a kind of what is not there
    for name in ("merge", "__class__", "__setattr__"):
        draft = Draft(st.to_bytes(Free(x=jnp.ones(2))))
        (entry,) = draft.manifest["types"]
        entry["extra"][entry["extra"].index("x")] = name
        with pytest.raises(st.errors.FormatError):
            st.load(draft.file(with_digests=True), trusted=[Free])


@dataclasses.dataclass(frozen=True)
class Hashing:
    """A class whose instances are asked for their hash, and for nothing in a file."""

    note: int = 0

    def __hash__(self):
        raise AssertionError("an object of a file was asked for its hash")

    def __eq__(self, other):
        raise AssertionError("an object of a file was compared")


def test_kinds_in_a_file_are_not_asked_before_they_are_known_to_be_texts():
    for value in (Hashing(), [1], {"a": 1}):
        draft = Draft(st.to_bytes(Free(x=jnp.ones(2), y=value)))
        of_module = next(node for node in draft.manifest["nodes"] if node[0] == "object" and len(node[2]) == 3)
        kinds = next(node for node in draft.manifest["nodes"] if node[:2] == ["dict", ["x", "y"]])
        kinds[2][0] = of_module[2][-1]
        with pytest.raises(st.errors.FormatError, match="kinds of the attributes of a `Free` that are none"):
            st.load(draft.file(with_digests=True), trusted=[Free, Hashing])


class Bare(st.Module):
    """Its attributes are assigned from outside."""


def test_a_copy_shares_nothing_with_what_was_put_into_a_static_container():
    layer = Free(weight=st.parameter(jnp.ones(2)))
    module = Free(table={"size": 1}, layer=layer)
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


class OnlyRestoring(Restoring):
    __getstate__ = st.Module.__getstate__


def test_marks_survive_pickling_by_whatever_methods():
    for cls in (WithState, Restoring, OnlyRestoring):
        loaded = pickle.loads(pickle.dumps(cls()))
        (weight,) = jax.tree.leaves(loaded.parameters())
        np.testing.assert_array_equal(weight, np.ones(2))
        assert (vars(loaded).get("handle") == "open again") == (cls is not WithState)
