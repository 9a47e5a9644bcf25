"""Whether an object holds an array, at any depth: then a name must not stand for it.

A name says where code lies. Under the name of a function that holds a weight, in a closure cell say, no weight would be
written, and whoever looks the name up gets a weight of their own. So an object is searched before it becomes a name:

    def scaled(w):
        def scale(x):
            return w * x
        return scale

    held_array(scaled(jnp.ones(3)))  # Held("closure cell `w`", is_array=True)

What is code is no part of an object: globals, modules, and classes with their attributes.
"""

import collections
import itertools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax

from ..._node_types import node_type_of
from ...transforms._function import FunctionTransform
from ..arrays._arrays import is_array
from ..trust._names import RefusalError

MAX_OBJECTS = 10_000
"""How many objects are looked at. Nobody knows what one holds that leads to more."""

_MAX_STEPS = 8

Part = tuple[str, Any]
"""What leads from an object to another that it holds, for people; and that one."""


class Held(NamedTuple):
    """Something that an object holds.

    Attributes:
        way: what leads to it, for people: "default of `table` → [0]".
        is_array: whether it is an array; else it is the first object that was not looked at, for there were too many.
    """

    way: str
    is_array: bool


def held_array(obj: Any) -> Held | None:
    """The nearest array that an object holds; None if it holds none.

    Args:
        obj: any object that is no array itself.

    Cost: one visit for each object; at most 10,000. Of their classes, only flatten functions are called.
    """
    found: list[tuple[Any, int, str]] = [(obj, -1, "")]  # an object, kept alive here; which holds it; what leads to it
    seen = {id(obj)}
    for number, (holder, _, _) in enumerate(found):  # it grows meanwhile
        for step, part in _parts_of(holder, type(holder)):
            cls = type(part)
            if id(part) in seen or cls in _HOLD_NOTHING or issubclass(cls, type | types.ModuleType):
                continue
            seen.add(id(part))  # alive in `found`
            found.append((part, number, step))
            if is_array(cls) or issubclass(cls, jax.Ref):
                return Held(_way(found), True)
            if len(found) > MAX_OBJECTS:
                return Held(_way(found), False)
    return None


def require_no_array(obj: Any) -> None:
    """Raises if a name must not stand for an object.

    Raises:
        RefusalError: if the object holds an array, or more than can be looked at.
    """
    held = held_array(obj)
    if held is None:
        return
    said = getattr(obj, "__qualname__", None)
    what = f"`{said}`, a function" if isinstance(said, str) else f"a `{type(obj).__qualname__}`, used as a function"
    if held.is_array:
        reason = f"{what} that holds an array ({held.way}), and only a name would be written, without the array"
    else:
        reason = f"{what} that holds more than {MAX_OBJECTS:,} objects, which may be arrays ({held.way})"
    raise RefusalError(
        reason,
        "Make it a field: hold it in an `equinox.Module` whose `__call__` does what the function does. Or hand it over "
        "as an argument, with `functools.partial`.",
    )


def _way(found: list[tuple[Any, int, str]]) -> str:
    steps: list[str] = []
    number = len(found) - 1
    while number > 0:
        _, number, step = found[number]
        steps.append(step)
    steps.reverse()
    return " → ".join(steps if len(steps) <= _MAX_STEPS else [*steps[:_MAX_STEPS], "..."])


_HOLD_NOTHING = frozenset({bool, int, float, complex, str, bytes, type(None), types.CodeType, types.FrameType})


def _parts_of(obj: Any, cls: type) -> Iterator[Part]:
    if issubclass(cls, types.FunctionType):
        return _parts_of_function(obj)
    if issubclass(cls, FunctionTransform):  # what else it has are caches
        return iter((("attribute `__wrapped__`", obj.__wrapped__), ("its options", obj.options)))
    return _parts_of_instance(obj, cls)


def _parts_of_function(function: types.FunctionType) -> Iterator[Part]:
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        yield from ((f"closure cell `{name}`", part) for _, part in _contents(cell))
    # The last of them belongs to the last argument. Who sets `__defaults__` may set too many.
    names = reversed(code.co_varnames[: code.co_argcount])
    for name, part in itertools.zip_longest(names, reversed(function.__defaults__ or ()), fillvalue=None):
        yield f"default of `{name}`", part
    yield from ((f"default of `{name}`", part) for name, part in (function.__kwdefaults__ or {}).items())
    yield from ((f"attribute `{name}`", part) for name, part in list(function.__dict__.items()))


def _parts_of_instance(obj: Any, cls: type) -> Iterator[Part]:
    for base, parts in _CONTAINERS.items():
        if issubclass(cls, base):
            yield from parts(obj)
            break
    for base in type.__getattribute__(cls, "__mro__"):
        for name, held in type.__getattribute__(base, "__dict__").items():
            if isinstance(held, types.MemberDescriptorType):  # a slot; of types written in C, what they hold
                try:
                    yield f"attribute `{name}`", held.__get__(obj)
                except AttributeError:  # never set
                    continue
            elif isinstance(held, types.GetSetDescriptorType) and name in ("__dict__", "__self__"):
                value = held.__get__(obj)
                if name == "__self__":
                    yield "attribute `__self__`", value
                elif type(value) is dict:
                    yield from ((f"attribute `{key}`", part) for key, part in list(value.items()))
    yield from _children(obj)


def _children(obj: Any) -> Iterable[Part]:
    """What a registered class says that its instances hold."""
    try:
        node_type = node_type_of(obj)
        if node_type is None or node_type.is_plain or node_type.fields:
            return ()
        children, aux = node_type.take_apart(obj)
    except Exception:  # noqa: BLE001 -- the class's own code may raise anything, and the attributes were looked at
        return ()
    return [*((f"child {i}", child) for i, child in enumerate(children)), ("auxiliary data", aux)]


def _contents(cell: types.CellType) -> Iterable[Part]:
    try:
        return [("cell", cell.cell_contents)]
    except ValueError:  # empty
        return ()


def _items(iterate: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterable[Part]]:
    return lambda obj: [(f"[{i}]", item) for i, item in enumerate(iterate(obj))]


def _entries(items: Callable[[Any], Iterable[tuple[Any, Any]]]) -> Callable[[Any], Iterator[Part]]:
    def entries(obj: Any) -> Iterator[Part]:
        for key, value in list(items(obj)):
            yield "a key", key
            yield f"[{key!r}]" if type(key) is str and len(key) < 40 else "a value", value

    return entries


_CONTAINERS: dict[type, Callable[[Any], Iterable[Part]]] = {
    dict: _entries(dict.items),
    types.MappingProxyType: _entries(types.MappingProxyType.items),
    tuple: _items(tuple.__iter__),
    list: _items(list.__iter__),
    set: _items(set.__iter__),
    frozenset: _items(frozenset.__iter__),
    collections.deque: _items(collections.deque.__iter__),
    types.CellType: _contents,
}
"""How to look into containers, past what a subclass does."""
