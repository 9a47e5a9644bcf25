"""What the golden files hold, family by family, made of names that every supported version of the dependencies has.

Files of old versions of the format are compared with what these functions return now, so nothing here may change but
by additions. All values are worked out by NumPy or written down: what JAX draws may differ from one version to another.
"""

import collections
import dataclasses
import enum
import functools
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax


class Color(enum.Enum):
    RED = "r"
    BLUE = "b"


class Mode(enum.Flag):
    TRAIN = 1
    LOG = 2
    SLOW = 4


class Pair(NamedTuple):
    first: Any
    second: Any = None


@dataclasses.dataclass
class Config:
    rate: float
    layers: list
    name: str = "base"


@dataclasses.dataclass(frozen=True)
class Key:
    value: Any


class Tied(eqx.Module):
    embed: jax.Array
    blocks: list
    head: jax.Array
    activation: Callable = eqx.field(static=True)
    width: int = eqx.field(static=True)

    def scaled(self, x):
        return x * self.width


@jax.tree_util.register_pytree_node_class
class Registered:
    def __init__(self, children, aux):
        self.children, self.aux = children, aux

    def tree_flatten(self):
        return self.children, self.aux

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(tuple(children), aux)

    def __eq__(self, other):
        return type(other) is Registered and (self.children, self.aux) == (other.children, other.aux)


def activate(x):
    return x


def numbers(shape: tuple[int, ...], start: int = 0) -> np.ndarray[Any, Any]:
    """Numbers that are exact in every floating-point dtype of 16 bits or more."""
    count = int(np.prod(shape, dtype=int))
    return (np.arange(start, start + count) % 61 / 4 - 7).astype(np.float32).reshape(shape)


def containers() -> Any:
    shared: list[Any] = [1, 2]
    return {
        "list": [shared, shared, ["nested", [[]]]],
        "tuple": (1, (), ("a",)),
        "dict": {"b": 1, "a": {3: None, (1, "x"): [], None: True, 2.5: "half", True: 0}},
        "set": {1, "a", (2, 3)},
        "frozenset": frozenset({Color.RED, b"x"}),
        "OrderedDict": collections.OrderedDict(z=1, a=shared),
        "defaultdict": collections.defaultdict(list, {"k": [3]}),
        "defaultdict without": collections.defaultdict(None, {}),
        "deque": collections.deque([1, shared], maxlen=5),
        "namedtuple": Pair(1, Pair(2)),
        "dataclass": Config(0.5, [shared], "x"),
        "frozen": Key((1, 2)),
        "bytearray": bytearray(b"\x00\xff"),
    }


def atoms() -> Any:
    return [
        None, True, False, 0, 1, -1, 255, 2**31, -(2**63), 2**64, 10**40, -(10**40),
        0.0, -0.0, 1.5, 1e300, 5e-324, float("inf"), float("-inf"), float("nan"), 0.1,
        1 + 2j, complex("nan-infj"), "", "text", "äöü\u20ac\U0001f600", "\x00\n\"\\", "\ud83d", b"", b"\x00\xff",
        ..., NotImplemented, slice(1, None, -2), range(1, 10, 3), object,
        np.float32(1.5), np.float64("-inf"), np.int8(-3), np.uint64(2**64 - 1), np.bool_(True), np.complex64(1 - 2j),
        np.datetime64("2020-02-29T12:00", "s"), np.timedelta64(3, "D"), np.str_("aé"), np.bytes_(b"x"),
        ml_dtypes.bfloat16(0.5), ml_dtypes.float8_e5m2(2),
        np.dtype("f4"), np.dtype(">i2"), np.dtype("U3"), np.dtype(ml_dtypes.bfloat16),
        int, str, dict, Pair, Color, jnp.float32, np.float32, eqx.nn.Linear,
        pathlib.PurePosixPath("/a/b"), pathlib.PureWindowsPath("c:\\x"),
    ]  # fmt: skip


