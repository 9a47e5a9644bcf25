"""S7: a tie that is lost inside a transform, or between two calls, is never silent."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import sharedtree as st
from tests.strategies import Layer, Pair


@pytest.fixture
def model():
    w = jnp.arange(4.0).reshape(2, 2)
    return Pair(Layer(w, jax.nn.relu, None), {"head": w})


def doubled(m):
    return jax.tree.map(lambda x: x * 2 if eqx.is_array(x) else x, m)


LOSSES = {
    "jax.tree.map": doubled,
    "eqx.tree_at": lambda m: eqx.tree_at(lambda m: m.second["head"], m, jnp.zeros_like(m.first.weight)),
    "eqx.apply_updates": lambda m: eqx.apply_updates(m, jax.tree.map(jnp.ones_like, eqx.filter(m, eqx.is_array))),
    "in a part of a larger result": lambda m: {"new": Pair(0, doubled(m))},
}


@pytest.mark.parametrize("name", LOSSES)
def test_lost_inside(model, name):
    lose = LOSSES[name]
    paths = r"`m\.first\.weight` and `m\.second\['head'\]`"
    f = st.jit(lambda m: lose(m))
    with pytest.warns(st.UntiedWarning, match=paths) as record:
        f(model)
    assert len(record) == 1
    assert "sharedtree.tree.map" in str(record[0].message)
    f(model)  # only when it is traced
    for transform in (st.vmap, st.checkpoint):
        with pytest.warns(st.UntiedWarning, match=paths):
            transform(lambda m: lose(m))(model)
    with pytest.warns(st.UntiedWarning, match=paths):
        st.grad(lambda m: (m.first.weight.sum(), lose(m)), has_aux=True)(model)


@pytest.mark.parametrize(
    "keep",
    [
        lambda m: jax.tree.map(lambda x: x, m),  # the same arrays in new nodes
        lambda m: st.tree.map(lambda x: x * 2, m),
        lambda m: st.tree.at(lambda m: m.second["head"], m, jnp.zeros((2, 2))),
        lambda m: st.apply_updates(m, st.tree.map(jnp.ones_like, st.tree.filter(m, eqx.is_array))),
        lambda m: st.retie(doubled(m), like=m),
        lambda m: st.untie(m),
        lambda m: st.tree.map(lambda x: x * 2, st.untie(m)),
        lambda m: st.untie(st.tree.map(lambda x: x * 2, m), lambda m: m.second["head"]),
        lambda m: m.first,
        lambda m: Layer(m.first.weight * 2, None, m.second["head"] * 2),
    ],
)
def test_kept_or_meant_or_something_else(model, keep):
    st.jit(keep)(model)


def test_policy(model):
    lose = lambda m: doubled(m)
    st.preserve_identities(jax.jit, policy=st.Policy(on_untie="ignore"))(lose)(model)
    strict = st.preserve_identities(jax.jit, policy=st.Policy(on_untie="error"))(lose)
    with pytest.raises(st.UntiedError) as caught:
        strict(model)
    assert caught.value.paths == ("m.first.weight", "m.second['head']")
    with st.Context(st.Policy(on_untie="error")), pytest.raises(st.UntiedError):
        st.jit(lose)(model)


def test_lost_between_two_calls(model):
    traces = []
    f = st.jit(lambda m: traces.append(1) or m.first.weight.sum())
    f(model)
    # What vanilla functions do outside any transform.
    loose = jax.tree.map(lambda x: x + 0 if eqx.is_array(x) else x, model)
    with pytest.warns(st.UntiedWarning, match="earlier call"):
        f(loose)
    assert len(traces) == 2
    f(loose)
    f(model)
    assert len(traces) == 2
    teacher = Pair(Layer(jnp.ones((2, 2)), jax.nn.relu, None), {"head": jnp.ones((2, 2))})
    f(teacher)  # which never had the tie


def test_aliases_between_arguments_and_in_optimizer_states_do_not_count(model):
    state = optax.LookaheadParams(model, model)

    @st.jit
    def step(fast, ema, state):
        double = lambda m: st.tree.map(lambda x: x * 2, m)
        triple = lambda m: st.tree.map(lambda x: x * 3, m)
        return double(fast), triple(ema), optax.LookaheadParams(double(state.fast), triple(state.slow))

    result = step(model, model, state)
    step(*result)


def test_aliases_in_a_state_inside_a_module(model):
    class Training(eqx.Module):
        model: Pair
        state: optax.LookaheadParams

    training = Training(model, optax.LookaheadParams(model, model))

    @st.jit
    def step(t):
        times = lambda k, m: st.tree.map(lambda x: x * k, m)
        return Training(times(2, t.model), optax.LookaheadParams(times(3, t.state.fast), times(4, t.state.slow)))

    step(step(training))


def test_lost_although_an_untied_model_of_the_class_is_there():
    model, ema = Pair(jnp.arange(2.0), None), Pair(jnp.ones(2), jnp.zeros(2))
    model = Pair(model.first, model.first)
    lose = lambda m: jax.tree.map(lambda x: x + 1, m)
    for f in (lambda m, ema: (lose(m), ema), lambda m, ema: lose(m), lambda m, ema: (lose(m), lose(ema))):
        with pytest.warns(st.UntiedWarning):
            st.jit(f)(model, ema)
    f = st.jit(lambda m, ema: 0)
    f(model, ema)
    with pytest.warns(st.UntiedWarning, match="earlier call"):
        f(lose(model), ema)


def test_a_tied_namedtuple_of_the_users_own_counts():
    class Params(NamedTuple):
        embed: object
        head: object

    w = jnp.ones(2)
    params = Pair(Params(w, w), 1)
    with pytest.warns(st.UntiedWarning, match=r"\.first\.embed"):
        st.jit(lambda m: Pair(Params(m.first.embed + 1, m.first.head + 1), 1))(params)
    kept = st.apply_updates(Params(w, w), Params(w, w))
    assert kept.embed is kept.head
    with pytest.raises(st.SharingMismatchError):
        st.apply_updates(Params(w, w), Params(w + 1, w + 1))


def test_eager_transforms_remember_nothing():
    f = st.grad(lambda m: m.first.sum())
    for _ in range(3):
        f(Pair(jnp.ones(2), 1))
    assert not list(f._seen._seen.items())
