"""`sharedtree.linen.TrainState` beside Flax's own.

The oracle of a tied state is Flax's `TrainState` on the *untied twin*: a model with one weight that it uses twice,
under vanilla `jax.jit` and `jax.grad`. The oracle of an untied one is Flax's on the same parameters, to the last bit.
"""

import functools
import operator
from typing import Any

import equinox as eqx
import flax.core
import flax.serialization
import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

import sharedtree as st
from sharedtree.linen import TrainState
from tests.processes import program, run

POLICY = st.Policy(containers=True)
X = jnp.linspace(-1.0, 1.0, 8).reshape(4, 2)
BATCHES = [X, 2 * X, X - 1, -X]


def weight():
    return jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)


def tied_params():
    shared = weight()
    return {"embed": shared, "head": shared, "bias": jnp.linspace(0.1, 0.3, 3)}


def twin_params():
    """The same model with one weight."""
    return {"weight": weight(), "bias": jnp.linspace(0.1, 0.3, 3)}


def untied_params():
    return {"embed": weight(), "head": weight() + 1, "bias": jnp.linspace(0.1, 0.3, 3)}


def loss(params, x):
    embed = params["embed"] if "embed" in params else params["weight"]
    head = params["head"] if "head" in params else params["weight"]
    return ((jnp.tanh(x @ embed + params["bias"]) @ head.T - 1) ** 2).mean()


def step_with_ties(state, x):
    grads = st.grad(loss, policy=POLICY)(state.params, x)
    return state.apply_gradients(grads=grads)


def vanilla_step(state, x):
    return state.apply_gradients(grads=jax.grad(loss)(state.params, x))


def trained(step, state, batches=BATCHES):
    for x in batches:
        state = step(state, x)
    return state


def merged(tree):
    """A tree of the tied model's shape as one of the twin's; raises if something that was tied is two arrays."""
    if isinstance(tree, dict) and "embed" in tree:
        assert tree["embed"] is tree["head"] or tree["embed"] == tree["head"] == optax.MaskedNode()
        return {"bias": merged(tree["bias"]), "weight": merged(tree["embed"])}
    if isinstance(tree, dict):
        return {key: merged(value) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*map(merged, tree))
    if isinstance(tree, tuple | list):
        return type(tree)(map(merged, tree))
    return tree


def assert_close(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert jnp.result_type(a) == jnp.result_type(b)
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def assert_identical(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert jax.typeof(a) == jax.typeof(b)
        np.testing.assert_array_equal(a, b)


def contents(state):
    return state.step, state.params, state.opt_state


def create(cls, params, tx, **more):
    return cls.create(apply_fn=None, params=params, tx=tx, **more)


FLAX = flax.training.train_state.TrainState


def is_weight(params):
    return {key: key != "bias" for key in params}


def labels(params):
    return {key: "frozen" if key == "bias" else "trained" for key in params}


# Of each kind, one is tried daily.
ONLY_SLOWLY = {
    "adamw with a function for a mask",
    "multi_transform with a function",
    "MultiSteps as a transformation",
    "momentum",
    "adafactor",
    "lamb",
}

TRANSFORMATIONS = {
    "sgd": lambda params: optax.sgd(0.1),
    "momentum": lambda params: optax.sgd(0.1, momentum=0.9),
    "adam": lambda params: optax.adam(0.1),
    "adamw with a mask": lambda params: optax.adamw(0.1, weight_decay=0.1, mask=is_weight(params)),
    "adamw with a function for a mask": lambda params: optax.adamw(0.1, weight_decay=0.1, mask=is_weight),
    "clipped": lambda params: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1)),
    "masked": lambda params: optax.masked(optax.adam(0.1), is_weight(params)),
    "multi_transform": lambda params: optax.multi_transform(
        {"frozen": optax.set_to_zero(), "trained": optax.adam(0.1)}, labels(params)
    ),
    "multi_transform with a function": lambda params: optax.multi_transform(
        {"frozen": optax.set_to_zero(), "trained": optax.lion(0.1)}, labels
    ),
    "MultiSteps": lambda params: optax.MultiSteps(optax.adam(0.1), every_k_schedule=2),
    "MultiSteps as a transformation": lambda params: optax.MultiSteps(
        optax.adam(0.1), every_k_schedule=2
    ).gradient_transformation(),
    "schedule_free": lambda params: optax.contrib.schedule_free_sgd(0.1),
    "apply_if_finite": lambda params: optax.chain(
        optax.clip(0.5), optax.apply_if_finite(optax.adam(0.1), max_consecutive_errors=3)
    ),
    "a schedule, injected": lambda params: optax.inject_hyperparams(optax.adam)(
        learning_rate=optax.linear_schedule(0.1, 0.01, 3)
    ),
    "adafactor": lambda params: optax.adafactor(0.1),
    "lamb": lambda params: optax.lamb(0.1),
}


