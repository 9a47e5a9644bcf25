"""`jax.custom_vjp`, `jax.custom_gradient` and `equinox.filter_custom_vjp`: rules for the reverse mode."""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

from ..._context import Policy
from ..._equinox_internals import name_of
from ..._whole_gradients import noting_whole
from .._differentiated import differentiated
from .._packing import unpack_call
from .._tangents import pack_tangents, unpack_tangents
from .._treatments import Treatment
from ._rules import RuleTransform, has_modules, unpacked


class CustomVjpTransform(RuleTransform):
    """A function under `jax.custom_vjp`, with identities preserved."""

    writes = True

    def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any], *positional: Any, **options: Any) -> None:
        """Sets the rules, as `jax.custom_vjp.defvjp` does.

        Args:
            fwd: the arguments → (the result, residuals); both may hold modules, and keep their ties.
            bwd: (residuals, a cotangent like the result) → a cotangent for each argument, like it or None.
            positional: options of `jax.custom_vjp.defvjp`.
            options: likewise.
        """
        self._vanilla.defvjp(fwd, bwd, *positional, **options)
        self.rules = fwd, bwd, positional, options

    def with_rules(self, policy: Policy, function: Callable[..., Any]) -> Callable[..., Any]:
        """The vanilla object for one call, on packed arguments.

        Raises:
            ValueError: in place, if with `symbolic_zeros` the arrays that `fwd` may change are others than those of the
                function.
        """
        fwd, bwd, positional, options = self.rules
        if policy.in_place and (options.get("symbolic_zeros") or any(positional[:1])):
            name = name_of(self, self)
            raise ValueError(
                f"With `symbolic_zeros`, `{name_of(fwd, fwd)}` is not given the arrays in its arguments, so what it "
                f"changes in place cannot be told from what it does not. Set the rules of `{name}` without:\n"
                f"    {name}.defvjp(fwd, bwd)"
            )
        vanilla = self.transform(self.called(policy, self.primal, function), **self.options)
        rules = self.called(policy, self._forward, fwd), self.called(policy, self._backward, bwd)
        vanilla.defvjp(*rules, *positional, **options)
        return vanilla

    def _forward(self, policy: Policy, fwd: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return self.with_more(policy, fwd, args, kwargs, functools.partial(self.with_residuals, policy, fwd))

    def _backward(self, policy: Policy, bwd: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        *static, residuals, cotangent = args
        if policy.in_place:
            _, cotangent = cotangent
        return self.cotangents(policy, bwd, *static, unpacked(residuals), unpack_tangents(cotangent), **kwargs)


class CustomGradientTransform(RuleTransform):
    """A function under `jax.custom_gradient`, with identities preserved."""

    writes = True
    rules = ()
    gives_one = True

    def check_options(self) -> None:
        """Refuses the options by which a rule is given something else."""
        asked = [name for name, value in self.options.items() if value]
        if asked:
            raise TypeError(
                f"No adapter says what `{self.transform_name}` gives to rules with the option `{asked[0]}`. Leave it "
                "out:\n"
                f"    sharedtree.preserve_identities({self.transform_name})(f)"
            )
        super().check_options()

    def with_rules(self, policy: Policy, function: Callable[..., Any]) -> Callable[..., Any]:
        """The vanilla object for one call, on packed arguments."""
        return self.transform(self.called(policy, self._result_and_rule, function))

    def _result_and_rule(self, policy: Policy, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return self.with_more(
            policy, function, args, kwargs, lambda y, rule: (y, self.called(policy, self._backward, rule))
        )

    def _backward(self, policy: Policy, rule: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if policy.in_place:
            ((_, cotangent),) = args
            args = (cotangent,)
        return self.cotangents(policy, rule, *unpack_tangents(args), **kwargs)


class FilterCustomVjpTransform(RuleTransform):
    """A function under `equinox.filter_custom_vjp`, with identities preserved."""

    _fwd: Any = None
    _bwd: Any = None

    def treatments(self, num_args: int, keywords: Collection[str]) -> Sequence[Treatment]:
        """The first argument is differentiated, the others are not."""
        return (differentiated(lambda position: position == 0),)

    def by_position(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as they are."""
        return args, kwargs

    def def_fwd(self, fwd: Callable[..., Any]) -> None:
        """Sets a rule: (what is perturbed, the arguments) → (the result, residuals)."""
        self._fwd = fwd
        self.rules = None if self._bwd is None else (fwd, self._bwd)

    def def_bwd(self, bwd: Callable[..., Any]) -> None:
        """Sets a rule: (residuals, cotangent, what is perturbed, the arguments) → a cotangent of the first argument."""
        self._bwd = bwd
        self.rules = None if self._fwd is None else (self._fwd, bwd)

    def with_rules(self, policy: Policy, function: Callable[..., Any]) -> Callable[..., Any]:
        """The vanilla object for one call, on packed arguments."""
        fwd, bwd = self.rules
        vanilla = self.transform(self.called(policy, self.primal, function))
        vanilla.def_fwd(self.called(policy, self._forward, fwd))
        vanilla.def_bwd(self.called(policy, self._backward, bwd))
        return vanilla

    def _forward(self, policy: Policy, fwd: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        perturbed, *operands = args
        rule = functools.partial(fwd, unpack_tangents(perturbed, False))
        return self.with_more(policy, rule, operands, kwargs, functools.partial(self.with_residuals, policy, fwd))

    def _backward(self, policy: Policy, bwd: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        residuals, cotangent, perturbed, *operands = args
        entered = unpack_call(operands, kwargs, ())
        before = unpacked(residuals), unpack_tangents(cotangent), unpack_tangents(perturbed, False)
        with noting_whole() as whole:
            given = bwd(*before, *entered.args, **entered.kwargs)
        operand, fit = operands[0], self.fit(policy, whole)
        return pack_tangents(operand, given, "cotangent", fit) if has_modules(operand) else given
