"""`jax.grad`, `jax.value_and_grad`, Jacobians, and their Equinox counterparts.

Of a module in a differentiated argument only the inexact traced leaves are handed to the transform; the others go
around it. The gradient is a module of the same shape and sharing, with `None` for whatever has no gradient; a Jacobian
is what the function returned, with such a module in place of each leaf.
"""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util as jtu

from .._context import Policy, current_policy
from .._node_types import is_traced
from .._packed import Packed
from .._ties import is_inexact
from ._argnums import several
from ._calling import calling
from ._crossing import Call, is_packed, packed_in
from ._function import FunctionTransform
from ._likes import Differentiated, as_entered, as_operands, unpack_likes
from ._partial_gradients import report_partial_gradients
from ._treatments import Treatment


class GradTransform(FunctionTransform):
    """A function under `jax.grad`, with identities preserved."""

    filters = False  # whether the transform itself leaves out what cannot be differentiated, as Equinox's do

    def __init__(
        self,
        transform: Callable[..., Any],
        function: Callable[..., Any],
        policy: Policy | None,
        options: dict[str, Any],
    ) -> None:
        argnums = options.get("argnums", 0)
        self._argnums = tuple(several(argnums))
        if "argnums" in options:  # not all versions of JAX take integers of NumPy
            options = {**options, "argnums": self._argnums if np.ndim(argnums) else self._argnums[0]}
        self._has_aux = options.get("has_aux", False)
        self._allow_int = options.get("allow_int", False)
        super().__init__(transform, function, policy, options)

    def treatments(self, num_args: int, keywords: Collection[str]) -> Sequence[Treatment]:
        """Which leaves are differentiated; those of a differentiated module that cannot be are not."""
        chosen = self._differentiated(num_args)
        return (
            Treatment(
                lambda position: position in chosen,
                resolve=lambda is_chosen, leaf: is_chosen and self._can_be_differentiated(leaf),
                describe=lambda is_chosen: "differentiated" if is_chosen else "not differentiated",
            ),
        )

    def _differentiated(self, num_args: int) -> list[int]:
        return [i + num_args if i < 0 else i for i in self._argnums]

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        policy = self.policy or current_policy()
        call = self.pack(args, kwargs, policy)
        chosen = self._differentiated(len(args))
        if call.cuts:
            report_partial_gradients(call, chosen, self.names, self.function, self._written(), policy)
        split = [self._split(value, call) if i in chosen else value for i, value in enumerate(call.args)]
        # A new function for each call: the transform does not cache, and where it did the leaves that go around it
        # would be those of an earlier call.
        options = {**self.options, "has_aux": True} if policy.in_place else self.options
        with calling(self.names, call):
            result = self.transform(self._inner(policy), **options)(*split, **call.kwargs)
        return self._finished(result, call, policy)

    def _written(self) -> str:
        """How to write this transform of another function, with more options."""
        own = "".join(f", {name}={value!r}" for name, value in self.options.items() if name != "argnums")
        known = {"jax.grad": "grad", "equinox.filter_grad": "grad"}
        known |= {"jax.value_and_grad": "value_and_grad", "equinox.filter_value_and_grad": "value_and_grad"}
        name = known.get(self.transform_name, f"preserve_identities({self.transform_name})")
        return f"sharedtree.{name}({{}}{own}{{}})"

    def _split(self, value: Any, call: Call) -> Any:
        """An argument with its inexact leaves for the transform to differentiate."""
        if self.filters:
            return as_operands(value)
        return jtu.tree_map(
            lambda item: Differentiated.of(item, self._can_be_differentiated, call) if type(item) is Packed else item,
            value,
            is_leaf=is_packed,
        )

    def _can_be_differentiated(self, leaf: Any) -> bool:
        if not is_traced(leaf, "jax"):  # in a container; the transform refuses it
            return False
        if is_inexact(leaf):
            return True
        dtype = leaf.dtype if hasattr(leaf, "dtype") else jax.dtypes.result_type(leaf)
        return self._allow_int and not jnp.issubdtype(dtype, jax.dtypes.extended)

    def _inner(self, policy: Policy) -> Callable[..., Any]:
        run = self.inner(policy)

        def inner(*args: Any, **kwargs: Any) -> Any:
            result = run(*map(as_entered, args), **kwargs)
            if not policy.in_place:
                return result
            state, result = result
            value, aux = result if self._has_aux else (result, None)
            return value, (state, aux)

        functools.update_wrapper(inner, run, updated=())
        return inner

    def _finished(self, result: Any, call: Call, policy: Policy) -> Any:
        gradients, aux = result if self._has_aux or policy.in_place else (result, None)
        _, aux = self._finished_results(None, aux, call, policy)
        gradients = self.unpack_gradients(gradients, call)
        return (gradients, aux) if self._has_aux else gradients

    def _finished_results(self, value: Any, aux: Any, call: Call, policy: Policy) -> tuple[Any, Any]:
        """What the function returned, unpacked; in place, what it changed has come with the auxiliary data."""
        if not policy.in_place:
            return self.finish((value, aux), call, policy)
        state, aux = aux
        return self.finish((state, (value, aux)), call, policy)

    def unpack_gradients(self, gradients: Any, call: Call) -> Any:
        """Gradients as modules: with the sharing of the arguments, and None where nothing is differentiable."""
        arguments = [a for position, value in call.items() for a in packed_in(value, position)]
        return unpack_likes(gradients, arguments, statics=False)


class ValueAndGradTransform(GradTransform):
    """A function under `jax.value_and_grad`, with identities preserved."""

    def _finished(self, result: Any, call: Call, policy: Policy) -> Any:
        value, gradients = result
        value, aux = value if self._has_aux or policy.in_place else (value, None)
        value, aux = self._finished_results(value, aux, call, policy)
        return ((value, aux) if self._has_aux else value), self.unpack_gradients(gradients, call)


class FilterGradTransform(GradTransform):
    """A function under `equinox.filter_grad`, or a Jacobian of Equinox's, with identities preserved."""

    filters = True


class FilterValueAndGradTransform(ValueAndGradTransform):
    """A function under `equinox.filter_value_and_grad`, with identities preserved."""

    filters = True
