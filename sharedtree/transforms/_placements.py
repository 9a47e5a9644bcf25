"""Where leaves are put: `in_shardings`, `out_shardings`, `device_put`, `with_sharding_constraint`.

An array has one place. So a prefix that sends one array of a module to two of them, as rules by name do with a tied
embedding, is an error, whoever is given the prefix.

    Net(w, w)  under  Net(P("x"), P(None, "x"))        an error with both paths and both specifications
    Net(w, w)  under  Net(P("x"), P("x", None))        one place, written in two ways
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from ..core._printing import shown
from ._leaf_labels import REFUSED, Treatment, labels_in


def is_sharding(obj: Any) -> bool:
    """Whether an object in a prefix of shardings is one."""
    return (
        obj is None
        or isinstance(obj, (Sharding, PartitionSpec, jax.Device))
        or (type(obj).__name__ in ("Format", "Layout"))
    )


def placing(name: str, prefix: Any, *, containers: bool = False) -> Treatment:
    """The treatment of who puts each leaf where a prefix says.

    Args:
        name: what the prefix is called: the option.
        prefix: a sharding, or a prefix tree of them.
        containers: whether mutable containers outside modules are objects, as under `Policy(containers=True)`.
    """

    def describe(place: Place) -> str:
        return f"{name} {_described(place.sharding, prefix)}"

    return Treatment(
        name,
        prefix,
        is_sharding,
        lambda label, leaf, _: Place(label),
        describe,
        advice=_how_to_have_one_place,
        within_module=REFUSED,
        has_containers=containers,
    )


def _described(sharding: Any, prefix: Any) -> str:
    """A sharding in words: its specification, and as much more as it takes to tell it from others of the prefix."""
    if not isinstance(sharding, NamedSharding):
        return shown(sharding)
    text = str(shortened(sharding.spec))
    meshes = [label.mesh for label in labels_in(prefix, is_sharding) if isinstance(label, NamedSharding)]
    if any(mesh != meshes[0] for mesh in meshes):
        devices = sharding.mesh.device_ids.ravel().tolist() if isinstance(sharding.mesh, Mesh) else []
        text += f" on the mesh {dict(sharding.mesh.shape)} of the devices {shown(devices)}"
    return text if sharding.memory_kind in (None, "device") else f"{text} in {sharding.memory_kind}"


class Place:
    """Where a sharding puts an array. Two shardings are one place if they say the same, however it is written.

    `P("x")` and `P()` are two, also on a mesh of one device, so that rules which disagree are refused there, too.

    Args:
        sharding: the label in a prefix.
    """

    __slots__ = ("sharding",)

    def __init__(self, sharding: Any) -> None:
        self.sharding = sharding

    def __eq__(self, other: object) -> bool:
        if type(other) is not Place:
            return NotImplemented
        one, two = _as_sharding(self.sharding), _as_sharding(other.sharding)
        return type(one) is type(two) and bool(one == two)

    __hash__ = None  # pyright: ignore[reportAssignmentType]


def _as_sharding(place: Any) -> Any:
    """A device as the sharding that it stands for, and a specification in the shortest way to write it."""
    if isinstance(place, jax.Device):
        return SingleDeviceSharding(place)
    if isinstance(place, NamedSharding):
        return NamedSharding(place.mesh, shortened(place.spec), memory_kind=place.memory_kind)
    return shortened(place) if isinstance(place, PartitionSpec) else place


def shortened(spec: PartitionSpec) -> PartitionSpec:
    """A specification as short as it can be written: `P("x", None)` and `P(("x",))` are `P("x")`."""
    if spec.unreduced or spec.reduced:
        return spec
    axes = [axis[0] if isinstance(axis, tuple) and len(axis) == 1 else axis or None for axis in spec]
    while axes and axes[-1] is None:
        axes.pop()
    return PartitionSpec(*axes)


def _how_to_have_one_place(leaves: Sequence[Any]) -> str:
    return (
        "What is tied within one argument has one place. Change the rule for one of these paths; or make rules by name "
        "so that they are asked once for each array, at its first path:\n"
        "    shardings = sharedtree.tree.map_with_path(rule, sharedtree.tree.filter(model, equinox.is_array))\n"
    )
