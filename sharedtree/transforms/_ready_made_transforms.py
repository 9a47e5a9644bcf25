"""The transforms of JAX and Equinox that take a function, with identities preserved, ready made.

Each is `preserve_identities` of the vanilla transform. It has the options of this transform, and in addition `policy=`,
a `Policy`, and `in_place=`, which wins over the policy. With a function it returns the function under the transform,
without one a decorator.

A *stub*, a function without a body such as `jit` below, has the name and the docstring. `ready_made` makes the
transform from it. The name of the decorator, such as `_jit`, tells type checkers the type of the transform.
"""

import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import Any, cast

import equinox as eqx
import jax

from ..core._jax_internals import api_boundary
from ._option_lists import ADDED_OPTIONS, signature_with, title_of
from ._preserve_identities import preserve_identities
from ._signatures import (
    Checkpoint,
    FilterJit,
    Grad,
    Jacobian,
    Jit,
    Jitted as Jitted,
    MakeJaxpr,
    Pmap,
    ShardMap,
    ValueAndGrad,
    Vmap,
)

Stub = Callable[..., Any]
"""A function without a body: the name and the docstring of a ready-made transform."""


def ready_made(transform: Callable[..., Any], *our_options: str) -> Callable[[Stub], Any]:
    """Returns a decorator that turns a stub into the ready-made version of a transform.

    Args:
        transform: the vanilla transform.
        our_options: further options that this package adds to the transform, and that its adapter takes. `policy` and
            `in_place` are not among them, since all transforms have these two. The signature lists all of them.
    """

    def decorate(stub: Stub) -> Any:
        """Makes the transform, with the name of the stub, its completed docstring, and a signature for `help`."""

        @api_boundary
        def ready(*function_and_options: Any, **options: Any) -> Any:
            # `preserve_identities` imports the adapters, so it is called here, and not when this module is imported.
            return preserve_identities(transform)(*function_and_options, **options)

        functools.update_wrapper(ready, stub)
        ready.__doc__ = _completed_docstring(stub.__doc__ or "", title_of(transform))
        function = inspect.Parameter("function", inspect.Parameter.POSITIONAL_ONLY, default=None)
        ready.__signature__ = signature_with(transform, function, (*our_options, *ADDED_OPTIONS))  # pyright: ignore[reportFunctionMemberAccess]
        return ready

    return decorate


def _completed_docstring(docstring: str, title: str) -> str:
    """Returns a docstring with the usual section `Args:` if it has none, and with a last sentence that has a link.

    Args:
        docstring: docstring of a stub.
        title: name of the vanilla transform.
    """
    text, example, after_example = inspect.cleandoc(docstring).partition("Example:\n")
    usual_args = (
        "function: the function. Without it, returns a decorator.\n"
        f"options: options of `{title}`; `policy=`, a `Policy`, and `in_place=`, which wins over it.\n"
    )
    if "Args:\n" not in text:
        text = f"{text}Args:\n{textwrap.indent(usual_args, '    ')}\n"
    return f"{text}{example}{after_example}\n\nSee `preserve_identities` for errors, cost and limitations.\n"


# For type checkers only: each of these is `ready_made` itself, typed as a decorator that makes one kind of transform.
_jit = cast(Callable[..., Callable[[Stub], Jit]], ready_made)
_filter_jit = cast(Callable[..., Callable[[Stub], FilterJit]], ready_made)
_checkpoint = cast(Callable[..., Callable[[Stub], Checkpoint]], ready_made)
_grad = cast(Callable[..., Callable[[Stub], Grad]], ready_made)
_value_and_grad = cast(Callable[..., Callable[[Stub], ValueAndGrad]], ready_made)
_vmap = cast(Callable[..., Callable[[Stub], Vmap]], ready_made)
_pmap = cast(Callable[..., Callable[[Stub], Pmap]], ready_made)
_shard_map = cast(Callable[..., Callable[[Stub], ShardMap]], ready_made)
_jacobian = cast(Callable[..., Callable[[Stub], Jacobian]], ready_made)
_make_jaxpr = cast(Callable[..., Callable[[Stub], MakeJaxpr]], ready_made)


@_jit(jax.jit)
def jit() -> Any:
    """Compiles a function of models, which keep their ties inside: `preserve_identities(jax.jit)`.

    A tied array is one input and one output of the compiled program. Traces are cached by structure: a call with other
    sharing, other static values, shapes or dtypes compiles again. A module that the function returns unchanged comes
    back as the caller's own object, without a copy. With `in_place=True`, changes of arguments are written back.

    Args:
        function: the function. Without it, returns a decorator.
        options: options of `jax.jit`; `policy=`, a `Policy`, and `in_place=`, which wins over it.

    Returns:
        The function under the transform, with `lower`, `trace`, `eval_shape` and `clear_cache` as under `jax.jit`.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> st.jit(lambda d: d.tree["a"] is d.tree["b"] and 1)(st.Dag({"a": w, "b": w}))
        Array(1, dtype=int32, weak_type=True)
    """


