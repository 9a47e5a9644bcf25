"""`jax.custom_vjp`, `jax.custom_jvp`, `jax.custom_gradient`: functions with rules for their derivatives.

The function and its rules take and return modules, with ties. What they hand to each other through JAX are hands:

    f(Pair(w, w), x)                  JAX sees    f(Hand([w, x]))
    fwd(Pair(w, w), x) → y, Net(a)                fwd(Hand([w, x])) → y, Hand([a])
    bwd(Net(a), dy) → Pair(d, e), dx              bwd(Hand([a]), dy) → (Hand([d + e, dx]),)

A rule may be called long after the call that it belongs to, and by another one's derivative. So the vanilla object is
made anew for each call, and its rules know the structures of that call, but hold none of its arrays.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util as jtu

from .._arguments import Position
from .._context import Policy
from .._equinox_internals import name_of
from .._errors import SharingMismatchError
from .._graph import Tags, pack, unpack
from .._jax_internals import as_numpy
from .._prefix import Label, labels
from .._structure import Structure
from .._text import listed
from .._ties import is_inexact
from .._walked import Walked
from .._whole_gradients import noting_whole
from ._call import Call, leave
from ._function_transform import FunctionTransform
from ._hands import Hand, whole
from ._inner_function import Inner
from ._inside import Inside
from ._like import tangents_of
from ._meet import Words, holds_modules, meet
from ._modules import How
from ._rules_in_place import Changed, changed_apart, write_back
from ._tangents import Fit, as_tuple, fitted
from .checks._functions_given import forbid_bound_module


class RuleTransform(FunctionTransform):
    """A function with rules, with identities preserved. The rules come later, by methods."""

    takes_rules = True
    rules_given: Any = None
    """As the transform's own methods take them; None until they are there."""
    unknown_methods: frozenset[str] = frozenset()
    """Methods of the transform of which nobody knows what they hand to rules."""

    writes = False
    """Whether it can write back what the function changed in its arguments."""

    _operands: Walked
    _primal: Inner | None = None
    _returned: Structure | None
    _changed: Changed

    def _made_alike(self) -> How | None:
        """Nothing: two objects of one function may have two rules."""
        return None

    def check_options(self) -> None:
        """Applies the transform, which also refuses to be called without rules as it always does."""
        self._vanilla = self.transform(self.function, **self.options)
        self._static = tuple(getattr(self._vanilla, "nondiff_argnums", ()))

    def __getattr__(self, name: str) -> Any:
        """What sets rules of another kind on the function itself, as that of `jax.custom_batching.custom_vmap` does."""
        if not name.startswith("def") or "_vanilla" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        found = getattr(self._vanilla, name)
        if name in self.unknown_methods:
            raise TypeError(
                f"No adapter says what `{self.transform_name}` hands to the rules that `{name}` sets. Make a function "
                "of a `sharedtree.Dag`, which every transform takes as it is, and give rules to that:\n"
                "    f_of_dag = jax.custom_vjp(lambda dag: f(dag.tree))"
            )
        return found

    def __reduce__(self) -> Any:
        """As the base, with the rules."""
        made = super().__reduce__()
        return made if isinstance(made, str) else (*made, self._own_rules())

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """As the base, with the rules."""
        made = super().__deepcopy__(memo)
        if made is not self:
            memo[id(self)] = made  # a rule may hold this, which the caller keeps alive
            made.__dict__.update(copy.deepcopy(self._own_rules(), memo))
        return made

    def _own_rules(self) -> dict[str, Any]:
        return {name: rule for name, rule in self.__dict__.items() if name == "rules_given"}

    def static_positions(self, num_args: int, keywords: Collection[str]) -> Collection[Position]:
        """Those that are not differentiated, which JAX does not trace."""
        return self._static

    def called(self, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy) -> Any:
        """As the base, under rules."""
        if self.rules_given is None:
            return self._vanilla(*args, **kwargs)
        if policy.in_place and not self.writes:
            raise ValueError(
                f"`in_place=True` adds what was changed to the result, and the rules of `{self.transform_name}` do not "
                "say how that is differentiated. Return what changes, and leave the arguments as they are:\n"
                f"    f = sharedtree.preserve_identities({self.transform_name})(f, in_place=False)"
            )
        args, kwargs = self._by_position(tuple(args), kwargs)
        with self.enter(args, kwargs, policy) as call:
            one = self._for_one_call(call)
            result = one.with_rules(policy, self.function)(*call.hands, *self.statics_of(call))
            if not policy.in_place:
                return leave((result,))
            return write_back(result, call, one._changed, name_of(self, self), self.transform_name)

    def statics_of(self, call: Call) -> Sequence[Any]:
        """The arguments that are not differentiated, as JAX gets them."""
        return call.statics

    def _for_one_call(self, call: Call) -> Self:
        """This, for the rules of one call to refer to."""
        one = self._without_function()
        types = [_type_of(leaf) for leaf in call.tree.leaves.values()]
        one._operands = Walked.of_leaves(call.tree.structure, types)  # pyright: ignore[reportArgumentType]
        one._returned = None
        one._changed = Changed(one._operands)
        return one

    def _by_position(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments by position, with defaults, as JAX gives them to the rules; as they are without a signature."""
        try:
            bound = inspect.signature(self.function).bind(*args, **kwargs)
        except (TypeError, ValueError) as error:
            if str(error).startswith("missing"):
                self._vanilla(*args, **kwargs)  # says best what is wrong
            return args, kwargs
        bound.apply_defaults()
        if kwargs.keys() & bound.kwargs.keys():
            self._vanilla(*args, **kwargs)  # as above
            return args, kwargs
        return bound.args, {}

    def with_rules(self, policy: Policy, function: Callable[..., Any]) -> Callable[..., Any]:
        """The vanilla object for one call, on hands."""
        raise NotImplementedError

    @property
    def _after_hand(self) -> tuple[int, ...]:
        return tuple(range(1, 1 + len(self._static)))

    # What becomes of each function --------------------------------------------------------------------------------

    def inner_of(self, policy: Policy, how: Callable[..., Any], function: Callable[..., Any]) -> Inner:
        """What JAX sees of the function or a rule: calls `how(policy, function, *args)`."""
        forbid_bound_module(function, policy, self.transform_name)
        return Inner(function, lambda: function, lambda own, args, kwargs: how(policy, own, *args, **kwargs))

    def primal(self, policy: Policy, function: Callable[..., Any], *args: Any) -> Any:
        """The function itself."""
        return self.with_more(policy, function, args, None)

    def with_more(
        self, policy: Policy, rule: Callable[..., Any], args: Sequence[Any], finish: Callable[[Inside, Any], Any] | None
    ) -> Any:
        """What becomes of the function, or of a rule that returns its result and something beside it.

        Args:
            policy: what counts as sharing.
            rule: the function or the rule.
            args: hands, and what is static.
            finish: (the trace, what is beside the result) → what JAX gets of that; None if it is the function. If a
                rule returns no pair, JAX gets that, for it says best what is wrong.
        """
        inside, result = self.run(policy, rule, args)
        beside = None
        if finish is not None:
            if not isinstance(result, (tuple, list)) or len(result) != 2:
                return result
            result, beside = result
        tree = inside.walked(inside.with_state(result))
        inside.check_walked(tree, is_with_state=policy.in_place)
        packed: Any = changed_apart(result, inside, self._changed) if policy.in_place else inside.pack(result)
        if finish is None:
            if policy.in_place:
                self._changed.note(packed[0])
            self._returned = (packed[1] if policy.in_place else packed).structure
            return packed
        return self._as_returned(packed, policy, rule), finish(inside, beside)

    def _as_returned(self, packed: Any, policy: Policy, rule: Callable[..., Any]) -> Any:
        """The packed result of a rule, in the shape of that of the function.

        Raises:
            SharingMismatchError: if they differ in shape, static values or ties, or in what they changed in place.
        """
        state, hand = packed if policy.in_place else (None, packed)
        function = name_of(self, self)
        if state is not None:
            self._changed.require_same(state, function, name_of(rule, rule))
        known = self._returned
        if known is not None and known is not hand.structure:
            one, two = (f"in what `{name}` returns" for name in (function, name_of(rule, rule)))
            before = Walked.of(known, [None] * len(known.records))
            after = Walked.of(hand.structure, [None] * len(hand.structure.records))
            above = (_Result(),)
            meet(before, after, Words(self.transform_name, one, two), above, exact=True)
            meet(after, before, Words(self.transform_name, two, one), above, exact=True)
            hand = whole(hand.leaves, known)
        return hand if state is None else (state, hand)

    def cotangents(self, policy: Policy, rule: Callable[..., Any], *args: Any, logs: bool = False) -> Any:
        """What a rule gives for the operands, in the hand in which they came.

        Raises:
            TypeError: if they are not as many.
            SharingMismatchError: if they differ in shape, or one object is at two paths of a tie.
        """
        operands = as_tuple(self._operands)
        num_operands = len(operands.records[operands.root][1])
        with noting_whole() as found:
            given = rule(*args)
        logged: Any = None
        if logs and isinstance(given, tuple) and len(given) == 2:
            given, logged = given
        given = self.as_several(given, num_operands)
        if not isinstance(given, (tuple, list)) or len(given) != num_operands:
            self._refuse_as_jax(given)
            what = f"{len(given)} values" if isinstance(given, (tuple, list)) else f"a `{type(given).__name__}`"
            raise TypeError(
                f"`{name_of(rule, rule)}` returned {what} for the {num_operands} operands of `{name_of(self, self)}` "
                "that are differentiated. It returns a tuple with one cotangent for each, None where that is zero:\n"
                "    return (cotangent, None)"
            )
        fit = self.fit(policy, whole=found, adds_up=True)
        leaves = list(fitted(operands, tuple(given), "cotangents", fit).values())
        if any(np.shape(leaf) != np.shape(own) for leaf, own in zip(leaves, operands.leaves.values(), strict=True)):
            self._refuse_as_jax(given)
        made = (whole(leaves, self._operands.structure),)  # pyright: ignore[reportArgumentType]
        return (made, logged) if logs else made

    def _refuse_as_jax(self, given: Any) -> None:
        """Raises what JAX says of cotangents that do not fit, where there is nothing that it does not know."""
        if self._primal is None or holds_modules(self._operands):
            return
        ruled = jax.custom_vjp(self._primal)
        ruled.defvjp(lambda *args: (0.0, None), lambda *_: given)
        assert self._operands.structure is not None
        operands = unpack(self._operands.structure, list(self._operands.leaves.values()))
        jax.eval_shape(lambda *args: jax.vjp(ruled, *args)[1](0.0), *operands.args)

    def refused(self, args: Sequence[Any], kwargs: dict[str, Any], error: SharingMismatchError) -> NoReturn:
        """As the base, without asking the transform, which has no rules."""
        raise error

    def as_several(self, given: Any, num_operands: int) -> Any:
        """What a rule returned, if it may return the cotangent of a single operand itself."""
        return given

    def fit(self, policy: Policy, *, whole: Any = None, adds_up: bool = False) -> Fit:
        """How tangents that a rule gave are taken, or cotangents, with those arrays of them that are whole."""
        rules = self.rules(policy)._replace(convention="jax")
        return Fit(self.transform_name, rules, adds_up, may_lack=True, is_of_rule=True, whole=whole)

    def run(self, policy: Policy, function: Callable[..., Any], args: Sequence[Any]) -> tuple[Inside, Any]:
        """Calls a function with what was dealt."""
        received = self.received(args)
        inside = Inside(self.terms(policy), function)
        own = received.arguments
        return inside, inside.call_with(received, own.args, own.kwargs)


class _Result:
    def __str__(self) -> str:
        return "result"


def _type_of(leaf: Any) -> Any:
    """What is kept of an operand. What is no array is a number, or JAX will refuse it."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if hasattr(leaf, "shape") else leaf


def tree_of(hand: Hand) -> Any:
    """What a hand was dealt from, put together."""
    return unpack(hand.structure, [as_numpy(leaf) for leaf in hand.leaves])


class CustomVjpTransform(RuleTransform):
    """A function under `jax.custom_vjp`, with identities preserved."""

    writes = True
    unknown_methods = frozenset({"defvjp_with_accums", "defremat", "defremat_with_logs"})

    def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any], *positional: Any, **options: Any) -> None:
        """Sets the rules, as `jax.custom_vjp.defvjp` does.

        Args:
            fwd: the arguments → (the result, residuals); both may hold modules, and keep their ties.
            bwd: (residuals, a cotangent like the result) → a cotangent for each argument, like it or None.
            positional: options of `jax.custom_vjp.defvjp`.
            options: likewise.
        """
        self._vanilla.defvjp(fwd, bwd, *positional, **options)
        self.rules_given = "defvjp", fwd, bwd, positional, options

    def defvjp_with_logs(
        self, fwd: Callable[..., Any], bwd: Callable[..., Any], *positional: Any, **options: Any
    ) -> None:
        """Sets the rules, as `jax.custom_vjp.defvjp_with_logs` of newer JAX does; `bwd` returns a pair."""
        self._vanilla.defvjp_with_logs(fwd, bwd, *positional, **options)
        self.rules_given = "defvjp_with_logs", fwd, bwd, positional, options

    def with_rules(self, policy: Policy, function: Callable[..., Any]) -> Callable[..., Any]:
        """The vanilla object for one call, on hands.

        Raises:
            ValueError: in place, if with `symbolic_zeros` the arrays that `fwd` may change are others than those of the
                function.
        """
        kind, fwd, bwd, positional, options = self.rules_given
        if policy.in_place and (options.get("symbolic_zeros") or any(positional[:1])):
            name = name_of(self, self)
            raise ValueError(
                f"With `symbolic_zeros`, `{name_of(fwd, fwd)}` is not given the arrays in its arguments, so what it "
                f"changes in place cannot be told from what it does not. Set the rules of `{name}` without:\n"
                f"    {name}.defvjp(fwd, bwd)"
            )
        own = {**self.options, "nondiff_argnums": self._after_hand} if self._static else self.options
        self._primal = self.inner_of(policy, self.primal, function)
        vanilla = self.transform(self._primal, **own)
        backward = functools.partial(self._backward, kind == "defvjp_with_logs")
        rules = self.inner_of(policy, self._forward, fwd), self.inner_of(policy, backward, bwd)
        getattr(vanilla, kind)(*rules, *positional, **options)
        return vanilla

    def _forward(self, policy: Policy, fwd: Callable[..., Any], *args: Any) -> Any:
        return self.with_more(policy, fwd, args, lambda inside, residuals: inside.pack(residuals))

    def _backward(self, logs: bool, policy: Policy, bwd: Callable[..., Any], *args: Any) -> Any:
        *static, residuals, cotangent = args
        if policy.in_place:
            _, cotangent = cotangent
        return self.cotangents(policy, bwd, *static, tree_of(residuals), tangents_of(cotangent), logs=logs)


