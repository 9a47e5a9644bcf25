"""How each object that has children comes apart, so that it can be written as a node.

For each type a function takes an instance and gives its children, how a path continues to each of them, and what makes
the node once the children are written. Children that JAX traces come first and in JAX's order, so that the path under
which an object is met first is the one that `jax.tree_util` prints first.
"""

import collections
import functools
import json
import pathlib
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jax import tree_util as jtu
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ..._node_types import node_type_of
from ..arrays._arrays import key_implementation
from ..trust._classes import kind_of
from ..trust._names import RefusalError
from ._manifest import are_steps
from ._placement import MEMORY_KINDS, axis_type_names
from ._touched import fault_of_aux
from ._wrapping import WRITTEN_ATTRIBUTES

Node = list[Any]


class Apart(NamedTuple):
    """An object taken apart.

    Attributes:
        children: what it holds.
        keys: what leads to each child, in a path.
        build: the children as they are written → the node.
        hashed: the keys or members, of which few may have one hash.
    """

    children: Sequence[Any]
    keys: Sequence[str]
    build: Callable[[list[Any]], Node]
    hashed: Sequence[Any] = ()


class Leaf:
    """Stands for a leaf in the object that describes a treedef."""

    __slots__ = ()


LEAF = Leaf()


class _Example(eqx.Module):
    def method(self) -> None:
        """Bound, it is what is looked for; `__call__` would be an ordinary bound method."""


BoundMethod: type = type(_Example().method)
"""Equinox's bound methods, which are pytrees; the class has no public name."""

CompiledFunction: type = type(eqx.filter_jit(_Example.method))
"""What `equinox.filter_jit` returns: a module that holds, besides what it wraps, a function that JAX has compiled."""


def take_apart(obj: Any) -> Apart | None:
    """An object taken apart; None if its type has no children, or none that are known here.

    Raises:
        RefusalError: if it holds what cannot be written.
    """
    taker = _TAKERS.get(type(obj))
    return None if taker is None else taker(obj)


def take_apart_registered(obj: Any, type_index: int) -> Apart:
    """An instance of a class that was registered with JAX or with `register_node`.

    Raises:
        RefusalError: if the registered function raises.
    """
    node_type = node_type_of(obj)
    assert node_type is not None
    try:
        children, aux = node_type.take_apart(obj)
        keys = [str(key) for key in node_type.keys_of(obj)]
    except Exception as error:  # noqa: BLE001 -- the class's own code may raise anything
        raise RefusalError(
            f"a `{type(obj).__qualname__}` whose flatten function raises {type(error).__name__}: {error}",
            "Leave it out, or bring it into a state in which JAX can flatten it.",
        ) from error
    fault = fault_of_aux(type(obj), aux)
    if fault is not None:
        raise RefusalError(
            f"a `{type(obj).__qualname__}` with {fault}, which no file may have", "Set it anew after loading."
        )
    # Keys that do not match the children, or make no paths. Texts with an address or surrogates are no good in a file.
    if len(keys) != len(children) or not are_steps(keys) or any(" at 0x" in key or not _is_utf8(key) for key in keys):
        keys = _indices(len(children))
    return Apart([*children, aux], [*keys, "<aux>"], lambda done: ["registered", type_index, done[-1], done[:-1], keys])


def _is_utf8(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)


def key_text(key: Any) -> str:
    """What leads to the value of a key, as JAX prints it. Texts that hold an address are left out: they vary."""
    try:
        text = repr(key)
    except Exception:  # noqa: BLE001 -- only a text for people
        text = ""
    return f"[{text}]" if 0 < len(text) <= 80 and " at 0x" not in text else f"[<{type(key).__name__}>]"


def _indices(count: int) -> list[str]:
    return [f"[{i}]" for i in range(count)]


def _sequence(kind: str) -> Callable[[Any], Apart]:
    return lambda obj: Apart(tuple(obj), _indices(len(obj)), lambda done: [kind, done])


