"""The one file that knows what Equinox does not promise: the marker for nothing, and which objects it warns of.

When Equinox takes a module apart whose fields were not all set, it puts a marker in the place of each that is missing,
and when it puts such a module together again (as `jax.tree.map`, `equinox.apply_updates`, `equinox.tree_at` and the
outputs of `equinox.filter_jit` do), the marker stays behind as its `__name__`, `__qualname__`, `__doc__` and so on.
Nobody has set those, so everything here that reads a module's attributes leaves them out.

The marker has no public name. It is found by looking at what Equinox makes of a module that has nothing set. If that is
no class of Equinox's own any more, then no value is taken for a marker.

Equinox warns when a module gets a field like `jax.vmap(layer)`, for nothing will train that layer. It knows such
objects by their types, which it keeps in a set. What wraps functions here is put there, too. If the set vanishes, there
is no warning.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import equinox as eqx
from jax import tree_util as jtu


class _Unset(eqx.Module):
    field: Any


def _find_marker() -> Any:
    children = tuple(jtu.default_registry.flatten_one_level(object.__new__(_Unset))[0])
    cls: type = type(children[0]) if children else type(None)
    return cls if cls.__module__.partition(".")[0] == "equinox" else None


# The class, not the marker itself: a copied or pickled module holds another instance.
_MARKER = _find_marker()


def marker_type() -> Any:
    """The class of what stands for an attribute that was never set; None if there is none."""
    return _MARKER


def is_missing(value: Any) -> bool:
    """Whether a value stands for an attribute that was never set."""
    return type(value) is _MARKER


def without_missing(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes that were set: the very dictionary if that is all of them. Cost: a look at each type."""
    if _MARKER in map(type, attributes.values()):
        return {name: value for name, value in attributes.items() if type(value) is not _MARKER}
    return attributes


def name_of(function: Any, default: Any, attribute: str = "__name__") -> str:
    """The `__name__` or `__qualname__` of a function or of whatever is used as one; the default if it has none.

    Whatever its attributes and its `__repr__` do: a name is asked for where something is printed, as an error is.
    """
    try:
        name = getattr(function, attribute, None)
        return name if isinstance(name, str) else str(default)
    except Exception:  # noqa: BLE001 -- whatever a user's class raises
        return default if isinstance(default, str) else f"<{type(default).__qualname__} object>"


def update_wrapper(wrapper: Any, wrapped: Callable[..., Any]) -> None:
    """`functools.update_wrapper`, but for the `__dict__`, and for attributes that a module has only as markers."""
    assigned = [name for name in functools.WRAPPER_ASSIGNMENTS if not is_missing(getattr(wrapped, name, None))]
    functools.update_wrapper(wrapper, wrapped, assigned=assigned, updated=())


def warn_of_layers_in(cls: type) -> None:
    """Has Equinox warn when an instance that wraps a layer becomes a field of a module."""
    module = sys.modules.get(eqx.Module.__module__)
    getattr(module, "_transform_types", set()).add(cls)
