"""The classes whose instances are what they have as attributes, declared or not: treeo's trees, and NNX's objects.

Each library has a file of its own, which says what is written of an instance and what comes from elsewhere. Here is
only asked whose a class is.
"""

from collections.abc import Callable, Mapping
from typing import Any

from . import _nnx_objects, _treeo_trees
from ._nnx_objects import step_of as step_of

Finish = Callable[[Any, dict[str, Any]], Any]
"""(an instance, its attributes as a file has them) → the instance, checked and completed, or one that is equal."""


def is_of_attributes(cls: type) -> bool:
    """Whether the instances of a class are all in their attributes."""
    return _nnx_objects.is_of_attributes(cls) or _treeo_trees.is_of_attributes(cls)


def declared_fields(cls: type) -> tuple[str, ...]:
    """The attributes that a class of this kind declares."""
    return _library_of(cls).declared_fields(cls)


def may_have(cls: type, name: str) -> bool | None:
    """Whether an attribute that is not declared may have a name; None if the library has no rule of its own."""
    return _nnx_objects.may_have(cls, name) if _nnx_objects.is_of_attributes(cls) else None


def is_open(cls: type) -> bool:
    """Whether the attributes of an instance are nowhere declared, so that one that is unknown is no mistake."""
    return _nnx_objects.is_of_attributes(cls)


def written(obj: Any, attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes of an instance as they are written: those that JAX traces come first, in JAX's order.

    Raises:
        RefusalError: if it cannot be saved.
    """
    return _library_of(type(obj)).written(obj, attributes)


def static_attributes(cls: type, aux: Any) -> dict[str, Any]:
    """The attributes of an instance that JAX does not trace, of the auxiliary data that its flatten function gives."""
    return _nnx_objects.static_attributes(aux) if _nnx_objects.is_of_attributes(cls) else dict(aux.items)


def finisher(cls: type, new_names: Mapping[str, str | None]) -> Finish | None:
    """What is done with an instance whose attributes were set as a file has them; None if nothing is.

    Args:
        cls: its class.
        new_names: the name of each attribute in the file → the name it has now, or None if it was dropped.
    """
    return _nnx_objects.finisher(cls, new_names) if _nnx_objects.is_of_attributes(cls) else _treeo_trees.finisher(cls)


def default_of(cls: type, name: str) -> Callable[[], Any] | None:
    """What makes the default of a field that a file lacks; None if it has none."""
    return None if _nnx_objects.is_of_attributes(cls) else _treeo_trees.default_of(cls, name)


def may_stay_unset(cls: type, name: str) -> bool:
    """Whether instances need not have a field."""
    return _library_of(cls).may_stay_unset(cls, name)


def _library_of(cls: type) -> Any:
    return _nnx_objects if _nnx_objects.is_of_attributes(cls) else _treeo_trees
