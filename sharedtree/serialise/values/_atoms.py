"""Atoms: values without identity that a manifest writes in place, and that depend on nothing but their own text.

`None`, booleans and strings are themselves in JSON. Every other atom is a list of texts whose first is its tag:
`["int", "-7f"]`. The classes and functions that a manifest names are written as atoms too, but what they mean is not
decided here.

Each value has one form as an atom. Loading refuses every other form, such as `["int", "07"]`, so that equal values are
equal atoms. To find out, a function that reads a text writes the value again, and compares.
"""

import base64
import binascii
import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from ...core._errors import FormatError
from ...core._printing import printable
from ..arrays._dtypes import clear_unused_bits, dtype_name, dtype_named

Atom = list[str]
"""The tag of an atom, and its texts."""

NAMES = frozenset({"class", "function"})
"""Tags of atoms that name something. The names are judged by a `Trust` before they are looked up."""

LEFT_OUT = "left_out"
"""Tag of the atom that takes the place of a value that was left out of the file. `["left_out", "1"]` is the second."""

# --- writing ----------------------------------------------------------------------------------------------------------


def encode_int(value: int) -> Atom:
    """Returns the atom of a whole number of any size: 127 → ["int", "7f"].

    The number is hexadecimal, because reading decimal digits takes quadratic time.
    """
    return ["int", format(value, "x")]


def encode_str(value: str) -> str | Atom:
    """Returns the atom of a string: the string itself, or ["str", its UTF-8 in base64] if it has surrogates."""
    # JSON cannot tell two lone surrogates from the character that they would make as a pair.
    if value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value):
        return value
    return ["str", _base64(value.encode("utf-8", "surrogatepass"))]


def encode_bytes(value: bytes | bytearray) -> Atom:
    """Returns the atom of bytes, which has them in base64."""
    return ["bytes", _base64(value)]


def encode_numpy(value: np.generic | np.dtype[Any]) -> Atom:
    """Returns the atom of a NumPy scalar or dtype: ["scalar", "int8", "7f"] or ["dtype", "int8"].

    A scalar has the name of its dtype, and its little-endian bytes in hexadecimal.

    Raises:
        TypeError: if no file can have a value of this dtype: a structured dtype, one with metadata, one of objects, or
            one of strings of variable length.
    """
    if isinstance(value, np.dtype):
        if value.metadata:
            raise TypeError("a dtype with metadata")
        return ["dtype", _dtype_text(value)]
    # The dtype float0 is structured as well. Its scalars are no numbers.
    if value.dtype.names:
        raise TypeError("a structured value")
    # Scalars of empty strings have no bytes.
    array = np.asarray(value)
    data = array.astype(_stored_dtype(array.dtype), copy=False).tobytes() if value.dtype.itemsize else b""
    return ["scalar", _dtype_text(value.dtype), _clear_unused_bits(data, value.dtype).hex()]


def _float_text(value: float) -> str:
    """Returns a float in hexadecimal, such as `0x1.8p+1`. For a NaN, returns `nan:` and its eight bytes."""
    # Only a NaN does not equal itself.
    return value.hex() if value == value else f"nan:{struct.pack('>d', value).hex()}"


ENCODERS: dict[type, Callable[[Any], Any]] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    str: encode_str,
    int: encode_int,
    float: lambda value: ["float", _float_text(value)],
    complex: lambda value: ["complex", _float_text(value.real), _float_text(value.imag)],
    bytes: encode_bytes,
    type(Ellipsis): lambda _: ["..."],
    type(NotImplemented): lambda _: ["NotImplemented"],
}
"""Class → function that returns the atom of an instance. NumPy's classes are not here: see `encode_numpy`."""

# --- reading ----------------------------------------------------------------------------------------------------------


def is_name(atom: list[Any]) -> bool:
    """Returns True if an atom names a class or a function."""
    return atom[0] in NAMES and len(atom) == 2


