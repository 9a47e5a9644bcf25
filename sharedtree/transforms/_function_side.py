"""The function's side of a transform: what a function receives, and what happens to its results.

The adapter of a transform that takes operands has a function of its own, its *body*. The body says how one trace goes:
which leaf groups the user's function is called with, and how its results are grouped for the transform.

    def iteration(trace, carry, xs):                  # for `jax.lax.scan`
        carried, emitted = trace.call(carry, xs)
        return trace.like(carry, carried), trace.pack(emitted)

Words:

- *leaf group*: some traced leaves of a tree, as one pytree node. It also holds the structure of the whole tree.
- *record*: the number of one object in a flat DAG.
- *in place*: what the function changes in its arguments is written back into the caller's objects. The arguments go out
  beside the result.
- *note*: a fact about the history of a leaf, such as that its tie was undone on purpose (`ties/_leaf_notes`).
- *label*: what the transform does with a leaf, such as the axis along which it is mapped.
- *outcome*: what the labels come to for one object. A *piece* is an object with one of its outcomes (`_leaf_labels`).
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
from ..core._pack_and_unpack import Rules, build, flat_dag_of
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
from .checks._lost_changes import DeferredLosses, FunctionBeingTraced, Loss, applied_to, walked_bound_module
from .checks._optimizers_of_nnx import add_note_of_slots, report_filters_of_optimizers
from .checks._refused_arguments import require_separate
from .checks._retracing import Traces
from .checks._tied_values import report_tied_values
from .checks._ties_cut_by_labels import report_cut_ties
from .checks._ties_lost_in_calls import LostTie, SeenArguments, report_lost_ties, ties_lost_between
from .checks._tracer_leaks import forbid_tracers


class TraceHistory(NamedTuple):
    """Findings from the traces of one function, for later traces. They refer neither to the function nor to arrays.

    Attributes:
        traces: counts the traces, to warn if static values make JAX trace again on every call.
        seen_arguments: the arguments of earlier traces, to find ties that the caller lost between two calls.
        deferred_losses: changes of arguments lost in traces that JAX has not run yet, as after `jit(f).lower(m)`. A
            later call that runs such a trace warns of them.
    """

    traces: Traces
    seen_arguments: SeenArguments
    deferred_losses: DeferredLosses


class Terms(NamedTuple):
    """Facts about one function under one transform and one policy. All of its traces have them in common.

    Attributes:
        title: name of the transform, for errors.
        names: names of the arguments, and where the function is defined.
        policy: what carries identity, and what a lost tie does.
        rules: how results are packed.
        history: findings from earlier traces of the function.
        caches_traces: True if a trace serves many calls, so that a retrace is worth a warning.
        writes: True if the transform can write back what the function changed.
        options: options of the transform, for messages.
        unwritable: (call, record of a changed leaf, value after the change) → sentence that says why the value cannot
            be written back, or "" if it can. The record is None for a new leaf, the value is None if it is not known.
        keeps: True if `in_place=True` keeps what the function changed. The condition of a loop keeps nothing.
        adds: True if the transform can write back an object that has more children than before, or fewer.
        differentiates: True if the transform differentiates the leaves with the label True.
        bound_to: name of the called module in the code of warnings. Empty if the function is no traced module.
        learned: a `Learned`, in which the traces of some adapters keep their findings. Otherwise None.
    """

    title: str
    names: Names
    policy: Policy
    rules: Rules
    history: TraceHistory
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
        tree: the records of the arguments as they were received, and the objects that the function received. The
            function may have changed these objects since, so they may differ from their records.
        arguments: the arguments, static ones included.
        call: the caller's side of the running call. None if the call has ended.
        given_copies: copy of a static object, as the function received it → the caller's original. None if nothing was
            copied. See `Rules.given_copies`.
    """

    tree: FlatDag
    arguments: Arguments
    call: Call | None
    given_copies: IdentityDict[Any] | None = None


NO_ARGUMENTS = Received(FlatDag((), 0), Arguments((), (), {}), None)
"""Stands for the received arguments in a trace that has not called the function yet."""


