"""Function transformers: `transform(f, **options) → g`. Five steps for all; what a family needs on top it overrides.

walk → leaves in groups → the transformed function → leaves gathered → build
"""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn, Self

from ..core._call_arguments import Arguments, Position
from ..core._errors import SharingMismatchError
from ..core._jax_internals import hide_frames
from ..core._pack_and_unpack import Rules
from ..ties._policy_and_context import Policy
from ._caller_side import Call, Grouping, call_of, enter, leave
from ._function_given_to_jax import Inner
from ._function_side import Inside, Received, Terms, packed, receive
from ._grouping_leaves import GroupedResult, group_result
from ._in_place import Changes, rules_for_state, with_changes
from ._in_place_by_label import group_result_with_state
from ._leaf_groups import LeafGroup, LeafGroups
from ._leaf_labels import Treatment, is_donated, labels_in
from ._pass_through import find_unchanged, passed_through
from ._repeated_calls import Form, Way, new_latest
from ._wrapped_function import Wrapper
from .checks._lost_changes import Unsaid
from .checks._refused_arguments import forbid_bound_module, is_refusal, name_counterpart, require_separate
from .checks._retracing import Traces
from .checks._ties_lost_in_calls import SeenArguments


class UnfitResultError(Exception):
    """An option does not fit what the function returned. Raised by a trace for the wrapper, which catches it."""

    def __init__(self, error: SharingMismatchError) -> None:
        super().__init__(str(error))
        self.error = error


