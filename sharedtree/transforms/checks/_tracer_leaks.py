"""A tracer in a static leaf of a result would outlive its trace, so it is an error at once, with its path."""

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

from jax.core import Tracer

from ...core._by_identity import IdentitySet
from ...core._errors import StaticTracerError
from ...core._jax_internals import belongs_to
from ...core._printing import shown
from ...core._structure import Structure, statics_of

_DEPTH = 8
"""Of closures within partials within containers; each level is a level of the user's own nesting."""

_MOST = 100_000
"""So many objects are looked at in one static value: what holds more is data, not a closure over a tracer."""

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
_HOLDING_NOTHING = (*_PLAIN, Tracer, type, types.ModuleType)


def forbid_tracers(outer: Sequence[Any]) -> Callable[[Any, Callable[[], str]], None]:
    """A check for `Rules.on_static`: no static value may hold a tracer, but for those of the enclosing traces."""

    def check(value: Any, path: Callable[[], str]) -> None:
        how = _find(value, outer)
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


def _find(value: Any, outer: Sequence[Any]) -> str | None:
    """How a tracer is reached from a value, by a shortest way; None if none is. Each object is looked at once."""
    if type(value) in _PLAIN:
        return None
    found: list[tuple[Any, int, str]] = [(value, -1, "")]  # with the number of the one that holds it, and how
    seen = IdentitySet([value])
    start = 0
    for _ in range(_DEPTH + 1):
        stop = len(found)
        for number in range(start, stop):
            obj = found[number][0]
            if isinstance(obj, Tracer) and not belongs_to(obj, outer):
                return _way(found, number)
            if isinstance(obj, _HOLDING_NOTHING):
                continue
            for how, part in _parts(obj):
                if type(part) not in _PLAIN and seen.add(part):
                    found.append((part, number, f", {how}"))
        start = stop
        if len(found) == stop or stop > _MOST:
            return None
    return None


def _way(found: Sequence[tuple[Any, int, str]], number: int) -> str:
    steps: list[str] = []
    while number >= 0:
        _, number, how = found[number]
        steps.append(how)
    return "".join(reversed(steps))


def _parts(value: Any) -> list[tuple[str, Any]]:
    items = value.items() if isinstance(value, dict) else value if _is_items(value) else None
    if items is not None:
        return [(f"under the key {shown(key)}", part) for key, part in items]
    if isinstance(value, (tuple, list, set, frozenset)):
        return [("in a container", part) for part in value]
    if isinstance(value, functools.partial):
        return [("in a partial", part) for part in (value.func, *value.args, *value.keywords.values())]
    if isinstance(value, types.MethodType):
        return [("in the object of a bound method", value.__self__), ("in a method", value.__func__)]
    if isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        return [(f"in the closure of `{value.__qualname__}` as `{name}`", _content(cell)) for name, cell in cells]
    if isinstance(value, Structure):
        return [("in a `Dag`", static.peek()) for _, static in statics_of(value)]
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        return [(f"as the attribute `{name}`", part) for name, part in attributes.items()]
    return []


def _is_items(value: Any) -> bool:
    """Whether it is what auxiliary data has in place of a dictionary of fields."""
    return type(value) is tuple and all(type(x) is tuple and len(x) == 2 and type(x[0]) is str for x in value)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
