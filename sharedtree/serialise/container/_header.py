"""The header of a container: where each tensor is, the manifest, the digests. It is read strictly.

A container is a safetensors file: eight bytes with the length N of the header, little-endian; N bytes of JSON, padded
with spaces until the data begins at a multiple of 64; the data, without holes. The header begins with the same bytes in
every container, so that the two values that are known last, its own digest and those of the data, have fixed places and
can be patched:

    {"__metadata__":{"sharedtree.header":"<8 digits>","sharedtree.digests":"<8 digits for each chunk>","sharedtree":…

The header's digest is checked before anything else is believed. It finds corruption and no forgery, so everything else
is checked as well: the worst a hostile header can do is to raise `FormatError`.
"""

import collections
import itertools
import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...core._errors import CorruptFileError, FormatError
from ...core._printing import printable, shown as short
from ._byte_sources import Source, num_chunks

_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64,
}  # fmt: skip
# Dtypes that only other programs write. The last three are packed: an element has no bytes of its own.
_OTHER_BITS = {"C64": 64, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}

ITEM_SIZES = {dtype: bits // 8 for dtype, bits in _BITS.items()}
"""The dtypes of safetensors' in which `save` stores arrays, and their sizes in bytes."""

BITS = _BITS | _OTHER_BITS
"""Bits of an element, for each dtype that other programs may use."""

# ---- Constants of the format: a header holds at most 100 MB ----

ALIGNMENT = 64

# A header holds at most 100 MB: that is safetensors' own limit.
MAX_HEADER_BYTES = 100_000_000

MANIFEST_TENSOR = "sharedtree.manifest"

_LENGTH_BYTES = 8
START = b'{"__metadata__":{"sharedtree.header":"'
_CRC_AT = _LENGTH_BYTES + len(START)
_DIGESTS_AT = _CRC_AT + 8 + len('","sharedtree.digests":"')
# NumPy's limit. Tensors of raw bytes have one axis more.
_MAX_RANK = 64
# How much of a name is printed. A file may have names as long as itself.
_MAX_SHOWN = 200
MAX_BYTES = 2**63 - 1
_JSON_SPACE = " \t\n\r"
RESTORE = "Restore the file from a copy, or write it again with the program that made it."


Buffer = bytes | memoryview


class TensorSource(NamedTuple):
    """An array to be written as a tensor.

    Attributes:
        name: name of the tensor.
        dtype: the stored dtype.
        shape: the stored shape.
        alignment: alignment of the array's own dtype.
        buffers: makes the bytes, in buffers of any size. It is called when the tensor is written, so that not all are
            in memory at once. If the file cannot be patched and the bytes cannot change, it is called twice.
        is_here: True if the array is in the host's memory. Then a list of buffers is views of memory that lives as long
            as the source; anything else is copies.
        may_change: True if somebody may write into the array meanwhile. Then each buffer is a copy.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    alignment: int
    buffers: Callable[[], Iterable[Buffer]]
    is_here: bool = False
    may_change: bool = False


class Tensor(NamedTuple):
    """One entry of the header: stored dtype and shape, and offsets from the start of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        return self.stop - self.start


class Header(NamedTuple):
    """A header after all checks.

    Attributes:
        tensors: in order of offset. The manifest's tensor, if there is one, is the last.
        metadata: the user's texts.
        manifest: the manifest's text; None if it is in a tensor; empty in a foreign file.
        digests: for each tensor, the CRC-32 of its chunks. A foreign file has none.
        data_start: offset of the data in the file.
    """

    tensors: tuple[Tensor, ...]
    metadata: dict[str, str]
    manifest: str | None
    digests: dict[str, list[int]]
    data_start: int


# ---- Writing: a header with zeros for digests, and the digests patched into it ----


def nbytes_of(dtype: str, shape: Sequence[int]) -> int:
    """Size of a stored tensor, in bytes."""
    return math.prod(shape) * ITEM_SIZES[dtype]


def blank_header(sized: Sequence[tuple[TensorSource, int]], manifest: str, metadata: Mapping[str, str]) -> bytearray:
    """Returns the length and the header as bytes, with zeros for digests.

    Args:
        sized: the tensors in the order of the file, each with its number of bytes.
        manifest: text of the manifest.
        metadata: the user's texts.

    Raises:
        ValueError: if a name or a text cannot be in a header.
    """
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise ValueError(
                f"`metadata` maps texts to texts, but has {key!r}: {value!r}. Write other values as texts, or put them "
                'into the tree:\n    sharedtree.save(path, {"model": model, "config": config})'
            )
        if key.startswith("sharedtree"):
            raise ValueError(
                f"The metadata key `{printable(key)}` is taken: those that begin with `sharedtree` are. Rename it."
            )
    digests = "00000000" * sum(num_chunks(nbytes) for _, nbytes in sized)
    # The order of the keys is part of the format: the digests have fixed places.
    reserved = {"sharedtree.header": "00000000", "sharedtree.digests": digests, "sharedtree": manifest}
    entries: dict[str, Any] = {"__metadata__": reserved | dict(metadata)}
    offset = 0
    for (name, dtype, shape, *_), nbytes in sized:
        if name in entries:
            raise ValueError(f"Two tensors cannot both be named `{printable(name)}`.")
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": (offset, offset + nbytes)}
        offset += nbytes
    for text in itertools.chain(entries, metadata, metadata.values()):
        if not is_unicode(text):
            raise ValueError(
                f"The text {text!r} holds half of a surrogate pair, which no safetensors file can hold. Encode it "
                "first:\n    text.encode('utf-8', 'backslashreplace').decode()"
            )
    text = json.dumps(entries, separators=(",", ":"), check_circular=False).encode("ascii")
    text += b" " * (-(_LENGTH_BYTES + len(text)) % ALIGNMENT)
    return bytearray(len(text).to_bytes(_LENGTH_BYTES, "little") + text)


def seal(header: bytearray, digests: Sequence[int]) -> slice:
    """Writes the digests of the data and the header's own into a blank header. Returns the bytes that changed."""
    stop = _DIGESTS_AT + 8 * len(digests)
    header[_DIGESTS_AT:stop] = np.array(digests, ">u4").tobytes().hex().encode()
    header[_CRC_AT : _CRC_AT + 8] = b"%08x" % zlib.crc32(header)
    return slice(_CRC_AT, stop)


# ---- Checked: digests, truncation, overlapping tensors, absurd shapes. No allocation beyond the file's size ----


def read_header(source: Source, *, foreign: bool = False) -> Header:
    """Reads and checks a header. Allocates nothing beyond its text; takes some microseconds for each tensor.

    Args:
        source: the bytes of the file.
        foreign: True if another program wrote it. Then it has neither a manifest nor digests, and may have tensors in
            any order and of unknown dtypes.

    Raises:
        FormatError: if this is no file of ours, or malformed.
        CorruptFileError: if it was cut short or has changed.
    """
    try:
        raw = bytes(source.read(0, _LENGTH_BYTES + _length(source, foreign)))
        _require_digest(source.label, raw)
        entries, metadata = _entries(raw[_LENGTH_BYTES:])
        if not foreign:
            _require_ours(source.label, raw, metadata)
        tensors = tuple(_tensors(entries, foreign))
        _require_whole(source, len(raw), tensors[-1].stop if tensors else 0)
        return Header(tensors, metadata, "", {}, len(raw)) if foreign else _header_of_ours(tensors, metadata, len(raw))
    except UnsoundError as error:
        raise invalid_file_error(source.label, str(error), foreign=foreign) from None


def is_foreign(source: Source) -> bool:
    """Returns True if a file begins as a safetensors file of another program.

    Some programs have white space before the header. Cost: reads it.
    """
    length = int.from_bytes(source.read(0, _LENGTH_BYTES), "little")
    if length > MAX_HEADER_BYTES:
        return False
    beginning = bytes(source.read(_LENGTH_BYTES, min(length, _CRC_AT)))
    if beginning.isspace():
        beginning = bytes(source.read(_LENGTH_BYTES, length))
    begins_with_header = beginning.lstrip(_JSON_SPACE.encode()).startswith(b"{")
    return begins_with_header and source.read(_LENGTH_BYTES, len(START)) != START


def invalid_file_error(label: str, fact: str, *, foreign: bool = False) -> FormatError:
    """Returns the error for a malformed file."""
    kind = "safetensors" if foreign else "sharedtree"
    return FormatError(f"`{label}` is not a valid {kind} file: {fact}.\nNothing was loaded. {RESTORE}")


def _require_no_zip(label: str, beginning: bytes) -> None:
    """Raises `FormatError` if a file begins as a zip archive, as NumPy, PyTorch and Keras write."""
    if beginning.startswith((b"PK\3\4", b"PK\5\6")):  # with members, and without any
        raise FormatError(
            f"`{label}` is not a sharedtree file: it is a zip archive, as `numpy.savez`, `torch.save` and Keras "
            "write. Load it with the library that wrote it. To see what is in it:\n"
            "    print(zipfile.ZipFile(path).namelist())"
        )


def _length(source: Source, foreign: bool) -> int:
    """Reads the length of the header, and checks that the file has so many bytes: truncation is found here first.

    Nothing is read beyond that, since a pipe may never end.
    """
    beginning = bytes(source.read(0, _CRC_AT))
    _require_no_zip(source.label, beginning)
    length = int.from_bytes(beginning[:_LENGTH_BYTES], "little")
    if length <= MAX_HEADER_BYTES and _LENGTH_BYTES + length <= source.size_up_to(_LENGTH_BYTES + length):
        return length
    if (foreign or beginning.startswith(START, _LENGTH_BYTES)) and length <= MAX_HEADER_BYTES:
        stop = _LENGTH_BYTES + length
        raise _cut_short(source, f"it has {source.size:,} bytes, and its header alone should end at {stop:,}")
    fact = f"begins with {beginning[:_LENGTH_BYTES]!r}, which is not the length of a header inside it"
    if len(beginning) < _LENGTH_BYTES:
        fact = f"has {len(beginning)} bytes" if beginning else "is empty"
    raise FormatError(
        f"`{source.label}` is not a sharedtree file, nor any other safetensors file: it {fact}.\n"
        "If another library wrote it, load it with that one."
    )


def _entries(raw: bytes) -> tuple[dict[str, Any], dict[str, str]]:
    """Parses the text of a header. Returns its entries for the tensors, by name and unchecked, and its metadata."""
    try:
        text = raw.decode()
        entries = parse_json(text)
    except UnicodeDecodeError as error:
        raise UnsoundError(f"its header is not UTF-8 at byte {error.start}") from None
    except UnsoundError as error:
        raise UnsoundError(f"in its header, {error}") from None
    # The library `safetensors` takes any white space around a header. Ours have spaces, and those at the end.
    padding = " " if raw.startswith(START) else _JSON_SPACE
    if not isinstance(entries, dict) or not text.rstrip(padding).endswith("}"):
        raise UnsoundError("its header is not a JSON object that is padded with spaces")
    metadata: Any = entries.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise UnsoundError("the metadata in its header does not map text to text")
    return entries, metadata


def _require_digest(label: str, raw: bytes) -> None:
    """Raises `CorruptFileError` if a header of ours does not have its digest. A flipped bit is found here."""
    if not raw.startswith(START, _LENGTH_BYTES):
        return
    # The digest is that of the header with zeros in place of the digest.
    crc = zlib.crc32(raw[_CRC_AT + 8 :], zlib.crc32(b"00000000", zlib.crc32(raw[:_CRC_AT])))
    if raw[_CRC_AT : _CRC_AT + 8] != b"%08x" % crc:
        raise CorruptFileError(
            f"The header of `{label}` is damaged: it does not have the digest that was saved with it.\n"
            f"Without a header there is no telling what the data is. {RESTORE}"
        )


def _require_ours(label: str, raw: bytes, metadata: Mapping[str, str]) -> None:
    """Raises `UnsoundError` or `FormatError` unless a header has a manifest, and begins and is aligned as ours."""
    if "sharedtree" not in metadata and raw.startswith(START, _LENGTH_BYTES):
        raise UnsoundError("its header begins as that of a sharedtree file, and has no manifest")
    if "sharedtree" not in metadata:
        raise FormatError(
            f"`{label}` is a safetensors file, but not one that sharedtree wrote: it has arrays and no model. "
            "To get the arrays, as JAX's or as NumPy's:\n"
            "    tensors = sharedtree.load(path, foreign=True)\n    tensors = safetensors.numpy.load_file(path)"
        )
    if not raw.startswith(START, _LENGTH_BYTES):
        raise UnsoundError("its header does not begin as sharedtree writes it; another program rewrote the file")
    if len(raw) % ALIGNMENT:
        raise UnsoundError(f"its data does not begin at a multiple of {ALIGNMENT} bytes")


def _tensors(entries: dict[str, Any], foreign: bool) -> Iterator[Tensor]:
    """Checks each entry and iterates over the tensors in order of offset.

    Raises:
        UnsoundError: if tensors overlap, are out of order, or have a hole between them.
    """
    tensors = [_tensor(name, entry, foreign) for name, entry in entries.items()]
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: (tensor.start, tensor.stop)) if foreign else tensors:
        if tensor.start != end:
            is_early = tensor.start < end
            fault = "it overlaps another one, or is out of order" if is_early else "there is a hole before it"
            raise UnsoundError(f"{_named(tensor.name)} begins at {tensor.start}, not at {end}: {fault}")
        end = tensor.stop
        yield tensor


