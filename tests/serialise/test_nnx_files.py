"""Files of Flax NNX's modules, variables, states and definitions of graphs; what was loaded is judged by NNX itself."""

import copy
import functools
import importlib.metadata
import json
import pathlib
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packaging.version import Version

import sharedtree as st
from sharedtree.serialise.trust._trust import Trust
from sharedtree.serialise.values._decoding import decode
from sharedtree.serialise.values._encoding import encode
from sharedtree.serialise.values._manifest import parse_manifest

from .drafts import Draft

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


def layers() -> dict[str, Callable[[Any], Any]]:
    """What makes each layer; in a dictionary so that one that a version lacks is skipped alone."""
    return {
        "linear": lambda r: nnx.Linear(2, 3, rngs=r),
        "general": lambda r: nnx.LinearGeneral((2, 2), (3,), axis=(-2, -1), rngs=r),
        "einsum": lambda r: nnx.Einsum("ab,bc->ac", (2, 3), (3,), rngs=r),
        "conv": lambda r: nnx.Conv(2, 3, (3,), rngs=r),
        "conv_transpose": lambda r: nnx.ConvTranspose(2, 3, (3,), rngs=r),
        "embed": lambda r: nnx.Embed(3, 2, rngs=r),
        "batch_norm": lambda r: nnx.BatchNorm(2, rngs=r),
        "layer_norm": lambda r: nnx.LayerNorm(2, rngs=r),
        "rms_norm": lambda r: nnx.RMSNorm(2, rngs=r),
        "group_norm": lambda r: nnx.GroupNorm(4, num_groups=2, rngs=r),
        "instance_norm": lambda r: nnx.InstanceNorm(2, rngs=r),
        "spectral_norm": lambda r: nnx.SpectralNorm(nnx.Linear(2, 3, rngs=r), rngs=r),
        "weight_norm": lambda r: nnx.WeightNorm(nnx.Linear(2, 3, rngs=r), rngs=r),
        "attention": lambda r: nnx.MultiHeadAttention(2, 4, decode=False, rngs=r),
        "dropout": lambda r: nnx.Dropout(0.1, rngs=r),
        "lora": lambda r: nnx.LoRA(2, 2, 2, rngs=r),
        "lora_linear": lambda r: nnx.LoRALinear(2, 3, lora_rank=2, rngs=r),
        "lstm": lambda r: nnx.LSTMCell(2, 3, rngs=r),
        "optimized_lstm": lambda r: nnx.OptimizedLSTMCell(2, 3, rngs=r),
        "gru": lambda r: nnx.GRUCell(2, 3, rngs=r),
        "simple_cell": lambda r: nnx.SimpleCell(2, 3, rngs=r),
        "rnn": lambda r: nnx.RNN(nnx.LSTMCell(2, 3, rngs=r)),
        "bidirectional": lambda r: nnx.Bidirectional(
            nnx.RNN(nnx.GRUCell(2, 3, rngs=r)), nnx.RNN(nnx.GRUCell(2, 3, rngs=r))
        ),
        "sequential": lambda r: nnx.Sequential(nnx.Linear(2, 3, rngs=r), nnx.relu, nnx.Linear(3, 2, rngs=r)),
        "list": lambda r: nnx.List([1, nnx.Linear(2, 3, rngs=r), *[jnp.ones(2)] * 10]),
        "dict": lambda r: nnx.Dict({"a b": nnx.Param(jnp.ones(2)), "class": 3}),
        "rngs": lambda r: nnx.Rngs(0, params=1),
        "prelu": lambda r: nnx.PReLU(),
        "accuracy": lambda r: nnx.metrics.Accuracy(),
        "metrics": lambda r: nnx.MultiMetric(loss=nnx.metrics.Average("loss"), deviation=nnx.metrics.Welford()),
        "net": Net,
        "declared": lambda r: Declared(nnx.Param(jnp.ones(2)), function=jax.nn.gelu),
        "property": lambda r: WithProperty(),
        "variable": lambda r: Scaled(jnp.arange(3.0), axis="model"),
        "state": lambda r: nnx.state(Net(r)),
    }


SLOW = {"attention", "bidirectional", "gru", "lstm", "net", "optimized_lstm", "rnn", "state"}
LAYERS = [pytest.param(each, marks=[pytest.mark.slow] * (each in SLOW)) for each in sorted(layers())]


def made(name: str) -> Any:
    try:
        return layers()[name](nnx.Rngs(0, dropout=1))
    except AttributeError as error:
        pytest.skip(f"this version of Flax has no such layer: {error}")


