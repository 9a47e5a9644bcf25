"""Paths in a manifest: its tree as lines of text, the path to a node, and the part of the tree at a path.

The lines show a shared object once, and refer to its first path where it occurs again. Small values without objects,
such as shapes, are one line. No name is looked up.
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
# Widest column. One long name would make every line as long.
_MAX_WIDTH = 100

# Steps that are not shown if their value is None.
_OPTIONAL = frozenset({
    ".<attributes>", ".default_factory", ".maxlen", ".sharding", ".memory_kind", ".unreduced", ".reduced", "<aux>",
})  # fmt: skip


class Line(NamedTuple):
    """One line of a tree: an object, or one more occurrence of it.

    Attributes:
        depth: number of nodes above it.
        step: last step of its path, such as `.weight` or `[0]`.
        path: path from the root.
        text: description of the object.
        nbytes: size of an array in bytes. None for other objects.
        tied_to: first path of the object, if this is another one.
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
        """Description of the object, or its first path if this is another one."""
        return self.text if self.tied_to is None else f"= {self.tied_to or '(the tree itself)'}"


class Lines:
    """Iterable of the lines of a tree. They are made during each iteration, as a small file can have very many."""

    __slots__ = ("_manifest",)

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest

    def __iter__(self) -> Iterator[Line]:
        return outline(self._manifest)

    def __repr__(self) -> str:
        return "<the lines of a tree>"


def outline(manifest: Manifest) -> Iterator[Line]:
    """Yields the lines of a tree, from the root down.

    Cost: a step for each node and each reference to one. Memory grows with the nodes, not with the references.
    """
    first_paths: dict[int, str] = {}
    # Each entry: the children that are not yet shown, their depth, and the path to their parent.
    stack: list[tuple[Iterator[tuple[Child, str]], int, str]] = [(iter([(manifest.root, "")]), 0, "")]
    while stack:
        children, depth, parent_path = stack[-1]
        child, step = next(children, (None, None))
        if step is None:
            stack.pop()
            continue
        # Keys of mappings are shown as parts of the paths to their values.
        if step == "<key>" or (child is None and step in _OPTIONAL):
            continue
        path = _join(parent_path, step)
        if type(child) is not int:
            yield Line(depth, step, path, atom_text(child))
            continue
        node = manifest.nodes[child]
        inline = inline_text(manifest, node)
        if inline is not None:
            yield Line(depth, step, path, inline)
        elif child not in first_paths:
            first_paths[child] = path
            nbytes = array_nbytes(manifest.arrays[node[1]]) if node[0] == "array" else None
            yield Line(depth, step, path, node_text(manifest, node), nbytes)
            stack.append((steps(manifest, node), depth + 1, path))
        elif carries_identity(manifest, node):
            yield Line(depth, step, path, "", tied_to=first_paths[child])
        # A value without identity is no tie. But to show its parts at each path could take exponential time.
        else:
            first_path = first_paths[child] or "(the tree itself)"
            yield Line(depth, step, path, f"{node_text(manifest, node)}, as at {first_path}")


def carries_identity(manifest: Manifest, node: Node) -> bool:
    """Returns True if two occurrences of a node are a tie."""
    # Namedtuples are written as objects, and are values like other tuples.
    is_tuple = node[0] == "object" and manifest.types[node[1]].kind == "namedtuple"
    return KINDS[node[0]].has_identity and not is_tuple


def array_nbytes(entry: ArrayEntry) -> int:
    """Returns the size of an array in the file, in bytes."""
    return math.prod(entry.shape) * dtype_named(entry.dtype).itemsize


def _join(path: str, step: str) -> str:
    # The paths of a deep tree would together take memory quadratic in its depth, so long ones are cut.
    return path + step if len(path) < MAX_STEP else path if path.endswith("...") else f"{path}..."