@pytest.fixture(
    params=[pytest.param(name, marks=[pytest.mark.slow] * (name in ONLY_SLOWLY)) for name in TRANSFORMATIONS]
)
def make_tx(request):
    return TRANSFORMATIONS[request.param]


# --- ties are kept ----------------------------------------------------------------------------------------------------


@pytest.mark.sampled(every=5)
def test_a_tied_state_is_trained_as_one_weight_is_in_flax_by_any_transformation(make_tx):
    params, twin = tied_params(), twin_params()
    state = create(TrainState, params, make_tx(params))
    assert_close(merged(state.opt_state), create(FLAX, twin, make_tx(twin)).opt_state)
    state = trained(st.jit(step_with_ties, donate_argnums=0), state)
    want = trained(jax.jit(vanilla_step), create(FLAX, twin, make_tx(twin)))
    assert_close(merged(contents(state)), contents(want))  # `merged` says that each slot is one
    assert type(state) is TrainState


def dag_of(step, **options):
    jitted = jax.jit(lambda dag, x: st.Dag(step(dag.tree, x)), **options)
    return lambda state, x: jitted(st.Dag(state), x).tree


def step_of_a_dag_of_parameters(state, x):
    grads = jax.grad(lambda dag: loss(dag.tree, x))(st.Dag(state.params)).tree
    return state.apply_gradients(grads=grads)


def step_in_a_context(state, x):
    with st.Context(POLICY):
        return state.apply_gradients(grads=st.grad(loss)(state.params, x))


STEPS = {
    "eagerly": step_with_ties,
    "eagerly, a Dag": step_of_a_dag_of_parameters,
    "st.jit": st.jit(step_with_ties),
    "st.jit with the policy": st.jit(step_with_ties, policy=POLICY),
    "st.jit, a Context": st.jit(step_in_a_context),
    "st.jit, a Dag for the gradient": st.jit(step_of_a_dag_of_parameters),
    "st.jit, donated": st.jit(step_with_ties, donate_argnums=0),
    "jax.jit with a Dag": dag_of(step_with_ties),
    "jax.jit with a Dag, donated": dag_of(step_of_a_dag_of_parameters, donate_argnums=0),
}


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.sampled(every=2)
def test_ties_are_kept_however_the_step_is_run(name):
    tx = optax.adam(0.1)
    first = create(TrainState, tied_params(), tx)
    state = trained(STEPS[name], first)
    want = trained(vanilla_step, create(FLAX, twin_params(), tx))
    assert_close(merged(contents(state)), contents(want))
    assert len(st.tree.leaves(state.opt_state)) == len(jax.tree.leaves(want.opt_state))
    assert first.params["embed"].is_deleted() == name.endswith("donated")


def test_the_gradient_of_a_tied_weight_is_the_sum_by_hand():
    shared = jnp.array([1.0, 2.0])
    state = create(TrainState, {"a": shared, "b": shared}, optax.sgd(0.5))

    @st.jit
    def step(state):
        grads = st.grad(lambda params: params["a"][0] + 3 * params["b"][0], policy=POLICY)(state.params)
        return state.apply_gradients(grads=grads)

    state = step(state)
    assert state.params["a"] is state.params["b"]
    np.testing.assert_allclose(state.params["a"], [1 - 0.5 * (1 + 3), 2.0])
    assert int(state.step) == 1


def test_the_gradient_of_a_sum_of_tied_arrays_is_whole():
    """Where `jax.grad` may return one array for both paths, which is half of it."""
    shared = jnp.array([1.0, 2.0])
    state = create(TrainState, {"a": shared, "b": shared}, optax.sgd(0.125))

    @st.jit
    def step(state):
        grads = st.grad(lambda params: ((params["a"] + params["b"]) ** 2).sum(), policy=POLICY)(state.params)
        return state.apply_gradients(grads=grads)

    np.testing.assert_allclose(step(state).params["a"], shared - 0.125 * 8 * shared)


