"""`jax.grad`, `jax.value_and_grad` and their Equinox counterparts.

Of a module in a differentiated argument only the inexact traced leaves are handed to the transform; the others go
around it. The gradient is a module of the same shape and sharing, with `None` for whatever has no gradient.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import tree_util as jtu

from .._context import Policy, current_policy
from .._distinct import distinct
from .._graph import build
from .._node_types import is_traced, node_type_of
from .._packed import LeafPath, Packed, leaf_paths
from .._statics import Static
from .._structure import Record
from .._ties import is_inexact
from ._crossing import Argument, Call, is_packed, packed_in, with_objects
from ._function import FunctionTransform, calling


class GradTransform(FunctionTransform):
    """A function under `jax.grad` or `jax.value_and_grad`, with identities preserved."""

    def __init__(
        self,
        transform: Callable[..., Any],
        function: Callable[..., Any],
        policy: Policy | None,
        options: dict[str, Any],
    ) -> None:
        self._argnums = options.get("argnums", 0)
        self._has_aux = options.get("has_aux", False)
        self._allow_int = options.get("allow_int", False)
        self._is_equinox = transform in (eqx.filter_grad, eqx.filter_value_and_grad)
        self._has_value = transform in (jax.value_and_grad, eqx.filter_value_and_grad)
        super().__init__(transform, function, policy, options)

    def treatment(self, argument: Argument, num_args: int) -> Any:
        """Differentiated or not."""
        return "differentiated" if argument.position in self._differentiated(num_args) else "not differentiated"

    def treatments(self, call: Call) -> dict[int, str]:
        """Which leaves are differentiated; the others of a differentiated module are not."""
        objects = call.tags.objects
        found = super().treatments(call)
        leaves = {number for number in found if node_type_of(objects[number]) is None}
        return {n: found[n] for n in leaves if is_traced(objects[n], "jax") and self._can_be_differentiated(objects[n])}

    def _differentiated(self, num_args: int) -> list[int]:
        argnums = (self._argnums,) if isinstance(self._argnums, int) else tuple(self._argnums)
        return [i + num_args if i < 0 else i for i in argnums]

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        policy = self.policy or current_policy()
        call = self.pack(args, kwargs, policy)
        chosen = self._differentiated(len(args))
        split = [
            jtu.tree_map(self._split, value, is_leaf=is_packed) if i in chosen and not self._is_equinox else value
            for i, value in enumerate(call.args)
        ]
        # A new function for each call: the transform does not cache, and where it did the leaves that go around it
        # would be those of an earlier call.
        options = {**self.options, "has_aux": True} if policy.in_place else self.options
        with calling(call):
            result = self.transform(self._inner(policy), **options)(*split, **call.kwargs)
        return self._finished(result, call, chosen, policy)

    def _split(self, item: Any) -> Any:
        if type(item) is not Packed:
            return item
        return Differentiated.of(item, self._can_be_differentiated)

    def _can_be_differentiated(self, leaf: Any) -> bool:
        if is_inexact(leaf):
            return True
        dtype = leaf.dtype if hasattr(leaf, "dtype") else jax.dtypes.result_type(leaf)
        return self._allow_int and not jnp.issubdtype(dtype, jax.dtypes.extended)

    def _inner(self, policy: Policy) -> Callable[..., Any]:
        run = self.inner(policy)

        def inner(*args: Any, **kwargs: Any) -> Any:
            whole = [jtu.tree_map(_joined, arg, is_leaf=lambda x: type(x) is Differentiated) for arg in args]
            result = run(*whole, **kwargs)
            if not policy.in_place:
                return result
            state, result = result
            value, aux = result if self._has_aux else (result, None)
            return value, (state, aux)

        functools.update_wrapper(inner, run, updated=())
        return inner

    def _finished(self, result: Any, call: Call, chosen: Sequence[int], policy: Policy) -> Any:
        has_aux = self._has_aux or policy.in_place
        if self._has_value:
            value, gradients = result
            value, aux = value if has_aux else (value, None)
        else:
            gradients, aux = result if has_aux else (result, None)
            value = None
        if policy.in_place:
            assert aux is not None
            state, aux = aux
            value, aux = self.finish((state, (value, aux)), call, policy)
        else:
            value, aux = self.finish((value, aux), call, policy)
        gradients = self._unpacked(gradients, call, chosen)
        if self._has_value:
            return ((value, aux) if self._has_aux else value), gradients
        return (gradients, aux) if self._has_aux else gradients

    def _unpacked(self, gradients: Any, call: Call, chosen: Sequence[int]) -> Any:
        """Gradients as modules: with the sharing of the arguments, and None where nothing is differentiable."""
        arguments = [a for position, value in call.items() for a in packed_in(value, position)]
        if not any(a.position in chosen for a in arguments):
            return gradients
        one = self._is_equinox or isinstance(self._argnums, int)
        by_position = dict(zip(chosen, (gradients,) if one else gradients, strict=True))
        leaves_of: dict[int, list[Any]] = {}  # position → the gradients of its modules, in order
        for position, gradient in by_position.items():
            found = jtu.tree_leaves(gradient, is_leaf=_is_gradient)
            leaves_of[position] = [_gradient_leaves(item) for item in found if _is_gradient(item)]
        table: list[Any] = []
        for argument in arguments:
            records = argument.structure.records
            if argument.position in chosen:
                leaves = leaves_of[argument.position].pop(0)  # pyright: ignore[reportArgumentType]
            else:
                leaves = [None] * len(argument.packed.leaves)
            build(_without_statics(records), distinct(leaves), table)
        whole = {
            position: with_objects(jtu.tree_map(_as_packed, gradient, is_leaf=_is_gradient), table)
            for position, gradient in by_position.items()
        }
        return whole[chosen[0]] if one else type(gradients)(whole[position] for position in chosen)


class Differentiated:
    """A packed module whose children are the leaves to differentiate; the other leaves ride in the aux data.

    The aux data is compared by identity. That is enough for a transform that is applied anew on every call.
    """

    __slots__ = ("leaves", "rest")

    def __init__(self, leaves: Sequence[Any], rest: "Rest") -> None:
        self.leaves = leaves
        self.rest = rest

    @classmethod
    def of(cls, packed: Packed, can_be_differentiated: Callable[[Any], bool]) -> "Differentiated":
        """Splits a packed module."""
        chosen = [can_be_differentiated(leaf) for leaf in packed.leaves]
        return cls([leaf for leaf, yes in zip(packed.leaves, chosen, strict=True) if yes], Rest(packed, chosen))

    def packed(self, *, others: bool) -> Packed:
        """The module packed again, with its other leaves, or with None in their place."""
        own = iter(self.leaves)
        each = zip(self.rest.packed.leaves, self.rest.chosen, strict=True)
        return Packed(
            [next(own) if yes else leaf if others else None for leaf, yes in each], self.rest.packed.structure
        )

    def keyed(self) -> list[tuple[LeafPath, Any]]:
        """The leaves with their paths."""
        texts = zip(leaf_paths(self.rest.packed.structure), self.rest.chosen, strict=True)
        return list(zip([LeafPath(text) for text, yes in texts if yes], self.leaves, strict=True))


class Rest:
    """What of a module is not differentiated."""

    __slots__ = ("chosen", "packed")

    def __init__(self, packed: Packed, chosen: Sequence[bool]) -> None:
        self.packed = packed
        self.chosen = chosen


jtu.register_pytree_with_keys(
    Differentiated,
    lambda item: (item.keyed(), item.rest),
    lambda rest, leaves: Differentiated(tuple(leaves), rest),
    lambda item: (item.leaves, item.rest),
)


def _joined(item: Any) -> Any:
    return item.packed(others=True) if type(item) is Differentiated else item


def _is_gradient(item: Any) -> bool:
    return type(item) in (Differentiated, Packed)


def _as_packed(item: Any) -> Any:
    return item.packed(others=False) if type(item) is Differentiated else item


def _gradient_leaves(item: Any) -> Sequence[Any]:
    return _as_packed(item).leaves


def _without_statics(records: Sequence[Record]) -> list[Record]:
    return [(_NONE, ()) if type(op) is Static else (op, children) for op, children in records]


_NONE = Static(None)
