"""Arithmetic on the floating-point leaves of a tree: their norm, and their dtype.

Each tied leaf counts once. Leaves that a library declares as state count, too.

norm({"embed": w, "head": w})     |w|, where functions of trees return √2 |w|
cast(model, bfloat16)             fp32 arrays → bf16, ties kept; integers, PRNG keys and static values stay
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ..core._node_types import PYTHON_NUMBERS
from ..core._printing import shown
from ..ties._list_ties import is_inexact
from ._jax_tree import leaves, map as _map

T = TypeVar("T")


def norm(tree: Any) -> jax.Array:
    """Computes the 2-norm of the floating-point and complex leaves of a tree, each tied leaf once.

    On a tree without ties it equals `optax.global_norm`, in the same dtype. For a gradient with ties it is the norm
    that `optax.clip_by_global_norm` uses inside `sharedtree.optimizer`.

    Args:
        tree: a gradient, a model, a `Dag`, or any container of modules and arrays. Integers, PRNG keys and static
            values do not count.

    Returns:
        A real scalar; 0 if there is no such leaf.

    Cost: one walk over the nodes, and one reduction for each leaf.

    Example:
        >>> import jax.numpy as jnp, optax, sharedtree as st
        >>> w = jnp.array([3.0, 4.0])
        >>> gradient = {"embed": w, "head": w, "step": jnp.array(7)}
        >>> float(st.tree.norm(gradient))
        5.0

    Limitations: squares are computed and added in the dtype of the leaves, as optax does, and may overflow or round.
    For single precision, call `norm(cast(tree, jnp.float32))`. At zero the gradient of `norm` is NaN.
    """
    squares = [_sum_of_squares(leaf) for leaf in leaves(tree) if is_inexact(leaf)]
    return jnp.array(jnp.sqrt(sum(squares)))


def _sum_of_squares(leaf: Any) -> jax.Array:
    """Returns the sum of the squared absolute values of a leaf, as a real scalar. The leaf may be a reference."""
    value = leaf[...] if isinstance(leaf, jax.Ref) else leaf
    square = jnp.square(value.real) + jnp.square(value.imag) if jnp.iscomplexobj(value) else jnp.square(value)
    return jnp.sum(square)


def cast(tree: T, dtype: Any) -> T:
    """Casts the floating-point arrays of a tree to another precision. Each tied array is cast once, so ties are kept.

    Args:
        tree: a model, a gradient, an optimizer state, or any container of modules and arrays; it is not changed.
        dtype: a floating-point dtype, such as `jnp.bfloat16`.

    Returns:
        A tree of new nodes. NumPy arrays stay NumPy arrays, and abstract arrays stay abstract. Integers, booleans,
        complex numbers, PRNG keys, Python numbers and static values are those of `tree`, as are arrays that have the
        dtype. Variables of Flax NNX keep their class and their metadata.

    Raises:
        TypeError: if `dtype` is no floating-point dtype, or a leaf is a floating-point `jax.Ref`, whose dtype is fixed.

    Cost: one walk over the nodes, and one new array for each leaf of another dtype.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> half = st.tree.cast({"embed": w, "head": w, "step": jnp.array(7)}, jnp.bfloat16)
        >>> half["embed"].dtype, half["embed"] is half["head"], half["step"].dtype
        (dtype(bfloat16), True, dtype('int32'))
    """
    target_dtype = _floating_dtype(dtype)

    def in_dtype(leaf: Any) -> Any:
        """Returns the leaf in the target dtype, or the same object if it is not cast."""
        if type(leaf) in PYTHON_NUMBERS or not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        if isinstance(leaf, jax.Ref):
            raise TypeError(
                f"`cast` cannot change the dtype of a `jax.Ref`, which is a place for an array of {leaf.dtype}. Cast "
                "what is read from it:\n"
                "    value = ref[...].astype(dtype)"
            )
        # The cast also takes the weak type away, as `astype` does.
        if leaf.dtype == target_dtype and not getattr(leaf, "weak_type", False):
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, target_dtype, sharding=leaf.sharding)
        return leaf.astype(target_dtype if isinstance(leaf, (np.ndarray, np.generic)) else dtype)

    return _map(in_dtype, tree)


def _floating_dtype(dtype: Any) -> np.dtype[Any]:
    """Converts the argument `dtype` of `cast` to a floating-point dtype of NumPy.

    Raises:
        TypeError: if the argument is no dtype, or another dtype.
    """
    try:
        # NumPy takes None for float64.
        numpy_dtype = None if dtype is None else jnp.dtype(dtype)
    except TypeError:
        numpy_dtype = None
    if numpy_dtype is None or not jnp.issubdtype(numpy_dtype, jnp.floating):
        kind = "no dtype" if numpy_dtype is None else f"the dtype {numpy_dtype}"
        raise TypeError(
            f"`cast` takes a floating-point dtype, and {shown(dtype)} is {kind}. It casts floating-point leaves only, "
            "from one precision to another:\n"
            "    model = sharedtree.tree.cast(model, jnp.bfloat16)\n"
            "For other casts, such as to integers, map a function:\n"
            "    model = sharedtree.tree.map(lambda leaf: leaf.astype(dtype), model)"
        )
    return numpy_dtype