def test_a_step_is_traced_as_often_as_in_flax():
    counts = []
    for cls, jit, step in ((TrainState, st.jit, step_with_ties), (FLAX, jax.jit, vanilla_step)):
        traces = []
        jitted = jit(lambda state, x, step=step, traces=traces: traces.append(1) or step(state, x))
        trained(jitted, create(cls, tied_params() if cls is TrainState else twin_params(), optax.adam(0.1)))
        counts.append(len(traces))
    assert counts[0] == counts[1]


def test_a_transformation_that_keeps_ties_already_is_used_as_it_is():
    tx = st.optimizer(optax.adam(0.1), wrt=lambda path, value: path != ("bias",))
    state = create(TrainState, tied_params(), tx)
    assert state.opt_state[0].mu["bias"] is None
    state = trained(st.jit(step_with_ties), state)
    frozen = optax.masked(optax.adam(0.1), is_weight)
    zero = optax.masked(optax.set_to_zero(), lambda params: jax.tree.map(operator.not_, is_weight(params)))
    want = trained(jax.jit(vanilla_step), create(FLAX, twin_params(), optax.chain(frozen, zero)))
    assert_close(merged(state.params), want.params)


def test_what_keeps_ties_may_be_part_of_a_chain():
    tx = optax.chain(optax.clip_by_global_norm(0.1), st.optimizer(optax.adam(0.1)))
    state = trained(st.jit(step_with_ties), create(TrainState, tied_params(), tx))
    plain = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1))
    want = trained(jax.jit(vanilla_step), create(FLAX, twin_params(), plain))
    assert_close(merged(contents(state)), contents(want))


def test_frozen_dicts_keep_ties():
    params = flax.core.freeze(tied_params())
    state = trained(st.jit(step_with_ties), create(TrainState, params, optax.adam(0.1)))
    assert isinstance(state.params, flax.core.FrozenDict)
    want = trained(vanilla_step, create(FLAX, twin_params(), optax.adam(0.1)))
    assert_close(merged(flax.core.unfreeze(state.params)), want.params)


def test_another_transformation_takes_over():
    """Flax's way: `replace` with a transformation and a state of it."""
    state = trained(st.jit(step_with_ties), create(TrainState, tied_params(), optax.adam(0.1)))
    sgd = optax.sgd(0.1)
    state = state.replace(tx=sgd, opt_state=sgd.init(state.params))
    want = trained(vanilla_step, create(FLAX, twin_params(), optax.adam(0.1)))
    want = want.replace(tx=sgd, opt_state=sgd.init(want.params))
    assert_close(merged(contents(trained(st.jit(step_with_ties), state))), contents(trained(vanilla_step, want)))


# --- without ties it is Flax's ----------------------------------------------------------------------------------------


@pytest.mark.sampled(every=3)
def test_without_ties_the_computation_is_that_of_flax(make_tx):
    tx = make_tx(untied_params())
    state, want = (create(cls, untied_params(), tx) for cls in (TrainState, FLAX))
    assert_identical(contents(state), contents(want))
    assert (state.tx, state.apply_fn, state.step) == (want.tx, want.apply_fn, want.step)
    # The same operations on the same inputs, in the same order.
    one, other = (jax.make_jaxpr(vanilla_step)(each, X) for each in (state, want))
    assert str(one) == str(other)
    assert isinstance(state, FLAX)


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit, st.jit], ids=["eagerly", "jax.jit", "st.jit"])
def test_without_ties_all_is_as_in_flax(jit):
    """To the last bit, and without a warning: warnings are errors here."""
    tx = optax.adam(0.1)
    state, want = (trained(jit(vanilla_step), create(cls, untied_params(), tx)) for cls in (TrainState, FLAX))
    assert_identical(contents(state), contents(want))


def test_states_of_one_transformation_have_one_treedef():
    tx = optax.adam(0.1)
    one, other = (create(TrainState, untied_params(), tx) for _ in range(2))
    assert jax.tree.structure(one) == jax.tree.structure(other)
    doubled = jax.tree.map(jnp.add, one, other)
    assert_identical(doubled.params, jax.tree.map(lambda x: 2 * x, one.params))


