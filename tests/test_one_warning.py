"""One cause, one warning: training loops as people write them, each with what it is told, and where.

The oracle of each is written by hand: how many warnings three steps give, which line of this file they name, what is
called there, and the code that is offered.
"""

import contextlib
import inspect
import warnings

import equinox as eqx
import flax.struct
import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState

import sharedtree as st
from tests.messages import warnings_of
from tests.strategies import Pair


class Net(eqx.Module):
    embed: jax.Array
    head: jax.Array
    bias: jax.Array


@flax.struct.dataclass
class State:
    params: object
    target: object
    opt_state: object


X = jnp.ones((4, 2))


def params():
    weight = jnp.arange(1.0, 7.0).reshape(2, 3)
    return {"embed": weight, "head": weight, "bias": jnp.ones(3)}


def net():
    return Net(**params())


def loss(model):
    own = model if isinstance(model, dict) else vars(model)
    return (((X @ own["embed"] + own["bias"]) @ own["head"].T) ** 2).mean()


def gradient(model):
    return st.grad(loss, policy=st.Policy(containers=True))(model)


def train_state(tx):
    step = lambda state: state.apply_gradients(grads=gradient(state.params))  # here
    return TrainState.create(apply_fn=None, params=params(), tx=tx), step


def by(update, tx):
    def step(both):
        model, state = both
        updates, state = tx.update(gradient(model), state, model)
        return update(model, updates), state

    model = net()
    return (model, tx.init(model)), step


def average_of_state():
    """An average that begins as the model, each updated by a function of optax's."""
    tx = st.optimizer(optax.adam(0.1))

    def step(state):
        updates, opt_state = tx.update(gradient(state.params), state.opt_state, state.params)
        new = st.apply_updates(state.params, updates)
        target = optax.incremental_update(new, state.target, 0.1)  # here
        return state.replace(params=new, target=target, opt_state=opt_state)

    model = net()
    return State(model, model, tx.init(model)), step


def frozen_target(model):
    """A target that is left alone between hard updates."""
    tx = st.optimizer(optax.adam(0.1))

    def step(state):
        updates, opt_state = tx.update(gradient(state.params), state.opt_state, state.params)
        return state.replace(params=st.apply_updates(state.params, updates), opt_state=opt_state)

    return State(model, model, tx.init(model)), step


def schedule_free():
    tx = st.optimizer(optax.contrib.schedule_free(optax.sgd(0.1), 0.1))

    def evaluate(both):
        model, state = both
        return optax.contrib.schedule_free_eval_params(state, model), state  # here

    model = net()
    return (model, tx.init(model)), evaluate


RECIPES = {
    "TrainState with st.optimizer": (
        lambda: train_state(st.optimizer(optax.adam(0.1))),
        "`TrainState.apply_gradients`",
        "    from sharedtree.linen import TrainState\n    state = TrainState.create(",
    ),
    "TrainState with optax": (
        lambda: train_state(optax.adam(0.1)),
        "`TrainState.apply_gradients`",
        "    from sharedtree.linen import TrainState\n    state = TrainState.create(",
    ),
    "optax.apply_updates": (
        lambda: by(lambda model, updates: optax.apply_updates(model, updates), st.optimizer(optax.adam(0.1))),
        "`optax.apply_updates`",
        "model = sharedtree.apply_updates(model, updates)",
    ),
    "eqx.apply_updates": (
        lambda: by(lambda model, updates: eqx.apply_updates(model, updates), st.optimizer(optax.sgd(0.1))),
        "`equinox.apply_updates`",
        "model = sharedtree.apply_updates(model, updates)",
    ),
    "jax.tree.map": (
        lambda: by(
            lambda model, updates: jax.tree.map(lambda p, u: p + u, model, updates), st.optimizer(optax.sgd(0.1))
        ),
        "`jax.tree.map`",
        "model = sharedtree.tree.map(f, model)",
    ),
    "an average that begins as the model": (
        average_of_state,
        "`optax.incremental_update`",
        "target = sharedtree.copy(params)",
    ),
    "a target that begins as the model": (
        lambda: frozen_target(net()),
        "`state.target` began as the same object as `state.params`",
        "target = sharedtree.copy(params)",
    ),
    "a target of a dict": (
        lambda: frozen_target(params()),
        "`state.target` began as the same object as `state.params`",
        "target = sharedtree.copy(params)",
    ),
    "schedule free": (
        schedule_free,
        "`optax.contrib.schedule_free_eval_params`",
        "sharedtree.retie(optax.contrib.schedule_free_eval_params(state, model), like=model)",
    ),
}


def steps(make, jit=st.jit):
    """Three steps of training, with all that they warn of."""
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        state, step = make()
        step_of = jit(step)
        for _ in range(3):
            state = step_of(state)
    assert {each.category for each in record} <= {st.UntiedWarning}
    return step, record


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.slow
def test_a_training_loop_is_told_once_where_it_loses_ties_and_what_keeps_them(name):
    make, function, fix = RECIPES[name]
    step, record = steps(make)
    (warning,) = record
    text = str(warning.message)
    assert len(text.splitlines()) <= 8
    assert function in text
    assert fix in text
    # Python takes it to come from the definition of the function, so that its filters tell two functions apart.
    assert (warning.filename, warning.lineno) == (__file__, step.__code__.co_firstlineno)
    lines, start = inspect.getsourcelines(step)
    marked = [start + i for i, line in enumerate(lines) if "# here" in line]
    named = [line for line in range(1, 300) if f"called at {__file__}:{line}, made" in text]
    if marked:
        assert named == marked
    if "begins as" in name:
        assert not any(word in text for word in ("retie(", "untie(", "tree.at("))


def test_a_copy_for_a_target_is_quiet():
    def with_copy(make):
        state, step = make()
        return state.replace(target=st.copy(state.target)), step

    assert not steps(lambda: with_copy(lambda: frozen_target(net())))[1]
    # Here the average loses the ties within the target, too.
    (warning,) = steps(lambda: with_copy(average_of_state))[1]
    assert "    target = sharedtree.incremental_update(" in str(warning.message)


def test_all_ties_that_one_trace_loses_are_one_warning():
    a, b, c = jnp.ones(2), jnp.zeros(2), jnp.arange(2.0)
    model = Pair([a, b, c], [a, b, c])
    with pytest.warns(st.UntiedWarning, match=r"^3 ties were lost in") as record:
        st.jit(lambda one, two: jax.tree.map(lambda x: 2 * x, (one, two)))(model, 3.0)
    assert len(record) == 1
    assert len(str(record[0].message).splitlines()) <= 8


def test_what_the_optimizer_and_the_trace_find_is_one_warning():
    tx = st.optimizer(optax.adam(0.1))

    def step(both):
        model, state = both
        model = jax.tree.map(lambda x: 2 * x, model)
        updates, state = tx.update(model, state, model)
        return optax.apply_updates(model, updates), state

    (_, record) = steps(lambda: ((net(), tx.init(net())), step))
    assert len(record) == 1
    # Where the function returns no model, the optimizer says it; and at once if the function raises.
    for fails in (False, True):
        own = st.optimizer(optax.adam(0.1))
        state = own.init(net())

        def lose(model, state, own=own, fails=fails):
            model = jax.tree.map(lambda x: 2 * x, model)
            own.update(model, state, model)
            return 1 / 0 if fails else 1

        def call(lose=lose, state=state, fails=fails):
            with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
                st.jit(lose)(net(), state)

        (text,) = warnings_of(call)
        assert "in the parameters of an update" in text
