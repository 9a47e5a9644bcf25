"""`jax.jit` and `equinox.filter_jit`: static and donated arguments, shardings, ahead-of-time compilation."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any

import equinox as eqx
import jax
from jax import tree_util as jtu

from .._context import Policy, current_policy
from .._graph import Tags, pack, unpack
from .._jax_internals import current_traces, used_inputs
from .._node_types import is_module
from .._packed import Packed
from ._crossing import Argument, Call, Entered, Position
from ._function import FunctionTransform, active, calling
from ._plans import NOT_BUILT, CallPlan, Packing, Site
from ._prefixes import has_modules, modules_with_parts, require_one_label, spread
from ._retracing import StaticNumbers

_ELSEWHERE = ("in_shardings", "out_shardings", "device", "backend")  # options under which jit moves what it returns


class JitTransform(FunctionTransform):
    """A function under `jax.jit`, with identities preserved."""

    def __init__(
        self,
        transform: Callable[..., Any],
        function: Callable[..., Any],
        policy: Policy | None,
        options: dict[str, Any],
    ) -> None:
        super().__init__(transform, function, policy, options)
        self._static = _Chosen(function, options.get("static_argnums"), options.get("static_argnames"))
        self._donated = _Chosen(function, options.get("donate_argnums"), options.get("donate_argnames"))
        self.passes_through = not any(options.get(name) is not None for name in _ELSEWHERE)
        self._in_shardings = options.get("in_shardings")
        self._out_shardings = options.get("out_shardings")
        self._prefixed = has_modules(self._in_shardings) or has_modules(self._out_shardings)
        self._can_be_planned = not self._prefixed
        self._numbers = StaticNumbers()
        self._sites: dict[Policy, Site] = {}

    def static_positions(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Collection[Position]:
        """Those that `static_argnums` and `static_argnames` choose."""
        return self._static.positions(len(args), kwargs)

    def treatment(self, argument: Argument, num_args: int) -> Any:
        """Donated or not."""
        is_donated = argument.position in self._donated.positions(num_args, (argument.position,))
        return "donated" if is_donated else "not donated"

    def is_taken(self, entered: Entered) -> Callable[[int], bool]:
        """Donated buffers are."""
        return donated(entered, self.treatment)

    def used(self, call: Call) -> Sequence[Any]:
        """JAX drops arguments that the computation does not need, and then their placement has no effect."""
        policy = self.policy or current_policy()
        traced = self._call_jitted(policy, call, lambda jitted, *a, **k: jitted.trace(*a, **k))
        static = self.static_positions(call.args, call.kwargs)
        dynamic = [value for position, value in call.items() if position not in static]
        return [leaf for leaf, yes in zip(jtu.tree_leaves(dynamic), used_inputs(traced.jaxpr), strict=True) if yes]

    def require_one_treatment(self, entered: Entered) -> None:
        """Of donation, and of shardings that reach inside modules; also counts the static numbers that change."""
        super().require_one_treatment(entered)
        self._numbers.traced(entered, self.names)

    def _call_jitted(self, policy: Policy, call: Call, use: Callable[..., Any]) -> Any:
        with calling(call):
            return use(self._jitted(policy, call), *call.args, **call.kwargs)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        policy = self.policy or current_policy()
        site = self._sites.get(policy)
        if site is not None:
            for plan in site.plans:
                packing = plan.pack(args, kwargs)
                if packing is not None:
                    return self._call_planned(plan, packing, policy, args, kwargs)
        call = self.pack(args, kwargs, policy)
        result = self._call_jitted(policy, call, lambda jitted, *a, **k: jitted(*a, **k))
        finished = self.finish(result, call, policy)
        if self._can_be_planned and policy.arrays and not policy.in_place:
            self._sites.setdefault(policy, Site()).saw(call, self.static_positions(args, kwargs))
        return finished

    def _call_planned(self, plan: CallPlan, packing: Packing, policy: Policy, args: Any, kwargs: Any) -> Any:
        stack = active.stack
        stack.append(_Planned(plan, packing))
        try:
            result = self._made[policy](*packing.args, **packing.kwargs)
        finally:
            stack.pop()
        built = plan.unpack(result, packing)
        if built is NOT_BUILT:
            built = self.finish(result, self.pack(args, kwargs, policy), policy)
            plan.learn(result)
        return built

    def _jitted(self, policy: Policy, call: Call) -> Any:
        """The jitted function. Shardings that reach inside modules are translated anew for each structure."""
        if not self._prefixed:
            return self.transformed(policy)
        avals = jtu.tree_map(_aval, (call.args, call.kwargs))
        leaves, treedef = jtu.tree_flatten(avals)
        key = (policy, treedef, tuple(leaves))
        made = self._made.get(key)
        if made is None:
            with self._lock:
                made = self._made.setdefault(key, self._jitted_for(policy, call, avals))
        return made

    def _jitted_for(self, policy: Policy, call: Call, avals: Any) -> Any:
        inner = self.inner(policy)
        options = dict(self.options)
        if has_modules(self._in_shardings):
            prefix = self._in_shardings
            modules = modules_with_parts(prefix, call.items(), is_sharding, "in_shardings")
            require_one_label(modules, self.names, is_sharding, "in_shardings", self.transform_name)
            parts = prefix if isinstance(prefix, (tuple, list)) else [prefix] * len(call.args)
            options["in_shardings"] = tuple(
                spread(part, arg, is_sharding, "in_shardings") for part, arg in zip(parts, call.args, strict=True)
            )
        if has_modules(self._out_shardings):
            # What the function returns is known only once it has been traced.
            plain = {k: v for k, v in options.items() if k not in ("in_shardings", "out_shardings")}
            args, kwargs = avals
            result = self.transform(inner, **plain).eval_shape(*args, **kwargs)
            prefix = (None, self._out_shardings) if policy.in_place else self._out_shardings
            options["out_shardings"] = spread(prefix, result, is_sharding, "out_shardings")
        return self.transform(inner, **options)

    # Ahead of time ------------------------------------------------------------------------------------------------

    def lower(self, *args: Any, **kwargs: Any) -> "Stage":
        """As `jax.jit(f).lower`, for the same arguments as the function; `.compile()` gives a callable."""
        return self._stage("lower", args, kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> "Stage":
        """As `jax.jit(f).trace`, for the same arguments as the function; `.lower()` and `.jaxpr` follow."""
        return self._stage("trace", args, kwargs)

    def _stage(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> "Stage":
        policy = self.policy or current_policy()
        call = self.pack(args, kwargs, policy)
        staged = self._call_jitted(policy, call, lambda jitted, *a, **k: getattr(jitted, name)(*a, **k))
        return Stage(staged, self, policy)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns for such arguments, with a `jax.ShapeDtypeStruct` for each traced leaf."""
        policy = dataclasses.replace(self.policy or current_policy(), pass_through=False, in_place=False)
        call = self.pack(args, kwargs, policy)
        result = self._call_jitted(policy, call, lambda jitted, *a, **k: jitted.eval_shape(*a, **k))
        return self.finish(result, call, policy)

    def clear_cache(self) -> None:
        """Forgets every trace of this function."""
        for made in list(self._made.values()):
            made.clear_cache()

    def finish_compiled(self, compiled: Any, policy: Policy, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Calls what `lower(...).compile()` made."""
        static = self._static.positions(len(args), kwargs)
        call = self.pack(args, kwargs, policy)
        dynamic = [value for i, value in enumerate(call.args) if i not in static]
        named = {name: value for name, value in call.kwargs.items() if name not in static}
        return self.finish(compiled(*dynamic, **named), call, policy)


class _Planned:
    """The caller's side of a call that a plan packed. Nothing is worked out unless the function is traced."""

    __slots__ = ("_packing", "_plan")

    def __init__(self, plan: CallPlan, packing: Packing) -> None:
        self._plan = plan
        self._packing = packing

    @property
    def outer(self) -> Sequence[Any]:
        traces = current_traces()
        return traces if jax.config.jax_disable_jit else traces[1:]  # pyright: ignore[reportAttributeAccessIssue]

    def object_of(self, number: int) -> Any:
        return self._plan.object_of(number, self._packing)


class Stage:
    """A stage of ahead-of-time compilation (`Traced`, `Lowered`, `Compiled`) of a function with identities preserved.

    Has every attribute of JAX's own stage. `.lower()` and `.compile()` lead to the next one. The last one is called
    with the arguments of the function; JAX has the static ones left out of that call, but here they are given, and must
    be what they were.
    """

    def __init__(self, stage: Any, jitted: JitTransform, policy: Policy) -> None:
        self._stage = stage
        self._jitted = jitted
        self._policy = policy

    def lower(self, *args: Any, **kwargs: Any) -> "Stage":
        """The next stage, lowered."""
        return Stage(self._stage.lower(*args, **kwargs), self._jitted, self._policy)

    def compile(self, *args: Any, **kwargs: Any) -> "Stage":
        """The next stage, compiled."""
        return Stage(self._stage.compile(*args, **kwargs), self._jitted, self._policy)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._jitted.finish_compiled(self._stage, self._policy, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def __repr__(self) -> str:
        return f"Stage({self._stage!r})"


class FilterJitTransform(FunctionTransform):
    """A function under `equinox.filter_jit`, with identities preserved. A module that is the function is traced too."""

    def treatment(self, argument: Argument, num_args: int) -> Any:
        """Donated or not."""
        donate = self.options.get("donate", "none")
        is_donated = donate in ("all", "warn") or (
            donate in ("all-except-first", "warn-except-first") and argument.position != 0
        )
        return "donated" if is_donated else "not donated"

    def is_taken(self, entered: Entered) -> Callable[[int], bool]:
        """Donated buffers are."""
        return donated(entered, self.treatment)

    def inner(self, policy: Policy) -> Callable[..., Any]:
        """A module that holds the function packed, so that Equinox traces its leaves, each once."""
        if not is_module(self.function):
            return super().inner(policy)
        return _CallPacked(Packed(*pack(self.function, Tags(), policy.rules)), self, policy)


class _CallPacked(eqx.Module):
    packed: Packed
    wrapper: FilterJitTransform = eqx.field(static=True)
    policy: Policy = eqx.field(static=True)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.wrapper.function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function = unpack(self.packed.structure, self.packed.leaves)
        alike = FunctionTransform(self.wrapper.transform, function, self.policy, self.wrapper.options)
        return alike.inner(self.policy)(*args, **kwargs)


def donated(entered: Entered, treatment: Callable[[Argument, int], Any]) -> Callable[[int], bool]:
    """Whether a record belongs to an argument that is donated."""
    taken: set[int] = set()
    for argument in entered.arguments:
        if treatment(argument, len(entered.args)) == "donated":
            base = argument.structure.base
            taken.update(range(base, base + len(argument.structure.records)))
    return taken.__contains__


class _Chosen:
    """The arguments that `…_argnums` and `…_argnames` choose; each infers the other, as in JAX."""

    def __init__(self, function: Callable[..., Any], argnums: Any, argnames: Any) -> None:
        self.argnums = () if argnums is None else tuple(_many(argnums))
        self.argnames = () if argnames is None else tuple(_many(argnames))
        if (argnums is None) == (argnames is None):
            return
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (ValueError, TypeError):
            return
        if argnums is None:
            positional = (inspect.Parameter.POSITIONAL_OR_KEYWORD,)
            names = {p.name: i for i, p in enumerate(parameters) if p.kind in positional}
            self.argnums = tuple(names[name] for name in self.argnames if name in names)
        else:
            keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
            names = {i: p.name for i, p in enumerate(parameters) if p.kind in keyword}
            own = [i + len(parameters) if i < 0 else i for i in self.argnums]
            self.argnames = tuple(names[i] for i in own if i in names)

    @functools.cached_property
    def is_empty(self) -> bool:
        return not self.argnums and not self.argnames

    def positions(self, num_args: int, names: Collection[Position]) -> Collection[Position]:
        if self.is_empty:
            return ()
        chosen: set[Position] = {i + num_args if i < 0 else i for i in self.argnums}
        chosen.update(name for name in self.argnames if name in names)
        return chosen


def _many(value: Any) -> Sequence[Any]:
    return (value,) if isinstance(value, (int, str)) else value


def is_sharding(obj: Any) -> bool:
    """Whether an object in a prefix of shardings is one."""
    return (
        obj is None
        or isinstance(obj, (jax.sharding.Sharding, jax.sharding.PartitionSpec, jax.Device))
        or (type(obj).__name__ in ("Format", "Layout"))
    )


def _aval(leaf: Any) -> Any:
    aval = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)  # pyright: ignore
