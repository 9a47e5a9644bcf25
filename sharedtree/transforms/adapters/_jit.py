"""`jax.jit` and `equinox.filter_jit`: static and donated arguments, shardings, ahead-of-time compilation."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import equinox as eqx
import jax
from jax import tree_util as jtu

from ..._context import Policy, PolicyOption, current_policy
from ..._graph import Tags, pack, unpack
from ..._jax_internals import api_boundary, used_inputs
from ..._node_types import is_module
from ..._packed import Packed
from ..._text import shown
from .._argnums import Chosen
from .._calling import calling
from .._crossed import Names, Position
from .._cuts import Leaving, treated
from .._function import FunctionTransform
from .._made_for import require_made_for
from .._modules import How
from .._packing import Call, pack_call
from .._prefixes import has_containers, has_modules, spread
from .._sorted_results import labels_of, sort
from .._treatments import Treatment
from ._donation import DonatingTransform, given_away_once
from ._stages import Stage

_ELSEWHERE = ("in_shardings", "out_shardings", "device", "backend")  # options under which jit moves what it returns


_MOST_PREFIXED = 32  # jitted functions of one wrapper whose shardings reach inside modules


class JitTransform(DonatingTransform):
    """A function under `jax.jit`, with identities preserved."""

    caches_traces = True
    only_for_transform = frozenset({"inline", "keep_unused", "compiler_options", "abstracted_axes"})

    def __init__(
        self,
        transform: Callable[..., Any],
        function: Callable[..., Any],
        policy: PolicyOption,
        options: dict[str, Any],
    ) -> None:
        self.passes_through = not any(options.get(name) is not None for name in _ELSEWHERE)
        self._in_shardings = options.get("in_shardings")
        self._out_shardings = options.get("out_shardings")
        prefixes = (self._in_shardings, self._out_shardings)
        self._prefixed = any(map(has_modules, prefixes))
        self._prefixed_by_containers = any(map(has_containers, prefixes))
        super().__init__(transform, function, policy, options)

    def check_options(self) -> None:
        """As the base. Shardings that reach inside modules are checked when they are translated."""
        options = self.options
        try:
            self._static = Chosen(self.function, options.get("static_argnums"), options.get("static_argnames"))
            self._donated = Chosen(self.function, options.get("donate_argnums"), options.get("donate_argnames"))
            treats_alike = self._static.is_empty and self._donated.is_empty and self._in_shardings is None
            has_prefix = self._prefixed or self._prefixed_by_containers or self._out_shardings is not None
            self.is_plain = treats_alike and not has_prefix
        except Exception:
            self.transform(self.function, **options)  # says best what is wrong with them
            raise
        if not self._prefixed:
            super().check_options()

    def _is_prefixed(self, policy: Policy) -> bool:
        """Whether the shardings reach inside what is packed, or place the result but not what was changed in place."""
        in_state = policy.in_place and self._out_shardings is not None
        return self._prefixed or in_state or (policy.containers and self._prefixed_by_containers)

    def static_positions(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Collection[Position]:
        """Those that `static_argnums` and `static_argnames` choose."""
        return self._static.positions(len(args), kwargs)

    def donated_positions(self, num_args: int, keywords: Collection[str]) -> Collection[Position]:
        """Those that `donate_argnums` and `donate_argnames` choose."""
        return self._donated.positions(num_args, keywords)

    def treatments(self, num_args: int, keywords: Collection[str]) -> Sequence[Treatment]:
        """Donated or not, and where to."""
        found = super().treatments(num_args, keywords)
        shardings = self._in_shardings
        if shardings is None:
            return found
        parts = self._shardings_of(num_args, self._static.positions(num_args, keywords))
        if parts is None:
            return found

        def sharding_of(position: Position) -> Any:
            return parts[position] if isinstance(position, int) else None

        name = "in_shardings"
        return (*found, Treatment(sharding_of, is_sharding, describe=lambda where: f"{name} {shown(where)}", name=name))

    def used(self, call: Call) -> Sequence[Any]:
        """JAX drops arguments that the computation does not need, and then their placement has no effect."""
        static = self.static_positions(call.args, call.kwargs)
        dynamic = [value for position, value in call.items() if position not in static]
        return _chosen(dynamic, self._used(call, current_policy(self.policy)))

    def _used(self, call: Call, policy: Policy) -> Sequence[bool]:
        traced = self._call_jitted(policy, call, lambda jitted, *a, **k: jitted.trace(*a, **k))
        return used_inputs(traced.jaxpr)

    def leaving(self, policy: Policy, args: Sequence[Any], kwargs: dict[str, Any]) -> Leaving | None:
        """The results go where `out_shardings` says."""
        if self._out_shardings is None:
            return None
        where = Treatment(lambda _: self._out_shardings, is_sharding, name="out_shardings")
        return Leaving(where, None, self._out_shardings)

    def _call_jitted(self, policy: Policy, call: Call, use: Callable[..., Any]) -> Any:
        try:
            with calling(self.names, call):
                return use(self.transformed_for(policy, call), *call.args, **call.kwargs)
        except TypeError as error:
            self.explain(error, call.args, call.kwargs)
            raise

    def transformed_for(self, policy: Policy, call: Call) -> Any:
        """As the base. Shardings that reach inside modules are translated anew for each structure."""
        if not self._is_prefixed(policy):
            return super().transformed_for(policy, call)
        static = self.static_positions(call.args, call.kwargs)
        dynamic = [value for position, value in call.items() if position not in static]
        key = (policy, frozenset(static), tuple(call.kwargs), jtu.tree_structure(dynamic))
        made = self._made.get(key)
        if made is None:
            made = self._made.setdefault(key, self._jitted_for(policy, call, static))
            # Another structure is another entry, so the oldest ones go.
            for old in list(self._made)[:-_MOST_PREFIXED]:
                self._made.pop(old, None)
        return made

    def call_inside(self, policy: Policy, function: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
        """As the base."""
        packed = super().call_inside(policy, function, args, kwargs)
        if self._out_shardings is None or not self._is_prefixed(policy):
            return packed
        return sort(packed, self._prefix_of_result(policy), None, is_sharding, "out_shardings")

    def _prefix_of_result(self, policy: Policy) -> Any:
        return (None, self._out_shardings) if policy.in_place else self._out_shardings

    def _shardings_of(self, num_args: int, static: Collection[Position]) -> Sequence[Any] | None:
        """What `in_shardings` has for each positional argument but the static ones; None if JAX will refuse it."""
        prefix = self._in_shardings
        dynamic = [i for i in range(num_args) if i not in static]
        parts = prefix if isinstance(prefix, (tuple, list)) else [prefix] * len(dynamic)
        if len(parts) != len(dynamic):
            return None
        part_of = dict(zip(dynamic, parts, strict=True))
        return [part_of.get(i) for i in range(num_args)]

    def _jitted_for(self, policy: Policy, call: Call, static: Collection[Position]) -> Any:
        options = dict(self.options)
        if self._in_shardings is not None:
            parts = self._shardings_of(len(call.args), static) or [self._in_shardings] * len(call.args)
            each = [(parts[i], arg) for i, arg in enumerate(call.args) if i not in static]
            records = call.graph.records
            options["in_shardings"] = tuple(
                spread(part, arg, records, is_sharding, "in_shardings") for part, arg in each
            )
        if self._out_shardings is not None:
            options["out_shardings"] = labels_of(self._prefix_of_result(policy), None, is_sharding)
        return self.transform(self.inner(policy), **options)

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
        call = self.pack(args, kwargs, policy)
        leaves = jtu.tree_leaves((call.args, call.kwargs))
        if any(isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding for leaf in leaves):
            policy = dataclasses.replace(policy, pass_through=False)  # what is compiled then moves its arguments
        staged = self._call_jitted(policy, call, lambda jitted, *a, **k: getattr(jitted, name)(*a, **k))
        # Which arguments are used is asked of this call, for that of what it compiles to lacks the static ones; and at
        # once, for what is compiled must not keep the arguments alive.
        used = self._used(call, policy)
        static = self.static_positions(args, kwargs)
        places = [i for i in range(len(args)) if i not in static]
        return Stage(staged, functools.partial(self._call_compiled, policy, used, places))

    @api_boundary
    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns for such arguments, with a `jax.ShapeDtypeStruct` for each traced leaf."""
        policy = dataclasses.replace(current_policy(self.policy), pass_through=False, in_place=False)
        call = self.pack(args, kwargs, policy)
        result = self._call_jitted(policy, call, lambda jitted, *a, **k: jitted.eval_shape(*a, **k))
        return self.finish(result, call, policy)

    def clear_cache(self) -> None:
        """Forgets every trace of this function, whoever wrapped it."""
        for made in list(self._made.values()):
            made.clear_cache()

    def _call_compiled(
        self,
        policy: Policy,
        used: Sequence[bool],
        places: Sequence[int],
        compiled: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        # The static arguments are left out, as in JAX, so the others are at other places than in the function's call.
        num_args = places[-1] + 1 if places else 0

        def place_of(position: Position) -> Position:
            return places[position] if isinstance(position, int) and position < len(places) else position

        treatments = [
            each._replace(part_of=lambda position, part_of=each.part_of: part_of(place_of(position)))
            for each in self.treatments(num_args, kwargs)
        ]
        names = self.names.of_positions(places)
        call = pack_call(args, kwargs, (), policy.rules, names)
        call = treated(call, (), treatments, names, self.transform_name)
        donated = self.donated_positions(num_args, kwargs)
        donated = [position for position, _ in call.items() if place_of(position) in donated]
        call = given_away_once(call, donated, (), names, self.transform_name)
        _require_compiled_for(compiled.in_tree, call, names)
        result = compiled(*call.args, **call.kwargs)
        return self.finish(result, call, policy, lambda call: _chosen([v for _, v in call.items()], used))


class FilterJitTransform(DonatingTransform):
    """A function under `equinox.filter_jit`, with identities preserved. A module that is the function is traced too."""

    caches_traces = True
    shares_alike = True

    def donated_positions(self, num_args: int, keywords: Collection[str]) -> Collection[Position]:
        """All of them, or all but the first."""
        donate = self.options.get("donate", "none")
        if donate not in ("all", "warn", "all-except-first", "warn-except-first"):
            return ()
        return {*range(int(donate.endswith("-except-first")), num_args), *keywords}

    @api_boundary
    def lower(self, *args: Any, **kwargs: Any) -> Stage:
        """As `equinox.filter_jit(f).lower`, for the same arguments as the function; `.compile()` gives a callable."""
        policy = current_policy(self.policy)
        call = self.pack(args, kwargs, policy)
        with calling(self.names, call):
            lowered = self.transformed(policy).lower(*call.args, **call.kwargs)
        known = jtu.tree_structure((call.args, call.kwargs))
        return Stage(lowered, functools.partial(self._call_compiled, policy, known))

    def _call_compiled(
        self, policy: Policy, known: Any, compiled: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        call = self.executable(self.pack(args, kwargs, policy))
        # What Equinox compiled compares neither ties nor static values, and would give the result for the others.
        _require_compiled_for(known, call, self.names)
        return self.finish(compiled(*call.args, **call.kwargs), call, policy)

    def inner(self, policy: Policy) -> Callable[..., Any]:
        """A module that holds the function packed, so that Equinox traces its leaves, each once."""
        if not is_module(self.function):
            return super().inner(policy)
        # Not kept: a module may change. What JAX compares is equal for all wrappers of equal modules.
        how = How(FunctionTransform, self.transform, policy, self.options)
        return _CallPacked(Packed(*pack(self.function, Tags(), policy.rules)), how)


class _CallPacked(eqx.Module):
    packed: Packed
    how: How = eqx.field(static=True)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return unpack(self.packed.structure, self.packed.leaves)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.how.applied_to(self.__wrapped__).inner(self.how.policy)(*args, **kwargs)


def _require_compiled_for(known: Any, call: Call, names: Names) -> None:
    made = f"`{names.definition.name}` was compiled"
    require_made_for(known, call, names, made, "f.lower(*args).compile()")


def _chosen(arguments: Sequence[Any], used: Sequence[bool]) -> Sequence[Any]:
    return [leaf for leaf, yes in zip(jtu.tree_leaves(arguments), used, strict=True) if yes]


def is_sharding(obj: Any) -> bool:
    """Whether an object in a prefix of shardings is one."""
    return (
        obj is None
        or isinstance(obj, (jax.sharding.Sharding, jax.sharding.PartitionSpec, jax.Device))
        or (type(obj).__name__ in ("Format", "Layout"))
    )
