"""Safetensors files of other programs: tensors with names, and no tree.

Header and arrays are read by the code that reads our files, only without digests. The library `safetensors` is not
used: of two tensors with one name it takes the last, it lacks dtypes newer than itself, and it wants a path or a copy
of all bytes.
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

# Dtype of safetensors → name of the dtype of NumPy or ml_dtypes.
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
    **of_a_tree: Any,
) -> dict[str, Any]:
    """Loads the tensors as a dictionary by name, in the order of the file. Tensors that are not selected are structs.

    The file has no digests, so `verify` only refuses booleans whose byte is not 0 or 1. If `verify` is False, any byte
    other than 0 counts as True.

    Args:
        source: the bytes of the file.
        select: as for `load`, but never a path.
        sharding: as for `load`.
        mmap: as for `load`.
        verify: as for `load`.
        progress: as for `load`.
        **of_a_tree: options of `load` for trees, each true if the user passed it.

    Raises:
        ValueError: if the user passed an option for trees.
        FormatError: if it is malformed, or a selected tensor has a dtype JAX has no arrays of. A tensor that is
            not selected and has an unknown dtype is left out.
    """
    # Options that need a tree are errors. A path in `select` needs one, too.
    require_select(select)
    tree_options = [name for name, value in of_a_tree.items() if value] + ["select"] * isinstance(select, str)
    if tree_options:
        raise ValueError(
            f"`{tree_options[0]}` says something of a tree, and `{source.label}` has none: another program wrote it. "
            "Load its tensors by name, of which `select` may be a function:\n"
            "    tensors = sharedtree.load(path, foreign=True)"
        )
    assert not isinstance(select, str)
    # Read the header, and choose the tensors.
    header = read_header(source, foreign=True)
    wanted = [tensor for tensor in header.tensors if select is None or select(tensor.name)]
    # Elements of less than a byte are packed, as no array has them. Unknown dtypes have 0 bits here.
    unloadable = [tensor for tensor in wanted if BITS.get(tensor.dtype, 0) < 8]
    if unloadable:
        listed = unloadable[:_MAX_LISTED]
        lines = [f"    `{printable(tensor.name)}`: {printable(tensor.dtype[:40])}" for tensor in listed]
        lines += [f"    and {len(unloadable) - _MAX_LISTED} more"] if len(unloadable) > _MAX_LISTED else []
        raise FormatError(
            "\n".join(
                [
                    f"`{source.label}` has tensors of dtypes that are packed, or that no array has:",
                    *lines,
                    "Nothing was loaded. Load the others, by a function from a name to whether it is one of them:",
                    "    sharedtree.load(path, foreign=True, select=is_another)",
                ]
            )
        )
    # Make the entries that a manifest would have, and describe the tensors as `save` would have stored them.
    loadable = [tensor for tensor in header.tensors if tensor.dtype in _DTYPES]
    entries: dict[str, ArrayEntry] = {}
    for tensor in loadable:
        entries[tensor.name] = ArrayEntry(tensor.name, _DTYPES[tensor.dtype], tensor.shape, "jax")
    tensors: list[Tensor] = []
    for tensor in wanted:
        stored_dtype, stored_shape = stored_form(dtype_named(entries[tensor.name].dtype), tensor.shape)
        tensors.append(tensor._replace(dtype=stored_dtype, shape=stored_shape))
    container = Container(source, header._replace(tensors=tuple(tensors)), is_owner=False)
    # Read the arrays like those of a file of ours.
    chosen = [entries[tensor.name] for tensor in wanted]
    reading = {"mmap": mmap, "verify": verify, "progress": progress, "is_foreign": True}
    arrays = read_arrays(container, chosen, place_of(sharding), **reading)
    read = dict(zip([entry.tensor for entry in chosen], arrays, strict=True))
    return {name: read[name] if name in read else struct_of(entry) for name, entry in entries.items()}
