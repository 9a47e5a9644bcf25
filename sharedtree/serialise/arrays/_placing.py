"""Arrays of a file: their entries in the manifest, where they go, and how they are read there.

Each process reads only the shards on its own devices.

An entry says what the bytes of an array do not: its dtype and shape, whether it is JAX's or NumPy's, whether it is
weakly typed, and for typed PRNG keys, their implementation. The stored bytes of keys are their raw data
(`jax.random.key_data`).

Words: a *part* of an array is what one device has of it, given by its bounds along each axis. A *placement* is where an
array of JAX's goes.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from ...core._comparison import array_text
from ...core._errors import FormatError, StructureMismatchError
from ...core._jax_internals import ConcreteArray, as_weakly_typed
from ...core._node_types import RefusalError
from ...core._printing import printable
from ..container._byte_sources import ProgressOption, progress_reporter
from ..container._reading import Container
from ._dtypes import AS_TRUE, AS_TRUE_IN_FOREIGN, array_from_bytes, dtype_named, name_if_storable, require_bools


class ArrayEntry(NamedTuple):
    """One entry of `arrays` in a manifest.

    Attributes:
        tensor: name of its tensor.
        dtype: name of the logical dtype.
        shape: its shape. For PRNG keys, the shape of their raw data.
        kind: `"jax"` or `"numpy"`.
        weak: True if it is weakly typed.
        key: implementation of its PRNG keys; None if it does not hold keys.
    """

    tensor: str
    dtype: str
    shape: tuple[int, ...]
    kind: str
    weak: bool = False
    key: str | None = None


KEY_IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")
"""The implementations of PRNG keys that are part of JAX. A file can name no other."""


# ---- Array → entry, and back ----


def is_array(cls: type) -> bool:
    """Returns True if instances of a class go to `describe`, which accepts or refuses them."""
    return cls is ConcreteArray or issubclass(cls, np.ndarray | jax.Array | Tracer)


def describe(array: Any, tensor: str) -> tuple[dict[str, Any], Any]:
    """Returns the entry of an array for the manifest, as a dictionary, and the array whose bytes are to be stored.

    The latter is mostly the array itself. For PRNG keys it is their raw data. For an array of JAX's dtype `float0`,
    which has no bytes, it may be an empty one of NumPy's. Then the entry's kind is `numpy`, too.

    Args:
        array: the array, of JAX or NumPy.
        tensor: name of its tensor.

    Raises:
        RefusalError: for a tracer; a subclass of NumPy's arrays other than `memmap`; a special kind of JAX's arrays;
            PRNG keys of an implementation from outside JAX; a donated or deleted array; a dtype no file can store.
    """
    if isinstance(array, Tracer):
        raise RefusalError("a tracer, which has no value yet", "Save outside of `jax.jit` and the other transforms.")
    cls, dtype = type(array), array.dtype
    # In some versions, JAX has its own class for arrays of float0. An empty one of NumPy's is the same: it has no
    # bytes.
    if dtype == jax.dtypes.float0 and cls is _class_of_float0():
        array, cls = np.empty(array.shape, dtype), np.ndarray
    is_jax = not issubclass(cls, np.ndarray)
    extra: dict[str, Any] = {}
    # 1. Special kinds of NumPy arrays hold more than a file could keep.
    if not is_jax and cls is not np.ndarray and cls is not np.memmap:
        advice = "Make it a plain one: `numpy.asarray(array)`. Save what else it has, such as a unit, beside it."
        if issubclass(cls, np.ma.MaskedArray):
            advice = "Save its data and its mask: `(numpy.asarray(array.data), numpy.ma.getmaskarray(array))`."
        elif issubclass(cls, np.memmap | np.matrix | np.recarray):
            advice = "Make it a plain one: `numpy.asarray(array)`."
        raise RefusalError(f"a `{cls.__qualname__}`, a special kind of NumPy array", advice)
    # 2. Of JAX's other arrays, only PRNG keys can be stored.
    if is_jax and cls is not ConcreteArray:
        if not jax.numpy.issubdtype(dtype, jax.dtypes.prng_key):
            advice = "Keep what it holds instead: `jax.numpy.copy(array)`."
            raise RefusalError(f"a `{cls.__qualname__}`, which is no plain array", advice)
        impl = jax.random.key_impl(array)
        if not isinstance(impl, str) or impl not in KEY_IMPLEMENTATIONS:
            raise RefusalError(
                f"a PRNG key of the implementation {str(impl)!r}, which JAX does not bring along",
                "Keep its data instead: `jax.random.key_data(key)`.",
            )
        extra["key"] = impl
        array = jax.random.key_data(array)
    elif is_jax and array.weak_type:
        extra["weak"] = True
    if is_jax and array.is_deleted():
        raise RefusalError("an array whose memory was donated or deleted", "Save before it is donated.")
    dtype = array.dtype
    # 3. The dtype. NumPy's can have metadata of the user's, which a file cannot hold.
    name = None if dtype.metadata else name_if_storable(dtype)
    if name is None:
        advice = "Keep numbers in arrays, and texts and objects in lists or tuples."
        raise RefusalError(f"an array of dtype `{dtype}`", advice)
    kind = "jax" if is_jax else "numpy"
    return {"tensor": tensor, "dtype": name, "shape": list(array.shape), "kind": kind, **extra}, array


@functools.cache
def _class_of_float0() -> type:
    """Returns the class of JAX's arrays with the dtype `float0`: NumPy's, or one of JAX's own.

    These are gradients with respect to integers. They have a shape and no bytes.
    """
    # Inside a `jax.jit`, `device_put` would return a tracer otherwise.
    with jax.ensure_compile_time_eval():
        return type(jax.device_put(np.empty((), jax.dtypes.float0)))


def finish(entry: ArrayEntry, array: Any) -> Any:
    """Turns raw data into typed PRNG keys, or an array into a weakly typed one, if its entry says so.

    Otherwise returns the array as it is. No memory is copied.

    Args:
        entry: entry of the array.
        array: an array of the entry's dtype and shape, or a `jax.ShapeDtypeStruct` for it. Of a struct, the result is a
            struct, too.

    Raises:
        FormatError: if JAX cannot make such an array: the entry is damaged or made by hand.
    """
    is_struct = isinstance(array, jax.ShapeDtypeStruct)
    if entry.key is not None:
        subject = f"`{printable(entry.tensor)}` is a PRNG key"
        dtype = key_dtype(entry.key, subject)
        # Each key has raw data of this shape. Its axes come last.
        data_shape = _key_type(entry.key)[1]
        rank = len(entry.shape) - len(data_shape)
        if entry.shape[rank:] != data_shape:
            raise FormatError(
                f"`{printable(entry.tensor)}` of shape {entry.shape} is no data of PRNG keys of the implementation "
                f"{entry.key!r}."
            )
        if is_struct:
            return jax.ShapeDtypeStruct(entry.shape[:rank], dtype)
        return jax.random.wrap_key_data(array, impl=entry.key)
    if not entry.weak:
        return array
    if is_struct:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, weak_type=True)
    try:
        return as_weakly_typed(array)
    except Exception as error:
        raise FormatError(f"`{printable(entry.tensor)}` of dtype {entry.dtype} cannot be of a weak type.") from error


def key_dtype(impl: str, subject: str = "The file names PRNG keys") -> Any:
    """Returns the dtype of PRNG keys of an implementation.

    Args:
        impl: name of the implementation.
        subject: beginning of the error.

    Raises:
        FormatError: if the implementation is not part of JAX.
    """
    if impl not in KEY_IMPLEMENTATIONS:
        raise FormatError(f"{subject} of the implementation {impl[:80]!r}, which JAX does not have.")
    return _key_type(impl)[0]


# There are three implementations, and JAX traces a function for each.
@functools.cache
def _key_type(impl: str) -> tuple[Any, tuple[int, ...]]:
    """Returns the dtype of PRNG keys of an implementation, and the shape of the raw data of one key."""
    key = jax.eval_shape(lambda: jax.random.key(0, impl=impl))
    return key.dtype, jax.eval_shape(jax.random.key_data, key).shape


def key_implementation(dtype: Any) -> str | None:
    """Returns the implementation of a dtype of PRNG keys; None if it is not part of JAX."""
    return next((impl for impl in KEY_IMPLEMENTATIONS if key_dtype(impl) == dtype), None)


# ---- Reading arrays: which ones, and where they go ----

Placement = jax.sharding.Sharding | jax.Device | None
"""Where an array of JAX's goes. None is JAX's default device, to which the array is not committed.

