"""The transforms of JAX and Equinox that take a function, with identities preserved, ready made.

Each is `preserve_identities` of the vanilla one and has its options, `policy=`, a `Policy`, and `in_place=`, which wins
over that. With a function it returns the function under the transform; without one, a decorator. What is said of each
is what it adds to the vanilla one; errors, cost and limitations are those of `preserve_identities`.
"""

import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import Any, cast

import equinox as eqx
import jax

from ..core._jax_internals import api_boundary
from ._option_lists import OURS, signature_with, title_of
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

Said = Callable[..., Any]


def made_of(transform: Callable[..., Any], *own: str) -> Callable[[Said], Any]:
    """The ready-made version of a transform, of which a function says what it adds.

    Args:
        transform: the vanilla one.
        own: the options of ours that it has, beside `policy` and `in_place`.
    """

    def made(said: Said) -> Any:
        @api_boundary
        def ready(*function: Any, **options: Any) -> Any:
            return preserve_identities(transform)(*function, **options)

        functools.update_wrapper(ready, said)
        ready.__doc__ = _with_usual(said.__doc__ or "", title_of(transform))
        function = inspect.Parameter("function", inspect.Parameter.POSITIONAL_ONLY, default=None)
        ready.__signature__ = signature_with(transform, function, (*own, *OURS))  # pyright: ignore[reportFunctionMemberAccess]
        return ready

    return made


def _with_usual(said: str, title: str) -> str:
    """What is said of one, with what holds of all where it says nothing of its own about that."""
    before, example, after = inspect.cleandoc(said).partition("Example:\n")
    usual = (
        "function: the function; without it, returns a decorator.\n"
        f"options: of `{title}`, `policy=`, a `Policy`, and `in_place=`, which wins over it.\n"
    )
    own = before if "Args:\n" in before else f"{before}Args:\n{textwrap.indent(usual, '    ')}\n"
    return f"{own}{example}{after}\n\nSee `preserve_identities` for errors, cost and limitations.\n"


# What type checkers take each to be; nothing happens here.
_jit = cast(Callable[..., Callable[[Said], Jit]], made_of)
_filter_jit = cast(Callable[..., Callable[[Said], FilterJit]], made_of)
_checkpoint = cast(Callable[..., Callable[[Said], Checkpoint]], made_of)
_grad = cast(Callable[..., Callable[[Said], Grad]], made_of)
_value_and_grad = cast(Callable[..., Callable[[Said], ValueAndGrad]], made_of)
_vmap = cast(Callable[..., Callable[[Said], Vmap]], made_of)
_pmap = cast(Callable[..., Callable[[Said], Pmap]], made_of)
_shard_map = cast(Callable[..., Callable[[Said], ShardMap]], made_of)
_jacobian = cast(Callable[..., Callable[[Said], Jacobian]], made_of)
_make_jaxpr = cast(Callable[..., Callable[[Said], MakeJaxpr]], made_of)


@_jit(jax.jit)
def jit() -> Any:
    """`preserve_identities(jax.jit)`.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> st.jit(lambda d: d.tree["a"] is d.tree["b"] and 1)(st.Dag({"a": w, "b": w}))
        Array(1, dtype=int32, weak_type=True)
    """


