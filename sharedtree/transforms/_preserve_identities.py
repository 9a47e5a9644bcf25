"""`preserve_identities`, and the table that says how each transform is wrapped."""

import functools
import importlib
from collections.abc import Callable
from typing import Any, overload

import equinox as eqx
import equinox.internal
import jax
import jax.custom_batching
import jax.export

from ..core._jax_internals import deprecated_shard_map
from ..core._node_types import is_module
from ..core._printing import shown
from ..libraries._equinox import name_of
from ..ties._policy_and_context import Policy, PolicyHere, PolicyOption, with_options
from ._branches import cond, switch
from ._crossing import TakingOperands
from ._derivative_rules_by_transform import (
    CustomGradientTransform,
    CustomJvpTransform,
    CustomVjpTransform,
    CustomVmapTransform,
)
from ._device_put import filter_shard
from ._function_and_options import How, TransformedModule, apply_options, is_of_equinox, title_of
from ._function_transform import FunctionTransform
from ._grad import GradTransform, JacobianTransform, ValueAndGradTransform
from ._jit import CheckpointTransform, FilterJitTransform, JitTransform
from ._jvp_vjp import filter_jvp, jvp, linear_transpose, linearize, vjp
from ._loops import associative_scan, fori_loop, map_over, scan, while_loop
from ._shape_evaluation import FilterMakeJaxprTransform, MakeJaxprTransform, as_it_is, eval_shape, filter_eval_shape
from ._signatures import Checkpoint, Grad, Jit, LikeCheckpoint, LikeGrad, LikeJit, LikeValueAndGrad, ValueAndGrad
from ._transforms_without_adapter import refusal_of
from ._unregistered_transforms import OpaqueTransform, UnregisteredTransform
from ._vmap import FilterVmapTransform, PmapTransform, ShardMapTransform, VmapTransform


def _exporting(transform: Callable[..., Any], *how: Any) -> Any:
    """Programs are files, whose part of the package is imported when it is first used."""
    package = __name__.partition(".")[0]
    return importlib.import_module(f"{package}.serialise._export").exporting(transform, *how)


_adapters: dict[Any, Any] = {
    jax.jit: JitTransform,
    jax.grad: GradTransform,
    jax.value_and_grad: ValueAndGradTransform,
    jax.jacfwd: JacobianTransform,
    jax.jacrev: JacobianTransform,
    jax.jacobian: JacobianTransform,
    jax.hessian: JacobianTransform,
    jax.vmap: VmapTransform,
    jax.checkpoint: CheckpointTransform,
    jax.remat: CheckpointTransform,
    jax.custom_vjp: CustomVjpTransform,
    jax.custom_jvp: CustomJvpTransform,
    jax.custom_gradient: CustomGradientTransform,
    jax.custom_batching.custom_vmap: CustomVmapTransform,
    eqx.filter_jit: FilterJitTransform,
    eqx.filter_grad: GradTransform,
    eqx.filter_value_and_grad: ValueAndGradTransform,
    eqx.filter_jacfwd: JacobianTransform,
    eqx.filter_jacrev: JacobianTransform,
    eqx.filter_hessian: JacobianTransform,
    eqx.filter_vmap: FilterVmapTransform,
    eqx.filter_checkpoint: FunctionTransform,
    jax.vjp: TakingOperands(vjp, writes=False, calls_each_time=True),
    jax.jvp: TakingOperands(jvp, writes=False, calls_each_time=True),
    jax.linearize: TakingOperands(linearize, writes=False, calls_each_time=True),
    jax.linear_transpose: TakingOperands(linear_transpose, writes=False),
    eqx.filter_vjp: TakingOperands(vjp, writes=False, calls_each_time=True),
    eqx.filter_jvp: TakingOperands(filter_jvp, writes=False, calls_each_time=True),
    jax.shard_map: ShardMapTransform,
    deprecated_shard_map(): ShardMapTransform,
    jax.pmap: PmapTransform,
    eqx.filter_shard: TakingOperands(filter_shard),
    jax.lax.scan: TakingOperands(scan),
    jax.lax.while_loop: TakingOperands(while_loop),
    equinox.internal.scan: TakingOperands(scan, writes=False),
    equinox.internal.while_loop: TakingOperands(while_loop, writes=False),
    jax.lax.fori_loop: TakingOperands(fori_loop),
    jax.lax.map: TakingOperands(map_over),
    jax.lax.associative_scan: TakingOperands(associative_scan, writes=False),
    jax.lax.cond: TakingOperands(cond),
    jax.lax.switch: TakingOperands(switch),
    jax.eval_shape: TakingOperands(eval_shape),
    eqx.filter_eval_shape: TakingOperands(filter_eval_shape),
    jax.make_jaxpr: MakeJaxprTransform,
    eqx.filter_make_jaxpr: FilterMakeJaxprTransform,
    jax.named_call: as_it_is,
    jax.export.export: _exporting,
}


