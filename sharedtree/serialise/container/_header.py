"""The header of a container: where each tensor is, the manifest, the digests. Laid out, written and read strictly.

A container is a safetensors file: eight bytes with the length N of the header, little-endian; N bytes of JSON, padded
with spaces until the data begins at a multiple of 64; the data, without holes. The header begins with the same bytes in
every container, so that the two values that are known last, its own digest and those of the data, have fixed places and
can be patched:

    {"__metadata__":{"sharedtree.header":"<8 digits>","sharedtree.digests":"<8 digits for each chunk>","sharedtree":…

The header's digest is checked before anything else is believed. It is no secret, so everything else is checked all the
same: what a hostile header can do is raise `FormatError`.
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
from ...core._printing import printable
from ._byte_sources import Source, num_chunks

ITEM_SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
"""The stored dtypes, which are safetensors', and their sizes in bytes."""

ALIGNMENT = 64
MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
MANIFEST_TENSOR = "sharedtree.manifest"

_LENGTH_BYTES = 8
START = b'{"__metadata__":{"sharedtree.header":"'
_CRC_AT = _LENGTH_BYTES + len(START)
_DIGESTS_AT = _CRC_AT + 8 + len('","sharedtree.digests":"')
_MAX_RANK = 65  # NumPy's 64 axes, and one for raw bytes
MAX_BYTES = 2**63 - 1
RESTORE = "Restore the file from a copy, or save the model again."


Buffer = bytes | memoryview


class TensorSource(NamedTuple):
    """What is to be a tensor. `dtype` and `shape` are the stored ones; `alignment` is that of the array's own dtype.

    `buffers` makes its bytes, in buffers of any size. It is called when the tensor's turn has come, so that not all are
    in memory at once; and twice if the file cannot be patched. With `is_here`, a list of them is views of memory that
    stays as long as the source, and anything else is copies.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    alignment: int
    buffers: Callable[[], Iterable[Buffer]]
    is_here: bool = False


class Tensor(NamedTuple):
    """One entry of the header. `dtype` and `shape` are the stored ones; offsets count from the start of the data."""

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
    """A header that was read and found sound."""

    tensors: tuple[Tensor, ...]  # in order of offset; the manifest's own, if it has one, is the last
    metadata: dict[str, str]  # the user's
    manifest: str | None  # None if it is in a tensor
    digests: dict[str, list[int]]  # of the chunks of each tensor
    data_start: int


def nbytes_of(dtype: str, shape: Sequence[int]) -> int:
    """The size of a stored tensor, in bytes."""
    return math.prod(shape) * ITEM_SIZES[dtype]


def blank_header(sized: Sequence[tuple[TensorSource, int]], manifest: str, metadata: Mapping[str, str]) -> bytearray:
    """The length and the header, with zeros for digests. A `ValueError` if a name or a text cannot be there."""
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
    own = {"sharedtree.header": "00000000", "sharedtree.digests": digests, "sharedtree": manifest}
    entries: dict[str, Any] = {"__metadata__": own | dict(metadata)}
    at = 0
    for (name, dtype, shape, *_), nbytes in sized:
        if name in entries:
            raise ValueError(f"Two tensors cannot both be named `{printable(name)}`.")
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": (at, at + nbytes)}
        at += nbytes
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
    """Writes the digests of the data, and the header's own, into a blank header. Returns which bytes changed."""
    stop = _DIGESTS_AT + 8 * len(digests)
    header[_DIGESTS_AT:stop] = np.array(digests, ">u4").tobytes().hex().encode()
    header[_CRC_AT : _CRC_AT + 8] = b"%08x" % zlib.crc32(header)
    return slice(_CRC_AT, stop)


