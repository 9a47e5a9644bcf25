"""Arrays of a file: which are wanted and where they go, and how they are read there.

Each process reads no more than its own.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ..._printable import printable
from ...errors import FormatError, StructureMismatchError
from ..container._chunks import ProgressOption, showing
from ..container._reading import Container
from ._arrays import ArrayEntry, finish
from ._dtypes import dtype_named, require_bools, restore

Placement = jax.sharding.Sharding | jax.Device | None
"""Where an array goes; None is JAX's default, without commitment."""

Place = Callable[[ArrayEntry], Placement]

Select = str | Callable[[str], bool] | None
"""The path of a part, or a function from the names of arrays to whether they are wanted."""

Shardings = Placement | Callable[[str, jax.ShapeDtypeStruct], Placement]
"""Where arrays go: one place for all of them, or a function from name and description."""

Bounds = tuple[tuple[int, int], ...]  # where a part of an array begins and ends along each axis


def read_arrays(
    container: Container, entries: list[ArrayEntry], place: Place, *, mmap: bool, verify: bool, progress: ProgressOption
) -> list[Any]:
    """The arrays of some entries. With `mmap`, all digests are checked before anything is mapped, or nothing is."""
    placements = placements_of(entries, place)
    plan = [(entry, placement, _parts(entry, placement)) for entry, placement in zip(entries, placements, strict=True)]
    whole = [entry.tensor for entry, _, parts in plan if parts is None]
    done = sum(container.tensors[name].nbytes for name in whole)
    total = done + sum(_nbytes(entry, parts) for entry, _, parts in plan if parts is not None)
    with showing(progress, "loading") as report:
        if mmap:
            if verify:
                container.require_undamaged([entry.tensor for entry in entries], progress=report)
            data = container.mapped()
        else:
            in_all = report and (lambda done, _: report(done, total))
            data = container.read_many(whole, verify=verify, progress=in_all)
        arrays: list[Any] = []
        for entry, placement, parts in plan:
            if parts is None:
                dtype = dtype_named(entry.dtype)
                if verify or not mmap:
                    require_bools(data[entry.tensor], dtype, entry.tensor)
                arrays.append(restore(data[entry.tensor], dtype, entry.shape))
                continue
            arrays.append(_read_parts(container, entry, placement, parts, verify=verify and not mmap))
            done += _nbytes(entry, parts)
            if report is not None and not mmap:
                report(done, total)
        del data
    return settled(entries, placements, arrays)


def placements_of(entries: Sequence[ArrayEntry], place: Place) -> list[Placement]:
    """Where each array goes: JAX's as is asked, if JAX can have them, and NumPy's stay on the host."""
    of_jax = [entry for entry in entries if entry.kind == "jax"]
    for entry in of_jax:
        if not _is_dtype_of_jax(entry.dtype):
            raise FormatError(
                f"`{printable(entry.tensor)}` is said to be JAX's and of dtype `{entry.dtype}`, which JAX "
                f"{jax.__version__} does not have. The file is damaged or was made by hand; or a newer JAX made the "
                "array, then update:\n    pip install --upgrade jax"
            )
    # Of such numbers JAX would take half, and say so in a warning at most.
    shortened = [
        entry for entry in of_jax if jax.dtypes.canonicalize_dtype(dtype_named(entry.dtype)) != dtype_named(entry.dtype)
    ]
    if shortened:
        listed = [f"    `{printable(entry.tensor)}`: {entry.dtype}{list(entry.shape)}\n" for entry in shortened[:20]]
        more = f"    and {len(shortened) - 20} more\n" if len(shortened) > 20 else ""
        raise StructureMismatchError(
            f"The file has arrays with 64-bit numbers, which JAX would shorten to 32 bits:\n{''.join(listed)}{more}"
            'Switch 64-bit types on before you load it:\n    jax.config.update("jax_enable_x64", True)',
            [entry.tensor for entry in shortened],
        )
    return [place(entry) if entry.kind == "jax" else None for entry in entries]


