"""Rows of what JAX has: arrays, their descriptions, the structures of trees, meshes and shardings.

A mesh comes back over the devices of the same ids, or, if those are not all there, over the first devices in JAX's
order. With too few devices loading fails: a model that holds a mesh means to compute on it. A single device is nothing
that a file has.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import tree_util as jtu
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ...core._comparison import array_text
from ...core._errors import FormatError, StructureMismatchError
from ...core._node_types import RefusalError
from ..arrays._placing import ArrayEntry, key_dtype, key_implementation
from ._atoms import encode_numpy, short
from ._nodes import SIZES, TEXT, Apart, Kind, Manifest, Node, Operand, Parts, child, children

# --- arrays, what describes them, and treedefs ------------------------------------------------------------------------


def entry_text(entry: ArrayEntry) -> str:
    """Dtype and shape of an array, and what else there is to say of it."""
    if entry.key is not None:
        return f"PRNG key, {short(entry.key)}, {array_text(entry)}"
    return f"{array_text(entry)}{' weak' if entry.weak else ''}{' NumPy' if entry.kind == 'numpy' else ''}"


def _take_struct(obj: jax.ShapeDtypeStruct) -> Apart:
    if not all(type(size) is int for size in obj.shape) or getattr(obj, "is_ref", False):
        raise RefusalError(
            "a `ShapeDtypeStruct` with unknown sizes, or of a mutable reference", "Give it sizes that are numbers."
        )
    sizes, weak = list(obj.shape), bool(obj.weak_type)
    held = obj.dtype, obj.sharding
    return Apart(held, (".dtype", ".sharding"), lambda done: ["struct", sizes, done[0], weak, done[1]])


def _build_struct(parts: Parts, node: Node) -> Any:
    return jax.ShapeDtypeStruct(tuple(node[1]), parts.child(node[2]), weak_type=node[3], sharding=parts.child(node[4]))


class Leaf:
    """Stands for a leaf in the object that describes a treedef."""

    __slots__ = ()


_LEAF = Leaf()


def _take_treedef(obj: Any) -> Apart:
    try:
        described = jtu.tree_unflatten(obj, [_LEAF] * obj.num_leaves)
        same = jtu.tree_structure(described) == obj
    except Exception as error:  # noqa: BLE001 -- the unflatten functions of any class may raise anything
        raise RefusalError(
            "a treedef whose classes refuse to be rebuilt around placeholders", "Leave it out."
        ) from error
    if not same:
        raise RefusalError("a treedef that does not come back from the object that it describes", "Leave it out.")
    return Apart((described,), ("",), lambda done: ["treedef", done[0]])


# --- meshes -----------------------------------------------------------------------------------------------------------


def take_other(obj: Any) -> Apart | list[str] | None:
    """What is of no one class: NumPy's scalars and dtypes, dtypes of PRNG keys. None for anything else."""
    if isinstance(obj, np.generic | np.dtype):
        try:
            return encode_numpy(obj)
        except TypeError:
            dtype = obj.dtype if isinstance(obj, np.generic) else obj
            fix = "Keep its parts, as numbers, texts or tuples."
            raise RefusalError(f"a NumPy value of the dtype `{dtype}`", fix) from None
    if isinstance(obj, jax.Device | SingleDeviceSharding):
        fix = "Place arrays after loading, `jax.device_put(array, device)`, or hold a `jax.sharding.NamedSharding`."
        raise RefusalError("a single device, which may be another one wherever the file is loaded", fix)
    if isinstance(obj, jax.Ref):
        fix = "Save what it holds: `ref[...]`, or `jax.freeze(ref)`."
        raise RefusalError("a `jax.Ref`, which is memory and not a value", fix)
    impl = key_implementation(obj) if hasattr(obj, "_impl") else None  # a cheap test first
    return None if impl is None else Apart((), (), lambda _: ["key_dtype", impl])


def _take_mesh(kind: str) -> Callable[[Any], Apart]:
    def take(obj: Any) -> Apart:
        ids = [device.id for device in obj.devices.flat] if kind == "mesh" else []
        sizes, types = [int(size) for size in obj.axis_sizes], [each.name for each in obj.axis_types]
        count = len(sizes)

        def build(done: list[Any]) -> Node:
            return [kind, sizes, done[:count], *([done[count:]] if kind == "mesh" else []), types]

        return Apart((*obj.axis_names, *ids), [""] * (count + len(ids)), build)

    return take


def _axes(parts: Parts, node: Node) -> tuple[Any, Any]:
    """The names of the axes of a mesh, and their types."""
    sizes, names, kinds = node[1], parts.children(node[2]), parts.children(node[-1])
    if not len(sizes) == len(names) == len(set(names)) == len(kinds):
        raise FormatError("The file describes a mesh whose sizes, names and types do not fit together.")
    known = {kind.name: kind for kind in jax.sharding.AxisType}
    if not known.keys() >= set(kinds):
        raise FormatError("The file describes a mesh with a type of axis that this JAX does not know.")
    return tuple(names), tuple([known[kind] for kind in kinds])


