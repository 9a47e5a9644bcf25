"""Ties through a function: models of five kinds, each beside a hand-written function of a single copy of the weight.

Each model embeds tokens by `w`, and its output layer has the kernel `w.T` and a bias `b`:

    logits = w[tokens] @ w.T + b
"""

import contextlib
import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import sharedtree as st
from tests.walks import in_python

VOCABULARY, WIDTH = 5, 3
TOKENS = jnp.array([1, 4, 1])
CONTAINERS = st.Policy(containers=True)


def oracle(params, tokens):
    return params["w"][tokens] @ params["w"].T + params["b"]


def loss_of(logits):
    return jnp.sum(jnp.sin(logits) * jnp.arange(1.0, 1.0 + logits.size).reshape(logits.shape))


def oracle_loss(params, tokens=TOKENS):
    return loss_of(oracle(params, tokens))


# --- models -----------------------------------------------------------------------------------------------------------


class OfEquinox(eqx.Module):
    embed: eqx.nn.Embedding
    kernel: Any
    bias: jax.Array

    def __call__(self, tokens):
        return jax.vmap(self.embed)(tokens) @ self.kernel + self.bias


class UnwrappingItself(OfEquinox):
    def __call__(self, tokens):
        return super(UnwrappingItself, st.unwrap(self)).__call__(tokens)


class OfNnx(nnx.Module):
    """Flatten order is alphabetical, so the view comes before what it is computed from."""

    def __init__(self, rngs):
        self.tokens = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.tokens(tokens))


class OfLinen(nn.Module):
    def setup(self):
        self.embed = nn.Embed(VOCABULARY, WIDTH)
        self.decoder = nn.Dense(VOCABULARY)

    def __call__(self, tokens):
        return self.decoder(self.embed(tokens))


class Model(NamedTuple):
    """A model that is tied through a transpose.

    Attributes:
        tied: the model, tied.
        call: the model and tokens → logits.
        weights: the model, or what has its shape → its `w` and `b`.
        policy: what the transforms need.
        view: the model → the view.
    """

    tied: Any
    call: Callable[[Any, Any], Any]
    weights: Callable[[Any], dict[str, Any]]
    view: Callable[[Any], Any]
    policy: st.Policy = st.Policy()


def equinox_model(cls=OfEquinox, call=lambda model, tokens: st.unwrap(model)(tokens)):
    keys = jax.random.split(jax.random.key(0), 3)
    model = cls(
        eqx.nn.Embedding(VOCABULARY, WIDTH, key=keys[0]),
        jax.random.normal(keys[1], (WIDTH, VOCABULARY)),
        jax.random.normal(keys[2], (VOCABULARY,)),
    )
    tied = st.tie(model, lambda m: (m.embed.weight, m.kernel), through=jnp.transpose)
    return Model(tied, call, lambda m: {"w": m.embed.weight, "b": m.bias}, lambda m: m.kernel)


def nnx_model():
    model = OfNnx(nnx.Rngs(0))
    model.head.bias[...] = jnp.arange(0.0, VOCABULARY)
    tied = st.tie(model, lambda m: (m.tokens.embedding, m.head.kernel), through=jnp.transpose)
    return Model(
        tied,
        lambda model, tokens: model(tokens),
        lambda m: {"w": m.tokens.embedding[...], "b": m.head.bias[...]},
        lambda m: m.head.kernel,
    )


def linen_model():
    network = OfLinen()
    params = network.init(jax.random.key(0), TOKENS)["params"]
    params["decoder"]["bias"] = jnp.arange(0.0, VOCABULARY)
    tied = st.tie(params, lambda p: (p["embed"]["embedding"], p["decoder"]["kernel"]), through=jnp.transpose)
    return Model(
        tied,
        lambda params, tokens: network.apply({"params": params}, tokens),
        lambda p: {"w": p["embed"]["embedding"], "b": p["decoder"]["bias"]},
        lambda p: p["decoder"]["kernel"],
        CONTAINERS,
    )