@_grad(jax.grad, "wrt")
def grad() -> Any:
    """Differentiates a scalar function: `preserve_identities(jax.grad)`. A module's gradient has the module's ties.

    Of a module, only inexact traced leaves are differentiated: arrays of a floating-point or complex dtype. For all
    other leaves, the gradient holds `None`. The gradient of a tied leaf is the sum over its paths, and is one array at
    all of them.

    Args:
        function: the function. Without it, returns a decorator.
        options: options of `jax.grad`; `policy=`, a `Policy`, and `in_place=`, which wins over it. With
            `allow_int=True`, integer leaves have float0 gradients, as in JAX. `wrt=` is a filter that selects among the
            leaves of the differentiated arguments. All other leaves are constants.

    Returns:
        A function that returns the gradient, in the shape of the first argument or of those in `argnums`. With
        `has_aux=True` it returns a pair of the gradient and the auxiliary data.

    Example:
        >>> import equinox as eqx, jax, jax.numpy as jnp, sharedtree as st
        >>> class Net(eqx.Module):
        ...     embed: jax.Array
        ...     head: jax.Array
        >>> w = jnp.ones(2)
        >>> gradient = st.grad(lambda net: (net.embed * net.head).sum())(Net(w, w))
        >>> gradient.embed is gradient.head, gradient.head
        (True, Array([2., 2.], dtype=float32))

    `wrt` is a filter as in Flax NNX, for any model. At each path it is asked about the value there: the variable of NNX
    that holds a leaf, or the leaf. It can be

    - a class: selects its instances, and leaves whose innermost module is an instance;
    - a string: selects values whose attribute `tag` is this string;
    - a function of a path (a tuple of names, keys and indices) and a value, or of a leaf: selects where it is True;
    - `...` or True: selects everything; False: selects nothing;
    - a list or tuple of filters: selects a value if one of them does;
    - a tree of booleans or filters, or a list of booleans, in the shape of the argument or of its beginning: selects as
      `equinox.partition` does;
    - None, the default: no filter.

    The gradient of a selected leaf that is not inexact is `None`, outside modules too.

        >>> gradient = st.grad(lambda d: d["w"] * d["b"], wrt=lambda path, value: path == ("w",))
        >>> gradient({"w": 2.0, "b": 3.0})
        {'b': None, 'w': Array(3., dtype=float32, weak_type=True)}

    The gradient has the shape and the ties of the model, and `None` for leaves that were not selected. `apply_updates`
    and `flax.nnx.Optimizer` take it as it is. `optimizer` does if the model passed to `init` has `None` there, too. A
    filter is asked twice at each path, also at each path of a tie. A module or variable must be selected at all of its
    paths or at none. An array that is selected at some of its paths only is two arrays inside, with an `UntiedWarning`.
    A filter that selects nothing raises `ValueError`.

    An array in both a differentiated argument and another one is two arrays inside, as in vanilla JAX. Its gradient
    lacks the part that flows through the second. If two differentiated arguments hold one array, both gradients are
    the sum.

    `sharedtree.tree.norm` counts a tied leaf of the gradient once; `optax.global_norm` counts it once for each path.
    """


@_value_and_grad(jax.value_and_grad, "wrt")
def value_and_grad() -> Any:
    """Computes a scalar function and its gradient: `preserve_identities(jax.value_and_grad)`. See `grad`.

    Args:
        function: the function. Without it, returns a decorator.
        options: options of `jax.value_and_grad`; `policy=`, a `Policy`, and `in_place=`, which wins over it. `wrt=` is
            a filter as `grad` has it.

    Returns:
        A function that returns a pair of the value and the gradient. With `has_aux=True`, the value is itself a pair,
        with the auxiliary data.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> value, gradient = st.value_and_grad(lambda d: d.tree[0] * d.tree[0])(st.Dag([jnp.array(3.0)]))
        >>> float(value), float(gradient.tree[0])
        (9.0, 6.0)
    """


@_vmap(jax.vmap)
def vmap() -> Any:
    """Maps a function over array axes, as if it ran on each slice: `preserve_identities(jax.vmap)`.

    `in_axes` and `out_axes` may reach inside modules. A shared module must have the same axes at all of its paths, or
    `InconsistentSharingError` is raised. An array that is mapped over different axes at two of its paths is two arrays
    inside.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.arange(3.0)
        >>> st.vmap(lambda d: d.tree["a"] + d.tree["b"])(st.Dag({"a": w, "b": w}))
        Array([0., 2., 4.], dtype=float32)
    """


