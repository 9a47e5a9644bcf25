"""Dtypes on disk: the name of each in the manifest, and how its bytes are stored in a safetensors file.

A *logical* dtype is that of the array in memory. The manifest names it: `float32`, `float8_e4m3fn`, `datetime64[ns]`,
or `>float32` for a big-endian array of NumPy's. A *stored* dtype is one of safetensors'. A logical dtype is stored as
itself if all versions of safetensors since 0.5 can read it, so `C64` and the newer kinds of fp8 are not. Every other
array is stored as its bytes, with the size of an item as one more axis at the end:

    float32 (2, 3)          stored as F32 (2, 3)
    complex128 (2, 3)       stored as U8 (2, 3, 16)

Elements of less than 8 bits take one byte each, as in memory: the 4-bit, 2-bit and 1-bit integers, and small floats.
Their high bits are *unused*, and so is the padding of a long double.

Bytes are always little-endian on disk. Names of dtypes in a file are looked up in a table. Only names of times reach
`numpy.dtype`, after a pattern has matched each character.

An array is written to disk in C order, in pieces of at most 4 MiB. How much of it is copied depends on the array:

    JAX's, in the host's memory, contiguous         nothing is copied
    transposed, strided, broadcast, big-endian,     a piece at a time
    or with unused bits in its elements
    NumPy's, which another thread may write to      a piece at a time, so that the bytes hashed are the bytes written
    sharded                                         a piece at a time, put together from the shards; never gathered
    on another device                               as a whole; the copy is not cached with the array

Of a replicated array, one of the copies is written.
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

# ---- Names of dtypes ----

STORED_AS_ITSELF = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "uint16": "U16", "int16": "I16", "float16": "F16", "bfloat16": "BF16",
    "uint32": "U32", "int32": "I32", "float32": "F32",
    "uint64": "U64", "int64": "I64", "float64": "F64",
}  # fmt: skip
"""Name of a logical dtype → the dtype of safetensors in which it is stored. Other dtypes are stored as bytes."""

# The dtypes of all versions of ml_dtypes. The installed version may lack some.
_ML_NAMES = (
    "bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu", "float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn", "int1", "uint1", "int2",
    "uint2", "int4", "uint4", "complex32", "bcomplex32",
)  # fmt: skip

# C's `long double` differs between machines, so its name says which format this machine has. The keys are the numbers
# of bits in the mantissa. None for any other format.
_LONG_DOUBLE = {63: "x87", 112: "binary128"}.get(np.finfo(np.longdouble).nmant)

FLOAT0 = "float0"
"""JAX's dtype of gradients of integers, whose arrays have no bytes."""

# Name in a manifest → dtype in this machine's byte order. Other names are refused, except those of times, and names
# with a mark for the other byte order.
_NATIVE: dict[str, np.dtype[Any]] = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in STORED_AS_ITSELF}
_NATIVE |= {name: np.dtype(name) for name in ("complex64", "complex128")}
_NATIVE |= {name: np.dtype(getattr(ml_dtypes, name)) for name in _ML_NAMES if hasattr(ml_dtypes, name)}
_NATIVE[FLOAT0] = np.dtype(jax.dtypes.float0)
if _LONG_DOUBLE is not None and np.dtype(np.longdouble).itemsize > 8:
    _NATIVE |= {f"{name}[{_LONG_DOUBLE}]": np.dtype(name) for name in ("longdouble", "clongdouble")}

