"""Optimizers on models with ties take the very steps that optax takes on a plain dict that holds each weight once."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import sharedtree as st
from tests.deep import in_a_thread, link

STEPS = 5


@pytest.fixture(autouse=True)
def _strict_promotion():
    """Overrides the fixture of that name for all tests: optax itself needs JAX's standard promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


class Embed(eqx.Module):
    weight: jax.Array


class Block(eqx.Module):
    weight: jax.Array
    activation: object = jnp.tanh


class Head(eqx.Module):
    weight: jax.Array
    bias: jax.Array


class Model(eqx.Module):
    embed: Embed
    blocks: list
    head: Head
    name: str = "tied"


def arrays():
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "weight": jax.random.normal(keys[0], (5, 3)),
        "block": jax.random.normal(keys[1], (3, 3)),
        "bias": jax.random.normal(keys[2], (5,)),
    }


def make_model():
    a = arrays()
    block = Block(a["block"])
    return Model(Embed(a["weight"]), [block, block], Head(a["weight"], a["bias"]))


def is_tied(model):
    weights = model.embed.weight, model.head.weight
    nothing = not jax.tree.leaves(weights)  # `None` and `optax.MaskedNode()` are values, which are never tied
    return (nothing or weights[0] is weights[1]) and model.blocks[0] is model.blocks[1]


def as_dict(model):
    return {"weight": model.embed.weight, "block": model.blocks[0].weight, "bias": model.head.bias}


TOKENS = jnp.array([0, 2, 4, 1])
TARGETS = jnp.array([1, 3, 0, 2])


def _loss(embed, block1, block2, head, bias):
    x = embed[TOKENS]
    x = jnp.tanh(jnp.tanh(x @ block1) @ block2)
    logits = x @ head.T + bias
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), TARGETS[:, None], axis=1)
    return -picked.mean() + 0.01 * (embed**2).sum()


def dict_loss(p):
    return _loss(p["weight"], p["block"], p["block"], p["weight"], p["bias"])


def model_loss(m):
    return _loss(m.embed.weight, m.blocks[0].weight, m.blocks[1].weight, m.head.weight, m.head.bias)


def mask_by_rank(tree):
    return jax.tree.map(lambda x: x.ndim == 2, tree)


def labels_by_rank(tree):
    return jax.tree.map(lambda x: "matrix" if x.ndim == 2 else "vector", tree)


def model_shaped(of_weight, of_block, of_bias):
    """A tree of the model's shape that names each tied parameter at every path."""
    block = Block(of_block, None)
    return Model(Embed(of_weight), [block, block], Head(of_weight, of_bias), None)


def mask_as_model():
    return model_shaped(True, True, False)


def two_kinds(labels):
    return optax.multi_transform({"matrix": optax.adam(1e-2), "vector": optax.sgd(0.1, momentum=0.9)}, labels)


# For each: what to run on the model, and on the dict.
SAME = {
    "adam": lambda: optax.adam(1e-2),
    "adamw": lambda: optax.adamw(1e-2, weight_decay=0.1),
    "sgd": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "lion": lambda: optax.lion(1e-2),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    "masked": lambda: optax.masked(optax.adam(1e-2), mask_by_rank),
    "adamw masked": lambda: optax.adamw(1e-2, weight_decay=0.5, mask=mask_by_rank),
    "two kinds": lambda: two_kinds(labels_by_rank),
    "every second": lambda: optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(0.1, 0.0, 10)),
    "schedule free": lambda: optax.contrib.schedule_free_adamw(1e-2, warmup_steps=2),
    "prodigy": lambda: optax.contrib.prodigy(0.1),
}
OPTIMIZERS = {name: (make, make) for name, make in SAME.items()}
OPTIMIZERS["masked by model"] = (
    lambda: optax.masked(optax.adam(1e-2), mask_as_model()),
    lambda: optax.masked(optax.adam(1e-2), {"weight": True, "block": True, "bias": False}),
)
OPTIMIZERS["labelled by model"] = (
    lambda: two_kinds(model_shaped("matrix", "matrix", "vector")),
    lambda: two_kinds({"weight": "matrix", "block": "matrix", "bias": "vector"}),
)


