"""A tracer in a static leaf of a result would outlive its trace, so it is an error at once, with its path."""

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

from jax.core import Tracer

from .._errors import StaticTracerError
from .._jax_internals import belongs_to

_DEPTH = 8  # of closures within partials within containers; each level is a level of the user's own nesting


def forbid_tracers(outer: Sequence[Any]) -> Callable[[Any, Callable[[], str]], None]:
    """A check for `Rules.on_static`: no static value may hold a tracer, but for those of the enclosing traces."""

    def check(value: Any, path: Callable[[], str]) -> None:
        how = _find(value, outer, _DEPTH)
        if how is not None:
            raise StaticTracerError(
                f"The result has a tracer in a static place, `{path()}`{how}.\n"
                "What is static is part of the structure and outlives the trace, which a tracer does not. Return the "
                "array in a field that is traced:\n"
                "    weight: jax.Array                  # not: eqx.field(static=True)\n"
                "or, if it sits in a class that JAX does not know, register that class:\n"
                "    jax.tree_util.register_pytree_node(cls, flatten, unflatten)",
                (path(),),
            )

    return check


def _find(value: Any, outer: Sequence[Any], depth: int) -> str | None:
    """How a tracer is reached from a value; None if none is."""
    if isinstance(value, Tracer):
        return None if belongs_to(value, outer) else ""
    if depth == 0 or value is None or isinstance(value, (str, bytes, int, float, complex, type, types.ModuleType)):
        return None
    for how, part in _parts(value):
        found = _find(part, outer, depth - 1)
        if found is not None:
            return f", {how}{found}"
    return None


def _parts(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(f"under the key {key!r}", part) for key, part in value.items()]
    if isinstance(value, (tuple, list, set, frozenset)):
        return [("in a container", part) for part in value]
    if isinstance(value, functools.partial):
        return [("in a partial", part) for part in (value.func, *value.args, *value.keywords.values())]
    if isinstance(value, types.MethodType):
        return [("in the object of a bound method", value.__self__), ("in a method", value.__func__)]
    if isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        return [(f"in the closure of `{value.__qualname__}` as `{name}`", _content(cell)) for name, cell in cells]
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        return [(f"as the attribute `{name}`", part) for name, part in attributes.items()]
    return []


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
