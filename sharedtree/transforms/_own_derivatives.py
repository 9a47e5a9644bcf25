"""Functions with rules of their own for their derivatives, ready made: `custom_vjp` and `custom_jvp`."""

from collections.abc import Callable
from typing import Any, cast

import jax

from ._ready_made import Said, made_of
from ._signatures import LikeCustomJvp, LikeCustomVjp

_custom_vjp = cast(Callable[..., Callable[[Said], LikeCustomVjp]], made_of)
_custom_jvp = cast(Callable[..., Callable[[Said], LikeCustomJvp]], made_of)


@_custom_vjp(jax.custom_vjp)
def custom_vjp() -> Any:
    """`preserve_identities(jax.custom_vjp)`: a function whose reverse-mode derivative you write yourself.

    The function and both rules take and return modules with their ties. Residuals may be modules, too; what is one
    object in them is one object in `bwd`. The cotangent that `bwd` gets has the shape and the ties of the result. What
    it returns for an argument has the shape of the argument, with `None` wherever there is no gradient: for static
    leaves, for integers, for a whole part. At the paths of a tied leaf, different arrays are added up, and one array
    counts once; numbers are added at each path.

    With `in_place=True` what the function changes in its arguments is written back, or what `fwd` changes where that
    runs instead. The rules stay what they are: `bwd` gets no cotangent for what was changed.

    Args:
        function: the function; without it, returns a decorator. Then `nondiff_argnums` and other options of
            `jax.custom_vjp`; arguments that these name are handed on as they are.
        options: of `jax.custom_vjp`, and `policy=`, a `Policy`.

    Returns:
        The function. `defvjp(fwd, bwd)` sets its rules, with the options of `jax.custom_vjp.defvjp`. With
        `symbolic_zeros`, the leaves that `fwd` gets are JAX's `CustomVJPPrimal`s, and zeros in the cotangent are
        `SymbolicZero`s.

    Raises:
        SharingMismatchError: when it is traced, if `fwd` returns another structure than the function, or if `bwd`
            returns something of another shape, or one array or module of its own at several paths of a tie.
        TypeError: if `bwd` does not return as many cotangents as there are arguments.
        StateGradientError: if a gradient flows through what was changed in place.
        InconsistentSharingError: in place, if a module or a container is in an argument and in the result.

    Example:
        >>> import equinox as eqx, jax.numpy as jnp, sharedtree as st
        >>> class Net(eqx.Module):
        ...     embed: jnp.ndarray
        ...     head: jnp.ndarray
        >>> @st.custom_vjp
        ... def product(net):
        ...     return net.embed * net.head
        >>> def fwd(net):
        ...     return product(net), net
        >>> def bwd(net, cotangent):
        ...     assert net.embed is net.head
        ...     return (Net(cotangent * net.head, cotangent * net.embed),)
        >>> product.defvjp(fwd, bwd)
        >>> w = jnp.array(3.0)
        >>> st.grad(product)(Net(w, w)).embed
        Array(6., dtype=float32, weak_type=True)

    Limitations: a loop that is differentiated and carries on what was changed in place counts as a gradient that flows
    through it, and with `symbolic_zeros` nothing can be in place, which is a `ValueError`. A gradient that `bwd` takes
    in a further `st.jit` is not known to be whole, and has to be said to be. See `preserve_identities` for further
    errors and limitations. Cost: JAX's, and for each rule one walk over what it is given and returns; in place, one
    more over the arguments.
    """


@_custom_jvp(jax.custom_jvp)
def custom_jvp() -> Any:
    """`preserve_identities(jax.custom_jvp)`: a function whose forward-mode derivative you write yourself.

    The tangents that the rule gets are modules like the arguments, with their ties, and `None` where there is no
    tangent. The tangent that it returns is like the result: tied where that is, and `None` for zeros.

    Args:
        function: the function; without it, returns a decorator. Then `nondiff_argnums` and other options of
            `jax.custom_jvp`.
        options: of `jax.custom_jvp`, and `policy=`, a `Policy`.

    Returns:
        The function. `defjvp(jvp)` sets its rule, with the options of `jax.custom_jvp.defjvp`; `defjvps` sets one for
        each argument.

    Raises:
        SharingMismatchError: when it is traced, if the rule returns another structure than the function, a tangent of
            another shape, or two tangents for one leaf.

    Example:
        >>> import jax, jax.numpy as jnp, sharedtree as st
        >>> @st.custom_jvp
        ... def product(dag):
        ...     return dag.tree[0] * dag.tree[1]
        >>> @product.defjvp
        ... def rule(primals, tangents):
        ...     (dag,), (dot,) = primals, tangents
        ...     return product(dag), 2 * dag.tree[0] * dot.tree[0]
        >>> w = jnp.array(3.0)
        >>> st.grad(product)(st.Dag([w, w])).tree[1]
        Array(6., dtype=float32, weak_type=True)

    Limitations: in place it raises `ValueError`, for a tangent of what is changed would have to be known at once. See
    `preserve_identities` for others.
    """
