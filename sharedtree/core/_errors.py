"""Every way in which sharedtree can fail, one class each.

An error says what happened in one line, names every path involved, says why, and ends with the fix as code. The
paths are also attributes, for programs that catch the error.
"""

from collections.abc import Sequence

from ._printing import printable_lines


class SharedTreeError(Exception):
    """Base class of every error that sharedtree raises on purpose.

    Attributes:
        paths: where it happened, each printed as `jax.tree_util.keystr` prints it.

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
    """One object sits at several paths that the transform would treat differently.

    Attributes:
        paths: those of the object, the first eight under each treatment.
        treatments: what the transform would do at each of them, in the same order.
    """

    treatments: tuple[str, ...]

    def __init__(self, message: str, paths: Sequence[str] = (), treatments: Sequence[str] = ()) -> None:
        super().__init__(message, paths)
        self.treatments = tuple(treatments)


class CycleError(SharedTreeError, ValueError):
    """An object contains itself. `paths` holds where it starts and where it comes back."""


class DepthError(SharedTreeError, RecursionError):
    """Containers are nested deeper than JAX or Python can walk without crashing."""


class UntiedError(SharedTreeError, ValueError):
    """What `UntiedWarning` says, under `Policy(on_untie="error")`."""


class SharingMismatchError(SharedTreeError, ValueError, TypeError):
    """Two trees that should have the same shape or the same ties do not.

    JAX raises a `ValueError` for an option or a solution of another shape, and a `TypeError` for a carry, a branch or
    the result of a rule. Programs that catch either catch this, too.

    Attributes:
        concerns_modules: False if there are none, so that a transform of JAX's says itself what is wrong.
    """

    concerns_modules = True


class StaticTracerError(SharedTreeError, TypeError):
    """A tracer ended up in a static leaf of an output, where it would outlive its trace."""


class StaticComparisonError(SharedTreeError, TypeError):
    """A static leaf cannot be compared with `==`, so no call could be recognised as the same as an earlier one."""


class UnregisteredTypeError(SharedTreeError, TypeError):
    """An object that neither JAX nor sharedtree knows how to take apart was given where a tree is needed."""


class ContextMismatchError(SharedTreeError, ValueError):
    """A structure made in one `Context` met one that was made in another, or lacks what came before it."""


class UnserialisableError(SharedTreeError, TypeError):
    """A tree holds objects that cannot be written to a file. All of them are listed; nothing was written.

    Attributes:
        paths: where they are.
        reasons: why each cannot be written, in the same order.
    """

    reasons: tuple[str, ...]

    def __init__(self, message: str, paths: Sequence[str] = (), reasons: Sequence[str] = ()) -> None:
        super().__init__(message, paths)
        self.reasons = tuple(reasons)


class UntrustedTypeError(SharedTreeError, TypeError):
    """A file names classes or functions that nobody allowed it to name. All of them are listed; nothing was imported.

    Attributes:
        paths: the first place of each.
        names: the names, `module:qualname`, in the same order.
    """

    names: tuple[str, ...]

    def __init__(self, message: str, paths: Sequence[str] = (), names: Sequence[str] = ()) -> None:
        super().__init__(message, paths)
        self.names = tuple(names)


class StructureMismatchError(SharedTreeError, ValueError):
    """What a file or a state describes does not fit the classes, devices or trees that are there now."""


class FormatError(SharedTreeError, ValueError):
    """What should be a sharedtree file is none, is malformed, or was written by a newer version."""


class CorruptFileError(SharedTreeError, OSError):
    """A file is not what was written: it was cut short, or its bytes do not have the digests saved with them.

    Attributes:
        paths: the names of the tensors that are damaged, which are their paths without the leading dot; empty for the
            header.
        tensor: the first of them, or None.
        chunk: which chunk of 4 MiB of that tensor, from 0, or None.
    """

    tensor: str | None
    chunk: int | None

    def __init__(self, message: str, paths: Sequence[str] = (), chunk: int | None = None) -> None:
        super().__init__(message, paths)
        self.tensor = paths[0] if paths else None
        self.chunk = chunk


class MissingStepError(SharedTreeError, FileNotFoundError):
    """A folder of checkpoints does not have the step that is to be restored."""


class _PrintableWarning(UserWarning):
    """A warning whose text is escaped as those of errors are."""

    def __init__(self, message: str) -> None:
        super().__init__(printable_lines(message))


class UntiedWarning(_PrintableWarning):
    """A tie was lost: in a transform, between two calls, or on its way to an optimizer.

    The text names the function with file and line, the paths, and the calls that keep ties. There is one warning for
    one tie, and it comes from where the function is defined, so that Python's filters tell functions apart.
    """


class RetraceWarning(_PrintableWarning):
    """A static value is another one on every call, and each is traced and compiled anew."""


class LostChangeWarning(_PrintableWarning):
    """A function changes state in its arguments, and nothing writes that back.

    Said when a function is traced under a transform that was not told `in_place=True` or `in_place=False`, neither by
    the option nor by a `Policy`, of objects whose library writes changes back: Flax NNX's, treex's, and
    `sharedtree.Module`. Of objects of other classes only where a transform further out is in place. Not said of what
    the function returns, and of `jax.eval_shape` and others that run nothing.
    """


class UnsaidVariableWarning(_PrintableWarning):
    """An optimizer trains a variable of Flax NNX whose class does not say whether it is a parameter or state."""


class CompatibilityError(SharedTreeError, ImportError):
    """A library that `sharedtree.compat` imports is absent, of another release, or lacks something that it needs."""
