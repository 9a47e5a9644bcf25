"""Paths in a manifest: its tree as lines of text, the path to a node, and the part of the tree at a path.

The lines show a shared object once, and refer to its first path where it occurs again. Small values without objects,
such as shapes, are one line. No name is looked up.

In a manifest, a child is the number of a node, or an atom, a value in place. So `type(child) is int` asks whether it is
a node. Children stand before their parents, so the loops from the root's number down to 0 get to each node after all of
its parents. `steps` yields the children of a node, each with its step in a path, such as `.weight`, `[0]`, or `<key>`
for the keys of a mapping.
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

# Most levels that are shown by indentation.
_MAX_INDENT = 40
# Most characters to which a column is padded. Otherwise one long name would make every line as long.
_MAX_WIDTH = 100

# Steps that are not shown if their value is None.
_STEPS_HIDDEN_IF_NONE = frozenset({
    ".<attributes>", ".default_factory", ".maxlen", ".sharding", ".memory_kind", ".unreduced", ".reduced", "<aux>",
})  # fmt: skip


class Line(NamedTuple):
    """One line of a tree: an object, or a further occurrence of an object that an earlier line shows.

    Attributes:
        depth: number of nodes above the object. 0 for the root.
        step: last step of its path, such as `.weight` or `[0]`. Empty for the root.
        path: path from the root. A long path ends in `...`.
        text: description of the object. Empty for a further occurrence.
        nbytes: size of an array in bytes. None for other objects.
        tied_to: None, or, if this is a further occurrence, the first path of the object. It is empty if the object is
            the root.
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
        """Description of the object, or `= ` and its first path if this is a further occurrence."""
        return self.text if self.tied_to is None else f"= {self.tied_to or '(the tree itself)'}"


class Lines:
    """Iterable of the lines of a tree. Each iteration makes them anew: a small file can have very many."""

    __slots__ = ("_manifest",)

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest

    def __iter__(self) -> Iterator[Line]:
        return outline(self._manifest)

    def __repr__(self) -> str:
        return "<the lines of a tree>"


def outline(manifest: Manifest) -> Iterator[Line]:
    """Yields the lines of a tree, from the root down.

    Cost: a step for each node and each reference to a node. Memory grows with the nodes, not with the references.
    """
    # Number of a node that was shown → its path.
    first_paths: dict[int, str] = {}
    # The nodes from the root to the current place. Each entry: the children of a node that are not yet shown, their
    # depth, and the path to the node.
    stack: list[tuple[Iterator[tuple[Child, str]], int, str]] = [(iter([(manifest.root, "")]), 0, "")]
    while stack:
        children, depth, parent_path = stack[-1]
        # The default marks the end: a child's step is never None.
        child, step = next(children, (None, None))
        if step is None:
            stack.pop()
            continue
        # Keys of mappings are shown as parts of the paths to their values.
        if step == "<key>" or (child is None and step in _STEPS_HIDDEN_IF_NONE):
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
        # A value without identity that was shown before, such as a tuple, is no tie. But its parts are not shown again:
        # at each path, that could take exponential time.
        else:
            first_path = first_paths[child] or "(the tree itself)"
            yield Line(depth, step, path, f"{node_text(manifest, node)}, as at {first_path}")


def carries_identity(manifest: Manifest, node: Node) -> bool:
    """Returns True if the object of a node has identity, so that two occurrences of the node are a tie."""
    # Namedtuples are written as objects, and are values like other tuples.
    is_tuple = node[0] == "object" and manifest.types[node[1]].kind == "namedtuple"
    return KINDS[node[0]].has_identity and not is_tuple


def array_nbytes(entry: ArrayEntry) -> int:
    """Returns the size of an array in the file, in bytes."""
    return math.prod(entry.shape) * dtype_named(entry.dtype).itemsize


def _join(path: str, step: str) -> str:
    """Returns the path to a child. If the path to its parent is long, appends `...` instead of the step, only once."""
    # The paths of a deep tree would together take memory quadratic in its depth.
    return path + step if len(path) < MAX_STEP else path if path.endswith("...") else f"{path}..."


