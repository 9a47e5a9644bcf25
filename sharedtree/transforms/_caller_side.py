"""The caller's side of a call: all arguments are one graph, which is flattened once and grouped by label.

    f(Net(w, b), x)    pack      structure Arguments(Net(0, 1), 2), leaves [w, b, x]
                       group     one leaf group [w, b, x], or one for each label: [w, x] and [b]
                       build     gather the leaves of the result from its groups, and build the result

A *leaf group* is a pytree node with some of the leaves. The transform gets leaf groups as its arguments. A *record* is
the number of one object in the flat DAG of the arguments, which has the objects in a table.

A *treatment* is what a transform does with each leaf, such as the axis along which it is mapped. It gives each leaf a
*label*, here the axis. If an array has two labels, one at each of its paths, its tie is *cut*: it becomes two leaves.

The groups depend on the transform, on the structure, and on a few facts about each leaf, such as its rank or whether it
is inexact. For each combination of these a *plan* is made once, and kept with the structure.

C does a call like an earlier one: it packs, groups, calls the *transformed function*, gathers the leaves, and builds.
How to pack a call depends on the number of its arguments and on its keywords. Which transformed function it needs
depends on the labels. Python finds out both in a first call, and keeps them with the *wrapper*, the function that the
user gets, such as `st.jit(f)`:

    step(model, x)      in Python    settings.patterns[2] = CallPattern(…, functions={labels: transformed function})
    step(model, x)      in C         finds the pattern by the 2, and the transformed function by the labels

If a call is not like an earlier one, C leaves it to Python. The user's function has not been called by then. C reads
the fields of `Plan`, `CallPattern` and `CallSettings` by position.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ..core._call_arguments import Arguments
from ..core._jax_internals import current_trace, hide_frames, with_enclosing_traces
from ..core._pack_and_unpack import Rules, Tags, build, flags_of, native, pack
from ..core._sharing import with_repeats_copied
from ..core._structure import FlatDag, Structure
from ..ties._leaf_notes import note, note_tied_values
from ..ties._policy_and_context import Policy, PolicyOption, current_policy
from ._grouping_leaves import Cut, LabelledTree, label_arguments
from ._joining_trees import Repacking
from ._leaf_groups import LeafGroup, LeafSelection, gather_leaves
from ._leaf_labels import Treatment, distinct_labels

V = TypeVar("V")

MAX_PLANS = 64
"""Number of plans that are kept with one structure. A dropped plan is made again when it is needed.

