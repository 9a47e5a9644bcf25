"""Random DAGs of every kind of value that a file can hold, and the classes that they are made of.

Each drawn object goes into a pool, and containers take their children from it, so sharing arises at every level. To
cover another kind of value, add it to `VALUES`, or a class and how to make it to `MAKERS`.
"""
# ruff: noqa: RUF005 -- lists of examples read best line by line

import collections
import dataclasses
import enum
import functools
import pathlib
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from hypothesis import strategies as st
from jax import tree_util as jtu


class Color(enum.Enum):
    RED = "r"
    BLUE = "b"


class Mode(enum.Flag):
    TRAIN = 1
    LOG = 2
    SLOW = 4


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Pair(NamedTuple):
    first: Any
    second: Any = None


@dataclasses.dataclass
class Config:
    rate: Any
    steps: Any = dataclasses.field(default=None, kw_only=True)
    scale: dataclasses.InitVar[int] = 1
    derived: Any = dataclasses.field(init=False)
    __sharedtree_attributes__ = ("undeclared",)

    def __post_init__(self, scale):
        raise AssertionError("loading calls no `__post_init__`")

    @functools.cached_property
    def cached(self):
        return object()


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    a: Any
    b: Any = 0


@dataclasses.dataclass(frozen=True)
class Key:
    """Hashable."""

    value: Any


class Layer(eqx.Module):
    weight: Any
    child: Any
    activation: Any = eqx.field(static=True)

    def __init__(self, *args):
        raise AssertionError("loading calls no `__init__`")

    def double(self, x):
        return 2 * x

    @classmethod
    def make(cls):
        return cls


@jtu.register_pytree_node_class
class Registered:
    def __init__(self, children, aux):
        self.children, self.aux = children, aux

    def tree_flatten(self):
        return self.children, self.aux

    @classmethod
    def tree_unflatten(cls, aux, children):
        new = object.__new__(cls)
        new.children, new.aux = tuple(children), aux
        return new


def activate(x):
    return x


def make(cls, **attributes):
    obj = object.__new__(cls)
    for name, value in attributes.items():
        object.__setattr__(obj, name, value)
    return obj