def numpy_arrays() -> Any:
    names = [
        "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32",
        "float64", "complex64", "complex128", ">i2", ">f4", ">c16",
    ]  # fmt: skip
    small = [
        "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz", "int4",
        "uint4", "int2", "uint2",
    ]  # fmt: skip
    values = np.array([[0, 1, 1], [1, 0, 0]])
    arrays = {name: values.astype(name) for name in names}
    arrays |= {name: values.astype(getattr(ml_dtypes, name)) for name in small}
    arrays |= {"M8[ns]": values.astype("M8[ns]"), ">m8[s]": values.astype(">m8[s]")}
    arrays |= {
        "zero-dim": np.array(3.5),
        "zero-size": np.zeros((0, 3)),
        "64 bytes": numbers((16,)),
        "large": numbers((30, 40)),
    }
    return arrays


def jax_arrays() -> Any:
    names = [
        "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "float16", "float32", "complex64", "bfloat16",
        "float8_e4m3fn", "float8_e5m2", "int4",
    ]  # fmt: skip
    arrays = {name: jnp.asarray(np.array([[0, 1, 1], [1, 0, 0]]), getattr(jnp, name, name)) for name in names}
    weak = [jnp.asarray(1.5), jnp.asarray(2), jnp.asarray(True)]
    return {
        **arrays,
        "weak": weak,
        "zero-dim": jnp.float32(3),
        "zero-size": jnp.zeros((0, 3)),
        "64 bytes": jnp.asarray(numbers((16,))),
    }


def tied_model() -> Any:
    table = jnp.asarray(numbers((5, 4)))
    block = {"w": jnp.asarray(numbers((4, 4), 3)), "b": jnp.zeros(4)}
    model = Tied(table, [block, jnp.ones(4), block], table, jax.nn.gelu, 4)
    return {"model": model, "teacher": model, "method": model.scaled}


def mlp() -> Any:
    model = eqx.nn.MLP(2, 3, 4, 2, key=jax.random.key(0))
    leaves, structure = jax.tree.flatten(eqx.filter(model, eqx.is_array))
    leaves = [jnp.asarray(numbers(leaf.shape, i)) for i, leaf in enumerate(leaves)]
    model = eqx.combine(jax.tree.unflatten(structure, leaves), model)
    return eqx.tree_at(lambda m: m.layers[2].bias, model, jnp.zeros(3))


def optimizer_state() -> Any:
    params = {"w": jnp.asarray(numbers((4, 3))), "b": jnp.zeros(3)}
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(), optax.trace(0.9))
    return {"params": params, "state": tx.init(params), "step": 7}


def equinox_state() -> Any:
    return eqx.nn.State(_Stateful())


class _Stateful(eqx.Module):
    index: eqx.nn.StateIndex = eqx.field(default_factory=lambda: eqx.nn.StateIndex(jnp.asarray(numbers((3,)))))


def functions() -> Any:
    return [
        jax.nn.relu, jnp.tanh, np.exp, activate, functools.partial(activate, 1, key=[2]),
        jax.tree_util.Partial(jnp.add, jnp.ones(2)), Mode.TRAIN, Mode.TRAIN | Mode.SLOW, Color.BLUE,
        Registered((1, 2.5), "aux"),
        jax.ShapeDtypeStruct((2, 0), jnp.float32), jax.sharding.PartitionSpec("x", None, ("y", "z")),
        jax.tree_util.tree_structure([1, {"a": (2, None)}]),
    ]  # fmt: skip


def keys() -> Any:
    data = {"threefry2x32": 2, "rbg": 4, "unsafe_rbg": 4}
    typed = {impl: jax.random.wrap_key_data(jnp.arange(size, dtype="uint32"), impl=impl) for impl, size in data.items()}
    batch = jax.random.wrap_key_data(jnp.arange(12, dtype="uint32").reshape(3, 2, 2))
    return {**typed, "batch": batch, "raw": jnp.arange(2, dtype="uint32"), "tied": [batch, batch]}


FAMILIES: dict[str, Callable[[], Any]] = {
    each.__name__: each
    for each in (
        containers, atoms, numpy_arrays, jax_arrays, tied_model, mlp, optimizer_state, equinox_state, functions, keys,
    )
}  # fmt: skip
"""The name of a golden file, and what makes the tree that it must hold."""