def register_transform(transform: Callable[..., Any], adapter: Any = None, *, takes_operands: bool = False) -> None:
    """Says how a transform treats its arguments, so that objects may be shared between them.

    A transform that is not registered may hide what it does to each argument, so a module in two of its arguments is an
    error, and arrays are cut between them. Ties inside one argument are kept without registration.

    Args:
        transform: a function transformer, `transform(f, **options) → g`. It is recognised by identity, so it must be a
            named object and not a fresh lambda.
        adapter: None, if the transform treats all arguments alike (a composition of `jax.jit`, `jax.checkpoint` or
            logging, say); a registered transform whose options and treatment it shares (`jax.vmap`); or a function
            `(transform, f, policy, options) → g`, which hands the policy on as it is.
        takes_operands: whether the transform is called with operands beside the function, as `jax.lax.scan` is. The
            adapter is then a function `(crossing, **parameters) → result`: it is given a
            `sharedtree.transforms.Crossing`, and by their names the parameters that the call gives. It decides which
            of them are packed and how each is treated. `docs/adapters.md` has an example. Such a transform refuses
            `in_place=True`.

    Raises:
        TypeError: if the adapter is none of these, or a transform that `preserve_identities` refuses, or if there is
            none and the transform is such a one.

    Example:
        >>> import jax, sharedtree as st
        >>> def traced_and_logged(f):
        ...     return jax.jit(jax.checkpoint(f))
        >>> st.register_transform(traced_and_logged)
        >>> model = st.Dag([1.0])
        >>> st.preserve_identities(traced_and_logged)(lambda a, b: a is b and 1)(model, model)
        Array(1, dtype=int32, weak_type=True)
    """
    is_plain = adapter is None and not takes_operands and _is_hashable(transform)
    refused = transform if is_plain else adapter
    refusal = refusal_of(refused) if _is_hashable(refused) and refused not in _adapters else None
    if refusal is not None:
        raise refusal
    if _is_hashable(adapter) and adapter in _adapters:
        found = _adapters[adapter]
        if takes_operands and not isinstance(found, TakingOperands):
            raise TypeError(
                f"`{title_of(adapter)}` takes no operands beside the function, so it is no model for a transform that "
                "does. Write an adapter:\n"
                "    sharedtree.register_transform(transform, adapter, takes_operands=True)"
            )
        adapter = found
    elif takes_operands and callable(adapter):
        # Whether it writes back what the function changed cannot be seen, and not to do so would be silent.
        adapter = TakingOperands(adapter, writes=False)
    elif adapter is None and not takes_operands:
        adapter = OpaqueTransform
    elif not callable(adapter):
        raise TypeError(
            f"An adapter is None, a registered transform or a callable, not {adapter!r}. Of a transform that takes "
            "operands beside the function, it is one of the latter two:\n"
            "    sharedtree.register_transform(transform, adapter, takes_operands=True)"
        )
    _adapters[transform] = adapter


