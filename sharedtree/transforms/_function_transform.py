"""Function transformers: `transform(f, **options) → g`. A call of `g` takes five steps.

    f(Net(w, w), x)

    pack the arguments               leaves w x, structure Arguments(Net(0, 0), 1)
    group the leaves                 [w, x], or one group for each label
    call the transformed function    build Net(w, w) and x, call the user's `f`, pack and group its result
    gather the leaves                from the groups of the result
    build the result

A *label* is what the transform does with a leaf, such as the axis along which it is mapped. All leaves with one label
form a *leaf group*, one argument of the transform. A *treatment* gives each leaf its label.

The transform is applied to an *inner function* in place of the user's, and returns the *transformed function*. Both
take leaf groups, then static arguments. To *trace* is to run the inner function: it builds the arguments, calls the
user's function and packs its result. JAX may keep the trace and run it again without calling the inner function.

*In place* means that what the function changes in its arguments is written back into the caller's objects. An object
*passes through* if the function returns it unchanged, and the caller gets the object itself back. The *vanilla*
transform is JAX's or Equinox's own.

Packing makes one *record* for each object, even if it is at several paths. A variable `record` holds its number.

The order of the steps is the same for all transforms. A family of transforms overrides the methods in which it differs.
C does the five steps for a call like an earlier one, and leaves all other calls to Python.
"""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn, Self

from ..core._call_arguments import Arguments, Position
from ..core._errors import SharingMismatchError
from ..core._jax_internals import hide_frames
from ..core._pack_and_unpack import Rules
from ..core._static_values import Static
from ..ties._policy_and_context import Policy
from ._caller_side import Call, CallPattern, CallSettings, Grouping, build_from_groups, call_of, new_latest, pack_call
from ._donation import donated_records, donation_treatment, take_each_buffer_once
from ._function_given_to_jax import Inner, NewProgramError
from ._function_side import (
    FunctionTrace,
    Received,
    Terms,
    TraceHistory,
    group_result_with_changes,
    receive,
    single_group_of_tree,
)
from ._grouping_leaves import group_result
from ._in_place import commit_changes, flatten_with_changes, rules_for_changes, write
from ._leaf_groups import LeafGroup, LeafGroups, groups_of
from ._leaf_labels import Treatment, is_donated, labels_in
from ._pass_through import find_unchanged
from ._wrapped_function import Wrapper
from .checks._refused_arguments import (
    forbid_bound_module,
    forbid_in_place,
    is_refusal,
    name_counterpart,
    require_separate,
)
from .checks._retracing import Traces

_REFERRING_TO_FUNCTION = ("function", "traced_function", "__wrapped__", "_shared", "_made")
"""Attributes of a wrapper that refer to the user's function, or to an inner function, which finds it."""