class FunctionTransform(Wrapper):
    """A function under a transform, with shared modules and tied arrays kept the same objects.

    The transform is applied once for each policy and each way in which leaves are grouped, to a function that puts its
    arguments together, calls and takes its result apart. It may cache what it likes: everything that the inner function
    learns about a call is in the structures of its groups. Where it does cache, all wrappers of one function give it
    the same inner function (`_function_given_to_jax`).
    """

    passes_through = False
    default_out: Any = None
    """What the transform does with results that its option says nothing about."""
    differentiates = False
    """Whether it differentiates the leaves that it labels True."""
    writes = True
    """Whether it can write back what the function changed in its arguments."""

    def go_on(self, left: Any, policy: Policy, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """As the base."""
        is_error = isinstance(left, BaseException)
        is_begun = is_error or bool(left)
        try:
            if is_error:
                raise left
            if is_begun:
                return self.leave(left[0], call_of(left[1]), policy)
            if self.way is None or self.way.policy is not policy:
                self.way = self._way_under(policy)
            return self.called(args, kwargs, policy)
        except UnfitResultError as error:
            self.refused(args, kwargs, error.error)
        except Exception as error:
            if is_begun:
                self.explain(error, self._entering(args, kwargs, policy))
            hide_frames(error)
            raise

    def _way_under(self, policy: Policy) -> Way:
        """How this is called under a policy."""
        cls = type(self)
        is_usual = cls.called is FunctionTransform.called
        rules = self.rules(policy) if is_usual else None
        return Way.under(policy, rules, finishes=cls.leave is FunctionTransform.leave)

    def called(self, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy) -> Any:
        """The five steps, in Python."""
        try:
            call = self.enter(args, kwargs, policy)
        except SharingMismatchError as error:
            self.refused(args, kwargs, error)
        with call:
            transformed = self.transformed_for(policy, call)
            try:
                result = transformed(*call.groups, *call.statics)
            except UnfitResultError as error:
                self.refused(args, kwargs, error.error)
            except Exception as error:
                self.explain(error, lambda: call)
                raise
            self._shared.unsaid.say(call.tree.structure)
            way = self.way
            if self._shared.unsaid:
                self.way = None  # a call in C would not say it
            elif way is not None and way.policy is policy:
                way.learn(args, kwargs, self._form(args, kwargs, policy, call), call, self.settled(transformed))
            return self.leave(result, call, policy)

    def _form(self, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy, call: Call) -> Form | None:
        grouping = self.grouping(policy, call.arguments)
        if grouping.key is None or not grouping.is_of_form:
            return None
        donates = any(is_donated(label) for label in call.plan.labels)
        return Form(
            call.arguments.aux, self.binding(args, kwargs), grouping.key, grouping.asks, donates, new_latest(), {}
        )

    def binding(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """How arguments are bound before they are taken apart, if they are (see `Form`)."""
        return None

    def settled(self, transformed: Any) -> Any:
        """What calls like an earlier one go to."""
        return transformed

    def _entering(self, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy) -> Callable[[], Call]:
        return lambda: self.enter(args, kwargs, policy)

    def refused(self, args: Sequence[Any], kwargs: dict[str, Any], error: SharingMismatchError) -> NoReturn:
        """Raises because an option does not fit; without modules the transform itself says it best."""
        if not error.concerns_modules:
            try:
                self.transform(self.function, **self.options)(*args, **kwargs)
            except Exception as vanilla:  # noqa: BLE001 -- what JAX itself raises is said better
                raise vanilla.with_traceback(None) from None
        raise error

    def explain(self, error: Exception, call: Callable[[], Call]) -> None:
        """Adds to an error of the transform's what it does not know of.

        Args:
            error: as it was raised.
            call: gives the call that failed.
        """
        if is_refusal(error) and "argnums" not in self.options:  # Equinox has it not
            name_counterpart(error, call().tree, self.transform_name)
        if isinstance(error, ValueError) and "Non-hashable static" in str(error):
            own = call()  # where one object is a static argument and a traced one, that is the fault
            require_separate(own.arguments, own.tree, self.names)

    @property
    def traces(self) -> Traces:
        """Those of the function."""
        return self._shared.traces

    # What families override -------------------------------------------------------------------------------------

    def static_positions(self, num_args: int, keywords: Collection[str]) -> Collection[Position]:
        """The arguments that are static, and no part of the graph."""
        return ()

    def grouping(self, policy: Policy, arguments: Arguments) -> Grouping:
        """What the transform does to its arguments, if it may not do the same to all."""
        return Grouping(self.transform_name, lambda _: (), ())

    def leaving(self, policy: Policy, arguments: Arguments) -> Treatment | None:
        """What the transform will do to what the function returns, if it may not do the same to all of it.

        In place its prefix is a `Branch`: of one for the arguments, and the one for the result.
        """
        return None

    def applied(
        self, inner: Callable[..., Any], labels: Sequence[Any], leaving: Sequence[Any] | None, num_statics: int
    ) -> Any:
        """The inner function under the transform.

        Args:
            inner: takes groups and static arguments.
            labels: of the groups.
            leaving: the labels of the groups of results; None if there is one, of which nothing is said.
            num_statics: how many static arguments follow the groups.
        """
        return self.transform(inner, **self.options)

    def executable(self, call: Call) -> Call:
        """The call as it can be executed. Raises `InconsistentSharingError` if it could be traced only."""
        return call

    def is_taken(self, received: Received) -> Callable[[int], bool]:
        """Whether a record may not be passed through, because its buffers are taken from the caller."""
        return lambda _: False

    def unwritable(self, call: Call, number: int | None, value: Any) -> str:
        """Says why a change cannot be written back although the transform is in place. Empty if it can.

        Args:
            call: the caller's side.
            number: of the leaf that was changed; None if it is new.
            value: what is there now; None if nobody knows.
        """
        return ""

    # The caller's side --------------------------------------------------------------------------------------------

    def rules(self, policy: Policy) -> Rules:
        """How arguments and results are walked."""
        return rules_of_call(policy, filtered=self.is_filtered, is_exact=self.calls_each_time)

    def arguments(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Arguments:
        """The arguments of a call, with the names that they have in errors."""
        names = self.names.of(len(args))
        static = self.static_positions(len(args), kwargs)
        if not static:
            return Arguments(names, args, kwargs)
        dynamic = tuple([None if i in static else name for i, name in enumerate(names)])
        return Arguments(dynamic, args, kwargs, tuple([name for name in sorted(kwargs) if name in static]))

    def enter(self, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy) -> Call:
        """Going in: what the transform is called with."""
        arguments = self.arguments(args, kwargs)
        call = enter(arguments, self.rules(policy), self.grouping(policy, arguments))
        return self.executable(call)

    def leave(self, result: Any, call: Call, policy: Policy, used: Callable[[], Sequence[Any]] | None = None) -> Any:
        """Coming out: what the function returned, and what it changed in place, written."""
        groups = result.parts if type(result) is LeafGroups else (result,)
        if policy.in_place:
            changes = Changes(call, self.transform_name)
            made = leave(groups, call.objects.__getitem__, changes.update)
            changes.commit()
            return made[-1]
        structure = groups[0].selection.structure
        given = passed_through(call, structure, used or (lambda: self.used(call))) if structure.given else None
        return leave(groups, given)

    def used(self, call: Call) -> Sequence[Any]:
        """The leaves among the arguments that the transformed function uses, as far as the transform drops others."""
        return call.leaves

    def transformed_for(self, policy: Policy, call: Call) -> Any:
        """The transformed function for a call, made on first use. Of threads that make it at once, one wins."""
        leaving = self.leaving_labels(policy, call.arguments)
        key = policy, call.plan.labels, leaving, len(call.statics)
        made = self._made.get(key)
        if made is None:
            made = self.applied(self.inner(policy), call.plan.labels, leaving, len(call.statics))
            made = self._made.setdefault(key, made)
        return made

    def leaving_labels(self, policy: Policy, arguments: Arguments) -> tuple[Any, ...] | None:
        """The labels of the groups of results; None if there is one, of which nothing is said."""
        leaving = self.leaving(policy, arguments)
        return None if leaving is None else tuple(self._labels_of_results(leaving))

    def _labels_of_results(self, leaving: Treatment) -> list[Any]:
        """The labels in the option for results, at least one.

        If the option has no label (`out_axes=()`), no result has a leaf. The structure of the results still needs a
        hand to travel in.
        """
        return labels_in(leaving.prefix, leaving.is_label) or [self.default_out]

    # The function's side --------------------------------------------------------------------------------------------

    def inner(self, policy: Policy) -> Callable[..., Any]:
        """The function that the transform sees."""
        shared = self._shared
        forbid_bound_module(self.function, policy, self.transform_name)
        inner = shared.inner.get(policy)
        if inner is None:
            function = self.traced_function
            call = functools.partial(self._without_function().call_inside, policy)
            inner = shared.inner.setdefault(policy, Inner(function, shared.hold, call))
        return inner

    @property
    def traced_function(self) -> Callable[..., Any]:
        """The function that is called inside."""
        return self.function

    def _without_function(self) -> Self:
        """The part of this that the inner function may hold: neither the function, nor what holds the inner one."""
        cls = type(self)
        part = cls.__new__(cls)
        vars(part).update(vars(self))
        for name in ("function", "__wrapped__", "_shared", "_made"):
            vars(part).pop(name, None)
        part.policy, part.way = self.policy, None
        part._terms_of = self._shared.traces, self._shared.seen, self._shared.unsaid
        return part

    _terms_of: tuple[Traces, SeenArguments, Unsaid]

    def terms(self, policy: Policy) -> Terms:
        """What the traces of the function have in common."""
        return Terms(
            self.transform_name,
            self.names,
            policy,
            self.rules(policy),
            *self._terms_of,
            caches_traces=self.caches_traces,
            writes=self.writes,
            options=self.all_options,
            unwritable=self.unwritable,
            differentiates=self.differentiates,
        )

    def call_inside(self, policy: Policy, function: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
        """Puts arguments together, calls the user's function and groups its results, inside the transform."""
        received = self.received(args)
        inside = Inside(self.terms(policy), function)
        own = received.arguments
        return self.pack_results(inside.call_with(received, own.args, own.kwargs), inside)

    def received(self, args: Sequence[Any]) -> Received:
        """The arguments, from groups and what is static."""
        return receive(
            [arg for arg in args if type(arg) is LeafGroup], [arg for arg in args if type(arg) is not LeafGroup]
        )

    def pack_results(self, result: Any, inside: Inside) -> Any:
        """The hands of what goes out."""
        policy, received = inside.terms.policy, inside.received
        leaving = self.leaving(policy, received.arguments)
        if leaving is not None:
            return self._pack_apart(result, inside, leaving)
        tree = inside.walked(inside.with_state(result))
        inside.check_walked(tree, is_with_state=bool(policy.in_place))
        taken, rules = self.is_taken(received), inside.terms.rules
        if policy.in_place:
            tree = with_changes(result, received.tree, inside.forbidding(rules), taken)
        elif policy.pass_through and self.passes_through:
            given = find_unchanged(result, received.tree, taken, containers=policy.containers)
            tree = inside.walked(result, rules._replace(given=given)) if given else tree
        return packed(tree)

    def _pack_apart(self, result: Any, inside: Inside, leaving: Treatment) -> Any:
        """The same where the transform may not do the same to all of it."""
        policy, received = inside.terms.policy, inside.received
        labels = None if leaving.groups_by_outcome else self._labels_of_results(leaving)
        try:
            if policy.in_place:
                changes = rules_for_state(inside.terms.rules, received.tree, self.is_taken(received), deeply=True)
                return self.handed_out(group_result_with_state(result, inside, leaving, labels, changes), received)
            tree = inside.walked(result)
            inside.check_walked(tree)
            return self.handed_out(group_result(tree, leaving, labels, inside.terms.title), received)
        except SharingMismatchError as error:
            raise UnfitResultError(error) from None

    def handed_out(self, out: GroupedResult, received: Received) -> Any:
        """The hands of what goes out, as the transform gets them."""
        return LeafGroups(out.groups)


@functools.cache
def rules_of_call(policy: Policy, *, filtered: bool, is_exact: bool = False) -> Rules:
    """Chooses how arguments and results are walked.

    Args:
        policy: What counts as sharing.
        filtered: Whether only arrays are traced, as under Equinox's transforms.
        is_exact: Whether the function gets the static values of this very call, as it does where it is called on each
            call of the transform. A trace that serves many calls has those of the first.
    """
    return Rules(
        arrays=policy.arrays,
        containers=policy.containers,
        convention="outside",
        filtered=filtered,
        is_exact=is_exact,
    )