def receive(groups: Sequence[LeafGroup], statics: Sequence[Any] = (), bare: Sequence[Any] = ()) -> Received:
    """Builds the arguments of a function from leaf groups. All of their nodes are new objects.

    Args:
        groups: all leaf groups of the arguments. There is at least one.
        statics: the static arguments (`static_argnums`).
        bare: arrays that the transform got as arguments of their own, in no group. They fill the remaining places of
            leaves, in flatten order.
    """
    # `build` appends the object of each record to `table`.
    structure, table = groups[0].selection.structure, list[Any]()
    leaves = gather_leaves(groups, bare)
    given_copies = None
    # A structure with `objects` was made for this call alone, and has the caller's own static objects. The function
    # must not change these, so it gets copies of the mutable ones.
    if structure.objects and any(static.is_mutable for _, static in statics_of(structure)):
        given_copies = _build_with_copies(structure, leaves, table)
    else:
        build(structure, leaves, table)
    first = groups[0].selection
    # C passes a tuple in place of a `Call`. `call_of` makes the `Call`, which is stored. So every later reader of this
    # selection gets the same one.
    call = call_of(first.call)
    first.call = call
    return Received(FlatDag.of(structure, table), table[structure.root].with_statics(statics), call, given_copies)


def _build_with_copies(structure: Structure, leaves: Sequence[Any], table: list[Any]) -> IdentityDict[Any]:
    """Builds arguments in which mutable static objects are copies, so that the function may change them.

    Args:
        structure: structure of the arguments.
        leaves: their leaves.
        table: an empty list. The object of each record is appended.

    Returns:
        Copy → its original.
    """
    # Object → its copy. Filled by `_with_copy`.
    copies = IdentityDict[Any]()
    # All operations share `copies`. So a static object at several paths has one copy, which is at all of them.
    records = [(_with_copy(op, copies), children) for op, children in structure.records]
    build(records, leaves, table)
    return IdentityDict((copied, original) for original, copied in copies.items() if copied is not original)


