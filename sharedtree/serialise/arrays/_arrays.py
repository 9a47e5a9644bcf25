"""Arrays in a manifest: what is said of each, and how the array that was read becomes the one that was saved.

What makes an array more than its bytes: whether it is JAX's or NumPy's, its dtype, JAX's weak type, and, for typed PRNG
keys, the implementation. The raw data of keys is what is stored.
"""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from ..._jax_internals import ConcreteArray, weakly_typed
from ..._printable import printable
from ...errors import FormatError
from ..trust._names import RefusalError
from ._dtypes import name_if_storable


class ArrayEntry(NamedTuple):
    """One entry of `arrays`."""

    tensor: str
    dtype: str
    shape: tuple[int, ...]
    kind: str
    weak: bool = False
    key: str | None = None


KEY_IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")
"""The implementations of PRNG keys that JAX brings along; a file can name no other."""


def is_array(cls: type) -> bool:
    """Whether the instances of a class are written as arrays, or refused as such."""
    return cls is ConcreteArray or issubclass(cls, np.ndarray | jax.Array | Tracer)


def describe(array: Any, tensor: str) -> tuple[dict[str, Any], Any]:
    """The entry of an array in the manifest, and the array whose bytes are to be stored.

    That is the array itself, or the raw data of PRNG keys, and nothing else is copied. It is a RefusalError if the
    array has no bytes to store, or a dtype that has no name.
    """
    if isinstance(array, Tracer):
        raise RefusalError("a tracer, which has no value yet", "Save outside of `jax.jit` and the other transforms.")
    cls, dtype = type(array), array.dtype
    if dtype == jax.dtypes.float0 and cls is _class_of_float0():
        array, cls = np.empty(array.shape, dtype), np.ndarray
    is_jax = not issubclass(cls, np.ndarray)
    extra: dict[str, Any] = {}
    if not is_jax and cls is not np.ndarray and cls is not np.memmap:
        advice = "Make it a plain one: `numpy.asarray(array)`."
        raise RefusalError(f"a `{cls.__qualname__}`, a special kind of NumPy array", advice)
    if is_jax and cls is not ConcreteArray:
        if not jax.numpy.issubdtype(dtype, jax.dtypes.prng_key):
            advice = "Keep what it holds instead: `jax.numpy.copy(array)`."
            raise RefusalError(f"a `{cls.__qualname__}`, which is no plain array", advice)
        impl = jax.random.key_impl(array)
        if not isinstance(impl, str) or impl not in KEY_IMPLEMENTATIONS:
            raise RefusalError(
                f"a PRNG key of the implementation {str(impl)!r}, which JAX does not bring along",
                "Keep its data instead: `jax.random.key_data(key)`.",
            )
        extra["key"] = impl
        array = jax.random.key_data(array)
    elif is_jax and array.weak_type:
        extra["weak"] = True
    if is_jax and array.is_deleted():
        raise RefusalError("an array whose memory was donated or deleted", "Save before it is donated.")
    dtype = array.dtype
    name = None if dtype.metadata else name_if_storable(dtype)
    if name is None:
        advice = "Keep numbers in arrays, and texts and objects in lists or tuples."
        raise RefusalError(f"an array of dtype `{dtype}`", advice)
    kind = "jax" if is_jax else "numpy"
    return {"tensor": tensor, "dtype": name, "shape": list(array.shape), "kind": kind, **extra}, array


@functools.cache
def _class_of_float0() -> type:
    """What JAX hands out where it has no gradient: an array of NumPy, or of a class of its own, with only a shape."""
    return type(jax.device_put(np.empty((), jax.dtypes.float0)))


def finish(entry: ArrayEntry, array: Any) -> Any:
    """What was saved, from what was read: an array of the entry's dtype and shape, of JAX or of NumPy as it says.

    That is the array itself, or it as a typed PRNG key, or weakly typed, over the same memory. A `ShapeDtypeStruct`
    stays one. It is a FormatError if the entry cannot be true.
    """
    is_struct = isinstance(array, jax.ShapeDtypeStruct)
    if entry.key is not None:
        subject = f"`{printable(entry.tensor)}` is a PRNG key"
        dtype = key_dtype(entry.key, subject)
        data_shape = _key_type(entry.key)[1]
        rank = len(entry.shape) - len(data_shape)
        if entry.shape[rank:] != data_shape:
            raise FormatError(
                f"`{printable(entry.tensor)}` of shape {entry.shape} is no data of PRNG keys of the implementation "
                f"{entry.key!r}."
            )
        if is_struct:
            return jax.ShapeDtypeStruct(entry.shape[:rank], dtype)
        return jax.random.wrap_key_data(array, impl=entry.key)
    if not entry.weak:
        return array
    if is_struct:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, weak_type=True)
    try:
        return weakly_typed(array)
    except Exception as error:
        raise FormatError(f"`{printable(entry.tensor)}` of dtype {entry.dtype} cannot be of a weak type.") from error


def key_dtype(impl: str, subject: str = "The file names PRNG keys") -> Any:
    """The dtype of typed PRNG keys of an implementation. It is a FormatError if JAX does not have that."""
    if impl not in KEY_IMPLEMENTATIONS:
        raise FormatError(f"{subject} of the implementation {impl[:80]!r}, which JAX does not have.")
    return _key_type(impl)[0]


@functools.cache  # of three implementations; each takes a trace
def _key_type(impl: str) -> tuple[Any, tuple[int, ...]]:
    """Of the PRNG keys of an implementation, the dtype, and the shape of the raw data of one."""
    key = jax.eval_shape(lambda: jax.random.key(0, impl=impl))
    return key.dtype, jax.eval_shape(jax.random.key_data, key).shape


def key_implementation(dtype: Any) -> str | None:
    """The implementation of a dtype of typed PRNG keys; None if it is none of JAX's own."""
    return next((impl for impl in KEY_IMPLEMENTATIONS if key_dtype(impl) == dtype), None)
