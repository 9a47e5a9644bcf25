"""Adapters of JAX's transforms with rules: arguments and results of the rules of each."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util as jtu

from ..core._errors import SharingMismatchError
from ..core._flat_dags import FlatDag
from ..core._pack_and_unpack import Tags, pack
from ..core._prefix_trees import Label, labels
from ..core._printing import listed
from ..ties._list_ties import is_inexact
from ..ties._policy_and_context import Policy
from ._adapter_names import VANILLA_CUSTOM_JVP, VANILLA_CUSTOM_VJP
from ._caller_side import Call
from ._derivative_rules import RuleTransform, returning, tree_of
from ._joining_trees import holds_modules
from ._leaf_groups import LeafGroup, tangents_of, whole
from ._option_lists import lists_options_of
from ._tangents import fit_to_leaves


class CustomVjpTransform(RuleTransform):
    """A function under `jax.custom_vjp`, with identities preserved."""

    unknown_methods = frozenset({"defvjp_with_logs", "defvjp_with_accums", "defremat", "defremat_with_logs"})

    @lists_options_of(VANILLA_CUSTOM_VJP.defvjp)
    def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any], *positional: Any, **options: Any) -> None:
        """Sets the rules, as `jax.custom_vjp.defvjp` does.

        Args:
            fwd: the arguments → (the result, residuals). Both may hold modules, and keep their ties.
            bwd: (residuals, cotangent of the result) → a cotangent for each argument, in its shape or None.
            positional: options of `jax.custom_vjp.defvjp`, by position.
            options: options of `jax.custom_vjp.defvjp`, by name.
        """
        self._vanilla.defvjp(fwd, bwd, *positional, **options)
        self.rules_given = fwd, bwd, positional, options

    def with_rules(self, policy: Policy, function: Callable[..., Any]) -> Callable[..., Any]:
        """Makes an object of `jax.custom_vjp`, with both of its rules."""
        fwd, bwd, positional, options = self.rules_given
        transform_options = (
            {**self.options, "nondiff_argnums": self._positions_of_statics} if self._static else self.options
        )
        self._primal = self.inner_of(policy, self.primal, function)
        vanilla = self.transform(self._primal, **transform_options)
        rules = self.inner_of(policy, self._forward, fwd), self.inner_of(policy, self._backward, bwd)
        vanilla.defvjp(*rules, *positional, **options)
        return vanilla

    def _forward(self, policy: Policy, fwd: Callable[..., Any], *args: Any) -> Any:
        return self.packed_result(policy, fwd, args, lambda inside, residuals: inside.pack(residuals))

    def _backward(self, policy: Policy, bwd: Callable[..., Any], *args: Any) -> Any:
        *static, residuals, cotangent = args
        return self.cotangents(policy, bwd, *static, tree_of(residuals), tangents_of(cotangent))


class CustomGradientTransform(RuleTransform):
    """A function under `jax.custom_gradient`, with identities preserved.

    The function returns its rule beside its result, so no method sets rules.
    """

    rules_given = ()

    def check_options(self) -> None:
        """Refuses the options of newer JAX that give a rule other arguments or another result.

        Raises:
            TypeError: if there is such an option.
        """
        # First, since JAX knows best which options it has.
        super().check_options()
        for name in ("with_logs", "remat", "with_accums"):
            option = self.options.get(name)
            if option:
                raise self.unknown_rules(f"the rules that it takes with `{name}`", f", {name}={option!r}")

    def with_rules(self, policy: Policy, function: Callable[..., Any]) -> Callable[..., Any]:
        """Makes a function under `jax.custom_gradient`. Its rule comes with each result."""
        return self.transform(self.inner_of(policy, self._result_and_rule, function), **self.options)

    def _result_and_rule(self, policy: Policy, function: Callable[..., Any], *args: Any) -> Any:
        return self.packed_result(policy, function, args, lambda _, rule: self.inner_of(policy, self._backward, rule))

    def _backward(self, policy: Policy, rule: Callable[..., Any], *args: Any) -> Any:
        return self.cotangents(policy, rule, *map(tangents_of, args))

    def as_several(self, result: Any, num_operands: int) -> Any:
        """Wraps the cotangent of a single operand in a tuple. Under this transform, rules may return it bare."""
        return (result,) if num_operands == 1 and not isinstance(result, (tuple, list)) else result


class Summands(list[Any]):
    """Tangents of one result, one from each rule of `defvjps`. Their sum is its tangent."""


class CustomJvpTransform(RuleTransform):
    """A function under `jax.custom_jvp`, with identities preserved."""

    @lists_options_of(VANILLA_CUSTOM_JVP.defjvp)
    def defjvp(self, jvp: Callable[..., Any], *positional: Any, **options: Any) -> Callable[..., Any]:
        """Sets the rule, as `jax.custom_jvp.defjvp` does.

        Args:
            jvp: (tuple of arguments, tuple of tangents in their shapes) → (the result, a tangent in its shape).
            positional: options of `jax.custom_jvp.defjvp`, by position.
            options: options of `jax.custom_jvp.defjvp`, by name.

        Returns:
            The rule.
        """
        self._vanilla.defjvp(jvp, *positional, **options)
        self.rules_given = jvp, positional, options
        return jvp

    def defjvps(self, *jvps: Callable[..., Any] | None) -> None:
        """Sets a rule for each argument, as `jax.custom_jvp.defjvps` does.

        Args:
            jvps: for each argument, (its tangent, the result, the arguments) → a tangent of the result; or None.
        """
        self._vanilla.defjvps(*jvps)

        def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
            result = self(*primals)
            # JAX allows fewer rules than arguments.
            pairs = zip(jvps, tangents, strict=False)
            return result, Summands([rule(tangent, result, *primals) for rule, tangent in pairs if rule is not None])

        self.rules_given = jvp, (), {}

    def statics_of(self, call: Call) -> Sequence[Any]:
        """Packs each argument in `nondiff_argnums` into a leaf group.

        JAX flattens and rebuilds these arguments to stop the gradient, which would lose their ties.
        """
        rules = self.rules(Policy())
        return [whole(*pack(value, Tags(), rules)) for value in call.statics]

    def received(self, args: Sequence[Any]) -> Any:
        """Unpacks the arguments in `nondiff_argnums` too."""
        group, *static = args
        return super().received([group, *map(tree_of, static)])

    def with_rules(self, policy: Policy, function: Callable[..., Any]) -> Callable[..., Any]:
        """Makes an object of `jax.custom_jvp`, with its rule."""
        jvp, positional, options = self.rules_given
        transform_options = (
            {**self.options, "nondiff_argnums": self._positions_of_statics} if self._static else self.options
        )
        self._primal = self.inner_of(policy, self.primal, function)
        vanilla = self.transform(self._primal, **transform_options)
        vanilla.defjvp(self.inner_of(policy, self._forward, jvp), *positional, **options)
        return vanilla

    def _forward(self, policy: Policy, jvp: Callable[..., Any], *args: Any) -> Any:
        """Calls the user's rule for JAX: (*static arguments, (primals,), (tangents,)) → (result, its tangent)."""
        *static, (primal,), (tangent,) = args
        all_tangents = tangents_of(tangent, is_gradient=False).args

        def rule(*args: Any) -> Any:
            """Calls the user's rule with static arguments first, as JAX does."""
            statics = [args[i] for i in self._static]
            primals = tuple([arg for i, arg in enumerate(args) if i not in self._static])
            tangents = tuple([arg for i, arg in enumerate(all_tangents) if i not in self._static])
            return jvp(*statics, primals, tangents)

        packed = self.packed_result(policy, rule, (primal, *static), lambda _, tangent_out: tangent_out)
        if type(packed) is not tuple or type(packed[0]) is not LeafGroup:
            # No pair. JAX itself says best what is wrong.
            return packed
        result, tangent_out = packed
        if type(tangent_out) is not Summands:
            self._refuse_tangent_as_jax(jvp, result, tangent_out)
        return result, self._pack_tangent(policy, result, tangent_out)

    def _refuse_tangent_as_jax(self, jvp: Callable[..., Any], result: LeafGroup, tangent: Any) -> None:
        """Raises JAX's own error for a tangent of another structure. Returns if there are modules, unknown to JAX."""
        if self._primal is None or holds_modules(FlatDag.of_leaves(result.structure, result.leaves)):
            return
        value = tree_of(result)
        if jtu.tree_structure(tangent) != jtu.tree_structure(value):
            vanilla = VANILLA_CUSTOM_JVP(returning(self._primal.function, value))
            vanilla.defjvp(returning(jvp, (value, tangent)))
            jax.eval_shape(lambda: jax.jvp(vanilla, (0.0,), (0.0,)))

    def _pack_tangent(self, policy: Policy, result: LeafGroup, tangent: Any) -> LeafGroup:
        """Packs a tangent of the result, or the sum of several, into the leaf group of the result."""
        tree = FlatDag.of_leaves(result.structure, result.leaves)
        fit = self.fit(policy)
        total: list[Any] = []
        # Without a single rule the sum is empty, and the tangent zero.
        for summand in tangent or [None] if type(tangent) is Summands else [tangent]:
            tangents = fit_to_leaves(tree, summand, "tangent", fit).values()
            leaves = [_tangent_or_zeros(primal, leaf) for primal, leaf in zip(result.leaves, tangents, strict=True)]
            if total:
                total = [_add_tangents(*triple) for triple in zip(result.leaves, total, leaves, strict=True)]
            else:
                total = leaves
        return LeafGroup(total, result.selection)


