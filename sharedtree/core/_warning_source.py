"""Warnings with the user's function as their source, in the text and for Python's warning filters.

    A tie was lost in `step` (train.py:12). `model.embed` and `model.head` were one object when ...

Warnings arise at trace time, deep inside JAX. The line there says nothing to a user. Also, Python shows one text from
one line only once, so only the first of several functions would be warned about. So each warning names the wrapped
function with file and line, and `warnings.warn_explicit` declares its definition as the source. What Python has shown
is stored per code object: a notebook cell that is run again defines its function again, and warns again.
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
    """Place of a function's definition.

    Attributes:
        name: The qualified name of the function.
        filename: The file, or the name of a notebook cell.
        lineno: The first line, which is the first decorator's if there is one.
        module: The name of the module.
        shown: The warnings already shown for it; the `registry` of `warnings.warn_explicit`.
    """

    name: str
    filename: str
    lineno: int
    module: str
    shown: dict[Any, Any]

    def __str__(self) -> str:
        return f"`{self.name}` ({self.filename}:{self.lineno})"


def definition_of(function: Any) -> Definition:
    """Returns the definition of the innermost function in wrappers, partials, methods and callable objects."""
    # Unwrap until there is code, or until a callable comes again: one that wraps nothing is its own inside.
    layers: list[Any] = []
    while not isinstance(function, types.CodeType) and not any(function is layer for layer in layers):
        layers.append(function)
        function = _inside(function)
    # The innermost layer with a name gives it; an object without one is called by its class.
    owner = next((layer for layer in reversed(layers) if hasattr(layer, "__qualname__")), type(layers[0]))
    module = str(getattr(owner, "__module__", None) or "<unknown>")
    # A function written in C has no code.
    if not isinstance(function, types.CodeType):
        return Definition(str(owner.__qualname__), module, 1, module, {})
    return _definition_of_code(function, str(owner.__qualname__), module)


def _inside(function: Any) -> Any:
    """Removes one layer: returns the wrapped callable, or a function's code; the argument itself if it has neither."""
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
    """Returns the definition of the user's function: the innermost one on the stack outside of `_PACKAGES`.

    If there is none, it is the outermost function on the stack.
    """
    frame: types.FrameType | None = sys._getframe(1)  # noqa: SLF001 -- `inspect.stack` reads every source file
    caller = frame
    while frame is not None:
        caller = frame
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in _PACKAGES:
            break
        frame = frame.f_back
    assert caller is not None
    code, module = caller.f_code, str(caller.f_globals.get("__name__", "<unknown>"))
    return _definition_of_code(code, code.co_qualname, module)


# By identity, since code compiled twice from one notebook cell is equal.
_shown: WeakIdentityDict[dict[Any, Any]] = WeakIdentityDict()
_lock = Lock()


def _definition_of_code(code: types.CodeType, name: str, module: str) -> Definition:
    """Makes the definition of a function with this code. All definitions of one code object share `shown`."""
    with _lock:
        shown = _shown.get(code)
        if shown is None:
            shown = _shown[code] = {}
    return Definition(name, code.co_filename, code.co_firstlineno, module, shown)


def warn_about(definition: Definition, message: str, category: type[Warning]) -> None:
    """Gives a warning with a function's definition as its source."""
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
    explanation: str,
    fixes: str,
    paths: Sequence[str],
    *,
    verb: str = "lost",
    count: int = 1,
    may_wait: bool = False,
) -> None:
    """Warns or raises because ties were lost. Every `UntiedWarning` and `UntiedError` comes from here.

    Args:
        on_untie: The setting of the policy.
        definition: The function in which it happened.
        explanation: Sentences with the paths and the reason.
        fixes: Lines of text and code. Code is indented by four spaces.
        paths: The paths, for programs that catch the error.
        verb: "lost" or "cut", for the first sentence.
        count: The number of ties.
        may_wait: True defers the warning to the end of the trace in progress, if there is one. Its own check may find
            the same loss, and then drops this warning.

    Raises:
        UntiedError: If `on_untie` is "error".
    """
    if on_untie == "ignore":
        return
    ties = "A tie was" if count == 1 else f"{count} ties were"
    message = f"{ties} {verb} in {definition}. {explanation}\n{fixes}"
    if on_untie == "error":
        raise UntiedError(message, paths)
    if may_wait and _traces.deferred:
        _traces.deferred[-1].append((definition, message))
    else:
        warn_about(definition, message, UntiedWarning)


class _ActiveTraces(threading.local):
    """The traces in progress in this thread. A trace runs in one thread.

    Attributes:
        deferred: One list of deferred warnings per trace, innermost last.
    """

    def __init__(self) -> None:
        self.deferred: list[list[tuple[Definition, str]]] = []


_traces = _ActiveTraces()


@contextmanager
def deferring_warnings() -> Iterator[list[tuple[Definition, str]]]:
    """Collects the deferrable warnings of the block. If the block raises, they are given at once."""
    deferred: list[tuple[Definition, str]] = []
    _traces.deferred.append(deferred)
    try:
        yield deferred
    except BaseException:
        _traces.deferred.pop()
        give_warnings(deferred)
        raise
    else:
        _traces.deferred.pop()


def give_warnings(deferred: list[tuple[Definition, str]]) -> None:
    """Gives deferred warnings, and removes them from the list."""
    while deferred:
        definition, message = deferred.pop(0)
        warn_about(definition, message, UntiedWarning)
