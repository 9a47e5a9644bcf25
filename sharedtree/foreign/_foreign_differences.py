"""A template compared with a file of another library, leaf by leaf: what does not fit is listed, all of it at once."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import StructureMismatchError
from .._printable import printable
from ..serialise.values._template import Difference, require_no_differences

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

    def __init__(self, path_of: Callable[[Any], str]) -> None:
        """`path_of` prints a place, which is done only for a difference: a long name may be in many paths."""
        self._path_of = path_of
        self._first: dict[int, tuple[Any, Any, Any]] = {}  # id → (the template's leaf, kept alive here; place; array)

    def value(self, wanted: Any, place: Any, found: Any) -> tuple[Any, Difference | None]:
        """The array for a leaf of the template: that of its first path; and how the one that was found differs."""
        if not isinstance(wanted, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
            return found, None
        _, first, value = self._first.setdefault(id(wanted), (wanted, place, found))  # alive in the table
        if value is found or same_bytes(value, found):
            return value, None
        there = f"other values than at `{self._path_of(first)}`"
        return value, Difference(self._path_of(place), there, "one object at both")


def same_bytes(one: Any, two: Any) -> bool:
    """Whether two arrays are equal to the bit."""
    one, two = np.asarray(one), np.asarray(two)
    return one.dtype == two.dtype and one.shape == two.shape and one.tobytes() == two.tobytes()


def is_shortened(wanted: Any) -> bool:
    """Whether JAX would take half of each number for a leaf of a template, since 64-bit types are switched off."""
    if not isinstance(wanted, jax.Array | jax.ShapeDtypeStruct) or is_key(wanted):
        return False
    return jax.dtypes.canonicalize_dtype(wanted.dtype) != wanted.dtype


def require_whole_numbers(shortened: Sequence[tuple[str, Any]], label: str) -> None:
    """Raises `StructureMismatchError` that lists all leaves of a template that JAX would shorten, if there are any."""
    if not shortened:
        return
    lines = [f"    `{printable(path)}`: {described(wanted)}" for path, wanted in shortened[:_MAX_LISTED]]
    if len(shortened) > _MAX_LISTED:
        lines.append(f"    and {len(shortened) - _MAX_LISTED} more")
    raise StructureMismatchError(
        "\n".join(
            [
                f"`{printable(label)}` has arrays with 64-bit numbers, which JAX would shorten to 32 bits:",
                *lines,
                "Switch 64-bit types on before you convert it:",
                '    jax.config.update("jax_enable_x64", True)',
            ]
        ),
        [path for path, _ in shortened],
    )


_CONVERTING = (
    "Give the template that the file was written from. If it is a tie that the file has not:",
    "    sharedtree.convert(source, like=sharedtree.untie(template))",
)


def require_a_fit(differences: Sequence[Difference], label: str) -> None:
    """Raises `StructureMismatchError` that lists all differences, if there are any."""
    require_no_differences(differences, printable(label), _CONVERTING)
