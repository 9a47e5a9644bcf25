"""What nodes, atoms and arrays of a manifest are, in a few words. No name is looked up."""

import math
from collections.abc import Sequence
from typing import Any

from ..arrays._dtypes import dtype_named
from ._atoms import decode_atom
from ._manifest import ArrayEntry, Manifest

_MAX_TEXT = 80
_MAX_INLINE = 16
_MAX_DECODED = 1_000
_MAX_WIDTH = 100  # of a column: one long name would make every line as long

_BRACKETS = {
    "tuple": ("(", ")"),
    "frozenset": ("frozenset({", "})"),
    "slice": ("slice(", ")"),
    "range": ("range(", ")"),
}


def node_text(manifest: Manifest, node: list[Any]) -> str:
    """What a node is, in a few words."""
    kind = node[0]
    if kind == "array":
        return array_text(manifest.arrays[node[1]])
    if kind in ("object", "wrapper", "registered"):
        return manifest.types[node[1]].name.rpartition(":")[2]
    inline = inline_text(manifest, node)
    if inline is not None:
        return inline
    if kind == "struct":
        return f"ShapeDtypeStruct{node[1]}"
    if kind in ("method", "bound"):
        return short(f"method {node[2]}")
    if kind == "device":
        return f"device {short(node[1])}"
    if kind in ("list", "set") and not node[1]:
        return f"empty {kind}"
    if kind in ("dict", "OrderedDict") and not node[1]:
        return f"empty {kind}"
    return kind


def inline_text(manifest: Manifest, node: list[Any]) -> str | None:
    """A value that fits on a line and holds nothing that could be tied; None of any other node."""
    kind = node[0]
    if kind == "enum" and type(node[2]) is not int:
        name = manifest.types[node[1]].name.rpartition(":")[2]
        return short(f"{name}.{node[2]}" if type(node[2]) is str else f"{name}({atom_text(node[2])})")
    if kind == "path" and type(node[2]) is not int:
        return short(f"{short(node[1])}({atom_text(node[2])})")
    if kind == "key_dtype":
        return f"dtype of PRNG keys, {short(node[1])}"
    if kind == "unconstrained":
        return "UNCONSTRAINED"
    if kind not in _BRACKETS:
        return None
    children = node[1] if kind in ("tuple", "frozenset") else node[1:]
    if len(children) > _MAX_INLINE or any(type(child) is int for child in children):
        return None
    opening, closing = _BRACKETS[kind]
    if kind == "frozenset" and not children:
        opening, closing = "frozenset(", ")"
    comma = "," if kind == "tuple" and len(children) == 1 else ""
    text = opening + ", ".join(atom_text(child) for child in children) + comma + closing
    return text if len(text) <= _MAX_TEXT else None


def array_text(entry: ArrayEntry) -> str:
    """Dtype and shape of an array, and what else there is to say of it."""
    shape = f"{entry.dtype}{list(entry.shape)}"
    if entry.key is not None:
        return f"PRNG key, {short(entry.key)}, {shape}"
    return f"{shape}{' weak' if entry.weak else ''}{' NumPy' if entry.kind == 'numpy' else ''}"


def array_nbytes(entry: ArrayEntry) -> int:
    """The size of an array in the file."""
    return math.prod(entry.shape) * dtype_named(entry.dtype).itemsize


def atom_text(atom: Any, most: int = _MAX_TEXT) -> str:
    """An atom as Python would print it, or the beginning of that.

    Cost: that of its first characters, for the node that holds it may be shown many times.
    """
    if type(atom) is str:
        return short(repr(atom[: most + 1]), most)
    if type(atom) is not list:
        return repr(atom)
    tag, *data = atom
    if tag in ("class", "function"):
        return short(data[0])
    if tag == "int" and len(data[0]) >= _MAX_TEXT:  # Python prints long ones only after a warning, and slowly
        return short(f"0x{data[0][:most]}")
    if tag == "float" and data[0].startswith("nan"):
        return data[0]
    if max(map(len, data), default=0) > _MAX_DECODED:
        return f"{short(data[0]) if len(data) > 1 else ''} {tag}, {len(data[-1]):,} characters in the file".lstrip()
    return short(repr(decode_atom(atom)))


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines in which each column begins in one place, but for what stands behind a text that is very long."""
    widths = [min(max(map(len, column)), _MAX_WIDTH) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def short(text: str, most: int = _MAX_TEXT) -> str:
    """The beginning of a text."""
    return text if len(text) <= most else f"{text[: most - 3]}..."
