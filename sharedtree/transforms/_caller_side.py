"""The caller's side of one call: all arguments are one graph, which is flattened once and grouped by label.

    f(Net(w, b), x)    packed    Arguments(Net(0, 1), 2)    leaves w b x
                       grouped   one group [w, b, x], or one for each label
                       results   gathered from the groups in which they come, and built

A *treatment* is what a transform does with each leaf, such as the axis along which it is mapped. It gives each leaf a
*label*, here the axis. If an array has two labels, one at each of its paths, its tie is *cut*: it becomes two leaves.

How the leaves of a structure are grouped depends on the transform, on the structure, and on what the transform asks of
each leaf (its rank, whether it is inexact). So a *plan* is made once for these, and kept with the structure.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from ..core._call_arguments import Arguments
from ..core._jax_internals import current_trace, with_enclosing
from ..core._pack_and_unpack import Rules, Tags, build, pack
from ..core._sharing import distinct
from ..core._structure import FlatDag, Structure
from ..ties._leaf_notes import note, note_tied_values
from ._grouping_leaves import Cut, LabelledTree, label_arguments
from ._joining_trees import Repacking
from ._leaf_groups import LeafGroup, LeafSelection, gather_leaves
from ._leaf_labels import Treatment, distinct_labels

V = TypeVar("V")

MAX_PLANS = 64
"""Plans that are kept with one structure. A plan that was dropped is made again, and equals the old one for JAX."""

SINGLE_GROUP: Sequence[tuple[Any, ...]] = ((),)
"""Group labels of a transform that treats all leaves alike: one group, without any label."""


class Plan(NamedTuple):
    """A grouping of the leaves of a structure.

    Attributes:
        structure: structure after all cuts, from which the arguments of the function are built.
        origins: for each of its records, the packed record from which it was cut. None if nothing was cut.
        labels: for each group, its labels, one for each treatment.
        selections: for each group, which leaves of `structure` are in it.
        sources: for each group, the positions of its leaves among the packed ones. None for all in order.
        cuts: the ties that were cut.
    """

    structure: Structure
    origins: Sequence[int] | None
    labels: tuple[tuple[Any, ...], ...]
    selections: tuple[LeafSelection, ...]
    sources: tuple[tuple[int, ...] | None, ...]
    cuts: Sequence[Cut]


class Grouping(NamedTuple):
    """Treatments of arguments by a transform, and everything else on which a plan depends.

    Attributes:
        title: name of the transform, for errors.
        treatments: (arguments as packed) → treatments of these.
        key: what `treatments` depends on besides the structure. None to keep no plan.
        facts_of_leaves: (leaves) → the facts about the leaves on which `treatments` depends, such as their ranks. They
            become part of the plan's key. The function may return None: then no plan is kept. The field itself is None
            if `treatments` does not depend on the leaves.
        groups: labels of the groups that always exist, in this order, even if no leaf has them. Other groups follow.
        holds_for_like_calls: True if a later call with as many arguments and the same keywords has the same `key` and
            `facts_of_leaves`, so that C may group its leaves.
    """

    title: str
    treatments: Callable[[FlatDag], Sequence[Treatment]]
    key: Any = None
    facts_of_leaves: Callable[[Sequence[Any]], Any] | None = None
    groups: Sequence[tuple[Any, ...]] = ()
    holds_for_like_calls: bool = True


class Call:
    """A running call. One that runs in C is a tuple of the first five arguments, until `call_of` makes the object.

    Args:
        arguments: the arguments as the caller wrote them.
        plan: how their leaves are grouped.
        leaves: the packed leaves.
        packed_objects: the caller's object of each packed record, before any cut.
        trace: the trace that was active when the call began. None for the current one.
        grouping: what the transform does with the arguments. None if C made the call.

    Attributes:
        tree: the arguments after all cuts, with the caller's objects.
        groups: the leaf groups, which the transform gets.
        result_labels: labels of the groups of the result. A trace fills them in if only the result tells them.
        findings: what a trace found out about the arguments, for the adapter. None if it found nothing.
    """

    __slots__ = (
        "arguments",
        "findings",
        "grouping",
        "groups",
        "leaves",
        "packed_objects",
        "plan",
        "result_labels",
        "trace",
        "tree",
    )

    def __init__(
        self,
        arguments: Arguments,
        plan: Plan,
        leaves: Sequence[Any],
        packed_objects: Sequence[Any],
        trace: Any = None,
        grouping: Grouping | None = None,
    ) -> None:
        """Makes the tree after all cuts. `with_groups` makes the groups."""
        self.arguments = arguments
        self.packed_objects = packed_objects
        objects = packed_objects if plan.origins is None else [packed_objects[record] for record in plan.origins]
        self.tree = FlatDag.of(plan.structure, objects)
        self.plan = plan
        self.leaves = leaves
        self.result_labels: list[Any] = []
        self.findings: Any = None
        self.trace = current_trace() if trace is None else trace
        self.groups: list[LeafGroup] = []
        self.grouping = grouping

    def with_groups(self) -> "Call":
        """Makes the groups, and returns the call itself. The first group refers to the call until the call ends."""
        leaves = self.leaves
        for selection, positions in zip(self.plan.selections, self.plan.sources, strict=True):
            group_leaves = list(leaves) if positions is None else [leaves[position] for position in positions]
            self.groups.append(LeafGroup(group_leaves, selection))
        # The function's side finds the call there. All calls share the selections of the plan, so the first is copied.
        if self.groups:
            first = self.groups[0]
            first.selection = LeafSelection(first.selection.structure, first.selection.numbers, self)
        return self

    @property
    def objects(self) -> Any:
        """The caller's object of each record, after all cuts."""
        return self.tree.objects

    def leaves_labelled(self, label: Any) -> set[int]:
        """Finds the records of the leaves that have a label under the first treatment."""
        structure = self.plan.structure
        records: set[int] = set()
        for labels, selection in zip(self.plan.labels, self.plan.selections, strict=True):
            if labels and labels[0] == label:
                positions = range(structure.num_leaves) if selection.numbers is None else selection.numbers
                records.update([structure.leaf_numbers[position] for position in positions])
        return records

    @property
    def cuts(self) -> list[Cut]:
        """The ties that were cut, with the caller's objects."""
        return [cut.in_call(self.packed_objects) for cut in self.plan.cuts]

    @property
    def statics(self) -> tuple[Any, ...]:
        """The static arguments (`static_argnums`), which the transform gets after the groups."""
        return self.arguments.statics

    @property
    def outer(self) -> Sequence[Any]:
        """The traces that were active when the call began, innermost first."""
        return with_enclosing(self.trace)

    def end(self) -> None:
        """Drops the first group's reference to the call. JAX may keep the aux data of a group, but no arguments."""
        # There are no groups before `with_groups`.
        for group in self.groups[:1]:
            group.selection.call = None

    def __enter__(self) -> "Call":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def enter(arguments: Arguments, rules: Rules, grouping: Grouping) -> Call:
    """Packs the arguments of a call and groups their leaves. Returns the call, with its groups.

    Args:
        arguments: the arguments.
        rules: how they are packed, as the policy says.
        grouping: what the transform does with them.

    Raises:
        InconsistentSharingError: if a module that holds traced leaves would be treated in two ways.
        CycleError: if an object contains itself.
        SharingMismatchError: if an option does not fit the arguments.
    """
    tags = Tags()
    leaves, structure = pack(arguments, tags, rules)
    plan = plan_for(FlatDag.of(structure, tags.objects), structure, leaves, grouping)
    return Call(arguments, plan, leaves, tags.objects, grouping=grouping).with_groups()


