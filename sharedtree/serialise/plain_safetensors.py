"""Safetensors files of other programs: tensors with names, and no tree.

The header is read here. The library `safetensors` takes the last of two tensors of one name, knows no dtypes that are
newer than itself, and wants a path or a copy of all bytes. What the header says is checked against the size of the file
before anything is read. Then arrays are read as those of a file of ours, but for the digests, which there are none of.
"""

import math
from typing import Any, NamedTuple

from ..core._errors import CorruptFileError, FormatError
from ..core._printing import printable
from .arrays._dtypes import dtype_named, require_bools, stored
from .arrays._placing import ArrayEntry, Select, Shardings, place_of, read_arrays, struct_of
from .container._byte_sources import ProgressOption, Source
from .container._header import MAX_BYTES, MAX_HEADER_BYTES, START, Header, Tensor, are_counts, parse_json
from .container._reading import Container

_MAX_RANK = 64  # of NumPy's arrays
_MAX_LISTED = 20

# What they call a dtype → what NumPy or ml_dtypes calls it, and the bits of an element.
_DTYPES = {
    "BOOL": ("bool", 8), "U8": ("uint8", 8), "U16": ("uint16", 16), "U32": ("uint32", 32), "U64": ("uint64", 64),
    "I8": ("int8", 8), "I16": ("int16", 16), "I32": ("int32", 32), "I64": ("int64", 64), "F16": ("float16", 16),
    "BF16": ("bfloat16", 16), "F32": ("float32", 32), "F64": ("float64", 64), "C64": ("complex64", 64),
    "F8_E4M3": ("float8_e4m3fn", 8), "F8_E5M2": ("float8_e5m2", 8), "F8_E8M0": ("float8_e8m0fnu", 8),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8), "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8),
    "F4": ("float4_e2m1fn", 4), "F6_E2M3": ("float6_e2m3fn", 6), "F6_E3M2": ("float6_e3m2fn", 6),
}  # fmt: skip


class Tensors(NamedTuple):
    """What a file holds: its tensors in the order of their bytes, its metadata, and where the data begins."""

    tensors: tuple[Tensor, ...]
    metadata: dict[str, str]
    data_start: int


def is_foreign(source: Source) -> bool:
    """Whether a file begins as a safetensors file that is not one of ours."""
    start = bytes(source.read(0, 8 + len(START)))
    length = int.from_bytes(start[:8], "little")
    return start[8:9] == b"{" and length <= MAX_HEADER_BYTES and start[8:] != START


def tensors_in(source: Source) -> Tensors:
    """Reads the header of a file that is foreign, and checks all of it.

    Raises:
        FormatError: if it is malformed.
        CorruptFileError: if it was cut short, or something was appended to it.

    Cost: in the length of the header. Nothing is allocated that the file does not hold.
    """
    data_start = 8 + int.from_bytes(source.read(0, 8), "little")
    if data_start > source.size:
        raise _cut_short(source, f"it has {source.size:,} bytes, and its header alone should have {data_start - 8:,}")
    try:
        entries = parse_json(bytes(source.read(8, data_start - 8)).decode())
    except ValueError as error:  # of UTF-8, too, which quotes what it cannot decode
        what = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        raise _malformed(source, f"in its header, {what}") from None
    metadata = entries.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _malformed(source, "the metadata in its header does not map text to text")
    tensors = sorted([_tensor(source, *item) for item in entries.items()], key=lambda each: (each.start, each.stop))
    at = 0
    for tensor in tensors:
        if tensor.start != at:
            what = "it overlaps another one" if tensor.start < at else "there is a hole before it"
            raise _malformed(source, f"`{printable(tensor.name)}` begins at {tensor.start}, not at {at}: {what}")
        at = tensor.stop
    available = source.size - data_start
    if available < at:
        raise _cut_short(source, f"its header says {at:,} bytes of data, and there are {available:,}")
    if available > at:
        raise CorruptFileError(
            f"`{source.label}` has {available - at:,} bytes after the end of its data: something was appended to it, "
            "or written over it. Copy it again."
        )
    return Tensors(tuple(tensors), metadata, data_start)


