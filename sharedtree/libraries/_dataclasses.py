"""Dataclasses in JAX's registry that can be read and built field by field, with the outcome that JAX has.

JAX's flatten asks each field with `getattr`, and its unflatten calls the class with all of them. Reading the instance's
own attributes and putting them into a new one is the same where nobody's code runs in either, and where `__init__` does
nothing but set the fields. Each fact that this takes is asked here. Of a class that lacks one, the registered functions
are called as ever.

A class can be changed at any time. Its facts are asked when it is first met, and again whenever a structure that has an
instance is made. Where one has gone, the class is left to JAX for good. Who changes a class of which structures exist
already, and makes no new one, is not seen.
"""

import contextlib
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
"""The native walk has a place in a byte."""


class Fields(NamedTuple):
    """How a dataclass is read and built.

    Attributes:
        order: all fields in the order in which `__init__` sets them.
        are_static: of each of these, whether it is static.
        places: of each of these, where it is among the traced, or among the static ones.
        traced: the fields that are children, in JAX's order.
        statics: the fields that are auxiliary data, in JAX's order.
        are_slots: whether the instances have slots and no dictionary.
    """

    order: tuple[str, ...]
    are_static: bytes
    places: bytes
    traced: tuple[str, ...]
    statics: tuple[str, ...]
    are_slots: bool


def native_layout_of(cls: Any) -> NativeLayout | None:
    """How the native walk reads a class; None if JAX has to."""
    found = fields_of(cls)
    if found is None or not found.are_slots:
        return None if found is None else NativeLayout("DATACLASS", found[:-1])
    return NativeLayout("SLOTS", found[:-1], slots=found.order)


def fields_of(cls: Any) -> Fields | None:
    """How a class is read and built field by field; None if JAX has to. Cost: some microseconds a field."""
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
    """Whether calling the class with its fields makes an object, sets them, and does nothing else."""
    plain = (("__new__", cls), ("__getattribute__", cls))
    if any(inherited(of, name) is not object.__dict__[name] for name, of in plain):
        return False
    if inherited(type(cls), "__call__") is not type.__dict__["__call__"]:
        return False
    frozen = bool(cls.__dataclass_params__.frozen)
    # What is frozen does not use its own `__setattr__` when it is made.
    if not frozen and inherited(cls, "__setattr__") is not object.__dict__["__setattr__"]:
        return False
    init = cls.__dict__.get("__init__")
    if type(init) is not types.FunctionType or init.__dict__ or inherited(cls, "__post_init__") is not ABSENT:
        return False
    return _code_of(init) == _generated(frozen, tuple([_shape_of(field) for field in fields]))


def _have_slots(cls: type, names: tuple[str, ...]) -> bool | None:
    """Whether all fields are slots, and there is no dictionary; None if it is neither that nor the other way round."""
    if built_in_base(cls) is not object:
        return None
    found = [inherited(cls, name) for name in names]
    are_slots = [type(each) is types.MemberDescriptorType for each in found]
    is_data = [is_data_descriptor(each) for each in found]
    if not cls.__dictoffset__:
        return True if all(are_slots) else None
    is_ordinary = type(dict_descriptor(cls)) is types.GetSetDescriptorType
    return False if is_ordinary and not any(is_data) else None


_FieldShape = tuple[str, bool, bool, bool]


def _shape_of(field: dataclasses.Field[Any]) -> _FieldShape:
    has_default, has_factory = (each is not dataclasses.MISSING for each in (field.default, field.default_factory))
    return field.name, bool(field.kw_only), has_default, has_factory


def _code_of(function: types.FunctionType) -> tuple[Any, ...]:
    """All that a function does, but for the values of its defaults, which are not used here."""
    code = function.__code__
    names = code.co_names, code.co_varnames, code.co_freevars
    return code.co_code, code.co_consts, *names, code.co_argcount, code.co_kwonlyargcount, code.co_flags


@functools.lru_cache(1_024)
def _generated(frozen: bool, shapes: tuple[_FieldShape, ...]) -> tuple[Any, ...] | None:
    """The code of the `__init__` that `dataclasses` makes for such fields."""
    fields: list[tuple[str, type, Any]] = []
    for name, kw_only, has_default, has_factory in shapes:
        options: dict[str, Any] = {"kw_only": kw_only}
        if has_default or has_factory:
            options["default_factory" if has_factory else "default"] = list if has_factory else None
        fields.append((name, object, dataclasses.field(**options)))
    try:
        made = dataclasses.make_dataclass("Generated", fields, frozen=frozen)
    except (TypeError, ValueError):  # fields that were changed after the class was made
        return None
    return _code_of(made.__dict__["__init__"])


def plain_form_of(obj: Any, node_type: NodeType) -> PlainForm | None:
    """All fields by name, of classes that came by `register_dataclass`."""
    registered = registered_fields(node_type.cls)
    if registered is None:
        return None
    names, static_names = registered
    children, aux = node_type.take_apart(obj)
    if len(children) != len(names) or type(aux) is not tuple or len(aux) != len(static_names):
        return None

    def make(new: Sequence[Any], statics: Mapping[str, Any]) -> Any:
        return node_type.put_together(tuple([statics[name] for name in static_names]), new)

    return PlainForm("dict", names, children, dict(zip(static_names, aux, strict=True)), make)


def kind_in_files(cls: Any) -> ClassKind | None:
    """Field by field, of those that `object.__new__` makes: not of what inherits from `dict`, `Exception` and the like.

    An abstract class has no instances, but may be named.
    """
    with contextlib.suppress(TypeError):
        is_abstract = bool(getattr(cls, "__abstractmethods__", None))
        if hasattr(cls, "__dataclass_fields__") and (is_abstract or type(object.__new__(cls)) is cls):
            return "dataclass"
    return None


DATACLASSES = Library(
    "dataclasses", native_layout_of=native_layout_of, plain_form_of=plain_form_of, kind_in_files=kind_in_files
)
