"""`jax.pure_callback`, `jax.experimental.io_callback`, `jax.debug.callback`: functions that run on the host.

The function gets models with the sharing that the operands have. What it returns is held to what was promised, for the
program has been compiled by then: classes, static values and the ties of `result_shape_dtypes`. An array that is one in
the result only is handed back at each of its places, since arrays alias by accident.

    promised      returned      handed back
    Net(s, s)     Net(a, a)     a
    Net(s, t)     Net(a, a)     a, a
    Net(s, s)     Net(a, b)     an error, for there is room for one

A program calls the function long after the call that it came with, so what the transform sees holds the function. JAX
compiles an eager callback once if what it sees is equal.
"""

import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax import tree_util as jtu

from ..._context import Policy
from ..._graph import Tags
from ..._static_keys import Same
from .._crossed import Graph
from .._crossing import Crossing
from .._joining import Words, joined, leaves_like, packed_as, require_same_containers
from .._packing import pack_tree, unpack_call
from ..checks._values import report_tied_values
from ._shapes import NO_KEYWORDS


def callback_with_result(
    crossing: Crossing,
    callback: Any,
    result_shape_dtypes: Any,
    args: Any = (),
    kwargs: Mapping[str, Any] = NO_KEYWORDS,
    **options: Any,
) -> Any:
    """`jax.pure_callback` and `jax.experimental.io_callback`."""
    promised = pack_tree(result_shape_dtypes, Tags(), crossing.policy.rules, "result_shape_dtypes")
    on_host, packed, named = _enter(crossing, callback, args, kwargs, jtu.tree_structure(promised))
    return crossing.leave(crossing.transform(on_host, promised, *packed, **named, **options))


def debug_callback(
    crossing: Crossing, callback: Any = None, args: Any = (), kwargs: Mapping[str, Any] = NO_KEYWORDS, **options: Any
) -> Any:
    """`jax.debug.callback`, in one call or in two: `jax.debug.callback(ordered=True)(callback, *args)`."""
    run = crossing.transform(**options) if callback is None else crossing.transform

    def call(callback: Any, *args: Any, **kwargs: Any) -> Any:
        if not callable(callback):
            return run(callback, *args, **kwargs)  # which refuses it
        own = Crossing(crossing.transform, crossing.title, crossing.policy)
        on_host, packed, named = _enter(own, callback, args, kwargs, None)
        return run(on_host, *packed, **named)

    return call if callback is None else call(callback, *args, **kwargs, **options)


def _enter(
    crossing: Crossing, callback: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], promised: Any
) -> tuple["OnHost", Sequence[Any], dict[str, Any]]:
    packed, named = crossing.enter_call(callback, args, kwargs)
    report_tied_values(crossing.call.items(), crossing.names, crossing.title, crossing.policy)
    return OnHost(callback, _identity_of(callback), crossing.title, crossing.policy, promised), packed, named


@dataclasses.dataclass(frozen=True)
class OnHost:
    """What the transform sees in place of the function; equal to another one that does the same.

    Attributes:
        callback: the user's function.
        identity: of the function, by which it is compared.
        title: what the transform is called in errors.
        policy: what counts as sharing.
        promised: the structure of the packed `result_shape_dtypes`; None if nothing is handed back. It comes last, for
            JAX allows no comparison of a structure with None, and the title tells them apart before.
    """

    callback: Callable[..., Any] = dataclasses.field(compare=False)
    identity: tuple[Same, ...]
    title: str
    policy: Policy
    promised: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        entered = unpack_call(args, kwargs, ())
        result = self.callback(*entered.args, **entered.kwargs)
        return None if self.promised is None else self._as_promised(result)

    def _as_promised(self, result: Any) -> Any:
        """A result, packed with the structure that was promised. JAX compares only how many leaves there are."""
        returned = pack_tree(result, Tags(), self.policy.rules, "result")
        if jtu.tree_structure(returned) == self.promised:
            return returned
        words = Words(self.title, "in `result_shape_dtypes`", "in what the callback returned")
        promised = self.promised.unflatten([0] * self.promised.num_leaves)
        if not require_same_containers(promised, returned, "result", words):
            return returned
        before, after = Graph.of(promised, "result"), Graph.of(returned, "result")
        return packed_as(returned, promised, leaves_like(before, after, joined(before, after, words, exact=True)))


def _identity_of(function: Callable[..., Any]) -> tuple[Same, ...]:
    """What to compare of a function; a method is made anew whenever it is asked for."""
    parts = (function.__self__, function.__func__) if isinstance(function, types.MethodType) else (function,)
    return tuple(map(Same, parts))
