"""Arguments by name and number: what they are called in errors; which `…_argnums` and `…_argnames` choose."""

import functools
import inspect
import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

from ..core._call_arguments import Position
from ..core._warning_source import definition_of


class Names:
    """What a function and its arguments are called.

    Args:
        function: the user's function.
        positional: what its arguments are called, if not as its parameters are.

    Attributes:
        definition: where the function is defined.
        positional: the names of its positional arguments, as far as they have any.
    """

    def __init__(self, function: Callable[..., Any], positional: Sequence[str] | None = None) -> None:
        self.definition = definition_of(function)
        if positional is not None:
            self.positional = tuple(positional)
            return
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (ValueError, TypeError):
            parameters = []
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self.positional = tuple([p.name for p in parameters if p.kind in by_position])

    def text(self, position: Position) -> str:
        """What an argument is called."""
        if isinstance(position, str):
            return position
        return self.positional[position] if position < len(self.positional) else f"args[{position}]"

    def of(self, count: int) -> tuple[str, ...]:
        """What so many positional arguments are called."""
        known = self.positional[:count]
        return known if len(known) == count else (*known, *[f"args[{i}]" for i in range(len(known), count)])


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
