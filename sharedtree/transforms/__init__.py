"""Transforms that keep identity: `preserve_identities`, and the ready-made ones. One file for each family.

- The arguments of a call are packed as one graph (`_caller_side`). Its leaves are grouped (`_leaf_groups`,
  `_grouping_leaves`) by what the transform does with each (`_leaf_labels`).
- The transform gets the leaf groups in place of the arguments, and an inner function in place of the user's
  (`_function_given_to_jax`). Its body builds the user's arguments from the groups and calls the user's function
  (`_function_side`).
- It packs the result into leaf groups, which the transform returns. The caller's side builds the result from them.
- Errors and warnings about lost ties and lost changes are in `checks/`.

Nothing here keeps the arguments of a call alive.
"""

import typing as _typing

# Imported first, while `jax.jit` is JAX's own. A program may replace it before it wraps a transform.
from . import _adapter_names as _adapter_names
from ._preserve_identities import preserve_identities as preserve_identities, register_transform as register_transform
from ._ready_made_control_flow import (
    associative_scan as associative_scan,
    cond as cond,
    fori_loop as fori_loop,
    map as map,  # noqa: A004 -- as in `jax.lax`
    scan as scan,
    switch as switch,
    while_loop as while_loop,
)
from ._ready_made_transforms import (
    checkpoint as checkpoint,
    filter_checkpoint as filter_checkpoint,
    filter_grad as filter_grad,
    filter_jit as filter_jit,
    filter_value_and_grad as filter_value_and_grad,
    filter_vmap as filter_vmap,
    grad as grad,
    hessian as hessian,
    jacfwd as jacfwd,
    jacrev as jacrev,
    jit as jit,
    make_jaxpr as make_jaxpr,
    pmap as pmap,
    remat as remat,
    shard_map as shard_map,
    value_and_grad as value_and_grad,
    vmap as vmap,
)
from ._ready_made_with_operands import (
    custom_jvp as custom_jvp,
    custom_vjp as custom_vjp,
    eval_shape as eval_shape,
    filter_eval_shape as filter_eval_shape,
    filter_jvp as filter_jvp,
    filter_vjp as filter_vjp,
    jvp as jvp,
    linear_transpose as linear_transpose,
    linearize as linearize,
    vjp as vjp,
)

if _typing.TYPE_CHECKING:
    from ._calls_with_operands import CallWithOperands as CallWithOperands
    from ._device_put import device_put as device_put, with_sharding_constraint as with_sharding_constraint
    from ._function_side import FunctionTrace as FunctionTrace
    from .checks._explain import Explanation as Explanation, LeafReport as LeafReport, explain as explain
else:
    from ..core._lazy_names import lazy_getattr_for as _lazy_getattr_for

    # Imported on first use, since they import the adapters, as the first wrapped transform does.
    _LATER = {
        **dict.fromkeys(("device_put", "with_sharding_constraint"), "_device_put"),
        **dict.fromkeys(("Explanation", "LeafReport", "explain"), "checks._explain"),
        "CallWithOperands": "_calls_with_operands",
        "FunctionTrace": "_function_side",
    }
    __getattr__ = _lazy_getattr_for(__name__, _LATER)

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LATER})
