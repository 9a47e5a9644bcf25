"""The files of `equinox.tree_serialise_leaves`: the arrays of a tree, one after the other, each as NumPy's `.npy`.

Nothing in such a file says to which tree it belongs, so that a template is needed. The records are read here, and not
by `numpy.load`, which would unpickle what says that it is an array of objects, or take memory before it looks whether
the file has as much. Each record is

    the magic, two bytes of version, the length of the header (2 bytes, or 4 in version 2), the header, the data

and the header is the text of a dictionary with the dtype, the order and the shape.
"""

import math
import re
import struct
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util as jtu

from ...core._comparison import array_text
from ...core._errors import CorruptFileError, FormatError
from ..arrays._dtypes import clear_unused, dtype_in_npy, require_bools
from ..container._byte_sources import Source
from ..values._template import NOTHING
from ._foreign_differences import Arrays, Fit, Numbers, is_key, told

MAGIC = b"\x93NUMPY"

_MAX_HEADER = 10_000  # bytes, as `numpy.load` has it
# No text of a file is given to Python's parser, which would warn of it, and quote it in errors.
_HEADER = re.compile(
    r"\{'descr': '([^'\\]*)', 'fortran_order': (True|False), "
    r"'shape': \(((?:[0-9]{1,19}(?:,|(?:, [0-9]{1,19})+))?)\)(?:, ?)?\}\s*"
)
_LENGTHS = {(1, 0): "<H", (2, 0): "<I"}


class _Record(NamedTuple):
    """One array in a file, and where its data is."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool
    start: int
    stop: int

    def __str__(self) -> str:
        return array_text(self)


def read_leaves(source: Source, like: Any) -> Any:
    """A tree like a template, with the leaves of a file. Arguments and errors are those of `convert`."""
    paths, treedef = jtu.tree_flatten_with_path(like)
    leaves: list[Any] = []
    fit, at = Fit(), 0
    for keys, wanted in paths:
        path = jtu.keystr(keys)
        place = fit.paths.below(0, path)
        if not _is_written(wanted):
            leaves.append(wanted)
        elif is_key(wanted) or not isinstance(wanted, Arrays | Numbers):
            fit.differs(place, "no form for it", told(wanted))
        elif at == source.size_up_to(at):
            fit.differs(place, NOTHING, told(wanted))
        else:
            record = _record(source, at)
            at = record.stop
            found = _fitting(source, record, wanted, path)
            if found is None:
                fit.differs(place, str(record), told(wanted))
            else:
                leaves.append(fit.value(wanted, place, found))
    while at < source.size_up_to(at):
        record = _record(source, at)
        at = record.stop
        fit.differs(0, f"{record} after the last leaf", NOTHING)
    fit.require(source.label, is_in_order=True)
    return treedef.unflatten(leaves)


def _is_written(leaf: Any) -> bool:
    return isinstance(leaf, Arrays | Numbers) or hasattr(leaf, "__jax_array__")


def _record(source: Source, at: int) -> _Record:
    """The record that begins at an offset, whose data the file has."""
    start = bytes(source.read(at, 12))
    if len(start) < 12 and start[:6] == MAGIC[: len(start[:6])]:
        raise _cut_short(source, at)
    version = tuple(start[6:8])
    length = _LENGTHS.get(version)  # type: ignore[arg-type]
    if start[:6] != MAGIC or length is None:
        raise _malformed(source, at, "no array of NumPy's begins there")
    size = struct.calcsize(length)
    (nbytes,) = struct.unpack(length, start[8 : 8 + size])
    if nbytes > _MAX_HEADER:
        raise _malformed(source, at, f"its header has {nbytes:,} bytes")
    header = bytes(source.read(at + 8, size + nbytes))
    if len(header) < size + nbytes:
        raise _cut_short(source, at)
    match = _HEADER.fullmatch(header[size:].decode("latin-1"))
    if match is None:
        raise _malformed(source, at, "its header is not what NumPy writes for an array of numbers")
    # NumPy makes much of a text: structures of any number of fields, names of Python's types, nested arrays.
    dtype, shape = dtype_in_npy(match[1]), tuple(map(int, match[3].replace(",", " ").split()))
    if dtype is None and match[1] in ("|O", "O"):
        raise _malformed(source, at, "it is an array of objects, which are pickled, and a pickle runs what it holds")
    if dtype is None:
        raise _malformed(source, at, "its dtype is none that an array of numbers has")
    begin = at + 8 + len(header)
    record = _Record(dtype, shape, match[2] == "True", begin, begin + dtype.itemsize * math.prod(shape))
    if record.stop > source.size_up_to(record.stop):
        raise _cut_short(source, at)
    return record


def _is_nameless(dtype: np.dtype[Any]) -> bool:
    """Whether NumPy knows nothing of a dtype, such as bfloat16, and notes only how many bytes an element has."""
    return dtype.isbuiltin == 2  # 2: those that were registered with NumPy, as ml_dtypes does


def _fitting(source: Source, record: _Record, wanted: Any, path: str) -> Any:
    """The value of a record, if it is one for a leaf of the template; else None."""
    is_array = isinstance(wanted, Arrays)
    dtype = np.dtype(wanted.dtype) if is_array or isinstance(wanted, np.generic) else record.dtype
    shape = tuple(wanted.shape) if is_array else ()
    is_nameless = _is_nameless(dtype) and record.dtype == np.dtype((np.void, dtype.itemsize))
    if record.shape != shape or not (is_nameless or record.dtype.newbyteorder("=") == dtype.newbyteorder("=")):
        return None
    data = np.frombuffer(source.read(record.start, record.stop - record.start), np.uint8)
    require_bools(data, record.dtype, path)
    if is_nameless:
        clear_unused(data, dtype)
    array = data.view(dtype if is_nameless else record.dtype)
    array = array.reshape(shape, order="F" if record.fortran else "C")
    if isinstance(wanted, jax.Array | jax.ShapeDtypeStruct):
        return jnp.array(array.astype(dtype, copy=False))
    if isinstance(wanted, np.ndarray):
        return array.astype(dtype)  # a copy: the source's memory is the caller's
    if isinstance(wanted, np.generic):
        return array.astype(dtype, copy=False)[()]
    value = array.item()
    return value if type(value) is type(wanted) else None


def _malformed(source: Source, at: int, what: str) -> FormatError:
    return FormatError(
        f"`{source.label}` is no file of `equinox.tree_serialise_leaves`: at byte {at:,}, {what}. Convert a file that "
        "Equinox wrote with its own `filter_spec`, unchanged."
    )


def _cut_short(source: Source, at: int) -> CorruptFileError:
    return CorruptFileError(
        f"`{source.label}` ends within the array that begins at byte {at:,}: it was cut short. Copy it again."
    )
