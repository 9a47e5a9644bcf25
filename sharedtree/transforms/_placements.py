"""Where leaves are put: `in_shardings`, `out_shardings`, `device_put`, `with_sharding_constraint`.

An array has one place. So a prefix that sends one array of a module to two places is an error, under every transform.
Sharding rules that go by parameter names do this to a tied embedding.

    Net(w, w)  under  Net(P("x"), P(None, "x"))        an error with both paths and both specifications
    Net(w, w)  under  Net(P("x"), P("x", None))        one place, written in two ways
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from ..core._printing import shown
from ._leaf_labels import REFUSED, Treatment, labels_in


def placement_treatment(name: str, prefix: Any, *, containers: bool = False) -> Treatment:
    """Makes the treatment of a transform with a prefix of places for the leaves.

    Args:
        name: name of the option, for errors.
        prefix: a sharding, or a prefix tree of shardings.
        containers: True if mutable containers outside modules carry identity, as under `Policy(containers=True)`.
    """

    def describe(placement: Placement) -> str:
        return f"{name} {_description(placement.sharding, prefix)}"

    return Treatment(
        name,
        prefix,
        is_sharding,
        lambda label, leaf, _: Placement(label),
        describe,
        advice=_advice_on_rules,
        within_module=REFUSED,
        has_containers=containers,
    )


def is_sharding(obj: Any) -> bool:
    """Returns True if an object in a prefix of shardings is a label: a sharding, a device, a layout or None."""
    return (
        obj is None
        or isinstance(obj, (Sharding, PartitionSpec, jax.Device))
        # JAX renamed these classes between releases.
        or (type(obj).__name__ in ("Format", "Layout"))
    )


class Placement:
    """The place of an array under a sharding. Two placements are equal if their shardings mean the same.

    `P("x")` and `P()` differ, also on a mesh of one device. So contradictory rules are refused there, too.

    Args:
        sharding: a label in a prefix of shardings.
    """

    __slots__ = ("sharding",)

    def __init__(self, sharding: Any) -> None:
        self.sharding = sharding

    def __eq__(self, other: object) -> bool:
        if type(other) is not Placement:
            return NotImplemented
        form, other_form = _normal_form(self.sharding), _normal_form(other.sharding)
        return type(form) is type(other_form) and bool(form == other_form)

    # Outcomes are compared and never hashed.
    __hash__ = None  # pyright: ignore[reportAssignmentType]


def _normal_form(sharding: Any) -> Any:
    """Returns a sharding in a form in which all ways to write it are equal."""
    if isinstance(sharding, jax.Device):
        return SingleDeviceSharding(sharding)
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, shortest_spec(sharding.spec), memory_kind=sharding.memory_kind)
    return shortest_spec(sharding) if isinstance(sharding, PartitionSpec) else sharding


def shortest_spec(spec: PartitionSpec) -> PartitionSpec:
    """Returns the shortest way to write a specification: `P("x")` for `P("x", None)` and for `P(("x",))`."""
    # A new specification would lose these two.
    if spec.unreduced or spec.reduced:
        return spec
    axes = [axis[0] if isinstance(axis, tuple) and len(axis) == 1 else axis or None for axis in spec]
    while axes and axes[-1] is None:
        axes.pop()
    return PartitionSpec(*axes)


def _description(sharding: Any, prefix: Any) -> str:
    """Describes a sharding for errors: its specification, and whatever else tells it from others in the prefix."""
    if not isinstance(sharding, NamedSharding):
        return shown(sharding)
    text = str(shortest_spec(sharding.spec))
    meshes = [label.mesh for label in labels_in(prefix, is_sharding) if isinstance(label, NamedSharding)]
    if any(mesh != meshes[0] for mesh in meshes):
        devices = sharding.mesh.device_ids.ravel().tolist() if isinstance(sharding.mesh, Mesh) else []
        text += f" on the mesh {dict(sharding.mesh.shape)} of the devices {shown(devices)}"
    return text if sharding.memory_kind in (None, "device") else f"{text} in {sharding.memory_kind}"


def _advice_on_rules(leaves: Sequence[Any]) -> str:
    """Advice in an error, for rules by parameter names."""
    return (
        "What is tied within one argument has one place. Change the rule for one of these paths; or make rules by name "
        "so that they are asked once for each array, at its first path:\n"
        "    shardings = sharedtree.tree.map_with_path(rule, sharedtree.tree.filter(model, equinox.is_array))\n"
    )
