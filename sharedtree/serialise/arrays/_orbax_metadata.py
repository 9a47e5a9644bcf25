"""What an Orbax checkpoint says of its arrays, compared with its manifest before a byte of them is read.

Orbax and TensorStore take memory by the word of the metadata that lies beside each array: for its shape, and for the
chunks that it is cut into. Whoever forges a checkpoint of some hundred bytes could so have terabytes asked for, and
TensorStore ends the process where there are none. The manifest is read first, so both must say the same; and the arrays
must be no larger than what lies on the disk can become.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..._errors import FormatError, StructureMismatchError
from ..._printable import printable
from ._arrays import ArrayEntry
from ._orbax_arrays import is_stored, key_of, require_stored_as, stored_as

# Orbax compresses with zstd, which makes no more than 2**15 bytes of one.
_MOST_OF_A_BYTE = 2**16


def names_of(entries: Sequence[ArrayEntry]) -> list[str]:
    """The keys of the arrays that a manifest says are stored."""
    return [key_of(entry.tensor) for entry in entries if is_stored(entry)]


def require_sound(found: Any, wanted: Sequence[ArrayEntry], placements: Sequence[Any], label: str) -> None:
    """Compares the metadata of the arrays of a step with the manifest.

    Args:
        found: Orbax's metadata of the item.
        wanted: the arrays that are to be read.
        placements: where each goes.
        label: what to call the step in errors.

    Raises:
        FormatError: if they do not agree, or there is too little on the disk for the arrays.
        StructureMismatchError: if the arrays do not fit into this machine's memory.

    Cost: a look at each array; and at files of the step, until there are enough for the arrays that are wanted.
    """
    tree = getattr(found, "tree", found)
    if not isinstance(tree, Mapping):
        raise _disagree(label, "Orbax has no metadata of them")
    for entry in wanted:
        key = key_of(entry.tensor)
        about = tree.get(key)
        if about is None:
            raise _disagree(label, f"there is no `{key}`")
        require_stored_as(entry, getattr(about, "dtype", None), getattr(about, "shape", None))
        chunk = getattr(getattr(about, "storage", None), "chunk_shape", None)
        shape = stored_as(entry)[1]
        if chunk is None or len(chunk) != len(shape) or any(n > m for n, m in zip(chunk, shape, strict=True)):
            raise _disagree(label, f"`{key}` of shape {list(shape)} is cut into chunks of {list(chunk or ())}")
    if not wanted:
        return
    total = sum(_nbytes(entry) for entry in wanted)
    directory = getattr(tree[key_of(wanted[0].tensor)], "directory", None)
    if directory is None or not _has_bytes(directory, total // _MOST_OF_A_BYTE):
        raise _disagree(label, f"what lies on the disk is too little for their {total:,} bytes")
    _require_memory(wanted, placements, label)


def _has_bytes(directory: Any, needed: int) -> bool:
    """Whether the files below a folder have more bytes than that; it is not walked further than that takes."""
    there, folders = 0, [directory]
    while folders and there <= needed:
        for path in folders.pop().iterdir():
            if path.is_dir():
                folders.append(path)
            else:
                there += path.stat().length
            if there > needed:
                break
    return there > needed


def _require_memory(wanted: Sequence[ArrayEntry], placements: Sequence[Any], label: str) -> None:
    """The arrays that stay on the host must fit into its memory together, of the others each alone.

    The system is asked for the memory and given it back untouched. TensorStore would end the process if it got none.
    """
    sizes = [_nbytes(entry, placement) for entry, placement in zip(wanted, placements, strict=True)]
    staying = [n for n, entry in zip(sizes, wanted, strict=True) if entry.kind == "numpy" or _is_on_host(entry)]
    needed = max(sum(staying), *sizes)
    try:
        np.empty(needed, np.uint8)
    except (MemoryError, ValueError):
        raise StructureMismatchError(
            f"The arrays of `{label}` take {needed:,} bytes, and this machine does not have the memory. Restore a "
            "part, or on more devices:\n"
            "    sharedtree.orbax.restore(manager, step, select=lambda name: ...)"
        ) from None


def _is_on_host(entry: ArrayEntry) -> bool:
    return entry.kind == "jax" and jax.default_backend() == "cpu"


def _nbytes(entry: ArrayEntry, placement: Any = None) -> int:
    """The size of an array in memory, or of what the devices of this process have of it."""
    dtype, shape = stored_as(entry)
    if placement is None or entry.key is not None or isinstance(placement, jax.Device):
        return dtype.itemsize * math.prod(shape)
    parts = len(placement.addressable_devices) if hasattr(placement, "addressable_devices") else 1
    return min(parts * math.prod(placement.shard_shape(shape[: len(entry.shape)])), math.prod(shape)) * dtype.itemsize


def _disagree(label: str, fact: str) -> FormatError:
    return FormatError(
        f"The arrays of `{label}` are not those of its manifest: {printable(fact)}. Nothing was restored. Restore "
        "another step:\n    sharedtree.orbax.restore(manager, step)"
    )