def parse_header(source: Source) -> Header:
    """Reads a header, with some microseconds for each tensor. Nothing is allocated but what its own text makes.

    `FormatError` if this is no file of ours, `CorruptFileError` if it has changed, `UnsoundError` if it is malformed.
    """
    raw, label = bytes(source.read(0, _LENGTH_BYTES + _length(source))), source.label
    ours = raw.startswith(START, _LENGTH_BYTES)
    # Its own digits stand as zeros in what the digest is of.
    crc = zlib.crc32(raw[_CRC_AT + 8 :], zlib.crc32(b"00000000", zlib.crc32(raw[:_CRC_AT])))
    if ours and raw[_CRC_AT : _CRC_AT + 8] != b"%08x" % crc:
        raise CorruptFileError(
            f"The header of `{label}` is damaged: it does not have the digest that was saved with it.\n"
            f"Without a header there is no telling what the data is. {RESTORE}"
        )
    entries = _entries(raw[_LENGTH_BYTES:])
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise UnsoundError("the metadata in its header does not map text to text")
    if "sharedtree" not in metadata:
        raise FormatError(
            f"`{label}` is a safetensors file, but not one that sharedtree wrote: it has arrays and no model. "
            "To get the arrays, as JAX's or as NumPy's:\n"
            "    tensors = sharedtree.load(path, foreign=True)\n    tensors = safetensors.numpy.load_file(path)"
        )
    if not ours:
        raise UnsoundError("its header does not begin as sharedtree writes it; another program rewrote the file")
    if len(raw) % ALIGNMENT:
        raise UnsoundError(f"its data does not begin at a multiple of {ALIGNMENT} bytes")
    tensors = tuple(_tensors(entries))
    declared, there = tensors[-1].stop if tensors else 0, source.size - len(raw)
    if there != declared:
        what = f"was cut short: its header says {declared} bytes of data, and there are {there}"
        if there > declared:
            behind = f"{there - declared} bytes after the end of its data"
            what = f"has {behind}: something was appended to it, or written over it"
        raise CorruptFileError(f"`{label}` {what}.\n{RESTORE}")
    manifest: str | None = metadata.pop("sharedtree")
    in_tensor = bool(tensors) and tensors[-1].name == MANIFEST_TENSOR
    is_text = not in_tensor or (tensors[-1].dtype == "U8" and len(tensors[-1].shape) == 1)
    if (manifest == "tensor") != in_tensor or not is_text:
        raise UnsoundError(f"the manifest should be in the last tensor, `{MANIFEST_TENSOR}`, and is not")
    digits, count = metadata.pop("sharedtree.digests", None), sum(num_chunks(tensor.nbytes) for tensor in tensors)
    if digits is None or len(digits) != 8 * count or not re.fullmatch("[0-9a-f]*", digits):
        raise UnsoundError(f"it has {len(digits or '')} digits of digests, and {count} chunks of data need 8 each")
    del metadata["sharedtree.header"]
    for key in metadata:
        if key.startswith("sharedtree"):
            shown = printable(key[:80])
            raise UnsoundError(f"its metadata has the key `{shown}`, which version 1 of the format does not have")
    left = iter(np.frombuffer(bytes.fromhex(digits), ">u4").tolist())
    digests = {tensor.name: list(itertools.islice(left, num_chunks(tensor.nbytes))) for tensor in tensors}
    return Header(tensors, metadata, None if in_tensor else manifest, digests, len(raw))


def _length(source: Source) -> int:
    first = bytes(source.read(0, _CRC_AT))
    length = int.from_bytes(first[:_LENGTH_BYTES], "little")
    if length <= MAX_HEADER_BYTES and _LENGTH_BYTES + length <= source.size:
        return length
    if first.startswith(START, _LENGTH_BYTES) and length <= MAX_HEADER_BYTES:
        raise CorruptFileError(
            f"`{source.label}` was cut short: it has {source.size} bytes, and its header alone should have {length}.\n"
            f"{RESTORE}"
        )
    what = f"begins with {first[:_LENGTH_BYTES]!r}, which is not the length of a header inside it"
    if source.size < _LENGTH_BYTES:
        what = f"has {source.size} bytes" if source.size else "is empty"
    raise FormatError(
        f"`{source.label}` is not a sharedtree file, nor any other safetensors file: it {what}.\n"
        "If another library wrote it, load it with that one."
    )


