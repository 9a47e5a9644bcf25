"""What a function would return and compute, without running it: `eval_shape` and `make_jaxpr`, ready made."""

from collections.abc import Callable
from typing import Any, ParamSpec, overload

import jax

from .._jax_internals import api_boundary
from ._preserve import preserve_identities

P = ParamSpec("P")

_eval_shape = preserve_identities(jax.eval_shape)


@api_boundary
def eval_shape(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """`preserve_identities(jax.eval_shape)`: what a function would return, without computing it.

    Args:
        function: the function, or what `jit` made of it.
        *args: its arguments, with arrays or `jax.ShapeDtypeStruct`s.
        **kwargs: likewise; but `policy=`, if it is a `Policy`.

    Returns:
        The result with a `jax.ShapeDtypeStruct` for each traced leaf, one for all paths of a tied one.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> shapes = st.eval_shape(lambda d: st.tree.map(jnp.sum, d), st.Dag({"a": w, "b": w})).tree
        >>> shapes["a"] is shapes["b"], shapes["a"]
        (True, ShapeDtypeStruct(shape=(), dtype=float32))

    See `preserve_identities` for errors, cost and limitations. Nothing is written back in place.
    """
    return _eval_shape(function, *args, **kwargs)


@overload
def make_jaxpr(function: Callable[P, Any], /, *positional: Any, **options: Any) -> Callable[P, Any]: ...
@overload
def make_jaxpr(**options: Any) -> Callable[[Callable[P, Any]], Callable[P, Any]]: ...
@api_boundary
def make_jaxpr(*function: Any, **options: Any) -> Any:
    """`preserve_identities(jax.make_jaxpr)`: the jaxpr has one input for a tied leaf, and one output.

    Args:
        function: the function; without it, returns a decorator.
        options: of `jax.make_jaxpr`, `policy=` and `in_place=`. With `return_shape=True` the shapes come in modules.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> st.make_jaxpr(lambda d: d)(st.Dag({"a": w, "b": w}))
        { lambda ; a:f32[2]. let  in (a,) }

    See `preserve_identities` for errors, cost and limitations. Nothing is written back in place.
    """
    return preserve_identities(jax.make_jaxpr)(*function, **options)
