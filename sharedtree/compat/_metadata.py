"""How the metadata in treeo's trees is compared: `FieldMetadata` and `Hashable` by content, `Opaque` loosely.

treeo keeps all three in the auxiliary data of its trees. The first two come without an `==`, so a model that was built
again, loaded or deep-copied could not be mapped together with the one that it is like, could not be tied to it, and was
traced anew. With one, vanilla JAX gains as well.
"""

from typing import Any

from .._comparisons import LOOSE


def compare_by_content(module: Any) -> None:
    """For `treeo.types`."""
    metadata, hashable = module.FieldMetadata, module.Hashable

    def is_same_metadata(self: Any, other: object) -> bool:
        return type(other) is metadata and vars(self) == vars(other)

    def holds_same(self: Any, other: object) -> bool:
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
