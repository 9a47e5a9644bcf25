"""`jax.jit` and `equinox.filter_jit`: static and donated arguments, shardings; and `jax.checkpoint`: static ones."""

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
from ..core._static_kinds import IdentityKey, Incomparable, copy_of
from ..core._static_values import Static
from ..ties._policy_and_context import Policy, current_policy
from ._ahead_of_time import Program, Stage, shapes_of
from ._argument_names import Chosen, Names, several
from ._caller_side import Call, Grouping, enter, leave
from ._donation import DonatingTransform
from ._function_given_to_jax import Shared, shared_by
from ._function_side import Terms
from ._function_transform import FunctionTransform
from ._leaf_groups import LeafGroups
from ._leaf_labels import Treatment, is_donated
from ._placements import is_sharding, placing
from .checks._lost_changes import only_traced
from .checks._refused_arguments import forbid_bound_module

_ELSEWHERE = ("in_shardings", "out_shardings", "device", "backend")  # options under which jit moves what it returns

_OWN = ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames", "in_shardings", "out_shardings")


class JitTransform(DonatingTransform):
    """A function under `jax.jit`, with identities preserved."""

    caches_traces = True
    only_for_transform = frozenset({"inline", "keep_unused", "compiler_options", "abstracted_axes"})

    def check_options(self) -> None:
        """As the base."""
        options = self.options
        self._in_shardings, self._out_shardings = options.get("in_shardings"), options.get("out_shardings")
        self.passes_through = not any(options.get(name) is not None for name in _ELSEWHERE)
        # JAX reads these when the function is wrapped, so whoever changes a dictionary of them later changes nothing.
        with contextlib.suppress(Incomparable):
            in_and_out = options.get("in_shardings"), options.get("out_shardings")
            self._in_shardings, self._out_shardings = copy_of(in_and_out, IdentityDict())
        with contextlib.suppress(Exception):  # the transform says best what is wrong with them
            self._static = Chosen(self.function, options.get("static_argnums"), options.get("static_argnames"))
            self._donated = Chosen(self.function, options.get("donate_argnums"), options.get("donate_argnames"))
        super().check_options()

    def static_positions(self, num_args: int, keywords: Collection[str]) -> Collection[Position]:
        """Those that `static_argnums` and `static_argnames` choose."""
        return self._static.positions(num_args, keywords)

    def donated_positions(self, num_args: int, keywords: Collection[str]) -> Collection[Position]:
        """Those that `donate_argnums` and `donate_argnames` choose."""
        return self._donated.positions(num_args, keywords)

    def grouping(self, policy: Policy, arguments: Arguments) -> Grouping:
        """Donated or not, and where to."""
        treatments = [each for each in (self.donating(arguments), self._placing(policy, arguments)) if each is not None]
        if not treatments:
            return super().grouping(policy, arguments)
        # Prefixes of shardings may be anything, but those of one function are the same.
        key = (
            Static(treatments[0].prefix)
            if self._in_shardings is None
            else (IdentityKey(self._in_shardings), policy.containers, *map(_prefix_of, treatments))
        )
        return Grouping(self.transform_name, lambda _: treatments, key)

    def _placing(self, policy: Policy, arguments: Arguments) -> Treatment | None:
        prefix, names = self._in_shardings, arguments.parts()[1]
        if prefix is None or is_sharding(prefix):
            return None
        positions = positions_of(names)
        parts = prefix if isinstance(prefix, (tuple, list)) else [prefix] * len(positions)
        if len(parts) != len(positions):
            self.transform(self.function, **self.options)(*arguments.args, **arguments.kwargs)
        return placing("in_shardings", Branch(tuple(parts)), containers=policy.containers)

    def leaving(self, policy: Policy, arguments: Arguments) -> Treatment | None:
        """The results go where `out_shardings` says, and what was changed where it was."""
        out = self._out_shardings
        if out is None or (is_sharding(out) and not policy.in_place):
            return None
        return placing("out_shardings", Branch((None, out)) if policy.in_place else out, containers=policy.containers)

    def applied(
        self, inner: Callable[..., Any], labels: Sequence[Any], leaving: Sequence[Any] | None, num_statics: int
    ) -> Any:
        """With the options of the groups."""
        options = {name: value for name, value in self.options.items() if name not in _OWN}
        is_ignored = any(i < 0 for i in self._donated.argnums) and not _donates_from_the_end()
        donated = [i for i, label in enumerate(labels) if is_donated(label) and not is_ignored]
        if donated:
            options["donate_argnums"] = tuple(donated)
        if num_statics:
            options["static_argnums"] = tuple(range(len(labels), len(labels) + num_statics))
        if self._in_shardings is not None:
            one = is_sharding(self._in_shardings)
            options["in_shardings"] = tuple([self._in_shardings if one else label[-1] for label in labels])
        if leaving is not None or self._out_shardings is not None:
            options["out_shardings"] = self._out_shardings if leaving is None else LeafGroups(leaving)
        return self.transform(inner, **options)

    def enter(self, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy) -> Call:
        """As the base. What is static is looked at where the function will be traced."""
        if kwargs and self._in_shardings is not None:
            self.transform(self.function, **self.options)(*args, **kwargs)  # refuses keywords
        return super().enter(args, kwargs, policy)

    def used(self, call: Call) -> Sequence[Any]:
        """JAX drops arguments that the computation does not need, and then their placement has no effect."""
        used = self._used(call, current_policy(self.policy))
        return [leaf for leaf, yes in zip(self._in_hands(call), used, strict=True) if yes]

    def _used(self, call: Call, policy: Policy) -> Sequence[bool]:
        return used_inputs(self.transformed_for(policy, call).trace(*call.groups, *call.statics).jaxpr)

    def _in_hands(self, call: Call) -> list[Any]:
        return [leaf for group in call.groups for leaf in group.leaves]

    # Ahead of time ------------------------------------------------------------------------------------------------

    @api_boundary
    def lower(self, *args: Any, **kwargs: Any) -> "Stage":
        """As `jax.jit(f).lower`, for the same arguments as the function; `.compile()` gives a callable."""
        return self._stage("lower", args, kwargs)

    @api_boundary
    def trace(self, *args: Any, **kwargs: Any) -> "Stage":
        """As `jax.jit(f).trace`, for the same arguments as the function; `.lower()` and `.jaxpr` follow."""
        return self._stage("trace", args, kwargs)

    def _stage(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> "Stage":
        policy = current_policy(self.policy)
        with self._entered(args, kwargs, policy) as call:
            if any(isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding for leaf in call.leaves):
                policy = dataclasses.replace(policy, pass_through=False)  # what is compiled then moves its arguments
            try:
                with only_traced():
                    staged = getattr(self.transformed_for(policy, call), name)(*call.groups, *call.statics)
                self._say_later()
                # Which arguments are used is asked of this call: what is compiled must not keep the arguments alive.
                used = self._used(call, policy) if self.passes_through else ()
            except Exception as error:
                self.explain(error, lambda: call)
                raise
            names, static = call.arguments.names, call.arguments.static
            return Stage(staged, Program(self, policy, used, names, static, call.plan.structure, call.plan.selections))

    def _say_later(self) -> None:
        """Leaves the next call to Python if it has to say what was lost in a trace that did not run."""
        if self._shared.unsaid:
            self.way = None

    def _entered(self, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy) -> Call:
        arguments = self.arguments(args, kwargs)
        return enter(arguments, self.rules(policy), self.grouping(policy, arguments))

    @api_boundary
    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns for such arguments, with a `jax.ShapeDtypeStruct` for each traced leaf."""
        policy = current_policy(self.policy)
        if policy.in_place:
            policy = dataclasses.replace(policy, in_place=False)
        with self._entered(args, kwargs, policy) as call:
            try:
                with only_traced():
                    result = self.transformed_for(policy, call).eval_shape(*call.groups, *call.statics)
                self._say_later()
            except Exception as error:
                self.explain(error, lambda: call)
                raise
            groups = result.parts if type(result) is LeafGroups else (result,)
            return leave(groups, shapes_of(call.tree))

    def clear_cache(self) -> None:
        """Forgets every trace of this function, whoever wrapped it."""
        for made in list(self._made.values()):
            made.clear_cache()


class FilterJitTransform(JitTransform):
    """A function under `equinox.filter_jit`, with identities preserved. A module that is the function is traced too."""

    shares_alike = True
    only_for_transform = frozenset()

    def check_options(self) -> None:
        """As the base."""
        self.transform(self.function, **self.options)
        donate = self.options.get("donate", "none")
        self._is_donating = donate != "none"
        self._all_but_first = donate.endswith("-except-first")
        self._is_quiet = donate.startswith("all")
        self._in_shardings = self._out_shardings = None
        self.passes_through = True
        self._signature = inspect.signature(self.function)
        self._is_module = is_module(self.function)
        if self._is_module:
            self.names = Names(self.function)

    def enter(self, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy) -> Call:
        """As the base. Arguments are bound first, so that a function that may not be called is refused before."""
        forbid_bound_module(self.function, policy, self.transform_name)
        return super().enter(args, kwargs, policy)

    def arguments(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Arguments:
        """As the base: by position where that can be, as Equinox has them, and the function first if it is a module."""
        bound = self._signature.bind(*args, **kwargs)
        args, kwargs = bound.args, bound.kwargs
        names = self.names.of(len(args))
        if self._is_module:
            return Arguments((_FUNCTION, *names), (self.function, *args), kwargs)
        return Arguments(names, args, kwargs)

    def static_positions(self, num_args: int, keywords: Collection[str]) -> Collection[Position]:
        """None: what is no array is static anyway."""
        return ()

    def donated_positions(self, num_args: int, keywords: Collection[str]) -> Collection[Position]:
        """All of them, or all but the first."""
        if not self._is_donating:
            return ()
        first = int(self._is_module)
        return {i for i in range(num_args) if not (self._all_but_first and i == first)} | set(keywords)

    def applied(
        self, inner: Callable[..., Any], labels: Sequence[Any], leaving: Sequence[Any] | None, num_statics: int
    ) -> Any:
        """Under `jax.jit`; or under Equinox's own where a program may raise an error of Equinox's."""
        options = {name: value for name, value in self.options.items() if name != "donate"}
        donated = tuple([i for i, label in enumerate(labels) if is_donated(label)])
        jitted = jax.jit(inner, donate_argnums=donated, **options)
        return Filtered(jitted, inner, bool(donated) and self._is_quiet)

    def terms(self, policy: Policy) -> Terms:
        """As the base. In place, a module that is the function is refused."""
        terms = super().terms(policy)
        return terms._replace(bound_to="model") if self._is_module else terms

    def binding(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """As the signature says; and the function before them if it is a module."""
        before = (self.function,) if self._is_module else ()
        bound = self._signature.bind(*args, **kwargs)
        if not before and not kwargs:
            return None
        by_keyword = [name for name in bound.arguments if name in kwargs and name not in bound.kwargs]
        return before, tuple(by_keyword), tuple(bound.kwargs)

    def settled(self, transformed: Any) -> Any:
        """As the base: straight to JAX's, if there is nothing to be told of Equinox's."""
        return transformed.settled

    def _shared_by(self, function: Callable[..., Any]) -> Shared:
        """As the base. A module that is the function is an argument, so what is traced is the same for all."""
        if not is_module(function):
            return super()._shared_by(function)
        return shared_by(_called, (type(self), self.transform), self.options)

    @property
    def traced_function(self) -> Callable[..., Any]:
        """The function that is called inside: one that takes it, if it is traced."""
        return _called if self._is_module else self.function


def _called(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


_FUNCTION = "self"
"""What the function is called if it is traced."""


class Filtered:
    """A function under `jax.jit` that is what Equinox's is beside: an error that it raises while it runs is told.

    Equinox waits for each program, so that its own errors (`equinox.error_if`) come where the call is. Only programs
    that call back can have such. So these are left to Equinox, which gets groups like everybody else.
    """

    def __init__(self, jitted: Any, inner: Callable[..., Any], is_quiet: bool) -> None:
        self.jitted = jitted
        self._inner = inner
        self._is_quiet = is_quiet
        self._may_raise: bool | None = None

    def __call__(self, *groups: Any) -> Any:
        if self._may_raise is None and len(current_traces()) == 1:
            self._may_raise = _calls_back(self.jitted.trace(*groups).jaxpr)
        if self._may_raise:
            return eqx.filter_jit(self._inner)(*groups)
        if not self._is_quiet:
            return self.jitted(*groups)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable*")
            return self.jitted(*groups)

    @property
    def settled(self) -> Any:
        """What may be called in place of this."""
        return self if self._may_raise is not False or self._is_quiet else self.jitted

    def __getattr__(self, name: str) -> Any:
        return getattr(self.jitted, name)


def _calls_back(jaxpr: Any) -> bool:
    """Whether a program, or one in it, calls a function on the host."""
    stack, seen = [jaxpr.jaxpr], IdentitySet()
    while stack:
        each = stack.pop()
        if not seen.add(each):
            continue
        for eqn in each.eqns:
            if "callback" in eqn.primitive.name:
                return True
            for value in jtu.tree_leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
                inside = getattr(value, "jaxpr", value)
                if hasattr(inside, "eqns"):
                    stack.append(inside)
    return False


@functools.cache
def _donates_from_the_end() -> bool:
    """Whether negative `donate_argnums` mean anything: with JAX 0.10 nothing is donated."""
    return jax.jit(lambda x: x, donate_argnums=-1).lower(0.0).args_info[0][0].donated


def _prefix_of(treatment: Treatment) -> Any:
    parts = treatment.prefix.parts
    return parts if treatment.name == "donate_argnums" else len(parts)


class CheckpointTransform(FunctionTransform):
    """A function under `jax.checkpoint`, with identities preserved."""

    caches_traces = True
    only_for_transform = frozenset({"policy", "prevent_cse", "concrete"})

    def static_positions(self, num_args: int, keywords: Collection[str]) -> Collection[Position]:
        """Those that `static_argnums` chooses."""
        return {i + num_args if i < 0 else i for i in several(self.options.get("static_argnums", ()))}

    def grouping(self, policy: Policy, arguments: Arguments) -> Grouping:
        """By what `prevent_cse` says of each leaf, where it is a prefix of the arguments."""
        prefix = self.options.get("prevent_cse", True)
        if isinstance(prefix, bool):
            return super().grouping(policy, arguments)
        parts, names = arguments.parts()
        positions = positions_of(names)
        indices = [position for position in positions if isinstance(position, int)]
        keywords = positions[len(indices) :]
        positional, by_name = prefix if keywords and len(prefix) == 2 else (prefix, {})
        positional = [positional] * len(indices) if isinstance(positional, bool) else positional
        by_name = dict.fromkeys(keywords, by_name) if isinstance(by_name, bool) else by_name
        fits = isinstance(positional, (tuple, list)) and len(positional) == len(indices)
        if not fits or not isinstance(by_name, dict) or by_name.keys() != {*keywords}:
            self.transform(self.function, **self.options)(*arguments.args, **arguments.kwargs)  # says what is wrong
        own = [*positional, *[by_name[name] for name in keywords]]
        treatment = Treatment(
            "prevent_cse",
            Branch(tuple([_in_shape(*pair) for pair in zip(own, parts, strict=True)])),
            lambda label: isinstance(label, bool),
        )
        return Grouping(self.transform_name, lambda _: [treatment], Static(treatment.prefix))

    def applied(
        self, inner: Callable[..., Any], labels: Sequence[Any], leaving: Sequence[Any] | None, num_statics: int
    ) -> Any:
        """With the static arguments after the groups."""
        options = {**self.options}
        if not isinstance(options.get("prevent_cse", True), bool):
            options["prevent_cse"] = tuple([label[0] for label in labels])
        if num_statics:
            options["static_argnums"] = tuple(range(len(labels), len(labels) + num_statics))
        return self.transform(inner, **options)


def _in_shape(prefix: Any, tree: Any) -> Any:
    """A prefix whose tuples stand for dicts and lists, as JAX lets them, with these in their places."""
    if type(prefix) is not tuple or type(tree) not in (dict, list) or len(prefix) != len(tree):
        return prefix
    if type(tree) is list:
        return list(map(_in_shape, prefix, tree))
    _, keys = jtu.default_registry.flatten_one_level(tree) or ((), ())
    return {key: _in_shape(part, tree[key]) for key, part in zip(keys, prefix, strict=True)}
