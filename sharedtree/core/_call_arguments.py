"""The arguments of a call, as one node: the root of the DAG, whose paths begin with the arguments' names.

    f(net, 3, rate=r)                                      the second argument is static
    Arguments(("net", None), (net, 3), {"rate": r})        children: net, r        paths: `net.weight`, `rate`

A *static* argument is one that the user declared static, as with `static_argnums`. It is no child, so it has no path.
It stays in `args` or `kwargs`. All other arguments are *traced*. The auxiliary data of the node are three groups of
names, see `ArgumentNames`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ._native_or_python import native_module

Position = int | str
"""Place of an argument in a call: the index of a positional argument, the name of a keyword argument."""


class LeafPath:
    """Key entry for `jax.tree_util` with a text of its own: a whole path, or the name with which a path begins.

    JAX prints the text as it is. So its own errors name `m.a.weight`. Two entries are equal if their texts are.
    """

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    @property
    def key(self) -> str:
        """The text. JAX 0.10 reads this attribute of a key entry, if the class is not JAX's own."""
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
"""Three groups of names: of the positional arguments, with None for a static one; of the traced keyword arguments,
sorted; of the static keyword arguments, sorted. For example `(("net", None), ("rate",), ())`."""


class _Arguments:
    """Base of `Arguments`, with its attributes. The native module has a class in C in place of this one.

    C reads the attributes of that class faster.
    """

    __slots__ = ("args", "aux", "kwargs")
    aux: ArgumentNames
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Arguments(_Arguments if TYPE_CHECKING else getattr(native_module, "Arguments", _Arguments)):
    """The arguments of a call. Children are the traced arguments: positional in order, then keywords sorted by name.

    Args:
        names: For each positional argument the name with which its paths begin. None for a static argument.
        args: The positional arguments, traced and static.
        kwargs: The keyword arguments, traced and static.
        static: The names of the static keyword arguments, sorted.

    Attributes:
        aux: The auxiliary data of the node: the names of the arguments.
    """

    __slots__ = ()

    def __init__(
        self, names: tuple[str | None, ...], args: Sequence[Any], kwargs: dict[str, Any], static: tuple[str, ...] = ()
    ) -> None:
        traced_keywords = tuple([name for name in sorted(kwargs) if name not in static])
        self.aux = names, traced_keywords, static
        self.args = tuple(args)
        self.kwargs = kwargs

    @property
    def names(self) -> tuple[str | None, ...]:
        """The names of the positional arguments. None for a static argument."""
        positional_names, _, _ = self.aux
        return positional_names

    @property
    def static(self) -> tuple[str, ...]:
        """The names of the static keyword arguments."""
        _, _, static_keywords = self.aux
        return static_keywords

    def parts(self) -> tuple[list[Any], ArgumentNames]:
        """Returns the children, which are the traced arguments, and the auxiliary data."""
        positional_names, traced_keywords, _ = self.aux
        traced = [arg for name, arg in zip(positional_names, self.args, strict=True) if name is not None]
        return [*traced, *[self.kwargs[name] for name in traced_keywords]], self.aux

    def keys(self) -> tuple[LeafPath, ...]:
        """Returns one key entry for each child: the name of the argument."""
        positional_names, traced_keywords, _ = self.aux
        return tuple([LeafPath(name) for name in (*positional_names, *traced_keywords) if name is not None])

    @property
    def statics(self) -> tuple[Any, ...]:
        """The static arguments themselves: the positional ones in order, then the keywords sorted by name."""
        positional_names, _, static_keywords = self.aux
        values = [arg for name, arg in zip(positional_names, self.args, strict=True) if name is None]
        return (*values, *[self.kwargs[name] for name in static_keywords])

    def with_statics(self, statics: Sequence[Any]) -> "Arguments":
        """Returns the same arguments with new values for the static ones, in the order of the property `statics`.

        If `statics` is empty, returns this object itself.
        """
        if not statics:
            return self
        positional_names, _, static_keywords = self.aux
        values = iter(statics)
        args = [next(values) if name is None else arg for name, arg in zip(positional_names, self.args, strict=True)]
        kwargs = self.kwargs | {name: next(values) for name in static_keywords}
        return Arguments(positional_names, args, kwargs, static_keywords)

    @classmethod
    def of_parts(cls, names: ArgumentNames, children: Sequence[Any]) -> "Arguments":
        """Makes arguments from their auxiliary data and children: the inverse of `parts`, with None for static ones."""
        positional_names, traced_keywords, static_keywords = names
        # The children are in one sequence: first those of `args`, then those of `kwargs`. So one iterator is enough.
        values = iter(children)
        args = [None if name is None else next(values) for name in positional_names]
        kwargs = {name: next(values) for name in traced_keywords} | dict.fromkeys(static_keywords)
        return cls(positional_names, args, kwargs, static_keywords)


def positions_of(names: ArgumentNames) -> list[Position]:
    """Returns, for each child, the position of its argument in the call.

    For example, `(("net", None, "x"), ("rate",), ())` gives `[0, 2, "rate"]`.
    """
    positional_names, traced_keywords, _ = names
    return [*[i for i, name in enumerate(positional_names) if name is not None], *traced_keywords]
