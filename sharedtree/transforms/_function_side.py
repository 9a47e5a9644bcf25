"""The function's side of a transform: what a function receives, and what becomes of its results.

Of a transform that takes operands, an adapter says in a function of its own, its *body*, how one trace goes: which
hands the user's function is called with, and how its results are grouped for the transform.

    def iteration(inside, carry, xs):                  # for `jax.lax.scan`
        carried, emitted = inside.call(carry, xs)
        return inside.like(carry, carried), inside.pack(emitted)
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from ..core._by_identity import IdentityDict
from ..core._call_arguments import Arguments, LeafPath
from ..core._flat_dags import FlatDag
from ..core._jax_internals import current_traces
from ..core._pack_and_unpack import Rules, build, walked
from ..core._static_values import Static
from ..core._structure import Node, Op, Structure, intern, statics_of
from ..core._warning_source import Definition, deferring_warnings, give_warnings
from ..ties._leaf_notes import hand_on, note_one_around
from ..ties._policy_and_context import Policy, with_in_place
from ._argument_names import Names
from ._caller_side import Call, call_of
from ._grouping_leaves import with_leaf_notes
from ._in_place import with_changes
from ._joining_trees import Sides, fit_leaves
from ._leaf_groups import LeafGroup, gather_leaves, whole
from .checks._closed_over import handing_over, report_closed_over
from .checks._lost_changes import FunctionBeingTraced, Loss, Unsaid, applied_to, walked_bound_module
from .checks._refused_arguments import require_separate
from .checks._retracing import Traces
from .checks._tied_values import report_tied_values
from .checks._ties_cut_by_labels import report_cut_ties
from .checks._ties_lost_in_calls import LostTie, SeenArguments, report_lost_ties, ties_lost_between
from .checks._tracer_leaks import forbid_tracers


class Terms(NamedTuple):
    """What all traces of one function under one transform have in common.

    Attributes:
        title: what the transform is called in errors.
        names: of the arguments, and where the function is defined.
        policy: what counts as sharing.
        rules: how results are walked.
        traces: those of the function.
        seen: the arguments it was traced with.
        unsaid: the changes that were lost in traces which did not run.
        caches_traces: whether a trace serves many calls, so that a retrace is worth a word.
        writes: whether it could be in place.
        options: those of the transform, for messages.
        unwritable: (a call, the number of a leaf, what is there now) → a sentence that says why it could not be written
            back; empty if it could. The number is None if it is new; the value, if nobody knows it.
        keeps: whether what the function changes is kept at all under `in_place=True`.
        adds: whether it could write back an object with more parts, or fewer.
        differentiates: whether leaves with the label True are differentiated.
        bound_to: how the function is called on a module, as code, if it is a module that is traced.
        learned: what traces have taught, for the adapter.
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
    """What a function received: new objects, put together from groups.

    Attributes:
        tree: its objects are what the function has in hand, and may change.
        arguments: with the static ones.
        call: the caller's side, if it is still under way.
        given_copies: The copies that the function got of the caller's own static objects, each with the object; None
            if it got none. See `Rules.given_copies`.
    """

    tree: FlatDag
    arguments: Arguments
    call: Call | None
    given_copies: IdentityDict[Any] | None = None


NOTHING = Received(FlatDag((), 0), Arguments((), (), {}), None)


def receive(groups: Sequence[LeafGroup], statics: Sequence[Any] = (), bare: Sequence[Any] = ()) -> Received:
    """The arguments that were grouped so; but for static ones, and those that crossed bare."""
    structure, table = groups[0].selection.structure, list[Any]()
    leaves = gather_leaves(groups, bare)
    given_copies = None
    if structure.objects and any(static.is_mutable for _, static in statics_of(structure)):
        given_copies = _build_with_copies(structure, leaves, table)
    else:
        build(structure, leaves, table)
    first = groups[0].selection
    first.call = call = call_of(first.call)  # all who receive it have one
    return Received(FlatDag.of(structure, table), table[structure.root].with_statics(statics), call, given_copies)


def _build_with_copies(structure: Structure, leaves: Sequence[Any], table: list[Any]) -> IdentityDict[Any]:
    """Builds arguments with copies of static objects that can be mutated, for the function may do so.

    Returns:
        Each copy with its original.
    """
    copies = IdentityDict[Any]()
    # One static object in several places has one copy in each of them.
    records = [(_with_copy(op, copies), children) for op, children in structure.records]
    build(records, leaves, table)
    return IdentityDict((copied, original) for original, copied in copies.items() if copied is not original)


