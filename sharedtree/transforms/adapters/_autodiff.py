"""`jax.vjp`, `jax.jvp`, `jax.linearize`, `jax.linear_transpose`, and Equinox's `filter_vjp` and `filter_jvp`.

The transform sees of each module the leaves that are differentiated (`_differentiated`). The others go around it: those
of the operands straight to the function, those of its results out beside it.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import tree_util as jtu

from ..._ties import is_inexact
from ..._under_way import keeps_limit
from .._crossed import Graph, Names, packed_in
from .._crossing import Crossing
from .._differentiated import differentiated, split
from .._inside import Inside, with_notes
from .._likes import as_entered
from .._modules import is_of_equinox
from .._packing import require_room_for
from .._references import handed_beside
from .._tangents import Fit, pack_tangents, unpack_tangents


class LinearMap:
    """What `jax.vjp`, `jax.linearize` and `jax.linear_transpose` return: takes and gives modules, with their ties.

    As what vanilla JAX returns it is a pytree, so it may cross transforms.

    Args:
        function: the vanilla function.
        takes: the tree, as the vanilla function sees it, of what it is given.
        fit: how that is fitted to it.
    """

    __slots__ = ("__weakref__", "fit", "function", "takes")

    def __init__(self, function: Any, takes: Any, fit: Fit) -> None:
        self.function = function
        self.takes = takes
        self.fit = fit

    @keeps_limit
    def __call__(self, /, *args: Any) -> Any:
        require_room_for(args, "cotangent" if self.fit.adds_up else "tangents")
        if not self.fit.adds_up:
            return unpack_tangents(self.function(*_as_seen(args, self.takes, "tangents", self.fit)))
        if len(args) != 1:
            return self.function(*args)  # says best what is wrong
        seen = _as_seen(args[0], self.takes, "cotangent", self.fit)
        return unpack_tangents(self.function(seen), is_gradient=True)

    def __repr__(self) -> str:
        return f"<function returned by {self.fit.title}, identities preserved>"


jtu.register_pytree_node(
    LinearMap,
    lambda item: ((item.function,), (item.takes, item.fit)),
    lambda how, children: LinearMap(children[0], *how),
)


class Trace:
    """The one trace of a function in a call of these transforms, which do not cache.

    Args:
        crossing: the call.
        function: the user's.
        primals: what it is differentiated in.
        others: further arguments, by name, that it gets as they are.
        has_aux: whether it returns a pair, of which the second is not differentiated.
        adds_up: whether it is given cotangents. JAX would add those of a reference up in another one.

    Attributes:
        seen: what the transform sees of the primals.
        results: the tree of what it saw of what the function returned, once it has.
    """

    results: Any

    def __init__(
        self,
        crossing: Crossing,
        function: Callable[..., Any],
        primals: Sequence[Any],
        others: Mapping[str, Any] | None = None,
        *,
        has_aux: bool = False,
        adds_up: bool = False,
    ) -> None:
        self.crossing = crossing
        self.has_aux = has_aux
        others = others or {}
        if not callable(function):
            crossing.transform(function, primals, primals)  # says best what is wrong
        names = Names(function)
        operands = {names.text(position): primal for position, primal in enumerate(primals)}
        chosen = len(operands)
        treatment = differentiated(lambda position: int(position) < chosen, is_inexact)
        packed = crossing.enter(function, {**operands, **others}, treatment if others else None)
        own = with_notes(packed[:chosen])
        # They are alive in `own`.
        beside = handed_beside(Graph.of(own)) if adds_up else frozenset[int]()
        self.seen, self.unseen = split(own, lambda leaf: id(leaf) not in beside and is_inexact(leaf))
        self._others = packed[chosen:]
        self._inner = crossing.function(function, _whole, caches_traces=False)
        functools.update_wrapper(self, self._inner, updated=())

    def __call__(self, *seen: Any) -> Any:
        """What the transform calls, with and without auxiliary data of the user's: (seen of the result, beside it)."""
        result = self._inner(*as_entered(seen, self.unseen), *self._others)
        aux = None
        if self.has_aux:
            if not isinstance(result, (tuple, list)) or len(result) != 2:
                return self.crossing.leave(result)  # which JAX refuses
            result, aux = result
        seen_of_result, rest = split(result)
        self.results = jtu.tree_structure(seen_of_result)
        return seen_of_result, (rest, aux)

    def leave(self, seen: Any, beside: Any) -> tuple[Any, ...]:
        """What the function returned, unpacked: its value, and the auxiliary data if there are any."""
        rest, aux = beside
        value, aux = self.crossing.leave((as_entered(seen, rest), aux))
        return (value, aux) if self.has_aux else (value,)

    def tangents(self, given: Sequence[Any]) -> Any:
        """The user's tangents of the primals as the transform sees them."""
        return _as_seen(tuple(given), jtu.tree_structure(self.seen), "tangents", self._fit(adds_up=False))

    def _fit(self, *, adds_up: bool) -> Fit:
        crossing = self.crossing
        return Fit(crossing.title, crossing.policy, adds_up, may_lack=is_of_equinox(crossing.transform))

    def linear_map(self, function: Any, *, adds_up: bool) -> Any:
        """The vanilla function, made to take and to give modules; itself where there are none."""
        trees = jtu.tree_structure(self.seen), self.results
        takes = trees[adds_up]
        return LinearMap(function, takes, self._fit(adds_up=adds_up)) if any(map(_has_modules, trees)) else function


