"""How each kind of node becomes an object, its children being built already.

A builder may raise whatever a constructor raises at nonsense; whoever calls it says that the file is malformed. Only
types are called here whose constructors do nothing but hold what they are given. No attribute is asked of an object
that a file describes, for its class may answer with a call of what the file put there.
"""

import collections
import enum
import functools
import pathlib
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import tree_util as jtu
from jax.sharding import PartitionSpec

from ..._errors import StructureMismatchError
from ..._jax_internals import rebuild_registered, registered_counts
from ..._node_types import _known
from ..._printable import printable
from ..arrays._arrays import key_dtype
from ..trust._classes import kind_of
from ._apart import LEAF, BoundMethod, find_method, is_partial_attribute
from ._atoms import read_base64
from ._nesting import Collisions
from ._placement import (
    find_device,
    rebuild_abstract_mesh,
    rebuild_mesh,
    rebuild_named_sharding,
    rebuild_single_device_sharding,
    rebuild_spec,
)
from ._touched import fault_of_aux
from ._wrapping import copy_wrapped_attributes, wrapped_attributes

Node = list[Any]


class Parts:
    """What there is to build from.

    Attributes:
        values: the value of each atom, by its texts.
        makers: for each type of the manifest, what makes an instance from the values of its fields, or the class.
        fields: for each type of the manifest, the names of its fields.
        collisions: of the keys of the nodes built so far.
        table: the objects of the nodes built so far.
    """

    __slots__ = ("collisions", "fields", "makers", "table", "values")

    def __init__(
        self,
        values: dict[tuple[str, ...], Any],
        makers: Sequence[Any],
        fields: Sequence[tuple[str, ...]],
        collisions: Collisions,
    ) -> None:
        self.values = values
        self.makers = makers
        self.fields = fields
        self.collisions = collisions
        self.table: list[Any] = []

    def child(self, child: Any) -> Any:
        """The object of a child."""
        cls = type(child)
        if cls is int:
            return self.table[child]
        return self.values[tuple(child)] if cls is list else child

    def children(self, children: list[Any]) -> list[Any]:
        """The objects of several children."""
        table, values = self.table, self.values
        return [table[c] if type(c) is int else values[tuple(c)] if type(c) is list else c for c in children]


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(what)


def _set(parts: Parts, node: Node) -> Any:
    items = parts.children(node[1])
    parts.collisions.add(items)
    made = set(items) if node[0] == "set" else frozenset(items)
    _require(len(made) == len(items), "a member occurs twice")
    return made


def _mapping(cls: Callable[..., Any]) -> Callable[[Parts, Node], Any]:
    def build(parts: Parts, node: Node) -> Any:
        keys = parts.children(node[-2])
        parts.collisions.add(keys)
        made = cls(zip(keys, parts.children(node[-1]), strict=True))
        _require(len(made) == len(keys), "a key occurs twice")
        return made

    return build


def _defaultdict(parts: Parts, node: Node) -> Any:
    factory = parts.child(node[1])
    _require(factory is None or callable(factory), "its default factory is no class")
    return _mapping(lambda items: collections.defaultdict(factory, items))(parts, node)


def _deque(parts: Parts, node: Node) -> Any:
    maxlen, items = parts.child(node[1]), parts.children(node[2])
    _require(maxlen is None or maxlen >= len(items), "it is longer than it may be")
    return collections.deque(items, maxlen)


def _object(parts: Parts, node: Node) -> Any:
    return parts.makers[node[1]](parts.children(node[2]))


def _wrapper(parts: Parts, node: Node) -> Any:
    obj = _object(parts, node)
    _require(kind_of(type(obj)) == "module", "its class is no Equinox module")
    copy_wrapped_attributes(obj, parts.child(node[2][parts.fields[node[1]].index(node[3])]))
    return obj