@_checkpoint(jax.checkpoint)
def checkpoint() -> Any:
    """Recomputes intermediate values in the backward pass, to save memory: `preserve_identities(jax.checkpoint)`.

    `remat` is the same function.

    Args:
        function: the function. Without it, returns a decorator.
        options: options of `jax.checkpoint`, and `in_place=`. `policy=` is JAX's checkpoint policy, or a `Policy` of
            this package: the type says which.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> f = st.checkpoint(lambda d: jnp.sin(d.tree[0]).sum())
        >>> st.grad(f)(st.Dag([jnp.zeros(2)])).tree
        [Array([1., 1.], dtype=float32)]
    """


remat = checkpoint
"""`checkpoint`, by its other name in JAX."""


@_jacobian(jax.jacfwd, "wrt")
def jacfwd() -> Any:
    """Computes a Jacobian column by column, in forward mode: `preserve_identities(jax.jacfwd)`.

    Args:
        function: the function. Without it, returns a decorator.
        options: options of `jax.jacfwd`; `policy=`, a `Policy`, and `in_place=`, which wins over it; `wrt=`, a filter
            as `grad` has it.

    Returns:
        A function that returns the Jacobian, a tree of trees. The outer tree is that of the function's result. In the
        place of each leaf it has an inner tree, in the shape of the argument. See `jacrev` for its leaves and its ties.
        In the example the result is one array, so there is only the inner tree.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> st.jacfwd(lambda dag: 3 * dag.tree[0])(st.Dag([jnp.ones(1)])).tree
        [Array([[3.]], dtype=float32)]
    """


@_jacobian(jax.jacrev, "wrt")
def jacrev() -> Any:
    """Computes a Jacobian row by row, in reverse mode: `preserve_identities(jax.jacrev)`.

    Args:
        function: the function. Without it, returns a decorator.
        options: options of `jax.jacrev`; `policy=`, a `Policy`, and `in_place=`, which wins over it; `wrt=`, a filter
            as `grad` has it.

    Returns:
        A function that returns the Jacobian. It has the tree of the function's result, with a tree in the place of each
        leaf. This inner tree has the shape and the ties of the argument. Each of its leaves is a block of the Jacobian:
        the derivative of one leaf of the result with respect to one leaf of the argument. The block of a tied leaf is
        the sum over its paths.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(1)
        >>> jacobian = st.jacrev(lambda dag: {"out": dag.tree["a"] * dag.tree["b"]})(st.Dag({"a": w, "b": w}))
        >>> jacobian["out"].tree["b"]
        Array([[2.]], dtype=float32)
    """


@_jacobian(jax.hessian, "wrt")
def hessian() -> Any:
    """Computes the second derivatives of a scalar function: `preserve_identities(jax.hessian)`.

    Args:
        function: the function. Without it, returns a decorator.
        options: options of `jax.hessian`; `policy=`, a `Policy`, and `in_place=`, which wins over it; `wrt=`, a filter
            as `grad` has it.

    Returns:
        A function that returns the Hessian, a tree in the shape of the argument, with another such tree in the place of
        each leaf. The second derivative with respect to two tied leaves is the sum over the paths of both.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(1)
        >>> hessian = st.hessian(lambda dag: (dag.tree["a"] * dag.tree["b"]).sum())(st.Dag({"a": w, "b": w}))
        >>> hessian.tree["a"].tree["b"]
        Array([[2.]], dtype=float32)
    """


@_shard_map(jax.shard_map)
def shard_map() -> Any:
    """Runs a function on each device, with its shards of the arguments: `preserve_identities(jax.shard_map)`.

    A tied array is one shard on each device, and not one for each path. `in_specs` and `out_specs` may reach inside
    modules. A shared module with different specifications at two of its paths raises `InconsistentSharingError`. An
    array with different specifications at two of its paths becomes two arrays inside the function. As in JAX, each call
    outside `jit` traces the function, so put `jit` around it.

    Args:
        function: the function. Without it, returns a decorator.
        options: options of `jax.shard_map`; `policy=`, a `Policy`, and `in_place=`, which wins over it. With
            `in_place=True`, a changed argument comes out of the function with its specification in `in_specs`.

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
    """


@_pmap(jax.pmap)
def pmap() -> Any:
    """Runs a function on several devices, with one slice of the arguments on each: `preserve_identities(jax.pmap)`.

    `in_axes` and `out_axes` may reach inside modules, with the rules of `vmap`.

    Args:
        function: the function. Without it, returns a decorator.
        options: options of `jax.pmap`; `policy=`, a `Policy`, and `in_place=`, which wins over it.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones((1, 2))
        >>> st.pmap(lambda d: d.tree["a"] + d.tree["b"])(st.Dag({"a": w, "b": w}))
        Array([[2., 2.]], dtype=float32)

    Limitations: the function that `pmap` returns has no `lower`.
    """