def _build_mesh(parts: Parts, node: Node) -> Mesh:
    sizes, ids, count = node[1], parts.children(node[3]), math.prod(node[1])
    names, kinds = _axes(parts, node)
    if not len(set(ids)) == len(ids) == count:
        raise FormatError("The file describes a mesh whose sizes and devices do not fit together.")
    there = {device.id: device for device in jax.devices()}
    if len(there) < count:
        raise StructureMismatchError(
            f"The file holds a mesh of {count} devices, {' x '.join(map(str, sizes))}, and {len(there)} are "
            "here. Load it where there are enough; on a CPU more devices can be had with\n"
            f"    jax.config.update('jax_num_cpu_devices', {count})"
        )
    devices = np.empty(count, object)
    devices[:] = [there[i] for i in ids] if all(i in there for i in ids) else list(there.values())[:count]
    return Mesh(devices.reshape(sizes), names, axis_types=kinds)


def _build_abstract_mesh(parts: Parts, node: Node) -> AbstractMesh:
    names, kinds = _axes(parts, node)
    return AbstractMesh(tuple(node[1]), names, axis_types=kinds)


# --- shardings --------------------------------------------------------------------------------------------------------


def _take_spec(obj: Any) -> Apart:
    sets = [getattr(obj, name, None) or None for name in ("unreduced", "reduced")]
    kind = getattr(obj, "unreduced_kind", None)
    if kind is not None and sets[0] and getattr(kind, "name", str(kind)).lower() != "sum":
        raise RefusalError(f"a `PartitionSpec` with the unreduced kind {kind}", "Leave it out of the model.")
    # Iterating over a spec that has one of the sets raises.
    known = [getattr(obj, name, None) for name in ("partitions", "_partitions")]
    entries = next((each for each in known if each is not None), None)
    entries = tuple(obj) if entries is None else entries
    count = len(entries)
    keys = (*[f"[{i}]" for i in range(count)], ".unreduced", ".reduced")
    return Apart((*entries, *sets), keys, lambda done: ["spec", done[:count], *done[count:]])


def _build_spec(parts: Parts, node: Node) -> PartitionSpec:
    unreduced, reduced = parts.children(node[2:])
    sets = {name: held for name, held in (("unreduced", unreduced), ("reduced", reduced)) if held}
    return PartitionSpec(*parts.children(node[1]), **sets)


_MEMORY_KINDS = ("device", "pinned_host", "unpinned_host")


def _memory_kind(sharding: Any, device: Any) -> str | None:
    """None for the ordinary memory of the device, whose name varies."""
    kind = sharding.memory_kind
    if kind is None or device is None or kind == device.default_memory().kind:
        return None
    if kind not in _MEMORY_KINDS:
        raise RefusalError(f"a sharding in the unknown kind of memory {kind!r}", "Leave it out of the model.")
    return kind


def _take_named_sharding(obj: Any) -> Apart:
    device = obj.mesh.devices.flat[0] if isinstance(obj.mesh, Mesh) else None
    parts = obj.mesh, obj.spec, _memory_kind(obj, device)
    return Apart(parts, (".mesh", ".spec", ".memory_kind"), lambda done: ["named_sharding", *done])


def _build_named_sharding(parts: Parts, node: Node) -> NamedSharding:
    mesh, spec, kind = parts.children(node[1:])
    if kind is not None and kind not in _MEMORY_KINDS:
        raise FormatError("The file describes a sharding in a kind of memory that JAX does not know.")
    return NamedSharding(mesh, spec, memory_kind=kind)


_MEMORY = child(".memory_kind", "null", "text")
_SETS = [child(step, "null", "frozenset", is_walked=True) for step in (".unreduced", ".reduced")]


def _text_of_array(manifest: Manifest, node: Node) -> str:
    return entry_text(manifest.arrays[node[1]])


KINDS = (
    Kind("array", (Operand("array"),), text=_text_of_array, is_deep=True, has_identity=True),
    Kind(
        "struct",
        (SIZES, child(".dtype", "dtype", "key_dtype"), Operand("flag"), child(".sharding", "null", "named_sharding")),
        (jax.ShapeDtypeStruct,), _take_struct, _build_struct, text=lambda _, node: f"ShapeDtypeStruct{node[1]}",
        has_identity=True,
    ),
    Kind("key_dtype", (TEXT,), build=lambda _, node: key_dtype(node[1]),
         inline=lambda _, node: f"dtype of PRNG keys, {short(node[1])}"),
    Kind("treedef", (child(".tree", is_walked=True),), (jtu.PyTreeDef,), _take_treedef,
         lambda parts, node: jtu.tree_structure(parts.child(node[1]))),
    Kind("leaf", (), (Leaf,), build=lambda *_: _LEAF),
    Kind("mesh", (SIZES, children(is_walked=True), children("int"), children("text")), (Mesh,), _take_mesh("mesh"),
         _build_mesh),
    Kind("abstract_mesh", (SIZES, children(is_walked=True), children("text")), (AbstractMesh,),
         _take_mesh("abstract_mesh"), _build_abstract_mesh, paired=1),
    Kind("spec", (children(is_walked=True), *_SETS), (PartitionSpec,), _take_spec, _build_spec),
    Kind("unconstrained", (), (type(PartitionSpec.UNCONSTRAINED),), build=lambda *_: PartitionSpec.UNCONSTRAINED,
         inline=lambda *_: "UNCONSTRAINED"),
    Kind("named_sharding",
         (child(".mesh", "mesh", "abstract_mesh", is_walked=True), child(".spec", "spec", is_walked=True), _MEMORY),
         (NamedSharding,), _take_named_sharding, _build_named_sharding),
)  # fmt: skip
