"""The loops and branches of `jax.lax` with identities preserved, ready made, with the types of what they take."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, TypeVarTuple, Unpack, overload

import jax

from ..core._jax_internals import api_boundary
from ._option_lists import OURS, lists_options_of
from ._preserve_identities import preserved_later
from ._signatures import Scanning, Usual

Carry = TypeVar("Carry")
X = TypeVar("X")
Y = TypeVar("Y")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")
R = TypeVar("R")

_scan = preserved_later(jax.lax.scan)
_while_loop = preserved_later(jax.lax.while_loop)
_fori_loop = preserved_later(jax.lax.fori_loop)
_map = preserved_later(jax.lax.map)
_associative_scan = preserved_later(jax.lax.associative_scan)
_cond = preserved_later(jax.lax.cond)
_switch = preserved_later(jax.lax.switch)


@lists_options_of(jax.lax.scan, *OURS)
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
    """`preserve_identities(jax.lax.scan)`: models as carry, models as what is scanned over, models as what comes out.

    What is shared in the carry is shared in each iteration and carried once; the same holds for one slice of `xs` and
    for `ys`. Each iteration returns the carry with the same classes, static values and ties of modules. Ties of arrays
    and lists, which may be accidents (`State(zeros, zeros)`), hold if the carry has them before and after; one that is
    lost warns as in `jit`, and costs one more trace. A static number that changes becomes a traced leaf.

    With `Policy(in_place=True)` changes of the carry are written back into the caller's objects when the loop ends, if
    each object that holds traced leaves comes back in its place; changes of what is scanned over come back stacked.

    Args:
        f: `(carry, x) → (carry, y)`.
        init: the first carry.
        xs: what is scanned over, along the first axis of each of its leaves.
        length: how many iterations, if `xs` is None.
        reverse: of `jax.lax.scan`.
        unroll: likewise.
        options: `policy=`, a `Policy`, and `in_place=`, which wins over it.

    Returns:
        The last carry and the stacked ys, new objects.

    Raises:
        SharingMismatchError: if the carry comes out with another class, static value or tie of modules.
        InconsistentSharingError: if one module is carried and scanned over. Arrays that are become two.

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


@lists_options_of(jax.lax.while_loop, *OURS)
@api_boundary
def while_loop(
    cond_fun: Callable[[Carry], Any], body_fun: Callable[[Carry], Carry], init_val: Carry, **options: Unpack[Usual]
) -> Carry:
    """`preserve_identities(jax.lax.while_loop)`; the carry is treated as that of `scan`.

    Args:
        cond_fun: whether to go on; changes nothing.
        body_fun: one iteration.
        init_val: the first carry.
        options: as of `scan`.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> dag = st.Dag([w, w])
        >>> last = st.while_loop(lambda d: d.tree[0].sum() < 9, lambda d: st.tree.map(lambda x: 2 * x, d), dag)
        >>> last.tree[0] is last.tree[1], last.tree[0]
        (True, Array([8., 8.], dtype=float32))
    """
    return _while_loop()(cond_fun, body_fun, init_val, **options)


@lists_options_of(jax.lax.fori_loop, *OURS)
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
    """`preserve_identities(jax.lax.fori_loop)`; the carry is treated as that of `scan`.

    Args:
        lower: the first index.
        upper: the one after the last.
        body_fun: (index, carry) → the next carry.
        init_val: the first carry.
        unroll: of `jax.lax.fori_loop`.
        options: as of `scan`.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> last = st.fori_loop(0, 3, lambda i, d: st.tree.map(lambda x: x + i, d), st.Dag([w, w]))
        >>> last.tree[0] is last.tree[1], last.tree[0]
        (True, Array([4., 4.], dtype=float32))
    """
    return _fori_loop()(lower, upper, body_fun, init_val, unroll=unroll, **options)


@lists_options_of(jax.lax.map, *OURS)
@api_boundary
def map(  # noqa: A001 -- as in `jax.lax`
    f: Callable[[X], Y], xs: X, *, batch_size: int | None = None, **options: Unpack[Usual]
) -> Y:
    """`preserve_identities(jax.lax.map)`.

    Args:
        f: the function.
        xs: what it is mapped over, along the first axis of each leaf. What is shared in it is shared in each slice.
        batch_size: of `jax.lax.map`.
        options: as of `scan`.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.arange(3.0)
        >>> st.map(lambda d: d.tree[0] + d.tree[1], st.Dag([w, w]))
        Array([0., 2., 4.], dtype=float32)
    """
    return _map()(f, xs, batch_size=batch_size, **options)


@lists_options_of(jax.lax.associative_scan, *OURS)
@api_boundary
def associative_scan(
    fn: Callable[[X, X], X], elems: X, reverse: bool = False, axis: int = 0, **options: Unpack[Usual]
) -> X:
    """`preserve_identities(jax.lax.associative_scan)`.

    What `fn` returns has the classes, static values and ties of modules of `elems`, as the carry of `scan`.

    Args:
        fn: an associative function of two slices.
        elems: what is combined, along the first axis of each leaf.
        reverse: of `jax.lax.associative_scan`.
        axis: likewise.
        options: `policy=`, a `Policy`, and `in_place=`, which can only be False.

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
@lists_options_of(jax.lax.cond, *OURS)
@api_boundary
def cond(pred: Any, true_fun: Any, false_fun: Any, *operands: Any, **options: Any) -> Any:
    """`preserve_identities(jax.lax.cond)`.

    The results of both functions must have the same ties of modules, and the same static values. Of the ties of arrays
    and mutable containers those hold that both have, and a static Python number that is not the same in both comes out
    as an array.

    Args:
        pred: which function to apply.
        true_fun: a function of the operands; `pred` is true.
        false_fun: another one.
        operands: what it is applied to.
        options: `operand=`, of `jax.lax.cond`, and those of `scan`.

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

    The results are new objects. Where a tie that only one function keeps is dropped, both are traced twice, the first
    time that they are called with operands of this structure.

    See `preserve_identities` for cost and limitations.
    """
    return _cond()(pred, true_fun, false_fun, *operands, **options)


@overload
def switch(index: Any, branches: Sequence[Callable[[*Ts], R]], *operands: *Ts, **options: Unpack[Usual]) -> R: ...
@overload
def switch(index: Any, branches: Sequence[Callable[[T], R]], *, operand: T, **options: Unpack[Usual]) -> R: ...
@lists_options_of(jax.lax.switch, *OURS)
@api_boundary
def switch(index: Any, branches: Any, *operands: Any, **options: Any) -> Any:
    """`preserve_identities(jax.lax.switch)`; see `cond`.

    Args:
        index: which function to apply.
        branches: functions of the operands.
        operands: what it is applied to.
        options: as of `cond`.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> branches = [lambda d: d.tree["a"] + d.tree["b"], lambda d: d.tree["a"] is d.tree["b"] and 0 * d.tree["a"]]
        >>> st.switch(1, branches, st.Dag({"a": w, "b": w}))
        Array([0., 0.], dtype=float32)
    """
    return _switch()(index, branches, *operands, **options)
