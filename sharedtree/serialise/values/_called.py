"""Rows of what is called and holds something: partials and bound methods."""

import functools
import types
from collections.abc import Iterable
from typing import Any

import equinox as eqx
from jax import tree_util as jtu

from ...errors import StructureMismatchError
from ..trust._classes import kind_of
from ..trust._names import RefusalError
from ._atoms import short
from ._attribute_classes import is_asked_of_all
from ._nodes import TEXT, Apart, Child, Kind, Node, Parts, child, children, require
from ._wrapping import WRITTEN_ATTRIBUTES, copy_wrapped_attributes, wrapped_attributes

# --- partials ---------------------------------------------------------------------------------------------------------

# What `functools.update_wrapper` sets, but for annotations, which are those of what it wraps.
_UPDATED = frozenset({*WRITTEN_ATTRIBUTES, "__wrapped__", "__type_params__"})


def _is_partial_attribute(name: Any) -> bool:
    """Whether a partial in a file may have an attribute: not those that other code calls, such as `__get__`."""
    return name in _UPDATED or (type(name) is str and not name.startswith("__") and not is_asked_of_all(name))


def _take_partial(obj: Any) -> Apart:
    attributes = {name: value for name, value in obj.__dict__.items() if name != "__annotations__"}
    if not all(map(_is_partial_attribute, attributes)):
        raise RefusalError("a partial with an attribute that stands in for a method", "Delete the attribute.")
    return _applied("partial", obj, obj.func, attributes or None)


def _take_jax_partial(obj: Any) -> Apart:
    function = obj.func
    if type(function).__name__ == "_HashableCallableShim":  # how JAX wraps a partial within a Partial
        function = vars(function)["fun"]
    return _applied("Partial", obj, function)


def _applied(kind: str, obj: Any, function: Any, *attributes: Any) -> Apart:
    names, count = tuple(obj.keywords), len(obj.args)
    if not all(type(name) is str for name in names):
        raise RefusalError("a partial with a keyword that is no string", "Make it anew, with its keywords as strings.")
    keys = [*[f"[{i}]" for i in range(count)], *[f"[{name!r}]" for name in names], *["<keyword>"] * len(names)]

    def build(done: list[Any]) -> Node:
        first, second = count + len(names), count + 2 * len(names)
        return [kind, done[second], done[:count], done[first:second], done[count:first], *done[second + 1 :]]

    return Apart(
        [*obj.args, *obj.keywords.values(), *names, function, *attributes], [*keys, ".func", ".__dict__"], build
    )


