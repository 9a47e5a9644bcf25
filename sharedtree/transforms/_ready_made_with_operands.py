"""The transforms of JAX and Equinox that take what the function is applied to, ready made; and rules of derivatives.

Of a module only the inexact traced leaves are differentiated. Tangents and cotangents are modules with the ties of the
value that they belong to, and None for whatever is not differentiated. Loops and branches are in
`_ready_made_control_flow`.
"""

from collections.abc import Callable
from typing import Any, Literal, TypeVar, Unpack, cast, overload

import equinox as eqx
import jax

from ..core._jax_internals import api_boundary
from ._option_lists import OURS, lists_options_of
from ._preserve_identities import preserved_later
from ._ready_made_transforms import Said, made_of
from ._signatures import LikeCustomJvp, LikeCustomVjp, Linearising, Pulling, Transposing, Usual

R = TypeVar("R")
A = TypeVar("A")

_vjp = preserved_later(jax.vjp)
_jvp = preserved_later(jax.jvp)
_linearize = preserved_later(jax.linearize)
_linear_transpose = preserved_later(jax.linear_transpose)
_filter_vjp = preserved_later(eqx.filter_vjp)
_filter_jvp = preserved_later(eqx.filter_jvp)
_filter_eval_shape = preserved_later(eqx.filter_eval_shape)
_eval_shape = preserved_later(jax.eval_shape)


@overload
def vjp(
    function: Callable[..., R], /, *primals: Any, has_aux: Literal[False] = False, **options: Unpack[Pulling]
) -> tuple[R, Callable[[Any], tuple[Any, ...]]]: ...
@overload
def vjp(
    function: Callable[..., tuple[R, A]], /, *primals: Any, has_aux: Literal[True], **options: Unpack[Pulling]
) -> tuple[R, Callable[[Any], tuple[Any, ...]], A]: ...
@lists_options_of(jax.vjp, *OURS)
@api_boundary
def vjp(function: Any, /, *primals: Any, **options: Any) -> Any:
    """`preserve_identities(jax.vjp)`: a value, and the function from its cotangent to those of the primals.

    Args:
        function: the function.
        primals: its arguments.
        options: of `jax.vjp`, `policy=`, a `Policy`, and `in_place=`, which can only be False.

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
    return _vjp()(function, *primals, **options)


@overload
def jvp(
    function: Callable[..., R],
    /,
    primals: Any,
    tangents: Any,
    has_aux: Literal[False] = False,
    **options: Unpack[Usual],
) -> tuple[R, Any]: ...
@overload
def jvp(
    function: Callable[..., tuple[R, A]],
    /,
    primals: Any,
    tangents: Any,
    has_aux: Literal[True],
    **options: Unpack[Usual],
) -> tuple[R, Any, A]: ...
@lists_options_of(jax.jvp, *OURS)
@api_boundary
def jvp(function: Any, /, *operands: Any, **options: Any) -> Any:
    """`preserve_identities(jax.jvp)`: a value and its tangent.

    Args:
        function: the function.
        operands: a tuple of its arguments, the primals, and one of their tangents. What is tied in the primals must be
            one object in the tangents.
        options: of `jax.jvp`, `policy=`, a `Policy`, and `in_place=`, which can only be False.

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
    return _jvp()(function, *operands, **options)


@overload
def linearize(
    function: Callable[..., R], /, *primals: Any, has_aux: Literal[False] = False, **options: Unpack[Linearising]
) -> tuple[R, Callable[..., Any]]: ...
@overload
def linearize(
    function: Callable[..., tuple[R, A]], /, *primals: Any, has_aux: Literal[True], **options: Unpack[Linearising]
) -> tuple[R, Callable[..., Any], A]: ...
@lists_options_of(jax.linearize, *OURS)
@api_boundary
def linearize(function: Any, /, *primals: Any, **options: Any) -> Any:
    """`preserve_identities(jax.linearize)`: a value, and the function from tangents of the primals to its own.

    Args:
        function: the function.
        primals: its arguments.
        options: of `jax.linearize`, `policy=`, a `Policy`, and `in_place=`, which can only be False.

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
    return _linearize()(function, *primals, **options)


@lists_options_of(jax.linear_transpose, *OURS)
@api_boundary
def linear_transpose(
    function: Callable[..., Any], /, *primals: Any, **options: Unpack[Transposing]
) -> Callable[[Any], tuple[Any, ...]]:
    """`preserve_identities(jax.linear_transpose)`: the transpose of a linear function.

    Args:
        function: the function, which must be linear in the inexact leaves of its arguments.
        primals: arguments, or anything of their shapes and dtypes, as `jax.ShapeDtypeStruct`s.
        options: of `jax.linear_transpose`, `policy=`, a `Policy`, and `in_place=`, which can only be False.

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
    return _linear_transpose()(function, *primals, **options)


