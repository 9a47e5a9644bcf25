"""`Dag` under code that knows only vanilla JAX; no decorator of ours anywhere in this file."""

import copy

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sharedtree as st


class Linear(eqx.Module):
    weight: object
    bias: object = None
    activation: object = jnp.tanh
    config: object = eqx.field(static=True, default=None)


class Model(eqx.Module):
    embed: Linear
    blocks: list
    head: object


def make_model(config=None):
    block = Linear(jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.ones(2), config=config)
    embed = Linear(jnp.array([[0.5, -1.0], [2.0, 1.0]]))
    return Model(embed, [block, block], embed.weight)


def is_tied(model):
    return model.embed.weight is model.head and model.blocks[0] is model.blocks[1]


def forward(embed, one, bias1, two, bias2, head):
    x = jnp.tanh(jnp.ones(2) @ embed @ one + bias1)
    return (jnp.tanh(x @ two + bias2) @ head).sum()


def loss(model):
    one, two = model.blocks
    return forward(model.embed.weight, one.weight, one.bias, two.weight, two.bias, model.head)


def test_each_tied_leaf_is_one_leaf_with_its_first_path():
    model = make_model()
    leaves = jax.tree.leaves_with_path(st.Dag(model))
    expected = [(".embed.weight", model.head), (".blocks[0].weight", model.blocks[1].weight)]
    assert [(jax.tree_util.keystr(p), x.shape) for p, x in leaves] == [
        (".embed.weight", (2, 2)),
        (".blocks[0].weight", (2, 2)),
        (".blocks[0].bias", (2,)),
    ]
    for (_, leaf), (_, array) in zip(leaves, expected, strict=False):
        assert leaf is array


def test_tree_is_the_same_object_each_time_and_first_the_very_one_that_was_given():
    model = make_model()
    assert st.Dag(model).tree is model
    dag = jax.tree.map(lambda x: x + 1, st.Dag(model))
    made = dag.tree
    assert dag.tree is made is not model
    assert is_tied(made)
    np.testing.assert_array_equal(made.blocks[1].bias, [2.0, 2.0])
    assert made.embed.activation is jnp.tanh
    assert jax.tree.leaves(dag)[0] is made.head


def test_jit_traces_once_and_keeps_ties():
    traces = 0

    @jax.jit
    def f(dag, x):
        nonlocal traces
        traces += 1
        assert is_tied(dag.tree)
        return jax.tree.map(lambda w: w * x, dag)

    dag = st.Dag(make_model())
    for _ in range(3):
        dag = f(dag, 2.0)
    assert traces == 1
    assert is_tied(dag.tree)
    np.testing.assert_array_equal(dag.tree.blocks[0].bias, [8.0, 8.0])
    assert len(f.lower(dag, 2.0).in_avals[0][0].tree.blocks) == 2
    assert len(jax.make_jaxpr(lambda d: d.tree.head)(dag).in_avals) == 3


def test_another_sharing_is_another_structure():
    model = make_model()
    f = jax.jit(lambda dag: loss(dag.tree))
    np.testing.assert_allclose(f(st.Dag(model)), f(st.Dag(st.untie(model))), rtol=1e-6)
    assert jax.tree.structure(st.Dag(model)) == jax.tree.structure(st.Dag(make_model()))
    assert jax.tree.structure(st.Dag(model)) != jax.tree.structure(st.Dag(st.untie(model)))
    total = jax.tree.map(jnp.add, st.Dag(model), st.Dag(make_model())).tree
    assert is_tied(total)
    np.testing.assert_array_equal(total.blocks[0].bias, [2.0, 2.0])
    with pytest.raises(ValueError):
        jax.tree.map(jnp.add, st.Dag(model), st.Dag(st.untie(model)))
    with pytest.raises(TypeError):
        jax.lax.scan(lambda d, _: (st.Dag(st.untie(d.tree)), None), st.Dag(model), length=2)


def test_grad_sums_over_the_paths():
    model = make_model()
    gradient = jax.grad(lambda dag: loss(dag.tree))(st.Dag(model)).tree
    parts = jax.grad(forward, argnums=(0, 1, 2, 3, 4, 5))(
        model.embed.weight, *[getattr(b, n) for b in model.blocks for n in ("weight", "bias")], model.head
    )
    assert is_tied(gradient)
    np.testing.assert_allclose(gradient.head, parts[0] + parts[5], rtol=1e-5)
    np.testing.assert_allclose(gradient.blocks[1].weight, parts[1] + parts[3], rtol=1e-5)
    np.testing.assert_allclose(gradient.blocks[0].bias, parts[2] + parts[4], rtol=1e-5)


def test_leaves_that_others_made_one_array_stay_two_leaves():
    dag, one = st.Dag([jnp.ones(2), jnp.ones(2)]), jnp.zeros(2)
    for made in (jax.tree.map(lambda _: one, dag), jax.grad(lambda d: (d.tree[0] + d.tree[1]).sum())(dag)):
        assert made.tree[0] is not made.tree[1]
        np.testing.assert_array_equal(*made.tree)
        assert len(jax.tree.leaves(st.Dag(made.tree))) == 2


