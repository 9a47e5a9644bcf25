"""What a function is called with, as the root of one graph: below it everything has a path that begins with a name.

f(net, 3, rate=r)     with the second argument static
Arguments(("net", None), (net, 3), {"rate": r})        children: net, r        paths: `net.weight`, `rate`
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ._native_or_python import native

Position = int | str
"""A positional argument by its index, or a keyword argument by its name."""


class LeafPath:
    """A key entry that prints as a whole path, or the beginning of one: JAX's own messages then name `m.a.weight`."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    @property
    def key(self) -> str:
        """The text, under the name by which JAX 0.10 asks other keys for theirs."""
        return self.text

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"LeafPath({self.text!r})"

    def __eq__(self, other: object) -> bool:
        return type(other) is LeafPath and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)


Names = tuple[tuple[str | None, ...], tuple[str, ...], tuple[str, ...]]
"""Of the positional arguments, None for those that are static; of the keyword arguments; of those that are static."""


class _Arguments:
    """The parts of arguments; in C where that is in use."""

    __slots__ = ("args", "aux", "kwargs")
    aux: Names
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Arguments(_Arguments if TYPE_CHECKING else getattr(native, "Arguments", _Arguments)):
    """The arguments of a call. Its children are those that are not static, keywords by name.

    Args:
        names: of the positional arguments; None for those that are static.
        args: the positional arguments.
        kwargs: the keyword arguments.
        static: the names of those keyword arguments that are static, in order.

    Attributes:
        aux: what all of them are called, the keywords in order.
    """

    __slots__ = ()

    def __init__(
        self, names: tuple[str | None, ...], args: Sequence[Any], kwargs: dict[str, Any], static: tuple[str, ...] = ()
    ) -> None:
        self.aux = names, tuple([name for name in sorted(kwargs) if name not in static]), static
        self.args = tuple(args)
        self.kwargs = kwargs

    @property
    def names(self) -> tuple[str | None, ...]:
        """Those of the positional arguments; None for static ones."""
        return self.aux[0]

    @property
    def static(self) -> tuple[str, ...]:
        """The names of the keyword arguments that are static."""
        return self.aux[2]

    def parts(self) -> tuple[list[Any], Names]:
        """The children, and what they are called."""
        own = [arg for name, arg in zip(self.names, self.args, strict=True) if name is not None]
        return [*own, *[self.kwargs[name] for name in self.aux[1]]], self.aux

    def keys(self) -> tuple[LeafPath, ...]:
        """The names of the children, as paths begin with them."""
        positional, keywords, _ = self.aux
        return tuple([LeafPath(name) for name in (*positional, *keywords) if name is not None])

    @property
    def statics(self) -> tuple[Any, ...]:
        """The arguments that are static, positional ones first."""
        own = [arg for name, arg in zip(self.names, self.args, strict=True) if name is None]
        return (*own, *[self.kwargs[name] for name in self.static])

    def with_statics(self, statics: Sequence[Any]) -> "Arguments":
        """These arguments with the static ones in their places."""
        if not statics:
            return self
        each = iter(statics)
        args = [next(each) if name is None else arg for name, arg in zip(self.names, self.args, strict=True)]
        return Arguments(self.names, args, self.kwargs | {name: next(each) for name in self.static}, self.static)

    @classmethod
    def of_parts(cls, names: Names, children: Sequence[Any]) -> "Arguments":
        """The inverse of `parts`, with None for what is static."""
        positional, keywords, static = names
        each = iter(children)
        args = [None if name is None else next(each) for name in positional]
        return cls(positional, args, {name: next(each) for name in keywords} | dict.fromkeys(static), static)


def positions_of(names: Names) -> list[Position]:
    """Which argument each child of an `Arguments` is."""
    positional, keywords, _ = names
    return [*[i for i, name in enumerate(positional) if name is not None], *keywords]