def indent(depth: int) -> str:
    """Returns the indentation of a line. Beyond 40 levels, it is no wider, and ends in the depth: `(57) `."""
    return "  " * depth if depth <= _MAX_INDENT else f"{'  ' * _MAX_INDENT}({depth}) "


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns rows as lines with aligned columns.

    A column is at most 100 characters wide. A wider cell is not cut: it moves the rest of its line to the right.

    Args:
        rows: rows of cells. All have the same length.
    """
    widths = [min(max(map(len, column)), _MAX_WIDTH) for column in zip(*rows, strict=True)]
    lines: list[str] = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


# --- the path to a node -----------------------------------------------------------------------------------------------

# Characters after which the beginning of a path is replaced by `...`.
_MAX_TEXT = 200


def first_parents(manifest: Manifest) -> dict[int, tuple[int, str]]:
    """Returns a dict: number of a node → the number of one of its parents, and the step from there to the node.

    Of several parents, it is the one with the highest number, and of several steps in it the first. So the parents of a
    shared node lead to one of its paths, but not always to the first one. The dict has the root and all nodes below it.
    The root has the parent -1 and an empty step.

    Returns:
        An empty dict if the root is an atom.
    """
    if type(manifest.root) is not int:
        return {}
    parents: dict[int, tuple[int, str]] = {manifest.root: (-1, "")}
    for number in range(manifest.root, -1, -1):
        # Other nodes are not below the root.
        if number in parents:
            for child, step in steps(manifest, manifest.nodes[number]):
                if type(child) is int:
                    parents.setdefault(child, (number, step))
    return parents


def path_to(manifest: Manifest, number: int) -> str:
    """Returns one path to a node. Of a path with more than about 200 characters, returns `...` and the end."""
    return path_from(first_parents(manifest), number)


def path_from(parents: dict[int, tuple[int, str]], number: int) -> str:
    """Returns one path to a node. Of a path with more than about 200 characters, returns `...` and the end.

    The path is empty for the root, and for a number that is not in `parents`.

    Args:
        parents: the result of `first_parents`.
        number: number of the node.
    """
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
    """Returns the manifest of the subtree at a path. An empty path selects the whole tree.

    Args:
        manifest: the whole manifest.
        path: a path as `jax.tree_util.keystr` prints it, such as `.layers[0]`. The first dot may be left out.

    Raises:
        StructureMismatchError: if the path leads nowhere, or if a step of it leads to several children. Two keys of a
            dictionary can have the same text.

    Cost: a step for each node of the part, and for each child of the nodes on the path.
    """
    full_path = path if not path or path[0] in ".[" else f".{path}"
    # `child` is the node or atom at `full_path[:position]`, at first the root. Each turn of the loop goes one step
    # further.
    child, position = manifest.root, 0
    while position < len(full_path):
        child_steps = _child_steps(manifest, child)
        matches: list[_StepMatch] = []
        for candidate, step in child_steps:
            # A user may have copied the step from the tree or from an error. `printable` replaces characters that
            # control a terminal, so both forms of the step are tried.
            for text in {step, printable(step)}:
                end = position + len(text)
                # After the step, the path must end or go on with another step: `.a` is no step of the path `.ab`.
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
    """A child with the next step of a path.

    Attributes:
        child: the child: the number of a node, or an atom.
        end: position in the path after this step.
    """

    child: Child
    end: int


def _no_child_message(path: str, prefix: str, child_steps: list[tuple[Child, str]]) -> str:
    """Returns the error's text for a path to nowhere.

    Args:
        path: the whole path.
        prefix: the longest beginning of the path that leads to a node or an atom.
        child_steps: the children of this node with their steps. No step continues the path.
    """
    place = f"Below `{printable(prefix)}`" if prefix else "At its root"
    listed = _list_texts([step for _, step in child_steps])
    return (
        f"The file has nothing at `{printable(path)}`. {place} there is {listed or 'nothing'}.\n"
        "See what it has:\n    print(sharedtree.inspect(path))"
    )


def _ambiguous_path_message(manifest: Manifest, path: str, matches: list[_StepMatch]) -> str:
    """Returns the error's text for a path with a step to several children.

    Args:
        manifest: the whole manifest.
        path: the whole path.
        matches: the children.
    """
    children = [match.child for match in matches]
    texts = [node_text(manifest, manifest.nodes[c]) if type(c) is int else atom_text(c) for c in children]
    return (
        f"The file has {len(matches)} things at or above `{printable(path)}`, since keys that are printed alike lead "
        f"to them: {_list_texts(texts)}. Load all of it, and take the one that you mean:\n"
        "    model = sharedtree.load(path)"
    )


def _child_steps(manifest: Manifest, child: Child) -> list[tuple[Child, str]]:
    """Returns the children of a node with their steps, without keys of mappings. Returns an empty list for an atom."""
    pairs = steps(manifest, manifest.nodes[child]) if type(child) is int else ()
    return [(grandchild, step) for grandchild, step in pairs if step != "<key>"]


def _list_texts(texts: list[str]) -> str:
    """Returns the first 20 texts in backticks, separated by commas."""
    shown = ", ".join(f"`{printable(text)}`" for text in texts[:_MAX_LISTED])
    return f"{shown}, ..." if len(texts) > _MAX_LISTED else shown


def _extract(manifest: Manifest, root: Child) -> Manifest:
    """Returns the manifest of a subtree, with only its nodes, types, arrays and names.

    Nodes, types and arrays get new numbers. The table of atoms stays as it is.

    Args:
        manifest: the whole manifest.
        root: the root of the subtree.
    """
    # The nodes of the subtree.
    needed = {root} if type(root) is int else set[int]()
    for number in range(root if type(root) is int else -1, -1, -1):
        if number in needed:
            needed.update(child for child in children_of(manifest.nodes[number]) if type(child) is int)
    # Old number of a node → new number.
    numbers = {old: new for new, old in enumerate(sorted(needed))}
    # Old index → new index, in the order in which nodes refer to them.
    types: dict[int, int] = {}
    arrays: dict[int, int] = {}

    def renumber(child: Child) -> Child:
        """Returns a child with the new number of a node. Atoms stay as they are."""
        return numbers[child] if type(child) is int else child

    # Type of an operand → function that rewrites its value.
    rewrite: dict[str, Callable[[Any], Any]] = {
        "child": renumber,
        "children": lambda children: [renumber(child) for child in children],
        # A type or array that was not met before gets the next number.
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
    # Names of classes of instances, names in atoms, and names of methods. For a node that is no method,
    # `name_of_method` returns None. The text "None" has no colon, so it is no name of the manifest and does no harm.
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
