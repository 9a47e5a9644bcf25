"""Checked by pyright, never run: `TrainState` and its subclasses make states of their own class."""

from typing import Any, assert_type

import flax.training.train_state
import jax
import optax

import sharedtree as st
from sharedtree.linen import TrainState

params: dict[str, Any] = {}
state = TrainState.create(apply_fn=lambda x: x, params=params, tx=optax.adam(1e-3))
assert_type(state, TrainState)
assert_type(state.apply_gradients(grads=params), TrainState)
assert_type(state.replace(step=0), TrainState)
assert_type(st.linen.TrainState.create(apply_fn=None, params=params, tx=st.optimizer(optax.sgd(0.1))), TrainState)
flaxs: flax.training.train_state.TrainState = state


class WithStatistics(TrainState):
    """A field more."""

    batch_stats: dict[str, jax.Array]


more = WithStatistics.create(apply_fn=None, params=params, tx=optax.sgd(0.1), batch_stats={})
assert_type(more, WithStatistics)
assert_type(more.apply_gradients(grads=params, batch_stats={}).batch_stats, dict[str, jax.Array])


@st.jit
def step(state: TrainState, x: jax.Array) -> TrainState:
    """A step."""
    return state.apply_gradients(grads=params)


assert_type(step(state, jax.numpy.ones(2)), TrainState)
state.apply_gradients(params)  # pyright: ignore[reportCallIssue]
TrainState.create(params=params)  # pyright: ignore[reportCallIssue]