def bits(leaf: Any) -> tuple[Any, ...]:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return type(leaf), leaf.dtype, leaf.shape, np.asarray(leaf).tobytes()


def assert_same(one: Any, two: Any) -> None:
    """What NNX and JAX say of them is the same: attributes, marks and ties, and each leaf to the bit."""
    assert jax.tree.structure(one) == jax.tree.structure(two)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        assert type(a) is type(b)
        assert a == b if isinstance(a, float | int) else bits(a) == bits(b)
    if not isinstance(one, nnx.Variable):
        assert nnx.split(one)[0] == nnx.split(two)[0]  # the definition of a graph has the ties


@pytest.mark.parametrize("name", LAYERS)
def test_what_is_loaded_is_what_was_saved(name):
    module = made(name)
    loaded = load_from(st.to_bytes(module))
    assert_same(module, loaded)
    assert_same(module, st.from_bytes(st.to_bytes(module), like=module))
    assert st.to_bytes(loaded) == st.to_bytes(module)


def test_ties_and_state():
    net = Net(nnx.Rngs(0, dropout=1))
    net(jnp.ones((2, 3)))
    loaded = load_from(st.to_bytes(net))
    assert loaded.head.kernel is loaded.embed.kernel
    assert loaded.again is loaded.blocks[2]
    assert loaded.blocks[0].kernel is not loaded.blocks[1].kernel
    assert loaded.dropout.rngs.count[...] == net.dropout.rngs.count[...] != 0
    assert loaded.calls[...] == 1
    np.testing.assert_array_equal(loaded.norm.mean[...], net.norm.mean[...])
    x = jnp.ones((2, 3))
    np.testing.assert_array_equal(net(x), loaded(x))  # the same keys, too
    assert st.same_sharing(net, loaded)
    arrays = {array.name: array.shape for array in st.inspect(st.to_bytes(net)).arrays}
    assert arrays["embed.kernel.value"] == arrays["blocks[1].kernel.value"] == (3, 3)
    assert "head.kernel.value" not in arrays


T = TypeVar("T")


class Holder(nnx.Module, Generic[T]):
    def __init__(self, rngs: Any) -> None:
        self.layer = nnx.Linear(2, 2, rngs=rngs)


def test_what_typing_notes_on_instances_is_left_out(tmp_path):
    noted, plain = Holder[int](nnx.Rngs(0)), Holder(nnx.Rngs(0))
    assert st.to_bytes(noted) == st.to_bytes(plain)
    loaded = st.from_bytes(st.to_bytes(noted), trusted=[Holder, "flax"])
    assert jax.tree.structure(loaded) == jax.tree.structure(plain)
    loaded.__orig_class__ = Holder[int]  # as the guide says
    assert jax.tree.structure(loaded) == jax.tree.structure(noted)
    # No template asks for what no file has.
    st.save(tmp_path / "file.safetensors", noted)
    assert jax.tree.structure(st.load(tmp_path / "file.safetensors", like=noted)) == jax.tree.structure(plain)


def test_a_loaded_model_is_alive():
    loaded = load_from(st.to_bytes(Net(nnx.Rngs(0))))
    loaded.extra = nnx.Param(jnp.ones(2))
    loaded.blocks.append(nnx.Linear(3, 3, rngs=nnx.Rngs(0)))
    assert len(loaded.blocks) == 4
    assert "extra" in nnx.state(loaded)
    with pytest.raises(ValueError, match="static"):
        loaded.name = jnp.ones(2)  # NNX knows still that it is static
    assert_same(loaded, load_from(st.to_bytes(loaded)))
    del loaded.extra
    assert_same(loaded, load_from(st.to_bytes(loaded)))


# --- training on ------------------------------------------------------------------------------------------------------


def loss_of(net: Any, x: Any) -> Any:
    return (net(x) ** 2).mean()


@pytest.mark.slow
def test_training_goes_on_as_if_nothing_had_happened():
    traces = []

    def step(net, optimizer, x):
        traces.append(1)
        loss, gradient = nnx.value_and_grad(loss_of)(net, x)
        optimizer.update(net, gradient)
        return loss

    jitted = st.jit(step, in_place=True)
    net = Net(nnx.Rngs(0, dropout=1))
    optimizer = nnx.Optimizer(net, optax.adam(1e-2), wrt=nnx.Param)
    x = jnp.arange(6.0).reshape(2, 3)
    for _ in range(2):
        jitted(net, optimizer, x)
    data = st.to_bytes({"net": net, "optimizer": nnx.state(optimizer)})
    loaded = load_from(data)
    again = loaded["net"]
    # The functions of the same transformation, so that even the optimizer is of the same structure.
    resumed = nnx.Optimizer(again, optimizer.tx, wrt=nnx.Param)
    nnx.update(resumed, loaded["optimizer"])
    count = len(traces)
    for _ in range(3):
        assert bits(jitted(net, optimizer, x)) == bits(jitted(again, resumed, x))
    assert len(traces) == count
    assert_same(net, again)
    assert_same(nnx.state(optimizer), nnx.state(resumed))
    assert again.head.kernel is again.embed.kernel


