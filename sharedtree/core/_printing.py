"""Text for people: foreign text without control characters, and values in a short form.

    shown([1, 2, 3, 4, 5, 6, 7, 8])     →   [1, 2, 3, 4, 5, 6, ...]

Names of tensors, keys, fields and classes may come from a file that anyone has made. They reach error messages,
reports and the command line, and from there a terminal or a log. There a control character could clear the screen, a
newline could begin a line that looks like one of ours, and a character that changes the direction of writing could make
a text look like another one.

Texts of others, such as these names, are *foreign* here. A complete message has newlines of its own, and those of a
foreign text can no longer be told from these. So each foreign text is made `printable` before it enters a message.
Besides, `SharedTreeError` makes `printable_lines` of every message: if a foreign text was forgotten, it can still break
a line, but do nothing worse.

`shown` takes bounded time, because it does not call the `__repr__` of a container.
"""

import ast
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
        A text on one line; the text itself if there is nothing to escape. A backslash is printable and stays, so two
        different texts may have the same result.

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
    r"""Returns a character, or its escape if it cannot be printed: `\x1b`, for example."""
    if char.isprintable() and not _INVISIBLE.match(char):
        return char
    return ascii(char)[1:-1]


_MAX_LENGTH = 80
"""The number of characters that `shown` shows of a value, and of a text in it."""

MOST_PATHS = 20
"""The largest number of paths in a message. The error has all of them in an attribute, too."""

# Classes whose subclasses may print all of their items, each once for each path to it.
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
    """Makes short texts of values. Of plain containers it shows the first few items.

    For subclasses of plain containers, for other containers and for dataclasses the text is only the class. Their
    `__repr__` would print a shared part once for each path to it. This may take exponentially long.
    """

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = _MAX_LENGTH

    def repr_instance(self, x: Any, level: int) -> str:
        """Returns the text of a value of a class without a method in `reprlib`. `reprlib` calls it.

        Args:
            x: the value.
            level: how many more levels of containers to enter.
        """
        cls = type(x)
        name = public_name(x)
        if name is not None:
            return name
        # The `repr` of a whole file path, or of all bytes, would take too long: it may have come from a file, be very
        # long, and stand at many paths. So only its beginning is taken.
        if cls in _PATHS:
            return f"{cls.__name__}({str(x)[:_MAX_LENGTH]!r})"
        if cls is bytes:
            return repr(x[:_MAX_LENGTH])
        if isinstance(x, tuple) and hasattr(x, "_fields"):
            return self._repr_namedtuple(x, level)
        # `reprlib` has methods of its own for plain lists, tuples and dictionaries. So any container that comes here is
        # an instance of a subclass, or of another class.
        if isinstance(x, _CONTAINERS) or (dataclasses.is_dataclass(x) and not isinstance(x, type)):
            return f"<{type(x).__qualname__}>"
        return super().repr_instance(x, level)

    def _repr_namedtuple(self, x: Any, level: int) -> str:
        """Returns the text of a namedtuple, with the names of its fields. Of many fields, only the first few are shown.

        Args:
            x: the namedtuple.
            level: how many more levels of containers to enter. At 0, no field is shown.
        """
        shown_fields = list(zip(x._fields, x, strict=False))[: self.maxtuple] if level > 0 else []
        parts = [f"{name}={self.repr1(part, level - 1)}" for name, part in shown_fields]
        parts += ["..."] if len(x) > len(parts) else []
        return f"{type(x).__qualname__}({', '.join(parts)})"


def public_name(value: Any) -> str | None:
    """Returns the name by which a user finds a callable: "jax.nn.relu". Functions of the main program have no module.

    Texts have this name in place of the `repr`. That of `jax.nn.relu` has a private name and an address, and that of a
    user's function has an address.

    Returns:
        The name. None if there is none, and for classes and for values that cannot be called.
    """
    if not callable(value) or isinstance(value, type):
        return None
    try:
        name = verified_name_of(value)
    except Exception:  # noqa: BLE001 -- an object may answer anything when it is asked for its name
        return None
    if name is None:
        return None
    # For example "jax.nn:relu" → "jax.nn", "relu".
    module, _, qualname = name.partition(":")
    return printable(qualname if module in (MAIN, "builtins") else f"{module}.{qualname}")


