"""Classes whose instances files may have: seven kinds, all rebuilt without a call of the class.

Modules of Equinox, dataclasses and namedtuples are rebuilt field by field; `sharedtree.Module`s and classes of treeo,
treex and Flax NNX attribute by attribute; placeholders are only there; enums have members by name; other classes that
are registered, with JAX or with `register_node`, have functions that take instances apart and make them.
"""

import enum
import weakref
from typing import Any

from ...core._class_attributes import ABSENT
from ...core._node_types import ClassKind, is_in_jax_registry, is_namedtuple, library_in_files, node_types_by_class

FIELD_KINDS = frozenset({"module", "dataclass", "namedtuple", "attributes", "placeholder"})
"""Kinds that are rebuilt field by field, and may turn into one another."""

_kinds: weakref.WeakKeyDictionary[type, ClassKind | None] = weakref.WeakKeyDictionary()


def is_rebuildable(cls: Any) -> bool:
    """Returns True if an object is a class of one of the seven kinds."""
    return kind_of(cls) is not None


def kind_of(cls: Any) -> ClassKind | None:
    """Returns the kind of a class; None if its instances cannot be rebuilt, or if it is no class at all."""
    if not isinstance(cls, type):
        return None
    kind = _kinds.get(cls, ABSENT)
    # A class without a kind may have been registered since it was last looked up.
    if kind is ABSENT or (kind is None and cls in node_types_by_class):
        kind = _kinds[cls] = _find_kind(cls)
    return kind


def _find_kind(cls: Any) -> ClassKind | None:
    """Works out the kind of a class.

    If several fit, the first of these wins: enum, namedtuple, the row of its library.
    """
    if issubclass(cls, enum.Enum):
        return "enum"
    if is_namedtuple(cls):
        return "namedtuple"
    by_library = library_in_files(cls)
    if by_library is not None:
        return by_library[1]
    # JAX has these in its registry, too, and files have kinds of nodes for them.
    is_plain = cls in (type(None), tuple, list, dict, set, frozenset, object, type)
    return "registered" if not is_plain and (cls in node_types_by_class or is_in_jax_registry(cls)) else None
