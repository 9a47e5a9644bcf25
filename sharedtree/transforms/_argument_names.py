"""Names of arguments in errors, and the arguments that options like `static_argnums` and `static_argnames` choose.

    def f(x, /, y, *rest, rate): ...

    Names(f).of(4)                                                 ("x", "y", "args[2]", "args[3]")
    ChosenArguments(f, argnums=1, argnames=None).argnames          ("y",), as JAX infers it
    ChosenArguments(f, argnums=None, argnames="rate").argnums      (), as `rate` has no position

A `Position` is an index (an int) or a keyword (a str).
"""

import functools
import inspect
import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

from ..core._call_arguments import Position
from ..core._errors import definition_of


class Names:
    """Names of the arguments of a function, for errors and warnings.

    Args:
        function: the user's function.
        positional: names of the positional arguments. None to take the names of the function's parameters.

    Attributes:
        definition: where the function is defined.
        positional: names of the positional arguments. Empty if the function has no signature and `positional` is None.
    """

    def __init__(self, function: Callable[..., Any], positional: Sequence[str] | None = None) -> None:
        """Reads the signature of the function if `positional` is None."""
        self.definition = definition_of(function)
        if positional is not None:
            self.positional = tuple(positional)
            return
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (ValueError, TypeError):
            # Some functions in C have no signature.
            parameters = []
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self.positional = tuple([p.name for p in parameters if p.kind in by_position])

    def text(self, position: Position) -> str:
        """Returns the name of an argument, such as "x". For an argument without a name, returns "args[2]"."""
        # A keyword argument: its position is its name.
        if isinstance(position, str):
            return position
        return self.positional[position] if position < len(self.positional) else f"args[{position}]"

    def of(self, count: int) -> tuple[str, ...]:
        """Returns the names of the positional arguments of a call. An argument without a name is "args[2]".

        Args:
            count: number of positional arguments in the call.
        """
        names = self.positional[:count]
        return names if len(names) == count else (*names, *[f"args[{i}]" for i in range(len(names), count)])


class ChosenArguments:
    """The arguments that two options, such as `static_argnums` and `static_argnames`, choose together.

    If only one of the options is set, the other is inferred from it, as in `jax.jit`. If both are set, nothing is
    inferred.

    Args:
        function: the user's function.
        argnums: one index or several. A negative index counts from the last argument. None if the option is not set.
        argnames: one name or several. None if the option is not set.

    Attributes:
        argnums: the indices, as they are written or inferred.
        argnames: the names, as they are written or inferred.

    Raises:
        TypeError: if an entry of an option is neither a name nor an index.
    """

    def __init__(self, function: Callable[..., Any], argnums: Any, argnames: Any) -> None:
        """Infers one option from the other, if only one is set and the function has a signature."""
        self.argnums = () if argnums is None else tuple(as_sequence(argnums))
        self.argnames = () if argnames is None else tuple(as_sequence(argnames))
        # With both options or none, nothing is inferred.
        if (argnums is None) == (argnames is None):
            return
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (ValueError, TypeError):
            # Some functions in C have no signature.
            return
        if argnums is None:
            # Like `jax.jit`, only for parameters that can be passed by position and by keyword.
            positional = (inspect.Parameter.POSITIONAL_OR_KEYWORD,)
            index_of = {p.name: i for i, p in enumerate(parameters) if p.kind in positional}
            self.argnums = tuple(index_of[name] for name in self.argnames if name in index_of)
        else:
            keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
            name_of = {i: p.name for i, p in enumerate(parameters) if p.kind in keyword}
            # There is no call yet. So here a negative index counts from the last parameter, and not from the last
            # argument.
            indices = [i + len(parameters) if i < 0 else i for i in self.argnums]
            self.argnames = tuple(name_of[i] for i in indices if i in name_of)

    @functools.cached_property
    def is_empty(self) -> bool:
        """True if no argument is chosen in any call."""
        return not self.argnums and not self.argnames

    def positions(self, num_args: int, keywords: Collection[Position]) -> Collection[Position]:
        """Returns the positions and names of the chosen arguments in one call.

        A negative index is counted from the last argument, and becomes an index from the first. An index may lie
        outside the arguments of the call. Of the names, only keywords of the call are returned.

        Args:
            num_args: number of positional arguments in the call.
            keywords: keywords of the call.
        """
        if self.is_empty:
            return ()
        positions: set[Position] = {i + num_args if i < 0 else i for i in self.argnums}
        positions.update(name for name in self.argnames if name in keywords)
        return positions


def as_sequence(value: Any) -> Sequence[Any]:
    """Returns the value of an option as a sequence. The value is one name or index, or several.

        "rate" → ("rate",)        1 → (1,)        (0, "rate") → [0, "rate"]

    NumPy's integers become Python's.

    Raises:
        TypeError: if an entry is neither a name nor an index.
    """
    if isinstance(value, str):
        return (value,)
    try:
        return (operator.index(value),)
    except TypeError:
        return [entry if isinstance(entry, str) else operator.index(entry) for entry in value]
