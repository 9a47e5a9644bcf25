"""Rows of Python's own containers, of values that hold others, and of what is called and holds something."""

import collections
import functools
import json
import pathlib
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import equinox as eqx
from jax import tree_util as jtu

from ...core._class_attributes import is_asked_of_all
from ...core._errors import StructureMismatchError
from ...core._node_types import RefusalError
from ..trust._buildable_classes import kind_of
from ._atoms import atom_text, encode_bytes, read_base64, short
from ._nodes import TEXT, Apart, Child, Kind, Manifest, Node, Operand, Parts, child, children, require
from ._wrapped_attributes import WRITTEN_ATTRIBUTES, copy_wrapped_attributes, wrapped_attributes

_KEYS = children(is_walked=True)


def key_text(key: Any) -> str:
    """What leads to the value of a key, as JAX prints it. Texts that hold an address are left out: they vary."""
    try:
        text = repr(key)
    except Exception:  # noqa: BLE001 -- only a text for people
        text = ""
    return f"[{text}]" if 0 < len(text) <= 80 and " at 0x" not in text else f"[<{type(key).__name__}>]"


# --- sets and mappings ------------------------------------------------------------------------------------------------


def _take_set(kind: str) -> Callable[[Any], Apart]:
    def build(done: list[Any]) -> Node:
        return [kind, sorted(done, key=json.dumps)]  # Python's own order of texts varies from run to run

    def take(obj: Any) -> Apart:
        members = tuple(obj)
        return Apart(members, [f"{{{i}}}" for i in range(len(members))], build, members)

    return take


def _build_set(cls: type) -> Callable[[Parts, Node], Any]:
    def build(parts: Parts, node: Node) -> Any:
        items = parts.children(node[1])
        parts.count(items)
        made = cls(items)
        require(len(made) == len(items), "a member occurs twice")
        return made

    return build


def _order(keys: list[Any]) -> Sequence[int]:
    """In which order JAX meets the values."""
    try:
        return sorted(range(len(keys)), key=keys.__getitem__)
    except (TypeError, ValueError):
        return range(len(keys))


def _take_mapping(kind: str) -> Callable[[Any], Apart]:
    def take(obj: Any) -> Apart:
        keys, values = list(obj), list(obj.values())
        count = len(keys)
        order = range(count) if kind == "OrderedDict" else _order(keys)
        factory = [obj.default_factory] if kind == "defaultdict" else []
        names = [key_text(key) for key in keys]
        paths = [*[names[i] for i in order], *[f"<key {name}>" for name in names], *[".default_factory"] * len(factory)]

        def build(done: list[Any]) -> Node:
            written: list[Any] = [None] * count
            for place, i in enumerate(order):
                written[i] = done[place]
            made = done[2 * count :]
            if made and made[0] is not None and type(made[0]) is not list:
                raise RefusalError(
                    "a `defaultdict` whose default factory is neither a class nor a function of a module",
                    "Write the factory with `def` at module level.",
                )
            return [kind, *made, done[count : 2 * count], written]

        return Apart([*[values[i] for i in order], *keys, *factory], paths, build, keys)

    return take


def _build_mapping(parts: Parts, node: Node) -> Any:
    keys = parts.children(node[-2])
    parts.count(keys)
    if node[0] == "defaultdict":
        factory = parts.child(node[1])
        require(factory is None or callable(factory), "its default factory is no class")
        made: dict[Any, Any] = collections.defaultdict(factory)
    else:
        made = {} if node[0] == "dict" else collections.OrderedDict()
    made.update(zip(keys, parts.children(node[-1]), strict=True))
    require(len(made) == len(keys), "a key occurs twice")
    return made


def _mapping(cls: type, *first: Operand) -> Kind:
    name, keyed = cls.__name__, len(first) + 1
    operands = (*first, _KEYS, children())
    is_deep = cls is dict
    return Kind(
        name, operands, (cls,), _take_mapping(name), _build_mapping, keyed=keyed, is_deep=is_deep, has_identity=True
    )


