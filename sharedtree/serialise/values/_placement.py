"""Devices, meshes and shardings that a model holds as values: described by name and number, found again at load.

A device comes back as the device of the same platform and id. A mesh comes back over the devices of the same ids, or,
if those are not all there, over the first devices in JAX's order. With too few devices loading fails: a model that
holds a mesh means to compute on it.

What each is built of has the form that `_kinds.FORMS` asks for, which was checked with the manifest.
"""

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ..._errors import FormatError, StructureMismatchError
from ..._printable import printable

MEMORY_KINDS = ("device", "pinned_host", "unpinned_host")

_AXIS_TYPES = {kind.name: kind for kind in jax.sharding.AxisType}


def axis_type_names(mesh: Any) -> list[str]:
    """The names of the types of the axes of a mesh."""
    return [kind.name for kind in mesh.axis_types]


def find_device(platform: str, number: int) -> Any:
    """The device of a platform and an id.

    Raises:
        StructureMismatchError: if it is not there.
    """
    try:
        found = [device for device in jax.devices(platform) if device.id == number]
    except RuntimeError:  # JAX has no such platform here
        found = []
    if not found:
        raise StructureMismatchError(
            f"The file holds the device {number} of the platform `{printable(platform[:40])}`, which is not here. Hold "
            "no devices in the model: give them to `jax.device_put` after loading."
        )
    return found[0]


def rebuild_mesh(sizes: list[int], names: list[Any], ids: list[int], kinds: list[str]) -> Mesh:
    """A mesh over devices of this process.

    Raises:
        StructureMismatchError: if there are too few devices.
        FormatError: if the description contradicts itself.
    """
    count = math.prod(sizes)
    if not (len(sizes) == len(names) == len(set(names)) == len(kinds) and len(set(ids)) == len(ids) == count):
        raise FormatError("The file describes a mesh whose sizes, names, types and devices do not fit together.")
    there = {device.id: device for device in jax.devices()}
    if len(there) < count:
        raise StructureMismatchError(
            f"The file holds a mesh of {count} devices, {' x '.join(map(str, sizes))}, and {len(there)} are "
            "here. Load it where there are enough; on a CPU more devices can be had with\n"
            f"    jax.config.update('jax_num_cpu_devices', {count})"
        )
    chosen = [there[i] for i in ids] if all(i in there for i in ids) else list(there.values())[:count]
    devices = np.empty(count, object)
    devices[:] = chosen
    return Mesh(devices.reshape(sizes), tuple(names), axis_types=_axis_types(kinds))


def rebuild_abstract_mesh(sizes: list[int], names: list[Any], kinds: list[str]) -> AbstractMesh:
    """A mesh without devices.

    Raises:
        FormatError: if the description contradicts itself.
    """
    if not len(sizes) == len(names) == len(set(names)) == len(kinds):
        raise FormatError("The file describes a mesh whose sizes, names and types do not fit together.")
    return AbstractMesh(tuple(sizes), tuple(names), axis_types=_axis_types(kinds))


def rebuild_spec(entries: list[Any], unreduced: frozenset[Any] | None, reduced: frozenset[Any] | None) -> PartitionSpec:
    """A PartitionSpec; the two sets are None where JAX has none."""
    sets = {k: v for k, v in (("unreduced", unreduced), ("reduced", reduced)) if v}
    return PartitionSpec(*entries, **sets)


def rebuild_named_sharding(mesh: Any, spec: PartitionSpec, memory_kind: str | None) -> NamedSharding:
    """A NamedSharding.

    Raises:
        FormatError: if JAX does not know the kind of memory.
    """
    return NamedSharding(mesh, spec, memory_kind=_memory_kind(memory_kind))


def rebuild_single_device_sharding(device: Any, memory_kind: str | None) -> SingleDeviceSharding:
    """A SingleDeviceSharding.

    Raises:
        FormatError: if JAX does not know the kind of memory.
    """
    return SingleDeviceSharding(device, memory_kind=_memory_kind(memory_kind))


def _axis_types(kinds: list[str]) -> Any:
    if not _AXIS_TYPES.keys() >= set(kinds):
        raise FormatError("The file describes a mesh with a type of axis that this JAX does not know.")
    return tuple(_AXIS_TYPES[kind] for kind in kinds)


def _memory_kind(kind: str | None) -> str | None:
    if kind is not None and kind not in MEMORY_KINDS:
        raise FormatError("The file describes a sharding in a kind of memory that JAX does not know.")
    return kind
