"""Places of leaves: `in_shardings`, `out_shardings`, `device_put`, `with_sharding_constraint`.

An array has one place. So a prefix that sends one array of a module to two places is an error, under every transform.
Sharding rules that go by parameter names do this to a tied embedding.

    Net(w, w)  under  Net(P("x"), P(None, "x"))        an error with both paths and both specifications
    Net(w, w)  under  Net(P("x"), P("x", None))        one place, written in two ways

A *prefix* is a sharding for the whole tree, or a tree of shardings that has the upper part of the tree's shape. A
sharding in the prefix is a *label*, and holds for all leaves below it. A *specification* is a `PartitionSpec`, such as
`P("x")`: a sharding without its mesh. A `Treatment` says how the prefix of an option is read. `Outcomes` in
`_leaf_labels` spreads the labels over the leaves, and finds the arrays with two labels.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from ..core._printing import shown
from ._leaf_labels import REFUSED, Treatment, labels_in


def placement_treatment(name: str, prefix: Any, *, containers: bool = False) -> Treatment:
    """Makes the treatment of an option with shardings. Under it, two places for one array of a module are an error.

    The transform that has the option raises the error.

    Args:
        name: name of the option, for errors.
        prefix: a sharding, or a prefix tree of shardings.
        containers: True if mutable containers outside modules carry identity, as under `Policy(containers=True)`. Then
            two places for one array in such a container are refused, too.
    """

    def describe(placement: Placement) -> str:
        # For example "out_shardings P('x')".
        return f"{name} {_describe_sharding(placement.sharding, prefix)}"

    return Treatment(
        name,
        prefix,
        is_label=is_sharding,
        # A label becomes a `Placement`, so that two spellings of one sharding are equal. The leaf and its record make
        # no difference.
        resolve=lambda label, _leaf, _record: Placement(label),
        describe=describe,
        advice=_advise_on_rules,
        # Two places for one array within the modules of one argument are an error, and no reason to split the array.
        within_module=REFUSED,
        has_containers=containers,
    )


def is_sharding(obj: Any) -> bool:
    """Returns True if an object in a prefix of shardings is a label: a sharding, a device, a layout or None.

    A specification such as `P("x")` counts as a sharding. None leaves the choice to JAX.
    """
    return (
        obj is None
        or isinstance(obj, (Sharding, PartitionSpec, jax.Device))
        # Layouts are recognised by name, because JAX renamed their classes between releases.
        or (type(obj).__name__ in ("Format", "Layout"))
    )


class Placement:
    """The place of an array under a sharding. Two placements are equal if their shardings are two spellings of one.

    `P("x")` and `P()` are not equal, even on a mesh of one device, where both put the array in the same place. So
    contradictory rules are refused on a developer's machine, too.

    Args:
        sharding: a label in a prefix of shardings.
    """

    __slots__ = ("sharding",)

    def __init__(self, sharding: Any) -> None:
        self.sharding = sharding

    def __eq__(self, other: object) -> bool:
        if type(other) is not Placement:
            return NotImplemented
        sharding, other_sharding = _canonical(self.sharding), _canonical(other.sharding)
        # Labels of two classes count as different places.
        return type(sharding) is type(other_sharding) and bool(sharding == other_sharding)

    # A treatment compares placements, and never hashes them.
    __hash__ = None  # pyright: ignore[reportAssignmentType]


def _canonical(sharding: Any) -> Any:
    """Returns the canonical spelling of a sharding: two spellings of one sharding give equal results.

        a device                                 →  SingleDeviceSharding(device)
        NamedSharding(mesh, P("x", None))        →  NamedSharding(mesh, P("x"))
        P("x", None)                             →  P("x")

    Any other label is returned as it is.
    """
    if isinstance(sharding, jax.Device):
        return SingleDeviceSharding(sharding)
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, shortest_spec(sharding.spec), memory_kind=sharding.memory_kind)
    return shortest_spec(sharding) if isinstance(sharding, PartitionSpec) else sharding


def shortest_spec(spec: PartitionSpec) -> PartitionSpec:
    """Returns the shortest spelling of a specification: `P("x")` for `P("x", None)` and for `P(("x",))`."""
    # These two attributes name axes of partial sums. A new specification, made from the entries alone, would lose them.
    if spec.unreduced or spec.reduced:
        return spec
    # A tuple of one axis is that axis, and an empty tuple is None.
    axes = [axis[0] if isinstance(axis, tuple) and len(axis) == 1 else axis or None for axis in spec]
    # Dimensions beyond the last entry are not sharded, so a None at the end says nothing.
    while axes and axes[-1] is None:
        axes.pop()
    return PartitionSpec(*axes)


def _describe_sharding(sharding: Any, prefix: Any) -> str:
    """Describes a sharding for errors: its specification, its mesh if the prefix has several, and unusual memory.

        P('x')          P('x') on the mesh {'x': 2} of the devices [0, 1]          P('x') in pinned_host

    Args:
        sharding: a label in the prefix.
        prefix: the prefix.
    """
    # Anything but a `NamedSharding` is printed by its `repr`, cut off if it is long.
    if not isinstance(sharding, NamedSharding):
        return shown(sharding)
    text = str(shortest_spec(sharding.spec))
    meshes = [label.mesh for label in labels_in(prefix, is_sharding) if isinstance(label, NamedSharding)]
    if any(mesh != meshes[0] for mesh in meshes):
        # An abstract mesh has no devices. For it, the text ends in "of the devices []".
        devices = sharding.mesh.device_ids.ravel().tolist() if isinstance(sharding.mesh, Mesh) else []
        text += f" on the mesh {dict(sharding.mesh.shape)} of the devices {shown(devices)}"
    # The usual kind of memory is not named.
    return text if sharding.memory_kind in (None, "device") else f"{text} in {sharding.memory_kind}"


def _advise_on_rules(leaves: Sequence[Any]) -> str:
    """Returns the last lines of an error: how rules by parameter names can give a tied array one place.

    Args:
        leaves: the leaves with conflicts. Not used: the advice is the same for all.
    """
    return (
        "A tied array is stored once. Give all of its paths one sharding. If a rule makes shardings from paths, apply "
        "it to each array once, at the first path:\n"
        "    shardings = sharedtree.tree.map_with_path(rule, sharedtree.tree.filter(model, equinox.is_array))\n"
    )
