"""Kinds of node for Python's own values: containers, other values with parts, partials and bound methods."""

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
from ...core._library_rows import RefusalError
from ..trust._buildable_classes import kind_of
from ._atoms import atom_text, encode_bytes, read_base64, short
from ._nodes import TEXT, Apart, Child, Kind, Manifest, Node, Operand, Parts, child, children, require
from ._wrapped_attributes import WRITTEN_ATTRIBUTES, copied_attributes, copy_wrapped_attributes

_KEYS = children(is_walked=True)


def key_text(key: Any) -> str:
    """Returns the step of a path to the value of a key, as JAX prints it."""
    try:
        text = repr(key)
    except Exception:  # noqa: BLE001 -- only a text for people
        text = ""
    # A text with an address differs from process to process, so the class takes its place.
    return f"[{text}]" if 0 < len(text) <= 80 and " at 0x" not in text else f"[<{type(key).__name__}>]"


# --- sets and mappings ------------------------------------------------------------------------------------------------


def _take_set(kind: str) -> Callable[[Any], Apart]:
    """Returns the function that takes a set or a frozenset apart."""

    def build(written: list[Any]) -> Node:
        # The order of strings in a Python set differs from process to process.
        return [kind, sorted(written, key=json.dumps)]

    def take(obj: Any) -> Apart:
        members = tuple(obj)
        return Apart(members, [f"{{{i}}}" for i in range(len(members))], build, members)

    return take


def _build_set(cls: type) -> Callable[[Parts, Node], Any]:
    """Returns the function that builds a set or a frozenset. It refuses members that occur twice."""

    def build(parts: Parts, node: Node) -> Any:
        items = parts.children(node[1])
        parts.count(items)
        members = cls(items)
        require(len(members) == len(items), "a member occurs twice")
        return members

    return build


def _flatten_order(keys: list[Any]) -> Sequence[int]:
    """Returns the positions of the keys in the order in which JAX flattens a dict: sorted, if they can be compared."""
    try:
        return sorted(range(len(keys)), key=keys.__getitem__)
    except (TypeError, ValueError):
        return range(len(keys))


def _take_mapping(kind: str) -> Callable[[Any], Apart]:
    """Returns the function that takes a dict, an `OrderedDict` or a `defaultdict` apart.

    The children are the values in the order of JAX, then the keys in insertion order, then the default factory. In the
    node, keys and values are both in insertion order.
    """

    def take(obj: Any) -> Apart:
        keys, values = list(obj), list(obj.values())
        count = len(keys)
        order = range(count) if kind == "OrderedDict" else _flatten_order(keys)
        factory = [obj.default_factory] if kind == "defaultdict" else []
        texts = [key_text(key) for key in keys]
        value_steps, key_steps = [texts[i] for i in order], [f"<key {text}>" for text in texts]
        steps = [*value_steps, *key_steps, *[".default_factory"] * len(factory)]

        def build(written: list[Any]) -> Node:
            written_values: list[Any] = [None] * count
            for place, i in enumerate(order):
                written_values[i] = written[place]
            written_factory = written[2 * count :]
            # A class or a function is written as an atom, which is a list. A node is a number.
            if written_factory and written_factory[0] is not None and type(written_factory[0]) is not list:
                raise RefusalError(
                    "a `defaultdict` whose default factory is neither a class nor a function of a module",
                    "Write the factory with `def` at module level.",
                )
            return [kind, *written_factory, written[count : 2 * count], written_values]

        return Apart([*[values[i] for i in order], *keys, *factory], steps, build, keys)

    return take


def _build_mapping(parts: Parts, node: Node) -> Any:
    """Builds a dict, an `OrderedDict` or a `defaultdict`. Refuses keys that occur twice."""
    keys = parts.children(node[-2])
    parts.count(keys)
    if node[0] == "defaultdict":
        factory = parts.child(node[1])
        require(factory is None or callable(factory), "its default factory is no class")
        mapping: dict[Any, Any] = collections.defaultdict(factory)
    else:
        mapping = {} if node[0] == "dict" else collections.OrderedDict()
    mapping.update(zip(keys, parts.children(node[-1]), strict=True))
    require(len(mapping) == len(keys), "a key occurs twice")
    return mapping