def repack_call(call: Call, how: Repacking) -> Call:
    """Makes a new call with the same arguments, which are packed and grouped in another way. Returns it.

    Args:
        call: the old call. It is not changed.
        how: the other way to pack the arguments. It cuts ties, and makes traced leaves of some static numbers.
    """
    structure = how.structure(call.tree)
    tree = FlatDag.of(structure, [call.objects[record] for record in how.origins])
    leaves = list(tree.leaves.values())
    assert call.grouping is not None
    plan = plan_for(tree, structure, leaves, call.grouping)
    return Call(call.arguments, plan, leaves, tree.objects, grouping=call.grouping).with_groups()


def plan_for(tree: FlatDag, structure: Structure, leaves: Sequence[Any], grouping: Grouping) -> Plan:
    """Returns the plan for arguments: one that was kept with their structure, or a new one.

    Args:
        tree: the arguments, with their objects.
        structure: their structure.
        leaves: their leaves.
        grouping: what the transform does with them.
    """
    key = grouping.key
    if key is not None and grouping.facts_of_leaves is not None:
        answers = grouping.facts_of_leaves(leaves)
        key = None if answers is None else (key, answers)
    plan = None if key is None else structure.plans.get(key)
    if plan is None:
        plan = _new_plan(tree, structure, grouping)
        if key is not None:
            plan = keep(structure, key, plan)
    return plan


