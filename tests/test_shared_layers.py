"""`unwrap_shared`: what a `Shared` returns when it is called, with ties. The oracle is `Shared.__call__` itself."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sharedtree as st


def embed_weight(pair):
    return pair[0].weight


def head_weight(pair):
    return pair[1].weight


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


def test_tied_weight(getkey):
    shared = eqx.nn.Shared(new_pair(getkey), head_weight, embed_weight)
    embed, head = st.unwrap_shared(shared)
    assert embed.weight is head.weight is shared.pytree[0].weight
    assert head.bias is shared.pytree[1].bias
    assert eqx.tree_equal((embed, head), shared(), typematch=True)


def test_layer_is_one_object(getkey):
    linear = eqx.nn.Linear(2, 2, key=getkey())
    shared = eqx.nn.Shared([linear, linear, linear], lambda m: m[1:], lambda m: [m[0], m[0]])
    first, second, third = st.unwrap_shared(shared)
    assert first is second is third
    assert eqx.tree_equal([first, second, third], shared(), typematch=True)


def test_several_nodes_of_several_kinds(getkey):
    block = {"in": eqx.nn.Linear(2, 2, key=getkey()), "out": eqx.nn.Linear(2, 2, key=getkey())}
    tree = (block, jax.tree.map(jnp.zeros_like, block), np.ones((2, 2), np.float32))
    shared = eqx.nn.Shared(tree, lambda m: (m[1]["in"], m[1]["out"].weight), lambda m: (m[0]["out"], m[0]["in"].weight))
    first, second, array = st.unwrap_shared(shared)
    assert second["in"] is first["out"]
    assert second["out"].weight is first["in"].weight
    assert second["out"].bias is not first["in"].bias
    assert array is tree[2]
    assert eqx.tree_equal((first, second, array), shared(), typematch=True)


def test_within_a_model_and_with_its_other_ties(getkey):
    shared = eqx.nn.Shared(new_pair(getkey), head_weight, embed_weight)
    outside = shared.pytree[0]
    tree = {"a": shared, "b": [shared, outside], "c": eqx.nn.Shared((outside, outside), *first_for_second())}
    back = st.unwrap_shared(tree)
    assert back["a"][0] is back["b"][0][0] is back["b"][1]
    assert back["a"][1].weight is back["b"][1].weight
    assert back["c"][0] is back["c"][1]
    assert back["c"][0].weight is back["a"][0].weight
    assert tree["a"] is shared


def first_for_second():
    return lambda pair: pair[1], lambda pair: pair[0]


def test_inside_another(getkey):
    inner = eqx.nn.Shared(new_pair(getkey), head_weight, embed_weight)
    third = eqx.nn.Linear(3, 5, key=getkey())
    outer = eqx.nn.Shared({"inner": inner, "third": third}, third_weight, inner_weight)
    back = st.unwrap_shared(outer)
    assert back["third"].weight is back["inner"][0].weight is back["inner"][1].weight
    by_calling = outer()
    by_calling["inner"] = by_calling["inner"]()
    assert eqx.tree_equal(back, by_calling, typematch=True)


def third_weight(tree):
    return tree["third"].weight


def inner_weight(tree):
    return tree["inner"].pytree[0].weight


def test_a_chain():
    arrays = [jnp.ones(1) * i for i in range(50)]
    back = st.unwrap_shared(eqx.nn.Shared(arrays, lambda m: m[1:], lambda m: m[:-1]))
    assert all(array is arrays[0] for array in back)


def test_one_after_another(getkey):
    # Equinox puts its placeholder into the third, for it looks in a tree from which the second is gone.
    pair = new_pair(getkey)
    shared = eqx.nn.Shared((*pair, pair[1]), lambda m: (m[1].weight, m[2].weight), lambda m: (m[0].weight, m[1].weight))
    first, second, third = st.unwrap_shared(shared)
    assert first.weight is second.weight is third.weight


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


def test_wrapper_itself_passes_through_transforms(getkey):
    model = Model(eqx.nn.Shared(new_pair(getkey), head_weight, embed_weight), jnp.array(0.5))
    doubled = st.jit(lambda model: st.tree.map(lambda x: 2 * x, model))(model)
    assert eqx.tree_equal(st.unwrap_shared(doubled).shared, doubled.shared(), typematch=True)


def test_shapes_and_tracers(getkey):
    make = lambda: eqx.nn.Shared(new_pair(getkey), head_weight, embed_weight)
    embed, head = st.unwrap_shared(eqx.filter_eval_shape(make))
    assert embed.weight is head.weight
    assert isinstance(embed.weight, jax.ShapeDtypeStruct)
    embed, head = st.jit(st.unwrap_shared)(make())
    assert embed.weight is head.weight


def test_gradient_is_joined_first(getkey):
    model = Model(eqx.nn.Shared(new_pair(getkey), head_weight, embed_weight), jnp.array(0.5))
    tree = eqx.filter_grad(lambda model: model(jnp.array(1)).sum())(model)
    with pytest.raises(TypeError, match=r"`\.shared` has lost its functions") as caught:
        st.unwrap_shared(tree)
    assert "equinox.combine" in str(caught.value)
    gradient = st.unwrap_shared(eqx.combine(tree, eqx.filter(model, eqx.is_array, inverse=True)))
    np.testing.assert_array_equal(gradient.shared[1].weight, tree.shared.pytree[0].weight)
    assert gradient.shared[0].weight is gradient.shared[1].weight


# What cannot be done ------------------------------------------------------------------------------------------------


def test_without_a_wrapper(getkey):
    class Own(eqx.nn.Shared):
        pass

    for tree in ({"a": jnp.ones(2)}, 3.0, None, Own(new_pair(getkey), head_weight, embed_weight)):
        with pytest.raises(TypeError, match="found no `equinox.nn.Shared`"):
            st.unwrap_shared(tree)


def test_computed():
    for get in (
        lambda pair: pair[0].T,
        lambda pair: jnp.transpose(pair[0]),
        lambda pair: pair[0] * 1,
        lambda pair: jnp.zeros((3, 3)),
    ):
        shared = eqx.nn.Shared((jnp.ones((3, 3)), jnp.zeros((3, 3))), lambda pair: pair[1], get)
        said = r"(?s)at `\['layers'\]` .* `get` .*keep the wrapper"
        with pytest.raises(st.SharingMismatchError, match=said) as caught:
            st.unwrap_shared({"layers": shared})
        assert caught.value.paths == ("['layers']",)


def test_other_errors_of_get_are_those_of_get():
    shared = eqx.nn.Shared((jnp.ones(2), jnp.zeros(2)), lambda pair: pair[1], lambda pair: pair[0])
    object.__setattr__(shared, "get", lambda pair: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        st.unwrap_shared(shared)


def test_sequence_that_the_pytree_holds():
    tree = {"from": [jnp.ones(2), jnp.zeros(2)], "x": jnp.ones(2), "y": jnp.ones(2)}
    shared = eqx.nn.Shared(tree, lambda m: [m["x"], m["y"]], lambda m: m["from"])
    back = st.unwrap_shared(shared)
    assert back["from"][0] is back["x"]
    assert back["from"][1] is back["y"]
    assert eqx.tree_equal(back, shared(), typematch=True)


def test_sequence_that_is_new():
    tree = {"to": [jnp.ones(2), jnp.zeros(2)], "x": jnp.ones(2), "y": jnp.ones(2)}
    shared = eqx.nn.Shared(tree, lambda m: m["to"], lambda m: [m["x"], m["y"]])
    with pytest.raises(st.SharingMismatchError, match="returns 1 of its nodes, and its `get` 2"):
        st.unwrap_shared(shared)


def test_circle(getkey):
    swap = eqx.nn.Shared((jnp.ones(2), jnp.zeros(2)), lambda m: (m[0], m[1]), lambda m: (m[1], m[0]))
    with pytest.raises(st.CycleError, match=r"circle.*`\[1\]`") as caught:
        st.unwrap_shared([jnp.ones(2), swap])
    assert caught.value.paths == ("[1]",)
