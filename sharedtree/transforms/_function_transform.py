"""Function transformers: `transform(f, **options) → g`. A call of `g` takes five steps.

    f(Net(w, w), x)

    pack the arguments               leaves w x, structure Arguments(Net(0, 0), 1)
    group the leaves                 [w, x], or one group for each label
    call the transformed function    build Net(w, w) and x, call the user's `f`, pack and group its result
    gather the leaves                from the groups of the result
    build the result

The steps are the same for all transforms. A family overrides what differs.
"""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn, Self

from ..core._call_arguments import Arguments, Position
from ..core._errors import SharingMismatchError
from ..core._jax_internals import hide_frames
from ..core._node_types import is_module
from ..core._pack_and_unpack import Rules
from ..core._static_values import Static
from ..ties._policy_and_context import Policy
from ._caller_side import Call, Grouping, call_of, enter, leave
from ._donation import donated_records, donation_treatment, take_each_buffer_once
from ._function_given_to_jax import Inner
from ._function_side import FunctionTrace, Received, Terms, group_result_with_state, packed, receive
from ._grouping_leaves import group_result
from ._in_place import commit_changes, rules_for_state, with_changes
from ._leaf_groups import LeafGroup, LeafGroups
from ._leaf_labels import Treatment, is_donated, labels_in
from ._pass_through import find_unchanged, passed_through
from ._repeated_calls import Form, Way, new_latest
from ._wrapped_function import Wrapper
from .checks._lost_changes import Unsaid
from .checks._refused_arguments import forbid_bound_module, is_refusal, name_counterpart, require_separate
from .checks._retracing import Traces
from .checks._ties_lost_in_calls import SeenArguments


