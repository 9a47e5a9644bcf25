"""A file's tree as lines of text, what is shared shown once and marked where it comes again.

Small values that hold no more than numbers and texts, such as shapes, are one line. No name is looked up.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..._printable import printable
from ..arrays._arrays import ArrayEntry
from ..arrays._dtypes import dtype_named
from ._atoms import atom_text
from ._kinds import KINDS, inline_text, node_text, steps
from ._nodes import MAX_STEP, Child, Manifest, Node

_MAX_INDENT = 40
_MAX_WIDTH = 100  # of a column: one long name would make every line as long

# Shown only if there is something.
_OPTIONAL = frozenset({
    ".<attributes>", ".default_factory", ".maxlen", ".sharding", ".memory_kind", ".unreduced", ".reduced", "<aux>",
})  # fmt: skip


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
        return indent(self.depth) + printable("  ".join(part for part in (self.step, self.what) if part)) + size

    @property
    def what(self) -> str:
        """The text, or where the object came first."""
        return self.text if self.tied_to is None else f"= {self.tied_to or '(the tree itself)'}"


class Lines:
    """The lines of a tree, made anew each time that one iterates over them: a small file can have a great many."""

    __slots__ = ("_manifest",)

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest

    def __iter__(self) -> Iterator[Line]:
        return outline(self._manifest)

    def __repr__(self) -> str:
        return "<the lines of a tree>"


def outline(manifest: Manifest) -> Iterator[Line]:
    """The lines of a tree, from the root down.

    Cost: one visit for each node and each reference to one. Takes memory for each node, but not for each reference.
    """
    first: dict[int, str] = {}
    stack: list[tuple[Iterator[tuple[Child, str]], int, str]] = [(iter([(manifest.root, "")]), 0, "")]
    while stack:
        below, depth, above = stack[-1]
        child, step = next(below, (None, None))
        if step is None:
            stack.pop()
            continue
        if step == "<key>" or (child is None and step in _OPTIONAL):  # keys are part of the paths
            continue
        path = _joined(above, step)
        if type(child) is not int:
            yield Line(depth, step, path, atom_text(child))
            continue
        node = manifest.nodes[child]
        inline = inline_text(manifest, node)
        if inline is not None:
            yield Line(depth, step, path, inline)
        elif child not in first:
            first[child] = path
            nbytes = array_nbytes(manifest.arrays[node[1]]) if node[0] == "array" else None
            yield Line(depth, step, path, node_text(manifest, node), nbytes)
            stack.append((steps(manifest, node), depth + 1, path))
        elif carries_identity(manifest, node):
            yield Line(depth, step, path, "", tied_to=first[child])
        else:  # opening it each time would take time that is exponential in the size of the file
            there = first[child] or "(the tree itself)"
            yield Line(depth, step, path, f"{node_text(manifest, node)}, as at {there}")


def carries_identity(manifest: Manifest, node: Node) -> bool:
    """Whether two occurrences of a node are a tie."""
    is_tuple = node[0] == "object" and manifest.types[node[1]].kind == "namedtuple"
    return KINDS[node[0]].has_identity and not is_tuple


def array_nbytes(entry: ArrayEntry) -> int:
    """The size of an array in the file."""
    return math.prod(entry.shape) * dtype_named(entry.dtype).itemsize


def _joined(path: str, step: str) -> str:
    """Paths of deep trees would together take memory that is quadratic in the depth."""
    return path + step if len(path) < MAX_STEP else path if path.endswith("...") else f"{path}..."


def indent(depth: int) -> str:
    """What a line of some depth begins with. Past 40 levels it says the depth: all of it would fill the disk."""
    return "  " * depth if depth <= _MAX_INDENT else f"{'  ' * _MAX_INDENT}({depth}) "


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines in which each column begins in one place, but for what stands behind a text that is very long."""
    widths = [min(max(map(len, column)), _MAX_WIDTH) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