def test_an_optimizer_whose_functions_have_names_is_saved_whole():
    net = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(net, optax.GradientTransformation(no_state, descend), wrt=nnx.Param)
    loaded = st.from_bytes(st.to_bytes(optimizer), trusted=["flax", no_state, descend])
    assert_same(optimizer, loaded)
    gradient = jax.tree.map(jnp.ones_like, nnx.state(net))
    loaded.update(net, gradient)
    assert loaded.step[...] == 1


def no_state(params: Any) -> Any:
    return optax.EmptyState()


def descend(updates: Any, state: Any, params: Any = None) -> Any:
    return jax.tree.map(lambda update: -0.1 * update, updates), state


def test_an_optimizer_of_optax_is_refused_with_the_way_out():
    net = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(net, optax.adam(1e-3), wrt=nnx.Param)
    with pytest.raises(st.UnserialisableError, match=r"flax\.nnx\.state\(optimizer\)") as caught:
        st.to_bytes({"net": net, "optimizer": optimizer})
    assert caught.value.paths == ("['optimizer']",)


def test_a_definition_of_a_graph_and_its_state_make_the_model_again():
    net = Net(nnx.Rngs(0))
    graphdef, state = nnx.split(net)
    loaded, loaded_state = load_from(st.to_bytes((graphdef, state)))
    assert loaded == graphdef
    assert hash(loaded) == hash(graphdef)
    assert_same(net, nnx.merge(loaded, loaded_state))
    filtered = nnx.split(net, nnx.Param, nnx.BatchStat, ...)
    assert_same(net, nnx.merge(*load_from(st.to_bytes(filtered))))


# --- templates, parts, changed classes --------------------------------------------------------------------------------


def test_templates_compare_what_is_static():
    net = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    other = nnx.Linear(2, 3, use_bias=False, rngs=nnx.Rngs(0))
    with pytest.raises(st.StructureMismatchError) as caught:
        st.from_bytes(st.to_bytes(net), like=other)
    assert ".use_bias" in caught.value.paths
    tied = Net(nnx.Rngs(0))
    untied = Net(nnx.Rngs(0))
    untied.head.kernel = nnx.Param(untied.embed.kernel[...] + 0)
    with pytest.raises(st.StructureMismatchError) as caught:
        st.from_bytes(st.to_bytes(tied), like=untied)
    assert any(".head.kernel" in path for path in caught.value.paths)


def test_a_part_of_a_file(tmp_path):
    file = tmp_path / "net.safetensors"
    net = Net(nnx.Rngs(0))
    st.save(file, net)
    assert_same(net.blocks[1], st.load(file, select=".blocks[1]", trusted="flax"))
    partial = st.load(file, select=lambda name: name.startswith("embed"), trusted=TRUSTED)
    assert type(partial.scale) is jax.ShapeDtypeStruct
    assert jax.tree.structure(partial) == jax.tree.structure(net)


def test_attributes_that_were_renamed_or_dropped():
    net = Net(nnx.Rngs(0))
    name = f"{__name__}:Net"
    renames = {f"{name}.sizes": "lengths", f"{name}.scale": "factor", f"{name}.name": None}
    loaded = load_from(st.to_bytes(net), renames=renames)
    assert loaded.lengths == net.sizes
    assert not {"sizes", "scale", "name"} & vars(loaded).keys()
    children = [path[0].name for path, _ in jax.tree.leaves_with_path(loaded)]
    assert {"lengths", "factor"} <= set(children)
    with pytest.raises(st.StructureMismatchError, match="something else"):
        load_from(st.to_bytes(net), renames={f"{name}.name": "__call__"})