@pytest.mark.slow
def test_states_are_made_under_transforms():
    tx = optax.adam(0.1)

    def init(scale):
        return create(TrainState, jax.tree.map(lambda x: x * scale, untied_params()), tx)

    shapes = jax.eval_shape(init, 1.0)
    here = jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), shapes)
    assert_identical(contents(jax.jit(init, out_shardings=here)(1.0))[1:], contents(init(1.0))[1:])
    many = jax.jit(jax.vmap(lambda scale: vanilla_step(init(scale), X)))(jnp.array([1.0, 2.0]))
    for i, scale in enumerate((1.0, 2.0)):
        want = vanilla_step(create(FLAX, init(scale).params, tx), X)
        assert_close(jax.tree.map(lambda x: x[i], many.params), want.params)


def test_a_field_of_a_subclass_and_kwargs():
    class State(TrainState):
        """With statistics and a key."""

        batch_stats: Any
        dropout_rng: jax.Array

    state = create(State, tied_params(), optax.adam(0.1), batch_stats={"mean": X[0]}, dropout_rng=jax.random.key(0))

    @st.jit
    def step(state, x):
        grads = st.grad(loss, policy=POLICY)(state.params, x)
        key = jax.random.fold_in(state.dropout_rng, state.step)
        return state.apply_gradients(grads=grads, batch_stats={"mean": x.mean(0)}, dropout_rng=key)

    state = trained(step, state)
    assert type(state) is State
    np.testing.assert_allclose(state.batch_stats["mean"], BATCHES[-1].mean(0), atol=1e-7)
    key = functools.reduce(jax.random.fold_in, range(4), jax.random.key(0))
    assert (jax.random.key_data(state.dropout_rng) == jax.random.key_data(key)).all()
    want = trained(vanilla_step, create(FLAX, twin_params(), optax.adam(0.1)))
    assert_close(merged(state.params), want.params)
    with pytest.raises(TypeError, match="nothing"):
        state.apply_gradients(grads=state.params, nothing=1)


def overwriting(params):
    return {"params": params, OVERWRITE_WITH_GRADIENT: {"scale": jnp.ones(2), "history": jnp.zeros(3)}}


def loss_that_overwrites(params, x):
    scales = params[OVERWRITE_WITH_GRADIENT]
    return loss(params["params"], x) + (scales["scale"] ** 2).sum() + (scales["history"] * jnp.arange(3.0)).sum()


@pytest.mark.slow
def test_what_gradients_overwrite_is_overwritten_as_in_flax():
    tx = optax.adam(0.1)
    gradients = {
        TrainState: lambda params, x: st.grad(loss_that_overwrites, policy=POLICY)(params, x),
        FLAX: jax.grad(loss_that_overwrites),
    }
    found = {}
    for name, cls, params in (
        ("tied", TrainState, tied_params()),
        ("one weight", FLAX, twin_params()),
        ("untied", TrainState, untied_params()),
        ("untied in Flax", FLAX, untied_params()),
    ):
        step = lambda state, x, cls=cls: state.apply_gradients(grads=gradients[cls](state.params, x))
        jit = st.jit if cls is TrainState else jax.jit
        found[name] = contents(trained(jit(step), create(cls, overwriting(params), tx), BATCHES[:2]))
    assert_close(merged(found["tied"]), found["one weight"])
    assert_identical(found["untied"], found["untied in Flax"])
    np.testing.assert_array_equal(found["tied"][1][OVERWRITE_WITH_GRADIENT]["scale"], [4.0, 4.0])
    np.testing.assert_array_equal(found["tied"][1][OVERWRITE_WITH_GRADIENT]["history"], [0.0, 1.0, 2.0])


# --- steps that lose ties ---------------------------------------------------------------------------------------------

MISMATCH = st.errors.SharingMismatchError


@pytest.mark.parametrize("around", [lambda f: f, st.jit, dag_of], ids=["eagerly", "st.jit", "a Dag"])
def test_half_gradients_are_an_error_that_says_how_to_sum_them(around):
    """`jax.grad` of `state.params` has a part for each path, also inside `st.jit`."""
    state = create(TrainState, tied_params(), optax.sgd(0.1))
    with pytest.raises(MISMATCH, match=r"`\['embed'\]` and `\['head'\]` are one leaf in the tree of") as caught:
        around(vanilla_step)(state, X)
    assert "sharedtree.grad(loss_fn, policy=sharedtree.Policy(containers=True))(state.params)" in str(caught.value)
    assert caught.value.paths == ("['embed']", "['head']")


