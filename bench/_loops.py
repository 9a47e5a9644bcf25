"""A function that is called again and again, each time with what it returned, as a training loop does.

New objects are made and old ones collected all the time, and now and then somebody replaces an attribute. A loop that
fed the same objects each time would measure caches that no real program hits.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

import sharedtree as st

from ._kinds import imported, to_brainstate, to_nnx
from ._measuring import Subject
from ._models import arrays_of, fields_of, last_array, replace_array, unique_arrays

CALLS = 10
"""How many calls there are before an attribute is replaced again."""


def increment(tree: Any) -> Any:
    """One more, at each path."""
    return jax.tree.map(lambda x: x + 1, tree)


def increment_once(tree: Any) -> Any:
    """One more, for each array once."""
    return st.tree.map(lambda x: x + 1, tree)


def _new(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Another function that does the same, which no cache knows."""
    return lambda tree: function(tree)


class Loop(NamedTuple):
    """A call to be made again and again.

    Attributes:
        step: state → state, the call. It was never called before, and nothing that it calls is in a cache of JAX.
        state: the first state.
        change: replaces one array of a state.
        last: an array of a state, to be waited for. All arrays of a call are ready when one is.
        values: the arrays of a state, tied ones at each path.
    """

    step: Callable[[Any], Any]
    state: Any
    change: Callable[[Any, jax.Array], None]
    last: Callable[[Any], jax.Array] = last_array
    values: Callable[[Any], Sequence[Any]] = arrays_of


def looping(loop: Loop) -> Subject:
    """A subject that replaces an attribute and then makes `CALLS` calls, each waited for."""
    step, state, change, last, values = loop
    fresh = jnp.full(2, 0.5)

    def run() -> None:
        nonlocal state
        change(state, fresh)
        for _ in range(CALLS):
            state = step(state)
            last(state).block_until_ready()

    return Subject(run, lambda: jax.device_get(values(state)), CALLS)


def flat_list(model: Any) -> Loop:
    """The limit: nothing but a list of the arrays, each once."""
    arrays, places = unique_arrays(model)

    def change(arrays: list[Any], fresh: jax.Array) -> None:
        arrays[0] = fresh

    step = jax.jit(lambda arrays: [x + 1 for x in arrays])
    return Loop(step, arrays, change, lambda arrays: arrays[-1], lambda arrays: [arrays[i] for i in places])


def functional(model: Any, step: Callable[[Any], Any]) -> Loop:
    """A model of any kind, and a step that returns a new one.

    Where the step has untied it, an attribute has to be replaced in each copy.
    """
    first = fields_of(model.blocks[0])[0]
    same = [i for i, block in enumerate(model.blocks) if getattr(block, first) is getattr(model.blocks[0], first)]

    def change(model: Any, fresh: jax.Array) -> None:
        for i in same:
            replace_array(model.blocks[i], first, fresh)

    return Loop(step, model, change)


def sharedtree_model(model: Any) -> Loop:
    """A model of any kind under `sharedtree.jit`. One change is enough, since what was one object still is."""
    return functional(model, st.jit(_new(increment_once)))._replace(change=_change_first)


def sharedtree_filtered(model: Any) -> Loop:
    """The same under `equinox.filter_jit`, wrapped."""
    step = st.preserve_identities(eqx.filter_jit)(_new(increment_once))
    return functional(model, step)._replace(change=_change_first)


def plain_jax(model: Any) -> Loop:
    """A model of any kind under vanilla `jax.jit`."""
    return functional(model, jax.jit(_new(increment)))


def filtered(model: Any) -> Loop:
    """A model under `equinox.filter_jit`."""
    return functional(model, eqx.filter_jit(_new(increment)))


def _change_first(model: Any, fresh: jax.Array) -> None:
    replace_array(model.blocks[0], fields_of(model.blocks[0])[0], fresh)


def _in_place(network: Any, update: Callable[[], Any]) -> Loop:
    def step(network: Any) -> Any:
        update()
        return network

    return Loop(step, network, _change_first)


def _updating(model: Any, jit: Callable[[Any], Any], partial: Callable[..., Any] = functools.partial) -> Loop:
    """The network in NNX, changed in place."""
    nnx = imported("flax.nnx")
    network = to_nnx(model)

    def update(network: Any) -> None:
        nnx.update(network, increment(nnx.state(network)))

    return _in_place(network, partial(jit(update), network))


def nnx_model(model: Any) -> Loop:
    """The network in NNX under `nnx.jit`."""
    return _updating(model, imported("flax.nnx").jit)


def nnx_cached(model: Any) -> Loop:
    """The same, with the walk over the network done once."""
    nnx = imported("flax.nnx")
    return _updating(model, nnx.jit, nnx.cached_partial)


def sharedtree_in_place(model: Any) -> Loop:
    """The same network and the same function under `sharedtree.jit`."""
    return _updating(model, functools.partial(st.jit, policy=st.Policy(in_place=True)))


def nnx_split(model: Any) -> Loop:
    """The network in NNX, taken apart once, before the loop: what Flax advises where NNX's own `jit` is too slow."""
    nnx = imported("flax.nnx")
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

    return Loop(jax.jit(_new(increment)), state, change, last, lambda state: arrays_of(nnx.merge(graph, state)))


def brainstate_model(model: Any) -> Loop:
    """The network in brainstate, changed in place. States are found by tracing, not in the arguments."""
    network = to_brainstate(model)
    states = list(network.states().values())

    def update() -> None:
        for state in states:
            state.value = state.value + 1

    return _in_place(network, imported("brainstate").transform.jit(update))
