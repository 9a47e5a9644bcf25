"""All kinds of node: their rows, and the functions of these rows that take objects apart and build them.

First come Python's values: containers, other values with parts, partials and bound methods. Then come instances of
classes, which are rebuilt field by field, by an unflatten function, or found by name (enums). Then come JAX's values:
`ShapeDtypeStruct`s, treedefs, meshes and shardings. The rows stand at the end.

Nothing here gets an attribute of an instance that a file describes. Its class may have a `__getattr__` that calls what
the file put into the instance.

A node is a JSON list: its kind, then its operands, so `node[1]` is the first operand. A child in a node is the number
of an earlier node, or an atom, a value in place. The functions `_take_...` return a `Decomposition`: children, their
steps in paths, and `build`, a function that makes the node from `written`, the list of the children as they are in a
node. The functions `_build_...` make the object of a node. `parts` returns the objects of children.

A mesh is loaded over the devices with the same ids. If some of these are absent, it is loaded over the first devices in
JAX's order. With too few devices loading fails, because a model that holds a mesh means to compute on it. No file
contains a single device.
"""

import collections
import enum
import functools
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

from ...core._class_attributes import is_asked_of_all
from ...core._comparison import array_text
from ...core._errors import FormatError, StructureMismatchError
from ...core._jax_internals import rebuild_registered, registered_counts
from ...core._node_types import RefusalError, fault_of_aux, node_type_of, node_types_by_class
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
    child,
    children,
    require,
    step_of,
)

_KEYS = children(is_walked=True)


def key_text(key: Any) -> str:
    """Returns the step of a path to the value of a key, as JAX prints it, or the class of a key with no short text."""
    try:
        text = repr(key)
    except Exception:  # noqa: BLE001 -- only a text for people
        text = ""
    # A text with an address differs from process to process, so the class takes its place.
    return f"[{text}]" if 0 < len(text) <= 80 and " at 0x" not in text else f"[<{type(key).__name__}>]"


# --- sets and mappings ------------------------------------------------------------------------------------------------


def _take_set(kind: str) -> Callable[[Any], Decomposition]:
    """Returns the function that takes a set or a frozenset apart."""

    def build(written: list[Any]) -> Node:
        # The order of strings in a Python set differs from process to process.
        return [kind, sorted(written, key=json.dumps)]

    def take(obj: Any) -> Decomposition:
        members = tuple(obj)
        return Decomposition(members, [f"{{{i}}}" for i in range(len(members))], build, members)

    return take


def _build_set(cls: type) -> Callable[[Parts, Node], Any]:
    """Returns the function that builds a set or a frozenset.

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
    """Returns the positions of the keys in the order in which JAX flattens a dict.

    The keys are sorted. If they cannot be compared, they stay in insertion order.
    """
    try:
        return sorted(range(len(keys)), key=keys.__getitem__)
    except (TypeError, ValueError):
        return range(len(keys))


def _take_mapping(kind: str) -> Callable[[Any], Decomposition]:
    """Returns the function that takes a dict, an `OrderedDict` or a `defaultdict` apart.

    The children are the values in the order of JAX, then the keys in insertion order, then the default factory. In the
    node, keys and values are both in insertion order.
    """

    def take(obj: Any) -> Decomposition:
        """Takes one mapping apart."""
        keys, values = list(obj), list(obj.values())
        count = len(keys)
        order = range(count) if kind == "OrderedDict" else _flatten_order(keys)
        factory = [obj.default_factory] if kind == "defaultdict" else []
        texts = [key_text(key) for key in keys]
        value_steps, key_steps = [texts[i] for i in order], [f"<key {text}>" for text in texts]
        steps = [*value_steps, *key_steps, *[".default_factory"] * len(factory)]

        def build(written: list[Any]) -> Node:
            """Puts the written values back into the order of the keys."""
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

        return Decomposition([*[values[i] for i in order], *keys, *factory], steps, build, keys)

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
    """Returns the row of a class of mappings. The operands are the leading ones, then keys and values."""
    name, keyed = cls.__name__, len(leading) + 1
    operands = (*leading, _KEYS, children())
    is_deep = cls is dict
    return Kind(
        name, operands, (cls,), _take_mapping(name), _build_mapping, keyed=keyed, is_deep=is_deep, has_identity=True
    )


# --- values that hold others ------------------------------------------------------------------------------------------


def _build_deque(parts: Parts, node: Node) -> Any:
    """Builds a deque. Raises `ValueError` if it has more items than it may have, as Python would drop some."""
    maxlen, items = parts.child(node[1]), parts.children(node[2])
    require(maxlen is None or maxlen >= len(items), "it is longer than it may be")
    return collections.deque(items, maxlen)


def _take_path(obj: pathlib.PurePath) -> Decomposition:
    kind = type(obj).__name__
    return Decomposition((str(obj),), ("",), lambda written: ["path", kind, written[0]])


def _build_path(parts: Parts, node: Node) -> Any:
    """Builds a path of the class with the file's name, or a pure path if the class is for another system."""
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