def _take_set(kind: str) -> Callable[[Any], Apart]:
    def build(done: list[Any]) -> Node:
        return [kind, sorted(done, key=json.dumps)]  # Python's own order of texts varies from run to run

    def take(obj: Any) -> Apart:
        members = tuple(obj)
        return Apart(members, [f"{{{i}}}" for i in range(len(members))], build, members)

    return take


def _take_dict(obj: dict[Any, Any]) -> Apart:
    return _mapping("dict", obj, _order(obj), None)


def _take_ordered_dict(obj: Any) -> Apart:
    return _mapping("OrderedDict", obj, range(len(obj)), None)


def _take_defaultdict(obj: Any) -> Apart:
    return _mapping("defaultdict", obj, _order(obj), obj.default_factory)


def _order(obj: dict[Any, Any]) -> Sequence[int]:
    """In which order JAX meets the values."""
    keys = list(obj)
    try:
        return sorted(range(len(keys)), key=keys.__getitem__)
    except (TypeError, ValueError):
        return range(len(keys))


def _mapping(kind: str, obj: Any, order: Sequence[int], factory: Any) -> Apart:
    keys, values = list(obj), list(obj.values())
    count = len(keys)
    children = [*[values[i] for i in order], *keys]
    names = [key_text(key) for key in keys]
    paths = [*[names[i] for i in order], *[f"<key {name}>" for name in names]]

    def build(done: list[Any]) -> Node:
        written: list[Any] = [None] * count
        for place, i in enumerate(order):
            written[i] = done[place]
        if kind == "defaultdict":
            if done[-1] is not None and type(done[-1]) is not list:
                raise RefusalError(
                    "a `defaultdict` whose default factory is neither a class nor a function of a module",
                    "Write the factory with `def` at module level.",
                )
            return [kind, done[-1], done[count:-1], written]
        return [kind, done[count:], written]

    if kind == "defaultdict":
        children.append(factory)
        paths.append(".default_factory")
    return Apart(children, paths, build, keys)


def _take_deque(obj: Any) -> Apart:
    return Apart((*obj, obj.maxlen), [*_indices(len(obj)), ".maxlen"], lambda done: ["deque", done[-1], done[:-1]])


def _three(kind: str) -> Callable[[Any], Apart]:
    return lambda obj: Apart((obj.start, obj.stop, obj.step), (".start", ".stop", ".step"), lambda done: [kind, *done])


def _take_partial(obj: Any) -> Apart:
    attributes = {name: value for name, value in obj.__dict__.items() if name != "__annotations__"}
    return _applied("partial", obj, obj.func, [attributes or None])


def _take_jax_partial(obj: Any) -> Apart:
    function = obj.func
    if type(function).__name__ == "_HashableCallableShim":  # how JAX wraps a partial within a Partial
        function = vars(function)["fun"]
    return _applied("Partial", obj, function, [])


# What `functools.update_wrapper` sets, but for annotations, which are those of what it wraps.
_UPDATED = frozenset({*WRITTEN_ATTRIBUTES, "__wrapped__", "__type_params__"})


def is_partial_attribute(name: Any) -> bool:
    """Whether a partial in a file may have an attribute: not those that other code calls, such as `__get__`."""
    return type(name) is str and (not name.startswith("__") or name in _UPDATED)


def _applied(kind: str, obj: Any, function: Any, more: list[Any]) -> Apart:
    names = tuple(obj.keywords)
    if not all(type(name) is str for name in names):
        raise RefusalError("a partial with a keyword that is no string", "Make it anew, with its keywords as strings.")
    if kind == "partial" and not all(map(is_partial_attribute, obj.__dict__.keys() - {"__annotations__"})):
        raise RefusalError("a partial with an attribute that stands in for a method", "Delete the attribute.")
    positional = len(obj.args)
    children = [*obj.args, *obj.keywords.values(), *names, function, *more]
    keys = [*_indices(positional), *[f"[{name!r}]" for name in names], *["<keyword>"] * len(names), ".func"]

    def build(done: list[Any]) -> Node:
        first, second = positional + len(names), positional + 2 * len(names)
        return [kind, done[second], done[:positional], done[first:second], done[positional:first], *done[second + 1 :]]

    return Apart(children, [*keys, *[".__dict__"] * len(more)], build)