INTS = st.integers() | st.integers(-(2**200), 2**200)
FLOATS = st.floats() | st.sampled_from([-0.0, float("inf"), float("-inf"), float("nan"), -float("nan"), 5e-324])
SURROGATES = st.text(st.characters(categories=["Cs", "L"]), max_size=4)
TEXTS = st.text() | SURROGATES | st.sampled_from(["\ud83d\ude00", "\x00", ""])
NAMED_VALUES = st.sampled_from([Color.RED, Mode.LOG, jnp.tanh])
HASHABLE = st.recursive(
    st.none() | st.booleans() | INTS | st.floats(allow_nan=False) | TEXTS | st.binary(max_size=4) | NAMED_VALUES,
    lambda inner: (
        st.lists(inner, max_size=3).map(tuple)
        | st.frozensets(inner, max_size=3)
        | inner.map(Key)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=4,
)

COMMON = "bool int8 uint8 int16 uint16 int32 uint32 float16 float32 complex64"
DTYPES = [np.dtype(name) for name in COMMON.split()]
SMALL = "bfloat16 float8_e4m3fn float8_e5m2 int4 uint4"
ML_DTYPES = [np.dtype(getattr(ml_dtypes, name)) for name in SMALL.split()]
BEYOND_JAX = "int64 uint64 float64 complex128 >f4 >i2 M8[ns] m8[s]"
NUMPY_ONLY = [np.dtype(name) for name in BEYOND_JAX.split()]
SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@st.composite
def numpy_arrays(draw, dtypes=tuple(DTYPES + ML_DTYPES + NUMPY_ONLY)):
    dtype, shape = draw(st.sampled_from(dtypes)), draw(SHAPES)
    seed = draw(st.integers(0, 1000))
    count = int(np.prod(shape, dtype=int))
    array = np.random.default_rng(seed).integers(0, 2, count).astype(dtype).reshape(shape)
    how = draw(st.sampled_from(["plain", "transposed", "strided"]))
    if how == "transposed":
        return array.T
    return np.repeat(array, 2, axis=0)[::2] if how == "strided" and shape else array


def jax_arrays():
    plain = numpy_arrays(tuple(DTYPES + ML_DTYPES)).map(jnp.asarray)
    weak = st.sampled_from([1.0, 2, 1j]).map(jnp.asarray)
    keys = st.tuples(st.integers(0, 9), st.sampled_from(["threefry2x32", "rbg", "unsafe_rbg"])).map(
        lambda pair: jax.random.key(pair[0], impl=pair[1])
    )
    batched = st.integers(0, 9).map(lambda seed: jax.random.split(jax.random.key(seed), 2))
    return plain | weak | keys | batched | st.integers(0, 9).map(jax.random.PRNGKey)


SCALARS = st.sampled_from(
    [np.float32(1.5), np.float64("nan"), np.int8(-3), np.bool_(True), np.complex64(1 - 2j)]
    + [np.datetime64("2020-01-01", "s"), np.str_("aé"), np.bytes_(b"x"), np.str_("")]
    + [ml_dtypes.bfloat16(0.1), ml_dtypes.float8_e5m2(2), ml_dtypes.int4(-3)]
)
NAMED = st.sampled_from(
    [jax.nn.relu, jax.nn.gelu, jnp.tanh, jnp.add, jnp.float32, jnp.bfloat16, np.float32, int, dict, Layer, Pair, Color]
    + [activate, jax.nn.initializers.zeros, eqx.nn.Linear, np.exp, jax.lax.add, jax.scipy.special.erf]
)
DESCRIPTIONS = st.sampled_from(
    [np.dtype("f4"), np.dtype(">i2"), np.dtype("U3"), np.dtype(ml_dtypes.bfloat16), jax.random.key(0).dtype]
    + [jax.ShapeDtypeStruct((2, 0), jnp.float32), jax.ShapeDtypeStruct((), jax.random.key(0).dtype)]
    + [jax.ShapeDtypeStruct((3,), jnp.int8, weak_type=True)]
    + [jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("x", None, ("y", "z"))]
    + [jax.sharding.PartitionSpec(jax.sharding.PartitionSpec.UNCONSTRAINED)]
    + [jax.sharding.NamedSharding(jax.make_mesh((1,), ("x",)), jax.sharding.PartitionSpec("x"))]
    + [jax.sharding.AbstractMesh((4, 2), ("x", "y"))]
    + [jtu.tree_structure({"a": (1, None), "b": [2, Layer]}), jtu.tree_structure(0)]
    + [pathlib.PurePosixPath("/a/b"), pathlib.PureWindowsPath("c:\\x"), pathlib.Path("relative")]
)

VALUES = (
    st.none() | st.booleans() | INTS | FLOATS | st.complex_numbers() | TEXTS | st.binary(max_size=5)
    | st.sampled_from([Ellipsis, NotImplemented, Color.BLUE, Mode.TRAIN, Mode.TRAIN | Mode.SLOW, Mode(0), Level.HIGH])
    | st.builds(slice, st.none() | INTS, INTS, st.none() | INTS)
    | st.builds(range, INTS, INTS, st.integers(1, 9))
    | SCALARS | NAMED | DESCRIPTIONS | numpy_arrays() | jax_arrays()
    | st.builds(bytearray, st.binary(max_size=4)) | st.builds(object)
    | st.sets(HASHABLE, max_size=3) | st.frozensets(HASHABLE, max_size=3)
)  # fmt: skip


def bound(xs):
    try:
        return make(Layer, weight=xs, child=xs).double
    except (TypeError, ValueError):  # old versions of Equinox flatten to bind, and JAX cannot flatten every dict
        return make(Layer, weight=xs)


def _mapping(cls, keys, xs):
    return cls(dict(zip(keys, xs, strict=False)))


MAKERS = [
    lambda xs, keys: tuple(xs),
    lambda xs, keys: list(xs),
    lambda xs, keys: _mapping(dict, keys, xs),
    lambda xs, keys: _mapping(collections.OrderedDict, keys, xs),
    lambda xs, keys: _mapping(functools.partial(collections.defaultdict, list), keys, xs),
    lambda xs, keys: _mapping(functools.partial(collections.defaultdict, None), keys, xs),
    lambda xs, keys: collections.deque(xs, 7),
    lambda xs, keys: collections.deque(xs),
    lambda xs, keys: Pair(*[*xs, 0][:2]) if xs else Pair(None),
    lambda xs, keys: make(Config, **dict(zip(("rate", "steps", "derived"), xs, strict=False))),
    lambda xs, keys: make(Config, rate=list(xs), undeclared=list(xs)),
    lambda xs, keys: make(Slotted, **dict(zip(("a", "b"), xs, strict=False))),
    lambda xs, keys: make(Layer, **dict(zip(("weight", "child", "activation"), xs, strict=False))),
    lambda xs, keys: bound(xs),
    lambda xs, keys: Layer.make,
    lambda xs, keys: Registered(tuple(xs), keys),
    lambda xs, keys: functools.partial(activate, *xs, key=keys),
    lambda xs, keys: functools.partial(functools.partial(activate, 1), *xs),
    lambda xs, keys: jtu.Partial(jnp.add, *xs),
    lambda xs, keys: eqx.Partial(activate, *xs),
]


@st.composite
def trees(draw, size=8):
    """A random DAG: a list of everything that was drawn, which shares parts in any way."""
    pool = draw(st.lists(VALUES, min_size=1, max_size=size))
    for _ in range(draw(st.integers(0, size))):
        chosen = draw(st.lists(st.integers(0, len(pool) - 1), max_size=4))
        keys = draw(st.lists(HASHABLE, max_size=len(chosen), unique_by=repr))
        pool.append(draw(st.sampled_from(MAKERS))([pool[i] for i in chosen], keys[: len(chosen)]))
    return pool if draw(st.booleans()) else pool[-1]
