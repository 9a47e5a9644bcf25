"""Safetensors files of other programs: tensors with names, and no tree.

Header and arrays are read as those of a file of ours, but for the digests, which there are none of. The library
`safetensors` takes the last of two tensors of one name, knows no dtypes that are newer than itself, and wants a path or
a copy of all bytes.
"""

from typing import Any

from ..core._errors import FormatError
from ..core._printing import printable
from .arrays._dtypes import STORED_AS_ITSELF, dtype_named, stored
from .arrays._placing import ArrayEntry, Select, Shardings, place_of, read_arrays, require_select, struct_of
from .container._byte_sources import ProgressOption, Source
from .container._header import BITS, read_header
from .container._reading import Container

_MAX_LISTED = 20

# What they call a dtype → what NumPy or ml_dtypes calls it.
_DTYPES = {theirs: ours for ours, theirs in STORED_AS_ITSELF.items()} | {
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
    """Name → array, in the order of the file; for what is not selected, a description of it.

    The rest is as for `load`. Without digests, `verify` only refuses booleans that are neither 0 nor 1; without it they
    are true.

    Raises:
        ValueError: if there is an option `of_a_tree`.
        FormatError: if it is malformed, or if one that is wanted has a dtype that JAX has no arrays of. What is not
            wanted and has a dtype that nobody knows is left out.
    """
    require_select(select)
    given = [name for name, value in of_a_tree.items() if value] + ["select"] * isinstance(select, str)
    if given:
        raise ValueError(
            f"`{given[0]}` says something of a tree, and `{source.label}` has none: another program wrote it. Load its "
            "tensors by name, of which `select` may be a function:\n"
            "    tensors = sharedtree.load(path, foreign=True)"
        )
    assert not isinstance(select, str)
    found = read_header(source, foreign=True)
    wanted = [tensor for tensor in found.tensors if select is None or select(tensor.name)]
    without = [each for each in wanted if BITS.get(each.dtype, 0) < 8]
    if without:
        lines = [f"    `{printable(each.name)}`: {printable(each.dtype[:40])}" for each in without[:_MAX_LISTED]]
        lines += [f"    and {len(without) - _MAX_LISTED} more"] if len(without) > _MAX_LISTED else []
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
    entries = {
        each.name: ArrayEntry(each.name, _DTYPES[each.dtype], each.shape, "jax")
        for each in found.tensors
        if each.dtype in _DTYPES
    }
    tensors = [
        each._replace(dtype=kind, shape=shape)
        for each in wanted
        for kind, shape in [stored(dtype_named(entries[each.name].dtype), each.shape)]
    ]
    container = Container(source, found._replace(tensors=tuple(tensors)), is_owner=False)
    chosen = [entries[each.name] for each in wanted]
    reading = {"mmap": mmap, "verify": verify, "progress": progress, "is_foreign": True}
    arrays = read_arrays(container, chosen, place_of(sharding), **reading)
    read = dict(zip([entry.tensor for entry in chosen], arrays, strict=True))
    return {name: read[name] if name in read else struct_of(entry) for name, entry in entries.items()}