def test_a_gradient_without_the_policy_warns_where_tie_was_called_and_is_an_error_in_any_case():
    def step(state, x):
        return state.apply_gradients(grads=st.grad(loss)(state.params, x))

    with pytest.raises(MISMATCH, match="`sharedtree.grad`, with this policy"):
        st.jit(step)(create(TrainState, tied_params(), optax.sgd(0.1)), X)
    params = st.tie(untied_params(), lambda params: (params["embed"], params["head"]))
    with pytest.warns(st.UntiedWarning, match="policy = sharedtree.Policy"), pytest.raises(MISMATCH):
        st.jit(step)(create(TrainState, params, optax.sgd(0.1)), X)


def double(tree):
    return jax.tree.map(lambda leaf: 2 * leaf, tree)


def test_a_gradient_that_lost_its_ties_is_an_error_and_one_that_kept_them_is_not():
    state = create(TrainState, tied_params(), optax.sgd(0.1))
    grads = st.grad(loss, policy=POLICY)(state.params, X)
    with pytest.raises(MISMATCH, match="sharedtree.tree.map"):
        state.apply_gradients(grads=double(grads))
    new = state.apply_gradients(grads=st.tree.map(lambda leaf: 2 * leaf, grads))
    want = jax.grad(loss)(twin_params(), X)
    assert_close(merged(new.params), jax.tree.map(lambda p, g: p - 0.1 * 2 * g, twin_params(), want))


def test_jax_jit_around_the_step_is_told_once():
    """It hands over a state without ties, which nothing but `create` has seen."""
    for make_tx in (lambda: optax.sgd(0.1), lambda: optax.MultiSteps(optax.sgd(0.1), 2)):
        state = create(TrainState, tied_params(), make_tx())
        step = jax.jit(lambda state, x: vanilla_step(state, x))
        with pytest.warns(st.UntiedWarning, match=r"`state.params\['embed'\]` and `state.params\['head'\]`") as record:
            trained(step, state)
        assert len(record) == 1
        assert "step = sharedtree.jit(step)" in str(record[0].message)
    with st.Context(st.Policy(on_untie="error")), pytest.raises(st.errors.UntiedError):
        vanilla_step(create(TrainState, tied_params(), optax.sgd(0.1)).replace(params=untied_params()), X)


def as_a_tree(state):
    return jax.tree.map(jnp.copy, state)


def restored_by_flax(state):
    return flax.serialization.from_bytes(state, flax.serialization.to_bytes(state))


@pytest.mark.parametrize("lose", [as_a_tree, restored_by_flax])
@pytest.mark.parametrize("jit", [lambda f: f, st.jit], ids=["eagerly", "st.jit"])
def test_a_state_that_lost_its_ties_is_told_of_them(lose, jit):
    before = vanilla_step_of_ties = step_with_ties(create(TrainState, tied_params(), optax.sgd(0.1)), X)
    with pytest.warns(st.UntiedWarning, match="when the optimizer was initialised"):
        jit(lambda state, x: step_with_ties(state, x))(lose(before), X)
    again = step_with_ties(st.retie(lose(before), like=before), X)
    assert_close(contents(again), contents(step_with_ties(vanilla_step_of_ties, X)))
    assert st.same_sharing(again, before)


def test_ties_that_are_meant_to_go_are_not_told_of():
    state = create(TrainState, tied_params(), optax.adam(0.1))
    state = st.untie(state)
    want = create(FLAX, {**tied_params()}, optax.adam(0.1))
    assert_identical(contents(vanilla_step(state, X)), contents(vanilla_step(want, X)))


