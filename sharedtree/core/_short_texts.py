"""Values as errors and tables print them: short, in bounded time, and whatever their `__repr__` does."""

import collections
import dataclasses
import functools
import pathlib
import reprlib
import types
from collections.abc import Sequence
from typing import Any

import equinox as eqx

_MOST = 80

MOST_PATHS = 20
"""How many paths a text names at most. All are attributes of the error or the warning."""

_CONTAINERS = (
    slice,
    tuple,
    list,
    dict,
    set,
    frozenset,
    collections.deque,
    functools.partial,
    types.MethodType,
    eqx.Module,
)

_PATHS = (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.WindowsPath, pathlib.PureWindowsPath)


class _Printer(reprlib.Repr):
    """Cuts off plain containers; of others, which print all that they hold, once for each path, it says the class."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = _MOST

    def repr_instance(self, x: Any, level: int) -> str:
        """Of what has no method of its own."""
        cls = type(x)
        # These print the whole text before it is cut off, and one of a file may be long and referred to often.
        if cls in _PATHS:
            return f"{cls.__name__}({str(x)[:_MOST]!r})"
        if cls is bytes:
            return repr(x[:_MOST])
        if isinstance(x, tuple) and hasattr(x, "_fields"):
            return self._repr_namedtuple(x, level)
        if isinstance(x, _CONTAINERS) or (dataclasses.is_dataclass(x) and not isinstance(x, type)):
            return f"<{type(x).__qualname__}>"
        return super().repr_instance(x, level)

    def _repr_namedtuple(self, x: Any, level: int) -> str:
        """With the names of its fields, and cut off as a tuple is."""
        shown_fields = list(zip(x._fields, x, strict=False))[: self.maxtuple] if level > 0 else []
        parts = [f"{name}={self.repr1(part, level - 1)}" for name, part in shown_fields]
        parts += ["..."] if len(x) > len(parts) else []
        return f"{type(x).__qualname__}({', '.join(parts)})"


_printer = _Printer()


def shown(value: Any) -> str:
    """A short `repr`. Containers are cut off, so nothing is printed for ever; one that raises is named by its class."""
    text = _printer.repr(value)
    return text if len(text) <= _MOST else f"{text[:_MOST]}..."


def listed(paths: Sequence[str]) -> str:
    """Paths in a sentence."""
    quoted = [f"`{path}`" for path in paths[:MOST_PATHS]]
    if len(paths) > MOST_PATHS:
        quoted.append(f"{len(paths) - MOST_PATHS} more")
    return f"{', '.join(quoted[:-1])} and {quoted[-1]}" if len(quoted) > 1 else quoted[0]