def haiku_model():
    hk = pytest.importorskip("haiku")
    network = hk.without_apply_rng(
        hk.transform(lambda tokens: hk.Linear(VOCABULARY)(hk.Embed(VOCABULARY, WIDTH)(tokens)))
    )
    params = network.init(jax.random.key(0), TOKENS)
    params["linear"]["b"] = jnp.arange(0.0, VOCABULARY)
    tied = st.tie(params, lambda p: (p["embed"]["embeddings"], p["linear"]["w"]), through=jnp.transpose)
    return Model(
        tied,
        lambda params, tokens: network.apply(st.unwrap(params), tokens),
        lambda p: {"w": p["embed"]["embeddings"], "b": p["linear"]["b"]},
        lambda p: p["linear"]["w"],
        CONTAINERS,
    )


MODELS = {
    "equinox": equinox_model,
    "equinox in the layer": functools.partial(equinox_model, UnwrappingItself, lambda model, tokens: model(tokens)),
    "nnx": nnx_model,
    "linen": linen_model,
    "haiku": haiku_model,
}


def assert_close(one, other):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), one, other)


def require_tied(model, tree):
    """Raises unless the source of the view is the weight itself, once."""
    weights, view = model.weights(tree), model.view(tree)
    assert type(view) is st.View
    assert view.through is jnp.transpose
    (source,) = view.of
    assert (source[...] if isinstance(source, nnx.Variable) else source) is weights["w"]
    assert len(st.tree.leaves(tree)) == 2


# --- uses -------------------------------------------------------------------------------------------------------------

USES = {}


def use(f):
    USES[f.__name__] = f
    return f


def loss(model):
    return lambda tree, tokens=TOKENS: loss_of(model.call(tree, tokens))


@use
def eager(model, params):
    assert_close(model.call(model.tied, TOKENS), oracle(params, TOKENS))


@use
def jit(model, params):
    call = st.jit(model.call, policy=model.policy)
    for _ in range(2):
        assert_close(call(model.tied, TOKENS), oracle(params, TOKENS))


@use
def jit_returns_the_model(model, params):
    doubled = st.jit(lambda m: st.tree.map(lambda x: 2 * x, m), policy=model.policy)(model.tied)
    require_tied(model, doubled)
    assert_close(model.weights(doubled), {key: 2 * value for key, value in params.items()})
    assert_close(model.call(doubled, TOKENS), oracle({key: 2 * value for key, value in params.items()}, TOKENS))


@use
def grad(model, params):
    for wrapper in (lambda f: f, functools.partial(st.jit, policy=model.policy)):
        gradient = wrapper(st.grad(loss(model), policy=model.policy))(model.tied)
        require_tied(model, gradient)
        assert_close(model.weights(gradient), jax.grad(oracle_loss)(params))


@use
def value_and_grad(model, params):
    value, gradient = st.value_and_grad(loss(model), policy=model.policy)(model.tied)
    expected = jax.value_and_grad(oracle_loss)(params)
    assert_close((value, model.weights(gradient)), expected)


@use
def remat(model, params):
    gradient = st.grad(st.remat(loss(model), policy=model.policy), policy=model.policy)(model.tied)
    assert_close(model.weights(gradient), jax.grad(oracle_loss)(params))


@use
def vmap_over_inputs(model, params):
    batch = jnp.stack([TOKENS, TOKENS + 0, TOKENS[::-1]])
    out = st.vmap(model.call, in_axes=(None, 0), policy=model.policy)(model.tied, batch)
    assert_close(out, jax.vmap(oracle, in_axes=(None, 0))(params, batch))


@use
def vmap_over_models(model, params):
    """Stacked models: each gets its own slice of the source, and the transpose of that."""
    stacked = st.tree.map(lambda x: jnp.stack([x, 2 * x]), model.tied)
    out = st.vmap(model.call, in_axes=(0, None), policy=model.policy)(stacked, TOKENS)
    assert_close(out[0], oracle(params, TOKENS))
    assert_close(out[1], oracle({key: 2 * value for key, value in params.items()}, TOKENS))


@use
def jvp(model, params):
    tangents = st.tree.map(jnp.ones_like, model.tied)
    out = st.jvp(loss(model), (model.tied,), (tangents,), policy=model.policy)
    assert_close(out, jax.jvp(oracle_loss, (params,), (jax.tree.map(jnp.ones_like, params),)))


