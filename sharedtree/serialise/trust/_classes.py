"""Which classes a file may have instances of: seven kinds, which are rebuilt without a call of the class.

Modules of Equinox, dataclasses and namedtuples are rebuilt field by field; `sharedtree.Module`s and classes of treeo,
treex and Flax NNX attribute by attribute; placeholders are only there; enums have members by name; other classes that
are registered, with JAX or with `register_node`, have functions that take instances apart and make them.
"""

import contextlib
import enum
import sys
import weakref
from typing import Any, Literal

import equinox as eqx

from ...core._class_attributes import ABSENT, inherited
from ...core._node_types import _is_in_jax_registry, _known
from ...core._plain_containers import is_namedtuple
from ...libraries._nnx import MAPPING, is_object, nnx
from ...nn._mutable_module import Module
from ._names import namespace

ClassKind = Literal["module", "dataclass", "namedtuple", "attributes", "placeholder", "enum", "registered"]

FIELD_KINDS = frozenset({"module", "dataclass", "namedtuple", "attributes", "placeholder"})
"""Kinds that are rebuilt field by field, and may turn into one another."""

_kinds: weakref.WeakKeyDictionary[type, ClassKind | None] = weakref.WeakKeyDictionary()


def is_rebuildable(cls: Any) -> bool:
    """Whether an object is a class of one of the seven kinds."""
    return kind_of(cls) is not None


def kind_of(cls: Any) -> ClassKind | None:
    """The kind of a class; None if its instances cannot be rebuilt, or if it is no class at all."""
    if not isinstance(cls, type):
        return None
    known = _kinds.get(cls, ABSENT)
    if known is ABSENT or (known is None and cls in _known):  # it may have been registered since
        known = _kinds[cls] = _find_kind(cls)
    return known


def _find_kind(cls: Any) -> ClassKind | None:
    # What `equinox.nn.Shared` puts where it has taken a node away: a private class, and no pytree node.
    if (cls.__module__, cls.__qualname__) == ("equinox.nn._shared", "SharedNode"):
        return "placeholder"
    if issubclass(cls, enum.Enum):
        return "enum"
    if issubclass(cls, eqx.Module):
        return "module"
    if is_namedtuple(cls):
        return "namedtuple"
    if library_name_of(cls) is not None:
        return "attributes"
    # `object.__new__` makes no instances of what inherits from `dict`, `Exception` and the like. An abstract class has
    # none, either, but may be named.
    with contextlib.suppress(TypeError):
        is_abstract = bool(getattr(cls, "__abstractmethods__", None))
        if hasattr(cls, "__dataclass_fields__") and (is_abstract or type(object.__new__(cls)) is cls):
            return "dataclass"
    is_plain = cls in (type(None), tuple, list, dict, set, frozenset, object, type)
    return "registered" if not is_plain and (cls in _known or _is_in_jax_registry(cls)) else None


def library_name_of(cls: Any) -> Literal["sharedtree", "nnx", "treeo"] | None:
    """Whose a class is whose instances are all in their attributes, declared or not; None if it is none of these."""
    if Module in type.__getattribute__(cls, "__mro__"):
        return "sharedtree"
    if is_object(cls) or cls in nnx_holders():
        return "nnx"
    is_holder = cls.__module__ == "treeo.types" and cls.__qualname__ in ("FieldMetadata", "Hashable")
    return "treeo" if is_holder or is_tree(cls) else None


def nnx_holders() -> dict[Any, dict[str, type]]:
    """The classes of NNX that hold plain data and are no objects of its own, and of each what its attributes are."""
    axes, table = held("flax.nnx", "StateAxes"), nnx()
    return {} if table is None else {table.mapping: {MAPPING: dict}, axes: {"_filters": tuple, "_axes": tuple}}


def is_tree(cls: Any) -> bool:
    """Whether a class is a tree of treeo's, without a flatten or unflatten function of its own, which knows better."""
    tree = held("treeo.tree", "Tree")
    if tree is None or cls is tree or tree not in type.__getattribute__(cls, "__mro__"):
        return False
    return all(inherited(cls, name) is inherited(tree, name) for name in ("tree_flatten", "tree_unflatten"))


def held(module: str, name: str) -> Any:
    """What a module holds under a name; None if it is not loaded, so that nothing can be of it."""
    return namespace(sys.modules.get(module)).get(name)
