"""Which leaves are traced, and which carry identity: arrays do, and numbers, NumPy's scalars among them, do not.

Which of an array, a number and anything else is traced depends on the convention of the module that holds it, which its
library says (`convention_of` of its row).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._jax_internals import TYPED_NUMBERS
from ._plain_containers import Inherited

PYTHON_NUMBERS = frozenset({bool, int, float, complex})

TRACED_NUMBERS = PYTHON_NUMBERS | TYPED_NUMBERS
"""Those that JAX gives to rules in their place, too."""

NUMPY_NUMBERS: tuple[type, ...] = tuple(
    {np.dtype(code).type for code in "?bhilqBHILQefdFD"}
    | {np.dtype(getattr(jnp, name)).type for name in dir(jnp) if name.startswith(("bfloat", "float8", "int4", "uint4"))}
)
"""Whose dtypes JAX traces; each has one object for its dtype."""

_WITH_IDENTITY = (jax.Array, np.ndarray, jax.ShapeDtypeStruct, jax.Ref)


def carries_identity(leaf: Any) -> bool:
    """Whether a traced leaf is an object, two occurrences of which are a tie, rather than a value."""
    return isinstance(leaf, _WITH_IDENTITY)


def is_traced(leaf: Any, convention: Inherited) -> bool:
    """Whether a leaf becomes an input of the computation under the convention of its module."""
    if convention in ("outside", "any"):
        return True
    if isinstance(leaf, np.ndarray | np.generic):
        return convention == "equinox" or _is_numeric(leaf.dtype)
    if isinstance(leaf, _WITH_IDENTITY):
        return True
    return convention != "equinox" and (type(leaf) in TRACED_NUMBERS or hasattr(type(leaf), "__jax_array__"))


def _is_numeric(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)