@_grad(jax.grad, "wrt")
def grad() -> Any:
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
    is one; a string, values with this `tag`; a function, of a path (a tuple of names, keys and indices) and a value, or
    of a leaf, those for which it is True; `...` and True everything, False nothing, a list or tuple what any in it
    selects. A tree of booleans or filters, of the shape of the argument or of its beginning, selects as
    `equinox.partition` does; so does a list of booleans. None, the default, is no filter. What is selected and not
    inexact has the gradient `None`, outside modules too.

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

    See `preserve_identities` for errors, cost and limitations. `sharedtree.tree.norm` counts a tied leaf of the
    gradient once; `optax.global_norm` counts it once for each path.
    """


@_value_and_grad(jax.value_and_grad, "wrt")
def value_and_grad() -> Any:
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


@_vmap(jax.vmap)
def vmap() -> Any:
    """`preserve_identities(jax.vmap)`.

    `in_axes` and `out_axes` may reach inside modules. A tied array that they give two axes is two arrays inside; a
    shared module must have the same axes at all of its paths.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.arange(3.0)
        >>> st.vmap(lambda d: d.tree["a"] + d.tree["b"])(st.Dag({"a": w, "b": w}))
        Array([0., 2., 4.], dtype=float32)
    """


@_checkpoint(jax.checkpoint)
def checkpoint() -> Any:
    """`preserve_identities(jax.checkpoint)`; `remat` is the same.

    Args:
        function: the function; without it, returns a decorator.
        options: of `jax.checkpoint`, `in_place=`, and `policy=`: JAX's, or a `Policy`; the type says which.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> f = st.checkpoint(lambda d: jnp.sin(d.tree[0]).sum())
        >>> st.grad(f)(st.Dag([jnp.zeros(2)])).tree
        [Array([1., 1.], dtype=float32)]
    """


remat = checkpoint
"""`checkpoint`, by the other name that it has in JAX."""


@_jacobian(jax.jacfwd, "wrt")
def jacfwd() -> Any:
    """`preserve_identities(jax.jacfwd)`: the Jacobian, column by column; see `jacrev`.

    Args:
        function: the function; without it, returns a decorator.
        options: of `jax.jacfwd`, `policy=`, a `Policy`, and `wrt=`, a filter, as `grad` has it.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> st.jacfwd(lambda dag: 3 * dag.tree[0])(st.Dag([jnp.ones(1)])).tree
        [Array([[3.]], dtype=float32)]
    """


@_jacobian(jax.jacrev, "wrt")
def jacrev() -> Any:
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
    """


@_jacobian(jax.hessian, "wrt")
def hessian() -> Any:
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
    """


@_shard_map(jax.shard_map)
def shard_map() -> Any:
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
    """


@_pmap(jax.pmap)
def pmap() -> Any:
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
    """


@_make_jaxpr(jax.make_jaxpr)
def make_jaxpr() -> Any:
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


@_filter_jit(eqx.filter_jit)
def filter_jit() -> Any:
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
    """


@_grad(eqx.filter_grad, "wrt")
def filter_grad() -> Any:
    """`preserve_identities(equinox.filter_grad)`: the gradient of a module is a module with the same ties.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> gradient = st.filter_grad(lambda d: (d.tree["a"] * d.tree["b"]).sum())(st.Dag({"a": w, "b": w}))
        >>> gradient.tree["a"] is gradient.tree["b"], gradient.tree["b"]
        (True, Array([2., 2.], dtype=float32))

    See `grad` for what becomes of tied leaves, and `preserve_identities` for errors, cost and limitations.
    """


@_value_and_grad(eqx.filter_value_and_grad, "wrt")
def filter_value_and_grad() -> Any:
    """`preserve_identities(equinox.filter_value_and_grad)`; see `filter_grad`.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> value, gradient = st.filter_value_and_grad(lambda d: d.tree[0] * d.tree[0])(st.Dag([jnp.array(3.0)]))
        >>> float(value), float(gradient.tree[0])
        (9.0, 6.0)
    """


@_vmap(eqx.filter_vmap)
def filter_vmap() -> Any:
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
    """


@_checkpoint(eqx.filter_checkpoint)
def filter_checkpoint() -> Any:
    """`preserve_identities(equinox.filter_checkpoint)`.

    Args:
        function: the function; without it, returns a decorator.
        options: of `equinox.filter_checkpoint`, `in_place=`, and `policy=`: JAX's, or a `Policy`; the type says which.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> f = st.filter_checkpoint(lambda d: jnp.sin(d.tree[0]).sum())
        >>> st.filter_grad(f)(st.Dag([jnp.zeros(2)])).tree
        [Array([1., 1.], dtype=float32)]
    """
