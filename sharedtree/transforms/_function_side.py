"""The function's side of a transform: what a function receives, and what happens to its results.

The adapter of a transform that takes operands has a function of its own, its *body*. The body says how one trace goes:
which leaf groups the user's function is called with, and how its results are grouped for the transform.

    def iteration(trace, carry, xs):                  # for `jax.lax.scan`
        carried, emitted = trace.call(carry, xs)
        return trace.like(carry, carried), trace.pack(emitted)

*In place* means that what the function changes in its arguments is written back into the caller's objects. The changed
arguments are the *state*, and go out beside the result. A *note* on a leaf records a fact about its history, such as
that its tie was undone on purpose (`ties/_leaf_notes`).
"""

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from ..core._by_identity import IdentityDict, IdentitySet
from ..core._call_arguments import Arguments, LeafPath
from ..core._errors import Definition, deferring_warnings, give_warnings
from ..core._jax_internals import current_traces
from ..core._pack_and_unpack import Rules, build, walked
from ..core._prefix_trees import Branch
from ..core._static_values import Static
from ..core._structure import FlatDag, Given, Node, Op, Structure, Update, intern, statics_of
from ..ties._leaf_notes import hand_on, note_one_around
from ..ties._policy_and_context import Policy, with_in_place
from ..ties._views import add_note_of_views
from ._argument_names import Names
from ._caller_side import Call, call_of
from ._grouping_leaves import GroupedResult, group_result, with_leaf_notes
from ._in_place import IN_PLACE, conventions, flatten_together, flatten_with_changes
from ._joining_trees import Sides, fit_leaves
from ._leaf_groups import LeafGroup, gather_leaves, single_group
from ._leaf_labels import Outcomes, Piece, Treatment, Visit, raise_inconsistent
from .checks._closed_over import relating_arguments, report_closed_over
from .checks._lost_changes import FunctionBeingTraced, Loss, Unsaid, applied_to, walked_bound_module
from .checks._refused_arguments import require_separate
from .checks._retracing import Traces
from .checks._tied_values import report_tied_values
from .checks._ties_cut_by_labels import report_cut_ties
from .checks._ties_lost_in_calls import LostTie, SeenArguments, report_lost_ties, ties_lost_between
from .checks._tracer_leaks import forbid_tracers


class Terms(NamedTuple):
    """Facts that all traces of one function under one transform have in common.

    Attributes:
        title: name of the transform, for errors.
        names: names of the arguments, and where the function is defined.
        policy: what carries identity, and what a lost tie does.
        rules: how results are packed.
        traces: the traces of the function.
        seen: the arguments that the function was traced with.
        unsaid: changes that were lost in traces that did not run. A call that runs such a trace later warns of them.
        caches_traces: True if a trace serves many calls, so that a retrace is worth a warning.
        writes: True if the transform can write back what the function changed.
        options: options of the transform, for messages.
        unwritable: (call, number of a leaf, value that is there now) → sentence that says why the value cannot be
            written back, empty if it can. The number is None for a new leaf, the value is None if it is not known.
        keeps: True if `in_place=True` keeps what the function changed. Conditions of loops keep nothing.
        adds: True if the transform can write back an object that has more children than before, or fewer.
        differentiates: True if leaves with the label True are differentiated.
        bound_to: name of the called module in the code of warnings. Empty if the function is no traced module.
        learned: findings of the traces, for the adapter.
    """

    title: str
    names: Names
    policy: Policy
    rules: Rules
    traces: Traces
    seen: SeenArguments
    unsaid: Unsaid
    caches_traces: bool
    writes: bool = True
    options: Mapping[str, Any] = MappingProxyType({})
    unwritable: Callable[[Call, int | None, Any], str] = lambda *_: ""
    adds: bool = True
    keeps: bool = True
    bound_to: str = ""
    differentiates: bool = False
    learned: Any = None


class Received(NamedTuple):
    """The arguments that a function received: new objects, built from leaf groups.

    Attributes:
        tree: the records of the arguments as they were received, and the very objects that the function received. It
            may have changed them since.
        arguments: the arguments, static ones included.
        call: the caller's side. None if it has ended.
        given_copies: copies of the caller's static objects that the function got, each with its original. None if it
            got no copies. See `Rules.given_copies`.
    """

    tree: FlatDag
    arguments: Arguments
    call: Call | None
    given_copies: IdentityDict[Any] | None = None


NOTHING = Received(FlatDag((), 0), Arguments((), (), {}), None)
"""What a trace has received before it calls the function."""


