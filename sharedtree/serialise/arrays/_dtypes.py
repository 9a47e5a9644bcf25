"""Dtypes on disk: the name of each in the manifest, and how its bytes are stored in a safetensors file.

A *logical* dtype is what an array has in memory; the manifest names it: `float32`, `float8_e4m3fn`, `datetime64[ns]`,
`>float32` where NumPy's array is big-endian. A *stored* dtype is one of safetensors'. Where every reader of safetensors
since 0.5 has the logical dtype (which leaves out `C64` and the newer kinds of fp8), it is stored as itself. Every other
array is stored as its bytes, with the size of an item as one more axis at the end:

    float32 (2, 3)          stored as F32 (2, 3)
    complex128 (2, 3)       stored as U8 (2, 3, 16)

The 4-bit, 2-bit and 1-bit integers and the floats of less than 8 bits take one byte an element, as in memory.

Bytes are little-endian on disk, always. A file names dtypes, and names are looked up in a table: no text from a file
reaches `numpy.dtype` but units of times, of which a pattern has matched each character.

An array goes to disk in C order, piece by piece. How much is copied depends on the array:

    JAX's, in this process's memory, contiguous     nothing is copied
    transposed, strided, broadcast, big-endian,     a piece at a time
    or with padding in its elements
    NumPy's, which another thread may write to      a piece at a time: what is hashed is what is written
    sharded                                         a piece at a time, put together from the shards; never gathered
    on another device                               as a whole; the copy is not cached with the array

If an array is replicated, one of the copies is taken.
"""

import functools
import itertools
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import ml_dtypes
import numpy as np

from ...core._errors import FormatError, UnserialisableError
from ...core._printing import printable
from ..container._byte_sources import CHUNK_BYTES, SMALL
from ..container._header import RESTORE, Buffer, TensorSource

# ---- Names of dtypes: no text of a file becomes something that Python evaluates ----

STORED_AS_ITSELF = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "uint16": "U16", "int16": "I16", "float16": "F16", "bfloat16": "BF16",
    "uint32": "U32", "int32": "I32", "float32": "F32",
    "uint64": "U64", "int64": "I64", "float64": "F64",
}  # fmt: skip
"""Logical dtype → the dtype of safetensors in which it is stored. All others are stored as bytes."""

# All that ml_dtypes has had; the installed version may lack some.
_ML_NAMES = (
    "bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu", "float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn", "int1", "uint1", "int2",
    "uint2", "int4", "uint4", "complex32", "bcomplex32",
)  # fmt: skip

# C's `long double` is another format on another machine, so its name says which.
_LONG_DOUBLE = {63: "x87", 112: "binary128"}.get(np.finfo(np.longdouble).nmant)

FLOAT0 = "float0"
"""JAX's dtype of gradients of integers, whose arrays have no bytes."""

# Name in a manifest → dtype of this machine. A name that is not here, and is no unit of time, is refused.
_NATIVE: dict[str, np.dtype[Any]] = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in STORED_AS_ITSELF}
_NATIVE |= {name: np.dtype(name) for name in ("complex64", "complex128")}
_NATIVE |= {name: np.dtype(getattr(ml_dtypes, name)) for name in _ML_NAMES if hasattr(ml_dtypes, name)}
_NATIVE[FLOAT0] = np.dtype(jax.dtypes.float0)
if _LONG_DOUBLE is not None and np.dtype(np.longdouble).itemsize > 8:
    _NATIVE |= {f"{name}[{_LONG_DOUBLE}]": np.dtype(name) for name in ("longdouble", "clongdouble")}