@overload
def filter_vjp(
    function: Callable[..., R], /, *primals: Any, has_aux: Literal[False] = False, **options: Unpack[Usual]
) -> tuple[R, Callable[[Any], tuple[Any, ...]]]: ...
@overload
def filter_vjp(
    function: Callable[..., tuple[R, A]], /, *primals: Any, has_aux: Literal[True], **options: Unpack[Usual]
) -> tuple[R, Callable[[Any], tuple[Any, ...]], A]: ...
@lists_options_of(eqx.filter_vjp, *OURS)
@api_boundary
def filter_vjp(function: Any, /, *primals: Any, **options: Any) -> Any:
    """`preserve_identities(equinox.filter_vjp)`: as `vjp`, where what is not inexact has the cotangent None.

    Args:
        function: the function.
        primals: its arguments.
        options: of `equinox.filter_vjp`, `policy=`, a `Policy`, and `in_place=`, which can only be False.

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
    return _filter_vjp()(function, *primals, **options)


@lists_options_of(eqx.filter_jvp, *OURS)
@api_boundary
def filter_jvp(function: Callable[..., R], primals: Any, tangents: Any, **options: Any) -> tuple[R, Any]:
    """`preserve_identities(equinox.filter_jvp)`: as `jvp`, where None is the tangent of what is not differentiated.

    Args:
        function: the function.
        primals: a tuple of its arguments.
        tangents: a tuple of their tangents. A tied leaf has one, at all of its paths.
        options: of `equinox.filter_jvp`, `policy=`, a `Policy`, and `in_place=`, which can only be False.

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
    return _filter_jvp()(function, primals, tangents, **options)


@lists_options_of(eqx.filter_eval_shape, *OURS)
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
    return _filter_eval_shape()(function, *args, **kwargs)


@lists_options_of(jax.eval_shape, *OURS)
@api_boundary
def eval_shape(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """`preserve_identities(jax.eval_shape)`: what a function would return, without computing it.

    Args:
        function: the function, or what `jit` made of it.
        *args: its arguments, with arrays or `jax.ShapeDtypeStruct`s.
        **kwargs: likewise; but `policy=`, if it is a `Policy`, and `in_place=`.

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
    return _eval_shape()(function, *args, **kwargs)


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

    Args:
        function: the function; without it, returns a decorator. Then `nondiff_argnums` and other options of
            `jax.custom_vjp`; arguments that these name are handed on as they are.
        options: of `jax.custom_vjp`, `policy=`, a `Policy`, and `in_place=`, which can only be False.

    Returns:
        The function. `defvjp(fwd, bwd)` sets its rules, with the options of `jax.custom_vjp.defvjp`. With
        `symbolic_zeros`, the leaves that `fwd` gets are JAX's `CustomVJPPrimal`s, and zeros in the cotangent are
        `SymbolicZero`s.

    Raises:
        SharingMismatchError: when it is traced, if `fwd` returns another structure than the function, or if `bwd`
            returns something of another shape, or one array or module of its own at several paths of a tie.
        TypeError: if `bwd` does not return as many cotangents as there are arguments.
        ValueError: when it is called in place, for the rules do not say how what the function changes is
            differentiated.

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

    Limitations: a gradient that `bwd` takes in a further `st.jit` is not known to be whole, and has to be said to be.
    Rules of newer JAX that log or accumulate are given to a function of a `Dag`. See `preserve_identities` for further
    errors and limitations. Cost: JAX's, and for each rule one walk over what it is given and returns.
    """


@_custom_jvp(jax.custom_jvp)
def custom_jvp() -> Any:
    """`preserve_identities(jax.custom_jvp)`: a function whose forward-mode derivative you write yourself.

    The tangents that the rule gets are modules like the arguments, with their ties, and `None` where there is no
    tangent. The tangent that it returns is like the result: tied where that is, and `None` for zeros.

    Args:
        function: the function; without it, returns a decorator. Then `nondiff_argnums` and other options of
            `jax.custom_jvp`.
        options: of `jax.custom_jvp`, `policy=`, a `Policy`, and `in_place=`, which can only be False.

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
