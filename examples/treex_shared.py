"""A treex model with a shared layer, trained as treex's users do: filter the parameters, differentiate, merge.

The middle of the network is one `Linear`, called three times. treex itself initialises it once and keeps it one layer
in `filter` and `merge`; `sharedtree`'s transforms and optimizer keep it one through jit, gradient and update.
"""

import jax
import jax.numpy as jnp
import optax

import sharedtree as st
from sharedtree.compat import treex as tx


def new_model() -> tx.Module:
    shared = tx.Linear(8)
    return tx.Sequential(tx.Linear(8), jnp.tanh, shared, jnp.tanh, shared, jnp.tanh, shared, jnp.tanh, tx.Linear(1))


def loss_fn(params, model, x, y):
    model = model.merge(params)
    return ((model(x) - y) ** 2).mean(), model


optimizer = st.optimizer(optax.adam(3e-3))


@st.jit
def train_step(model, state, x, y):
    params = model.filter(tx.Parameter)
    (loss, model), gradient = st.value_and_grad(loss_fn, has_aux=True)(params, model, x, y)
    updates, state = optimizer.update(gradient, state, params)
    return model.merge(st.apply_updates(params, updates)), state, loss


def main() -> None:
    x = jax.random.normal(jax.random.key(0), (64, 3))
    y = jnp.sin(x.sum(axis=1, keepdims=True))
    model = new_model().init(0, x)
    assert model.layers[2] is model.layers[4] is model.layers[6]
    by_path = sum(leaf.size for leaf in jax.tree.leaves(model))
    print(f"parameters: {by_path} by path, {st.count_parameters(model)} in fact")

    state = optimizer.init(model.filter(tx.Parameter))
    first = last = None
    for _ in range(200):
        model, state, last = train_step(model, state, x, y)
        first = last if first is None else first
    print(f"loss: {first:.3f} at the first step, {last:.3f} at the last")

    assert last < first / 5
    assert model.layers[2] is model.layers[4] is model.layers[6]
    assert state[0].mu.layers[2] is state[0].mu.layers[6]
    print("one layer and one pair of moments, after 200 steps")


if __name__ == "__main__":
    main()
