"""Groups the leaves of a tree by what a transform does with them, and splits objects that have conflicts.

A *label* is what a transform does with a leaf, such as the axis along which it is mapped. A *treatment* gives each leaf
of a tree its label. A *leaf group* has the leaves with one label, and is one argument of the transform.

Arrays alias by accident: a target network starts with the model's arrays, or a filtered model is passed beside the
whole model. So a tie of an array or of a mutable container holds only under one label. A tie between two labels is cut:
the object is *split* into one object for each label, as in vanilla JAX. A module or a reference (`jax.Ref`) in the
arguments is split only if its treatment allows that. Otherwise it is an error. Results are new objects, so every object
in a result may be split.

A *record* is the number of an object in a flat DAG. The *outcome* of an object is what the labels of its leaves come
to. An object with two outcomes has a *conflict*. A *piece* is a record with one of its outcomes. A split renumbers the
records, so that each piece is a record. A *visit* is a record with the part of the prefix (`in_axes`) under which it is
reached. `_leaf_labels` computes all of these.

    f(Pair(w, 1), [w, Pair(w, 2)])    in_axes (0, 1)      w → one record, reached with the outcomes 0 and 1
                                      after the split     w → two records, one leaf each
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from ..core._call_arguments import Arguments
from ..core._structure import LEAF, FlatDag, Given, Node, Op, Path, Structure, canonical_records, intern
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
    """The ties in a call's arguments that one treatment cuts.

    Later calls of the same structure use this object, too, so it holds no object of a call. All records in it are
    numbered as before this cut.

    Attributes:
        outcomes: outcomes of every record, without objects. See `in_call`.
        leaves: records of the arrays that are split.
        modules: records of the modules that are split.
        containers: records of the mutable containers that are split.
        origins: for each record before this cut, its record before all cuts. None if this is the first cut.
    """

    outcomes: Outcomes
    leaves: Sequence[int]
    modules: Sequence[int]
    containers: Sequence[int]
    origins: Sequence[int] | None

    def in_call(self, objects: Sequence[Any]) -> "Cut":
        """Returns a copy of the cut, with the objects of one call in its outcomes.

        Args:
            objects: the object of each record, numbered as before all cuts.
        """
        if self.origins is not None:
            objects = [objects[record] for record in self.origins]
        return self._replace(outcomes=self.outcomes.with_objects(objects))


class LabelledTree(NamedTuple):
    """The arguments of a call with the labels of each leaf, after all cuts.

    Attributes:
        structure: structure of the arguments after the cuts.
        origins: for each record of `structure`, the record before all cuts. None if nothing was cut.
        labels: for each leaf of `structure`, in flatten order, a tuple of labels: one for each treatment.
        cuts: one entry for each treatment that cut something.
    """

    structure: Structure
    origins: Sequence[int] | None
    labels: Sequence[tuple[Any, ...]]
    cuts: Sequence[Cut]


def label_arguments(
    tree: FlatDag, structure: Structure, treatments: Sequence[Treatment], transform: str
) -> LabelledTree:
    """Labels the leaves of a call's arguments, and splits the objects that have conflicts and may be split.

    Args:
        tree: the arguments, with their objects.
        structure: their structure.
        treatments: what the transform does with the arguments. One after the other is applied, each to the tree with
            the splits of those before.
        transform: name of the transform, for errors.

    Raises:
        InconsistentSharingError: if an object has a conflict and must not be split. See `_refuse_conflicts`.
        SharingMismatchError: if a prefix does not fit the tree.
    """
    # Record of a leaf → its labels under the treatments so far. In the loop `tree`, `structure`, `labels` and `origins`
    # speak of the tree after the splits so far.
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
            # Nothing is split. All visits of a leaf have one outcome, so the label of its first visit is that of all.
            for record in labels:
                labels[record] = (*labels[record], outcomes.group_label(visit_of[record]))
            continue
        modules = _refuse_conflicts(outcomes, conflicts, transform)
        cuts.append(_cut(outcomes, conflicts, modules, origins))
        # From here on, records are numbered as after the split: each piece is a record.
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
    """Makes a `Cut`: sorts the records that are split into leaves, modules and containers.

    Other nodes, such as tuples, are split without being listed: they carry no identity.

    Args:
        outcomes: outcomes of every record.
        conflicts: the records that are split.
        modules: records of the modules that may be split.
        origins: for each record, its record before all cuts. None if this is the first cut.
    """
    tree = outcomes.tree
    leaves: list[int] = []
    split_modules: list[int] = []
    containers: list[int] = []
    for record in conflicts:
        node = tree.node(record)
        if node is None:
            leaves.append(record)
        elif node.type.carries_identity:
            # Of nodes with identity, every module is in `modules`, or there would have been an error.
            (split_modules if record in modules else containers).append(record)
    return Cut(outcomes.with_objects(()), leaves, split_modules, containers, origins)


def _refuse_conflicts(outcomes: Outcomes, conflicts: Mapping[int, Sequence[Visit]], transform: str) -> Collection[int]:
    """Raises an error if an object has a conflict and must not be split.

    Args:
        outcomes: outcomes of every record.
        conflicts: the records with a conflict, each with one visit for each outcome.
        transform: name of the transform, for errors.

    Returns:
        The records of the modules that may be split. Empty if no module has a conflict.

    Raises:
        InconsistentSharingError: in three cases. A reference has a conflict, or a module that the treatment does not
            allow to be split. A container or a module has two outcomes within one outermost module. An array has two
            outcomes within the modules of one argument, and the treatment refuses that (`within_module`).
    """
    tree = outcomes.tree
    nodes = {record: tree.node(record) for record in conflicts}
    modules = {record for record, node in nodes.items() if node is not None and not node.type.is_plain}
    splittable = outcomes.treatment.splittable_modules(outcomes) if modules else ()
    # Case 1: references, and modules that must not be split. Collect the other nodes with identity: containers, and
    # modules that may be split.
    nodes_with_identity: set[int] = set()
    for record in sorted(conflicts):
        node = nodes[record]
        if record in modules.difference(splittable) or isinstance(tree.objects[record], jax.Ref):
            raise_inconsistent(outcomes, record, transform)
        if node is not None and node.type.carries_identity:
            nodes_with_identity.add(record)
    # Case 2: a collected node has two outcomes within one outermost module. The module would have to hold two copies.
    refused: set[int] = set()
    if nodes_with_identity:
        # A group for each module, since two outcomes from two modules are allowed.
        group_for_each_module = [[visit] for _, visit in outermost_modules(outcomes)]
        refused |= conflicts_within(outcomes, nodes_with_identity, group_for_each_module)
    # Case 3: an array has two outcomes within the modules of one argument.
    if outcomes.treatment.within_module == REFUSED:
        arrays = {record for record, node in nodes.items() if node is None}
        refused |= conflicts_within(outcomes, arrays, modules_by_argument(outcomes))
    if refused:
        raise_inconsistent(outcomes, min(refused), transform)
    return splittable


# ---- Results ----


class GroupedResult(NamedTuple):
    """The leaf groups of a result.

    Attributes:
        labels: label of each group.
        groups: the groups.
    """

    labels: Sequence[Any]
    groups: tuple[LeafGroup, ...]


def group_result(
    tree: FlatDag,
    treatment: Treatment,
    labels: Sequence[Any] | None,
    transform: str,
    new_op_of: Callable[[Outcomes], Callable[[Piece], Op | None]] | None = None,
) -> GroupedResult:
    """Groups the leaves of a function's result by label. Objects with conflicts are split, without a warning.

    Args:
        tree: the result, with its objects.
        treatment: what the transform will do with the result.
        labels: labels of the groups, in order; a group may be empty. None to make one group for each label that occurs.
        transform: name of the transform, for errors.
        new_op_of: (outcomes of the result) → a function for the argument `op_of` of `split_records`. It puts operations
            in place of those of the result. None to replace nothing.

    Raises:
        InconsistentSharingError: if the treatment refuses conflicts within modules (`within_module`), and there is one.
            Also if `new_op_of` raises it.
        SharingMismatchError: if the prefix does not fit the tree.
    """
    outcomes = Outcomes(tree, treatment)
    # Refuse conflicts within the modules of one entry of the result, if the treatment says so.
    if treatment.within_module == REFUSED:
        objects = [record for record, (op, _) in enumerate(tree.records) if _is_object(op)]
        refused = conflicts_within(outcomes, objects, modules_by_argument(outcomes))
        if refused:
            raise_inconsistent_result(outcomes, min(refused), transform)
    # Split the objects with conflicts. The `lambda` returns None, so it replaces no operation.
    structure, pieces = split_records(outcomes, new_op_of(outcomes) if new_op_of else lambda _: None)
    # Find the leaves after the split, and the label of each.
    first_visits = outcomes.first_visits()
    leaf_pieces = [piece for (op, _), piece in zip(structure.records, pieces, strict=True) if op is LEAF]
    leaves = [tree.objects[piece.record] for piece in leaf_pieces]
    leaf_labels = [outcomes.group_label(first_visits[piece]) for piece in leaf_pieces]
    # A result without leaves has one empty group with the label None, since the caller's side needs its structure.
    if labels is None:
        labels = distinct_labels(leaf_labels) or [None]
    structure = with_leaf_notes(structure, leaves)
    # Make the groups.
    groups: list[LeafGroup] = []
    for label in labels:
        places = tuple([i for i, leaf_label in enumerate(leaf_labels) if is_same_label(leaf_label, label)])
        groups.append(LeafGroup([leaves[i] for i in places], LeafSelection(structure, places)))
    return GroupedResult(labels, tuple(groups))


def with_leaf_notes(structure: Structure, leaves: Sequence[Any]) -> Structure:
    """Returns a structure with the notes of its leaves. If no leaf has a note, returns the structure itself.

    A note says, for example, that a tie of the leaf was undone on purpose (`ties/_leaf_notes`). JAX runs a cached
    program without a trace. The caller's side then gives the notes in the structure to the leaves of the result.

    Args:
        structure: a structure without notes.
        leaves: its leaves, which may have notes.
    """
    # Positions of the leaves whose tie was undone or reported, and of those tied outside modules.
    noted, tied = which_are_noted(leaves), which_are_tied_values(leaves)
    # 0 and None: the structure belongs to no `Context`.
    return intern(structure.records, structure.root, 0, None, noted, tied) if noted or tied else structure


def _is_object(op: Op) -> bool:
    """Returns True for a traced leaf and for a node that carries identity. A conflict of these can be refused."""
    return op is LEAF or (type(op) is Node and op.type.carries_identity)


# ---- Arguments and results ----


def split_records(
    outcomes: Outcomes, op_of: Callable[[Piece], Op | None] = lambda _: None
) -> tuple[Structure, Sequence[Piece]]:
    """Splits all objects with conflicts: makes the structure in which each piece is a record.

    Args:
        outcomes: outcomes of every record.
        op_of: (piece) → a new operation for the piece, or None to keep its operation. A `Given` stands for an object
            of the caller. It has no children, so everything below the piece is left out.

    Returns:
        The new structure, and the piece of each of its records.
    """
    records = outcomes.tree.records
    first_visits = outcomes.first_visits()

    def expand(piece: Piece) -> tuple[Op, Sequence[Piece]]:
        """Returns the operation of a piece, and the pieces of its children."""
        op, children = records[piece.record]
        replacement = op_of(piece)
        # The caller has the object of a `Given` already, so nothing below it is a part of the result.
        if type(replacement) is Given or not children:
            return replacement or op, ()
        visits = outcomes.children(first_visits[piece])
        return replacement or op, [Piece(visit.record, outcomes[visit]) for visit in visits]

    root = Piece(outcomes.root.record, outcomes[outcomes.root])
    # `canonical_records` numbers the pieces as a walk would number objects: children first, the root last.
    table, pieces = canonical_records(root, expand)
    return intern(table, len(table) - 1), list(pieces)


def conflicts_within(outcomes: Outcomes, records: Collection[int], groups: Sequence[Sequence[Visit]]) -> set[int]:
    """Finds the records that are reached with two outcomes from the modules of one group.

    A group here is a list of visits of modules, and not a leaf group. If a record is reached with one outcome from each
    of two groups, it does not count, even if the two outcomes differ.

    Args:
        outcomes: outcomes of every record.
        records: the records in question.
        groups: for each group, visits of the modules in it.
    """
    conflicts: set[int] = set()
    for group in groups if records else ():
        # Record → the first outcome with which this group reaches it.
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
    """Returns visits of the outermost modules: one list for each argument or, in a result, for each entry of a tuple.

    All modules of an argument count together: a dictionary of modules is one model, as a module is. So a tie between
    two of its modules is no accident.
    """
    # First key of the path, which is the argument or the entry → visits. A result that is no tuple has the key `()`.
    groups: dict[Any, list[Visit]] = {}
    root = outcomes.tree.node(outcomes.root.record)
    has_entries = root is not None and (root.type.cls is tuple or root.type.cls is Arguments)
    for path, visit in outermost_modules(outcomes, has_containers=outcomes.treatment.has_containers):
        groups.setdefault(path[:1] if has_entries else (), []).append(visit)
    return list(groups.values())


def outermost_modules(outcomes: Outcomes, *, has_containers: bool = False) -> list[tuple[Path, Visit]]:
    """Returns the modules that are not inside another module, in flatten order: for each its path and its visit.

    A module at several paths has one entry for each path.

    Args:
        outcomes: outcomes of every record.
        has_containers: True to count mutable containers outside modules as modules.
    """
    modules: list[tuple[Path, Visit]] = []
    stack: list[tuple[Path, Visit]] = [((), outcomes.root)]
    while stack:
        path, visit = stack.pop()
        node = outcomes.tree.node(visit.record)
        # A leaf or a static value outside modules.
        if node is None:
            continue
        # Look for modules in plain containers. Children are pushed in reverse, to come off the stack in flatten order.
        if node.type.is_plain and not (has_containers and node.type.is_mutable):
            children = list(zip(node.keys, outcomes.children(visit), strict=True))
            stack.extend([((*path, key), child) for key, child in reversed(children)])
        else:
            modules.append((path, visit))
    return modules
