"""Boxes of Flax Linen, and Flax's own files.

A *box* is an `AxisMetadata`: it holds a parameter and the names of its axes. Linen opens a box, by `unbox()`, before a
layer sees the parameter. So if views of sharedtree count as boxes, each layer gets an array in place of a view.

This file never imports Flax. `loaded` looks a name up, and returns None if the program has not imported its module.
"""

from collections.abc import Callable
from typing import Any

from ..core._class_attributes import loaded


def is_box(obj: Any) -> bool:
    """Returns True if an object is a box."""
    return isinstance(obj, loaded("flax.core.meta", "AxisMetadata") or ())


def register_as_box(cls: Any) -> bool:
    """Makes the instances of a class boxes. The class has the methods of `AxisMetadata`.

    Returns:
        False if Linen is not imported, so that nothing was done.
    """
    metadata = loaded("flax.core.meta", "AxisMetadata")
    if metadata is None:
        return False
    metadata.register(cls)
    return True


def partition_spec_of(obj: Any) -> Any:
    """Returns Linen's partition spec of a parameter, boxed or not. Linen has been imported."""
    get_partition_spec = loaded("flax.core.meta", "get_partition_spec")
    assert get_partition_spec is not None
    return get_partition_spec(obj)


def sharding_of(obj: Any, mesh: Any) -> Any:
    """Returns Linen's sharding of a parameter on a mesh, boxed or not. Linen has been imported."""
    get_sharding = loaded("flax.core.meta", "get_sharding")
    assert get_sharding is not None
    return get_sharding(obj, mesh)


def refuse_in_flax_files(cls: type, refuse: Callable[[Any], Any]) -> bool:
    """Makes `flax.serialization` refuse to save and load instances of a class.

    Args:
        cls: the class.
        refuse: takes the instance and raises the error.

    Returns:
        False if `flax.serialization` is not imported, so that nothing was done.
    """
    register = loaded("flax.serialization", "register_serialization_state")
    if register is None:
        return False
    # The second function gets the instance and the saved state.
    register(cls, refuse, lambda obj, _: refuse(obj), override=True)
    return True
