"""Row of the table of libraries for Flax: its `TrainState`. Besides, the boxes of Flax Linen, and Flax's own files.

A *`TrainState`* updates its parameters by optax. None of its other fields is trained: they are the state of the
optimizer, the number of steps, and what a user's subclass adds, such as the statistics of batch norms.

A *box* is an `AxisMetadata`: it holds a parameter and the names of its axes. Linen opens a box, by `unbox()`, before a
layer sees the parameter. So if views of sharedtree count as boxes, each layer gets an array in place of a view.

This file never imports Flax. `loaded` looks a name up, and returns None if the program has not imported its module.
"""

from collections.abc import Callable, Sequence
from typing import Any

from ..core._class_attributes import dataclass_fields, loaded
from ..core._node_types import Library, NamesInFiles, Role


def role_of(cls: Any) -> Callable[[Any], Sequence[Role | None]] | None:
    """Returns the function that gives the roles of the children of a `TrainState`. None for other classes."""
    if not issubclass(cls, loaded("flax.training.train_state", "TrainState") or ()):
        return None
    # Flax's dataclasses have their fields as children, in order, except those that are declared as no pytree nodes.
    children: list[str] = [field.name for field in dataclass_fields(cls) if field.metadata.get("pytree_node", True)]
    roles: list[Role | None] = [_role_of_field(name) for name in children]
    return lambda _: roles


def roles_by_step(steps: Sequence[str]) -> dict[str, Role | None]:
    """Returns step → role for an instance in a file, if it has the fields of a `TrainState`. Otherwise nothing.

    Subclasses, which no file tells from other classes, are recognised, too.

    Args:
        steps: texts of the edges to the children: `.step`, `.params`, `.opt_state`.
    """
    names = [step.removeprefix(".") for step in steps]
    if not {"step", "params", "opt_state"}.issubset(names):
        return {}
    return {f".{name}": _role_of_field(name) for name in names}


def _role_of_field(name: str) -> Role | None:
    """Returns the role of all leaves below a field of a `TrainState`.

    None for `params`: the leaves below it have the roles that their own classes give to them.
    """
    if name == "params":
        return None
    return "optimizer state" if name == "opt_state" else "state"


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


def is_keyed_by_aux(cls: Any) -> bool:
    """Returns True for `FrozenDict`: its auxiliary data is its keys."""
    return cls is loaded("flax.core", "FrozenDict")


FLAX = Library(
    "Flax",
    role_of=role_of,
    is_keyed_by_aux=is_keyed_by_aux,
    names=NamesInFiles(
        "flax",
        instances="""
            flax.core: FrozenDict
            flax.training.train_state: TrainState
            sharedtree.linen: TrainState
        """,
        functions="flax.linen.linear: default_embed_init default_kernel_init",
    ),
)