# There is no end to the units of times, such as `datetime64[25s]`, so they are matched by a pattern.
_TIME = re.compile(r"(datetime64|timedelta64)(?:\[([1-9][0-9]{0,8})?(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?")


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Returns the name of a dtype in the manifest. Raises `TypeError` if its arrays cannot be stored."""
    name = name_if_storable(dtype)
    if name is None:
        raise TypeError(f"Arrays of dtype `{dtype}` cannot be saved in a sharedtree file.")
    return name


def dtype_named(name: str) -> np.dtype[Any]:
    """Returns the dtype for a name in the manifest: the inverse of `dtype_name`.

    Raises:
        FormatError: if this machine or its ml_dtypes lacks the dtype, or `dtype_name` returns another name for it.
    """
    native = _NATIVE.get(name)
    if native is not None:
        return native
    # For example `>float32`: without the mark, it names the dtype in this machine's byte order.
    native_name = name.removeprefix(_OTHER_ORDER)
    native = _NATIVE.get(native_name)
    if native is None and _TIME.fullmatch(native_name):
        # The pattern has checked every character, so NumPy gets no other text of the file to parse.
        native = np.dtype(native_name)
    dtype = native if native is None or native_name == name else native.newbyteorder()
    # Each dtype has just one name in files. `>int8` and `datetime64[1s]` are refused: those are `int8` and
    # `datetime64[s]`.
    if dtype is None or name_if_storable(dtype) != name:
        raise _unknown_dtype_error(name, native_name)
    return dtype


# The cache is bounded, since there is no end to the units of times.
@functools.lru_cache(256)
def name_if_storable(dtype: np.dtype[Any]) -> str | None:
    """Returns the name of a dtype in the manifest; None if its arrays cannot be stored: structures, objects, texts."""
    if dtype.kind in "mM" and _TIME.fullmatch(dtype.name):
        return dtype.name if dtype.isnative else _OTHER_ORDER + dtype.name
    return _NAMES.get(dtype)


def _has_byte_order(dtype: np.dtype[Any]) -> bool:
    """Returns True if the bytes of an element can be swapped."""
    # The dtypes of ml_dtypes have no byte order, whatever `byteorder` says. Their `isbuiltin` is 2.
    return dtype.byteorder != "|" and dtype.kind != "V" and dtype.isbuiltin != 2


# Mark of the byte order that this machine does not have.
_OTHER_ORDER = ">" if sys.byteorder == "little" else "<"

# Dtype → its name in a manifest: the inverse of `_NATIVE`, and the same dtypes in the other byte order.
_NAMES: dict[np.dtype[Any], str] = {dtype: name for name, dtype in _NATIVE.items()}
_NAMES |= {dtype.newbyteorder(): _OTHER_ORDER + name for name, dtype in _NATIVE.items() if _has_byte_order(dtype)}


# ---- Bytes on disk → arrays ----


def stored_form(dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Returns the stored dtype and the stored shape of an array, as in the head of this file."""
    stored_dtype = _stored_dtype_of(dtype)
    return ("U8", (*shape, dtype.itemsize)) if stored_dtype is None else (stored_dtype, shape)


@functools.lru_cache(256)
def _stored_dtype_of(dtype: np.dtype[Any]) -> str | None:
    """Returns safetensors' dtype for a logical dtype stored as itself; None if it is stored as bytes.

    Byte order makes no difference. Raises `TypeError` if arrays of the dtype cannot be stored.
    """
    return STORED_AS_ITSELF.get(dtype_name(dtype).lstrip("<>"))


