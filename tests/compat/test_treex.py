"""The real treex 0.6.9: its issue's cases, its layers through every transform, its idioms, and training.

The oracles are vanilla JAX on a model that holds a shared layer once and calls it twice, and finite differences.
"""

import copy
import importlib.util
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sharedtree as st
from tests.threads import at_once

if importlib.util.find_spec("treex") is None or importlib.util.find_spec("treeo") is None:
    pytest.skip("treex is not installed", allow_module_level=True)

from sharedtree.compat import treex as tx
from tests.compat import treex_models

IN_PLACE = st.Policy(in_place=True)


class Pair(tx.Module):
    """Holds a layer at two paths, or two layers."""

    first: tx.Module
    second: tx.Module

    def __init__(self, first, second):
        super().__init__()
        self.first = first
        self.second = second

    def __call__(self, x):
        return self.first(x) + 2 * self.second(x)


class Single(tx.Module):
    """The same, written by hand with one copy of the layer."""

    only: tx.Module

    def __init__(self, only):
        super().__init__()
        self.only = only

    def __call__(self, x):
        return self.only(x) + 2 * self.only(x)


def vanilla_twin(model):
    """A model with a copy of each array at each path."""
    leaves, treedef = jax.tree.flatten(model)
    return treedef.unflatten([jnp.array(leaf) for leaf in leaves])


def assert_alike(ours, theirs, rtol=1e-5):
    ours, theirs = jax.tree.leaves(ours), jax.tree.leaves(theirs)
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=rtol, atol=1e-6)


# Cases of the issue from which `preserve_identities` comes; that the second counter follows is in `tests/seeds/`.


class Counter(tx.Module):
    count: jax.Array = tx.State.node()

    def __init__(self):
        super().__init__()
        self.count = jnp.array(0)


class Counters(Pair):
    x: jax.Array | None = tx.State.node()

    def __init__(self, first, second):
        super().__init__(first, second)
        self.x = None


def two_counters():
    counter = Counter()
    return Counters(counter, counter)


def assign(m1, m2):
    m1.x = jnp.arange(3)
    return m1, m2


def test_one_argument_twice():
    model = two_counters()
    m1, m2 = st.jit(assign)(model, model)
    assert m1 is m2
    np.testing.assert_array_equal(m2.x, [0, 1, 2])
    assert model.x is None
    m1, m2 = jax.jit(assign)(model, model)
    assert m1 is not m2
    assert m2.x is None
    m1, m2 = st.jit(assign, policy=IN_PLACE)(model, model)
    assert m1 is m2 is model
    np.testing.assert_array_equal(model.x, [0, 1, 2])


def test_what_is_assigned_inside_and_nobody_declared():
    """A layer comes out. Other fields treeo makes static: of an array in one vanilla JAX leaks the tracer."""

    def grow(model):
        model.extra = model.first
        return model

    def undeclared(model):
        model.y = model.first.count + 1
        return model

    for policy in (st.Policy(), IN_PLACE):
        model = two_counters()
        grown = st.jit(grow, policy=policy)(model)
        assert grown.extra is grown.first is grown.second
        assert (grown is model) == bool(policy.in_place)
        with pytest.raises(st.errors.StaticTracerError, match="'y'"):
            st.jit(undeclared, policy=policy)(two_counters())


FLOATS = np.random.default_rng(0).normal(size=(4, 5, 3)).astype(np.float32)
# Without those that have nothing in them, or hold a layer twice already. Dropout has no input in that table.
LAYERS = {
    name: row for name, row in treex_models.LAYERS.items() if name not in ("KeySeq", "Dropout", "Flatten", "Block")
}
LAYERS["Dropout"] = (lambda: tx.Dropout(0.5), FLOATS)


def models(name, shared):
    """A model, vanilla JAX's counterpart of it, and an input."""
    make, x = LAYERS[name]
    layer = make().init(0, x)
    if not shared:
        return layer, vanilla_twin(layer), x
    return Pair(layer, layer).train(), Single(vanilla_twin(layer)).train(), x


def layers_of(model):
    return [model.first, model.second] if isinstance(model, Pair) else [model]


def assert_state(model, theirs):
    """Each path of the shared layer has what vanilla JAX makes of the one."""
    for layer in layers_of(model):
        assert_alike(layer, theirs.only if isinstance(theirs, Single) else theirs)
    if isinstance(model, Pair):
        assert model.first is model.second


def out_and_model(model, x):
    y = model(x)
    return y, model


def merged_loss(params, model, x):
    model = model.merge(params)
    return (model(x) ** 2).mean(), model


