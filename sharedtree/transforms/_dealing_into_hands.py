"""Dealing: which hands the leaves of a tree make, under what a transform does to them; ties between treatments are cut.

Arrays alias by accident: a target network starts as the model's arrays, a filtered model is passed beside the whole
one. So the identity of an array or of a mutable container is (object, treatment): a tie within one treatment holds, one
between two is cut, and each side is what vanilla JAX makes of it. Modules and references are not parted in arguments;
in results everything is, for they are new objects.

Where some object has two fates the records are numbered anew, by record and fate, so that it becomes two:

    f(Pair(w, 1), [w, Pair(w, 2)])    in_axes (0, 1)      w → number 0, and 0 again
                                      after the cut       w → number 0 and number 2, one leaf each
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from ..core._call_arguments import Arguments
from ..core._structure import LEAF, Given, Node, Op, Path, Structure, canonical, intern
from ..core._trees_taken_apart import Walked
from ..ties._leaf_notes import which_are_noted, which_are_tied_values
from ._hands import Deal, Hand
from ._inconsistent_sharing import raise_inconsistent, raise_inconsistent_result
from ._leaf_labels import REFUSED, Fates, Treatment, Way, are_one, distinct_labels

Name = tuple[int, int]
"""A record and a fate: what is one object after the cut."""


class Cut(NamedTuple):
    """Ties that were cut in the arguments of a call. It is kept with their structure, and keeps none of their objects.

    Attributes:
        fates: of everything, by the numbers before the cut.
        leaves: the numbers of the arrays that were cut.
        modules: the numbers of the modules that were.
        containers: the numbers of the containers that were.
        origins: for each record before the cut, that of the arguments as they were walked; None if they are the same.
    """

    fates: Fates
    leaves: Sequence[int]
    modules: Sequence[int]
    containers: Sequence[int]
    origins: Sequence[int] | None

    def in_call(self, walked: Sequence[Any]) -> "Cut":
        """The same with the objects of a call.

        Args:
            walked: what the arguments were walked to.
        """
        objects = walked if self.origins is None else [walked[old] for old in self.origins]
        return self._replace(fates=self.fates.with_objects(objects))


class Dealt(NamedTuple):
    """A tree as it is dealt to a transform.

    Attributes:
        structure: of the tree, after the cut.
        origins: for each of its records, that of the tree before; None if nothing was cut.
        labels: for each of its leaves, in order, the labels that it has, one for each treatment.
        cuts: what was cut.
    """

    structure: Structure
    origins: Sequence[int] | None
    labels: Sequence[tuple[Any, ...]]
    cuts: Sequence[Cut]


def dealt(tree: Walked, structure: Structure, treatments: Sequence[Treatment], transform: str) -> Dealt:
    """Deals the leaves of what goes in.

    Args:
        tree: with its objects.
        structure: of the same.
        treatments: what the transform does to it.
        transform: what it is called, for errors.

    Raises:
        InconsistentSharingError: if a module that holds a traced leaf, or a reference, would be treated in two ways;
            or, within one module, a container.
        SharingMismatchError: where a prefix does not fit the tree.
    """
    labels: dict[int, tuple[Any, ...]] = dict.fromkeys(tree.leaf_numbers, ())
    origins: Sequence[int] | None = None
    cuts: list[Cut] = []
    for treatment in treatments:
        fates = Fates(tree, treatment)
        several = fates.several()
        if not several:
            first: dict[int, Way] = {}
            for way in fates.ways():
                first.setdefault(way[0], way)
            labels = {number: (*own, fates.label_at(first[number])) for number, own in labels.items()}
            continue
        partible = _forbid(fates, several, transform)
        cuts.append(_cut(fates, several, partible, origins))
        structure, names = numbered_anew(fates)
        ways = fates.way_of_each()
        labels = {
            new: (*labels[name[0]], fates.label_at(ways[name])) for new, name in enumerate(names) if name[0] in labels
        }
        tree = Walked.of(structure, [tree.objects[old] for old, _ in names])
        origins = [old if origins is None else origins[old] for old, _ in names]
    return Dealt(structure, origins, [labels[number] for number in tree.leaf_numbers], cuts)


def _cut(fates: Fates, several: Collection[int], partible: Collection[int], origins: Sequence[int] | None) -> Cut:
    tree = fates.tree
    objects = [n for n in several if (node := tree.node(n)) is None or node.type.carries_identity]
    leaves = [number for number in objects if tree.node(number) is None]
    modules = [number for number in objects if number in partible]
    containers = [n for n in objects if n not in partible and tree.node(n) is not None]
    return Cut(fates.with_objects(()), leaves, modules, containers, origins)


def _forbid(fates: Fates, several: Mapping[int, Sequence[Way]], transform: str) -> Collection[int]:
    """Raises if something has two fates that may have only one; returns the modules that may have two."""
    tree = fates.tree
    nodes = {number: tree.node(number) for number in several}
    modules = {number for number, node in nodes.items() if node is not None and not node.type.is_plain}
    partible = fates.treatment.partible(fates) if modules else ()
    containers: set[int] = set()
    for number in sorted(several):
        node = nodes[number]
        if number in modules.difference(partible) or isinstance(tree.objects[number], jax.Ref):
            raise_inconsistent(fates, number, transform)
        if node is not None and node.type.carries_identity:
            containers.add(number)
    conflicts = within_groups(fates, containers, [[root] for _, root in outermost_ways(fates)] if containers else [])
    if fates.treatment.within_module == REFUSED:
        arrays = {number for number, node in nodes.items() if node is None}
        conflicts |= within_groups(fates, arrays, modules_of_arguments(fates))
    if conflicts:
        raise_inconsistent(fates, min(conflicts), transform)
    return partible


def within_groups(fates: Fates, numbers: Collection[int], groups: Sequence[Sequence[Way]]) -> set[int]:
    """Finds the records to which the edges below one group of ways lead with two fates.

    Args:
        fates: of the tree.
        numbers: the records that are asked about.
        groups: ways into modules. What two groups lead to may have two fates.
    """
    found: set[int] = set()
    for group in groups if numbers else ():
        first: dict[int, int] = {}
        for way in [way for root in group for way in fates.ways_from(root)]:
            if way[0] in numbers and first.setdefault(way[0], fates[way]) != fates[way]:
                found.add(way[0])
    return found


def modules_of_arguments(fates: Fates) -> list[list[Way]]:
    """The outermost ways into the modules of each argument, or of each result of several.

    A dictionary of modules is one model as well as a module is, so a tie between two of its modules is no accident.
    """
    groups: dict[Any, list[Way]] = {}
    root = fates.tree.node(fates.root[0])
    has_several = root is not None and (root.type.cls is tuple or root.type.cls is Arguments)
    for path, way in outermost_ways(fates, has_containers=fates.treatment.has_containers):
        groups.setdefault(path[:1] if has_several else (), []).append(way)
    return list(groups.values())


def outermost_ways(fates: Fates, *, has_containers: bool = False) -> list[tuple[Path, Way]]:
    """The ways into modules that are in no other one, with a path, in the order of a walk.

    Args:
        fates: of the tree.
        has_containers: whether mutable containers outside modules count as modules do.
    """
    found: list[tuple[Path, Way]] = []
    stack: list[tuple[Path, Way]] = [((), fates.root)]
    while stack:
        path, way = stack.pop()
        node = fates.tree.node(way[0])
        if node is None:
            continue
        if node.type.is_plain and not (has_containers and node.type.is_mutable):
            steps = list(zip(node.keys, fates.below(way), strict=True))
            stack.extend([((*path, key), below) for key, below in reversed(steps)])
        else:
            found.append((path, way))
    return found


def numbered_anew(
    fates: Fates, op_of: Callable[[Name], Op | None] = lambda _: None
) -> tuple[Structure, Sequence[Name]]:
    """The tree with one record for each object and fate, and the name of each record.

    Args:
        fates: of the tree.
        op_of: what stands for an object instead of what was packed, if anything does.
    """
    records = fates.tree.records
    way_of = fates.way_of_each()

    def expand(name: Name) -> tuple[Op, Sequence[Name]]:
        op, children = records[name[0]]
        instead = op_of(name)
        if type(instead) is Given or not children:
            return instead or op, ()
        return instead or op, [(below[0], fates[below]) for below in fates.below(way_of[name])]

    table, numbers = canonical((fates.root[0], fates[fates.root]), expand)
    return intern(table, len(table) - 1), list(numbers)


def with_notes(structure: Structure, leaves: Sequence[Any]) -> Structure:
    """The structure of a result, which says of its leaves what was noted of them, on every call that JAX caches."""
    noted, tied = which_are_noted(leaves), which_are_tied_values(leaves)
    return intern(structure.records, structure.root, 0, None, noted, tied) if noted or tied else structure


def _is_object(op: Op) -> bool:
    return op is LEAF or (type(op) is Node and op.type.carries_identity)


class DealtOut(NamedTuple):
    """What goes out: the hands, and the label of each."""

    labels: Sequence[Any]
    hands: tuple[Hand, ...]


def dealt_out(
    tree: Walked,
    treatment: Treatment,
    labels: Sequence[Any] | None,
    transform: str,
    op_of: Callable[[Fates], Callable[[Name], Op | None]] | None = None,
) -> DealtOut:
    """Deals the leaves of what goes out, in one hand for each label. What has two fates is parted.

    Args:
        tree: with its objects.
        treatment: what the transform will do to it.
        labels: of the hands; None for those that occur.
        transform: what it is called, for errors.
        op_of: (the fates) → (a name) → what stands for an object instead of what was packed, if anything does.

    Raises:
        InconsistentSharingError: if an object within one module would be put to two places.
        SharingMismatchError: where the prefix does not fit the tree.
    """
    fates = Fates(tree, treatment)
    if treatment.within_module == REFUSED:
        objects = [number for number, (op, _) in enumerate(tree.records) if _is_object(op)]
        conflicts = within_groups(fates, objects, modules_of_arguments(fates))
        if conflicts:
            raise_inconsistent_result(fates, min(conflicts), transform)
    structure, names = numbered_anew(fates, op_of(fates) if op_of else lambda _: None)
    ways = fates.way_of_each()
    own = [name for (op, _), name in zip(structure.records, names, strict=True) if op is LEAF]
    leaves, found = [tree.objects[name[0]] for name in own], [fates.label_at(ways[name]) for name in own]
    if labels is None:
        labels = distinct_labels(found) or [None]
    structure = with_notes(structure, leaves)
    numbers = [tuple([i for i, its in enumerate(found) if are_one(its, label)]) for label in labels]
    return DealtOut(labels, tuple([Hand([leaves[i] for i in each], Deal(structure, each)) for each in numbers]))