def test_optax():
    tx = optax.adam(0.1, eps=1e-2)  # large, for else it magnifies what rounding leaves of a vanishing gradient
    dag = st.Dag(make_model())
    state = tx.init(dag)
    assert len(jax.tree.leaves(state)) == 7

    @jax.jit
    def step(dag, state):
        updates, state = tx.update(jax.grad(lambda d: loss(d.tree))(dag), state, dag)
        return optax.apply_updates(dag, updates), state

    m = make_model()
    params = {"e": m.head, "w": m.blocks[0].weight, "b": m.blocks[0].bias}
    vanilla = tx.init(params)
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(4):
            dag, state = step(dag, state)
            gradient = jax.grad(lambda p: forward(p["e"], p["w"], p["b"], p["w"], p["b"], p["e"]))(params)
            updates, vanilla = tx.update(gradient, vanilla, params)
            params = optax.apply_updates(params, updates)
    assert is_tied(dag.tree)
    assert is_tied(state[0].mu.tree)
    np.testing.assert_allclose(dag.tree.head, params["e"], rtol=1e-4)
    np.testing.assert_allclose(dag.tree.blocks[1].weight, params["w"], rtol=1e-4)
    np.testing.assert_allclose(state[0].nu.tree.embed.weight, vanilla[0].nu["e"], rtol=1e-4, atol=1e-7)


def test_device_put_and_eval_shape():
    dag = st.Dag(make_model())
    put = jax.device_put(dag, jax.devices()[0])
    assert is_tied(put.tree)
    assert put.tree.head.committed
    shapes = jax.eval_shape(lambda d: jax.tree.map(lambda x: x[None], d), dag).tree
    assert is_tied(shapes)
    assert shapes.head == jax.ShapeDtypeStruct((1, 2, 2), jnp.float32)


def doubled(dag):
    return jax.tree.map(lambda w: 2 * w, dag)


TRANSFORMED = {
    "scan": lambda d: jax.lax.scan(lambda d, _: (doubled(d), None), d, length=1)[0],
    "fori_loop": lambda d: jax.lax.fori_loop(0, 1, lambda i, d: doubled(d), d),
    "cond": lambda d: jax.lax.cond(True, doubled, lambda d: d, d),
    "vmap": lambda d: jax.tree.map(
        lambda x: x[1], jax.vmap(lambda d, s: jax.tree.map(lambda x: x * s, d), (None, 0))(d, jnp.arange(1.0, 3.0))
    ),
    "donation": jax.jit(doubled, donate_argnums=0),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_other_transforms(name):
    dag = st.Dag(make_model())
    found = TRANSFORMED[name](dag)
    assert found.structure is dag.structure
    assert is_tied(found.tree)
    for leaf, original in zip(jax.tree.leaves(found), jax.tree.leaves(st.Dag(make_model())), strict=True):
        np.testing.assert_array_equal(leaf, 2 * original)
    assert all(x.is_deleted() for x in jax.tree.leaves(dag)) == (name == "donation")


def test_leaves_need_not_be_arrays():
    names = jax.tree.map(str, jax.tree.map(lambda x: x.ndim, st.Dag(make_model()))).tree
    assert (names.head, names.blocks[1].bias) == ("2", "1")
    none = jax.tree.map(lambda x: None, st.Dag({"a": jnp.ones(2)}))
    assert none.tree == {"a": None}


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
@pytest.mark.parametrize("fresh", [True, False])
def test_copies(copied, fresh):
    dag = st.Dag(make_model())
    if not fresh:
        dag = jax.tree.map(lambda x: x * 1, dag)
    twin = copied(dag)
    assert type(twin) is st.Dag
    assert twin.structure is dag.structure
    assert is_tied(twin.tree)
    assert jax.tree.structure(twin) == jax.tree.structure(dag)
    for x, y in zip(jax.tree.leaves(twin), jax.tree.leaves(dag), strict=True):
        np.testing.assert_array_equal(x, y)
    assert jax.tree.leaves(twin)[0] is twin.tree.head


def test_plain_containers_count_as_inside():
    w = jnp.ones(2)
    box = [w]
    dag = jax.jit(lambda d: jax.tree.map(lambda x: x + 1, d))(st.Dag({"a": box, "b": box, "c": (w, None)}))
    assert len(jax.tree.leaves(dag)) == 1
    assert dag.tree["a"] is dag.tree["b"]
    assert dag.tree["c"][0] is dag.tree["a"][0]
    assert dag.tree["c"][1] is None


def test_it_is_read_once_and_statics_are_copied():
    config = {"layers": [1]}
    params = {"w": jnp.ones(2)}
    dag = st.Dag(params)
    params["w"] = jnp.zeros(2)
    np.testing.assert_array_equal(jax.tree.leaves(dag)[0], [1.0, 1.0])
    one = jax.tree.map(lambda x: x, st.Dag(make_model(config)))
    two = jax.tree.map(lambda x: x, st.Dag(make_model(config)))
    assert one.tree.blocks[0].config == config
    assert one.tree.blocks[0].config is not config
    assert one.tree.blocks[0].config is not two.tree.blocks[0].config


def test_dags_nest():
    inner = st.Dag(make_model())
    outer = st.Dag({"x": inner, "y": [inner]})
    assert len(jax.tree.leaves(outer)) == 3
    new = jax.jit(lambda d: jax.tree.map(lambda x: x + 1, d))(outer).tree
    assert new["x"] is new["y"][0]
    assert is_tied(new["x"].tree)


def test_repr_shows_the_model():
    assert repr(st.Dag({"a": 1})) == "Dag({'a': 1})"


def test_errors_of_jax_name_the_paths():
    with pytest.raises(TypeError, match=r"\.embed\.weight"):
        jax.jit(lambda d: 0)(jax.tree.map(lambda x: "text", st.Dag(make_model())))
