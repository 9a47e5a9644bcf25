"""The header of a container: where each tensor is, the manifest, the digests. It is read strictly.

A container is a safetensors file: eight bytes with the length N of the header, little-endian; N bytes of JSON, padded
with spaces until the data begins at a multiple of 64; the data, without holes. The header begins with the same bytes in
every container, so that the two values that are known last, its own digest and those of the data, have fixed places and
can be patched:

    {"__metadata__":{"sharedtree.header":"<8 digits>","sharedtree.digests":"<8 digits for each chunk>","sharedtree":…

The header's digest is checked before anything else in the header is used. It finds corruption but no forgery, so
everything else is checked as well: the worst that a hostile header can do is to raise `FormatError`.

Words: a file *of ours* is one that sharedtree wrote. A *foreign* file is a safetensors file of another program: it has
no manifest and no digests, and begins differently.
"""

import collections
import itertools
import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from ...core._errors import CorruptFileError, FormatError
from ...core._printing import printable, shown as short
from ._byte_sources import Source, num_chunks

# Bits of an element, for each dtype in which `save` stores arrays.
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64,
}  # fmt: skip
# Dtypes that only other programs write. The last three are packed: several elements share a byte.
_OTHER_BITS = {"C64": 64, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}

ITEM_SIZES = {dtype: bits // 8 for dtype, bits in _BITS.items()}
"""Size of an element in bytes, for each of safetensors' dtypes in which `save` stores arrays."""

BITS = _BITS | _OTHER_BITS
"""Bits of an element, for each dtype that other programs may use."""

# ---- Constants of the format: a header has at most 100 MB ----

# The data begins at a multiple of so many bytes, and so does each tensor whose size is a multiple of it.
ALIGNMENT = 64

# A header holds at most 100 MB: that is safetensors' own limit.
MAX_HEADER_BYTES = 100_000_000

# Name of the tensor that holds a manifest too long for the header.
MANIFEST_TENSOR = "sharedtree.manifest"

# A file begins with the length of its header, as so many bytes.
_LENGTH_BYTES = 8
# Then comes the header. Each of ours begins with this, and then has the eight digits of its own digest.
START = b'{"__metadata__":{"sharedtree.header":"'
# Where the header's own digest is, and where those of the data begin, counted from the beginning of the file.
_CRC_AT = _LENGTH_BYTES + len(START)
_DIGESTS_AT = _CRC_AT + 8 + len('","sharedtree.digests":"')
# The keys of the digests in the metadata of each file of ours: that of the header, and those of the data.
_KEYS_OF_DIGESTS = frozenset({"sharedtree.header", "sharedtree.digests"})
# NumPy's limit for the number of axes. A dtype that is stored as raw bytes adds an axis to the stored shape.
_MAX_RANK = 64
# So many characters of a name are printed. A hostile file may have a name of 100 MB.
_MAX_SHOWN = 200
# Sizes and offsets are 64-bit integers with a sign.
MAX_BYTES = 2**63 - 1
_JSON_SPACE = " \t\n\r"
# Ends the errors for damaged files.
RESTORE = "Restore the file from a copy, or write it again with the program that made it."


Buffer = bytes | memoryview


class TensorSource(NamedTuple):
    """An array to be written as a tensor.

    Attributes:
        name: name of the tensor.
        dtype: the stored dtype.
        shape: the stored shape.
        alignment: alignment of the array's own dtype.
        buffers: function that returns the tensor's bytes, in buffers of any size. It is called when the tensor is
            written, so that the bytes of all tensors are not in memory at once. If the file cannot be patched and
            the bytes cannot change, it is called twice.
        is_here: True if the array is in the host's memory. Then `buffers` returns either a list of views of memory
            that lives as long as the source, or another iterable of copies. If False, all buffers are copies.
        may_change: True if somebody may write into the array while it is saved. Then each buffer is a copy.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    alignment: int
    buffers: Callable[[], Iterable[Buffer]]
    is_here: bool = False
    may_change: bool = False


class Tensor(NamedTuple):
    """One entry of the header.

    Attributes:
        name: name of the tensor.
        dtype: the stored dtype, as safetensors calls it: `"F32"`.
        shape: the stored shape.
        start: offset of its first byte from the start of the data.
        stop: offset after its last byte.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return self.stop - self.start


class Header(NamedTuple):
    """A header after all checks.

    Attributes:
        tensors: the tensors in order of offset. The manifest's tensor, if there is one, is the last.
        metadata: the user's texts.
        manifest: the manifest's text; None if it is in a tensor; empty for a foreign file.
        digests: for each tensor by name, the CRC-32 of each of its chunks. Empty for a foreign file.
        data_start: offset of the data in the file.
    """

    tensors: tuple[Tensor, ...]
    metadata: dict[str, str]
    manifest: str | None
    digests: dict[str, list[int]]
    data_start: int


# ---- Writing: a header with zeros for digests, and the digests patched into it ----


def nbytes_of(dtype: str, shape: Sequence[int]) -> int:
    """Returns the size in bytes of a tensor with this stored dtype and shape."""
    return math.prod(shape) * ITEM_SIZES[dtype]


def blank_header(
    sized_sources: Sequence[tuple[TensorSource, int]], manifest: str, metadata: Mapping[str, str]
) -> bytearray:
    """Returns the beginning of a file: the length of the header, and the header with zeros in place of all digests.

    Args:
        sized_sources: the tensors in the order of the file, each with its number of bytes.
        manifest: text of the manifest. If the manifest is in a tensor of its own, the word `"tensor"`.
        metadata: the user's texts.

    Raises:
        ValueError: if two tensors have one name, if a tensor has a reserved name (`__metadata__`), if
            `metadata` has other values than texts or a key with `sharedtree` at its beginning, or if a text cannot be
            encoded.
    """
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise ValueError(
                f"`metadata` maps strings to strings, but has {key!r}: {value!r}. Convert other values to strings, or "
                "put them into the tree:\n"
                '    sharedtree.save(path, {"model": model, "config": config})'
            )
        if key.startswith("sharedtree"):
            raise ValueError(
                f"The metadata key `{printable(key)}` is taken: those that begin with `sharedtree` are. Rename it."
            )
    digests = "00000000" * sum(num_chunks(nbytes) for _, nbytes in sized_sources)
    # The order of the keys is part of the format: the digests have fixed places.
    reserved = {"sharedtree.header": "00000000", "sharedtree.digests": digests, "sharedtree": manifest}
    entries: dict[str, Any] = {"__metadata__": reserved | dict(metadata)}
    offset = 0
    for (name, dtype, shape, *_), nbytes in sized_sources:
        # `__metadata__` is in `entries` already. `save` never gives a tensor this name.
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
    # No part of `entries` can hold itself, so the search for cycles is left out.
    text = json.dumps(entries, separators=(",", ":"), check_circular=False).encode("ascii")
    # Spaces up to the next multiple of 64 bytes, where the data begins.
    text += b" " * (-(_LENGTH_BYTES + len(text)) % ALIGNMENT)
    return bytearray(len(text).to_bytes(_LENGTH_BYTES, "little") + text)


def seal(header: bytearray, digests: Sequence[int]) -> slice:
    """Writes digests into a header that has zeros in their places: those of the data, and the header's own.

    Returns:
        The range of changed bytes.
    """
    # Each digest has eight hexadecimal digits.
    stop = _DIGESTS_AT + 8 * len(digests)
    header[_DIGESTS_AT:stop] = np.array(digests, ">u4").tobytes().hex().encode()
    # The header's own digest is that of the header with zeros in its place.
    header[_CRC_AT : _CRC_AT + 8] = b"%08x" % zlib.crc32(header)
    return slice(_CRC_AT, stop)


# ---- Reading: digests, truncation, overlapping tensors and absurd shapes are checked ----


def read_header(source: Source, *, foreign: bool = False) -> Header:
    """Reads and checks a header. Allocates memory in proportion to its text; takes some microseconds for each tensor.

    The data is not read. Only its size is compared with the header.

    Args:
        source: the bytes of the file.
        foreign: True if another program wrote the file. Then its tensors may be in any order and of unknown dtypes. A
            file whose metadata has digests of ours is never foreign.

    Raises:
        FormatError: if the file is malformed, is no safetensors file, or, unless `foreign`, is not one of ours.
        CorruptFileError: if the file is longer or shorter than its header says, or the header has changed.
    """
    try:
        raw = bytes(source.read(0, _LENGTH_BYTES + _read_header_length(source, foreign)))
        _require_digest(source.label, raw)
        entries, metadata = _parse_header(raw[_LENGTH_BYTES:])
        # A file of ours that was damaged in its fixed beginning looks foreign. It must not be loaded as such, without a
        # check of its digests.
        if foreign and not _KEYS_OF_DIGESTS.isdisjoint(metadata):
            # So that the handler below gives the advice for a file of ours.
            foreign = False
            raise UnsoundError(
                "its metadata has digests of a sharedtree file, and its header does not begin as sharedtree writes it. "
                "It is damaged, or another program rewrote it"
            )
        if not foreign:
            _require_ours(source.label, raw, metadata)
        tensors = tuple(_checked_tensors(entries, foreign))
        _require_declared_size(source, len(raw), tensors[-1].stop if tensors else 0)
        return Header(tensors, metadata, "", {}, len(raw)) if foreign else _header_of_ours(tensors, metadata, len(raw))
    except UnsoundError as error:
        raise invalid_file_error(source.label, str(error), foreign=foreign) from None


def is_foreign(source: Source) -> bool:
    """Returns True if a file begins like a safetensors file of another program.

    Some programs write white space before the header. It is passed over, and for this the whole header is read.
    """
    length = int.from_bytes(source.read(0, _LENGTH_BYTES), "little")
    if length > MAX_HEADER_BYTES:
        return False
    # The first bytes of the header. The number is of no importance.
    beginning = bytes(source.read(_LENGTH_BYTES, min(length, _CRC_AT)))
    if beginning.isspace():
        beginning = bytes(source.read(_LENGTH_BYTES, length))
    begins_with_header = beginning.lstrip(_JSON_SPACE.encode()).startswith(b"{")
    return begins_with_header and source.read(_LENGTH_BYTES, len(START)) != START


def invalid_file_error(label: str, fact: str, *, foreign: bool = False) -> FormatError:
    """Returns the error for a malformed file.

    Args:
        label: name of the file.
        fact: the problem, as a clause: `"its header is not UTF-8"`.
        foreign: True if the file is read as another program's.
    """
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


def _read_header_length(source: Source, foreign: bool) -> int:
    """Reads the length of the header from the first eight bytes, and checks that the file has so many bytes.

    A stream is read no further than to the end of the header, unless there is an error.

    Raises:
        FormatError: if the file does not begin like a safetensors file.
        CorruptFileError: if it does, and ends within the header.
    """
    beginning = bytes(source.read(0, _CRC_AT))
    _require_no_zip(source.label, beginning)
    length = int.from_bytes(beginning[:_LENGTH_BYTES], "little")
    if length <= MAX_HEADER_BYTES and _LENGTH_BYTES + length <= source.size_up_to(_LENGTH_BYTES + length):
        return length
    # The file is too short. Only if it is known to be a safetensors file, that means that it was cut short.
    is_safetensors = foreign or beginning.startswith(START, _LENGTH_BYTES)
    if is_safetensors and length <= MAX_HEADER_BYTES:
        stop = _LENGTH_BYTES + length
        raise _cut_short_error(source, f"it has {source.size:,} bytes, and its header alone should end at {stop:,}")
    fact = f"begins with {beginning[:_LENGTH_BYTES]!r}, which is not the length of a header inside it"
    if len(beginning) < _LENGTH_BYTES:
        fact = f"has {len(beginning)} bytes" if beginning else "is empty"
    raise FormatError(
        f"`{source.label}` is not a sharedtree file, nor any other safetensors file: it {fact}.\n"
        "If another library wrote it, load it with that one."
    )


def _parse_header(raw: bytes) -> tuple[dict[str, Any], dict[str, str]]:
    """Parses the text of a header.

    Returns:
        The entries of the tensors by name, not checked yet, and the metadata.

    Raises:
        UnsoundError: if it is not UTF-8, not a JSON object, or the metadata does not map texts to texts.
    """
    try:
        text = raw.decode()
        entries = parse_json(text)
    except UnicodeDecodeError as error:
        raise UnsoundError(f"its header is not UTF-8 at byte {error.start}") from None
    except UnsoundError as error:
        raise UnsoundError(f"in its header, {error}") from None
    # The library `safetensors` accepts any white space around a header. A header of ours has spaces at its end only.
    # `raw` begins with the JSON text here, without the length.
    padding = " " if raw.startswith(START) else _JSON_SPACE
    if not isinstance(entries, dict) or not text.rstrip(padding).endswith("}"):
        raise UnsoundError("its header is not a JSON object that is padded with spaces")
    metadata: Any = entries.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise UnsoundError("the metadata in its header does not map text to text")
    return entries, metadata


def _require_digest(label: str, raw: bytes) -> None:
    """Raises `CorruptFileError` if a header of ours does not match its digest. A flipped bit is found here.

    Args:
        label: name of the file.
        raw: the length and the header. If it does not begin like a header of ours, nothing is checked.
    """
    if not raw.startswith(START, _LENGTH_BYTES):
        return
    # The digest was computed with eight zeros in its own place.
    crc = zlib.crc32(raw[_CRC_AT + 8 :], zlib.crc32(b"00000000", zlib.crc32(raw[:_CRC_AT])))
    if raw[_CRC_AT : _CRC_AT + 8] != b"%08x" % crc:
        raise CorruptFileError(
            f"The header of `{label}` is damaged: it does not have the digest that was saved with it.\n"
            f"Without a header there is no telling what the data is. {RESTORE}"
        )


def _require_ours(label: str, raw: bytes, metadata: Mapping[str, str]) -> None:
    """Raises an error unless a header has a manifest, and begins and is aligned like those that we write.

    Args:
        label: name of the file.
        raw: the length and the header.
        metadata: the metadata in the header, with our keys.

    Raises:
        FormatError: if it is a header of another program.
        UnsoundError: if it is like ours in some respect only.
    """
    if "sharedtree" not in metadata and raw.startswith(START, _LENGTH_BYTES):
        raise UnsoundError("its header begins as that of a sharedtree file, and has no manifest")
    if "sharedtree" not in metadata:
        raise FormatError(
            f"`{label}` is a safetensors file, but not one that sharedtree wrote: it has arrays and no model. To load "
            "the arrays, into JAX or into NumPy:\n"
            "    tensors = sharedtree.load(path, foreign=True)\n"
            "    tensors = safetensors.numpy.load_file(path)"
        )
    if not raw.startswith(START, _LENGTH_BYTES):
        raise UnsoundError("its header does not begin as sharedtree writes it; another program rewrote the file")
    if len(raw) % ALIGNMENT:
        raise UnsoundError(f"its data does not begin at a multiple of {ALIGNMENT} bytes")


def _checked_tensors(entries: dict[str, Any], foreign: bool) -> Iterator[Tensor]:
    """Checks each entry of a header, and yields the tensors in order of offset.

    Args:
        entries: the entries by name.
        foreign: True if another program wrote the header. Its entries may be in any order.

    Raises:
        UnsoundError: if an entry is malformed, or tensors overlap, are out of order, or have a hole between them.
    """
    tensors = [_checked_tensor(name, entry, foreign) for name, entry in entries.items()]
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: (tensor.start, tensor.stop)) if foreign else tensors:
        if tensor.start != end:
            is_early = tensor.start < end
            fault = "it overlaps another one, or is out of order" if is_early else "there is a hole before it"
            raise UnsoundError(f"{_tensor_text(tensor.name)} begins at {tensor.start}, not at {end}: {fault}")
        end = tensor.stop
        yield tensor


