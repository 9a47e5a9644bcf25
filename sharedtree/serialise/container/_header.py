"""The header of a container: where each tensor is, the manifest, the digests. Laid out, written and read strictly.

A container is a safetensors file: eight bytes with the length N of the header, little-endian; N bytes of JSON, padded
with spaces until the data begins at a multiple of 64; the data, without holes. The header begins with the same bytes in
every container, so that the two values that are known last, its own digest and those of the data, have fixed places and
can be patched:

    {"__metadata__":{"sharedtree.header":"<8 digits>","sharedtree.digests":"<8 digits for each chunk>","sharedtree":…

The header's digest is the CRC-32 of the eight bytes and the header, in which its own digits stand as zeros. It is
checked before anything else is believed. It is no secret, so everything else is checked all the same: what a hostile
header can do is raise `FormatError`.
"""

import json
import math
import re
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..._errors import CorruptFileError, FormatError
from ..._printable import printable
from ..arrays._dtypes import ITEM_SIZES, nbytes_of
from ._digest import num_chunks
from ._strict_json import parse_json

ALIGNMENT = 64
MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
MAX_INLINE_MANIFEST = 16 * 2**20
MANIFEST_TENSOR = "sharedtree.manifest"

_LENGTH = struct.Struct("<Q")
LENGTH_BYTES = _LENGTH.size
_BEFORE_CRC = b'{"__metadata__":{"sharedtree.header":"'
_BEFORE_DIGESTS = b'","sharedtree.digests":"'
_CRC_AT = LENGTH_BYTES + len(_BEFORE_CRC)
_DIGESTS_AT = _CRC_AT + 8 + len(_BEFORE_DIGESTS)

_MAX_RANK = 65  # NumPy's 64 axes, and one for raw bytes
_MAX_BYTES = 2**63 - 1
_DIGITS = re.compile("[0-9a-f]*")


