"""Files of Flax NNX's modules, variables, states and definitions of graphs; what was loaded is judged by NNX itself."""

import functools
import importlib.metadata
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packaging.version import Version

import sharedtree as st
from sharedtree.serialise.trust._allow_list import IF_TRUSTED
from tests.nnx_layers import LAYERS, layers_of_nnx
from tests.processes import program, run

from .containers import naming
from .drafts import Draft
from .isomorphic import assert_isomorphic

pytest.importorskip("flax", minversion="0.12.1")
nnx: Any = pytest.importorskip("flax.nnx")
optax: Any = pytest.importorskip("optax")


class Net(nnx.Module):
    """Ties of variables and of modules, and state of every kind."""

    def __init__(self, rngs: Any) -> None:
        self.embed = nnx.Linear(3, 3, rngs=rngs)
        self.head = nnx.Linear(3, 3, use_bias=False, rngs=rngs)
        self.head.kernel = self.embed.kernel
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(3, 3, rngs=rngs) for _ in range(3)])
        self.again = self.blocks[2]
        self.parts = nnx.Dict({"a b": nnx.Param(jnp.ones(2)), "plain": 3})
        self.calls = nnx.Variable(jnp.array(0))
        self.scale = jnp.array(2.0)
        self.sizes = nnx.data([1.5, 2.5])
        self.activation = jax.nn.relu
        self.name = "net"

    def __call__(self, x: Any) -> Any:
        self.calls[...] += 1
        for block in self.blocks:
            x = self.activation(block(x))
        return self.head(self.dropout(self.norm(self.embed(x))))


@nnx.dataclass
class Declared(nnx.Module):
    weight: Any = nnx.data()
    rate: float = nnx.static(default=0.5)
    function: Callable[..., Any] = jax.nn.relu


class WithProperty(nnx.Module):
    def __init__(self) -> None:
        self.weight = nnx.Param(jnp.ones(2))

    @property
    def double(self) -> Any:
        return 2 * self.weight[...]

    @double.setter
    def double(self, value: Any) -> None:
        raise AssertionError("a property was set")


class Scaled(nnx.Param):
    """A variable of the user's."""


TRUSTED: list[Any] = [Net, Declared, WithProperty, Scaled, "flax"]
load_from = functools.partial(st.from_bytes, trusted=TRUSTED)


# What makes each layer of NNX that this version has, and what else is saved.
MAKE: dict[str, Callable[[], Any]] = {
    **{name: make for name, (make, _, _) in LAYERS.items() if name in layers_of_nnx()},
    "list": lambda: nnx.List([1, nnx.Linear(2, 3, rngs=nnx.Rngs(0)), *[jnp.ones(2)] * 10]),
    "dict": lambda: nnx.Dict({"a b": nnx.Param(jnp.ones(2)), "class": 3}),
    "rngs": lambda: nnx.Rngs(0, params=1),
    "accuracy": lambda: nnx.metrics.Accuracy(),
    "metrics": lambda: nnx.MultiMetric(loss=nnx.metrics.Average("loss"), deviation=nnx.metrics.Welford()),
    "net": lambda: Net(nnx.Rngs(0, dropout=1)),
    "declared": lambda: Declared(nnx.Param(jnp.ones(2)), function=jax.nn.gelu),
    "property": lambda: WithProperty(),
    "variable": lambda: Scaled(jnp.arange(3.0), axis="model"),
    "state": lambda: nnx.state(Net(nnx.Rngs(0))),
}
SLOW = {"Bidirectional", "GRUCell", "LSTMCell", "MultiHeadAttention", "OptimizedLSTMCell", "RNN", "net", "state"}


def assert_same(one: Any, two: Any) -> None:
    """What NNX and JAX say of them is the same: attributes, marks and ties, and each leaf to the bit."""
    assert jax.tree.structure(one) == jax.tree.structure(two)
    assert_isomorphic(jax.tree.leaves(one), jax.tree.leaves(two))
    if not isinstance(one, nnx.Variable):
        assert nnx.split(one)[0] == nnx.split(two)[0]  # the definition of a graph has the ties


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("name", [pytest.param(each, marks=[pytest.mark.slow] * (each in SLOW)) for each in MAKE])
def test_what_is_loaded_is_what_was_saved(name):
    module = MAKE[name]()
    data = st.to_bytes(module)
    loaded = load_from(data)
    assert_same(module, loaded)
    assert_same(module, st.from_bytes(data, like=module))
    assert st.to_bytes(loaded) == data


