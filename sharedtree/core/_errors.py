"""Errors and warnings of the package, and the place in the user's code that each warning names.

    CycleError         an object contains itself      "A `Node` contains itself: it sits at `.a` and again, ..."
    UntiedWarning      a tie was lost                 "A tie was lost in `step` (train.py:12). ..."

There is one class for each way to fail. The first line of a message says what is wrong and names the paths. Then follow
the reason, in a sentence, and the fix, as code that runs. The paths are also an attribute, for programs that catch the
error.

Warnings arise at trace time, deep inside JAX, where the line number says nothing to a user. Besides, Python shows the
same text from the same line only once. If all warnings came from one line here, a second function with the same problem
would give no warning. So each warning names the wrapped function with file and line, and `warnings.warn_explicit`
declares the definition of this function as the source.

To show a warning once, Python keeps a list of the warnings already shown (a `registry`). Here each code object has a
list of its own. So if a notebook cell is run again, which defines its function again, it warns again.
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
from ._locks import Lock
from ._printing import printable_lines

# --- errors -----------------------------------------------------------------------------------------------------------


class SharedTreeError(Exception):
    """Base class of all errors of this package. Unprintable characters in a message are escaped.

    Attributes:
        paths: The paths involved, each as a text by `jax.tree_util.keystr`. The empty text is the root.

    Example:
        >>> import sharedtree as st
        >>> issubclass(st.errors.CycleError, st.SharedTreeError)
        True
    """

    paths: tuple[str, ...]

    def __init__(self, message: str, paths: Sequence[str] = ()) -> None:
        super().__init__(printable_lines(message))
        self.paths = tuple(paths)


class InconsistentSharingError(SharedTreeError, ValueError):
    """One object sits at several paths, and the transform would treat it differently at some of them.

    Attributes:
        paths: The paths of the object: the first eight for each treatment.
        treatments: The treatment at each of the paths, in words, in the same order.
    """

    treatments: tuple[str, ...]

    def __init__(self, message: str, paths: Sequence[str] = (), treatments: Sequence[str] = ()) -> None:
        super().__init__(message, paths)
        self.treatments = tuple(treatments)


class CycleError(SharedTreeError, ValueError):
    """An object contains itself. `paths` has its first path, and the path below itself where it comes again."""


class DepthError(SharedTreeError, RecursionError):
    """Containers are nested more deeply than JAX or Python can walk."""


class UntiedError(SharedTreeError, ValueError):
    """A tie was lost, under `Policy(on_untie="error")`. See `UntiedWarning`."""


class SharingMismatchError(SharedTreeError, ValueError, TypeError):
    """Two trees should have the same shape or the same ties, but they differ.

    If an option or a solution has the wrong shape, JAX raises a `ValueError`; for a carry, a branch or the result of a
    rule, a `TypeError`. This error is both, so programs that catch one of them catch it, too.

    Attributes:
        concerns_modules: True if one of the trees has modules. The package sets it to False on an error without
            modules, and then raises JAX's own error instead, which is clear in this case.
    """

    concerns_modules = True


class StaticTracerError(SharedTreeError, TypeError):
    """A function returns a tracer in a static leaf, in which the tracer would outlive its trace."""


class StaticComparisonError(SharedTreeError, TypeError):
    """A static leaf cannot be compared with `==`, so no call could reuse what was compiled for an earlier one."""


class ViewError(SharedTreeError, TypeError, AttributeError):
    """A `View` was used or set like an array, or its array cannot be computed.

    `sharedtree.unwrap` puts arrays in the place of views.
    """


class UnregisteredTypeError(SharedTreeError, TypeError):
    """A tree was expected, but neither JAX nor sharedtree can take this object apart."""


class ContextMismatchError(SharedTreeError, ValueError):
    """A structure was used with a structure of another `Context`, or without the earlier ones to which it refers."""


class UnserialisableError(SharedTreeError, TypeError):
    """Objects in a tree cannot be written to a file. The error lists all of them; no file was written.

    Attributes:
        paths: The paths of the objects.
        reasons: The reason for each object, in the order of `paths`.
    """

    reasons: tuple[str, ...]

    def __init__(self, message: str, paths: Sequence[str] = (), reasons: Sequence[str] = ()) -> None:
        super().__init__(message, paths)
        self.reasons = tuple(reasons)


class UntrustedTypeError(SharedTreeError, TypeError):
    """A file names untrusted classes or functions. The error lists all of them; nothing was imported.

    Attributes:
        paths: The first path of each class or function.
        names: The names, as `module:qualname`, in the order of `paths`.
    """

    names: tuple[str, ...]

    def __init__(self, message: str, paths: Sequence[str] = (), names: Sequence[str] = ()) -> None:
        super().__init__(message, paths)
        self.names = tuple(names)


class StructureMismatchError(SharedTreeError, ValueError):
    """The contents of a file or a state do not fit the classes, devices or trees of this program."""


class FormatError(SharedTreeError, ValueError):
    """A file is no sharedtree file, is malformed, or was written by a newer version."""


class CorruptFileError(SharedTreeError, OSError):
    """A file was damaged since it was written: it is too short, or its digests do not match.

    Attributes:
        paths: The names of the damaged tensors: their paths without the leading dot; empty for the header.
        tensor: The first of these names; None for the header.
        chunk: The number, from 0, of the damaged chunk of 4 MiB in this tensor; None if it is not known.
    """

    tensor: str | None
    chunk: int | None

    def __init__(self, message: str, paths: Sequence[str] = (), chunk: int | None = None) -> None:
        super().__init__(message, paths)
        self.tensor = paths[0] if paths else None
        self.chunk = chunk


class MissingStepError(SharedTreeError, FileNotFoundError):
    """The requested step is missing from a folder of checkpoints."""


class _PrintableWarning(UserWarning):
    """Base class of the warnings. As in errors, unprintable characters are escaped."""

    def __init__(self, message: str) -> None:
        super().__init__(printable_lines(message))


class UntiedWarning(_PrintableWarning):
    """A tie was lost: in a transform, between two calls, or on its way to an optimizer.

    The text names the function with file and line, the paths, and the calls that keep ties. Each tie gives one warning.
    The location of the warning is the definition of the function, so Python's warning filters tell functions apart.
    """


class RetraceWarning(_PrintableWarning):
    """A static value differs on every call, so every call is traced and compiled anew."""


class LostChangeWarning(_PrintableWarning):
    """A function changes state in its arguments, and the change is lost.

    The warning is given at trace time. The library of the changed object must be one that writes changes back itself,
    as Flax NNX, treex and `sharedtree.Module` do. And neither the option `in_place` of the transform nor a `Policy`
    says whether to write them back. For objects of other classes, the warning is given only inside a transform with
    `in_place=True`. There is none for an object returned by the function, nor under `jax.eval_shape` and other
    functions that run nothing.
    """


class UnsaidVariableWarning(_PrintableWarning):
    """An optimizer trains a Flax NNX variable, although its class is known neither as parameter nor as state."""


class CompatibilityError(SharedTreeError, ImportError):
    """A library needed by `sharedtree.compat` is absent, is another release, or lacks a name."""


# --- the source of warnings -------------------------------------------------------------------------------------------


# Functions of these packages are not the user's. Those of all other libraries, such as Flax, count as the user's.
_PACKAGES = ("sharedtree", "jax", "equinox", "optax")


class Definition(NamedTuple):
    """Place of a function's definition.

    Attributes:
        name: The qualified name of the function.
        filename: The file, or the name of a notebook cell.
        lineno: The first line of the definition: the line of the first decorator, if there is one.
        module: The name of the module.
        shown: The warnings already shown for the function. Python fills it, as the `registry` of
            `warnings.warn_explicit`.
    """

    name: str
    filename: str
    lineno: int
    module: str
    shown: dict[Any, Any]

    def __str__(self) -> str:
        return f"`{self.name}` ({self.filename}:{self.lineno})"


def definition_of(function: Any) -> Definition:
    """Finds the user's function inside wrappers, partials, methods and callable objects. Returns its definition."""
    # Unwrap until there is code. `_unwrap_once` returns a callable that wraps nothing unchanged, which also ends the
    # loop.
    layers: list[Any] = []
    while not isinstance(function, types.CodeType) and not any(function is layer for layer in layers):
        layers.append(function)
        function = _unwrap_once(function)
    # The name is that of the innermost layer that has one. If none has, it is that of the object's class.
    named = next((layer for layer in reversed(layers) if hasattr(layer, "__qualname__")), type(layers[0]))
    module = str(getattr(named, "__module__", None) or "<unknown>")
    # A function written in C has no code, so there is no file. The module stands in its place.
    if not isinstance(function, types.CodeType):
        return Definition(str(named.__qualname__), filename=module, lineno=1, module=module, shown={})
    return _definition_of_code(function, str(named.__qualname__), module)