def _take_bytearray(obj: bytearray) -> Decomposition:
    return Decomposition((), (), lambda _: ["bytearray", encode_bytes(obj)[1]])


def _start_stop_step_kind(cls: type, *forms: str) -> Kind:
    """Returns the row of `slice` or `range`."""
    operands = tuple(child(step, *forms) for step in (".start", ".stop", ".step"))
    return Kind(cls.__name__, operands, (cls,), inline=(f"{cls.__name__}(", ")"))


# --- partials ---------------------------------------------------------------------------------------------------------

# Attributes that `functools.update_wrapper` sets and a file may hold. Annotations are not among them: they are copied
# from the attribute `__wrapped__` when a partial is loaded.
_UPDATED = frozenset({*WRITTEN_ATTRIBUTES, "__wrapped__", "__type_params__"})


def _is_partial_attribute(name: Any) -> bool:
    """Returns True if a partial in a file may have an attribute with this name.

    It may not have a name by which other code gets something to call, such as `__get__`.
    """
    return name in _UPDATED or (type(name) is str and not name.startswith("__") and not is_asked_of_all(name))


def _take_partial(obj: Any) -> Decomposition:
    """Takes a `functools.partial` apart, with its own attributes except annotations.

    Raises:
        RefusalError: if it has an attribute that no file may have, or a keyword that is no string.
    """
    attributes = {name: value for name, value in obj.__dict__.items() if name != "__annotations__"}
    if not all(map(_is_partial_attribute, attributes)):
        raise RefusalError("a partial with an attribute that stands in for a method", "Delete the attribute.")
    return _take_call_parts("partial", obj, obj.func, attributes or None)


def _take_jax_partial(obj: Any) -> Decomposition:
    """Takes a `jax.tree_util.Partial` apart."""
    function = obj.func
    # `jax.tree_util.Partial` wraps a `functools.partial` in this private class, so that it can be hashed.
    if type(function).__name__ == "_HashableCallableShim":
        function = vars(function)["fun"]
    return _take_call_parts("Partial", obj, function)


def _take_call_parts(kind: str, obj: Any, function: Any, *attributes: Any) -> Decomposition:
    """Takes a partial apart into arguments, values of keywords, names of keywords, function, and attributes.

    The children are in this order, in which traced ones come first. The node has them in the order of its operands:
    function, arguments, names, values, attributes.

    Args:
        kind: kind of the node.
        obj: the partial.
        function: the function that the partial calls.
        attributes: the dict of the partial's own attributes, or None if there are none. Left out for a kind whose
            nodes have no such operand.
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

    return Decomposition([*obj.args, *obj.keywords.values(), *names, function, *attributes], steps, build)


def _call_parts(parts: Parts, node: Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Returns the function, the arguments and the keyword arguments of a partial."""
    function, names = parts.child(node[1]), parts.children(node[3])
    require(callable(function), "its function cannot be called")
    require(len(set(names)) == len(names), "a keyword occurs twice")
    return function, tuple(parts.children(node[2])), dict(zip(names, parts.children(node[4]), strict=True))