def test_ties_and_state():
    net, x = Net(nnx.Rngs(0, dropout=1)), jnp.ones((2, 3))
    net(x)
    loaded = load_from(st.to_bytes(net))
    assert loaded.head.kernel is loaded.embed.kernel
    assert loaded.again is loaded.blocks[2]
    assert loaded.blocks[0].kernel is not loaded.blocks[1].kernel
    assert loaded.dropout.rngs.count[...] == net.dropout.rngs.count[...] != 0
    assert loaded.calls[...] == 1
    np.testing.assert_array_equal(net(x), loaded(x))  # the same keys, too
    arrays = {array.name: array.shape for array in st.inspect(st.to_bytes(net)).arrays}
    assert arrays["embed.kernel.value"] == arrays["blocks[1].kernel.value"] == (3, 3)
    assert "head.kernel.value" not in arrays


T = TypeVar("T")


class Holder(nnx.Module, Generic[T]):
    def __init__(self, rngs: Any) -> None:
        self.layer = nnx.Linear(2, 2, rngs=rngs)


def test_what_typing_notes_on_instances_is_left_out():
    noted, plain = Holder[int](nnx.Rngs(0)), Holder(nnx.Rngs(0))
    data = st.to_bytes(noted)
    assert data == st.to_bytes(plain)
    for options in ({"trusted": [Holder, "flax"]}, {"like": noted}):  # no template asks for what no file has
        loaded = st.from_bytes(data, **options)
        assert jax.tree.structure(loaded) == jax.tree.structure(plain)
        loaded.__orig_class__ = Holder[int]  # as the guide says, and static as before
        assert jax.tree.structure(loaded) == jax.tree.structure(noted)


def test_an_optimizer_is_saved_whole_if_its_functions_have_names():
    net = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(net, optax.GradientTransformation(no_state, descend), wrt=nnx.Param)
    loaded = st.from_bytes(st.to_bytes(optimizer), trusted=["flax", no_state, descend])
    assert_same(optimizer, loaded)
    loaded.update(net, jax.tree.map(jnp.ones_like, nnx.state(net)))
    assert loaded.step[...] == 1
    optimizer = nnx.Optimizer(net, optax.adam(1e-3), wrt=nnx.Param)  # whose functions have none
    optimizer.update(net, jax.tree.map(jnp.ones_like, nnx.state(net)))
    assert_same(nnx.state(optimizer), load_from(st.to_bytes(nnx.state(optimizer))))
    with pytest.raises(st.errors.UnserialisableError, match=r"flax\.nnx\.state\(optimizer\)") as caught:
        st.to_bytes({"net": net, "optimizer": optimizer})
    assert caught.value.paths == ("['optimizer']",)


def no_state(params: Any) -> Any:
    return optax.EmptyState()


def descend(updates: Any, state: Any, params: Any = None) -> Any:
    return jax.tree.map(lambda update: -0.1 * update, updates), state


def test_a_definition_of_a_graph_and_its_state_make_the_model_again():
    net = Net(nnx.Rngs(0))
    graphdef, state = nnx.split(net)
    filtered = nnx.split(net, nnx.Param, nnx.BatchStat, ...)
    loaded, loaded_state, loaded_filtered = load_from(st.to_bytes((graphdef, state, filtered)))
    assert loaded == graphdef
    assert hash(loaded) == hash(graphdef)
    assert_same(net, nnx.merge(loaded, loaded_state))
    assert_same(net, nnx.merge(*loaded_filtered))


def test_templates_and_parts(tmp_path):
    net, other = (nnx.Linear(2, 3, use_bias=use_bias, rngs=nnx.Rngs(0)) for use_bias in (True, False))
    with pytest.raises(st.errors.StructureMismatchError) as caught:
        st.from_bytes(st.to_bytes(net), like=other)
    assert ".use_bias" in caught.value.paths
    net, untied, file = Net(nnx.Rngs(0)), Net(nnx.Rngs(0)), tmp_path / "net.safetensors"
    st.save(file, net)
    untied.head.kernel = nnx.Param(untied.embed.kernel[...] + 0)
    with pytest.raises(st.errors.StructureMismatchError) as caught:
        st.load(file, like=untied)
    assert any(".head.kernel" in path for path in caught.value.paths)
    assert_same(net.blocks[1], st.load(file, select=".blocks[1]", trusted="flax"))
    partial = st.load(file, select=lambda name: name.startswith("embed"), trusted=TRUSTED)
    assert type(partial.scale) is jax.ShapeDtypeStruct
    assert jax.tree.structure(partial) == jax.tree.structure(net)