class CustomGradientTransform(RuleTransform):
    """A function under `jax.custom_gradient`, with identities preserved."""

    writes = True
    rules_given = ()

    def with_rules(self, policy: Policy, function: Callable[..., Any]) -> Callable[..., Any]:
        """The vanilla object for one call, on hands."""
        return self.transform(self.inner_of(policy, self._result_and_rule, function), **self.options)

    def _result_and_rule(self, policy: Policy, function: Callable[..., Any], *args: Any) -> Any:
        return self.with_more(policy, function, args, lambda _, rule: self.inner_of(policy, self._backward, rule))

    def _backward(self, policy: Policy, rule: Callable[..., Any], *args: Any) -> Any:
        if policy.in_place:
            ((_, cotangent),) = args
            args = (cotangent,)
        return self.cotangents(policy, rule, *map(tangents_of, args), logs=bool(self.options.get("with_logs")))

    def as_several(self, given: Any, num_operands: int) -> Any:
        """The cotangent of a single operand may be returned itself."""
        return (given,) if num_operands == 1 and not isinstance(given, (tuple, list)) else given


class Summed(list[Any]):
    """Several tangents of one result, which are to be added."""


class CustomJvpTransform(RuleTransform):
    """A function under `jax.custom_jvp`, with identities preserved."""

    def defjvp(self, jvp: Callable[..., Any], *positional: Any, **options: Any) -> Callable[..., Any]:
        """Sets the rule, as `jax.custom_jvp.defjvp` does.

        Args:
            jvp: (a tuple of arguments, a tuple of tangents like them) → (the result, a tangent like it).
            positional: options of `jax.custom_jvp.defjvp`.
            options: likewise.

        Returns:
            The rule.
        """
        self._vanilla.defjvp(jvp, *positional, **options)
        self.rules_given = jvp, positional, options
        return jvp

    def defjvps(self, *jvps: Callable[..., Any] | None) -> None:
        """Sets a rule for each argument, as `jax.custom_jvp.defjvps` does.

        Args:
            jvps: for each argument, (its tangent, the result, the arguments) → a tangent like the result; or None.
        """
        self._vanilla.defjvps(*jvps)

        def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
            result = self(*primals)
            each = zip(jvps, tangents, strict=False)
            return result, Summed([rule(tangent, result, *primals) for rule, tangent in each if rule is not None])

        self.rules_given = jvp, (), {}

    def statics_of(self, call: Call) -> Sequence[Any]:
        """As hands of their own, since JAX rebuilds what is static, to stop the gradient."""
        rules = self.rules(Policy())
        return [whole(*pack(value, Tags(), rules)) for value in call.statics]

    def received(self, args: Sequence[Any]) -> Any:
        """As the base."""
        hand, *static = args
        return super().received([hand, *map(tree_of, static)])

    def with_rules(self, policy: Policy, function: Callable[..., Any]) -> Callable[..., Any]:
        """The vanilla object for one call, on hands."""
        jvp, positional, options = self.rules_given
        own = {**self.options, "nondiff_argnums": self._after_hand} if self._static else self.options
        vanilla = self.transform(self.inner_of(policy, self.primal, function), **own)
        vanilla.defjvp(self.inner_of(policy, self._forward, jvp), *positional, **options)
        return vanilla

    def _forward(self, policy: Policy, jvp: Callable[..., Any], *args: Any) -> Any:
        *static, (primal,), (tangent,) = args
        tangents = tangents_of(tangent, is_gradient=False).args

        def rule(*args: Any) -> Any:
            own = [args[i] for i in self._static]
            others = tuple([x for i, x in enumerate(args) if i not in self._static])
            given = tuple([x for i, x in enumerate(tangents) if i not in self._static])
            return jvp(*own, others, given)

        finish = functools.partial(self._tangent, policy)
        packed = self.with_more(policy, rule, (primal, *static), lambda _, beside: beside)
        if type(packed) is not tuple or type(packed[0]) is not Hand:
            return packed
        return packed[0], finish(packed[0], packed[1])

    def _tangent(self, policy: Policy, result: Hand, given: Any) -> Hand:
        """A tangent of the result, in the hand in which that is."""
        tree = Walked.of_leaves(result.structure, result.leaves)
        fit = self.fit(policy)
        total: list[Any] = []
        for one in given or [None] if type(given) is Summed else [given]:
            found = fitted(tree, one, "tangent", fit).values()
            leaves = [_filled(primal, tangent) for primal, tangent in zip(result.leaves, found, strict=True)]
            total = [_added(*three) for three in zip(result.leaves, total, leaves, strict=True)] if total else leaves
        return Hand(total, result.deal)


