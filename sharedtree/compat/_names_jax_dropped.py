"""The names that treex and treeo use and that JAX, NumPy and Flax have dropped, with what stands in for each.

A row takes effect only where the installed library lacks the name: of a library that has it, treex gets its own.
"""

import importlib
import importlib.metadata
from collections.abc import Callable, Container
from typing import Any, NamedTuple

from ..core._errors import CompatibilityError
from ._tree_map import tree_map


class GivenBack(NamedTuple):
    """A name that a library had.

    Attributes:
        module: where treex looks for it.
        name: what it looks for there.
        gone_since: the first release without it, from the libraries' changelogs and histories; empty if it is there.
        stand_in: what it gets: an object, or the dotted name of one, which is looked up when it is needed.
    """

    module: str
    name: str
    gone_since: str
    stand_in: Any

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


def _rows(module: str, names: str, gone_since: str, stand_in: str | Callable[..., Any]) -> list[GivenBack]:
    """One row a name; `{}` in the stand-in's name is the name itself."""
    return [
        GivenBack(module, name, gone_since, stand_in.format(name) if isinstance(stand_in, str) else stand_in)
        for name in names.split()
    ]


ROWS: tuple[GivenBack, ...] = (
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


def find(row: GivenBack) -> Any:
    """What stands in for a name.

    Raises:
        CompatibilityError: if the installed version of the library does not have that either.
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
    """Raises if a name of these libraries is gone, and what stands in for it, too.

    Raises:
        CompatibilityError: naming it.
    """
    for row in ROWS:
        if row.module.partition(".")[0] in libraries:
            try:
                _look_up(str(row))
            except (ImportError, AttributeError):
                find(row)


def _look_up(dotted: str) -> Any:
    module, _, name = dotted.rpartition(".")
    return getattr(importlib.import_module(module), name)
