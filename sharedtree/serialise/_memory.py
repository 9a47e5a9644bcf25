"""Where tensors go in memory: each at a multiple of 64 bytes, so that JAX can use it on a CPU without a copy.

A large tensor has memory of its own. Small ones that lie close together in the file share a block, which lives as long
as any of them and has at most 64 bytes for each besides their own.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ._header import ALIGNMENT, Tensor

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
"""A flat array of uint8."""

SMALL = 64 * 2**10  # tensors below this are read in groups
_GROUP_BYTES = 2**20  # of one group in the file


def aligned(nbytes: int) -> Bytes:
    """Fresh memory, not filled, that begins at a multiple of 64 bytes."""
    block = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -block.ctypes.data % ALIGNMENT
    return block[start : start + nbytes]


def groups_of(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Large tensors, each by itself, and runs of small ones that lie close together, each short enough for one read."""
    group: list[Tensor] = []
    for tensor in tensors:
        if group and (
            tensor.nbytes >= SMALL
            or group[0].nbytes >= SMALL
            or tensor.start - group[-1].stop > SMALL
            or tensor.stop - group[0].start > _GROUP_BYTES
        ):
            yield group
            group = []
        group.append(tensor)
    if group:
        yield group


def slots_of(group: Sequence[Tensor]) -> dict[str, Bytes]:
    """Memory for each tensor of a group, by name, in one block."""
    sizes = [tensor.nbytes + -tensor.nbytes % ALIGNMENT for tensor in group]
    block = aligned(sum(sizes))
    slots: dict[str, Bytes] = {}
    at = 0
    for tensor, size in zip(group, sizes, strict=True):
        slots[tensor.name] = block[at : at + tensor.nbytes]
        at += size
    return slots
