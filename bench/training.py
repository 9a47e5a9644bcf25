"""A training step of the demo's model, whose embedding is its output layer, tied in each way that there is.

All of them use the same numbers, the same batch and the same AdamW, and donate the model and the optimizer's state.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import sharedtree as st
from sharedtree.cli._demo import LanguageModel, Sizes, next_byte_loss

from ._kinds import imported
from ._measuring import Case, Effort, Subject
from ._names import BY_HAND, EQUINOX_SHARED, NNX, SHAREDTREE, UNTIED
from ._nnx_language_model import nnx_language_model

NAME = "training step of the demo"
SMALL_NAME = "training step of a small model"

SMALL = Sizes(width=32, heads=2, blocks=1, context=16, batch=4)

ROWS = 256
"""In the demo's table: one for each byte."""


class Training(NamedTuple):
    """A training step and where it begins.

    Attributes:
        step: (*state, windows) → (*state, loss), jitted. The state is donated.
        state: the first one.
        unique: the arrays of the state, each once.
    """

    step: Callable[..., Any]
    state: tuple[Any, ...]
    unique: list[jax.Array]


Start = Callable[[Sizes, int], Training]


def make_windows(sizes: Sizes) -> jax.Array:
    """A batch to train on."""
    return jnp.asarray(np.random.default_rng(0).integers(0, 256, (sizes.batch, sizes.context + 1)), jnp.int32)


def make_language_model(sizes: Sizes, rows: int = ROWS) -> LanguageModel:
    """The demo's model, with a table of some number of rows. The arrays are new each time, since they get donated."""
    model = LanguageModel(sizes, key=jax.random.key(0))
    if rows != ROWS:
        table = 0.02 * jax.random.normal(jax.random.key(1), (rows, sizes.width))
        object.__setattr__(model.embed, "weight", table)
    return model


def make_transformation() -> Any:
    """AdamW as in the demo, at a constant rate."""
    return optax.adamw(1e-3, b2=0.99, weight_decay=0.01)


def with_sharedtree(sizes: Sizes, rows: int = ROWS) -> Training:
    """As the demo does it."""
    model = make_language_model(sizes, rows)
    optimizer = st.optimizer(make_transformation())

    @st.preserve_identities(jax.jit, donate_argnums=(0, 1))
    def step(model: LanguageModel, state: Any, windows: jax.Array) -> tuple[LanguageModel, Any, jax.Array]:
        loss, gradient = st.value_and_grad(next_byte_loss)(model, windows)
        updates, state = optimizer.update(gradient, state, model)
        return st.apply_updates(model, updates), state, loss

    state = model, optimizer.init(model)
    return Training(step, state, _arrays(state))


def by_hand(sizes: Sizes, rows: int = ROWS) -> Training:
    """Plain JAX: parameters in a flat dict, the table in it once, and the model put together inside."""
    model = make_language_model(sizes, rows)
    return _on_parameters(eqx.tree_at(lambda model: model.head, model, None), tie=True)


def untied(sizes: Sizes, rows: int = ROWS) -> Training:
    """Plain JAX on the untied twin: another model, with two tables that drift apart."""
    model = make_language_model(sizes, rows)
    head = eqx.tree_at(lambda head: head.weight, model.head, jnp.copy(model.head.weight))
    return _on_parameters(eqx.tree_at(lambda model: model.head, model, head), tie=False)


