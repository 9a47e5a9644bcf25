"""The files of `flax.serialization`: a state dictionary, nested and with texts for keys, as msgpack.

Flax reads and writes them, arrays of more than 1 GiB in pieces included; it makes arrays of bytes and calls nothing by
the file's word. Here is checked what it does not look at: shapes, dtypes, names, and whether anything is left over.
"""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util as jtu

from .._errors import CompatibilityError, CorruptFileError, FormatError, StructureMismatchError
from .._printable import printable
from ._foreign_differences import NOTHING, Numbers, Ties, described, is_key, require_a_fit
from ._refusals import Problem, unserialisable
from ._sources import Source
from ._template import Difference

_VALUES = (np.ndarray, jax.Array, np.generic, bool, int, float, complex, str, bytes, type(None))


def read_state(source: Source, like: Any) -> Any:
    """A tree like a template, with the values of a file; without one, dictionaries of NumPy arrays.

    Arguments and errors are those of `convert`.
    """
    flax = _flax()
    try:
        state = flax.msgpack_restore(bytes(source.read(0, source.size)))
    except Exception as error:  # msgpack, NumPy and flax each have errors of their own
        if "incomplete input" in str(error):
            raise CorruptFileError(f"`{source.label}` ends too early: it was cut short. Copy it again.") from error
        raise FormatError(
            f"`{source.label}` is no file of `flax.serialization` "
            f"({type(error).__name__}: {printable(str(error)[:200])}). Give the file as flax wrote it."
        ) from error
    _require_values(state, source.label)
    if like is None:
        return state
    state = _fitted(flax.to_state_dict(like), state, source.label)
    try:
        return flax.from_state_dict(like, state)
    except Exception as error:  # of whatever class it is
        raise StructureMismatchError(
            f"flax cannot put what `{source.label}` holds into a `{type(like).__qualname__}`: "
            f"{type(error).__name__}: {printable(str(error)[:200])}. Give the template that the file was written from."
        ) from error


def state_bytes(tree: Any) -> bytes:
    """What `flax.serialization.to_bytes` makes of a tree. Raises `UnserialisableError` if it knows some of it not."""
    flax = _flax()
    state = flax.to_state_dict(tree)
    problems = [
        Problem(path, f"{described(value)}, which `flax.serialization` has no form for", _OTHERWISE)
        for path, value in _items(state)
        if type(value) is not dict and (not isinstance(value, _VALUES) or is_key(value) or _holds_objects(value))
    ]
    if not problems:
        try:
            return flax.msgpack_serialize(state, in_place=True)
        except Exception as error:  # noqa: BLE001 -- numbers of more than 64 bits, texts with surrogates
            problems = [Problem("", f"what msgpack cannot hold ({type(error).__name__}: {error})", _OTHERWISE)]
    raise unserialisable(problems)


_OTHERWISE = "Register its class with flax, or write what it holds as arrays: `sharedtree.state(model)` has them."


def _flax() -> Any:
    try:
        return importlib.import_module("flax.serialization")
    except ImportError as error:
        raise CompatibilityError(
            "Files of `flax.serialization` are read and written by flax, which is not installed. Install it:\n"
            "    pip install flax"
        ) from error


def _holds_objects(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.hasobject


def _items(state: Any) -> list[tuple[str, Any]]:
    """All that is in a state dictionary, each with its path."""
    found, stack = [], [("", state)]
    while stack:
        path, value = stack.pop()
        found.append((path, value))
        if type(value) is dict:
            stack += [(path + jtu.keystr((jtu.DictKey(key),)), part) for key, part in reversed(value.items())]
    return found


def _require_values(state: Any, label: str) -> None:
    for path, value in _items(state):
        if type(value) is not dict and type(value) is not list and not isinstance(value, _VALUES):
            raise FormatError(
                f"`{label}` has a `{type(value).__name__}` at `{printable(path)}`, which flax does not write. Give the "
                "file as flax wrote it."
            )


def _fitted(wanted: Any, found: Any, label: str) -> Any:
    """The state dictionary of a file, with arrays of the library that a template's has, if the two fit."""
    differences: list[Difference] = []
    ties = Ties()
    result: dict[str, Any] = {}
    stack: list[tuple[str, Any, Any, dict[str, Any], str]] = [("", wanted, found, result, "")]
    while stack:
        path, want, have, into, key = stack.pop()
        if type(want) is dict and type(have) is dict:
            into[key] = {}
            for name in reversed({**want, **have}):
                step = path + jtu.keystr((jtu.DictKey(name),))
                if name not in have:
                    differences.append(Difference(step, NOTHING, described(want[name])))
                elif name not in want:
                    differences.append(Difference(step, described(have[name]), NOTHING))
                else:
                    stack.append((step, want[name], have[name], into[key], name))
            continue
        value = _fitting(want, have)
        if value is _MISFIT:
            differences.append(Difference(path, described(have), described(want)))
            continue
        into[key], difference = ties.value(want, path, value)
        differences += [] if difference is None else [difference]
    require_a_fit(sorted(differences), label)
    return result[""]


_MISFIT: Any = object()


def _fitting(want: Any, have: Any) -> Any:
    if isinstance(want, jax.Array | jax.ShapeDtypeStruct | np.ndarray):
        fits = isinstance(have, np.ndarray | np.generic) and not is_key(want)
        if not fits or have.shape != want.shape or have.dtype != want.dtype:
            return _MISFIT
        return np.array(have) if isinstance(want, np.ndarray) else jnp.array(have)
    if isinstance(want, Numbers):  # a counter is a number at first, and an array once it was in a transform
        is_number = isinstance(have, Numbers) or (isinstance(have, np.ndarray) and not have.shape)
        return have if is_number else _MISFIT
    return have if isinstance(want, str | bytes | None) and type(want) is type(have) else _MISFIT
