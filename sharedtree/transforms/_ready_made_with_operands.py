"""The transforms with operands beside the function, and those with rules for derivatives, ready made.

Operands are arguments of the transform itself, as in `jax.vjp(function, *primals)`. Of a module, only the inexact
traced leaves are differentiated. Its tangents and cotangents are modules with the same ties, and None for all other
leaves. Loops and branches are in `_ready_made_control_flow`.
"""

from collections.abc import Callable
from typing import Any, Literal, TypeVar, Unpack, cast, overload

import equinox as eqx
import jax

from ..core._jax_internals import api_boundary
from ._option_lists import ADDED_OPTIONS, lists_options_of
from ._preserve_identities import preserved_later
from ._ready_made_transforms import Stub, ready_made
from ._signatures import CustomJvpDecorator, CustomVjpDecorator, Linearising, Pulling, Transposing, Usual

R = TypeVar("R")
A = TypeVar("A")

# Each of these functions takes no argument and returns the transform with identities preserved. It imports the adapters
# in its first call, so that `import sharedtree` need not.
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
@lists_options_of(jax.vjp, *ADDED_OPTIONS)
@api_boundary
def vjp(function: Any, /, *primals: Any, **options: Any) -> Any:
    """Computes a value and the function that pulls cotangents back through it: `preserve_identities(jax.vjp)`.

    Args:
        function: the function to differentiate.
        primals: its arguments.
        options: options of `jax.vjp`; `policy=`, a `Policy`, and `in_place=`, which can only be False.

    Returns:
        The value, and a function that maps a cotangent of the value to a tuple with a cotangent for each primal. With
        `has_aux=True`, the auxiliary data too. The returned function is a pytree, as JAX's own is, and can be passed to
        `jit`.

    The cotangent of a tied leaf of a primal is the sum over its paths. The cotangent of a tied leaf of the value can be
    one object at all of its paths, which counts once, or several objects, which are added up. If two primals hold one
    object, both get its whole cotangent.

    The function it returns raises:
        SharingMismatchError: if a cotangent does not have the shape of the value.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> value, pullback = st.vjp(lambda dag: dag.tree["a"] * dag.tree["b"], st.Dag({"a": w, "b": w}))
        >>> pullback(value)[0].tree
        {'a': Array([2., 2.], dtype=float32), 'b': Array([2., 2.], dtype=float32)}

    See `preserve_identities` for errors, cost and limitations. Further limitations, if there are modules: the returned
    function has no other attributes of JAX's own, and options that are trees cannot reach inside a module.
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
@lists_options_of(jax.jvp, *ADDED_OPTIONS)
@api_boundary
def jvp(function: Any, /, *operands: Any, **options: Any) -> Any:
    """Computes a value and its tangent: `preserve_identities(jax.jvp)`.

    Args:
        function: the function to differentiate.
        operands: two tuples: the arguments of the function (`primals`), and their tangents. As in JAX, `has_aux` may
            come third. A leaf tied in the primals must have one object as its tangent, at all of its paths.
        options: options of `jax.jvp`; `policy=`, a `Policy`, and `in_place=`, which can only be False.

    Returns:
        The value and its tangent. With `has_aux=True`, the auxiliary data too.

    Raises:
        SharingMismatchError: if the tangents do not have the shape and the ties of the primals.

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
@lists_options_of(jax.linearize, *ADDED_OPTIONS)
@api_boundary
def linearize(function: Any, /, *primals: Any, **options: Any) -> Any:
    """Computes a value and the function that pushes tangents forward through it: `preserve_identities(jax.linearize)`.

    Args:
        function: the function to differentiate.
        primals: its arguments.
        options: options of `jax.linearize`; `policy=`, a `Policy`, and `in_place=`, which can only be False.

    Returns:
        The value, and a function that maps a tangent for each primal to the tangent of the value. With `has_aux=True`,
        the auxiliary data too. The returned function takes one argument for each primal: its tangent, with the same
        ties. It is a pytree, and can be passed to `jit`.

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


@lists_options_of(jax.linear_transpose, *ADDED_OPTIONS)
@api_boundary
def linear_transpose(
    function: Callable[..., Any], /, *primals: Any, **options: Unpack[Transposing]
) -> Callable[[Any], tuple[Any, ...]]:
    """Transposes a linear function: `preserve_identities(jax.linear_transpose)`.

    Args:
        function: the function. It must be linear in the inexact leaves of its arguments.
        primals: arguments of the function, or `jax.ShapeDtypeStruct`s of their shapes and dtypes.
        options: options of `jax.linear_transpose`; `policy=`, a `Policy`, and `in_place=`, which can only be False.

    Returns:
        A function that maps a cotangent of the value to a tuple with a cotangent for each primal, as the function that
        `vjp` returns does.

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
@lists_options_of(eqx.filter_vjp, *ADDED_OPTIONS)
@api_boundary
def filter_vjp(function: Any, /, *primals: Any, **options: Any) -> Any:
    """Computes a value and the function that pulls cotangents back: `preserve_identities(equinox.filter_vjp)`.

    Args:
        function: the function to differentiate.
        primals: its arguments.
        options: options of `equinox.filter_vjp`; `policy=`, a `Policy`, and `in_place=`, which can only be False.

    Returns:
        The value, and a function that maps a cotangent of the value to a tuple with a cotangent for each primal. The
        cotangent of a leaf that is not inexact is None. With `has_aux=True`, the auxiliary data too.

    The function it returns raises:
        SharingMismatchError: if a cotangent does not have the shape of the value.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> value, pullback = st.filter_vjp(lambda d: d.tree["a"] * d.tree["b"], st.Dag({"a": w, "b": w}))
        >>> pullback(value)[0].tree["b"]
        Array([2., 2.], dtype=float32)

    See `preserve_identities` for errors, cost and limitations.
    """
    return _filter_vjp()(function, *primals, **options)