@use
def scan_that_trains(model, params):
    def step(tree, tokens):
        gradient = st.grad(loss(model), policy=model.policy)(tree, tokens)
        return st.tree.map(lambda w, g: w - 0.01 * g, tree, gradient), None

    def oracle_step(params, tokens):
        gradient = jax.grad(oracle_loss)(params, tokens)
        return jax.tree.map(lambda w, g: w - 0.01 * g, params, gradient), None

    batches = jnp.stack([TOKENS, TOKENS[::-1]])
    trained, _ = st.scan(step, model.tied, batches, policy=model.policy)
    require_tied(model, trained)
    assert_close(model.weights(trained), jax.lax.scan(oracle_step, params, batches)[0])


def trained_by_oracle(params, tx):
    state = tx.init(params)
    for _ in range(3):
        updates, state = tx.update(jax.grad(oracle_loss)(params), state, params)
        params = optax.apply_updates(params, updates)
    return params


@use
def adamw_with_decay(model, params):
    tx = st.optimizer(optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.1, weight_decay=0.1)))

    @functools.partial(st.jit, policy=model.policy)
    def step(tree, state):
        gradient = st.grad(loss(model), policy=model.policy)(tree)
        updates, state = tx.update(gradient, state, tree)
        return st.apply_updates(tree, updates), state

    tree, state = model.tied, tx.init(model.tied)
    for _ in range(3):
        tree, state = step(tree, state)
    require_tied(model, tree)
    expected = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.1, weight_decay=0.1))
    assert_close(model.weights(tree), trained_by_oracle(params, expected))


@use
def wrt_that_freezes(model, params):
    """A filter by path says of the array itself, wherever the view stands. No optimizer of NNX gets it."""

    def is_weight(path, leaf):
        return path[0] in ("embed", "tokens")

    def is_no_weight(*place):
        return not is_weight(*place)

    for wrt in (is_weight, is_no_weight):
        st.optimizer(optax.sgd(0.1), wrt=wrt)
    expected = jax.grad(oracle_loss)(params)
    gradient = st.grad(loss(model), wrt=is_weight, policy=model.policy)(model.tied)
    (leaf,) = [leaf for leaf in st.tree.leaves(gradient) if leaf.shape == params["w"].shape]
    assert_close(leaf, expected["w"])
    gradient = st.grad(loss(model), wrt=is_no_weight, policy=model.policy)(model.tied)
    assert all(leaf.shape == params["b"].shape for leaf in st.tree.leaves(gradient))


@use
def donation(model, params):
    step = st.jit(lambda m: st.tree.map(lambda x: x + 1, m), donate_argnums=0, policy=model.policy)
    tree = step(st.copy(model.tied))
    tree = step(tree)
    require_tied(model, tree)
    assert_close(model.weights(tree), {key: value + 2 for key, value in params.items()})


@use
def save_and_load(model, params):
    data = st.to_bytes(model.tied)
    assert b'.of[0]":{' not in data  # the tensor has the name of the array's own place
    loaded = st.from_bytes(data, trusted=["flax", OfEquinox, UnwrappingItself, OfNnx])
    require_tied(model, loaded)
    assert_close(model.weights(loaded), params)
    assert_close(model.call(loaded, TOKENS), oracle(params, TOKENS))


@use
def load_into_a_template(model, params):
    other = st.tree.map(jnp.zeros_like, model.tied)
    loaded = st.from_bytes(st.to_bytes(model.tied), like=other)
    require_tied(model, loaded)
    assert_close(model.weights(loaded), params)


@use
def ties(model, params):
    (tie,) = st.ties(model.tied)
    first, second = tie.paths
    assert ".of[0]" not in first
    assert second.endswith(".of[0]")


@use
def untie(model, params):
    """A view whose tie is undone has a weight of its own."""
    loose = st.untie(model.tied)
    assert not st.ties(loose)
    assert len(st.tree.leaves(loose)) == 3
    assert_close(model.call(loose, TOKENS), oracle(params, TOKENS))
    gradient = st.grad(loss(model), policy=model.policy)(loose)
    both = jax.grad(lambda w, v: loss_of(w[TOKENS] @ v.T + params["b"]), argnums=(0, 1))(params["w"], params["w"])
    (source,) = model.view(gradient).of
    assert_close((model.weights(gradient)["w"], source[...]), both)


