"""A template compared with a file of another library, leaf by leaf: what does not fit is listed, all of it at once."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...core._by_identity import IdentityDict
from ...core._comparison import Paths, class_text, described, lines_of
from ...core._errors import StructureMismatchError
from ...core._printing import printable
from ..values._template import MOST_LISTED, Difference, require_no_differences

Arrays = jax.Array | jax.ShapeDtypeStruct | np.ndarray
Numbers = bool | int | float | complex | np.generic


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of typed PRNG keys, or stands for one."""
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def told(leaf: Any) -> str:
    """A leaf in a few words."""
    if isinstance(leaf, dict):
        return "a dictionary"
    return "`None`" if leaf is None else described(leaf, class_text)


class Fit:
    """How a template and a file fit: the values that are found for its leaves are noted here, and what differs.

    `paths` has the places; long names may be in many.
    """

    def __init__(self) -> None:
        self.paths = Paths()
        self._differences: list[Difference] = []
        self._shortened: list[tuple[str, str]] = []
        self._first: IdentityDict[tuple[int, Any]] = IdentityDict()  # leaf of the template → (place, array)

    def differs(self, place: int, found: str, wanted: str) -> None:
        """Notes a difference, in words."""
        self._differences.append(Difference(self.paths.text(place), found, wanted))

    def value(self, wanted: Any, place: int, found: Any) -> Any:
        """The value for a leaf of the template: of one that is tied, that of its first path, and all must be equal."""
        if not isinstance(wanted, Arrays):
            return found
        is_plain = not isinstance(wanted, np.ndarray) and not is_key(wanted)
        if is_plain and jax.dtypes.canonicalize_dtype(wanted.dtype) != wanted.dtype:
            self._shortened.append((self.paths.text(place), told(wanted)))
        first, value = self._first.setdefault(wanted, (place, found))
        if value is not found and not _same_bytes(value, found):
            self.differs(place, f"other values than at `{self.paths.text(first)}`", "one object at both")
        return value

    def require(self, label: str, *, is_in_order: bool) -> None:
        """Raises `StructureMismatchError` that lists all that differs, or else all whose numbers JAX would halve."""
        if not is_in_order:
            self._differences.sort()
            self._shortened.sort(key=operator.itemgetter(0))
        label = printable(label)
        fix = (
            "Give the template that the file was written from. If it is a tie that the file has not:",
            "    sharedtree.convert(source, like=sharedtree.untie(template))",
        )
        require_no_differences(self._differences, label, lambda: fix)
        if not self._shortened:
            return
        listed = [f"`{printable(path)}`: {wanted}" for path, wanted in self._shortened[:MOST_LISTED]]
        lines = lines_of(listed, len(self._shortened))
        lines.insert(0, f"`{label}` has arrays with 64-bit numbers, which JAX would shorten to 32 bits:")
        lines += ["Switch 64-bit types on before you convert it:", '    jax.config.update("jax_enable_x64", True)']
        raise StructureMismatchError("\n".join(lines), [path for path, _ in self._shortened])


def _same_bytes(one: Any, two: Any) -> bool:
    one, two = np.asarray(one), np.asarray(two)
    return one.dtype == two.dtype and one.shape == two.shape and one.tobytes() == two.tobytes()