def _tensor(source: Source, name: str, entry: Any) -> Tensor:
    shown = printable(name)
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise _malformed(source, f"`{shown}` has no dtype, no shape or no offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        raise _malformed(source, f"the dtype of `{shown}` is no text")
    if not are_counts(shape) or len(shape) > _MAX_RANK:
        raise _malformed(source, f"the shape of `{shown}` is not a list of up to {_MAX_RANK} sizes")
    if not are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _malformed(source, f"the offsets of `{shown}` are not two byte counts, the smaller first")
    if dtype in _DTYPES:
        bits = math.prod(shape) * _DTYPES[dtype][1]
        # NumPy and JAX multiply the sizes other than 0 even where the product is 0.
        if (bits or math.prod(size for size in shape if size) * 64) > 8 * MAX_BYTES:
            raise _malformed(source, f"the shape {tuple(shape)} of `{shown}` is absurd")
        if bits != 8 * (offsets[1] - offsets[0]):
            raise _malformed(
                source, f"`{shown}` spans bytes {offsets[0]} to {offsets[1]}, and its shape makes {bits:,} bits"
            )
    return Tensor(name, dtype, tuple(shape), *offsets)


def load_tensors(
    source: Source,
    *,
    select: Select,
    sharding: Shardings,
    mmap: bool,
    verify: bool,
    progress: ProgressOption,
    **of_a_tree: Any,
) -> dict[str, Any]:
    """Name → array, in the order of the file; for what is not selected, a description of it.

    The rest is as for `load`. Without digests, `verify` asks only for booleans that are 0 or 1.

    Raises:
        ValueError: if there is an option `of_a_tree`.
        FormatError: as `tensors_in`, or if one that is wanted has a dtype that JAX has no arrays of. What is not wanted
            and has a dtype that nobody knows is left out.
    """
    given = [name for name, value in of_a_tree.items() if value] + ["select"] * isinstance(select, str)
    if given:
        raise ValueError(
            f"`{given[0]}` says something of a tree, and `{source.label}` has none: another program wrote it. Load its "
            "tensors by name, of which `select` may be a function:\n"
            "    tensors = sharedtree.load(path, foreign=True)"
        )
    assert not isinstance(select, str)
    found = tensors_in(source)
    wanted = [tensor for tensor in found.tensors if select is None or select(tensor.name)]
    without = [each for each in wanted if each.dtype not in _DTYPES or _DTYPES[each.dtype][1] < 8]
    if without:
        lines = [f"    `{printable(each.name)}`: {printable(each.dtype[:40])}" for each in without[:_MAX_LISTED]]
        lines += [f"    and {len(without) - _MAX_LISTED} more"] if len(without) > _MAX_LISTED else []
        raise FormatError(
            "\n".join(
                [
                    f"`{source.label}` has tensors of dtypes that are packed, or that no array has:",
                    *lines,
                    "Nothing was loaded. Load the others, by a function from a name to whether it is one of them:",
                    "    sharedtree.load(path, foreign=True, select=is_another)",
                ]
            )
        )
    entries = {
        each.name: ArrayEntry(each.name, _DTYPES[each.dtype][0], each.shape, "jax")
        for each in found.tensors
        if each.dtype in _DTYPES
    }
    tensors = [
        each._replace(dtype=kind, shape=shape)
        for each in wanted
        for kind, shape in [stored(dtype_named(entries[each.name].dtype), each.shape)]
    ]
    container = Container(source, Header(tuple(tensors), {}, "", {}, found.data_start))
    if mmap and verify:
        mapped = container.mapped()
        for each in wanted:
            require_bools(mapped[each.name], dtype_named(entries[each.name].dtype), each.name)
    chosen = [entries[each.name] for each in wanted]
    arrays = read_arrays(container, chosen, place_of(sharding), mmap=mmap, verify=False, progress=progress)
    read = dict(zip([entry.tensor for entry in chosen], arrays, strict=True))
    return {name: read[name] if name in read else struct_of(entry) for name, entry in entries.items()}


def _malformed(source: Source, fact: str) -> FormatError:
    return FormatError(
        f"`{source.label}` is not a valid safetensors file: {fact}.\n"
        "Nothing was loaded. Copy the file again, or write it again with the program that made it."
    )


def _cut_short(source: Source, fact: str) -> CorruptFileError:
    return CorruptFileError(f"`{source.label}` was cut short: {fact}. Copy it again.")
