"""Table of the names that treex and treeo use and that JAX, NumPy and Flax have dropped, with a stand-in for each.

A row has an effect only if the installed library lacks the name. Otherwise treex gets the library's own object.
"""

import importlib
import importlib.metadata
from collections.abc import Callable, Container
from typing import Any, NamedTuple

from ..core._errors import CompatibilityError
from ._tree_map import tree_map


class DroppedName(NamedTuple):
    """Former name of a library.

    Attributes:
        module: module in which treex looks the name up.
        name: the name.
        gone_since: first release without the name, from the changelogs and histories of the libraries. Empty if no
            release so far lacks it.
        stand_in: the object for treex, or its dotted name, looked up when it is needed.
    """

    module: str
    name: str
    gone_since: str
    stand_in: Any

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


def _rows(module: str, names: str, gone_since: str, stand_in: str | Callable[..., Any]) -> list[DroppedName]:
    """Makes rows for several names of one module.

    Args:
        module: module in which treex looks the names up.
        names: the names, with spaces between them.
        gone_since: first release without them.
        stand_in: an object, or a dotted name in which `{}` stands for the name itself.
    """
    return [DroppedName(module, name, gone_since, _for_name(stand_in, name)) for name in names.split()]


def _for_name(stand_in: str | Callable[..., Any], name: str) -> str | Callable[..., Any]:
    """Puts a name into the dotted name of a stand-in. Any other stand-in is returned unchanged."""
    return stand_in.format(name) if isinstance(stand_in, str) else stand_in


ROWS: tuple[DroppedName, ...] = (
    *_rows("jax", "tree_map", "JAX 0.6.0", tree_map),
    *_rows("jax", "tree_flatten tree_leaves tree_structure tree_unflatten", "JAX 0.6.0", "jax.tree_util.{}"),
    *_rows("jax", "tree_multimap", "JAX 0.3.16", tree_map),
    *_rows("jax.tree_util", "tree_multimap", "JAX 0.3.16", tree_map),
    *_rows("jax.core", "Value", "", "typing.Any"),
    *_rows("jax._src.numpy.lax_numpy", "ndarray", "JAX 0.4.5", "jax.Array"),
    *_rows("jax._src.numpy.lax_numpy", "split", "", "jax.numpy.split"),
    *_rows("jax.numpy", "DeviceArray", "JAX 0.4.14", "jax.Array"),
    *_rows("jax.numpy", "alltrue", "JAX 0.4.16", "jax.numpy.all"),
    *_rows("numpy.lib.arraysetops", "isin", "NumPy 2.0", "numpy.isin"),
    *_rows("flax.linen.linear", "zeros ones", "Flax 0.6.5", "jax.nn.initializers.{}"),
    *_rows("flax.linen.normalization", "zeros ones", "Flax 0.6.5", "jax.nn.initializers.{}"),
    *_rows("flax.linen.recurrent", "zeros", "Flax 0.6.5", "jax.nn.initializers.zeros"),
    *_rows("flax.linen.recurrent", "orthogonal", "Flax 0.6.5", "jax.nn.initializers.orthogonal"),
    *_rows("flax.linen.recurrent", "Shape", "Flax 0.8.1", "flax.typing.Shape"),
)


def find_stand_in(row: DroppedName) -> Any:
    """Returns the stand-in for a name.

    Raises:
        CompatibilityError: if the installed version of the library lacks the stand-in, too.
    """
    if not isinstance(row.stand_in, str):
        return row.stand_in
    try:
        return _look_up(row.stand_in)
    except (ImportError, AttributeError):
        library = row.stand_in.partition(".")[0]
        version = importlib.metadata.version(library)
        gone = f"is gone since {row.gone_since}" if row.gone_since else "is gone"
        raise CompatibilityError(
            f"`treex` needs `{row}`, which {gone}. What would stand in for it, `{row.stand_in}`, is not in {library} "
            f"{version}, which is installed, either.\nInstall a release of {library} that has it:\n"
            f"    pip install '{library}<{version}'"
        ) from None


def require_all(libraries: Container[str]) -> None:
    """Returns if each name of these libraries, or else its stand-in, is there.

    Raises:
        CompatibilityError: otherwise. The message has the name.
    """
    for row in ROWS:
        if row.module.partition(".")[0] in libraries:
            try:
                _look_up(str(row))
            except (ImportError, AttributeError):
                # Raises if there is no stand-in.
                find_stand_in(row)


def _look_up(dotted: str) -> Any:
    """Returns the object with a dotted name.

    Raises:
        ImportError: if its module cannot be imported.
        AttributeError: if the module lacks the name.
    """
    module, _, name = dotted.rpartition(".")
    return getattr(importlib.import_module(module), name)
