"""Where tensors go in memory: each at a multiple of 64 bytes, so that JAX can use it on a CPU without a copy.

A tensor of 4 MiB or more has memory of its own. Smaller ones share it, because fresh memory costs more than the bytes
that are read into it: the operating system hands it out in pages of 4 KiB, each with an interrupt of its own, unless
it is asked for pages of 2 MiB, which smaller pieces cannot have. What is shared lives as long as any of the tensors in
it, so its size is bounded: 16 MiB, or 1 MiB for tensors below 64 KiB. Those are kept apart, so that what people keep
of a model most often, its scalars and biases, never keeps the matrices beside them.

For example, tensors of 1 MiB, 8 bytes, 15 MiB, 100 bytes and 2 MiB take three pieces of memory: 3 MiB for the first and
the last, 192 bytes for the second and the fourth, and 15 MiB.
"""

import mmap
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ._header import ALIGNMENT, Tensor

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
"""A flat array of uint8."""

SMALL = 64 * 2**10
"""Tensors below this share blocks, and those that lie close together in the file are read together."""

LARGE = 4 * 2**20
"""Tensors from this on have memory of their own; those between share slabs."""

SLAB_BYTES = 16 * 2**20
"""What tensors share, at most."""

BLOCK_BYTES = 2**20
"""What small tensors share, at most, and what is read at once of them."""

_HUGE_PAGE = 2 * 2**20


def aligned(nbytes: int) -> Bytes:
    """Fresh memory, not filled, that begins at a multiple of 64 bytes."""
    block = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -block.ctypes.data % ALIGNMENT
    return block[start : start + nbytes]


def memory_for(tensors: Sequence[Tensor]) -> dict[str, Bytes]:
    """Fresh memory, not filled, for each tensor, by name. No more than 63 bytes for each are taken besides."""
    memory: dict[str, Bytes] = {}
    for together in _sharing(tensors):
        sizes = [tensor.nbytes + -tensor.nbytes % ALIGNMENT for tensor in together]
        block = _in_huge_pages(sum(sizes))
        at = 0
        for tensor, size in zip(together, sizes, strict=True):
            memory[tensor.name] = block[at : at + tensor.nbytes]
            at += size
    return memory


def _sharing(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Large tensors, each by itself, and others that share a piece of memory, in the order in which they are given."""
    shared: dict[int, list[Tensor]] = {BLOCK_BYTES: [], SLAB_BYTES: []}
    filled = dict.fromkeys(shared, 0)
    for tensor in tensors:
        if tensor.nbytes >= LARGE:
            yield [tensor]
            continue
        bound = BLOCK_BYTES if tensor.nbytes < SMALL else SLAB_BYTES
        size = tensor.nbytes + -tensor.nbytes % ALIGNMENT
        if filled[bound] + size > bound:
            yield shared[bound]
            shared[bound], filled[bound] = [], 0
        shared[bound].append(tensor)
        filled[bound] += size
    yield from filter(None, shared.values())


def _in_huge_pages(nbytes: int) -> Bytes:
    """Fresh memory at a multiple of 64 bytes, in pages of 2 MiB as far as it fills them, where there are such pages.

    It is mapped by itself, not taken from what `malloc` manages: that keeps what lies below a piece that is in use,
    though it be free. Only address space is taken beyond `nbytes`, no memory: the last page is an ordinary one.
    """
    if nbytes >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            # Private, or processes forked later would write to the same memory.
            pages = mmap.mmap(-1, nbytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            block = np.frombuffer(pages, np.uint8)
            start = -block.ctypes.data % _HUGE_PAGE
            pages.madvise(mmap.MADV_HUGEPAGE, start, nbytes)
            return block[start : start + nbytes]
        except OSError:
            pass  # a kernel without huge pages, or no memory, as NumPy will say
    return aligned(nbytes)


def groups_of(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors by themselves, and runs of small ones that lie close together, each short enough for one read."""
    group: list[Tensor] = []
    for tensor in tensors:
        if group and (
            tensor.nbytes >= SMALL
            or group[0].nbytes >= SMALL
            or tensor.start - group[-1].stop > SMALL
            or tensor.stop - group[0].start > BLOCK_BYTES
        ):
            yield group
            group = []
        group.append(tensor)
    if group:
        yield group
