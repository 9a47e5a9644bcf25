"""Subjects that call a function again and again, each time with what it returned, as a training loop does.

New objects are made and old ones collected all the time, and now and then somebody replaces an attribute. A loop that
fed the same objects each time would measure caches that no real program hits.
"""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

import sharedtree as st

from ._measuring import Subject
from ._models import (
    Model,
    fields_of,
    import_brainstate,
    import_nnx,
    occurrences,
    to_brainstate,
    to_nnx,
    unique_arrays,
)

CALLS = 10
"""How many calls there are before an attribute is replaced again."""

Change = Callable[[Any, jax.Array], None]


def increment(tree: Any) -> Any:
    """One more, at each path."""
    return jax.tree.map(lambda x: x + 1, tree)


def increment_once(tree: Any) -> Any:
    """One more, for each array once."""
    return st.tree.map(lambda x: x + 1, tree)


def looping(
    step: Callable[[Any], Any],
    state: Any,
    change: Change,
    last: Callable[[Any], jax.Array],
    values: Callable[[Any], Sequence[Any]],
) -> Subject:
    """A subject that replaces an attribute and then makes `CALLS` calls, each waited for.

    Args:
        step: state → state, the call that is measured.
        state: the first state.
        change: replaces one array of a state.
        last: an array of a state, to be waited for. All arrays of a call are ready when one is.
        values: the arrays of a state, tied ones at each path.
    """
    fresh = jnp.full(2, 0.5)

    def run() -> None:
        nonlocal state
        change(state, fresh)
        for _ in range(CALLS):
            state = step(state)
            last(state).block_until_ready()

    return Subject(run, lambda: jax.device_get(values(state)), CALLS)


def last_array(model: Any) -> Any:
    """The last array of the last block, or what the library keeps it in."""
    block = model.blocks[-1]
    return getattr(block, fields_of(block)[-1])


def flat_list(model: Model) -> Subject:
    """The limit: nothing but a list of the arrays, each once."""
    arrays, places = unique_arrays(model)

    def change(arrays: list[Any], fresh: jax.Array) -> None:
        arrays[0] = fresh

    step = jax.jit(lambda arrays: [x + 1 for x in arrays])
    return looping(step, arrays, change, lambda arrays: arrays[-1], lambda arrays: [arrays[i] for i in places])


def equinox_model(model: Model, step: Callable[[Model], Model]) -> Subject:
    """The Equinox model itself. Where the step has untied it, an attribute has to be replaced in each copy."""
    first = fields_of(model.blocks[0])[0]
    first_of_all = [
        i for i, block in enumerate(model.blocks) if getattr(block, first) is getattr(model.blocks[0], first)
    ]

    def change(model: Model, fresh: jax.Array) -> None:
        for i in first_of_all:
            object.__setattr__(model.blocks[i], first, fresh)

    return looping(step, model, change, last_array, occurrences)


def sharedtree_model(model: Model) -> Subject:
    """The same, wrapped. One change is enough, since what was one object still is."""

    first = fields_of(model.blocks[0])[0]

    def change(model: Model, fresh: jax.Array) -> None:
        object.__setattr__(model.blocks[0], first, fresh)

    return looping(st.jit(increment_once), model, change, last_array, occurrences)


def nnx_model(model: Model, *, cached: bool = False) -> Subject:
    """The network in NNX, changed in place."""
    nnx = import_nnx()
    network = to_nnx(model)
    first = fields_of(model.blocks[0])[0]

    @nnx.jit
    def update(network: Any) -> None:
        nnx.update(network, increment(nnx.state(network)))

    call = nnx.cached_partial(update, network) if cached else lambda: update(network)

    def step(network: Any) -> Any:
        call()
        return network

    def change(network: Any, fresh: jax.Array) -> None:
        getattr(network.blocks[0], first).set_value(fresh)

    return looping(
        step,
        network,
        change,
        lambda network: last_array(network).get_value(),
        lambda network: [variable.get_value() for variable in occurrences(network)],
    )


def nnx_split(model: Model) -> Subject:
    """The network in NNX, taken apart once, before the loop: what Flax advises where NNX's own `jit` is too slow."""
    nnx = import_nnx()
    graph, state = nnx.split(to_nnx(model))
    first = fields_of(model.blocks[0])[0]

    def change(state: Any, fresh: jax.Array) -> None:
        state["blocks"][0][first].set_value(fresh)

    leaf = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, nnx.Variable))[-1]
    path = next(path for path, variable in nnx.to_flat_state(state) if variable is leaf)

    def last(state: Any) -> jax.Array:
        for key in path:
            state = state[key]
        return state.get_value()

    return looping(
        jax.jit(increment),
        state,
        change,
        last,
        lambda state: [variable.get_value() for variable in occurrences(nnx.merge(graph, state))],
    )


def brainstate_model(model: Model) -> Subject:
    """The network in brainstate, changed in place. States are found by tracing, not in the arguments."""
    brainstate = import_brainstate()
    network = to_brainstate(model)
    states = list(network.states().values())
    first = fields_of(model.blocks[0])[0]

    @brainstate.transform.jit
    def update() -> None:
        for state in states:
            state.value = state.value + 1

    def step(network: Any) -> Any:
        update()
        return network

    def change(network: Any, fresh: jax.Array) -> None:
        getattr(network.blocks[0], first).value = fresh

    return looping(
        step,
        network,
        change,
        lambda network: last_array(network).value,
        lambda network: [state.value for state in occurrences(network)],
    )


def plain_jax(model: Model) -> Subject:
    """The Equinox model under vanilla `jax.jit`."""
    return equinox_model(model, jax.jit(increment))


def filtered(model: Model) -> Subject:
    """The Equinox model under `equinox.filter_jit`."""
    return equinox_model(model, eqx.filter_jit(increment))