def decode_atom(atom: list[Any]) -> Any:
    """Returns the value of an atom that names no class or function.

    Raises:
        FormatError: if the tag is unknown, or if no save would write these texts.
    """
    tag, *texts = atom
    # The default fits no atom: no list has -1 texts.
    count, read = _READERS.get(tag, (-1, None))
    try:
        if read is not None and len(texts) == count:
            return read(*texts)
    except FormatError:
        raise
    except (ValueError, OverflowError, TypeError, binascii.Error, struct.error, UnicodeError):
        pass
    raise FormatError(
        f"`{printable(str(atom)[:80])}` is not a value of this format. The file is damaged, or was made by hand."
    )


def is_nan(atom: Any) -> bool:
    """Returns True if the value of an atom does not equal itself: a NaN, a complex number with one, or NumPy's NaT.

    Args:
        atom: any atom.
    """
    # All atoms but NumPy scalars. Of these, only the texts of a Python float or complex number can begin with "nan".
    if type(atom) is not list or atom[0] != "scalar":
        return type(atom) is list and atom[0] in ("float", "complex") and any(text[:3] == "nan" for text in atom[1:])
    # NumPy scalars. The letters are NumPy's for the kinds of dtypes: float, complex, timedelta, datetime, and void, the
    # kind of the floats of ml_dtypes.
    value = decode_atom(atom)
    return value.dtype.kind in "fcmMV" and value.dtype.itemsize > 0 and bool(value != value)


def _read_float(text: str) -> float:
    """Returns the float of a text that `_float_text` made. Raises `ValueError` for any other text."""
    value = struct.unpack(">d", bytes.fromhex(text[4:]))[0] if text.startswith("nan:") else float.fromhex(text)
    if _float_text(value) != text:
        raise ValueError
    return value


def _read_int(text: str) -> int:
    """Returns the whole number of a text that `encode_int` made. Raises `ValueError` for any other text."""
    value = int(text, 16)
    # `int` also takes spaces, underscores and prefixes, which `encode_int` never makes.
    if format(value, "x") != text:
        raise ValueError
    return value


def _base64(data: bytes | bytearray) -> str:
    """Returns bytes as a text in base64."""
    return base64.b64encode(data).decode("ascii")


def read_base64(text: str) -> bytes:
    """Returns the bytes of a text that `_base64` made. Raises `ValueError` for any other text."""
    data = base64.b64decode(text, validate=True)
    # The last character can have unused bits, so several texts may stand for the same bytes.
    if _base64(data) != text:
        raise ValueError
    return data


def _read_str(text: str) -> str:
    """Returns the string of a text in base64.

    Raises:
        ValueError: if the text is no base64 of a string, or if the string has no surrogates.
    """
    value = read_base64(text).decode("utf-8", "surrogatepass")
    # A string without surrogates is written as itself and never as an atom.
    if type(encode_str(value)) is str:
        raise ValueError
    return value


def _read_scalar(text: str, data: str) -> np.generic:
    """Returns the NumPy scalar of an atom.

    Args:
        text: name of its dtype.
        data: its little-endian bytes in hexadecimal.

    Raises:
        ValueError: if `encode_numpy` would not write `data`: if it has another length, unused bits that are set, and
            the like.
        FormatError: if there is no such dtype.
    """
    dtype = _read_dtype(text)
    raw = bytes.fromhex(data)
    # The length fits, the dtype is not structured, and `data` has lower-case digits without spaces. `fromhex` would
    # also accept others.
    is_sound = len(raw) == dtype.itemsize and not (dtype.kind == "V" and dtype.fields) and raw.hex() == data
    # Beside that, unused bits must be 0, and a boolean must be 0 or 1.
    if not is_sound or _clear_unused_bits(raw, dtype) != raw or (dtype.kind == "b" and raw not in (b"\0", b"\1")):
        raise ValueError
    # For code points beyond Unicode, NumPy raises SystemError. Decoding raises UnicodeDecodeError before that.
    if dtype.kind == "U":
        raw.decode("utf-32-le", "surrogatepass")
    # For an empty string, NumPy would read one character of the buffer below, which has none.
    if not raw:
        return dtype.type()
    return np.frombuffer(raw, _stored_dtype(dtype)).astype(dtype, copy=False)[0]


# --- dtypes of scalars: those of arrays, and fixed-width strings ------------------------------------------------------

# Names of dtypes of strings and bytes of a fixed width, such as `str_[5]`.
_FIXED_TEXT = re.compile(r"(str_|bytes_)\[(0|[1-9][0-9]{0,8})\]")