def keep(structure: Structure, key: Any, value: V) -> V:
    """Keeps a value with a structure under a key, and returns it. If two threads do so at once, both get one value.

    Only the latest `MAX_PLANS` values are kept.
    """
    value = structure.plans.setdefault(key, value)
    for oldest in list(structure.plans)[:-MAX_PLANS]:
        structure.plans.pop(oldest, None)
    return value


def call_of(call_or_parts: Any) -> Any:
    """Returns the call that a selection refers to, or None if it refers to none.

    The selection of a call that runs in C has a tuple of the arguments of `Call`, from which the call is made here.
    """
    return Call(*call_or_parts) if type(call_or_parts) is tuple else call_or_parts


def _new_plan(tree: FlatDag, structure: Structure, grouping: Grouping) -> Plan:
    treatments = grouping.treatments(tree)
    # The transform treats all leaves alike: they are one group, in the order in which they were packed.
    if not treatments:
        return Plan(structure, None, tuple(SINGLE_GROUP), (LeafSelection(structure),), (None,), ())
    labelled = label_arguments(tree, structure, treatments, grouping.title)
    return _plan_of(labelled, tree, grouping.groups, len(treatments))


def _plan_of(
    labelled: LabelledTree, packed: FlatDag, initial_groups: Sequence[tuple[Any, ...]], num_treatments: int
) -> Plan:
    """Makes one group for each distinct tuple of labels.

    Args:
        labelled: the arguments after all cuts.
        packed: the arguments before any cut.
        initial_groups: labels of the groups that always exist.
        num_treatments: number of labels of each leaf, one for each treatment.
    """
    structure, origins = labelled.structure, labelled.origins
    # Without leaves there is one empty group even so, since its aux data holds the structure.
    labels = distinct_labels([*initial_groups, *labelled.labels]) or [(None,) * num_treatments]
    # Nothing was cut, and all leaves are one group in the order in which they were packed.
    if len(labels) <= 1 and origins is None:
        return Plan(structure, None, tuple(labels), (LeafSelection(structure),), (None,), labelled.cuts)
    # For each leaf after the cuts, its position among the packed leaves. Those of a leaf that was cut are the same.
    position_of = {record: position for position, record in enumerate(packed.leaf_numbers)}
    sources = [position_of[record if origins is None else origins[record]] for record in structure.leaf_numbers]
    members: list[tuple[int, ...]] = []
    for group_labels in labels:
        positions = [i for i, leaf_labels in enumerate(labelled.labels) if leaf_labels == group_labels]
        members.append(tuple(positions))
    return Plan(
        structure,
        origins,
        tuple(labels),
        tuple([LeafSelection(structure, positions) for positions in members]),
        tuple([tuple([sources[position] for position in positions]) for positions in members]),
        labelled.cuts,
    )


def leave(
    groups: Sequence[LeafGroup],
    callers_object: Any = None,
    update: Callable[[int, Any], Any] | None = None,
) -> Any:
    """Builds a result from its leaf groups. All nodes are new, except objects of the caller's that occur in it.

    Args:
        groups: all groups of one tree.
        callers_object: (record) → the caller's object that stands there unchanged. None if there are none.
        update: (record, new content) → the caller's object that gets this content, now or later. None if there are
            none.
    """
    # JAX may return one array for two leaves. That is no tie, so it is copied.
    structure, leaves = groups[0].selection.structure, distinct(gather_leaves(groups))
    table: list[Any] = []
    build(structure, leaves, table, callers_object, update)
    # What the trace noted of the leaves is noted again, since JAX may have run the program without a trace.
    if structure.is_noted:
        note(leaves[i] for i in structure.noted)
        note_tied_values(leaves[i] for i in structure.tied_values)
    return table[structure.root]