def _build_partial(parts: Parts, node: Node) -> Any:
    """Builds a `functools.partial`. Its annotations are copied from the object in its attribute `__wrapped__`.

    Raises:
        ValueError: if it has an attribute that no file may have, or type parameters.
    """
    function, args, keywords = _call_parts(parts, node)
    # The last operand is the dict of the partial's attributes, or None.
    attributes = dict(parts.child(node[5]) or {})
    require(all(map(_is_partial_attribute, attributes)), "its attributes would stand in for methods")
    # `functools.update_wrapper` copies the type parameters of a function, `()` for all but generic ones. Only the code
    # that defines a generic function can make others, so a file may not have them.
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
    """Builds a `jax.tree_util.Partial`."""
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
    """Returns the function that `owner.<name>` would bind to `owner`, found without running any descriptor.

    Args:
        owner: an instance, for an ordinary method, or a class, for a class method.
        name: name of the method.

    Returns:
        None if `owner.<name>` is no method that is bound to `owner`. A class method of an instance's class is none: it
        is bound to the class.
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
    """Returns the name of a function if `owner.<name>` binds this very function to `owner`, and None otherwise."""
    name = getattr(function, "__name__", None)
    return name if isinstance(name, str) and name.isidentifier() and _find_method(owner, name) is function else None


def _take_method(obj: types.MethodType) -> Decomposition:
    """Takes one of Python's bound methods apart into its object. The node has the method's name beside that.

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
    """Takes a bound method of an Equinox module apart into the module. The node has the method's name beside that.

    Returns:
        None if the name of the function does not lead from the module to this function.
    """
    parts = object.__getattribute__(obj, "__dict__")
    owner, function = parts.get("__self__"), parts.get("__func__")
    name = _method_name(function, owner)
    if name is None or isinstance(owner, type):
        return None
    return Decomposition((owner,), (".__self__",), lambda written: ["bound", written[0], name])


def function_of_method(method: Any) -> Any:
    """Returns the function that a bound method, Python's or Equinox's, calls."""
    return object.__getattribute__(method, "__dict__")["__func__"] if type(method) is BoundMethod else method.__func__


def _build_method(parts: Parts, node: Node) -> Any:
    """Builds a bound method, Python's or Equinox's. Only methods of trusted classes are built.

    Raises:
        StructureMismatchError: if the class of the object has no such method any more.
        ValueError: if files may not bind methods of such an object.
    """
    owner = parts.child(node[1])
    function = _find_method(owner, node[2])
    cls = owner if issubclass(type(owner), type) else type(owner)
    # Classes that files may name, such as `pathlib.Path`, have methods that must not come from a file: `unlink`.
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
    """Returns the name of the function that a node binds, as `module:Class.method`.

    Args:
        types: the name of each class in the manifest.
        nodes: the nodes before `node`, or all of them.
        node: any node.

    Returns:
        None if the node is no method, or the class of its object is not known from the manifest. That is so for the
        `__call__` of a bound method, whose object is itself a node `bound`.
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
    return parts.makers[node[1]](parts.children(node[2]))


def _build_wrapper(parts: Parts, node: Node) -> Any:
    """Builds an Equinox module that wraps the function in one of its fields.

    Name, documentation and annotations of the module are copied from the value of the field that holds the function.
    """
    obj = _build_object(parts, node)
    require(kind_of(type(obj)) == "module", "its class is no Equinox module")
    # The last operand is the name of that field, whose position in the type is its position among the values.
    copy_wrapped_attributes(obj, parts.child(node[2][parts.fields[node[1]].index(node[3])]))
    return obj


def _steps_of_fields(manifest: Manifest, node: Node) -> Iterator[tuple[Child, str]]:
    """Yields the children of an instance with their steps, which are its attributes in the order of its type."""
    entry = manifest.types[node[1]]
    for value, name in zip(node[2], (*entry.fields, *entry.extra), strict=True):
        yield value, step_of(name)


def _class_name(manifest: Manifest, node: Node) -> str:
    return manifest.types[node[1]].name.rpartition(":")[2]


# --- instances of registered classes ----------------------------------------------------------------------------------


def take_registered(obj: Any, type_index: int) -> Decomposition:
    """Takes an instance of a class that was registered with JAX or with `register_node` apart.

    Raises:
        RefusalError: if its flatten function raises, or gives auxiliary data that no file may have.
    """
    if type(obj) is Dag:
        return _take_dag(obj, type_index)
    node_type = node_type_of(obj)
    assert node_type is not None
    try:
        child_objects, aux = node_type.take_apart(obj)  # children, auxiliary data
        keys = [str(key) for key in node_type.keys_of(obj)]
    except Exception as error:  # noqa: BLE001 -- the class's own code may raise anything
        raise RefusalError(
            f"a `{type(obj).__qualname__}` whose flatten function raises {type(error).__name__}: {error}",
            "Leave it out, or bring it into a state in which JAX can flatten it.",
        ) from error
    # Some classes without children are constants for JAX, and give themselves as auxiliary data. The walk would take
    # that for a cycle, but its user could not break it. So it gets an error of its own.
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
    # The keys become steps of paths, unless some do not fit. Then positions take their place. Keys must be as many as
    # the children, different, and each like a step. They must have no address, which differs from process to process,
    # and no surrogates, which no file can hold.
    is_sound = len(keys) == len(child_objects) and are_steps(keys)
    if not is_sound or any(" at 0x" in key or type(encode_str(key)) is list for key in keys):
        keys = [f"[{i}]" for i in range(len(child_objects))]
    return Decomposition(
        [*child_objects, aux],
        [*keys, "<aux>"],
        lambda written: ["registered", type_index, written[-1], written[:-1], keys],
    )


def _take_dag(dag: Dag[Any], type_index: int) -> Decomposition:
    """Takes a `Dag` apart. Its one child is its model.

    Raises:
        RefusalError: if packing the model does not give the leaves and the structure of the `Dag`. The model may have
            been changed since, or `jax.tree.map` put other values in the places of the arrays.
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
    """Returns True for a list of different texts, each of which can be a step of a path."""
    if type(steps) is not list or not all(type(step) is str for step in steps):
        return False
    return len(set(steps)) == len(steps) and all(1 < len(step) <= MAX_STEP and step[0] in ".[" for step in steps)


