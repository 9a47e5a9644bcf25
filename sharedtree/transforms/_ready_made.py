"""The transforms of JAX with identities preserved, ready made, with the types of the functions they take."""

from collections.abc import Callable
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, overload

import jax

from ._preserve import preserve_identities

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Jitted(Protocol, Generic[P, R_co]):
    """What `sharedtree.jit` returns: the function, and JAX's ways to compile it ahead of time."""

    __name__: str
    __wrapped__: Callable[..., Any]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...  # noqa: D102
    def __get__(self, instance: Any, owner: type | None = None) -> Callable[..., R_co]: ...  # noqa: D105
    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Any: ...  # noqa: D102
    def trace(self, *args: P.args, **kwargs: P.kwargs) -> Any: ...  # noqa: D102
    def eval_shape(self, *args: P.args, **kwargs: P.kwargs) -> Any: ...  # noqa: D102
    def clear_cache(self) -> None: ...  # noqa: D102


@overload
def jit(function: Callable[P, R], /, **options: Any) -> Jitted[P, R]: ...
@overload
def jit(**options: Any) -> Callable[[Callable[P, R]], Jitted[P, R]]: ...
def jit(*function: Any, **options: Any) -> Any:
    """`preserve_identities(jax.jit)`.

    Args:
        function: the function; without it, returns a decorator.
        options: of `jax.jit`, and `policy=`, a `Policy`.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> st.jit(lambda d: d.tree["a"] is d.tree["b"] and 1)(st.Dag({"a": w, "b": w}))
        Array(1, dtype=int32, weak_type=True)

    See `preserve_identities` for errors, cost and limitations.
    """
    return preserve_identities(jax.jit)(*function, **options)


@overload
def grad(function: Callable[P, Any], /, *positional: Any, **options: Any) -> Callable[P, Any]: ...
@overload
def grad(**options: Any) -> Callable[[Callable[P, Any]], Callable[P, Any]]: ...
def grad(*function: Any, **options: Any) -> Any:
    """`preserve_identities(jax.grad)`: the gradient with respect to a module is a module with the same ties.

    Only the inexact traced leaves of a module are differentiated, the other places of the gradient hold `None`. The
    gradient of a tied leaf is the sum over its paths, and is one array at all of them.

    Args:
        function: the function; without it, returns a decorator.
        options: of `jax.grad`. With `allow_int=True` integer leaves have float0 gradients, as in JAX.

    Example:
        >>> import equinox as eqx, jax, jax.numpy as jnp, sharedtree as st
        >>> class Net(eqx.Module):
        ...     embed: jax.Array
        ...     head: jax.Array
        >>> w = jnp.ones(2)
        >>> gradient = st.grad(lambda net: (net.embed * net.head).sum())(Net(w, w))
        >>> gradient.embed is gradient.head, gradient.head
        (True, Array([2., 2.], dtype=float32))

    An array that is in a differentiated argument and in one that is not is two arrays inside, as in vanilla JAX, and
    its gradient lacks what flows through the second. Of two differentiated arguments that hold one array, each gets the
    sum.

    See `preserve_identities` for errors, cost and limitations. Norms over the unpacked gradient (`optax.global_norm`)
    count a tied leaf once for each path; over `sharedtree.tree.leaves(gradient)` once.
    """
    return preserve_identities(jax.grad)(*function, **options)


@overload
def value_and_grad(function: Callable[P, R], /, *positional: Any, **options: Any) -> Callable[P, tuple[R, Any]]: ...
@overload
def value_and_grad(**options: Any) -> Callable[[Callable[P, R]], Callable[P, tuple[R, Any]]]: ...
def value_and_grad(*function: Any, **options: Any) -> Any:
    """`preserve_identities(jax.value_and_grad)`; see `grad`.

    Args:
        function: the function; without it, returns a decorator.
        options: of `jax.value_and_grad`, and `policy=`, a `Policy`.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> value, gradient = st.value_and_grad(lambda d: d.tree[0] * d.tree[0])(st.Dag([jnp.array(3.0)]))
        >>> float(value), float(gradient.tree[0])
        (9.0, 6.0)
    """
    return preserve_identities(jax.value_and_grad)(*function, **options)


@overload
def vmap(function: Callable[P, Any], /, *positional: Any, **options: Any) -> Callable[P, Any]: ...
@overload
def vmap(**options: Any) -> Callable[[Callable[P, Any]], Callable[P, Any]]: ...
def vmap(*function: Any, **options: Any) -> Any:
    """`preserve_identities(jax.vmap)`.

    `in_axes` and `out_axes` may reach inside modules. A tied array that they give two axes is two arrays inside; a
    shared module must have the same axes at all of its paths.

    Args:
        function: the function; without it, returns a decorator.
        options: of `jax.vmap`, and `policy=`, a `Policy`.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.arange(3.0)
        >>> st.vmap(lambda d: d.tree["a"] + d.tree["b"])(st.Dag({"a": w, "b": w}))
        Array([0., 2., 4.], dtype=float32)

    See `preserve_identities` for errors, cost and limitations.
    """
    return preserve_identities(jax.vmap)(*function, **options)


@overload
def checkpoint(function: Callable[P, R], /, **options: Any) -> Callable[P, R]: ...
@overload
def checkpoint(**options: Any) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def checkpoint(*function: Any, **options: Any) -> Any:
    """`preserve_identities(jax.checkpoint)`.

    Args:
        function: the function; without it, returns a decorator.
        options: of `jax.checkpoint`, its `policy` included.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> f = st.checkpoint(lambda d: jnp.sin(d.tree[0]).sum())
        >>> st.grad(f)(st.Dag([jnp.zeros(2)])).tree
        [Array([1., 1.], dtype=float32)]

    See `preserve_identities` for errors, cost and limitations.
    """
    return preserve_identities(jax.checkpoint)(*function, **options)
