"""Atoms: values without identity that a manifest writes in place, and that depend on nothing but their own text.

`None`, booleans and strings are themselves in JSON. Every other atom is a list of texts whose first is its tag:
`["int", "-7f"]`. `_manifest.py` has the grammar. The classes and functions that a manifest names are written as atoms
too, but what they mean is not decided here.
"""

import base64
import binascii
import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from ..._errors import FormatError
from ..._printable import printable
from ..arrays._dtypes import clear_unused, dtype_name, dtype_named

Atom = list[str]

NAMES = frozenset({"class", "function"})
"""Tags of atoms that name something, which are resolved by a `Trust`."""


def encode_int(value: int) -> Atom:
    """A whole number of any size, in hexadecimal: its text takes linear time to read."""
    return ["int", format(value, "x")]


def encode_float(value: float) -> Atom:
    """A float, exactly; a nan with its bits."""
    return ["float", _float_text(value)]


def encode_complex(value: complex) -> Atom:
    """A complex number: its two floats."""
    return ["complex", _float_text(value.real), _float_text(value.imag)]


def encode_str(value: str) -> str | Atom:
    """A text. JSON cannot tell two lone surrogates from the character that they would make."""
    if value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value):
        return value
    return ["str", _base64(value.encode("utf-8", "surrogatepass"))]


def encode_bytes(value: bytes | bytearray) -> Atom:
    """Bytes, in base64."""
    return ["bytes", _base64(value)]


def encode_scalar(value: np.generic) -> Atom:
    """A NumPy scalar: its dtype, and its bytes in little-endian order.

    Raises:
        TypeError: if its dtype has no name.
    """
    array = np.asarray(value)
    data = array.astype(_on_disk(array.dtype), copy=False).tobytes() if value.dtype.itemsize else b""
    return ["scalar", _dtype_text(value.dtype), _cleared(data, value.dtype).hex()]


def encode_dtype(value: np.dtype[Any]) -> Atom:
    """A NumPy dtype.

    Raises:
        TypeError: if it has no name: structured dtypes, and those of objects and of texts of any length.
    """
    if value.metadata:
        raise TypeError("a dtype with metadata")
    return ["dtype", _dtype_text(value)]


def encode_special(value: Any) -> Atom:
    """`Ellipsis` and `NotImplemented`."""
    return ["..."] if value is Ellipsis else ["NotImplemented"]


def decode_atom(atom: list[Any]) -> Any:
    """The value of an atom that names nothing.

    Raises:
        FormatError: if it is not an atom.
    """
    tag, *texts = atom
    reader = _READERS.get(tag)
    if reader is None or len(texts) != reader[0]:
        raise _not_an_atom(atom)
    try:
        value = reader[1](*texts)
    except FormatError:
        raise
    except (ValueError, OverflowError, TypeError, binascii.Error, struct.error, UnicodeError):
        raise _not_an_atom(atom) from None
    return value


class DistinctNans(dict[tuple[str, ...], Any]):
    """The values of atoms, by their texts. Each look-up of a nan gives an object of its own.

    A nan is equal to nothing, but Python finds one object equal to itself, also within tuples. Two keys that were saved
    would be one key.
    """

    def __getitem__(self, atom: tuple[str, ...]) -> Any:
        value = super().__getitem__(atom)
        return decode_atom(list(atom)) if is_nan(value) and atom[0] not in NAMES else value


def is_nan(value: Any) -> bool:
    """Whether a number is not equal to itself. Of other objects nothing is asked."""
    if isinstance(value, np.generic):
        return value.dtype.kind in "fcmMV" and value.dtype.itemsize > 0 and bool(value != value)
    return type(value) in (float, complex) and value != value


def is_name(atom: list[Any]) -> bool:
    """Whether an atom names a class or a function."""
    return atom[0] in NAMES and len(atom) == 2


def _not_an_atom(atom: list[Any]) -> FormatError:
    return FormatError(
        f"`{printable(str(atom)[:80])}` is not a value of this format. The file is damaged, or was made by hand."
    )


def _float_text(value: float) -> str:
    return value.hex() if value == value else f"nan:{struct.pack('>d', value).hex()}"


def _read_float(text: str) -> float:
    is_nan = text.startswith("nan:")
    value = struct.unpack(">d", bytes.fromhex(text[4:]))[0] if is_nan else float.fromhex(text)
    if _float_text(value) != text:
        raise ValueError
    return value


def _read_int(text: str) -> int:
    value = int(text, 16)
    if format(value, "x") != text:  # `int` takes spaces, underscores and prefixes
        raise ValueError
    return value


def _read_complex(real: str, imag: str) -> complex:
    return complex(_read_float(real), _read_float(imag))


def _base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


def read_base64(text: str) -> bytes:
    """The bytes of a text in base64.

    Raises:
        ValueError: if it is not just what encoding these bytes gives.
    """
    data = base64.b64decode(text, validate=True)
    if _base64(data) != text:  # bits of the last character that mean nothing
        raise ValueError
    return data


def _read_str(text: str) -> str:
    value = read_base64(text).decode("utf-8", "surrogatepass")
    if type(encode_str(value)) is str:  # it has no surrogates, and is written as it is
        raise ValueError
    return value


def _dtype_text(dtype: np.dtype[Any]) -> str:
    if dtype.kind in "SU" and dtype.isnative:
        return f"{dtype.type.__name__}[{dtype.itemsize // np.dtype((dtype.type, 1)).itemsize}]"
    return dtype_name(dtype)


def _dtype_of(text: str) -> np.dtype[Any]:
    match = _FIXED_TEXT.fullmatch(text)
    if match is None:
        return dtype_named(text)
    return np.dtype(f"{'U' if match[1] == 'str_' else 'S'}{match[2]}")


def _read_scalar(text: str, data: str) -> np.generic:
    dtype = _dtype_of(text)
    raw = bytes.fromhex(data)
    if len(raw) != dtype.itemsize or (dtype.kind == "V" and dtype.fields) or raw.hex() != data:
        raise ValueError
    if _cleared(raw, dtype) != raw:
        raise ValueError
    if dtype.kind == "b" and raw not in (b"\0", b"\1"):
        raise ValueError
    if dtype.kind == "U":
        raw.decode("utf-32-le", "surrogatepass")  # what is beyond Unicode makes NumPy raise SystemError
    if not raw:  # an empty text; NumPy gives its dtype one character
        return dtype.type()
    return np.frombuffer(raw, _on_disk(dtype)).astype(dtype, copy=False)[0]


def _cleared(raw: bytes, dtype: np.dtype[Any]) -> bytes:
    data = np.frombuffer(bytearray(raw), np.uint8)
    clear_unused(data, dtype)
    return data.tobytes()


def _on_disk(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype if dtype.isbuiltin == 2 else dtype.newbyteorder("<")  # those of ml_dtypes cannot be swapped


_FIXED_TEXT = re.compile(r"(str_|bytes_)\[(0|[1-9][0-9]{0,8})\]")

_READERS: dict[str, tuple[int, Callable[..., Any]]] = {
    "int": (1, _read_int),
    "float": (1, _read_float),
    "complex": (2, _read_complex),
    "str": (1, _read_str),
    "bytes": (1, read_base64),
    "scalar": (2, _read_scalar),
    "dtype": (1, _dtype_of),
    "...": (0, lambda: Ellipsis),
    "NotImplemented": (0, lambda: NotImplemented),
}
