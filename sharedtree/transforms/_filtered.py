"""Equinox's transforms with identities preserved, ready made: `eqx.filter_` becomes `st.filter_`.

Outside modules arguments are as with Equinox: what is no array is static, and of each argument the inexact arrays are
differentiated. Options and results are Equinox's, but that modules in results are the ones that have the ties.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx

from .._jax_internals import api_boundary
from ._preserve import preserve_identities
from ._ready_made import as_checkpoint, as_grad, as_jit, as_value_and_grad, as_vmap


@as_jit
def filter_jit(*function: Any, **options: Any) -> Any:
    """`preserve_identities(equinox.filter_jit)`.

    Args:
        function: the function, or a module, which then becomes a module whose call is compiled; without it, returns a
            decorator.
        options: of `equinox.filter_jit`, `policy=`, a `Policy`, and `in_place=`, which wins over it.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> st.filter_jit(lambda d, name: d.tree["a"] is d.tree["b"] and name)(st.Dag({"a": w, "b": w}), "tied")
        'tied'

    See `preserve_identities` for errors, cost and limitations.
    """
    return preserve_identities(eqx.filter_jit)(*function, **options)


@as_grad
def filter_grad(*function: Any, **options: Any) -> Any:
    """`preserve_identities(equinox.filter_grad)`: the gradient of a module is a module with the same ties.

    Args:
        function: the function; without it, returns a decorator.
        options: of `equinox.filter_grad`, `policy=`, a `Policy`, and `in_place=`, which wins over it.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> gradient = st.filter_grad(lambda d: (d.tree["a"] * d.tree["b"]).sum())(st.Dag({"a": w, "b": w}))
        >>> gradient.tree["a"] is gradient.tree["b"], gradient.tree["b"]
        (True, Array([2., 2.], dtype=float32))

    See `grad` for what becomes of tied leaves, and `preserve_identities` for errors, cost and limitations.
    """
    return preserve_identities(eqx.filter_grad)(*function, **options)


@as_value_and_grad
def filter_value_and_grad(*function: Any, **options: Any) -> Any:
    """`preserve_identities(equinox.filter_value_and_grad)`; see `filter_grad`.

    Args:
        function: the function; without it, returns a decorator.
        options: of `equinox.filter_value_and_grad`, `policy=`, a `Policy`, and `in_place=`, which wins over it.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> value, gradient = st.filter_value_and_grad(lambda d: d.tree[0] * d.tree[0])(st.Dag([jnp.array(3.0)]))
        >>> float(value), float(gradient.tree[0])
        (9.0, 6.0)
    """
    return preserve_identities(eqx.filter_value_and_grad)(*function, **options)


@as_vmap
def filter_vmap(*function: Any, **options: Any) -> Any:
    """`preserve_identities(equinox.filter_vmap)`.

    Args:
        function: the function, or a module, which then becomes a module whose call is mapped; without it, returns a
            decorator.
        options: of `equinox.filter_vmap`, `policy=`, a `Policy`, and `in_place=`, which wins over it. The axes of a
            shared module must be the same at all of its paths; a tied array with two axes is two arrays inside.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.arange(3.0)
        >>> st.filter_vmap(lambda d: d.tree["a"] + d.tree["b"])(st.Dag({"a": w, "b": w}))
        Array([0., 2., 4.], dtype=float32)

    See `preserve_identities` for errors, cost and limitations.
    """
    return preserve_identities(eqx.filter_vmap)(*function, **options)


@as_checkpoint
def filter_checkpoint(*function: Any, **options: Any) -> Any:
    """`preserve_identities(equinox.filter_checkpoint)`.

    Args:
        function: the function; without it, returns a decorator.
        options: of `equinox.filter_checkpoint`, `in_place=`, and `policy=`: JAX's, or a `Policy`; the type says which.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> f = st.filter_checkpoint(lambda d: jnp.sin(d.tree[0]).sum())
        >>> st.filter_grad(f)(st.Dag([jnp.zeros(2)])).tree
        [Array([1., 1.], dtype=float32)]

    See `preserve_identities` for errors, cost and limitations.
    """
    return preserve_identities(eqx.filter_checkpoint)(*function, **options)


@api_boundary
def filter_vjp(function: Callable[..., Any], /, *primals: Any, **options: Any) -> Any:
    """`preserve_identities(equinox.filter_vjp)`: as `vjp`, where what is not inexact has the cotangent None.

    Args:
        function: the function.
        primals: its arguments.
        options: of `equinox.filter_vjp`, and `policy=`, a `Policy`.

    Returns:
        What the function returned; a function that takes a cotangent of it and returns a tuple with one for each
        primal; with `has_aux=True`, the auxiliary data.

    Raises, from the function that it returns:
        SharingMismatchError: if a cotangent has not the shape of the result.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> value, pullback = st.filter_vjp(lambda d: d.tree["a"] * d.tree["b"], st.Dag({"a": w, "b": w}))
        >>> pullback(value)[0].tree["b"]
        Array([2., 2.], dtype=float32)

    See `preserve_identities` for errors, cost and limitations.
    """
    return preserve_identities(eqx.filter_vjp)(function, *primals, **options)


@api_boundary
def filter_jvp(function: Callable[..., Any], primals: Any, tangents: Any, **options: Any) -> Any:
    """`preserve_identities(equinox.filter_jvp)`: as `jvp`, where None is the tangent of what is not differentiated.

    Args:
        function: the function.
        primals: a tuple of its arguments.
        tangents: a tuple of their tangents. A tied leaf has one, at all of its paths.
        options: of `equinox.filter_jvp`, and `policy=`, a `Policy`.

    Returns:
        What the function returned, and its tangent.

    Raises:
        SharingMismatchError: if a tangent has not the shape and the ties of its primal.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> dag = st.Dag({"a": w, "b": w})
        >>> st.filter_jvp(lambda d: d.tree["a"] * d.tree["b"], (dag,), (dag,))[1]
        Array([2., 2.], dtype=float32)

    See `preserve_identities` for errors, cost and limitations.
    """
    return preserve_identities(eqx.filter_jvp)(function, primals, tangents, **options)


@api_boundary
def filter_eval_shape(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """`preserve_identities(equinox.filter_eval_shape)`: a template of what a function returns, with its ties.

    Args:
        function: the function.
        args: its arguments; what is no array or shape is static.
        kwargs: likewise.

    Returns:
        What the function would return, with a `jax.ShapeDtypeStruct` for each array, one for a tied array. What is no
        array is itself.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> def make(size):
        ...     w = jnp.ones(size)
        ...     return st.Dag({"a": w, "b": w})
        >>> template = st.filter_eval_shape(make, 3).tree
        >>> template["a"] is template["b"], template["b"]
        (True, ShapeDtypeStruct(shape=(3,), dtype=float32))

    See `preserve_identities` for errors, cost and limitations.
    """
    return preserve_identities(eqx.filter_eval_shape)(function, *args, **kwargs)
