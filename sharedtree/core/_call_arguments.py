"""The arguments of a call, as one node: the root of the DAG, whose paths begin with the arguments' names.

    f(net, 3, rate=r)                                      the second argument is static
    Arguments(("net", None), (net, 3), {"rate": r})        children: net, r        paths: `net.weight`, `rate`

A static argument has no path, since it is no child. It stays in `args` or `kwargs`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ._native_or_python import native_module

Position = int | str
"""A positional argument by its index, or a keyword argument by its name."""


class LeafPath:
    """A key of `jax.tree_util` with the text of a whole path or its beginning: JAX's own errors then name `m.a.weight`.

    Two are equal if their texts are.
    """

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    @property
    def key(self) -> str:
        """The text, under the attribute that JAX 0.10 reads from other classes of keys."""
        return self.text

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"LeafPath({self.text!r})"

    def __eq__(self, other: object) -> bool:
        return type(other) is LeafPath and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)


ArgumentNames = tuple[tuple[str | None, ...], tuple[str, ...], tuple[str, ...]]
"""Names of the positional arguments (None for a static one), of the traced keywords, and of the static keywords."""


class _Arguments:
    """The three attributes of `Arguments`. The native walk has a class in C in its place, which it reads faster."""

    __slots__ = ("args", "aux", "kwargs")
    aux: ArgumentNames
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Arguments(_Arguments if TYPE_CHECKING else getattr(native_module, "Arguments", _Arguments)):
    """The arguments of a call. Its children are the traced ones: positional in order, then keywords sorted by name.

    Args:
        names: The names of the positional arguments; None for a static one.
        args: The positional arguments.
        kwargs: The keyword arguments.
        static: The names of the static keyword arguments, sorted.

    Attributes:
        aux: The auxiliary data of the node.
    """

    __slots__ = ()

    def __init__(
        self, names: tuple[str | None, ...], args: Sequence[Any], kwargs: dict[str, Any], static: tuple[str, ...] = ()
    ) -> None:
        keywords = tuple([name for name in sorted(kwargs) if name not in static])
        self.aux = names, keywords, static
        self.args = tuple(args)
        self.kwargs = kwargs

    @property
    def names(self) -> tuple[str | None, ...]:
        """The names of the positional arguments; None for a static one."""
        positional_names, _, _ = self.aux
        return positional_names

    @property
    def static(self) -> tuple[str, ...]:
        """The names of the static keyword arguments."""
        _, _, static = self.aux
        return static

    def parts(self) -> tuple[list[Any], ArgumentNames]:
        """Returns the children and the auxiliary data."""
        positional_names, traced_keywords, _ = self.aux
        traced = [arg for name, arg in zip(positional_names, self.args, strict=True) if name is not None]
        return [*traced, *[self.kwargs[name] for name in traced_keywords]], self.aux

    def keys(self) -> tuple[LeafPath, ...]:
        """Returns one key per child: its name."""
        positional_names, traced_keywords, _ = self.aux
        return tuple([LeafPath(name) for name in (*positional_names, *traced_keywords) if name is not None])

    @property
    def statics(self) -> tuple[Any, ...]:
        """The static arguments, positional ones first."""
        positional_names, _, static_keywords = self.aux
        values = [arg for name, arg in zip(positional_names, self.args, strict=True) if name is None]
        return (*values, *[self.kwargs[name] for name in static_keywords])

    def with_statics(self, statics: Sequence[Any]) -> "Arguments":
        """Replaces the static arguments by the given values, in the order of `statics`."""
        if not statics:
            return self
        positional_names, _, static_keywords = self.aux
        values = iter(statics)
        args = [next(values) if name is None else arg for name, arg in zip(positional_names, self.args, strict=True)]
        kwargs = self.kwargs | {name: next(values) for name in static_keywords}
        return Arguments(positional_names, args, kwargs, static_keywords)

    @classmethod
    def of_parts(cls, names: ArgumentNames, children: Sequence[Any]) -> "Arguments":
        """Rebuilds arguments from their auxiliary data and children. Static arguments become None."""
        positional_names, traced_keywords, static_keywords = names
        # The children are in one sequence, positional ones first, so one iterator serves both.
        values = iter(children)
        args = [None if name is None else next(values) for name in positional_names]
        kwargs = {name: next(values) for name in traced_keywords} | dict.fromkeys(static_keywords)
        return cls(positional_names, args, kwargs, static_keywords)


def positions_of(names: ArgumentNames) -> list[Position]:
    """Returns the position of each child's argument.

    For example, `(("net", None, "x"), ("rate",), ())` gives `[0, 2, "rate"]`.
    """
    positional_names, traced_keywords, _ = names
    return [*[i for i, name in enumerate(positional_names) if name is not None], *traced_keywords]