For an array of NumPy's it is always None: that array stays on the host.
"""

Place = Callable[[ArrayEntry], Placement]
"""Function that returns where the array of an entry goes."""

Select = str | Callable[[str], bool] | None
"""The user's option: the path of one part of the tree, or a function from an array's name to True if it is wanted.

None for the whole tree.
"""

Shardings = Placement | Callable[[str, jax.ShapeDtypeStruct], Placement]
"""The user's option: one placement for all arrays, or a function (name of the array, its shape and dtype) for each."""

Bounds = tuple[tuple[int, int], ...]
"""Where a part of an array begins and ends along each axis: ((0, 2), (4, 8)) for [0:2, 4:8]."""


def read_arrays(
    container: Container,
    entries: list[ArrayEntry],
    place: Place,
    *,
    mmap: bool,
    verify: bool,
    progress: ProgressOption,
    is_foreign: bool = False,
) -> list[Any]:
    """Reads the arrays of some entries, and puts each where it goes. Returns them in the order of the entries.

    With `mmap` and `verify`, the digests of all wanted arrays are checked first. If one is wrong, nothing is mapped.

    Args:
        container: the open file.
        entries: entries of the wanted arrays.
        place: returns where an array of JAX's goes. It is not called for NumPy's.
        mmap: True to map the file instead of reading it.
        verify: True to check digests, and to refuse booleans whose byte is not 0 or 1. If False, any byte other than
            0 counts as True.
        progress: the user's option.
        is_foreign: True if another program wrote the file. Then it has no digests.

    Raises:
        CorruptFileError: if a chunk does not match its digest, or the file ends early.
        FormatError: if a boolean is refused, or the file calls an array JAX's and JAX lacks its dtype.
        StructureMismatchError: if JAX would shorten 64-bit numbers, or an array cannot be sharded as asked.
        TypeError: if the user's `sharding` is neither a sharding nor a device.
        MemoryError: if there is no memory for the arrays.
    """
    # End of the error about a boolean that is refused. None if none is.
    advice_on_booleans = (AS_TRUE_IN_FOREIGN if is_foreign else AS_TRUE) if verify else None
    verify = verify and not is_foreign
    placements = placements_of(entries, place)
    # 1. Which arrays are read in parts, since this process has only some shards? The others are read together.
    pairs = zip(entries, placements, strict=True)
    plan = [(entry, placement, _parts_to_read(entry, placement)) for entry, placement in pairs]
    whole_names = [entry.tensor for entry, _, parts in plan if parts is None]
    # The bytes of the arrays that are read as a whole, and of all.
    done = sum(container.tensors[name].nbytes for name in whole_names)
    total = done + sum(_nbytes(entry, parts) for entry, _, parts in plan if parts is not None)
    with progress_reporter(progress, "loading") as report:
        # 2. Map the file, or read those that are read as a whole.
        if mmap:
            if verify:
                container.require_undamaged([entry.tensor for entry in entries], progress=report)
            data = container.map_tensors()
        else:
            # `read_many` knows only the arrays that are read as a whole, but the user's total has the parts, too.
            report_of_all = report and (lambda done, _: report(done, total))
            data = container.read_many(whole_names, verify=verify, progress=report_of_all)
        # 3. Make the arrays, and read the parts.
        arrays: list[Any] = []
        for entry, placement, parts in plan:
            if parts is None:
                dtype = dtype_named(entry.dtype)
                if advice_on_booleans is not None:
                    require_bools(data[entry.tensor], dtype, entry.tensor, advice_on_booleans)
                arrays.append(array_from_bytes(data[entry.tensor], dtype, entry.shape))
                continue
            # With `mmap`, the digests were checked above.
            is_verified = verify and not mmap
            arrays.append(_read_parts(container, entry, placement, parts, advice_on_booleans, verify=is_verified))
            done += _nbytes(entry, parts)
            if report is not None and not mmap:
                report(done, total)
        # From here on, only the arrays keep the memory alive. So it is freed array by array when they go to a device.
        del data
    return place_arrays(entries, placements, arrays)


