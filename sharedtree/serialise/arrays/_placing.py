"""Arrays of a file, read and put where they are wanted, each process reading no more than its own."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ..._errors import FormatError, StructureMismatchError
from ..._printable import printable
from ..container._chunks import ProgressOption, showing
from ..container._reading import Container
from ._arrays import ArrayEntry, finish
from ._dtypes import dtype_named, require_bools, restore

Placement = jax.sharding.Sharding | jax.Device | None
"""Where an array goes; None is JAX's default, without commitment."""

Place = Callable[[ArrayEntry], Placement]

Bounds = tuple[tuple[int, int], ...]
"""A part of an array: where it begins and ends along each axis."""


def read_arrays(
    container: Container,
    entries: Sequence[ArrayEntry],
    place: Place,
    *,
    mmap: bool,
    verify: bool,
    progress: ProgressOption,
) -> list[Any]:
    """The arrays of some entries.

    Args:
        container: that holds them.
        entries: which.
        place: where each JAX array goes. NumPy arrays stay on the host.
        mmap: whether to map the file instead of reading it.
        verify: whether to check digests; before anything is mapped, too.
        progress: see `showing`.

    Raises:
        CorruptFileError: if a digest is wrong.
        FormatError: if JAX has no arrays of such a dtype, or booleans have bytes other than 0 and 1. With `mmap` and
            without `verify` nothing is looked at.
        StructureMismatchError: if JAX would shorten numbers, since 64-bit types are switched off.
    """
    require_dtypes_of_jax(entries)
    placements = [place(entry) if entry.kind == "jax" else None for entry in entries]
    parted = [_is_parted(placement) and entry.key is None for entry, placement in zip(entries, placements, strict=True)]
    parts = {
        i: _parts(entry, placement)
        for i, (entry, placement) in enumerate(zip(entries, placements, strict=True))
        if parted[i]
    }
    whole = [entry.tensor for entry, is_parted in zip(entries, parted, strict=True) if not is_parted]
    nbytes = sum(container.tensors[name].nbytes for name in whole)
    total = nbytes + sum(_nbytes(entries[i], bounds) for i, found in parts.items() for bounds in found)
    with showing(progress, "loading") as report:
        if mmap:
            if verify:
                container.require_undamaged([entry.tensor for entry in entries], progress=report)
            data = container.mapped()
        else:
            in_all = report and (lambda done, _: report(done, total))
            data = container.read_many(whole, verify=verify, progress=in_all)
        views: list[Any] = []
        for i, (entry, placement) in enumerate(zip(entries, placements, strict=True)):
            if not parted[i]:
                if verify or not mmap:
                    require_bools(data[entry.tensor], dtype_named(entry.dtype), entry.tensor)
                views.append(restore(data[entry.tensor], dtype_named(entry.dtype), entry.shape))
                continue
            views.append(_read_parts(container, entry, placement, parts[i], verify=verify and not mmap))
            nbytes += sum(_nbytes(entry, bounds) for bounds in parts[i])
            if report is not None and not mmap:
                report(nbytes, total)
        del data
    return settled(entries, placements, views)


def settled(entries: Sequence[ArrayEntry], placements: Sequence[Placement], arrays: list[Any]) -> list[Any]:
    """The arrays that were saved, where they are wanted.

    Args:
        entries: what each array is.
        placements: where each goes; NumPy arrays stay.
        arrays: the arrays on the host, NumPy's, of which JAX may keep the memory; or JAX's, which are in place already.
            Each is replaced in the list, so that the host's memory is let go on the way.

    Returns:
        The same list.
    """
    together = [
        i
        for i, (entry, placement) in enumerate(zip(entries, placements, strict=True))
        if entry.kind == "jax" and isinstance(arrays[i], np.ndarray) and (placement is None or entry.key is not None)
    ]
    for i, array in zip(together, jax.device_put([arrays[i] for i in together]), strict=True):
        arrays[i] = array
    for i, (entry, placement) in enumerate(zip(entries, placements, strict=True)):
        if placement is not None and isinstance(arrays[i], np.ndarray):
            arrays[i] = _put(arrays[i], placement)
        arrays[i] = finish(entry, arrays[i])
        if placement is not None and entry.key is not None:
            arrays[i] = _put(arrays[i], placement)
    return arrays


