"""The files of `flax.serialization`: a state dictionary, nested and with texts for keys, as msgpack.

Flax reads them, arrays of more than 1 GiB in pieces included; it makes arrays of bytes and calls nothing by
the file's word. Here is checked what it does not look at: shapes, dtypes, names, and whether anything is left over.
"""

import importlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util as jtu

from ...core._comparison import MISSING, Pair, Paths, differences_from, is_alone, matched
from ...core._errors import CompatibilityError, CorruptFileError, FormatError, StructureMismatchError
from ...core._printing import printable
from ..arrays._dtypes import is_dtype_of_flax, require_bools
from ..container._byte_sources import Source
from ..values._template import NOTHING
from ._foreign_differences import Arrays, Fit, Numbers, is_key, told

_VALUES = (np.ndarray, jax.Array, np.generic, bool, int, float, complex, str, bytes, type(None))


def read_state(source: Source, like: Any) -> Any:
    """A tree like a template, with the values of a file; without one, dictionaries of NumPy arrays.

    Arguments and errors are those of `convert`.
    """
    flax = _flax()
    try:
        _require_no_number(bytes(source.read(0, _MAX_NUMBER + 1)))
        data = bytes(source.read(0, source.size))
        _require_dtypes(data)
        state = flax.msgpack_restore(data)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 -- msgpack, NumPy and flax each have errors of their own
        if "incomplete input" in str(error):
            raise CorruptFileError(f"`{source.label}` ends too early: it was cut short. Copy it again.") from None
        raise FormatError(
            f"`{source.label}` is no file of `flax.serialization` ({_in_words(error)}). Give the file as flax wrote it."
        ) from None
    _require_values(state, source.label)
    if like is None:
        return _with_own_arrays(state)
    try:
        wanted = flax.to_state_dict(like)
    except Exception as error:  # of whatever class it is
        raise StructureMismatchError(
            f"flax cannot take the template apart: {_in_words(error)}. Give one that `flax.serialization.to_bytes` "
            "takes."
        ) from error
    state = _fitted(wanted, state, source.label)
    try:
        return flax.from_state_dict(like, state)
    except Exception as error:  # noqa: BLE001 -- of whatever class it is
        raise StructureMismatchError(
            f"flax cannot put what `{source.label}` holds into a `{type(like).__qualname__}`: "
            f"{_in_words(error)}. Give the template that the file was written from."
        ) from None


_MAX_NUMBER = 9  # bytes of a number, or of another value without parts


def _require_no_number(start: bytes) -> None:
    """Raises `ValueError` if a file begins with a number and goes on after it, as any text does: it may never end."""
    kind = start[0] if start else 0
    # Small numbers, nothing and truth values, and floats and large numbers.
    is_number = kind < 0x80 or kind >= 0xE0 or 0xC0 <= kind < 0xC4 or 0xCA <= kind < 0xD4
    if len(start) > _MAX_NUMBER and is_number:
        raise ValueError("it has more after its first value, which is a number")


def _require_dtypes(data: bytes) -> None:
    """Raises `ValueError` if an array has a dtype that is no number's: flax hands any text to NumPy."""
    msgpack: Any = importlib.import_module("msgpack")

    def check(code: int, extension: bytes) -> None:
        if code in (_ARRAY, _SCALAR):
            unpacker = msgpack.Unpacker(raw=True)
            unpacker.feed(extension[:_MAX_START])  # the data comes after it
            if unpacker.read_array_header() != 3:
                raise ValueError("an array that is not made of its shape, its dtype and its data")
            unpacker.skip()
            name = unpacker.unpack()
            if type(name) is not bytes or not is_dtype_of_flax(name.decode("latin-1")):
                raise ValueError(f"an array of the dtype {name!r:.100}, which is none of numbers")

    msgpack.unpackb(data, ext_hook=check, raw=False, strict_map_key=False)


_ARRAY, _SCALAR = 1, 3  # what flax calls them
_MAX_START = 4096


