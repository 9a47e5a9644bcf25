"""Classes of which a file may hold instances. There are seven kinds, and none is rebuilt by calling the class.

module, dataclass, namedtuple   Equinox modules and others: rebuilt field by field
attributes                      `sharedtree.Module`s, classes of treeo, treex and Flax NNX: attribute by attribute
placeholder                     an instance stands for something, and has no contents
enum                            members are found by name
registered                      registered with JAX or `register_node`: rebuilt by the registered functions
"""

import enum
import weakref
from typing import Any

from jax import tree_util as jtu

from ...core._class_attributes import ABSENT, is_instance
from ...core._node_types import (
    PLAIN,
    ClassKind,
    is_in_jax_registry,
    is_namedtuple,
    library_in_files,
    node_types_by_class,
)

FIELD_KINDS = frozenset({"module", "dataclass", "namedtuple", "attributes", "placeholder"})
"""Kinds that are rebuilt field by field or attribute by attribute.

A class may change from one of these kinds to another, and old files can still be loaded.
"""

# Class → its kind, for classes that were looked up.
_kinds: weakref.WeakKeyDictionary[type, ClassKind | None] = weakref.WeakKeyDictionary()


def is_rebuildable(cls: Any) -> bool:
    """Returns True if an object is a class of one of the seven kinds; False for anything else."""
    return kind_of(cls) is not None


def kind_of(cls: Any) -> ClassKind | None:
    """Returns the kind of a class; None if it has none of the seven kinds, or the object is no class."""
    if not is_instance(cls, type):
        return None
    kind = _kinds.get(cls, ABSENT)
    # A class without a kind may have been registered since it was last looked up.
    if kind is ABSENT or (kind is None and cls in node_types_by_class):
        kind = _kinds[cls] = _find_kind(cls)
    return kind


def _find_kind(cls: Any) -> ClassKind | None:
    """Determines the kind of a class, without the cache.

    If several kinds fit, the first of these is returned: "enum", "namedtuple", the kind by its library, "registered".
    """
    if issubclass(cls, enum.Enum):
        return "enum"
    if is_namedtuple(cls):
        return "namedtuple"
    # The file of a library in `sharedtree/libraries/` knows the kinds of its classes. Dataclasses count as a library.
    library_and_kind = library_in_files(cls)
    if library_and_kind is not None:
        _, kind = library_and_kind
        return kind
    # Classes for whose instances files have nodes of their own kinds do not count as registered, though JAX has them in
    # its registry. A file could use JAX's unflatten functions for these to get round the checks of such a node.
    is_plain = cls in PLAIN or cls in (set, frozenset, object, type, jtu.Partial)
    return "registered" if not is_plain and (cls in node_types_by_class or is_in_jax_registry(cls)) else None