@use
def tree_map(model, params):
    tree = st.tree.map(lambda x: x - 1, model.tied)
    require_tied(model, tree)
    assert_close(model.weights(tree), {key: value - 1 for key, value in params.items()})


@use
def dag_under_vanilla_transforms(model, params):
    dag = st.Dag(model.tied)
    value, gradient = jax.jit(jax.value_and_grad(lambda dag: loss(model)(dag.tree)))(dag)
    assert_close((value, model.weights(gradient.tree)), jax.value_and_grad(oracle_loss)(params))
    tx = optax.adamw(0.1)
    state = tx.init(dag)
    for _ in range(3):
        gradient = jax.grad(lambda dag: loss(model)(dag.tree))(dag)
        updates, state = tx.update(gradient, state, dag)
        dag = optax.apply_updates(dag, updates)
    require_tied(model, dag.tree)
    assert_close(model.weights(dag.tree), trained_by_oracle(params, optax.adamw(0.1)))


@use
def counts_and_norms(model, params):
    assert st.count_parameters(model.tied) == VOCABULARY * WIDTH + VOCABULARY
    assert_close(st.tree.norm(model.tied), optax.tree.norm(params))
    half = st.tree.cast(model.tied, jnp.bfloat16)
    require_tied(model, half)
    assert model.weights(half)["w"].dtype == jnp.bfloat16
    assert model.view(half)[...].dtype == jnp.bfloat16


@use
def copies(model, params):
    for tree in (st.copy(model.tied), copy.deepcopy(model.tied), pickle.loads(pickle.dumps(model.tied))):
        require_tied(model, tree)
        assert_close(model.call(tree, TOKENS), oracle(params, TOKENS))


@use
def eval_shape(model, params):
    out = st.eval_shape(model.call, model.tied, TOKENS, policy=model.policy)
    assert (out.shape, out.dtype) == ((3, VOCABULARY), jnp.float32)


@use
def state(model, params):
    loaded = st.load_state(st.tree.map(jnp.zeros_like, model.tied), st.state(model.tied))
    require_tied(model, loaded)
    assert_close(model.weights(loaded), params)


WALKED = [
    # The walk in Python daily with one model, and with all of them when it is slow.
    pytest.param(name, walk, id=f"{name}-{walk}", marks=[pytest.mark.slow] * (walk == "python" and name != "nnx"))
    for walk in ("native", "python")
    for name in MODELS
]


@pytest.mark.parametrize(("name", "walk"), WALKED)
@pytest.mark.parametrize("used", USES)
def test_a_tied_model_is_its_oracle(used, name, walk):
    with in_python() if walk == "python" else contextlib.nullcontext():
        model = MODELS[name]()
        require_tied(model, model.tied)
        USES[used](model, model.weights(model.tied))


# --- the transforms of the libraries themselves -----------------------------------------------------------------------


def weights_of(model):
    return {"w": model.tokens.embedding[...], "b": model.head.bias[...]}


def test_transforms_of_nnx():
    model = nnx_model().tied
    params = weights_of(model)
    loss = lambda model: loss_of(model(TOKENS))
    assert_close(nnx.jit(lambda model: model(TOKENS))(model), oracle(params, TOKENS))
    expected = jax.value_and_grad(oracle_loss)(params)
    value, gradient = nnx.value_and_grad(loss)(model)
    leaves = sorted(jax.tree.leaves(gradient), key=jnp.ndim)
    assert_close((value, dict(zip(("b", "w"), leaves, strict=True))), expected)
    assert_close(nnx.remat(loss)(model), expected[0])
    batch = jnp.stack([TOKENS, TOKENS[::-1]])
    out = nnx.vmap(lambda model, tokens: model(tokens), in_axes=(None, 0))(model, batch)
    assert_close(out, jax.vmap(oracle, in_axes=(None, 0))(params, batch))


