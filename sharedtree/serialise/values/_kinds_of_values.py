"""All kinds of node: their rows, and the functions of these rows that take objects apart and build them.

First come Python's values: containers, other values with parts, partials and bound methods. Then come instances of
classes, which are rebuilt field by field, by an unflatten function, or found by name (enums). Then come JAX's values:
`ShapeDtypeStruct`s, treedefs, meshes and shardings. The rows stand at the end.

Nothing here gets an attribute of an instance that a file describes. Its class may have a `__getattr__` that calls what
the file put into the instance.

A node is a JSON list: its kind, then its operands, so `node[1]` is the first operand. A child in a node is the number
of an earlier node, or an atom, a value in place. A *step* is the part of a path that leads to a child, such as
`.weight`; it is "" for a child that nobody looks for by path.

The functions `_take_...` take an object apart. They return a `Decomposition`: the children in the order of the walk,
their steps, and `build`, a function that makes the node from `written`, the list of the same children as numbers and
atoms. The first path to a shared object is made of these steps, so traced children come first, in JAX's order.

The functions `_build_...` make the object of a node. `parts.child` and `parts.children` return the objects of children,
and `parts.makers` has a function or class for each type. `require` raises `ValueError` with a reason, which the decoder
turns into a `FormatError`.

A mesh is loaded over the devices with the same ids. If some of these are absent, it is loaded over the first devices in
JAX's order. With too few devices loading fails, because a model that holds a mesh means to compute on it. No file
contains a single device.
"""

import collections
import contextlib
import enum
import functools
import itertools
import json
import math
import pathlib
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax import tree_util as jtu
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ...core._class_attributes import is_protocol_name
from ...core._comparison import array_text
from ...core._errors import FormatError, StructureMismatchError
from ...core._jax_internals import rebuild_registered, registered_counts
from ...core._node_types import RefusalError, fault_of_aux, is_keyed_by_aux, node_type_of, node_types_by_class
from ...core._printing import printable
from ...tree._dag import Dag
from ..arrays._placing import ArrayEntry, key_dtype, key_implementation
from ..trust._buildable_classes import kind_of
from ._atoms import atom_text, encode_bytes, encode_int, encode_numpy, encode_str, read_base64, short
from ._instances import WRITTEN_ATTRIBUTES, copied_attributes, copy_wrapped_attributes
from ._nodes import (
    MAX_STEP,
    SIZES,
    TEXT,
    TYPE,
    Child,
    Decomposition,
    Kind,
    Manifest,
    Node,
    Operand,
    Parts,
    are_sizes,
    child,
    children,
    require,
    require_few_collisions,
    step_of,
)

_KEYS = children(is_walked=True)


def key_text(key: Any) -> str:
    """Returns the step of a path to the value of a key, as JAX prints it: `['a']`, or `[<Point>]`.

    The second form has the class of the key. It is for a key whose text is long, empty, has an address or raises.
    """
    try:
        text = repr(key)
    except Exception:  # noqa: BLE001 -- only a text for people
        text = ""
    # A text with an address differs from process to process, so the class takes its place.
    return f"[{text}]" if 0 < len(text) <= 80 and " at 0x" not in text else f"[<{type(key).__name__}>]"


# --- sets and mappings ------------------------------------------------------------------------------------------------


def _take_set(kind: str) -> Callable[[Any], Decomposition]:
    """Returns the function that takes sets or frozensets apart.

    Args:
        kind: `set` or `frozenset`.
    """

    def build(written: list[Any]) -> Node:
        """Makes the node, with the members in an order that does not depend on the process."""
        # The order of strings in a Python set differs from process to process. The numbers of nodes do not, because the
        # walk visits members that are nodes in an order of its own: see `_encoding.py`.
        return [kind, sorted(written, key=json.dumps)]

    def take(obj: Any) -> Decomposition:
        members = tuple(obj)
        # The steps are {0}, {1} and so on.
        return Decomposition(members, [f"{{{i}}}" for i in range(len(members))], build, keys=members)

    return take


def _build_set(cls: type) -> Callable[[Parts, Node], Any]:
    """Returns the function that builds sets or frozensets.

    The function raises `ValueError` if a member occurs twice, or if too many members have the same hash.
    """

    def build(parts: Parts, node: Node) -> Any:
        items = parts.children(node[1])
        parts.limit_collisions(items)
        members = cls(items)
        require(len(members) == len(items), "a member occurs twice")
        return members

    return build


def _flatten_order(keys: list[Any]) -> Sequence[int]:
    """Returns the positions of the keys in the order in which JAX flattens a dict: ["b", "a"] → [1, 0].

    JAX sorts the keys. If they cannot be compared, they stay in insertion order.
    """
    try:
        return sorted(range(len(keys)), key=keys.__getitem__)
    except (TypeError, ValueError):
        return range(len(keys))


def _take_mapping(kind: str) -> Callable[[Any], Decomposition]:
    """Returns the function that takes instances of a class of mappings apart.

    The children are the values in the order of JAX, then the keys in insertion order, then the default factory. In the
    node, keys and values are both in insertion order:

        {"b": 1, "a": 2}      children 2, 1, "b", "a"      node ["dict", ["b", "a"], [<1>, <2>]]

    Args:
        kind: `dict`, `OrderedDict` or `defaultdict`.
    """

    def take(obj: Any) -> Decomposition:
        """Takes one mapping apart. `build` raises `RefusalError` for an unsuitable default factory."""
        keys, values = list(obj), list(obj.values())
        count = len(keys)
        # For each value, in the order of the walk, its position in the mapping.
        order = range(count) if kind == "OrderedDict" else _flatten_order(keys)
        factory = [obj.default_factory] if kind == "defaultdict" else []
        texts = [key_text(key) for key in keys]
        value_steps, key_steps = [texts[i] for i in order], [f"<key {text}>" for text in texts]
        steps = [*value_steps, *key_steps, *[".default_factory"] * len(factory)]

        def build(written: list[Any]) -> Node:
            """Puts the written values back into the order of the keys."""
            written_values: list[Any] = [None] * count
            for place_in_walk, position in enumerate(order):
                written_values[position] = written[place_in_walk]
            # The child after the values and keys. Only a `defaultdict` has it.
            written_factory = written[2 * count :]
            # A class or a function is written as an atom, which is a list. An instance would be the number of a node.
            if written_factory and written_factory[0] is not None and type(written_factory[0]) is not list:
                raise RefusalError(
                    "a `defaultdict` whose default factory is neither a class nor a function of a module",
                    "Write the factory with `def` at module level.",
                )
            return [kind, *written_factory, written[count : 2 * count], written_values]

        return Decomposition([*[values[i] for i in order], *keys, *factory], steps, build, keys=keys)

    return take