def receive(groups: Sequence[LeafGroup], statics: Sequence[Any] = (), bare: Sequence[Any] = ()) -> Received:
    """Builds the arguments of a function.

    Args:
        groups: all leaf groups of the arguments.
        statics: the static arguments (`static_argnums`).
        bare: leaves that the transform got as they are, in no group.
    """
    # The table gets the object of each record.
    structure, table = groups[0].selection.structure, list[Any]()
    leaves = gather_leaves(groups, bare)
    given_copies = None
    # A structure with `objects` was made for this call alone, and has the caller's own static objects.
    if structure.objects and any(static.is_mutable for _, static in statics_of(structure)):
        given_copies = _build_with_copies(structure, leaves, table)
    else:
        build(structure, leaves, table)
    first = groups[0].selection
    # A call that runs in C is a tuple until now. All who receive this group get one and the same `Call`.
    first.call = call = call_of(first.call)
    return Received(FlatDag.of(structure, table), table[structure.root].with_statics(statics), call, given_copies)


def _build_with_copies(structure: Structure, leaves: Sequence[Any], table: list[Any]) -> IdentityDict[Any]:
    """Builds arguments with copies of mutable static objects, which the function may change.

    Args:
        structure: structure of the arguments.
        leaves: their leaves.
        table: is filled with the object of each record.

    Returns:
        Each copy with its original.
    """
    copies = IdentityDict[Any]()
    # A static object at several paths has one copy, which is at all of them.
    records = [(_with_copy(op, copies), children) for op, children in structure.records]
    build(records, leaves, table)
    return IdentityDict((copied, original) for original, copied in copies.items() if copied is not original)


def _with_copy(op: Op, copies: IdentityDict[Any]) -> Op:
    """Returns an operation with a copy of its mutable static value. Other operations are returned unchanged.

    Args:
        op: the operation.
        copies: object → its copy. Extended.
    """
    if type(op) is Static and op.is_mutable:
        return op.with_copy(copies)
    if type(op) is Node and op.aux.is_mutable:
        return Node(op.type, op.aux.with_copy(copies), op.keys)
    return op


