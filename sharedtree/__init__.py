"""sharedtree lets a JAX model be a DAG: shared layers and tied weights stay one object through every transform."""

# First of all, for it decides from where the rest is imported.
from .core import _current_directory as _current_directory  # isort: split

import typing as _typing

# Before the walk, which asks them.
from . import libraries as libraries  # isort: split

from . import errors as errors, tree as tree
from .core import __version__ as __version__
from .core._node_types import register_node as register_node
from .errors import RetraceWarning as RetraceWarning, SharedTreeError as SharedTreeError, UntiedWarning as UntiedWarning
from .nn import (
    Module as Module,
    inference_mode as inference_mode,
    make_with_state as make_with_state,
    parameter as parameter,
    state_field as state_field,
    unwrap_shared as unwrap_shared,
)
from .optim import (
    apply_updates as apply_updates,
    incremental_update as incremental_update,
    optimizer as optimizer,
)
from .ties import (
    Context as Context,
    Policy as Policy,
    Tie as Tie,
    assert_same_sharing as assert_same_sharing,
    copy as copy,
    count_parameters as count_parameters,
    retie as retie,
    same_sharing as same_sharing,
    tie as tie,
    ties as ties,
    untie as untie,
)
from .transforms import (
    associative_scan as associative_scan,
    checkpoint as checkpoint,
    cond as cond,
    custom_jvp as custom_jvp,
    custom_vjp as custom_vjp,
    eval_shape as eval_shape,
    filter_checkpoint as filter_checkpoint,
    filter_eval_shape as filter_eval_shape,
    filter_grad as filter_grad,
    filter_jit as filter_jit,
    filter_jvp as filter_jvp,
    filter_value_and_grad as filter_value_and_grad,
    filter_vjp as filter_vjp,
    filter_vmap as filter_vmap,
    fori_loop as fori_loop,
    grad as grad,
    hessian as hessian,
    jacfwd as jacfwd,
    jacrev as jacrev,
    jit as jit,
    jvp as jvp,
    linear_transpose as linear_transpose,
    linearize as linearize,
    make_jaxpr as make_jaxpr,
    map as map,  # noqa: A004 -- as in `jax.lax`
    pmap as pmap,
    preserve_identities as preserve_identities,
    register_transform as register_transform,
    remat as remat,
    scan as scan,
    shard_map as shard_map,
    switch as switch,
    value_and_grad as value_and_grad,
    vjp as vjp,
    vmap as vmap,
    while_loop as while_loop,
)
from .tree._dag import Dag as Dag

for _type in (Context, Dag, Module, Policy, Tie):
    _type.__module__ = __name__  # under which they are printed, pickled and documented

if _typing.TYPE_CHECKING:  # who checks types would take any name for one that `__getattr__` has
    from . import linen as linen, show as show

    # From the files that have them, since mypy takes `serialise.load` for the file.
    from .serialise import orbax as orbax
    from .serialise._export import Exported as Exported, export as export
    from .serialise.inspect_and_audit import audit as audit, inspect as inspect, verify as verify
    from .serialise.load import from_bytes as from_bytes, load as load
    from .serialise.save import save as save, to_bytes as to_bytes
    from .serialise.trust._trusted_names import trust as trust
    from .show import draw as draw, summary as summary
    from .ties._views import View as View, unwrap as unwrap
    from .transforms._device_put import device_put as device_put, with_sharding_constraint as with_sharding_constraint
    from .transforms.checks._explain import explain as explain
    from .tree._plain_data import (
        StateReport as StateReport,
        load_state as load_state,
        register_state as register_state,
        state as state,
    )
else:
    from .core._lazy_names import import_public_name as __getattr__, names_for_dir as __dir__  # noqa: F401

# For `help` and `from sharedtree import *`; a test says what is missing.
# fmt: off
__all__ = [
    "Context", "Dag", "Exported", "Module", "Policy", "RetraceWarning", "SharedTreeError", "StateReport", "Tie",
    "UntiedWarning", "View",
    "apply_updates", "assert_same_sharing", "associative_scan", "audit", "checkpoint", "cond", "copy",
    "count_parameters", "custom_jvp", "custom_vjp", "device_put", "draw", "errors", "eval_shape", "explain", "export",
    "filter_checkpoint", "filter_eval_shape", "filter_grad", "filter_jit", "filter_jvp", "filter_value_and_grad",
    "filter_vjp", "filter_vmap", "fori_loop", "from_bytes", "grad", "hessian", "incremental_update", "inference_mode",
    "inspect", "jacfwd", "jacrev", "jit", "jvp", "linear_transpose", "linearize", "load", "load_state", "make_jaxpr",
    "make_with_state", "map", "optimizer", "orbax", "parameter", "pmap", "preserve_identities", "register_node",
    "register_state", "register_transform", "remat", "retie", "same_sharing", "save", "scan", "shard_map", "show",
    "state", "state_field", "summary", "switch", "tie", "ties", "to_bytes", "tree", "trust", "untie", "unwrap",
    "unwrap_shared", "value_and_grad", "verify", "vjp", "vmap", "while_loop", "with_sharding_constraint",
]
# fmt: on
