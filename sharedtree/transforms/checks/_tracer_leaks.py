"""Raises an error for a tracer in a static value of a result.

    return Net(w, scale=x.mean())           # `scale` is a static field: the tracer would outlive its trace
    return Net(w, act=lambda y: y * x)      # the tracer `x` in the closure of a static function would, too

The error names the path of the static value, and the steps from this value to the tracer.
"""

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.core import Tracer

from ...core._by_identity import IdentitySet
from ...core._errors import StaticTracerError
from ...core._jax_internals import belongs_to
from ...core._printing import shown
from ...core._structure import Structure, statics_of

_MAX_DEPTH = 8
"""How many levels of one static value are searched. A closure in a partial in a list is on the third level."""

_MAX_OBJECTS = 100_000
"""How many objects of one static value are searched. A larger value is data, not a closure over a tracer."""

_SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes})
"""Classes whose instances are neither tracers nor hold any."""

_WITHOUT_PARTS = (*_SCALARS, Tracer, type, types.ModuleType)
"""Classes whose instances are not searched. Classes and Python modules are no parts of a result."""


def forbid_tracers(outer: Sequence[Any]) -> Callable[[Any, Callable[[], str]], None]:
    """Returns a function for `Rules.on_static`. It is called with each static value, and a function for the path of it.

    The returned function raises `StaticTracerError` if a value holds a tracer. Tracers of the enclosing traces are
    allowed, because these traces go on after the function has returned.

    Args:
        outer: the enclosing traces.
    """

    def check(value: Any, path: Callable[[], str]) -> None:
        """Raises `StaticTracerError` if a value holds a tracer that is not allowed."""
        route = _route_to_tracer(value, outer)
        if route is not None:
            where = f" ({route.removeprefix(', ')})" if route else ""
            raise StaticTracerError(
                f"A static value of the result holds a tracer, at `{path()}`{where}.\n"
                "Static values outlive the trace, but a tracer does not. Return the array in a traced field:\n"
                "    weight: jax.Array                  # not: eqx.field(static=True)\n"
                "If it is in a class that JAX does not know, register that class:\n"
                "    jax.tree_util.register_pytree_node(cls, flatten, unflatten)",
                (path(),),
            )

    return check


class _Reached(NamedTuple):
    """An object in the list of all objects reached by the search for tracers.

    Attributes:
        obj: the object.
        holder: index of its holder in the list. -1 for the static value itself, where the search begins.
        step: where the holder has it, in words, such as ", in a partial".
    """

    obj: Any
    holder: int
    step: str


def _route_to_tracer(value: Any, outer: Sequence[Any]) -> str | None:
    """Searches a static value for a tracer, breadth first.

    Args:
        value: the static value.
        outer: the enclosing traces. Their tracers do not count.

    Returns:
        The steps of a shortest route from the value to a tracer, in words. Empty if the value is the tracer itself.
        None if no tracer was found, or if the search was given up: after `_MAX_DEPTH` levels, or after the level in
        which it reached more than `_MAX_OBJECTS` objects.
    """
    if type(value) in _SCALARS:
        return None
    # All objects reached, level by level. `visited` has them as a set.
    reached = [_Reached(value, -1, "")]
    visited = IdentitySet([value])
    start = 0
    for _ in range(_MAX_DEPTH + 1):
        # One level: the objects from `start` to `stop`. The objects that they hold are appended: the next level.
        stop = len(reached)
        for index in range(start, stop):
            obj = reached[index].obj
            if isinstance(obj, Tracer) and not belongs_to(obj, outer):
                return _route(reached, index)
            if isinstance(obj, _WITHOUT_PARTS):
                continue
            for step, part in _parts(obj):
                if type(part) not in _SCALARS and visited.add(part):
                    reached.append(_Reached(part, index, f", {step}"))
        start = stop
        # No object is left, or too many.
        if len(reached) == stop or stop > _MAX_OBJECTS:
            return None
    return None


def _route(reached: Sequence[_Reached], index: int) -> str:
    """Returns the steps that lead to an object of the search, joined in order.

    Args:
        reached: the objects of the search.
        index: index of the object in them.
    """
    # Go from the object to its holders, up to the first value.
    steps: list[str] = []
    while index >= 0:
        _, index, step = reached[index]
        steps.append(step)
    return "".join(reversed(steps))


def _parts(value: Any) -> list[tuple[str, Any]]:
    """Returns the objects in a value, each after a few words about its place: ("in a partial", part).

    Empty if the parts of the value are unknown, as with most classes written in C.
    """
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
    # A `Dag` holds its static values in a structure.
    if isinstance(value, Structure):
        return [("in a `Dag`", static.peek()) for _, static in statics_of(value)]
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        return [(f"as the attribute `{name}`", part) for name, part in attributes.items()]
    return []


def _is_items(value: Any) -> bool:
    """Returns True for a tuple of pairs of a name and a value.

    The auxiliary data of Equinox and other libraries has its fields as such a tuple, in place of a dict.
    """
    return type(value) is tuple and all(type(x) is tuple and len(x) == 2 and type(x[0]) is str for x in value)


def _content(cell: Any) -> Any:
    """Returns the value of a closure variable."""
    try:
        return cell.cell_contents
    except ValueError:
        # The variable has no value yet.
        return None
