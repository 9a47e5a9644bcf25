"""Optimizers on models with ties take the very steps that optax takes on a plain dict that holds each weight once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import sharedtree as st
from tests.deep import chain, in_a_thread
from tests.optimizers import Model, arrays, distinct, flat, is_tied, net, nets, parts
from tests.strategies import Pair

STEPS = 3


def loss(embed, block1, block2, head, other):
    return ((jnp.tanh(embed @ block1) @ block2 @ head) ** 2).mean() + ((head @ other) ** 2).mean()


def dict_loss(p):
    return loss(p["a"], p["b"], p["b"], p["a"], p["c"])


def model_loss(m):
    return loss(m.embed.weight, m.blocks[0].weight, m.blocks[1].weight, m.head["again"], m.other)


OPTIMIZERS = {
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adam": lambda: optax.adam(1e-2),
    "every second": lambda: optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "schedule free": lambda: optax.contrib.schedule_free_adamw(1e-2, warmup_steps=2),
}


@functools.cache
def oracle(name):
    """The parameters after each step of plain optax on a plain dict, and the last state."""
    tx = OPTIMIZERS[name]()

    @jax.jit
    def step(params, state):
        updates, state = tx.update(jax.grad(dict_loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    params = flat(*arrays(0))
    state = tx.init(params)
    history = []
    for _ in range(STEPS):
        params, state = step(params, state)
        history.append(params)
    return history, state


def check_state(state, vanilla_state):
    ours, theirs = distinct(state), jax.tree.leaves(vanilla_state)
    assert len(ours) == len(theirs)
    assert sum(x.nbytes for x in ours) == sum(x.nbytes for x in theirs)
    # every array of the one has its equal in the other, in whatever order
    rest = [np.asarray(x) for x in theirs]
    for mine in map(np.asarray, ours):
        like = lambda x: (x.shape, x.dtype) == (mine.shape, mine.dtype) and np.allclose(x, mine, rtol=1e-4, atol=1e-6)
        near = [i for i, x in enumerate(rest) if like(x)]
        assert near, mine
        del rest[near[0]]


def assert_close(params, expected):
    for name, value in expected.items():
        np.testing.assert_allclose(params[name], value, rtol=2e-5, atol=1e-6, err_msg=name)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("name", "mode"), [("momentum", "eager"), *((name, "donated") for name in OPTIMIZERS if name != "momentum")]
)
def test_steps_equal_those_on_a_dict(name, mode):
    """What `test_every_optimizer` compares as programs is run here, for several steps and on a real loss."""
    history, vanilla_state = oracle(name)
    tx = st.optimizer(OPTIMIZERS[name]())
    traces = 0

    def step(model, state):
        nonlocal traces
        traces += 1
        updates, state = tx.update(st.grad(model_loss)(model), state, model)
        assert is_tied(updates)
        return st.apply_updates(model, updates), state

    model = net(*arrays(0))
    state = tx.init(model)
    run = st.jit(step, donate_argnums=(0, 1)) if mode == "donated" else step
    for expected in history:
        before = model
        model, state = run(model, state)
        assert is_tied(model)
        assert_close(flat(*parts(model)), expected)
        assert before.embed.weight.is_deleted() == (mode == "donated")
    assert model.embed.activation is jnp.tanh
    check_state(state, vanilla_state)
    assert all(is_tied(found) for found in nets(state))
    assert mode == "eager" or traces == 1
    if name == "adam":
        mu = state[0].mu
        assert isinstance(mu, Model)
        np.testing.assert_allclose(mu.head["again"], vanilla_state[0].mu["a"], rtol=1e-4, atol=1e-6)


def in_modules(weight):
    return Pair(Pair(weight, None), Pair(weight, None))


def in_containers(weight):
    return {"first": weight, "second": [weight]}


def loss_of_both(model):
    one, two = jax.tree.leaves(model)
    return (one * two * jnp.arange(3.0)).sum() + one.sum()


MISSING = {
    # Each path has its own share of the gradient here.
    "gradient": lambda tx, model, gradient, state: tx.update(jax.grad(loss_of_both)(model), state, model),
    "mapped gradient": lambda tx, model, gradient, state: tx.update(mapped(gradient), state, model),
    "state": lambda tx, model, gradient, state: tx.update(gradient, mapped(state), model),
    "apply": lambda tx, model, gradient, state: st.apply_updates(model, mapped(gradient)),
}


def mapped(tree):
    return jax.tree.map(lambda x: x + 0, tree)


def test_updates_of_optax_itself_are_told_of_the_optimizer():
    """Each path has a slot there, although the gradient is tied. The names are those of the caller."""
    model, adam = in_modules(jnp.ones(3)), optax.adam(1e-2)
    updates, _ = adam.update(st.grad(loss_of_both)(model), adam.init(model), model)
    with pytest.raises(st.errors.SharingMismatchError) as caught:
        st.apply_updates(model, updates)
    text = str(caught.value)
    assert text.startswith(
        "`.first.first` and `.second.first` are one leaf in the model, but two objects in `updates`.\n"
    )
    assert (
        text.index("tx = sharedtree.optimizer(tx)") < text.index("sharedtree.tree.map") < text.index("sharedtree.grad")
    )
    assert "rest" not in text
    with pytest.raises(st.errors.SharingMismatchError, match="the model .* `updates`"):
        st.apply_updates(model, [updates])


@pytest.mark.parametrize("where", MISSING)
@pytest.mark.parametrize(
    ("make", "paths"),
    [(in_modules, (".first.first", ".second.first")), (in_containers, ("['first']", "['second'][0]"))],
)
def test_a_tie_missing_in_updates_or_state_is_an_error_with_both_paths(make, paths, where):
    tx = st.optimizer(optax.adam(1e-2))
    model = make(jnp.ones(3))
    gradient = st.grad(loss_of_both, policy=st.Policy(containers=True))(model)
    with pytest.raises(st.errors.SharingMismatchError) as caught:
        MISSING[where](tx, model, gradient, tx.init(model))
    assert caught.value.paths == paths
    text = str(caught.value)
    assert f"`{paths[0]}` and `{paths[1]}`" in text
    # Of a gradient `retie` would keep one path's part.
    assert ("optimizer.init(model)" if where == "state" else "sharedtree.grad(") in text
    ways = {"state": "`sharedtree.tree.map`", "apply": "sharedtree.tree.map(lambda g: "}
    assert ways.get(where, "sharedtree.tree.map(jnp.add, ") in text
    # Modules need no policy.
    assert make is in_containers or "Policy" not in text
    assert "retie" not in text


@pytest.mark.parametrize("mode", ["eager", "jit"])
def test_what_is_no_parameter_is_left_as_it_is(mode):
    w, key, table = jnp.array([1.0, 2.0]), jax.random.key(1), np.arange(3)
    model = Pair(w, [w, jnp.array(3), key, table, jax.nn.relu, 0.5, None])
    tx = st.optimizer(optax.sgd(0.1, momentum=0.9))
    state = tx.init(model)
    assert [x.shape for x in distinct(state)] == [(2,)]

    def step(model, state):
        gradient = st.grad(lambda m: (m.first * m.second[0]).sum() * m.second[5])(model)
        updates, state = tx.update(gradient, state, model)
        return st.apply_updates(model, updates), state

    run = st.jit(step) if mode == "jit" else step
    for _ in range(2):
        model, state = run(model, state)
    # The gradient of w² / 2 is w, so after a step it is 0.9 w, and the momentum 0.9 w + 0.9 w.
    np.testing.assert_allclose(model.first, 0.9 * w - 0.1 * (0.9 * w + 0.9 * w), rtol=1e-6)
    same, steps, new_key, new_table, *static = model.second
    assert same is model.first
    assert int(steps) == 3
    assert bool(jnp.array_equal(jax.random.key_data(new_key), jax.random.key_data(key)))
    np.testing.assert_array_equal(new_table, table)
    assert static == [jax.nn.relu, 0.5, None]


@pytest.mark.slow
def test_depth_one_thousand():
    model = chain(1000, jnp.array(1.0), jnp.array(2.0))
    tx = st.optimizer(optax.sgd(0.1, momentum=0.0))

    def step(model, state):
        updates, state = tx.update(st.tree.map(jnp.ones_like, model), state, model)
        return st.apply_updates(model, updates), state

    def two_steps():
        one, state = step(model, tx.init(model))
        two, state = st.jit(step)(one, state)
        return two, len(st.tree.leaves(state))

    model, slots = in_a_thread(two_steps)
    assert slots == 2
    np.testing.assert_allclose([model.scale, model.next.scale], [0.8, 0.8], rtol=1e-5)
    assert model.scale is model.next.scale
    depth = 0
    while model.next is not None:
        depth, model = depth + 1, model.next
    assert depth == 999
    np.testing.assert_allclose(model.scale, 1.8, rtol=1e-5)


def test_calls_without_parameters_and_with_arguments_that_no_transformation_asks_for():
    w, g = jnp.ones(2), jnp.full(2, 4.0)
    tx = st.optimizer(optax.sgd(0.5))
    state = tx.init({"a": w, "b": w})
    without, _ = tx.update({"a": g, "b": g}, state)
    more, _ = tx.update({"a": g, "b": g}, state, {"a": w, "b": w}, value=jnp.array(1.0))
    for updates in (without, more):
        assert updates["a"] is updates["b"]
        np.testing.assert_array_equal(updates["b"], [-2.0, -2.0])


def test_apply_updates_equals_optax_where_nothing_is_tied():
    params = {"a": jnp.ones(2), "b": jnp.ones(2, jnp.bfloat16), "c": None, "d": jnp.ones(2)}
    half = jnp.full(2, 0.5, jnp.bfloat16)
    updates = {"a": jnp.full(2, 0.5), "b": half, "c": None, "d": half}
    ours, theirs = st.apply_updates(params, updates), optax.apply_updates(params, updates)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)
    # What has no update stays the caller's own.
    assert st.apply_updates(params, updates | {"a": None})["a"] is params["a"]


@pytest.mark.parametrize(
    "tx", [optax.adam(0.1), optax.chain(optax.scale_by_adam(), optax.trace(0.9))], ids=["adam", "chain"]
)
def test_a_tuple_of_parameters_is_not_taken_for_the_state_of_a_chain(tx):
    w = jnp.ones(2)
    params, plain = (w, w), (w,)
    ours, state, vanilla = st.optimizer(tx), st.optimizer(tx).init(params), tx.init(plain)
    for _ in range(3):
        gradient = jax.tree.map(lambda x: 2 * x, plain)
        updates, state = ours.update((gradient[0], gradient[0]), state, params)
        params = st.apply_updates(params, updates)
        updates, vanilla = tx.update(gradient, vanilla, plain)
        plain = optax.apply_updates(plain, updates)
        assert params[0] is params[1]
        np.testing.assert_allclose(params[0], plain[0], rtol=1e-6)
    assert len(distinct(state)) == len(jax.tree.leaves(vanilla))
