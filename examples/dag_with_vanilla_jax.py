"""`Dag`: a tied model for code that knows only vanilla JAX.

A `Dag` is a pytree whose leaves are the unique traced leaves of a model. `jax.jit`, `jax.grad`, `jax.lax.scan`, optax
and everything else that takes a pytree take it as it is; `.tree` gives the model back, ties included.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import sharedtree as st


class Autoencoder(eqx.Module):
    """Decodes with the transpose of the weight that it encodes with."""

    encoder: eqx.nn.Linear
    decoder_weight: jax.Array

    def __init__(self, size: int, code: int, *, key: jax.Array) -> None:
        self.encoder = eqx.nn.Linear(size, code, key=key)
        self.decoder_weight = self.encoder.weight

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.nn.tanh(self.encoder(x)) @ self.decoder_weight


def loss_fn(dag, batch):
    return jnp.mean((jax.vmap(dag.tree)(batch) - batch) ** 2)


def main() -> None:
    dag = st.Dag(Autoencoder(6, 2, key=jax.random.key(0)))
    print(f"leaves: {len(jax.tree.leaves(dag.tree))} of the model, {len(jax.tree.leaves(dag))} of the Dag")

    batch = jax.random.normal(jax.random.key(1), (16, 6))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))

    def train_step(carry, _):
        dag, state = carry
        loss, gradient = jax.value_and_grad(loss_fn)(dag, batch)
        updates, state = tx.update(gradient, state, dag)
        return (optax.apply_updates(dag, updates), state), loss

    @jax.jit
    def train(dag):
        (dag, _), losses = jax.lax.scan(train_step, (dag, tx.init(dag)), length=100)
        return dag, losses

    dag, losses = train(dag)
    print(f"loss: {losses[0]:.3f} at the first step, {losses[-1]:.3f} at the last")

    model = dag.tree
    assert model.encoder.weight is model.decoder_weight
    assert losses[-1] < losses[0]
    print("the weight is still one array")


if __name__ == "__main__":
    main()
