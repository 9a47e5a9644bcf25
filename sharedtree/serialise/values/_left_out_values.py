"""What a tree is saved without, because no file can hold it, and what puts it back: the same places of a template.

A value is left out where a name of an attribute, or a path, leads to it. In its place stands an atom with a number, and
nothing of it is in the file:

    encode(state, ["tx"])        ["object", <TrainState>, [step, params, opt_state, ["left_out", "0"]]]

Nothing is lost in silence. Such a file is loaded with a template or not at all, and what is left out may not be or hold
what is also saved: as two objects they would not be one again.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ...core._by_identity import IdentityDict
from ...core._printing import printable
from ._all_kinds_of_nodes import children_of, operands, steps
from ._atoms import LEFT_OUT
from ._nodes import Child, Manifest, Node
from ._paths import carries_identity, path_to
from ._written_by_name import Problem, reached

HOLDERS = frozenset({"object", "wrapper", "registered", "list", "tuple", "dict", "OrderedDict", "defaultdict", "deque"})
"""The kinds of node of which a value may be left out."""

Key = tuple[str, ...]


class LeaveOut:
    """What is to be left out, as `save` is told it: names of attributes, wherever they are, and whole paths."""

    def __init__(self, entries: Sequence[str]) -> None:
        wrong = [each for each in entries if not isinstance(each, str) or not (each.isidentifier() or _is_path(each))]
        if wrong:
            raise ValueError(
                f"`leave_out` has {wrong[0]!r}, which is neither the name of an attribute nor a path, as errors print "
                'it. Name attributes:\n    sharedtree.save(path, tree, leave_out=["apply_fn", "tx"])'
            )
        self._unused = dict.fromkeys(entries)
        self._names = {f".{each}": each for each in entries if not _is_path(each)}
        self._paths = tuple([each for each in entries if _is_path(each)])
        self.objects: list[Any] = []
        self.paths: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._names or self._paths)

    def atom_for(self, obj: Any, step: str, path: Callable[[], str]) -> list[str] | None:
        """What is written in the place of an object; None if it is not left out."""
        entry = self._names.get(step)
        if entry is None:
            ends = [each for each in self._paths if each.endswith(step)]
            entry = next((each for each in ends if each == path()), None)
        if entry is None:
            return None
        self._unused.pop(entry, None)
        self.objects.append(obj)
        self.paths.append(path())
        return [LEFT_OUT, format(len(self.objects) - 1, "x")]

    def faults(self, whole: Manifest, numbers: IdentityDict[int]) -> list[Problem]:
        """What is left out where that cannot be, or is or holds what is saved as well, the objects with `numbers`."""
        problems = list[Problem]()
        lacking = misplaced(whole.nodes)
        if lacking is not None:
            what = f"a `{whole.nodes[lacking][0]}`, which cannot do without what is left out of it"
            problems.append(Problem(path_to(whole, lacking), what, "Leave out all of it, or nothing."))
        for obj, path in IdentityDict(zip(self.objects, self.paths, strict=True)).items():
            found = [numbers[each] for each in reached([(obj, -1, "")]) if each in numbers]
            both = next((n for n in found if carries_identity(whole, whole.nodes[n])), None)
            if both is not None:
                there = path_to(whole, both)
                what = f"left out, and is or holds what is saved at `{there}`, with which it would not be one object"
                problems.append(Problem(path, what, "Leave out both, or neither."))
        return problems

    def require_used(self) -> None:
        """Raises if an entry led nowhere: it may be misspelt, and then what was meant is not left out."""
        if self._unused:
            listed = ", ".join([f"`{printable(each)}`" for each in self._unused])
            raise ValueError(
                f"`leave_out` has {listed}, and the tree has nothing there. What is shared has one path, the first in "
                "JAX's order. Leave out what the tree has, or nothing:\n    sharedtree.save(path, tree)"
            )


def _is_path(entry: str) -> bool:
    return entry.startswith((".", "["))


def _is_left_out(child: Child) -> bool:
    return type(child) is list and child[0] == LEFT_OUT


def left_out_of(manifest: Manifest) -> list[Key]:
    """The atoms of a file, or of a part of it, in whose places nothing was written."""
    if not any(atom[0] == LEFT_OUT for atom in manifest.atoms):
        return []
    held = itertools.chain((manifest.root,), *map(children_of, manifest.nodes))
    return [tuple(child) for child in held if _is_left_out(child)]  # pyright: ignore[reportArgumentType]


def misplaced(nodes: Sequence[Node]) -> int | None:
    """The first node that lacks what its kind, or what hashes it, cannot do without; None if none does."""
    lacks: list[bool] = []
    for i, node in enumerate(nodes):
        lacks.append(False)
        for operand, value in operands(node):
            children = value if operand.type == "children" else [value] if operand.type == "child" else []
            own = any(map(_is_left_out, children))
            below = own or any(type(child) is int and lacks[child] for child in children)
            is_free = operand.type == "children" and operand.forms is None and node[0] in HOLDERS
            if (below and operand.is_walked) or (own and not is_free):
                return i
            lacks[i] |= below
    return None


def put_back(
    manifest: Manifest,
    template: Manifest,
    open_node: Callable[[int], Iterator[tuple[Any, str]]],
    new_step: Callable[[Node, str], str | None],
) -> Mapping[Key, Any]:
    """What a template has in the places of what a file lacks, by the atoms of the file. Some may be nowhere.

    `template` is its nodes as they are written; `open_node` gives the objects that a node of it holds, with steps.
    """
    found: dict[Key, Any] = {}
    lacks: list[bool] = []
    for node in manifest.nodes:
        held = children_of(node)
        lacks.append(any(lacks[child] if type(child) is int else _is_left_out(child) for child in held))
    if type(manifest.root) is not int or type(template.root) is not int:
        return found

    @functools.cache  # a file may have many nodes beside one of the template, which may be large
    def children_at(other: int) -> dict[str, Child]:
        return {step: child for child, step in steps(template, template.nodes[other])}

    @functools.cache
    def objects_at(other: int) -> dict[str, Any]:
        return {step: obj for obj, step in open_node(other)}

    beside: dict[int, int] = {manifest.root: template.root}
    for number in range(manifest.root, -1, -1):  # children stand before their parents
        if not lacks[number] or number not in beside:
            continue
        other = beside[number]
        below = children_at(other)
        for child, step in steps(manifest, manifest.nodes[number]):
            step = new_step(manifest.nodes[number], step)
            if step is None:  # it is dropped
                found |= {tuple(child): None} if _is_left_out(child) else {}  # pyright: ignore
            elif type(child) is int and type(below.get(step)) is int:
                beside.setdefault(child, below[step])  # pyright: ignore[reportArgumentType]
            elif _is_left_out(child) and step in objects_at(other):
                found[tuple(child)] = objects_at(other)[step]  # pyright: ignore
    return found