# Units of times are without number, so they are matched instead of listed.
_TIME = re.compile(r"(datetime64|timedelta64)(?:\[([1-9][0-9]{0,8})?(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?")


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Returns the name of a dtype in the manifest. Raises `TypeError` if its arrays cannot be stored."""
    name = name_if_storable(dtype)
    if name is None:
        raise TypeError(f"Arrays of dtype `{dtype}` have no place in a sharedtree file.")
    return name


def dtype_named(name: str) -> np.dtype[Any]:
    """Returns the dtype of a name in the manifest. Raises `FormatError` if this machine or its ml_dtypes lacks it."""
    native = _NATIVE.get(name)
    if native is not None:
        return native
    plain = name.removeprefix(_OTHER_ORDER)
    native = _NATIVE.get(plain)
    if native is None and _TIME.fullmatch(plain):
        # The pattern has checked every character, so NumPy parses nothing else of the file's.
        native = np.dtype(plain)
    dtype = native if native is None or plain == name else native.newbyteorder()
    # The name may be no dtype's. Or it is not the one that `dtype_name` gives, as `>int8` and `datetime64[1s]` are not.
    if dtype is None or name_if_storable(dtype) != name:
        raise _unknown(name, plain)
    return dtype


# The cache is bounded, since units of times are without number.
@functools.lru_cache(256)
def name_if_storable(dtype: np.dtype[Any]) -> str | None:
    """Returns the name of a dtype; None for structures, objects and texts: their arrays cannot be stored."""
    if dtype.kind in "mM" and _TIME.fullmatch(dtype.name):
        return dtype.name if dtype.isnative else _OTHER_ORDER + dtype.name
    return _NAMES.get(dtype)


def _has_byte_order(dtype: np.dtype[Any]) -> bool:
    # The dtypes of ml_dtypes (2) have no byte order, whatever they say.
    return dtype.byteorder != "|" and dtype.kind != "V" and dtype.isbuiltin != 2


_OTHER_ORDER = ">" if sys.byteorder == "little" else "<"

_NAMES: dict[np.dtype[Any], str] = {dtype: name for name, dtype in _NATIVE.items()}
_NAMES |= {dtype.newbyteorder(): _OTHER_ORDER + name for name, dtype in _NATIVE.items() if _has_byte_order(dtype)}


# ---- Bytes on disk → arrays ----


def stored(dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Returns the stored dtype and shape of an array."""
    as_itself = _stored_as(dtype)
    return ("U8", (*shape, dtype.itemsize)) if as_itself is None else (as_itself, shape)


@functools.lru_cache(256)
def _stored_as(dtype: np.dtype[Any]) -> str | None:
    return STORED_AS_ITSELF.get(dtype_name(dtype).lstrip("<>"))


