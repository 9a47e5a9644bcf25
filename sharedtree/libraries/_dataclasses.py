"""Row of the table of libraries for dataclasses in JAX's registry, which the native walk can read field by field.

JAX's flatten function reads each field with `getattr`, and its unflatten function calls the class with all fields. The
native walk is faster: it reads the attributes of the instance, and puts them into a new one. The result is the same if
no code of the user runs in either, and if `__init__` only sets the fields. This file checks all these facts.
For a class without one of them, the registered functions are called.

A class can be changed at any time. Its facts are checked when its first instance is read, and again whenever a
structure with an instance is made. If a fact no longer holds, the class is left to JAX for good. A change is not
noticed as long as no new structure is made.

In this file an attribute is *inherited* if the class or a base class has it; see `core._class_attributes.inherited`.
"""

import dataclasses
import functools
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..core._class_attributes import (
    ABSENT,
    built_in_base,
    dataclass_fields,
    dict_descriptor,
    inherited,
    is_data_descriptor,
)
from ..core._jax_internals import registered_fields
from ..core._node_types import ClassKind, Library, NativeLayout, NodeType, PlainForm

_MAX_FIELDS = 255
"""The native walk stores the place of a field in a byte."""


class Fields(NamedTuple):
    """The fields of a dataclass, as the native walk reads and builds them.

    Attributes:
        order: all fields in the order in which `__init__` sets them.
        are_static: one byte for each field in `order`, 1 if it is static.
        places: one byte for each field in `order`, its index in `traced` or in `statics`.
        traced: the fields for the children, in JAX's order.
        statics: the fields for the auxiliary data, in JAX's order.
        are_slots: True if the instances have slots and no dictionary.
    """

    order: tuple[str, ...]
    are_static: bytes
    places: bytes
    traced: tuple[str, ...]
    statics: tuple[str, ...]
    are_slots: bool


def native_layout_of(cls: Any) -> NativeLayout | None:
    """Returns the layout of a class for the native walk. None leaves the class to the registered functions."""
    fields = fields_of(cls)
    # C takes the fields without the last one, `are_slots`, which is the kind of the layout.
    if fields is None or not fields.are_slots:
        return None if fields is None else NativeLayout("DATACLASS", fields[:-1])
    return NativeLayout("SLOTS", fields[:-1], slots=fields.order)


def fields_of(cls: Any) -> Fields | None:
    """Checks that a class can be read and built field by field. Returns its fields, or None if it cannot.

    Cost: some microseconds for each field.
    """
    registered = registered_fields(cls)
    if registered is None or "__dataclass_fields__" not in cls.__dict__:
        return None
    traced, statics = (tuple([sys.intern(name) for name in names]) for names in registered)
    fields = dataclass_fields(cls)
    order = tuple([sys.intern(field.name) for field in fields])
    if len(order) > _MAX_FIELDS or sorted(order) != sorted(traced + statics):
        return None
    if not all(field.init for field in fields) or not _is_called_for_its_fields_only(cls, fields):
        return None
    are_slots = _have_slots(cls, order)
    if are_slots is None:
        return None
    are_static = bytes(name in statics for name in order)
    places = bytes((statics if name in statics else traced).index(name) for name in order)
    return Fields(order, are_static, places, traced, statics, are_slots)


def _is_called_for_its_fields_only(cls: Any, fields: tuple[dataclasses.Field[Any], ...]) -> bool:
    """Returns True if a call of the class with its fields makes an object, sets them, and does nothing else."""
    plain = (("__new__", cls), ("__getattribute__", cls))
    if any(inherited(owner, name) is not object.__dict__[name] for name, owner in plain):
        return False
    # The metaclass may not take part in the call.
    if inherited(type(cls), "__call__") is not type.__dict__["__call__"]:
        return False
    frozen = bool(cls.__dataclass_params__.frozen)
    # The `__init__` of a frozen dataclass uses `object.__setattr__`.
    if not frozen and inherited(cls, "__setattr__") is not object.__dict__["__setattr__"]:
        return False
    init = cls.__dict__.get("__init__")
    if type(init) is not types.FunctionType or init.__dict__ or inherited(cls, "__post_init__") is not ABSENT:
        return False
    # The `__init__` must be the one that `dataclasses` generates for these fields.
    return _code_of(init) == _generated_code(frozen, tuple([_shape_of(field) for field in fields]))


