"""Checked by pyright, never run: `optimizer` returns what optax calls a transformation."""

from typing import assert_type

import optax

import sharedtree as st

tx = st.optimizer(optax.sgd(0.1), wrt="decay")
assert_type(tx, optax.GradientTransformationExtraArgs)
st.optimizer(optax.sgd)  # pyright: ignore[reportArgumentType]
