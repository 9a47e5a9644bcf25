"""Kinds of node for values of JAX's: arrays, `ShapeDtypeStruct`s, treedefs, meshes and shardings.

A mesh is loaded over the devices with the same ids. If some of these are absent, it is loaded over the first devices in
JAX's order. With too few devices loading fails, because a model that holds a mesh means to compute on it. No file
contains a single device.
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
from ...core._library_rows import RefusalError
from ..arrays._placing import ArrayEntry, key_dtype, key_implementation
from ._atoms import encode_numpy, short
from ._nodes import SIZES, TEXT, Apart, Kind, Manifest, Node, Operand, Parts, child, children

# --- arrays, what describes them, and treedefs ------------------------------------------------------------------------


def entry_text(entry: ArrayEntry) -> str:
    """Describes an array in a few words: dtype and shape, and whether it is a PRNG key, weakly typed or NumPy's."""
    if entry.key is not None:
        return f"PRNG key, {short(entry.key)}, {array_text(entry)}"
    return f"{array_text(entry)}{' weak' if entry.weak else ''}{' NumPy' if entry.kind == 'numpy' else ''}"


def _take_struct(obj: jax.ShapeDtypeStruct) -> Apart:
    """Takes a `ShapeDtypeStruct` apart. Symbolic sizes and structs of references are refused."""
    if not all(type(size) is int for size in obj.shape) or getattr(obj, "is_ref", False):
        raise RefusalError(
            "a `ShapeDtypeStruct` with unknown sizes, or of a mutable reference", "Give it sizes that are numbers."
        )
    sizes, weak = list(obj.shape), bool(obj.weak_type)
    child_objects = obj.dtype, obj.sharding
    return Apart(
        child_objects, (".dtype", ".sharding"), lambda written: ["struct", sizes, written[0], weak, written[1]]
    )


def _build_struct(parts: Parts, node: Node) -> Any:
    return jax.ShapeDtypeStruct(tuple(node[1]), parts.child(node[2]), weak_type=node[3], sharding=parts.child(node[4]))


class Leaf:
    """Placeholder for a leaf in the tree that describes a treedef."""

    __slots__ = ()


_LEAF = Leaf()


def _take_treedef(obj: Any) -> Apart:
    """Takes a treedef apart, into a tree of placeholders whose treedef it is."""
    try:
        tree = jtu.tree_unflatten(obj, [_LEAF] * obj.num_leaves)
        is_equal = jtu.tree_structure(tree) == obj
    except Exception as error:  # noqa: BLE001 -- the unflatten functions of any class may raise anything
        raise RefusalError(
            "a treedef whose classes refuse to be rebuilt around placeholders", "Leave it out."
        ) from error
    if not is_equal:
        raise RefusalError("a treedef that does not come back from the object that it describes", "Leave it out.")
    return Apart((tree,), ("",), lambda written: ["treedef", written[0]])


# --- meshes -----------------------------------------------------------------------------------------------------------


def take_other(obj: Any) -> Apart | list[str] | None:
    """Writes values that are not recognised by their exact class: NumPy scalars and dtypes, and dtypes of PRNG keys.

    Returns:
        An atom, or the object taken apart. None if this is none of these values.

    Raises:
        RefusalError: if it is a NumPy value of an unsuitable dtype, a single device, or a `jax.Ref`.
    """
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
    # The cheap test comes first: most objects that get here are functions and unknown instances.
    impl = key_implementation(obj) if hasattr(obj, "_impl") else None
    return None if impl is None else Apart((), (), lambda _: ["key_dtype", impl])


def _take_mesh(kind: str) -> Callable[[Any], Apart]:
    """Returns the function that takes a `Mesh` or an `AbstractMesh` apart. Only a `Mesh` has the ids of devices."""

    def take(obj: Any) -> Apart:
        # The names of the axes are children, because they can be any hashable value.
        ids = [device.id for device in obj.devices.flat] if kind == "mesh" else []
        sizes, types = [int(size) for size in obj.axis_sizes], [axis_type.name for axis_type in obj.axis_types]
        count = len(sizes)

        def build(written: list[Any]) -> Node:
            return [kind, sizes, written[:count], *([written[count:]] if kind == "mesh" else []), types]

        return Apart((*obj.axis_names, *ids), [""] * (count + len(ids)), build)

    return take


