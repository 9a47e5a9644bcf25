"""sharedtree lets a JAX model be a DAG: shared layers and tied weights stay one object through every transform."""

# First of all, for it decides from where the rest is imported.
from . import _current_directory as _current_directory  # isort: split

from . import tree as tree
from ._context import Context as Context, Policy as Policy
from ._dag import Dag as Dag
from ._errors import (
    CompatibilityError as CompatibilityError,
    ContextMismatchError as ContextMismatchError,
    CorruptFileError as CorruptFileError,
    CycleError as CycleError,
    DepthError as DepthError,
    FormatError as FormatError,
    InconsistentSharingError as InconsistentSharingError,
    RetraceWarning as RetraceWarning,
    SharedTreeError as SharedTreeError,
    SharingMismatchError as SharingMismatchError,
    StaticComparisonError as StaticComparisonError,
    StaticTracerError as StaticTracerError,
    StructureMismatchError as StructureMismatchError,
    UnregisteredTypeError as UnregisteredTypeError,
    UnserialisableError as UnserialisableError,
    UntiedError as UntiedError,
    UntiedWarning as UntiedWarning,
    UntrustedTypeError as UntrustedTypeError,
)
from ._node_types import register_node as register_node
from ._stateful import inference_mode as inference_mode, make_with_state as make_with_state
from ._ties import (
    Tie as Tie,
    assert_same_sharing as assert_same_sharing,
    count_parameters as count_parameters,
    same_sharing as same_sharing,
    ties as ties,
)
from ._tying import copy as copy, retie as retie, tie as tie, untie as untie
from ._version import __version__ as __version__
from .optim import apply_updates as apply_updates, optimizer as optimizer
from .serialise import (
    audit as audit,
    from_bytes as from_bytes,
    inspect as inspect,
    load as load,
    orbax as orbax,
    save as save,
    to_bytes as to_bytes,
    trust as trust,
    verify as verify,
)
from .transforms import (
    checkpoint as checkpoint,
    device_put as device_put,
    explain as explain,
    grad as grad,
    jit as jit,
    preserve_identities as preserve_identities,
    register_transform as register_transform,
    value_and_grad as value_and_grad,
    vmap as vmap,
    with_sharding_constraint as with_sharding_constraint,
)
