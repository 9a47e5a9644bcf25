"""`…_argnums` and `…_argnames`: which arguments they choose."""

import functools
import inspect
import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

from .._arguments import Position


class Chosen:
    """The arguments that `…_argnums` and `…_argnames` choose; each infers the other, as in JAX."""

    def __init__(self, function: Callable[..., Any], argnums: Any, argnames: Any) -> None:
        self.argnums = () if argnums is None else tuple(several(argnums))
        self.argnames = () if argnames is None else tuple(several(argnames))
        if (argnums is None) == (argnames is None):
            return
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (ValueError, TypeError):
            return
        if argnums is None:
            positional = (inspect.Parameter.POSITIONAL_OR_KEYWORD,)
            names = {p.name: i for i, p in enumerate(parameters) if p.kind in positional}
            self.argnums = tuple(names[name] for name in self.argnames if name in names)
        else:
            keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
            names = {i: p.name for i, p in enumerate(parameters) if p.kind in keyword}
            own = [i + len(parameters) if i < 0 else i for i in self.argnums]
            self.argnames = tuple(names[i] for i in own if i in names)

    @functools.cached_property
    def is_empty(self) -> bool:
        return not self.argnums and not self.argnames

    def positions(self, num_args: int, names: Collection[Position]) -> Collection[Position]:
        if self.is_empty:
            return ()
        chosen: set[Position] = {i + num_args if i < 0 else i for i in self.argnums}
        chosen.update(name for name in self.argnames if name in names)
        return chosen


def several(value: Any) -> Sequence[Any]:
    """The one or the several that an option names; integers may be NumPy's."""
    if isinstance(value, str):
        return (value,)
    try:
        return (operator.index(value),)
    except TypeError:
        return [each if isinstance(each, str) else operator.index(each) for each in value]
