"""The errors and warnings of the package, one class for each way to fail.

The first line of a message says what is wrong and names the paths. Then follow the reason, in a sentence, and the fix,
as code that runs. The paths are also an attribute, for programs that catch the error.
"""

from collections.abc import Sequence

from ._printing import printable_lines


class SharedTreeError(Exception):
    """Base class of all errors of this package.

    Attributes:
        paths: The paths involved, each printed as by `jax.tree_util.keystr`.

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
    """One object sits at several paths, and the transform would treat it differently at them.

    Attributes:
        paths: The paths of the object: the first eight of each treatment.
        treatments: The treatment at each of the paths, in the same order.
    """

    treatments: tuple[str, ...]

    def __init__(self, message: str, paths: Sequence[str] = (), treatments: Sequence[str] = ()) -> None:
        super().__init__(message, paths)
        self.treatments = tuple(treatments)


class CycleError(SharedTreeError, ValueError):
    """An object contains itself. `paths` has the first path of the object and the path at which it comes again."""


class DepthError(SharedTreeError, RecursionError):
    """Containers are nested more deeply than JAX or Python can walk."""


class UntiedError(SharedTreeError, ValueError):
    """A tie was lost, under `Policy(on_untie="error")`. See `UntiedWarning`."""


class SharingMismatchError(SharedTreeError, ValueError, TypeError):
    """Two trees should have the same shape or the same ties, and have not.

    For different shapes of an option or a solution, JAX raises a `ValueError`; for those of a carry, a branch or the
    result of a rule, a `TypeError`. Programs that catch either one catch this error, too.

    Attributes:
        concerns_modules: False if neither tree has modules. Then JAX's own error is clear, and is raised instead.
    """

    concerns_modules = True


class StaticTracerError(SharedTreeError, TypeError):
    """An output has a tracer in a static leaf, where it would outlive its trace."""


class StaticComparisonError(SharedTreeError, TypeError):
    """A static leaf cannot be compared with `==`, so no call could reuse what was compiled for an earlier one."""


class ViewError(SharedTreeError, TypeError, AttributeError):
    """A `View` was used as an array, or has none to show. `sharedtree.unwrap` puts arrays in the place of views."""


class UnregisteredTypeError(SharedTreeError, TypeError):
    """A tree was expected, but neither JAX nor sharedtree can take this object apart."""


class ContextMismatchError(SharedTreeError, ValueError):
    """A structure was used with one of another `Context`, or without the earlier structures to which it refers."""


class UnserialisableError(SharedTreeError, TypeError):
    """Objects in a tree cannot be written to a file. The error lists all of them; no file was written.

    Attributes:
        paths: The paths of the objects.
        reasons: The reason for each, in the same order.
    """

    reasons: tuple[str, ...]

    def __init__(self, message: str, paths: Sequence[str] = (), reasons: Sequence[str] = ()) -> None:
        super().__init__(message, paths)
        self.reasons = tuple(reasons)


class UntrustedTypeError(SharedTreeError, TypeError):
    """A file names classes or functions that are not trusted. The error lists all of them; nothing was imported.

    Attributes:
        paths: The first path of each.
        names: The names, as `module:qualname`, in the same order.
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
        paths: The names of the damaged tensors, which are their paths without the leading dot; empty for the header.
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
    """A warning with an escaped text, like the errors."""

    def __init__(self, message: str) -> None:
        super().__init__(printable_lines(message))


class UntiedWarning(_PrintableWarning):
    """A tie was lost: in a transform, between two calls, or on its way to an optimizer.

    The text names the function with file and line, the paths, and the calls that keep ties. Each tie gives one warning.
    Its location is the definition of the function, so Python's warning filters tell functions apart.
    """


class RetraceWarning(_PrintableWarning):
    """A static value differs on every call, so every call is traced and compiled anew."""


class LostChangeWarning(_PrintableWarning):
    """A function changes state in its arguments, and the change is lost.

    It is given at trace time, if neither the option `in_place` of the transform nor a `Policy` says whether to write
    changes back, and the changed object's library writes them back: Flax NNX, treex, `sharedtree.Module`. For objects
    of other classes it is given only inside a transform with `in_place=True`. There is no warning for an object that
    the function returns, nor under `jax.eval_shape` and other functions that run nothing.
    """


class UnsaidVariableWarning(_PrintableWarning):
    """An optimizer trains a variable of Flax NNX of a class that is known neither as parameter nor as state."""


class CompatibilityError(SharedTreeError, ImportError):
    """A library needed by `sharedtree.compat` is absent, is another release, or lacks a name."""