JAX compares the new plan equal to the old one, and does not trace again.
"""

SINGLE_GROUP: Sequence[tuple[Any, ...]] = ((),)
"""Group labels of a transform that treats all leaves alike: one group, without any label."""


class Plan(NamedTuple):
    """The leaf groups of a structure, and the structure after its ties were cut.

        f(w, w)   in_axes=(0, 1)      structure before    Arguments(0, 0)        leaves [w]
                                      structure           Arguments(0, 1)        leaves [w, w]
                                      origins             (0, 0, 1)              the last record is the root
                                      labels              ((0,), (1,))           two groups
                                      sources             ((0,), (0,))           the leaf 0 goes into both

    Attributes:
        structure: structure after all cuts. The arguments of the function are built from it.
        origins: for each record of `structure`, the record before the cuts from which it was made. None if nothing was
            cut.
        labels: for each group, its labels, one for each treatment.
        selections: for each group, which leaves of `structure` are in it.
        sources: for each group, the positions of its leaves among the leaves before the cuts. None if the group has all
            of them in order.
        cuts: the ties that were cut. Records in it are numbered as before the cut.
    """

    structure: Structure
    origins: Sequence[int] | None
    labels: tuple[tuple[Any, ...], ...]
    selections: tuple[LeafSelection, ...]
    sources: tuple[tuple[int, ...] | None, ...]
    cuts: Sequence[Cut]


class Grouping(NamedTuple):
    """What a transform does with arguments, and everything else on which a plan depends.

    Attributes:
        title: name of the transform, for errors.
        treatments: (the flat DAG of the arguments) → their treatments. Each treatment gives each leaf one label. With
            no treatment, all leaves form one group.
        key: hashable, all on which `treatments` depends besides the structure and `facts_of_leaves`. None to make a new
            plan in each call.
        facts_of_leaves: (leaves) → the facts about the leaves on which `treatments` depends, such as their ranks. They
            become part of the plan's key. The function may return None: then no plan is kept. The field itself is None
            if `treatments` does not depend on the leaves.
        groups: labels of the groups that always exist, in this order, even if no leaf has them. Other groups follow.
        holds_for_like_calls: True if each later call with as many arguments and the same keywords has the same `key`
            and the same function `facts_of_leaves`. Then C may group its leaves.
    """

    title: str
    treatments: Callable[[FlatDag], Sequence[Treatment]]
    key: Any = None
    facts_of_leaves: Callable[[Sequence[Any]], Any] | None = None
    groups: Sequence[tuple[Any, ...]] = ()
    holds_for_like_calls: bool = True


class Call:
    """A running call, on the caller's side.

    If the C extension does a call, it makes no such object, but a tuple with the first five arguments of this class.
    `call_of` makes the object from the tuple if Python needs it.

    Args:
        arguments: the arguments as the caller wrote them.
        plan: how their leaves are grouped.
        leaves: the traced leaves of the arguments, before any cut.
        packed_objects: for each record before any cut, the caller's object. The property `objects` has them after all
            cuts.
        trace: JAX's trace that was active when the call began. None for the current one.
        grouping: what the transform does with the arguments. None if C made the call.

    Attributes:
        tree: the arguments after all cuts, with the caller's objects.
        groups: the leaf groups for the transform. Empty before `with_groups`.
        result_labels: labels of the groups of the result. If they depend on the result, they are filled in while JAX
            traces the function. Otherwise empty.
        findings: what was found out about the arguments while JAX traced the function, for the code that treats the
            transform (its adapter). None if nothing was found out.
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
        """Makes `groups`, and returns the call itself.

        The selection of the first group refers to the call until the call ends. The function's side finds it there.
        """
        leaves = self.leaves
        for selection, positions in zip(self.plan.selections, self.plan.sources, strict=True):
            group_leaves = list(leaves) if positions is None else [leaves[position] for position in positions]
            self.groups.append(LeafGroup(group_leaves, selection))
        # All calls share the selections of the plan. So the first group gets a selection of its own for the reference.
        if self.groups:
            first = self.groups[0]
            first.selection = LeafSelection(first.selection.structure, first.selection.numbers, self)
        return self

    @property
    def objects(self) -> Any:
        """The caller's object of each record, after all cuts."""
        return self.tree.objects

    def leaf_records_with_label(self, label: Any) -> set[int]:
        """Returns the records of the leaves that have a label under the first treatment."""
        structure = self.plan.structure
        records: set[int] = set()
        for labels, selection in zip(self.plan.labels, self.plan.selections, strict=True):
            if labels and labels[0] == label:
                positions = range(structure.num_leaves) if selection.numbers is None else selection.numbers
                records.update([structure.leaf_numbers[position] for position in positions])
        return records

    @property
    def cuts(self) -> list[Cut]:
        """The ties that were cut, with the caller's objects. The cuts of the plan have no objects."""
        return [cut.in_call(self.packed_objects) for cut in self.plan.cuts]

    @property
    def statics(self) -> tuple[Any, ...]:
        """The static arguments (`static_argnums`), which the transform gets after the groups."""
        return self.arguments.statics

    @property
    def outer(self) -> Sequence[Any]:
        """The traces around that of the function: those that were active when the call began, innermost first."""
        return with_enclosing_traces(self.trace)

    def end(self) -> None:
        """Drops the first group's reference to the call.

        JAX may keep the selection of a group in its caches. It must not keep the caller's arguments alive.
        """
        # A slice, since there are no groups before `with_groups`.
        for group in self.groups[:1]:
            group.selection.call = None

    def __enter__(self) -> "Call":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def pack_call(arguments: Arguments, rules: Rules, grouping: Grouping) -> Call:
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


def repack_call(call: Call, repacking: Repacking) -> Call:
    """Makes a new call with the same arguments, packed in another way and grouped anew.

    Args:
        call: the old call, made by `pack_call`. It is not changed.
        repacking: the other way to pack the arguments. It cuts ties, and makes traced leaves of some static numbers.

    Returns:
        The new call, with its groups.
    """
    structure = repacking.structure(call.tree)
    # `origins`: for each new record, the old record with the same object.
    tree = FlatDag.of(structure, [call.objects[record] for record in repacking.origins])
    leaves = list(tree.leaves.values())
    assert call.grouping is not None
    plan = plan_for(tree, structure, leaves, call.grouping)
    return Call(call.arguments, plan, leaves, tree.objects, grouping=call.grouping).with_groups()


def plan_for(tree: FlatDag, structure: Structure, leaves: Sequence[Any], grouping: Grouping) -> Plan:
    """Returns the plan for arguments: the one that is kept with their structure, or else a new one.

    Args:
        tree: the arguments, with their objects.
        structure: structure of the arguments.
        leaves: traced leaves of the arguments.
        grouping: what the transform does with the arguments.

    Raises:
        InconsistentSharingError: if a module that holds traced leaves would be treated in two ways.
        SharingMismatchError: if an option does not fit the arguments.
    """
    # The key of the plan has one part or two. None if the plan must not be kept.
    key = grouping.key
    if key is not None and grouping.facts_of_leaves is not None:
        facts = grouping.facts_of_leaves(leaves)
        key = None if facts is None else (key, facts)
    plan = None if key is None else structure.plans.get(key)
    if plan is None:
        plan = _new_plan(tree, structure, grouping)
        if key is not None:
            plan = keep(structure, key, plan)
    return plan