def _build_registered(parts: Parts, node: Node) -> Any:
    """Builds an instance by the unflatten function of its class, and flattens it to check that nothing was dropped.

    Raises:
        StructureMismatchError: if the unflatten function raises, or the numbers of children or static values differ.
        ValueError: if no file may have this auxiliary data.
    """
    cls, aux, child_objects = parts.makers[node[1]], parts.child(node[2]), parts.children(node[3])
    if cls is Dag:
        require(aux is None and len(child_objects) == 1, "a `Dag` has one model, and nothing else")
        return Dag._of_file(child_objects[0])  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    node_type, counts_in_file = node_types_by_class.get(cls), _count_parts(child_objects, aux)
    fault = fault_of_aux(cls, aux)
    require(fault is None, f"it has {fault}")
    # Dataclasses that are registered with lists of their fields have fixed counts.
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
    except Exception as error:
        raise StructureMismatchError(
            f"The unflatten function of `{cls.__qualname__}` raised {type(error).__name__} on what the file holds: "
            f"{printable(str(error)[:200])}. Load it with the version of the class that wrote it."
        ) from error
    # Only the unflatten function knows how many children it takes. One that zips them with names drops the excess.
    counts = None if flattened is None else _count_parts(*flattened)
    if counts != counts_in_file:
        raise _wrong_counts(cls, counts_in_file, counts or (0, None))
    return obj


def _count_parts(child_objects: Sequence[Any], aux: Any) -> tuple[int, int | None]:
    """Returns the number of children and the number of static values.

    The latter is None if the auxiliary data is no plain collection, whose values could be counted.
    """
    return len(child_objects), len(aux) if type(aux) in (tuple, list, dict) else None


def _wrong_counts(
    cls: type, counts_in_file: tuple[int, int | None], counts_of_class: tuple[int, int | None]
) -> StructureMismatchError:
    """Returns the error for a node with other numbers of children or static values than its class has."""
    in_file, of_class = _counts_text(*counts_in_file), _counts_text(*counts_of_class)
    return StructureMismatchError(
        f"The file has {in_file} for a `{cls.__qualname__}`, and that has {of_class}. Load it with the version of the "
        "class that wrote it."
    )


def _counts_text(num_children: int, num_static: int | None) -> str:
    return f"{num_children} children and {'other aux data' if num_static is None else f'{num_static} static values'}"


def _steps_of_registered(_: Manifest, node: Node) -> Iterator[tuple[Child, str]]:
    yield from zip(node[3], node[4], strict=True)
    yield node[2], "<aux>"


# --- enums ------------------------------------------------------------------------------------------------------------


