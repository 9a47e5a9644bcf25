"""How the metadata in treeo's trees is compared.

In any order; `FieldMetadata` and `Hashable` by content, `Opaque` loosely. treeo keeps all three in the auxiliary data
of its trees. The first two come without an `==`, so a model that was built again, loaded or deep-copied could not be
mapped together with the one that it is like, could not be tied to it, and was traced anew. With one, vanilla JAX gains
as well.
"""

from typing import Any

from .._comparisons import LOOSE
from .._node_types import AUX_IN_ORDER


def compare_by_content(module: Any) -> None:
    """For `treeo.types`."""
    metadata, hashable = module.FieldMetadata, module.Hashable

    def is_same_metadata(self: Any, other: object) -> bool:
        return type(other) is metadata and vars(self) == vars(other)

    def holds_same(self: Any, other: Any) -> bool:
        if type(other) is not hashable:
            return False
        one, another = self.value, other.value
        # An array has an answer for each element, and stays itself alone.
        return one is another or (type(one) is type(another) and (one == another) is True)

    metadata.__eq__ = is_same_metadata
    metadata.__hash__ = lambda self: hash(self.node)
    hashable.__eq__ = holds_same
    hashable.__hash__ = lambda self: hash(type(self.value))


def compare_loosely(module: Any) -> None:
    """For `treeo.utils`."""
    LOOSE[module.Opaque] = lambda opaque: opaque.value


def compare_in_any_order(module: Any) -> None:
    """For `treeo.tree`. A tree's copy has its fields sorted, and so its field metadata."""
    AUX_IN_ORDER[module.Tree] = _in_order


def _in_order(static_fields: Any) -> Any:
    names = sorted(static_fields)
    return {name: _sorted(static_fields[name]) if name == "_field_metadata" else static_fields[name] for name in names}


def _sorted(metadata: Any) -> Any:
    return {name: metadata[name] for name in sorted(metadata)} if type(metadata) is dict else metadata
