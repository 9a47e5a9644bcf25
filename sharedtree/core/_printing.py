"""Text for people: foreign text without control characters, and values in a short form.

    shown([1, 2, 3, 4, 5, 6, 7, 8])     →   [1, 2, 3, 4, 5, 6, ...]

Names of tensors, keys, fields and classes may come from a file that anyone has made. They reach error messages,
reports and the command line, and from there a terminal or a log. There a control character could clear the screen, a
newline could begin a line that looks like one of ours, and a character that changes the direction of writing could make
a text look like another one.

A message has lines of its own, so newlines can no longer be escaped once it is complete. So each foreign text is made
`printable` where it enters a message. Besides, `SharedTreeError` makes `printable_lines` of every message: a text that
was forgotten can only break a line.

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

# Invisible characters for which `str.isprintable` is True: Unicode's default ignorable ones. The category Cf is not
# listed, since for its characters `str.isprintable` is False.
_INVISIBLE = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")


def printable(text: str) -> str:
    r"""Escapes the unprintable characters of a text, newlines included.

    Args:
        text: Any text, lone surrogates included.

    Returns:
        A text on one line; the text itself if there is nothing to escape. Backslashes are not escaped, so two texts may
        have one result.

    Cost: one look at each character.

    Example:
        >>> print(printable("a\x1b[2Jb\nc"))
        a\x1b[2Jb\nc
    """
    if text.isprintable() and (text.isascii() or not _INVISIBLE.search(text)):
        return text
    return "".join(map(_escaped, text))


def printable_lines(text: str) -> str:
    r"""Escapes the unprintable characters of a text, except newlines.

    Example:
        >>> print(printable_lines("one\r\ntwo\x07"))
        one\r
        two\x07
    """
    return "\n".join(map(printable, text.split("\n")))


def _escaped(char: str) -> str:
    """Returns a character, or its escape if it cannot be printed."""
    if char.isprintable() and not _INVISIBLE.match(char):
        return char
    return ascii(char)[1:-1]


_MAX_LENGTH = 80

MOST_PATHS = 20
"""The largest number of paths in a message. An error has all of them in its attribute."""

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
    """Prints plain containers cut off. Prints other ones by their class: they would print each object once per path."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = _MAX_LENGTH

    def repr_instance(self, x: Any, level: int) -> str:
        """Prints a value of a class for which `reprlib` has no method."""
        cls = type(x)
        name = public_name(x)
        if name is not None:
            return name
        # These are cut before they are printed: one that comes from a file may be long, and be printed at many paths.
        if cls in _PATHS:
            return f"{cls.__name__}({str(x)[:_MAX_LENGTH]!r})"
        if cls is bytes:
            return repr(x[:_MAX_LENGTH])
        if isinstance(x, tuple) and hasattr(x, "_fields"):
            return self._repr_namedtuple(x, level)
        # `reprlib` prints plain lists, tuples and dictionaries itself. Here are their subclasses, and other containers.
        if isinstance(x, _CONTAINERS) or (dataclasses.is_dataclass(x) and not isinstance(x, type)):
            return f"<{type(x).__qualname__}>"
        return super().repr_instance(x, level)

    def _repr_namedtuple(self, x: Any, level: int) -> str:
        """Prints a namedtuple with the names of its fields, cut off like a tuple."""
        shown_fields = list(zip(x._fields, x, strict=False))[: self.maxtuple] if level > 0 else []
        parts = [f"{name}={self.repr1(part, level - 1)}" for name, part in shown_fields]
        parts += ["..."] if len(x) > len(parts) else []
        return f"{type(x).__qualname__}({', '.join(parts)})"


def public_name(value: Any) -> str | None:
    """Returns the name under which a user imports a callable: `jax.nn.relu`; None if there is none, and for classes.

    The `repr` of `jax.nn.relu` names a private object and an address, that of a user's function has an address.
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
    """Returns a `repr` cut off at 80 characters, in bounded time. If its `__repr__` raises, prints its class."""
    text = _printer.repr(value)
    return text if len(text) <= _MAX_LENGTH else f"{text[:_MAX_LENGTH]}..."


def name_of_class(value: Any) -> str:
    """Returns the name of a value's class for messages. Arrays and tracers, of private classes, give "jax.Array"."""
    return "jax.Array" if isinstance(value, jax.Array) else type(value).__name__


def listed(paths: Sequence[str]) -> str:
    """Joins paths for a sentence, at most `MOST_PATHS` of them: "`a`, `b` and `c`"."""
    quoted = [f"`{path}`" for path in paths[:MOST_PATHS]]
    if len(paths) > MOST_PATHS:
        quoted.append(f"{len(paths) - MOST_PATHS} more")
    return f"{', '.join(quoted[:-1])} and {quoted[-1]}" if len(quoted) > 1 else quoted[0]