def _call_parts(parts: Parts, node: Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    function, names = parts.child(node[1]), parts.children(node[3])
    require(callable(function), "its function cannot be called")
    require(len(set(names)) == len(names), "a keyword occurs twice")
    return function, tuple(parts.children(node[2])), dict(zip(names, parts.children(node[4]), strict=True))


def _build_partial(parts: Parts, node: Node) -> Any:
    function, args, keywords = _call_parts(parts, node)
    attributes = dict(parts.child(node[5]) or {})
    require(all(map(_is_partial_attribute, attributes)), "its attributes would stand in for methods")
    parameters = attributes.get("__type_params__", ())
    require(type(parameters) is tuple and not parameters, "its type parameters are no code's")
    if "__wrapped__" in attributes:
        annotations = wrapped_attributes(attributes["__wrapped__"]).get("__annotations__")
        attributes |= {} if annotations is None else {"__annotations__": annotations}
    made = functools.partial(_nothing)
    set_state: Any = made.__setstate__  # pyright: ignore[reportAttributeAccessIssue]
    set_state((function, args, keywords, attributes or None))  # the constructor would merge partials of partials
    return made


def _nothing() -> None:
    """Stands in a partial until its state is set."""


def _build_jax_partial(parts: Parts, node: Node) -> Any:
    function, args, keywords = _call_parts(parts, node)
    return jtu.Partial(function, *args, **keywords)


_OF_PARTIALS = (child(".func"), children(), children("text"), children())

# --- bound methods ----------------------------------------------------------------------------------------------------


class _Example(eqx.Module):
    def method(self) -> None:
        """Bound, it is what is looked for; `__call__` would be an ordinary bound method."""


BoundMethod: type = type(_Example().method)
"""Equinox's bound methods, which are pytrees; the class has no public name."""

CompiledFunction: type = type(eqx.filter_jit(_Example.method))
"""What `equinox.filter_jit` returns: a module that holds, besides what it wraps, a function that JAX has compiled."""


def _find_method(owner: Any, name: str) -> Any:
    """The function that binds to `owner` under a name: of its class, or, if it is a class, its class method."""
    bases: Iterable[type] = type.__getattribute__(owner if isinstance(owner, type) else type(owner), "__mro__")
    for base in bases:
        found = type.__getattribute__(base, "__dict__").get(name)
        if found is not None:
            if isinstance(owner, type) or isinstance(found, classmethod):
                return found.__func__ if isinstance(owner, type) and isinstance(found, classmethod) else None
            return found if isinstance(found, types.FunctionType) else None
    return None


def _method_name(function: Any, owner: Any) -> str | None:
    """The name under which the class of an object, or an object that is a class, has a function."""
    name = getattr(function, "__name__", None)
    return name if isinstance(name, str) and name.isidentifier() and _find_method(owner, name) is function else None


def _take_method(obj: types.MethodType) -> Apart:
    name, owner = _method_name(obj.__func__, obj.__self__), obj.__self__
    if name is None:
        raise RefusalError(
            f"a bound method, `{getattr(obj.__func__, '__qualname__', '?')}`, that its object's class does not have",
            "Let the class define it.",
        )
    if kind_of(owner if isinstance(owner, type) else type(owner)) is None:
        raise RefusalError(
            f"a bound method of a `{type(owner).__qualname__}`, which is no pytree node", "Save the object itself."
        )
    return Apart((owner,), (".__self__",), lambda done: ["method", done[0], name])


def take_bound_method(obj: Any) -> Apart | None:
    """A bound method of an Equinox module; None if it is not one that its class has."""
    parts = object.__getattribute__(obj, "__dict__")
    owner, function = parts.get("__self__"), parts.get("__func__")
    name = _method_name(function, owner)
    if name is None or isinstance(owner, type):
        return None
    return Apart((owner,), (".__self__",), lambda done: ["bound", done[0], name])


def function_of(method: Any) -> Any:
    """The function that a bound method of either kind calls."""
    return object.__getattribute__(method, "__dict__")["__func__"] if type(method) is BoundMethod else method.__func__


def _build_method(parts: Parts, node: Node) -> Any:
    owner = parts.child(node[1])
    function = _find_method(owner, node[2])
    cls = owner if issubclass(type(owner), type) else type(owner)
    # Methods of classes that are values, such as `pathlib.Path.unlink`, are nothing that a model holds.
    require(kind_of(cls) is not None, "its object is no instance of a trusted class")
    if function is None:
        raise StructureMismatchError(f"`{cls.__qualname__}` has no method `{node[2][:80]}`. Add it to the class again.")
    if node[0] == "method":
        return types.MethodType(function, owner)
    require(kind_of(cls) == "module" and cls is not owner, "its object is no Equinox module")
    made = object.__new__(BoundMethod)
    object.__getattribute__(made, "__dict__").update({"__func__": function, "__self__": owner})
    copy_wrapped_attributes(made, function)
    return made


_OWNERS = {
    "method": frozenset({"object", "wrapper", "registered", "enum"}),
    "bound": frozenset({"object", "wrapper"}),
}  # fmt: skip


def name_of_method(types: list[str], nodes: list[Node], node: Node) -> str | None:
    """The name of the function that a node binds; None if it is no method, or its object has no class with a name."""
    if node[0] not in _OWNERS:
        return None
    owner: Child = node[1]
    if type(owner) is list and node[0] == "method" and owner[0] == "class":
        return f"{owner[1]}.{node[2]}"
    if type(owner) is int and nodes[owner][0] in _OWNERS[node[0]]:
        return f"{types[nodes[owner][1]]}.{node[2]}"
    return None


KINDS = (
    Kind(
        "partial", (*_OF_PARTIALS, child(".<attributes>", "null", "dict")), (functools.partial,), _take_partial,
        _build_partial, keyed=3,
    ),
    Kind("Partial", _OF_PARTIALS, (jtu.Partial,), _take_jax_partial, _build_jax_partial, keyed=3),
    Kind("method", (child(".__self__"), TEXT), (types.MethodType,), _take_method, _build_method,
         text=lambda _, node: short(f"method {node[2]}")),
    Kind("bound", (child(".__self__"), TEXT), build=_build_method, text=lambda _, node: short(f"method {node[2]}")),
)  # fmt: skip