@pytest.mark.parametrize(
    "lose",
    [
        lambda state: state.replace(opt_state=state.tx.init(state.params)),
        lambda state: state.replace(opt_state=as_a_tree(state.opt_state)),
        lambda state: TrainState(
            step=0, apply_fn=None, params=state.params, tx=state.tx, opt_state=state.tx.init(state.params)
        ),
    ],
    ids=["init of optax", "a map over it", "the class itself"],
)
def test_a_state_of_the_optimizer_without_the_ties_is_an_error(lose):
    state = create(TrainState, tied_params(), optax.adam(0.1))
    with pytest.raises(MISMATCH, match="two objects in the state") as caught:
        step_with_ties(lose(state), X)
    assert "fresh = sharedtree.optimizer(state.tx).init(state.params)" in str(caught.value)


# --- bad input --------------------------------------------------------------------------------------------------------

WRONG_TREES = {
    "a key too few": lambda g: {key: value for key, value in g.items() if key != "bias"},
    "a key too many": lambda g: {**g, "scale": jnp.ones(2)},
    "another key": lambda g: {"bias": g["bias"], "embed": g["embed"], "tail": g["head"]},
    "a list": lambda g: list(g.values()),
    "a frozen dict": flax.core.freeze,
    "an array": lambda g: g["bias"],
    "nothing": lambda g: None,
    "a Dag": st.Dag,
    "a level more": lambda g: {**g, "bias": {"bias": g["bias"]}},
}


@pytest.mark.parametrize("make_params", [untied_params, tied_params])
@pytest.mark.parametrize("name", WRONG_TREES)
def test_a_gradient_of_another_tree_is_an_error_as_in_flax(name, make_params):
    for tx in (optax.sgd(0.1), optax.adam(0.1)):
        for cls in (FLAX, TrainState):
            with pytest.raises((ValueError, TypeError)):
                create(cls, make_params(), tx).apply_gradients(grads=WRONG_TREES[name](make_params()))


def test_a_gradient_with_other_keys_says_which():
    grads = {"bias": jnp.ones(3), "embed": weight(), "tail": weight()}
    with pytest.raises(MISMATCH, match=r"at the root: .*`\['head'\]` in this one only.*`\['tail'\]` in this one only"):
        create(TrainState, untied_params(), optax.sgd(0.1)).apply_gradients(grads=grads)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (4, 3)])
def test_a_leaf_of_another_shape_is_what_flax_makes_of_it(shape):
    grads = {**untied_params(), "bias": jnp.ones(shape)}

    def outcome(cls):
        try:
            return contents(create(cls, untied_params(), optax.adam(0.1)).apply_gradients(grads=grads))
        except TypeError as error:
            return str(error)

    want = outcome(FLAX)
    if isinstance(want, str):
        assert outcome(TrainState) == want
    else:
        assert_identical(outcome(TrainState), want)


def test_a_gradient_may_have_arrays_in_common_that_the_parameters_have_not():
    grads = tied_params()
    new, want = (create(c, untied_params(), optax.adam(0.1)).apply_gradients(grads=grads) for c in (TrainState, FLAX))
    assert_identical(contents(new), contents(want))


@pytest.mark.parametrize("tx", [None, optax.adam, 0.1])
def test_what_is_no_transformation_is_refused(tx):
    with pytest.raises(TypeError, match=r"`TrainState.create` needs an optax transformation.*\n    tx = optax"):
        create(TrainState, untied_params(), tx)


@pytest.mark.parametrize(
    "params", [{}, [jnp.ones(2)], {"a": 1.0}, {"a": np.ones(3, np.float32)}, {"a": jnp.ones(3, jnp.bfloat16)}], ids=str
)
@pytest.mark.slow
def test_other_parameters_without_ties_are_as_in_flax(params):
    grads = jax.tree.map(lambda leaf: jnp.ones_like(leaf) / 3, params)
    new, want = (create(c, params, optax.adam(0.1)).apply_gradients(grads=grads) for c in (TrainState, FLAX))
    assert_identical(contents(new), contents(want))


@pytest.mark.slow
def test_a_parameter_that_is_an_array_of_the_optimizers_state():
    """Entries of an optimizer's state do not count as ties: each is what it is without."""
    tx = optax.sgd(0.1, momentum=0.9)
    state = vanilla_step(create(TrainState, untied_params(), tx), X)
    tied = st.tie(state, lambda state: (state.params["embed"], state.opt_state[0].trace["embed"]))
    want = create(FLAX, tied.params, tx).replace(step=1, opt_state=tied.opt_state)
    want = trained(jax.jit(vanilla_step), want)
    for options in ({}, {"donate_argnums": 0}):
        # A copy of the state would have arrays of its own, but the same tie.
        got = trained(st.jit(vanilla_step, **options), st.copy(tied))
        assert_close(contents(got), contents(want))
        assert not st.ties(got)


