"""`jax.custom_vjp`, `jax.custom_jvp`, `jax.custom_gradient`: functions with rules for their derivatives.

The function and its rules take and return modules, with ties. What they hand to each other through JAX are groups:

    f(Pair(w, w), x)                  JAX sees    f(LeafGroup([w, x]))
    fwd(Pair(w, w), x) → y, Net(a)                fwd(LeafGroup([w, x])) → y, LeafGroup([a])
    bwd(Net(a), dy) → Pair(d, e), dx              bwd(LeafGroup([a]), dy) → (LeafGroup([d + e, dx]),)

A rule may be called long after the call that it belongs to, and by another one's derivative. So the vanilla object is
made anew for each call, and its rules know the structures of that call, but hold none of its arrays.
"""

import copy
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn, Self

import jax
import numpy as np

from ..core._call_arguments import Arguments, Position
from ..core._errors import SharingMismatchError
from ..core._pack_and_unpack import unpack, walked
from ..core._structure import FlatDag, Structure
from ..libraries._equinox import name_of
from ..ties._leaf_notes import note_tied, noting_whole
from ..ties._policy_and_context import Policy
from ._adapter_names import VANILLA_CUSTOM_VJP
from ._argument_names import Names
from ._caller_side import Call, leave
from ._function_and_options import How, in_code
from ._function_given_to_jax import Inner
from ._function_side import Inside
from ._function_transform import FunctionTransform
from ._joining_trees import Sides, holds_modules, join
from ._leaf_groups import LeafGroup, whole
from ._option_lists import public_name
from ._tangents import Fit, as_tuple, fitted
from .checks._ties_lost_in_calls import report_lost_ties, ties_lost_between