def placements_of(entries: Sequence[ArrayEntry], place: Place) -> list[Placement]:
    """Returns the placement of each array. It is None for arrays of NumPy's: they stay on the host.

    All entries are checked before `place` is called for the first time.

    Args:
        entries: entries of the arrays.
        place: returns where an array of JAX's goes.

    Raises:
        FormatError: if an entry says that its array is JAX's, but the installed JAX does not have the dtype.
        StructureMismatchError: if JAX would shorten 64-bit numbers to 32 bits, since 64-bit types are switched off; or
            if an array cannot be sharded as its placement says.
    """
    of_jax = [entry for entry in entries if entry.kind == "jax"]
    for entry in of_jax:
        if not _is_dtype_of_jax(entry.dtype):
            raise FormatError(
                f"`{printable(entry.tensor)}` is a JAX array of dtype `{entry.dtype}` according to the file, but JAX "
                f"{jax.__version__} does not have this dtype. The file is damaged, was made by hand, or has arrays of "
                "a newer JAX. In the last case, update:\n"
                "    pip install --upgrade jax"
            )
    # JAX would shorten such numbers to 32 bits, with a warning at most.
    shortened: list[ArrayEntry] = []
    for entry in of_jax:
        dtype = dtype_named(entry.dtype)
        if jax.dtypes.canonicalize_dtype(dtype) != dtype:
            shortened.append(entry)
    if shortened:
        listed = [f"    `{printable(entry.tensor)}`: {array_text(entry)}\n" for entry in shortened[:20]]
        more = f"    and {len(shortened) - 20} more\n" if len(shortened) > 20 else ""
        raise StructureMismatchError(
            f"The file has arrays with 64-bit numbers, which JAX would shorten to 32 bits:\n{''.join(listed)}{more}"
            'Switch 64-bit types on before you load it:\n    jax.config.update("jax_enable_x64", True)',
            [entry.tensor for entry in shortened],
        )
    placements = [place(entry) if entry.kind == "jax" else None for entry in entries]
    for entry, placement in zip(entries, placements, strict=True):
        _require_fitting(entry, placement)
    return placements