@functools.lru_cache(256)
def on_disk(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns the same dtype, little-endian. It is equal to `dtype` if no bytes have to be swapped."""
    return dtype.newbyteorder("<") if _has_byte_order(dtype) else dtype


def restore(data: np.ndarray[Any, Any], dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Returns the array with the given bytes, as a view of them. The view is writable if they are.

    Three kinds of arrays are changed, in place if `data` is writable, otherwise in a copy: big-endian ones have their
    bytes swapped, elements of less than a byte their unused bits cleared, and booleans above 1 become 1.

    Args:
        data: the bytes on disk, flat and contiguous, as many as the array has.
        dtype: the logical dtype.
        shape: the shape.
    """
    if dtype.itemsize == 0:
        return np.empty(shape, dtype)
    used = used_bits(dtype)
    has_other_bits = used is not None and len(used) == 1 and data.size and data.max() > used[0]
    # NumPy would use such bits.
    if has_other_bits or has_other_bools(data, dtype):
        data = data if data.flags.writeable else data.copy()
        clear_unused(data, dtype)
    array = data.view(dtype)
    if on_disk(dtype) != dtype:
        array = array.byteswap(inplace=data.flags.writeable)
    return array.reshape(shape)


def clear_unused(data: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> None:
    """Clears the unused bits of elements in place: the padding of long doubles, the high bits of small elements.

    In memory they may be anything, and what another array or a password left there would be in the file. Booleans may
    be any byte there, as in a mask of 0 and 255 that `array.view(bool)` has made, and become 0 and 1.

    Args:
        data: the bytes on disk, flat and writable.
        dtype: the logical dtype.
    """
    if dtype.kind == "b":
        np.minimum(data, 1, out=data)
        return
    used = used_bits(dtype)
    if used is not None:
        np.bitwise_and(data.reshape(-1, len(used)), used, out=data.reshape(-1, len(used)))


@functools.lru_cache(256)
def used_bits(dtype: np.dtype[Any]) -> np.ndarray[Any, Any] | None:
    """Returns a mask of the used bits for each byte of an element on disk; None if all bits are used."""
    if dtype.kind in "fc" and dtype.type in (np.longdouble, np.clongdouble) and _LONG_DOUBLE == "x87":
        is_used_byte = np.arange(np.dtype(np.longdouble).itemsize) < 10
        return np.where(np.tile(is_used_byte, dtype.itemsize // len(is_used_byte)), 255, 0).astype(np.uint8)
    bits = _SMALL_BITS.get(_NAMES.get(dtype, ""))
    return None if bits is None else np.array([2**bits - 1], np.uint8)


# How many bits are used of elements that take one byte.
_SMALL_BITS = {
    "float6_e2m3fn": 6, "float6_e3m2fn": 6, "float4_e2m1fn": 4,
    "int4": 4, "uint4": 4, "int2": 2, "uint2": 2, "int1": 1, "uint1": 1,
}  # fmt: skip


def has_other_bools(data: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> bool:
    """Returns True for booleans with other bytes than 0 and 1. What NumPy and XLA do with those is undefined.

    Args:
        data: the bytes, as uint8.
        dtype: the logical dtype. If it is not bool, the result is False.
    """
    return dtype.kind == "b" and data.size > 0 and int(data.max()) > 1


def require_bools(data: np.ndarray[Any, Any], dtype: np.dtype[Any], name: str, otherwise: str = "") -> None:
    """Raises `FormatError` if an array of booleans has other bytes than 0 and 1.

    Args:
        data: the bytes, flat.
        dtype: the logical dtype.
        name: of the tensor, for the error.
        otherwise: more advice, for the error.
    """
    if has_other_bools(data, dtype):
        raise FormatError(
            f"The array `{printable(name)}` of booleans has bytes other than 0 and 1. The file is damaged, or was "
            f"made by hand.\nNothing was loaded. {RESTORE}{otherwise}"
        )


# What a user can do about booleans that are neither 0 nor 1, in a file of ours and in one of another program.
AS_TRUE = " Or take all bytes but 0 for true:\n    sharedtree.load(path, verify=False)"
AS_TRUE_IN_FOREIGN = " Or take all bytes but 0 for true:\n    sharedtree.load(path, foreign=True, verify=False)"


def with_sound_bools(array: Any) -> Any:
    """Returns the array with booleans as bytes 0 and 1: the array itself, if they already are.

    Cost: for booleans, a look at each byte, for which an array on a device is copied to the host shard by shard.
    """
    if array.dtype != np.bool_ or not array.size:
        return array
    if isinstance(array, np.ndarray):
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return (data != 0).reshape(array.shape) if has_other_bools(data, array.dtype) else array
    shards = [shard.data for shard in array.addressable_shards]
    on_host = [np.asarray(shard) for shard in shards]
    sound = [with_sound_bools(part) for part in on_host]
    if all(part is unchanged for part, unchanged in zip(sound, on_host, strict=True)):
        return array
    placed = [jax.device_put(part, shard.sharding) for part, shard in zip(sound, shards, strict=True)]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, placed)


def _unknown(name: str, plain: str) -> FormatError:
    """Returns the error for a dtype this machine lacks. It gives the fix."""
    if plain in _ML_NAMES:
        installed = f"ml_dtypes {ml_dtypes.__version__}"
        why = f"which the installed {installed} lacks.\nUpdate it:\n    pip install --upgrade ml_dtypes"
    elif "longdouble[" in plain:
        why = (
            "and on this machine `long double` is another format.\n"
            "Where the array was made, save it as float64:\n    array.astype(numpy.float64)"
        )
    else:
        why = (
            "which this version of sharedtree does not know.\n"
            "If a newer version wrote the file, update:\n    pip install --upgrade sharedtree"
        )
    return FormatError(f"The file has an array of dtype `{printable(name[:80])}`, {why}")


Array = np.ndarray[Any, Any]

# ---- Arrays → bytes on disk. A snapshot: pieces of writable NumPy memory are copied first ----


def tensor_source(name: str, array: Any) -> TensorSource:
    """Describes an array of JAX or NumPy as a future tensor. Nothing is copied yet."""
    dtype, shape = array.dtype, array.shape
    stored_dtype, stored_shape = stored(dtype, shape)
    take = functools.partial(_checked_buffers, name, array, dtype, shape)
    may_change = isinstance(array, np.ndarray) and _may_be_written_to(array)
    return TensorSource(name, stored_dtype, stored_shape, dtype.alignment, take, _is_here(array), may_change)


def _is_here(array: Any) -> bool:
    """Returns True if NumPy can use an array without a copy."""
    return isinstance(array, np.ndarray) or (array.sharding.num_devices == 1 and _is_cpu(array.sharding))


def _may_be_written_to(array: Array) -> bool:
    """Returns True if anybody may write into the memory of an array, through the array or past it.

    A read-only array may be a view of memory that is written to elsewhere, or of a file another program writes to.
    The owner of memory may become read-only after writable views of it were made. So only memory that is never written
    to is safe: that of `bytes`, and that of JAX arrays.
    """
    memory: Any = array
    while isinstance(memory, np.ndarray | memoryview):
        if isinstance(memory, memoryview):
            memory = memory.obj
        elif memory.flags.writeable:
            return True
        else:
            memory = memory.base
    return not isinstance(memory, bytes | jax.Array)


def _checked_buffers(name: str, array: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Iterable[Buffer]:
    """Returns the bytes of an array, in buffers.

    Raises:
        ValueError: if dtype or shape are no longer those the header was made for.
        UnserialisableError: if the array was donated or deleted meanwhile.
    """
    if array.dtype != dtype or array.shape != shape:
        raise ValueError(
            f"The array at `{printable(name)}` was of dtype {dtype} and shape {shape} and now is of dtype "
            f"{array.dtype} and shape {array.shape}: something changed it while it was being saved."
        )
    try:
        pieces = buffers(array)
    # JAX raises it for an array whose memory is gone.
    except RuntimeError:
        _require_memory(name, array)
        raise
    return pieces if isinstance(pieces, list) else _until_deleted(name, array, pieces)


def _until_deleted(name: str, array: Any, pieces: Iterable[Buffer]) -> Iterator[Buffer]:
    """Iterates over the buffers of an array, whose memory may be donated before the last of them."""
    try:
        yield from pieces
    except RuntimeError:
        _require_memory(name, array)
        raise


def _require_memory(name: str, array: Any) -> None:
    """Raises `UnserialisableError` if a JAX array was donated or deleted."""
    if isinstance(array, jax.Array) and array.is_deleted():
        raise UnserialisableError(
            f"The array at `{printable(name)}` was donated or deleted while it was being saved. A save in the "
            "background needs arrays that nobody donates. Copy the model before that begins, and save the copy:\n"
            "    snapshot = sharedtree.copy(model)\n"
            "    sharedtree.save(path, snapshot)",
            (name,),
            ("donated while it was being saved",),
        ) from None


def buffers(array: Any) -> Iterable[Buffer]:
    """Returns the bytes of an array of JAX or NumPy, at most 4 MiB at a time.

    A list has buffers that alias the array, or are small copies. An iterator makes a copy for each buffer. Either way
    the consumer may keep buffers, and must not write to them.
    """
    if _is_here(array):
        host = np.asarray(array)
    elif array.is_fully_replicated:
        # `addressable_data` makes a new array, so the copy on the host is not cached with the caller's.
        host = np.asarray(array.addressable_data(0))
    else:
        shards = {tuple(_bounds(shard.index, array.shape)): shard for shard in array.addressable_shards}
        take = functools.partial(_taken, array, list(shards.values()))
        return _copied(array.shape, array.dtype, take)
    is_bool = host.dtype.kind == "b"
    if on_disk(host.dtype) == host.dtype and used_bits(host.dtype) is None:
        # A view takes longer to make than a small array to copy.
        if host.nbytes < SMALL:
            data = host.tobytes()
            return [np.minimum(np.frombuffer(data, np.uint8), 1).tobytes() if is_bool else data]
        if host.flags.c_contiguous:
            flat = host.reshape(-1).view(np.uint8)
            may_change = isinstance(array, np.ndarray) and _may_be_written_to(array)
            if may_change or has_other_bools(flat, host.dtype):
                # The pieces stay booleans, so that each copy is set to 0 and 1, whatever another thread writes.
                flat = flat.view(host.dtype) if is_bool else flat
                return _copied(flat.shape, flat.dtype, flat.__getitem__, _COPY_BYTES)
            all_bytes = memoryview(flat)
            return [all_bytes[start : start + CHUNK_BYTES] for start in range(0, len(all_bytes), CHUNK_BYTES)]
    # Big-endian, with unused bits, or not contiguous.
    host = host.reshape(host.shape or (1,))
    return _copied(host.shape, host.dtype, host.__getitem__)


# A piece of this size is still in the cache of the processor when it is hashed and written. Saving 256 MiB to memory in
# pieces of 1 MiB took 7 % more time than without a copy, and in pieces of 4 MiB or 256 KiB 27 %.
_COPY_BYTES = 2**20


def _copied(
    shape: tuple[int, ...], dtype: np.dtype[Any], take: Callable[[Any], Array], piece_bytes: int = CHUNK_BYTES
) -> Iterator[Buffer]:
    """Iterates over the bytes of an array, each piece copied, in C order.

    Args:
        shape: of the array.
        dtype: of the array.
        take: returns a part of the array, for an index of numbers and one slice of step 1.
        piece_bytes: most bytes of a piece.
    """
    if 0 in shape:
        return
    order = on_disk(dtype)
    # The outermost axis of which one step fits into a piece, and how many steps do.
    steps = (piece_bytes // (math.prod(shape[axis + 1 :]) * dtype.itemsize) for axis in range(len(shape)))
    axis, step = next((axis, step) for axis, step in enumerate(steps) if step)
    for outer in itertools.product(*map(range, shape[:axis])):
        for start in range(0, shape[axis], step):
            data = np.array(take((*outer, slice(start, start + step))), order, order="C").reshape(-1).view(np.uint8)
            clear_unused(data, order)
            yield memoryview(data)


def _taken(array: jax.Array, shards: list[Any], index: tuple[Any, ...]) -> Array:
    """Returns a copied part of a sharded array, put together from the shards.

    Args:
        array: the array.
        shards: its distinct shards.
        index: numbers and slices. An axis with a number stays, with size 1.
    """
    wanted = _bounds(index, array.shape)
    part = np.empty([stop - start for start, stop in wanted], array.dtype)
    for shard in shards:
        shard_bounds = _bounds(shard.index, array.shape)
        overlap = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, shard_bounds, strict=True)]
        if any(start >= stop for start, stop in overlap):
            continue
        source = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(overlap, shard_bounds, strict=True))
        target = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(overlap, wanted, strict=True))
        # On other devices, the part is cut out before it is copied to the host.
        data = np.asarray(shard.data) if _is_cpu(array.sharding) else shard.data
        part[target] = np.asarray(data[source])
    return part


@functools.lru_cache
def _is_cpu(sharding: jax.sharding.Sharding) -> bool:
    return all(device.platform == "cpu" for device in sharding.device_set)


def _bounds(index: tuple[Any, ...], shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Returns where a part begins and ends along each axis. Axes without an index are whole."""
    index = (*index, *[slice(None)] * (len(shape) - len(index)))
    bounds: list[tuple[int, int]] = []
    for item, size in zip(index, shape, strict=True):
        bounds.append(item.indices(size)[:2] if isinstance(item, slice) else (item, item + 1))
    return bounds