def _on_parameters(model: LanguageModel, *, tie: bool) -> Training:
    arrays, static = eqx.partition(model, eqx.is_array)
    with_paths, treedef = jax.tree.flatten_with_path(arrays)
    parameters = {jax.tree_util.keystr(path): array for path, array in with_paths}
    names = list(parameters)
    transformation = make_transformation()

    def loss_of(parameters: dict[str, jax.Array], windows: jax.Array) -> jax.Array:
        model = eqx.combine(jax.tree.unflatten(treedef, [parameters[name] for name in names]), static)
        if tie:
            object.__setattr__(model, "head", model.embed)
        return next_byte_loss(model, windows)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(parameters: Any, state: Any, windows: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, gradient = jax.value_and_grad(loss_of)(parameters, windows)
        updates, state = transformation.update(gradient, state, parameters)
        return optax.apply_updates(parameters, updates), state, loss

    state = parameters, transformation.init(parameters)
    return Training(step, state, _arrays(state))


def with_equinox_shared(sizes: Sizes, rows: int = ROWS) -> Training:
    """`equinox.nn.Shared`: the model without the second table, and a note of where it belongs."""
    model = make_language_model(sizes, rows)
    shared = eqx.nn.Shared(model, where=lambda model: model.head, get=lambda model: model.embed)
    return _filtered(shared, lambda shared, windows: next_byte_loss(shared(), windows))


def with_equinox(sizes: Sizes, rows: int = ROWS) -> Training:
    """The tied model as it is under `equinox.filter_jit`, which makes two of the table."""
    return _filtered(make_language_model(sizes, rows), next_byte_loss)


def _filtered(model: Any, loss_of: Callable[[Any, jax.Array], jax.Array]) -> Training:
    transformation = make_transformation()

    @functools.partial(eqx.filter_jit, donate="all-except-first")
    def step(windows: jax.Array, model: Any, state: Any) -> tuple[Any, Any, jax.Array]:
        loss, gradient = eqx.filter_value_and_grad(loss_of)(model, windows)
        updates, state = transformation.update(gradient, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state, loss

    state = model, transformation.init(eqx.filter(model, eqx.is_array))
    return Training(_WindowsLast(step), state, _arrays(state))


class _WindowsLast:
    """`equinox.filter_jit` donates all arguments but the first; the other steps take the windows last."""

    def __init__(self, step: Any) -> None:
        self._step = step

    def __call__(self, model: Any, state: Any, windows: jax.Array) -> Any:
        return self._step(windows, model, state)

    def lower(self, model: Any, state: Any, windows: jax.Array) -> Any:
        return self._step.lower(windows, model, state)


def with_nnx(sizes: Sizes, rows: int = ROWS) -> Training:
    """The same network in NNX, whose module for the table is in it twice."""
    nnx = imported("flax.nnx")
    model = nnx_language_model(make_language_model(sizes, rows))
    optimizer = nnx.Optimizer(model, make_transformation(), wrt=nnx.Param)

    @functools.partial(nnx.jit, donate_argnums=(0, 1))
    def update(model: Any, optimizer: Any, windows: jax.Array) -> jax.Array:
        loss, gradient = nnx.value_and_grad(next_byte_loss)(model, windows)
        optimizer.update(model, gradient)
        return loss

    arrays = jax.tree.leaves((nnx.state(model), nnx.state(optimizer)))
    return Training(_InPlace(update), (model, optimizer), arrays)


class _InPlace:
    """A step that changes its arguments; the other steps return new ones."""

    def __init__(self, update: Any) -> None:
        self._update = update

    def __call__(self, model: Any, optimizer: Any, windows: jax.Array) -> Any:
        loss = self._update(model, optimizer, windows)
        return model, optimizer, loss

    def lower(self, *args: Any) -> Any:
        return self._update.lower(*args)


TIED: dict[str, Start] = {
    BY_HAND: by_hand,
    SHAREDTREE: with_sharedtree,
    EQUINOX_SHARED: with_equinox_shared,
    NNX: with_nnx,
}
"""The ways to train the tied model. All have the same losses."""

ALL: dict[str, Start] = {**TIED, UNTIED: untied}
"""The ways to train any of the two. All have the same loss in the first step."""


def _arrays(state: Any) -> list[jax.Array]:
    # `state` keeps the arrays alive while their ids are in use.
    return list({id(leaf): leaf for leaf in jax.tree.leaves(state) if eqx.is_array(leaf)}.values())


def _subject(start: Start, sizes: Sizes) -> Subject:
    training = start(sizes, ROWS)
    windows = make_windows(sizes)
    state = training.state
    losses: list[float] = []

    def run() -> None:
        nonlocal state
        *state, loss = training.step(*state, windows)
        losses.append(float(loss))  # waits

    return Subject(run, lambda: losses[:3])


def cases(effort: Effort) -> list[Case]:
    """The demo's sizes, where arithmetic is nearly all of the time, and small ones, where dispatch shows."""
    found = [_case(SMALL_NAME, SMALL, effort)]
    if not effort.quick:
        found.append(_case(NAME, Sizes(), effort._replace(seconds=5 * effort.seconds)))
    return found


def _case(name: str, sizes: Sizes, effort: Effort) -> Case:
    return Case(
        name=name,
        group="training",
        parameters={},
        implementations={name: functools.partial(_subject, start, sizes) for name, start in TIED.items()},
        reference=BY_HAND,
        effort=effort,
        warm_up=4,
        tolerance=1e-4,
    )