def test_a_target_begins_as_a_copy():
    class State(TrainState):
        """With a target."""

        target: Any

    params, step = untied_params(), lambda state, x: vanilla_step(state, x)
    with pytest.warns(st.UntiedWarning, match=r"target = sharedtree.copy\(params\)"):
        st.jit(step)(create(State, params, optax.sgd(0.1), target=params), X)
    tied = tied_params()
    state = create(State, tied, optax.sgd(0.1), target=st.copy(tied))
    state = trained(st.jit(step_with_ties, donate_argnums=0), state)
    assert_close(state.target, tied_params())
    assert state.target["embed"] is state.target["head"]


# --- parameters that are modules, or hold them ------------------------------------------------------------------------


class Tied(eqx.Module):
    embed: eqx.nn.Linear
    head: eqx.nn.Linear
    activation: Any = jnp.tanh

    def __call__(self, x):
        return self.head(self.activation(self.embed(x)))


def equinox_model():
    layer = eqx.nn.Linear(2, 2, key=jax.random.key(1))
    return Tied(layer, layer)


def loss_of(model, x):
    return (jax.vmap(model)(x) ** 2).mean()


def twin_of_modules(arrays, x):
    one = lambda x: arrays["weight"] @ x + arrays["bias"]
    return (jax.vmap(lambda x: one(jnp.tanh(one(x))))(x) ** 2).mean()


@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: {"net": m}, lambda m: [m]], ids=["alone", "dict", "list"])
@pytest.mark.slow
def test_parameters_that_are_modules_of_equinox(wrap):
    model = equinox_model()
    of = lambda params: (
        params if isinstance(params, Tied) else jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, Tied))[0]
    )

    @st.jit
    def step(state, x):
        # Modules carry identity wherever they are, so no policy is needed.
        return state.apply_gradients(grads=st.grad(lambda params: loss_of(of(params), x))(state.params))

    state = trained(step, create(TrainState, wrap(model), optax.adam(0.1)))
    new = of(state.params)
    assert new.embed is new.head
    assert new.activation is jnp.tanh
    arrays = {"weight": model.embed.weight, "bias": model.embed.bias}
    want = trained(
        lambda state, x: state.apply_gradients(grads=jax.grad(twin_of_modules)(state.params, x)),
        create(FLAX, arrays, optax.adam(0.1)),
    )
    assert_close({"weight": new.embed.weight, "bias": new.embed.bias}, want.params)


class Net(nnx.Module):
    def __init__(self):
        self.embed = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
        self.head = nnx.Linear(2, 2, rngs=nnx.Rngs(1))
        self.head.kernel = self.embed.kernel

    def __call__(self, x):
        return self.head(self.norm(jnp.tanh(self.embed(x)), use_running_average=True))


@pytest.mark.slow
def test_parameters_that_are_a_module_of_nnx():
    """State of the library's is left alone, as by `st.optimizer`; weight decay would change it."""
    model = Net()
    tx = optax.adamw(0.1, weight_decay=0.5)

    @st.jit
    def step(state, x):
        return state.apply_gradients(grads=st.grad(lambda model: (model(x) ** 2).mean())(state.params))

    state = trained(step, create(TrainState, model, tx))
    assert state.params.embed.kernel is state.params.head.kernel
    assert_identical(nnx.state(state.params.norm, nnx.BatchStat), nnx.state(model.norm, nnx.BatchStat))

    def twin(arrays, x):
        hidden = jnp.tanh(x @ arrays["kernel"] + arrays["embed"]) / jnp.sqrt(1 + 1e-5) * arrays["scale"]
        return (((hidden + arrays["shift"]) @ arrays["kernel"] + arrays["head"]) ** 2).mean()

    def arrays_of(net):
        return {
            "kernel": net.embed.kernel[...],
            "embed": net.embed.bias[...],
            "head": net.head.bias[...],
            "scale": net.norm.scale[...],
            "shift": net.norm.bias[...],
        }

    want = trained(
        lambda state, x: state.apply_gradients(grads=jax.grad(twin)(state.params, x)),
        create(FLAX, arrays_of(model), tx),
    )
    assert_close(arrays_of(state.params), want.params)


