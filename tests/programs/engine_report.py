"""Prints which walk is in use, what it flattens, and what was warned of."""

import warnings

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import sharedtree as st
    from sharedtree.core._native_or_python import engine
import jax.numpy as jnp

w = jnp.ones(2)
print(engine())
print(*st.tree.flatten([w, {"a": w}]))
print([str(each.message) for each in caught if "native" in str(each.message)])