class FunctionTransform(Wrapper):
    """A function under a transform, with shared modules and tied arrays kept the same objects.

    The transform is called once for each policy and each grouping of the leaves. It gets an inner function. This one
    builds its arguments, calls the user's function and packs the result.

    The transform may cache as it likes, because the inner function learns about a call from the structures of its
    groups alone. If it caches, all wrappers of one function give it the same inner function. See
    `_function_given_to_jax`.

    Attributes:
        passes_through: True if an unchanged module in the result becomes the caller's own object.
        default_out: label of results if the option for results says nothing about them.
        differentiates: True if the transform differentiates the leaves with the label True.
        writes: True if the transform can write back changes of its arguments.
        bound_to: name of a module that is called, in the code of warnings. Empty if the function is no traced module.
        calls_natively: True if C may do later calls like the first one, without `called`. A class that overrides
            `called` has False, unless it states True: its `called` then only matters in calls that Python does.
        finishes_natively: True if C may build the result of a call, without `leave`. A class that overrides `leave` has
            False, unless it states True.
    """

    passes_through = False
    default_out: Any = None
    differentiates = False
    writes = True
    bound_to = ""
    calls_natively = True
    finishes_natively = True

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # C does not see an overridden hook, so calls would bypass it in silence.
        for hook, attribute in (("called", "calls_natively"), ("leave", "finishes_natively")):
            # The first class in which the hook or the attribute stands, which may be a mixin.
            nearest = next(base for base in cls.__mro__ if hook in vars(base) or attribute in vars(base))
            if attribute not in vars(nearest):
                setattr(cls, attribute, False)

    # ---- A call ----

    def go_on(self, deferred: Any, policy: Policy, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Goes on where C left a call to Python. Explains its error if there is one."""
        is_error = isinstance(deferred, BaseException)
        has_begun = is_error or bool(deferred)
        try:
            if is_error:
                raise deferred
            # C has called the transformed function, but cannot build the result.
            if has_begun:
                return self.leave(deferred[0], call_of(deferred[1]), policy)
            if self.way is None or self.way.policy is not policy:
                self.way = self._new_way(policy)
            return self.called(args, kwargs, policy)
        except UnfitResultError as error:
            self.refused(args, kwargs, error.error)
        except Exception as error:
            # An error in `called` is explained there.
            if has_begun:
                self.explain(error, self._entering_again(args, kwargs, policy))
            hide_frames(error)
            raise

    def _new_way(self, policy: Policy) -> Way:
        """Makes the record of calls under a policy. With it, C does later calls like earlier ones."""
        rules = self.rules(policy) if self.calls_natively else None
        return Way.under(policy, rules, finishes=self.finishes_natively)

    def called(self, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy) -> Any:
        """Does a call in Python, in five steps, and teaches C to do calls like this one."""
        # Steps 1 and 2: pack the arguments, and group their leaves.
        try:
            call = self.enter(args, kwargs, policy)
        except SharingMismatchError as error:
            self.refused(args, kwargs, error)
        # Step 3: call the transformed function. If it traces, it builds the arguments and packs the result.
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
                # A later call may have to warn, which C cannot do. So calls stay in Python until nothing is unsaid.
                self.way = None
            elif way is not None and way.policy is policy:
                way.learn(args, kwargs, self._new_form(args, kwargs, call), call, self.for_later_calls(transformed))
            # Steps 4 and 5: gather the leaves, and build the result.
            return self.leave(result, call, policy)

    def _new_form(self, args: Sequence[Any], kwargs: dict[str, Any], call: Call) -> Form | None:
        """Makes the record of calls with as many arguments and the same keywords. None to leave them to Python."""
        grouping = call.grouping
        if grouping is None or grouping.key is None or not grouping.holds_for_like_calls:
            return None
        # A donated buffer may be in one leaf only, which C then checks.
        donates = any(is_donated(label) for label in call.plan.labels)
        return Form(
            call.arguments.aux, self.binding(args, kwargs), grouping.key, grouping.asks, donates, new_latest(), {}
        )

    def binding(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Returns `Form.bound`: the binding of arguments before they are packed. None if they are packed as written."""
        return None

    def for_later_calls(self, transformed: Any) -> Any:
        """Returns the function that C calls in later calls, which may do less than the transformed one of this call."""
        return transformed

    def _entering_again(self, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy) -> Callable[[], Call]:
        return lambda: self.enter(args, kwargs, policy)

    def refused(self, args: Sequence[Any], kwargs: dict[str, Any], error: SharingMismatchError) -> NoReturn:
        """Raises because an option does not fit the arguments or the result.

        If no module is concerned, raises the error of the vanilla transform for the same call.
        """
        if not error.concerns_modules:
            try:
                self.raise_vanilla_error(args, kwargs)
            except Exception as vanilla:  # noqa: BLE001 -- JAX may raise anything, and its words are the better ones
                raise vanilla.with_traceback(None) from None
        raise error

    def raise_vanilla_error(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Calls the vanilla transform for its own error, which says best what is wrong with a call.

        Returns if the vanilla transform accepts the call.
        """
        self.transform(self.function, **self.options)(*args, **kwargs)

    def explain(self, error: Exception, call: Callable[[], Call]) -> None:
        """Adds the cause to an error of the transform, if the transform cannot know it.

        Args:
            error: the error. It may be changed.
            call: returns the failed call.
        """
        # Equinox's transforms have no `argnums`, so none is a counterpart of a transform with this option.
        if is_refusal(error) and "argnums" not in self.options:
            name_counterpart(error, call().tree, self.transform_name)
        # If one object is both a static and a traced argument, that is the cause.
        if isinstance(error, ValueError) and "Non-hashable static" in str(error):
            failed_call = call()
            require_separate(failed_call.arguments, failed_call.tree, self.names)

    @property
    def traces(self) -> Traces:
        """The traces of the function."""
        return self._shared.traces

    # ---- For families to override ----

    def static_positions(self, num_args: int, keywords: Collection[str]) -> Collection[Position]:
        """Positions of the static arguments. They are not part of the graph."""
        return ()

    def donated_positions(self, num_args: int, keywords: Collection[str]) -> Collection[Position]:
        """Positions and names of the arguments whose buffers the transform takes over."""
        return ()

    def grouping(self, policy: Policy, arguments: Arguments) -> Grouping:
        """Returns the treatments of the arguments. By default all are treated alike, but for donation."""
        donation = self.donation_treatment(arguments)
        if donation is None:
            return Grouping(self.transform_name, lambda _: (), ())
        return Grouping(self.transform_name, lambda _: (donation,), Static(donation.prefix))

    def treatment_of_results(self, policy: Policy, arguments: Arguments) -> Treatment | None:
        """Returns the treatment of the result. None if all of it is treated alike.

        In place, the prefix is a `Branch` of two: one part for the arguments, and one for the result.
        """
        return None

    def apply_transform(
        self, inner: Callable[..., Any], labels: Sequence[Any], result_labels: Sequence[Any] | None, num_statics: int
    ) -> Any:
        """Applies the transform to the inner function.

        Args:
            inner: takes leaf groups, followed by static arguments.
            labels: for each group, its labels.
            result_labels: labels of the groups of results. None if all results form one group and the transform takes
                no option for it.
            num_statics: number of static arguments.
        """
        return self.transform(inner, **self.options)

    def unwritable(self, call: Call, number: int | None, value: Any) -> str:
        """Says why a change cannot be written back although the call is in place. Empty if it can.

        Args:
            call: the call.
            number: number of the changed leaf. None for a new leaf.
            value: the leaf after the change. None if it is not known.
        """
        return ""

    # ---- The caller's side ----

    def rules(self, policy: Policy) -> Rules:
        """Rules for packing arguments and results."""
        return rules_of_call(policy, filtered=self.is_filtered, is_exact=self.calls_each_time)

    def arguments(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Arguments:
        """Makes one node of the arguments of a call, with their names in errors."""
        names = self.names.of(len(args))
        static = self.static_positions(len(args), kwargs)
        if not static:
            return Arguments(names, args, kwargs)
        # A static argument has no name in `Arguments`, and so no place in the graph.
        dynamic = tuple([None if i in static else name for i, name in enumerate(names)])
        return Arguments(dynamic, args, kwargs, tuple([name for name in sorted(kwargs) if name in static]))

    def enter(self, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy) -> Call:
        """Packs the arguments of a call and groups their leaves."""
        arguments = self.arguments(args, kwargs)
        call = enter(arguments, self.rules(policy), self.grouping(policy, arguments))
        return self.executable(call)

    def executable(self, call: Call) -> Call:
        """Returns the call, after `take_each_buffer_once`.

        Raises:
            InconsistentSharingError: if a donated array is also in an argument that is not donated.
        """
        donation = self.donation_treatment(call.arguments)
        return call if donation is None else take_each_buffer_once(call, donation, self.transform_name)

    def donation_treatment(self, arguments: Arguments) -> Treatment | None:
        """Makes the treatment of donation. None if nothing is donated."""
        return donation_treatment(arguments, self.donated_positions(len(arguments.args), arguments.kwargs))

    def leave(self, result: Any, call: Call, policy: Policy, used: Callable[[], Sequence[Any]] | None = None) -> Any:
        """Builds the result of a call. In place, writes the function's changes into the caller's objects.

        Args:
            result: result of the transformed function: one leaf group, or several.
            call: the call.
            policy: the policy of the call.
            used: returns the leaves of the arguments on which the computation depends. None to ask the transform.
        """
        groups = result.parts if type(result) is LeafGroups else (result,)
        if policy.in_place:
            # The last entry is the result. The ones before are what was changed.
            (entries,) = commit_changes(call, self.transform_name, groups)
            return entries[-1]
        structure = groups[0].selection.structure
        if not structure.given:
            return leave(groups)
        # Some objects of the caller's are in the result as they are.
        return leave(groups, passed_through(call, structure, used or (lambda: self.leaves_used(call))))

    def leaves_used(self, call: Call) -> Sequence[Any]:
        """The leaves of the arguments on which the computation depends. By default all of them count."""
        return call.leaves

    def transformed_for(self, policy: Policy, call: Call) -> Any:
        """The transformed function for a call. It is made on first use. If threads make it at once, all get one."""
        result_labels = self.labels_of_results(policy, call.arguments)
        key = policy, call.plan.labels, result_labels, len(call.statics)
        transformed = self._made.get(key)
        if transformed is None:
            transformed = self.apply_transform(self.inner(policy), call.plan.labels, result_labels, len(call.statics))
            transformed = self._made.setdefault(key, transformed)
        return transformed

    def labels_of_results(self, policy: Policy, arguments: Arguments) -> tuple[Any, ...] | None:
        """Labels of the groups of results. None if all results form one group."""
        treatment = self.treatment_of_results(policy, arguments)
        return None if treatment is None else tuple(self._labels_in_treatment(treatment))

    def _labels_in_treatment(self, treatment: Treatment) -> list[Any]:
        """The distinct labels in the option for results, at least one.

        If the option contains no label (`out_axes=()`), no result has a leaf. One group is made even so, because the
        structure of the result is its aux data.
        """
        return labels_in(treatment.prefix, treatment.is_label) or [self.default_out]

    # ---- The function's side ----

    def inner(self, policy: Policy) -> Callable[..., Any]:
        """The function for the transform to call in place of the user's. It is made once for each policy."""
        shared = self._shared
        forbid_bound_module(self.function, policy, self.transform_name)
        inner = shared.inner.get(policy)
        if inner is None:
            call = functools.partial(self._without_function().call_inside, policy)
            # Called modules may share their traces under the name of one function. Other functions keep their own name.
            function = shared.hold() if is_module(self.function) else self.function
            inner = shared.inner.setdefault(policy, Inner(function, shared.hold, call))
        return inner

    def _without_function(self) -> Self:
        """Returns a copy for the inner function to hold.

        The copy refers neither to the function nor to the inner function. So both are freed with the wrapper.
        """
        cls = type(self)
        part = cls.__new__(cls)
        vars(part).update(vars(self))
        for name in ("function", "__wrapped__", "_shared", "_made"):
            vars(part).pop(name, None)
        # The native base class keeps these two where `vars` does not see them.
        part.policy, part.way = self.policy, None
        part._records_of_traces = self._shared.traces, self._shared.seen, self._shared.unsaid
        return part

    _records_of_traces: tuple[Traces, SeenArguments, Unsaid]

    def terms(self, policy: Policy) -> Terms:
        """Makes the record shared by all traces of the function under a policy."""
        return Terms(
            self.transform_name,
            self.names,
            policy,
            self.rules(policy),
            *self._records_of_traces,
            caches_traces=self.caches_traces,
            writes=self.writes,
            options=self.all_options,
            unwritable=self.unwritable,
            differentiates=self.differentiates,
            bound_to=self.bound_to,
        )

    def call_inside(self, policy: Policy, function: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
        """Builds arguments from leaf groups, calls the user's function, and groups its result for the transform."""
        received = self.received(args)
        trace = FunctionTrace(self.terms(policy), function)
        arguments = received.arguments
        return self.pack_results(trace.call_with(received, arguments.args, arguments.kwargs), trace)

    def is_taken(self, received: Received) -> Callable[[int], bool]:
        """Returns a predicate on records: True if the object may not pass through, since its buffers are donated."""
        donation = self.donation_treatment(received.arguments)
        return (lambda _: False) if donation is None else donated_records(received.tree, donation).__contains__

    def received(self, args: Sequence[Any]) -> Received:
        """Builds the arguments of the function from leaf groups and static arguments."""
        return receive(
            [arg for arg in args if type(arg) is LeafGroup], [arg for arg in args if type(arg) is not LeafGroup]
        )

    def pack_results(self, result: Any, trace: FunctionTrace) -> Any:
        """Packs the result of the function into leaf groups for the transform."""
        policy, received = trace.terms.policy, trace.received
        treatment = self.treatment_of_results(policy, received.arguments)
        if treatment is not None:
            return self._pack_by_label(result, trace, treatment)
        tree = trace.walked(trace.with_state(result))
        trace.check_walked(tree, is_with_state=bool(policy.in_place))
        # In place, the tree for the check has all arguments. Only the changed ones are packed.
        taken, rules = self.is_taken(received), trace.terms.rules
        if policy.in_place:
            tree = with_changes(result, received.tree, trace.forbidding(rules), taken)
        elif policy.pass_through and self.passes_through:
            record_of_unchanged = find_unchanged(result, received.tree, taken, containers=policy.containers)
            tree = trace.walked(result, rules._replace(given=record_of_unchanged)) if record_of_unchanged else tree
        return packed(tree)

    def _pack_by_label(self, result: Any, trace: FunctionTrace, treatment: Treatment) -> Any:
        """Packs a result into several leaf groups, one for each label.

        Raises:
            UnfitResultError: if the option for results does not fit the result.
        """
        policy, received = trace.terms.policy, trace.received
        labels = None if treatment.groups_by_outcome else self._labels_in_treatment(treatment)
        try:
            if policy.in_place:
                changes = rules_for_state(trace.terms.rules, received.tree, self.is_taken(received), deeply=True)
                grouped = group_result_with_state(result, trace, treatment, labels, changes)
            else:
                tree = trace.walked(result)
                trace.check_walked(tree)
                grouped = group_result(tree, treatment, labels, trace.terms.title)
        except SharingMismatchError as error:
            raise UnfitResultError(error) from None
        if labels is None:
            # Only the result tells these labels. The transform reads them from the call when the trace has ended.
            assert received.call is not None
            received.call.result_labels[:] = grouped.labels
        return LeafGroups(grouped.groups)


class UnfitResultError(Exception):
    """An option does not fit the result of the function. A trace raises it, and the wrapper catches it."""

    def __init__(self, error: SharingMismatchError) -> None:
        super().__init__(str(error))
        self.error = error


@functools.cache
def rules_of_call(policy: Policy, *, filtered: bool, is_exact: bool = False) -> Rules:
    """Returns the rules for packing arguments and results.

    Args:
        policy: what carries identity.
        filtered: True if only arrays are traced, as under Equinox's transforms.
        is_exact: True to pack static values as these very objects, and not up to equality. This is for transforms that
            call the function each time. A cached trace has the static values of the first call.
    """
    return Rules(
        arrays=policy.arrays,
        containers=policy.containers,
        convention="outside",
        filtered=filtered,
        is_exact=is_exact,
    )