def test_parameters_that_are_a_dag_need_no_other_transforms():
    """Flax's own refuses them."""
    state = create(TrainState, st.Dag(tied_params()), optax.adam(0.1))
    step = jax.jit(lambda state, x: state.apply_gradients(grads=jax.grad(lambda d: loss(d.tree, x))(state.params)))
    state = trained(step, state)
    want = trained(vanilla_step, create(FLAX, twin_params(), optax.adam(0.1)))
    assert_close(merged(state.params.tree), want.params)


def test_a_bare_array_is_a_parameter():
    state = create(TrainState, jnp.ones(3), optax.sgd(0.5)).apply_gradients(grads=jnp.ones(3))
    np.testing.assert_array_equal(state.params, jnp.full(3, 0.5))


@pytest.mark.slow
def test_two_models_in_a_lookahead():
    tx = optax.lookahead(optax.sgd(0.1), 2, 0.5)

    def run_of(cls, params, grad, jit):
        state = create(cls, optax.LookaheadParams.init_synced(params), tx)
        return trained(jit(lambda state, x: state.apply_gradients(grads=grad(state.params.fast, x))), state)

    got = run_of(TrainState, tied_params(), st.grad(loss, policy=POLICY), st.jit)
    want = run_of(FLAX, twin_params(), jax.grad(loss), jax.jit)
    assert_close(merged(contents(got)), contents(want))


# --- files ------------------------------------------------------------------------------------------------------------


class Statistics(TrainState):
    """Of the program, at the top of a module, so that a file can name it."""

    batch_stats: Any


@pytest.mark.parametrize("cls", [TrainState, Statistics])
def test_a_state_is_saved_and_loaded_with_its_ties(cls, tmp_path):
    more = {"batch_stats": {"mean": X[0]}} if cls is Statistics else {}
    tx, path = optax.adam(0.1), tmp_path / "state.safetensors"
    template = cls.create(apply_fn=loss, params=tied_params(), tx=tx, **more)
    state = trained(st.jit(step_with_ties), template, BATCHES[:2])

    st.save(path, state, leave_out=["apply_fn", "tx"])
    loaded = st.load(path, like=template)
    assert (type(loaded), loaded.tx, loaded.apply_fn) == (cls, tx, loss)

    st.save(path, state.replace(tx=None, apply_fn=None))
    if cls is Statistics:
        with pytest.raises(st.errors.UntrustedTypeError, match="Statistics"):
            st.load(path)
    by_trust = st.load(path, trusted=[cls]).replace(tx=tx, apply_fn=loss)
    if cls is TrainState:
        assert st.same_sharing(st.load(path), by_trust)

    want = trained(step_with_ties, state, BATCHES[2:])
    for again in (loaded, by_trust):
        assert st.same_sharing(again, state)
        assert_identical(contents(again), contents(state))
        assert_close(contents(trained(st.jit(step_with_ties), again, BATCHES[2:])), contents(want))


@pytest.mark.slow
def test_loading_a_state_does_not_import_flax(tmp_path):
    path = tmp_path / "state.safetensors"
    st.save(path, create(TrainState, tied_params(), optax.sgd(0.1)).replace(tx=None))
    code = program("load_a_linen_state")
    assert run(code, path).split() == ["TrainState"]


@pytest.mark.slow
def test_a_program_without_flax_is_told_what_is_missing():
    code = program("without_flax")
    lines = ["`sharedtree.linen` needs Flax, whose `TrainState` it extends. Install it:", "    pip install flax"]
    assert run(code) == f"flax {lines}\n" * 3


@pytest.mark.slow
def test_what_flax_itself_lacks_is_said_by_flax():
    code = """
        import sys
        sys.modules["optax"] = None
        try:
            import sharedtree.linen
        except ImportError as error:
            print(error.name, "sharedtree" in str(error))
    """
    assert run(code) == "optax False\n"


@pytest.mark.slow
def test_the_module_is_an_attribute_of_the_package_when_it_is_used():
    code = """
        import sys, sharedtree as st
        assert "flax" not in sys.modules
        print(st.linen.TrainState.__module__, dir(st.linen))
    """
    assert run(code) == "sharedtree.linen ['TrainState']\n"