def _flax() -> Any:
    try:
        return importlib.import_module("flax.serialization")
    except ImportError as error:
        raise CompatibilityError(
            "Files of `flax.serialization` are read by flax, which is not installed. Install it:\n    pip install flax"
        ) from error


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {printable(str(error)[:200])}"


def _items(state: Any, paths: Paths) -> Iterator[tuple[int, Any]]:
    """All that is in a state dictionary, each with its path."""
    stack: list[tuple[int, Any]] = [(0, state)]
    while stack:
        at, value = stack.pop()
        yield at, value
        if type(value) is dict:
            stack += [(paths.below(at, jtu.DictKey(key)), part) for key, part in reversed(value.items())]
        elif type(value) is list:
            stack += [(paths.below(at, jtu.SequenceKey(i)), part) for i, part in reversed([*enumerate(value)])]


def _require_values(state: Any, label: str) -> None:
    paths = Paths()
    for at, value in _items(state, paths):
        keys = [key for key in value if type(key) is not str] if type(value) is dict else []
        if keys or not isinstance(value, (dict, list, *_VALUES)):
            what = f"a key of type `{type(keys[0]).__name__}`" if keys else f"a `{type(value).__name__}`"
            raise FormatError(
                f"`{label}` has {what} at `{printable(paths.text(at))}`, which flax does not write. Give the file as "
                "flax wrote it."
            )
        if isinstance(value, np.ndarray) and value.dtype.kind == "b" and value.size:
            data = value.reshape(-1).view(np.uint8)
            if data.max() > 1:  # a path is made only to be told
                require_bools(data, value.dtype, paths.text(at))


def _with_own_arrays(state: Any) -> Any:
    """The same state, changed in place, with arrays that can be written to; they were views of what was read."""
    root = {"": state}
    stack: list[Any] = [root]
    while stack:
        part = stack.pop()
        for key, value in part.items() if type(part) is dict else enumerate(part):
            if isinstance(value, np.ndarray):
                part[key] = np.array(value)
            elif type(value) is dict or type(value) is list:
                stack.append(value)
    return root[""]


def _fitted(wanted: Any, found: Any, label: str) -> Any:
    """The state dictionary of a file, with arrays of the library that a template's has, if the two fit."""
    fit = Fit()
    result: dict[str, Any] = {}

    def meet(pair: Pair) -> Iterator[Pair]:
        want, have, at, (into, key) = pair
        if type(want) is not dict or type(have) is not dict:
            value = _fitting(want, have)
            if value is _MISFIT:
                fit.differs(at, told(have), told(want))
            else:
                into[key] = fit.value(want, at, value)
            return
        into[key] = {}
        for name, its, theirs in matched(want, have, is_short=False):
            below = fit.paths.below(at, jtu.DictKey(name))
            if is_alone(its, theirs):
                fit.differs(below, *(NOTHING if each is MISSING else told(each) for each in (theirs, its)))
            else:
                yield Pair(its, theirs, below, (into[key], name))

    for _ in differences_from(Pair(wanted, found, 0, (result, "")), meet):
        pass
    fit.require(label, is_in_order=False)
    return result[""]


_MISFIT: Any = object()


def _fitting(want: Any, have: Any) -> Any:
    if isinstance(want, Arrays):
        fits = isinstance(have, np.ndarray | np.generic) and not is_key(want)
        if not fits or have.shape != want.shape or have.dtype != want.dtype:
            return _MISFIT
        return np.array(have) if isinstance(want, np.ndarray) else jnp.array(have)
    if isinstance(want, Numbers):  # a counter is a number at first, and an array once it was in a transform
        if isinstance(have, np.ndarray) and not have.shape:
            return np.array(have)  # a copy, which can be written to
        return have if isinstance(have, Numbers) else _MISFIT
    return have if isinstance(want, str | bytes | None) and type(want) is type(have) else _MISFIT
