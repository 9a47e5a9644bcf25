"""Functions under `jax.jit`, `equinox.filter_jit` and `jax.checkpoint`, and ahead-of-time compilation.

The options of these transforms are about the user's arguments: their positions, names and subtrees. But JAX gets *leaf
groups* in place of the arguments, so the options are translated to positions of groups.

    jit(f, donate_argnums=0)(net, x)      groups  [leaves of net]  [x]      JAX gets  donate_argnums=(0,)

An option becomes a *treatment*: a prefix tree with a *label* for each leaf, such as "donated" or a sharding. Leaves
with the same labels form one leaf group, and JAX gets each group as one argument. A *static* argument is in no group.
JAX gets it after the groups.

JAX transforms the *inner function*. It takes leaf groups, builds the arguments, calls the user's function, and packs
the result into leaf groups. JAX returns the *transformed function*. A module *passes through* if the user's function
returns it unchanged: the caller gets the very object back. With `in_place=True`, the objects changed by the function go
out beside the result, and their new content is written into the caller's objects. Without it, changes of the arguments
are *lost*, and the package warns of them. A *policy* says which objects carry identity, and whether a call is in place.

`FunctionTransform` does the steps of a call. The classes here override its methods.

Ahead of time, JAX's stages are about the inner function, too. A `Stage` has the attributes of JAX's own stage in the
user's shapes. A `Program` has everything else that a call of the compiled function needs:

    compiled = jit(f).lower(net, x).compile()     Stage(Compiled, Program(…, structure of (net, x)))
    compiled(net, x)                              packed again: the structure must be the same

The *structure* describes everything in the arguments but their traced leaves: classes, static values and ties. A
compiled program cannot be traced again. So a call with other ties, classes or static values is an error that names the
difference.
"""

import contextlib
import dataclasses
import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import tree_util as jtu

from ..core._by_identity import IdentityDict, IdentitySet
from ..core._call_arguments import Arguments, Position, positions_of
from ..core._jax_internals import api_boundary, current_traces, used_inputs
from ..core._node_types import is_module
from ..core._pack_and_unpack import unpack
from ..core._prefix_trees import Branch
from ..core._static_values import IdentityKey, Incomparable, Static, copy_of
from ..core._structure import LEAF, FlatDag, Node, Structure
from ..ties._policy_and_context import Policy, current_policy
from ._argument_names import ChosenArguments, Names, as_sequence
from ._caller_side import Call, Grouping, build_from_groups, pack_call
from ._function_given_to_jax import Inner, NewProgramError
from ._function_transform import FunctionTransform
from ._joining_trees import Sides, holds_modules, join
from ._leaf_groups import LeafGroup, LeafGroups, LeafSelection, gather_leaves, groups_of
from ._leaf_labels import Treatment, is_donated
from ._pass_through import objects_for_caller
from ._placements import is_sharding, placement_treatment
from .checks._lost_changes import only_traced
from .checks._refused_arguments import forbid_bound_module

_OPTIONS_THAT_MOVE = ("in_shardings", "out_shardings", "device", "backend")
"""Options under which `jax.jit` moves arrays. No object of the caller's passes through then."""

_TRANSLATED_OPTIONS = (
    "static_argnums",
    "static_argnames",
    "donate_argnums",
    "donate_argnames",
    "in_shardings",
    "out_shardings",
)
"""Options about the user's arguments and results. They are translated to leaf groups."""