@overload
def preserve_identities(
    transform: LikeJit, *, policy: PolicyOption = None, in_place: bool | None = None, **options: Any
) -> Jit: ...
@overload
def preserve_identities(
    transform: LikeCheckpoint, *, policy: PolicyOption = None, in_place: bool | None = None, **options: Any
) -> Checkpoint: ...
@overload
def preserve_identities(transform: LikeGrad, *, policy: PolicyOption = None, in_place: bool | None = None) -> Grad: ...
@overload
def preserve_identities(
    transform: LikeValueAndGrad, *, policy: PolicyOption = None, in_place: bool | None = None
) -> ValueAndGrad: ...
@overload
def preserve_identities(
    transform: Callable[..., Any], *, policy: PolicyOption = None, in_place: bool | None = None, **options: Any
) -> Any: ...
def preserve_identities(
    transform: Callable[..., Any], *, policy: PolicyOption = None, in_place: bool | None = None, **options: Any
) -> Any:
    """Wraps a transform so that what is one object outside is one object inside, and the other way round.

    JAX flattens arguments to trees, so a layer reachable by two paths enters `jax.jit` as two layers and leaves it as
    two. Here each shared module, tied array and mutable container is packed once and put together once.

    Args:
        transform: `jax.jit`, `jax.grad`, `jax.value_and_grad`, `jax.jacfwd`, `jax.jacrev`, `jax.hessian`, `jax.vmap`,
            `jax.checkpoint`, their counterparts `equinox.filter_…`, a `functools.partial` of one of these, one that was
            registered with `register_transform`, or any other function transformer.
        policy: what counts as sharing. Default: that of the innermost `Context` at each call. It can be given with the
            function, too: `jit(f, policy=Policy(containers=True))`.
        in_place: whether what the function changed in its arguments is written back into the caller's objects, as with
            `Policy(in_place=True)`; False says that it is meant to be lost. Default: what the policy says. It wins over
            the policy, and can be given with the function, too: `jit(f, in_place=True)`.
        options: of the transform, bound in advance.

    Returns:
        A transform. It takes a function, and further options, as the original does, and returns a function with the
        same name, docstring and signature. Under `jax.jit` that has `lower`, `trace`, `eval_shape` and `clear_cache`.
        It can be used as a decorator, on methods too. Under Equinox's transforms a module becomes a module, whose
        leaves are its own.

    Raises:
        TypeError: if the transform would not accept its options, or takes operands beside the function, for which
            there is no adapter; the text says what to do instead, for most a `Dag` in the model's place.

    The function it returns raises:
        InconsistentSharingError: if two occurrences of one module that holds traced leaves would be treated
            differently: donated and not, differentiated and not, mapped along different axes; or, under an unregistered
            transform, if they are in different arguments. Arrays and mutable containers part silently there; but not if
            a buffer would be given away that another argument keeps, and not if a container would be written back in
            place.
        CycleError: if an object contains itself.
        StaticComparisonError: if a static leaf has no usable `==`.
        StaticTracerError: if a tracer is left in a static leaf of the result.

    and warns with:
        UntiedWarning: if a tie enters and does not leave, checked when the function is traced; or if a gradient lacks
            what flows through an argument that is not differentiated.
        LostChangeWarning: if nothing was said of `in_place`, and the function changes objects whose library writes
            changes back (Flax NNX, treex, `sharedtree.Module`) and does not return them.
        RetraceWarning: if a static value is another one on every call.

    Cost: each call packs its arguments and unpacks its results, in time proportional to the nodes; the arrays are
    aliased. A traced function is cached by structure, so equal sharing does not retrace and other sharing does. Nor
    does wrapping the same function again with the same options, as in JAX.

    The idea is Cristian Garcia's (treex issue 8).

    Example:
        >>> import jax, jax.numpy as jnp, equinox as eqx, sharedtree as st
        >>> class Net(eqx.Module):
        ...     embed: jax.Array
        ...     head: jax.Array
        >>> w = jnp.ones(3)
        >>> @st.preserve_identities(jax.jit)
        ... def step(net):
        ...     assert net.embed is net.head
        ...     return st.tree.map(lambda x: 2 * x, net)
        >>> net = step(Net(w, w))
        >>> net.embed is net.head
        True

    Limitations: what a function closes over is not an argument, so an object that is both closed over and passed is
    two objects inside. Identity outside modules is that of values: of `f(x, x)` with an array `x` the function gets
    two arrays; wrap them in a `Dag` to tie them. `Policy(containers=True)` gives identity to lists and dicts, and to
    the arrays in them.
    """
    if policy is not None and not isinstance(policy, (Policy, PolicyHere)):
        raise TypeError(
            f"`policy` is a `sharedtree.Policy`, not {policy!r}. An option of the transform by that name goes with the "
            "function:\n"
            "    preserve_identities(jax.checkpoint)(f, policy=jax.checkpoint_policies.dots_saveable)"
        )
    if not callable(transform):
        raise TypeError(
            f"`preserve_identities` takes a transform, not {shown(transform)}:\n"
            "    sharedtree.preserve_identities(jax.jit)"
        )
    while isinstance(transform, functools.partial) and not transform.args:
        options = {**transform.keywords, **options}
        transform = transform.func
    if in_place is not None:
        options["in_place"] = in_place
    # What is no `in_place` is refused here, not only when there is a function.
    with_options({**options}, policy)
    adapter = _adapter_of(transform)
    if isinstance(adapter, TakingOperands):
        return adapter.applied(transform, policy, options)

    def preserving(*positional: Any, **more: Any) -> Any:
        own = {**options, **more}
        if adapter is UnregisteredTransform and positional and not any(map(callable, (*positional, *own.values()))):
            raise _is_no_transform(transform, positional[0])
        chosen = with_options(own, policy)
        ours = {name: own.pop(name) for name in getattr(adapter, "own_options", ()) if name in own}
        function, bound = apply_options(transform, positional, own)
        if function is None:
            return functools.partial(preserving, **more)
        if adapter is UnregisteredTransform and not callable(function):
            raise _is_no_transform(transform, function)
        bound |= ours
        takes_rules = getattr(adapter, "takes_rules", False)
        if is_module(function) and is_of_equinox(transform) and not takes_rules:
            return TransformedModule(function, How(adapter, transform, chosen, bound))
        return adapter(transform, function, chosen, bound)

    preserving.__name__ = name_of(transform, "transform")
    preserving.__doc__ = f"`{preserving.__name__}`, with identities preserved; see `sharedtree.preserve_identities`."
    return preserving


def _adapter_of(transform: Callable[..., Any]) -> Any:
    """The adapter that is registered for a transform, or that of an unregistered one.

    Raises:
        TypeError: if it is a transform that is refused, and nobody registered an adapter for it.
    """
    if not _is_hashable(transform):
        return UnregisteredTransform
    if transform not in _adapters:
        refusal = refusal_of(transform)
        if refusal is not None:
            raise refusal
    return _adapters.get(transform, UnregisteredTransform)


def _is_no_transform(transform: Callable[..., Any], given: Any) -> TypeError:
    return TypeError(
        f"`{title_of(transform)}` was given {shown(given)}, where a transform is given a function. "
        "`preserve_identities` takes a transform, not the function that is to be transformed:\n"
        "    f = sharedtree.preserve_identities(jax.jit)(f)"
    )


def _is_hashable(obj: Any) -> bool:
    try:
        hash(obj)
    except TypeError:
        return False
    return True
