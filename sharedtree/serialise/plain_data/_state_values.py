"""What a state has for an object of a model: whether it fits, and what becomes of it."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...core._node_types import carries_identity
from ...core._static_values import Static
from ._state_forms import Form, is_state_leaf


def is_nothing(given: Any, form: Form | None) -> bool:
    """Whether a state leaves to the model what it has. Where there are no tuples, an empty list is left of them."""
    if type(given) is tuple:
        return not given
    return type(given) is list and not given and (form is None or form.kind == "dict")


def sequence(given: Any) -> Sequence[Any] | None:
    """The entries of a list or a tuple, or of a dict by index; None of anything else."""
    if isinstance(given, (list, tuple)) and not hasattr(given, "_fields"):
        return given
    if isinstance(given, Mapping):
        mapping: Mapping[Any, Any] = given
        for kind in (str, int):
            if all(kind(i) in mapping for i in range(len(mapping))):
                return [mapping[kind(i)] for i in range(len(mapping))]
    return None


def is_object(given: Any) -> bool:
    """Whether two occurrences of what a state has are a tie."""
    return carries_identity(given) or isinstance(given, (list, Mapping))


def are_one_value(a: Any, b: Any) -> bool:
    """Whether two objects of a state are values, and equal."""
    if is_object(a) or is_object(b):
        return False
    return is_state_leaf(a) and is_state_leaf(b) and Static(a) == Static(b)


def fits_leaf(obj: Any, given: Any) -> bool:
    """Whether what a state has for a leaf can take its place."""
    if not is_state_leaf(obj) or not is_state_leaf(given):
        return False
    if carries_identity(obj) or carries_identity(given):
        if not hasattr(obj, "dtype") or not hasattr(given, "dtype"):
            return False
        if isinstance(obj, jax.Ref) is not isinstance(given, jax.Ref):
            return False
        if isinstance(given, jax.ShapeDtypeStruct) and not isinstance(obj, jax.ShapeDtypeStruct):
            return False
    elif not (isinstance(obj, np.generic) and isinstance(given, np.generic)):
        return True
    return tuple(obj.shape) == tuple(given.shape) and obj.dtype == given.dtype


def as_in_model(obj: Any, given: Any) -> Any:
    """An array of the state; where the model has one of JAX's, a NumPy one is copied into one.

    `jnp.asarray` and `jax.device_put` may keep NumPy's memory, as its alignment has it, so that the model would change
    with what was loaded.
    """
    if isinstance(obj, jax.Array) and isinstance(given, (np.ndarray, np.generic)):
        return jnp.array(given)
    if isinstance(obj, np.ndarray) and isinstance(given, np.generic):
        return np.asarray(given)
    return given