def under_jit(ours, theirs, x):
    for _ in range(2):
        y, ours = st.jit(out_and_model)(ours, x)
        expected, theirs = jax.jit(out_and_model)(theirs, x)
        assert_alike(y, expected)
        assert_state(ours, theirs)
    objects = layers_of(ours)
    y = st.jit(lambda model, x: model(x), policy=IN_PLACE)(ours, x)
    expected, theirs = jax.jit(out_and_model)(theirs, x)
    assert_alike(y, expected)
    assert_state(ours, theirs)
    assert all(now is before for now, before in zip(layers_of(ours), objects, strict=True))


def under_value_and_grad_with_the_model_returned(ours, theirs, x):
    """treex's idiom: the model's arrays are in an argument that is differentiated and in one that is not."""
    function = st.jit(st.value_and_grad(merged_loss, has_aux=True))
    (value, new), gradient = function(ours.parameters(), ours, x)
    vanilla = jax.jit(jax.value_and_grad(merged_loss, has_aux=True))
    (expected, new_theirs), gradient_theirs = vanilla(theirs.parameters(), theirs, x)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert_state(new, new_theirs)
    assert_state(gradient, gradient_theirs)


def under_vmap(ours, theirs, x):
    """Over the input, and over models."""
    y = st.vmap(lambda model, x: model(x), in_axes=(None, 0), in_place=False)(ours, x)
    assert_alike(y, jax.vmap(lambda model, x: model(x), in_axes=(None, 0))(theirs, x))
    scales = jnp.arange(1, 4)

    def stack(leaf):
        return jnp.stack([(scale * leaf).astype(leaf.dtype) for scale in scales])

    y, new = st.vmap(out_and_model, in_axes=(0, None), axis_size=3)(st.tree.map(stack, ours), x)
    expected, new_theirs = jax.vmap(out_and_model, in_axes=(0, None), axis_size=3)(jax.tree.map(stack, theirs), x)
    assert_alike(y, expected, rtol=1e-4)
    assert_state(new, new_theirs)


@pytest.mark.parametrize("way", [under_jit, under_value_and_grad_with_the_model_returned, under_vmap])
def test_each_layer_alone_and_at_two_paths(way):
    wrong = []
    for name in LAYERS:
        for shared in (False, True):
            try:
                way(*models(name, shared))
            except Exception as error:
                wrong.append(f"{name}, {'shared' if shared else 'alone'}: {error!r}")
    assert not wrong, "\n".join(wrong)


def test_modes_are_static_and_come_out_where_a_function_switches_them():
    layer = LAYERS["Sequential"][0]().init(0, FLOATS)
    model = Pair(layer, layer).train()
    run = st.jit(lambda model, x: model(x), in_place=False)
    training, evaluating = run(model, FLOATS), run(model.eval(), FLOATS)
    assert not np.allclose(training, evaluating)
    assert_alike(evaluating, jax.jit(lambda model, x: model(x))(Single(layer).eval(), FLOATS))
    for switched in [model.eval(), model.freeze(), model.train()]:
        assert switched.first is switched.second
    assert model.second.training
    assert not model.eval().second.training
    new = st.jit(lambda model: model.eval())(model)
    assert new.first is new.second
    assert not new.first.training
    st.jit(lambda model: model.eval(inplace=True), policy=IN_PLACE)(model)
    assert not model.second.training
    assert model.first is model.second


class Draws(Pair):
    def __call__(self):
        return self.first(), self.second()


def test_a_shared_key_sequence_draws_other_keys_at_each_path():
    # By hand, as `KeySeq` does it: the first of a split is handed out, the second is kept.
    expected, key = [], jax.random.PRNGKey(3)
    for _ in range(4):
        drawn, key = jax.random.split(key)
        expected.append(drawn)
    for policy in (st.Policy(), IN_PLACE):
        sequence = tx.KeySeq(3)
        keys = Draws(sequence, sequence)
        step = st.jit(lambda keys: (keys(), keys), policy=policy)
        drawn, keys = step(keys)
        more, keys = step(keys)
        np.testing.assert_array_equal([*drawn, *more], expected)
        assert keys.first is keys.second
        np.testing.assert_array_equal(keys.second.key, key)
        assert (keys.first is sequence) == bool(policy.in_place)


INITIALISE = {
    "seed": lambda model, x: model.init(0, x),
    "key": lambda model, x: model.init(jax.random.PRNGKey(0), x),
    "in place": lambda model, x: model.init(0, x, inplace=True),
    "inputs": lambda model, x: model.init(0, (x,)),
    "jit": lambda model, x: st.jit(lambda model, x: model.init(0, x))(model, x),
}


