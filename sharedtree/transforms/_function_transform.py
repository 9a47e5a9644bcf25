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
*passes through* if the function returns it unchanged, and the caller gets the very object back.

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
from ..core._node_types import is_module
from ..core._pack_and_unpack import Rules
from ..core._static_values import Static
from ..ties._policy_and_context import Policy
from ._caller_side import Call, Grouping, call_of, enter, leave
from ._donation import donated_records, donation_treatment, take_each_buffer_once
from ._function_given_to_jax import Inner
from ._function_side import FunctionTrace, Received, Terms, group_result_with_state, receive, single_group_of_tree
from ._grouping_leaves import group_result
from ._in_place import commit_changes, flatten_with_changes, rules_for_state
from ._leaf_groups import LeafGroup, LeafGroups
from ._leaf_labels import Treatment, is_donated, labels_in
from ._pass_through import find_unchanged, objects_for_caller
from ._repeated_calls import CallPattern, CallSettings, new_latest
from ._wrapped_function import Wrapper
from .checks._lost_changes import Unsaid
from .checks._refused_arguments import forbid_bound_module, is_refusal, name_counterpart, require_separate
from .checks._retracing import Traces
from .checks._ties_lost_in_calls import SeenArguments


class FunctionTransform(Wrapper):
    """A function under a transform. Objects shared between its arguments stay shared inside the function.

    The transform is applied once for each policy and each grouping of the leaves.

    The transform may keep traces, because the inner function learns about a call from the structures of its leaf groups
    alone. JAX finds a trace again by the inner function. So all wrappers of one function with equal options have the
    same inner function (see `_function_given_to_jax`).

    Attributes:
        passes_through: True if an unchanged module in the result becomes the caller's own object.
        default_out: the label of all results if the option for results is not set, or has no label.
        differentiates: True if the transform differentiates the leaves with the label True.
        writes: True if the transform can write back changes of its arguments.
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
        """Clears `calls_natively` or `finishes_natively` in a class that overrides the method skipped by C."""
        super().__init_subclass__()
        # C does not call these two methods. If a class overrides one, a call in C would skip the override.
        for method, attribute in (("call_in_python", "calls_natively"), ("leave", "finishes_natively")):
            # The first class that has the method or the attribute, which may be a mixin. If it has the method alone, it
            # overrides it without stating that C may skip it.
            nearest = next(base for base in cls.__mro__ if method in vars(base) or attribute in vars(base))
            if attribute not in vars(nearest):
                setattr(cls, attribute, False)

    # ---- A call ----

    def go_on(self, deferred: Any, policy: Policy, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Does the rest of a call after C, and returns the result of the call. C calls this method.

        Args:
            deferred: an empty tuple if C did nothing. If C called the transformed function, a pair of its result and
                the call (see `call_of`). If C raised an exception, the exception itself.
            policy: the policy in force.
            args: positional arguments of the call.
            kwargs: its keyword arguments.

        Raises:
            Exception: the deferred one, or one from Python's part of the call. If its cause is known, its text says it.
        """
        is_error = isinstance(deferred, BaseException)
        has_begun = is_error or bool(deferred)
        try:
            # C called the transformed function, which raised.
            if is_error:
                raise deferred
            # C called the transformed function, but cannot build the result.
            if has_begun:
                return self.leave(deferred[0], call_of(deferred[1]), policy)
            # C did nothing. The settings are new for each policy, and C learns from them to do later calls.
            if self.settings is None or self.settings.policy is not policy:
                self.settings = self._new_settings(policy)
            return self.call_in_python(args, kwargs, policy)
        except UnfitResultError as error:
            self.raise_refusal(args, kwargs, error.error)
        except Exception as error:
            # If Python did the whole call, `call_in_python` has explained the error.
            if has_begun:
                self.explain(error, self._entering_again(args, kwargs, policy))
            # Removes the frames of JAX and of this package from the traceback.
            hide_frames(error)
            raise

    def _new_settings(self, policy: Policy) -> CallSettings:
        """Makes the settings for calls under a policy. `learn` fills them, and C reads them in later calls."""
        # Without rules for packing, C leaves all calls to Python.
        rules = self.rules(policy) if self.calls_natively else None
        return CallSettings.before_first_call(policy, rules, finishes=self.finishes_natively)

    def call_in_python(self, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy) -> Any:
        """Does a call in Python, in five steps, and teaches C to do calls like this one. Returns the result."""
        # Steps 1 and 2: pack the arguments, and group their leaves. `raise_refusal` always raises.
        try:
            call = self.enter(args, kwargs, policy)
        except SharingMismatchError as error:
            self.raise_refusal(args, kwargs, error)
        # Step 3: call the transformed function. If it traces, it builds the arguments and packs the result.
        with call:
            transformed = self.transformed_for(policy, call)
            try:
                result = transformed(*call.groups, *call.statics)
            except UnfitResultError as error:
                self.raise_refusal(args, kwargs, error.error)
            except Exception as error:
                self.explain(error, lambda: call)
                raise
            # JAX can trace without running the program (`jit(f).lower(m)`). If such a trace loses changes of the
            # arguments, nobody is warned. `say` warns if this call has run a trace of that kind.
            self._shared.unsaid.say(call.tree.structure)
            settings = self.settings
            if self._shared.unsaid:
                # A later call may have to warn, which C cannot do. So calls stay in Python until nothing is unsaid.
                self.settings = None
            elif settings is not None and settings.policy is policy:
                # Teach C to do calls like this one.
                settings.learn(
                    args, kwargs, self._new_pattern(args, kwargs, call), call, self.for_later_calls(transformed)
                )
            # Steps 4 and 5: gather the leaves, and build the result.
            return self.leave(result, call, policy)

    def _new_pattern(self, args: Sequence[Any], kwargs: dict[str, Any], call: Call) -> CallPattern | None:
        """Makes the pattern for C to do calls with the same keywords and as many arguments as this one.

        Returns None if Python has to do these calls, since they may be grouped in another way than this one.
        """
        grouping = call.grouping
        if grouping is None or grouping.key is None or not grouping.holds_for_like_calls:
            return None
        # A donated buffer may be in one leaf only. C checks this in each call if `donates` is true.
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

        None to pack them as they are written in the call.
        """
        return None

    def for_later_calls(self, transformed: Any) -> Any:
        """Returns the function for C to call in later calls whose leaf groups have the labels of this call.

        It is the transformed function, or one without the work that only a first call needs.
        """
        return transformed

    def _entering_again(self, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy) -> Callable[[], Call]:
        """Returns a function that packs the arguments of a call once more. A call that failed in C has no `Call`."""
        return lambda: self.enter(args, kwargs, policy)

    def raise_refusal(self, args: Sequence[Any], kwargs: dict[str, Any], error: SharingMismatchError) -> NoReturn:
        """Raises the error for an option that does not fit the arguments or the result.

        If no module is concerned, the vanilla transform is called with the same arguments, and its own error is raised.
        If it accepts them, or if a module is concerned, raises the package's error.

        Args:
            args: positional arguments of the call.
            kwargs: its keyword arguments.
            error: the package's error.
        """
        if not error.concerns_modules:
            try:
                self.raise_vanilla_error(args, kwargs)
            except Exception as vanilla:  # noqa: BLE001 -- JAX may raise anything, and its words are the better ones
                raise vanilla.with_traceback(None) from None
        raise error

    def raise_vanilla_error(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Calls the user's function under the vanilla transform, for its own error about a wrong call.

        Returns None if the vanilla transform accepts the call.
        """
        self.transform(self.function, **self.options)(*args, **kwargs)

    def explain(self, error: Exception, call: Callable[[], Call]) -> None:
        """Adds the cause to an error of JAX, or raises a better error, if JAX cannot know the cause.

        Returns None if there is nothing to add, or if the cause was added to the text of `error`. The caller then
        raises `error`.

        Args:
            error: the error. Its text may be changed.
            call: returns the failed call.
        """
        # JAX refused an argument that Equinox's version of the transform would accept, and the text shall say so. No
        # transform of Equinox has an option `argnums`, so none corresponds to a transform with it.
        if is_refusal(error) and "argnums" not in self.options:
            name_counterpart(error, call().tree, self.transform_name)
        # If one object is both a static and a traced argument, that is the cause. `require_separate` raises then.
        if isinstance(error, ValueError) and "Non-hashable static" in str(error):
            failed_call = call()
            require_separate(failed_call.arguments, failed_call.tree, self.names)

    @property
    def traces(self) -> Traces:
        """The traces of the function so far. If static values make it retrace on every call, they give a warning."""
        return self._shared.traces

    # ---- For families to override ----

    def static_positions(self, num_args: int, keywords: Collection[str]) -> Collection[Position]:
        """Returns the positions and names of the static arguments of a call. They are not part of the graph.

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
        """Returns the treatments of the arguments: they give each leaf its labels.

        By default leaves are grouped by whether they are donated, or form one group if nothing is donated.
        """
        donation = self.donation_treatment(arguments)
        # The second argument makes the treatments from the packed arguments, which are not needed here. The key says
        # what the treatments depend on besides the structure of the arguments.
        if donation is None:
            return Grouping(self.transform_name, lambda _: (), key=())
        return Grouping(self.transform_name, lambda _: (donation,), key=Static(donation.prefix))

    def treatment_of_results(self, policy: Policy, arguments: Arguments) -> Treatment | None:
        """Returns the treatment of the result. None if all leaves of it are treated alike, so that they are one group.

        In place, the changed arguments are returned from the transform beside the result. Then the prefix is a `Branch`
        of two: one part for the arguments, and one for the result.

        Args:
            policy: the policy of the call.
            arguments: arguments of the call. In place, changed arguments are returned under the same labels.
        """
        return None

    def apply_transform(
        self, inner: Callable[..., Any], labels: Sequence[Any], result_labels: Sequence[Any] | None, num_statics: int
    ) -> Any:
        """Applies the transform to the inner function. Returns the transformed function.

        A family with an option for arguments or results overrides this: the option gets one entry for each group.

        Args:
            inner: the inner function. It takes leaf groups, followed by static arguments.
            labels: for each group of the arguments, its labels, one for each treatment.
            result_labels: the label of each group of the result. None if the result is one group, and the transform has
                no option for it.
            num_statics: number of static arguments.
        """
        return self.transform(inner, **self.options)

    def unwritable(self, call: Call, number: int | None, value: Any) -> str:
        """Returns the reason, as a sentence, why `in_place=True` could not write a change back. Empty if it could.

        Args:
            call: the call.
            number: record of the changed leaf. None for a new leaf.
            value: the leaf after the change. None if it is not known.
        """
        return ""

    # ---- The caller's side ----

    def rules(self, policy: Policy) -> Rules:
        """Returns the rules for packing arguments and results: what carries identity, and which leaves are traced."""
        return rules_of_call(policy, filtered=self.is_filtered, is_exact=self.calls_each_time)

    def arguments(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Arguments:
        """Makes one node of all arguments of a call: the root of the graph. It has the names of the arguments."""
        names = self.names.of(len(args))
        static = self.static_positions(len(args), kwargs)
        if not static:
            return Arguments(names, args, kwargs)
        # A static argument has no name in `Arguments`, and so no place in the graph.
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
        # `enter` of `_caller_side`, which packs and groups.
        call = enter(arguments, self.rules(policy), self.grouping(policy, arguments))
        return self.copy_arrays_donated_twice(call)

    def copy_arrays_donated_twice(self, call: Call) -> Call:
        """Puts copies into the donated leaf groups, wherever an array of a module would be donated a second time.

        Returns the call itself. Under an outer trace JAX takes no buffer, so nothing is copied.

        Raises:
            InconsistentSharingError: if a donated array is also in an argument that is kept.
        """
        donation = self.donation_treatment(call.arguments)
        return call if donation is None else take_each_buffer_once(call, donation, self.transform_name)

    def donation_treatment(self, arguments: Arguments) -> Treatment | None:
        """Makes the treatment of donation: each leaf is labelled as donated or kept. None if no argument is donated."""
        return donation_treatment(arguments, self.donated_positions(len(arguments.args), arguments.kwargs))

    def leave(self, result: Any, call: Call, policy: Policy, used: Callable[[], Sequence[Any]] | None = None) -> Any:
        """Builds the result of a call. In place, writes the function's changes into the caller's objects.

        Args:
            result: result of the transformed function: one leaf group, or several.
            call: the call.
            policy: the policy of the call.
            used: returns the leaves of the arguments used by the computation. None for `leaves_used`.
        """
        groups = result.parts if type(result) is LeafGroups else (result,)
        if policy.in_place:
            # Writes the changes, and returns one tuple for each tree. Here it is one tree: the changed objects come
            # first, the result last.
            (entries,) = commit_changes(call, self.transform_name, groups)
            return entries[-1]
        # `given` has the records of the caller's objects that the function returned unchanged.
        structure = groups[0].selection.structure
        if not structure.given:
            return leave(groups)
        return leave(groups, objects_for_caller(call, structure, used or (lambda: self.leaves_used(call))))

    def leaves_used(self, call: Call) -> Sequence[Any]:
        """Returns the leaves of the arguments used by the computation. By default, all leaves.

        If one of these is committed to a device, vanilla `jax.jit` commits its results.
        """
        return call.leaves

    def transformed_for(self, policy: Policy, call: Call) -> Any:
        """Returns the transformed function for a call: one for each policy and each set of labels.

        It is made on first use. Two threads get the same one.
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
        """Returns the inner function, which the transform gets. It is made once for each policy.

        Raises:
            TypeError: in place, if the user's function is a mutable module or a method of one. Its changes of
                itself would not be written back.
        """
        shared = self._shared
        forbid_bound_module(self.function, policy, self.transform_name)
        inner = shared.inner.get(policy)
        if inner is None:
            call = functools.partial(self._without_function().call_inside, policy)
            # The inner function has the name of the user's function. If that is a module, the module is an argument of
            # one function for all modules, and the inner function has the name of that function.
            function = shared.get_function() if is_module(self.function) else self.function
            inner = shared.inner.setdefault(policy, Inner(function, shared.get_function, call))
        return inner

    def _without_function(self) -> Self:
        """Returns a copy of the wrapper for the inner function to refer to.

        The copy refers neither to the user's function nor to the inner function. So both are freed with the wrapper.
        """
        cls = type(self)
        # Not `__init__`, which would apply the transform once more.
        wrapper_copy = cls.__new__(cls)
        vars(wrapper_copy).update(vars(self))
        for name in ("function", "__wrapped__", "_shared", "_made"):
            vars(wrapper_copy).pop(name, None)
        # These two are attributes of the native base class, so `vars` does not have them.
        wrapper_copy.policy, wrapper_copy.settings = self.policy, None
        # Of the state in `_shared`, the parts that refer neither to the user's function nor to the inner one.
        wrapper_copy._records_of_traces = self._shared.traces, self._shared.seen, self._shared.unsaid
        return wrapper_copy

    # An attribute of the copy alone. See `Shared` for the three.
    _records_of_traces: tuple[Traces, SeenArguments, Unsaid]

    def terms(self, policy: Policy) -> Terms:
        """Makes the facts common to all traces of the function under a policy. Called on the copy alone."""
        return Terms(
            self.transform_name,
            self.names,
            policy,
            self.rules(policy),
            # What earlier traces of the function found out.
            *self._records_of_traces,
            caches_traces=self.caches_traces,
            writes=self.writes,
            options=self.all_options,
            unwritable=self.unwritable,
            differentiates=self.differentiates,
            bound_to=self.bound_to,
        )

    def call_inside(self, policy: Policy, function: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
        """Builds arguments from leaf groups, calls the user's function, and returns its result in leaf groups.

        This is the body of the inner function.

        Args:
            policy: the policy.
            function: the user's function.
            args: leaf groups, then static arguments.
            kwargs: empty.
        """
        received = self.receive_arguments(args)
        trace = FunctionTrace(self.terms(policy), function)
        arguments = received.arguments
        return self.pack_results(trace.call_with(received, arguments.args, arguments.kwargs), trace)

    def make_is_taken(self, received: Received) -> Callable[[int], bool]:
        """Returns a predicate on records: True if the object is donated, so the transform takes over its buffers.

        The object may not pass through, since the caller's own object has lost its buffers.
        """
        donation = self.donation_treatment(received.arguments)
        return (lambda _: False) if donation is None else donated_records(received.tree, donation).__contains__

    def receive_arguments(self, args: Sequence[Any]) -> Received:
        """Builds the arguments for the user's function.

        Args:
            args: leaf groups, then static arguments.
        """
        return receive(
            [arg for arg in args if type(arg) is LeafGroup], [arg for arg in args if type(arg) is not LeafGroup]
        )

    def pack_results(self, result: Any, trace: FunctionTrace) -> Any:
        """Packs the result of the function and, in place, the changed arguments, for the transform.

        Warns of ties lost by the function.

        Args:
            result: the result of the user's function.
            trace: the trace, with the arguments as received by the function.

        Returns:
            One leaf group, or `LeafGroups` if the transform has an option for results.

        Raises:
            StaticTracerError: if a static leaf of the result holds a tracer.
        """
        policy, received = trace.terms.policy, trace.received
        treatment = self.treatment_of_results(policy, received.arguments)
        if treatment is not None:
            return self._pack_by_label(result, trace, treatment)
        # Warn of lost ties. The check needs the result and, in place, all arguments (`with_state`).
        tree = trace.flatten(trace.with_state(result))
        trace.check_flattened(tree, is_with_state=bool(policy.in_place))
        is_taken, rules = self.make_is_taken(received), trace.terms.rules
        if policy.in_place:
            # Pack the result and the objects that changed. Under `rules_against_leaks`, packing raises if a static leaf
            # holds a tracer.
            tree = flatten_with_changes(result, received.tree, trace.rules_against_leaks(rules), is_taken)
        elif policy.pass_through and self.passes_through:
            # Object → record, for what was returned unchanged. Under the rule `given` the object itself is not packed,
            # but a reference to the caller's object with this record.
            unchanged = find_unchanged(result, received.tree, is_taken, containers=policy.containers)
            tree = trace.flatten(result, rules._replace(given=unchanged)) if unchanged else tree
        return single_group_of_tree(tree)

    def _pack_by_label(self, result: Any, trace: FunctionTrace, treatment: Treatment) -> Any:
        """Packs a result and, in place, the changed arguments into several leaf groups, one for each label.

        Warns of ties lost by the function.

        Args:
            result: the result of the user's function.
            trace: the trace, with the arguments as received by the function.
            treatment: the treatment of the result. In place, its prefix has a part for the arguments in front.

        Raises:
            UnfitResultError: if the option for results does not fit the result.
        """
        policy, received = trace.terms.policy, trace.received
        # The labels as written in the option. None if the groups are those of the leaves' resolved labels.
        labels = None if treatment.groups_by_outcome else self._labels_in_treatment(treatment)
        try:
            if policy.in_place:
                # Rules that say which objects changed. `deeply`: an object that holds a changed one counts as changed,
                # since it may be returned under another label.
                changes = rules_for_state(trace.terms.rules, received.tree, self.make_is_taken(received), deeply=True)
                grouped = group_result_with_state(result, trace, treatment, labels, changes)
            else:
                tree = trace.flatten(result)
                trace.check_flattened(tree)
                grouped = group_result(tree, treatment, labels, trace.terms.title)
        except SharingMismatchError as error:
            raise UnfitResultError(error) from None
        if labels is None:
            # The resolved labels depend on the leaves of the result. The transform reads them from the call when the
            # trace has ended.
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
        is_exact: True to pack static values as these very objects, and not as equal copies. This is for transforms
            that call the function each time. A kept trace has the static values of the first call.
    """
    # "outside" is the convention outside all modules: every leaf is traced, and the transform refuses what it cannot
    # trace. Arrays and plain containers are values without identity there.
    return Rules(
        arrays=policy.arrays,
        containers=policy.containers,
        convention="outside",
        filtered=filtered,
        is_exact=is_exact,
    )