def take_enum(obj: Any, type_index: int) -> Decomposition:
    """Takes a member of an enum apart. The node has its name, or the value of a combination of flags without a name.

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
        StructureMismatchError: if the enum has no such member any more.
        ValueError: if there is no such combination, or files have added too many to this class.
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
        member = enum.Flag._missing_.__func__(cls, name_or_value)  # pyright: ignore  # noqa: SLF001 -- see above
        # The class keeps every combination for ever, because members are compared by identity.
        _combinations[cls] = _combinations.get(cls, 0) + len(members) - num_members
    require(isinstance(member, cls), "it is no member")
    return member


def _enum_text(manifest: Manifest, node: Node) -> str | None:
    """Returns a member of an enum as the text `Class.NAME` or `Class(value)`."""
    name, member = _class_name(manifest, node), node[2]
    if type(member) is int:
        return None
    return short(f"{name}.{member}" if type(member) is str else f"{name}({atom_text(member)})")


# --- arrays, what describes them, and treedefs ------------------------------------------------------------------------


def entry_text(entry: ArrayEntry) -> str:
    """Describes an array in a few words: dtype and shape, and whether it is a PRNG key, weakly typed or NumPy's."""
    if entry.key is not None:
        return f"PRNG key, {short(entry.key)}, {array_text(entry)}"
    return f"{array_text(entry)}{' weak' if entry.weak else ''}{' NumPy' if entry.kind == 'numpy' else ''}"


def _take_struct(obj: jax.ShapeDtypeStruct) -> Decomposition:
    """Takes a `ShapeDtypeStruct` apart. Symbolic sizes and structs of references are refused."""
    if not all(type(size) is int for size in obj.shape) or getattr(obj, "is_ref", False):
        raise RefusalError(
            "a `ShapeDtypeStruct` with unknown sizes, or of a mutable reference", "Give it sizes that are numbers."
        )
    sizes, weak = list(obj.shape), bool(obj.weak_type)
    child_objects = obj.dtype, obj.sharding
    return Decomposition(
        child_objects, (".dtype", ".sharding"), lambda written: ["struct", sizes, written[0], weak, written[1]]
    )


def _build_struct(parts: Parts, node: Node) -> Any:
    return jax.ShapeDtypeStruct(tuple(node[1]), parts.child(node[2]), weak_type=node[3], sharding=parts.child(node[4]))


class Leaf:
    """Placeholder for a leaf in the tree that describes a treedef."""

    __slots__ = ()


_LEAF = Leaf()


def _take_treedef(obj: Any) -> Decomposition:
    """Takes a treedef apart. Its one child is a tree with the placeholder `_LEAF` for each leaf, whose treedef it is.

    Raises:
        RefusalError: if the treedef's classes cannot be rebuilt around placeholders, or the treedef of the rebuilt tree
            differs.
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
    """Writes values that are not recognised by their exact class: NumPy scalars and dtypes, and dtypes of PRNG keys.

    Returns:
        An atom, or the object taken apart. None if this is none of these values.

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
    """Returns the function that takes a `Mesh` (kind `mesh`) or an `AbstractMesh` apart.

    Its children are the names of the axes and, only for a `Mesh`, the ids of the devices.
    """

    def take(obj: Any) -> Decomposition:
        # The names of the axes are children, because they can be any hashable value.
        ids = [device.id for device in obj.devices.flat] if kind == "mesh" else []
        sizes, types = [int(size) for size in obj.axis_sizes], [axis_type.name for axis_type in obj.axis_types]
        count = len(sizes)

        def build(written: list[Any]) -> Node:
            return [kind, sizes, written[:count], *([written[count:]] if kind == "mesh" else []), types]

        return Decomposition((*obj.axis_names, *ids), [""] * (count + len(ids)), build)

    return take


def _mesh_axes(parts: Parts, node: Node) -> tuple[Any, Any]:
    """Returns the names of the axes of a mesh, and their types.

    Raises:
        FormatError: if they do not fit the sizes, or JAX does not know a type.
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
        FormatError: if the file's sizes and ids do not fit together.
        StructureMismatchError: if there are too few devices.
    """
    sizes, ids, count = node[1], parts.children(node[3]), math.prod(node[1])
    names, axis_types = _mesh_axes(parts, node)
    if not len(set(ids)) == len(ids) == count:
        raise FormatError("The file describes a mesh whose sizes and devices do not fit together.")
    devices_by_id = {device.id: device for device in jax.devices()}
    if len(devices_by_id) < count:
        raise StructureMismatchError(
            f"The file holds a mesh of {count} devices, {' x '.join(map(str, sizes))}, and {len(devices_by_id)} are "
            "here. Load it where there are enough; on a CPU more devices can be had with\n"
            f"    jax.config.update('jax_num_cpu_devices', {count})"
        )
    devices = np.empty(count, object)
    has_all = all(i in devices_by_id for i in ids)
    devices[:] = [devices_by_id[i] for i in ids] if has_all else list(devices_by_id.values())[:count]
    return Mesh(devices.reshape(sizes), names, axis_types=axis_types)


