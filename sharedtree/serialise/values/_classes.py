"""The classes whose instances can be written and rebuilt without calling them, and what their instances hold.

Seven kinds: Equinox modules, dataclasses and namedtuples, which are rebuilt field by field; `sharedtree.Module`s and
classes of treeo, treex and Flax NNX, which are rebuilt attribute by attribute; placeholders, of which there is nothing
to rebuild but that they are there; enums, whose members are found by name; and other classes that are registered with
JAX or with `register_node`, which come apart and together by the functions that were registered.
"""

import dataclasses
import enum
import functools
import keyword
import types
import weakref
from typing import Any, Literal, NamedTuple

import equinox as eqx

from ..._errors import SharedTreeError
from ..._node_types import _is_in_jax_registry, _known, dict_descriptor, is_namedtuple
from ..trust._allowed import LIBRARIES
from ._attribute_classes import is_of_attributes, library_of

ClassKind = Literal["module", "dataclass", "namedtuple", "attributes", "placeholder", "enum", "registered"]

FIELD_KINDS = frozenset({"module", "dataclass", "namedtuple", "attributes", "placeholder"})
"""Kinds that are rebuilt field by field, and may turn into one another."""

WRAPPER_ATTRIBUTES = ("__module__", "__name__", "__qualname__", "__doc__", "__annotations__")
"""What `equinox.module_update_wrapper` copies from a wrapped function into a module."""

WRITTEN_ATTRIBUTES = frozenset(WRAPPER_ATTRIBUTES) - {"__annotations__"}
"""Those of them that a file may hold. Texts in annotations are evaluated by whoever asks for the types that they name,
so annotations are only ever copied from code."""

_ABSENT: Any = object()


class Layout(NamedTuple):
    """Where the instances of a class keep what they hold.

    Attributes:
        kind: which kind of class it is.
        fields: the names of its fields; what JAX traces comes first, as in JAX's order.
        attributes_of: instance → its `__dict__`; None if it has none.
        slots: the descriptor of each slot, by name.
        ignored: attributes that are not data: caches of properties, and what `typing` notes on instances.
        version: what the class says in `__sharedtree_version__`, 0 if it says nothing.
    """

    kind: ClassKind
    fields: tuple[str, ...]
    attributes_of: Any
    slots: dict[str, Any]
    ignored: frozenset[str]
    version: int


def is_rebuildable(cls: Any) -> bool:
    """Whether an object is a class of one of the seven kinds."""
    return kind_of(cls) is not None


def kind_of(cls: Any) -> ClassKind | None:
    """The kind of a class; None if its instances cannot be rebuilt, or if it is no class at all."""
    if not isinstance(cls, type) or isinstance(cls, types.GenericAlias):
        return None
    known = _kinds.get(cls, _ABSENT)
    if known is _ABSENT or (known is None and cls in _known):  # it may have been registered since
        known = _kinds[cls] = _find_kind(cls)
    return known


def layout_of(cls: Any) -> Layout:
    """The layout of a class that is rebuilt field by field.

    Raises:
        SharedTreeError: if its `__sharedtree_version__` is not a whole number.
    """
    known = _layouts.get(cls)
    if known is None:
        known = _layouts[cls] = _find_layout(cls)
    return known


_kinds: weakref.WeakKeyDictionary[type, ClassKind | None] = weakref.WeakKeyDictionary()
_layouts: weakref.WeakKeyDictionary[type, Layout] = weakref.WeakKeyDictionary()


def is_attribute_name(name: Any, cls: type) -> bool:
    """Whether an attribute that is no declared field may have this name in a file: not those that Python uses."""
    if type(name) is not str:
        return False
    if is_of_attributes(cls) and (allowed := library_of(cls).may_have(cls, name)) is not None:
        return allowed
    if not name.isidentifier() or keyword.iskeyword(name):
        return False
    return name in WRITTEN_ATTRIBUTES or not (name.startswith("__") and name.endswith("__"))


def shadows(cls: type, name: str) -> bool:
    """Whether an attribute that is no declared field would stand in the place of something that the class defines.

    A file could replace a method in this way. Of slots and plain values of the class it may: they are data. Instances
    of classes of the libraries have no attributes but those that `equinox.module_update_wrapper` sets; but treex's and
    NNX's have more than they declare.
    """
    if name in WRAPPER_ATTRIBUTES:
        return False
    for base in type.__getattribute__(cls, "__mro__"):
        held = type.__getattribute__(base, "__dict__").get(name, _ABSENT)
        if held is not _ABSENT:
            if isinstance(held, types.MemberDescriptorType):
                return False
            return callable(held) or hasattr(type(held), "__get__")
    return cls.__module__.partition(".")[0] in LIBRARIES and kind_of(cls) != "attributes"


def _find_kind(cls: type) -> ClassKind | None:
    if (cls.__module__, cls.__qualname__) in _PLACEHOLDERS:
        return "placeholder"
    if issubclass(cls, enum.Enum):
        return "enum"
    if issubclass(cls, eqx.Module):
        return "module"
    if is_namedtuple(cls):
        return "namedtuple"
    if is_of_attributes(cls):
        return "attributes"
    if dataclasses.is_dataclass(cls) and _is_made_by_object(cls):
        return "dataclass"
    if cls in _PLAIN_TYPES:
        return None
    if cls in _known or _is_in_jax_registry(cls):
        return "registered"
    return None


# What `equinox.nn.Shared` puts where it has taken a node away. The class is private, and no pytree node.
_PLACEHOLDERS = frozenset({("equinox.nn._shared", "SharedNode")})

_PLAIN_TYPES = frozenset({type(None), tuple, list, dict, set, frozenset, object, type})


def _is_made_by_object(cls: Any) -> bool:
    """Whether `object.__new__` makes its instances; not so if it inherits from `dict`, `Exception` and the like."""
    if getattr(cls, "__abstractmethods__", None):
        return True  # it has no instances, but may be named
    try:
        object.__new__(cls)
    except TypeError:
        return False
    return True


def _find_layout(cls: Any) -> Layout:
    kind = kind_of(cls)
    assert kind in FIELD_KINDS
    if kind == "namedtuple":
        fields: tuple[str, ...] = cls._fields
    elif kind == "placeholder":
        fields = ()
    elif kind == "attributes":
        fields = library_of(cls).declared_fields(cls)
    else:
        declared = dataclasses.fields(cls)
        static = [f.name for f in declared if f.metadata.get("static", False)]
        fields = (*[f.name for f in declared if f.name not in static], *static)
    slots: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        slots.update({k: v for k, v in vars(base).items() if isinstance(v, types.MemberDescriptorType)})
    has_dict = any("__dict__" in vars(base) for base in cls.__mro__)
    version = getattr(cls, "__sharedtree_version__", 0)
    if type(version) is not int or version < 0:
        raise SharedTreeError(
            f"`{cls.__qualname__}.__sharedtree_version__` is {version!r}. Let it be a whole number, and count it up "
            "when the fields change:\n    __sharedtree_version__ = 1"
        )
    cached = {k for base in cls.__mro__ for k, v in vars(base).items() if isinstance(v, functools.cached_property)}
    return Layout(
        kind,
        fields,
        dict_descriptor(cls).__get__ if has_dict else None,
        slots,
        frozenset({*cached, "__orig_class__", "__weakref__"} - set(fields)),
        version,
    )