class CustomVmapTransform(RuleTransform):
    """A function under `jax.custom_batching.custom_vmap`, with identities preserved."""

    def def_vmap(self, vmap_rule: Callable[..., Any]) -> Callable[..., Any]:
        """Sets the rule, as `jax.custom_batching.custom_vmap.def_vmap` does.

        Args:
            vmap_rule: (size of the axis, list with a tree of booleans for each argument, *arguments) → (the result, a
                tree of booleans in its shape). True marks a leaf that has the axis.

        Returns:
            The rule.
        """
        self._vanilla.def_vmap(vmap_rule)
        self.rules_given = vmap_rule
        return vmap_rule

    def with_rules(self, policy: Policy, function: Callable[..., Any]) -> Callable[..., Any]:
        """Makes an object of `custom_vmap`, with its rule."""
        vanilla = self.transform(self.inner_of(policy, self.primal, function), **self.options)
        vanilla.def_vmap(self.inner_of(policy, self._batched, self.rules_given))
        return vanilla

    def _batched(self, policy: Policy, rule: Callable[..., Any], size: int, in_batched: Any, group: LeafGroup) -> Any:
        """Calls the user's rule for JAX, with leaf groups of booleans in `in_batched` and in the result."""
        in_batched_trees = list(tree_of(in_batched[0]).args)

        def rule_of_arguments(*args: Any) -> Any:
            return rule(size, in_batched_trees, *args)

        functools.update_wrapper(rule_of_arguments, rule, ("__name__", "__qualname__"), ())
        packed = self.packed_result(policy, rule_of_arguments, (group,), lambda _, out_batched: out_batched)
        if type(packed) is not tuple or type(packed[0]) is not LeafGroup:
            # No pair. JAX itself says best what is wrong.
            return packed
        return packed[0], self._pack_out_batched(*packed)

    def _pack_out_batched(self, result: LeafGroup, out_batched: Any) -> LeafGroup:
        """Packs the booleans that a rule returned into the leaf group of its result.

        Raises:
            SharingMismatchError: if the paths of a tied leaf have different booleans.
        """
        tree = FlatDag.of(result.structure)
        label_of: dict[int, Label] = {}
        for label in labels(out_batched, tree, lambda part: isinstance(part, bool), "out_batched"):
            if label_of.setdefault(label.record, label).label is not label.label:
                paths = [jtu.keystr(path) for path in (label_of[label.record].path, label.path)]
                raise SharingMismatchError(
                    f"A rule of `{self.transform_name}` says of one array that it has the axis and that it has not, at "
                    f"{listed(paths)} of `out_batched`. Say one of them, or undo the tie, as "
                    "`result = sharedtree.untie(result)` does.",
                    tuple(paths),
                )
        return LeafGroup([label_of[number].label for number in tree.leaf_numbers], result.selection)


def _tangent_or_zeros(primal: Any, tangent: Any) -> Any:
    """Returns a tangent, with zeros in place of None. JAX wants float0 zeros for leaves that are not inexact."""
    if not is_inexact(primal):
        return np.zeros(jnp.shape(primal), jax.dtypes.float0)
    return jnp.zeros_like(primal) if tangent is None else tangent


def _add_tangents(primal: Any, a: Any, b: Any) -> Any:
    """Adds two tangents of a leaf. Float0 arrays, those of leaves that are not inexact, cannot be added."""
    return a + b if is_inexact(primal) else a
