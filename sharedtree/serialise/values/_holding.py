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
import contextlib
import itertools
import types
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax

from ..._node_types import node_type_of
from ...transforms._function import FunctionTransform
from ..arrays._arrays import is_array
from ..trust._names import RefusalError

# How many objects are looked at. Nobody knows what one holds that leads to more.
MAX_OBJECTS = 10_000
_HOLD_NOTHING = frozenset({bool, int, float, complex, str, bytes, type(None), types.CodeType, types.FrameType})
_CONTAINERS = (types.CellType, tuple, dict, list, types.MappingProxyType, set, frozenset, collections.deque)


class Held(NamedTuple):
    """The nearest array that an object holds; or if there were too many objects, the first that was not looked at."""

    way: str
    is_array: bool


def held_array(obj: Any) -> Held | None:
    """The nearest array that an object, which is none itself, holds. Of classes only flatten functions are called."""
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
    """Raises a `RefusalError` if a name must not stand for an object, which holds an array or too much to look at."""
    held = held_array(obj)
    if held is None:
        return
    said = getattr(obj, "__qualname__", None)
    what = f"`{said}`, a function" if isinstance(said, str) else f"a `{type(obj).__qualname__}`, used as a function"
    too_much = f"an array ({held.way}), and only a name would be written, without the array"
    if not held.is_array:
        too_much = f"more than {MAX_OBJECTS:,} objects, which may be arrays ({held.way})"
    raise RefusalError(
        f"{what} that holds {too_much}",
        "Make it a field: hold it in an `equinox.Module` whose `__call__` does what the function does. Or hand it over "
        "as an argument, with `functools.partial`.",
    )


def _way(found: list[tuple[Any, int, str]]) -> str:
    steps: list[str] = []
    number = len(found) - 1
    while number > 0:
        _, number, step = found[number]
        steps.append(step)
    first = steps[::-1][:8]
    return " → ".join(first if len(first) == len(steps) else [*first, "..."])


def _parts_of(obj: Any, cls: type) -> Iterable[tuple[str, Any]]:
    """What an object holds, and before each part what leads to it, for people."""
    if issubclass(cls, types.FunctionType):
        return _parts_of_function(obj)
    if issubclass(cls, FunctionTransform):  # what else it has are caches
        return ("attribute `__wrapped__`", obj.__wrapped__), ("its options", obj.options)
    inside = _parts_of_container(obj, cls) if issubclass(cls, _CONTAINERS) else ()
    return itertools.chain(inside, _attributes_of(obj, cls), _children(obj))


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        yield from ((f"closure cell `{name}`", part) for _, part in _parts_of_container(cell, types.CellType))
    # The last of them belongs to the last argument. Who sets `__defaults__` may set too many.
    names = reversed(code.co_varnames[: code.co_argcount])
    defaults = itertools.zip_longest(names, reversed(function.__defaults__ or ()))
    for name, part in itertools.chain(defaults, (function.__kwdefaults__ or {}).items()):
        yield f"default of `{name}`", part
    yield from ((f"attribute `{name}`", part) for name, part in list(function.__dict__.items()))


def _parts_of_container(obj: Any, cls: type) -> Iterator[tuple[str, Any]]:
    """What is in a container, past what a subclass does."""
    base: Any = next(base for base in _CONTAINERS if issubclass(cls, base))
    if base is types.CellType:
        with contextlib.suppress(ValueError):  # empty
            yield "cell", obj.cell_contents
    elif base in (dict, types.MappingProxyType):
        for key, value in list(base.items(obj)):
            yield "a key", key
            yield f"[{key!r}]" if type(key) is str and len(key) < 40 else "a value", value
    else:
        yield from [(f"[{i}]", item) for i, item in enumerate(base.__iter__(obj))]


def _attributes_of(obj: Any, cls: type) -> Iterator[tuple[str, Any]]:
    for base in type.__getattribute__(cls, "__mro__"):
        for name, held in type.__getattribute__(base, "__dict__").items():
            if type(held) is types.MemberDescriptorType:  # a slot; of types written in C, what they hold
                try:
                    yield f"attribute `{name}`", held.__get__(obj)
                except AttributeError:  # never set
                    continue
            elif name in ("__dict__", "__self__") and type(held) is types.GetSetDescriptorType:
                value = held.__get__(obj)
                if name == "__self__":
                    yield "attribute `__self__`", value
                elif type(value) is dict:
                    yield from ((f"attribute `{key}`", part) for key, part in list(value.items()))


def _children(obj: Any) -> Iterator[tuple[str, Any]]:
    """What a registered class says that its instances hold."""
    try:
        node_type = node_type_of(obj)
        if node_type is None or node_type.is_plain or node_type.fields:
            return
        children, aux = node_type.take_apart(obj)
        parts = [*((f"child {i}", child) for i, child in enumerate(children)), ("auxiliary data", aux)]
    except Exception:  # noqa: BLE001 -- the class's own code may raise anything, and the attributes were looked at
        return
    yield from parts
