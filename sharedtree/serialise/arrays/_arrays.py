"""Arrays in a manifest: what is said of each, and how the array that was read becomes the one that was saved.

What makes an array more than its bytes: whether it is JAX's or NumPy's, its dtype, JAX's weak type, and, for typed PRNG
keys, the implementation. The raw data of keys is what is stored.
"""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from ..._errors import FormatError
from ..._jax_internals import ConcreteArray, weakly_typed
from ..._printable import printable
from ..trust._names import RefusalError
from ._dtypes import dtype_name, storable


class ArrayEntry(NamedTuple):
    """One entry of `arrays`."""

    tensor: str
    dtype: str
    shape: tuple[int, ...]
    kind: str
    weak: bool = False
    key: str | None = None


_dtype_names: dict[np.dtype[Any], str] = {}  # filled once a dtype, by a single assignment, which threads cannot tear


def is_array(cls: type) -> bool:
    """Whether the instances of a class are written as arrays, or refused as such."""
    return cls is ConcreteArray or issubclass(cls, np.ndarray | jax.Array | Tracer)


def describe(array: Any, tensor: str) -> tuple[dict[str, Any], Any]:
    """The entry of an array in the manifest, and the array whose bytes are to be stored.

    Args:
        array: a NumPy or JAX array.
        tensor: the name of its tensor.

    Returns:
        The entry, and the array itself, or the raw data of a PRNG key. Nothing is copied but that raw data.

    Raises:
        RefusalError: if the array has no bytes to store, or a dtype that has no name.
    """
    is_jax = not isinstance(array, np.ndarray)
    extra: dict[str, Any] = {}
    if is_jax:
        if isinstance(array, Tracer):
            raise RefusalError(
                "a tracer, which has no value yet", "Save outside of `jax.jit` and the other transforms."
            )
        if type(array) is not ConcreteArray and jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
            impl = jax.random.key_impl(array)
            if not isinstance(impl, str) or impl not in KEY_IMPLEMENTATIONS:
                raise RefusalError(
                    f"a PRNG key of the implementation {str(impl)!r}, which JAX does not bring along",
                    "Keep its data instead: `jax.random.key_data(key)`.",
                )
            extra["key"] = impl
            array = jax.random.key_data(array)
        elif type(array) is not ConcreteArray:
            raise RefusalError(
                f"a `{type(array).__qualname__}`, which is no plain array",
                "Keep what it holds instead: `jax.numpy.copy(array)`.",
            )
        elif array.weak_type:
            extra["weak"] = True
        if array.dtype == jax.dtypes.float0:
            raise RefusalError("a JAX array of dtype `float0`", "Make it NumPy's: `numpy.asarray(array)`.")
        if array.is_deleted():
            raise RefusalError("an array whose memory was donated or deleted", "Save before it is donated.")
    elif type(array) is not np.ndarray and type(array) is not np.memmap:
        raise RefusalError(
            f"a `{type(array).__qualname__}`, a special kind of NumPy array",
            "Make it a plain one: `numpy.asarray(array)`.",
        )
    dtype = array.dtype
    name = _dtype_names.get(dtype)
    if name is None or dtype.metadata:
        if not storable(dtype) or dtype.metadata:
            raise RefusalError(
                f"an array of dtype `{dtype}`", "Keep numbers in arrays, and texts and objects in lists or tuples."
            )
        name = _dtype_names[dtype] = dtype_name(dtype)
    entry = {
        "tensor": tensor,
        "dtype": name,
        "shape": list(array.shape),
        "kind": "jax" if is_jax else "numpy",
        **extra,
    }
    return entry, array


def finish(entry: ArrayEntry, array: Any) -> Any:
    """What was saved, from what was read.

    Args:
        entry: the array's entry.
        array: an array of the entry's dtype and shape, of JAX or of NumPy as the entry says. A `ShapeDtypeStruct` stays
            one.

    Returns:
        The array itself, or it as a typed PRNG key, or weakly typed, over the same memory.

    Raises:
        FormatError: if the entry names an implementation of PRNG keys that JAX does not have.
    """
    if entry.key is not None:
        if entry.key not in KEY_IMPLEMENTATIONS:
            raise FormatError(
                f"`{printable(entry.tensor)}` is a PRNG key of the implementation {entry.key!r}, which JAX does not "
                "have."
            )

        key = _key_struct(entry.key)
        rank = len(entry.shape) - len(key.data_shape)
        if entry.shape[rank:] != key.data_shape:
            raise FormatError(
                f"`{printable(entry.tensor)}` of shape {entry.shape} is no data of PRNG keys of the implementation "
                f"{entry.key!r}."
            )
        if isinstance(array, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(entry.shape[:rank], key.dtype)
        return jax.random.wrap_key_data(array, impl=entry.key)
    if entry.weak:
        if isinstance(array, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(array.shape, array.dtype, weak_type=True, sharding=array.sharding)
        try:
            return weakly_typed(array)
        except Exception as error:
            raise FormatError(
                f"`{printable(entry.tensor)}` of dtype {entry.dtype} cannot be of a weak type."
            ) from error
    return array


def key_dtype(impl: str) -> Any:
    """The dtype of typed PRNG keys of an implementation.

    Raises:
        FormatError: if JAX does not have it.
    """
    if impl not in KEY_IMPLEMENTATIONS:
        raise FormatError(f"The file names PRNG keys of the implementation {impl[:80]!r}, which JAX does not have.")
    return _key_struct(impl).dtype


class _KeyStruct(NamedTuple):
    """Of the PRNG keys of one implementation, the dtype, and the shape of the raw data of one."""

    dtype: Any
    data_shape: tuple[int, ...]


@functools.cache  # of three implementations; each takes a trace
def _key_struct(impl: str) -> _KeyStruct:
    def example() -> tuple[Any, Any]:
        key = jax.random.key(0, impl=impl)
        return key, jax.random.key_data(key)

    key, data = jax.eval_shape(example)
    return _KeyStruct(key.dtype, data.shape)


def key_implementation(dtype: Any) -> str | None:
    """The implementation of a dtype of typed PRNG keys; None if it is none of JAX's own."""
    return next((impl for impl in KEY_IMPLEMENTATIONS if key_dtype(impl) == dtype), None)


KEY_IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")
"""The implementations of PRNG keys that JAX brings along; a file can name no other."""
