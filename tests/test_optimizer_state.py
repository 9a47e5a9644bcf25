"""`st.optimizer` without `wrt` trains parameters and leaves state alone, against optax on the parameters alone."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import sharedtree as st
from sharedtree.serialise.load import open_checkpoint
from sharedtree.show._outline import Outline
from sharedtree.show._saved_models import description_of_file

UNSAID = st.errors.UnsaidVariableWarning


class Kernel(nnx.Variable):
    """A class of the user's, of which nobody says what it is."""


class Statistic(nnx.BatchStat):
    """State, since its base is."""


class Net(nnx.Module):
    """A variable of each class, and a plain array; all hold floating-point numbers."""

    def __init__(self):
        self.param = nnx.Param(jnp.full(2, 1.0))
        self.lora = nnx.LoRAParam(jnp.full(2, 2.0))
        self.plain = nnx.data(jnp.full(2, 3.0))
        self.stat = nnx.BatchStat(jnp.full(2, 4.0))
        self.own_stat = Statistic(jnp.full(2, 5.0))
        self.cache = nnx.Cache(jnp.full(2, 6.0))
        self.seen = nnx.Intermediate(jnp.full(2, 7.0))
        self.rng = nnx.RngState(jnp.full(2, 8.0), tag="params")
        self.metric = nnx.metrics.Average()
        self.metric.total[...] = jnp.asarray(9.0)
        self.optimizer = nnx.OptState(jnp.full(2, 10.0))


class Mutable(st.Module):
    def __init__(self):
        self.param = st.parameter(jnp.full(2, 1.0))
        self.unmarked = jnp.full(2, 2.0)
        self.stat = st.state_field(jnp.full(2, 4.0))
        self.target = st.state_field({"deep": nnx.Param(jnp.full(2, 5.0))})


def equinox_model():
    index = eqx.nn.StateIndex(jnp.full(2, 4.0))
    return {"param": jnp.full(2, 1.0), "index": index, "state": eqx.nn.State(index)}


PARAMETERS = {
    "NNX": (Net, ["param", "lora", "plain"]),
    "Module": (Mutable, ["param", "unmarked"]),
    "Equinox": (equinox_model, ["param"]),
}


def part(model, name):
    value = model[name] if isinstance(model, dict) else getattr(model, name)
    return value[...] if isinstance(value, nnx.Variable) else value


def ones_like(model):
    return st.tree.map(lambda x: jnp.ones_like(x) if eqx.is_inexact_array(x) else None, model)


def inexact(tree):
    return [np.asarray(x) for x in st.tree.leaves(tree) if eqx.is_inexact_array(x)]


TRANSFORMATIONS = {
    "decayed": lambda: optax.adamw(0.1, weight_decay=0.5),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.5, momentum=0.9)),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
@pytest.mark.parametrize("kind", PARAMETERS)
@pytest.mark.sampled(every=4)
def test_the_steps_are_optax_steps_on_the_parameters_alone(kind, name):
    make, trained = PARAMETERS[kind]
    model, before = make(), make()
    own = {each: part(model, each) for each in trained}
    ours, theirs = st.optimizer(TRANSFORMATIONS[name]()), TRANSFORMATIONS[name]()
    state, bare = ours.init(model), theirs.init(own)
    for _ in range(3):
        updates, state = ours.update(ones_like(model), state, model)
        model = st.apply_updates(model, updates)
        theirs_updates, bare = theirs.update({each: jnp.ones(2) for each in own}, bare, own)
        own = optax.apply_updates(own, theirs_updates)
        assert sum(map(np.size, inexact(updates))) == 2 * len(trained)
    for each in trained:
        np.testing.assert_allclose(part(model, each), own[each], rtol=1e-6)
    # Everything else is what it was, in the same order.
    new, old = inexact(model), inexact(before)
    assert sum(not np.array_equal(a, b) for a, b in zip(new, old, strict=True)) == len(trained)
    assert sum(map(np.size, inexact(state))) == sum(map(np.size, inexact(bare)))