@functools.cache
def _is_dtype_of_jax(name: str) -> bool:
    try:
        jax.device_put(np.zeros(1, dtype_named(name)))
    except (TypeError, ValueError, jax.errors.JaxRuntimeError):  # the last from XLA, which JAX 0.10 asks in vain
        return False
    return True


def settled(entries: Sequence[ArrayEntry], placements: Sequence[Placement], arrays: list[Any]) -> list[Any]:
    """The arrays that were saved, where they are wanted: the same list, in which each is replaced as its memory goes.

    They come as NumPy's on the host, of which JAX may keep the memory, or as JAX's, which are in place already.
    """
    pairs = list(zip(entries, placements, strict=True))
    # The sharding of PRNG keys is not that of their data, so they are made first and placed then.
    together = [i for i, (entry, at) in enumerate(pairs) if (entry.kind, at) == ("jax", None) or entry.key is not None]
    for i, array in zip(together, jax.device_put([arrays[i] for i in together]), strict=True):
        arrays[i] = array
    for i, (entry, placement) in enumerate(pairs):
        if entry.key is None:
            arrays[i] = finish(entry, _put(arrays[i], placement))
        else:
            arrays[i] = _put(finish(entry, arrays[i]), placement)
    return arrays


def _put(array: Any, placement: Any) -> Any:
    if placement is None:
        return array
    if isinstance(placement, jax.Device) or placement.is_fully_addressable:
        return jax.device_put(array, placement)
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return array  # in place already
    # `jax.device_put` takes no JAX array there, and would compare NumPy's among all processes.
    return jax.make_array_from_callback(array.shape, placement, lambda index: array[index])


def _parts(entry: ArrayEntry, placement: Any) -> set[Bounds] | None:
    """The parts of an array that the devices of this process have, each once; None if it is read as a whole.

    So are PRNG keys, and what all devices have all of, if they are this process's.
    """
    if placement is None or isinstance(placement, jax.Device) or entry.key is not None:
        return None
    if placement.is_fully_replicated and placement.is_fully_addressable:
        return None
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


def _nbytes(entry: ArrayEntry, parts: set[Bounds]) -> int:
    items = sum(math.prod(stop - start for start, stop in bounds) for bounds in parts)
    return items * dtype_named(entry.dtype).itemsize


def _read_parts(container: Container, entry: ArrayEntry, placement: Any, parts: set[Bounds], *, verify: bool) -> Any:
    dtype = dtype_named(entry.dtype)
    whole_rows = tuple((0, size) for size in entry.shape[1:])
    if verify and len(parts) > 1 and any(part[1:] != whole_rows for part in parts):
        # Each part touches nearly every chunk, so each would read and check nearly all.
        container.require_undamaged([entry.tensor])
        verify = False

    @functools.cache  # replicas read it once
    def read(bounds: Bounds) -> np.ndarray[Any, Any]:
        part = container.read_selection(entry.tensor, [slice(*each) for each in bounds], verify=verify)
        require_bools(part, dtype, entry.tensor)
        return restore(part, dtype, tuple(stop - start for start, stop in bounds))

    return jax.make_array_from_callback(entry.shape, placement, lambda index: read(_bounds(index, entry.shape)))


def struct_of(entry: ArrayEntry) -> jax.ShapeDtypeStruct:
    """The description of an array."""
    return finish(entry, jax.ShapeDtypeStruct(entry.shape, dtype_named(entry.dtype)))


def place_of(sharding: Shardings) -> Place:
    """Where `sharding` would have each array."""

    def required(placement: Any) -> Placement:
        if placement is None or isinstance(placement, jax.sharding.Sharding | jax.Device):
            return placement
        raise TypeError(
            f"`sharding` is or gives {placement!r}, which is neither a device nor a sharding. Give one of JAX's:\n"
            "    sharedtree.load(path, sharding=jax.devices()[0])"
        )

    if callable(sharding) and not isinstance(sharding, jax.sharding.Sharding):
        return lambda entry: required(sharding(entry.tensor, struct_of(entry)))
    placement = required(sharding)
    return lambda _: placement