def _build_mapping(parts: Parts, node: Node) -> Any:
    """Builds a dict, an `OrderedDict` or a `defaultdict`.

    Raises:
        ValueError: if a key occurs twice, too many keys have the same hash, or the default factory cannot be called.
    """
    # The last two operands are keys and values. A `defaultdict` has its default factory before them.
    keys = parts.children(node[-2])
    parts.limit_collisions(keys)
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
    """Returns the row of a class of mappings.

    Args:
        cls: the class.
        leading: operands before the last two, which are the keys and the values.
    """
    # `keyed` is the number of the operand with the keys.
    name, keyed = cls.__name__, len(leading) + 1
    operands = (*leading, _KEYS, children())
    is_deep = cls is dict
    return Kind(
        name, operands, (cls,), _take_mapping(name), _build_mapping, keyed=keyed, is_deep=is_deep, has_identity=True
    )


# --- values that hold others ------------------------------------------------------------------------------------------


def _build_deque(parts: Parts, node: Node) -> Any:
    """Builds a deque.

    Raises:
        ValueError: if the node has more items than the deque may have. Python would drop some.
    """
    maxlen, items = parts.child(node[1]), parts.children(node[2])
    require(maxlen is None or maxlen >= len(items), "it is longer than it may be")
    return collections.deque(items, maxlen)


def _take_path(obj: pathlib.PurePath) -> Decomposition:
    """Takes a path of the file system apart. Its one child is its text, and the node also has the name of its class."""
    class_name = type(obj).__name__
    return Decomposition((str(obj),), ("",), lambda written: ["path", class_name, written[0]])


def _build_path(parts: Parts, node: Node) -> Any:
    """Builds a path of the file system, or a pure path if the class in the file is for another operating system.

    Raises:
        ValueError: if the file names another class than one of `_PATHS`.
    """
    require(node[1] in _PATHS, "it is no path")
    concrete, pure = _PATHS[node[1]]
    # A concrete path of another system cannot be made on this one. A pure path has the same text.
    return (concrete if issubclass(type(pathlib.Path()), concrete) else pure)(parts.child(node[2]))


def _path_text(_: Manifest, node: Node) -> str | None:
    """Returns a path as text, such as `PosixPath('a/b')`. None if its text is not an atom."""
    return short(f"{short(node[1])}({atom_text(node[2])})") if type(node[2]) is not int else None


_PATHS: dict[str, tuple[type, type]] = {
    "PosixPath": (pathlib.PosixPath, pathlib.PurePosixPath),
    "WindowsPath": (pathlib.WindowsPath, pathlib.PureWindowsPath),
    "PurePosixPath": (pathlib.PurePosixPath, pathlib.PurePosixPath),
    "PureWindowsPath": (pathlib.PureWindowsPath, pathlib.PureWindowsPath),
}
"""Name in a file → the class, and the pure class that takes its place on another system."""


def _take_bytearray(obj: bytearray) -> Decomposition:
    """Takes a `bytearray` apart. It has no children, and the node has its bytes in base64."""
    return Decomposition((), (), lambda _: ["bytearray", encode_bytes(obj)[1]])


def _start_stop_step_kind(cls: type, *forms: str) -> Kind:
    """Returns the row of `slice` or `range`.

    Args:
        cls: the class.
        forms: what start, stop and step may be, such as `int`. Default: any values.
    """
    operands = tuple(child(step, *forms) for step in (".start", ".stop", ".step"))
    return Kind(cls.__name__, operands, (cls,), inline=(f"{cls.__name__}(", ")"))


# --- partials ---------------------------------------------------------------------------------------------------------

# Attributes that `functools.update_wrapper` sets and a file may hold. Annotations are no such attribute: they are
# copied from the object in `__wrapped__` when a partial is loaded.
_UPDATED = frozenset({*WRITTEN_ATTRIBUTES, "__wrapped__", "__type_params__"})


def _is_partial_attribute(name: Any) -> bool:
    """Returns True if a partial in a file may have an attribute with this name.

    It may not have a name under which other code looks for something to call, such as `__get__`.
    """
    return name in _UPDATED or (type(name) is str and not name.startswith("__") and not is_protocol_name(name))


def _take_partial(obj: Any) -> Decomposition:
    """Takes a `functools.partial` apart, with its own attributes except annotations.

    Raises:
        RefusalError: if it has an attribute that no file may have, or a keyword that is no string.
    """
    attributes = {name: value for name, value in obj.__dict__.items() if name != "__annotations__"}
    if not all(map(_is_partial_attribute, attributes)):
        raise RefusalError("a partial with an attribute that stands in for a method", "Delete the attribute.")
    # Most partials have no attributes. Then the child is None.
    return _take_call_parts("partial", obj, obj.func, attributes or None)


def _take_jax_partial(obj: Any) -> Decomposition:
    """Takes a `jax.tree_util.Partial` apart. Raises `RefusalError` if it has a keyword that is no string."""
    function = obj.func
    # `jax.tree_util.Partial` wraps a `functools.partial` in this private class, so that it can be hashed.
    if type(function).__name__ == "_HashableCallableShim":
        function = vars(function)["fun"]
    return _take_call_parts("Partial", obj, function)


