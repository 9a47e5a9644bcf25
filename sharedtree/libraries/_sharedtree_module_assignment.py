"""What an assignment to an attribute of a `Module` does: the mark is taken off and noted; some values are refused."""

import dataclasses
from typing import Any

import numpy as np

from ..core._class_attributes import inherited
from ..core._errors import CycleError
from ..core._node_types import PYTHON_NUMBERS
from ._sharedtree_module_kinds import DECLARED, attributes_of, kinds_of, note_kinds, noted_kinds, of_class
from ._sharedtree_module_values import (
    MARKED,
    PARAMETER,
    STATE,
    SUBTREE,
    Kind,
    Marked,
    is_array,
    kind_of_value,
    require_markable,
)

OWN_METHODS = frozenset({"merge", "parameters"})


def assign(module: Any, name: str, value: Any) -> Any:
    """Notes the kind of an attribute to which a value is about to be assigned, and returns the value without its mark.

    Raises:
        UnregisteredTypeError: if the value holds arrays or modules where no pytree could hold them.
        CycleError: if the value is the module itself.
        AttributeError: if the name is that of a method of `Module`.
    """
    cls: Any = type(module)
    if name in OWN_METHODS:
        raise AttributeError(
            f"`{cls.__name__}.{name}` is a method of `sharedtree.Module`, which an attribute of that name would hide. "
            "Give the attribute another name."
        )
    if value is module:
        raise CycleError(
            f"`{cls.__name__}.{name}` is assigned the module itself, which would then contain itself.\n"
            "A DAG has no cycles. Give it to the methods that need it, as an argument of the call.",
            ("", f".{name}"),
        )
    noted = noted_kinds(module)
    before = noted.by_name.get(name)
    declared = of_class(cls).declared.get(name)
    if type(value) is Marked:
        kind, value = value.kind, value.value
    elif before in MARKED or declared in MARKED:
        kind = before if before in MARKED else declared
        assert kind is not None
        require_markable(value, kind, f"`{cls.__name__}.{name}`")
    elif declared is not None:
        kind = declared
    else:
        kind = kind_of_value(value, f"`{cls.__name__}.{name}`")
        # An array that becomes a number, as a counter that is reset does, is no other kind of thing; nor is it if that
        # number becomes another one.
        current = attributes_of(module).get(name)
        if before == SUBTREE and (is_array(current) or _is_number(current)) and _is_number(value):
            kind = SUBTREE
    if kind != before and name not in of_class(cls).ignored:
        kinds: dict[str, Kind] = {**noted.by_name, name: kind}
        note_kinds(module, kinds_of(kinds.items()))
    return value


def _is_number(value: Any) -> bool:
    return type(value) in PYTHON_NUMBERS or isinstance(value, np.number | np.bool_)


def forget(module: Any, name: str) -> None:
    """Drops what was noted of an attribute that is deleted, its mark, too."""
    noted = noted_kinds(module)
    if name in noted.by_name:
        note_kinds(module, kinds_of([item for item in noted.items if item[0] != name]))


def require_soundness(cls: Any) -> None:
    """Raises if the instances of a new class could not be modules.

    Raises:
        TypeError: if it has slots, or marks what is an attribute of the class.
    """
    slots = vars(cls).get("__slots__", ())
    if slots and slots not in ("__weakref__", "__dict__"):
        raise TypeError(
            f"`{cls.__name__}` has `__slots__`, but the attributes of a `sharedtree.Module` live in its `__dict__`. "
            "Leave the slots out; of a dataclass, leave out `slots=True`."
        )
    for name, value in vars(cls).items():
        if type(value) is Marked:
            raise TypeError(
                f"`{cls.__name__}.{name}` marks an attribute of the class, which all instances would have together. "
                f"Mark it in `__init__`, or declare a field of a dataclass:\n"
                f"    {name}: jax.Array = sharedtree.{_FUNCTIONS[value.kind]}(default_factory=...)"
            )


_FUNCTIONS: dict[Kind, str] = {PARAMETER: "parameter", STATE: "state_field"}


def is_assigned_by_class(cls: type, name: str) -> bool:
    """Whether a class has a property, or another descriptor, that is asked when an attribute is assigned."""
    return hasattr(type(inherited(cls, name)), "__set__")


def field_declaring(kind: Kind, **options: Any) -> Any:
    """A field of a dataclass that declares the kind of its attribute."""
    return dataclasses.field(metadata={DECLARED: kind}, **options)