def _mapping_kind(cls: type, *leading: Operand) -> Kind:
    """Returns the row of a class of mappings. The operands are the leading ones, then keys and values."""
    name, keyed = cls.__name__, len(leading) + 1
    operands = (*leading, _KEYS, children())
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
    return Apart((str(obj),), ("",), lambda written: ["path", kind, written[0]])


def _build_path(parts: Parts, node: Node) -> Any:
    require(node[1] in _PATHS, "it is no path")
    concrete, pure = _PATHS[node[1]]
    # A concrete path of another system cannot be made on this one. A pure path has the same text.
    return (concrete if issubclass(type(pathlib.Path()), concrete) else pure)(parts.child(node[2]))


def _path_text(_: Manifest, node: Node) -> str | None:
    return short(f"{short(node[1])}({atom_text(node[2])})") if type(node[2]) is not int else None


_PATHS: dict[str, tuple[type, type]] = {
    "PosixPath": (pathlib.PosixPath, pathlib.PurePosixPath),
    "WindowsPath": (pathlib.WindowsPath, pathlib.PureWindowsPath),
    "PurePosixPath": (pathlib.PurePosixPath, pathlib.PurePosixPath),
    "PureWindowsPath": (pathlib.PureWindowsPath, pathlib.PureWindowsPath),
}
"""Name in a file → the class, and the pure class that takes its place on another system."""


def _take_bytearray(obj: bytearray) -> Apart:
    return Apart((), (), lambda _: ["bytearray", encode_bytes(obj)[1]])


def _start_stop_step_kind(cls: type, *forms: str) -> Kind:
    """Returns the row of `slice` or `range`."""
    operands = tuple(child(step, *forms) for step in (".start", ".stop", ".step"))
    return Kind(cls.__name__, operands, (cls,), inline=(f"{cls.__name__}(", ")"))


# --- partials ---------------------------------------------------------------------------------------------------------

# Attributes that `functools.update_wrapper` sets. Annotations are not written, but copied from `__wrapped__`.
_UPDATED = frozenset({*WRITTEN_ATTRIBUTES, "__wrapped__", "__type_params__"})


def _is_partial_attribute(name: Any) -> bool:
    """Returns True if a partial in a file may have an attribute. Names that other code calls, as `__get__`, may not."""
    return name in _UPDATED or (type(name) is str and not name.startswith("__") and not is_asked_of_all(name))


def _take_partial(obj: Any) -> Apart:
    attributes = {name: value for name, value in obj.__dict__.items() if name != "__annotations__"}
    if not all(map(_is_partial_attribute, attributes)):
        raise RefusalError("a partial with an attribute that stands in for a method", "Delete the attribute.")
    return _take_call_parts("partial", obj, obj.func, attributes or None)


def _take_jax_partial(obj: Any) -> Apart:
    function = obj.func
    # `jax.tree_util.Partial` wraps a `functools.partial` in this private class, so that it can be hashed.
    if type(function).__name__ == "_HashableCallableShim":
        function = vars(function)["fun"]
    return _take_call_parts("Partial", obj, function)


def _take_call_parts(kind: str, obj: Any, function: Any, *attributes: Any) -> Apart:
    """Takes a partial apart into arguments, values of keywords, names of keywords, and function, in this order.

    Args:
        kind: kind of the node.
        obj: the partial.
        function: the function that it applies.
        attributes: dict of the partial's own attributes, if nodes of the kind have one.
    """
    names, count = tuple(obj.keywords), len(obj.args)
    if not all(type(name) is str for name in names):
        raise RefusalError("a partial with a keyword that is no string", "Make it anew, with its keywords as strings.")
    argument_steps = [*[f"[{i}]" for i in range(count)], *[f"[{name!r}]" for name in names]]
    steps = [*argument_steps, *["<keyword>"] * len(names), ".func", ".__dict__"]

    def build(written: list[Any]) -> Node:
        values_end, names_end = count + len(names), count + 2 * len(names)
        arguments, values, names_written = written[:count], written[count:values_end], written[values_end:names_end]
        return [kind, written[names_end], arguments, names_written, values, *written[names_end + 1 :]]

    return Apart([*obj.args, *obj.keywords.values(), *names, function, *attributes], steps, build)