def _take_call_parts(kind: str, obj: Any, function: Any, *attributes: Any) -> Decomposition:
    """Takes a partial apart into arguments, values of keywords, names of keywords, function, and attributes.

    The children are in this order, in which traced ones come first. The node has them in the order of its operands:
    function, arguments, names, values, attributes. For `partial(f, x, n=2)`:

        children x, 2, "n", f, None      node ["partial", <f>, [<x>], ["n"], [<2>], null]

    Args:
        kind: kind of the node, `partial` or `Partial`.
        obj: the partial.
        function: the function that the partial calls.
        attributes: one value for `partial`: the dict of the partial's own attributes, or None if there are none. No
            value for `Partial`, whose nodes have no operand for it.

    Raises:
        RefusalError: if the partial has a keyword that is no string.
    """
    names, count = tuple(obj.keywords), len(obj.args)
    if not all(type(name) is str for name in names):
        raise RefusalError("a partial with a keyword that is no string", "Make it anew, with its keywords as strings.")
    argument_steps = [*[f"[{i}]" for i in range(count)], *[f"[{name!r}]" for name in names]]
    steps = [*argument_steps, *["<keyword>"] * len(names), ".func", ".__dict__"]

    def build(written: list[Any]) -> Node:
        # Where the written values and names end. The function and the attributes follow.
        values_end, names_end = count + len(names), count + 2 * len(names)
        arguments, values, names_written = written[:count], written[count:values_end], written[values_end:names_end]
        return [kind, written[names_end], arguments, names_written, values, *written[names_end + 1 :]]

    return Decomposition([*obj.args, *obj.keywords.values(), *names, function, *attributes], steps, build)


