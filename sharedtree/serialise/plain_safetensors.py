"""Safetensors files of other programs: tensors with names, and no tree.

The header and the arrays are read by the code that reads our own files, but without digests. The library `safetensors`
is not used, for three reasons. It accepts two tensors with one name, and returns the last. It lacks dtypes that are
newer than itself. And it needs a path, or a copy of all bytes.
"""

from typing import Any

from ..core._errors import FormatError
from ..core._printing import printable
from .arrays._dtypes import STORED_AS_ITSELF, dtype_named, stored_form
from .arrays._placing import ArrayEntry, Select, Shardings, place_of, read_arrays, require_select, struct_of
from .container._byte_sources import ProgressOption, Source
from .container._header import BITS, Tensor, read_header
from .container._reading import Container

# How many tensors an error lists.
_MAX_LISTED = 20

# Dtype of safetensors → name of the dtype in NumPy or ml_dtypes.
_DTYPES = {stored_dtype: dtype for dtype, stored_dtype in STORED_AS_ITSELF.items()} | {
    "C64": "complex64", "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F4": "float4_e2m1fn", "F6_E2M3": "float6_e2m3fn", "F6_E3M2": "float6_e3m2fn",
}  # fmt: skip


def load_tensors(
    source: Source,
    *,
    select: Select,
    sharding: Shardings,
    mmap: bool,
    verify: bool,
    progress: ProgressOption,
    **tree_options: Any,
) -> dict[str, Any]:
    """Returns name → JAX array, in the order of the file. For tensors that are not selected, `jax.ShapeDtypeStruct`s.

    A tensor that is not selected is missing if JAX has no such dtype.

    The file has no digests, so `verify` only refuses booleans whose byte is not 0 or 1. If `verify` is False, any byte
    other than 0 counts as True.

    Args:
        source: the bytes of the file.
        select: None, or a function from the name of a tensor to True if it is wanted. A path is an error.
        sharding: as for `load`.
        mmap: as for `load`.
        verify: as for `load`.
        progress: as for `load`.
        **tree_options: options of `load` that make sense for a tree only. Each is true if the user passed it.

    Raises:
        ValueError: if the user passed an option that makes sense for a tree only.
        FormatError: if the file is malformed, or no array can have the dtype of a selected tensor.
        CorruptFileError: if the file is longer or shorter than its header says.
        TypeError, StructureMismatchError, MemoryError: as `read_arrays` and `require_select`.
    """
    # 1. Options for trees are errors, and so is a path in `select`.
    require_select(select)
    tree_only = [name for name, value in tree_options.items() if value] + ["select"] * isinstance(select, str)
    if tree_only:
        raise ValueError(
            f"`{tree_only[0]}` needs a tree, but `{source.label}` has none: another program wrote it. Load its "
            "tensors by name (`select` may be a function of the name):\n"
            "    tensors = sharedtree.load(path, foreign=True)"
        )
    assert not isinstance(select, str)
    # 2. Read the header, and choose the tensors.
    header = read_header(source, foreign=True)
    wanted = [tensor for tensor in header.tensors if select is None or select(tensor.name)]
    # Elements of less than a byte share bytes in such files, and in no array. Unknown dtypes count as 0 bits.
    unloadable = [tensor for tensor in wanted if BITS.get(tensor.dtype, 0) < 8]
    if unloadable:
        listed = unloadable[:_MAX_LISTED]
        lines = [f"    `{printable(tensor.name)}`: {printable(tensor.dtype[:40])}" for tensor in listed]
        lines += [f"    and {len(unloadable) - _MAX_LISTED} more"] if len(unloadable) > _MAX_LISTED else []
        others = "{" + ", ".join(repr(printable(tensor.name)) for tensor in listed) + "}"
        raise FormatError(
            "\n".join(
                [
                    f"`{source.label}` has tensors of dtypes that neither NumPy nor JAX can load from a file:",
                    *lines,
                    "Nothing was loaded. Load the others:",
                    f"    sharedtree.load(path, foreign=True, select=lambda name: name not in {others})",
                ]
            )
        )
    # 3. Make the entries that a manifest of ours would have. Give the tensors the stored dtypes and shapes with which
    # `save` would have written them: complex64 as bytes, with one axis more.
    loadable = [tensor for tensor in header.tensors if tensor.dtype in _DTYPES]
    entries: dict[str, ArrayEntry] = {}
    for tensor in loadable:
        entries[tensor.name] = ArrayEntry(tensor.name, _DTYPES[tensor.dtype], tensor.shape, "jax")
    tensors: list[Tensor] = []
    for tensor in wanted:
        stored_dtype, stored_shape = stored_form(dtype_named(entries[tensor.name].dtype), tensor.shape)
        tensors.append(tensor._replace(dtype=stored_dtype, shape=stored_shape))
    container = Container(source, header._replace(tensors=tuple(tensors)), is_owner=False)
    # 4. Read the arrays like those of a file of ours.
    chosen = [entries[tensor.name] for tensor in wanted]
    reading = {"mmap": mmap, "verify": verify, "progress": progress, "is_foreign": True}
    arrays = read_arrays(container, chosen, place_of(sharding), **reading)
    # 5. Every tensor is in the result. One that was not read is there as a struct.
    arrays_by_name: dict[str, Any] = {name: struct_of(entry) for name, entry in entries.items()}
    for entry, array in zip(chosen, arrays, strict=True):
        arrays_by_name[entry.tensor] = array
    return arrays_by_name