class JittedTransform(FunctionTransform):
    """A function under `jax.jit` or `equinox.filter_jit`: ahead-of-time compilation, shapes, and the cache of traces.

    The base class does the steps of a call.
    """

    # One trace serves many calls, so a retrace is worth a warning.
    caches_traces = True
    # C knows what passes through.
    finishes_natively = True

    def leave(self, result: Any, call: Call, policy: Policy) -> Any:
        """Builds the result of a call. A module that the function returned unchanged is the caller's own object."""
        return self.build_result(
            result, call, policy, lambda: used_leaves(call, self._used_flags(call, current_policy(self.policy)))
        )

    def build_result(self, result: Any, call: Call, policy: Policy, leaves_used: Callable[[], Sequence[Any]]) -> Any:
        """Builds the result of a call, as `leave` does. The caller says which leaves the program uses.

        Args:
            result: result of the transformed function: a leaf group, or `LeafGroups`.
            call: the call.
            policy: the policy of the call.
            leaves_used: returns the leaves of the arguments that the program uses. JAX drops all others, so only the
                placement of these has an effect on the results. It is called if something passes through.
        """
        # In place, all of the caller's objects come back.
        if policy.in_place:
            return super().leave(result, call, policy)
        groups = groups_of(result)
        structure = groups[0].selection.structure
        # `given` has the records of the caller's objects that pass through.
        callers_object = objects_for_caller(call, structure, leaves_used) if structure.given else None
        return build_from_groups(groups, callers_object)

    def _used_flags(self, call: Call, policy: Policy) -> Sequence[bool]:
        """Returns one flag for each leaf of the groups, in order: True if the computation uses the leaf."""
        return used_inputs(self.transformed_for(policy, call).trace(*call.groups, *call.statics).jaxpr)

    # ---- Ahead of time ----

    @api_boundary
    def lower(self, *args: Any, **kwargs: Any) -> "Stage":
        """Lowers the function for these arguments, as `jax.jit(f).lower` does. `.compile()` follows."""
        return self._stage("lower", args, kwargs)

    @api_boundary
    def trace(self, *args: Any, **kwargs: Any) -> "Stage":
        """Traces the function for these arguments, as `jax.jit(f).trace` does. `.jaxpr` and `.lower()` follow."""
        return self._stage("trace", args, kwargs)

    def _stage(self, method_name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> "Stage":
        """Makes the first stage of ahead-of-time compilation: a `Stage` around JAX's own stage.

        Its `Program` has everything to call the compiled program later, and keeps no argument alive.

        Args:
            method_name: method of `jax.jit(f)` to make JAX's own stage with: `lower` or `trace`.
            args: positional arguments. Arrays may be `jax.ShapeDtypeStruct`s.
            kwargs: keyword arguments. Arrays may be `jax.ShapeDtypeStruct`s, too.
        """
        policy = current_policy(self.policy)
        with self._enter_to_trace(args, kwargs, policy) as call:
            # If a struct has a sharding, the compiled program moves the array in its place to this sharding. A moved
            # array is another object than the caller's, so no array may pass through.
            if any(isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding for leaf in call.leaves):
                policy = dataclasses.replace(policy, pass_through=False)
            try:
                # The program does not run now, so a warning of lost changes would come too early. `only_traced` stores
                # the losses, and a later call of the wrapper warns of them.
                with only_traced():
                    stage = getattr(self.transformed_for(policy, call), method_name)(*call.groups, *call.statics)
                self._leave_warnings_to_python()
                # The program must not keep these arguments alive. So find out now which of their leaves it uses. For
                # that, `_used_flags` looks at a trace of the function.
                is_used = self._used_flags(call, policy) if self.passes_through else ()
            except Exception as error:
                # `explain` adds the cause to an error of JAX, or raises an error of its own.
                self.explain(error, lambda: call)
                raise
            names, static = call.arguments.names, call.arguments.static
            program = Program(self, policy, is_used, names, static, call.plan.structure, call.plan.selections)
            return Stage(stage, program)

    def _leave_warnings_to_python(self) -> None:
        """Makes Python do the next call of the wrapper, if some lost changes have got no warning yet.

        A later call may have to warn of them, and C cannot warn.
        """
        if self._shared.history.deferred_losses:
            # C knows how to do calls from the settings alone. Without them it leaves the call to Python.
            self.settings = None

    def _enter_to_trace(self, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy) -> Call:
        """Packs the arguments and groups their leaves, to trace them only. Returns the call, with its groups.

        The method `enter` checks the donated arrays, too. A trace takes over no buffer, so they need no check here.
        """
        arguments = self.arguments(args, kwargs)
        return pack_call(arguments, self.rules(policy), self.grouping(policy, arguments))

    @api_boundary
    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the function's result with a `jax.ShapeDtypeStruct` for each traced leaf. Nothing is computed."""
        policy = current_policy(self.policy)
        # In place, the changed arguments would go out beside the result. The caller asks for the result alone.
        if policy.in_place:
            policy = dataclasses.replace(policy, in_place=False)
        with self._enter_to_trace(args, kwargs, policy) as call:
            try:
                # `only_traced` stores lost changes for a later call to warn of.
                with only_traced():
                    result = self.transformed_for(policy, call).eval_shape(*call.groups, *call.statics)
                self._leave_warnings_to_python()
            except Exception as error:
                # `explain` adds the cause to an error of JAX, or raises an error of its own.
                self.explain(error, lambda: call)
                raise
            # Modules that pass through are rebuilt with structs in place of their arrays.
            return build_from_groups(groups_of(result), abstract_objects_of(call.tree))

    def clear_cache(self) -> None:
        """Forgets every trace of this function, as `jax.jit(f).clear_cache` does.

        All wrappers of the function with equal options share their traces, so those wrappers trace again, too.
        """
        # The transformed functions that this wrapper has used so far.
        for transformed in list(self._made.values()):
            transformed.clear_cache()


class JitTransform(JittedTransform):
    """A function under `jax.jit`, with identities preserved."""

    # Options on which a trace of the function does not depend. Wrappers that differ in nothing else share the traces.
    only_for_transform = frozenset({"inline", "keep_unused", "compiler_options", "abstracted_axes"})

    def check_options(self) -> None:
        """Reads the options, and lets `jax.jit` refuse wrong ones."""
        options = self.options
        self._in_shardings, self._out_shardings = options.get("in_shardings"), options.get("out_shardings")
        self.passes_through = not any(options.get(name) is not None for name in _OPTIONS_THAT_MOVE)
        # `jax.jit` reads shardings when it wraps a function. If the user changes a list of them later, nothing happens.
        # `copy_of` raises `Incomparable` if an object refuses to be copied. Then the user's own objects serve.
        with contextlib.suppress(Incomparable):
            # They are copied as one, so that an object in both stays one.
            in_and_out = options.get("in_shardings"), options.get("out_shardings")
            self._in_shardings, self._out_shardings = copy_of(in_and_out, IdentityDict())
        # `ChosenArguments` may raise for wrong options. So does `jax.jit`, which the base calls below, and its error is
        # better.
        with contextlib.suppress(Exception):
            self._static = ChosenArguments(self.function, options.get("static_argnums"), options.get("static_argnames"))
            self._donated = ChosenArguments(
                self.function, options.get("donate_argnums"), options.get("donate_argnames")
            )
        super().check_options()

    def static_positions(self, num_args: int, keywords: Collection[str]) -> Collection[Position]:
        """Returns the positions and names chosen by `static_argnums` and `static_argnames` in a call."""
        return self._static.positions(num_args, keywords)

    def donated_positions(self, num_args: int, keywords: Collection[str]) -> Collection[Position]:
        """Returns the positions and names chosen by `donate_argnums` and `donate_argnames` in a call."""
        return self._donated.positions(num_args, keywords)

    def grouping(self, policy: Policy, arguments: Arguments) -> Grouping:
        """Returns up to two treatments of the arguments: whether each is donated, and the shardings of its leaves.

        So leaves are in one group if they agree in both.
        """
        placement = self._placement_of_arguments(policy, arguments)
        donation = self.donation_treatment(arguments)
        # Without shardings, the base groups by donation alone. (If all arguments have one sharding, `placement` is also
        # None. If some of them are donated as well, the lines below group by donation alone.)
        if placement is None and (donation is None or self._in_shardings is None):
            return super().grouping(policy, arguments)
        treatments = [treatment for treatment in (donation, placement) if treatment is not None]
        # Groupings with equal keys group a structure in the same way. A prefix of shardings need not be hashable. But a
        # function has only one such prefix, so the identity of the prefix is enough.
        key = (IdentityKey(self._in_shardings), policy.containers, *map(_key_of_prefix, treatments))
        return Grouping(self.transform_name, lambda _: treatments, key)

    def _placement_of_arguments(self, policy: Policy, arguments: Arguments) -> Treatment | None:
        """Makes the treatment of `in_shardings`. Returns None if all arguments have one sharding or none."""
        prefix = self._in_shardings
        _, names = arguments.parts()
        if prefix is None or is_sharding(prefix):
            return None
        # The traced arguments. A static one has no sharding.
        positions = positions_of(names)
        parts = prefix if isinstance(prefix, (tuple, list)) else [prefix] * len(positions)
        if len(parts) != len(positions):
            # Vanilla JAX raises its own error if there are more shardings than arguments, or fewer.
            self.raise_vanilla_error(arguments.args, arguments.kwargs)
        # The root of the prefix stands for all arguments. A `Branch` fits any node with as many children.
        return placement_treatment("in_shardings", Branch(tuple(parts)), containers=policy.containers)

    def treatment_of_results(self, policy: Policy, arguments: Arguments) -> Treatment | None:
        """Makes the treatment of `out_shardings`. Returns None if all results have one sharding or none.

        In place, its prefix has one part for the objects changed by the function, and one for the result.
        """
        prefix = self._out_shardings
        # One sharding for all results needs no grouping. But in place, it is not for the changed objects.
        if prefix is None or (is_sharding(prefix) and not policy.in_place):
            return None
        if policy.in_place:
            # None: changed objects stay on their devices.
            prefix = Branch((None, prefix))
        return placement_treatment("out_shardings", prefix, containers=policy.containers)

    def apply_transform(
        self, inner: Callable[..., Any], labels: Sequence[Any], result_labels: Sequence[Any] | None, num_statics: int
    ) -> Any:
        """Applies `jax.jit` to the inner function, with the options translated to leaf groups.

        Args:
            inner: the inner function. It takes leaf groups, and then static arguments.
            labels: for each group of the arguments, its labels: from donation if some argument is donated, and then
                from `in_shardings` if the arguments have different shardings.
            result_labels: the sharding of each group of the result. None if the result is one group.
            num_statics: number of static arguments.
        """
        options = {name: value for name, value in self.options.items() if name not in _TRANSLATED_OPTIONS}
        # JAX 0.10 ignores negative indices. Here they are translated to groups, which every JAX would donate.
        is_ignored = any(i < 0 for i in self._donated.argnums) and not _can_donate_from_the_end()
        donated = [i for i, group_labels in enumerate(labels) if is_donated(group_labels) and not is_ignored]
        if donated:
            options["donate_argnums"] = tuple(donated)
        if num_statics:
            # Static arguments come after the groups.
            options["static_argnums"] = tuple(range(len(labels), len(labels) + num_statics))
        if self._in_shardings is not None:
            is_for_all = is_sharding(self._in_shardings)
            # The label from `in_shardings` is the last one.
            options["in_shardings"] = tuple(
                [self._in_shardings if is_for_all else group_labels[-1] for group_labels in labels]
            )
        if result_labels is not None or self._out_shardings is not None:
            # The inner function returns one group, or a `LeafGroups` of several, which needs a prefix of its class.
            options["out_shardings"] = self._out_shardings if result_labels is None else LeafGroups(result_labels)
        return self.transform(inner, **options)

    def enter(self, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy) -> Call:
        """Packs the arguments of a call and groups their leaves.

        With `in_shardings`, JAX refuses keyword arguments. Its own error is raised.
        """
        if kwargs and self._in_shardings is not None:
            self.raise_vanilla_error(args, kwargs)
        return super().enter(args, kwargs, policy)


@functools.cache
def _can_donate_from_the_end() -> bool:
    """Returns True if JAX understands negative `donate_argnums`. JAX 0.10 donates nothing then."""
    # Information about the arguments is a pair: one part for the positional ones, and one for the keyword arguments.
    return jax.jit(lambda x: x, donate_argnums=-1).lower(0.0).args_info[0][0].donated


def _key_of_prefix(treatment: Treatment) -> Any:
    """Returns a treatment's part of the key of a grouping.

    For donation it is the label of each argument. For shardings it is the number of arguments, because the rest of the
    key already has the user's prefix.
    """
    parts = treatment.prefix.parts
    return parts if treatment.name == "donate_argnums" else len(parts)


def _called(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Calls a function. JAX sees this name in the place of a called module's."""
    return function(*args, **kwargs)


class FilterJitTransform(JittedTransform):
    """A function under `equinox.filter_jit`, with identities preserved.

    The function may be a module. This *called module* is an argument of the inner function, as in Equinox, so its
    leaves are traced.
    """

    # Equinox compares functions by `==`, so equal methods and equal wrappers count as one function.
    shares_alike = True
    function_for_modules = staticmethod(_called)

    def check_options(self) -> None:
        """Lets `equinox.filter_jit` refuse wrong options, and reads them."""
        # Called for its errors alone.
        self.transform(self.function, **self.options)
        # One of "all", "all-except-first", "warn", "warn-except-first" and "none". With the first two, JAX's warning of
        # donated buffers that it could not use is hidden.
        donate = self.options.get("donate", "none")
        self.passes_through = not any(self.options.get(name) is not None for name in _OPTIONS_THAT_MOVE)
        self._is_donating = donate != "none"
        self._is_first_kept = donate.endswith("-except-first")
        self._is_quiet = donate.startswith("all")
        self._signature = inspect.signature(self.function)
        self._is_module = is_module(self.function)
        if self._is_module:
            # `_called` stands for all modules, so the base has the names of its parameters.
            self.names = Names(self.function)
            # The name of the module in the code of warnings.
            self.bound_to = "model"

    def enter(self, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy) -> Call:
        """Packs the arguments of a call and groups their leaves.

        With `in_place=True`, the function must not be a mutable module or a method of one, since no change can be
        written back into that module. This is checked first: binding the arguments may raise a less helpful error.
        """
        forbid_bound_module(self.function, policy, self.transform_name)
        return super().enter(args, kwargs, policy)

    def arguments(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Arguments:
        """Binds the arguments of a call, and makes one node of them, the root of the graph.

        As in Equinox, keyword arguments become positional where that is possible. A called module comes first.
        """
        bound = self._signature.bind(*args, **kwargs)
        args, kwargs = bound.args, bound.kwargs
        # One name for each positional argument.
        names = self.names.of(len(args))
        if self._is_module:
            return Arguments((_NAME_OF_CALLED_MODULE, *names), (self.function, *args), kwargs)
        return Arguments(names, args, kwargs)

    def donated_positions(self, num_args: int, keywords: Collection[str]) -> Collection[Position]:
        """Returns all positions and keywords, all but the first argument's, or none, as the option `donate` says.

        Args:
            num_args: number of positional arguments. A called module counts as one.
            keywords: keywords of the call.
        """
        if not self._is_donating:
            return ()
        positions: set[Position] = {*range(num_args), *keywords}
        if self._is_first_kept:
            # "First" means the user's first argument. After a called module, that is at position 1.
            positions.discard(int(self._is_module))
        return positions

    def apply_transform(
        self, inner: Callable[..., Any], labels: Sequence[Any], result_labels: Sequence[Any] | None, num_statics: int
    ) -> Any:
        """Applies `jax.jit` to the inner function. `FilterJitted` adds Equinox's errors and its handling of warnings.

        Args:
            inner: the inner function. It takes leaf groups.
            labels: for each group of the arguments, its labels: `DONATED` or `KEPT`, or none if nothing is donated.
            result_labels: None, since the result is one group.
            num_statics: 0. Under Equinox, static values are part of the structure and no arguments.
        """
        options = {name: value for name, value in self.options.items() if name != "donate"}
        donated = tuple([i for i, group_labels in enumerate(labels) if is_donated(group_labels)])
        assert isinstance(inner, Inner)
        is_quiet = bool(donated) and self._is_quiet
        # All wrappers of a function with these options share its programs, and what is known of them.
        jitted = inner.transformed.get((donated, is_quiet))
        if jitted is None:
            jitted = FilterJitted(inner, donated, is_quiet=is_quiet, options=options)
        return inner.transformed.setdefault((donated, is_quiet), jitted)

    def binding(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Returns the rules for C to bind such arguments as the method `arguments` binds them in Python.

        Returns:
            Three tuples: values to put before the positional arguments (a called module), names of the keywords to
            make positional, and names of all other keywords. None if C packs the arguments as written.
        """
        called_module = (self.function,) if self._is_module else ()
        bound = self._signature.bind(*args, **kwargs)
        if not called_module and not kwargs:
            return None
        by_position = [name for name in bound.arguments if name in kwargs and name not in bound.kwargs]
        return called_module, tuple(by_position), tuple(bound.kwargs)

    def for_later_calls(self, transformed: Any) -> Any:
        """Returns the function for C to call in later calls.

        After a call in which Equinox did no more than JAX, it is the function under `jax.jit` itself.

        Args:
            transformed: the `FilterJitted` of the call.
        """
        return transformed.for_later_calls


_NAME_OF_CALLED_MODULE = "self"
"""Name of a called module in paths, as in the signature of its class."""


class _Thread(threading.local):
    """State of a thread.

    Attributes:
        is_in_python: True while Python, and not C, calls a function under `filter_jit`, so that JAX may trace it anew.
    """

    is_in_python = False


_thread = _Thread()


def call_and_let_trace(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function, and lets JAX trace new programs meanwhile."""
    was_in_python = _thread.is_in_python
    _thread.is_in_python = True
    try:
        return function(*args, **kwargs)
    finally:
        _thread.is_in_python = was_in_python


def _require_known() -> None:
    """Raises at the beginning of a trace in a call by C."""
    if not _thread.is_in_python:
        raise NewProgramError


class FilterJitted:
    """A function under `jax.jit`, with the behaviour of `equinox.filter_jit`. It takes leaf groups.

    Equinox waits for each program to end, so that its own errors (`equinox.error_if`) are raised where the call is.
    Only a program that calls a function on the host can raise such an error. These programs are called through Equinox.
    All others are called through JAX, without waiting. Attributes such as `lower` are JAX's.

    As long as no program of this function calls the host, C calls `jitted` itself. It knows nothing of programs, so a
    call with other shapes may begin a new one. Then the trace raises `NewProgramError`, and Python does the call.

    Args:
        inner: the inner function.
        donated: positions of the groups to donate.
        is_quiet: True to hide JAX's warning of donated buffers it could not use.
        options: options of `jax.jit`.
    """

    def __init__(self, inner: Inner, donated: Collection[int], *, is_quiet: bool, options: Mapping[str, Any]) -> None:
        self._inner = inner.guarded(_require_known)
        self.jitted = jax.jit(self._inner, donate_argnums=tuple(donated), **options)
        self._donated = frozenset(donated)
        self._is_quiet = is_quiet
        self._options = options
        # Structure and types of the groups → True if the program for them calls the host. A function may call the host
        # for some arguments only.
        self._calls_host: dict[Any, bool] = {}
        # True as soon as some program does. C may not call `jitted` itself then.
        self._may_call_host = False
        # Made when a program first calls the host.
        self._under_equinox: Callable[..., Any] | None = None

    def __call__(self, *groups: Any) -> Any:
        """Calls the function, through Equinox if the program for these groups calls the host."""
        # Only the outermost transform runs a program: a single trace is active then. Under an outer transform the
        # program becomes a part of another one, and nobody could wait for it.
        if len(current_traces()) == 1 and self._program_calls_host(groups):
            return self._call_through_equinox(groups)
        if not self._is_quiet:
            return call_and_let_trace(self.jitted, *groups)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable*")
            return call_and_let_trace(self.jitted, *groups)

    def _program_calls_host(self, groups: Sequence[Any]) -> bool:
        """Returns True if the program for these groups calls a function on the host. Traces it if it is new."""
        leaves, treedef = jtu.tree_flatten(groups)
        try:
            key = (treedef, *[jax.typeof(leaf) for leaf in leaves])
        except TypeError:
            # JAX takes no such leaf, an array of texts for example. The call raises its error.
            return False
        calls_host = self._calls_host.get(key)
        if calls_host is None:
            program = call_and_let_trace(self.jitted.trace, *groups).jaxpr
            calls_host = self._calls_host[key] = _calls_host(program)
            self._may_call_host |= calls_host
        return calls_host

    def _call_through_equinox(self, groups: Sequence[Any]) -> Any:
        """Calls the function under `equinox.filter_jit`, with the same options and the same groups donated."""
        # `equinox.filter_jit` donates all arguments, or all but the first. So the first one holds what is kept.
        kept = {i: group for i, group in enumerate(groups) if i not in self._donated}
        donated = {i: group for i, group in enumerate(groups) if i in self._donated}
        if self._under_equinox is None:
            donate = "none" if not donated else "all-except-first" if self._is_quiet else "warn-except-first"
            self._under_equinox = eqx.filter_jit(self._call_merged, donate=donate, **self._options)
        return call_and_let_trace(self._under_equinox, kept, donated)

    def _call_merged(self, kept: dict[int, Any], donated: dict[int, Any]) -> Any:
        """Calls the inner function with groups by position."""
        groups = {**kept, **donated}
        return self._inner(*[groups[i] for i in range(len(groups))])

    @property
    def for_later_calls(self) -> Any:
        """The function that C calls: `jitted` if no program needs more than that, otherwise this object."""
        return self if self._is_quiet or self._may_call_host else self.jitted

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.jitted, name)
        return functools.partial(call_and_let_trace, attribute) if callable(attribute) else attribute


def _calls_host(closed_jaxpr: Any) -> bool:
    """Returns True if a program, or a program inside it, calls a function on the host."""
    # `IdentitySet.add` returns False for an object that is in the set already.
    stack, visited = [closed_jaxpr.jaxpr], IdentitySet()
    while stack:
        jaxpr = stack.pop()
        if not visited.add(jaxpr):
            continue
        for eqn in jaxpr.eqns:
            # `pure_callback`, `io_callback`, `debug_callback`.
            if "callback" in eqn.primitive.name:
                return True
            # Parameters hold programs by themselves and in tuples (the branches of `cond`), some of them closed.
            for value in jtu.tree_leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
                # A closed program holds the open one in its attribute `jaxpr`.
                inner_jaxpr = getattr(value, "jaxpr", value)
                if hasattr(inner_jaxpr, "eqns"):
                    stack.append(inner_jaxpr)
    return False


class CheckpointTransform(FunctionTransform):
    """A function under `jax.checkpoint`, with identities preserved."""

    # One trace serves many calls, so a retrace is worth a warning.
    caches_traces = True
    # Options on which a trace of the function does not depend. Wrappers that differ in nothing else share the traces.
    only_for_transform = frozenset({"policy", "prevent_cse", "concrete"})

    def static_positions(self, num_args: int, keywords: Collection[str]) -> Collection[Position]:
        """Returns the positions chosen by `static_argnums` in a call. Negative ones count from the last argument."""
        return {i + num_args if i < 0 else i for i in as_sequence(self.options.get("static_argnums", ()))}

    def grouping(self, policy: Policy, arguments: Arguments) -> Grouping:
        """Groups leaves by `prevent_cse`, if it is a prefix tree of the arguments and not one bool for all."""
        prefix = self.options.get("prevent_cse", True)
        if isinstance(prefix, bool):
            return super().grouping(policy, arguments)
        children, names = arguments.parts()
        prefixes = self._split_prefix(prefix, arguments, positions_of(names))
        fitted = [_in_shape_of(child, subprefix) for child, subprefix in zip(children, prefixes, strict=True)]
        # The root of the prefix stands for all arguments. A `Branch` fits any node with as many children.
        treatment = Treatment("prevent_cse", Branch(tuple(fitted)), is_label=lambda label: isinstance(label, bool))
        return Grouping(self.transform_name, lambda _: [treatment], Static(treatment.prefix))

    def _split_prefix(self, prefix: Any, arguments: Arguments, positions: Sequence[Position]) -> list[Any]:
        """Splits the prefix tree `prevent_cse` into one prefix for each traced argument.

        If it does not fit the arguments, raises JAX's own error.

        Args:
            prefix: the option. It is no bool.
            arguments: the arguments of a call.
            positions: positions of the positional ones, and then names of the keyword arguments. No static ones.
        """
        indices = [position for position in positions if isinstance(position, int)]
        keywords = positions[len(indices) :]
        # If there are keyword arguments, a pair holds one prefix for `args` and one for `kwargs`.
        positional, by_name = prefix if keywords and len(prefix) == 2 else (prefix, {})
        # A bool in either place is for all arguments there.
        positional = [positional] * len(indices) if isinstance(positional, bool) else positional
        by_name = dict.fromkeys(keywords, by_name) if isinstance(by_name, bool) else by_name
        fits = isinstance(positional, (tuple, list)) and len(positional) == len(indices)
        if not fits or not isinstance(by_name, dict) or by_name.keys() != {*keywords}:
            # Vanilla JAX raises its own error for a prefix that does not fit.
            self.raise_vanilla_error(arguments.args, arguments.kwargs)
        return [*positional, *[by_name[name] for name in keywords]]

    def apply_transform(
        self, inner: Callable[..., Any], labels: Sequence[Any], result_labels: Sequence[Any] | None, num_statics: int
    ) -> Any:
        """Applies `jax.checkpoint` to the inner function, with the options translated to leaf groups.

        Args:
            inner: the inner function. It takes leaf groups, and then static arguments.
            labels: for each group, its labels. If `prevent_cse` is a prefix tree, this is a tuple of one bool.
            result_labels: None, since the result is one group.
            num_statics: number of static arguments.
        """
        options = {**self.options}
        if not isinstance(options.get("prevent_cse", True), bool):
            options["prevent_cse"] = tuple([group_labels[0] for group_labels in labels])
        if num_statics:
            # Static arguments come after the groups.
            options["static_argnums"] = tuple(range(len(labels), len(labels) + num_statics))
        return self.transform(inner, **options)


def _in_shape_of(tree: Any, prefix: Any) -> Any:
    """Returns a prefix with a list or a dict in place of each tuple, wherever the tree has a list or a dict.

    JAX lets a tuple stand for either. `Treatment` needs the classes of the tree. A tuple of another length stays, and
    is refused later.
    """
    if type(prefix) is not tuple or type(tree) not in (dict, list) or len(prefix) != len(tree):
        return prefix
    if type(tree) is list:
        return list(map(_in_shape_of, tree, prefix))
    # The keys in the order in which JAX flattens the dict.
    _, keys = jtu.default_registry.flatten_one_level(tree) or ((), ())
    return {key: _in_shape_of(tree[key], part) for key, part in zip(keys, prefix, strict=True)}


# ---- Ahead of time ----

_ABOUT_ARGUMENTS = ("args_info", "in_avals", "input_formats", "input_layouts", "input_shardings")
"""Attributes of JAX's stages with one value for each argument."""

_ABOUT_RESULTS = ("out_avals", "out_info", "output_formats", "output_layouts", "output_shardings")
"""Attributes of JAX's stages with one value for each result."""


class Stage:
    """A stage of ahead-of-time compilation (`Traced`, `Lowered`, `Compiled`) of a function with identities preserved.

    It has every attribute of JAX's own stage. Attributes about arguments and results have the user's shapes, without
    leaf groups. `.lower()` and `.compile()` lead to the next stage. The last one is called with the arguments of the
    function except the static ones, as JAX's is.

    Args:
        stage: JAX's stage of the inner function.
        program: everything needed to call the compiled function.
    """

    def __init__(self, stage: Any, program: "Program") -> None:
        self._stage = stage
        self._program = program

    @api_boundary
    def lower(self, *args: Any, **kwargs: Any) -> "Stage":
        """Returns the next stage, lowered."""
        return Stage(self._stage.lower(*args, **kwargs), self._program)

    @api_boundary
    def compile(self, *args: Any, **kwargs: Any) -> "Stage":
        """Returns the next stage, compiled."""
        return Stage(self._stage.compile(*args, **kwargs), self._program)

    @api_boundary
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._program(self._stage, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of JAX's stage. If it is about arguments or results, it gets the user's shapes."""
        # The trees of JAX's stage are those of the leaf groups. So they are read off an attribute in the user's shapes.
        if name in ("in_tree", "out_tree"):
            return jtu.tree_structure(self.args_info if name == "in_tree" else self.out_info)
        # A copy asks for attributes before it has `_stage`.
        if name.startswith("_"):
            raise AttributeError(name)
        value = getattr(self._stage, name)
        if name in _ABOUT_ARGUMENTS:
            return self._program.in_shape_of_arguments(value)
        # The value for results is a leaf group with an entry in the place of each leaf. A group that lacks some leaves,
        # or refers to objects of the caller's, cannot be built as a tree, and stays a group.
        if name in _ABOUT_RESULTS and type(value) is LeafGroup and value.is_tree:
            return value.tree()
        return value

    def __repr__(self) -> str:
        return f"Stage({self._stage!r})"


@dataclasses.dataclass(frozen=True)
class Program:
    """Everything needed to call a compiled function. No argument of the first call is kept.

    Attributes:
        jitted: the wrapper of the function.
        policy: the policy at compilation: which objects carry identity, and whether changes are written back.
        is_used: for each leaf of the groups, True if the program uses it. Empty if no object of the caller's can be in
            the result.
        names: names of the positional arguments. None for static ones, left out in calls.
        static: names of the static keyword arguments.
        structure: structure of the arguments.
        selections: the selections of the arguments' leaf groups, one for each.
    """

    jitted: JittedTransform
    policy: Policy
    is_used: Sequence[bool]
    names: tuple[str | None, ...]
    static: tuple[str, ...]
    structure: Structure
    selections: Sequence[LeafSelection]

    def in_shape_of_arguments(self, value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Builds the arguments, a tuple and a dict, with entries such as shapes in the places of leaves.

        Args:
            value: a tree with one entry for each leaf of the groups, in their order. An entry may be None.
        """
        # Without `is_leaf`, JAX would drop entries that are None.
        entries = iter(jtu.tree_leaves(value, is_leaf=lambda entry: entry is None))

        def group_with_entries(selection: LeafSelection) -> LeafGroup:
            return LeafGroup([next(entries) for _ in range(selection.num_leaves)], selection)

        groups = [group_with_entries(selection) for selection in self.selections]
        # `gather_leaves` merges the groups into one list in flatten order.
        return _traced_arguments(unpack(self.structure, gather_leaves(groups)))

    def __call__(self, compiled: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Calls the compiled function, and returns its result with objects shared as in the function's own result.

        Args:
            compiled: JAX's last stage.
            args: the positional arguments, without static ones.
            kwargs: the keyword arguments, without static ones.

        Raises:
            SharingMismatchError: if the arguments differ in ties, classes or static values from the first ones.
        """
        jitted = self.jitted
        arguments = self._name_arguments(args, kwargs)
        with pack_call(arguments, jitted.rules(self.policy), jitted.grouping(self.policy, arguments)) as call:
            # Refuses arrays that are donated and kept, and copies those that are donated twice.
            jitted.copy_arrays_donated_twice(call)
            description = f"`{jitted.names.definition.name}` was compiled"
            require_made_for(self.structure, call, description, "f.lower(*args).compile()")
            result = compiled(*call.groups)
            # An object of the caller's that the function returned unchanged may be in the result, but only if JAX would
            # leave its arrays where they are. That depends on the leaves that the program uses.
            return jitted.build_result(result, call, self.policy, lambda: used_leaves(call, self.is_used))

    def _name_arguments(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Arguments:
        """Makes one node of the arguments of a call, with the names that they had at compilation.

        Accepts too few and too many arguments. `require_made_for` raises the error for them.
        """
        names: list[str | None] = []
        values: list[Any] = []
        remaining = iter(args)
        for name in self.names:
            # Static arguments are left out in a call. None stands in their places.
            value = None if name is None else next(remaining, _MISSING)
            if value is not _MISSING:
                names.append(name)
                values.append(value)
        # Arguments beyond the ones compiled for.
        for i, arg in enumerate(remaining, len(self.names)):
            names.append(f"args[{i}]")
            values.append(arg)
        return Arguments(tuple(names), values, {**kwargs, **dict.fromkeys(self.static)}, self.static)


_MISSING = object()
"""Marks an argument that a call does not have."""


def used_leaves(call: Call, is_used: Sequence[bool]) -> list[Any]:
    """Returns the leaves of a call that its computation uses.

    Args:
        call: the call.
        is_used: for each leaf of its groups, True if it is used.
    """
    leaves = [leaf for group in call.groups for leaf in group.leaves]
    return [leaf for leaf, is_leaf_used in zip(leaves, is_used, strict=True) if is_leaf_used]


def abstract_objects_of(tree: FlatDag) -> Callable[[int], Any]:
    """Returns a function: record of an object → the object, with `jax.ShapeDtypeStruct`s in place of arrays.

    One record always gives the same object. `eval_shape` puts these objects into its result, where the function returns
    objects of the caller's unchanged.

    Args:
        tree: the arguments of a call, with their objects. Its records are numbered, children before their parents.
    """
    # Record → its abstract object. It always has all records below some number.
    abstract_objects: dict[int, Any] = {}

    def abstract_object(record: int) -> Any:
        """Builds the objects up to this record, as far as they are missing, and returns the last of them."""
        # All children of a record come before it, so they are in the table when their parent is built.
        for i in range(len(abstract_objects), record + 1):
            op, children = tree.records[i]
            if op is LEAF:
                # A reference is a place in memory, and `jax.eval_shape` returns no place. So it stands for itself.
                leaf = tree.objects[i]
                abstract_objects[i] = leaf if isinstance(leaf, jax.Ref) else jax.eval_shape(lambda x: x, leaf)
            elif type(op) is Node:
                # A node is built anew from its auxiliary data and its children.
                abstract_children = [abstract_objects[child] for child in children]
                abstract_objects[i] = op.type.put_together(op.aux.thaw(), abstract_children)
            else:
                # A static leaf has no abstract form.
                abstract_objects[i] = tree.objects[i]
        return abstract_objects[record]

    return abstract_object


def require_made_for(structure: Any, call: Call, program: str, code: str) -> None:
    """Raises an error unless a program was made for arguments like those of a call.

    Args:
        structure: structure of the arguments for which the program was made.
        call: the call, with its arguments.
        program: first words of the error, such as "`f` was compiled".
        code: last words of the error: code to make another program, for `args`.

    Raises:
        SharingMismatchError: if the ties, classes or static values differ.
    """
    # Equal structures are one object, so `is` compares them.
    if call.tree.structure is structure:
        return
    expected = FlatDag.without_objects(structure)
    # Without modules, JAX has an error of its own for the difference, and it is better.
    if not holds_modules(expected) and not holds_modules(call.tree):
        _raise_vanilla_error_of_program(structure, call)
    # The names of the two trees in errors. The first field is a transform, and there is a program instead.
    sides = Sides("", "in the original ones", "in the new ones", program=program, code=code)
    # `join` is called for its errors alone. An exact join raises for ties that only its first tree has, so the second
    # call, with the trees exchanged, raises for those that only the arguments of the call have.
    join(expected, call.tree, sides, exact=True)
    join(
        call.tree, expected, sides._replace(first_place=sides.second_place, second_place=sides.first_place), exact=True
    )


def _raise_vanilla_error_of_program(structure: Structure, call: Call) -> None:
    """Raises JAX's own error for mismatched arguments, by calling a dummy program compiled for the right ones.

    Returns if JAX accepts them.

    Args:
        structure: structure of the right arguments.
        call: the call, with its mismatched arguments.
    """
    # The dummy gets scalars for all leaves. JAX compares the trees of the arguments before their shapes.
    scalars = [jax.ShapeDtypeStruct((), jnp.float32)] * structure.num_leaves
    expected_args, expected_kwargs = _traced_arguments(unpack(structure, scalars))
    compiled = jax.jit(lambda *args, **kwargs: None).lower(*expected_args, **expected_kwargs).compile()
    args, kwargs = _traced_arguments(call.arguments)
    compiled(*args, **kwargs)


def _traced_arguments(arguments: Arguments) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the traced arguments: the positional ones as a tuple, and the keyword arguments as a dict."""
    # A static positional argument has None as its name.
    args = tuple([arg for name, arg in zip(arguments.names, arguments.args, strict=True) if name is not None])
    return args, {name: value for name, value in arguments.kwargs.items() if name not in arguments.static}