def _entries(raw: bytes) -> dict[str, Any]:
    try:
        text = raw.decode()
        entries = parse_json(text)
    except UnicodeDecodeError as error:
        raise UnsoundError(f"its header is not UTF-8 at byte {error.start}") from None
    except UnsoundError as error:
        raise UnsoundError(f"in its header, {error}") from None
    if not isinstance(entries, dict) or not text.rstrip(" ").endswith("}"):
        raise UnsoundError("its header is not a JSON object that is padded with spaces")
    return entries


def _tensors(entries: dict[str, Any]) -> Iterator[Tensor]:
    at = 0
    for name, entry in entries.items():
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            raise UnsoundError(f"the tensor `{printable(name)}` has not just a dtype, a shape and offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
            raise UnsoundError(
                f"the tensor `{printable(name)}` has the dtype {dtype!r}, which the format does not have"
            )
        if not are_counts(shape) or len(shape) > _MAX_RANK:
            raise UnsoundError(f"the shape of the tensor `{printable(name)}` is not a list of up to {_MAX_RANK} sizes")
        if not are_counts(offsets) or len(offsets) != 2:
            raise UnsoundError(f"the offsets of the tensor `{printable(name)}` are not two byte counts")
        (start, stop), size = offsets, nbytes_of(dtype, shape)
        # NumPy and JAX multiply the sizes other than 0 even where the product is 0.
        if (size or nbytes_of(dtype, [each for each in shape if each])) > MAX_BYTES:
            raise UnsoundError(f"the shape {tuple(shape)} of the tensor `{printable(name)}` is absurd")
        if stop - start != size:
            raise UnsoundError(
                f"the tensor `{printable(name)}` spans bytes {start} to {stop}, and its shape makes {size} bytes"
            )
        if start != at:
            what = "overlaps the one before it, or is out of order" if start < at else "leaves a hole before it"
            raise UnsoundError(f"the tensor `{printable(name)}` begins at {start}, not at {at}: it {what}")
        at = stop
        yield Tensor(name, dtype, tuple(shape), start, stop)


def are_counts(values: Any) -> bool:
    """Whether this is a list of sizes or of counts of bytes. Asked twice of each tensor: a generator takes longer."""
    is_list = isinstance(values, list)
    return is_list and all([type(value) is int and 0 <= value <= MAX_BYTES for value in values])  # noqa: C419


class UnsoundError(ValueError):
    """What safetensors or JSON allow and the format does not."""


def malformed(what: str) -> FormatError:
    """The error for a manifest that is not what it should be."""
    return FormatError(f"The manifest of the file is malformed: {what}. The file is damaged, or was made by hand.")


def parse_manifest_json(text: str) -> Any:
    """The value of the JSON text of a manifest; a `FormatError` if it is not JSON as the format has it."""
    try:
        return parse_json(text, _refuse_number, _refuse_number)
    except UnsoundError as error:
        raise malformed(str(error)) from None


def is_unicode(text: str) -> bool:
    """Whether a text can be written as UTF-8: it has no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_Hook = Callable[[str], Any]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        ((twice, _),) = collections.Counter(key for key, _ in pairs).most_common(1)
        raise UnsoundError(f"the key '{printable(twice[:80])}' is there twice")
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
    """JSON with no key twice, no half of a surrogate pair and no `-0`, and no deeper than Python can read.

    In one pass over the text; a few more where it has escapes of surrogates.
    """
    # Python reads `-0` as 0. All other numbers with a sign are found where they are used: no place may have one.
    parse_int = _parse_int if re.search(r"-0(?![0-9.eE])", text) else None
    hooks = {"parse_float": parse_float, "parse_int": parse_int, "parse_constant": parse_constant}
    try:
        value = json.loads(text, object_pairs_hook=_object, **hooks)
        # Escaped or bare, a pair is not told from a half. Writing it out finds halves without a walk in Python.
        has_any = re.search(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]", text)
        if has_any and not is_unicode(json.dumps(value, ensure_ascii=False)):
            raise UnsoundError("it holds half of a surrogate pair in a text")
    except RecursionError:
        raise UnsoundError("it is nested too deeply") from None
    except UnsoundError:
        raise
    except ValueError as error:  # a syntax error, or a number with more digits than Python reads
        raise UnsoundError(f"it is not JSON ({printable(str(error)[:100])})") from None
    return value
