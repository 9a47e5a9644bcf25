"""The loops and branches of `jax.lax` with identities preserved, ready made, with types for type checkers.

A *carry* is the state that an iteration receives and returns. *Operands* are the arguments of all branches. A *tie*
is one object at several paths of a tree, here mostly an array or a module.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, TypeVarTuple, Unpack, overload

import jax

from ..core._jax_internals import api_boundary
from ._option_lists import ADDED_OPTIONS, lists_options_of
from ._preserve_identities import preserved_later
from ._signatures import Scanning, Usual

Carry = TypeVar("Carry")
X = TypeVar("X")
Y = TypeVar("Y")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")
R = TypeVar("R")

# Each of these functions takes no argument and returns the transform with identities preserved. It imports the adapters
# in its first call, so that `import sharedtree` need not.
_scan = preserved_later(jax.lax.scan)
_while_loop = preserved_later(jax.lax.while_loop)
_fori_loop = preserved_later(jax.lax.fori_loop)
_map = preserved_later(jax.lax.map)
_associative_scan = preserved_later(jax.lax.associative_scan)
_cond = preserved_later(jax.lax.cond)
_switch = preserved_later(jax.lax.switch)


@lists_options_of(jax.lax.scan, *ADDED_OPTIONS)
@api_boundary
def scan(
    f: Callable[[Carry, Any], tuple[Carry, Y]],
    init: Carry,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    **options: Unpack[Scanning],
) -> tuple[Carry, Y]:
    """Runs a function once for each slice of `xs` and carries a state along: `preserve_identities(jax.lax.scan)`.

    The carry, `xs` and the results may be models. A tied leaf of the carry is one object in each iteration and is
    carried once. The same holds for ties within a slice of `xs` and within `y`.

    Each iteration must return the carry with the same classes, static values and ties of modules, with two exceptions:

    - A static number that changes becomes a traced leaf.
    - A tie of arrays or lists may get lost. Often it is not meant, as in the first carry `State(zeros, zeros)`. If the
      iterations return two objects, the two are separate from the beginning. This costs one more trace. A lost tie of
      arrays warns as in `jit`.

    With `in_place=True`, changes of the carry are written back into the caller's objects when the loop ends. For that,
    each object that holds traced leaves must come back in its place. Changes of a slice of `xs` come back stacked.

    Args:
        f: `(carry, x) → (carry, y)`.
        init: the first carry.
        xs: the tree to scan over, along the first axis of each of its leaves.
        length: number of iterations. Needed only if `xs` is None.
        reverse: True to run from the last slice to the first, as `jax.lax.scan` does.
        unroll: number of iterations to unroll, or True for all, as in `jax.lax.scan`.
        options: `policy=`, a `Policy`, and `in_place=`, which wins over it.

    Returns:
        The last carry, and the stacked `y`s. Both are new objects. With `in_place=True`, the carry consists of the
        caller's own objects where they came back.

    Raises:
        SharingMismatchError: if the carry comes back with another class, another static value (but for numbers), or
            other ties of modules.
        InconsistentSharingError: if one module is both in the carry and in `xs`. An array in both becomes two arrays.

    Example:
        >>> import equinox as eqx, jax.numpy as jnp, sharedtree as st
        >>> class Net(eqx.Module):
        ...     embed: jnp.ndarray
        ...     head: jnp.ndarray
        >>> w = jnp.ones(2)
        >>> def step(net, x):
        ...     return st.tree.map(lambda w: w * x, net), net.head
        >>> net, ys = st.scan(step, Net(w, w), jnp.arange(1.0, 4))
        >>> net.embed is net.head, net.head, ys.shape
        (True, Array([6., 6.], dtype=float32), (3, 2))

    See `preserve_identities` for further errors, cost and limitations.
    """
    return _scan()(f, init, xs, length, reverse=reverse, unroll=unroll, **options)


@lists_options_of(jax.lax.while_loop, *ADDED_OPTIONS)
@api_boundary
def while_loop(
    cond_fun: Callable[[Carry], Any], body_fun: Callable[[Carry], Carry], init_val: Carry, **options: Unpack[Usual]
) -> Carry:
    """Runs a function as long as a condition on the carry is true: `preserve_identities(jax.lax.while_loop)`.

    The carry is treated as by `scan`, with the same errors.

    Args:
        cond_fun: carry → boolean scalar, True to go on. If it changes the carry in place, the changes are lost.
        body_fun: carry → next carry.
        init_val: the first carry.
        options: `policy=`, a `Policy`, and `in_place=`, which wins over it.

    Returns:
        The last carry, a new object. With `in_place=True`, the caller's own objects where they came back.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> dag = st.Dag([w, w])
        >>> last = st.while_loop(lambda d: d.tree[0].sum() < 9, lambda d: st.tree.map(lambda x: 2 * x, d), dag)
        >>> last.tree[0] is last.tree[1], last.tree[0]
        (True, Array([8., 8.], dtype=float32))
    """
    return _while_loop()(cond_fun, body_fun, init_val, **options)


@lists_options_of(jax.lax.fori_loop, *ADDED_OPTIONS)
@api_boundary
def fori_loop(
    lower: Any,
    upper: Any,
    body_fun: Callable[[Any, Carry], Carry],
    init_val: Carry,
    *,
    unroll: int | bool | None = None,
    **options: Unpack[Usual],
) -> Carry:
    """Runs a function for each index from `lower` to `upper - 1`: `preserve_identities(jax.lax.fori_loop)`.

    Each next carry must fit the first one as under `scan`, or the same error is raised.

    Args:
        lower: the first index.
        upper: the index after the last one.
        body_fun: (index, carry) → next carry.
        init_val: the first carry.
        unroll: number of iterations to unroll, or True for all, as in `jax.lax.fori_loop`.
        options: `policy=`, a `Policy`, and `in_place=`, which wins over it.

    Returns:
        The last carry, a new object. With `in_place=True`, the caller's own objects where they came back.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> last = st.fori_loop(0, 3, lambda i, d: st.tree.map(lambda x: x + i, d), st.Dag([w, w]))
        >>> last.tree[0] is last.tree[1], last.tree[0]
        (True, Array([4., 4.], dtype=float32))
    """
    return _fori_loop()(lower, upper, body_fun, init_val, unroll=unroll, **options)


@lists_options_of(jax.lax.map, *ADDED_OPTIONS)
@api_boundary
def map(  # noqa: A001 -- as in `jax.lax`
    f: Callable[[X], Y], xs: X, *, batch_size: int | None = None, **options: Unpack[Usual]
) -> Y:
    """Applies a function to each slice of `xs`, one after the other: `preserve_identities(jax.lax.map)`.

    With `in_place=True`, changes of the slices come back stacked, in the caller's objects.

    Args:
        f: slice of `xs` → result.
        xs: the tree to map over, along the first axis of each leaf. Leaves tied in it are tied in each slice.
        batch_size: number of slices to compute at a time by `jax.vmap`. None for one.
        options: `policy=`, a `Policy`, and `in_place=`, which wins over it.

    Returns:
        The stacked results, new objects.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.arange(3.0)
        >>> st.map(lambda d: d.tree[0] + d.tree[1], st.Dag([w, w]))
        Array([0., 2., 4.], dtype=float32)
    """
    return _map()(f, xs, batch_size=batch_size, **options)


@lists_options_of(jax.lax.associative_scan, *ADDED_OPTIONS)
@api_boundary
def associative_scan(
    fn: Callable[[X, X], X], elems: X, reverse: bool = False, axis: int = 0, **options: Unpack[Usual]
) -> X:
    """Computes the cumulative results of an associative function: `preserve_identities(jax.lax.associative_scan)`.

    The result of `fn` must have the same classes, static values and ties of modules as `elems`.

    Args:
        fn: (slice, slice) → slice. Must be associative.
        elems: the tree to combine, along one axis of each leaf.
        reverse: True to combine from the last slice to the first.
        axis: the axis along which the slices are taken. The first by default.
        options: `policy=`, a `Policy`, and `in_place=`, which can only be False.

    Returns:
        A tree in the shape of `elems`. Slice i combines slices 0 to i; with `reverse=True`, slices i to the last.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.arange(4.0)
        >>> sums = st.associative_scan(lambda a, b: st.tree.map(jnp.add, a, b), st.Dag([w, w]))
        >>> sums.tree[0] is sums.tree[1], sums.tree[0]
        (True, Array([0., 1., 3., 6.], dtype=float32))
    """
    return _associative_scan()(fn, elems, reverse=reverse, axis=axis, **options)


@overload
def cond(
    pred: Any, true_fun: Callable[[*Ts], R], false_fun: Callable[[*Ts], R], *operands: *Ts, **options: Unpack[Usual]
) -> R: ...
@overload
def cond(
    pred: Any, true_fun: Callable[[T], R], false_fun: Callable[[T], R], *, operand: T, **options: Unpack[Usual]
) -> R: ...
@lists_options_of(jax.lax.cond, *ADDED_OPTIONS)
@api_boundary
def cond(pred: Any, true_fun: Any, false_fun: Any, *operands: Any, **options: Any) -> Any:
    """Applies one of two functions to the operands, chosen by a boolean: `preserve_identities(jax.lax.cond)`.

    The results of both functions must have the same classes, static values and ties of modules. Two things may differ:

    - If only one result has a tie of arrays or mutable containers, the tie is lost.
    - If a static Python number differs, it comes out as an array.

    Args:
        pred: boolean scalar. True to apply `true_fun`, False to apply `false_fun`.
        true_fun: operands → result.
        false_fun: operands → result, of the same shape.
        operands: arguments of both functions.
        options: `operand=`, one operand by keyword, as in `jax.lax.cond`; `policy=`, a `Policy`, and `in_place=`, which
            wins over it.

    Returns:
        The result of the function, a new object. With `in_place=True`, operands in it are the caller's own objects, if
        both functions return the same operands at the same paths.

    Raises:
        SharingMismatchError: if the results differ in a tie of modules, in classes or in static values.

    Example:
        >>> import equinox as eqx, jax, jax.numpy as jnp, sharedtree as st
        >>> class Net(eqx.Module):
        ...     embed: jax.Array
        ...     head: jax.Array
        >>> w = jnp.ones(2)
        >>> double = lambda net: st.tree.map(lambda x: 2 * x, net)
        >>> net = st.cond(True, double, lambda net: net, Net(w, w))
        >>> net.embed is net.head, net.head
        (True, Array([2., 2.], dtype=float32))

    If only one of the functions keeps a tie, both are traced twice in the first call with operands of this structure.

    See `preserve_identities` for cost and limitations.
    """
    return _cond()(pred, true_fun, false_fun, *operands, **options)


@overload
def switch(index: Any, branches: Sequence[Callable[[*Ts], R]], *operands: *Ts, **options: Unpack[Usual]) -> R: ...
@overload
def switch(index: Any, branches: Sequence[Callable[[T], R]], *, operand: T, **options: Unpack[Usual]) -> R: ...
@lists_options_of(jax.lax.switch, *ADDED_OPTIONS)
@api_boundary
def switch(index: Any, branches: Any, *operands: Any, **options: Any) -> Any:
    """Applies one of several functions to the operands, chosen by an index: `preserve_identities(jax.lax.switch)`.

    Results are treated as by `cond`, with the same errors.

    Args:
        index: integer scalar, the index of the function in `branches`. JAX clamps it to the valid indices.
        branches: functions of the operands, with results of one shape.
        operands: arguments of all functions.
        options: `operand=`, one operand by keyword, as in `jax.lax.switch`; `policy=`, a `Policy`, and `in_place=`,
            which wins over it.

    Returns:
        The result of the function, a new object. With `in_place=True`, operands in it are the caller's own objects, if
        all functions return the same operands at the same paths.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> branches = [lambda d: d.tree["a"] + d.tree["b"], lambda d: d.tree["a"] is d.tree["b"] and 0 * d.tree["a"]]
        >>> st.switch(1, branches, st.Dag({"a": w, "b": w}))
        Array([0., 0.], dtype=float32)
    """
    return _switch()(index, branches, *operands, **options)
