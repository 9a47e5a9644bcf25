"""Functions among the arguments of a transform that takes arrays, and the transform that takes both.

`jax.jit` refuses a function, or an optimizer, which is several of them, where it takes an array. What it says then
names static arguments only. Its counterpart in Equinox traces what is an array and takes everything else as it is.
"""

from collections.abc import Collection, Sequence
from typing import Any

import equinox as eqx
from jax import tree_util as jtu

from ..._node_types import is_module
from ..._text import listed
from .._crossed import Names, Position
from .._packing import positions

_REFUSALS = ("as an abstract array", "is not a valid JAX type")
"""What JAX says of a value that it cannot take."""


def is_refusal(error: Exception) -> bool:
    """Whether JAX has refused a value, and nobody has said more of it yet."""
    text = str(error)
    is_known = "sharedtree.preserve_identities(" in text
    return isinstance(error, TypeError) and any(words in text for words in _REFUSALS) and not is_known


def name_counterpart(
    error: Exception,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    left_out: Collection[Position],
    names: Names,
    title: str,
) -> None:
    """Adds to a refusal of JAX's, if functions among the arguments are what it refused, which transform takes them.

    Args:
        error: the refusal. It stays the error that it is.
        args: of the call.
        kwargs: those by keyword.
        left_out: the arguments that JAX does not take for arrays.
        names: of the arguments.
        title: of the transform.
    """
    counterpart = f"filter_{title.removeprefix('jax.')}"
    text = str(error)
    if not hasattr(eqx, counterpart):
        return
    functions = [
        names.text(position, path)
        for position, value in positions(args, kwargs)
        if position not in left_out
        for path, leaf in jtu.tree_flatten_with_path(value, is_leaf=is_module)[0]
        if callable(leaf) and not is_module(leaf) and repr(type(leaf)) in text
    ]
    if functions:
        be = "is a function" if len(functions) == 1 else "are functions"
        error.args = (
            f"{text}\n{listed(functions)} {be}. `equinox.{counterpart}` takes the arrays among the arguments as "
            f"`{title}` does, and functions and optimizers as they are:\n"
            f"    f = sharedtree.preserve_identities(equinox.{counterpart})(f)",
        )
