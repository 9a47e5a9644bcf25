"""Texts as people get to see them: those of others without what a terminal would obey, and values short.

Names of tensors, keys, fields and classes and what is saved beside a tree may come from a file that anyone has made.
They reach error messages, reports and the command line, and from there a terminal or a log. There a control character
could clear the screen, a newline could begin a line that looks like one of ours, and a character that turns the
direction of writing could make a text look like another.

A message has lines of its own, so newlines cannot be escaped once it is put together. Each text of others is therefore
made `printable` where it enters a message. `SharedTreeError` makes `printable_lines` of every message besides: whatever
was forgotten can do no more than break a line.

Values are printed in bounded time, whatever their `__repr__` does.
"""

import collections
import dataclasses
import functools
import pathlib
import re
import reprlib
import types
from collections.abc import Sequence
from typing import Any

import jax

from ._class_attributes import MAIN, verified_name_of

# What `str.isprintable` lets pass, although nothing is seen of it: Unicode's default ignorable characters. Those of the
# category Cf are not printable to Python either.
_INVISIBLE = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")


def printable(text: str) -> str:
    r"""A text on one line, in which what is not printable is an escape.

    Args:
        text: any text, lone surrogates included.

    Returns:
        The text itself if there is nothing to escape. A backslash is no escape, so the text cannot be told from one
        that has the escape in it.

    Cost: one look at each character.

    Example:
        >>> print(printable("a\x1b[2Jb\nc"))
        a\x1b[2Jb\nc
    """
    if text.isprintable() and (text.isascii() or not _INVISIBLE.search(text)):
        return text
    return "".join(map(_escaped, text))


def printable_lines(text: str) -> str:
    r"""The same for a text that has lines of its own, which stay lines.

    Example:
        >>> print(printable_lines("one\r\ntwo\x07"))
        one\r
        two\x07
    """
    return "\n".join(map(printable, text.split("\n")))


def _escaped(char: str) -> str:
    if char.isprintable() and not _INVISIBLE.match(char):
        return char
    return ascii(char)[1:-1]


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
        name = public_name(x)
        if name is not None:
            return name
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


def public_name(value: Any) -> str | None:
    """The name under which people import a function or another callable object; None if there is none.

    JAX's `relu` prints itself as a private object with an address, and a function of the program with one.
    """
    if not callable(value) or isinstance(value, type):
        return None
    try:
        name = verified_name_of(value)
    except Exception:  # noqa: BLE001 -- an object may answer anything when it is asked for its name
        return None
    if name is None:
        return None
    module, _, qualname = name.partition(":")
    return printable(qualname if module in (MAIN, "builtins") else f"{module}.{qualname}")


_printer = _Printer()


def shown(value: Any) -> str:
    """A short `repr`. Containers are cut off, so nothing is printed for ever; one that raises is named by its class."""
    text = _printer.repr(value)
    return text if len(text) <= _MOST else f"{text[:_MOST]}..."


def name_of_class(value: Any) -> str:
    """What messages call the class of a value: of arrays and tracers, whose own classes are private, JAX's name."""
    return "jax.Array" if isinstance(value, jax.Array) else type(value).__name__


def listed(paths: Sequence[str]) -> str:
    """Paths in a sentence."""
    quoted = [f"`{path}`" for path in paths[:MOST_PATHS]]
    if len(paths) > MOST_PATHS:
        quoted.append(f"{len(paths) - MOST_PATHS} more")
    return f"{', '.join(quoted[:-1])} and {quoted[-1]}" if len(quoted) > 1 else quoted[0]
