"""Checked by pyright, never run: `load_state` returns what it is given, and a report where not everything must fit."""

from typing import Any, assert_type

import equinox as eqx
import jax

import sharedtree as st


class Layer(eqx.Module):
    weight: jax.Array


layer = Layer(jax.numpy.ones(2))
assert_type(st.state(layer), Any)
assert_type(st.state(layer, keep=eqx.is_array), Any)
assert_type(st.load_state(layer, st.state(layer)), Layer)
assert_type(st.load_state(layer, {}, strict=True), Layer)
assert_type(st.load_state(layer, {}, strict=False), tuple[Layer, st.StateReport])
assert_type(st.register_state(Layer, lambda obj: obj.weight, lambda obj, new: Layer(new)), None)