def paths_of(tree: Any) -> list[str]:
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def migrated(migrate: Callable[[dict[str, Any]], dict[str, Any]], net: Any, **options: Any) -> Any:
    """What is loaded of a model by a class that has this migration."""

    class New(nnx.Module):
        __sharedtree_names__ = (f"{__name__}:Small",)
        __sharedtree_version__ = 1

        def __call__(self) -> None: ...

        @classmethod
        def __sharedtree_migrate__(cls, fields: dict[str, Any], version: int) -> dict[str, Any]:
            return migrate(fields)

    return st.from_bytes(st.to_bytes(net), trusted=[New, "flax"], **options)


class Small(nnx.Module):
    def __init__(self) -> None:
        self.sizes = nnx.data([1.5, 2.5])
        self.scale = jnp.array(2.0)
        self.weight = nnx.Param(jnp.ones(2))
        self.name = "net"


def test_migration_keeps_the_marks():
    seen: list[list[str]] = []

    def migrate(fields: dict[str, Any]) -> dict[str, Any]:
        seen.append(sorted(fields))
        return {**fields, "scale": fields["scale"] * 2}

    net = Small()
    loaded = migrated(migrate, net)
    assert seen == [["name", "scale", "sizes", "weight"]]
    assert dict(loaded._pytree__nodes) == dict(net._pytree__nodes)
    assert paths_of(loaded) == paths_of(net) == [".scale", ".sizes[0]", ".sizes[1]", ".weight.value"]
    assert loaded.scale == 4


def test_migration_renames_adds_and_drops_attributes():
    def migrate(fields: dict[str, Any]) -> dict[str, Any]:
        return {"kernel": fields["weight"], "bias": jnp.ones(3), "name": fields["name"], "mode": "eval"}

    loaded = migrated(migrate, Small())
    twin = nnx.Module()
    twin.kernel, twin.bias, twin.name, twin.mode = nnx.Param(jnp.ones(2)), jnp.ones(3), "net", "eval"
    assert dict(loaded._pytree__nodes) == dict(twin._pytree__nodes)
    assert paths_of(loaded) == paths_of(twin)


@pytest.mark.parametrize(
    "name", ["__call__", "train", "_pytree__nodes", "_pytree__state", "_pytree__other", "__dict__"]
)
def test_migration_cannot_set_what_is_the_classs_or_nnxs_own(name):
    with pytest.raises(st.StructureMismatchError, match="has for something else"):
        migrated(lambda fields: {**fields, name: True}, Small())


def test_migration_returns_values():
    with pytest.raises(st.StructureMismatchError, match="a declaration as `lengths`"):
        migrated(lambda fields: {"lengths": nnx.data(fields["sizes"])}, Small())
    renames = {f"{__name__}:Small.sizes": "lengths"}
    loaded = migrated(lambda fields: {"lengths": [*fields["lengths"], 3.5]}, Small(), renames=renames)
    assert jax.tree.leaves(loaded) == [1.5, 2.5, 3.5]


@pytest.mark.parametrize("pair", [("_pytree__nodes", None), ("_pytree__nodes", "marks"), ("name", "_pytree__nodes")])
def test_renames_cannot_take_the_marks_away(pair):
    with pytest.raises(st.StructureMismatchError, match="is no attribute"):
        st.from_bytes(st.to_bytes(Small()), trusted=[Small, "flax"], renames={f"{__name__}:Small.{pair[0]}": pair[1]})


def test_a_field_that_was_added_takes_its_default():
    module = Declared(nnx.Param(jnp.ones(2)))
    encoded = encode(module)
    entry = next(each for each in encoded.manifest["types"] if each["name"].endswith(":Declared"))
    node = next(each for each in encoded.manifest["nodes"] if each[0] == "object")
    at = entry["fields"].index("rate")
    del entry["fields"][at]
    del node[2][at]
    assert built(encoded.manifest, encoded.arrays).rate == 0.5


# --- trust ------------------------------------------------------------------------------------------------------------


def test_what_nobody_trusts_is_refused_at_once():
    with pytest.raises(st.UntrustedTypeError) as caught:
        st.from_bytes(st.to_bytes(Net(nnx.Rngs(0))))
    names = set(caught.value.names)
    assert {f"{__name__}:Net", "flax.nnx:Linear", "flax.nnx:Param", "flax.nnx:List"} <= names
    assert 'trusted=["flax"' in str(caught.value) or ', "flax"]' in str(caught.value)
    with pytest.raises(st.UntrustedTypeError) as caught:
        st.from_bytes(st.to_bytes(nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))))
    assert 'trusted=["flax"])' in str(caught.value)