@functools.cache
def oracle(name):
    """The parameters after each step of plain optax on a plain dict, the last state and the number of traces."""
    tx = OPTIMIZERS[name][1]()
    traces = 0

    @jax.jit
    def step(params, state):
        nonlocal traces
        traces += 1
        updates, state = tx.update(jax.grad(dict_loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    params = arrays()
    state = tx.init(params)
    history = []
    for _ in range(STEPS):
        params, state = step(params, state)
        history.append(params)
    return history, state, traces


def distinct_arrays(tree):
    found = {id(x): x for x in jax.tree.leaves(tree) if isinstance(x, (jax.Array, np.ndarray))}
    return list(found.values())


def models_in(tree):
    return [x for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Model)) if isinstance(x, Model)]


def check_state(state, vanilla_state):
    ours, theirs = distinct_arrays(state), jax.tree.leaves(vanilla_state)
    assert len(ours) == len(theirs)
    assert sum(x.nbytes for x in ours) == sum(x.nbytes for x in theirs)
    # every array of the one has its equal in the other, in whatever order
    rest = [np.asarray(x) for x in theirs]
    for mine in map(np.asarray, ours):
        near = [
            i
            for i, x in enumerate(rest)
            if x.shape == mine.shape and x.dtype == mine.dtype and np.allclose(x, mine, rtol=1e-4, atol=1e-6)
        ]
        assert near, mine
        del rest[near[0]]