@functools.lru_cache(256)
def on_disk(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns the dtype in little-endian order. It equals `dtype` if no bytes have to be swapped on the way to disk."""
    return dtype.newbyteorder("<") if _has_byte_order(dtype) else dtype


def array_from_bytes(data: np.ndarray[Any, Any], dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Returns the bytes of a stored array as an array of its logical dtype and shape.

    The array is a view of the bytes if nothing in them has to change, and is writable if they are. In three cases the
    bytes change, in place if `data` is writable, otherwise in a copy:

        big-endian arrays                   bytes are swapped
        elements of less than a byte        unused bits are cleared
        booleans with a byte above 1         become 1

    Args:
        data: the bytes on disk, flat and contiguous, as many as the array has.
        dtype: the logical dtype.
        shape: the shape.
    """
    if dtype.itemsize == 0:
        return np.empty(shape, dtype)
    used = used_bits(dtype)
    # One byte in the mask: elements of less than a byte. A byte above the mask has unused bits, which NumPy would use.
    # The padding of long doubles does no harm.
    has_unused_bits = used is not None and len(used) == 1 and data.size and data.max() > used[0]
    if has_unused_bits or has_other_bools(data, dtype):
        data = data if data.flags.writeable else data.copy()
        clear_unused_bits(data, dtype)
    array = data.view(dtype)
    if on_disk(dtype) != dtype:
        array = array.byteswap(inplace=data.flags.writeable)
    return array.reshape(shape)


def clear_unused_bits(data: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> None:
    """Sets the unused bits of elements to 0, in place: the padding of long doubles, the high bits of small elements.

    In memory, they may hold anything that was there before, even a password, and it must not get into the file.

    Booleans are set to 0 and 1. In memory, True may be any other byte, as in `array_of_0_and_255.view(bool)`.

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
    """Returns the mask of the used bits, with one uint8 for each byte of an element on disk; None if all are used."""
    # An x87 long double has 10 bytes, and then padding. A complex one has two of these.
    if dtype.kind in "fc" and dtype.type in (np.longdouble, np.clongdouble) and _LONG_DOUBLE == "x87":
        is_used_byte = np.arange(np.dtype(np.longdouble).itemsize) < 10
        return np.where(np.tile(is_used_byte, dtype.itemsize // len(is_used_byte)), 255, 0).astype(np.uint8)
    bits = _SMALL_BITS.get(_NAMES.get(dtype, ""))
    return None if bits is None else np.array([2**bits - 1], np.uint8)


# How many bits are used in elements that take one byte.
_SMALL_BITS = {
    "float6_e2m3fn": 6, "float6_e3m2fn": 6, "float4_e2m1fn": 4,
    "int4": 4, "uint4": 4, "int2": 2, "uint2": 2, "int1": 1, "uint1": 1,
}  # fmt: skip


def has_other_bools(data: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> bool:
    """Returns True for booleans with bytes other than 0 and 1. What NumPy and XLA do with such bytes is undefined.

    Args:
        data: the bytes, as an array of uint8.
        dtype: the logical dtype. If it is not bool, the result is False.
    """
    return dtype.kind == "b" and data.size > 0 and int(data.max()) > 1


def require_bools(data: np.ndarray[Any, Any], dtype: np.dtype[Any], name: str, advice: str = "") -> None:
    """Raises `FormatError` if an array of booleans has other bytes than 0 and 1.

    Args:
        data: the bytes, flat.
        dtype: the logical dtype.
        name: name of the tensor, for the error.
        advice: text at the end of the error.
    """
    if has_other_bools(data, dtype):
        raise FormatError(
            f"The array `{printable(name)}` of booleans has bytes other than 0 and 1. The file is damaged, or was "
            f"made by hand.\nNothing was loaded. {RESTORE}{advice}"
        )


# What a user can do about booleans that are neither 0 nor 1: in a file of ours, and in a file of another program.
AS_TRUE = " Or read all bytes but 0 as True:\n    sharedtree.load(path, verify=False)"
AS_TRUE_IN_FOREIGN = " Or read all bytes but 0 as True:\n    sharedtree.load(path, foreign=True, verify=False)"


def normalise_bools(array: Any) -> Any:
    """Returns the array with all booleans stored as 0 or 1. If they are already, or it has none, it is the same object.

    Cost: for booleans, a look at each byte. For that, an array on a device is copied to the host shard by shard.

    Args:
        array: an array of NumPy or JAX of any dtype.
    """
    if array.dtype != np.bool_ or not array.size:
        return array
    if isinstance(array, np.ndarray):
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return (data != 0).reshape(array.shape) if has_other_bools(data, array.dtype) else array
    shards = [shard.data for shard in array.addressable_shards]
    host_parts = [np.asarray(shard) for shard in shards]
    sound_parts = [normalise_bools(part) for part in host_parts]
    if all(sound_part is part for sound_part, part in zip(sound_parts, host_parts, strict=True)):
        return array
    placed = [jax.device_put(part, shard.sharding) for part, shard in zip(sound_parts, shards, strict=True)]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, placed)


def _unknown_dtype_error(name: str, native_name: str) -> FormatError:
    """Returns the error for the name of a refused dtype, with the fix.

    Args:
        name: the name in the file.
        native_name: the name without the mark for the other byte order.
    """
    if native_name in _ML_NAMES:
        installed = f"ml_dtypes {ml_dtypes.__version__}"
        why = f"which the installed {installed} lacks.\nUpdate it:\n    pip install --upgrade ml_dtypes"
    elif "longdouble[" in native_name:
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

# ---- Arrays → bytes on disk. Pieces of writable NumPy memory are copied before they are hashed and written ----


def tensor_source(name: str, array: Any) -> TensorSource:
    """Returns the description of an array of JAX or NumPy for writing it as a tensor. Nothing is copied yet.

    Raises:
        TypeError: if arrays of its dtype cannot be stored.
    """
    dtype, shape = array.dtype, array.shape
    stored_dtype, stored_shape = stored_form(dtype, shape)
    # The dtype and the shape may have changed by the time the bytes are asked for.
    make_buffers = functools.partial(_checked_buffers, name, array, dtype, shape)
    may_change = isinstance(array, np.ndarray) and _may_be_written_to(array)
    return TensorSource(name, stored_dtype, stored_shape, dtype.alignment, make_buffers, _is_here(array), may_change)


def _is_here(array: Any) -> bool:
    """Returns True if NumPy can use an array without a copy."""
    return isinstance(array, np.ndarray) or (array.sharding.num_devices == 1 and _is_cpu(array.sharding))


def _may_be_written_to(array: Array) -> bool:
    """Returns True if anybody may write into the memory of an array, through the array or past it.

    A read-only array may be a view of memory that is written to elsewhere, or of a file that another program writes to.
    And an array that owns its memory may be made read-only after writable views of it. So only memory that is never
    written to is safe: that of `bytes`, and that of JAX arrays.
    """
    # Follows the views to the object that owns the memory.
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
    """Returns the bytes of an array in buffers, as `buffers` does, after a check that the array is as it was.

    Args:
        name: name of the tensor, for errors.
        array: the array.
        dtype: its dtype when the header was made.
        shape: its shape when the header was made.

    Raises:
        ValueError: if its dtype or shape has changed since.
        UnserialisableError: if it was donated or deleted since, or is while the buffers are made.
    """
    if array.dtype != dtype or array.shape != shape:
        raise ValueError(
            f"The array at `{printable(name)}` was of dtype {dtype} and shape {shape} and now is of dtype "
            f"{array.dtype} and shape {array.shape}: something changed it while it was being saved."
        )
    try:
        pieces = buffers(array)
    # JAX raises it for a donated or deleted array. `_require_memory` replaces the error by ours in that case.
    except RuntimeError:
        _require_memory(name, array)
        raise
    return pieces if isinstance(pieces, list) else _pieces_unless_deleted(name, array, pieces)


def _pieces_unless_deleted(name: str, array: Any, pieces: Iterable[Buffer]) -> Iterator[Buffer]:
    """Yields the buffers of an array. If it is donated or deleted before the last one, raises `UnserialisableError`."""
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
            "background needs arrays that stay. Copy the model before the save begins, and save the copy:\n"
            "    snapshot = sharedtree.copy(model)\n"
            "    sharedtree.save(path, snapshot)",
            (name,),
            ("donated while it was being saved",),
        ) from None


def buffers(array: Any) -> Iterable[Buffer]:
    """Returns the bytes of an array of JAX or NumPy as on disk, in buffers of at most 4 MiB.

    Returns either a list of buffers that alias the array or are small copies, or an iterator that copies the bytes of
    each buffer. The consumer may keep the buffers, and must not write to them.
    """
    if _is_here(array):
        host = np.asarray(array)
    elif array.is_fully_replicated:
        # JAX caches the copy on the host with an array. `addressable_data` returns a new array, so the copy is freed
        # with that one.
        host = np.asarray(array.addressable_data(0))
    else:
        # By their bounds, so that of replicated shards one is left.
        shards = {tuple(_bounds(shard.index, array.shape)): shard for shard in array.addressable_shards}
        take_part = functools.partial(_copy_part, array, list(shards.values()))
        return _copies_of_pieces(array.shape, array.dtype, take_part)
    is_bool = host.dtype.kind == "b"
    if on_disk(host.dtype) == host.dtype and used_bits(host.dtype) is None:
        # A small array is copied sooner than a view of it is made.
        if host.nbytes < SMALL:
            data = host.tobytes()
            return [np.minimum(np.frombuffer(data, np.uint8), 1).tobytes() if is_bool else data]
        if host.flags.c_contiguous:
            flat = host.reshape(-1).view(np.uint8)
            may_change = isinstance(array, np.ndarray) and _may_be_written_to(array)
            if may_change or has_other_bools(flat, host.dtype):
                # Booleans are passed as booleans, so that each copy is set to 0 and 1, whatever another thread writes.
                flat = flat.view(host.dtype) if is_bool else flat
                return _copies_of_pieces(flat.shape, flat.dtype, flat.__getitem__, _COPY_BYTES)
            all_bytes = memoryview(flat)
            return [all_bytes[start : start + CHUNK_BYTES] for start in range(0, len(all_bytes), CHUNK_BYTES)]
    # Big-endian, with unused bits, or not contiguous. An array without axes gets one, to be cut along.
    host = host.reshape(host.shape or (1,))
    return _copies_of_pieces(host.shape, host.dtype, host.__getitem__)


# Bytes of a piece that is copied for safety only. A piece of this size is still in the cache of the processor when it
# is hashed and written. Saving 256 MiB to memory in pieces of 1 MiB took 7 % more time than without a copy, and in
# pieces of 4 MiB or 256 KiB 27 %.
_COPY_BYTES = 2**20


def _copies_of_pieces(
    shape: tuple[int, ...], dtype: np.dtype[Any], take_part: Callable[[Any], Array], piece_bytes: int = CHUNK_BYTES
) -> Iterator[Buffer]:
    """Yields the bytes of an array as on disk, in C order. Each buffer is a copy.

    Args:
        shape: shape of the array. It has an axis at least.
        dtype: dtype of the array.
        take_part: returns a part of the array for an index. The index has a number for each of the first axes, then one
            slice of step 1.
        piece_bytes: most bytes of a piece.
    """
    if 0 in shape:
        return
    disk_dtype = on_disk(dtype)
    # A piece is cut along the outermost axis of which one position fits into a piece: so many of its positions as fit.
    # For example, float32 (3, 100, 2**18) has 1 MiB for each position of axis 1, so a piece is [i, j : j + 4].
    steps = (piece_bytes // (math.prod(shape[axis + 1 :]) * dtype.itemsize) for axis in range(len(shape)))
    axis, step = next((axis, step) for axis, step in enumerate(steps) if step)
    for outer in itertools.product(*map(range, shape[:axis])):
        for start in range(0, shape[axis], step):
            part = take_part((*outer, slice(start, start + step)))
            data = np.array(part, disk_dtype, order="C").reshape(-1).view(np.uint8)
            clear_unused_bits(data, disk_dtype)
            yield memoryview(data)


def _copy_part(array: jax.Array, shards: list[Any], index: tuple[Any, ...]) -> Array:
    """Returns a copy of a part of a sharded array, put together from the shards.

    Args:
        array: the array.
        shards: its shards in this process, each replica once.
        index: numbers and slices for the first axes. Unlike in NumPy, an axis with a number stays, with size 1.
    """
    wanted = _bounds(index, array.shape)
    part = np.empty([stop - start for start, stop in wanted], array.dtype)
    for shard in shards:
        shard_bounds = _bounds(shard.index, array.shape)
        # Where the part and the shard overlap along each axis, in positions of the whole array.
        overlap = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, shard_bounds, strict=True)]
        if any(start >= stop for start, stop in overlap):
            continue
        # The same in positions of the shard, and in positions of the part.
        source = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(overlap, shard_bounds, strict=True))
        target = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(overlap, wanted, strict=True))
        # A shard on another device is cut before it is copied to the host.
        data = np.asarray(shard.data) if _is_cpu(array.sharding) else shard.data
        part[target] = np.asarray(data[source])
    return part


@functools.lru_cache
def _is_cpu(sharding: jax.sharding.Sharding) -> bool:
    """Returns True if all devices of a sharding are CPUs."""
    return all(device.platform == "cpu" for device in sharding.device_set)


def _bounds(index: tuple[Any, ...], shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Returns where a part begins and ends along each axis.

    Args:
        index: numbers and slices of step 1, for the first axes. The part has the others whole.
        shape: shape of the array.
    """
    index = (*index, *[slice(None)] * (len(shape) - len(index)))
    bounds: list[tuple[int, int]] = []
    for item, size in zip(index, shape, strict=True):
        bounds.append(item.indices(size)[:2] if isinstance(item, slice) else (item, item + 1))
    return bounds
