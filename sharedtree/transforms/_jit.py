"""Functions under `jax.jit`, `equinox.filter_jit` and `jax.checkpoint`.

The options of these transforms are about the user's arguments: their positions, names and subtrees. JAX gets leaf
groups instead, so the options are translated to positions of groups.

    jit(f, donate_argnums=0)(net, x)      groups  [leaves of net]  [x]      JAX gets  donate_argnums=(0,)
"""

import contextlib
import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any

import equinox as eqx
import jax
from jax import tree_util as jtu

from ..core._by_identity import IdentityDict, IdentitySet
from ..core._call_arguments import Arguments, Position, positions_of
from ..core._jax_internals import api_boundary, current_traces, used_inputs
from ..core._node_types import is_module
from ..core._prefix_trees import Branch
from ..core._static_values import IdentityKey, Incomparable, Static, copy_of
from ..ties._policy_and_context import Policy, current_policy
from ._ahead_of_time import Program, Stage, abstract_objects_of, used_leaves
from ._argument_names import Chosen, Names, as_sequence
from ._caller_side import Call, Grouping, enter, leave
from ._function_given_to_jax import Shared, shared_by
from ._function_transform import FunctionTransform
from ._leaf_groups import LeafGroups
from ._leaf_labels import Treatment, is_donated
from ._placements import is_sharding, placement_treatment
from .checks._lost_changes import only_traced
from .checks._refused_arguments import forbid_bound_module

_OPTIONS_THAT_MOVE = ("in_shardings", "out_shardings", "device", "backend")
"""Options under which `jax.jit` moves arrays, so that no object of the caller's passes through."""

_TRANSLATED_OPTIONS = (
    "static_argnums",
    "static_argnames",
    "donate_argnums",
    "donate_argnames",
    "in_shardings",
    "out_shardings",
)
"""Options about the user's arguments and results, which are translated to leaf groups."""


