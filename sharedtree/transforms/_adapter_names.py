"""Names of the adapters of JAX's and Equinox's transforms.

An *adapter* is the class or object with which `preserve_identities` wraps a transform: it passes the transform the
leaves of the user's objects, and builds objects from what comes back.

The transforms are looked up when the package is imported, because a program may replace `jax.jit` by `sharedtree.jit`
later. The adapters cost more to import, so only their names are here. `_adapters` imports all of them with the first
transform that a program wraps.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import equinox.internal
import jax
import jax.custom_batching
import jax.export

from ..core._jax_internals import deprecated_shard_map

NAME_OF_ADAPTER: dict[Callable[..., Any], str] = {
    jax.jit: "_jit.JitTransform",
    jax.grad: "_grad.GradTransform",
    jax.value_and_grad: "_grad.ValueAndGradTransform",
    jax.jacfwd: "_grad.JacobianTransform",
    jax.jacrev: "_grad.JacobianTransform",
    jax.jacobian: "_grad.JacobianTransform",
    jax.hessian: "_grad.JacobianTransform",
    jax.vmap: "_vmap.VmapTransform",
    jax.checkpoint: "_jit.CheckpointTransform",
    jax.remat: "_jit.CheckpointTransform",
    jax.custom_vjp: "_derivative_rules.CustomVjpTransform",
    jax.custom_jvp: "_derivative_rules.CustomJvpTransform",
    jax.custom_gradient: "_derivative_rules.CustomGradientTransform",
    jax.custom_batching.custom_vmap: "_derivative_rules.CustomVmapTransform",
    eqx.filter_jit: "_jit.FilterJitTransform",
    eqx.filter_grad: "_grad.GradTransform",
    eqx.filter_value_and_grad: "_grad.ValueAndGradTransform",
    eqx.filter_jacfwd: "_grad.JacobianTransform",
    eqx.filter_jacrev: "_grad.JacobianTransform",
    eqx.filter_hessian: "_grad.JacobianTransform",
    eqx.filter_vmap: "_vmap.FilterVmapTransform",
    eqx.filter_checkpoint: "_function_transform.FunctionTransform",
    jax.vjp: "_jvp_vjp.VJP",
    jax.jvp: "_jvp_vjp.JVP",
    jax.linearize: "_jvp_vjp.LINEARIZE",
    jax.linear_transpose: "_jvp_vjp.LINEAR_TRANSPOSE",
    eqx.filter_vjp: "_jvp_vjp.VJP",
    eqx.filter_jvp: "_jvp_vjp.FILTER_JVP",
    jax.shard_map: "_vmap.ShardMapTransform",
    deprecated_shard_map(): "_vmap.ShardMapTransform",
    jax.pmap: "_vmap.PmapTransform",
    eqx.filter_shard: "_device_put.FILTER_SHARD",
    jax.lax.scan: "_loops.SCAN",
    jax.lax.while_loop: "_loops.WHILE_LOOP",
    equinox.internal.scan: "_loops.UNWRITTEN_SCAN",
    equinox.internal.while_loop: "_loops.UNWRITTEN_WHILE_LOOP",
    jax.lax.fori_loop: "_loops.FORI_LOOP",
    jax.lax.map: "_loops.MAP",
    jax.lax.associative_scan: "_loops.ASSOCIATIVE_SCAN",
    jax.lax.cond: "_branches.COND",
    jax.lax.switch: "_branches.SWITCH",
    jax.eval_shape: "_shape_evaluation.EVAL_SHAPE",
    eqx.filter_eval_shape: "_shape_evaluation.FILTER_EVAL_SHAPE",
    jax.make_jaxpr: "_shape_evaluation.MakeJaxprTransform",
    eqx.filter_make_jaxpr: "_shape_evaluation.FilterMakeJaxprTransform",
    jax.named_call: "_shape_evaluation.apply_vanilla",
    jax.export.export: "_shape_evaluation.exporting",
}
"""Transform → file in this folder and name in this file, for its adapter."""

COUNTERPART_OF_FILTER: dict[str, Callable[..., Any]] = {
    "filter_grad": jax.grad,
    "filter_value_and_grad": jax.value_and_grad,
    "filter_jacfwd": jax.jacfwd,
    "filter_jacrev": jax.jacrev,
    "filter_hessian": jax.hessian,
}
"""Name of a filtering transform of Equinox → JAX's transform, which does the same for explicitly chosen leaves."""

VANILLA_JIT, VANILLA_CUSTOM_VJP, VANILLA_CUSTOM_JVP = jax.jit, jax.custom_vjp, jax.custom_jvp
"""JAX's own transforms, for the package's own computations. They stay the same if a program replaces them in `jax`."""