@pytest.mark.parametrize(
    "name", ["flax.nnx:Linear.set_mode", "flax.nnx:Module.train", "flax.nnx:jit", "flax.io:rmtree"]
)
def test_functions_of_flax_are_allowed_one_by_one(name):
    manifest = {"format": 1, "library": "", "types": [], "arrays": [], "nodes": [], "root": ["function", name]}
    with pytest.raises(st.UntrustedTypeError):
        built(manifest)


def test_linen_is_not_trusted_with_it():
    pytest.importorskip("flax.linen")
    for name in ("flax.linen:Dense", "flax.linen:Sequential", "flax.core:Scope"):
        manifest = {"format": 1, "library": "", "types": [], "arrays": [], "nodes": [], "root": ["class", name]}
        with pytest.raises(st.UntrustedTypeError):
            built(manifest)


@pytest.mark.slow
def test_another_process_loads_it(tmp_path):
    st.save(tmp_path / "layer.safetensors", nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.relu))
    st.save(tmp_path / "state.safetensors", nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0))))
    code = """
        import sys
        import sharedtree as st
        assert "flax" not in sys.modules
        try:
            st.load("layer.safetensors")
        except st.UntrustedTypeError as error:
            assert "flax" in str(error)
        else:
            raise AssertionError
        assert "flax" not in sys.modules
        layer = st.load("layer.safetensors", trusted="flax")
        state = st.load("state.safetensors", trusted=["flax"])
        print(type(layer).__name__, layer.layers[0].kernel.shape, state["kernel"].shape)
    """
    root = str(pathlib.Path(st.__file__).parent.parent)
    run = subprocess.run(
        [sys.executable, "-c", f"import sys\nsys.path.insert(0, {root!r})\n" + textwrap.dedent(code)],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert run.stdout == "Sequential (2, 3) (2, 3)\n", run.stderr


# --- forged files -----------------------------------------------------------------------------------------------------


def built(manifest: Any, arrays: Any = ()) -> Any:
    parsed = parse_manifest(json.dumps(manifest))
    return decode(parsed, lambda i: arrays[i], trust=Trust(TRUSTED))


def forged(change: Callable[[dict[str, Any], list[Any]], None], module: Any = None) -> Any:
    """Builds a file of a module with a property after a change of its type and its node."""
    encoded = encode(WithProperty() if module is None else module)
    manifest = copy.deepcopy(encoded.manifest)
    entry = next(each for each in manifest["types"] if each["kind"] == "attributes")
    node = next(each for each in manifest["nodes"] if each[0] == "object")
    change(entry, node)
    return built(manifest, encoded.arrays)


def adding(name: str, value: Any) -> Callable[[dict[str, Any], list[Any]], None]:
    def change(entry: dict[str, Any], node: list[Any]) -> None:
        entry.setdefault("extra", []).append(name)
        node[2].append(value)

    return change


@pytest.mark.parametrize(
    "name",
    ["double", "__class__", "__dict__", "__call__", "train", "eval", "_setattr", "_pytree__flatten",
     "_pytree__has_int_keys", "_pytree__is_pytree", "_graph_node_flatten", "_object__nodes", ""],
)  # fmt: skip
def test_a_file_sets_no_attribute_that_is_the_classs(name):
    with pytest.raises(st.FormatError):
        forged(adding(name, True))


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


@pytest.mark.parametrize("place", ["fields", "extra"])
@pytest.mark.parametrize(("cls", "name"), [(Applying, "apply"), (Overriding, "apply"), (Overriding, "scale")])
def test_a_method_that_a_base_annotates_is_a_method(cls, place, name):
    def change(entry: dict[str, Any], node: list[Any]) -> None:
        entry["missing"] = [each for each in entry.get("missing", []) if each != name]
        if place == "fields":
            entry["fields"].append(name)
            node[2].insert(len(entry["fields"]) - 1, FUNCTION)
        else:
            adding(name, FUNCTION)(entry, node)

    with pytest.raises((st.FormatError, st.StructureMismatchError), match=f"`{name}`"):
        forged(change, cls())


def test_a_default_that_its_class_annotates_can_be_replaced():
    net = Applying()
    net.scale = jnp.sin
    assert st.from_bytes(st.to_bytes(net), trusted=[Applying, "flax"]).scale is jnp.sin
    again = Again()
    again.apply = jnp.sin
    assert st.from_bytes(st.to_bytes(again), trusted=[Again, "flax"]).apply is jnp.sin
    net.apply = jnp.sin
    with pytest.raises(st.UnserialisableError, match="`apply`"):
        st.to_bytes(net)


@pytest.mark.parametrize("value", [None, True, "kernel", ["int", "1"]])
@pytest.mark.parametrize("name", ["_pytree__nodes", "_pytree__state"])
def test_what_is_nnxs_own_is_of_its_kind(name, value):
    with pytest.raises(st.FormatError, match="No save would write that"):
        forged(adding(name, value))


def test_marks_are_flags():
    encoded = encode(Net(nnx.Rngs(0)))
    for mark in ("yes", ["int", "1"]):
        manifest = copy.deepcopy(encoded.manifest)
        marks = next(node for node in manifest["nodes"] if node[:2] == ["dict", ["sizes"]])
        marks[2] = [mark]
        with pytest.raises(st.FormatError, match="No save would write that"):
            built(manifest, encoded.arrays)


def test_one_attribute_is_set_once():
    with pytest.raises(st.FormatError):
        forged(adding("weight", None))


def test_what_a_file_refers_to_twice_is_one_object():
    def change(entry: dict[str, Any], node: list[Any]) -> None:
        entry["extra"].append("again")
        node[2].append(node[2][entry["extra"].index("weight")])

    loaded = forged(change)
    assert loaded.again is loaded.weight
    assert len(jax.tree.leaves(st.Dag(loaded))) == 1


def test_an_object_does_not_contain_itself():
    def change(entry: dict[str, Any], node: list[Any]) -> None:
        node[2][0] = 10_000

    with pytest.raises(st.FormatError):
        forged(change)
    net = nnx.Dict()
    net.itself = net
    with pytest.raises(st.CycleError):
        st.to_bytes(net)


def test_classes_that_are_not_there():
    for name in ("flax.nnx:Linaer", "flax.nnx.nowhere:Linear"):
        with pytest.raises(st.StructureMismatchError, match="names what is not there"):
            forged(lambda entry, node, name=name: entry.update(name=name))
    with pytest.raises(st.SharedTreeError):
        forged(lambda entry, node: entry.update(name="flax.nnx:Param"))
    with pytest.raises(st.SharedTreeError):
        forged(lambda entry, node: entry.update(name="flax.nnx:relu"))


@pytest.mark.parametrize(
    "aux", [None, "text", ["int", "1"], ["bytes", "YQ=="]], ids=["none", "text", "number", "bytes"]
)
def test_variables_and_states_of_wrong_metadata(aux):
    encoded = encode({"state": nnx.state(WithProperty()), "variable": Scaled(jnp.ones(1), axis="model")})
    for number, node in enumerate(encoded.manifest["nodes"]):
        if node[0] == "registered":
            manifest = copy.deepcopy(encoded.manifest)
            manifest["nodes"][number][2] = aux
            with pytest.raises(st.SharedTreeError):
                built(manifest, encoded.arrays)


def test_mappings_and_axes_hold_what_they_must():
    rnn = nnx.RNN(nnx.SimpleCell(2, 3, rngs=nnx.Rngs(0)))
    for module, suffix in ((nnx.graphdef(rnn), ":HashableMapping"), (rnn, ":StateAxes")):
        encoded = encode(module)
        for value in (None, "text", ["int", "1"]):
            manifest = copy.deepcopy(encoded.manifest)
            numbers = [i for i, entry in enumerate(manifest["types"]) if entry["name"].endswith(suffix)]
            node = next(node for node in manifest["nodes"] if node[0] == "object" and node[1] in numbers)
            node[2][0] = value
            with pytest.raises(st.FormatError, match="No save would write that"):
                built(manifest, encoded.arrays)


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


# --- nothing looks at a variable of the file's making ---------------------------------------------------------------


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


def with_hooks(tree: Any) -> Draft:
    """A file in which the texts that stand for hooks are functions."""
    draft = Draft(st.to_bytes(tree))
    function = json.dumps(["function", f"{__name__}:called_by_a_file"])
    draft.manifest = json.loads(json.dumps(draft.manifest).replace('"a hook"', function))
    return draft


def holders() -> dict[str, Any]:
    from flax.core import FrozenDict

    return {
        "State": nnx.State({"a": jnp.ones(1)}),
        "Param": nnx.Param(jnp.ones(1)),
        "FrozenDict": FrozenDict({"a": jnp.ones(1)}),
        "Zipping": Zipping(a=jnp.ones(1)),
    }


def nested_in(node: Any, draft: Draft) -> int:
    """A tuple that holds a node, put right after it."""
    nodes = draft.manifest["nodes"]
    nodes.insert(node + 1, ["tuple", [node]])
    later = lambda child: child + 1 if type(child) is int and child > node else child
    for each in nodes[node + 2 :]:
        for place, operand in enumerate(each[1:], 1):
            if each[0] not in ("array",) and not (each[0] in ("object", "registered") and place == 1):
                each[place] = [*map(later, operand)] if type(operand) is list else later(operand)
    draft.manifest["root"] += 1
    return node + 1


@pytest.mark.parametrize("is_nested", [False, True], ids=["at once", "nested"])
@pytest.mark.parametrize("name", ["State", "Param", "FrozenDict", "Zipping"])
def test_no_variable_is_handed_to_an_unflatten_function(name, is_nested):
    tree = [variable(), holders()[name]]
    draft = with_hooks(tree)
    first, last = draft.manifest["nodes"][draft.manifest["root"]][1]
    draft.manifest["nodes"][last][2] = first
    if is_nested:
        inner = nested_in(first, draft)
        draft.manifest["nodes"][last + 1][2] = inner
    data = draft.file(with_digests=True)
    trusted = ["flax", called_by_a_file, Zipping]
    for options in ({"trusted": trusted}, {"like": tree, "trusted": [called_by_a_file]}):
        with pytest.raises(st.FormatError, match="where something would look at it"):
            st.from_bytes(data, **options)


@pytest.mark.parametrize("kind", ["set", "frozenset"])
@pytest.mark.parametrize(
    "make", [variable, lambda: nnx.split(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))[0]], ids=["variable", "graph"]
)
def test_nothing_of_nnx_is_hashed(kind, make):
    draft = with_hooks([make()])
    draft.manifest["nodes"][draft.manifest["root"]][0] = kind
    with pytest.raises(st.FormatError, match="where something would look at it"):
        st.from_bytes(draft.file(with_digests=True), trusted=["flax", called_by_a_file])


