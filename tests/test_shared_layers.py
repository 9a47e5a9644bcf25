"""`unwrap_shared`: what a `Shared` returns when it is called, with ties. The oracle is `Shared.__call__` itself."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sharedtree as st
from tests.models import embed_weight, first, head_weight, second


def new_pair(getkey):
    return eqx.nn.Embedding(5, 3, key=getkey()), eqx.nn.Linear(3, 5, key=getkey())


class Model(eqx.Module):
    """A language model as Equinox's documentation has it: it calls the wrapper first."""

    shared: eqx.nn.Shared
    scale: jax.Array

    def __call__(self, token):
        embed, head = self.shared()
        return head(self.scale * embed(token))


class Plain(eqx.Module):
    """The same model without the wrapper."""

    shared: tuple
    scale: jax.Array

    def __call__(self, token):
        embed, head = self.shared
        return head(self.scale * embed(token))


def loss(model, tokens):
    logits = jax.vmap(model)(tokens[:-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[1:]).mean()


def linear():
    return eqx.nn.Linear(2, 2, key=jax.random.key(1))


def arrays(*names):
    return {name: jnp.ones(2) for name in names}


def block():
    return {"in": linear(), "out": linear()}


# What is wrapped, where, and what is there instead; and which places of the result are one object.
WRAPPED = {
    "a weight": (lambda: [linear(), linear()], head_weight, embed_weight, [embed_weight, head_weight]),
    "a layer": (
        lambda: [linear()] * 3,
        lambda m: m[1:],
        lambda m: [m[0], m[0]],
        [lambda m: m[0], lambda m: m[1], lambda m: m[2]],
    ),
    "several of several kinds": (
        lambda: (block(), block(), np.ones((2, 2), np.float32)),
        lambda m: (m[1]["in"], m[1]["out"].weight),
        lambda m: (m[0]["out"], m[0]["in"].weight),
        [lambda m: m[1]["in"], lambda m: m[0]["out"]],
        [lambda m: m[1]["out"].weight, lambda m: m[0]["in"].weight],
    ),
    "a sequence that the tree holds": (
        lambda: {"from": [*arrays("a", "b").values()], **arrays("x", "y")},
        lambda m: [m["x"], m["y"]],
        lambda m: m["from"],
        [lambda m: m["from"][0], lambda m: m["x"]],
        [lambda m: m["from"][1], lambda m: m["y"]],
    ),
}


def test_what_a_call_returns_with_ties():
    for name, (make, where, get, *ties) in WRAPPED.items():
        shared = eqx.nn.Shared(make(), where, get)
        back = st.unwrap_shared(shared)
        assert eqx.tree_equal(back, shared(), typematch=True), name
        for one, other, *rest in ties:
            assert all(place(back) is one(back) for place in (other, *rest)), name
    back = st.unwrap_shared(eqx.nn.Shared([linear(), linear()], head_weight, embed_weight))
    assert back[0].bias is not back[1].bias
    chain = [jnp.ones(1) * i for i in range(50)]
    assert all(x is chain[0] for x in st.unwrap_shared(eqx.nn.Shared(chain, lambda m: m[1:], lambda m: m[:-1])))
    # Equinox puts its placeholder into the third, for it looks in a tree from which the second is gone.
    triple = (linear(), other := linear(), other)
    shared = eqx.nn.Shared(triple, lambda m: (m[1].weight, m[2].weight), lambda m: (m[0].weight, m[1].weight))
    one, two, three = st.unwrap_shared(shared)
    assert one.weight is two.weight is three.weight


def test_within_a_model_and_with_its_other_ties(getkey):
    shared = eqx.nn.Shared(new_pair(getkey), head_weight, embed_weight)
    outside = shared.pytree[0]
    tree = {"a": shared, "b": [shared, outside], "c": eqx.nn.Shared((outside, outside), second, first)}
    back = st.unwrap_shared(tree)
    assert back["a"][0] is back["b"][0][0] is back["b"][1]
    assert back["a"][1].weight is back["b"][1].weight
    assert back["c"][0] is back["c"][1]
    assert back["c"][0].weight is back["a"][0].weight
    assert tree["a"] is shared


def test_inside_another(getkey):
    inner = eqx.nn.Shared(new_pair(getkey), head_weight, embed_weight)
    tree = {"inner": inner, "third": eqx.nn.Linear(3, 5, key=getkey())}
    outer = eqx.nn.Shared(tree, lambda m: m["third"].weight, lambda m: m["inner"].pytree[0].weight)
    back = st.unwrap_shared(outer)
    assert back["third"].weight is back["inner"][0].weight is back["inner"][1].weight
    by_calling = outer()
    by_calling["inner"] = by_calling["inner"]()
    assert eqx.tree_equal(back, by_calling, typematch=True)


@pytest.mark.slow
def test_losses_of_a_training(getkey):
    model = Model(eqx.nn.Shared(new_pair(getkey), head_weight, embed_weight), jnp.array(0.5))
    unwrapped = st.unwrap_shared(model)
    assert st.count_parameters(unwrapped) == sum(x.size for x in jax.tree.leaves(eqx.filter(model, eqx.is_array)))
    plain = Plain(unwrapped.shared, unwrapped.scale)
    tokens = jnp.array([0, 1, 2, 3, 4] * 3)
    adam = optax.adam(1e-2)

    @eqx.filter_jit
    def equinox_step(model, state):
        value, gradient = eqx.filter_value_and_grad(loss)(model, tokens)
        updates, state = adam.update(gradient, state)
        return eqx.apply_updates(model, updates), state, value

    tx = st.optimizer(adam)

    @st.jit
    def step(model, state):
        value, gradient = st.value_and_grad(loss)(model, tokens)
        updates, state = tx.update(gradient, state, model)
        return st.apply_updates(model, updates), state, value

    expected, found = [], []
    state = adam.init(eqx.filter(model, eqx.is_inexact_array))
    for _ in range(10):
        model, state, value = equinox_step(model, state)
        expected.append(value)
    state = tx.init(plain)
    for _ in range(10):
        plain, state, value = step(plain, state)
        found.append(value)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert plain.shared[0].weight is plain.shared[1].weight


def test_wrapper_itself_passes_through_transforms_and_shapes_and_tracers_are_unwrapped(getkey):
    model = Model(eqx.nn.Shared(new_pair(getkey), head_weight, embed_weight), jnp.array(0.5))
    doubled = st.jit(lambda model: st.tree.map(lambda x: 2 * x, model))(model)
    assert eqx.tree_equal(st.unwrap_shared(doubled).shared, doubled.shared(), typematch=True)
    shapes = eqx.filter_eval_shape(lambda: model)
    for embed, head in (st.unwrap_shared(shapes).shared, st.jit(st.unwrap_shared)(model).shared):
        assert embed.weight is head.weight
    assert isinstance(st.unwrap_shared(shapes).shared[0].weight, jax.ShapeDtypeStruct)


# What cannot be done ------------------------------------------------------------------------------------------------


def test_without_a_wrapper(getkey):
    class Own(eqx.nn.Shared):
        pass

    for tree in ({"a": jnp.ones(2)}, 3.0, None, Own(new_pair(getkey), head_weight, embed_weight)):
        with pytest.raises(TypeError, match="found no `equinox.nn.Shared`"):
            st.unwrap_shared(tree)


@pytest.mark.parametrize(
    "get",
    [
        lambda pair: pair[0].T,
        lambda pair: jnp.transpose(pair[0]),
        lambda pair: pair[0] * 1,
        lambda pair: jnp.zeros((3, 3)),
    ],
)
def test_computed(get):
    shared = eqx.nn.Shared((jnp.ones((3, 3)), jnp.zeros((3, 3))), lambda pair: pair[1], get)
    said = r"(?s)at `\['layers'\]`: its `get` .*keep the wrapper"
    with pytest.raises(st.errors.SharingMismatchError, match=said) as caught:
        st.unwrap_shared({"layers": shared})
    assert caught.value.paths == ("['layers']",)


def test_errors_of_get_new_sequences_and_circles():
    shared = eqx.nn.Shared((jnp.ones(2), jnp.zeros(2)), second, first)
    object.__setattr__(shared, "get", lambda pair: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        st.unwrap_shared(shared)
    tree = {"to": [jnp.ones(2), jnp.zeros(2)], **arrays("x", "y")}
    with pytest.raises(st.errors.SharingMismatchError, match="returns 1 of its nodes, and its `get` 2"):
        st.unwrap_shared(eqx.nn.Shared(tree, lambda m: m["to"], lambda m: [m["x"], m["y"]]))
    swap = eqx.nn.Shared((jnp.ones(2), jnp.zeros(2)), lambda m: (m[0], m[1]), lambda m: (m[1], m[0]))
    with pytest.raises(st.errors.CycleError, match=r"refers to itself.*`\[1\]`") as caught:
        st.unwrap_shared([jnp.ones(2), swap])
    assert caught.value.paths == ("[1]",)
