"""An example beside its *twin*: the same model in vanilla JAX, whose author wrote each shared parameter once.

A twin is a function of a dictionary of arrays, in which what is tied in the example stands once. It uses neither
`sharedtree` nor Equinox, so it is right or wrong for reasons of its own. Both are trained from the same arrays on the
same batches, and must have the same losses.
"""

import dataclasses
import importlib.util
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sharedtree as st

STEPS = 20
FOLDER = pathlib.Path(__file__).parents[2] / "examples"


def example(name):
    """The program `examples/<name>.py` as a module. It is found by its path, for other packages have examples, too."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def keys():
    return jax.random.split(jax.random.key(7), STEPS)


def trained(step, *carry, batches):
    """What a step function makes of the carry, and the losses on the way."""
    losses = []
    for batch in batches:
        *carry, loss = step(*carry, batch)
        losses.append(loss)
    return *carry, np.stack(losses)


def step_of(loss_fn, tx):
    """A train step in vanilla JAX."""

    @jax.jit
    def step(params, state, batch):
        loss, gradient = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def train_beside(program, model, loss, params, tx, *, train_step=None, batches=None):
    """Trains the model of an example, and its twin by a loss and vanilla Optax; both learn and cost the same.

    Returns the model, the state of its optimizer, and the parameters of the twin.
    """
    batches = batches or [program.new_batch(key) for key in keys()]
    params, twin_state, expected = trained(step_of(loss, tx), params, tx.init(params), batches=batches)
    model, state, losses = trained(train_step or program.train_step, model, program.tx.init(model), batches=batches)
    assert_same_losses(losses, expected)
    assert_each_once(model, params, state, twin_state)
    return model, state, params


def assert_same_losses(found, expected):
    assert len(found) == len(expected) == STEPS
    assert not np.allclose(expected[0], expected[-1], rtol=1e-2)  # they learn
    # Losses may cross zero, as an actor's does.
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def assert_each_once(model, params, state=None, twin_state=None):
    """A model has as many parameters as its twin, and the state of its optimizer as many slots and numbers."""
    assert sizes(st.tree.leaves(model)) == sizes(jax.tree.leaves(params))
    assert sizes(st.tree.leaves(state)) == sizes(jax.tree.leaves(twin_state))


def sizes(leaves):
    return sorted(jnp.size(leaf) for leaf in leaves)


def arrays(layer):
    """The arrays of a layer, by the names of its fields; None for what is no array."""
    if isinstance(layer, list | tuple):
        return [arrays(each) for each in layer]
    if dataclasses.is_dataclass(layer):
        return {name: arrays(value) for name, value in vars(layer).items()}
    return layer if isinstance(layer, jax.Array) else None