def _dtype_text(dtype: np.dtype[Any]) -> str:
    """Returns the name of a dtype in a file, such as `float32`, or `str_[5]` for strings of five characters."""
    if dtype.kind in "SU" and dtype.isnative:
        # The number of characters. A character has four bytes in a string, and one in `bytes_`.
        return f"{dtype.type.__name__}[{dtype.itemsize // np.dtype((dtype.type, 1)).itemsize}]"
    return dtype_name(dtype)


def _read_dtype(text: str) -> np.dtype[Any]:
    """Returns the dtype of a name that `_dtype_text` made. Raises `FormatError` if there is no such dtype."""
    match = _FIXED_TEXT.fullmatch(text)
    if match is None:
        return dtype_named(text)
    return np.dtype(f"{'U' if match[1] == 'str_' else 'S'}{match[2]}")


def _clear_unused_bits(raw: bytes, dtype: np.dtype[Any]) -> bytes:
    """Returns a copy of the bytes with zeros where the dtype has unused bits, so that equal scalars have one text."""
    data = np.frombuffer(bytearray(raw), np.uint8)
    clear_unused_bits(data, dtype)
    return data.tobytes()


def _stored_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns the dtype that an array has in a file: the same dtype, but little-endian."""
    # `isbuiltin` is 2 for the dtypes of ml_dtypes, whose byte order cannot be changed.
    return dtype if dtype.isbuiltin == 2 else dtype.newbyteorder("<")


_READERS: dict[str, tuple[int, Callable[..., Any]]] = {
    "int": (1, _read_int),
    "float": (1, _read_float),
    "complex": (2, lambda real, imag: complex(_read_float(real), _read_float(imag))),
    "str": (1, _read_str),
    "bytes": (1, read_base64),
    "scalar": (2, _read_scalar),
    "dtype": (1, _read_dtype),
    "...": (0, lambda: Ellipsis),
    "NotImplemented": (0, lambda: NotImplemented),
    LEFT_OUT: (1, _read_int),
}
"""Tag → number of texts after it, and function from these texts to the value."""

# --- printing ---------------------------------------------------------------------------------------------------------

# Most characters of an atom that are printed.
_MAX_TEXT = 80
# Most characters in an atom that is decoded in order to be printed.
_MAX_DECODED = 1_000


def atom_text(atom: Any, max_length: int = _MAX_TEXT) -> str:
    """Returns an atom as text for people, mostly as Python prints its value.

    A string is cut to `max_length` characters. Other atoms are cut to about 80. An atom of more than 1,000 characters
    is described by their number, such as "bytes, 40,000 characters in the file". Only the first characters of a long
    atom are looked at, because the node that holds it may be shown many times.
    """
    if type(atom) is str:
        return short(repr(atom[: max_length + 1]), max_length)
    if type(atom) is not list:
        return repr(atom)
    tag, *data = atom
    if tag in NAMES:
        return short(data[0])
    if tag == LEFT_OUT:
        return "left out"
    # Python prints long numbers in quadratic time, and refuses those of more than 4,300 digits.
    if tag == "int" and len(data[0]) >= _MAX_TEXT:
        # `short` cuts the text once more, with a mark that says so.
        return short(f"0x{data[0][:max_length]}")
    # The bytes of a NaN are shown as they are.
    if tag == "float" and data[0].startswith("nan"):
        return data[0]
    # An atom with two texts is a NumPy scalar or a complex number. The first text of a scalar is its dtype.
    if max(map(len, data), default=0) > _MAX_DECODED:
        return f"{short(data[0]) if len(data) > 1 else ''} {tag}, {len(data[-1]):,} characters in the file".lstrip()
    try:
        return short(repr(decode_atom(atom)))
    # NumPy cannot print some dates, such as those with a unit of a billion years.
    except OverflowError:
        return short(" ".join(data))


def short(text: str, max_length: int = _MAX_TEXT) -> str:
    """Returns a text, cut to `max_length` characters if it is longer. A cut text ends in `...`."""
    return text if len(text) <= max_length else f"{text[: max_length - 3]}..."
