"""Decides which leaves are traced and which carry identity.

    leaf            traced by Equinox    traced by JAX    carries identity
    an array        yes                  yes              yes
    np.float32(1)   yes                  yes              no
    1.0             no                   yes              no
    jax.nn.relu     no                   no               no

Which column holds for a leaf depends on the module that holds it: its library says (`convention_of` of its row).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._jax_internals import TYPED_NUMBERS
from ._plain_containers import Inherited

PYTHON_NUMBERS = frozenset({bool, int, float, complex})

TRACED_NUMBERS = PYTHON_NUMBERS | TYPED_NUMBERS
"""Classes of numbers that JAX traces: Python's, and the subclasses that JAX passes to derivative rules instead."""

_NAMES_OF_DTYPES = [name for name in dir(jnp) if name.startswith(("bfloat", "float8", "int4", "uint4"))]

NUMPY_NUMBERS: tuple[type, ...] = tuple(
    {np.dtype(code).type for code in "?bhilqBHILQefdFD"}
    | {np.dtype(getattr(jnp, name)).type for name in _NAMES_OF_DTYPES}
)
"""NumPy's scalar classes whose dtypes JAX traces. For each of them there is one dtype object."""

_WITH_IDENTITY = (jax.Array, np.ndarray, jax.ShapeDtypeStruct, jax.Ref)


def carries_identity(leaf: Any) -> bool:
    """Tells whether a traced leaf is an object, two occurrences of which are a tie, and not a value."""
    return isinstance(leaf, _WITH_IDENTITY)


def is_traced(leaf: Any, convention: Inherited) -> bool:
    """Tells whether a leaf becomes an input of the computation, under the convention of its module."""
    # Outside modules the transform decides, and raises its own error for what it cannot trace.
    if convention in ("outside", "any"):
        return True
    # JAX refuses NumPy arrays of texts and objects, so in its convention they are static. To Equinox all are arrays.
    if isinstance(leaf, np.ndarray | np.generic):
        return convention == "equinox" or _is_numeric(leaf.dtype)
    if isinstance(leaf, _WITH_IDENTITY):
        return True
    return convention != "equinox" and (type(leaf) in TRACED_NUMBERS or hasattr(type(leaf), "__jax_array__"))


def _is_numeric(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)