def _require_fitting(entry: ArrayEntry, placement: Placement) -> None:
    """Raises `StructureMismatchError` if an array has too few axes for a sharding, or cannot be divided evenly."""
    if placement is None or isinstance(placement, jax.Device):
        return
    # The shape of PRNG keys is that of the keys, and not of their raw data.
    shape = struct_of(entry).shape
    # Both calls are only for their errors. The first raises for a sharding of too many axes, the second for a size that
    # cannot be divided evenly.
    try:
        jax.ShapeDtypeStruct(shape, np.uint8, sharding=placement)
        placement.shard_shape(shape)
    except ValueError as error:
        raise StructureMismatchError(
            f"`{printable(entry.tensor)}` of shape {list(shape)} cannot be sharded as requested: {error}\n"
            "Give it another sharding:\n"
            "    sharedtree.load(path, sharding=lambda name, struct: jax.devices()[0])",
            (entry.tensor,),
        ) from error


@functools.cache
def _is_dtype_of_jax(name: str) -> bool:
    """Returns True if JAX can make arrays of a dtype. To find out, it makes one, once for each dtype.

    Args:
        name: name of the dtype in a manifest.
    """
    try:
        # Inside a `jax.jit`, `device_put` would return a tracer without asking XLA.
        with jax.ensure_compile_time_eval():
            jax.device_put(np.zeros(1, dtype_named(name)))
    # JAX 0.10 lets XLA raise the last of these.
    except (TypeError, ValueError, jax.errors.JaxRuntimeError):
        return False
    return True


def place_arrays(entries: Sequence[ArrayEntry], placements: Sequence[Placement], arrays: list[Any]) -> list[Any]:
    """Puts arrays where they go, and makes them what their entries say: NumPy's, weakly typed, or PRNG keys.

    Returns the same list. Each array in it is replaced as soon as it is placed. This frees its memory.

    Args:
        entries: entries of the arrays.
        placements: where each goes.
        arrays: arrays of NumPy's on the host, whose memory JAX may alias; or arrays of JAX's that are in place already.
    """
    pairs = list(zip(entries, placements, strict=True))
    # 1. JAX's arrays without a placement go to JAX in one call. So does the raw data of PRNG keys. A sharding of keys
    # does not fit their data, so the keys are made before they are placed.
    default_placed: list[int] = []
    for i, (entry, placement) in enumerate(pairs):
        is_unplaced = entry.kind == "jax" and placement is None
        if is_unplaced or entry.key is not None:
            default_placed.append(i)
    for i, array in zip(default_placed, jax.device_put([arrays[i] for i in default_placed]), strict=True):
        arrays[i] = array
    # 2. The others are placed one by one.
    for i, (entry, placement) in enumerate(pairs):
        if entry.key is None:
            arrays[i] = finish(entry, _put(arrays[i], placement))
        else:
            arrays[i] = _put(finish(entry, arrays[i]), placement)
    return arrays


def _put(array: Any, placement: Any) -> Any:
    """Returns an array at its placement. If this is None, returns the array as it is."""
    if placement is None:
        return array
    if isinstance(placement, jax.Device) or placement.is_fully_addressable:
        return jax.device_put(array, placement)
    # From here on, the placement has devices of other processes. An array that was read shard by shard is in place.
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return array
    # With such a placement, `jax.device_put` refuses JAX's arrays, and compares NumPy's among all processes.
    return jax.make_array_from_callback(array.shape, placement, lambda index: array[index])