def _registered(parts: Parts, node: Node) -> Any:
    cls, aux, children = parts.makers[node[1]], parts.child(node[2]), parts.children(node[3])
    known, given = _known.get(cls), _counts(children, aux)
    fault = fault_of_aux(cls, aux)
    _require(fault is None, f"it has {fault}")
    fixed = registered_counts(cls)
    if fixed is not None and fixed != given:
        raise _other_counts(cls, given, fixed)
    try:
        if known is not None:
            made = known.put_together(aux, children)
            again: Any = known.take_apart(made)
        else:
            made = rebuild_registered(cls, aux, children)
            again = jtu.default_registry.flatten_one_level(made)
    except Exception as error:
        raise StructureMismatchError(
            f"The unflatten function of `{cls.__qualname__}` raised {type(error).__name__} on what the file holds: "
            f"{printable(str(error)[:200])}. Load it with the version of the class that wrote it."
        ) from error
    # How many an unflatten function takes only it knows, and those that zip with names drop what is too many.
    own = None if again is None else _counts(*again)
    if own != given:
        raise _other_counts(cls, given, own or (0, None))
    return made


def _counts(children: Sequence[Any], aux: Any) -> tuple[int, int | None]:
    """How many children there are, and static values, if aux data is a plain collection of them."""
    return len(children), len(aux) if type(aux) in (tuple, list, dict) else None


def _other_counts(cls: type, given: tuple[int, int | None], own: tuple[int, int | None]) -> StructureMismatchError:
    told = [f"{n} children and {'other aux data' if m is None else f'{m} static values'}" for n, m in (given, own)]
    return StructureMismatchError(
        f"The file has {told[0]} for a `{cls.__qualname__}`, and that has {told[1]}. Load it with the version of the "
        "class that wrote it."
    )


def _enum(parts: Parts, node: Node) -> Any:
    cls, member = parts.makers[node[1]], parts.child(node[2])
    if type(member) is str:
        found = cls.__members__.get(member)
        if found is None:
            raise StructureMismatchError(
                f"`{cls.__qualname__}` has no member `{printable(member[:80])}`. Add it again, as an alias if it was "
                "renamed."
            )
        return found
    _require(issubclass(cls, enum.Flag), "it is no member")
    found = cls._value2member_map_.get(member)  # noqa: SLF001 -- `cls(member)` is a call of the user's class
    if found is None:
        found = enum.Flag._missing_.__func__(cls, member)  # pyright: ignore  # noqa: SLF001 -- likewise
    _require(isinstance(found, cls), "it is no member")
    return found


def _struct(parts: Parts, node: Node) -> Any:
    sizes, dtype, weak, sharding = tuple(node[1]), parts.child(node[2]), node[3], parts.child(node[4])
    return jax.ShapeDtypeStruct(sizes, dtype, weak_type=weak, sharding=sharding)


def _nothing() -> None:
    """Stands in a partial until its state is set."""


