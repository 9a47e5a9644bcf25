"""Assignments to attributes of a `Module`: they take the mark off, note the kind, and refuse some values.

The kind of an attribute is parameter, state, sub-tree or static. Parameter and state are *marked* by `st.parameter` and
`st.state_field`, or *declared* by a field of a dataclass. The *noted* kinds are stored with the instance (see
`_sharedtree_module_kinds`).
"""

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
"""The public methods of `Module`, which are no names for attributes."""


def assign(module: Any, name: str, value: Any) -> Any:
    """Notes the kind of an attribute before an assignment, and returns the value without its mark. The caller sets it.

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
    noted_kind = noted.by_name.get(name)
    declared = of_class(cls).declared.get(name)
    # A mark wins over the noted and the declared kind, and these over the kind that follows from the value.
    if type(value) is Marked:
        kind, value = value.kind, value.value
    elif noted_kind in MARKED or declared in MARKED:
        kind = noted_kind if noted_kind in MARKED else declared
        assert kind is not None
        require_markable(value, kind, f"`{cls.__name__}.{name}`")
    elif declared is not None:
        kind = declared
    else:
        kind = kind_of_value(value, f"`{cls.__name__}.{name}`")
        # An array that becomes a number stays traced, as in a counter that is reset to 0. So does this number if it
        # becomes another number.
        current = attributes_of(module).get(name)
        if noted_kind == SUBTREE and (is_array(current) or _is_number(current)) and _is_number(value):
            kind = SUBTREE
    if kind != noted_kind and name not in of_class(cls).ignored:
        kinds: dict[str, Kind] = {**noted.by_name, name: kind}
        note_kinds(module, kinds_of(kinds.items()))
    return value


def _is_number(value: Any) -> bool:
    """Returns True for a Python number or a NumPy scalar."""
    return type(value) in PYTHON_NUMBERS or isinstance(value, np.number | np.bool_)


def forget(module: Any, name: str) -> None:
    """Removes the noted kind of an attribute that is deleted, and with it its mark."""
    noted = noted_kinds(module)
    if name in noted.by_name:
        note_kinds(module, kinds_of([item for item in noted.items if item[0] != name]))


def require_soundness(cls: Any) -> None:
    """Checks that the instances of a new class can be modules.

    Raises:
        TypeError: if the class has slots, or if an attribute of the class itself is a marked value.
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


# Kind → the name of the function that marks it.
_FUNCTIONS: dict[Kind, str] = {PARAMETER: "parameter", STATE: "state_field"}


def is_assigned_by_class(cls: type, name: str) -> bool:
    """Returns True if a property or another descriptor of the class handles assignments to an attribute."""
    return hasattr(type(inherited(cls, name)), "__set__")


def field_declaring(kind: Kind, **options: Any) -> Any:
    """Returns a field of a dataclass that declares the kind of its attribute. The options are `dataclasses.field`'s."""
    return dataclasses.field(metadata={DECLARED: kind}, **options)
