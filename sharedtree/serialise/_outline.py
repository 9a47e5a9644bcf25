"""A file's tree as lines of text, what is shared shown once and marked where it comes again.

Small values that hold no more than numbers and texts, such as shapes, are one line. No name is looked up.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from ._atoms import decode_atom
from ._audit import steps
from ._dtypes import dtype_named
from ._manifest import ArrayEntry, Child, Manifest

_MAX_TEXT = 80
_MAX_PATH = 400
_MAX_INDENT = 40
_MAX_INLINE = 16

CARRY_IDENTITY = frozenset(
    {"list", "dict", "OrderedDict", "defaultdict", "deque", "set", "bytearray", "object", "wrapper", "registered"}
    | {"array", "marker", "struct"}
)
"""The kinds of node two occurrences of which are a tie, but for namedtuples."""

# What a node calls the children that stand in places of their own, in order.
_SINGLE = {
    "deque": (".maxlen",),
    "struct": (".dtype", ".sharding"),
    "treedef": (".tree",),
    "method": (".__self__",),
    "bound": (".__self__",),
    "slice": (".start", ".stop", ".step"),
    "range": (".start", ".stop", ".step"),
    "path": (".text",),
    "device": (".id",),
    "spec": (".unreduced", ".reduced"),
    "named_sharding": (".mesh", ".spec", ".memory_kind"),
    "single_device_sharding": (".device", ".memory_kind"),
}
_BRACKETS = {
    "tuple": ("(", ")"),
    "frozenset": ("frozenset({", "})"),
    "slice": ("slice(", ")"),
    "range": ("range(", ")"),
}
_OPTIONAL = frozenset({".<attributes>", ".default_factory", ".maxlen", ".sharding", ".memory_kind", ".unreduced"}) | {
    ".reduced",
    "<aux>",
}


class Line(NamedTuple):
    """One object, or one more occurrence of it.

    Attributes:
        depth: how deep it lies.
        step: what leads to it from the line above it that is less deep: `.weight`, `[0]`.
        path: from the root.
        text: what it is.
        nbytes: of an array.
        tied_to: the path where it came first, if this is another one.
    """

    depth: int
    step: str
    path: str
    text: str
    nbytes: int | None = None
    tied_to: str | None = None

    def __str__(self) -> str:
        size = f"  {self.nbytes:,} bytes" if self.nbytes is not None else ""
        return indent(self.depth) + "  ".join(part for part in (self.step, self.what) if part) + size

    @property
    def what(self) -> str:
        """The text, or where the object came first."""
        return self.text if self.tied_to is None else f"= {self.tied_to or '(the tree itself)'}"


def indent(depth: int) -> str:
    """What a line of some depth begins with. Past 40 levels it says the depth: all of it would fill the disk."""
    return "  " * depth if depth <= _MAX_INDENT else f"{'  ' * _MAX_INDENT}({depth}) "


def outline(manifest: Manifest) -> Iterator[Line]:
    """The lines of a tree, from the root down. Cost: one visit for each node and each reference to one."""
    first: dict[int, str] = {}
    stack: list[tuple[Child, int, str, str]] = [(manifest.root, 0, "", "")]
    while stack:
        child, depth, step, path = stack.pop()
        if type(child) is not int:
            yield Line(depth, step, path, atom_text(child))
            continue
        node = manifest.nodes[child]
        inline = inline_text(manifest, node)
        if inline is not None:
            yield Line(depth, step, path, inline)
            continue
        if child in first:
            if carries_identity(manifest, node):
                yield Line(depth, step, path, "", tied_to=first[child])
            else:  # opening it each time would take time that is exponential in the size of the file
                yield Line(
                    depth, step, path, f"{node_text(manifest, node)}, as at {first[child] or '(the tree itself)'}"
                )
            continue
        first[child] = path
        nbytes = array_nbytes(manifest.arrays[node[1]]) if node[0] == "array" else None
        yield Line(depth, step, path, node_text(manifest, node), nbytes)
        below = [
            (each, depth + 1, way, _joined(path, way)) for each, way in steps_of(manifest, node) if _is_shown(way, each)
        ]
        stack.extend(reversed(below))


def carries_identity(manifest: Manifest, node: list[Any]) -> bool:
    """Whether two occurrences of a node are a tie."""
    return node[0] in CARRY_IDENTITY and not (node[0] == "object" and manifest.types[node[1]].kind == "namedtuple")


def steps_of(manifest: Manifest, node: list[Any]) -> Iterator[tuple[Child, str]]:
    """The children of a node, each with what leads to it, as Python would write it where it can.

    The keys of dictionaries come before the values, as `<key>`.
    """
    kind = node[0]
    if kind in ("partial", "Partial"):
        yield node[1], ".func"
        yield from [(child, f"[{i}]") for i, child in enumerate(node[2])]
        yield from [(child, f"[{_short(repr(key))}]") for key, child in zip(node[3], node[4], strict=True)]
        if kind == "partial":
            yield node[5], ".<attributes>"
    elif kind in _SINGLE:
        names = iter(_SINGLE[kind])
        for child, step in steps(manifest, node):
            yield child, next(names) if step.startswith(".<") else step
    elif kind in ("dict", "OrderedDict", "defaultdict"):
        keys = iter(node[-2])
        for child, step in steps(manifest, node):
            key = next(keys) if step.startswith("[") else None
            yield child, step if step != "[...]" else f"[{_key_text(manifest, key)}]"
    else:
        yield from steps(manifest, node)


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
        return _short(f"method {node[2]}")
    if kind == "device":
        return _short(f"device {node[1]}")
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
        return _short(f"{name}.{node[2]}" if type(node[2]) is str else f"{name}({atom_text(node[2])})")
    if kind == "path" and type(node[2]) is not int:
        return _short(f"{node[1]}({atom_text(node[2])})")
    if kind == "key_dtype":
        return _short(f"dtype of PRNG keys, {node[1]}")
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
        return f"PRNG key, {_short(entry.key)}, {shape}"
    return f"{shape}{' weak' if entry.weak else ''}{' NumPy' if entry.kind == 'numpy' else ''}"


def array_nbytes(entry: ArrayEntry) -> int:
    """The size of an array in the file."""
    return math.prod(entry.shape) * dtype_named(entry.dtype).itemsize


def atom_text(atom: Any) -> str:
    """An atom as Python would print it."""
    if type(atom) is not list:
        return _short(repr(atom))
    tag, *data = atom
    if tag in ("class", "function"):
        return _short(data[0])
    if tag == "int":  # Python prints long ones only after a warning, and slowly
        return _short(str(int(data[0], 16)) if len(data[0]) < _MAX_TEXT else f"0x{data[0]}")
    if tag == "float" and data[0].startswith("nan"):
        return data[0]
    return _short(repr(decode_atom(atom)))


def _short(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 3]}..."


def _key_text(manifest: Manifest, key: Child) -> str:
    return node_text(manifest, manifest.nodes[key]) if type(key) is int else atom_text(key)


def _joined(path: str, step: str) -> str:
    """Paths of deep trees would together take memory that is quadratic in the depth."""
    return path + step if len(path) < _MAX_PATH else path if path.endswith("...") else f"{path}..."


def _is_shown(step: str, child: Child) -> bool:
    """Keys are part of the paths; what a class or a container holds besides is shown if there is something."""
    return step != "<key>" and not (child is None and step in _OPTIONAL)
