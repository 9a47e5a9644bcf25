"""The tree of a manifest by its paths: the part at one of them, and all of it as lines of text.

In the lines, what is shared is shown once and marked where it comes again. Small values that hold no more than numbers
and texts, such as shapes, are one line. No name is looked up.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ...core._errors import StructureMismatchError
from ...core._printing import printable
from ..arrays._dtypes import dtype_named
from ..arrays._placing import ArrayEntry
from ._all_kinds_of_nodes import KINDS, children_of, inline_text, node_text, operands, steps
from ._atoms import atom_text, is_name
from ._kinds_of_values import name_of_method
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


# --- to a node --------------------------------------------------------------------------------------------------------

_MAX_TEXT = 200


def first_parents(manifest: Manifest) -> dict[int, tuple[int, str]]:
    """For each node below the root, the node that it was first reached from, and how."""
    if type(manifest.root) is not int:
        return {}
    parents: dict[int, tuple[int, str]] = {manifest.root: (-1, "")}
    for number in range(manifest.root, -1, -1):  # children stand before their parents
        if number in parents:
            for child, step in steps(manifest, manifest.nodes[number]):
                if type(child) is int:
                    parents.setdefault(child, (number, step))
    return parents


def path_to(manifest: Manifest, number: int) -> str:
    """The first path of a node."""
    return path_from(first_parents(manifest), number)


def path_from(parents: dict[int, tuple[int, str]], number: int) -> str:
    """The path to a node, or the end of it."""
    texts: list[str] = []
    length = 0
    while number in parents and length < _MAX_TEXT:
        number, step = parents[number]
        texts.append(step)
        length += len(step)
    return ("..." if number in parents else "") + "".join(reversed(texts))


# --- a part of it -----------------------------------------------------------------------------------------------------

_MAX_LISTED = 20


def part_at(manifest: Manifest, path: str) -> Manifest:
    """The manifest of the subtree at a path, as `jax.tree_util.keystr` prints it; the first dot may be left out.

    Raises:
        StructureMismatchError: if nothing is there, or on the way more than one step fits: keys of a dictionary may
            look the same in print.

    Cost: a look at each node of the part, and at the nodes on the way.
    """
    whole = path if not path or path[0] in ".[" else f".{path}"
    child, done = manifest.root, 0
    while done < len(whole):
        ways = _ways(manifest, child)
        fitting: list[tuple[Child, int]] = []
        for each, step in ways:
            for text in {step, printable(step)}:  # as it is, or as it was printed, without what a terminal would obey
                stop = done + len(text)
                if whole.startswith(text, done) and (len(whole) == stop or whole[stop] in ".["):
                    fitting.append((each, stop))
        if len(fitting) != 1:
            fact = _nothing_at(path, whole[:done], ways) if not fitting else _too_much_at(manifest, path, fitting)
            raise StructureMismatchError(fact, (path,))
        ((child, done),) = fitting
    return _pruned(manifest, child)


def _nothing_at(path: str, before: str, ways: list[tuple[Child, str]]) -> str:
    place = f"Below `{printable(before)}`" if before else "At its root"
    there = _listed([step for _, step in ways])
    return (
        f"The file has nothing at `{printable(path)}`. {place} there is {there or 'nothing'}.\n"
        "See what it has:\n    print(sharedtree.inspect(path))"
    )


def _too_much_at(manifest: Manifest, path: str, fitting: list[tuple[Child, int]]) -> str:
    texts = [node_text(manifest, manifest.nodes[at]) if type(at) is int else atom_text(at) for at, _ in fitting]
    return (
        f"The file has {len(fitting)} things at or above `{printable(path)}`, for keys that look alike in print lead "
        f"to them: {_listed(texts)}. Load all of it, and take the one that you mean:\n"
        "    model = sharedtree.load(path)"
    )


def _ways(manifest: Manifest, child: Child) -> list[tuple[Child, str]]:
    below = steps(manifest, manifest.nodes[child]) if type(child) is int else ()
    return [(each, step) for each, step in below if step != "<key>"]


def _listed(texts: list[str]) -> str:
    shown = ", ".join(f"`{printable(text)}`" for text in texts[:_MAX_LISTED])
    return f"{shown}, ..." if len(texts) > _MAX_LISTED else shown


def _pruned(manifest: Manifest, root: Child) -> Manifest:
    needed = {root} if type(root) is int else set[int]()
    for number in range(root if type(root) is int else -1, -1, -1):  # children stand before their parents
        if number in needed:
            needed.update(child for child in children_of(manifest.nodes[number]) if type(child) is int)
    numbers = {old: new for new, old in enumerate(sorted(needed))}
    types: dict[int, int] = {}
    arrays: dict[int, int] = {}

    def renumbered(child: Child) -> Child:
        return numbers[child] if type(child) is int else child

    rewrite: dict[str, Callable[[Any], Any]] = {
        "child": renumbered,
        "children": lambda children: [renumbered(child) for child in children],
        "type": lambda index: types.setdefault(index, len(types)),
        "array": lambda index: arrays.setdefault(index, len(arrays)),
    }
    old_nodes = [manifest.nodes[number] for number in numbers]
    nodes: list[Node] = []
    for node in old_nodes:
        rewritten = [rewrite[each.type](value) if each.type in rewrite else value for each, value in operands(node)]
        nodes.append([node[0], *rewritten])
    atoms = [root, *(child for node in old_nodes for child in children_of(node))]
    named = {("class", manifest.types[index].name) for index in types}
    named |= {(atom[0], atom[1]) for atom in atoms if type(atom) is list and is_name(atom)}
    owners = [entry.name for entry in manifest.types]
    named |= {("method", str(name_of_method(owners, manifest.nodes, node))) for node in old_nodes}
    return manifest._replace(
        types=tuple(manifest.types[index] for index in types),
        arrays=tuple(manifest.arrays[index] for index in arrays),
        nodes=nodes,
        root=renumbered(root),
        names=tuple(name for name in manifest.names if name in named),
    )