def assert_close(params, expected):
    for name, value in expected.items():
        np.testing.assert_allclose(params[name], value, rtol=2e-5, atol=1e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eager", "jit"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_equal_those_on_a_dict(name, mode):
    history, vanilla_state, vanilla_traces = oracle(name)
    tx = st.optimizer(OPTIMIZERS[name][0]())
    traces = 0

    def step(model, state):
        nonlocal traces
        traces += 1
        updates, state = tx.update(st.grad(model_loss)(model), state, model)
        assert is_tied(updates)
        return st.apply_updates(model, updates), state

    model = make_model()
    state = tx.init(model)
    run = st.jit(step) if mode == "jit" else step
    for expected in history:
        model, state = run(model, state)
        assert is_tied(model)
        assert_close(as_dict(model), expected)
    assert model.name == "tied"
    assert model.blocks[0].activation is jnp.tanh
    check_state(state, vanilla_state)
    for found in models_in(state):
        assert is_tied(found)
    if mode == "jit":
        assert traces == vanilla_traces == 1


@pytest.mark.parametrize("name", ["adam", "every second", "prodigy", "schedule free"])
def test_model_and_state_can_be_donated(name):
    history, _, _ = oracle(name)
    tx = st.optimizer(OPTIMIZERS[name][0]())
    traces = 0

    @st.jit(donate_argnums=(0, 1))
    def step(model, state):
        nonlocal traces
        traces += 1
        updates, state = tx.update(st.grad(model_loss)(model), state, model)
        return st.apply_updates(model, updates), state

    model = make_model()
    state = tx.init(model)
    for expected in history:
        before = model, state
        model, state = step(model, state)
        assert_close(as_dict(model), expected)
        assert before[0].embed.weight.is_deleted()
    assert is_tied(model)
    assert traces == 1


def test_the_state_is_read_at_every_path_of_a_weight():
    tx = st.optimizer(optax.adam(1e-2))
    model = make_model()
    state = tx.init(model)
    _, state = tx.update(st.grad(model_loss)(model), state, model)
    mu = state[0].mu
    assert isinstance(mu, Model)
    assert mu.embed.weight is mu.head.weight
    assert mu.blocks[1] is mu.blocks[0]
    expected = 0.1 * jax.grad(dict_loss)(arrays())["weight"]
    np.testing.assert_allclose(mu.embed.weight, expected, rtol=1e-5)


def test_a_tied_weight_counts_once_in_the_norm_that_clips():
    """The gradient at a point is known here: 3 for the tied weight, 4 for the other, so the norm is 5 and not √34."""
    tied, other = jnp.zeros(()), jnp.zeros(())
    params = {"a": tied, "b": tied, "c": other}
    gradient = {"a": jnp.array(3.0), "c": jnp.array(4.0)}
    gradient["b"] = gradient["a"]
    tx = st.optimizer(optax.clip_by_global_norm(1.0))
    updates, _ = tx.update(gradient, tx.init(params), params)
    np.testing.assert_allclose([updates["a"], updates["b"], updates["c"]], [0.6, 0.6, 0.8], rtol=1e-6)
    assert updates["a"] is updates["b"]


@pytest.mark.parametrize("mode", ["eager", "jit"])
def test_lookahead_parts_slow_and_fast_weights(mode):
    make = lambda: optax.lookahead(optax.sgd(0.1, momentum=0.9), sync_period=2, slow_step_size=0.5)
    vanilla = make()
    params = optax.LookaheadParams.init_synced(arrays())
    vanilla_state = vanilla.init(params)
    tx = st.optimizer(make())
    model = make_model()
    models = optax.LookaheadParams.init_synced(model)
    state = tx.init(models)

    def step(models, state):
        updates, state = tx.update(st.grad(model_loss)(models.fast), state, models)
        return st.apply_updates(models, updates), state

    @jax.jit
    def vanilla_step(params, state):
        updates, state = vanilla.update(jax.grad(dict_loss)(params.fast), state, params)
        return optax.apply_updates(params, updates), state

    run = st.jit(step) if mode == "jit" else step
    for _ in range(STEPS):
        models, state = run(models, state)
        params, vanilla_state = vanilla_step(params, vanilla_state)
        for mine, expected in zip(models, params, strict=True):
            assert is_tied(mine)
            assert_close(as_dict(mine), expected)
    assert models.fast is not models.slow
    assert models.fast.embed.weight is not models.slow.embed.weight
    check_state(state, vanilla_state)


def test_lookahead_from_two_copies_is_traced_once():
    tx = st.optimizer(optax.lookahead(optax.adam(0.1), sync_period=2, slow_step_size=0.5))
    models = optax.LookaheadParams(make_model(), make_model())
    state = tx.init(models)
    traces = 0

    @st.jit(donate_argnums=(0, 1))
    def step(models, state):
        nonlocal traces
        traces += 1
        updates, state = tx.update(st.grad(model_loss)(models.fast), state, models)
        return st.apply_updates(models, updates), state

    for _ in range(STEPS):
        models, state = step(models, state)
    assert traces == 1
    assert is_tied(models.fast)
    assert is_tied(models.slow)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eager", "jit"])
def test_lbfgs_gets_whole_models_in_its_value_function(mode):
    # Eagerly, each step traces its line search anew; backtracking is the cheaper one to trace.
    backtracking = optax.scale_by_backtracking_linesearch(3, store_grad=True)
    make = lambda: optax.lbfgs(memory_size=3, **({"linesearch": backtracking} if mode == "eager" else {}))
    vanilla, tx = make(), st.optimizer(make())
    counts = {"vanilla": 0, "ours": 0}

    @jax.jit
    def vanilla_step(params, state):
        counts["vanilla"] += 1
        value, gradient = jax.value_and_grad(dict_loss)(params)
        updates, state = vanilla.update(gradient, state, params, value=value, grad=gradient, value_fn=dict_loss)
        return optax.apply_updates(params, updates), state

    def step(model, state):
        counts["ours"] += 1

        def value_fn(m):
            assert m.name == "tied"
            assert m.blocks[0].activation is jnp.tanh
            return model_loss(m)

        value, gradient = st.value_and_grad(model_loss)(model)
        updates, state = tx.update(gradient, state, model, value=value, grad=gradient, value_fn=value_fn)
        return st.apply_updates(model, updates), state

    params, model = arrays(), make_model()
    vanilla_state, state = vanilla.init(params), tx.init(model)
    run = st.jit(step) if mode == "jit" else step
    for _ in range(STEPS):
        params, vanilla_state = vanilla_step(params, vanilla_state)
        model, state = run(model, state)
        assert is_tied(model)
        for name, value in params.items():
            np.testing.assert_allclose(as_dict(model)[name], value, rtol=2e-3, atol=1e-4, err_msg=name)
    assert model_loss(model) < model_loss(make_model())
    for found in models_in(state):
        assert is_tied(found)
    assert len(distinct_arrays(state)) == len(jax.tree.leaves(vanilla_state))
    if mode == "jit":
        assert counts["ours"] == counts["vanilla"]


class Tied(eqx.Module):
    embed: Embed
    head: Embed


@pytest.mark.parametrize("where", ["gradient", "mapped gradient", "state", "apply"])
def test_a_tie_missing_in_updates_or_state_is_an_error_with_both_paths(where):
    tx = st.optimizer(optax.adam(1e-2))
    weight = jnp.ones(3)
    model = Tied(Embed(weight), Embed(weight))
    loss = lambda m: (m.embed.weight * m.head.weight * jnp.arange(3.0)).sum() + m.embed.weight.sum()
    state = tx.init(model)
    gradient = st.grad(loss)(model)
    with pytest.raises(st.SharingMismatchError) as caught:
        if where == "gradient":  # each path has its own share of the gradient here
            tx.update(jax.grad(loss)(model), state, model)
        elif where == "mapped gradient":
            tx.update(jax.tree.map(lambda x: x + 0, gradient), state, model)
        elif where == "state":
            tx.update(gradient, jax.tree.map(lambda x: x + 0, state), model)
        else:
            st.apply_updates(model, jax.tree.map(lambda x: x + 0, gradient))
    assert caught.value.paths == (".embed.weight", ".head.weight")
    text = str(caught.value)
    assert "`.embed.weight` and `.head.weight`" in text
    # Of a gradient `retie` would keep one path's part.
    assert ("optimizer.init(model)" if where == "state" else "sharedtree.grad(") in text
    assert ("`sharedtree.tree.map`" if where == "state" else "sharedtree.tree.map(jnp.add, ") in text
    # Modules need no policy.
    assert "Policy" not in text
    assert where == "apply" or "retie" not in text


def test_plain_jax_grad_of_plain_parameters_is_refused():
    w = jnp.ones(3)
    params = {"a": w, "b": [w]}
    tx = st.optimizer(optax.sgd(0.1))
    state = tx.init(params)
    gradient = jax.grad(lambda p: (p["a"] * p["b"][0] * jnp.arange(3.0)).sum())(params)
    gradient = jax.tree.map(lambda x: x + 0, gradient)
    with pytest.raises(st.SharingMismatchError, match=r"\['a'\].*\['b'\]\[0\]") as caught:
        tx.update(gradient, state, params)
    assert caught.value.paths == ("['a']", "['b'][0]")


@pytest.mark.parametrize("mode", ["eager", "jit"])
def test_plain_dicts_and_lists_of_parameters(mode):
    def loss(x, y, b):
        return ((x * jnp.arange(3.0) + b) ** 2).sum() + (y * b).sum()

    w, b = jnp.ones(3), jnp.full(3, 0.5)
    params = {"layers": [w, {"again": w}], "b": b}
    vanilla = {"w": w, "b": b}
    tx, reference = st.optimizer(optax.adam(0.1)), optax.adam(0.1)
    state, vanilla_state = tx.init(params), reference.init(vanilla)

    def step(dag, state):
        params = dag.tree
        value = lambda d: loss(d.tree["layers"][0], d.tree["layers"][1]["again"], d.tree["b"])
        gradient = jax.grad(value)(dag).tree
        updates, new = tx.update(gradient, state.tree, params)
        return st.Dag(st.apply_updates(params, updates)), st.Dag(new)

    run = jax.jit(step) if mode == "jit" else step
    dag, state = st.Dag(params), st.Dag(state)
    for _ in range(4):
        dag, state = run(dag, state)
        gradient = jax.grad(lambda p: loss(p["w"], p["w"], p["b"]))(vanilla)
        updates, vanilla_state = reference.update(gradient, vanilla_state, vanilla)
        vanilla = optax.apply_updates(vanilla, updates)
        new = dag.tree
        assert new["layers"][0] is new["layers"][1]["again"]
        assert_close({"w": new["layers"][0], "b": new["b"]}, vanilla)
    assert len(jax.tree.leaves(state)) == len(jax.tree.leaves(vanilla_state))


class Mixed(eqx.Module):
    weight: jax.Array
    same: jax.Array
    steps: jax.Array
    key: jax.Array
    table: np.ndarray
    activation: object
    rate: float
    bias: None = None


@pytest.mark.parametrize("mode", ["eager", "jit"])
def test_what_is_no_parameter_is_left_as_it_is(mode):
    w = jnp.array([1.0, 2.0])
    model = Mixed(w, w, jnp.array(3), jax.random.key(1), np.arange(3), jax.nn.relu, 0.5)
    tx = st.optimizer(optax.adam(0.1))
    state = tx.init(model)
    assert [x.shape for x in distinct_arrays(state)] == [(), (2,), (2,)]

    def step(model, state):
        gradient = st.grad(lambda m: (m.weight * m.same).sum() * m.rate)(model)
        updates, state = tx.update(gradient, state, model)
        return st.apply_updates(model, updates), state

    run = st.jit(step) if mode == "jit" else step
    expected = vanilla = {"w": w}
    vanilla_tx = optax.adam(0.1)
    vanilla_state = vanilla_tx.init(vanilla)
    for _ in range(4):
        model, state = run(model, state)
        updates, vanilla_state = vanilla_tx.update({"w": expected["w"]}, vanilla_state)
        expected = optax.apply_updates(expected, updates)
        np.testing.assert_allclose(model.weight, expected["w"], rtol=1e-6)
    assert model.weight is model.same
    assert int(model.steps) == 3
    assert bool(jnp.array_equal(jax.random.key_data(model.key), jax.random.key_data(jax.random.key(1))))
    np.testing.assert_array_equal(model.table, np.arange(3))
    assert model.activation is jax.nn.relu
    assert model.rate == 0.5
    assert model.bias is None


@pytest.mark.parametrize("mode", ["eager", "jit"])
def test_depth_one_thousand(mode):
    tied, last = jnp.array(1.0), jnp.array(2.0)
    model = link(last, None)
    for _ in range(999):
        model = link(tied, model)

    tx = st.optimizer(optax.adam(0.1))

    def step(model, state):
        gradient = st.tree.map(lambda x: jnp.ones_like(x), model)
        updates, state = tx.update(gradient, state, model)
        return st.apply_updates(model, updates), state

    run = st.jit(step) if mode == "jit" else step

    def two_steps():
        state = tx.init(model)
        one, state = run(model, state)
        two, state = run(one, state)
        return two, len(st.tree.leaves(state))

    model, slots = in_a_thread(two_steps)
    assert slots == 5
    np.testing.assert_allclose([model.scale, model.next.scale], [0.8, 0.8], rtol=1e-5)
    assert model.scale is model.next.scale
    depth = 0
    while model.next is not None:
        depth, model = depth + 1, model.next
    assert depth == 999
    np.testing.assert_allclose(model.scale, 1.8, rtol=1e-5)


def test_extra_arguments_that_no_transformation_asks_for_are_dropped_as_by_optax():
    w = jnp.ones(2)
    params = [w, w]
    tx = st.optimizer(optax.sgd(1.0))
    g = jnp.ones(2)
    updates, _ = tx.update([g, g], tx.init(params), params, value=jnp.array(1.0))
    np.testing.assert_array_equal(updates[0], [-1.0, -1.0])
    assert updates[0] is updates[1]


def test_updates_without_params():
    w = jnp.ones(2)
    tx = st.optimizer(optax.sgd(0.5))
    state = tx.init({"a": w, "b": w})
    g = jnp.full(2, 4.0)
    updates, _ = tx.update({"a": g, "b": g}, state)
    assert updates["a"] is updates["b"]
    np.testing.assert_array_equal(updates["b"], [-2.0, -2.0])


def test_the_state_holds_no_array_of_the_parameters():
    """`prodigy` keeps the first parameters; donating those must not take the state's copy away."""
    model = make_model()
    state = st.optimizer(optax.contrib.prodigy(0.1)).init(model)
    mine = {id(x) for x in distinct_arrays(model)}
    assert not mine & {id(x) for x in distinct_arrays(state)}


def test_an_object_that_cannot_be_taken_apart_is_refused():
    class Opaque:
        def __init__(self):
            self.weight = jnp.ones(2)

    with pytest.raises(st.UnregisteredTypeError, match="Opaque"):
        st.optimizer(optax.adam(0.1)).init(Opaque())


def test_apply_updates_equals_optax_where_nothing_is_tied():
    params = {"a": jnp.ones(2), "b": jnp.ones(2, jnp.bfloat16), "c": None}
    updates = {"a": jnp.full(2, 0.5), "b": jnp.full(2, 0.25, jnp.bfloat16), "c": None}
    ours, theirs = st.apply_updates(params, updates), optax.apply_updates(params, updates)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def test_apply_updates_keeps_the_dtype_and_aliases_what_has_no_update():
    w, b = jnp.ones(2, jnp.float32), jnp.ones(3)
    new = st.apply_updates({"a": w, "b": b}, {"a": jnp.ones(2, jnp.bfloat16), "b": None})
    assert new["a"].dtype == jnp.float32
    assert new["b"] is b


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