def test_what_would_not_be_loaded_is_not_saved():
    class Holder:
        pass

    Holder.__qualname__ = "Holder"
    globals()["Holder"] = Holder
    held = nnx.Param(jnp.ones(1))
    jax.tree_util.register_pytree_node(Holder, lambda _: ((), held), lambda *_: Holder())
    with pytest.raises(st.UnserialisableError, match="as a key or in its auxiliary data"):
        st.to_bytes(Holder())
    assert load_from(st.to_bytes({"model": [held]}))["model"][0][...] == 1


def test_metadata_of_a_variable_is_named_values():
    """An Equinox module with a field `keys` would have that called by `dict`."""
    draft = Draft(st.to_bytes([eqx.nn.Lambda(jax.nn.relu), nnx.Param(jnp.ones(1))]))
    first, last = draft.manifest["nodes"][draft.manifest["root"]][1]
    draft.manifest["nodes"][last][2] = first
    with pytest.raises(st.FormatError, match="no tuple of names with values"):
        st.from_bytes(draft.file(with_digests=True), trusted=["flax"])


NOT_ALLOWED = (
    "flax.nnx.proxy_caller:DelayedAccessor flax.nnx.proxy_caller:GetAttr flax.nnx.proxy_caller:CallableProxy "
    "flax.nnx.bridge:ToLinen flax.nnx.bridge:ToNNX flax.nnx.transforms.compilation:JitFn flax.nnx:OfType "
    "flax.nnx.graphlib:UpdateContext flax.nnx.graphlib:GraphNodeImpl"
)


