"""`jax.custom_jvp` and `equinox.filter_custom_jvp`: rules for the forward mode."""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util as jtu

from ..._context import Policy
from ..._graph import Tags
from ..._ties import is_inexact
from .._differentiated import differentiated
from .._packing import Call, pack_tree
from .._tangents import pack_tangents, unpack_tangents
from .._treatments import Treatment
from ._rules import RuleTransform, has_modules, unpacked


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
        self.rules = jvp, positional, options
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

        self.rules = jvp, (), {}

    def pack(self, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy) -> Call:
        """As the base. JAX rebuilds what is static, to stop the gradient, so that it is packed, too, on its own."""
        call = super().pack(args, kwargs, policy)
        packed = [
            pack_tree(x, Tags(), policy.rules, self.names.text(i)) if i in self._static else x
            for i, x in enumerate(call.args)
        ]
        return call._replace(args=tuple(packed))

    def call_inside(self, policy: Policy, function: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
        """As the base, with what is static unpacked."""

        def with_static(*args: Any, **kwargs: Any) -> Any:
            return function(*[unpacked(x) if i in self._static else x for i, x in enumerate(args)], **kwargs)

        return super().call_inside(policy, with_static, args, kwargs)

    def with_rules(self, policy: Policy, function: Callable[..., Any]) -> Callable[..., Any]:
        """The vanilla object for one call, on packed arguments."""
        jvp, positional, options = self.rules
        vanilla = self.transform(self.called(policy, self.primal, function), **self.options)
        vanilla.defjvp(self.called(policy, self._forward, jvp), *positional, **options)
        return vanilla

    def _forward(self, policy: Policy, jvp: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        *static, primals, tangents = args
        everything = list(primals)
        for i, value in zip(self._static, static, strict=True):
            everything.insert(i, value)

        def rule(*args: Any) -> Any:
            own = [args[i] for i in self._static]
            others = [x for i, x in enumerate(args) if i not in self._static]
            return jvp(*own, type(primals)(others), unpack_tangents(tangents), **kwargs)

        return self.with_more(policy, rule, everything, {}, functools.partial(self._with_tangent, policy, jvp))

    def _with_tangent(self, policy: Policy, jvp: Callable[..., Any], result: Any, tangent: Any) -> Any:
        result = self.as_returned(policy, result, jvp)
        if type(tangent) is not Summed:
            if not has_modules(result):
                return result, tangent
            tangent = [tangent]
        fit = self.fit(policy)
        each = [jtu.tree_map(_filled, result, pack_tangents(result, x, "tangent", fit)) for x in tangent or [None]]
        return result, functools.reduce(lambda a, b: jtu.tree_map(_added, result, a, b), each)


class FilterCustomJvpTransform(RuleTransform):
    """A function under `equinox.filter_custom_jvp`, with identities preserved."""

    def treatments(self, num_args: int, keywords: Collection[str]) -> Sequence[Treatment]:
        """Keyword arguments are not differentiated."""
        return (differentiated(lambda position: isinstance(position, int)),)

    def by_position(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as they are."""
        return args, kwargs

    def def_jvp(self, jvp: Callable[..., Any]) -> None:
        """Sets the rule: (a tuple of arguments, their tangents, keyword arguments) → (the result, its tangent)."""
        self.rules = jvp

    def with_rules(self, policy: Policy, function: Callable[..., Any]) -> Callable[..., Any]:
        """The vanilla object for one call, on packed arguments."""
        vanilla = self.transform(self.called(policy, self.primal, function))
        vanilla.def_jvp(self.called(policy, self._forward, self.rules))
        return vanilla

    def _forward(self, policy: Policy, jvp: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        primals, tangents = args

        def rule(*args: Any, **kwargs: Any) -> Any:
            return jvp(args, unpack_tangents(tangents), **kwargs)

        return self.with_more(policy, rule, primals, kwargs, functools.partial(self._with_tangent, policy, jvp))

    def _with_tangent(self, policy: Policy, jvp: Callable[..., Any], result: Any, tangent: Any) -> Any:
        result = self.as_returned(policy, result, jvp)
        if not has_modules(result):
            return result, tangent
        return result, pack_tangents(result, tangent, "tangent", self.fit(policy))


def _filled(primal: Any, tangent: Any) -> Any:
    """A tangent, with an array of zeros for None, of the type that JAX asks for."""
    if not is_inexact(primal):
        return np.zeros(jnp.shape(primal), jax.dtypes.float0)
    return jnp.zeros_like(primal) if tangent is None else tangent


def _added(primal: Any, a: Any, b: Any) -> Any:
    return a + b if is_inexact(primal) else a