def _with_copy(op: Op, copies: IdentityDict[Any]) -> Op:
    if type(op) is Static and op.is_mutable:
        return op.with_copy(copies)
    if type(op) is Node and op.aux.is_mutable:
        return Node(op.type, op.aux.with_copy(copies), op.keys)
    return op


class Inside:
    """One trace of a function.

    Args:
        terms: what all its traces have in common.
        function: the user's function.

    Attributes:
        received: what it was called with.
    """

    def __init__(self, terms: Terms, function: Callable[..., Any]) -> None:
        self.terms = terms
        self.received = NOTHING
        self.function = function
        self._waiting: list[tuple[Definition, str]] = []

    @property
    def outer(self) -> Sequence[Any]:
        """The traces around this one, whose tracers may be anywhere."""
        call = self.received.call
        return enclosing_traces() if call is None else call.outer

    def call(
        self, *operands: Any, before: Sequence[Any] = (), named: Mapping[str, Any] | None = None, again: bool = False
    ) -> Any:
        """What the user's function makes of what was received in some groups; what it changed in that is kept.

        Args:
            operands: hands of one tree, and arrays that crossed bare.
            before: further positional arguments, before those.
            named: further ones, by the names of the function's parameters.
            again: it was called with the same before, and the result checked.

        Warns, at the name of the function, of ties that are lost in it.

        Raises:
            StaticTracerError: if a tracer is left in a static leaf of the result.
            UntiedError: under `Policy(on_untie="error")`.
        """
        groups = [each for each in operands if type(each) is LeafGroup]
        received = receive(groups, bare=[each for each in operands if type(each) is not LeafGroup])
        own = received.arguments
        result = self.call_with(received, (*before, *own.args), {**own.kwargs, **(named or {})})
        if again:
            give_warnings(self._waiting)
        else:
            self.check(result)
        return result

    def call_apart(self, *groups: LeafGroup) -> Any:
        """The same of several trees, each in one group; what it changes is kept in the first."""
        each = [receive((group,)) for group in groups]
        result = self.call_with(each[0], [arg for one in each for arg in one.arguments.args], {})
        self.check(result)
        return result

    def call_with(
        self, received: Received, args: Sequence[Any], kwargs: Mapping[str, Any], *, returns_pair: bool = False
    ) -> Any:
        """Calls the user's function with arguments that were received.

        Args:
            received: the arguments, and what is kept beside them.
            args: by position.
            kwargs: by name.
            returns_pair: whether the function returns a pair, of which callers get the first only.
        """
        terms, tree, call = self.terms, received.tree, received.call
        self.received = received
        if terms.caches_traces:
            terms.traces.add(tree, received.arguments, terms.names)
        if call is not None:
            require_separate(call.arguments, call.tree, terms.names)
            report_tied_values(call.tree, terms.names, terms.title, terms.policy)
            report_cut_ties(call, terms.names, terms.title, terms.policy)
            if terms.differentiates:
                report_closed_over(self.function, call, call.leaves_labelled(True), terms.names, terms.policy)
            numbers = tree.leaf_numbers
            hand_on([call.objects[n] for n in numbers], [tree.objects[n] for n in numbers])
        if terms.policy.containers:
            note_one_around(tree)
        bound, called = walked_bound_module(self.function, terms.policy)
        obstacle = "" if terms.writes else f"`{terms.title}` hands back what the function returns, and nothing else."
        to_adding = "" if terms.adds else f"`{terms.title}` cannot add to an object or remove from it."
        loss = Loss(
            terms.names.definition,
            terms.title,
            terms.options,
            obstacle=obstacle,
            obstacle_to_adding=to_adding,
            bound_to=terms.bound_to,
            is_condition=not terms.keeps,
        )
        # A condition was told nothing by `in_place=True`, which does not reach it.
        is_told = terms.keeps or not terms.policy.in_place
        policy = terms.policy if is_told else with_in_place(terms.policy, None)
        unsaid = terms.unsaid if terms.caches_traces else None

        def unwritable(number: int | None, value: Any) -> str:
            return "" if call is None else terms.unwritable(call, number, value)

        def as_code() -> str:
            return applied_to(self.function, args)

        with (
            deferring_warnings() as self._waiting,
            FunctionBeingTraced(policy, loss, unwritable, unsaid, as_code) as tracing,
            contextlib.nullcontext() if call is None else handing_over(call.tree, tree),
        ):
            result = self.function(*args, **kwargs)
            tracing.changed_what_it_is_bound_to(bound, called)
            is_pair = returns_pair and isinstance(result, (tuple, list)) and len(result) == 2
            tracing.returned(tree, result[0] if is_pair else result, terms.rules)
        return result

    def walked(self, result: Any, rules: Rules | None = None, name: str = "result") -> FlatDag:
        """A result taken apart, with no tracer of this trace left in a static leaf.

        Raises:
            StaticTracerError: if one is.
        """
        rules = self.forbidding(self.terms.rules if rules is None else rules)
        tree = walked(result, rules, name)
        if any(type(leaf) is jax.ShapeDtypeStruct for leaf in tree.leaves.values()):
            tree = walked(result, rules._replace(are_structs_traced=False), name)
        return tree

    def forbidding(self, rules: Rules) -> Rules:
        """Rules under which no tracer of this trace may be left in a static leaf."""
        return rules._replace(on_static=forbid_tracers(self.outer), given_copies=self.received.given_copies)

    def check(self, result: Any) -> None:
        """Warns, at the name of the function, of ties that are lost in it."""
        self.check_walked(self.walked(self.with_state(result)), is_with_state=bool(self.terms.policy.in_place))

    def with_state(self, result: Any) -> Any:
        """The result, in place beside what was received."""
        own = self.received.arguments
        return (own, result) if self.terms.policy.in_place else result

    def check_walked(self, result: FlatDag, *, is_with_state: bool = False) -> None:
        """The same of a result that was taken apart, with what was received before it or not."""
        terms, received, call = self.terms, self.received.tree, self.received.call
        since: list[LostTie] = []
        if terms.caches_traces and call is not None:
            since = terms.seen.compare(received, call.objects, terms.policy)
        lost = ties_lost_between(received, result, terms.policy, is_with_state=is_with_state)
        if lost or since:
            self._waiting.clear()  # one warning for one trace
            report_lost_ties(since, lost, terms.policy, terms.names)
        give_warnings(self._waiting)
        report_tied_values(result, terms.names, terms.title, terms.policy)

    def pack(self, result: Any, *, as_operand: bool = False) -> LeafGroup:
        """A result, or a part of one, as one group.

        Args:
            result: what the function returned.
            as_operand: whether its structure is compared with that of an operand, which does not say which leaves have
                lost their ties on purpose.
        """
        return packed(self.walked(result), as_operand=as_operand)

    def like(self, group: LeafGroup, tree: Any) -> LeafGroup:
        """A tree that stands for an operand, in the group in which that came.

        Args:
            group: of one operand.
            tree: what the function returned for it, for example.

        Raises:
            SharingMismatchError: if it lacks a tie of the operand, or differs in shape or static values.
        """
        position = group.operand
        words = Sides(self.terms.title, "in the operand", "in what stands in its place")
        above = (LeafPath(self.terms.names.text(position)),)
        return LeafGroup(
            fit_leaves(receive((group,)).tree.child(position), self.walked(tree), words, above), group.selection
        )

    def pack_with_state(self, result: Any, position: int) -> LeafGroup:
        """A result together with what was changed in an operand, which goes out as the result does.

        Args:
            result: what the function returned.
            position: of the operand.
        """
        if not self.terms.policy.in_place:
            return self.pack(result)
        received = self.received.tree
        own = received.child(position).reached
        rules = self.forbidding(self.terms.rules)
        return packed(with_changes(result, received, rules, lambda number: number not in own, own))


def packed(tree: FlatDag, *, as_operand: bool = False) -> LeafGroup:
    """A tree as one group.

    Args:
        tree: as walked.
        as_operand: whether its structure is compared with that of an operand, which does not say what was noted.
    """
    leaves = [tree.objects[number] for number in tree.leaf_numbers]
    structure = intern(tuple(tree.records), tree.root)
    return whole(leaves, structure if as_operand else with_leaf_notes(structure, leaves))


def enclosing_traces() -> Sequence[Any]:
    """The traces around the one that a function is being traced in."""
    traces = current_traces()
    return traces if jax.config.jax_disable_jit else traces[1:]  # pyright: ignore[reportAttributeAccessIssue]


Inside.__module__ = __name__.rpartition(".")[0]  # under which it is printed, pickled and documented