class RuleTransform(FunctionTransform):
    """A function with rules, with identities preserved. The rules come later, by methods."""

    takes_rules = True
    rules_given: Any = None
    """As the transform's own methods take them; None until they are there."""
    unknown_methods: frozenset[str] = frozenset()
    """Methods of the transform of which nobody knows what they hand to rules."""

    writes = False

    _operands: FlatDag
    _primal: Inner | None = None
    _returned: Structure | None

    def _made_alike(self) -> How | None:
        """Nothing: two objects of one function may have two rules."""
        return None

    def check_options(self) -> None:
        """Applies the transform, which also refuses to be called without rules as it always does."""
        self._vanilla = self.transform(self.function, **self.options)
        # Under `jax_custom_vjp3` JAX 0.10 makes an object of another class, which calls them by another name.
        static = getattr(self._vanilla, "nondiff_argnums", None) or getattr(self._vanilla, "static_argnums", ())
        self._static = tuple(sorted(static))

    def __getattr__(self, name: str) -> Any:
        """What sets rules of another kind on the function itself, as that of `jax.custom_batching.custom_vmap` does."""
        if not name.startswith("def") or "_vanilla" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        found = getattr(self._vanilla, name)
        if name in self.unknown_methods:
            raise self.unknown_rules(f"the rules that `{name}` sets")
        return found

    def unknown_rules(self, rules: str, option: str = "") -> TypeError:
        """The error for rules that are handed, or return, something else than those that this class knows.

        Args:
            rules: which rules, in words.
            option: of the transform, as code that follows the function; empty if a method sets them.
        """
        vanilla = public_name(self.transform) or "jax.custom_vjp"
        return TypeError(
            f"`{self.transform_name}` has no adapter for {rules}.\n"
            "They are handed something else than a cotangent, or return more. Give them to a function of a "
            "`sharedtree.Dag`, which every transform takes as it is (docs/transforms.md, “Transforms that need no "
            "adapter”):\n"
            f"    f_of_dag = {vanilla}(lambda dag: f(dag.tree){option})"
        )

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
        if policy.in_place:
            raise ValueError(
                f"`{self.transform_name}` writes nothing back.\n"
                "Its rules say how the result of the function is differentiated, and not what else it changes. Return "
                "what changes, and leave the arguments as they are:\n"
                f"    f = {in_code(self.transform_name, 'in_place=False', 'f')}"
            )
        args, kwargs = self._by_position(tuple(args), kwargs)
        with self.enter(args, kwargs, policy) as call:
            one = self._for_one_call(call)
            return leave((one.with_rules(policy, self.function)(*call.groups, *self.statics_of(call)),))

    def statics_of(self, call: Call) -> Sequence[Any]:
        """The arguments that are not differentiated, as JAX gets them."""
        return call.statics

    def _for_one_call(self, call: Call) -> Self:
        """This, for the rules of one call to refer to."""
        one = self._without_function()
        types = [_type_of(leaf) for leaf in call.tree.leaves.values()]
        one._operands = FlatDag.of_leaves(call.tree.structure, types)  # pyright: ignore[reportArgumentType]
        one._returned = None
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
        """The vanilla object for one call, on groups."""
        raise NotImplementedError

    @property
    def _after_hand(self) -> tuple[int, ...]:
        return tuple(range(1, 1 + len(self._static)))

    # What becomes of each function --------------------------------------------------------------------------------

    def inner_of(self, policy: Policy, how: Callable[..., Any], function: Callable[..., Any]) -> Inner:
        """What JAX sees of the function or a rule: calls `how(policy, function, *args)`."""
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
            args: groups, and what is static.
            finish: (the trace, what is beside the result) → what JAX gets of that; None if it is the function. If a
                rule returns no pair, JAX gets that, for it says best what is wrong.
        """
        inside, result = self.run(policy, rule, args, returns_pair=finish is not None)
        beside = None
        if finish is not None:
            if not isinstance(result, (tuple, list)) or len(result) != 2:
                return result
            result, beside = result
        tree = inside.walked(result)
        inside.check_walked(tree)
        packed = inside.pack(result)
        if finish is None:
            self._returned = packed.structure
            return packed
        return self._as_returned(packed, rule), finish(inside, beside)

    def _as_returned(self, packed: LeafGroup, rule: Callable[..., Any]) -> LeafGroup:
        """The packed result of a rule, in the shape of that of the function.

        Raises:
            SharingMismatchError: if they differ in shape, static values or ties.
        """
        returned = self._returned
        if returned is None or returned is packed.structure:
            return packed
        one, two = (f"in what `{name}` returns" for name in (name_of(self, self), name_of(rule, rule)))
        before = FlatDag.of(returned, [None] * len(returned.records))
        after = FlatDag.of(packed.structure, [None] * len(packed.structure.records))
        above = (_Result(),)
        join(before, after, Sides(self.transform_name, one, two), above, exact=True)
        join(after, before, Sides(self.transform_name, two, one), above, exact=True)
        return whole(packed.leaves, returned)

    def cotangents(self, policy: Policy, rule: Callable[..., Any], *args: Any) -> Any:
        """What a rule gives for the operands, in the group in which they came.

        Raises:
            SharingMismatchError: if they are not as many, differ in shape, or one object is at two paths of a tie.
        """
        operands = as_tuple(self._operands)
        num_operands = len(operands.records[operands.root][1])
        with noting_whole() as found:
            # The cotangents that come in are ours: of a tie, each is whole, and so it stays if it is handed on.
            received = walked(Arguments(Names(rule).of(len(args)), args, {}), self.rules(policy))
            cotangents = received.child(len(args) - 1)  # what comes before are residuals
            leaves = [received.leaves[number] for number in cotangents.leaf_numbers]
            note_tied(cotangents, leaves)
            given = rule(*args)
        given = self.as_several(given, num_operands)
        if not isinstance(given, (tuple, list)) or len(given) != num_operands:
            self._refuse_as_jax(rule, given)
            what = f"{len(given)} values" if isinstance(given, (tuple, list)) else f"a `{type(given).__name__}`"
            raise SharingMismatchError(
                f"`{name_of(rule, rule)}` returned {what} for the {num_operands} operands of `{name_of(self, self)}` "
                "that are differentiated. It returns a tuple with one cotangent for each, None where that is zero:\n"
                "    return (cotangent, None)"
            )
        fit = self.fit(policy, whole=found, adds_up=True)
        try:
            leaves = list(fitted(operands, tuple(given), "cotangents", fit).values())
        except SharingMismatchError:
            self._refuse_as_jax(rule, given)
            raise
        if any(np.shape(leaf) != np.shape(own) for leaf, own in zip(leaves, operands.leaves.values(), strict=True)):
            self._refuse_as_jax(rule, given)
        # What the rule made of a tied cotangent path by path is added up, and may be the whole at each of them.
        lost = ties_lost_between(cotangents, walked(tuple(given), self.rules(policy)), policy)
        report_lost_ties((), lost, policy, Names(rule))
        return (whole(leaves, self._operands.structure),)  # pyright: ignore[reportArgumentType]

    def _refuse_as_jax(self, rule: Callable[..., Any], given: Any) -> None:
        """Raises what JAX says of cotangents that do not fit, where there is nothing that it does not know."""
        if self._primal is None or holds_modules(self._operands):
            return
        # JAX traces the function anew, or even calls it (`jax_custom_vjp3`), so it gets one that only looks like it.
        ruled = VANILLA_CUSTOM_VJP(returning(self._primal.function, 0.0))
        ruled.defvjp(lambda *args: (0.0, None), returning(rule, given))
        own = unpack(self._operands.structure, list(self._operands.leaves.values()))
        operands = [arg for name, arg in zip(own.names, own.args, strict=True) if name is not None]
        jax.eval_shape(lambda *args: jax.vjp(ruled, *args)[1](0.0), *operands)

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

    def run(
        self, policy: Policy, function: Callable[..., Any], args: Sequence[Any], *, returns_pair: bool = False
    ) -> tuple[Inside, Any]:
        """Calls a function with what was received.

        Args:
            policy: what counts as sharing.
            function: the function or a rule.
            args: groups, and what is static.
            returns_pair: whether it returns a pair, of which callers get the first only.
        """
        received = self.received(args)
        inside = Inside(self.terms(policy), function)
        own = received.arguments
        return inside, inside.call_with(received, own.args, own.kwargs, returns_pair=returns_pair)


def returning(function: Callable[..., Any], value: Any) -> Inner:
    """A function that looks like another one, and returns a value whatever it is called with."""
    return Inner(function, lambda: function, lambda *_: value)


class _Result:
    def __str__(self) -> str:
        return "result"


def _type_of(leaf: Any) -> Any:
    """What is kept of an operand. What is no array is a number, or JAX will refuse it."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if hasattr(leaf, "shape") else leaf


def tree_of(group: LeafGroup) -> Any:
    """What a group was made from, put together."""
    return unpack(group.structure, group.leaves)
