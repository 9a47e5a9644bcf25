"""What stands in a class under a name, as it was written there: no metaclass and no descriptor is asked."""

from typing import Any

ABSENT: Any = object()


def inherited(cls: type, name: str) -> Any:
    """What a class has under a name, or the first of its bases that has it; `ABSENT` if none does."""
    return next((base.__dict__[name] for base in cls.__mro__ if name in base.__dict__), ABSENT)


def is_data_descriptor(value: Any) -> bool:
    """Whether a value in a class answers for an attribute even where the instance has one of that name."""
    return hasattr(type(value), "__set__") or hasattr(type(value), "__delete__")
