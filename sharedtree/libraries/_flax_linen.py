"""Flax Linen: the boxes around its parameters, which carry the names of axes. And Flax's own files.

Linen opens each `AxisMetadata` before a layer sees it, by `unbox()`. So a view that counts as one reaches every layer
as an array.

Flax is not imported, only looked at if the program has done so.
"""

from collections.abc import Callable
from typing import Any

from ..core._class_attributes import loaded


def is_box(obj: Any) -> bool:
    """Tells whether Linen opens an object before a layer sees it."""
    return isinstance(obj, loaded("flax.core.meta", "AxisMetadata") or ())


def register_as_box(cls: Any) -> bool:
    """Makes Linen open instances of a class, which has the methods of `AxisMetadata`. False if it is not imported."""
    metadata = loaded("flax.core.meta", "AxisMetadata")
    if metadata is None:
        return False
    metadata.register(cls)
    return True


def partition_spec_of(obj: Any) -> Any:
    """Asks Linen for the partition spec of a parameter, boxed or not."""
    get_partition_spec = loaded("flax.core.meta", "get_partition_spec")
    assert get_partition_spec is not None
    return get_partition_spec(obj)


def sharding_of(obj: Any, mesh: Any) -> Any:
    """Asks Linen for the sharding of a parameter, boxed or not."""
    get_sharding = loaded("flax.core.meta", "get_sharding")
    assert get_sharding is not None
    return get_sharding(obj, mesh)


def refuse_in_flax_files(cls: type, refuse: Callable[[Any], Any]) -> bool:
    """Makes `flax.serialization` call `refuse` for instances of a class. False if it is not imported.

    Args:
        cls: the class.
        refuse: takes the instance and raises.
    """
    register = loaded("flax.serialization", "register_serialization_state")
    if register is None:
        return False
    register(cls, refuse, lambda obj, _: refuse(obj), override=True)
    return True