@pytest.mark.parametrize("kind", PARAMETERS)
def test_count_and_summary_ask_the_same(kind):
    make, trained = PARAMETERS[kind]
    assert st.count_parameters(make()) == st.summary(make()).parameters == 2 * len(trained)


@pytest.mark.parametrize("kind", PARAMETERS)
def test_the_table_of_a_file_asks_no_class_and_says_the_same(kind):
    model = PARAMETERS[kind][0]()
    if kind == "NNX":
        del model.own_stat  # of a class of the user's, whose bases no file has
    with open_checkpoint(st.to_bytes(model)) as file:
        table = st.show.Summary(Outline(description_of_file(file.manifest)), None, 1_000)
    assert table.parameters == st.summary(model).parameters


def test_batch_norm_is_left_alone_by_weight_decay():
    model = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    x = jnp.arange(6.0).reshape(2, 3)

    def loss(model):
        return (model(x, use_running_average=True) ** 2).sum()

    tx = st.optimizer(optax.adamw(0.1, weight_decay=0.5))
    state = tx.init(model)
    gradient = st.grad(loss)(model)
    assert gradient.var[...] is not None  # the gradient has all, the optimizer takes what it trains
    for tree in (gradient, st.grad(loss, wrt=nnx.Param)(model)):
        updates, _ = tx.update(tree, state, model)
        new = st.apply_updates(model, updates)
        assert new.mean[...] is model.mean[...]
        assert new.var[...] is model.var[...]
        assert not np.array_equal(new.scale[...], model.scale[...])
    whole, params = state[0].mu, nnx.state(model, nnx.Param)
    assert len(jax.tree.leaves(whole)) == len(jax.tree.leaves(params))


def test_states_of_models_are_models():
    model = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    tx = st.optimizer(optax.adamw(0.1))
    state = tx.init(nnx.state(model))
    updates, _ = tx.update(ones_like(nnx.state(model)), state, nnx.state(model))
    assert updates["mean"].get_value() is None
    assert updates["scale"].get_value().shape == (3,)
    with pytest.raises(
        ValueError, match=r"The optimizer has nothing to train: `\['mean'\]\.value` and `\['var'\]\.value`"
    ):
        tx.init(nnx.state(model, nnx.BatchStat))
    # A filter says what is meant.
    everything = st.optimizer(optax.sgd(0.1, momentum=0.9), wrt=...).init(nnx.state(model, nnx.BatchStat))
    assert len(jax.tree.leaves(everything)) == 2


def test_what_has_no_numbers_to_train_is_nothing_to_complain_of():
    for tree in ({"step": jnp.array(0)}, {}, nnx.Rngs(0)):
        st.optimizer(optax.sgd(0.1)).init(tree)


def test_an_average_of_parameters():
    model = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    tx = st.optimizer(optax.ema(0.5, debias=False))
    average, state = tx.update(model, tx.init(model))
    np.testing.assert_allclose(average.scale[...], 0.5 * model.scale[...])
    assert average.mean.get_value() is None
    assert state.ema.var.get_value() is None


def masks():
    model = Net()
    as_tree = st.tree.map(lambda x: jnp.ndim(x) > 0, model)
    return {
        "a tree of the whole model": lambda tx: optax.masked(tx, as_tree),
        "a function": lambda tx: optax.masked(tx, lambda tree: jax.tree.map(lambda x: x.ndim > 0, tree)),
        "labels": lambda tx: optax.multi_transform(
            {"a": tx, "b": optax.set_to_zero()}, st.tree.map(lambda x: "a" if jnp.ndim(x) else "b", model)
        ),
        "label function": lambda tx: optax.multi_transform({"a": tx}, lambda tree: jax.tree.map(lambda _: "a", tree)),
    }