class FunctionTransform(Wrapper):
    """A function under a transform. Objects shared between its arguments stay shared inside the function.

    There is a subclass for each family of transforms. The transform is applied once for each policy and each grouping
    of the leaves.

    The inner function learns about a call from the structures of its leaf groups alone. So a trace serves all calls
    with the same structures, and JAX may keep it. JAX finds a trace again by the inner function. So all wrappers of one
    function with equal options have the same inner function (see `_function_given_to_jax`).

    Attributes:
        passes_through: True if the inner function names unchanged modules in the result, for the caller to get its own
            objects in their places. A class that sets this overrides `leave`, as `JittedTransform` does.
        default_out: label of the result if the option for results is not set or contains no label.
        differentiates: True if the transform differentiates the leaves with the label True.
        writes: True if the transform can write back changes of its arguments. Otherwise `in_place=True` is an error.
        bound_to: name of the called module in the code of warnings. Empty unless the user's function is a module whose
            leaves are arguments of the transform, too.
        calls_natively: True if C may do later calls like the first one, without `call_in_python`. False in a class that
            overrides `call_in_python`, unless the class sets it to True. Its override then only runs in calls that C
            leaves to Python.
        finishes_natively: True if C may build the result of a call, without `leave`. False in a class that overrides
            `leave`, unless the class sets it to True.
    """

    passes_through = False
    default_out: Any = None
    differentiates = False
    writes = True
    bound_to = ""
    calls_natively = True
    finishes_natively = True

    def __init_subclass__(cls) -> None:
        """Sets `calls_natively` or `finishes_natively` to False in a class that overrides a method which C skips."""
        super().__init_subclass__()
        # C does not call these two methods, so it would skip an override.
        for method, attribute in (("call_in_python", "calls_natively"), ("leave", "finishes_natively")):
            # The first class, perhaps a mixin, that has the method or the attribute. If it has the method alone, it
            # does not say that C may skip the override.
            nearest = next(base for base in cls.__mro__ if method in vars(base) or attribute in vars(base))
            if attribute not in vars(nearest):
                setattr(cls, attribute, False)

    # ---- A call ----

    def go_on(self, deferred: Any, policy: Policy, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Does what C left of a call, and returns the result of the call. C calls this method.

        Args:
            deferred: what C did. An empty tuple if nothing. If C called the transformed function, a pair of the result
                and the call (for `call_of`). If C or the transformed function raised, the exception.
            policy: the policy in force.
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.

        Raises:
            Exception: the deferred exception, or one from Python's part of the call. `explain` may have added the cause
                to its text.
        """
        if isinstance(deferred, NewProgramError):
            # Nothing was run, so Python does the whole call.
            deferred = ()
        is_error = isinstance(deferred, BaseException)
        has_begun = is_error or bool(deferred)
        try:
            # C or the transformed function raised.
            if is_error:
                raise deferred
            # C called the transformed function, but cannot build the result.
            if has_begun:
                return self.leave(deferred[0], call_of(deferred[1]), policy)
            # C did nothing. If there are no settings for this policy, make them. `call_in_python` fills them for C.
            if self.settings is None or self.settings.policy is not policy:
                self.settings = self._new_settings(policy)
            return self.call_in_python(args, kwargs, policy)
        except UnfitResultError as error:
            # The trace of the function found that an option does not fit the result.
            self.raise_refusal(args, kwargs, error.error)
        except Exception as error:
            # If Python did the whole call, `call_in_python` has explained the error.
            if has_begun:
                self.explain(error, self._function_to_enter_again(args, kwargs, policy))
            # Removes the frames of JAX and of this package from the traceback.
            hide_frames(error)
            raise

    def _new_settings(self, policy: Policy) -> CallSettings:
        """Makes the settings for calls under a policy, without patterns. `CallSettings.learn` adds a pattern for C."""
        # None: C leaves all calls to Python.
        rules = self.rules(policy) if self.calls_natively else None
        return CallSettings.before_first_call(policy, rules, write, finishes=self.finishes_natively)

    def call_in_python(self, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy) -> Any:
        """Does a call in Python, in five steps, and teaches the C extension to do calls like it. Returns the result.

        Args:
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.
            policy: the policy in force.

        Raises:
            Exception: any error of the user's function, of JAX, or of the package. `explain` may have added the cause
                to its text.
        """
        if not self.writes:
            forbid_in_place(policy, self.transform_name)
        # Steps 1 and 2: pack the arguments, and group their leaves. `raise_refusal` always raises, so `call` is set
        # below.
        try:
            call = self.enter(args, kwargs, policy)
        except SharingMismatchError as error:
            self.raise_refusal(args, kwargs, error)
        # Step 3: call the transformed function. If JAX has to trace the user's function, the inner function builds the
        # arguments, calls the user's function, and packs its result.
        with call:
            transformed = self.transformed_for(policy, call)
            try:
                result = transformed(*call.groups, *call.statics)
            except UnfitResultError as error:
                self.raise_refusal(args, kwargs, error.error)
            except Exception as error:
                self.explain(error, lambda: call)
                raise
            # JAX can trace without running the program (`jit(f).lower(m)`). If the function then loses changes of its
            # arguments, the warning is deferred. It is given now if this call has run that trace: the losses are stored
            # by the structure of the arguments.
            deferred_losses = self._shared.history.deferred_losses
            deferred_losses.report(call.tree.structure)
            settings = self.settings
            if deferred_losses:
                # A warning still waits for another call. The C extension cannot give it, so the next call is left to
                # Python.
                self.settings = None
            # Teach the C extension to do calls like this one. Meanwhile, a call inside the function, or one
            # in another thread, may have replaced the settings by those of another policy.
            elif settings is not None and settings.policy is policy:
                settings.learn(
                    args, kwargs, self._new_pattern(args, kwargs, call), call, self.for_later_calls(transformed)
                )
            # Steps 4 and 5: gather the leaves, and build the result.
            return self.leave(result, call, policy)

    def _new_pattern(self, args: Sequence[Any], kwargs: dict[str, Any], call: Call) -> CallPattern | None:
        """Makes the pattern for C to do calls with the same keywords and as many arguments as this one.

        Returns None if Python has to do these calls, because their leaves may have to be grouped in another way.
        """
        grouping = call.grouping
        if grouping is None or grouping.key is None or not grouping.holds_for_like_calls:
            return None
        # A donated buffer may be in one leaf only. If `donates` is true, C checks this in each call.
        donates = any(is_donated(group_labels) for group_labels in call.plan.labels)
        return CallPattern(
            call.arguments.aux,
            bound=self.binding(args, kwargs),
            key=grouping.key,
            facts_of_leaves=grouping.facts_of_leaves,
            donates=donates,
            latest=new_latest(),
            functions={},
        )

    def binding(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Returns `CallPattern.bound`: how C reorders the arguments of later calls before it packs them.

        By default None: C packs them as they are written in the call.
        """
        return None

    def for_later_calls(self, transformed: Any) -> Any:
        """Returns the function for C to call in later calls whose leaf groups have the labels of this call.

        By default it is the transformed function. A subclass may return one without the work of a first call.
        """
        return transformed

    def _function_to_enter_again(
        self, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy
    ) -> Callable[[], Call]:
        """Returns a function that packs the arguments of a call again. For `explain`, as a call in C has no `Call`."""
        return lambda: self.enter(args, kwargs, policy)

    def raise_refusal(self, args: Sequence[Any], kwargs: dict[str, Any], error: SharingMismatchError) -> NoReturn:
        """Raises the error for an option that does not fit the arguments or the result. Always raises.

        If no module is concerned, the vanilla transform is called with the same arguments, for its own error.

        Args:
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.
            error: the package's error.

        Raises:
            SharingMismatchError: the package's error, if a module is concerned or the vanilla transform raises nothing.
            Exception: otherwise, the error of the vanilla transform.
        """
        if not error.concerns_modules:
            try:
                self.raise_vanilla_error(args, kwargs)
            except Exception as vanilla:  # noqa: BLE001 -- JAX may raise anything, and its words are the better ones
                raise vanilla.with_traceback(None) from None
        raise error

    def raise_vanilla_error(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Calls the user's function under the vanilla transform, only for the error that this raises for a wrong call.

        Does nothing else: if the vanilla transform raises nothing, the result is dropped.
        """
        self.transform(self.function, **self.options)(*args, **kwargs)

    def explain(self, error: Exception, call: Callable[[], Call]) -> None:
        """Adds the cause to the text of an error, or raises a better error in its place.

        If it returns, the caller raises `error`.

        Args:
            error: an error from a call. Its text may be changed.
            call: returns the failed call. It is called only if the call is needed.

        Raises:
            InconsistentSharingError: if an object is in a static argument and in a traced one, and JAX could not hash
                it.
        """
        # 1. JAX refused an argument, such as a function. Add to the text that Equinox's version of the transform
        # accepts it. Equinox has no version of a transform with `argnums`.
        if is_refusal(error) and "argnums" not in self.options:
            name_counterpart(error, call().tree, self.transform_name)
        # 2. JAX cannot hash a static argument. If the argument shares an object with a traced one, `require_separate`
        # raises the better error.
        if isinstance(error, ValueError) and "Non-hashable static" in str(error):
            failed_call = call()
            require_separate(failed_call.arguments, failed_call.tree, self.names)

    @property
    def traces(self) -> Traces:
        """The traces of the function so far. They warn if static values make JAX trace again on every call."""
        return self._shared.history.traces

    # ---- For families to override ----

    def static_positions(self, num_args: int, keywords: Collection[str]) -> Collection[Position]:
        """Returns the positions and names of the static arguments of a call. They are not packed.

        Args:
            num_args: number of positional arguments in the call.
            keywords: keywords of the call.
        """
        return ()

    def donated_positions(self, num_args: int, keywords: Collection[str]) -> Collection[Position]:
        """Returns the positions and names of the arguments whose buffers the transform takes over.

        Args:
            num_args: number of positional arguments in the call.
            keywords: keywords of the call.
        """
        return ()

    def grouping(self, policy: Policy, arguments: Arguments) -> Grouping:
        """Returns how to group the leaves of the arguments: the treatments, which give each leaf its labels.

        By default there are two groups: donated leaves and others. If nothing is donated, there is one group.

        Args:
            policy: the policy of the call. Only subclasses use it.
            arguments: the arguments, before they are packed.
        """
        donation = self.donation_treatment(arguments)
        # A `Grouping` takes a function from the packed arguments to the treatments. Here the treatments are known
        # without the packed arguments, so the lambdas ignore them. `key` is all that the treatments depend on. Calls
        # with equal keys share the groups.
        if donation is None:
            return Grouping(self.transform_name, lambda _: (), key=())
        return Grouping(self.transform_name, lambda _: (donation,), key=Static(donation.prefix))

    def treatment_of_results(self, policy: Policy, arguments: Arguments) -> Treatment | None:
        """Returns the treatment of the result. None if all of its leaves are treated alike, and so form one group.

        In place, the transform returns the changed arguments beside the result. Then the prefix of the treatment is a
        `Branch` of two parts, one for the arguments and one for the result.

        Args:
            policy: the policy of the call.
            arguments: arguments of the call. In place, they go out under the labels under which they come in.
        """
        return None

    def apply_transform(
        self, inner: Callable[..., Any], labels: Sequence[Any], result_labels: Sequence[Any] | None, num_statics: int
    ) -> Any:
        """Applies the transform to the inner function. Returns the transformed function.

        A family with an option such as `in_axes` or `out_axes` overrides this: it passes one entry for each group.

        Args:
            inner: the inner function. It takes leaf groups, followed by static arguments.
            labels: for each group of the arguments, a tuple of its labels, one for each treatment.
            result_labels: the label of each group of the result. None if the result is one group without a label.
            num_statics: number of static arguments.
        """
        return self.transform(inner, **self.options)

    def unwritable(self, call: Call, number: int | None, value: Any) -> str:
        """Returns a sentence that says why `in_place=True` could not write a change back. Empty if it could.

        Args:
            call: the call.
            number: record of the changed leaf. None for a leaf that was added.
            value: the leaf after the change. None if it is not known.
        """
        return ""

    # ---- The caller's side ----

    def rules(self, policy: Policy) -> Rules:
        """Returns the rules for packing arguments and results: what carries identity, and which leaves are traced."""
        return rules_of_call(policy, filtered=self.is_filtered, is_exact=self.calls_each_time)

    def arguments(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Arguments:
        """Makes one node of all arguments of a call, with their names. It is the root of the graph that is packed."""
        names = self.names.of(len(args))
        static = self.static_positions(len(args), kwargs)
        if not static:
            return Arguments(names, args, kwargs)
        # A static argument is no child of the node, so it is not packed. In `Arguments`, the name None marks a static
        # positional argument, and the fourth field lists the names of static keyword arguments. `static` has both:
        # indices of positional arguments, and names of keyword arguments.
        traced_names = tuple([None if i in static else name for i, name in enumerate(names)])
        return Arguments(traced_names, args, kwargs, tuple([name for name in sorted(kwargs) if name in static]))

    def enter(self, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy) -> Call:
        """Packs the arguments of a call, groups their leaves, and returns the call.

        Raises:
            InconsistentSharingError: if a module would be treated in two ways, or a donated array is also in an
                argument that is kept.
            SharingMismatchError: if an option does not fit the arguments.
            CycleError: if an object contains itself.
        """
        arguments = self.arguments(args, kwargs)
        call = pack_call(arguments, self.rules(policy), self.grouping(policy, arguments))
        return self.copy_arrays_donated_twice(call)

    def copy_arrays_donated_twice(self, call: Call) -> Call:
        """Copies each array of a module that would be donated a second time, in the leaf groups of a call.

        Returns the call itself. Under an outer trace JAX takes over no buffer, so nothing is copied.

        Raises:
            InconsistentSharingError: if a donated array is also in an argument that is kept.
        """
        donation = self.donation_treatment(call.arguments)
        return call if donation is None else take_each_buffer_once(call, donation, self.transform_name)

    def donation_treatment(self, arguments: Arguments) -> Treatment | None:
        """Makes the treatment of donation: each leaf is labelled as donated or kept. None if no argument is donated."""
        return donation_treatment(arguments, self.donated_positions(len(arguments.args), arguments.kwargs))

    def leave(self, result: Any, call: Call, policy: Policy) -> Any:
        """Builds the result of a call. In place, writes the function's changes into the caller's objects.

        Args:
            result: result of the transformed function: a leaf group, or `LeafGroups`.
            call: the call.
            policy: the policy of the call.

        Raises:
            InconsistentSharingError: in place, if a changed object cannot be written back.
        """
        groups = groups_of(result)
        if policy.in_place:
            # Writes the changes, and returns a list with one tuple: first the changed objects, last the result.
            (entries,) = commit_changes(call, self.transform_name, groups)
            return entries[-1]
        return build_from_groups(groups)

    def transformed_for(self, policy: Policy, call: Call) -> Any:
        """Returns the transformed function for a call: one for each policy, number of static arguments, and labels.

        It is made on first use, and kept in `_made`. All threads get the same one.
        """
        result_labels = self.labels_of_results(policy, call.arguments)
        key = policy, call.plan.labels, result_labels, len(call.statics)
        transformed = self._made.get(key)
        if transformed is None:
            transformed = self.apply_transform(self.inner(policy), call.plan.labels, result_labels, len(call.statics))
            transformed = self._made.setdefault(key, transformed)
        return transformed

    def labels_of_results(self, policy: Policy, arguments: Arguments) -> tuple[Any, ...] | None:
        """Returns the label of each group of the result. None if the result is one group, without a label."""
        treatment = self.treatment_of_results(policy, arguments)
        return None if treatment is None else tuple(self._labels_in_treatment(treatment))

    def _labels_in_treatment(self, treatment: Treatment) -> list[Any]:
        """Returns the distinct labels in the option for results, at least one.

        If the option has no label (`out_axes=()`), the result has no leaf. There is a group even so, because its aux
        data holds the structure of the result.
        """
        return labels_in(treatment.prefix, treatment.is_label) or [self.default_out]

    # ---- The function's side ----

    def inner(self, policy: Policy) -> Callable[..., Any]:
        """Returns the inner function under a policy, for the transform. All wrappers of one function share it.

        Raises:
            TypeError: in place, if the user's function is a mutable module or a method of one. Its changes of
                itself would not be written back.
        """
        shared = self._shared
        # This is checked in each call of the method, and not in `make`: a module that is the function may share the
        # inner function of another one, for which it was made.
        forbid_bound_module(self.function, policy, self.transform_name)

        def make() -> Inner:
            options = self._without_function()
            terms = options.terms(policy, shared.history)
            return Inner(self.traced_function, terms, options.call_inside, shared.get_function)

        return shared.inner_for(policy, make)

    def _without_function(self) -> Self:
        """Returns a copy of the wrapper with its options, and without the user's function.

        The inner function refers to the copy, and not to the wrapper. So JAX's caches do not keep the user's function
        alive. The user's function and the inner function are freed with the wrapper.
        """
        cls = type(self)
        # Not `__init__`, which would apply the transform once more.
        options = cls.__new__(cls)
        attributes = {name: value for name, value in vars(self).items() if name not in _REFERRING_TO_FUNCTION}
        vars(options).update(attributes)
        return options

    def terms(self, policy: Policy, history: TraceHistory) -> Terms:
        """Makes the facts that all traces of the function have in common.

        Called on the copy of `_without_function`, since the terms refer to the object by which they are made.

        Args:
            policy: the policy.
            history: findings from earlier traces.
        """
        return Terms(
            self.transform_name,
            self.names,
            policy,
            self.rules(policy),
            history,
            caches_traces=self.caches_traces,
            writes=self.writes,
            options=self.all_options,
            unwritable=self.unwritable,
            differentiates=self.differentiates,
            bound_to=self.bound_to,
        )

    def call_inside(self, trace: FunctionTrace, *args: Any) -> Any:
        """Builds arguments from leaf groups, calls the user's function, and returns its result in leaf groups.

        This is the body of the inner function.

        Args:
            trace: the trace of the user's function.
            args: leaf groups, then static arguments.
        """
        groups = [arg for arg in args if type(arg) is LeafGroup]
        received = receive(groups, args[len(groups) :])
        arguments = received.arguments
        return self.pack_results(trace.call_with(received, arguments.args, arguments.kwargs), trace)

    def make_is_taken(self, received: Received) -> Callable[[int], bool]:
        """Returns a function: record → True if the transform takes over a buffer of the object (donation).

        Such an object may not pass through, since the caller's object has lost the buffer.
        """
        donation = self.donation_treatment(received.arguments)
        return (lambda _: False) if donation is None else donated_records(received.tree, donation).__contains__

    def pack_results(self, result: Any, trace: FunctionTrace) -> Any:
        """Packs the result of the function and, in place, the changed arguments, for the transform.

        Warns of ties that the function lost.

        Args:
            result: the result of the user's function.
            trace: the trace, with the arguments that the function received.

        Returns:
            One leaf group, or `LeafGroups` if the transform has an option for results.

        Raises:
            StaticTracerError: if a static leaf of the result holds a tracer.
            UnfitResultError: if the option for results does not fit the result.
            UntiedError: if a tie was lost, under `Policy(on_untie="error")`.
        """
        policy, received = trace.terms.policy, trace.received
        treatment = self.treatment_of_results(policy, received.arguments)
        if treatment is not None:
            return self._pack_by_label(result, trace, treatment)
        # Warn of lost ties. The check needs the result and, in place, all arguments (`with_arguments`).
        tree = trace.flatten(trace.with_arguments(result))
        trace.check_flattened(tree, is_with_arguments=bool(policy.in_place))
        is_taken, rules = self.make_is_taken(received), trace.terms.rules
        if policy.in_place:
            # Pack the result and the objects that changed. Under `rules_against_leaks`, packing raises if a static leaf
            # holds a tracer.
            tree = flatten_with_changes(result, received.tree, trace.rules_against_leaks(rules), is_taken)
        elif policy.pass_through and self.passes_through:
            # Object that was returned unchanged → its record. Under the rule `given`, a `Given` with this record stands
            # for the object, and the object itself is not packed.
            unchanged = find_unchanged(result, received.tree, is_taken, containers=policy.containers)
            tree = trace.flatten(result, rules._replace(given=unchanged)) if unchanged else tree
        return single_group_of_tree(tree)

    def _pack_by_label(self, result: Any, trace: FunctionTrace, treatment: Treatment) -> Any:
        """Packs a result and, in place, the changed arguments into several leaf groups, one for each label.

        Warns of ties that the function lost.

        Args:
            result: the result of the user's function.
            trace: the trace, with the arguments that the function received.
            treatment: the treatment of the result. In place, its prefix has two parts: for the arguments, and for the
                result.

        Raises:
            UnfitResultError: if the option for results does not fit the result.
        """
        policy, received = trace.terms.policy, trace.received
        # The labels as written in the option. None to make a group for each resolved label.
        labels = None if treatment.groups_by_outcome else self._labels_in_treatment(treatment)
        try:
            if policy.in_place:
                # Rules that say which objects changed. With `deeply`, an object that holds a changed one counts as
                # changed, too. It is then packed, and can go out under another label.
                change_rules = rules_for_changes(
                    trace.terms.rules, received.tree, self.make_is_taken(received), deeply=True
                )
                grouped = group_result_with_changes(result, trace, treatment, labels, change_rules)
            else:
                tree = trace.flatten(result)
                trace.check_flattened(tree)
                grouped = group_result(tree, treatment, labels, trace.terms.title)
        except SharingMismatchError as error:
            raise UnfitResultError(error) from None
        if labels is None:
            # The resolved labels depend on the leaves of the result. So they are left in the call, where the transform
            # reads them after the trace.
            assert received.call is not None
            received.call.result_labels[:] = grouped.labels
        return LeafGroups(grouped.groups)


class UnfitResultError(Exception):
    """An option does not fit the result of the function. A trace raises this, and the wrapper raises a better error.

    Attributes:
        error: the error with the reason. See `FunctionTransform.raise_refusal`.
    """

    def __init__(self, error: SharingMismatchError) -> None:
        super().__init__(str(error))
        self.error = error


@functools.cache
def rules_of_call(policy: Policy, *, filtered: bool, is_exact: bool = False) -> Rules:
    """Returns the rules for packing arguments and results.

    Args:
        policy: what carries identity.
        filtered: True if only arrays are traced, as under Equinox's transforms.
        is_exact: True to pack the static values themselves, and not copies. For transforms that call the function in
            each call. Other transforms keep a trace, in which the function has the static values of the first call.
    """
    # "outside" is the convention at the root, outside all modules. There every leaf is traced, and the transform
    # refuses leaves that it cannot trace. Arrays and plain containers carry no identity there.
    return Rules(
        arrays=policy.arrays,
        containers=policy.containers,
        convention="outside",
        filtered=filtered,
        is_exact=is_exact,
    )