def keep(structure: Structure, key: Any, value: V) -> V:
    """Keeps a value with a structure, and returns the value that is kept there now.

    If another thread has kept a value under this key in the meantime, that value is returned. Only the latest
    `MAX_PLANS` values of a structure are kept.

    Args:
        structure: the structure.
        key: key of the value in `structure.plans`.
        value: the value, such as a plan.
    """
    value = structure.plans.setdefault(key, value)
    for oldest in list(structure.plans)[:-MAX_PLANS]:
        structure.plans.pop(oldest, None)
    return value


def call_of(call_or_parts: Any) -> Any:
    """Returns a `Call`, from what the selection of a leaf group has in its field `call`.

    C puts a tuple there, with the arguments of `Call`, and Python a `Call`. Returns None if the call has ended.
    """
    return Call(*call_or_parts) if type(call_or_parts) is tuple else call_or_parts


def _new_plan(tree: FlatDag, structure: Structure, grouping: Grouping) -> Plan:
    """Makes the plan for arguments, without looking for a kept one. See `plan_for`."""
    treatments = grouping.treatments(tree)
    # The transform treats all leaves alike: they are one group, in order.
    if not treatments:
        return Plan(structure, None, tuple(SINGLE_GROUP), (LeafSelection(structure),), (None,), ())
    labelled = label_arguments(tree, structure, treatments, grouping.title)
    return _plan_of(labelled, tree, grouping.groups, len(treatments))


def _plan_of(
    labelled: LabelledTree, uncut: FlatDag, initial_groups: Sequence[tuple[Any, ...]], num_treatments: int
) -> Plan:
    """Makes the plan for labelled arguments: one group for each distinct tuple of labels.

    Args:
        labelled: the arguments after all cuts, with the labels of each leaf.
        uncut: the arguments before any cut.
        initial_groups: labels of the groups that always exist.
        num_treatments: number of labels of each leaf, one for each treatment.
    """
    structure, origins = labelled.structure, labelled.origins
    # Arguments without leaves have one empty group, since the function's side reads the structure from a group.
    labels = distinct_labels([*initial_groups, *labelled.labels]) or [(None,) * num_treatments]
    # The simple case: nothing was cut, and all leaves are one group in order.
    if len(labels) <= 1 and origins is None:
        return Plan(structure, None, tuple(labels), (LeafSelection(structure),), (None,), labelled.cuts)
    # For each leaf after the cuts, its position among the leaves before the cuts. The two leaves made from one leaf
    # have the same position.
    position_of = {record: position for position, record in enumerate(uncut.leaf_numbers)}
    sources = [position_of[record if origins is None else origins[record]] for record in structure.leaf_numbers]
    # For each group, the positions of its leaves after the cuts.
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


def build_from_groups(
    groups: Sequence[LeafGroup],
    callers_object: Any = None,
    update: Callable[[int, Any], Any] | None = None,
) -> Any:
    """Builds a result from its leaf groups. Its nodes are new objects, except for objects of the caller's.

    Args:
        groups: all groups of one tree.
        callers_object: record of an object that the function returned unchanged (`Given`) → the caller's object. None
            if the structure has no `Given`.
        update: (record of an object that the function changed (`Update`), a new object with its content) → the caller's
            object, to which the content is written now or later. None if the structure has no `Update`.
    """
    # JAX may return one array for two leaves. That is no tie, so `with_repeats_copied` copies the second one.
    structure, leaves = groups[0].selection.structure, with_repeats_copied(gather_leaves(groups))
    table: list[Any] = []
    build(structure, leaves, table, callers_object, update)
    # The structure says which leaves the trace noted, such as leaves untied on purpose. The arrays of this call get the
    # same notes, since JAX may have run the program without a trace.
    if structure.is_noted:
        note(leaves[i] for i in structure.noted)
        note_tied_values(leaves[i] for i in structure.tied_values)
    return table[structure.root]


# ---- Calls like earlier ones, done in C ----

_MAX_PATTERNS = 256
"""Number of patterns that are kept for one wrapper. Before one more is added, all are dropped.

Python makes a dropped pattern again in the next call that needs it.
"""

new_latest: Callable[[], Any] = (lambda: None) if native is None else native.Latest
"""Makes the object in which C keeps what it found in the last call of a pattern. None without the C extension."""