@pytest.mark.parametrize("mask", masks())
def test_masks_and_labels_of_the_whole_model(mask):
    model = Net()
    tx = st.optimizer(masks()[mask](optax.sgd(1.0)))
    updates, _ = tx.update(ones_like(model), tx.init(model), model)
    new = st.apply_updates(model, updates)
    for name in ("param", "lora", "plain"):
        np.testing.assert_allclose(part(new, name), part(model, name) - 1)
    for name in ("stat", "cache", "seen", "optimizer"):
        assert part(new, name) is part(model, name)


STATES = {
    "all": nnx.state,
    "parameters": lambda model: nnx.state(model, nnx.Param),
    "as a dictionary": lambda model: nnx.to_pure_dict(nnx.state(model)),
}
LABELLED = {
    "mask": optax.masked,
    "param_labels": lambda tx, labels: optax.multi_transform({True: tx, False: optax.set_to_zero()}, labels),
}


@pytest.mark.parametrize("name", LABELLED)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("is_function", [False, True])
def test_masks_of_another_shape_are_refused_with_a_fix_for_those_of_a_state(name, state, is_function):
    """NNX's own optimizer hands optax states, ours hands it models: a mask of the former fits no path of the latter."""

    def mask_of(model):
        return jax.tree.map(lambda _: True, STATES[state](model))

    model = Net()
    mask = mask_of if is_function else mask_of(model)
    with pytest.raises(st.errors.SharingMismatchError, match=f"`{name}`") as caught:
        st.optimizer(LABELLED[name](optax.sgd(1.0), mask)).init(model)
    if state == "as a dictionary":
        return
    names = {"sharedtree": st, "nnx": nnx, "model": model, name: mask_of(model)}
    exec("\n".join(line.strip() for line in str(caught.value).splitlines() if line.startswith("    ")), names)
    tx = st.optimizer(LABELLED[name](optax.sgd(1.0), names[name]))
    updates, _ = tx.update(ones_like(model), tx.init(model), model)
    new = st.apply_updates(model, updates)
    np.testing.assert_allclose(part(new, "param"), part(model, "param") - 1)
    assert part(new, "stat") is part(model, "stat")


class Unsaid(nnx.Module):
    def __init__(self):
        self.param = nnx.Param(jnp.ones(2))
        self.layers = nnx.List([Kernel(jnp.ones(2)), Kernel(jnp.ones(2))])
        self.variable = nnx.Variable(jnp.ones(2))
        self.count = nnx.Variable(jnp.array(0))  # nothing that could be trained
        self.stat = nnx.BatchStat(jnp.ones(2))


def test_a_class_that_says_nothing_is_trained_and_said_once():
    model, tx = Unsaid(), st.optimizer(optax.sgd(1.0))
    with pytest.warns(UNSAID) as caught:
        state = tx.init(model)
    (warning,) = caught
    text = str(warning.message)
    assert warning.filename == __file__
    assert "`Kernel` at `.layers[0]` and `Variable` at `.variable`" in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        updates, _ = tx.update(ones_like(model), state, model)
        assert st.count_parameters(model) == 8
    new = st.apply_updates(model, updates)
    assert new.variable[...][0] == new.layers[1][...][0] == 0
    assert new.stat[...] is model.stat[...]
    few, some = [line.strip() for line in text.split("\n") if line.startswith("    ")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for code, count in ((few, 1), (some, 4)):
            names = {"sharedtree": st, "nnx": nnx, "Kernel": Kernel, "tx": optax.sgd(1.0, momentum=0.9)}
            exec(code, names)
            assert len(jax.tree.leaves(names["tx"].init(model))) == count


def test_a_tie_between_state_and_a_parameter_is_a_parameter():
    shared = nnx.Param(jnp.ones(2))
    model = Mutable()
    model.target, model.head = st.state_field({"deep": shared}), st.parameter(shared)
    tx = st.optimizer(optax.sgd(1.0))
    updates, _ = tx.update(ones_like(model), tx.init(model), model)
    new = st.apply_updates(model, updates)
    assert new.head is new.target["deep"]
    np.testing.assert_array_equal(new.head[...], jnp.zeros(2))