@_make_jaxpr(jax.make_jaxpr)
def make_jaxpr() -> Any:
    """Traces a function and returns its jaxpr, without computing anything: `preserve_identities(jax.make_jaxpr)`.

    A tied leaf is one input of the jaxpr, and one output. Nothing is written back in place.

    Args:
        function: the function. Without it, returns a decorator.
        options: options of `jax.make_jaxpr`; `policy=`, a `Policy`, and `in_place=`, which wins over it. With
            `return_shape=True`, the shapes come in modules, as the function returns them.

    Returns:
        A function that returns the jaxpr. With `return_shape=True` it returns a pair of the jaxpr and the shapes.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> st.make_jaxpr(lambda d: d)(st.Dag({"a": w, "b": w}))
        { lambda ; a:f32[2]. let  in (a,) }
    """


@_filter_jit(eqx.filter_jit)
def filter_jit() -> Any:
    """Compiles a function whose arguments need not be arrays: `preserve_identities(equinox.filter_jit)`.

    Arrays are traced. All other leaves are static, outside modules too, where `jit` traces Python numbers. The rest is
    as under `jit`.

    Args:
        function: the function. If it is a module, returns a module whose call is compiled. Without it, returns a
            decorator.
        options: options of `equinox.filter_jit`; `policy=`, a `Policy`, and `in_place=`, which wins over it.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> st.filter_jit(lambda d, name: d.tree["a"] is d.tree["b"] and name)(st.Dag({"a": w, "b": w}), "tied")
        'tied'
    """


@_grad(eqx.filter_grad, "wrt")
def filter_grad() -> Any:
    """Differentiates a scalar function by its inexact arrays: `preserve_identities(equinox.filter_grad)`.

    The gradient of a module is a module with the same ties. For leaves that are not differentiated, it holds `None`.
    The gradient of a tied leaf is the sum over its paths. `wrt=` is a filter as `grad` has it.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> gradient = st.filter_grad(lambda d: (d.tree["a"] * d.tree["b"]).sum())(st.Dag({"a": w, "b": w}))
        >>> gradient.tree["a"] is gradient.tree["b"], gradient.tree["b"]
        (True, Array([2., 2.], dtype=float32))
    """


@_value_and_grad(eqx.filter_value_and_grad, "wrt")
def filter_value_and_grad() -> Any:
    """Computes a scalar function and its gradient: `preserve_identities(equinox.filter_value_and_grad)`.

    Returns a function that returns a pair of the value and the gradient. With `has_aux=True`, the value is itself a
    pair, with the auxiliary data. The gradient is as under `filter_grad`, in the inexact arrays of the first argument.
    `wrt=` is a filter as `grad` has it.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> value, gradient = st.filter_value_and_grad(lambda d: d.tree[0] * d.tree[0])(st.Dag([jnp.array(3.0)]))
        >>> float(value), float(gradient.tree[0])
        (9.0, 6.0)
    """


@_vmap(eqx.filter_vmap)
def filter_vmap() -> Any:
    """Maps a function over the axes of arrays: `preserve_identities(equinox.filter_vmap)`.

    By default, arrays are mapped over their first axis, and other leaves are not mapped. A shared module must have the
    same axes in `in_axes` at all of its paths, or `InconsistentSharingError` is raised. An array that is mapped over
    different axes at two of its paths is two arrays inside.

    Args:
        function: the function. If it is a module, returns a module whose call is mapped. Without it, returns a
            decorator.
        options: options of `equinox.filter_vmap`; `policy=`, a `Policy`, and `in_place=`, which wins over it.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.arange(3.0)
        >>> st.filter_vmap(lambda d: d.tree["a"] + d.tree["b"])(st.Dag({"a": w, "b": w}))
        Array([0., 2., 4.], dtype=float32)
    """


@_checkpoint(eqx.filter_checkpoint)
def filter_checkpoint() -> Any:
    """Recomputes intermediate values in the backward pass: `preserve_identities(equinox.filter_checkpoint)`.

    Arrays are traced, all other leaves are static. The rest is as under `checkpoint`.

    Args:
        function: the function. Without it, returns a decorator.
        options: options of `equinox.filter_checkpoint`, and `in_place=`. `policy=` may be JAX's checkpoint policy or a
            `Policy` of this package. The two are told apart by type.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> f = st.filter_checkpoint(lambda d: jnp.sin(d.tree[0]).sum())
        >>> st.filter_grad(f)(st.Dag([jnp.zeros(2)])).tree
        [Array([1., 1.], dtype=float32)]
    """
