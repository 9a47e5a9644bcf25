"""`sharedtree.Module`s: what is written of one, and how its attributes get their kinds when it is loaded.

A module is what its `__dict__` holds, and of which kind each attribute is. The kinds are written as one more attribute,
which modules that are alike in this have together:

    ["object", <Linear>, [weight, calls, activation, {"weight": "parameter", "calls": "state", "activation": "static"}]]

They also say in which order the attributes are, which is that of the leaves. None of the class's code runs when a file
is loaded, and a file that says nothing of the kinds, or not of all attributes, gets those that follow from the values.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ..._assigned_values import ALL_KINDS
from ..._assigning import assign, forget
from ..._attribute_kinds import (
    KINDS_SLOT,
    Kinds,
    attributes_of,
    kinds_of,
    note_kinds,
    present_kinds,
    static_attributes as static_attributes,
)
from ..._errors import FormatError
from ...module import Module

IS_OPEN: bool = True


def is_of_attributes(cls: Any) -> bool:
    """Whether a class is one of `sharedtree.Module`s."""
    return Module in type.__getattribute__(cls, "__mro__")


def declared_fields(cls: Any) -> tuple[str, ...]:
    """The attributes that a class declares: of a dataclass its fields, otherwise none."""
    return tuple([field.name for field in dataclasses.fields(cls)]) if hasattr(cls, "__dataclass_fields__") else ()


def may_have(cls: Any, name: str) -> None:
    """No rule of its own for attributes that are not declared."""


def may_stay_unset(cls: Any, name: str) -> bool:
    """Whether instances need not have a field: no, as with any dataclass."""
    return False


def default_of(cls: Any, name: str) -> None:
    """No defaults but those of the fields of a dataclass."""


def written(obj: Any, attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes of an instance as they are written: those that JAX traces come first, in JAX's order."""
    kinds = present_kinds(obj)
    every = {name: attributes[name] for name in (*kinds.children, *kinds.statics)}
    return every | {KINDS_SLOT: kinds.by_name}


def finisher(cls: Any, new_names: Mapping[str, str | None]) -> Callable[[Any, dict[str, Any]], Any]:
    """What is done with an instance whose attributes were set as a file has them.

    Args:
        cls: the class.
        new_names: the names in the file → those that the attributes have now.

    Returns:
        (the instance, its attributes) → the instance, with its kinds. Raises `FormatError` if the file has none where
        it should.
    """

    def finish(obj: Any, attributes: dict[str, Any]) -> Any:
        try:
            said: Any = object.__getattribute__(obj, KINDS_SLOT)
        except AttributeError:
            return obj
        if type(said) is Kinds:  # of a default
            return obj
        # Texts first: an object of the file's making would be asked for its hash.
        are_texts = type(said) is dict and all(type(n) is str and type(kind) is str for n, kind in said.items())
        if not are_texts or not ALL_KINDS.issuperset(said.values()):
            raise FormatError(
                f"The file has kinds of the attributes of a `{cls.__qualname__}` that are none. No save would write "
                "that."
            )
        known = {new_names.get(name) or name: kind for name, kind in said.items()}
        items = [(name, kind) for name, kind in known.items() if name in attributes]
        values = dict(attributes)
        attributes.clear()
        attributes.update({name: values.pop(name) for name, _ in items} | values)
        note_kinds(obj, kinds_of(items))
        return obj

    return finish


def reassign(obj: Any, values: Mapping[str, Any]) -> None:
    """Gives an instance these attributes and no others, with the kinds that they would get by assignment.

    None of the class's code runs.

    Raises:
        UnregisteredTypeError: if a value cannot be assigned to its attribute.
    """
    attributes = attributes_of(obj)
    for name in [name for name in attributes if name not in values]:
        forget(obj, name)
        del attributes[name]
    for name, value in values.items():
        if name not in attributes or attributes[name] is not value:
            attributes[name] = assign(obj, name, value)
