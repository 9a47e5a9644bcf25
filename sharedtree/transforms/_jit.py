"""`jax.jit` and `equinox.filter_jit`: static and donated arguments, shardings, ahead-of-time compilation."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
from jax import tree_util as jtu

from .._context import Policy, current_policy
from .._graph import Tags, pack, unpack
from .._jax_internals import used_inputs
from .._node_types import is_module
from .._packed import Packed
from ._argnums import Chosen
from ._calling import Calling, active, calling
from ._crossing import Argument, Call, Entered, Position, pack_call
from ._function import FunctionTransform
from ._plans import CallPlan
from ._prefixes import has_modules, modules_with_parts, require_one_label, require_one_label_in_result, spread
from ._result_plans import NOT_BUILT
from ._sites import Site
from ._stages import Stage

_ELSEWHERE = ("in_shardings", "out_shardings", "device", "backend")  # options under which jit moves what it returns


class JitTransform(FunctionTransform):
    """A function under `jax.jit`, with identities preserved."""

    caches_traces = True

    def __init__(
        self,
        transform: Callable[..., Any],
        function: Callable[..., Any],
        policy: Policy | None,
        options: dict[str, Any],
    ) -> None:
        self.passes_through = not any(options.get(name) is not None for name in _ELSEWHERE)
        self._in_shardings = options.get("in_shardings")
        self._out_shardings = options.get("out_shardings")
        self._prefixed = has_modules(self._in_shardings) or has_modules(self._out_shardings)
        self._can_be_planned = not self._prefixed
        self._sites: dict[Policy, Site] = {}
        self._site: Site | None = None  # that of the last call
        super().__init__(transform, function, policy, options)
        self._static = Chosen(function, options.get("static_argnums"), options.get("static_argnames"))
        self._donated = Chosen(function, options.get("donate_argnums"), options.get("donate_argnames"))

    def check_options(self) -> None:
        """Shardings that reach inside modules are checked when they are translated."""
        if not self._prefixed:
            super().check_options()

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
        static = self.static_positions(call.args, call.kwargs)
        dynamic = [value for position, value in call.items() if position not in static]
        return _chosen(dynamic, self._used(call, self.policy or current_policy()))

    def _used(self, call: Call, policy: Policy) -> Sequence[bool]:
        traced = self._call_jitted(policy, call, lambda jitted, *a, **k: jitted.trace(*a, **k))
        return used_inputs(traced.jaxpr)

    def pack(self, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy) -> Call:
        """As the base; refuses two shardings for one object. Plans need not ask: their structure is one that passed."""
        call = super().pack(args, kwargs, policy)
        if self._in_shardings is not None:
            require_one_label(
                modules_with_parts(self._in_shardings, call.items(), is_sharding, "in_shardings"),
                self.names,
                is_sharding,
                "in_shardings",
                self.transform_name,
            )
        return call

    def pack_results(self, result: Any, entered: Entered, policy: Policy, noted: Any, current: Calling) -> Any:
        """As the base, and refuses two shardings for one object."""
        packed = super().pack_results(result, entered, policy, noted, current)
        if self._out_shardings is not None:
            prefix = (None, self._out_shardings) if policy.in_place else self._out_shardings
            require_one_label_in_result(prefix, packed, is_sharding, "out_shardings", self.transform_name)
        return packed

    def _call_jitted(self, policy: Policy, call: Call, use: Callable[..., Any]) -> Any:
        with calling(call):
            return use(self._jitted(policy, call), *call.args, **call.kwargs)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        policy = self.policy or current_policy()
        site = self._site
        if site is None or site.policy is not policy:
            site = self._site_for(policy)
        for plan in site.plans:
            packing = plan.pack(args, kwargs)
            if packing is None:
                continue
            if plan is not site.plans[0]:
                site.prefer(plan)
            objects = plan.objects_given(args, kwargs) if plan.given else None
            call = None if plan.results else self.pack(args, kwargs, policy)  # before anything can change them
            stack = active.stack
            stack.append((args, kwargs))
            try:
                result = site.jitted(*packing[0], **packing[1])
            finally:
                entry = stack.pop()
            if type(entry) is Calling:  # it was traced
                return self._finish_planned(result, plan, entry.call, policy)
            for outcome in plan.results:
                if outcome.given and not plan.can_be_given(outcome, packing):
                    continue
                built = outcome.build(result, objects)
                if built is not NOT_BUILT:
                    return built
            return self._finish_planned(result, plan, call or self.pack(args, kwargs, policy), policy)
        call = self.pack(args, kwargs, policy)
        result = self._call_jitted(policy, call, lambda jitted, *a, **k: jitted(*a, **k))
        finished = self.finish(result, call, policy)
        if self._can_be_planned and policy.arrays and not policy.in_place:
            with self._planning():
                site.saw(call, self.static_positions(args, kwargs))
        return finished

    def _finish_planned(self, result: Any, plan: CallPlan, call: Call, policy: Policy) -> Any:
        """Unpacks a result that no plan knows, and makes one."""
        finished = self.finish(result, call, policy)
        with self._planning():
            plan.learn(result)
        return finished

    def _site_for(self, policy: Policy) -> Site:
        with self._lock:
            site = self._sites.get(policy)
            if site is None:
                jitted = None if self._prefixed else self.transformed(policy)
                site = self._sites[policy] = Site(policy, jitted)
            self._site = site
        return site

    @contextlib.contextmanager
    def _planning(self) -> Iterator[None]:
        """Makes do without plans if one cannot be made: the result is there already, and must not be lost."""
        try:
            yield
        except Exception:  # noqa: BLE001 -- whatever it was, the walk is right and only slower
            self._can_be_planned = False

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
        leaves = jtu.tree_leaves((call.args, call.kwargs))
        if any(isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding for leaf in leaves):
            policy = dataclasses.replace(policy, pass_through=False)  # what is compiled then moves its arguments
        staged = self._call_jitted(policy, call, lambda jitted, *a, **k: getattr(jitted, name)(*a, **k))
        # Which arguments are used is asked of this call, for that of what it compiles to lacks the static ones.
        used = functools.cache(lambda: self._used(call, policy))
        return Stage(staged, functools.partial(self._call_compiled, policy, used))

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns for such arguments, with a `jax.ShapeDtypeStruct` for each traced leaf."""
        policy = dataclasses.replace(self.policy or current_policy(), pass_through=False, in_place=False)
        call = self.pack(args, kwargs, policy)
        result = self._call_jitted(policy, call, lambda jitted, *a, **k: jitted.eval_shape(*a, **k))
        return self.finish(result, call, policy)

    def clear_cache(self) -> None:
        """Forgets every trace of this function, and how to pack and unpack its calls."""
        with self._lock:
            self._sites.clear()
            self._site = None
        for made in list(self._made.values()):
            made.clear_cache()

    def _call_compiled(
        self,
        policy: Policy,
        used: Callable[[], Sequence[bool]],
        compiled: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        call = pack_call(args, kwargs, (), policy.rules, self.names)  # the static ones are left out, as in JAX
        result = compiled(*call.args, **call.kwargs)
        return self.finish(result, call, policy, lambda call: _chosen([v for _, v in call.items()], used()))


class FilterJitTransform(FunctionTransform):
    """A function under `equinox.filter_jit`, with identities preserved. A module that is the function is traced too."""

    caches_traces = True

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

    def lower(self, *args: Any, **kwargs: Any) -> Stage:
        """As `equinox.filter_jit(f).lower`, for the same arguments as the function; `.compile()` gives a callable."""
        policy = self.policy or current_policy()
        call = self.pack(args, kwargs, policy)
        with calling(call):
            lowered = self.transformed(policy).lower(*call.args, **call.kwargs)
        return Stage(lowered, functools.partial(self._call_compiled, policy))

    def _call_compiled(self, policy: Policy, compiled: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        call = self.pack(args, kwargs, policy)
        return self.finish(compiled(*call.args, **call.kwargs), call, policy)

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


def _chosen(arguments: Sequence[Any], used: Sequence[bool]) -> Sequence[Any]:
    return [leaf for leaf, yes in zip(jtu.tree_leaves(arguments), used, strict=True) if yes]


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
