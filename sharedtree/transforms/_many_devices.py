"""`shard_map` and `pmap` with identities preserved, ready made."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

import jax

from ._preserve import preserve_identities

P = ParamSpec("P")
R = TypeVar("R")


@overload
def shard_map(function: Callable[P, R], /, **options: Any) -> Callable[P, R]: ...
@overload
def shard_map(**options: Any) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def shard_map(*function: Any, **options: Any) -> Any:
    """`preserve_identities(jax.shard_map)`: of a tied array each device gets one shard.

    `in_specs` and `out_specs` may reach inside modules. A tied array that they cut in two ways is two arrays inside; a
    shared module must have the same specifications at all of its paths. As in JAX, the function is traced on every call
    that is not itself traced, so put `jit` around it.

    Args:
        function: the function; without it, returns a decorator.
        options: of `jax.shard_map`, `policy=` and `in_place=`. With `in_place=True`, what the function changed
            leaves it as `in_specs` says.

    Example:
        >>> import jax, jax.numpy as jnp, sharedtree as st
        >>> from jax.sharding import PartitionSpec
        >>> w = jnp.arange(2.0)
        >>> mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> double = st.shard_map(
        ...     lambda d: d.tree["a"] + d.tree["b"] if d.tree["a"] is d.tree["b"] else None,
        ...     mesh=mesh,
        ...     in_specs=PartitionSpec("x"),
        ...     out_specs=PartitionSpec("x"),
        ... )
        >>> double(st.Dag({"a": w, "b": w}))
        Array([0., 2.], dtype=float32)

    See `preserve_identities` for errors, cost and limitations.
    """
    return preserve_identities(jax.shard_map)(*function, **options)


@overload
def pmap(function: Callable[P, Any], /, *positional: Any, **options: Any) -> Callable[P, Any]: ...
@overload
def pmap(**options: Any) -> Callable[[Callable[P, Any]], Callable[P, Any]]: ...
def pmap(*function: Any, **options: Any) -> Any:
    """`preserve_identities(jax.pmap)`; see `vmap` for `in_axes` and `out_axes`, which may reach inside modules.

    Args:
        function: the function; without it, returns a decorator.
        options: of `jax.pmap`, and `policy=` and `in_place=`.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones((1, 2))
        >>> st.pmap(lambda d: d.tree["a"] + d.tree["b"])(st.Dag({"a": w, "b": w}))
        Array([[2., 2.]], dtype=float32)

    Limitations: what it returns has no `lower`.

    See `preserve_identities` for errors, cost and limitations.
    """
    return preserve_identities(jax.pmap)(*function, **options)