class CallPattern(NamedTuple):
    """Facts about calls with one number of arguments and one set of keywords. C reads the fields by position.

    Attributes:
        aux: names of the arguments, as `Arguments` has them.
        bound: how C reorders the arguments before it packs them. Three tuples: values to put before the positional
            arguments, names of the keywords that become positional, and names of all other keywords. None to pack the
            arguments as they are written in the call.
        key: first part of the key under which a structure keeps its plan. A plan says how the leaves are grouped.
        facts_of_leaves: (leaves) → second part of that key. None if the key has one part. See `Grouping`.
        donates: True if buffers are donated. Then C leaves a call to Python if two leaves have one buffer.
        latest: the object of `new_latest` for these calls.
        functions: labels of all leaf groups, as in `Plan.labels` → transformed function.
    """

    aux: Any
    bound: Any
    key: Any
    facts_of_leaves: Any
    donates: bool
    latest: Any
    functions: dict[Any, Callable[..., Any]]


class CallSettings(NamedTuple):
    """Facts about the calls of one wrapper under one policy. C reads the fields by position.

    Attributes:
        policy: the policy.
        flags: the rules of packing, as `flags_of` encodes them.
        patterns: number of positional arguments → pattern of such calls. For calls with keywords, the key is a pair:
            `(2, ("rate",))`. A value is None if Python has to do these calls. `patterns` itself is None if Python has
            to do all calls.
        in_place: True if changes are written back.
        finishes: True if C may build the result. False if the transform returns something else than leaf groups of the
            function's result, such as a gradient.
        write: writes changes into the caller's objects if C cannot. See `_in_place.write`.
    """

    policy: Policy
    flags: int
    patterns: dict[Any, CallPattern | None] | None
    in_place: bool
    finishes: bool
    write: Callable[[Sequence[Any]], None]

    @classmethod
    def before_first_call(
        cls, policy: Policy, rules: Rules | None, write: Callable[[Sequence[Any]], None], *, finishes: bool
    ) -> "CallSettings":
        """Makes the settings before the first call, without patterns.

        Args:
            policy: the policy.
            rules: how arguments are packed. None to leave all calls to Python.
            write: `_in_place.write`.
            finishes: True if C may build the result.
        """
        in_place = bool(policy.in_place)
        # No rules for C (0), and no patterns (None): Python does every call.
        if native is None or rules is None:
            return cls(policy, 0, None, in_place, finishes, write)
        # `learn` adds the patterns.
        return cls(policy, flags_of(rules), {}, in_place, finishes, write)

    def learn(
        self, args: Sequence[Any], kwargs: dict[str, Any], pattern: CallPattern | None, call: Call, transformed: Any
    ) -> None:
        """Remembers how Python did a call, so that C can do calls like it. Adds a pattern, or extends the earlier one.

        Args:
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.
            pattern: facts about such calls, with empty `functions`. None if Python has to do them.
            call: the call. Its plan has the labels of the leaf groups.
            transformed: the function for C to call with leaf groups that have these labels.
        """
        patterns = self.patterns
        if patterns is None:
            return
        # A user may call a wrapper with other keywords each time. The patterns must not grow without bound.
        if len(patterns) >= _MAX_PATTERNS:
            patterns.clear()
        key = (len(args), tuple(kwargs)) if kwargs else len(args)
        earlier_pattern = patterns.get(key)
        if pattern is not None:
            # Calls like this one may have had groups with other labels. Their transformed functions stay in use.
            pattern.functions.update(earlier_pattern.functions if earlier_pattern is not None else {})
            pattern.functions[call.plan.labels] = transformed
        patterns[key] = pattern


class _Caller:
    """The base class of `Caller` without the C extension: every call goes to `go_on`.

    Attributes:
        policy: the policy as the user wrote it.
        settings: settings for C, under the policy of the last call. None to leave the next call to Python.
    """

    policy: PolicyOption
    settings: CallSettings | None

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.go_on((), current_policy(self.policy), args, kwargs)
        except Exception as error:
            # Removes the frames of JAX and of the package from the traceback, as a vanilla transform does.
            hide_frames(error)
            raise

    def go_on(self, deferred: Any, policy: Policy, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Does what the C extension left of a call, and returns the result of the call. Subclasses override this.

        Args:
            deferred: tells what is left. An empty tuple: all of the call, for C did nothing. A pair: only the building
                of the result. C has called the transformed function, and the pair has its result and the call, a tuple
                from which `call_of` makes a `Call`. An exception: C or the transformed function raised it, and the
                method has to handle it.
            policy: the policy in force.
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.
        """
        raise NotImplementedError


class Caller(_Caller if TYPE_CHECKING or native is None else native.Caller):
    """The base class of wrappers. With the C extension, `__call__` does the call in C, or calls `go_on`."""