def _take_method(obj: types.MethodType) -> Apart:
    name = method_name(obj.__func__, obj.__self__)
    if name is None:
        raise RefusalError(
            f"a bound method, `{getattr(obj.__func__, '__qualname__', '?')}`, that its object's class does not have",
            "Let the class define it.",
        )
    owner = obj.__self__
    if kind_of(owner if isinstance(owner, type) else type(owner)) is None:
        raise RefusalError(
            f"a bound method of a `{type(owner).__qualname__}`, which is no pytree node", "Save the object itself."
        )
    return Apart((owner,), (".__self__",), lambda done: ["method", done[0], name])


def take_bound_method(obj: Any) -> Apart | None:
    """A bound method of an Equinox module; None if it is not one that its class has."""
    parts = object.__getattribute__(obj, "__dict__")
    if "__self__" not in parts or "__func__" not in parts:
        return None
    name = method_name(parts["__func__"], parts["__self__"])
    if name is None or isinstance(parts["__self__"], type):
        return None
    return Apart((parts["__self__"],), (".__self__",), lambda done: ["bound", done[0], name])


def method_name(function: Any, owner: Any) -> str | None:
    """The name under which the class of an object, or an object that is a class, has a function."""
    name = getattr(function, "__name__", None)
    return name if isinstance(name, str) and name.isidentifier() and find_method(owner, name) is function else None


def find_method(owner: Any, name: str) -> Any:
    """The function that binds to `owner` under a name: of its class, or, if it is a class, its class method."""
    bases: Iterable[type] = type.__getattribute__(owner if isinstance(owner, type) else type(owner), "__mro__")
    for base in bases:
        found = type.__getattribute__(base, "__dict__").get(name)
        if found is not None:
            if isinstance(owner, type) or isinstance(found, classmethod):
                return found.__func__ if isinstance(owner, type) and isinstance(found, classmethod) else None
            return found if isinstance(found, types.FunctionType) else None
    return None


def _take_path(obj: pathlib.PurePath) -> Apart:
    kind = type(obj).__name__
    return Apart((str(obj),), ("",), lambda done: ["path", kind, done[0]])


def _take_struct(obj: jax.ShapeDtypeStruct) -> Apart:
    if not all(type(size) is int for size in obj.shape) or getattr(obj, "is_ref", False):
        raise RefusalError(
            "a `ShapeDtypeStruct` with unknown sizes, or of a mutable reference", "Give it sizes that are numbers."
        )
    sizes = list(obj.shape)
    return Apart(
        (obj.dtype, bool(obj.weak_type), obj.sharding),
        (".dtype", ".weak_type", ".sharding"),
        lambda done: ["struct", sizes, done[0], done[1], done[2]],
    )


def _take_treedef(obj: Any) -> Apart:
    try:
        described = jtu.tree_unflatten(obj, [LEAF] * obj.num_leaves)
        same = jtu.tree_structure(described) == obj
    except Exception as error:  # noqa: BLE001 -- the unflatten functions of any class may raise anything
        raise RefusalError(
            "a treedef whose classes refuse to be rebuilt around placeholders", "Leave it out."
        ) from error
    if not same:
        raise RefusalError("a treedef that does not come back from the object that it describes", "Leave it out.")
    return Apart((described,), ("",), lambda done: ["treedef", done[0]])


def _take_mesh(obj: Any) -> Apart:
    sizes, kinds = [int(n) for n in obj.devices.shape], axis_type_names(obj)
    ids = [device.id for device in obj.devices.flat]
    return Apart(
        (*obj.axis_names, *ids),
        [""] * (len(sizes) + len(ids)),
        lambda done: ["mesh", sizes, done[: len(sizes)], done[len(sizes) :], kinds],
    )


