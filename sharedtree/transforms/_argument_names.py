"""What a function and its arguments are called, for errors and warnings."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from .._arguments import Position
from .._attribution import definition_of


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