def _call_parts(parts: Parts, node: Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Returns the function, the arguments and the keyword arguments of a partial."""
    function, names = parts.child(node[1]), parts.children(node[3])
    require(callable(function), "its function cannot be called")
    require(len(set(names)) == len(names), "a keyword occurs twice")
    return function, tuple(parts.children(node[2])), dict(zip(names, parts.children(node[4]), strict=True))


def _build_partial(parts: Parts, node: Node) -> Any:
    """Builds a `functools.partial`, with its annotations copied from the function that it wraps."""
    function, args, keywords = _call_parts(parts, node)
    attributes = dict(parts.child(node[5]) or {})
    require(all(map(_is_partial_attribute, attributes)), "its attributes would stand in for methods")
    parameters = attributes.get("__type_params__", ())
    require(type(parameters) is tuple and not parameters, "its type parameters are no code's")
    if "__wrapped__" in attributes:
        annotations = copied_attributes(attributes["__wrapped__"]).get("__annotations__")
        attributes |= {} if annotations is None else {"__annotations__": annotations}
    # The constructor would merge a partial of a partial into one, so the state is set instead.
    partial = functools.partial(_placeholder)
    set_state: Any = partial.__setstate__  # pyright: ignore[reportAttributeAccessIssue]
    set_state((function, args, keywords, attributes or None))
    return partial


def _placeholder() -> None:
    """Is the function of a partial until its state is set."""


def _build_jax_partial(parts: Parts, node: Node) -> Any:
    function, args, keywords = _call_parts(parts, node)
    return jtu.Partial(function, *args, **keywords)


_PARTIAL_OPERANDS = (child(".func"), children(), children("text"), children())
"""Function, arguments, names of keywords, and their values."""

# --- bound methods ----------------------------------------------------------------------------------------------------


class _Example(eqx.Module):
    def method(self) -> None:
        """Is bound below to get the class of bound methods. `__call__` would be an ordinary bound method."""


BoundMethod: type = type(_Example().method)
"""Class of Equinox's bound methods, which are pytrees. The class has no public name."""

CompiledFunction: type = type(eqx.filter_jit(_Example.method))
"""Class of the results of `equinox.filter_jit`. These modules hold a function that JAX has compiled."""


def _find_method(owner: Any, name: str) -> Any:
    """Returns the function that `owner.<name>` would bind, found without running any descriptor. None if none does.

    Args:
        owner: an instance, for an ordinary method, or a class, for a class method.
        name: name of the method.
    """
    bases: Iterable[type] = type.__getattribute__(owner if isinstance(owner, type) else type(owner), "__mro__")
    for base in bases:
        attribute = type.__getattribute__(base, "__dict__").get(name)
        if attribute is not None:
            if isinstance(owner, type) or isinstance(attribute, classmethod):
                return attribute.__func__ if isinstance(owner, type) and isinstance(attribute, classmethod) else None
            return attribute if isinstance(attribute, types.FunctionType) else None
    return None


def _method_name(function: Any, owner: Any) -> str | None:
    """Returns the name under which `owner` binds a function. None if it does not: see `_find_method`."""
    name = getattr(function, "__name__", None)
    return name if isinstance(name, str) and name.isidentifier() and _find_method(owner, name) is function else None


def _take_method(obj: types.MethodType) -> Apart:
    """Takes an ordinary bound method apart. Raises `RefusalError` if its name does not lead back to it."""
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
    return Apart((owner,), (".__self__",), lambda written: ["method", written[0], name])


def take_bound_method(obj: Any) -> Apart | None:
    """Takes a bound method of an Equinox module apart. Returns None if the module's class does not have the method."""
    parts = object.__getattribute__(obj, "__dict__")
    owner, function = parts.get("__self__"), parts.get("__func__")
    name = _method_name(function, owner)
    if name is None or isinstance(owner, type):
        return None
    return Apart((owner,), (".__self__",), lambda written: ["bound", written[0], name])


def function_of(method: Any) -> Any:
    """Returns the function that a bound method, Python's or Equinox's, calls."""
    return object.__getattribute__(method, "__dict__")["__func__"] if type(method) is BoundMethod else method.__func__


def _build_method(parts: Parts, node: Node) -> Any:
    """Builds a bound method, Python's or Equinox's. Only methods of trusted classes are built."""
    owner = parts.child(node[1])
    function = _find_method(owner, node[2])
    cls = owner if issubclass(type(owner), type) else type(owner)
    # Classes that files may name, such as `pathlib.Path`, have methods that must not come from a file: `unlink`.
    require(kind_of(cls) is not None, "its object is no instance of a trusted class")
    if function is None:
        raise StructureMismatchError(f"`{cls.__qualname__}` has no method `{node[2][:80]}`. Add it to the class again.")
    if node[0] == "method":
        return types.MethodType(function, owner)
    require(kind_of(cls) == "module" and cls is not owner, "its object is no Equinox module")
    bound = object.__new__(BoundMethod)
    object.__getattribute__(bound, "__dict__").update({"__func__": function, "__self__": owner})
    copy_wrapped_attributes(bound, function)
    return bound


_OWNERS = {
    "method": frozenset({"object", "wrapper", "registered", "enum"}),
    "bound": frozenset({"object", "wrapper"}),
}  # fmt: skip
"""Kind of a method's node → the kinds of node of its object, all of which name a class."""


def name_of_method(types: list[str], nodes: list[Node], node: Node) -> str | None:
    """Returns the name of the function that a node binds, as `module:Class.method`.

    Args:
        types: the name of each class in the manifest.
        nodes: the nodes before this one, or all of them.
        node: any node.

    Returns:
        None if the node is no method, or the node of its object names no class.
    """
    if node[0] not in _OWNERS:
        return None
    owner: Child = node[1]
    # A class method is bound to a class, which is an atom.
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
    _mapping_kind(dict),
    _mapping_kind(collections.OrderedDict),
    _mapping_kind(collections.defaultdict, child(".default_factory", "null", "class", "function")),
    Kind(
        "deque", (child(".maxlen", "null", "int"), children()), (collections.deque,), build=_build_deque,
        has_identity=True,
    ),
    _start_stop_step_kind(slice),
    _start_stop_step_kind(range, "int"),
    Kind("path", (TEXT, child(".text", "text")), tuple(pure for pair in _PATHS.values() for pure in pair),
         _take_path, _build_path, inline=_path_text),
    Kind("bytearray", (Operand("base64"),), (bytearray,), _take_bytearray,
         lambda _, node: bytearray(read_base64(node[1])), has_identity=True),
    Kind("marker", (), (object,), build=lambda *_: object(), has_identity=True),
    Kind(
        "partial", (*_PARTIAL_OPERANDS, child(".<attributes>", "null", "dict")), (functools.partial,), _take_partial,
        _build_partial, keyed=3,
    ),
    Kind("Partial", _PARTIAL_OPERANDS, (jtu.Partial,), _take_jax_partial, _build_jax_partial, keyed=3),
    Kind("method", (child(".__self__"), TEXT), (types.MethodType,), _take_method, _build_method,
         text=lambda _, node: short(f"method {node[2]}")),
    Kind("bound", (child(".__self__"), TEXT), build=_build_method, text=lambda _, node: short(f"method {node[2]}")),
)  # fmt: skip
