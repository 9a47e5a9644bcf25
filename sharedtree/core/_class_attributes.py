"""What stands in a class under a name, as it was written there: no metaclass and no descriptor is asked."""

import dataclasses
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