class Tensor(NamedTuple):
    """One entry of the header. `dtype` and `shape` are the stored ones; offsets count from the start of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class Header(NamedTuple):
    """A header that was read and found sound.

    Attributes:
        tensors: in order of offset; the manifest's own tensor, if it has one, is the last.
        metadata: the user's.
        manifest: None if it is in a tensor.
        digests: of all chunks of all tensors.
        first_chunk: for each tensor, where its digests begin.
        data_start: where the data begins in the file.
    """

    tensors: tuple[Tensor, ...]
    metadata: dict[str, str]
    manifest: str | None
    digests: list[int]
    first_chunk: list[int]
    data_start: int


# --- writing -----------------------------------------------------------------------------------------------------


def laid_out(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> list[Tensor]:
    """Names, stored dtypes and shapes, given in order of offset, with their offsets."""
    placed: list[Tensor] = []
    at = 0
    for name, dtype, shape in tensors:
        stop = at + nbytes_of(dtype, shape)
        placed.append(Tensor(name, dtype, shape, at, stop))
        at = stop
    return placed


def blank_header(tensors: Sequence[Tensor], manifest: str, metadata: Mapping[str, str]) -> bytearray:
    """The length and the header, with zeros for digests.

    Args:
        tensors: in order of offset.
        manifest: the text under the key `sharedtree`.
        metadata: the user's.

    Raises:
        ValueError: if a name is taken twice or is reserved, or a text cannot be written as UTF-8.
    """
    num_digits = 8 * sum(num_chunks(t.nbytes) for t in tensors)
    own = {"sharedtree.header": "0" * 8, "sharedtree.digests": "0" * num_digits, "sharedtree": manifest}
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"Metadata must map text to text; the entry `{key!r}: {value!r}` does not.")
        if key.startswith("sharedtree"):
            raise ValueError(
                f"The metadata key `{printable(key)}` is taken: those that begin with `sharedtree` are the format's."
            )
        _require_unicode(key)
        _require_unicode(value)
    entries: dict[str, Any] = {"__metadata__": own | dict(metadata)}
    for tensor in tensors:
        if tensor.name in entries:
            raise ValueError(f"Two tensors cannot both be named `{printable(tensor.name)}`.")
        _require_unicode(tensor.name)
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": (tensor.start, tensor.stop),
        }
    text = json.dumps(entries, separators=(",", ":"), check_circular=False).encode("ascii")
    padding = -(LENGTH_BYTES + len(text)) % ALIGNMENT
    return bytearray(_LENGTH.pack(len(text) + padding) + text + b" " * padding)


def _require_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"The text {text!r} holds half of a surrogate pair, which no safetensors file can hold. Encode it first:\n"
            "    text.encode('utf-8', 'backslashreplace').decode()"
        ) from None


def seal(header: bytearray, digests: Sequence[int]) -> tuple[int, int]:
    """Writes the digests of the data, and the header's own, into a blank header.

    Returns:
        Where the bytes that changed begin and end.
    """
    stop = _DIGESTS_AT + 8 * len(digests)
    header[_DIGESTS_AT:stop] = np.array(digests, ">u4").tobytes().hex().encode()
    header[_CRC_AT : _CRC_AT + 8] = b"%08x" % zlib.crc32(header)
    return _CRC_AT, stop


# --- reading -----------------------------------------------------------------------------------------------------


def header_length(first: bytes, file_bytes: int, label: str) -> int:
    """N, from the first bytes of a file, enough of them to recognise a container.

    Raises:
        FormatError: if this is not a safetensors file.
        CorruptFileError: if it is one of ours, cut short.
    """
    length = _LENGTH.unpack_from(first)[0] if len(first) >= LENGTH_BYTES else None
    if length is not None and length <= MAX_HEADER_BYTES and LENGTH_BYTES + length <= file_bytes:
        return length
    if first[LENGTH_BYTES:].startswith(_BEFORE_CRC) and length is not None and length <= MAX_HEADER_BYTES:
        raise CorruptFileError(
            f"`{label}` was cut short: it has {file_bytes} bytes, and its header alone should have {length}.\n"
            f"{_RESTORE}"
        )
    what = "is empty" if file_bytes == 0 else f"has {file_bytes} bytes"
    if length is not None:
        what = f"begins with {first[:LENGTH_BYTES]!r}, which is not the length of a header inside it"
    raise FormatError(
        f"`{label}` is not a sharedtree file, nor any other safetensors file: it {what}.\n"
        "If another library wrote it, load it with that one."
    )


def parse_header(raw: bytes, file_bytes: int, label: str) -> Header:
    """Reads a header.

    Args:
        raw: the eight bytes and the header.
        file_bytes: the size of the whole file.
        label: what errors call the file.

    Raises:
        FormatError: if it is not a sharedtree file, or malformed.
        CorruptFileError: if it was one, and has changed.

    Cost: some microseconds for each tensor. Nothing is allocated but what the header's own text makes.
    """
    ours = raw.startswith(_BEFORE_CRC, LENGTH_BYTES)
    if ours:
        _check_crc(raw, label)
    entries = _parse_json(raw[LENGTH_BYTES:], label)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _malformed(label, "the metadata in its header does not map text to text")
    if "sharedtree" not in metadata:
        raise FormatError(
            f"`{label}` is a safetensors file, but not one that sharedtree wrote: it has arrays and no model. "
            "To get the arrays, as JAX's or as NumPy's:\n"
            "    tensors = sharedtree.load(path, foreign=True)\n    tensors = safetensors.numpy.load_file(path)"
        )
    if not ours:
        raise _malformed(label, "its header does not begin as sharedtree writes it; another program rewrote the file")
    if len(raw) % ALIGNMENT:
        raise _malformed(label, f"its data does not begin at a multiple of {ALIGNMENT} bytes")
    tensors = _tensors(entries, label)
    _check_size(tensors, file_bytes - len(raw), label)
    manifest: str | None = metadata.pop("sharedtree")
    in_tensor = bool(tensors) and tensors[-1].name == MANIFEST_TENSOR
    is_text = not in_tensor or (tensors[-1].dtype == "U8" and len(tensors[-1].shape) == 1)
    if (manifest == "tensor") != in_tensor or not is_text:
        raise _malformed(label, f"the manifest should be in the last tensor, `{MANIFEST_TENSOR}`, and is not")
    digits = metadata.pop("sharedtree.digests", None)
    metadata.pop("sharedtree.header")
    counts = [num_chunks(t.nbytes) for t in tensors]
    if digits is None or len(digits) != 8 * sum(counts) or not _DIGITS.fullmatch(digits):
        raise _malformed(
            label, f"it has {len(digits or '')} digits of digests, and {sum(counts)} chunks of data need 8 each"
        )
    unknown = [key for key in metadata if key.startswith("sharedtree")]
    if unknown:
        raise _malformed(
            label,
            f"its metadata has the key `{printable(unknown[0][:80])}`, which version 1 of the format does not have",
        )
    digests: list[int] = np.frombuffer(bytes.fromhex(digits), ">u4").tolist()
    first_chunk = [0, *np.cumsum(counts, dtype=np.int64).tolist()][: len(tensors)]
    return Header(tensors, metadata, None if in_tensor else manifest, digests, first_chunk, len(raw))


_RESTORE = "Restore the file from a copy, or save the model again."


def _malformed(label: str, fact: str) -> FormatError:
    return FormatError(f"`{label}` is not a valid sharedtree file: {fact}.\nNothing was loaded. {_RESTORE}")


def _check_crc(raw: bytes, label: str) -> None:
    crc = zlib.crc32(raw[_CRC_AT + 8 :], zlib.crc32(b"0" * 8, zlib.crc32(raw[:_CRC_AT])))
    if raw[_CRC_AT : _CRC_AT + 8] != b"%08x" % crc:
        raise CorruptFileError(
            f"The header of `{label}` is damaged: it does not have the digest that was saved with it.\n"
            f"Without a header there is no telling what the data is. {_RESTORE}"
        )


def _parse_json(raw: bytes, label: str) -> dict[str, Any]:
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise _malformed(label, f"its header is not UTF-8 at byte {error.start}") from None
    try:
        entries = parse_json(text)
    except ValueError as error:
        raise _malformed(label, f"in its header, {error}") from None
    if not isinstance(entries, dict) or not text.rstrip(" ").endswith("}"):
        raise _malformed(label, "its header is not a JSON object that is padded with spaces")
    return entries


def _tensors(entries: dict[str, Any], label: str) -> tuple[Tensor, ...]:
    tensors: list[Tensor] = []
    at = 0
    for name, entry in entries.items():
        tensor = _tensor(name, entry, label)
        if tensor.start != at:
            what = "overlaps the one before it, or is out of order" if tensor.start < at else "leaves a hole before it"
            raise _malformed(label, f"the tensor `{printable(name)}` begins at {tensor.start}, not at {at}: it {what}")
        at = tensor.stop
        tensors.append(tensor)
    return tuple(tensors)


def _tensor(name: str, entry: Any, label: str) -> Tensor:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _malformed(label, f"the tensor `{printable(name)}` has not just a dtype, a shape and offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
        raise _malformed(
            label, f"the tensor `{printable(name)}` has the dtype {dtype!r}, which the format does not have"
        )
    if not _are_counts(shape) or len(shape) > _MAX_RANK:
        raise _malformed(label, f"the shape of the tensor `{printable(name)}` is not a list of up to {_MAX_RANK} sizes")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise _malformed(label, f"the offsets of the tensor `{printable(name)}` are not two byte counts")
    start, stop = offsets
    size = nbytes_of(dtype, shape)
    # NumPy and JAX multiply the sizes other than 0 even where the product is 0.
    if (size or math.prod(each for each in shape if each) * ITEM_SIZES[dtype]) > _MAX_BYTES:
        raise _malformed(label, f"the shape {tuple(shape)} of the tensor `{printable(name)}` is absurd")
    if stop - start != size:
        raise _malformed(
            label, f"the tensor `{printable(name)}` spans bytes {start} to {stop}, and its shape makes {size} bytes"
        )
    return Tensor(name, dtype, tuple(shape), start, stop)


def _are_counts(values: Any) -> bool:
    # A list: this is asked twice of each tensor, and a generator takes longer than all its other checks.
    is_list = isinstance(values, list)
    return is_list and all([type(value) is int and 0 <= value <= _MAX_BYTES for value in values])  # noqa: C419


def _check_size(tensors: Sequence[Tensor], available: int, label: str) -> None:
    declared = tensors[-1].stop if tensors else 0
    if available < declared:
        raise CorruptFileError(
            f"`{label}` was cut short: its header says {declared} bytes of data, and there are {available}.\n{_RESTORE}"
        )
    if available > declared:
        raise CorruptFileError(
            f"`{label}` has {available - declared} bytes after the end of its data: something was appended to it, or "
            f"written over it.\n{_RESTORE}"
        )