def _has_modules(tree: Any) -> bool:
    return any(packed_in(as_entered(_of_zeros(tree)), 0))


def _of_zeros(tree: Any) -> Any:
    return tree.unflatten([0.0] * tree.num_leaves)


def _as_seen(given: Any, tree: Any, name: str, fit: Fit) -> Any:
    """The user's tangents or cotangents as the transform sees them. Without modules, that says best what is wrong."""
    return pack_tangents(_of_zeros(tree), given, name, fit) if _has_modules(tree) else given


def _whole(inside: Inside, *operands: Any) -> Any:
    return inside.pack(inside.call(*operands))


def vjp(crossing: Crossing, fun: Any, primals: Sequence[Any] = (), *, has_aux: bool = False, **options: Any) -> Any:
    """`jax.vjp` and `equinox.filter_vjp`."""
    trace = Trace(crossing, fun, primals, has_aux=has_aux, adds_up=True)
    seen, pullback, beside = crossing.apply(trace, *trace.seen, has_aux=True, **options)
    value, *aux = trace.leave(seen, beside)
    return value, trace.linear_map(pullback, adds_up=True), *aux


def linearize(
    crossing: Crossing, fun: Any, primals: Sequence[Any] = (), *, has_aux: bool = False, **options: Any
) -> Any:
    """`jax.linearize`."""
    trace = Trace(crossing, fun, primals, has_aux=has_aux)
    seen, pushforward, beside = crossing.apply(trace, *trace.seen, has_aux=True, **options)
    value, *aux = trace.leave(seen, beside)
    return value, trace.linear_map(pushforward, adds_up=False), *aux


def linear_transpose(crossing: Crossing, fun: Any, primals: Sequence[Any] = (), **options: Any) -> Any:
    """`jax.linear_transpose`; what is not differentiated of the result is left out."""
    trace = Trace(crossing, fun, primals)
    unseen = [leaf for leaf in jtu.tree_leaves(trace.unseen) if isinstance(leaf, jax.ShapeDtypeStruct)]
    if unseen:
        at = crossing.paths_to(lambda leaf: any(leaf is each for each in unseen))
        raise TypeError(
            f"`{crossing.title}` was given a `jax.ShapeDtypeStruct` at {at}, which is not differentiated. So the "
            "function needs its value, for only the rest is transposed:\n"
            "    struct = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if eqx.is_inexact_array(x) else x\n"
            "    abstract = sharedtree.tree.map(struct, model)"
        )

    def seen_only(*seen: Any) -> Any:
        return trace(*seen)[0]

    functools.update_wrapper(seen_only, trace, updated=())
    return trace.linear_map(crossing.apply(seen_only, *trace.seen, **options), adds_up=True)


def jvp(crossing: Crossing, fun: Any, primals: Any, tangents: Any, has_aux: bool = False) -> Any:
    """`jax.jvp`."""
    if not isinstance(primals, (tuple, list)) or not isinstance(tangents, (tuple, list)):
        return crossing.transform(fun, primals, tangents)  # says best what is wrong
    trace = Trace(crossing, fun, primals, has_aux=has_aux)
    given = trace.tangents(tangents)
    kinds = [list if isinstance(each, list) else tuple for each in (primals, tangents)]
    seen, tangents_out, beside = crossing.apply(trace, kinds[0](trace.seen), kinds[1](given), has_aux=True)
    value, *aux = trace.leave(seen, beside)
    return value, unpack_tangents(tangents_out), *aux


def filter_jvp(crossing: Crossing, fn: Any, primals: Any, tangents: Any, **others: Any) -> Any:
    """`equinox.filter_jvp`. It has no auxiliary data; whatever is not differentiated has the tangent None."""
    if not isinstance(primals, (tuple, list)) or not isinstance(tangents, (tuple, list)):
        raise TypeError(
            f"The primals and the tangents of `{crossing.title}` are tuples or lists, with one for each argument, and "
            f"not a `{type(primals).__name__}` and a `{type(tangents).__name__}`."
        )

    @functools.wraps(fn)
    def by_position(*args: Any) -> Any:
        return fn(*args[: len(primals)], **dict(zip(others, args[len(primals) :], strict=True)))

    trace = Trace(crossing, by_position if others else fn, tuple(primals), others)
    given = trace.tangents(tangents)
    (seen, beside), (tangents_out, _) = crossing.apply(trace, trace.seen, given)
    return trace.leave(seen, beside)[0], unpack_tangents(tangents_out)
