"""Values that are left out of a file, because no file can hold them, and are taken from a template on loading.

The option `leave_out` names attributes, or paths. The file has an atom with a number in the place of such a value, and
nothing else of it:

    encode(state, ["tx"])        ["object", <TrainState>, [step, params, opt_state, ["left_out", "0"]]]

The number counts the left-out values of the file from 0 on, in hexadecimal. Nothing is lost in silence: the file can
only be loaded with a template. A value that is left out must not be or hold an object that is also saved: after
loading, the template's object and the file's would be two.

In a manifest, a child is the number of a node, or an atom, a value in place. So `type(child) is int` asks whether it is
a node. A node is *incomplete* if a value was left out of it or of a node below it.
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
"""The texts of an atom, such as `("left_out", "0")`."""


class LeaveOut:
    """The option `leave_out` of one save, and the values matched by it.

    Args:
        entries: names of attributes, matching anywhere in the tree, and whole paths.

    Attributes:
        objects: values left out, in the order of their atoms.
        paths: the path of each of `objects`.

    Raises:
        ValueError: if an entry is neither a name nor a path.
    """

    def __init__(self, entries: Sequence[str]) -> None:
        wrong = [entry for entry in entries if not _is_name_or_path(entry)]
        if wrong:
            raise ValueError(
                f'`leave_out` has {wrong[0]!r}, which is neither the name of an attribute, such as "tx", nor a path, '
                'such as ".state.tx" or "[\'tx\']". Name attributes:\n'
                '    sharedtree.save(path, tree, leave_out=["apply_fn", "tx"])'
            )
        # An ordered set of the entries that have matched nothing so far.
        self._unused = dict.fromkeys(entries)
        # Names of attributes are looked up by the step: ".tx" → "tx".
        self._names = {f".{entry}": entry for entry in entries if not _is_path(entry)}
        self._paths = tuple([entry for entry in entries if _is_path(entry)])
        self.objects: list[Any] = []
        self.paths: list[str] = []

    def __bool__(self) -> bool:
        """Returns True if the option has any entry."""
        return bool(self._names or self._paths)

    def leave_out_if_matched(self, obj: Any, step: str, path: Callable[[], str]) -> list[str] | None:
        """Leaves an object out if an entry matches it: notes the object, its path, and that the entry is used.

        Args:
            obj: the object.
            step: the last step of its path.
            path: returns the whole path, in a time that grows with its length. Called only if needed.

        Returns:
            The atom to write in the place of the object, such as `["left_out", "0"]`. None if no entry matches.
        """
        entry = self._names.get(step)
        # Paths are compared by their ends first, because the whole path of an object is costly.
        if entry is None:
            candidates = [candidate for candidate in self._paths if candidate.endswith(step)]
            entry = next((candidate for candidate in candidates if candidate == path()), None)
        if entry is None:
            return None
        self._unused.pop(entry, None)
        self.objects.append(obj)
        self.paths.append(path())
        # "x" writes the number in hexadecimal.
        return [LEFT_OUT, format(len(self.objects) - 1, "x")]

    def find_problems(self, manifest: Manifest, numbers: IdentityDict[int]) -> list[Problem]:
        """Returns the problems with values left out by mistake.

        There are two kinds. An object cannot be built without the value left out of it. Or the value is, or
        holds, an object that is also saved: after loading, the template's object and the file's would be two.

        Args:
            manifest: everything that was written.
            numbers: written object → number of its node.
        """
        problems = list[Problem]()
        incomplete = first_wrongly_incomplete(manifest.nodes)
        if incomplete is not None:
            reason = f"a `{manifest.nodes[incomplete][0]}`, which cannot do without what is left out of it"
            problems.append(Problem(path_to(manifest, incomplete), reason, "Leave out all of it, or nothing."))
        # An object that was left out at several paths is looked at once. `search` yields it and everything in it, the
        # nearest first. Its argument is the list of what the search has reached: at first the object, without a holder.
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
                f"`leave_out` has {listed}, but the tree has nothing there. A shared object is named by its first "
                "path, in JAX's order. Correct the entry, or leave nothing out:\n"
                "    sharedtree.save(path, tree)"
            )


def _is_name_or_path(entry: Any) -> bool:
    # The name of an attribute, such as `tx`, or a path, such as `.heads[0]`.
    return isinstance(entry, str) and (entry.isidentifier() or _is_path(entry))


def _is_path(entry: str) -> bool:
    return entry.startswith((".", "["))


def _is_left_out(child: Child) -> bool:
    return type(child) is list and child[0] == LEFT_OUT


def left_out_atoms(manifest: Manifest) -> list[Key]:
    """Returns the atoms in the places of left-out values, in the order of the nodes.

    Args:
        manifest: a whole manifest, or the manifest of a part of the tree. A part has all atoms of the whole in its
            table. Only those that its own nodes refer to are returned.
    """
    if not any(atom[0] == LEFT_OUT for atom in manifest.atoms):
        return []
    all_children = itertools.chain((manifest.root,), *map(children_of, manifest.nodes))
    return [tuple(child) for child in all_children if _is_left_out(child)]  # pyright: ignore[reportArgumentType]


def first_wrongly_incomplete(nodes: Sequence[Node]) -> int | None:
    """Returns the number of the first node that cannot do without a value left out.

    A value may be left out only if it is a field or an item of a node of one of the kinds `HOLDERS`. Nothing may be
    left out at or below a child that Python or JAX hashes or walks, such as a key.

    Returns:
        None if there is no such node. Nodes may still be incomplete, in a way that is allowed.
    """
    # For each node, whether a value was left out of it or of a node below it.
    is_incomplete: list[bool] = []
    for i, node in enumerate(nodes):
        is_incomplete.append(False)
        for operand, value in operands(node):
            children = value if operand.type == "children" else [value] if operand.type == "child" else []
            lacks_child = any(map(_is_left_out, children))
            lacks_anything = lacks_child or any(type(child) is int and is_incomplete[child] for child in children)
            # An operand is a list of children, one child, or something else. `forms` restricts what children may be,
            # for example to texts. Fields and items are the lists of children without a restriction.
            holds_fields_or_items = operand.type == "children" and operand.forms is None and node[0] in HOLDERS
            if (lacks_anything and operand.is_walked) or (lacks_child and not holds_fields_or_items):
                return i
            is_incomplete[i] |= lacks_anything
    return None


NewStep = Callable[[Node, str], str | None]
"""(node of a file, step to one of its children) → the step today. None if the user drops the attribute."""


def _incomplete_nodes(manifest: Manifest) -> list[bool]:
    """Returns for each node whether a value was left out of it or of a node below it."""
    is_incomplete: list[bool] = []
    for node in manifest.nodes:
        children = children_of(node)
        is_incomplete.append(
            any(is_incomplete[child] if type(child) is int else _is_left_out(child) for child in children)
        )
    return is_incomplete


def dropped_atoms(manifest: Manifest, new_step: NewStep) -> set[Key]:
    """Finds the left-out values that are not needed, because each path to them leads through a dropped attribute.

    Args:
        manifest: the manifest of the file.
        new_step: see `NewStep`.

    Returns:
        The atoms of these values.
    """
    is_incomplete = _incomplete_nodes(manifest)
    dropped: set[Key] = set()
    if type(manifest.root) is not int:
        return dropped
    # Children stand before their parents, so the loop gets to each node after its parents.
    needed = {manifest.root}
    for number in range(manifest.root, -1, -1):
        if not is_incomplete[number]:
            continue
        for child, step in steps(manifest, manifest.nodes[number]):
            is_needed = number in needed and new_step(manifest.nodes[number], step) is not None
            if type(child) is int and is_needed:
                needed.add(child)
            elif _is_left_out(child) and not is_needed:
                dropped.add(tuple(child))  # pyright: ignore[reportArgumentType]
    return dropped


def find_in_template(
    manifest: Manifest,
    template: Manifest,
    open_node: Callable[[int], Iterator[tuple[Any, str]]],
    new_step: NewStep,
) -> Mapping[Key, Any]:
    """Finds the values left out of a file, at the same paths of a template.

    Args:
        manifest: the manifest of the file.
        template: the manifest that a file of the template would have.
        open_node: number of a node of the template → pairs of a child, as an object, and the step to it.
        new_step: see `NewStep`.

    Returns:
        A dict: atom of the file → the value in the template. An atom is absent if the template has nothing at its path,
        or if its path leads through a dropped attribute.
    """
    values: dict[Key, Any] = {}
    is_incomplete = _incomplete_nodes(manifest)
    if type(manifest.root) is not int or type(template.root) is not int:
        return values

    # Many nodes of a file can correspond to one node of the template, which may be large. So its children are cached:
    # step → child in the template's manifest, and step → child as an object.
    @functools.cache
    def children_at(template_node: int) -> dict[str, Child]:
        return {step: child for child, step in steps(template, template.nodes[template_node])}

    @functools.cache
    def objects_at(template_node: int) -> dict[str, Any]:
        return {step: obj for obj, step in open_node(template_node)}

    # Number of a node in the file → number of the node at the same path of the template. Children stand before their
    # parents, so the loop from the last node to the first gets to each node after its parents. Complete nodes are
    # skipped.
    template_nodes: dict[int, int] = {manifest.root: template.root}
    for number in range(manifest.root, -1, -1):
        if not is_incomplete[number] or number not in template_nodes:
            continue
        template_node = template_nodes[number]
        template_children = children_at(template_node)
        for child, step in steps(manifest, manifest.nodes[number]):
            step = new_step(manifest.nodes[number], step)
            # The user drops the attribute, so nothing is needed from the template.
            if step is None:
                continue
            # A node here and a node there: they correspond.
            if type(child) is int and type(template_children.get(step)) is int:
                template_nodes.setdefault(child, template_children[step])  # pyright: ignore[reportArgumentType]
            elif _is_left_out(child) and step in objects_at(template_node):
                values[tuple(child)] = objects_at(template_node)[step]  # pyright: ignore
    return values