def test_shared_layer_is_initialised_once():
    x = FLOATS[:, 0]
    single = Single(tx.Linear(3)).init(0, x)
    for name, initialise in INITIALISE.items():
        model = initialise(Pair(*[tx.Linear(3)] * 2), x)
        assert model.first is model.second, name
        assert model.first.kernel.shape == (3, 3)
        assert st.count_parameters(model) == 12
        by_hand = x @ model.first.kernel + model.first.bias
        np.testing.assert_allclose(model(x), 3 * by_hand, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(model.second.kernel, single.only.kernel)


def test_keys_inside():
    """`tx.next_key` in a function that is traced, as in a layer of a user's own."""

    class Noisy(tx.Module):
        weight: jax.Array | None = tx.Parameter.node()

        def __init__(self):
            super().__init__()
            self.weight = None

        def __call__(self, x):
            if self.initializing():
                self.weight = jax.random.normal(tx.next_key(), x.shape[-1:])
            return x * self.weight

    x = FLOATS[:, 0]
    model = Pair(*[Noisy()] * 2).init(0, x)
    assert model.first is model.second
    np.testing.assert_allclose(st.jit(lambda model, x: model(x))(model, x), 3 * x * model.first.weight, rtol=1e-5)

    @st.jit
    def draw(key, model):
        with tx.rng_key(key):
            return tx.next_key(), model

    key, same = draw(jax.random.PRNGKey(1), model)
    np.testing.assert_array_equal(key, jax.random.split(jax.random.PRNGKey(1))[0])
    assert same is model


def net_of():
    layer = tx.Linear(4)
    return tx.Sequential(tx.Linear(4), jnp.tanh, layer, jnp.tanh, layer)


def data():
    x = np.random.default_rng(1).normal(size=(32, 4)).astype(np.float32)
    return x, np.sin(x.sum(axis=1, keepdims=True)) * np.ones((1, 4), np.float32)


def squared_error(params, model, x, y):
    model = model.merge(params)
    return ((model(x) - y) ** 2).mean(), model


def losses_of_the_single_copy(model, num_steps):
    """By vanilla JAX and optax, on plain arrays."""
    x, y = data()
    params = [(layer.kernel, layer.bias) for layer in (model.layers[0], model.layers[2])]

    def loss(params):
        inner, outer = params
        hidden = x
        for kernel, bias in (inner, outer):
            hidden = jnp.tanh(hidden @ kernel + bias)
        return ((hidden @ outer[0] + outer[1] - y) ** 2).mean()

    optimizer = optax.adam(1e-2)

    @jax.jit
    def step(params, state):
        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    state, losses = optimizer.init(params), []
    for _ in range(num_steps):
        params, state, value = step(params, state)
        losses.append(float(value))
    return losses


def assert_trains_as_the_single_copy(step, model, state, num_steps=8):
    expected, losses = losses_of_the_single_copy(model, num_steps), []
    for _ in range(num_steps):
        model, state, loss = step(model, state, *data())
        losses.append(float(loss))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert losses[-1] < losses[0]
    assert model.layers[2] is model.layers[4]


def test_training_with_an_optimizer_of_sharedtree():
    x, _ = data()
    model = net_of().init(0, x)
    optimizer = st.optimizer(optax.adam(1e-2))
    params = model.filter(tx.Parameter)
    state = optimizer.init(params)
    # Two moments for each of four arrays, and the count; two layers that are three in the tree.
    assert len(st.tree.leaves(state)) == 2 * 4 + 1
    assert state[0].mu.layers[2] is state[0].mu.layers[4]
    traces = []

    @st.jit
    def step(model, state, x, y):
        traces.append(None)
        params = model.filter(tx.Parameter)
        (loss, model), gradient = st.value_and_grad(squared_error, has_aux=True)(params, model, x, y)
        updates, state = optimizer.update(gradient, state, params)
        return model.merge(st.apply_updates(params, updates)), state, loss

    assert_trains_as_the_single_copy(step, model, state)
    assert len(traces) == 1


def test_the_optimizer_of_treex_unties_and_says_so():
    """With the fix that is offered, the losses are those of the single copy."""
    x, y = data()
    model = net_of().init(0, x)
    optimizer = tx.Optimizer(optax.adam(1e-2)).init(model.filter(tx.Parameter))

    def stepping(fixed):
        @st.jit
        def step(model, optimizer, x, y):
            params = model.filter(tx.Parameter)
            (loss, model), gradient = st.value_and_grad(squared_error, has_aux=True)(params, model, x, y)
            return model.merge(fixed(optimizer.update(gradient, params), params)), optimizer, loss

        return step

    with pytest.warns(st.UntiedWarning, match="A tie was lost") as caught:
        new, _, _ = stepping(lambda new, params: new)(model, optimizer, x, y)
    assert len(caught) == 1
    assert "'layers'][2]" in str(caught[0].message)
    assert "'layers'][4]" in str(caught[0].message)
    assert new.layers[2] is not new.layers[4]
    assert_trains_as_the_single_copy(stepping(lambda new, params: st.retie(new, like=params)), model, optimizer)


def shared_model():
    return net_of().init(0, FLOATS[:, 0, [0, 1, 2, 0]])


def test_functions_of_sharedtree():
    model, x = shared_model(), FLOATS[:, 0, [0, 1, 2, 0]]
    (tie,) = st.ties(model)
    leaves = dict(jax.tree_util.tree_flatten_with_path(model)[0])
    printed = {jax.tree_util.keystr(path) for path in leaves}
    assert tie.kind == "module"
    assert all(f"{path}[<flat index 0>]['kernel']" in printed for path in tie.paths)
    assert [path[-3:] for path in tie.paths] == ["[2]", "[4]"]
    doubled = st.tree.map(jnp.add, model, model)
    assert doubled.layers[2] is doubled.layers[4]
    assert_alike(doubled, jax.tree.map(lambda leaf: 2 * leaf, model))
    moved = st.tree.at(lambda model: model.layers[2].bias, model, jnp.ones(4))
    assert moved.layers[4].bias is moved.layers[2].bias
    np.testing.assert_array_equal(moved.layers[4].bias, np.ones(4))
    # treex's own table is of the tree; `count_parameters` counts each array once.
    assert "Total Parameters:" in model.tabulate(x)
    assert st.count_parameters(model) == 40
    text = str(st.explain(st.jit(lambda model, x: model(x)), model, x))
    assert sum("'kernel']" in line for line in text.splitlines() if "traced  float32[4, 4]" in line) == 2
    assert text.count("'layers'][4]") == 1


# What `test_treeo.py` asks of random trees is left out.
MADE = {
    "modes": lambda model: model.train().eval().freeze().unfreeze(),
    "deepcopy": lambda model: copy.deepcopy(model),
    "map in place": lambda model: model.map(lambda leaf: leaf + 1, inplace=True),
    "merge in place": lambda model: model.merge(model.parameters(), inplace=True),
}


def test_what_treex_itself_makes_keeps_ties():
    for name, make in MADE.items():
        model = shared_model()
        new = make(model)
        assert new.layers[2] is new.layers[4], name
        assert new.layers[0] is not new.layers[2]
        assert st.same_sharing(new, model)


def picklable_model():
    layer = tx.Linear(4, kernel_init=jax.nn.initializers.ones)
    return tx.Sequential(tx.Linear(4, kernel_init=jax.nn.initializers.ones), layer, layer)


LIKE_IT = {
    "copy": lambda model, x: model.copy(),
    "sharedtree's copy": lambda model, x: st.copy(model),
    "map": lambda model, x: model.map(lambda leaf: leaf),
    "deepcopy": lambda model, x: copy.deepcopy(model),
    "pickle": lambda model, x: pickle.loads(pickle.dumps(model)),
    "loaded from a file": lambda model, x: st.from_bytes(st.to_bytes(model)),
    "built again": lambda model, x: picklable_model().init(1, x),
    "flattened before": lambda model, x: (jax.tree.leaves(model), model.check_metadata_updates(), model)[2],
}


def test_models_that_are_like_one_another_are_traced_once():
    x = FLOATS[:, 0, [0, 1, 2, 0]]
    model = picklable_model().init(0, x)
    for jit in (jax.jit, st.jit):
        traces = []
        run = jit(lambda model, x, traces=traces: traces.append(None) or model(x))
        run(model, x)
        for name, make in LIKE_IT.items():
            run(make(model, x), x)
            assert len(traces) == 1, name


def test_threads_do_not_see_one_anothers_contexts():
    """Filtering, initialising, tabulating and flattening at once: each is one of treeo's or treex's contexts."""
    x = FLOATS[:, 0, [0, 1, 2, 0]]
    model = shared_model()
    shapes = [leaf.shape for leaf in jax.tree.leaves(model)]
    kernel = np.asarray(model.layers[2].kernel)

    def work(i):
        for _ in range(10):
            match i % 4:
                case 0:
                    assert len(jax.tree.leaves(model.filter(tx.Parameter))) == 6
                case 1:
                    assert [leaf.shape for leaf in jax.tree.leaves(model)] == shapes
                case 2:
                    np.testing.assert_array_equal(net_of().init(0, x).layers[2].kernel, kernel)
                case 3:
                    assert "Linear" in repr(model)
        return True

    assert all(at_once(work))