def test_a_field_that_was_added_takes_its_default():
    def without_rate(entry: dict[str, Any], node: list[Any]) -> None:
        at = entry["fields"].index("rate")
        del entry["fields"][at]
        del node[2][at]

    assert forged(without_rate, Declared(nnx.Param(jnp.ones(2)))).rate == 0.5


def test_what_nobody_trusts_is_refused_at_once():
    net, state = Net(nnx.Rngs(0)), nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    with pytest.raises(st.errors.UntrustedTypeError, match=r'trusted=\["flax"|, "flax"\]') as caught:
        st.from_bytes(st.to_bytes(net))
    assert {f"{__name__}:Net", "flax.nnx:Linear", "flax.nnx:Param", "flax.nnx:List"} <= set(caught.value.names)
    with pytest.raises(st.errors.UntrustedTypeError, match=r'trusted=\["flax"\]\)'):
        st.from_bytes(st.to_bytes(state))


FORBIDDEN = """
    flax.linen:Dense flax.linen:Sequential flax.core:Scope flax.nnx.proxy_caller:DelayedAccessor
    flax.nnx.proxy_caller:GetAttr flax.nnx.proxy_caller:CallableProxy flax.nnx.bridge:ToLinen flax.nnx.bridge:ToNNX
    flax.nnx.transforms.compilation:JitFn flax.nnx:OfType flax.nnx.graphlib:UpdateContext
    flax.nnx.graphlib:GraphNodeImpl
"""


def test_names_of_flax_are_allowed_one_by_one():
    """Linen is not trusted with NNX, nor is what calls what it holds."""
    functions = "flax.nnx:Linear.set_mode flax.nnx:Module.train flax.nnx:jit flax.io:rmtree"
    for tag, names in (("function", functions), ("class", FORBIDDEN)):
        for name in names.split():
            with pytest.raises((st.errors.UntrustedTypeError, st.errors.StructureMismatchError)):
                pytest.fail(repr(load_from(naming([tag, name]))))
    is_newest = Version(importlib.metadata.version("flax")) >= Version("0.12.12")  # `RoPE` came late
    for name in IF_TRUSTED:
        (request,) = st.audit(naming(["class", name]), trusted="flax").requests
        assert request.allowed, request
        assert request.found or not is_newest, request
        assert not st.audit(naming(["class", name])).requests[0].allowed


@pytest.mark.slow
def test_a_process_without_flax_is_told_to_import_it(tmp_path):
    layer = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.relu)
    st.save(tmp_path / "file.safetensors", {"layer": layer, "state": nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))})
    code = program("load_without_flax")
    assert run(code, cwd=tmp_path) == "Sequential (2, 3) (2, 3)\n"


def forged(change: Callable[[dict[str, Any], list[Any]], None], module: Any = None) -> Any:
    """Loads a file of a module with a property after a change of its type and its node."""
    draft = Draft(st.to_bytes(WithProperty() if module is None else module))
    entry = next(each for each in draft.manifest["types"] if each["kind"] == "attributes")
    change(entry, next(each for each in draft.manifest["nodes"] if each[0] == "object"))
    return load_from(draft.file(with_digests=True))


def adding(name: str, value: Any) -> Callable[[dict[str, Any], list[Any]], None]:
    def change(entry: dict[str, Any], node: list[Any]) -> None:
        entry.setdefault("extra", []).append(name)
        node[2].append(value)

    return change


def test_a_file_sets_no_attribute_that_is_the_classs():
    names = """
        double __class__ __dict__ __call__ train eval _setattr _pytree__flatten _pytree__has_int_keys
        _pytree__is_pytree _graph_node_flatten _object__nodes
    """
    for name in (*names.split(), "", "weight"):  # the last is there already
        with pytest.raises(st.errors.FormatError):
            pytest.fail(repr(forged(adding(name, True))))