def test_an_optimizer_of_nnx():
    model = nnx_model().tied
    params = weights_of(model)
    optimizer = nnx.Optimizer(model, optax.adamw(0.1, weight_decay=0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        optimizer.update(model, nnx.grad(lambda model: loss_of(model(TOKENS)))(model))

    for _ in range(3):
        step(model, optimizer)
    assert model.head.kernel.of[0] is model.tokens.embedding
    assert_close(weights_of(model), trained_by_oracle(params, optax.adamw(0.1, weight_decay=0.1)))


def test_what_nnx_takes_apart_and_puts_together():
    model = nnx_model().tied
    definition, state = nnx.split(model)
    assert len(jax.tree.leaves(state)) == 2
    for again in (nnx.merge(definition, state), nnx.clone(model)):
        assert again.head.kernel.of[0] is again.tokens.embedding
        assert_close(again(TOKENS), model(TOKENS))
    nnx.update(model, jax.tree.map(lambda x: 2 * x, state))
    assert_close(model.head.kernel[...], model.tokens.embedding[...].T)


@pytest.mark.parametrize("metadata", [{}, {"ref": True}])
def test_kinds_of_variables(metadata):
    variable = nnx.Param(jnp.arange(6.0).reshape(2, 3), **metadata)
    view = st.View(jnp.transpose, variable)
    np.testing.assert_array_equal(view[...], jnp.arange(6.0).reshape(2, 3).T)
    np.testing.assert_array_equal(st.unwrap([view])[0], view[...])


def test_a_training_state_of_linen():
    from sharedtree.linen import TrainState

    model = linen_model()
    params = model.weights(model.tied)
    state = TrainState.create(apply_fn=OfLinen().apply, params=model.tied, tx=optax.adamw(0.1))

    @functools.partial(st.jit, policy=CONTAINERS)
    def step(state):
        loss = lambda params: loss_of(state.apply_fn({"params": params}, TOKENS))
        return state.apply_gradients(grads=st.grad(loss, policy=CONTAINERS)(state.params))

    for _ in range(3):
        state = step(state)
    require_tied(model, state.params)
    assert_close(model.weights(state.params), trained_by_oracle(params, optax.adamw(0.1)))


class Layers(nn.Module):
    """Layers that are scanned, each with a kernel that is the transpose of the one before it in the same layer."""

    @nn.compact
    def __call__(self, x):
        def layer(block, x, _):
            x = nn.Dense(VOCABULARY, use_bias=False, name="up", parent=block)(x)
            return nn.Dense(WIDTH, use_bias=False, name="down", parent=block)(x), None

        return nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)(self, x, None)[0]


def test_stacked_layers_in_a_scan_of_linen():
    x = jnp.arange(3.0)
    params = Layers().init(jax.random.key(0), x)["params"]
    tied = st.tie(params, lambda p: (p["up"]["kernel"], p["down"]["kernel"]), through=jnp.matrix_transpose)
    w = params["up"]["kernel"]
    loss = lambda params: jnp.sin(Layers().apply({"params": params}, x)).sum()
    expected = jax.value_and_grad(lambda w: jnp.sin(functools.reduce(lambda x, w: x @ w @ w.T, w, x)).sum())(w)
    value, gradient = st.value_and_grad(loss, policy=CONTAINERS)(tied)
    assert_close((value, gradient["up"]["kernel"]), expected)
    assert gradient["down"]["kernel"].of[0] is gradient["up"]["kernel"]


def test_the_compiled_program_reads_the_weight_as_a_handwritten_one_does():
    w = jnp.ones((64, 32))
    tied = st.Dag({"w": w, "kernel": st.View(jnp.transpose, w)})

    def of_view(dag, tokens):
        params = st.unwrap(dag.tree)
        return params["w"][tokens] @ params["kernel"]

    by_view = jax.jit(of_view).lower(tied, TOKENS).compile()
    by_hand = jax.jit(lambda w, tokens: w[tokens] @ w.T).lower(w, TOKENS).compile()
    assert by_view.cost_analysis() == by_hand.cost_analysis()
    assert by_view.memory_analysis().argument_size_in_bytes == by_hand.memory_analysis().argument_size_in_bytes