@pytest.mark.parametrize("name", NOT_ALLOWED.split())
def test_classes_of_nnx_are_allowed_one_by_one(name):
    verdict = Trust("flax").resolve(name, "class")
    assert not (verdict.allowed and verdict.found)


def test_all_allowed_classes_are_there():
    from sharedtree.serialise.trust._allowed import NNX

    is_newest = Version(importlib.metadata.version("flax")) >= Version("0.12.12")  # `RoPE` came late
    for name in NNX:
        verdict = Trust("flax").resolve(name, "class")
        assert verdict.allowed, (name, verdict)
        assert verdict.found or not is_newest, (name, verdict)
        assert not Trust().resolve(name, "class").allowed


# --- what a variable or a state may answer to ------------------------------------------------------------------------


def in_metadata(name: str, value: Any) -> Any:
    return nnx.Param._new(jnp.ones(1), {"ref": False, name: value})


SPECIAL = ("__array_interface__", "__array__", "__deepcopy__", "__jax_array__", "__len__")


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize("make", [in_metadata, lambda name, value: nnx.State({name: value})], ids=["variable", "state"])
def test_no_name_that_python_asks_for(make, name):
    """NumPy reads whatever memory an `__array_interface__` names."""
    with pytest.raises(st.UnserialisableError, match="a name that Python itself asks for"):
        st.to_bytes(make(name, 3))
    draft = Draft(st.to_bytes(make("innocent", 3)))
    draft.manifest = json.loads(json.dumps(draft.manifest).replace('"innocent"', f'"{name}"'))
    with pytest.raises(st.FormatError, match="a name that Python itself asks for"):
        load_from(draft.file(with_digests=True))


