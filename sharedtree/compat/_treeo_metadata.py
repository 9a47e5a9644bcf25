"""Compares the metadata in treeo's trees by content.

The auxiliary data of a treeo tree is a dict of its static fields. One of its entries is a dict of `FieldMetadata`. A
copy of a tree may have both dicts in another order. Some values in them have no `==`, or one that is true for different
values. Two changes are made:

- `FieldMetadata`, an immutable class of treeo, gets an `==` by content. Vanilla JAX profits, too: a model that was
  built again, loaded or deep-copied is not traced anew, and `jax.tree.map` takes it together with the first one.
- In the structures of sharedtree, the fields are sorted, and an `Opaque` is compared by its value. treeo's own `==`
  compares only the types. JAX would then reuse a trace of one model, with its value, for every other model.

The second change replaces auxiliary data as follows:

    {"_training": True, "log": Opaque([3], None), "_field_metadata": {"w": ..., "log": ...}}
    _Fields((("_field_metadata", _Ordered({"log": ..., "w": ...})), ("_training", True), ("log", _Held([3], None))))
"""

from typing import Any, NamedTuple

from ..core._node_types import AUX_CONVERSIONS, AuxConversion


class _Fields(NamedTuple):
    """Static fields of a tree: pairs of a name and a value, sorted by name."""

    items: tuple[tuple[str, Any], ...]


class _Held(NamedTuple):
    """Content of an `Opaque`, treeo's wrapper of a static value.

    Attributes:
        value: the static value.
        predicate: treeo's function to compare two values.
    """

    value: Any
    predicate: Any


class _Ordered:
    """Sorted items of a dict of `FieldMetadata`. The hash is computed once, since every tree has such a dict."""

    __slots__ = ("_hash", "items")

    def __init__(self, metadata: dict[str, Any]) -> None:
        # `FieldMetadata` can be hashed after `compare_by_content`.
        self.items = tuple([(name, metadata[name]) for name in sorted(metadata)])
        self._hash = hash(self.items)

    def __eq__(self, other: object) -> bool:
        return type(other) is _Ordered and self.items == other.items

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return repr(dict(self.items))


def compare_by_content(module: Any) -> None:
    """Patches treeo: gives its class `FieldMetadata` an `==` by content and a hash.

    Args:
        module: the module `treeo.types`.
    """
    metadata = module.FieldMetadata

    def is_same(self: Any, other: object) -> bool:
        return type(other) is metadata and vars(self) == vars(other)

    metadata.__eq__ = is_same
    # `node` tells whether the field is a child. It is equal for equal objects, and a hash needs no more.
    metadata.__hash__ = lambda self: hash(self.node)


def compare_in_one_form(module: Any) -> None:
    """Makes structures of sharedtree compare the static fields of treeo's trees by content.

    Args:
        module: the module `treeo.tree`.
    """
    opaque = module.utils.Opaque

    def to_structure(aux: Any) -> Any:
        """Replaces the auxiliary data of a tree by `_Fields`."""
        # The class has a flatten function of its own, whose auxiliary data is nothing of treeo's.
        if type(aux) is not dict:
            return aux
        return _Fields(tuple([(name, value_to_structure(name, aux[name])) for name in sorted(aux)]))

    def value_to_structure(name: str, value: Any) -> Any:
        """Replaces the value of one field."""
        if type(value) is opaque:
            return _Held(value.value, value.predicate)
        is_metadata = name == "_field_metadata" and type(value) is dict
        return _Ordered(value) if is_metadata else value

    def from_structure(aux: Any) -> Any:
        """Restores the auxiliary data for treeo's unflatten function."""
        return {name: value_from_structure(value) for name, value in aux.items} if type(aux) is _Fields else aux

    def value_from_structure(value: Any) -> Any:
        """Restores the value of one field."""
        if type(value) is _Held:
            return opaque(*value)
        return dict(value.items) if type(value) is _Ordered else value

    AUX_CONVERSIONS[module.Tree] = AuxConversion(to_structure, from_structure)


def forget(module: Any) -> None:
    """Takes back `compare_in_one_form` for a module `treeo.tree` that is removed from `sys.modules`.

    Args:
        module: the module. None if it was not imported.
    """
    # Without a module, None is looked up, which is no key.
    AUX_CONVERSIONS.pop(getattr(module, "Tree", None), None)  # pyright: ignore[reportArgumentType, reportCallIssue]