def _take_abstract_mesh(obj: Any) -> Apart:
    sizes, kinds = [int(n) for n in obj.axis_sizes], axis_type_names(obj)
    return Apart(obj.axis_names, [""] * len(sizes), lambda done: ["abstract_mesh", sizes, done, kinds])


def _take_spec(obj: Any) -> Apart:
    sets = [getattr(obj, name, None) or None for name in ("unreduced", "reduced")]
    kind = getattr(obj, "unreduced_kind", None)
    if kind is not None and sets[0] and getattr(kind, "name", str(kind)).lower() != "sum":
        raise RefusalError(f"a `PartitionSpec` with the unreduced kind {kind}", "Leave it out of the model.")
    # Iterating over a spec that has one of the sets raises.
    known = [getattr(obj, name, None) for name in ("partitions", "_partitions")]
    entries = next((each for each in known if each is not None), None)
    entries = tuple(obj) if entries is None else entries
    count = len(entries)
    return Apart(
        (*entries, *sets),
        (*_indices(count), ".unreduced", ".reduced"),
        lambda done: ["spec", done[:count], *done[count:]],
    )


def _take_named_sharding(obj: Any) -> Apart:
    device = obj.mesh.devices.flat[0] if isinstance(obj.mesh, Mesh) else None
    return Apart(
        (obj.mesh, obj.spec, _memory_kind(obj, device)),
        (".mesh", ".spec", ".memory_kind"),
        lambda done: ["named_sharding", *done],
    )


def _take_single_device_sharding(obj: Any) -> Apart:
    (device,) = obj.device_set
    return Apart(
        (device, _memory_kind(obj, device)),
        (".device", ".memory_kind"),
        lambda done: ["single_device_sharding", *done],
    )


def _memory_kind(sharding: Any, device: Any) -> str | None:
    """None for the ordinary memory of the device, whose name varies."""
    kind = sharding.memory_kind
    if kind is None or device is None or kind == device.default_memory().kind:
        return None
    if kind not in MEMORY_KINDS:
        raise RefusalError(f"a sharding in the unknown kind of memory {kind!r}", "Leave it out of the model.")
    return kind


def take_device(obj: Any) -> Apart:
    """A device: its platform and its id."""
    platform = obj.platform
    return Apart((obj.id,), (".id",), lambda done: ["device", platform, done[0]])


def key_dtype_node(dtype: Any) -> Node | None:
    """The node of a dtype of typed PRNG keys; None if it is anything else, or not of JAX's own implementations."""
    if isinstance(dtype, np.dtype) or not hasattr(dtype, "_impl"):  # a cheap test first
        return None
    impl = key_implementation(dtype)
    return None if impl is None else ["key_dtype", impl]


def _node(*node: Any) -> Callable[[Any], Apart]:
    return lambda _: Apart((), (), lambda _: list(node))


_TAKERS: dict[type, Callable[[Any], Apart]] = {
    tuple: _sequence("tuple"),
    list: _sequence("list"),
    set: _take_set("set"),
    frozenset: _take_set("frozenset"),
    dict: _take_dict,
    collections.OrderedDict: _take_ordered_dict,
    collections.defaultdict: _take_defaultdict,
    collections.deque: _take_deque,
    slice: _three("slice"),
    range: _three("range"),
    functools.partial: _take_partial,
    jtu.Partial: _take_jax_partial,
    types.MethodType: _take_method,
    pathlib.PurePosixPath: _take_path,
    pathlib.PureWindowsPath: _take_path,
    pathlib.PosixPath: _take_path,
    pathlib.WindowsPath: _take_path,
    jax.ShapeDtypeStruct: _take_struct,
    jtu.PyTreeDef: _take_treedef,
    Mesh: _take_mesh,
    AbstractMesh: _take_abstract_mesh,
    PartitionSpec: _take_spec,
    NamedSharding: _take_named_sharding,
    SingleDeviceSharding: _take_single_device_sharding,
    type(PartitionSpec.UNCONSTRAINED): _node("unconstrained"),
    object: _node("marker"),
    Leaf: _node("leaf"),
}