@pytest.mark.parametrize("name", ["learning rate", "x/y", "my-tag", "1", "", "_private"])
def test_any_other_name_is_one(name):
    loaded = load_from(st.to_bytes(in_metadata(name, 0.1)))
    assert loaded.get_metadata()[name] == 0.1


HOOKS = {
    "function": jax.nn.relu,
    "partial": functools.partial(jax.nn.leaky_relu, negative_slope=0.1),
    "in a tuple": (jax.nn.relu,),
    "in a dictionary": {"a": [jax.nn.relu]},
    "a layer": eqx.nn.Lambda(jax.nn.relu),
}


def nested(depth: int) -> Any:
    value: Any = ()
    for _ in range(depth):
        value = (value,)
    return value


def doubled(depth: int) -> Any:
    """2^depth paths, in as many tuples as it is deep."""
    value: Any = ("note",)
    for _ in range(depth):
        value = (value, value)
    return value


def test_metadata_of_any_depth_is_looked_through():
    back = st.from_bytes(st.to_bytes(nnx.Param(jnp.ones(()), note=nested(500))), trusted=["flax"])
    assert type(back) is nnx.Param
    for deep in (nested(5_000), doubled(60)):  # more than may be hashed, or its structure could not be
        with pytest.raises(st.UnserialisableError, match="nested so deeply, or shared so often"):
            st.to_bytes(nnx.Param(jnp.ones(()), note=deep))
    with pytest.raises(st.UnserialisableError, match="metadata that can be called"):
        st.to_bytes(nnx.Param(jnp.ones(()), note=[nested(3), {"hook": (jax.nn.relu,)}]))


@pytest.mark.parametrize("name", HOOKS)
def test_no_hooks(name):
    with pytest.raises(st.UnserialisableError, match="metadata that can be called, such as a hook"):
        st.to_bytes(in_metadata("on_get_value", HOOKS[name]))


@pytest.mark.parametrize("like", [True, False])
def test_no_hook_is_called_by_what_is_static(like):
    """Templates compare what is static, and a variable there would ask its hooks."""
    layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    forged_layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    vars(forged_layer)["in_features"] = variable()
    data = with_hooks(forged_layer).file(with_digests=True)
    with pytest.raises(st.FormatError, match="metadata that can be called"):
        st.from_bytes(data, trusted=["flax", called_by_a_file], **({"like": layer} if like else {}))


def test_what_metadata_holds_in_practice():
    mesh = jax.sharding.AbstractMesh((1,), ("x",))
    for value in (jnp.float32, np.dtype("int8"), mesh, jax.sharding.PartitionSpec("x"), ("a", None), {"a": 1.5}):
        assert load_from(st.to_bytes(in_metadata("kept", value))).get_metadata()["kept"] == value


def test_a_module_with_a_method_of_dictionaries_is_no_auxiliary_data():
    class Open(st.Module):
        pass

    Open.__qualname__ = "Open"
    globals()["Open"] = Open
    module = Open()
    module.items_ = "a hook"
    draft = with_hooks([module, Zipping(a=jnp.ones(1))])
    first, last = draft.manifest["nodes"][draft.manifest["root"]][1]
    draft.manifest["nodes"][last][2] = first
    with pytest.raises(st.FormatError, match="where something would look at it"):
        st.from_bytes(draft.file(with_digests=True), trusted=[Open, Zipping, called_by_a_file])


def test_the_advice_names_what_is_on_the_list():
    class Held(nnx.Module):
        def __init__(self) -> None:
            self.weight, self.filter = nnx.Param(jnp.ones(1)), nnx.OfType(nnx.Param)

    Held.__qualname__ = "Held"
    globals()["Held"] = Held
    data = st.to_bytes(Held())
    with pytest.raises(st.UntrustedTypeError) as caught:
        st.from_bytes(data, trusted=["flax", Held])
    assert 'trusted=["flax"]' not in str(caught.value)
    assert isinstance(st.from_bytes(data, trusted=["flax", Held, nnx.OfType]).filter, nnx.OfType)