def _call_parts(parts: Parts, node: Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    function = parts.child(node[1])
    names = parts.children(node[3])
    _require(callable(function), "its function cannot be called")
    _require(len(set(names)) == len(names), "a keyword occurs twice")
    return function, tuple(parts.children(node[2])), dict(zip(names, parts.children(node[4]), strict=True))


def _partial(parts: Parts, node: Node) -> Any:
    function, args, keywords = _call_parts(parts, node)
    attributes = parts.child(node[5])
    _require(all(map(is_partial_attribute, attributes or ())), "its attributes would stand in for methods")
    attributes = dict(attributes or {})
    parameters = attributes.get("__type_params__", ())
    _require(type(parameters) is tuple and not parameters, "its type parameters are no code's")
    if "__wrapped__" in attributes:
        annotations = wrapped_attributes(attributes["__wrapped__"]).get("__annotations__")
        attributes |= {} if annotations is None else {"__annotations__": annotations}
    made = functools.partial(_nothing)
    set_state: Any = made.__setstate__  # pyright: ignore[reportAttributeAccessIssue]
    set_state((function, args, keywords, attributes or None))  # the constructor would merge partials of partials
    return made


def _jax_partial(parts: Parts, node: Node) -> Any:
    function, args, keywords = _call_parts(parts, node)
    return jtu.Partial(function, *args, **keywords)


def _method(parts: Parts, node: Node) -> Any:
    owner = parts.child(node[1])
    function = find_method(owner, node[2])
    cls = owner if issubclass(type(owner), type) else type(owner)
    # Methods of classes that are values, such as `pathlib.Path.unlink`, are nothing that a model holds.
    _require(kind_of(cls) is not None, "its object is no instance of a trusted class")
    if function is None:
        raise StructureMismatchError(f"`{cls.__qualname__}` has no method `{node[2][:80]}`. Add it to the class again.")
    if node[0] == "method":
        return types.MethodType(function, owner)
    _require(kind_of(cls) == "module" and cls is not owner, "its object is no Equinox module")
    made = object.__new__(BoundMethod)
    object.__getattribute__(made, "__dict__").update({"__func__": function, "__self__": owner})
    copy_wrapped_attributes(made, function)
    return made


def _range(parts: Parts, node: Node) -> range:
    return range(*parts.children(node[1:]))


def _path(parts: Parts, node: Node) -> Any:
    text = parts.child(node[2])
    _require(node[1] in _PATHS, "it is no path")
    concrete, pure = _PATHS[node[1]]
    # A path of the other family of systems cannot be used here, only looked at.
    return concrete(text) if issubclass(type(pathlib.Path()), concrete) else pure(text)


_PATHS: dict[str, tuple[Any, Any]] = {
    "PosixPath": (pathlib.PosixPath, pathlib.PurePosixPath),
    "WindowsPath": (pathlib.WindowsPath, pathlib.PureWindowsPath),
    "PurePosixPath": (pathlib.PurePosixPath, pathlib.PurePosixPath),
    "PureWindowsPath": (pathlib.PureWindowsPath, pathlib.PureWindowsPath),
}


BUILDERS: dict[str, Callable[[Parts, Node], Any]] = {
    "tuple": lambda parts, node: tuple(parts.children(node[1])),
    "list": lambda parts, node: parts.children(node[1]),
    "set": _set,
    "frozenset": _set,
    "dict": _mapping(dict),
    "OrderedDict": _mapping(collections.OrderedDict),
    "defaultdict": _defaultdict,
    "deque": _deque,
    "object": _object,
    "wrapper": _wrapper,
    "registered": _registered,
    "enum": _enum,
    "struct": _struct,
    "key_dtype": lambda _, node: key_dtype(node[1]),
    "treedef": lambda parts, node: jtu.tree_structure(parts.child(node[1])),
    "leaf": lambda *_: LEAF,
    "partial": _partial,
    "Partial": _jax_partial,
    "method": _method,
    "bound": _method,
    "bytearray": lambda _, node: bytearray(read_base64(node[1])),
    "slice": lambda parts, node: slice(*parts.children(node[1:])),
    "range": _range,
    "path": _path,
    "marker": lambda *_: object(),
    "device": lambda parts, node: find_device(node[1], parts.child(node[2])),
    "mesh": lambda parts, node: rebuild_mesh(node[1], *map(parts.children, node[2:])),
    "abstract_mesh": lambda parts, node: rebuild_abstract_mesh(node[1], *map(parts.children, node[2:])),
    "spec": lambda parts, node: rebuild_spec(parts.children(node[1]), *parts.children(node[2:])),
    "unconstrained": lambda *_: PartitionSpec.UNCONSTRAINED,
    "named_sharding": lambda parts, node: rebuild_named_sharding(*parts.children(node[1:])),
    "single_device_sharding": lambda parts, node: rebuild_single_device_sharding(*parts.children(node[1:])),
}