def _parts_to_read(entry: ArrayEntry, placement: Any) -> set[Bounds] | None:
    """Returns the parts of an array that devices of this process get, each once; None if it is read as a whole.

    It is read as a whole if there is no sharding, if it holds PRNG keys, or if it is replicated and all devices are
    this process's.
    """
    if placement is None or isinstance(placement, jax.Device) or entry.key is not None:
        return None
    if placement.is_fully_replicated and placement.is_fully_addressable:
        return None
    indices = placement.addressable_devices_indices_map(entry.shape).values()
    return {_bounds(index, entry.shape) for index in indices}


def _bounds(index: Any, shape: Sequence[int]) -> Bounds:
    """Returns the bounds of a part from an index of JAX's: a slice of step 1 for each axis."""
    return tuple(axis_slice.indices(size)[:2] for axis_slice, size in zip(index, shape, strict=True))


def _nbytes(entry: ArrayEntry, parts: set[Bounds]) -> int:
    """Returns the size of some parts of an array, in bytes."""
    items = sum(math.prod(stop - start for start, stop in bounds) for bounds in parts)
    return items * dtype_named(entry.dtype).itemsize


def _read_parts(
    container: Container,
    entry: ArrayEntry,
    placement: Any,
    parts: set[Bounds],
    advice_on_booleans: str | None,
    *,
    verify: bool,
) -> Any:
    """Reads this process's shards of an array, and makes a sharded JAX array of them.

    Args:
        container: the open file.
        entry: entry of the array.
        placement: its sharding.
        parts: the parts needed by JAX. They decide how digests are checked.
        advice_on_booleans: end of the error about booleans with a byte other than 0 or 1; None to accept such bytes.
        verify: True to check digests.

    Raises:
        CorruptFileError: if a chunk does not match its digest, or the file ends early.
        FormatError: if a boolean is refused.
    """
    dtype = dtype_named(entry.dtype)
    whole_rows = tuple((0, size) for size in entry.shape[1:])
    if verify and len(parts) > 1 and any(part[1:] != whole_rows for part in parts):
        # A part that is cut along inner axes has some bytes in nearly every chunk. For each such part, nearly all
        # chunks of the tensor would be read and checked. So the chunks are checked once here, and the parts read
        # unchecked.
        container.require_undamaged([entry.tensor])
        verify = False

    # JAX calls the function below for each device, so it asks for the same part several times if there are replicas.
    @functools.cache
    def read_part(bounds: Bounds) -> np.ndarray[Any, Any]:
        """Returns one part, with its dtype and shape."""
        part = container.read_selection(entry.tensor, [slice(*axis_bounds) for axis_bounds in bounds], verify=verify)
        if advice_on_booleans is not None:
            require_bools(part, dtype, entry.tensor, advice_on_booleans)
        return array_from_bytes(part, dtype, tuple(stop - start for start, stop in bounds))

    return jax.make_array_from_callback(entry.shape, placement, lambda index: read_part(_bounds(index, entry.shape)))


def struct_of(entry: ArrayEntry) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of the array as it is loaded. Raises `FormatError` as `finish` does."""
    return finish(entry, jax.ShapeDtypeStruct(entry.shape, dtype_named(entry.dtype)))


def require_select(select: Any) -> None:
    """Raises `TypeError` unless the user's `select` is a path, a function or None."""
    if select is not None and not isinstance(select, str) and not callable(select):
        raise TypeError(
            "`select` must be the path of one part, as a string, or a function from the name of an array to a bool, "
            f"not a `{type(select).__qualname__}`:\n"
            '    select = lambda name: name.startswith("encoder.")'
        )


def place_of(sharding: Shardings) -> Place:
    """Returns the function from an entry to its placement for the user's option `sharding`.

    Raises:
        TypeError: if the option, or a result of the user's function, is neither a device nor a sharding nor None.
    """

    def checked_placement(placement: Any) -> Placement:
        """Returns the placement. Raises `TypeError` if it is neither a device nor a sharding nor None."""
        if placement is None or isinstance(placement, jax.sharding.Sharding | jax.Device):
            return placement
        raise TypeError(
            f"`sharding` is or returns {placement!r}, which is neither a device nor a sharding of JAX. Use one of "
            "these:\n"
            "    sharedtree.load(path, sharding=jax.devices()[0])"
        )

    if callable(sharding) and not isinstance(sharding, jax.sharding.Sharding):
        return lambda entry: checked_placement(sharding(entry.tensor, struct_of(entry)))
    placement = checked_placement(sharding)
    return lambda _: placement
