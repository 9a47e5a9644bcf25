"""Whose function a warning is about: what its text says, and where Python takes it to come from.

A warning that is given when a function is traced comes from deep inside JAX, so the line that gave it says nothing, and
Python, which shows one text from one line once, would show it for the first function and for no other. Each warning is
therefore given in the name of the function that was wrapped: its text names it with file and line, and
`warnings.warn_explicit` says that it comes from where the function is defined. What has been shown is remembered for
each code object, so a notebook cell that is run again, which defines its function again, warns again.

    A tie was lost in `step` (train.py:12). `model.embed` and `model.head` were one object when ...
"""

import functools
import inspect
import sys
import threading
import types
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from ._by_identity import WeakIdentityDict
from ._errors import UntiedError, UntiedWarning
from ._locks import Lock

_PACKAGES = ("sharedtree", "jax", "equinox", "optax")


class Definition(NamedTuple):
    """Where a function is defined.

    Attributes:
        name: its qualified name.
        filename: the file, or what the compiler was told, such as the name of a notebook cell.
        lineno: the first line, that of its first decorator if there is one.
        module: the name of its module.
        shown: what Python has shown for it; the `registry` of `warnings.warn_explicit`.
    """

    name: str
    filename: str
    lineno: int
    module: str
    shown: dict[Any, Any]

    def __str__(self) -> str:
        return f"`{self.name}` ({self.filename}:{self.lineno})"


def definition_of(function: Any) -> Definition:
    """The definition of the innermost function in wrappers, partials, methods and callable objects."""
    seen: list[Any] = []
    while not isinstance(function, types.CodeType) and not any(function is each for each in seen):
        seen.append(function)
        function = _inside(function)
    owner = next((each for each in reversed(seen) if hasattr(each, "__qualname__")), type(seen[0]))
    module = str(getattr(owner, "__module__", None) or "<unknown>")
    if not isinstance(function, types.CodeType):  # one that is written in C
        return Definition(str(owner.__qualname__), module, 1, module, {})
    return _of_code(function, str(owner.__qualname__), module)


def _inside(function: Any) -> Any:
    """What a callable calls: another one, or the code of a function; itself if neither is known."""
    if isinstance(function, functools.partial):
        return function.func
    if isinstance(function, types.MethodType):
        return function.__func__
    wrapped = inspect.getattr_static(function, "__wrapped__", None)
    if wrapped is not None:
        return getattr(function, "__wrapped__", function)
    if isinstance(function, types.FunctionType):
        return function.__code__
    call = inspect.getattr_static(type(function), "__call__", None)
    return call if isinstance(call, types.FunctionType) else function


def definition_of_caller() -> Definition:
    """The definition of the innermost function on the stack that belongs to none of the libraries involved."""
    frame: types.FrameType | None = sys._getframe(1)  # noqa: SLF001 -- `inspect.stack` reads every source file
    last = frame
    while frame is not None:
        last = frame
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in _PACKAGES:
            break
        frame = frame.f_back
    assert last is not None
    return _of_code(last.f_code, last.f_code.co_qualname, str(last.f_globals.get("__name__", "<unknown>")))


_shown: WeakIdentityDict[dict[Any, Any]] = WeakIdentityDict()
_lock = Lock()


def _of_code(code: types.CodeType, name: str, module: str) -> Definition:
    # By identity, since code compiled from one cell twice is equal.
    with _lock:
        shown = _shown.get(code)
        if shown is None:
            shown = _shown[code] = {}
    return Definition(name, code.co_filename, code.co_firstlineno, module, shown)


def warn_about(definition: Definition, message: str, category: type[Warning]) -> None:
    """Gives a warning in the name of a function."""
    warnings.warn_explicit(
        message,
        category,
        definition.filename,
        definition.lineno,
        module=definition.module,
        registry=definition.shown,
    )


def report_untied(
    on_untie: Literal["warn", "error", "ignore"],
    definition: Definition,
    what: str,
    fixes: str,
    paths: Sequence[str],
    *,
    verb: str = "lost",
    count: int = 1,
    may_wait: bool = False,
) -> None:
    """Says that a tie was lost; every `UntiedWarning` and `UntiedError` comes from here.

    Args:
        on_untie: of the policy.
        definition: the function in which it happened.
        what: sentences that name the paths and say what became of them.
        fixes: lines, with the code indented by four spaces.
        paths: for programs that catch the error.
        verb: what became of the ties, in the first sentence.
        count: how many ties it happened to.
        may_wait: whether the end of a trace that is under way says it, unless that has to say the same.

    Raises:
        UntiedError: if the policy says so.
    """
    if on_untie == "ignore":
        return
    ties = "A tie was" if count == 1 else f"{count} ties were"
    message = f"{ties} {verb} in {definition}. {what}\n{fixes}"
    if on_untie == "error":
        raise UntiedError(message, paths)
    if may_wait and _waiting.lists:
        _waiting.lists[-1].append((definition, message))
    else:
        warn_about(definition, message, UntiedWarning)


class _Waiting(threading.local):
    def __init__(self) -> None:
        self.lists: list[list[tuple[Definition, str]]] = []  # one for each trace that is under way


_waiting = _Waiting()  # a trace runs in one thread


@contextmanager
def deferring_warnings() -> Iterator[list[tuple[Definition, str]]]:
    """Collects the warnings inside the block that may wait. They are given at once if the block raises."""
    waiting: list[tuple[Definition, str]] = []
    _waiting.lists.append(waiting)
    try:
        yield waiting
    except BaseException:
        _waiting.lists.pop()
        give_warnings(waiting)
        raise
    else:
        _waiting.lists.pop()


def give_warnings(waiting: list[tuple[Definition, str]]) -> None:
    """Gives warnings that have waited."""
    while waiting:
        definition, message = waiting.pop(0)
        warn_about(definition, message, UntiedWarning)