class FunctionTrace:
    """One trace of a function.

    Args:
        terms: what all traces of the function have in common.
        function: the user's function.

    Attributes:
        received: the arguments of the last call of the function.
    """

    def __init__(self, terms: Terms, function: Callable[..., Any]) -> None:
        self.terms = terms
        self.received = NOTHING
        self.function = function
        # Warnings of transforms inside the function. The check of the result drops or gives them.
        self._waiting: list[tuple[Definition, str]] = []

    @property
    def outer(self) -> Sequence[Any]:
        """The traces around this one. Their tracers may be in static values."""
        call = self.received.call
        return enclosing_traces() if call is None else call.outer

    def call(
        self, *operands: Any, before: Sequence[Any] = (), named: Mapping[str, Any] | None = None, again: bool = False
    ) -> Any:
        """Builds arguments from leaf groups, calls the user's function, and returns its result.

        What the function changes in its arguments is kept for `pack_with_state`. Ties that it loses are warned of, with
        the line of its definition.

        Args:
            operands: leaf groups of one tree, and arrays that the transform got as they are.
            before: further positional arguments, in front of the operands.
            named: further arguments, by the names of the function's parameters.
            again: True if an earlier trace called the function with the same arguments. Its result was checked then,
                and is not checked again.

        Raises:
            StaticTracerError: if a static leaf of the result holds a tracer of this trace.
            UntiedError: if a tie was lost, under `Policy(on_untie="error")`.
        """
        groups = [operand for operand in operands if type(operand) is LeafGroup]
        received = receive(groups, bare=[operand for operand in operands if type(operand) is not LeafGroup])
        arguments = received.arguments
        result = self.call_with(received, (*before, *arguments.args), {**arguments.kwargs, **(named or {})})
        # Without a check of the result, nothing else gives the warnings.
        if again:
            give_warnings(self._waiting)
        else:
            self.check(result)
        return result

    def call_with_several_trees(self, *groups: LeafGroup) -> Any:
        """Calls the user's function with the arguments of several trees, each of them in one leaf group.

        What the function changes in the first tree is kept. Changes in the others are lost.
        """
        received = [receive((group,)) for group in groups]
        args = [arg for tree in received for arg in tree.arguments.args]
        result = self.call_with(received[0], args, {})
        self.check(result)
        return result

    def call_with(
        self, received: Received, args: Sequence[Any], kwargs: Mapping[str, Any], *, returns_pair: bool = False
    ) -> Any:
        """Calls the user's function with arguments that were built, and returns its result.

        The result is checked for lost changes, and not for lost ties.

        Args:
            received: the arguments of which changes are kept.
            args: positional arguments.
            kwargs: keyword arguments.
            returns_pair: True if the function returns a pair whose second entry the transform keeps for itself, such as
                the residuals of a rule. A changed object in that entry counts as not returned.
        """
        self.received = received
        self._check_arguments(received)
        if self.terms.policy.containers:
            note_one_around(received.tree)
        call, tree = received.call, received.tree
        bound, bound_before = walked_bound_module(self.function, self.terms.policy)
        with (
            deferring_warnings() as self._waiting,
            self._change_detector(call, args) as tracing,
            contextlib.nullcontext() if call is None else relating_arguments(call.tree, tree),
        ):
            try:
                result = self.function(*args, **kwargs)
            except (TypeError, ValueError) as error:
                add_note_of_views(error, tree)
                raise
            tracing.check_bound_module(bound, bound_before)
            is_pair = returns_pair and isinstance(result, (tuple, list)) and len(result) == 2
            tracing.check_result(tree, result[0] if is_pair else result, self.terms.rules)
        return result

    def _check_arguments(self, received: Received) -> None:
        """Refuses arguments, or warns of them, before the function is called.

        Then copies the notes on the caller's leaves to the leaves that the function received.
        """
        terms, tree, call = self.terms, received.tree, received.call
        if terms.caches_traces:
            terms.traces.add(tree, received.arguments, terms.names)
        # All else compares with the caller's side.
        if call is None:
            return
        require_separate(call.arguments, call.tree, terms.names)
        report_tied_values(call.tree, terms.names, terms.title, terms.policy)
        report_cut_ties(call, terms.names, terms.title, terms.policy)
        if terms.differentiates:
            report_closed_over(self.function, call, call.leaves_labelled(True), terms.names, terms.policy)
        records = tree.leaf_numbers
        hand_on([call.objects[record] for record in records], [tree.objects[record] for record in records])

    def _change_detector(self, call: Call | None, args: Sequence[Any]) -> FunctionBeingTraced:
        """Makes the context manager that finds out what the function changes, and warns of changes that are lost.

        Args:
            call: the caller's side. None if it has ended.
            args: positional arguments of the function, for the code of a warning.
        """
        terms = self.terms
        loss = Loss(
            terms.names.definition,
            terms.title,
            terms.options,
            obstacle="" if terms.writes else f"`{terms.title}` hands back what the function returns, and nothing else.",
            obstacle_to_adding="" if terms.adds else f"`{terms.title}` cannot add to an object or remove from it.",
            bound_to=terms.bound_to,
            is_condition=not terms.keeps,
        )
        # `in_place=True` is meant for the body of a loop. The condition keeps no changes. For it the option counts as
        # not set, so that lost changes are warned of.
        does_policy_hold = terms.keeps or not terms.policy.in_place
        policy = terms.policy if does_policy_hold else with_in_place(terms.policy, None)
        unsaid = terms.unsaid if terms.caches_traces else None

        def unwritable(number: int | None, value: Any) -> str:
            return "" if call is None else terms.unwritable(call, number, value)

        def as_code() -> str:
            return applied_to(self.function, args)

        return FunctionBeingTraced(policy, loss, unwritable, unsaid, as_code)

    def flatten(self, result: Any, rules: Rules | None = None, name: str = "result") -> FlatDag:
        """Flattens a result. Returns its records and objects.

        Args:
            result: what the function returned, or a part of it.
            rules: how it is packed. None for the rules of the transform.
            name: what it is called in errors.

        Raises:
            StaticTracerError: if a static leaf holds a tracer of this trace.
        """
        rules = self.rules_against_leaks(self.terms.rules if rules is None else rules)
        tree = walked(result, rules, name)
        # JAX cannot return a `ShapeDtypeStruct`, so in a result it is static.
        if any(type(leaf) is jax.ShapeDtypeStruct for leaf in tree.leaves.values()):
            tree = walked(result, rules._replace(are_structs_traced=False), name)
        return tree

    def rules_against_leaks(self, rules: Rules) -> Rules:
        """Returns rules under which packing raises if a tracer of this trace is in a static leaf.

        A copy of a static object that the function left unchanged is packed as the caller's own object.
        """
        return rules._replace(on_static=forbid_tracers(self.outer), given_copies=self.received.given_copies)

    def check(self, result: Any) -> None:
        """Warns of ties that the function lost, with the line of its definition."""
        self.check_flattened(self.flatten(self.with_state(result)), is_with_state=bool(self.terms.policy.in_place))

    def with_state(self, result: Any) -> Any:
        """Returns the result. In place, returns a pair of the arguments, with their changes, and the result."""
        arguments = self.received.arguments
        return (arguments, result) if self.terms.policy.in_place else result

    def check_flattened(self, result: FlatDag, *, is_with_state: bool = False) -> None:
        """Warns of ties that the function lost, and gives the warnings that waited for this check.

        Args:
            result: the flattened result, or the pair of the arguments and the result (see `with_state`).
            is_with_state: True if it is the pair.
        """
        terms, received, call = self.terms, self.received.tree, self.received.call
        # Ties that the arguments of an earlier trace had and these lack: the caller lost them between two calls.
        lost_between_calls: list[LostTie] = []
        if terms.caches_traces and call is not None:
            lost_between_calls = terms.seen.compare(received, call.objects, terms.policy)
        lost = ties_lost_between(received, result, terms.policy, is_with_state=is_with_state)
        if lost or lost_between_calls:
            # The warnings of inner functions are about the same ties. One cause gets one warning.
            self._waiting.clear()
            report_lost_ties(lost_between_calls, lost, terms.policy, terms.names)
        give_warnings(self._waiting)
        report_tied_values(result, terms.names, terms.title, terms.policy)

    def pack(self, result: Any, *, as_operand: bool = False) -> LeafGroup:
        """Packs a result, or a part of one, into one leaf group.

        Args:
            result: what the function returned.
            as_operand: True to leave the notes on leaves out of the structure, so that it can equal the structure of an
                operand.
        """
        return single_group_of_tree(self.flatten(result), as_operand=as_operand)

    def like(self, group: LeafGroup, tree: Any) -> LeafGroup:
        """Packs a tree that replaces an operand. Returns a leaf group with the selection of the operand's group.

        Args:
            group: leaf group of one operand.
            tree: what replaces the operand, such as the carry that an iteration returned.

        Raises:
            SharingMismatchError: if the tree lacks a tie of the operand, or differs in shape or static values.
        """
        position = group.operand
        sides = Sides(self.terms.title, "in the operand", "in what stands in its place")
        above = (LeafPath(self.terms.names.text(position)),)
        operand = receive((group,)).tree.child(position)
        return LeafGroup(fit_leaves(operand, self.flatten(tree), sides, above), group.selection)

    def pack_with_state(self, result: Any, position: int) -> LeafGroup:
        """Packs a result and, in place, what the function changed in one operand, into one leaf group.

        Args:
            result: what the function returned.
            position: position of the operand.
        """
        if not self.terms.policy.in_place:
            return self.pack(result)
        received = self.received.tree
        # Objects of other operands count as taken, and are not written back. So they are packed wherever they occur.
        records_of_operand = received.child(position).reached
        rules = self.rules_against_leaks(self.terms.rules)
        return single_group_of_tree(
            flatten_with_changes(
                result, received, rules, lambda record: record not in records_of_operand, records_of_operand
            )
        )