def _named(name: str) -> str:
    return f"the tensor `{printable(name[:_MAX_SHOWN])}`"


def _tensor(name: str, entry: Any, foreign: bool) -> Tensor:
    """Returns the tensor of one entry of a header. Raises `UnsoundError` if anything in it is wrong."""
    keys = {"dtype", "shape", "data_offsets"}
    if not isinstance(entry, dict) or not (keys <= entry.keys() if foreign else keys == entry.keys()):
        raise UnsoundError(f"{_named(name)} has not {'' if foreign else 'just '}a dtype, a shape and offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or not (foreign or dtype in ITEM_SIZES):
        raise UnsoundError(f"{_named(name)} has the dtype {printable(short(dtype))}, which the format does not have")
    max_rank = _MAX_RANK if foreign else _MAX_RANK + 1
    if not are_counts(shape) or len(shape) > max_rank:
        raise UnsoundError(f"the shape of {_named(name)} is not a list of up to {max_rank} sizes")
    if not are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise UnsoundError(f"the offsets of {_named(name)} are not two byte counts, the smaller first")
    (start, stop), bits = offsets, BITS.get(dtype)
    if bits is not None:
        size = math.prod(shape) * bits
        # Absurd shapes. NumPy and JAX multiply the sizes other than 0 even where the product is 0.
        if (size or math.prod([length for length in shape if length]) * bits) > 8 * MAX_BYTES:
            raise UnsoundError(f"the shape {tuple(shape)} of {_named(name)} is absurd")
        if size != 8 * (stop - start):
            size_text = f"{size:,} bits" if size % 8 else f"{size // 8} bytes"
            raise UnsoundError(f"{_named(name)} spans bytes {start} to {stop}, and its shape makes {size_text}")
    return Tensor(name, dtype, tuple(shape), start, stop)


def _require_whole(source: Source, data_start: int, declared: int) -> None:
    """Raises `CorruptFileError` if the file is shorter or longer than its header says."""
    num_present = source.size_up_to(data_start + declared) - data_start
    if num_present < declared:
        raise _cut_short(source, f"its header says {declared:,} bytes of data, and there are {num_present:,}")
    if num_present > declared:
        least = "" if source.size_is_known else "at least "
        raise CorruptFileError(
            f"`{source.label}` has {least}{num_present - declared:,} bytes after the end of its data: something was "
            f"appended to it, or written over it.\n{RESTORE}"
        )


def _cut_short(source: Source, fact: str) -> CorruptFileError:
    return CorruptFileError(f"`{source.label}` was cut short: {fact}.\n{RESTORE}")


def _header_of_ours(tensors: tuple[Tensor, ...], metadata: dict[str, str], data_start: int) -> Header:
    """Returns the header of a file of ours: takes manifest and digests out of the metadata, and checks them.

    Raises:
        UnsoundError: if the manifest is not in its place, there are not as many digests as chunks, or the metadata has
            another key that begins with `sharedtree`.
    """
    manifest: str | None = metadata.pop("sharedtree")
    in_tensor = bool(tensors) and tensors[-1].name == MANIFEST_TENSOR
    is_sound_tensor = not in_tensor or (tensors[-1].dtype == "U8" and len(tensors[-1].shape) == 1)
    # The header has the word `tensor` in place of a long manifest. Then, and only then, a tensor has the manifest.
    if (manifest == "tensor") != in_tensor or not is_sound_tensor:
        raise UnsoundError(f"the manifest should be in the last tensor, `{MANIFEST_TENSOR}`, and is not")
    digits = metadata.pop("sharedtree.digests", None)
    count = sum(num_chunks(tensor.nbytes) for tensor in tensors)
    if digits is None or len(digits) != 8 * count or not re.fullmatch("[0-9a-f]*", digits):
        raise UnsoundError(f"it has {len(digits or '')} digits of digests, and {count} chunks of data need 8 each")
    # The header's own digest was checked before, by `_require_digest`.
    del metadata["sharedtree.header"]
    for key in metadata:
        if key.startswith("sharedtree"):
            shown = printable(key[:80])
            raise UnsoundError(f"its metadata has the key `{shown}`, which version 1 of the format does not have")
    # The digests of all chunks, in the order of the file. Each tensor takes as many as it has chunks.
    remaining = iter(np.frombuffer(bytes.fromhex(digits), ">u4").tolist())
    digests = {tensor.name: list(itertools.islice(remaining, num_chunks(tensor.nbytes))) for tensor in tensors}
    return Header(tensors, metadata, None if in_tensor else manifest, digests, data_start)


def are_counts(values: Any) -> bool:
    """Returns True for a list of sizes or of byte counts."""
    is_list = isinstance(values, list)
    # This runs twice for each tensor, and a generator takes longer than a list.
    return is_list and all([type(value) is int and 0 <= value <= MAX_BYTES for value in values])  # noqa: C419


# ---- Checked: duplicate keys, and whatever else JSON allows and the format does not ----


class UnsoundError(ValueError):
    """A header or a manifest has something that safetensors or JSON allow and the format does not."""


def malformed(fact: str) -> FormatError:
    """Returns the error for a manifest that is not as the format has it."""
    return FormatError(f"The manifest of the file is malformed: {fact}. The file is damaged, or was made by hand.")


def parse_manifest_json(text: str) -> Any:
    """Parses the JSON text of a manifest.

    Raises:
        FormatError: if it is not JSON as the format has it.
    """
    try:
        return parse_json(text, _refuse_number, _refuse_number)
    except UnsoundError as error:
        raise malformed(str(error)) from None


def is_unicode(text: str) -> bool:
    """Returns True if a text can be written as UTF-8: it has no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_Hook = Callable[[str], Any]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes the dictionary of a JSON object. Raises `UnsoundError` for duplicate keys."""
    result = dict(pairs)
    if len(result) != len(pairs):
        ((duplicate, _),) = collections.Counter(key for key, _ in pairs).most_common(1)
        raise UnsoundError(f"the key '{printable(duplicate[:80])}' is there twice")
    return result


def _parse_int(number: str) -> int:
    if number == "-0":
        raise UnsoundError("it holds the number `-0`, and none of its numbers has a sign")
    return int(number)


def _refuse_number(number: str) -> Any:
    raise UnsoundError(f"it holds the number `{number[:40]}`, and all its numbers are whole")


def _refuse_constant(constant: str) -> Any:
    raise UnsoundError(f"{constant} is not JSON")


def parse_json(text: str, parse_float: _Hook = float, parse_constant: _Hook = _refuse_constant) -> Any:
    """Parses JSON strictly: no duplicate keys, no halves of surrogate pairs, no `-0`, no deep nesting.

    Cost: one pass over the text; a few more if it has escapes of surrogates.

    Raises:
        UnsoundError: if it is anything else. It never raises another error.
    """
    # Python reads `-0` as 0, so the sign would go unnoticed. Other numbers with a sign are refused where they are used.
    parse_int = _parse_int if re.search(r"-0(?![0-9.eE])", text) else None
    hooks = {"parse_float": parse_float, "parse_int": parse_int, "parse_constant": parse_constant}
    try:
        value = json.loads(text, object_pairs_hook=_object, **hooks)
        # A pattern cannot tell a surrogate pair from a half of one. Writing the value out finds halves, without a walk
        # in Python.
        has_surrogates = re.search(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]", text)
        if has_surrogates and not is_unicode(json.dumps(value, ensure_ascii=False)):
            raise UnsoundError("it holds half of a surrogate pair in a text")
    except RecursionError:
        raise UnsoundError("it is nested too deeply") from None
    except UnsoundError:
        raise
    # A syntax error, or a number with more digits than Python reads.
    except ValueError as error:
        raise UnsoundError(f"it is not JSON ({printable(str(error)[:100])})") from None
    return value
