"""`preserve_identities` and `register_transform`, as users see them. What they do is in `_adapters`.

Most of this room is imported with the first transform that a program wraps, which is when it decorates its first
function. A program that only reads, ties or saves models does not pay for it.
"""

import functools
from collections.abc import Callable
from typing import Any, overload

from ..ties._policy_and_context import PolicyOption
from ._signatures import Checkpoint, Grad, Jit, LikeCheckpoint, LikeGrad, LikeJit, LikeValueAndGrad, ValueAndGrad


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
    from ._adapters import wrapped

    return wrapped(transform, policy, in_place, options)


def preserved_later(transform: Callable[..., Any]) -> Callable[[], Callable[..., Any]]:
    """Returns a function that gives a transform with identities preserved, and wraps it in the first call."""
    return functools.cache(functools.partial(preserve_identities, transform))