class JittedTransform(FunctionTransform):
    """A function under `jax.jit` or `equinox.filter_jit`: the steps that both have in common."""

    caches_traces = True

    def leaves_used(self, call: Call) -> Sequence[Any]:
        """Leaves used by the computation. JAX drops the others, so their placement has no effect on the results."""
        return used_leaves(call, self._used_flags(call, current_policy(self.policy)))

    def _used_flags(self, call: Call, policy: Policy) -> Sequence[bool]:
        """For each leaf of the groups, True if the computation uses it."""
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

    def _stage(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> "Stage":
        """Makes the first stage of ahead-of-time compilation, with all that a later call of the program needs.

        The stage keeps no argument alive.

        Args:
            name: name of the method of `jax.jit(f)` to call, `lower` or `trace`.
            args: positional arguments. Arrays may be `jax.ShapeDtypeStruct`s.
            kwargs: keyword arguments. Arrays may be `jax.ShapeDtypeStruct`s, too.
        """
        policy = current_policy(self.policy)
        with self._enter_to_trace(args, kwargs, policy) as call:
            # A struct with a sharding compiles a program that moves its arguments there, so they cannot pass through.
            if any(isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding for leaf in call.leaves):
                policy = dataclasses.replace(policy, pass_through=False)
            try:
                with only_traced():
                    stage = getattr(self.transformed_for(policy, call), name)(*call.groups, *call.statics)
                self._leave_warnings_to_python()
                # The program must not keep these arguments alive, so which of them it uses is found out now.
                is_used = self._used_flags(call, policy) if self.passes_through else ()
            except Exception as error:
                self.explain(error, lambda: call)
                raise
            names, static = call.arguments.names, call.arguments.static
            program = Program(self, policy, is_used, names, static, call.plan.structure, call.plan.selections)
            return Stage(stage, program)

    def _leave_warnings_to_python(self) -> None:
        """Leaves the next call to Python if a trace that did not run lost changes. C could not warn of them."""
        if self._shared.unsaid:
            self.settings = None

    def _enter_to_trace(self, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy) -> Call:
        """Enters a call without executing it. No buffer is taken, so donated arrays need no check."""
        arguments = self.arguments(args, kwargs)
        return enter(arguments, self.rules(policy), self.grouping(policy, arguments))

    @api_boundary
    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the function's result with a `jax.ShapeDtypeStruct` for each traced leaf. Nothing is computed."""
        policy = current_policy(self.policy)
        if policy.in_place:
            policy = dataclasses.replace(policy, in_place=False)
        with self._enter_to_trace(args, kwargs, policy) as call:
            try:
                with only_traced():
                    result = self.transformed_for(policy, call).eval_shape(*call.groups, *call.statics)
                self._leave_warnings_to_python()
            except Exception as error:
                self.explain(error, lambda: call)
                raise
            groups = result.parts if type(result) is LeafGroups else (result,)
            return leave(groups, abstract_objects_of(call.tree))

    def clear_cache(self) -> None:
        """Forgets every trace of this function, those of its other wrappers included."""
        for transformed in list(self._made.values()):
            transformed.clear_cache()


class JitTransform(JittedTransform):
    """A function under `jax.jit`, with identities preserved."""

    only_for_transform = frozenset({"inline", "keep_unused", "compiler_options", "abstracted_axes"})

    def check_options(self) -> None:
        """Reads the options, and lets `jax.jit` refuse wrong ones."""
        options = self.options
        self._in_shardings, self._out_shardings = options.get("in_shardings"), options.get("out_shardings")
        self.passes_through = not any(options.get(name) is not None for name in _OPTIONS_THAT_MOVE)
        # `jax.jit` reads shardings when it wraps a function. If the user changes a list of them later, nothing happens.
        with contextlib.suppress(Incomparable):
            # They are copied as one, so that an object in both stays one.
            in_and_out = options.get("in_shardings"), options.get("out_shardings")
            self._in_shardings, self._out_shardings = copy_of(in_and_out, IdentityDict())
        # The base raises the error of `jax.jit` for wrong options, which is the better one.
        with contextlib.suppress(Exception):
            self._static = Chosen(self.function, options.get("static_argnums"), options.get("static_argnames"))
            self._donated = Chosen(self.function, options.get("donate_argnums"), options.get("donate_argnames"))
        super().check_options()

    def static_positions(self, num_args: int, keywords: Collection[str]) -> Collection[Position]:
        """Positions chosen by `static_argnums` and `static_argnames`."""
        return self._static.positions(num_args, keywords)

    def donated_positions(self, num_args: int, keywords: Collection[str]) -> Collection[Position]:
        """Positions chosen by `donate_argnums` and `donate_argnames`."""
        return self._donated.positions(num_args, keywords)

    def grouping(self, policy: Policy, arguments: Arguments) -> Grouping:
        """Groups leaves by two treatments: whether they are donated, and their shardings."""
        placement = self._placement_of_arguments(policy, arguments)
        donation = self.donation_treatment(arguments)
        if placement is None and (donation is None or self._in_shardings is None):
            return super().grouping(policy, arguments)
        treatments = [treatment for treatment in (donation, placement) if treatment is not None]
        # A prefix of shardings need not be hashable. But a function has only one such prefix, so the identity
        # of the prefix is enough.
        key = (IdentityKey(self._in_shardings), policy.containers, *map(_key_of_prefix, treatments))
        return Grouping(self.transform_name, lambda _: treatments, key)

    def _placement_of_arguments(self, policy: Policy, arguments: Arguments) -> Treatment | None:
        """Makes the treatment of `in_shardings`. None if all arguments have one sharding or none."""
        prefix, names = self._in_shardings, arguments.parts()[1]
        if prefix is None or is_sharding(prefix):
            return None
        positions = positions_of(names)
        parts = prefix if isinstance(prefix, (tuple, list)) else [prefix] * len(positions)
        if len(parts) != len(positions):
            # Vanilla JAX raises its own error for another number of shardings than of arguments.
            self.raise_vanilla_error(arguments.args, arguments.kwargs)
        return placement_treatment("in_shardings", Branch(tuple(parts)), containers=policy.containers)

    def treatment_of_results(self, policy: Policy, arguments: Arguments) -> Treatment | None:
        """Makes the treatment of `out_shardings`. Objects changed in place stay on their devices."""
        prefix = self._out_shardings
        if prefix is None or (is_sharding(prefix) and not policy.in_place):
            return None
        if policy.in_place:
            prefix = Branch((None, prefix))
        return placement_treatment("out_shardings", prefix, containers=policy.containers)

    def apply_transform(
        self, inner: Callable[..., Any], labels: Sequence[Any], result_labels: Sequence[Any] | None, num_statics: int
    ) -> Any:
        """Applies `jax.jit` to the inner function, with the options translated to leaf groups."""
        options = {name: value for name, value in self.options.items() if name not in _TRANSLATED_OPTIONS}
        is_ignored = any(i < 0 for i in self._donated.argnums) and not _can_donate_from_the_end()
        donated = [i for i, group_labels in enumerate(labels) if is_donated(group_labels) and not is_ignored]
        if donated:
            options["donate_argnums"] = tuple(donated)
        if num_statics:
            options["static_argnums"] = tuple(range(len(labels), len(labels) + num_statics))
        if self._in_shardings is not None:
            is_for_all = is_sharding(self._in_shardings)
            options["in_shardings"] = tuple(
                [self._in_shardings if is_for_all else group_labels[-1] for group_labels in labels]
            )
        if result_labels is not None or self._out_shardings is not None:
            options["out_shardings"] = self._out_shardings if result_labels is None else LeafGroups(result_labels)
        return self.transform(inner, **options)

    def enter(self, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy) -> Call:
        """Enters a call. With `in_shardings`, keyword arguments are refused, by JAX's own error."""
        if kwargs and self._in_shardings is not None:
            self.raise_vanilla_error(args, kwargs)
        return super().enter(args, kwargs, policy)


class FilterJitTransform(JittedTransform):
    """A function under `equinox.filter_jit`, with identities preserved.

    The function may be a module. This *called module* is an argument of the inner function, as in Equinox, so its
    leaves are traced.
    """

    shares_alike = True
    passes_through = True

    def check_options(self) -> None:
        """Lets `equinox.filter_jit` refuse wrong options, and reads them."""
        self.transform(self.function, **self.options)
        # One of "all", "all-except-first", "warn", "warn-except-first" and "none". With the first two, JAX's warning of
        # donated buffers that it could not use is hidden.
        donate = self.options.get("donate", "none")
        self._is_donating = donate != "none"
        self._all_but_first = donate.endswith("-except-first")
        self._is_quiet = donate.startswith("all")
        self._signature = inspect.signature(self.function)
        self._is_module = is_module(self.function)
        if self._is_module:
            self.names = Names(self.function)
            self.bound_to = "model"

    def enter(self, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy) -> Call:
        """Enters a call. A forbidden bound method is refused first, before its arguments are bound."""
        forbid_bound_module(self.function, policy, self.transform_name)
        return super().enter(args, kwargs, policy)

    def arguments(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Arguments:
        """Binds the arguments, by position where possible, as Equinox does. A called module is the first."""
        bound = self._signature.bind(*args, **kwargs)
        args, kwargs = bound.args, bound.kwargs
        names = self.names.of(len(args))
        if self._is_module:
            return Arguments((_NAME_OF_CALLED_MODULE, *names), (self.function, *args), kwargs)
        return Arguments(names, args, kwargs)

    def donated_positions(self, num_args: int, keywords: Collection[str]) -> Collection[Position]:
        """All positions, all but the first, or none, as the option `donate` says."""
        if not self._is_donating:
            return ()
        positions: set[Position] = {*range(num_args), *keywords}
        if self._all_but_first:
            # A called module is not counted.
            positions.discard(int(self._is_module))
        return positions

    def apply_transform(
        self, inner: Callable[..., Any], labels: Sequence[Any], result_labels: Sequence[Any] | None, num_statics: int
    ) -> Any:
        """Applies `jax.jit` to the inner function. `FilterJitted` adds whatever else Equinox does."""
        options = {name: value for name, value in self.options.items() if name != "donate"}
        donated = tuple([i for i, group_labels in enumerate(labels) if is_donated(group_labels)])
        jitted = jax.jit(inner, donate_argnums=donated, **options)
        return FilterJitted(jitted, inner, bool(donated) and self._is_quiet)

    def binding(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Rules by which C binds these arguments: a called module comes first, and keywords become positions."""
        called_module = (self.function,) if self._is_module else ()
        bound = self._signature.bind(*args, **kwargs)
        if not called_module and not kwargs:
            return None
        by_position = [name for name in bound.arguments if name in kwargs and name not in bound.kwargs]
        return called_module, tuple(by_position), tuple(bound.kwargs)

    def for_later_calls(self, transformed: Any) -> Any:
        """The function of `jax.jit` itself, once Equinox is known to do no more than JAX."""
        return transformed.for_later_calls

    def _shared_by(self, function: Callable[..., Any]) -> Shared:
        """Shares the traces of all called modules, as arguments of one function, `_called`."""
        if not is_module(function):
            return super()._shared_by(function)
        return shared_by(_called, (type(self), self.transform), self.options)


def _called(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


_NAME_OF_CALLED_MODULE = "self"
"""Name of a called module in paths, as in the signature of its class."""


class FilterJitted:
    """A function under `jax.jit` with the behaviour of `equinox.filter_jit`.

    Equinox waits for each program to end, and raises its own errors (`equinox.error_if`) where the call is. To raise
    such an error a program must call a function on the host. These programs are called through Equinox, with leaf
    groups as arguments. All others are called through JAX, without waiting.

    Args:
        jitted: the inner function under `jax.jit`.
        inner: the inner function.
        is_quiet: True to hide JAX's warning of donated buffers it could not use.
    """

    def __init__(self, jitted: Any, inner: Callable[..., Any], is_quiet: bool) -> None:
        self.jitted = jitted
        self._inner = inner
        self._is_quiet = is_quiet
        # None until it is known.
        self._may_raise: bool | None = None

    def __call__(self, *groups: Any) -> Any:
        """Calls the function, through Equinox if it may raise an error of Equinox's."""
        # Under an outer transform the program becomes a part of another one, and nobody could wait for it.
        if self._may_raise is None and len(current_traces()) == 1:
            self._may_raise = _calls_host(self.jitted.trace(*groups).jaxpr)
        if self._may_raise:
            return eqx.filter_jit(self._inner)(*groups)
        if not self._is_quiet:
            return self.jitted(*groups)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable*")
            return self.jitted(*groups)

    @property
    def for_later_calls(self) -> Any:
        """The function for later calls: JAX's, if nothing has to be done around it."""
        return self if self._may_raise is not False or self._is_quiet else self.jitted

    def __getattr__(self, name: str) -> Any:
        return getattr(self.jitted, name)


def _calls_host(closed_jaxpr: Any) -> bool:
    """Returns True if a program, or one inside it, calls a function on the host."""
    stack, visited = [closed_jaxpr.jaxpr], IdentitySet()
    while stack:
        jaxpr = stack.pop()
        if not visited.add(jaxpr):
            continue
        for eqn in jaxpr.eqns:
            if "callback" in eqn.primitive.name:
                return True
            # Parameters hold programs by themselves and in tuples (the branches of `cond`), some of them closed.
            for value in jtu.tree_leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
                inner_jaxpr = getattr(value, "jaxpr", value)
                if hasattr(inner_jaxpr, "eqns"):
                    stack.append(inner_jaxpr)
    return False


@functools.cache
def _can_donate_from_the_end() -> bool:
    """Returns True if JAX understands negative `donate_argnums`. JAX 0.10 donates nothing then."""
    return jax.jit(lambda x: x, donate_argnums=-1).lower(0.0).args_info[0][0].donated


def _key_of_prefix(treatment: Treatment) -> Any:
    """A treatment's part of the key of a plan: for shardings, only the number of arguments."""
    parts = treatment.prefix.parts
    return parts if treatment.name == "donate_argnums" else len(parts)


class CheckpointTransform(FunctionTransform):
    """A function under `jax.checkpoint`, with identities preserved."""

    caches_traces = True
    only_for_transform = frozenset({"policy", "prevent_cse", "concrete"})

    def static_positions(self, num_args: int, keywords: Collection[str]) -> Collection[Position]:
        """Positions chosen by `static_argnums`."""
        return {i + num_args if i < 0 else i for i in as_sequence(self.options.get("static_argnums", ()))}

    def grouping(self, policy: Policy, arguments: Arguments) -> Grouping:
        """Groups leaves by `prevent_cse`, if it is a prefix tree of the arguments."""
        prefix = self.options.get("prevent_cse", True)
        if isinstance(prefix, bool):
            return super().grouping(policy, arguments)
        parts, names = arguments.parts()
        positions = positions_of(names)
        indices = [position for position in positions if isinstance(position, int)]
        keywords = positions[len(indices) :]
        # If there are keyword arguments, a pair holds one prefix for `args` and one for `kwargs`.
        positional, by_name = prefix if keywords and len(prefix) == 2 else (prefix, {})
        positional = [positional] * len(indices) if isinstance(positional, bool) else positional
        by_name = dict.fromkeys(keywords, by_name) if isinstance(by_name, bool) else by_name
        fits = isinstance(positional, (tuple, list)) and len(positional) == len(indices)
        if not fits or not isinstance(by_name, dict) or by_name.keys() != {*keywords}:
            # Vanilla JAX raises its own error for a prefix that does not fit.
            self.raise_vanilla_error(arguments.args, arguments.kwargs)
        prefixes = [*positional, *[by_name[name] for name in keywords]]
        treatment = Treatment(
            "prevent_cse",
            Branch(tuple([_in_shape_of(part, subprefix) for part, subprefix in zip(parts, prefixes, strict=True)])),
            lambda label: isinstance(label, bool),
        )
        return Grouping(self.transform_name, lambda _: [treatment], Static(treatment.prefix))

    def apply_transform(
        self, inner: Callable[..., Any], labels: Sequence[Any], result_labels: Sequence[Any] | None, num_statics: int
    ) -> Any:
        """Applies `jax.checkpoint` to the inner function, with the options translated to leaf groups."""
        options = {**self.options}
        if not isinstance(options.get("prevent_cse", True), bool):
            options["prevent_cse"] = tuple([group_labels[0] for group_labels in labels])
        if num_statics:
            options["static_argnums"] = tuple(range(len(labels), len(labels) + num_statics))
        return self.transform(inner, **options)


def _in_shape_of(tree: Any, prefix: Any) -> Any:
    """Replaces tuples in a prefix by the lists and dicts of the tree. JAX lets a tuple stand for either."""
    if type(prefix) is not tuple or type(tree) not in (dict, list) or len(prefix) != len(tree):
        return prefix
    if type(tree) is list:
        return list(map(_in_shape_of, tree, prefix))
    _, keys = jtu.default_registry.flatten_one_level(tree) or ((), ())
    return {key: _in_shape_of(tree[key], part) for key, part in zip(keys, prefix, strict=True)}
