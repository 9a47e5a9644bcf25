"""A file's tree as lines of text, what is shared shown once and marked where it comes again.

Small values that hold no more than numbers and texts, such as shapes, are one line. No name is looked up.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from ..._printable import printable
from ._manifest import Child, Manifest
from ._steps import steps
from ._texts import array_nbytes, atom_text, inline_text, node_text

_MAX_PATH = 400
_MAX_INDENT = 40

CARRY_IDENTITY = frozenset(
    {"list", "dict", "OrderedDict", "defaultdict", "deque", "set", "bytearray", "object", "wrapper", "registered"}
    | {"array", "marker", "struct"}
)
"""The kinds of node two occurrences of which are a tie, but for namedtuples."""

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
        return indent(self.depth) + printable("  ".join(part for part in (self.step, self.what) if part)) + size

    @property
    def what(self) -> str:
        """The text, or where the object came first."""
        return self.text if self.tied_to is None else f"= {self.tied_to or '(the tree itself)'}"


def indent(depth: int) -> str:
    """What a line of some depth begins with. Past 40 levels it says the depth: all of it would fill the disk."""
    return "  " * depth if depth <= _MAX_INDENT else f"{'  ' * _MAX_INDENT}({depth}) "


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
        if not _is_shown(step, child):
            continue
        path = _joined(above, step)
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
        stack.append((steps(manifest, node), depth + 1, path))


def carries_identity(manifest: Manifest, node: list[Any]) -> bool:
    """Whether two occurrences of a node are a tie."""
    return node[0] in CARRY_IDENTITY and not (node[0] == "object" and manifest.types[node[1]].kind == "namedtuple")


def _joined(path: str, step: str) -> str:
    """Paths of deep trees would together take memory that is quadratic in the depth."""
    return path + step if len(path) < _MAX_PATH else path if path.endswith("...") else f"{path}..."


def _is_shown(step: str, child: Child) -> bool:
    """Keys are part of the paths; what a class or a container holds besides is shown if there is something."""
    return step != "<key>" and not (child is None and step in _OPTIONAL)