def _mesh_axes(parts: Parts, node: Node) -> tuple[Any, Any]:
    """Returns the names of the axes of a mesh, and their types."""
    sizes, names, type_names = node[1], parts.children(node[2]), parts.children(node[-1])
    if not len(sizes) == len(names) == len(set(names)) == len(type_names):
        raise FormatError("The file describes a mesh whose sizes, names and types do not fit together.")
    axis_types = {axis_type.name: axis_type for axis_type in jax.sharding.AxisType}
    if not axis_types.keys() >= set(type_names):
        raise FormatError("The file describes a mesh with a type of axis that this JAX does not know.")
    return tuple(names), tuple([axis_types[name] for name in type_names])


def _build_mesh(parts: Parts, node: Node) -> Mesh:
    """Builds a mesh over the devices with the ids in the file, or over the first devices if some ids are absent."""
    sizes, ids, count = node[1], parts.children(node[3]), math.prod(node[1])
    names, axis_types = _mesh_axes(parts, node)
    if not len(set(ids)) == len(ids) == count:
        raise FormatError("The file describes a mesh whose sizes and devices do not fit together.")
    devices_by_id = {device.id: device for device in jax.devices()}
    if len(devices_by_id) < count:
        raise StructureMismatchError(
            f"The file holds a mesh of {count} devices, {' x '.join(map(str, sizes))}, and {len(devices_by_id)} are "
            "here. Load it where there are enough; on a CPU more devices can be had with\n"
            f"    jax.config.update('jax_num_cpu_devices', {count})"
        )
    devices = np.empty(count, object)
    has_all = all(i in devices_by_id for i in ids)
    devices[:] = [devices_by_id[i] for i in ids] if has_all else list(devices_by_id.values())[:count]
    return Mesh(devices.reshape(sizes), names, axis_types=axis_types)


def _build_abstract_mesh(parts: Parts, node: Node) -> AbstractMesh:
    names, axis_types = _mesh_axes(parts, node)
    return AbstractMesh(tuple(node[1]), names, axis_types=axis_types)


# --- shardings --------------------------------------------------------------------------------------------------------


def _take_spec(obj: Any) -> Apart:
    """Takes a `PartitionSpec` apart, into its entries and its two sets of reduced and unreduced axes."""
    sets = [getattr(obj, name, None) or None for name in ("unreduced", "reduced")]
    kind = getattr(obj, "unreduced_kind", None)
    if kind is not None and sets[0] and getattr(kind, "name", str(kind)).lower() != "sum":
        raise RefusalError(f"a `PartitionSpec` with the unreduced kind {kind}", "Leave it out of the model.")
    # Iterating over a spec with one of the sets raises, so the entries are read from an attribute. Its name depends on
    # the version of JAX, and a version whose spec is a tuple has none.
    candidates = [getattr(obj, name, None) for name in ("partitions", "_partitions")]
    entries = next((candidate for candidate in candidates if candidate is not None), None)
    entries = tuple(obj) if entries is None else entries
    count = len(entries)
    keys = (*[f"[{i}]" for i in range(count)], ".unreduced", ".reduced")
    return Apart((*entries, *sets), keys, lambda written: ["spec", written[:count], *written[count:]])


def _build_spec(parts: Parts, node: Node) -> PartitionSpec:
    unreduced, reduced = parts.children(node[2:])
    # Empty sets are the default.
    sets = {name: axes for name, axes in (("unreduced", unreduced), ("reduced", reduced)) if axes}
    return PartitionSpec(*parts.children(node[1]), **sets)


_MEMORY_KINDS = ("device", "pinned_host", "unpinned_host")


def _memory_kind(sharding: Any, device: Any) -> str | None:
    """Returns the kind of memory of a sharding. None for the default memory of the device, as its name varies."""
    kind = sharding.memory_kind
    if kind is None or device is None or kind == device.default_memory().kind:
        return None
    if kind not in _MEMORY_KINDS:
        raise RefusalError(f"a sharding in the unknown kind of memory {kind!r}", "Leave it out of the model.")
    return kind


def _take_named_sharding(obj: Any) -> Apart:
    device = obj.mesh.devices.flat[0] if isinstance(obj.mesh, Mesh) else None
    child_objects = obj.mesh, obj.spec, _memory_kind(obj, device)
    return Apart(child_objects, (".mesh", ".spec", ".memory_kind"), lambda written: ["named_sharding", *written])


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
