"""Every way in which sharedtree can fail, one class each; and what it warns of."""

from .core._errors import (
    CompatibilityError as CompatibilityError,
    ContextMismatchError as ContextMismatchError,
    CorruptFileError as CorruptFileError,
    CycleError as CycleError,
    DepthError as DepthError,
    FormatError as FormatError,
    InconsistentSharingError as InconsistentSharingError,
    LostChangeWarning as LostChangeWarning,
    MissingStepError as MissingStepError,
    RetraceWarning as RetraceWarning,
    SharedTreeError as SharedTreeError,
    SharingMismatchError as SharingMismatchError,
    StaticComparisonError as StaticComparisonError,
    StaticTracerError as StaticTracerError,
    StructureMismatchError as StructureMismatchError,
    UnregisteredTypeError as UnregisteredTypeError,
    UnsaidVariableWarning as UnsaidVariableWarning,
    UnserialisableError as UnserialisableError,
    UntiedError as UntiedError,
    UntiedWarning as UntiedWarning,
    UntrustedTypeError as UntrustedTypeError,
    ViewError as ViewError,
)

for _error in [error for error in [*globals().values()] if isinstance(error, type)]:
    _error.__module__ = __name__  # under which they are printed, pickled and documented
