"""Every way in which sharedtree can fail, one class each.

An error says what happened in one line, names every path involved, says why, and ends with the fix as code. The
paths are also attributes, for programs that catch the error.
"""

from collections.abc import Sequence


class SharedTreeError(Exception):
    """Base class of every error that sharedtree raises on purpose.

    Attributes:
        paths: where it happened, each printed as `jax.tree_util.keystr` prints it.

    Example:
        >>> import sharedtree as st
        >>> issubclass(st.CycleError, st.SharedTreeError)
        True
    """

    paths: tuple[str, ...]

    def __init__(self, message: str, paths: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.paths = tuple(paths)


class InconsistentSharingError(SharedTreeError, ValueError):
    """One object sits at several paths that the transform would treat differently.

    Attributes:
        paths: the paths of the object.
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
    """A tie that entered a transform did not leave it, under `Policy(on_untie="error")`."""


class SharingMismatchError(SharedTreeError, ValueError):
    """Two trees that should have the same shape or the same ties do not."""


class StaticTracerError(SharedTreeError, TypeError):
    """A tracer ended up in a static leaf of an output, where it would outlive its trace."""


class StaticComparisonError(SharedTreeError, TypeError):
    """A static leaf cannot be compared with `==`, so no call could be recognised as the same as an earlier one."""


class UnregisteredTypeError(SharedTreeError, TypeError):
    """An object that neither JAX nor sharedtree knows how to take apart was given where a tree is needed."""


class ContextMismatchError(SharedTreeError, ValueError):
    """A structure made in one `Context` met one that was made in another, or lacks what came before it."""


class UntiedWarning(UserWarning):
    """A tie was lost inside a transform, or between two calls. The text names the paths and the call that keeps it."""


class RetraceWarning(UserWarning):
    """A static number changes on every call, and each change is traced and compiled anew."""
