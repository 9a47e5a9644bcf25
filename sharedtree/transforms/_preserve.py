"""`preserve_identities`, and the table that says how each transform is wrapped."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from .._context import Policy
from .._equinox_internals import name_of
from .._node_types import is_module
from ._applying import apply_options
from ._checkpoint import CheckpointTransform
from ._function import FunctionTransform
from ._grad import FilterGradTransform, FilterValueAndGradTransform, GradTransform, ValueAndGradTransform
from ._jit import FilterJitTransform, JitTransform
from ._modules import How, TransformedModule, is_of_equinox
from ._opaque import OpaqueTransform, UnregisteredTransform
from ._vmap import FilterVmapTransform, VmapTransform

Adapter = Callable[[Callable[..., Any], Callable[..., Any], Policy | None, dict[str, Any]], Callable[..., Any]]
"""(transform, function, policy, options) → the function under the transform, with identities preserved."""

_adapters: dict[Any, Any] = {
    jax.jit: JitTransform,
    jax.grad: GradTransform,
    jax.value_and_grad: ValueAndGradTransform,
    jax.jacfwd: GradTransform,
    jax.jacrev: GradTransform,
    jax.jacobian: GradTransform,
    jax.hessian: GradTransform,
    jax.vmap: VmapTransform,
    jax.checkpoint: CheckpointTransform,
    jax.remat: CheckpointTransform,
    eqx.filter_jit: FilterJitTransform,
    eqx.filter_grad: FilterGradTransform,
    eqx.filter_value_and_grad: FilterValueAndGradTransform,
    eqx.filter_jacfwd: FilterGradTransform,
    eqx.filter_jacrev: FilterGradTransform,
    eqx.filter_hessian: FilterGradTransform,
    eqx.filter_vmap: FilterVmapTransform,
    eqx.filter_checkpoint: FunctionTransform,
}


def register_transform(transform: Callable[..., Any], adapter: Any = None) -> None:
    """Says how a transform treats its arguments, so that objects may be shared between them.

    A transform that is not registered may hide what it does to each argument, so a module in two of its arguments is an
    error, and arrays are cut between them. Ties inside one argument are kept without registration.

    Args:
        transform: a function transformer, `transform(f, **options) → g`. It is recognised by identity, so it must be a
            named object and not a fresh lambda.
        adapter: None, if the transform treats all arguments alike (a composition of `jax.jit`, `jax.checkpoint` or
            logging, say); a registered transform whose options and treatment it shares (`jax.vmap`); or a function
            `(transform, f, policy, options) → g`.

    Raises:
        TypeError: if the adapter is none of these.

    Example:
        >>> import jax, sharedtree as st
        >>> def traced_and_logged(f):
        ...     return jax.jit(jax.checkpoint(f))
        >>> st.register_transform(traced_and_logged)
        >>> model = st.Dag([1.0])
        >>> st.preserve_identities(traced_and_logged)(lambda a, b: a is b and 1)(model, model)
        Array(1, dtype=int32, weak_type=True)
    """
    if adapter is None:
        adapter = OpaqueTransform
    elif adapter in _adapters:
        adapter = _adapters[adapter]
    if not callable(adapter):
        raise TypeError(f"An adapter is None, a registered transform or a callable, not {adapter!r}.")
    _adapters[transform] = adapter


def preserve_identities(transform: Callable[..., Any], *, policy: Policy | None = None, **options: Any) -> Any:
    """Wraps a transform so that what is one object outside is one object inside, and the other way round.

    JAX flattens arguments to trees, so a layer reachable by two paths enters `jax.jit` as two layers and leaves it as
    two. Here each shared module, tied array and mutable container is packed once and put together once.

    Args:
        transform: `jax.jit`, `jax.grad`, `jax.value_and_grad`, `jax.jacfwd`, `jax.jacrev`, `jax.hessian`, `jax.vmap`,
            `jax.checkpoint`, their counterparts `equinox.filter_…`, a `functools.partial` of one of these, one that was
            registered with `register_transform`, or any other function transformer.
        policy: what counts as sharing. Default: that of the innermost `Context` at each call. It can be given with the
            function, too: `jit(f, policy=Policy(containers=True))`.
        options: of the transform, bound in advance.

    Returns:
        A transform. It takes a function, and further options, as the original does, and returns a function with the
        same name, docstring and signature. Under `jax.jit` that has `lower`, `trace`, `eval_shape` and `clear_cache`.
        It can be used as a decorator, on methods too. Under Equinox's transforms a module becomes a module, whose
        leaves are its own.

    Raises:
        TypeError: if the transform would not accept its options, or takes operands or rules beside the function, for
            which there is no adapter; the text says what to do instead.

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
        RetraceWarning: if a static number changes on every call.

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
    if policy is not None and not isinstance(policy, Policy):
        raise TypeError(
            f"`policy` is a `sharedtree.Policy`, not {policy!r}. An option of the transform by that name goes with the "
            "function:\n"
            "    preserve_identities(jax.checkpoint)(f, policy=jax.checkpoint_policies.dots_saveable)"
        )
    while isinstance(transform, functools.partial) and not transform.args:
        options = {**transform.keywords, **options}
        transform = transform.func
    adapter = _adapters.get(transform, UnregisteredTransform) if _is_hashable(transform) else UnregisteredTransform

    def preserving(*positional: Any, **more: Any) -> Any:
        own = {**options, **more}
        chosen = policy
        if isinstance(own.get("policy"), Policy):  # `jax.checkpoint` has an option of that name, of another type
            chosen = own.pop("policy")
        function, bound = apply_options(transform, positional, own)
        if function is None:
            return functools.partial(preserving, **more)
        if is_module(function) and is_of_equinox(transform):
            return TransformedModule(function, How(adapter, transform, chosen, bound))
        return adapter(transform, function, chosen, bound)

    preserving.__name__ = name_of(transform, "transform")
    preserving.__doc__ = f"`{preserving.__name__}`, with identities preserved; see `sharedtree.preserve_identities`."
    return preserving


def _is_hashable(obj: Any) -> bool:
    try:
        hash(obj)
    except TypeError:
        return False
    return True