def _with_copy(op: Op, copies: IdentityDict[Any]) -> Op:
    """Returns an equal operation that holds a copy of its mutable static value.

    The operation itself is returned if it has no mutable static value.

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
    """One trace of a function: calls it with arguments built from leaf groups, and packs its result.

    Args:
        terms: what all traces of the function have in common.
        function: the user's function.

    Attributes:
        received: the arguments of the last call of the function in this trace.
    """

    def __init__(self, terms: Terms, function: Callable[..., Any]) -> None:
        self.terms = terms
        self.received = NO_ARGUMENTS
        self.function = function
        # Warnings of lost ties by transforms inside the function. They wait for the check of this function's own
        # result, which gives or drops them.
        self._deferred_warnings: list[tuple[Definition, str]] = []

    @property
    def outer(self) -> Sequence[Any]:
        """The traces around this one. A static value may hold a tracer of theirs, but none of this trace."""
        call = self.received.call
        return enclosing_traces() if call is None else call.outer

    def call(
        self, *operands: Any, before: Sequence[Any] = (), named: Mapping[str, Any] | None = None, again: bool = False
    ) -> Any:
        """Builds arguments from leaf groups, calls the user's function, and returns its result.

        `pack_with_changes` can pack the changes of the arguments afterwards. If the function loses ties, there is a
        warning with the line of the function's definition.

        Args:
            operands: what the transform passes for the operands: all leaf groups of one tree, and for some operands a
                bare array.
            before: further positional arguments, in front of the operands.
            named: further arguments, by the names of the function's parameters.
            again: True if an earlier trace called the function with the same arguments. The result was checked then,
                and is not checked again.

        Raises:
            StaticTracerError: if a static leaf of the result holds a tracer of this trace.
            UntiedError: if a tie was lost, under `Policy(on_untie="error")`.
        """
        groups = [operand for operand in operands if type(operand) is LeafGroup]
        received = receive(groups, bare=[operand for operand in operands if type(operand) is not LeafGroup])
        arguments = received.arguments
        result = self.call_with(received, (*before, *arguments.args), {**arguments.kwargs, **(named or {})})
        # `check` gives or drops the deferred warnings. Without it, they are given here.
        if again:
            give_warnings(self._deferred_warnings)
        else:
            self.check(result)
        return result

    def call_with_several_trees(self, *groups: LeafGroup) -> Any:
        """Calls the user's function with the arguments of several trees, which were packed one by one.

        Only changes in the first tree can be packed afterwards. Changes in the others are lost.

        Args:
            groups: for each tree, one leaf group with all of its leaves.
        """
        received = [receive((group,)) for group in groups]
        args = [arg for tree in received for arg in tree.arguments.args]
        result = self.call_with(received[0], args, {})
        self.check(result)
        return result

    def call_with(
        self, received: Received, args: Sequence[Any], kwargs: Mapping[str, Any], *, returns_pair: bool = False
    ) -> Any:
        """Calls the user's function with arguments that `receive` has built, and returns its result.

        Warns of changes that the function does not return. Lost ties are for `check` to find.

        Args:
            received: the arguments, or those among them in which changes are looked for.
            args: positional arguments of the function.
            kwargs: keyword arguments of the function.
            returns_pair: True if the function returns a pair, and the transform keeps the second entry for itself. An
                example are the residuals of a rule. A changed object in the second entry counts as not returned.
        """
        self.received = received
        self._check_arguments(received)
        if self.terms.policy.containers:
            note_one_around(received.tree)
        call, tree = received.call, received.tree
        # If the function is a method, the module to which it is bound, and code for messages: `model.step`.
        bound_module, code_of_bound_method = walked_bound_module(self.function, self.terms.policy)
        with (
            deferring_warnings() as self._deferred_warnings,
            self._change_detector(call, args) as change_detector,
            contextlib.nullcontext() if call is None else relating_arguments(call.tree, tree),
        ):
            try:
                result = self.function(*args, **kwargs)
            except (TypeError, ValueError) as error:
                # If JAX refused a `View`, the note says so.
                add_note_of_views(error, tree)
                # If an optimizer of NNX was made before its model was tied, the note says so.
                add_note_of_slots(error, tree)
                raise
            change_detector.check_bound_module(bound_module, code_of_bound_method)
            is_pair = returns_pair and isinstance(result, (tuple, list)) and len(result) == 2
            change_detector.check_result(tree, result[0] if is_pair else result, self.terms.rules)
        return result

    def _check_arguments(self, received: Received) -> None:
        """Does what has to be done with arguments before the function is called: checks, warnings, notes.

        Raises:
            InconsistentSharingError: if a static argument and a traced argument share an object.
            UntiedError: under `Policy(on_untie="error")`, in place of a warning of ties.
        """
        terms, tree, call = self.terms, received.tree, received.call
        # Warns if a static value makes JAX trace again and again.
        if terms.caches_traces:
            terms.history.traces.add(tree, received.arguments, terms.names)
        # Warns of filters of an `nnx.Optimizer` that ask about a path through a view.
        report_filters_of_optimizers(self.function, tree, terms.policy)
        # Everything below reads the caller's objects, which are gone if the call has ended.
        if call is None:
            return
        require_separate(call.arguments, call.tree, terms.names)
        # Three warnings: of tied arrays outside modules, of ties cut by labels, and of a module that the function holds
        # and is differentiated with respect to.
        report_tied_values(call.tree, terms.names, terms.title, terms.policy)
        report_cut_ties(call, terms.names, terms.title, terms.policy)
        if terms.differentiates:
            report_closed_over(self.function, call, call.leaf_records_with_label(True), terms.names, terms.policy)
        # Copy the notes on the caller's leaves to the leaves that the function received.
        records = tree.leaf_numbers
        hand_on([call.objects[record] for record in records], [tree.objects[record] for record in records])

    def _change_detector(self, call: Call | None, args: Sequence[Any]) -> FunctionBeingTraced:
        """Makes the context manager that finds out what the function changes, and warns of changes that are lost.

        Its class is called `FunctionBeingTraced`, since it is active while the function is traced.

        Args:
            call: the caller's side. None if it has ended.
            args: positional arguments of the function. Warnings show the function as code, which may need them.
        """
        terms = self.terms
        # A `Loss` is a description of lost changes for a warning. Here it says where they are lost. What is lost is
        # known after the call of the function, and `FunctionBeingTraced` adds it. An obstacle is a sentence that says
        # why no changes are written back. Only the condition of a loop does not keep its changes.
        loss = Loss(
            terms.names.definition,
            terms.title,
            terms.options,
            obstacle="" if terms.writes else f"`{terms.title}` passes on what the function returns, and nothing else.",
            obstacle_to_adding="" if terms.adds else f"`{terms.title}` cannot add to an object or remove from it.",
            bound_to=terms.bound_to,
            is_condition=not terms.keeps,
        )
        # Under `in_place=True`, only the body of a loop keeps its changes. The condition loses them. So for the
        # condition the option counts as not set, and a warning names the lost changes.
        is_option_ignored = bool(terms.policy.in_place) and not terms.keeps
        policy = with_in_place(terms.policy, None) if is_option_ignored else terms.policy
        # If the trace does not run now, its losses are deferred, because a later call may run it. A trace that serves
        # one call runs at once.
        deferred_losses = terms.history.deferred_losses if terms.caches_traces else None

        def unwritable(record: int | None, value: Any) -> str:
            """Returns `Terms.unwritable` for this call."""
            return "" if call is None else terms.unwritable(call, record, value)

        def as_code() -> str:
            """Returns the function as code, if its name is not enough: a partial, or a method of a class."""
            return applied_to(self.function, args)

        return FunctionBeingTraced(policy, loss, unwritable, deferred_losses, as_code)

    def flatten(self, result: Any, rules: Rules | None = None, name: str = "result") -> FlatDag:
        """Flattens a result. Returns its flat DAG: the records and the objects.

        Args:
            result: what the function returned, or a part of it, or a tuple that holds it.
            rules: how to pack the result. None for the rules of the transform.
            name: the beginning of paths in errors.

        Raises:
            StaticTracerError: if a static leaf holds a tracer of this trace.
        """
        rules = self.rules_against_leaks(self.terms.rules if rules is None else rules)
        tree = flat_dag_of(result, rules, name)
        # The rules may trace a `ShapeDtypeStruct` in place of an array. A transform cannot return one, so in a result
        # it is static. Such results are rare, so the second walk is, too.
        if any(type(leaf) is jax.ShapeDtypeStruct for leaf in tree.leaves.values()):
            tree = flat_dag_of(result, rules._replace(are_structs_traced=False), name)
        return tree

    def rules_against_leaks(self, rules: Rules) -> Rules:
        """Returns rules for results, with two additions.

        Packing raises a `StaticTracerError` if a static leaf holds a tracer of this trace. A copy of a static object is
        packed as the caller's original, if the function left it unchanged.
        """
        return rules._replace(on_static=forbid_tracers(self.outer), given_copies=self.received.given_copies)

    def check(self, result: Any) -> None:
        """Warns of ties that the arguments have and the result lacks, with the line of the function's definition.

        Raises:
            StaticTracerError: if a static leaf of the result holds a tracer of this trace.
            UntiedError: if a tie was lost, under `Policy(on_untie="error")`.
        """
        tree = self.flatten(self.with_arguments(result))
        self.check_flattened(tree, is_with_arguments=bool(self.terms.policy.in_place))

    def with_arguments(self, result: Any) -> Any:
        """Returns what goes out of the trace: in place, the pair (arguments, result), and otherwise the result.

        The arguments are the objects that the function received, with its changes.
        """
        arguments = self.received.arguments
        return (arguments, result) if self.terms.policy.in_place else result

    def check_flattened(self, result: FlatDag, *, is_with_arguments: bool = False) -> None:
        """Warns of lost ties, as `check` does, for a result that is flattened already. Gives the deferred warnings.

        Args:
            result: the flattened result, or the flattened pair (arguments, result) of `with_arguments`.
            is_with_arguments: True if `result` is the pair.

        Raises:
            UntiedError: if a tie was lost, under `Policy(on_untie="error")`.
        """
        terms, received, call = self.terms, self.received.tree, self.received.call
        # Ties lost by the caller between two calls: the arguments of an earlier trace had them, and these lack them.
        lost_between_calls: list[LostTie] = []
        if terms.caches_traces and call is not None:
            lost_between_calls = terms.history.seen_arguments.compare(received, call.objects, terms.policy)
        lost = ties_lost_between(received, result, terms.policy, is_with_arguments=is_with_arguments)
        if lost or lost_between_calls:
            # The deferred warnings of inner functions are about the same ties. One cause gets one warning.
            self._deferred_warnings.clear()
            report_lost_ties(lost_between_calls, lost, terms.policy, terms.names)
        give_warnings(self._deferred_warnings)
        report_tied_values(result, terms.names, terms.title, terms.policy)

    def pack(self, result: Any, *, as_operand: bool = False) -> LeafGroup:
        """Packs a result, or a part of one, into one leaf group.

        Args:
            result: what the function returned.
            as_operand: see `single_group_of_tree`.

        Raises:
            StaticTracerError: if a static leaf holds a tracer of this trace.
        """
        return single_group_of_tree(self.flatten(result), as_operand=as_operand)

    def like(self, group: LeafGroup, tree: Any) -> LeafGroup:
        """Packs a tree that replaces an operand. Returns a leaf group that has the structure of the operand's group.

        So JAX accepts the new group in the place of the old one.

        Args:
            group: leaf group of one operand.
            tree: what replaces the operand, such as the carry that an iteration returned.

        Raises:
            SharingMismatchError: if the tree lacks a tie of the operand, or differs in shape or static values.
            StaticTracerError: if a static leaf of the tree holds a tracer of this trace.
        """
        position = group.operand
        # For the error: names of the two trees that must be alike, and the beginning of their paths.
        sides = Sides(self.terms.title, "in the operand", "in what stands in its place")
        prefix = (LeafPath(self.terms.names.text(position)),)
        operand = receive((group,)).tree.child(position)
        # `fit_leaves` raises for differences, and returns the leaves of the tree in the order of the operand's.
        return LeafGroup(fit_leaves(operand, self.flatten(tree), sides, prefix), group.selection)

    def pack_with_changes(self, result: Any, position: int) -> LeafGroup:
        """Packs a result into one leaf group. In place, what the function changed in one operand is packed, too.

        Args:
            result: what the function returned.
            position: position of the operand whose changes are written back.

        Raises:
            StaticTracerError: if a static leaf holds a tracer of this trace.
        """
        if not self.terms.policy.in_place:
            return self.pack(result)
        received = self.received.tree
        records_of_operand = received.child(position).reached
        rules = self.rules_against_leaks(self.terms.rules)

        # Changes of one operand alone are written back. If the result holds objects of other operands, they are packed
        # as new objects, even if they are unchanged.
        def is_taken(record: int) -> bool:
            return record not in records_of_operand

        return single_group_of_tree(
            flatten_with_changes(result, received, rules, is_taken, writable=records_of_operand)
        )


def single_group_of_tree(tree: FlatDag, *, as_operand: bool = False) -> LeafGroup:
    """Makes one leaf group with all leaves of a flattened tree.

    Args:
        tree: the tree, with its objects.
        as_operand: True to leave the notes on leaves out of the structure. An operand's structure has no notes, so only
            then the two structures can be equal.
    """
    leaves = [tree.objects[record] for record in tree.leaf_numbers]
    structure = intern(tuple(tree.records), tree.root)
    return single_group(leaves, structure if as_operand else with_leaf_notes(structure, leaves))


def enclosing_traces() -> Sequence[Any]:
    """Returns the traces around the one in which a function is being traced now, innermost first."""
    # All active traces. The first one is that of the function, unless jit is disabled: then the function has none.
    traces = current_traces()
    return traces if jax.config.jax_disable_jit else traces[1:]  # pyright: ignore[reportAttributeAccessIssue]


# ---- In place, under a transform with an option for results (`out_axes`) ----


def group_result_with_changes(
    result: Any, trace: FunctionTrace, treatment: Treatment, labels: Sequence[Any] | None, change_rules: Rules
) -> GroupedResult:
    """Groups the leaves of the changed objects and of the result by their labels.

    One tuple is flattened: first the arguments, then *detached* objects, which the function took out of the arguments,
    and last the result. In it, a `Given` stands for each object of the caller's that did not change, and an `Update`
    with the new content for each object that did.

        def f(model, x):                     # the caller's `model` has the records 0 (its weight) and 1 (the model)
            model.weight = x
            return x                         # packed: (Arguments(Update(1, Model(x)), x), x)

    Args:
        result: what the function returned.
        trace: the trace of the function.
        treatment: what the transform will do with the tuple. Its prefix is a `Branch` of two parts, one for the
            arguments and one for the result.
        labels: labels of the groups, in order. None to make a group for each label that occurs.
        change_rules: rules made by `rules_for_changes`. Their field `given` has the objects that cannot have changed,
            and `updated` those that may have.

    Raises:
        InconsistentSharingError: if an object would have to be written back under two labels.
        SharingMismatchError: if the prefix does not fit the result.
    """
    received, arguments = trace.received.tree, trace.received.arguments
    prefix_of_arguments, prefix_of_result = treatment.prefix.parts
    # 1. Compute the outcomes of the arguments as they were received. A later comparison tells which objects go out
    # under another label than they came in.
    outcomes_received = Outcomes(received, treatment._replace(prefix=prefix_of_arguments))
    # Record → its first visit.
    visit_received: dict[int, Visit] = {}
    for visit in outcomes_received.visits():
        visit_received.setdefault(visit.record, visit)
    # 2. Warn of lost ties.
    tree = trace.flatten((arguments, result))
    trace.check_flattened(tree, is_with_arguments=True)
    # 3. Find the objects that may have changed and that neither the arguments nor the result hold any more.
    reachable = IdentitySet(tree.objects)
    convention_of = conventions(received, change_rules)
    # Received object → its record, for the objects that did not change and for those that may have changed.
    unchanged = change_rules.given or IdentityDict[int]()
    updated = change_rules.updated or IdentityDict[int]()
    # In descending order, so that a holder comes before the objects in it: it has a higher record.
    changeable = sorted(set(updated.values()), reverse=True)
    detached = [record for record in changeable if received.objects[record] not in reachable]
    # 4. Flatten the tuple. Without `given` and `updated` in the rules, every object is packed. `replacement` decides
    # later for which objects a `Given` or an `Update` stands.
    tree = flatten_together(
        [
            (arguments, change_rules.convention),
            *[(received.objects[record], convention_of[record]) for record in detached],
            (result, change_rules.convention),
        ],
        trace.rules_against_leaks(change_rules._replace(given=None, updated=None)),
        [*[IN_PLACE] * (1 + len(detached)), ""],
    )
    # A detached object has the labels with which it came in.
    prefixes = [
        prefix_of_arguments,
        *[outcomes_received.prefix_at(visit_received[record]) for record in detached],
        prefix_of_result,
    ]
    # The first entries of the tuple are written back: the arguments and the detached objects.
    num_written = 1 + len(detached)

    def new_op_of(outcomes: Outcomes) -> Callable[[Piece], Op | None]:
        """Returns the function `replacement`, for outcomes of the flattened tuple.

        Raises:
            InconsistentSharingError: if an object would have to be written back under two labels.
        """
        # The pieces that are written back. An object that is in the result alone is packed as a new object.
        written_pieces: set[Piece] = set()
        for root in outcomes.children(outcomes.root)[:num_written]:
            written_pieces.update(Piece(visit.record, outcomes[visit]) for visit in outcomes.reachable_from(root))
        _require_one_piece(outcomes, written_pieces, IdentitySet([*unchanged, *updated]), trace.terms.title)
        first_visits = outcomes.first_visits()

        def replacement(piece: Piece) -> Op | None:
            """Returns the operation to put in place of a piece's own. None to keep its own.

            It is a `Given` for an object of the caller's that goes out as it came in. It is an `Update` for a node of
            the caller's that has changed, or that goes out under another label.
            """
            obj = tree.objects[piece.record]
            record = updated.get(obj, unchanged.get(obj))
            if piece not in written_pieces or record is None:
                return None
            # An object that goes out under another label than it came in has to be packed, changed or not. An example
            # is a weight that came in unmapped, and goes out along axis 0.
            treatments_now = outcomes.descriptions_below(first_visits[piece])
            is_moved = treatments_now != outcomes_received.descriptions_below(visit_received[record])
            if obj in unchanged and not is_moved:
                return Given(record)
            op = tree.records[piece.record][0]
            return Update.of(record, op, received.records[record][0]) if type(op) is Node else None

        return replacement

    # 5. Group the leaves. `group_result` calls `new_op_of` with the outcomes of the tuple.
    return group_result(tree, treatment._replace(prefix=Branch(tuple(prefixes))), labels, trace.terms.title, new_op_of)


def _require_one_piece(
    outcomes: Outcomes, written_pieces: Collection[Piece], received_objects: IdentitySet, title: str
) -> None:
    """Raises an error if one of the caller's nodes would have to be written back in two ways.

    Args:
        outcomes: outcomes of every record.
        written_pieces: the pieces that are written back.
        received_objects: the objects that the function received. Each stands for one of the caller's.
        title: name of the transform, for errors.

    Raises:
        InconsistentSharingError: if such a node is in two pieces, one for each of two outcomes.
    """
    # Records with a piece so far.
    seen: set[int] = set()
    for record, _ in sorted(written_pieces):
        is_node = outcomes.tree.node(record) is not None
        if is_node and outcomes.tree.objects[record] in received_objects and record in seen:
            raise_inconsistent(
                outcomes,
                record,
                title,
                "The function put one object into places that are written back in two ways. Put a copy into one of "
                "them, `sharedtree.copy(layer)`.\n",
            )
        seen.add(record)


FunctionTrace.__module__ = __name__.rpartition(".")[0]  # under which it is printed, pickled and documented
