"""What a call costs beside the computation: outputs fed back as the next call's inputs, results asserted equal.

Read the medians as ratios to the flat list within one run. Run with

    python -m pytest bench --benchmark-only --benchmark-group-by=param:num_leaves --benchmark-columns=median,iqr
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharedtree as st


class Block(eqx.Module):
    query: jax.Array
    key: jax.Array
    value: jax.Array
    output: jax.Array
    up: jax.Array
    down: jax.Array
    scale: jax.Array
    shift: jax.Array
    name: str = eqx.field(static=True, default="block")


class Model(eqx.Module):
    blocks: list[Block]
    rest: tuple[jax.Array, ...]


def make(num_leaves: int) -> Model:
    arrays = [jnp.full(2, float(i)) for i in range(num_leaves)]
    count = (num_leaves - 4) // 8
    blocks = [Block(*arrays[8 * i : 8 * i + 8]) for i in range(count)]
    return Model(blocks, tuple(arrays[8 * count :]))


def increment(tree):
    return jax.tree.map(lambda x: x + 1, tree)


IMPLEMENTATIONS = {
    "flat list, jax.jit": (jax.jit(lambda leaves: [x + 1 for x in leaves]), jax.tree.leaves),
    "sharedtree.jit": (st.jit(increment), lambda model: model),
    "jax.jit": (jax.jit(increment), lambda model: model),
    "equinox.filter_jit": (eqx.filter_jit(increment), lambda model: model),
}


@pytest.mark.parametrize("num_leaves", [24, 204, 1004])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_dispatch(benchmark, implementation, num_leaves):
    f, prepare = IMPLEMENTATIONS[implementation]
    model = make(num_leaves)
    for _ in range(3):  # traced, compiled, and seen twice
        model_now = f(prepare(model))
    np.testing.assert_array_equal(jax.tree.leaves(model_now)[-1], jax.tree.leaves(model)[-1] + 1)
    state = [prepare(model)]

    def call():
        state[0] = f(state[0])
        last = state[0][-1] if isinstance(state[0], list) else state[0].rest[-1]
        last.block_until_ready()

    benchmark(call)


@pytest.mark.parametrize("num_leaves", [400])
@pytest.mark.parametrize("implementation", ["sharedtree.jit", "jax.jit"])
def test_one_block_reused_everywhere(benchmark, implementation, num_leaves):
    """Eight arrays fifty times over: eight inputs for sharedtree, four hundred for vanilla `jax.jit`."""
    model = Model([make(12).blocks[0]] * (num_leaves // 8), ())
    ours = implementation == "sharedtree.jit"
    f = st.jit(lambda m: st.tree.map(lambda x: x + 1, m)) if ours else jax.jit(increment)
    assert len(f.trace(model).jaxpr.in_avals) == (8 if ours else num_leaves)
    state = [model]

    def call():
        state[0] = f(state[0])
        state[0].blocks[0].shift.block_until_ready()

    benchmark(call)
    assert (state[0].blocks[0] is state[0].blocks[49]) == ours
