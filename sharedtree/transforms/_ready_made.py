"""The transforms of JAX with identities preserved, ready made, with the types of the functions they take."""

from collections.abc import Callable
from typing import Any, cast

import jax

from ._preserve import preserve_identities
from ._signatures import Checkpoint, Grad, Jit, Jitted as Jitted, ValueAndGrad, Vmap


# What type checkers take each function to be; nothing happens here.
def _typed(function: Any) -> Any:
    return function


as_jit = cast(Callable[[Any], Jit], _typed)
as_grad = cast(Callable[[Any], Grad], _typed)
as_value_and_grad = cast(Callable[[Any], ValueAndGrad], _typed)
as_vmap = cast(Callable[[Any], Vmap], _typed)
as_checkpoint = cast(Callable[[Any], Checkpoint], _typed)


@as_jit
def jit(*function: Any, **options: Any) -> Any:
    """`preserve_identities(jax.jit)`.

    Args:
        function: the function; without it, returns a decorator.
        options: of `jax.jit`, `policy=`, a `Policy`, and `in_place=`, which wins over it.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> st.jit(lambda d: d.tree["a"] is d.tree["b"] and 1)(st.Dag({"a": w, "b": w}))
        Array(1, dtype=int32, weak_type=True)

    See `preserve_identities` for errors, cost and limitations.
    """
    return preserve_identities(jax.jit)(*function, **options)


@as_grad
def grad(*function: Any, **options: Any) -> Any:
    """`preserve_identities(jax.grad)`: the gradient with respect to a module is a module with the same ties.

    Only the inexact traced leaves of a module are differentiated, the other places of the gradient hold `None`. The
    gradient of a tied leaf is the sum over its paths, and is one array at all of them.

    Args:
        function: the function; without it, returns a decorator.
        options: of `jax.grad`, `policy=`, a `Policy`, and `in_place=`, which wins over it. With `allow_int=True`
            integer leaves have float0 gradients, as in JAX. `wrt=` is a filter, which selects among the leaves of the
            differentiated arguments; the others are constants.

    Example:
        >>> import equinox as eqx, jax, jax.numpy as jnp, sharedtree as st
        >>> class Net(eqx.Module):
        ...     embed: jax.Array
        ...     head: jax.Array
        >>> w = jnp.ones(2)
        >>> gradient = st.grad(lambda net: (net.embed * net.head).sum())(Net(w, w))
        >>> gradient.embed is gradient.head, gradient.head
        (True, Array([2., 2.], dtype=float32))

    `wrt` is a filter in the terms of Flax NNX, for any model. It is asked about each path and the value there: the
    variable of NNX that holds a leaf, or the leaf. A class selects its instances, and the leaves whose innermost module
    is one; a string, values with this `tag`; a function, of a path (a tuple of names, keys and indices) and a value,
    those for which it is True; `...` and True everything, False nothing, a list or tuple what any in it selects. None,
    the default, is no filter. What is selected and not inexact has the gradient `None`, outside modules too.

        >>> gradient = st.grad(lambda d: d["w"] * d["b"], wrt=lambda path, value: path == ("w",))
        >>> gradient({"w": 2.0, "b": 3.0})
        {'b': None, 'w': Array(3., dtype=float32, weak_type=True)}

    The gradient has the shape and the ties of the model, `None` where nothing was selected, as `apply_updates` and
    `flax.nnx.Optimizer` take it; `optimizer` does if the model that `init` got has `None` there, too. A filter is asked
    at each path of what is tied, twice. Modules and variables must be selected at all of their paths or at none. An
    array that is not is two arrays inside, with an `UntiedWarning`. To select nothing is a `ValueError`.

    An array that is in a differentiated argument and in one that is not is two arrays inside, as in vanilla JAX, and
    its gradient lacks what flows through the second. Of two differentiated arguments that hold one array, each gets the
    sum.

    See `preserve_identities` for errors, cost and limitations. Norms over the unpacked gradient (`optax.global_norm`)
    count a tied leaf once for each path; over `sharedtree.tree.leaves(gradient)` once.
    """
    return preserve_identities(jax.grad)(*function, **options)


@as_value_and_grad
def value_and_grad(*function: Any, **options: Any) -> Any:
    """`preserve_identities(jax.value_and_grad)`; see `grad`.

    Args:
        function: the function; without it, returns a decorator.
        options: of `jax.value_and_grad`, `policy=`, a `Policy`, `in_place=`, which wins over it, and `wrt=`.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> value, gradient = st.value_and_grad(lambda d: d.tree[0] * d.tree[0])(st.Dag([jnp.array(3.0)]))
        >>> float(value), float(gradient.tree[0])
        (9.0, 6.0)
    """
    return preserve_identities(jax.value_and_grad)(*function, **options)


@as_vmap
def vmap(*function: Any, **options: Any) -> Any:
    """`preserve_identities(jax.vmap)`.

    `in_axes` and `out_axes` may reach inside modules. A tied array that they give two axes is two arrays inside; a
    shared module must have the same axes at all of its paths.

    Args:
        function: the function; without it, returns a decorator.
        options: of `jax.vmap`, `policy=`, a `Policy`, and `in_place=`, which wins over it.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.arange(3.0)
        >>> st.vmap(lambda d: d.tree["a"] + d.tree["b"])(st.Dag({"a": w, "b": w}))
        Array([0., 2., 4.], dtype=float32)

    See `preserve_identities` for errors, cost and limitations.
    """
    return preserve_identities(jax.vmap)(*function, **options)


@as_checkpoint
def checkpoint(*function: Any, **options: Any) -> Any:
    """`preserve_identities(jax.checkpoint)`; `remat` is the same.

    Args:
        function: the function; without it, returns a decorator.
        options: of `jax.checkpoint`, `in_place=`, and `policy=`: JAX's, or a `Policy`; the type says which.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> f = st.checkpoint(lambda d: jnp.sin(d.tree[0]).sum())
        >>> st.grad(f)(st.Dag([jnp.zeros(2)])).tree
        [Array([1., 1.], dtype=float32)]

    See `preserve_identities` for errors, cost and limitations.
    """
    return preserve_identities(jax.checkpoint)(*function, **options)


remat = checkpoint
"""`checkpoint`, by the other name that it has in JAX."""
