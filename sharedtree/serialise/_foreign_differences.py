"""A template compared with a file of another library, leaf by leaf: what does not fit is listed, all of it at once."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import StructureMismatchError
from .._printable import printable
from ._template import Difference

_MAX_LISTED = 100

NOTHING = "nothing"

Numbers = bool | int | float | complex | np.generic


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of typed PRNG keys, or stands for one."""
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def described(leaf: Any) -> str:
    """A leaf in a few words."""
    if isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return f"{leaf.dtype}{list(leaf.shape)}"
    if isinstance(leaf, dict):
        return "a dictionary"
    return "`None`" if leaf is None else f"a `{type(leaf).__name__}`"


class Ties:
    """The ties of a template, whose copies in a file must be equal, since the template makes one of them."""

    def __init__(self) -> None:
        self._first: dict[int, tuple[Any, str, Any]] = {}  # id → (the template's leaf, kept alive here; path; array)

    def value(self, wanted: Any, path: str, found: Any) -> tuple[Any, Difference | None]:
        """The array for a leaf of the template: that of its first path; and how the one that was found differs."""
        if not isinstance(wanted, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
            return found, None
        _, first, value = self._first.setdefault(id(wanted), (wanted, path, found))  # alive in the table
        if first == path or same_bytes(value, found):
            return value, None
        return value, Difference(path, f"other values than at `{first}`", "one object at both")


def same_bytes(one: Any, two: Any) -> bool:
    """Whether two arrays are equal to the bit."""
    one, two = np.asarray(one), np.asarray(two)
    return one.dtype == two.dtype and one.shape == two.shape and one.tobytes() == two.tobytes()


def require_a_fit(differences: Sequence[Difference], label: str) -> None:
    """Raises `StructureMismatchError` that lists all differences, if there are any."""
    if not differences:
        return
    lines = [f"    {difference}" for difference in differences[:_MAX_LISTED]]
    if len(differences) > _MAX_LISTED:
        lines.append(f"    and {len(differences) - _MAX_LISTED} more")
    raise StructureMismatchError(
        "\n".join(
            [
                f"`{printable(label)}` does not hold what the template asks for:",
                *lines,
                "Give the template that the file was written from. If it is a tie that the file has not:",
                "    sharedtree.convert(source, like=sharedtree.untie(template))",
            ]
        ),
        [difference.path for difference in differences],
    )