@lists_options_of(eqx.filter_jvp, *ADDED_OPTIONS)
@api_boundary
def filter_jvp(function: Callable[..., R], primals: Any, tangents: Any, **options: Any) -> tuple[R, Any]:
    """Computes a value and its tangent: `preserve_identities(equinox.filter_jvp)`.

    Args:
        function: the function to differentiate.
        primals: tuple of its arguments.
        tangents: tuple of their tangents, with None for leaves that are not differentiated and for zeros. A tied leaf
            must have one object as its tangent, at all of its paths.
        options: keyword arguments of the function, which are not differentiated; `policy=`, a `Policy`,
            and `in_place=`, which can only be False.

    Returns:
        The value, and its tangent.

    Raises:
        SharingMismatchError: if a tangent does not have the shape and the ties of its primal.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> dag = st.Dag({"a": w, "b": w})
        >>> st.filter_jvp(lambda d: d.tree["a"] * d.tree["b"], (dag,), (dag,))[1]
        Array([2., 2.], dtype=float32)

    See `preserve_identities` for errors, cost and limitations.
    """
    return _filter_jvp()(function, primals, tangents, **options)


@lists_options_of(eqx.filter_eval_shape, *ADDED_OPTIONS)
@api_boundary
def filter_eval_shape(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Returns a function's result with shapes in place of arrays: `preserve_identities(equinox.filter_eval_shape)`.

    The function is traced, and nothing is computed. So you get the structure of a model that does not fit into memory,
    for example as a template into which a saved model is loaded.

    Args:
        function: the function.
        args: its arguments. Leaves that are neither arrays nor `jax.ShapeDtypeStruct`s are static.
        kwargs: its keyword arguments. Two of them are options of this package, and do not reach the function.
            `in_place=` is always one, and has no effect. `policy=` is one if its value is a `Policy`.

    Returns:
        The result, with a `jax.ShapeDtypeStruct` for each array, one object for a tied array. Other leaves are as the
        function returned them.

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


@lists_options_of(jax.eval_shape, *ADDED_OPTIONS)
@api_boundary
def eval_shape(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Returns a function's result with shapes in place of arrays: `preserve_identities(jax.eval_shape)`.

    The function is traced, and nothing is computed. With `in_place=True`, nothing is written back.

    Args:
        function: the function. It may be under `sharedtree.jit`.
        *args: its arguments, with arrays or `jax.ShapeDtypeStruct`s.
        **kwargs: its keyword arguments. Two names are options of ours, and do not reach the function: `in_place=`, and
            `policy=`, if it is a `Policy`.

    Returns:
        The result, with a `jax.ShapeDtypeStruct` for each traced leaf, one object for a tied leaf.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> shapes = st.eval_shape(lambda d: st.tree.map(jnp.sum, d), st.Dag({"a": w, "b": w})).tree
        >>> shapes["a"] is shapes["b"], shapes["a"]
        (True, ShapeDtypeStruct(shape=(), dtype=float32))

    See `preserve_identities` for errors, cost and limitations.
    """
    return _eval_shape()(function, *args, **kwargs)


# For type checkers only: each of these is `ready_made` itself, typed as a decorator that makes one kind of transform.
_custom_vjp = cast(Callable[..., Callable[[Stub], CustomVjpDecorator]], ready_made)
_custom_jvp = cast(Callable[..., Callable[[Stub], CustomJvpDecorator]], ready_made)


@_custom_vjp(jax.custom_vjp)
def custom_vjp() -> Any:
    """Lets you write the reverse-mode derivative of a function yourself: `preserve_identities(jax.custom_vjp)`.

    The function and both rules take and return modules with their ties:

    - `fwd` returns the result and the residuals. Residuals may hold modules. One object in them is one object in `bwd`.
    - `bwd` gets the residuals and a cotangent, in the shape and with the ties of the result. It returns a cotangent for
      each argument, in the shape of the argument, or `None` for a leaf or a part without a gradient.
    - The cotangent of a tied leaf of an argument is the sum over its paths. Different arrays at these paths are added
      up, and a number is added for each path. One array at several paths counts once if it is known to be the whole
      sum: if it is a tied leaf of the incoming cotangent, of a gradient made by this package, or of a tree that
      `st.retie` returned. Any other array at several paths is an error, since it could also be the share of each path.

    Args:
        function: the function. Without it, returns a decorator. `nondiff_argnums` and other options of
            `jax.custom_vjp` can follow by position. Arguments at the positions in `nondiff_argnums` are passed on
            unchanged.
        options: options of `jax.custom_vjp`; `policy=`, a `Policy`, and `in_place=`, which can only be False.

    Returns:
        The function under the transform. Its method `defvjp(fwd, bwd)` sets the rules, with the options of
        `jax.custom_vjp.defvjp`. With `symbolic_zeros=True`, `fwd` gets a `CustomVJPPrimal` of JAX for each leaf, and a
        zero in the cotangent is a `SymbolicZero`.

    The function it returns raises:
        SharingMismatchError: if `fwd` returns another structure than the function; or if `bwd` returns another shape
            than that of the arguments, or one array at several paths of a tie that is not known to be the whole sum.
        TypeError: if `bwd` does not return as many cotangents as there are arguments.
        ValueError: if the policy is in place. The rules do not say how changes of arguments are differentiated.

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

    Cost: JAX's own, and for each rule one walk over its arguments and its result.

    Limitations: if `bwd` computes a gradient within another `st.jit`, its tied leaves are not known to be whole sums.
    Pass it through `st.retie`, or for shares through `st.untie`. Newer kinds of rules, which log or accumulate, are not
    translated. Give them to `jax.custom_vjp` of a function of a `Dag`.
    """


@_custom_jvp(jax.custom_jvp)
def custom_jvp() -> Any:
    """Lets you write the forward-mode derivative of a function yourself: `preserve_identities(jax.custom_jvp)`.

    The rule gets a tuple of arguments and a tuple of tangents. A tangent is a module in the shape of its argument, with
    the same ties, and `None` for leaves without a tangent. The rule returns the result, and a tangent in the shape of
    the result: tied where the result is tied, `None` for zeros.

    Args:
        function: the function. Without it, returns a decorator. `nondiff_argnums` and other options of
            `jax.custom_jvp` can follow by position.
        options: options of `jax.custom_jvp`; `policy=`, a `Policy`, and `in_place=`, which can only be False.

    Returns:
        The function under the transform. Its method `defjvp(jvp)` sets the rule, with the options of
        `jax.custom_jvp.defjvp`. Its method `defjvps` sets one rule for each argument instead.

    The function it returns raises:
        SharingMismatchError: if the rule returns another structure than the function, a tangent of another shape, or
            two tangents for one leaf.
        ValueError: if the policy is in place. The rule has no tangent for a changed argument.

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
    """
