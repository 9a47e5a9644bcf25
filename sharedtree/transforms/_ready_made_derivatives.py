"""The derivatives of JAX with identities preserved, ready made, but for `grad` and `value_and_grad`.

Of a module only the inexact traced leaves are differentiated. Tangents, cotangents and blocks of Jacobians are modules
with the ties of the value that they belong to, and None for whatever is not differentiated.
"""

from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypeVar, overload

import jax

from .._jax_internals import api_boundary
from ._preserve import preserve_identities

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")


@overload
def vjp(
    function: Callable[..., R], /, *primals: Any, has_aux: Literal[False] = False, **options: Any
) -> tuple[R, Callable[[Any], tuple[Any, ...]]]: ...
@overload
def vjp(
    function: Callable[..., tuple[R, A]], /, *primals: Any, has_aux: Literal[True], **options: Any
) -> tuple[R, Callable[[Any], tuple[Any, ...]], A]: ...
@api_boundary
def vjp(function: Any, /, *primals: Any, **options: Any) -> Any:
    """`preserve_identities(jax.vjp)`: a value, and the function from its cotangent to those of the primals.

    Args:
        function: the function.
        primals: its arguments.
        options: of `jax.vjp`, and `policy=`, a `Policy`.

    Returns:
        What the function returned; a function that takes a cotangent of it and returns a tuple with one for each
        primal; with `has_aux=True`, the auxiliary data. The function is a pytree, as vanilla's, and may cross `jit`.

    The cotangent of a tied leaf of a primal is the sum over its paths. For a tied leaf of the result there may be one
    cotangent at all of its paths, which counts once, or several objects, which are summed. Two primals that hold one
    object both get its whole cotangent.

    Raises, from the function that it returns:
        SharingMismatchError: if a cotangent has not the shape of the result.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> value, pullback = st.vjp(lambda dag: dag.tree["a"] * dag.tree["b"], st.Dag({"a": w, "b": w}))
        >>> pullback(value)[0].tree
        {'a': Array([2., 2.], dtype=float32), 'b': Array([2., 2.], dtype=float32)}

    See `preserve_identities` for errors, cost and limitations. Where there are modules, the function that it returns
    can be called and is a pytree, but has none of the other attributes of vanilla's. Options that are trees cannot
    reach inside a module.
    """
    return preserve_identities(jax.vjp)(function, *primals, **options)


@overload
def jvp(
    function: Callable[..., R], /, primals: Any, tangents: Any, has_aux: Literal[False] = False, **options: Any
) -> tuple[R, Any]: ...
@overload
def jvp(
    function: Callable[..., tuple[R, A]], /, primals: Any, tangents: Any, has_aux: Literal[True], **options: Any
) -> tuple[R, Any, A]: ...
@api_boundary
def jvp(function: Any, /, *operands: Any, **options: Any) -> Any:
    """`preserve_identities(jax.jvp)`: a value and its tangent.

    Args:
        function: the function.
        operands: a tuple of its arguments, the primals, and one of their tangents. What is tied in the primals must be
            one object in the tangents.
        options: of `jax.jvp`, and `policy=`, a `Policy`.

    Returns:
        What the function returned, its tangent, and with `has_aux=True` the auxiliary data.

    Raises:
        SharingMismatchError: if the tangents have not the shape and the ties of the primals.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> dag = st.Dag({"a": w, "b": w})
        >>> st.jvp(lambda dag: dag.tree["a"] * dag.tree["b"], (dag,), (dag,))[1]
        Array([2., 2.], dtype=float32)

    See `preserve_identities` for errors, cost and limitations.
    """
    return preserve_identities(jax.jvp)(function, *operands, **options)


@overload
def linearize(
    function: Callable[..., R], /, *primals: Any, has_aux: Literal[False] = False, **options: Any
) -> tuple[R, Callable[..., Any]]: ...
@overload
def linearize(
    function: Callable[..., tuple[R, A]], /, *primals: Any, has_aux: Literal[True], **options: Any
) -> tuple[R, Callable[..., Any], A]: ...
@api_boundary
def linearize(function: Any, /, *primals: Any, **options: Any) -> Any:
    """`preserve_identities(jax.linearize)`: a value, and the function from tangents of the primals to its own.

    Args:
        function: the function.
        primals: its arguments.
        options: of `jax.linearize`, and `policy=`, a `Policy`.

    Returns:
        What the function returned; a function that takes a tangent for each primal, as `jvp` does; with
        `has_aux=True`, the auxiliary data. The function is a pytree, as vanilla's, and may cross `jit`.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> dag = st.Dag({"a": w, "b": w})
        >>> value, pushforward = st.linearize(lambda dag: dag.tree["a"] * dag.tree["b"], dag)
        >>> pushforward(dag)
        Array([2., 2.], dtype=float32)

    See `preserve_identities` for errors, cost and limitations.
    """
    return preserve_identities(jax.linearize)(function, *primals, **options)


