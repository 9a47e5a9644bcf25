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

from ..core._call_arguments import LeafPath
from ..core._pack_and_unpack import Rules, Tags, pack, walked
from ..core._static_kinds import Same
from ..core._structure import Structure
from ..core._trees_taken_apart import Walked
from ._crossing import Crossing
from ._function_side import receive
from ._hands import Hand, whole
from ._meet_of_trees import Words, fitted, holds_modules
from ._shape_evaluation import NO_KEYWORDS
from .checks._tied_values import report_tied_values


def callback_with_result(
    crossing: Crossing,
    callback: Any,
    result_shape_dtypes: Any,
    args: Any = (),
    kwargs: Mapping[str, Any] = NO_KEYWORDS,
    **options: Any,
) -> Any:
    """`jax.pure_callback` and `jax.experimental.io_callback`."""
    promised = whole(*pack(result_shape_dtypes, Tags(), crossing.rules, "result_shape_dtypes"))
    on_host, hand = _enter(crossing, callback, args, kwargs, promised.structure)
    return crossing.leave(crossing.transform(on_host, promised, hand, **options))


def debug_callback(
    crossing: Crossing, callback: Any = None, args: Any = (), kwargs: Mapping[str, Any] = NO_KEYWORDS, **options: Any
) -> Any:
    """`jax.debug.callback`, in one call or in two: `jax.debug.callback(ordered=True)(callback, *args)`."""
    run = crossing.transform(**options) if callback is None else crossing.transform

    def call(callback: Any, *args: Any, **kwargs: Any) -> Any:
        if not callable(callback):
            return run(callback, *args, **kwargs)  # which refuses it
        own = {
            name: kwargs.pop(name)
            for name in ("ordered", "partitioned")
            if run is crossing.transform and name in kwargs
        }
        return run(
            *_enter(Crossing(crossing.transform, crossing.title, crossing.policy), callback, args, kwargs, None), **own
        )

    return call if callback is None else call(callback, *args, **kwargs, **options)


def _enter(
    crossing: Crossing,
    callback: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    promised: Structure | None,
) -> tuple["OnHost", Hand]:
    hand = crossing.enter_call(callback, args, kwargs)
    report_tied_values(crossing.call.tree, crossing.names, crossing.title, crossing.policy)
    crossing.call.end()
    return OnHost(callback, _identity_of(callback), crossing.title, crossing.rules, promised), hand


@dataclasses.dataclass(frozen=True)
class OnHost:
    """What the transform sees in place of the function; equal to another one that does the same.

    Attributes:
        callback: the user's function.
        identity: of the function, by which it is compared.
        title: what the transform is called in errors.
        rules: how results are walked.
        promised: the structure of `result_shape_dtypes`; None if nothing is handed back.
    """

    callback: Callable[..., Any] = dataclasses.field(compare=False)
    identity: tuple[Same, ...]
    title: str
    rules: Rules
    promised: Structure | None

    def __hash__(self) -> int:
        return hash((self.identity, self.title, self.promised))

    def __call__(self, hand: Hand) -> Any:
        arguments = receive((hand,)).arguments
        result = self.callback(*arguments.args, **arguments.kwargs)
        return None if self.promised is None else self._as_promised(result)

    def _as_promised(self, result: Any) -> Any:
        """A result, in the hand that was promised. JAX compares only how many leaves there are."""
        assert self.promised is not None
        before = Walked.of(self.promised, [None] * len(self.promised.records))
        after = walked(result, self.rules, "result")
        if not (self.rules.containers or holds_modules(before) or holds_modules(after)):
            return result  # which JAX takes in whatever containers
        words = Words(self.title, "in `result_shape_dtypes`", "in what the callback returned")
        return whole(fitted(before, after, words, (LeafPath("result"),)), self.promised)


def _identity_of(function: Callable[..., Any]) -> tuple[Same, ...]:
    """What to compare of a function; a method is made anew whenever it is asked for."""
    parts = (function.__self__, function.__func__) if isinstance(function, types.MethodType) else (function,)
    return tuple(map(Same, parts))
