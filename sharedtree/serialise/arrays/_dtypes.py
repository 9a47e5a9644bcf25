"""Dtypes on disk: what each is called in the manifest, and how its bytes are stored in a safetensors file.

A *logical* dtype is what an array has in memory; the manifest names it: `float32`, `float8_e4m3fn`, `datetime64[ns]`,
`>float32` where NumPy's array is big-endian. A *stored* dtype is one of safetensors'. Where every reader of safetensors
since 0.5 has the logical dtype (which leaves out `C64` and the newer kinds of fp8), it is stored as itself. Every other
array is stored as its bytes: dtype `U8`, with the size of an item as one more axis at the end. The 4-bit, 2-bit and
1-bit integers and the floats of less than 8 bits take one byte an element, as in memory.

Bytes are little-endian on disk, always. A file names dtypes, and names are looked up in a table: no text from a file
reaches `numpy.dtype` but units of times, of which a pattern has matched each character.

An array goes to disk in C order, piece by piece, without a copy of the whole. One of JAX that is in this process's
memory and contiguous is not copied at all. Others (transposed, strided, broadcast, big-endian, with padding in their
elements) are copied a piece at a time, so that writing one takes no more memory than writing another. So is memory of
NumPy that another thread may write into: what is hashed and what is written must be the same bytes. So is an array that
is sharded: it is never gathered. A piece of it is put together from what each shard has of it, and no more than that
leaves the devices. What is replicated is taken from one of its copies. From another device, an array that is on one is
copied as a whole, and let go with the result: nothing stays cached with the array.
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

STORED_AS_ITSELF = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "uint16": "U16", "int16": "I16", "float16": "F16", "bfloat16": "BF16",
    "uint32": "U32", "int32": "I32", "float32": "F32",
    "uint64": "U64", "int64": "I64", "float64": "F64",
}  # fmt: skip

# All that ml_dtypes has had; the installed version may lack some.
_ML_NAMES = (
    "bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu", "float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn", "int1", "uint1", "int2",
    "uint2", "int4", "uint4", "complex32", "bcomplex32",
)  # fmt: skip

# C's `long double` is another format on another machine, so its name says which.
_LONG_DOUBLE = {63: "x87", 112: "binary128"}.get(np.finfo(np.longdouble).nmant)

FLOAT0 = "float0"  # JAX's dtype of gradients of integers: no bytes at all

_NATIVE: dict[str, np.dtype[Any]] = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in STORED_AS_ITSELF}
_NATIVE |= {name: np.dtype(name) for name in ("complex64", "complex128")}
_NATIVE |= {name: np.dtype(getattr(ml_dtypes, name)) for name in _ML_NAMES if hasattr(ml_dtypes, name)}
_NATIVE[FLOAT0] = np.dtype(jax.dtypes.float0)
if _LONG_DOUBLE is not None and np.dtype(np.longdouble).itemsize > 8:
    _NATIVE |= {f"{name}[{_LONG_DOUBLE}]": np.dtype(name) for name in ("longdouble", "clongdouble")}

_TIME = re.compile(r"(datetime64|timedelta64)(?:\[([1-9][0-9]{0,8})?(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?")


def dtype_name(dtype: np.dtype[Any]) -> str:
    """What the manifest calls a dtype. It is a TypeError if the dtype is not storable."""
    name = name_if_storable(dtype)
    if name is None:
        raise TypeError(f"Arrays of dtype `{dtype}` have no place in a sharedtree file.")
    return name


def dtype_named(name: str) -> np.dtype[Any]:
    """The dtype that a manifest calls so. It is a FormatError if this machine or the installed ml_dtypes has none."""
    native = _NATIVE.get(name)
    if native is not None:
        return native
    plain = name.removeprefix(_OTHER_ORDER)
    native = _NATIVE.get(plain)
    if native is None and _TIME.fullmatch(plain):
        native = np.dtype(plain)  # the pattern has checked every character
    dtype = native if native is None or plain == name else native.newbyteorder()
    if dtype is None or name_if_storable(dtype) != name:  # a dtype without a byte order, or a unit with a count of 1
        raise _unknown(name, plain)
    return dtype


@functools.lru_cache(256)  # bounded: units of times are without number
def name_if_storable(dtype: np.dtype[Any]) -> str | None:
    """The name of a dtype; None for those of structures, objects and texts, whose arrays cannot be stored."""
    if dtype.kind in "mM" and _TIME.fullmatch(dtype.name):
        return dtype.name if dtype.isnative else _OTHER_ORDER + dtype.name
    return _NAMES.get(dtype)


def _has_byte_order(dtype: np.dtype[Any]) -> bool:
    return dtype.byteorder != "|" and dtype.kind != "V" and dtype.isbuiltin != 2  # 2: ml_dtypes', which have none


_OTHER_ORDER = ">" if sys.byteorder == "little" else "<"

_NAMES: dict[np.dtype[Any], str] = {dtype: name for name, dtype in _NATIVE.items()}
_NAMES |= {dtype.newbyteorder(): _OTHER_ORDER + name for name, dtype in _NATIVE.items() if _has_byte_order(dtype)}


def stored(dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """The stored dtype and shape of an array of a storable dtype."""
    as_itself = _stored_as(dtype)
    return ("U8", (*shape, dtype.itemsize)) if as_itself is None else (as_itself, shape)


@functools.lru_cache(256)
def _stored_as(dtype: np.dtype[Any]) -> str | None:
    return STORED_AS_ITSELF.get(dtype_name(dtype).lstrip("<>"))


@functools.lru_cache(256)
def on_disk(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The same dtype, little-endian. Equal to `dtype` if no bytes need be swapped."""
    return dtype.newbyteorder("<") if _has_byte_order(dtype) else dtype