_printer = _Printer()


def shown(value: Any) -> str:
    """Returns a short text for a value, in bounded time: its `repr`, cut off at 80 characters.

    The text of a callable with a public name is that name. The text of a dataclass, of an instance of a subclass of a
    plain container, and of a value whose `__repr__` raises is its class.
    """
    text = _printer.repr(value)
    return text if len(text) <= _MAX_LENGTH else f"{text[:_MAX_LENGTH]}..."


def name_of_class(value: Any) -> str:
    """Returns the name of a value's class for messages. For arrays and tracers, of private classes, "jax.Array"."""
    return "jax.Array" if isinstance(value, jax.Array) else type(value).__name__


_VARIABLE = re.compile(r"([^\W\d]\w*)(.*)", re.DOTALL)
"""A path in a message: the variable with which it begins, and the rest."""


def code_that_unties(tied: str, separate: Sequence[str]) -> str:
    """Returns code that gives objects of their own to some places of a tie, for errors. Ties inside them are kept.

    Without `where`, `sharedtree.untie` would also cut the ties inside of two models that are tied as a whole.

    Args:
        tied: The path that keeps the object, beginning with a variable: "init['online']".
        separate: The paths that get objects of their own, each beginning with a variable.

    Returns:
        A line of code, indented by four spaces. If a path cannot be written as code (see `where_argument`), the code
        undoes all ties, and a comment says so.

    Example:
        >>> print(code_that_unties("init['online']", ["init['target']"]))
            init = sharedtree.untie(init, lambda m: m['target'])
        >>> print(code_that_unties("a", ["b.head"]))
            a, b = sharedtree.untie((a, b), lambda m: m[1].head)
    """
    # (variable, rest of the path)
    parts: list[tuple[str, str]] = []
    for path in (tied, *separate):
        match = _VARIABLE.fullmatch(path)
        parts.append((match[1], match[2]) if match else ("model", path))
    variables = list(dict.fromkeys(variable for variable, _ in parts))
    names = ", ".join(variables)
    value = names if len(variables) == 1 else f"({names})"
    nodes: list[str] = []
    for variable, rest in parts[1:]:
        index = "" if len(variables) == 1 else f"[{variables.index(variable)}]"
        nodes.append(f"m{index}{rest}")
    where = where_argument(nodes)
    if not where:
        return f"    {names} = sharedtree.untie({value})      # also the ties inside"
    return f"    {names} = sharedtree.untie({value}{where})"


def where_argument(nodes: Sequence[str]) -> str:
    """Returns code for an argument `where`, with the comma before it.

    Args:
        nodes: Expressions of a tree `m`, such as "m.head".

    Returns:
        Such as ", lambda m: m.head". Empty if an expression is not Python, as `m[<flat index 0>]`, JAX's text for a
        child without a name.
    """
    where = nodes[0] if len(nodes) == 1 else f"({', '.join(nodes)})"
    try:
        ast.parse(where)
    except SyntaxError:
        return ""
    return f", lambda m: {where}"


def listed(paths: Sequence[str]) -> str:
    """Joins one or more paths for a sentence: "`a`, `b` and `c`", or "`a`, ..., `t` and 3 more"."""
    quoted = [f"`{path}`" for path in paths[:MOST_PATHS]]
    if len(paths) > MOST_PATHS:
        quoted.append(f"{len(paths) - MOST_PATHS} more")
    return f"{', '.join(quoted[:-1])} and {quoted[-1]}" if len(quoted) > 1 else quoted[0]
