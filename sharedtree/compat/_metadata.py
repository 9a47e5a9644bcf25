"""How the metadata in treeo's trees is compared: `FieldMetadata` and `Hashable` by content, `Opaque` loosely.

treeo keeps all three in the auxiliary data of its trees. The first two have no `==` of their own, so a model that was
loaded, deep-copied or built again would be of another structure than the one that it is like.
"""

from typing import Any

from .._comparisons import BY_CONTENT, LOOSE


def enter_types(module: Any) -> None:
    """For `treeo.types`."""
    BY_CONTENT[module.FieldMetadata] = lambda metadata: (metadata.node, metadata.kind, metadata.opaque)
    BY_CONTENT[module.Hashable] = lambda hashable: (hashable.value,)


def enter_opaque(module: Any) -> None:
    """For `treeo.utils`."""
    LOOSE[module.Opaque] = lambda opaque: opaque.value
