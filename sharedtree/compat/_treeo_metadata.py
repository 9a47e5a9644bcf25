"""How the metadata in treeo's trees is compared.

treeo keeps a dictionary of static fields in the auxiliary data of a tree, and in that one of `FieldMetadata`. Its
copies have both in another order, and what is in them comes without an `==`, or with one that says too little. So

- `FieldMetadata`, which nobody can change, gets an `==` by content, from which vanilla JAX gains, too: a model that was
  built again, loaded or deep-copied is not traced anew, and can be mapped together with the one that it is like;
- in the structures of sharedtree the fields are in one order, and an `Opaque` is compared by what it holds. treeo's own
  `==` asks for the type only, which spares a trace, and gives the traced model's value to every other model.

    {"_training": True, "log": Opaque([3], None), "_field_metadata": {"w": ..., "log": ...}}
    _Fields((("_field_metadata", _Ordered({"log": ..., "w": ...})), ("_training", True), ("log", _Held([3], None))))
"""

from typing import Any, NamedTuple

from ..core._node_types import AUX_CONVERSIONS, AuxConversion


class _Fields(NamedTuple):
    """The static fields of a tree, by name."""

    items: tuple[tuple[str, Any], ...]


class _Held(NamedTuple):
    """What an `Opaque` holds."""

    value: Any
    predicate: Any


class _Ordered:
    """The items of a dictionary of `FieldMetadata`, which is compared as a whole: there is one in each tree."""

    __slots__ = ("_hash", "items")

    def __init__(self, metadata: dict[str, Any]) -> None:
        self.items = tuple([(name, metadata[name]) for name in sorted(metadata)])
        self._hash = hash(self.items)

    def __eq__(self, other: object) -> bool:
        return type(other) is _Ordered and self.items == other.items

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return repr(dict(self.items))


def compare_by_content(module: Any) -> None:
    """For `treeo.types`."""
    metadata = module.FieldMetadata

    def is_same(self: Any, other: object) -> bool:
        return type(other) is metadata and vars(self) == vars(other)

    metadata.__eq__ = is_same
    metadata.__hash__ = lambda self: hash(self.node)


def compare_in_one_form(module: Any) -> None:
    """For `treeo.tree`."""
    opaque = module.utils.Opaque

    def seen(aux: Any) -> Any:
        if type(aux) is not dict:
            # Of a class with a flatten function of its own.
            return aux
        return _Fields(tuple([(name, seen_in(name, aux[name])) for name in sorted(aux)]))

    def seen_in(name: str, value: Any) -> Any:
        if type(value) is opaque:
            return _Held(value.value, value.predicate)
        is_metadata = name == "_field_metadata" and type(value) is dict
        return _Ordered(value) if is_metadata else value

    def given(aux: Any) -> Any:
        return {name: given_in(value) for name, value in aux.items} if type(aux) is _Fields else aux

    def given_in(value: Any) -> Any:
        if type(value) is _Held:
            return opaque(*value)
        return dict(value.items) if type(value) is _Ordered else value

    AUX_CONVERSIONS[module.Tree] = AuxConversion(seen, given)


def forget(module: Any) -> None:
    """Takes back what was said of a `treeo.tree` that is not to be used."""
    AUX_CONVERSIONS.pop(getattr(module, "Tree", None), None)  # pyright: ignore[reportArgumentType, reportCallIssue]