class CustomVmapTransform(RuleTransform):
    """A function under `jax.custom_batching.custom_vmap`, with identities preserved."""

    def def_vmap(self, vmap_rule: Callable[..., Any]) -> Callable[..., Any]:
        """Sets the rule, as `jax.custom_batching.custom_vmap.def_vmap` does.

        Args:
            vmap_rule: (the size of the axis, a list of trees like the arguments that say which leaves have it, *the
                arguments) → (the result, a tree like it that says which leaves have the axis).

        Returns:
            The rule.
        """
        self._vanilla.def_vmap(vmap_rule)
        self.rules_given = vmap_rule
        return vmap_rule

    def with_rules(self, policy: Policy, function: Callable[..., Any]) -> Callable[..., Any]:
        """The vanilla object for one call, on hands."""
        vanilla = self.transform(self.inner_of(policy, self.primal, function), **self.options)
        vanilla.def_vmap(self.inner_of(policy, self._batched, self.rules_given))
        return vanilla

    def _batched(self, policy: Policy, rule: Callable[..., Any], size: int, in_batched: Any, hand: Hand) -> Any:
        which = list(tree_of(in_batched[0]).args)

        def on_trees(*args: Any) -> Any:
            return rule(size, which, *args)

        functools.update_wrapper(on_trees, rule, ("__name__", "__qualname__"), ())
        packed = self.with_more(policy, on_trees, (hand,), lambda _, beside: beside)
        if type(packed) is not tuple or type(packed[0]) is not Hand:
            return packed
        return packed[0], self._which(*packed)

    def _which(self, result: Hand, given: Any) -> Hand:
        tree = Walked.of(result.structure)
        found: dict[int, Label] = {}
        for each in labels(given, tree.records, tree.root, lambda part: isinstance(part, bool), "out_batched"):
            if found.setdefault(each.record, each).label is not each.label:
                paths = [jtu.keystr(path) for path in (found[each.record].path, each.path)]
                raise SharingMismatchError(
                    f"A rule of `{self.transform_name}` says of one array that it has the axis and that it has not, at "
                    f"{listed(paths)} of `out_batched`. Say one of them, or undo the tie, as "
                    "`result = sharedtree.untie(result)` does.",
                    tuple(paths),
                )
        return Hand([found[number].label for number in tree.leaf_numbers], result.deal)


def _filled(primal: Any, tangent: Any) -> Any:
    """A tangent, with an array of zeros for None, of the type that JAX asks for."""
    if not is_inexact(primal):
        return np.zeros(jnp.shape(primal), jax.dtypes.float0)
    return jnp.zeros_like(primal) if tangent is None else tangent


def _added(primal: Any, a: Any, b: Any) -> Any:
    return a + b if is_inexact(primal) else a