class Annotating(nnx.Module):
    apply: Callable[..., Any]
    scale: Callable[..., Any] = jax.nn.relu


class Applying(Annotating):
    def __init__(self) -> None:
        self.weight = nnx.Param(jnp.ones(2))

    def apply(self, x: Any) -> Any:
        return x


class Again(Applying):
    apply: Callable[..., Any]


class Overriding(Again):
    def apply(self, x: Any) -> Any:
        return 2 * x

    def scale(self, x: Any) -> Any:
        return 2 * x


TRUSTED.extend([Applying, Overriding])
FUNCTION = ["function", "jax.numpy:sin"]


def test_a_method_that_a_base_annotates_is_a_method():
    def change(entry: dict[str, Any], node: list[Any], name: str, is_field: bool) -> None:
        entry["missing"] = [each for each in entry.get("missing", []) if each != name]
        if is_field:
            entry["fields"].append(name)
            node[2].insert(len(entry["fields"]) - 1, FUNCTION)
        else:
            adding(name, FUNCTION)(entry, node)

    for cls, name in ((Applying, "apply"), (Overriding, "apply"), (Overriding, "scale")):
        for is_field in (True, False):
            with pytest.raises((st.errors.FormatError, st.errors.StructureMismatchError), match=f"`{name}`"):
                forged(functools.partial(change, name=name, is_field=is_field), cls())


def test_a_default_that_its_class_annotates_can_be_replaced():
    net = Applying()
    net.scale = jnp.sin
    assert st.from_bytes(st.to_bytes(net), trusted=[Applying, "flax"]).scale is jnp.sin
    again = Again()
    again.apply = jnp.sin
    assert st.from_bytes(st.to_bytes(again), trusted=[Again, "flax"]).apply is jnp.sin
    net.apply = jnp.sin
    with pytest.raises(st.errors.UnserialisableError, match="`apply`"):
        st.to_bytes(net)


def test_what_is_nnxs_own_is_of_its_kind():
    for name in ("_pytree__nodes", "_pytree__state"):
        for value in (None, True, "kernel", ["int", "1"]):
            with pytest.raises(st.errors.FormatError, match="No save would write that"):
                forged(adding(name, value))
    draft = Draft(st.to_bytes(Net(nnx.Rngs(0))))
    marks = next(node for node in draft.manifest["nodes"] if node[:2] == ["dict", ["sizes"]])
    for mark in ("yes", ["int", "1"]):
        marks[2] = [mark]
        with pytest.raises(st.errors.FormatError, match="No save would write that"):
            load_from(draft.file(with_digests=True))


def test_what_a_file_refers_to_twice_is_one_object_and_contains_not_itself():
    def again(entry: dict[str, Any], node: list[Any]) -> None:
        entry["extra"].append("again")
        node[2].append(node[2][entry["extra"].index("weight")])

    def astray(entry: dict[str, Any], node: list[Any]) -> None:
        node[2][0] = 10_000

    loaded = forged(again)
    assert loaded.again is loaded.weight
    assert len(jax.tree.leaves(st.Dag(loaded))) == 1
    with pytest.raises(st.errors.FormatError):
        forged(astray)
    net = nnx.Dict()
    net.itself = net
    with pytest.raises(st.errors.CycleError):
        st.to_bytes(net)


def test_classes_that_are_not_there():
    for name in ("flax.nnx:Linaer", "flax.nnx.nowhere:Linear"):
        with pytest.raises(st.errors.StructureMismatchError, match="that do not exist here"):
            forged(lambda entry, node, name=name: entry.update(name=name))
    for name in ("flax.nnx:Param", "flax.nnx:relu"):
        with pytest.raises(st.SharedTreeError):
            forged(lambda entry, node, name=name: entry.update(name=name))