def _put(array: Any, placement: Any) -> Any:
    if isinstance(placement, jax.sharding.Sharding) and not placement.is_fully_addressable:
        # `jax.device_put` takes no JAX array there, and would compare NumPy's among all processes.
        if isinstance(array, jax.Array) and not array.is_fully_addressable:
            return array  # in place already
        return jax.make_array_from_callback(array.shape, placement, lambda index: array[index])
    return jax.device_put(array, placement)


def _is_parted(placement: Placement) -> bool:
    """Whether not all devices have all of the array, or not all devices are this process's."""
    if not isinstance(placement, jax.sharding.Sharding):
        return False
    return not (placement.is_fully_replicated and placement.is_fully_addressable)


def _parts(entry: ArrayEntry, placement: Any) -> set[Bounds]:
    """The parts of an array that the devices of this process have, each once."""
    try:
        placement.shard_shape(entry.shape)
    except ValueError as error:
        raise StructureMismatchError(
            f"`{printable(entry.tensor)}` of shape {list(entry.shape)} cannot be sharded as was asked: {error}\n"
            "Give it another sharding:\n"
            "    sharedtree.load(path, sharding=lambda name, struct: jax.devices()[0])",
            (entry.tensor,),
        ) from error
    indices = placement.addressable_devices_indices_map(entry.shape).values()
    return {_bounds(index, entry.shape) for index in indices}


def _bounds(index: Any, shape: Sequence[int]) -> Bounds:
    return tuple(each.indices(size)[:2] for each, size in zip(index, shape, strict=True))


def _nbytes(entry: ArrayEntry, bounds: Bounds) -> int:
    return math.prod(stop - start for start, stop in bounds) * dtype_named(entry.dtype).itemsize


def _read_parts(container: Container, entry: ArrayEntry, placement: Any, parts: set[Bounds], *, verify: bool) -> Any:
    dtype = dtype_named(entry.dtype)
    whole_rows = tuple((0, size) for size in entry.shape[1:])
    is_split_behind = any(part[1:] != whole_rows for part in parts)
    if verify and is_split_behind and len(parts) > 1:
        # Each part touches nearly every chunk, so each would read and check nearly all.
        container.require_undamaged([entry.tensor])
        verify = False
    known: dict[Bounds, np.ndarray[Any, Any]] = {}  # replicas read it once

    def read(index: Any) -> np.ndarray[Any, Any]:
        bounds = _bounds(index, entry.shape)
        if bounds not in known:
            selection = [slice(start, stop) for start, stop in bounds]
            part = container.read_selection(entry.tensor, selection, verify=verify)
            require_bools(part, dtype, entry.tensor)
            known[bounds] = restore(part, dtype, tuple(stop - start for start, stop in bounds))
        return known[bounds]

    return jax.make_array_from_callback(entry.shape, placement, read)


def require_dtypes_of_jax(entries: Sequence[ArrayEntry]) -> None:
    """Raises if JAX cannot hold the arrays that are said to be its own.

    Raises:
        FormatError: if JAX has no arrays of such a dtype.
        StructureMismatchError: if 64-bit types are switched off, and an array has one: JAX would take half of each
            number, and say so in a warning at most.
    """
    for entry in entries:
        if entry.kind == "jax" and not _is_dtype_of_jax(entry.dtype):
            raise FormatError(
                f"`{printable(entry.tensor)}` is said to be JAX's and of dtype `{entry.dtype}`, which JAX "
                f"{jax.__version__} does not have. The file is damaged or was made by hand; or a newer JAX made the "
                "array, then update:\n    pip install --upgrade jax"
            )
    if jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        return
    shortened = [
        entry
        for entry in entries
        if entry.kind == "jax" and jax.dtypes.canonicalize_dtype(dtype_named(entry.dtype)) != dtype_named(entry.dtype)
    ]
    if shortened:
        listed = "\n".join(
            f"    `{printable(entry.tensor)}`: {entry.dtype}{list(entry.shape)}" for entry in shortened[:20]
        )
        more = f"\n    and {len(shortened) - 20} more" if len(shortened) > 20 else ""
        raise StructureMismatchError(
            f"The file has arrays with 64-bit numbers, which JAX would shorten to 32 bits:\n{listed}{more}\n"
            'Switch 64-bit types on before you load it:\n    jax.config.update("jax_enable_x64", True)',
            [entry.tensor for entry in shortened],
        )


@functools.cache
def _is_dtype_of_jax(name: str) -> bool:
    try:
        jax.device_put(np.zeros(1, dtype_named(name)))
    except (TypeError, ValueError, jax.errors.JaxRuntimeError):  # the last from XLA, which JAX 0.10 asks in vain
        return False
    return True