def single_group_of_tree(tree: FlatDag, *, as_operand: bool = False) -> LeafGroup:
    """Makes one leaf group of a flattened tree.

    Args:
        tree: the tree, with its objects.
        as_operand: True to leave out the notes on leaves, so that the structure equals that of an operand.
    """
    leaves = [tree.objects[record] for record in tree.leaf_numbers]
    structure = intern(tuple(tree.records), tree.root)
    return single_group(leaves, structure if as_operand else with_leaf_notes(structure, leaves))


def enclosing_traces() -> Sequence[Any]:
    """The traces around the one in which a function is traced now."""
    traces = current_traces()
    # Without jit, the innermost trace is not this function's.
    return traces if jax.config.jax_disable_jit else traces[1:]  # pyright: ignore[reportAttributeAccessIssue]


# ---- In place, under a transform with an option for results (`out_axes`) ----


def group_result_with_state(
    result: Any, trace: FunctionTrace, treatment: Treatment, labels: Sequence[Any] | None, changes: Rules
) -> GroupedResult:
    """Groups the leaves of the state and of the result by their labels.

    They are flattened as one tuple: the arguments, the objects that the function took out of them, and the result. An
    object that did not change is then replaced by a reference to the caller's (`Given`), and a changed one by an
    `Update` of it.

    Args:
        result: what the function returned.
        trace: the trace of the function.
        treatment: what the transform will do with the state and the result. Its prefix is a `Branch` of two, one for
            the arguments and one for the result.
        labels: labels of the groups. None for those that occur.
        changes: rules of `rules_for_state`, which tell the unchanged objects from those that may have changed.
    """
    received, arguments = trace.received.tree, trace.received.arguments
    prefix_of_arguments, prefix_of_result = treatment.prefix.parts
    # Outcomes of the arguments as they were received. They tell which objects go out under another label.
    entry = Outcomes(received, treatment._replace(prefix=prefix_of_arguments))
    entry_visits: dict[int, Visit] = {}
    for visit in entry.visits():
        entry_visits.setdefault(visit.record, visit)
    tree = trace.flatten((arguments, result))
    trace.check_flattened(tree, is_with_state=True)
    reachable = IdentitySet(tree.objects)
    conventions_of = conventions(received, changes)
    # Received object → its record, for the objects that did not change and for those that may have changed.
    unchanged, updated = changes.given or IdentityDict[int](), changes.updated or IdentityDict[int]()
    # Objects that the function took out of its arguments go out, too, so that the caller's are written to. An object
    # has a higher number than those that it holds, so it is walked before them.
    changeable = sorted(set(updated.values()), reverse=True)
    detached = [record for record in changeable if received.objects[record] not in reachable]
    # Without `given` and `updated`, every object is packed. `replacement` decides later which ones are not.
    tree = flatten_together(
        [
            (arguments, changes.convention),
            *[(received.objects[record], conventions_of[record]) for record in detached],
            (result, changes.convention),
        ],
        trace.rules_against_leaks(changes._replace(given=None, updated=None)),
        [*[IN_PLACE] * (1 + len(detached)), ""],
    )
    prefixes = [
        prefix_of_arguments,
        *[entry.prefix_at(entry_visits[record]) for record in detached],
        prefix_of_result,
    ]
    num_state = 1 + len(detached)

    def new_op_of(outcomes: Outcomes) -> Callable[[Piece], Op | None]:
        """Returns a function from a piece to the op that stands for the caller's object. None for a new object."""
        # The pieces below the arguments and the detached objects. A piece that is in the result alone is packed.
        state: set[Piece] = set()
        for root in outcomes.children(outcomes.root)[:num_state]:
            state.update(Piece(visit.record, outcomes[visit]) for visit in outcomes.reachable_from(root))
        _require_one_piece(outcomes, state, IdentitySet([*unchanged, *updated]), trace.terms.title)
        first_visits = outcomes.first_visits()

        def replacement(piece: Piece) -> Op | None:
            """Returns `Given` for an object that goes out as it came in, and `Update` for the caller's other nodes."""
            obj = tree.objects[piece.record]
            record = updated.get(obj, unchanged.get(obj))
            if piece not in state or record is None:
                return None
            # An object that goes out under another label than it came in with has to be packed, changed or not.
            is_moved = outcomes.descriptions_below(first_visits[piece]) != entry.descriptions_below(
                entry_visits[record]
            )
            if obj in unchanged and not is_moved:
                return Given(record)
            op = tree.records[piece.record][0]
            return Update.of(record, op, received.records[record][0]) if type(op) is Node else None

        return replacement

    return group_result(tree, treatment._replace(prefix=Branch(tuple(prefixes))), labels, trace.terms.title, new_op_of)


def _require_one_piece(outcomes: Outcomes, state: Collection[Piece], callers: IdentitySet, title: str) -> None:
    """Raises an error if one of the caller's nodes would have to be written back in two ways.

    Args:
        outcomes: outcomes of every record.
        state: the pieces that are written back.
        callers: the received objects, each of which stands for one of the caller's.
        title: name of the transform, for errors.
    """
    seen: set[int] = set()
    for record, _ in sorted(state):
        is_node = outcomes.tree.node(record) is not None
        if is_node and outcomes.tree.objects[record] in callers and record in seen:
            raise_inconsistent(
                outcomes,
                record,
                title,
                "The function put it where it would be written back in two ways. It can put a copy of it, "
                "`sharedtree.copy(layer)`, into one of these places.\n",
            )
        seen.add(record)


FunctionTrace.__module__ = __name__.rpartition(".")[0]  # under which it is printed, pickled and documented
