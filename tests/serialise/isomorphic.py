"""Whether two trees are the same but for the objects themselves: an oracle that knows nothing of the code under test.

Types, values to the bit, dtypes, weak types, and which places hold one object.
"""
# ruff: noqa: PT018 -- one line for each kind of value says what is compared

import collections
import dataclasses
import enum
import functools
import pathlib
import struct
import types

import equinox as eqx
import jax
import numpy as np
from jax import tree_util as jtu

BY_IDENTITY = (jax.Array, np.ndarray, list, dict, set, bytearray, collections.deque, jax.ShapeDtypeStruct)

COMPARED = (
    *(int, str, bytes, bytearray, range, pathlib.PurePath, jtu.PyTreeDef),
    *(jax.sharding.Sharding, jax.sharding.Mesh, jax.sharding.AbstractMesh, jax.sharding.PartitionSpec),
    type(jax.eval_shape(lambda: jax.random.key(0)).dtype),
)


def assert_isomorphic(a, b):
    """Raises AssertionError unless `b` is a copy of `a`."""
    there, back, keep = {}, {}, []
    stack = [("", a, b)]
    while stack:
        path, x, y = stack.pop()
        assert type(x) is type(y), (path, type(x), type(y))
        if has_identity(x):
            if id(x) in there or id(y) in back:
                assert there.get(id(x)) == id(y) and back.get(id(y)) == id(x), f"other sharing at {path}"
                continue
            there[id(x)], back[id(y)] = id(y), id(x)
            keep.append((x, y))
        stack += [(path + step, p, q) for step, p, q in pairs(path, x, y)]


def has_identity(x):
    if isinstance(x, BY_IDENTITY) or type(x) is object:
        return True
    return (dataclasses.is_dataclass(x) and not isinstance(x, type)) or isinstance(x, eqx.nn.State)


def pairs(path, x, y):
    """What must be the same for two objects to be, after all that can be said at once."""
    if isinstance(x, float):
        assert bits(x) == bits(y), (path, x, y)
    elif isinstance(x, complex):
        assert bits(x.real) == bits(y.real) and bits(x.imag) == bits(y.imag), (path, x, y)
    elif isinstance(x, np.generic):
        assert x.dtype == y.dtype and used_bytes(x) == used_bytes(y), (path, x, y)
    elif isinstance(x, jax.Array):
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            assert x.dtype == y.dtype and x.shape == y.shape, path
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert x.dtype == y.dtype and x.shape == y.shape and x.weak_type == y.weak_type, path
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), path
    elif isinstance(x, np.ndarray):
        assert x.dtype == y.dtype and x.shape == y.shape and used_bytes(x) == used_bytes(y), path
    elif isinstance(x, types.FunctionType | types.BuiltinFunctionType | type | np.dtype | enum.Enum):
        assert x is y or (isinstance(x, np.dtype) and x == y), (path, x, y)
    elif isinstance(x, types.MethodType):
        assert x.__func__ is y.__func__, path
        return [(".__self__", x.__self__, y.__self__)]
    elif isinstance(x, functools.partial):
        one, two = ((each.func, each.args, list(each.keywords.items())) for each in (x, y))
        attributes = [(".__dict__", vars(x), vars(y))] if type(x) is functools.partial else []
        return [*zip((".func", ".args", ".keywords"), one, two, strict=True), *attributes]
    elif isinstance(x, collections.deque):
        assert len(x) == len(y) and x.maxlen == y.maxlen, path
        return [(f"[{i}]", p, q) for i, (p, q) in enumerate(zip(x, y, strict=True))]
    elif isinstance(x, dict):
        assert len(x) == len(y), path
        more = [(".default_factory", x.default_factory, y.default_factory)] if hasattr(x, "default_factory") else []
        keys = [(f"<key {i}>", p, q) for i, (p, q) in enumerate(zip(x, y, strict=True))]
        return [*more, *keys, *[(f"<{i}>", p, q) for i, (p, q) in enumerate(zip(x.values(), y.values(), strict=True))]]
    elif isinstance(x, set | frozenset):
        assert sorted(map(canonical, x)) == sorted(map(canonical, y)), (path, x, y)
    elif isinstance(x, slice):
        return [(".slice", (x.start, x.stop, x.step), (y.start, y.stop, y.step))]
    elif isinstance(x, eqx.nn.State):
        return [("._state", x._state, y._state)]
    elif (dataclasses.is_dataclass(x) or hasattr(type(x), "_fields")) and not isinstance(x, type):
        names = [f.name for f in dataclasses.fields(x)] if dataclasses.is_dataclass(x) else x._fields
        one, two = getattr(x, "__dict__", {}), getattr(y, "__dict__", {})
        assert set(one) == set(two), (path, set(one) ^ set(two))
        missing = [name for name in names if not hasattr(x, name)]
        assert missing == [name for name in names if not hasattr(y, name)], path
        names = [name for name in {**dict.fromkeys(names), **one} if name not in missing]
        return [(f".{name}", read(x, name), read(y, name)) for name in names]
    elif isinstance(x, tuple | list):
        assert len(x) == len(y), (path, len(x), len(y))
        return [(f"[{i}]", p, q) for i, (p, q) in enumerate(zip(x, y, strict=True))]
    elif isinstance(x, jax.ShapeDtypeStruct):
        assert (x.shape, x.dtype, x.weak_type, x.sharding) == (y.shape, y.dtype, y.weak_type, y.sharding), path
    elif isinstance(x, COMPARED):
        # A nan in a spec or in a treedef is equal to nothing.
        assert x == y or ("nan" in repr(x) and repr(x) == repr(y)), (path, x, y)
    elif jtu.all_leaves([x]):
        assert x is y or type(x) is object, (path, x, y)  # None, Ellipsis, jitted functions, ufuncs
    else:
        one, two = jtu.tree_flatten(x, lambda z: z is not x), jtu.tree_flatten(y, lambda z: z is not y)
        below = [(f"[{i}]", p, q) for i, (p, q) in enumerate(zip(one[0], two[0], strict=True))]
        if one[1] != two[1]:  # also where aux data holds a nan, or a bare object
            aux = [jtu.default_registry.flatten_one_level(each)[1] for each in (x, y)]
            below.append(("<aux>", *aux))
        return below
    return []


def read(x, name):
    return vars(x)[name] if name in getattr(x, "__dict__", {}) else getattr(x, name)


def used_bytes(x):
    """The bytes of NumPy's arrays and scalars, but for the padding of long doubles, in which there may be anything."""
    data = x.tobytes()
    if x.dtype.type in (np.longdouble, np.clongdouble) and np.finfo(np.longdouble).nmant == 63:
        # The first ten bytes of what each takes.
        return np.frombuffer(data, np.uint8).reshape(-1, np.dtype(np.longdouble).itemsize)[:, :10].tobytes()
    return data


def bits(x):
    return struct.pack("<d", x)


def canonical(x):
    """A text that differs for members of a set that differ in type or value."""
    if isinstance(x, tuple | frozenset):
        inner = map(canonical, x)
        return f"{type(x)}{list(inner) if isinstance(x, tuple) else sorted(inner)}"
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return f"{type(x)}{[canonical(getattr(x, f.name, None)) for f in dataclasses.fields(x)]}"
    if type(x) is object:
        return "object"
    return f"{type(x)}{bits(x).hex() if isinstance(x, float) else repr(x)}"
