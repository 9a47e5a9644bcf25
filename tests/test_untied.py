"""S7: a tie that is lost inside a transform, or between two calls, is never silent."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import sharedtree as st
from tests.strategies import Layer, Pair


@pytest.fixture
def model():
    w = jnp.arange(4.0).reshape(2, 2)
    return Pair(Layer(w, jax.nn.relu, None), {"head": w})


def doubled(m):
    return jax.tree.map(lambda x: x * 2 if eqx.is_array(x) else x, m)


@pytest.mark.parametrize(
    "lose",
    [
        doubled,
        lambda m: eqx.tree_at(lambda m: m.second["head"], m, jnp.zeros_like(m.first.weight)),
        lambda m: eqx.apply_updates(m, jax.tree.map(jnp.ones_like, eqx.filter(m, eqx.is_array))),
        lambda m: {"new": Pair(0, doubled(m))},
    ],
)
def test_lost_inside(model, lose):
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
