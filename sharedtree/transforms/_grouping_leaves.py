"""Groups the leaves of a tree by what a transform does with them, and splits objects that have conflicts.

Arrays alias by accident: a target network starts as the model's arrays, a filtered model is passed beside the whole
one. So the identity of an array or of a mutable container is (object, treatment). A tie within one treatment holds. A
tie between two treatments is cut, and each side is what vanilla JAX makes of it. Modules and references in arguments
are never split; that is an error. Results are new objects, so everything in them may be split.

If some object has two outcomes, the records are renumbered, one for each *piece* (a record and an outcome):

    f(Pair(w, 1), [w, Pair(w, 2)])    in_axes (0, 1)      w → one record, reached with the outcomes 0 and 1
                                      after the split     w → two records, one leaf each
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from ..core._call_arguments import Arguments
from ..core._structure import LEAF, FlatDag, Given, Node, Op, Path, Structure, canonical, intern
from ..ties._leaf_notes import which_are_noted, which_are_tied_values
from ._leaf_groups import LeafGroup, LeafSelection
from ._leaf_labels import (
    REFUSED,
    Outcomes,
    Piece,
    Treatment,
    Visit,
    distinct_labels,
    is_same_label,
    raise_inconsistent,
    raise_inconsistent_result,
)

# ---- Arguments ----


class Cut(NamedTuple):
    """Ties of a call's arguments that one treatment cut. It is kept with a structure and holds no object of a call.

    All records are numbered as before the cut.

    Attributes:
        outcomes: outcomes of every record.
        leaves: arrays that were split.
        modules: modules that were split.
        containers: mutable containers that were split.
        origins: for each record before this cut, its record before all cuts. None if they are the same.
    """

    outcomes: Outcomes
    leaves: Sequence[int]
    modules: Sequence[int]
    containers: Sequence[int]
    origins: Sequence[int] | None

    def in_call(self, objects: Sequence[Any]) -> "Cut":
        """Returns a copy that has the objects of one call.

        Args:
            objects: the object of each record, numbered as before all cuts.
        """
        if self.origins is not None:
            objects = [objects[record] for record in self.origins]
        return self._replace(outcomes=self.outcomes.with_objects(objects))


class LabelledTree(NamedTuple):
    """The arguments of a call with the labels of each leaf, after all cuts.

    Attributes:
        structure: structure of the tree after the cuts.
        origins: for each of its records, the record before the cuts. None if nothing was cut.
        labels: for each of its leaves in flatten order, one label for each treatment.
        cuts: what was cut, one entry for each treatment that cut something.
    """

    structure: Structure
    origins: Sequence[int] | None
    labels: Sequence[tuple[Any, ...]]
    cuts: Sequence[Cut]


def label_arguments(
    tree: FlatDag, structure: Structure, treatments: Sequence[Treatment], transform: str
) -> LabelledTree:
    """Labels the leaves of a call's arguments, and cuts the ties of arrays and containers that have conflicts.

    Args:
        tree: the arguments, with their objects.
        structure: structure of the same.
        treatments: what the transform does with them.
        transform: name of the transform, for errors.

    Raises:
        InconsistentSharingError: if a module with a traced leaf, a reference or, within one module, a container has a
            conflict.
        SharingMismatchError: if a prefix does not fit the tree.
    """
    labels: dict[int, tuple[Any, ...]] = dict.fromkeys(tree.leaf_numbers, ())
    origins: Sequence[int] | None = None
    cuts: list[Cut] = []
    for treatment in treatments:
        outcomes = Outcomes(tree, treatment)
        conflicts = outcomes.conflicts()
        if not conflicts:
            visit_of: dict[int, Visit] = {}
            for visit in outcomes.visits():
                visit_of.setdefault(visit.record, visit)
            # The records stay as they are. Each leaf gets one more label.
            for record in labels:
                labels[record] = (*labels[record], outcomes.group_label(visit_of[record]))
            continue
        modules = _find_splittable_modules(outcomes, conflicts, transform)
        cuts.append(_cut(outcomes, conflicts, modules, origins))
        # From here on, records are numbered as after the split: one for each piece.
        structure, pieces = split_records(outcomes)
        first_visits = outcomes.first_visits()
        labels_of_pieces: dict[int, tuple[Any, ...]] = {}
        for record, piece in enumerate(pieces):
            if piece.record in labels:
                label = outcomes.group_label(first_visits[piece])
                labels_of_pieces[record] = (*labels[piece.record], label)
        labels = labels_of_pieces
        tree = FlatDag.of(structure, [tree.objects[piece.record] for piece in pieces])
        origins = [piece.record if origins is None else origins[piece.record] for piece in pieces]
    return LabelledTree(structure, origins, [labels[record] for record in tree.leaf_numbers], cuts)


def _cut(
    outcomes: Outcomes, conflicts: Collection[int], modules: Collection[int], origins: Sequence[int] | None
) -> Cut:
    """Sorts the records that are split into leaves, modules and containers."""
    tree = outcomes.tree
    leaves: list[int] = []
    split_modules: list[int] = []
    containers: list[int] = []
    for record in conflicts:
        node = tree.node(record)
        if node is None:
            leaves.append(record)
        elif node.type.carries_identity:
            (split_modules if record in modules else containers).append(record)
    return Cut(outcomes.with_objects(()), leaves, split_modules, containers, origins)


def _find_splittable_modules(
    outcomes: Outcomes, conflicts: Mapping[int, Sequence[Visit]], transform: str
) -> Collection[int]:
    """Refuses conflicts that must not be split, and returns the modules that may be.

    Raises:
        InconsistentSharingError: if something else has a conflict that must not be split.
    """
    tree = outcomes.tree
    nodes = {record: tree.node(record) for record in conflicts}
    modules = {record for record, node in nodes.items() if node is not None and not node.type.is_plain}
    splittable = outcomes.treatment.splittable_modules(outcomes) if modules else ()
    # Modules and references are refused wherever they are.
    containers: set[int] = set()
    for record in sorted(conflicts):
        node = nodes[record]
        if record in modules.difference(splittable) or isinstance(tree.objects[record], jax.Ref):
            raise_inconsistent(outcomes, record, transform)
        if node is not None and node.type.carries_identity:
            containers.add(record)
    # Containers are refused within one module, and so are arrays where the treatment says so.
    refused: set[int] = set()
    if containers:
        each_alone = [[visit] for _, visit in outermost_modules(outcomes)]
        refused |= conflicts_within(outcomes, containers, each_alone)
    if outcomes.treatment.within_module == REFUSED:
        arrays = {record for record, node in nodes.items() if node is None}
        refused |= conflicts_within(outcomes, arrays, modules_by_argument(outcomes))
    if refused:
        raise_inconsistent(outcomes, min(refused), transform)
    return splittable


# ---- Results ----


class GroupedResult(NamedTuple):
    """The leaf groups of a result, and the label of each."""

    labels: Sequence[Any]
    groups: tuple[LeafGroup, ...]


def group_result(
    tree: FlatDag,
    treatment: Treatment,
    labels: Sequence[Any] | None,
    transform: str,
    op_of: Callable[[Outcomes], Callable[[Piece], Op | None]] | None = None,
) -> GroupedResult:
    """Groups the leaves of a function's result by label. Objects with conflicts are split without a word.

    Args:
        tree: the result, with its objects.
        treatment: what the transform will do with it.
        labels: labels of the groups, in order; a group may be empty. None for one group for each label that occurs.
        transform: name of the transform, for errors.
        op_of: (outcomes) → (piece) → op that replaces what was packed for this piece, or None to keep that.

    Raises:
        InconsistentSharingError: if the treatment refuses conflicts within one module, and there is one.
        SharingMismatchError: if the prefix does not fit the tree.
    """
    outcomes = Outcomes(tree, treatment)
    if treatment.within_module == REFUSED:
        objects = [record for record, (op, _) in enumerate(tree.records) if _is_object(op)]
        refused = conflicts_within(outcomes, objects, modules_by_argument(outcomes))
        if refused:
            raise_inconsistent_result(outcomes, min(refused), transform)
    structure, pieces = split_records(outcomes, op_of(outcomes) if op_of else lambda _: None)
    first_visits = outcomes.first_visits()
    leaf_pieces = [piece for (op, _), piece in zip(structure.records, pieces, strict=True) if op is LEAF]
    leaves = [tree.objects[piece.record] for piece in leaf_pieces]
    leaf_labels = [outcomes.group_label(first_visits[piece]) for piece in leaf_pieces]
    if labels is None:
        labels = distinct_labels(leaf_labels) or [None]
    structure = with_leaf_notes(structure, leaves)
    groups: list[LeafGroup] = []
    for label in labels:
        places = tuple([i for i, leaf_label in enumerate(leaf_labels) if is_same_label(leaf_label, label)])
        groups.append(LeafGroup([leaves[i] for i in places], LeafSelection(structure, places)))
    return GroupedResult(labels, tuple(groups))


def with_leaf_notes(structure: Structure, leaves: Sequence[Any]) -> Structure:
    """Returns the structure with what was noted of its leaves, so that calls that JAX caches note it again."""
    noted, tied = which_are_noted(leaves), which_are_tied_values(leaves)
    return intern(structure.records, structure.root, 0, None, noted, tied) if noted or tied else structure


def _is_object(op: Op) -> bool:
    return op is LEAF or (type(op) is Node and op.type.carries_identity)


# ---- Both ----


def split_records(
    outcomes: Outcomes, op_of: Callable[[Piece], Op | None] = lambda _: None
) -> tuple[Structure, Sequence[Piece]]:
    """Renumbers the records of a tree, one for each piece. Returns the new structure, and the piece of each record.

    Args:
        outcomes: outcomes of every record.
        op_of: (piece) → op that replaces what was packed for this piece, or None to keep that.
    """
    records = outcomes.tree.records
    first_visits = outcomes.first_visits()

    def expand(piece: Piece) -> tuple[Op, Sequence[Piece]]:
        op, children = records[piece.record]
        replacement = op_of(piece)
        # `Given` stands for an object of the caller's, which is not built, so its children do not go out.
        if type(replacement) is Given or not children:
            return replacement or op, ()
        visits = outcomes.children(first_visits[piece])
        return replacement or op, [Piece(visit.record, outcomes[visit]) for visit in visits]

    root = Piece(outcomes.root.record, outcomes[outcomes.root])
    table, pieces = canonical(root, expand)
    return intern(table, len(table) - 1), list(pieces)


def conflicts_within(outcomes: Outcomes, records: Collection[int], groups: Sequence[Sequence[Visit]]) -> set[int]:
    """Finds the records that the edges below one group of visits reach with two outcomes.

    Args:
        outcomes: outcomes of every record.
        records: the records that are asked about.
        groups: visits of modules. Two groups may reach one record with two outcomes.
    """
    conflicts: set[int] = set()
    for group in groups if records else ():
        first_outcome: dict[int, int] = {}
        for root in group:
            for visit in outcomes.reachable_from(root):
                if visit.record not in records:
                    continue
                outcome = outcomes[visit]
                if first_outcome.setdefault(visit.record, outcome) != outcome:
                    conflicts.add(visit.record)
    return conflicts


def modules_by_argument(outcomes: Outcomes) -> list[list[Visit]]:
    """Visits of the outermost modules, one list for each argument or, in a result that is a tuple, for each entry.

    A dictionary of modules is one model just as a module is, so a tie between two of its modules is no accident.
    """
    groups: dict[Any, list[Visit]] = {}
    root = outcomes.tree.node(outcomes.root.record)
    has_entries = root is not None and (root.type.cls is tuple or root.type.cls is Arguments)
    for path, visit in outermost_modules(outcomes, has_containers=outcomes.treatment.has_containers):
        groups.setdefault(path[:1] if has_entries else (), []).append(visit)
    return list(groups.values())


def outermost_modules(outcomes: Outcomes, *, has_containers: bool = False) -> list[tuple[Path, Visit]]:
    """Visits of the modules that are not below another module, each with its path, in flatten order.

    Args:
        outcomes: outcomes of every record.
        has_containers: True to count mutable containers outside modules as modules.
    """
    modules: list[tuple[Path, Visit]] = []
    stack: list[tuple[Path, Visit]] = [((), outcomes.root)]
    while stack:
        path, visit = stack.pop()
        node = outcomes.tree.node(visit.record)
        if node is None:
            continue
        if node.type.is_plain and not (has_containers and node.type.is_mutable):
            children = list(zip(node.keys, outcomes.children(visit), strict=True))
            stack.extend([((*path, key), child) for key, child in reversed(children)])
        else:
            modules.append((path, visit))
    return modules