def _have_slots(cls: type, names: tuple[str, ...]) -> bool | None:
    """Checks where the instances of a class have their fields.

    Returns:
        True if all are slots and there is no dictionary. False if all are in an ordinary dictionary. None otherwise.
    """
    if built_in_base(cls) is not object:
        return None
    attributes = [inherited(cls, name) for name in names]
    are_slots = [type(attribute) is types.MemberDescriptorType for attribute in attributes]
    # A property, for example, would answer in the place of the dictionary.
    is_data = [is_data_descriptor(attribute) for attribute in attributes]
    # 0 if the instances have no dictionary.
    if not cls.__dictoffset__:
        return True if all(are_slots) else None
    is_ordinary = type(dict_descriptor(cls)) is types.GetSetDescriptorType
    return False if is_ordinary and not any(is_data) else None


# Name, keyword-only, has a default, has a default factory: all that the generated `__init__` depends on.
_FieldShape = tuple[str, bool, bool, bool]


def _shape_of(field: dataclasses.Field[Any]) -> _FieldShape:
    """Returns the shape of a field."""
    has_default = field.default is not dataclasses.MISSING
    has_factory = field.default_factory is not dataclasses.MISSING
    return field.name, bool(field.kw_only), has_default, has_factory


def _code_of(function: types.FunctionType) -> tuple[Any, ...]:
    """Returns all that decides what a function does, without the values of its defaults, which nobody uses here."""
    code = function.__code__
    names = code.co_names, code.co_varnames, code.co_freevars
    return code.co_code, code.co_consts, *names, code.co_argcount, code.co_kwonlyargcount, code.co_flags


@functools.lru_cache(1_024)
def _generated_code(frozen: bool, shapes: tuple[_FieldShape, ...]) -> tuple[Any, ...] | None:
    """Returns the code of the `__init__` that `dataclasses` generates for fields of these shapes."""
    # Only the shapes of the fields matter, so all types are `object` and all defaults are None or a list.
    fields: list[tuple[str, type, Any]] = []
    for name, kw_only, has_default, has_factory in shapes:
        options: dict[str, Any] = {"kw_only": kw_only}
        if has_default or has_factory:
            options["default_factory" if has_factory else "default"] = list if has_factory else None
        fields.append((name, object, dataclasses.field(**options)))
    try:
        generated = dataclasses.make_dataclass("Generated", fields, frozen=frozen)
    # The fields were changed after the class was made, and now fit no `__init__`.
    except (TypeError, ValueError):
        return None
    return _code_of(generated.__dict__["__init__"])


def plain_form_of(obj: Any, node_type: NodeType) -> PlainForm | None:
    """Returns the plain data for an instance in a state: all its fields.

    None for a class that `jax.tree_util.register_dataclass` does not know.
    """
    registered = registered_fields(node_type.cls)
    if registered is None:
        return None
    names, static_names = registered
    # The flatten function may give something else than these fields.
    children, aux = node_type.take_apart(obj)
    if len(children) != len(names) or type(aux) is not tuple or len(aux) != len(static_names):
        return None

    def make(new: Sequence[Any], statics: Mapping[str, Any]) -> Any:
        """Makes the instance again, from its traced and its static fields."""
        return node_type.put_together(tuple([statics[name] for name in static_names]), new)

    return PlainForm("dict", names, children, dict(zip(static_names, aux, strict=True)), make)


def kind_in_files(cls: Any) -> ClassKind | None:
    """Returns "dataclass" for a dataclass whose instances `object.__new__` makes. None for a subclass of `dict`, say.

    An abstract dataclass counts, too: it has no instances, but a file may name it. No instance is made to find out,
    because a file may name classes that are refused later, and the `__del__` of an instance would run.
    """
    if not hasattr(cls, "__dataclass_fields__"):
        return None
    # `object.__new__` raises if a `__new__` in C, of `dict` for example, has to make the instance. It does not matter
    # if a class in between has a `__new__` in Python.
    functions = [base.__dict__.get("__new__") for base in cls.__mro__]
    first_in_c = next(function for function in functions if type(function) is types.BuiltinFunctionType)
    return "dataclass" if first_in_c is object.__dict__["__new__"] else None


DATACLASSES = Library(
    "dataclasses", native_layout_of=native_layout_of, plain_form_of=plain_form_of, kind_in_files=kind_in_files
)
