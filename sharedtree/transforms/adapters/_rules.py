"""Functions with rules for their derivatives: what those of `jax.custom_vjp` and `jax.custom_jvp` have in common.

The function and its rules take and return modules, with ties. What they hand to each other through JAX is packed:

    f(Pair(w, w), x)                  JAX sees    f(Packed([w]), x)
    fwd(Pair(w, w), x) → y, Net(a)                fwd(Packed([w]), x) → y, Packed([a])
    bwd(Net(a), dy) → Pair(d, e), dx              bwd(Packed([a]), dy) → Packed([d + e]), dx

A rule may be called long after the call that it belongs to, and by another one's derivative. So the vanilla object is
made anew for each call, and its rules know the structures of that call, but hold none of its arrays.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn, Self

import jax
from jax import tree_util as jtu

from ..._context import Policy, current_policy
from ..._equinox_internals import name_of
from ..._graph import Tags
from ..._under_way import keeps_limit
from ..._whole_gradients import Whole, noting_whole
from .._calling import caller_of, calling
from .._crossed import Graph, Position, packed_in
from .._cuts import Leaving
from .._function import FunctionTransform
from .._inner import Inner
from .._inside import Inside, enclosing_traces
from .._joining import Words, joined, require_same_containers
from .._modules import How
from .._packing import Call, pack_tree, unpack_call
from .._tangents import Fit, pack_tangents
from ..checks._functions_given import forbid_bound_module
from ..checks._leaks import forbid_tracers
from ._rules_in_place import Paths, State, parted, raise_differentiated, require_same_changes, write_back


class RuleTransform(FunctionTransform):
    """A function with rules, with identities preserved. The rules come later, by methods."""

    takes_rules = True
    rules: Any = None
    """As the transform's own methods take them; None until they are there."""

    gives_one = False
    """Whether its rule may return the cotangent of a single operand itself."""
    writes = False
    """Whether it can write back what the function changed in its arguments."""

    _operands: Any
    _returned: Any
    _paths: Paths

    def _made_alike(self) -> How | None:
        """Nothing: two objects of one function may have two rules."""
        return None

    def check_options(self) -> None:
        """Applies the transform, which also refuses to be called without rules as it always does."""
        self._vanilla = self.transform(self.function, **self.options)
        self._static = tuple(getattr(self._vanilla, "nondiff_argnums", ()))

    def __reduce__(self) -> Any:
        """As the base, with the rules."""
        made = super().__reduce__()
        return made if isinstance(made, str) else (*made, self._all_rules())

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """As the base, with the rules."""
        made = super().__deepcopy__(memo)
        if made is not self:
            memo[id(self)] = made  # a rule may hold this, which the caller keeps alive
            made.__dict__.update(copy.deepcopy(self._all_rules(), memo))
        return made

    def _all_rules(self) -> dict[str, Any]:
        """The attributes that hold rules."""
        return {name: rule for name, rule in self.__dict__.items() if name in ("rules", "_fwd", "_bwd")}

    def static_positions(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Collection[Position]:
        """Those that are not differentiated, which JAX does not trace."""
        return self._static

    @keeps_limit
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if self.rules is None:
            return self._vanilla(*args, **kwargs)
        policy = current_policy(self.policy)
        if policy.in_place and not self.writes:
            raise ValueError(
                f"`in_place=True` adds what was changed to the result, and the rules of `{self.transform_name}` do not "
                "say how that is differentiated. Return what changes, and leave the arguments as they are:\n"
                f"    f = sharedtree.preserve_identities({self.transform_name})(f, in_place=False)"
            )
        args, kwargs = self.by_position(args, kwargs)
        call = self.pack(args, kwargs, policy)
        one = self._for_one_call(call)
        if policy.in_place:
            one._paths = Paths(call, one.names)
        with calling(one.names, call):
            result = one.with_rules(policy, self.function)(*call.args, **call.kwargs)
        if not policy.in_place:
            return self.finish(result, call, policy)
        return write_back(result, call, one.refuse_gradient)

    def _for_one_call(self, call: Call) -> Self:
        """This, for the rules of one call to refer to."""
        one = self._without_function()
        one.names = copy.copy(self.names)
        one._operands = jtu.tree_map(_type_of, tuple([x for i, x in enumerate(call.args) if i not in self._static]))
        one._returned = None
        return one

    def by_position(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments by position, with defaults, as JAX gives them to the rules; as they are if they do not fit."""
        try:
            bound = inspect.signature(self.function).bind(*args, **kwargs)
        except (TypeError, ValueError):
            return args, kwargs
        bound.apply_defaults()
        return (args, kwargs) if kwargs.keys() & bound.kwargs.keys() else (bound.args, {})

    def with_rules(self, policy: Policy, function: Callable[..., Any]) -> Callable[..., Any]:
        """The vanilla object for one call, on packed arguments."""
        raise NotImplementedError

    def pack_results(self, result: Any, inside: Inside, leaving: Leaving | None) -> Any:
        """As the base; in place, what was changed and the result have numberings of their own."""
        packed = super().pack_results(result, inside, leaving)
        return parted(packed[0], result, inside) if inside.terms.policy.in_place else packed

    def refuse_gradient(self, state: State, places: Sequence[int]) -> NoReturn:
        """Raises, for a gradient flows through what was changed, at some places among its leaves."""
        paths = self._paths.of_leaves(state)
        raise_differentiated([paths[i] for i in places], name_of(self, self), self.transform_name)

    # What becomes of each function --------------------------------------------------------------------------------

    def called(self, policy: Policy, how: Callable[..., Any], function: Callable[..., Any]) -> Inner:
        """What JAX sees of the function or a rule: calls `how(policy, function, args, kwargs)`."""
        forbid_bound_module(function, policy, self.transform_name)
        return Inner(function, lambda: function, functools.partial(how, policy))

    def primal(self, policy: Policy, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The function itself."""
        packed = self.call_inside(policy, function, args, kwargs)
        self._returned = jtu.tree_structure(packed)
        return packed

    def with_more(
        self,
        policy: Policy,
        rule: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        finish: Callable[[Any, Any], Any],
    ) -> Any:
        """What becomes of a rule that returns the result of the function and something beside it.

        Args:
            policy: what counts as sharing.
            rule: the rule.
            args: the packed arguments.
            kwargs: likewise.
            finish: (the packed result, what is beside it) → what JAX gets. If the rule returns no pair, JAX gets that,
                for it says best what is wrong.
        """
        made: list[Any] = []

        def result(*args: Any, **kwargs: Any) -> Any:
            made.append(rule(*args, **kwargs))
            return made[0][0] if _is_pair(made[0]) else None

        packed = self.call_inside(policy, result, args, kwargs)
        return finish(packed, made[0][1]) if _is_pair(made[0]) else made[0]

    def as_returned(self, policy: Policy, result: Any, rule: Callable[..., Any]) -> Any:
        """The packed result of a rule, packed as that of the function.

        Raises:
            SharingMismatchError: if they differ in shape, static values or ties, or in what they changed in place.
        """
        treedef = self._returned
        if treedef is None or treedef == jtu.tree_structure(result):
            return result
        known = jtu.tree_unflatten(treedef, [0.0] * treedef.num_leaves)
        names = name_of(self, self), name_of(rule, rule)
        if policy.in_place:
            require_same_changes(known[0], result[0], self._paths, *names)
            return result[0], self._like(known[1], result[1], *names)
        return self._like(known, result, *names)

    def _like(self, known: Any, result: Any, function: str, rule: str) -> Any:
        one, two = (f"in what `{name}` returns" for name in (function, rule))
        words = Words(self.transform_name, one, two)
        if not require_same_containers(known, result, "result", words):
            return result
        before, after = Graph.of(known, "result"), Graph.of(result, "result")
        joined(before, after, words, exact=True)
        joined(after, before, Words(self.transform_name, two, one), exact=True)
        return jtu.tree_unflatten(jtu.tree_structure(known), jtu.tree_leaves(result))

    def with_residuals(self, policy: Policy, rule: Callable[..., Any], result: Any, residuals: Any) -> tuple[Any, Any]:
        """The packed result of a rule, and residuals, packed in a numbering of their own."""
        current = caller_of(self.names)
        outer = enclosing_traces() if current is None else current.outer
        rules = policy.rules._replace(on_static=forbid_tracers(outer))
        return self.as_returned(policy, result, rule), pack_tree(residuals, Tags(), rules, "residuals")

    def cotangents(self, policy: Policy, rule: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What a rule gives for the operands, packed as they are.

        Raises:
            TypeError: if they are not as many.
            SharingMismatchError: if they differ in shape, or one object is at two paths of a tie.
        """
        operands = self._operands
        with noting_whole() as whole:
            given = rule(*args, **kwargs)
        if self.gives_one and len(operands) == 1 and not isinstance(given, (tuple, list)):
            given = (given,)
        if not has_modules(operands):
            return given
        if not isinstance(given, (tuple, list)) or len(given) != len(operands):
            what = f"{len(given)} values" if isinstance(given, (tuple, list)) else f"a `{type(given).__name__}`"
            raise TypeError(
                f"`{name_of(rule, rule)}` returned {what} for the {len(operands)} operands of `{name_of(self, self)}` "
                "that are differentiated. It returns a tuple with one cotangent for each, None where that is zero:\n"
                "    return (cotangent, None)"
            )
        return pack_tangents(operands, tuple(given), "cotangents", self.fit(policy, whole))

    def fit(self, policy: Policy, whole: Whole | None = None) -> Fit:
        """How tangents that a rule gave are taken, or cotangents, with those arrays of them that are whole."""
        return Fit(self.transform_name, policy, whole is not None, may_lack=True, is_of_rule=True, whole=whole)


def _type_of(leaf: Any) -> Any:
    """What is kept of an operand. What is no array is a number, or JAX will refuse it."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if hasattr(leaf, "shape") else leaf


def _is_pair(made: Any) -> bool:
    return isinstance(made, (tuple, list)) and len(made) == 2


def has_modules(packed: Any) -> bool:
    """Whether there is a module in a packed tree."""
    return any(packed_in(packed, 0))


def unpacked(packed: Any) -> Any:
    """A packed tree with modules."""
    return unpack_call((packed,), {}, ()).args[0]
