"""Values that are left out of a file, because no file can hold them, and are taken from a template on loading.

The option `leave_out` names attributes, or paths. The file has an atom with a number in the place of such a value, and
nothing else of it:

    encode(state, ["tx"])        ["object", <TrainState>, [step, params, opt_state, ["left_out", "0"]]]

Nothing is lost in silence. Such a file can only be loaded with a template. A value that is left out must not be or hold
an object that is also saved, because after loading the two would not be one object.
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
from ._written_by_name import Problem, Reached, search

HOLDERS = frozenset({"object", "wrapper", "registered", "list", "tuple", "dict", "OrderedDict", "defaultdict", "deque"})
"""The kinds of node from which a value may be left out."""

Key = tuple[str, ...]
"""The texts of an atom."""


class LeaveOut:
    """The option `leave_out` of one save, and the values that it has matched.

    Args:
        entries: names of attributes, which match anywhere in the tree, and whole paths.

    Attributes:
        objects: values that were left out, in the order of their atoms.
        paths: the path of each.

    Raises:
        ValueError: if an entry is neither a name nor a path.
    """

    def __init__(self, entries: Sequence[str]) -> None:
        wrong = [entry for entry in entries if not _is_name_or_path(entry)]
        if wrong:
            raise ValueError(
                f"`leave_out` has {wrong[0]!r}, which is neither the name of an attribute nor a path, as errors print "
                'it. Name attributes:\n    sharedtree.save(path, tree, leave_out=["apply_fn", "tx"])'
            )
        self._unused = dict.fromkeys(entries)
        self._names = {f".{entry}": entry for entry in entries if not _is_path(entry)}
        self._paths = tuple([entry for entry in entries if _is_path(entry)])
        self.objects: list[Any] = []
        self.paths: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._names or self._paths)

    def atom_for(self, obj: Any, step: str, path: Callable[[], str]) -> list[str] | None:
        """Returns the atom to write in the place of an object. None if the object is not left out.

        Args:
            obj: the object.
            step: the last step of its path.
            path: returns the whole path. Making it takes a step for each level, so it is called only if needed.
        """
        entry = self._names.get(step)
        if entry is None:
            candidates = [candidate for candidate in self._paths if candidate.endswith(step)]
            entry = next((candidate for candidate in candidates if candidate == path()), None)
        if entry is None:
            return None
        self._unused.pop(entry, None)
        self.objects.append(obj)
        self.paths.append(path())
        return [LEFT_OUT, format(len(self.objects) - 1, "x")]

    def find_problems(self, manifest: Manifest, numbers: IdentityDict[int]) -> list[Problem]:
        """Finds values that must not be left out: their holder needs them, or they share an object with the rest.

        Args:
            manifest: everything that was written.
            numbers: object that was written → number of its node.
        """
        problems = list[Problem]()
        incomplete = first_incomplete(manifest.nodes)
        if incomplete is not None:
            reason = f"a `{manifest.nodes[incomplete][0]}`, which cannot do without what is left out of it"
            problems.append(Problem(path_to(manifest, incomplete), reason, "Leave out all of it, or nothing."))
        for obj, path in IdentityDict(zip(self.objects, self.paths, strict=True)).items():
            saved = [numbers[part] for part in search([Reached(obj, -1, "")]) if part in numbers]
            shared = next((n for n in saved if carries_identity(manifest, manifest.nodes[n])), None)
            if shared is not None:
                saved_path = path_to(manifest, shared)
                reason = (
                    f"left out, and is or holds what is saved at `{saved_path}`, with which it would not be one object"
                )
                problems.append(Problem(path, reason, "Leave out both, or neither."))
        return problems

    def require_used(self) -> None:
        """Raises `ValueError` if an entry matched nothing: it may be misspelt."""
        if self._unused:
            listed = ", ".join([f"`{printable(entry)}`" for entry in self._unused])
            raise ValueError(
                f"`leave_out` has {listed}, and the tree has nothing there. What is shared has one path, the first in "
                "JAX's order. Leave out what the tree has, or nothing:\n    sharedtree.save(path, tree)"
            )


def _is_name_or_path(entry: Any) -> bool:
    return isinstance(entry, str) and (entry.isidentifier() or _is_path(entry))


def _is_path(entry: str) -> bool:
    return entry.startswith((".", "["))


def _is_left_out(child: Child) -> bool:
    return type(child) is list and child[0] == LEFT_OUT


def left_out_of(manifest: Manifest) -> list[Key]:
    """Returns the atoms of values that were left out of a file, or of a part of it."""
    if not any(atom[0] == LEFT_OUT for atom in manifest.atoms):
        return []
    all_children = itertools.chain((manifest.root,), *map(children_of, manifest.nodes))
    return [tuple(child) for child in all_children if _is_left_out(child)]  # pyright: ignore[reportArgumentType]


def first_incomplete(nodes: Sequence[Node]) -> int | None:
    """Returns the number of the first node that cannot be built without a value that was left out.

    Only fields and items of `HOLDERS` may be left out, and nothing below a key or another walked child.

    Returns:
        None if there is no such node.
    """
    is_incomplete: list[bool] = []
    for i, node in enumerate(nodes):
        is_incomplete.append(False)
        for operand, value in operands(node):
            children = value if operand.type == "children" else [value] if operand.type == "child" else []
            lacks_child = any(map(_is_left_out, children))
            lacks_part = lacks_child or any(type(child) is int and is_incomplete[child] for child in children)
            may_lack = operand.type == "children" and operand.forms is None and node[0] in HOLDERS
            if (lacks_part and operand.is_walked) or (lacks_child and not may_lack):
                return i
            is_incomplete[i] |= lacks_part
    return None


def values_left_out(
    manifest: Manifest,
    template: Manifest,
    open_node: Callable[[int], Iterator[tuple[Any, str]]],
    new_step: Callable[[Node, str], str | None],
) -> Mapping[Key, Any]:
    """Finds the values that were left out of a file, at the same paths of a template.

    Args:
        manifest: the file.
        template: nodes of the template, as they would be written.
        open_node: yields the objects that a node of the template holds, with their steps.
        new_step: (node, step in the file) → step in the template. None if the attribute is dropped.

    Returns:
        Atom of the file → the value in the template. Atoms without a value are absent. Dropped values are None.
    """
    values: dict[Key, Any] = {}
    is_incomplete: list[bool] = []
    for node in manifest.nodes:
        children = children_of(node)
        is_incomplete.append(
            any(is_incomplete[child] if type(child) is int else _is_left_out(child) for child in children)
        )
    if type(manifest.root) is not int or type(template.root) is not int:
        return values

    # Many nodes of a file can be compared with one node of the template, which may be large. So both are cached.
    @functools.cache
    def children_at(template_node: int) -> dict[str, Child]:
        return {step: child for child, step in steps(template, template.nodes[template_node])}

    @functools.cache
    def objects_at(template_node: int) -> dict[str, Any]:
        return {step: obj for obj, step in open_node(template_node)}

    # Number of a node in the file → number of the node at the same path of the template. Children stand before their
    # parents, so the order is downwards, and nodes without a left-out value below them are skipped.
    template_nodes: dict[int, int] = {manifest.root: template.root}
    for number in range(manifest.root, -1, -1):
        if not is_incomplete[number] or number not in template_nodes:
            continue
        template_node = template_nodes[number]
        template_children = children_at(template_node)
        for child, step in steps(manifest, manifest.nodes[number]):
            step = new_step(manifest.nodes[number], step)
            if step is None:
                values |= {tuple(child): None} if _is_left_out(child) else {}  # pyright: ignore
            elif type(child) is int and type(template_children.get(step)) is int:
                template_nodes.setdefault(child, template_children[step])  # pyright: ignore[reportArgumentType]
            elif _is_left_out(child) and step in objects_at(template_node):
                values[tuple(child)] = objects_at(template_node)[step]  # pyright: ignore
    return values