def _unwrap_once(function: Any) -> Any:
    """Goes one step from a callable toward the user's function, and from there to its code.

    Returns:
        The callable that it wraps. For a function that wraps nothing, its code. For an object with a `__call__` written
        in Python, this `__call__`. For any other callable, the callable itself.
    """
    if isinstance(function, functools.partial):
        return function.func
    if isinstance(function, types.MethodType):
        return function.__func__
    # An object may answer `getattr` for any name, by a `__getattr__`. `getattr_static` finds out, without running this
    # code, whether there really is a `__wrapped__`. Only then is `getattr` called.
    wrapped = inspect.getattr_static(function, "__wrapped__", None)
    if wrapped is not None:
        return getattr(function, "__wrapped__", function)
    if isinstance(function, types.FunctionType):
        return function.__code__
    call = inspect.getattr_static(type(function), "__call__", None)
    return call if isinstance(call, types.FunctionType) else function


def definition_of_caller() -> Definition:
    """Returns the definition of the innermost function on the stack that is not in one of `_PACKAGES`.

    If all are, returns the definition of the outermost function on the stack.
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


# Code object → the warnings shown for it. By identity, because a notebook cell that is compiled twice gives two code
# objects that are equal.
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
    """Gives a warning with a function's definition as its source. Python's filters may ignore it or raise it."""
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
    """Warns or raises an error because ties were lost. All `UntiedWarning`s and `UntiedError`s come from here.

    Args:
        on_untie: What the policy says: give a warning, raise an error, or do nothing.
        definition: The function in which the ties were lost.
        explanation: Sentences with the paths and the reason.
        fixes: Lines of text and code. Code is indented by four spaces.
        paths: The paths, for programs that catch the error.
        verb: for the first sentence. "lost" if the tie is gone. "cut" if gradients or labels separate its places.
            "passed over" if an optimizer of another library looks at one of its places only.
        count: The number of ties.
        may_wait: True defers the warning to the end of the innermost trace in progress in this thread, if there is one.
            The transform that runs the trace checks its result for lost ties, too. If it finds the same loss, it drops
            this warning.

    Raises:
        UntiedError: If `on_untie` is "error".
    """
    if on_untie == "ignore":
        return
    ties = "A tie was" if count == 1 else f"{count} ties were"
    message = f"{ties} {verb} in {definition}. {explanation}\n{fixes}"
    if on_untie == "error":
        raise UntiedError(message, paths)
    # Defer the warning. The last list is that of the innermost trace.
    if may_wait and _traces.deferred:
        _traces.deferred[-1].append((definition, message))
    else:
        warn_about(definition, message, UntiedWarning)


class _ActiveTraces(threading.local):
    """The traces in progress in this thread. Each trace runs in one thread.

    Attributes:
        deferred: One list for each trace, the innermost last. A list has (function, text) of each deferred warning.
    """

    def __init__(self) -> None:
        self.deferred: list[list[tuple[Definition, str]]] = []


_traces = _ActiveTraces()


@contextmanager
def deferring_warnings() -> Iterator[list[tuple[Definition, str]]]:
    """Collects the warnings deferred by `report_untied` during the block.

    Yields:
        The list of these warnings. After the block, the caller issues them by `give_warnings`, or drops them. If the
        block raises an error, they are issued at once. A filter may make one of them an error, which then takes the
        place of the error of the block.
    """
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
    """Gives deferred warnings, and removes each from the list before it is given."""
    # A warning may be raised as an error, by a filter. Then the rest stays in the list.
    while deferred:
        definition, message = deferred.pop(0)
        warn_about(definition, message, UntiedWarning)