@api_boundary
def linear_transpose(
    function: Callable[..., Any], /, *primals: Any, **options: Any
) -> Callable[[Any], tuple[Any, ...]]:
    """`preserve_identities(jax.linear_transpose)`: the transpose of a linear function.

    Args:
        function: the function, which must be linear in the inexact leaves of its arguments.
        primals: arguments, or anything of their shapes and dtypes, as `jax.ShapeDtypeStruct`s.
        options: of `jax.linear_transpose`, and `policy=`, a `Policy`.

    Returns:
        A function as the one that `vjp` returns.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> transpose = st.linear_transpose(lambda dag: 2 * dag.tree["a"] + dag.tree["b"], st.Dag({"a": w, "b": w}))
        >>> transpose(w)[0].tree["b"]
        Array([3., 3.], dtype=float32)

    See `preserve_identities` for errors, cost and limitations.
    """
    return preserve_identities(jax.linear_transpose)(function, *primals, **options)


@overload
def jacfwd(function: Callable[P, Any], /, *positional: Any, **options: Any) -> Callable[P, Any]: ...
@overload
def jacfwd(**options: Any) -> Callable[[Callable[P, Any]], Callable[P, Any]]: ...
@api_boundary
def jacfwd(*function: Any, **options: Any) -> Any:
    """`preserve_identities(jax.jacfwd)`: the Jacobian, column by column; see `jacrev`.

    Args:
        function: the function; without it, returns a decorator.
        options: of `jax.jacfwd`, `policy=`, a `Policy`, and `wrt=`, a filter, as `grad` has it.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> st.jacfwd(lambda dag: 3 * dag.tree[0])(st.Dag([jnp.ones(1)])).tree
        [Array([[3.]], dtype=float32)]
    """
    return preserve_identities(jax.jacfwd)(*function, **options)


@overload
def jacrev(function: Callable[P, Any], /, *positional: Any, **options: Any) -> Callable[P, Any]: ...
@overload
def jacrev(**options: Any) -> Callable[[Callable[P, Any]], Callable[P, Any]]: ...
@api_boundary
def jacrev(*function: Any, **options: Any) -> Any:
    """`preserve_identities(jax.jacrev)`: the Jacobian, row by row.

    It is what the function returned, with a module in the shape of the argument in place of each leaf. The block of a
    tied leaf is the sum over its paths.

    Args:
        function: the function; without it, returns a decorator.
        options: of `jax.jacrev`, `policy=`, a `Policy`, and `wrt=`, a filter, as `grad` has it.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(1)
        >>> jacobian = st.jacrev(lambda dag: {"out": dag.tree["a"] * dag.tree["b"]})(st.Dag({"a": w, "b": w}))
        >>> jacobian["out"].tree["b"]
        Array([[2.]], dtype=float32)

    See `preserve_identities` for errors, cost and limitations.
    """
    return preserve_identities(jax.jacrev)(*function, **options)


@overload
def hessian(function: Callable[P, Any], /, *positional: Any, **options: Any) -> Callable[P, Any]: ...
@overload
def hessian(**options: Any) -> Callable[[Callable[P, Any]], Callable[P, Any]]: ...
@api_boundary
def hessian(*function: Any, **options: Any) -> Any:
    """`preserve_identities(jax.hessian)`: a module, with another one in place of each leaf.

    Args:
        function: the function; without it, returns a decorator.
        options: of `jax.hessian`, `policy=`, a `Policy`, and `wrt=`, a filter, as `grad` has it.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(1)
        >>> hessian = st.hessian(lambda dag: (dag.tree["a"] * dag.tree["b"]).sum())(st.Dag({"a": w, "b": w}))
        >>> hessian.tree["a"].tree["b"]
        Array([[2.]], dtype=float32)

    See `preserve_identities` for errors, cost and limitations.
    """
    return preserve_identities(jax.hessian)(*function, **options)
