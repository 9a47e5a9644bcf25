"""Atoms: values without identity that a manifest writes in place, and that depend on nothing but their own text.

`None`, booleans and strings are themselves in JSON. Every other atom is a list of texts whose first is its tag:
`["int", "-7f"]`. The classes and functions that a manifest names are written as atoms too, but what they mean is not
decided here.
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
from ..arrays._dtypes import clear_unused, dtype_name, dtype_named

Atom = list[str]

NAMES = frozenset({"class", "function"})
"""Tags of atoms that name something, which are resolved by a `Trust`."""

LEFT_OUT = "left_out"
"""The tag of what stands in the place of a value that was left out, of which a template has the like: `["left_out",
"1"]` for the second one."""

# --- writing ----------------------------------------------------------------------------------------------------------


def encode_int(value: int) -> Atom:
    """A whole number of any size, in hexadecimal: its text takes linear time to read."""
    return ["int", format(value, "x")]


def encode_str(value: str) -> str | Atom:
    """A text. JSON cannot tell two lone surrogates from the character that they would make."""
    if value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value):
        return value
    return ["str", _base64(value.encode("utf-8", "surrogatepass"))]


def encode_bytes(value: bytes | bytearray) -> Atom:
    """Bytes, in base64."""
    return ["bytes", _base64(value)]


def encode_numpy(value: np.generic | np.dtype[Any]) -> Atom:
    """A NumPy scalar: its dtype, and its bytes in little-endian order. Or a dtype.

    Raises:
        TypeError: if the dtype has no name: structured dtypes, those with metadata, of objects, of texts of any length.
    """
    if isinstance(value, np.dtype):
        if value.metadata:
            raise TypeError("a dtype with metadata")
        return ["dtype", _dtype_text(value)]
    if value.dtype.names:  # float0 among them, whose scalars are no numbers
        raise TypeError("a structured value")
    array = np.asarray(value)
    data = array.astype(_on_disk(array.dtype), copy=False).tobytes() if value.dtype.itemsize else b""
    return ["scalar", _dtype_text(value.dtype), _cleared(data, value.dtype).hex()]


def _float_text(value: float) -> str:
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
"""How the instances of each class are written, but for NumPy's."""

# --- reading ----------------------------------------------------------------------------------------------------------


def is_name(atom: list[Any]) -> bool:
    """Whether an atom names a class or a function."""
    return atom[0] in NAMES and len(atom) == 2


def decode_atom(atom: list[Any]) -> Any:
    """The value of an atom that names nothing; raises `FormatError` if it is no atom."""
    tag, *texts = atom
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
    """Whether an atom is a number that is not equal to itself."""
    if type(atom) is not list or atom[0] != "scalar":
        return type(atom) is list and atom[0] in ("float", "complex") and any(text[:3] == "nan" for text in atom[1:])
    value = decode_atom(atom)
    return value.dtype.kind in "fcmMV" and value.dtype.itemsize > 0 and bool(value != value)


def _read_float(text: str) -> float:
    value = struct.unpack(">d", bytes.fromhex(text[4:]))[0] if text.startswith("nan:") else float.fromhex(text)
    if _float_text(value) != text:
        raise ValueError
    return value


def _read_int(text: str) -> int:
    value = int(text, 16)
    if format(value, "x") != text:  # `int` takes spaces, underscores and prefixes
        raise ValueError
    return value


def _base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


def read_base64(text: str) -> bytes:
    """The bytes of a text in base64; raises `ValueError` if it is not just what encoding these bytes gives."""
    data = base64.b64decode(text, validate=True)
    if _base64(data) != text:  # bits of the last character that mean nothing
        raise ValueError
    return data


def _read_str(text: str) -> str:
    value = read_base64(text).decode("utf-8", "surrogatepass")
    if type(encode_str(value)) is str:  # it has no surrogates, and is written as it is
        raise ValueError
    return value


def _read_scalar(text: str, data: str) -> np.generic:
    dtype = _dtype_of(text)
    raw = bytes.fromhex(data)
    is_sound = len(raw) == dtype.itemsize and not (dtype.kind == "V" and dtype.fields) and raw.hex() == data
    if not is_sound or _cleared(raw, dtype) != raw or (dtype.kind == "b" and raw not in (b"\0", b"\1")):
        raise ValueError
    if dtype.kind == "U":
        raw.decode("utf-32-le", "surrogatepass")  # what is beyond Unicode makes NumPy raise SystemError
    if not raw:  # an empty text; NumPy gives its dtype one character
        return dtype.type()
    return np.frombuffer(raw, _on_disk(dtype)).astype(dtype, copy=False)[0]


# --- dtypes of values, which may be of texts --------------------------------------------------------------------------

_FIXED_TEXT = re.compile(r"(str_|bytes_)\[(0|[1-9][0-9]{0,8})\]")


def _dtype_text(dtype: np.dtype[Any]) -> str:
    if dtype.kind in "SU" and dtype.isnative:
        return f"{dtype.type.__name__}[{dtype.itemsize // np.dtype((dtype.type, 1)).itemsize}]"
    return dtype_name(dtype)


def _dtype_of(text: str) -> np.dtype[Any]:
    match = _FIXED_TEXT.fullmatch(text)
    if match is None:
        return dtype_named(text)
    return np.dtype(f"{'U' if match[1] == 'str_' else 'S'}{match[2]}")


def _cleared(raw: bytes, dtype: np.dtype[Any]) -> bytes:
    data = np.frombuffer(bytearray(raw), np.uint8)
    clear_unused(data, dtype)
    return data.tobytes()


def _on_disk(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype if dtype.isbuiltin == 2 else dtype.newbyteorder("<")  # those of ml_dtypes cannot be swapped


_READERS: dict[str, tuple[int, Callable[..., Any]]] = {
    "int": (1, _read_int),
    "float": (1, _read_float),
    "complex": (2, lambda real, imag: complex(_read_float(real), _read_float(imag))),
    "str": (1, _read_str),
    "bytes": (1, read_base64),
    "scalar": (2, _read_scalar),
    "dtype": (1, _dtype_of),
    "...": (0, lambda: Ellipsis),
    "NotImplemented": (0, lambda: NotImplemented),
    LEFT_OUT: (1, _read_int),
}

# --- printing ---------------------------------------------------------------------------------------------------------

_MAX_TEXT = 80
_MAX_DECODED = 1_000


def atom_text(atom: Any, most: int = _MAX_TEXT) -> str:
    """An atom as Python would print it, or the beginning of that.

    Cost: that of its first characters, for the node that holds it may be shown many times.
    """
    if type(atom) is str:
        return short(repr(atom[: most + 1]), most)
    if type(atom) is not list:
        return repr(atom)
    tag, *data = atom
    if tag in NAMES:
        return short(data[0])
    if tag == LEFT_OUT:
        return "left out"
    if tag == "int" and len(data[0]) >= _MAX_TEXT:  # Python prints long ones only after a warning, and slowly
        return short(f"0x{data[0][:most]}")
    if tag == "float" and data[0].startswith("nan"):
        return data[0]
    if max(map(len, data), default=0) > _MAX_DECODED:
        return f"{short(data[0]) if len(data) > 1 else ''} {tag}, {len(data[-1]):,} characters in the file".lstrip()
    try:
        return short(repr(decode_atom(atom)))
    except OverflowError:  # a date that NumPy has and cannot print: its unit is a billion years, say
        return short(" ".join(data))


def short(text: str, most: int = _MAX_TEXT) -> str:
    """The beginning of a text."""
    return text if len(text) <= most else f"{text[: most - 3]}..."