def _tensor_text(name: str) -> str:
    """Returns the words for a tensor in an error: "the tensor `name`"."""
    return f"the tensor `{printable(name[:_MAX_SHOWN])}`"


def _checked_tensor(name: str, entry: Any, foreign: bool) -> Tensor:
    """Returns the tensor of one entry of a header.

    Args:
        name: name of the tensor.
        entry: the entry, of any type.
        foreign: True if another program wrote the header. It may have further keys and unknown dtypes.

    Raises:
        UnsoundError: if anything in the entry is wrong.
    """
    keys = {"dtype", "shape", "data_offsets"}
    if not isinstance(entry, dict) or not (keys <= entry.keys() if foreign else keys == entry.keys()):
        raise UnsoundError(f"{_tensor_text(name)} has not {'' if foreign else 'just '}a dtype, a shape and offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or not (foreign or dtype in ITEM_SIZES):
        # `short` is the `repr`, cut off at 80 characters.
        raise UnsoundError(
            f"{_tensor_text(name)} has the dtype {printable(short(dtype))}, which the format does not have"
        )
    # Only our files have tensors of raw bytes, with one axis more.
    max_rank = _MAX_RANK if foreign else _MAX_RANK + 1
    if not is_list_of_counts(shape) or len(shape) > max_rank:
        raise UnsoundError(f"the shape of {_tensor_text(name)} is not a list of up to {max_rank} sizes")
    if not is_list_of_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise UnsoundError(f"the offsets of {_tensor_text(name)} are not two byte counts, the smaller first")
    # The size of a dtype that we do not know cannot be compared with the offsets.
    (start, stop), bits = offsets, BITS.get(dtype)
    if bits is not None:
        size = math.prod(shape) * bits
        # Shapes too large for any memory. A shape with a 0 makes no bytes, but NumPy and JAX multiply its other sizes,
        # and their product must not overflow: (0, 2**62, 2**62) is refused.
        if (size or math.prod([length for length in shape if length]) * bits) > 8 * MAX_BYTES:
            raise UnsoundError(f"the shape {tuple(shape)} of {_tensor_text(name)} is absurd")
        if size != 8 * (stop - start):
            size_text = f"{size:,} bits" if size % 8 else f"{size // 8} bytes"
            raise UnsoundError(f"{_tensor_text(name)} spans bytes {start} to {stop}, and its shape makes {size_text}")
    return Tensor(name, dtype, tuple(shape), start, stop)


def _require_declared_size(source: Source, data_start: int, declared_bytes: int) -> None:
    """Raises `CorruptFileError` if the file is shorter or longer than its header says.

    Args:
        source: the bytes of the file.
        data_start: where the data begins in the file.
        declared_bytes: the number of bytes of data by the header.
    """
    # A stream is read at most one byte past the declared end. So it may have more bytes than `num_present`.
    num_present = source.size_up_to(data_start + declared_bytes) - data_start
    if num_present < declared_bytes:
        fact = f"its header says {declared_bytes:,} bytes of data, and there are {num_present:,}"
        raise _cut_short_error(source, fact)
    if num_present > declared_bytes:
        excess = f"{'' if source.size_is_known else 'at least '}{num_present - declared_bytes:,} bytes"
        raise CorruptFileError(
            f"`{source.label}` has {excess} after the end of its data: something was "
            f"appended to it, or written over it.\n{RESTORE}"
        )


def _cut_short_error(source: Source, fact: str) -> CorruptFileError:
    """Returns the error for a file that ends too early."""
    return CorruptFileError(f"`{source.label}` was cut short: {fact}.\n{RESTORE}")


def _header_of_ours(tensors: tuple[Tensor, ...], metadata: dict[str, str], data_start: int) -> Header:
    """Returns the header of a file of ours, after checking its manifest and digests.

    Args:
        tensors: the tensors in order of offset.
        metadata: the metadata in the header. Our own keys are removed from it, and the user's texts stay.
        data_start: offset of the data in the file.

    Raises:
        UnsoundError: if the manifest is not in its place, there are not as many digests as chunks, or the metadata has
            another key that begins with `sharedtree`.
    """
    manifest: str | None = metadata.pop("sharedtree")
    in_tensor = bool(tensors) and tensors[-1].name == MANIFEST_TENSOR
    is_sound_tensor = not in_tensor or (tensors[-1].dtype == "U8" and len(tensors[-1].shape) == 1)
    # The header has the word `tensor` in place of a long manifest. Then, and only then, a tensor holds the manifest.
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
    # The digests of all chunks, in the order of the file: eight digits are four bytes, the first one the highest. Each
    # tensor takes as many digests as it has chunks.
    remaining = iter(np.frombuffer(bytes.fromhex(digits), ">u4").tolist())
    digests = {tensor.name: list(itertools.islice(remaining, num_chunks(tensor.nbytes))) for tensor in tensors}
    return Header(tensors, metadata, None if in_tensor else manifest, digests, data_start)


def is_list_of_counts(values: Any) -> bool:
    """Returns True for a list of integers from 0 to `MAX_BYTES`, as sizes and offsets are. Booleans are none."""
    is_list = isinstance(values, list)
    # This runs twice for each tensor, and a generator takes longer than a list.
    return is_list and all([type(value) is int and 0 <= value <= MAX_BYTES for value in values])  # noqa: C419


# ---- Parsing: JSON allows duplicate keys and more that the format does not ----


class UnsoundError(ValueError):
    """A header or a manifest breaks a rule of the format, perhaps one that safetensors or JSON do not have.

    The text is a clause: "its header is not UTF-8". Callers put it into a `FormatError` with the file's name.
    """


def malformed(fact: str) -> FormatError:
    """Returns the error for a manifest that breaks a rule of the format.

    Args:
        fact: the problem, as a clause.
    """
    return FormatError(f"The manifest of the file is malformed: {fact}. The file is damaged, or was made by hand.")


def parse_manifest_json(text: str) -> Any:
    """Parses the JSON text of a manifest.

    Raises:
        FormatError: if `parse_json` refuses the text, or it holds a number other than an integer.
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


# Function that `json` calls with the text of a number or a constant. It returns its value.
_Hook = Callable[[str], Any]


def _dict_of_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the dictionary for a JSON object. Raises `UnsoundError` if a key occurs twice."""
    result = dict(pairs)
    if len(result) != len(pairs):
        ((duplicate, _),) = collections.Counter(key for key, _ in pairs).most_common(1)
        raise UnsoundError(f"the key '{printable(duplicate[:80])}' is there twice")
    return result


def _parse_int(number: str) -> int:
    """Returns the value of an integer. Raises `UnsoundError` for `-0`."""
    if number == "-0":
        raise UnsoundError("it holds the number `-0`, and none of its numbers has a sign")
    return int(number)


def _refuse_number(number: str) -> NoReturn:
    """Raises `UnsoundError` for a number with a fraction or an exponent, or for NaN or an infinity."""
    raise UnsoundError(f"it holds the number `{number[:40]}`, and all its numbers are whole")


def _refuse_constant(constant: str) -> NoReturn:
    """Raises `UnsoundError` for `NaN`, `Infinity` or `-Infinity`, which Python's `json` would accept."""
    raise UnsoundError(f"{constant} is not JSON")


def parse_json(text: str, parse_float: _Hook = float, parse_constant: _Hook = _refuse_constant) -> Any:
    """Parses JSON strictly: no duplicate keys, no halves of surrogate pairs, no `-0`, no deep nesting.

    Cost: one pass over the text; a few more if it has escapes of surrogates.

    Args:
        text: the text.
        parse_float: called with each number with a fraction or an exponent.
        parse_constant: called with each `NaN`, `Infinity` and `-Infinity`. By default these are refused.

    Raises:
        UnsoundError: if the text is not JSON of this kind. No other error is raised.
    """
    # Python reads `-0` as 0, so the sign would go unnoticed. Other negative numbers are refused where they are used.
    parse_int = _parse_int if re.search(r"-0(?![0-9.eE])", text) else None
    hooks = {"parse_float": parse_float, "parse_int": parse_int, "parse_constant": parse_constant}
    try:
        value = json.loads(text, object_pairs_hook=_dict_of_unique_keys, **hooks)
        # A pattern cannot tell a surrogate pair from a half of one. But the value as one text can be encoded only if no
        # text in it has a half. This needs no walk over the value in Python.
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