def indent(depth: int) -> str:
    """Returns the indentation of a line. Beyond 40 levels the depth is a number, as the text would grow without end."""
    return "  " * depth if depth <= _MAX_INDENT else f"{'  ' * _MAX_INDENT}({depth}) "


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns rows as lines with aligned columns. A cell that is wider than the widest column shifts its line."""
    widths = [min(max(map(len, column)), _MAX_WIDTH) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


# --- the path to a node -----------------------------------------------------------------------------------------------

_MAX_TEXT = 200


def first_parents(manifest: Manifest) -> dict[int, tuple[int, str]]:
    """Returns for each node at or below the root its first parent, and the step from there. -1 for the root."""
    if type(manifest.root) is not int:
        return {}
    parents: dict[int, tuple[int, str]] = {manifest.root: (-1, "")}
    # Children stand before their parents, so in this order each node is reached before its children.
    for number in range(manifest.root, -1, -1):
        if number in parents:
            for child, step in steps(manifest, manifest.nodes[number]):
                if type(child) is int:
                    parents.setdefault(child, (number, step))
    return parents


def path_to(manifest: Manifest, number: int) -> str:
    """Returns a path to a node. Of a long path, the end."""
    return path_from(first_parents(manifest), number)


def path_from(parents: dict[int, tuple[int, str]], number: int) -> str:
    """Returns the path to a node by the parents of `first_parents`. Of a long path, the end."""
    texts: list[str] = []
    length = 0
    while number in parents and length < _MAX_TEXT:
        number, step = parents[number]
        texts.append(step)
        length += len(step)
    return ("..." if number in parents else "") + "".join(reversed(texts))


# --- the part at a path -----------------------------------------------------------------------------------------------

_MAX_LISTED = 20


def part_at(manifest: Manifest, path: str) -> Manifest:
    """Returns the manifest of the subtree at a path.

    Args:
        manifest: the whole manifest.
        path: a path as `jax.tree_util.keystr` prints it. The first dot may be left out.

    Raises:
        StructureMismatchError: if the path leads nowhere, or to several children: keys of a dictionary may look the
            same in print.

    Cost: a step for each node of the part, and for each child of the nodes on the path.
    """
    full_path = path if not path or path[0] in ".[" else f".{path}"
    child, position = manifest.root, 0
    while position < len(full_path):
        child_steps = _child_steps(manifest, child)
        matches: list[_StepMatch] = []
        for candidate, step in child_steps:
            # The path may have a step as it is, or as it was printed, without characters that a terminal would obey.
            for text in {step, printable(step)}:
                end = position + len(text)
                if full_path.startswith(text, position) and (len(full_path) == end or full_path[end] in ".["):
                    matches.append(_StepMatch(candidate, end))
        if len(matches) != 1:
            message = (
                _ambiguous_path_message(manifest, path, matches)
                if matches
                else _no_child_message(path, full_path[:position], child_steps)
            )
            raise StructureMismatchError(message, (path,))
        ((child, position),) = matches
    return _extract(manifest, child)


class _StepMatch(NamedTuple):
    """A child whose step a path continues with, and the position in the path after that step."""

    child: Child
    end: int


def _no_child_message(path: str, prefix: str, child_steps: list[tuple[Child, str]]) -> str:
    """Message for a path that leads nowhere after `prefix`, where the steps are others."""
    place = f"Below `{printable(prefix)}`" if prefix else "At its root"
    listed = _list_texts([step for _, step in child_steps])
    return (
        f"The file has nothing at `{printable(path)}`. {place} there is {listed or 'nothing'}.\n"
        "See what it has:\n    print(sharedtree.inspect(path))"
    )


def _ambiguous_path_message(manifest: Manifest, path: str, matches: list[_StepMatch]) -> str:
    """Message for a path with a step that leads to several children."""
    children = [match.child for match in matches]
    texts = [node_text(manifest, manifest.nodes[c]) if type(c) is int else atom_text(c) for c in children]
    return (
        f"The file has {len(matches)} things at or above `{printable(path)}`, for keys that look alike in print lead "
        f"to them: {_list_texts(texts)}. Load all of it, and take the one that you mean:\n"
        "    model = sharedtree.load(path)"
    )


def _child_steps(manifest: Manifest, child: Child) -> list[tuple[Child, str]]:
    pairs = steps(manifest, manifest.nodes[child]) if type(child) is int else ()
    return [(grandchild, step) for grandchild, step in pairs if step != "<key>"]


def _list_texts(texts: list[str]) -> str:
    shown = ", ".join(f"`{printable(text)}`" for text in texts[:_MAX_LISTED])
    return f"{shown}, ..." if len(texts) > _MAX_LISTED else shown


def _extract(manifest: Manifest, root: Child) -> Manifest:
    """Returns the manifest of a subtree, with only its nodes, types, arrays and names, all of them renumbered."""
    # Children stand before their parents, so in this order each needed node is known before its children.
    needed = {root} if type(root) is int else set[int]()
    for number in range(root if type(root) is int else -1, -1, -1):
        if number in needed:
            needed.update(child for child in children_of(manifest.nodes[number]) if type(child) is int)
    numbers = {old: new for new, old in enumerate(sorted(needed))}
    # Old index → new index, in the order in which nodes refer to them.
    types: dict[int, int] = {}
    arrays: dict[int, int] = {}

    def renumber(child: Child) -> Child:
        return numbers[child] if type(child) is int else child

    # Type of an operand → function that rewrites its value.
    rewrite: dict[str, Callable[[Any], Any]] = {
        "child": renumber,
        "children": lambda children: [renumber(child) for child in children],
        "type": lambda index: types.setdefault(index, len(types)),
        "array": lambda index: arrays.setdefault(index, len(arrays)),
    }
    old_nodes = [manifest.nodes[number] for number in numbers]
    nodes: list[Node] = []
    for node in old_nodes:
        new_node: Node = [node[0]]
        for operand, value in operands(node):
            new_node.append(rewrite[operand.type](value) if operand.type in rewrite else value)
        nodes.append(new_node)
    # Names of classes, of functions, and of methods. A node that is no method adds ("method", "None"), which is unused.
    children = [root, *(child for node in old_nodes for child in children_of(node))]
    used_names = {("class", manifest.types[index].name) for index in types}
    used_names |= {(child[0], child[1]) for child in children if type(child) is list and is_name(child)}
    owners = [entry.name for entry in manifest.types]
    used_names |= {("method", str(name_of_method(owners, manifest.nodes, node))) for node in old_nodes}
    return manifest._replace(
        types=tuple(manifest.types[index] for index in types),
        arrays=tuple(manifest.arrays[index] for index in arrays),
        nodes=nodes,
        root=renumber(root),
        names=tuple(name for name in manifest.names if name in used_names),
    )
