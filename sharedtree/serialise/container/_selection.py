"""Which bytes a part of a tensor is, and how to read them in few and long reads.

A part is one slice an axis. In C order it is a set of runs. Long runs are read where they belong. Short ones that lie
close together are read with the gaps between them, some MiB at a time, and picked out: a system call costs about as
much as reading 16 KiB.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..arrays._dtypes import ITEM_SIZES
from ._header import Tensor

Selection = Sequence[slice]
"""One slice an axis, with positive steps; axes that are left out are whole."""

ReadInto = Callable[[int, memoryview], None]
"""Fills a buffer with the tensor's bytes from an offset on."""

_LONG_RUN = 64 * 2**10
_SHORT_GAP = 16 * 2**10
_SPAN = 4 * 2**20


class Plan(NamedTuple):
    """What to read.

    Attributes:
        shape: of the part, in stored items.
        ranges: the positions along each axis that is not of size 1.
        strides: bytes from one position to the next, for the same axes.
        sizes: of the same axes of the tensor.
        item_size: in bytes.
    """

    shape: tuple[int, ...]
    ranges: tuple[range, ...]
    strides: tuple[int, ...]
    sizes: tuple[int, ...]
    item_size: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.item_size

    def read(self, read_into: ReadInto, memory: np.ndarray[Any, Any]) -> None:
        """Fills `memory`, flat and of `nbytes` bytes, with the part."""
        if not self.nbytes:
            return
        buffer = memoryview(memory)
        num_axes, run = self._run()
        if run < _LONG_RUN:
            for axis in range(num_axes):
                if self.strides[axis] * self.ranges[axis].step <= _SHORT_GAP:
                    self._read_spans(read_into, memory, axis)
                    return
        for number, start in enumerate(self._starts(num_axes)):
            read_into(start, buffer[number * run : (number + 1) * run])

    def _run(self) -> tuple[int, int]:
        """How many axes tell runs apart, and the bytes of a run."""
        for axis in reversed(range(len(self.sizes))):
            positions = self.ranges[axis]
            if len(positions) == 1 or positions.step == 1:
                if len(positions) < self.sizes[axis]:
                    return axis, len(positions) * self.strides[axis]
            else:
                return axis + 1, self.strides[axis]
        return 0, self.nbytes

    def _starts(self, num_axes: int) -> Iterator[int]:
        """Where each run begins, counted from the start of the tensor."""
        inner = sum(
            positions[0] * stride
            for positions, stride in zip(self.ranges[num_axes:], self.strides[num_axes:], strict=True)
        )
        for positions in itertools.product(*self.ranges[:num_axes]):
            yield inner + sum(p * stride for p, stride in zip(positions, self.strides[:num_axes], strict=True))

    def _read_spans(self, read_into: ReadInto, memory: np.ndarray[Any, Any], axis: int) -> None:
        """Reads a few positions along `axis` at a time, from the first byte wanted to the last, and picks from them."""
        positions, stride = self.ranges[axis], self.strides[axis]
        inner = self.ranges[axis + 1 :]
        first = sum(p[0] * s for p, s in zip(inner, self.strides[axis + 1 :], strict=True))
        last = sum(p[-1] * s for p, s in zip(inner, self.strides[axis + 1 :], strict=True)) + self.item_size
        pick = (slice(None, None, positions.step), *(slice(p.start, p.stop, p.step) for p in inner))
        per_step = math.prod(map(len, inner)) * self.item_size
        at_once = max(1, _SPAN // (stride * positions.step))
        scratch = np.empty(min(at_once, len(positions)) * stride * positions.step, np.uint8)
        done = 0
        for outer in itertools.product(*self.ranges[:axis]):
            base = sum(p * s for p, s in zip(outer, self.strides[:axis], strict=True))
            for begin in range(0, len(positions), at_once):
                some = positions[begin : begin + at_once]
                rows = some[-1] - some[0] + 1
                window = memoryview(scratch)[first : (rows - 1) * stride + last]
                read_into(base + some[0] * stride + first, window)
                grid = scratch[: rows * stride].reshape(rows, *self.sizes[axis + 1 :], self.item_size)
                part = memory[done : done + len(some) * per_step]
                part.reshape(len(some), *map(len, inner), self.item_size)[...] = grid[pick]
                done += len(part)


def runs(tensor: Tensor, selection: Selection) -> Plan:
    """How to read a part of a tensor.

    Raises:
        IndexError: if there are more slices than axes, or a step is not positive.
    """
    rank = len(tensor.shape)
    if len(selection) > rank or any(s.step is not None and s.step < 1 for s in selection):
        raise IndexError(
            f"The selection {tuple(selection)} does not fit the tensor `{tensor.name}`, whose stored shape is "
            f"{tensor.shape}: give at most one slice an axis, with a positive step."
        )
    slices = [*selection, *[slice(None)] * (rank - len(selection))]
    ranges = [range(*s.indices(size)) for s, size in zip(slices, tensor.shape, strict=True)]
    item_size = ITEM_SIZES[tensor.dtype]
    kept = [axis for axis in range(rank) if tensor.shape[axis] != 1]  # NumPy has no more than 64 axes
    return Plan(
        tuple(map(len, ranges)),
        tuple(ranges[axis] for axis in kept),
        tuple(math.prod(tensor.shape[axis + 1 :]) * item_size for axis in kept),
        tuple(tensor.shape[axis] for axis in kept),
        item_size,
    )
