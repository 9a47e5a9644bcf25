"""What each of JAX's transforms with rules hands to these, and takes from them."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util as jtu

from ..core._errors import SharingMismatchError
from ..core._pack_and_unpack import Tags, pack
from ..core._prefix_trees import Label, labels
from ..core._printing import listed
from ..core._structure import FlatDag
from ..ties._list_ties import is_inexact
from ..ties._policy_and_context import Policy
from ._adapter_names import VANILLA_CUSTOM_JVP, VANILLA_CUSTOM_VJP
from ._caller_side import Call
from ._derivative_rules import RuleTransform, returning, tree_of
from ._joining_trees import holds_modules
from ._leaf_groups import LeafGroup, tangents_of, whole
from ._option_lists import lists_options_of
from ._tangents import fitted


class CustomVjpTransform(RuleTransform):
    """A function under `jax.custom_vjp`, with identities preserved."""

    unknown_methods = frozenset({"defvjp_with_logs", "defvjp_with_accums", "defremat", "defremat_with_logs"})

    @lists_options_of(VANILLA_CUSTOM_VJP.defvjp)
    def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any], *positional: Any, **options: Any) -> None:
        """Sets the rules, as `jax.custom_vjp.defvjp` does.

        Args:
            fwd: the arguments → (the result, residuals); both may hold modules, and keep their ties.
            bwd: (residuals, a cotangent like the result) → a cotangent for each argument, like it or None.
            positional: options of `jax.custom_vjp.defvjp`.
            options: likewise.
        """
        self._vanilla.defvjp(fwd, bwd, *positional, **options)
        self.rules_given = fwd, bwd, positional, options

    def with_rules(self, policy: Policy, function: Callable[..., Any]) -> Callable[..., Any]:
        """The vanilla object for one call, on groups."""
        fwd, bwd, positional, options = self.rules_given
        own = {**self.options, "nondiff_argnums": self._after_hand} if self._static else self.options
        self._primal = self.inner_of(policy, self.primal, function)
        vanilla = self.transform(self._primal, **own)
        rules = self.inner_of(policy, self._forward, fwd), self.inner_of(policy, self._backward, bwd)
        vanilla.defvjp(*rules, *positional, **options)
        return vanilla

    def _forward(self, policy: Policy, fwd: Callable[..., Any], *args: Any) -> Any:
        return self.with_more(policy, fwd, args, lambda inside, residuals: inside.pack(residuals))

    def _backward(self, policy: Policy, bwd: Callable[..., Any], *args: Any) -> Any:
        *static, residuals, cotangent = args
        return self.cotangents(policy, bwd, *static, tree_of(residuals), tangents_of(cotangent))


class CustomGradientTransform(RuleTransform):
    """A function under `jax.custom_gradient`, with identities preserved."""

    rules_given = ()

    def check_options(self) -> None:
        """Refuses the options of newer JAX under which a rule gets or returns something else.

        Raises:
            TypeError: if one of them is given.
        """
        super().check_options()  # first, for JAX knows best which options it has
        for name in ("with_logs", "remat", "with_accums"):
            option = self.options.get(name)
            if option:
                raise self.unknown_rules(f"the rules that it takes with `{name}`", f", {name}={option!r}")

    def with_rules(self, policy: Policy, function: Callable[..., Any]) -> Callable[..., Any]:
        """The vanilla object for one call, on groups."""
        return self.transform(self.inner_of(policy, self._result_and_rule, function), **self.options)

    def _result_and_rule(self, policy: Policy, function: Callable[..., Any], *args: Any) -> Any:
        return self.with_more(policy, function, args, lambda _, rule: self.inner_of(policy, self._backward, rule))

    def _backward(self, policy: Policy, rule: Callable[..., Any], *args: Any) -> Any:
        return self.cotangents(policy, rule, *map(tangents_of, args))

    def as_several(self, given: Any, num_operands: int) -> Any:
        """The cotangent of a single operand may be returned itself."""
        return (given,) if num_operands == 1 and not isinstance(given, (tuple, list)) else given


class Summed(list[Any]):
    """Several tangents of one result, which are to be added."""


class CustomJvpTransform(RuleTransform):
    """A function under `jax.custom_jvp`, with identities preserved."""

    @lists_options_of(VANILLA_CUSTOM_JVP.defjvp)
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
        """As groups of their own, since JAX rebuilds what is static, to stop the gradient."""
        rules = self.rules(Policy())
        return [whole(*pack(value, Tags(), rules)) for value in call.statics]

    def received(self, args: Sequence[Any]) -> Any:
        """As the base."""
        group, *static = args
        return super().received([group, *map(tree_of, static)])

    def with_rules(self, policy: Policy, function: Callable[..., Any]) -> Callable[..., Any]:
        """The vanilla object for one call, on groups."""
        jvp, positional, options = self.rules_given
        own = {**self.options, "nondiff_argnums": self._after_hand} if self._static else self.options
        self._primal = self.inner_of(policy, self.primal, function)
        vanilla = self.transform(self._primal, **own)
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

        packed = self.with_more(policy, rule, (primal, *static), lambda _, beside: beside)
        if type(packed) is not tuple or type(packed[0]) is not LeafGroup:
            return packed
        result, given = packed
        if type(given) is not Summed:
            self._refuse_tangent_as_jax(jvp, result, given)
        return result, self._tangent(policy, result, given)

    def _refuse_tangent_as_jax(self, jvp: Callable[..., Any], result: LeafGroup, given: Any) -> None:
        """Raises what JAX says of a tangent of another structure, where there is nothing that it does not know."""
        if self._primal is None or holds_modules(FlatDag.of_leaves(result.structure, result.leaves)):
            return
        value = tree_of(result)
        if jtu.tree_structure(given) != jtu.tree_structure(value):
            ruled = VANILLA_CUSTOM_JVP(returning(self._primal.function, value))
            ruled.defjvp(returning(jvp, (value, given)))
            jax.eval_shape(lambda: jax.jvp(ruled, (0.0,), (0.0,)))

    def _tangent(self, policy: Policy, result: LeafGroup, given: Any) -> LeafGroup:
        """A tangent of the result, in the group in which that is."""
        tree = FlatDag.of_leaves(result.structure, result.leaves)
        fit = self.fit(policy)
        total: list[Any] = []
        for one in given or [None] if type(given) is Summed else [given]:
            found = fitted(tree, one, "tangent", fit).values()
            leaves = [_filled(primal, tangent) for primal, tangent in zip(result.leaves, found, strict=True)]
            total = [_added(*three) for three in zip(result.leaves, total, leaves, strict=True)] if total else leaves
        return LeafGroup(total, result.selection)


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
        """The vanilla object for one call, on groups."""
        vanilla = self.transform(self.inner_of(policy, self.primal, function), **self.options)
        vanilla.def_vmap(self.inner_of(policy, self._batched, self.rules_given))
        return vanilla

    def _batched(self, policy: Policy, rule: Callable[..., Any], size: int, in_batched: Any, group: LeafGroup) -> Any:
        which = list(tree_of(in_batched[0]).args)

        def on_trees(*args: Any) -> Any:
            return rule(size, which, *args)

        functools.update_wrapper(on_trees, rule, ("__name__", "__qualname__"), ())
        packed = self.with_more(policy, on_trees, (group,), lambda _, beside: beside)
        if type(packed) is not tuple or type(packed[0]) is not LeafGroup:
            return packed
        return packed[0], self._which(*packed)

    def _which(self, result: LeafGroup, given: Any) -> LeafGroup:
        tree = FlatDag.of(result.structure)
        found: dict[int, Label] = {}
        for each in labels(given, tree, lambda part: isinstance(part, bool), "out_batched"):
            if found.setdefault(each.record, each).label is not each.label:
                paths = [jtu.keystr(path) for path in (found[each.record].path, each.path)]
                raise SharingMismatchError(
                    f"A rule of `{self.transform_name}` says of one array that it has the axis and that it has not, at "
                    f"{listed(paths)} of `out_batched`. Say one of them, or undo the tie, as "
                    "`result = sharedtree.untie(result)` does.",
                    tuple(paths),
                )
        return LeafGroup([found[number].label for number in tree.leaf_numbers], result.selection)


def _filled(primal: Any, tangent: Any) -> Any:
    """A tangent, with an array of zeros for None, of the type that JAX asks for."""
    if not is_inexact(primal):
        return np.zeros(jnp.shape(primal), jax.dtypes.float0)
    return jnp.zeros_like(primal) if tangent is None else tangent


def _added(primal: Any, a: Any, b: Any) -> Any:
    return a + b if is_inexact(primal) else a