def restore(data: np.ndarray[Any, Any], dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """The array whose bytes, as they are on disk, are `data`: flat and contiguous, and as many as the array has.

    It is a view of `data`, writable if that is. Only big-endian arrays have their bytes swapped, elements of less than
    a byte their other bits cleared, and booleans that are neither 0 nor 1 set to 1: in place if `data` is writable,
    else in a copy.
    """
    if dtype.itemsize == 0:
        return np.empty(shape, dtype)
    used = used_bits(dtype)
    has_other_bits = used is not None and len(used) == 1 and data.size and data.max() > used[0]
    if has_other_bits or has_other_bools(data, dtype):  # which NumPy would make use of
        data = data if data.flags.writeable else data.copy()
        clear_unused(data, dtype)
    array = data.view(dtype)
    if on_disk(dtype) != dtype:
        array = array.byteswap(inplace=data.flags.writeable)
    return array.reshape(shape)


def clear_unused(data: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> None:
    """Clears what an element does not use of its bytes: the padding of long doubles, the high bits of small elements.

    In memory there may be anything: what another array or a password left there would be in the file. Booleans may be
    any byte there, as in a mask of 0 and 255 that `array.view(bool)` has made, and become 0 and 1. The bytes are those
    on disk, flat and writable, and are changed in place.
    """
    if dtype.kind == "b":
        np.minimum(data, 1, out=data)
        return
    used = used_bits(dtype)
    if used is not None:
        np.bitwise_and(data.reshape(-1, len(used)), used, out=data.reshape(-1, len(used)))


@functools.lru_cache(256)
def used_bits(dtype: np.dtype[Any]) -> np.ndarray[Any, Any] | None:
    """For each byte of an element on disk, which of its bits are used; None if all of them are."""
    if dtype.kind in "fc" and dtype.type in (np.longdouble, np.clongdouble) and _LONG_DOUBLE == "x87":
        number = np.arange(np.dtype(np.longdouble).itemsize) < 10
        return np.where(np.tile(number, dtype.itemsize // len(number)), 255, 0).astype(np.uint8)
    bits = _SMALL_BITS.get(_NAMES.get(dtype, ""))
    return None if bits is None else np.array([2**bits - 1], np.uint8)


_SMALL_BITS = {
    "float6_e2m3fn": 6, "float6_e3m2fn": 6, "float4_e2m1fn": 4,
    "int4": 4, "uint4": 4, "int2": 2, "uint2": 2, "int1": 1, "uint1": 1,
}  # fmt: skip


def has_other_bools(data: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> bool:
    """Whether the bytes of an array of booleans are others than 0 and 1: what NumPy and XLA do with those is undefined.

    The bytes are of dtype uint8; arrays of other dtypes may have any.
    """
    return dtype.kind == "b" and data.size > 0 and int(data.max()) > 1


def require_bools(data: np.ndarray[Any, Any], dtype: np.dtype[Any], name: str, otherwise: str = "") -> None:
    """Raises if an array of booleans has other bytes than 0 and 1.

    Args:
        data: the bytes, flat.
        dtype: of the array.
        name: of the tensor, for the error.
        otherwise: what else can be done, for the error.
    """
    if has_other_bools(data, dtype):
        raise FormatError(
            f"The array `{printable(name)}` of booleans has bytes other than 0 and 1. The file is damaged, or was "
            f"made by hand.\nNothing was loaded. {RESTORE}{otherwise}"
        )


AS_TRUE = " Or take all bytes but 0 for true:\n    sharedtree.load(path, verify=False)"
AS_TRUE_IN_FOREIGN = " Or take all bytes but 0 for true:\n    sharedtree.load(path, foreign=True, verify=False)"
"""What can be done about booleans that are neither 0 nor 1, in a file of ours and in one of another program."""


def with_sound_bools(array: Any) -> Any:
    """An array of NumPy or JAX whose booleans are the bytes 0 and 1: the array itself, wherever they are.

    Cost: for booleans, a look at each byte, for which an array on a device is copied to the host shard by shard.
    """
    if array.dtype != np.bool_ or not array.size:
        return array
    if isinstance(array, np.ndarray):
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return (data != 0).reshape(array.shape) if has_other_bools(data, array.dtype) else array
    shards = [shard.data for shard in array.addressable_shards]
    held = [np.asarray(shard) for shard in shards]
    sound = [with_sound_bools(part) for part in held]
    if all(part is unchanged for part, unchanged in zip(sound, held, strict=True)):
        return array
    placed = [jax.device_put(part, shard.sharding) for part, shard in zip(sound, shards, strict=True)]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, placed)


def _unknown(name: str, plain: str) -> FormatError:
    if plain in _ML_NAMES:
        lacking = f"ml_dtypes {ml_dtypes.__version__}"
        why = f"which the installed {lacking} lacks.\nUpdate it:\n    pip install --upgrade ml_dtypes"
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


def tensor_source(name: str, array: Any) -> TensorSource:
    """An array of JAX or NumPy, of a storable dtype, as what is to be a tensor."""
    dtype, shape = array.dtype, array.shape
    stored_dtype, stored_shape = stored(dtype, shape)
    take = functools.partial(_unchanged, name, array, dtype, shape)
    may_change = isinstance(array, np.ndarray) and _may_be_written_to(array)
    return TensorSource(name, stored_dtype, stored_shape, dtype.alignment, take, _is_here(array), may_change)


def _is_here(array: Any) -> bool:
    """Whether NumPy can have an array without a copy."""
    return isinstance(array, np.ndarray) or (array.sharding.num_devices == 1 and _is_cpu(array.sharding))


def _may_be_written_to(array: Array) -> bool:
    """Whether anybody may write into the memory of an array, through the array itself or past it.

    A read-only array may be a view of memory that is written to elsewhere, or of a file that another program writes to.
    The owner of memory may become read-only after writable views of it were made. So only memory that is never written
    to does not count: that of `bytes`, and that of JAX arrays.
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


def _unchanged(name: str, array: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Iterable[Buffer]:
    if array.dtype != dtype or array.shape != shape:
        raise ValueError(
            f"The array at `{printable(name)}` was of dtype {dtype} and shape {shape} and now is of dtype "
            f"{array.dtype} and shape {array.shape}: something changed it while it was being saved."
        )
    try:
        pieces = buffers(array)
    except RuntimeError:  # JAX's, of an array whose memory is gone
        _require_memory(name, array)
        raise
    return pieces if isinstance(pieces, list) else _while_there(name, array, pieces)


def _while_there(name: str, array: Any, pieces: Iterable[Buffer]) -> Iterator[Buffer]:
    """The pieces of an array, whose memory may be donated before the last of them."""
    try:
        yield from pieces
    except RuntimeError:
        _require_memory(name, array)
        raise


def _require_memory(name: str, array: Any) -> None:
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
    """The bytes of an array of JAX or NumPy, at most 4 MiB at a time.

    A buffer aliases the array where that is contiguous and nobody can write to it; otherwise it is fresh memory. Either
    way the consumer may keep it, and must not write to it.
    """
    if _is_here(array):
        host = np.asarray(array)
    elif array.is_fully_replicated:
        host = np.asarray(array.addressable_data(0))  # a new array, with which the copy on the host goes
    else:
        shards = {tuple(_bounds(shard.index, array.shape)): shard for shard in array.addressable_shards}
        take = functools.partial(_taken, array, list(shards.values()))
        return _copied(array.shape, array.dtype, take)
    is_bool = host.dtype.kind == "b"
    if on_disk(host.dtype) == host.dtype and used_bits(host.dtype) is None:
        if host.nbytes < SMALL:  # a view takes longer to make than so much to copy
            data = host.tobytes()
            return [np.minimum(np.frombuffer(data, np.uint8), 1).tobytes() if is_bool else data]
        if host.flags.c_contiguous:
            flat = host.reshape(-1).view(np.uint8)
            may_change = isinstance(array, np.ndarray) and _may_be_written_to(array)
            if may_change or has_other_bools(flat, host.dtype):
                # Of booleans each copied piece is set to 0 and 1, whatever another thread writes there meanwhile.
                flat = flat.view(host.dtype) if is_bool else flat
                return _copied(flat.shape, flat.dtype, flat.__getitem__, _COPY_BYTES)
            whole = memoryview(flat)
            return [whole[start : start + CHUNK_BYTES] for start in range(0, len(whole), CHUNK_BYTES)]
    host = host.reshape(host.shape or (1,))
    return _copied(host.shape, host.dtype, host.__getitem__)


# A piece of this size is still in the cache of the processor when it is hashed and written. Saving 256 MiB to memory in
# pieces of 1 MiB took 7 % more time than without a copy, and in pieces of 4 MiB or 256 KiB 27 %.
_COPY_BYTES = 2**20


def _copied(
    shape: tuple[int, ...], dtype: np.dtype[Any], take: Callable[[Any], Array], piece_bytes: int = CHUNK_BYTES
) -> Iterator[Buffer]:
    """The bytes of parts of an array, each copied. `take` is asked for parts: by numbers, and a slice of step 1."""
    if 0 in shape:
        return
    order = on_disk(dtype)
    # The outermost axis of which one step fits a piece, and how many do.
    steps = (piece_bytes // (math.prod(shape[axis + 1 :]) * dtype.itemsize) for axis in range(len(shape)))
    axis, step = next((axis, step) for axis, step in enumerate(steps) if step)
    for outer in itertools.product(*map(range, shape[:axis])):
        for start in range(0, shape[axis], step):
            data = np.array(take((*outer, slice(start, start + step))), order, order="C").reshape(-1).view(np.uint8)
            clear_unused(data, order)
            yield memoryview(data)


def _taken(array: jax.Array, shards: list[Any], index: tuple[Any, ...]) -> Array:
    """A part of a sharded array, copied. An axis that is given a number stays, with size 1."""
    wanted = _bounds(index, array.shape)
    part = np.empty([stop - start for start, stop in wanted], array.dtype)
    for shard in shards:
        held = _bounds(shard.index, array.shape)
        both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, held, strict=True)]
        if any(start >= stop for start, stop in both):
            continue
        source = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(both, held, strict=True))
        target = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(both, wanted, strict=True))
        data = np.asarray(shard.data) if _is_cpu(array.sharding) else shard.data
        part[target] = np.asarray(data[source])
    return part


@functools.lru_cache
def _is_cpu(sharding: jax.sharding.Sharding) -> bool:
    return all(device.platform == "cpu" for device in sharding.device_set)


def _bounds(index: tuple[Any, ...], shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Where a part begins and ends along each axis. What `index` leaves out is whole."""
    index = (*index, *[slice(None)] * (len(shape) - len(index)))
    return [
        each.indices(size)[:2] if isinstance(each, slice) else (each, each + 1)
        for each, size in zip(index, shape, strict=True)
    ]