def _build_abstract_mesh(parts: Parts, node: Node) -> AbstractMesh:
    names, axis_types = _mesh_axes(parts, node)
    return AbstractMesh(tuple(node[1]), names, axis_types=axis_types)


# --- shardings --------------------------------------------------------------------------------------------------------


def _take_spec(obj: Any) -> Decomposition:
    """Takes a `PartitionSpec` apart into its entries, its set of unreduced axes and its set of reduced axes.

    None stands for an empty set, and for one that this version of JAX does not have.

    Raises:
        RefusalError: if unreduced axes would be reduced by anything but a sum.
    """
    sets = [getattr(obj, name, None) or None for name in ("unreduced", "reduced")]
    kind = getattr(obj, "unreduced_kind", None)
    if kind is not None and sets[0] and getattr(kind, "name", str(kind)).lower() != "sum":
        raise RefusalError(f"a `PartitionSpec` with the unreduced kind {kind}", "Leave it out of the model.")
    # Iterating over a spec with one of the sets raises, so the entries are read from an attribute. Its name depends on
    # the version of JAX, and a version whose spec is a tuple has none.
    candidates = [getattr(obj, name, None) for name in ("partitions", "_partitions")]
    entries = next((candidate for candidate in candidates if candidate is not None), None)
    entries = tuple(obj) if entries is None else entries
    count = len(entries)
    keys = (*[f"[{i}]" for i in range(count)], ".unreduced", ".reduced")
    return Decomposition((*entries, *sets), keys, lambda written: ["spec", written[:count], *written[count:]])


def _build_spec(parts: Parts, node: Node) -> PartitionSpec:
    unreduced, reduced = parts.children(node[2:])
    # Empty sets are the default.
    sets = {name: axes for name, axes in (("unreduced", unreduced), ("reduced", reduced)) if axes}
    return PartitionSpec(*parts.children(node[1]), **sets)


_MEMORY_KINDS = ("device", "pinned_host", "unpinned_host")


def _memory_kind(sharding: Any, device: Any) -> str | None:
    """Returns the kind of memory of a sharding. None for the default memory of its device, whose name varies.

    Args:
        sharding: the sharding.
        device: one of its devices. None if it has none, because its mesh is abstract.

    Raises:
        RefusalError: if JAX has a kind of memory here that files do not know.
    """
    kind = sharding.memory_kind
    if kind is None or device is None or kind == device.default_memory().kind:
        return None
    if kind not in _MEMORY_KINDS:
        raise RefusalError(f"a sharding in the unknown kind of memory {kind!r}", "Leave it out of the model.")
    return kind


def _take_named_sharding(obj: Any) -> Decomposition:
    device = obj.mesh.devices.flat[0] if isinstance(obj.mesh, Mesh) else None
    child_objects = obj.mesh, obj.spec, _memory_kind(obj, device)
    return Decomposition(
        child_objects, (".mesh", ".spec", ".memory_kind"), lambda written: ["named_sharding", *written]
    )


def _build_named_sharding(parts: Parts, node: Node) -> NamedSharding:
    mesh, spec, kind = parts.children(node[1:])
    if kind is not None and kind not in _MEMORY_KINDS:
        raise FormatError("The file describes a sharding in a kind of memory that JAX does not know.")
    return NamedSharding(mesh, spec, memory_kind=kind)


_MEMORY = child(".memory_kind", "null", "text")
_AXIS_SET_OPERANDS = [child(step, "null", "frozenset", is_walked=True) for step in (".unreduced", ".reduced")]


def _text_of_array(manifest: Manifest, node: Node) -> str:
    return entry_text(manifest.arrays[node[1]])


# --- the rows ---------------------------------------------------------------------------------------------------------

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
