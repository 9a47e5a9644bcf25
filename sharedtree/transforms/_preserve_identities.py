"""`preserve_identities` and `register_transform`: their signatures and documentation. `_adapters` implements them.

Most of `sharedtree.transforms` is imported with the first transform that a program wraps, for example where it
decorates its first function. So the functions here import `_adapters` when they are called. A program that only reads,
ties or saves models does not pay for that import.
"""

import functools
from collections.abc import Callable
from typing import Any, overload

from ..ties._policy_and_context import PolicyOption
from ._signatures import Checkpoint, Grad, Jit, LikeCheckpoint, LikeGrad, LikeJit, LikeValueAndGrad, ValueAndGrad


def register_transform(transform: Callable[..., Any], adapter: Any = None, *, takes_operands: bool = False) -> None:
    """Registers how a transform treats its arguments, so that objects may be shared between them.

    An unregistered transform may treat each argument in its own way. So a module in two of its arguments is an error,
    and ties of arrays between arguments are cut. Ties inside one argument are kept without registration.

    Args:
        transform: a function transformer, `transform(f, **options) → g`. It is recognised by identity, so it must be a
            named object and not a fresh lambda.
        adapter: None if the transform treats all arguments alike, as a composition of `jax.jit`, `jax.checkpoint` and
            logging does. Or a registered transform with the same options and the same treatment, such as `jax.vmap`.
            Or a function `(transform, f, policy, options) → g`. It passes the policy that it gets on, unchanged, to
            the wrapper that it makes.
        takes_operands: True if the transform is called with operands beside the function, as `jax.lax.scan` is. The
            adapter is then a function `(call, **parameters) → result`. It gets a
            `sharedtree.transforms.CallWithOperands`, and the parameters of the transform's call as keyword arguments.
            It decides which of them are packed and how each is treated. `docs/adapters.md` has an example. Such a
            transform refuses `in_place=True`.

    Raises:
        TypeError: if the adapter is none of these, or is itself a transform that `preserve_identities` refuses. Without
            an adapter: if `preserve_identities` refuses the transform.

    Example:
        >>> import jax, sharedtree as st
        >>> def traced_and_logged(f):
        ...     return jax.jit(jax.checkpoint(f))
        >>> st.register_transform(traced_and_logged)
        >>> model = st.Dag([1.0])
        >>> st.preserve_identities(traced_and_logged)(lambda a, b: a is b and 1)(model, model)
        Array(1, dtype=int32, weak_type=True)
    """
    from ._adapters import register

    register(transform, adapter, takes_operands=takes_operands)


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
    """Wraps a transform so that an object passed in twice arrives as one object, and two objects stay two.

    JAX flattens arguments to trees, so a layer at two paths enters `jax.jit` as two layers and leaves it as two. Here
    each shared module, tied array and mutable container is packed once and rebuilt once.

    Args:
        transform: `jax.jit`, `jax.grad`, `jax.value_and_grad`, `jax.jacfwd`, `jax.jacrev`, `jax.hessian`, `jax.vmap`,
            `jax.checkpoint`, their counterparts `equinox.filter_…`, a `functools.partial` of one of these, a transform
            registered with `register_transform`, or any other function transformer.
        policy: what counts as sharing. Default: the policy of the innermost `Context` at each call. It can also be
            passed with the function: `jit(f, policy=Policy(containers=True))`.
        in_place: True to write what the function changed in its arguments back into the caller's objects, as with
            `Policy(in_place=True)`. False if such changes are meant to be lost. Default: what the policy says. This
            option wins over the policy. It can also be passed with the function: `jit(f, in_place=True)`.
        options: options of the transform, bound in advance.

    Returns:
        A transform. It takes a function, and further options, as the original does, and returns a function with the
        same name, docstring and signature. Under `jax.jit` this function has `lower`, `trace`, `eval_shape` and
        `clear_cache`. The transform can be used as a decorator, on methods too. Under Equinox's transforms a module
        becomes a module with the same leaves.

    Raises:
        TypeError: if the transform would not accept its options, or takes operands beside the function and has no
            adapter. The message says what to do instead; for most transforms, pass a `Dag` in the model's place.

    The function it returns raises:
        InconsistentSharingError: if two occurrences of one module that holds traced leaves would be treated
            differently: donated and not, differentiated and not, mapped along different axes. Under an unregistered
            transform, also if they are in different arguments. Arrays and mutable containers are split silently
            instead. But an array raises if its buffer would be donated and another argument keeps it, and a container
            raises if it is within one module or would be written back in place.
        CycleError: if an object contains itself.
        StaticComparisonError: if a static leaf has no usable `==`.
        StaticTracerError: if a tracer is left in a static leaf of the result.

    and warns with:
        UntiedWarning: if a tie enters and does not leave, checked when the function is traced. Also if a gradient
            misses the part through an argument that is not differentiated.
        LostChangeWarning: if `in_place` is not set, and the function changes objects whose library writes changes back
            (Flax NNX, treex, `sharedtree.Module`) and does not return them.
        RetraceWarning: if a static value differs in every call.

    Cost: each call packs its arguments and unpacks its results, in time proportional to the nodes. Arrays are aliased,
    not copied. Traces are cached by structure: other sharing retraces, equal sharing does not. Wrapping the same
    function again with the same options does not retrace either, as in JAX.

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

    Limitations: a closed-over object is not an argument. If it is also passed, it is two objects inside. Arrays outside
    modules are values: in `f(x, x)` the function gets two arrays. Wrap them in a `Dag` to tie them.
    `Policy(containers=True)` gives identity to lists and dicts, and to the arrays in them.
    """
    from ._adapters import wrap_transform

    return wrap_transform(transform, policy, in_place, options)


def preserved_later(transform: Callable[..., Any]) -> Callable[[], Callable[..., Any]]:
    """Returns a function without arguments that returns a transform with identities preserved.

    The first call of that function wraps the transform, and imports the adapters. Later calls return the same object.
    So a file can refer to the wrapped transform without the cost of that import.
    """
    return functools.cache(functools.partial(preserve_identities, transform))