def test_values_of_wrong_kinds_in_their_places():
    """Metadata of variables and states, and what mappings and axes hold."""
    rnn = nnx.RNN(nnx.SimpleCell(2, 3, rngs=nnx.Rngs(0)))
    registered = {"state": nnx.state(WithProperty()), "variable": Scaled(jnp.ones(1), axis="model")}
    for tree, kind, suffix in (
        (registered, "registered", ""), (nnx.graphdef(rnn), "object", ":HashableMapping"),
        (rnn, "object", ":StateAxes"),
    ):  # fmt: skip
        data = st.to_bytes(tree)
        types = Draft(data).manifest["types"]
        for number, node in enumerate(Draft(data).manifest["nodes"]):
            if node[0] == kind and types[node[1]]["name"].endswith(suffix):
                for value in (None, "text", ["int", "1"], ["bytes", "YQ=="]):
                    draft = Draft(data)
                    place = draft.manifest["nodes"][number]
                    place[2] = value if kind == "registered" else [value, *place[2][1:]]
                    with pytest.raises(st.errors.FormatError if kind == "object" else st.SharedTreeError):
                        load_from(draft.file(with_digests=True))


def test_no_code_of_nnx_runs(monkeypatch):
    data = st.to_bytes(Net(nnx.Rngs(0)))

    def called(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("it was called")

    for cls, name in (
        *[(nnx.Pytree, each) for each in ("__setattr__", "_setattr", "_check_value", "_graph_node_init")],
        *[(nnx.Linear, "__init__"), (nnx.Variable, "__init__"), (nnx.List, "append"), (Net, "__init__")],
    ):
        monkeypatch.setattr(cls, name, called)
    assert load_from(data).head is not None


def called_by_a_file(*_: Any, **__: Any) -> Any:
    raise AssertionError("a file had it called")


@jax.tree_util.register_pytree_node_class
class Zipping:
    """Unflattens as many classes do."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def tree_flatten(self) -> Any:
        return list(self.values.values()), tuple(self.values)

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> Any:
        return cls(**dict(zip(aux, children, strict=True)))


def variable() -> Any:
    """One that calls a function whenever it is looked at, by a hook and by the name of a method: see `with_hooks`."""
    names = ("on_get_value", "keys", "items", "tolist")
    return nnx.Param._new(jnp.ones(()), {"ref": False, **dict.fromkeys(names, "a hook")})


def with_hooks(tree: Any, *, second_holds_first: bool = False) -> Draft:
    """A file in which the texts that stand for hooks are functions."""
    draft = Draft(st.to_bytes(tree))
    function = json.dumps(["function", f"{__name__}:called_by_a_file"])
    draft.manifest = json.loads(json.dumps(draft.manifest).replace('"a hook"', function))
    if second_holds_first:  # as what describes it: its metadata, its names, its auxiliary data
        first, second = draft.manifest["nodes"][draft.manifest["root"]][1]
        draft.manifest["nodes"][second][2] = first
    return draft


class Open(st.Module):
    """Its attribute has the name of a method of dictionaries, nearly."""

    def __init__(self) -> None:
        self.items_ = "a hook"


def files_with_hooks() -> Iterator[tuple[Draft, Any, str]]:
    """Each file that would have a variable looked at, a template of it or none, and what is said."""
    from flax.core import FrozenDict

    array, looked_at = jnp.ones(1), "where something would look at it"
    # Variables are handed to no unflatten function.
    for holder in (nnx.State({"a": array}), nnx.Param(array), FrozenDict({"a": array}), Zipping(a=array)):
        for first in (variable(), (variable(),)):
            yield with_hooks([first, holder], second_holds_first=True), [first, holder], looked_at
    # Nor is what has a method of dictionaries: of an Equinox module with a field `keys`, `dict` would call it.
    yield with_hooks([Open(), Zipping(a=array)], second_holds_first=True), None, looked_at
    layer = eqx.nn.Lambda(jax.nn.relu)
    yield with_hooks([layer, nnx.Param(array)], second_holds_first=True), None, "no tuple of names with values"
    # Nothing of NNX is hashed.
    for each in (variable(), nnx.split(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))[0]):
        for kind in ("set", "frozenset"):
            draft = with_hooks([each])
            draft.manifest["nodes"][draft.manifest["root"]][0] = kind
            yield draft, None, looked_at
    # Templates compare what is static.
    template, forged_layer = (nnx.Linear(2, 2, rngs=nnx.Rngs(0)) for _ in range(2))
    vars(forged_layer)["in_features"] = variable()
    yield with_hooks(forged_layer), template, "metadata that can be called"


def test_no_hook_is_called():
    for draft, like, words in files_with_hooks():
        data = draft.file(with_digests=True)
        for options in ({}, {"like": like}) if like is not None else ({},):
            with pytest.raises(st.errors.FormatError, match=words):
                st.from_bytes(data, trusted=["flax", called_by_a_file, Zipping, Open], **options)


class Describing:
    """Its auxiliary data is a variable."""


HELD = nnx.Param(jnp.ones(1))
jax.tree_util.register_pytree_node(Describing, lambda _: ((), HELD), lambda *_: Describing())


def test_what_would_not_be_loaded_is_not_saved():
    with pytest.raises(st.errors.UnserialisableError, match="as a key or in its auxiliary data"):
        st.to_bytes(Describing())
    assert load_from(st.to_bytes({"model": [HELD]}))["model"][0][...] == 1


def in_metadata(name: str, value: Any) -> Any:
    return nnx.Param._new(jnp.ones(1), {"ref": False, name: value})


@pytest.mark.parametrize("name", ["__array_interface__", "__array__", "__deepcopy__", "__jax_array__", "__len__"])
def test_no_name_that_python_asks_for(name):
    """NumPy reads whatever memory an `__array_interface__` names."""
    for make in (in_metadata, lambda name, value: nnx.State({name: value})):
        with pytest.raises(st.errors.UnserialisableError, match="a name that Python itself or other programs ask for"):
            st.to_bytes(make(name, 3))
        draft = Draft(st.to_bytes(make("innocent", 3)))
        draft.manifest = json.loads(json.dumps(draft.manifest).replace('"innocent"', f'"{name}"'))
        with pytest.raises(st.errors.FormatError, match="a name that Python itself or other programs ask for"):
            load_from(draft.file(with_digests=True))


class AsNumber(float):
    pass


def test_what_metadata_may_be():
    for name in ("learning rate", "x/y", "my-tag", "1", "", "_private"):
        assert load_from(st.to_bytes(in_metadata(name, 0.1))).get_metadata()[name] == 0.1
    mesh = jax.sharding.AbstractMesh((1,), ("x",))
    for value in (
        jnp.float32,
        np.float32,
        jnp.bfloat16,
        int,
        np.dtype("int8"),
        mesh,
        jax.sharding.PartitionSpec("x"),
        ("a", None),
        {"a": 1.5},
    ):
        assert load_from(st.to_bytes(in_metadata("kept", value))).get_metadata()["kept"] == value
    leaky = functools.partial(jax.nn.leaky_relu, negative_slope=0.1)
    classes = (pathlib.Path, nnx.Param, AsNumber)
    for hook in (jax.nn.relu, leaky, (jax.nn.relu,), {"a": [jax.nn.relu]}, eqx.nn.Lambda(jax.nn.relu), *classes):
        with pytest.raises(st.errors.UnserialisableError, match="metadata that can be called, such as a hook"):
            st.to_bytes(in_metadata("on_get_value", hook))


def nested(depth: int, count: int = 1) -> Any:
    """A text in tuples, each of which holds the one before so many times."""
    value: Any = ("note",)
    for _ in range(depth):
        value = (value,) * count
    return value


def test_metadata_of_any_depth_is_looked_through():
    back = load_from(st.to_bytes(nnx.Param(jnp.ones(()), note=nested(500))))
    assert type(back) is nnx.Param
    for deep in (nested(5_000), nested(60, count=2)):  # more than may be hashed, or its structure could not be
        with pytest.raises(st.errors.UnserialisableError, match="nested so deeply, or shared so often"):
            st.to_bytes(nnx.Param(jnp.ones(()), note=deep))
    with pytest.raises(st.errors.UnserialisableError, match="metadata that can be called"):
        st.to_bytes(nnx.Param(jnp.ones(()), note=[nested(3), {"hook": (jax.nn.relu,)}]))


class Held(nnx.Module):
    def __init__(self) -> None:
        self.weight, self.filter = nnx.Param(jnp.ones(1)), nnx.OfType(nnx.Param)


def test_the_advice_names_what_is_on_the_list():
    data = st.to_bytes(Held())
    with pytest.raises(st.errors.UntrustedTypeError) as caught:
        st.from_bytes(data, trusted=["flax", Held])
    assert 'trusted=["flax"]' not in str(caught.value)
    assert isinstance(st.from_bytes(data, trusted=["flax", Held, nnx.OfType]).filter, nnx.OfType)