def _call_parts(parts: Parts, node: Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Returns the function, the arguments and the keyword arguments of a partial.

    Raises:
        ValueError: if the function cannot be called, or a keyword occurs twice.
    """
    function, names = parts.child(node[1]), parts.children(node[3])
    require(callable(function), "its function cannot be called")
    require(len(set(names)) == len(names), "a keyword occurs twice")
    return function, tuple(parts.children(node[2])), dict(zip(names, parts.children(node[4]), strict=True))


def _build_partial(parts: Parts, node: Node) -> Any:
    """Builds a `functools.partial`. Its annotations are copied from the object in its attribute `__wrapped__`.

    Raises:
        ValueError: if it has an attribute that no file may have, or type parameters, if its function cannot be called,
            or if a keyword occurs twice.
    """
    function, args, keywords = _call_parts(parts, node)
    # The last operand is the dict of the partial's attributes, or None.
    attributes = dict(parts.child(node[5]) or {})
    require(all(map(_is_partial_attribute, attributes)), "its attributes would stand in for methods")
    # `functools.update_wrapper` copies the type parameters of a function, which are `()` for all but generic functions.
    # Only the code that defines a generic function can make type parameters, so a file may have none.
    parameters = attributes.get("__type_params__", ())
    require(type(parameters) is tuple and not parameters, "its type parameters are no code's")
    if "__wrapped__" in attributes:
        annotations = copied_attributes(attributes["__wrapped__"]).get("__annotations__")
        attributes |= {} if annotations is None else {"__annotations__": annotations}
    # The constructor would merge a partial of a partial into one. So a partial of any function is made, and then gets
    # its state.
    partial = functools.partial(_placeholder)
    set_state: Any = partial.__setstate__  # pyright: ignore[reportAttributeAccessIssue]
    set_state((function, args, keywords, attributes or None))
    return partial


def _placeholder() -> None:
    """Does nothing. A partial has this function until its state is set."""


def _build_jax_partial(parts: Parts, node: Node) -> Any:
    """Builds a `jax.tree_util.Partial`. Raises `ValueError` as `_call_parts` does."""
    function, args, keywords = _call_parts(parts, node)
    return jtu.Partial(function, *args, **keywords)


_PARTIAL_OPERANDS = (child(".func"), children(), children("text"), children())
"""Function, arguments, names of keywords, and their values."""

# --- bound methods ----------------------------------------------------------------------------------------------------


class _Example(eqx.Module):
    """A module with a method, from which the constants below get classes of Equinox that have no public name."""

    def method(self) -> None:
        """Does nothing. Equinox binds `__call__` as Python does, so the method has another name."""


BoundMethod: type = type(_Example().method)
"""Class of Equinox's bound methods, which are pytrees. The class has no public name."""

CompiledFunction: type = type(eqx.filter_jit(_Example.method))
"""Class of the results of `equinox.filter_jit`. Such a module holds a function that JAX has compiled."""


def _find_method(owner: Any, name: str) -> Any:
    """Returns the function that `owner.<name>` would bind to `owner`, found without running any descriptor.

    Args:
        owner: an instance, for an ordinary method, or a class, for a class method.
        name: name of the method.

    Returns:
        None if `owner.<name>` is no method that is bound to `owner`. For an instance, this includes a class method:
        Python would bind it to the class.
    """
    bases: Iterable[type] = type.__getattribute__(owner if isinstance(owner, type) else type(owner), "__mro__")
    for base in bases:
        attribute = type.__getattribute__(base, "__dict__").get(name)
        # The first class with the name decides. A class binds only class methods, and an instance only functions.
        if attribute is not None:
            if isinstance(owner, type) or isinstance(attribute, classmethod):
                return attribute.__func__ if isinstance(owner, type) and isinstance(attribute, classmethod) else None
            return attribute if isinstance(attribute, types.FunctionType) else None
    return None


def _method_name(function: Any, owner: Any) -> str | None:
    """Returns the name of a function if `owner.<name>` binds this very function to `owner`, and None otherwise."""
    name = getattr(function, "__name__", None)
    return name if isinstance(name, str) and name.isidentifier() and _find_method(owner, name) is function else None


def _take_method(obj: types.MethodType) -> Decomposition:
    """Takes one of Python's bound methods apart. Its one child is its object, and the node also has the method's name.

    Raises:
        RefusalError: if the name does not lead from the object to the method, or if the object's class cannot be
            rebuilt from a file.
    """
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
    return Decomposition((owner,), (".__self__",), lambda written: ["method", written[0], name])


def take_bound_method(obj: Any) -> Decomposition | None:
    """Takes a bound method of an Equinox module apart. Its one child is the module, and the node also has its name.

    Returns:
        None if the name of the function does not lead from the module to this function. Then no node `bound` can stand
        for the method.
    """
    parts = object.__getattribute__(obj, "__dict__")
    owner, function = parts.get("__self__"), parts.get("__func__")
    name = _method_name(function, owner)
    if name is None or isinstance(owner, type):
        return None
    return Decomposition((owner,), (".__self__",), lambda written: ["bound", written[0], name])


def function_of_method(method: Any) -> Any:
    """Returns the function called by a bound method, Python's or Equinox's."""
    return object.__getattribute__(method, "__dict__")["__func__"] if type(method) is BoundMethod else method.__func__


def _build_method(parts: Parts, node: Node) -> Any:
    """Builds a bound method, Python's or Equinox's. Only methods of trusted classes are built.

    Raises:
        StructureMismatchError: if the class of the object has no method of this name any more.
        ValueError: if the object's class has no kind (`kind_of`), or if the object of a `bound` is no Equinox module.
    """
    owner = parts.child(node[1])
    function = _find_method(owner, node[2])
    cls = owner if issubclass(type(owner), type) else type(owner)
    # A file may name more classes than those with a kind. `pathlib.Path` is one, and has methods that must not come
    # from a file, such as `unlink`.
    require(kind_of(cls) is not None, "its object is no instance of a trusted class")
    if function is None:
        raise StructureMismatchError(f"`{cls.__qualname__}` has no method `{node[2][:80]}`. Add it to the class again.")
    if node[0] == "method":
        return types.MethodType(function, owner)
    # The other kind of node is `bound`. Its object must be an instance, and no class.
    require(kind_of(cls) == "module" and cls is not owner, "its object is no Equinox module")
    bound = object.__new__(BoundMethod)
    object.__getattribute__(bound, "__dict__").update({"__func__": function, "__self__": owner})
    copy_wrapped_attributes(bound, function)
    return bound


_OWNERS = {
    "method": frozenset({"object", "wrapper", "registered", "enum"}),
    "bound": frozenset({"object", "wrapper"}),
}  # fmt: skip
"""Kind of a method's node → the kinds that the node of its object may have. Their first operand is the class.

`method` is a bound method of Python, and `bound` is Equinox's bound method of a module.
"""


def name_of_method(types: list[str], nodes: list[Node], node: Node) -> str | None:
    """Returns the name of the function bound by the node of a bound method, as `module:Class.method`.

    Args:
        types: for each type of the manifest, the name of its class.
        nodes: the nodes before `node`, or all of them.
        node: any node.

    Returns:
        None if the node is no bound method, or if its object has no class of a known name. The second case is the
        `__call__` of a bound method: its object is a node `bound`, which names no class.
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


# --- instances that are rebuilt field by field ------------------------------------------------------------------------


def _build_object(parts: Parts, node: Node) -> Any:
    """Builds an instance by the function from `_changed_classes.maker_for` for its type."""
    return parts.makers[node[1]](parts.children(node[2]))


def _build_wrapper(parts: Parts, node: Node) -> Any:
    """Builds an Equinox module around the function in one of its fields.

    Name, documentation and annotations of the module are copied from the value of the field that holds the function.

    Raises:
        ValueError: if the class is no Equinox module.
    """
    obj = _build_object(parts, node)
    require(kind_of(type(obj)) == "module", "its class is no Equinox module")
    # `node[3]` is the name of that field. Its position in the type is also its position among the values, `node[2]`.
    copy_wrapped_attributes(obj, parts.child(node[2][parts.fields[node[1]].index(node[3])]))
    return obj


def _steps_of_fields(manifest: Manifest, node: Node) -> Iterator[tuple[Child, str]]:
    """Yields the children of an instance, each with its step, such as `.weight`. The order is that of the type."""
    entry = manifest.types[node[1]]
    for value, name in zip(node[2], (*entry.fields, *entry.extra), strict=True):
        yield value, step_of(name)


def _class_name(manifest: Manifest, node: Node) -> str:
    """Returns the qualified name of a node's class, without the module."""
    return manifest.types[node[1]].name.rpartition(":")[2]


# --- Registered classes: the only place where code of a trusted class rebuilds an instance ----------------------------


def take_registered(obj: Any, type_index: int) -> Decomposition:
    """Takes an instance of a class apart that was registered with JAX or with `register_node`.

    Args:
        obj: the instance.
        type_index: index of its class in `types` of the manifest.

    Raises:
        RefusalError: if its flatten function raises, or returns the instance itself or something that no file may have
            (`fault_of_aux`) as auxiliary data.
    """
    if type(obj) is Dag:
        return _take_dag(obj, type_index)
    node_type = node_type_of(obj)
    assert node_type is not None
    try:
        child_objects, aux = node_type.take_apart(obj)
        keys = [str(key) for key in node_type.keys_of(obj)]
    except Exception as error:  # noqa: BLE001 -- the class's own code may raise anything
        raise RefusalError(
            f"a `{type(obj).__qualname__}` whose flatten function raises {type(error).__name__}: {error}",
            "Leave it out, or bring it into a state in which JAX can flatten it.",
        ) from error
    # A class without children can be a constant for JAX: its flatten function returns the instance as auxiliary data.
    # The walk would report a cycle, which no user of the class could break. So there is an error for this case.
    if aux is obj:
        raise RefusalError(
            f"a `{type(obj).__qualname__}` that is its own auxiliary data, of which nothing can be written",
            "Let its flatten function give plain values, from which its unflatten function makes it anew.",
        )
    fault = fault_of_aux(type(obj), aux)
    if fault is not None:
        raise RefusalError(
            f"a `{type(obj).__qualname__}` with {fault}, which no file may have", "Set it anew after loading."
        )
    if is_keyed_by_aux(type(obj)):
        try:
            require_few_collisions(aux)
        except ValueError:
            raise RefusalError(
                f"a `{type(obj).__qualname__}` in which too many keys have one hash",
                "Use other keys. Python compares such keys one by one, which takes too long to be allowed in a file.",
            ) from None
    # The keys of the children, such as ".mean", become their steps. If some key is unsuitable, all steps are positions,
    # such as "[0]". There must be one key for each child, all different, each beginning with "." or "[". A key must
    # have no address, which differs from process to process, and no surrogates, which no file can hold (`encode_str`
    # returns a list for these).
    is_sound = len(keys) == len(child_objects) and are_steps(keys)
    if not is_sound or any(" at 0x" in key or type(encode_str(key)) is list for key in keys):
        keys = [f"[{i}]" for i in range(len(child_objects))]
    return Decomposition(
        [*child_objects, aux],
        [*keys, "<aux>"],
        # The auxiliary data is the last child, and the second operand.
        lambda written: ["registered", type_index, written[-1], written[:-1], keys],
    )


def _take_dag(dag: Dag[Any], type_index: int) -> Decomposition:
    """Takes a `Dag` apart. Its one child is its model.

    Args:
        dag: the `Dag`.
        type_index: index of its class in `types` of the manifest.

    Raises:
        RefusalError: if the `Dag` has other leaves, or another structure, than its model has now. The model was changed
            after the `Dag` was made, or `jax.tree.map` put other values in the places of the arrays.
    """
    leaves, structure = dag._flatten()  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    try:
        model_leaves, model_structure = Dag(dag.tree)._flatten()  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
        pairs = zip(model_leaves, leaves, strict=True)
        is_unchanged = model_structure is structure and all(a is b for a, b in pairs)
    except Exception:  # noqa: BLE001 -- the unflatten functions of any class may raise anything
        is_unchanged = False
    if not is_unchanged:
        raise RefusalError(
            "a `Dag` that holds something else than its model has: the model was changed, or numbers or placeholders "
            "are in the places of arrays",
            "Save its model, `dag.tree`, or its leaves, `jax.tree.leaves(dag)`.",
        )
    return Decomposition((dag.tree,), (".tree",), lambda written: ["registered", type_index, None, written, [".tree"]])


def are_steps(steps: Any) -> bool:
    """Returns True for a list of different texts, each usable as a step of a path."""
    if type(steps) is not list or not all(type(step) is str for step in steps):
        return False
    return len(set(steps)) == len(steps) and all(1 < len(step) <= MAX_STEP and step[0] in ".[" for step in steps)


def _build_registered(parts: Parts, node: Node) -> Any:
    """Builds an instance by the unflatten function of its class, and flattens it to check that nothing was dropped.

    Raises:
        StructureMismatchError: if the unflatten function raises, or if the class has another number of children or of
            static values than the file.
        ValueError: if no file may have this auxiliary data, or if it is keys of which too many have the same hash.
    """
    cls, aux, child_objects = parts.makers[node[1]], parts.child(node[2]), parts.children(node[3])
    if cls is Dag:
        require(aux is None and len(child_objects) == 1, "a `Dag` has one model, and nothing else")
        return Dag._of_file(child_objects[0])  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    node_type, counts_in_file = node_types_by_class.get(cls), _count_parts(child_objects, aux)
    fault = fault_of_aux(cls, aux)
    require(fault is None, f"it has {fault}")
    # The unflatten function of such a class makes a dict. It may take fewer keys than there are, but no more than there
    # are children. `islice`, because a `range` has any number of items.
    if is_keyed_by_aux(cls):
        # If the data is no sequence or holds what has no hash, the unflatten function raises, too.
        with contextlib.suppress(TypeError):
            require_few_collisions(itertools.islice(aux, len(child_objects)))
    # A class of `jax.tree_util.register_dataclass` has fixed counts, which can be compared before it is built.
    fixed_counts = registered_counts(cls)
    if fixed_counts is not None and fixed_counts != counts_in_file:
        raise _wrong_counts(cls, counts_in_file, fixed_counts)
    try:
        if node_type is not None:
            obj = node_type.put_together(aux, child_objects)
            flattened: Any = node_type.take_apart(obj)
        else:
            obj = rebuild_registered(cls, aux, child_objects)
            flattened = jtu.default_registry.flatten_one_level(obj)
    except Exception as error:  # noqa: BLE001 -- the class's own code may raise anything
        # `from None`, since its text may quote the file, and a traceback would show it as it is.
        raise StructureMismatchError(
            f"The unflatten function of `{cls.__qualname__}` raised {type(error).__name__} on what the file holds: "
            f"{printable(str(error)[:200])}. Load it with the version of the class that wrote it."
        ) from None
    # For other classes, only the unflatten function knows how many children it takes. It may drop the excess without an
    # error, for example by a `zip` of names and children. So the counts of the new instance are compared.
    counts = None if flattened is None else _count_parts(*flattened)
    if counts != counts_in_file:
        raise _wrong_counts(cls, counts_in_file, counts or (0, None))
    return obj


def _count_parts(child_objects: Sequence[Any], aux: Any) -> tuple[int, int | None]:
    """Returns the number of children and the number of static values.

    The number of static values is None if the auxiliary data is no tuple, list or dict, which could be counted.
    """
    return len(child_objects), len(aux) if type(aux) in (tuple, list, dict) else None


def _wrong_counts(
    cls: type, counts_in_file: tuple[int, int | None], counts_of_class: tuple[int, int | None]
) -> StructureMismatchError:
    """Returns the error for a node with other numbers of children or static values than its class has.

    Args:
        cls: the class.
        counts_in_file: result of `_count_parts` for the node.
        counts_of_class: result of `_count_parts` for an instance of the class.
    """
    in_file, of_class = _counts_text(*counts_in_file), _counts_text(*counts_of_class)
    return StructureMismatchError(
        f"The file has {in_file} for a `{cls.__qualname__}`, and that has {of_class}. Load it with the version of the "
        "class that wrote it."
    )


def _counts_text(num_children: int, num_static: int | None) -> str:
    """Returns a result of `_count_parts` in words, such as "2 children and 1 static values"."""
    return f"{num_children} children and {'other aux data' if num_static is None else f'{num_static} static values'}"


def _steps_of_registered(_: Manifest, node: Node) -> Iterator[tuple[Child, str]]:
    """Yields the children of an instance, each with its step, and then the auxiliary data with the step `<aux>`."""
    # `node[3]` has the children, `node[4]` their steps, and `node[2]` is the auxiliary data.
    yield from zip(node[3], node[4], strict=True)
    yield node[2], "<aux>"


# --- enums ------------------------------------------------------------------------------------------------------------


def take_enum(obj: Any, type_index: int) -> Decomposition:
    """Takes a member of an enum apart. It has no children, and the node has its name.

    A combination of flags may have no name. Then the node has its value.

    Args:
        obj: the member.
        type_index: index of its class in `types` of the manifest.

    Raises:
        RefusalError: if the object is no member of its class.
    """
    cls, name, value = type(obj), obj._name_, obj._value_  # noqa: SLF001 -- `name` may be a member's name
    if name is not None and cls.__members__.get(name) is obj:
        member = encode_str(name)
    elif isinstance(obj, enum.Flag) and type(value) is int:
        member = encode_int(value)
    else:
        raise RefusalError(f"a `{cls.__qualname__}` that is no member of its class", "Use one of its members.")
    return Decomposition((), (), lambda _: ["enum", type_index, member])


MAX_COMBINATIONS, MAX_FLAG_BITS = 1024, 256
"""Most combinations of flags that files may add to a class in one process, and most bits of one combination."""

_combinations: weakref.WeakKeyDictionary[type, int] = weakref.WeakKeyDictionary()
"""Class of flags → number of combinations that files have added to it."""


def _build_enum(parts: Parts, node: Node) -> Any:
    """Returns the member of an enum with the name in the file, or the combination of flags with the value in the file.

    Raises:
        StructureMismatchError: if the enum does not have the member any more.
        ValueError: if the combination does not exist, or files have added too many to this class.
    """
    cls, name_or_value = parts.makers[node[1]], parts.child(node[2])
    if type(name_or_value) is str:
        member = cls.__members__.get(name_or_value)
        if member is None:
            raise StructureMismatchError(
                f"`{cls.__qualname__}` has no member `{printable(name_or_value[:80])}`. Add it again, as an alias if "
                "it was renamed."
            )
        return member
    require(issubclass(cls, enum.Flag), "it is no member")
    members: Any = cls._value2member_map_  # noqa: SLF001 -- `cls(value)` is a call of the user's class
    member = members.get(name_or_value)
    if member is None:
        require(_combinations.get(cls, 0) < MAX_COMBINATIONS, "its class has had too many combinations from files")
        require(name_or_value.bit_length() <= MAX_FLAG_BITS, "it has too many bits")
        num_members = len(members)
        # Python's own lookup makes the combination, or raises `ValueError`.
        member = enum.Flag._missing_.__func__(cls, name_or_value)  # pyright: ignore  # noqa: SLF001 -- see above
        # The class keeps every combination for ever, because members are compared by identity.
        _combinations[cls] = _combinations.get(cls, 0) + len(members) - num_members
    require(isinstance(member, cls), "it is no member")
    return member


def _enum_text(manifest: Manifest, node: Node) -> str | None:
    """Returns a member of an enum as the text `Class.NAME` or `Class(value)`. None if its operand is a node."""
    name, member = _class_name(manifest, node), node[2]
    if type(member) is int:
        return None
    return short(f"{name}.{member}" if type(member) is str else f"{name}({atom_text(member)})")


# --- arrays, what describes them, and treedefs ------------------------------------------------------------------------


def entry_text(entry: ArrayEntry) -> str:
    """Returns a description of an array in a few words, such as "float32[2, 3] weak" or "int8[2] NumPy"."""
    if entry.key is not None:
        return f"PRNG key, {short(entry.key)}, {array_text(entry)}"
    return f"{array_text(entry)}{' weak' if entry.weak else ''}{' NumPy' if entry.kind == 'numpy' else ''}"


def _take_struct(obj: jax.ShapeDtypeStruct) -> Decomposition:
    """Takes a `ShapeDtypeStruct` apart. Its children are dtype and sharding.

    Raises:
        RefusalError: if it has symbolic sizes or an impossible shape, or describes a mutable reference.
    """
    if not all(type(size) is int for size in obj.shape) or getattr(obj, "is_ref", False):
        raise RefusalError(
            "a `ShapeDtypeStruct` with unknown sizes, or of a mutable reference", "Give it sizes that are numbers."
        )
    sizes, weak = list(obj.shape), bool(obj.weak_type)
    if not are_sizes(sizes):
        raise RefusalError(
            f"a `ShapeDtypeStruct` of the impossible shape {obj.shape}",
            "Give it at most 64 sizes, whose product is below 2**63.",
        )
    child_objects = obj.dtype, obj.sharding
    return Decomposition(
        child_objects, (".dtype", ".sharding"), lambda written: ["struct", sizes, written[0], weak, written[1]]
    )


def _build_struct(parts: Parts, node: Node) -> Any:
    """Builds a `ShapeDtypeStruct`. Its operands are shape, dtype, weak type and sharding."""
    return jax.ShapeDtypeStruct(tuple(node[1]), parts.child(node[2]), weak_type=node[3], sharding=parts.child(node[4]))


class Leaf:
    """Placeholder for a leaf in the tree that describes a treedef. Its only instance is `_LEAF`."""

    __slots__ = ()


_LEAF = Leaf()


def _take_treedef(obj: Any) -> Decomposition:
    """Takes a treedef apart. Its one child is a tree with this treedef, in which each leaf is the placeholder `_LEAF`.

    Raises:
        RefusalError: if an unflatten function fails on placeholders, or the tree of placeholders has another treedef.
    """
    try:
        tree = jtu.tree_unflatten(obj, [_LEAF] * obj.num_leaves)
        is_equal = jtu.tree_structure(tree) == obj
    except Exception as error:  # noqa: BLE001 -- the unflatten functions of any class may raise anything
        raise RefusalError(
            "a treedef whose classes refuse to be rebuilt around placeholders", "Leave it out."
        ) from error
    if not is_equal:
        raise RefusalError("a treedef that does not come back from the object that it describes", "Leave it out.")
    return Decomposition((tree,), ("",), lambda written: ["treedef", written[0]])


# --- NumPy scalars, meshes --------------------------------------------------------------------------------------------


def take_by_base_class(obj: Any) -> Decomposition | list[str] | None:
    """Writes values that the table of kinds cannot find by their exact class, but that belong to NumPy or JAX.

    They are NumPy scalars, NumPy dtypes, and dtypes of PRNG keys.

    Returns:
        An atom, or the object taken apart. None for any other object.

    Raises:
        RefusalError: if it is a NumPy value of an unsuitable dtype, a single device, or a `jax.Ref`.
    """
    if isinstance(obj, np.generic | np.dtype):
        try:
            return encode_numpy(obj)
        except TypeError:
            dtype = obj.dtype if isinstance(obj, np.generic) else obj
            fix = "Keep its parts, as numbers, texts or tuples."
            raise RefusalError(f"a NumPy value of the dtype `{dtype}`", fix) from None
    if isinstance(obj, jax.Device | SingleDeviceSharding):
        fix = "Place arrays after loading, `jax.device_put(array, device)`, or hold a `jax.sharding.NamedSharding`."
        raise RefusalError("a single device, which may be another one wherever the file is loaded", fix)
    if isinstance(obj, jax.Ref):
        fix = "Save what it holds: `ref[...]`, or `jax.freeze(ref)`."
        raise RefusalError("a `jax.Ref`, which is memory and not a value", fix)
    # The cheap test comes first: most objects that get here are functions and unknown instances.
    impl = key_implementation(obj) if hasattr(obj, "_impl") else None
    return None if impl is None else Decomposition((), (), lambda _: ["key_dtype", impl])


def _take_mesh(kind: str) -> Callable[[Any], Decomposition]:
    """Returns the function for taking meshes apart.

    Their children are the names of the axes and, only for a `Mesh`, the ids of the devices.

    Args:
        kind: `mesh` for a `Mesh`, `abstract_mesh` for an `AbstractMesh`.
    """

    def take(obj: Any) -> Decomposition:
        # The names of the axes are children, because they can be any hashable value.
        ids = [device.id for device in obj.devices.flat] if kind == "mesh" else []
        sizes, type_names = [int(size) for size in obj.axis_sizes], [axis_type.name for axis_type in obj.axis_types]
        count = len(sizes)
        if not are_sizes(sizes):
            raise RefusalError("a mesh of an impossible shape", "Give it fewer devices, and at most 64 axes.")

        # `["mesh", sizes, names, ids, names of axis types]`. A node `abstract_mesh` has no ids.
        def build(written: list[Any]) -> Node:
            return [kind, sizes, written[:count], *([written[count:]] if kind == "mesh" else []), type_names]

        # All steps are empty: names and ids are no attributes, and the path of the mesh is enough.
        return Decomposition((*obj.axis_names, *ids), [""] * (count + len(ids)), build)

    return take


def _mesh_axes(parts: Parts, node: Node) -> tuple[Any, Any]:
    """Returns the names of the axes of a mesh, and the types of the axes, as two tuples.

    Raises:
        FormatError: if there is not one name and one type for each size, if two names are equal, or if JAX does not
            know a type.
    """
    sizes, names, type_names = node[1], parts.children(node[2]), parts.children(node[-1])
    if not len(sizes) == len(names) == len(set(names)) == len(type_names):
        raise FormatError("The file describes a mesh whose sizes, names and types do not fit together.")
    axis_types = {axis_type.name: axis_type for axis_type in jax.sharding.AxisType}
    if not axis_types.keys() >= set(type_names):
        raise FormatError("The file describes a mesh with a type of axis that this JAX does not know.")
    return tuple(names), tuple([axis_types[name] for name in type_names])


def _build_mesh(parts: Parts, node: Node) -> Mesh:
    """Builds a mesh over the devices with the ids in the file, or over the first devices if some ids are absent.

    Raises:
        FormatError: if sizes, names, types and ids do not fit together, or JAX does not know a type of axis.
        StructureMismatchError: if there are too few devices.
        ValueError: if too many ids have the same hash.
    """
    sizes, ids, count = node[1], parts.children(node[3]), math.prod(node[1])
    names, axis_types = _mesh_axes(parts, node)
    require_few_collisions(ids)
    if not len(set(ids)) == len(ids) == count:
        raise FormatError("The file describes a mesh whose sizes and devices do not fit together.")
    devices_by_id = {device.id: device for device in jax.devices()}
    if len(devices_by_id) < count:
        raise StructureMismatchError(
            f"The file has a mesh of {count} devices, {' x '.join(map(str, sizes))}, but the number of devices here "
            f"is {len(devices_by_id)}. Load it where there are enough. On a CPU, set their number:\n"
            f"    jax.config.update('jax_num_cpu_devices', {count})"
        )
    devices = np.empty(count, object)
    # Loaded where other devices are, the mesh has the first ones instead.
    has_all = all(i in devices_by_id for i in ids)
    devices[:] = [devices_by_id[i] for i in ids] if has_all else list(devices_by_id.values())[:count]
    return Mesh(devices.reshape(sizes), names, axis_types=axis_types)


def _build_abstract_mesh(parts: Parts, node: Node) -> AbstractMesh:
    """Builds an `AbstractMesh`. Raises `FormatError` as `_mesh_axes` does."""
    names, axis_types = _mesh_axes(parts, node)
    return AbstractMesh(tuple(node[1]), names, axis_types=axis_types)


# --- shardings --------------------------------------------------------------------------------------------------------


def _take_spec(obj: Any) -> Decomposition:
    """Takes a `PartitionSpec` apart into its entries, its set of unreduced axes and its set of reduced axes.

    A set that is empty, or that specs of this version of JAX do not have, is written as None.

    Raises:
        RefusalError: if the spec has unreduced axes, and the operation that reduces them is not the sum.
    """
    sets = [getattr(obj, name, None) or None for name in ("unreduced", "reduced")]
    reduction = getattr(obj, "unreduced_kind", None)
    if reduction is not None and sets[0] and getattr(reduction, "name", str(reduction)).lower() != "sum":
        raise RefusalError(f"a `PartitionSpec` with the unreduced kind {reduction}", "Leave it out of the model.")
    # Iterating over a spec with an unreduced or reduced set raises, so the entries are read from an attribute. Its name
    # depends on the version of JAX. In versions whose spec is a tuple, there is no such attribute.
    candidates = [getattr(obj, name, None) for name in ("partitions", "_partitions")]
    entries = next((candidate for candidate in candidates if candidate is not None), None)
    entries = tuple(obj) if entries is None else entries
    count = len(entries)
    steps = (*[f"[{i}]" for i in range(count)], ".unreduced", ".reduced")
    return Decomposition((*entries, *sets), steps, lambda written: ["spec", written[:count], *written[count:]])


def _build_spec(parts: Parts, node: Node) -> PartitionSpec:
    """Builds a `PartitionSpec`. Empty sets, the default, are not passed: older versions of JAX have none."""
    unreduced, reduced = parts.children(node[2:])
    sets = {name: axes for name, axes in (("unreduced", unreduced), ("reduced", reduced)) if axes}
    return PartitionSpec(*parts.children(node[1]), **sets)


_MEMORY_KINDS = ("device", "pinned_host", "unpinned_host")
"""The kinds of memory that a file can name."""


def _memory_kind(sharding: Any, device: Any) -> str | None:
    """Returns the kind of memory of a sharding. None for the default memory of its device, whose name varies by device.

    Args:
        sharding: the sharding.
        device: one of its devices. None if it has none, because its mesh is abstract.

    Raises:
        RefusalError: if the kind is none of `_MEMORY_KINDS`.
    """
    kind = sharding.memory_kind
    if kind is None or device is None or kind == device.default_memory().kind:
        return None
    if kind not in _MEMORY_KINDS:
        raise RefusalError(f"a sharding in the unknown kind of memory {kind!r}", "Leave it out of the model.")
    return kind


def _take_named_sharding(obj: Any) -> Decomposition:
    """Takes a `NamedSharding` apart into mesh, spec and kind of memory.

    Raises:
        RefusalError: if no file can name the kind of memory.
    """
    device = obj.mesh.devices.flat[0] if isinstance(obj.mesh, Mesh) else None
    child_objects = obj.mesh, obj.spec, _memory_kind(obj, device)
    return Decomposition(
        child_objects, (".mesh", ".spec", ".memory_kind"), lambda written: ["named_sharding", *written]
    )


def _build_named_sharding(parts: Parts, node: Node) -> NamedSharding:
    """Builds a `NamedSharding`. Raises `FormatError` if its kind of memory is none of `_MEMORY_KINDS`."""
    mesh, spec, kind = parts.children(node[1:])
    if kind is not None and kind not in _MEMORY_KINDS:
        raise FormatError("The file describes a sharding in a kind of memory that JAX does not know.")
    return NamedSharding(mesh, spec, memory_kind=kind)


# Operands in the rows of `named_sharding` and `spec` below.
_MEMORY = child(".memory_kind", "null", "text")
_AXIS_SET_OPERANDS = [child(step, "null", "frozenset", is_walked=True) for step in (".unreduced", ".reduced")]


def _text_of_array(manifest: Manifest, node: Node) -> str:
    """Returns a description of the array of a node `array`, whose operand is an index into `arrays`."""
    return entry_text(manifest.arrays[node[1]])


# --- the rows ---------------------------------------------------------------------------------------------------------
#
# A row without a function `take` or `build` has the default of `_all_kinds_of_nodes.py`, which follows from its
# operands.

ROWS = (
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
    Kind("object", (TYPE, children()), build=_build_object, steps=_steps_of_fields, text=_class_name, is_deep=True,
         has_identity=True),
    Kind("wrapper", (TYPE, children(), TEXT), build=_build_wrapper, steps=_steps_of_fields, text=_class_name,
         is_deep=True, has_identity=True),
    Kind("registered", (TYPE, child("<aux>", is_walked=True), children(), Operand("steps")), build=_build_registered,
         steps=_steps_of_registered, text=_class_name, paired=3, has_identity=True),
    Kind("enum", (TYPE, child(".<enum>", "text", "int")), build=_build_enum, inline=_enum_text),
    Kind("array", (Operand("array"),), text=_text_of_array, is_deep=True, has_identity=True),
    Kind(
        "struct",
        (SIZES, child(".dtype", "dtype", "key_dtype"), Operand("flag"), child(".sharding", "null", "named_sharding")),
        (jax.ShapeDtypeStruct,), _take_struct, _build_struct, text=lambda _, node: f"ShapeDtypeStruct{node[1]}",
        has_identity=True,
    ),
    Kind("key_dtype", (TEXT,), build=lambda _, node: key_dtype(node[1]),
         inline=lambda _, node: f"dtype of PRNG keys, {short(node[1])}"),
    Kind("treedef", (child(".tree", is_walked=True),), (jtu.PyTreeDef,), _take_treedef,
         lambda parts, node: jtu.tree_structure(parts.child(node[1]))),
    Kind("leaf", (), (Leaf,), build=lambda *_: _LEAF),
    Kind("mesh", (SIZES, children(is_walked=True), children("int"), children("text")), (Mesh,), _take_mesh("mesh"),
         _build_mesh),
    Kind("abstract_mesh", (SIZES, children(is_walked=True), children("text")), (AbstractMesh,),
         _take_mesh("abstract_mesh"), _build_abstract_mesh, paired=1),
    Kind("spec", (children(is_walked=True), *_AXIS_SET_OPERANDS), (PartitionSpec,), _take_spec, _build_spec),
    Kind("unconstrained", (), (type(PartitionSpec.UNCONSTRAINED),), build=lambda *_: PartitionSpec.UNCONSTRAINED,
         inline=lambda *_: "UNCONSTRAINED"),
    Kind("named_sharding",
         (child(".mesh", "mesh", "abstract_mesh", is_walked=True), child(".spec", "spec", is_walked=True), _MEMORY),
         (NamedSharding,), _take_named_sharding, _build_named_sharding),
)  # fmt: skip
"""All kinds of node. `_all_kinds_of_nodes.py` has the table that is made of them."""