# --- values that hold others ------------------------------------------------------------------------------------------


def _build_deque(parts: Parts, node: Node) -> Any:
    maxlen, items = parts.child(node[1]), parts.children(node[2])
    require(maxlen is None or maxlen >= len(items), "it is longer than it may be")
    return collections.deque(items, maxlen)


def _take_path(obj: pathlib.PurePath) -> Apart:
    kind = type(obj).__name__
    return Apart((str(obj),), ("",), lambda done: ["path", kind, done[0]])


def _build_path(parts: Parts, node: Node) -> Any:
    require(node[1] in _PATHS, "it is no path")
    concrete, pure = _PATHS[node[1]]
    # A path of the other family of systems cannot be used here, only looked at.
    return (concrete if issubclass(type(pathlib.Path()), concrete) else pure)(parts.child(node[2]))


def _path_text(_: Manifest, node: Node) -> str | None:
    return short(f"{short(node[1])}({atom_text(node[2])})") if type(node[2]) is not int else None


_PATHS: dict[str, tuple[type, type]] = {
    "PosixPath": (pathlib.PosixPath, pathlib.PurePosixPath),
    "WindowsPath": (pathlib.WindowsPath, pathlib.PureWindowsPath),
    "PurePosixPath": (pathlib.PurePosixPath, pathlib.PurePosixPath),
    "PureWindowsPath": (pathlib.PureWindowsPath, pathlib.PureWindowsPath),
}


def _take_bytearray(obj: bytearray) -> Apart:
    return Apart((), (), lambda _: ["bytearray", encode_bytes(obj)[1]])


def _of_three(cls: type, *forms: str) -> Kind:
    operands = tuple(child(step, *forms) for step in (".start", ".stop", ".step"))
    return Kind(cls.__name__, operands, (cls,), inline=(f"{cls.__name__}(", ")"))


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
        "tuple", (children(),), (tuple,), build=lambda parts, node: tuple(parts.children(node[1])), inline=("(", ")"),
        is_deep=True,
    ),
    Kind(
        "list", (children(),), (list,), build=lambda parts, node: parts.children(node[1]), is_deep=True,
        has_identity=True,
    ),
    Kind("set", (_KEYS,), (set,), _take_set("set"), _build_set(set), keyed=1, has_identity=True),
    Kind(
        "frozenset", (_KEYS,), (frozenset,), _take_set("frozenset"), _build_set(frozenset), keyed=1,
        inline=("frozenset({", "})"),
    ),
    _mapping(dict),
    _mapping(collections.OrderedDict),
    _mapping(collections.defaultdict, child(".default_factory", "null", "class", "function")),
    Kind(
        "deque", (child(".maxlen", "null", "int"), children()), (collections.deque,), build=_build_deque,
        has_identity=True,
    ),
    _of_three(slice),
    _of_three(range, "int"),
    Kind("path", (TEXT, child(".text", "text")), tuple(pure for pair in _PATHS.values() for pure in pair),
         _take_path, _build_path, inline=_path_text),
    Kind("bytearray", (Operand("base64"),), (bytearray,), _take_bytearray,
         lambda _, node: bytearray(read_base64(node[1])), has_identity=True),
    Kind("marker", (), (object,), build=lambda *_: object(), has_identity=True),
    Kind(
        "partial", (*_OF_PARTIALS, child(".<attributes>", "null", "dict")), (functools.partial,), _take_partial,
        _build_partial, keyed=3,
    ),
    Kind("Partial", _OF_PARTIALS, (jtu.Partial,), _take_jax_partial, _build_jax_partial, keyed=3),
    Kind("method", (child(".__self__"), TEXT), (types.MethodType,), _take_method, _build_method,
         text=lambda _, node: short(f"method {node[2]}")),
    Kind("bound", (child(".__self__"), TEXT), build=_build_method, text=lambda _, node: short(f"method {node[2]}")),
)  # fmt: skip
