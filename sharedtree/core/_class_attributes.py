"""What stands in a class or a module under a name, as it was written there.

No metaclass, no descriptor and no `__getattr__` of a lazy module is asked, and nothing is imported.
"""

import dataclasses
import sys
import types
from collections.abc import Mapping
from typing import Any

ABSENT: Any = object()


def inherited(cls: type, name: str) -> Any:
    """What a class has under a name, or the first of its bases that has it; `ABSENT` if none does."""
    return next((base.__dict__[name] for base in cls.__mro__ if name in base.__dict__), ABSENT)


def is_data_descriptor(value: Any) -> bool:
    """Whether a value in a class answers for an attribute even where the instance has one of that name."""
    return hasattr(type(value), "__set__") or hasattr(type(value), "__delete__")


def dataclass_fields(cls: Any) -> tuple[dataclasses.Field[Any], ...]:
    """The fields that the instances of a dataclass have, in order; none if it is no dataclass."""
    return dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()


def dataclass_entries(cls: Any) -> dict[str, dataclasses.Field[Any]]:
    """All that a dataclass declares, by name: what no instance has, too, such as `ClassVar`s; empty if it is none."""
    return getattr(cls, "__dataclass_fields__", {})


_DEFINED_IN_PYTHON = 1 << 9  # `Py_TPFLAGS_HEAPTYPE`, as `copyreg` asks for it


def built_in_base(cls: type) -> type:
    """The first of its bases that was not defined in Python, which determines how its instances are laid out."""
    return next(base for base in cls.__mro__ if not base.__flags__ & _DEFINED_IN_PYTHON)


def dict_descriptor(cls: type) -> Any:
    """Reads and sets `obj.__dict__` past the class's own methods, which on Equinox modules cost four times more."""
    for base in cls.__mro__:
        descriptor = base.__dict__.get("__dict__")
        if descriptor is not None:
            return descriptor
    raise TypeError(f"`{cls.__qualname__}` has no `__dict__`; Equinox modules must have one.")


def namespace(module: Any) -> Mapping[str, Any]:
    """The dictionary of a module, read without running a lazy module's code."""
    if not isinstance(module, types.ModuleType):
        return {}
    try:
        return object.__getattribute__(module, "__dict__")
    except AttributeError:
        return {}


def loaded(module: str, name: str) -> Any:
    """What a module holds under a name; None if it is not loaded, so that nothing can be of it."""
    return namespace(sys.modules.get(module)).get(name)


_ASKED = frozenset({"_asdict", "for_json", "getdoc", "to_dict", "to_json", "to_numpy", "tolist"})


def is_asked_of_all(name: Any) -> bool:
    """Whether programs ask any object for an attribute of this name, and call what they get.

    Python does so with `__names__`, notebooks with `_repr_html_` and `_ipython_display_`, what makes JSON with
    `tolist`, IPython's `?` with `getdoc`, Matplotlib with `to_numpy`. Where a class lets its instances have any
    attribute, a file could put a function there.
    """
    if type(name) is not str:
        return False
    is_enclosed = name.startswith("_") and name.endswith("_") and name.strip("_") != ""
    return is_enclosed or name in _ASKED or name.startswith(("_repr_", "_ipython_", "__array", "__jax"))
