"""Attributes that an Equinox module copies from the function that it wraps: name, documentation and annotations.

`equinox.module_update_wrapper` copies them. Annotations may be texts, and other programs evaluate such texts to get the
types. So a file never contains annotations. It names the field from whose value a reader copies them again, if they
are still equal to those of that value.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from ...core._class_attributes import ABSENT, dict_descriptor
from ...core._library_rows import without_missing
from ...libraries._equinox import WRAPPER_ATTRIBUTES
from ..trust._buildable_classes import kind_of

WRITTEN_ATTRIBUTES = frozenset(WRAPPER_ATTRIBUTES) - {"__annotations__"}
"""The copied attributes that a file may hold. Annotations are not among them."""


class WrappedField(NamedTuple):
    """A field of a module, and the names of the attributes that a reader copies from its value.

    Attributes:
        field: None if the module wraps none of its fields.
    """

    field: str | None
    copied: tuple[str, ...]


_NOT_WRAPPED = WrappedField(None, ())


def find_wrapped_field(fields: Sequence[str], attributes: dict[str, Any]) -> WrappedField:
    """Finds the field that a module wraps, by comparing the module's attributes with those of each field's value.

    The module may have been renamed since it was wrapped. Then its new name differs and is written. Annotations are
    never written, so those of the field must equal those of the module.
    """
    best = _NOT_WRAPPED
    if "__module__" not in attributes:
        return best
    module_attributes = {name: attributes[name] for name in WRAPPER_ATTRIBUTES if name in attributes}
    for field in fields:
        copies = copied_attributes(attributes[field]) if field in attributes else {}
        equal = [name for name in module_attributes if name in copies and copies[name] == module_attributes[name]]
        has_all_annotations = "__annotations__" in equal or len(equal) == len(module_attributes)
        is_wrapped = copies.keys() <= module_attributes.keys() and has_all_annotations
        # Several fields may hold functions. The one with the most equal attributes is the wrapped one.
        if is_wrapped and len(equal) > len(best.copied):
            best = WrappedField(field, tuple(equal))
    return best


def copy_wrapped_attributes(obj: Any, wrapped: Any) -> None:
    """Copies the attributes that `equinox.module_update_wrapper` copies. Attributes that the module has are kept."""
    module_attributes = dict_descriptor(type(obj)).__get__(obj)
    copies = copied_attributes(wrapped)
    module_attributes.update({name: value for name, value in copies.items() if name not in module_attributes})


def copied_attributes(wrapped: Any) -> dict[str, Any]:
    """Returns the attributes that a module copies from the object that it wraps.

    If a file can contain instances of the object's class, or if it is a partial, the attributes are read from
    dictionaries. So no property and no `__getattr__` runs, nor anything that the file put there.
    """
    cls = type(wrapped)
    if kind_of(cls) is None and not issubclass(cls, functools.partial):
        attributes = {name: getattr(wrapped, name, ABSENT) for name in WRAPPER_ATTRIBUTES}
        return {name: value for name, value in attributes.items() if value is not ABSENT}
    # Later dictionaries win, so bases come first, then subclasses, then the instance.
    bases = reversed(type.__getattribute__(cls, "__mro__"))
    dictionaries = [type.__getattribute__(base, "__dict__") for base in bases]
    descriptors = [names["__dict__"] for names in dictionaries if "__dict__" in names]
    instance_dicts = [without_missing(descriptor.__get__(wrapped)) for descriptor in descriptors]
    attributes: dict[str, Any] = {}
    for names in (*dictionaries, *instance_dicts[-1:]):
        attributes |= {name: names[name] for name in WRAPPER_ATTRIBUTES if name in names}
    return {name: value for name, value in attributes.items() if value is None or type(value) in (str, dict)}
