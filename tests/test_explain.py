"""`explain`: per leaf what is tied, traced, static and how it is treated; and why the function was traced again."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import sharedtree as st
from tests.strategies import Layer, Pair


def rows(f, *args, **kwargs):
    return {row.path: (row.kind, row.tied_to, row.treatment) for row in st.explain(f, *args, **kwargs).leaves}


def test_leaves():
    w = jnp.ones((2, 3))
    model = Pair(Layer(w, jax.nn.relu, [jnp.arange(2)]), {"head": w})
    found = rows(st.jit(lambda m, n: 0, donate_argnums=0), model, Pair(1, jnp.ones(2)))
    assert found == {
        "m.first.weight": ("traced", "", "donated"),
        "m.first.activation": ("static", "", ""),
        "m.first.parts[0]": ("traced", "", "donated"),
        "m.second['head']": ("traced", "m.first.weight", "donated"),
        "n.first": ("static", "", ""),
        "n.second": ("traced", "", ""),
    }
    found = rows(st.grad(lambda m: 0.0), model)
    assert found["m.first.weight"][2] == "differentiated"
    assert found["m.first.parts[0]"][2] == ""
    found = rows(st.vmap(lambda m, n: 0, in_axes=(0, None)), model, Pair(1, jnp.ones(2)))
    assert found["m.first.weight"][2] == "in_axes 0"
    assert found["n.second"][2] == "in_axes None"
    found = rows(st.preserve_identities(eqx.filter_vmap)(lambda m: 0), model)
    assert found["m.first.parts[0]"][2] == "in_axes 0"


def test_a_conflict_is_the_error_that_the_call_would_raise():
    model = Pair(jnp.ones(2), 1)
    for f in (
        st.jit(lambda a, b: 0, donate_argnums=0),
        st.vmap(lambda a, b: 0, in_axes=(0, None)),
        st.preserve_identities(lambda f: jax.jit(f))(lambda a, b: 0),
    ):
        with pytest.raises(st.errors.InconsistentSharingError) as caught:
            st.explain(f, model, model)
        assert caught.value.paths == ("a.first", "b.first")
    with pytest.raises(st.errors.InconsistentSharingError):
        st.explain(st.grad(lambda a, b: 0.0), model, [model])
    with pytest.raises(TypeError, match=r"sharedtree\.explain\(sharedtree\.jit\(f\), model\)"):
        st.explain(jax.jit(lambda x: x), 1)


W, V = jnp.ones(2), jnp.zeros(2)


SHARED = Pair(W, V)
REASONS = [
    ((Pair(W, 1),), (Pair(W, 2),), "`m.second` was 1 and is 2"),
    ((Pair(W, 1),), (Pair(jnp.ones(3), 1),), "`m.first` was float32[2] and is float32[3]"),
    ((Pair(W, V),), (Pair(W, W),), "`m.first` and `m.second` are one object now"),
    ((Pair(W, [1]),), (Pair(W, [1, 2]),), "`m.second` was a `list` with 1 child and is a `list` with 2 children"),
    ((Pair(W, []),), (Pair(W, {}),), "`m.second` was a `list` with 0 children and is a `dict` with 0 children"),
    ((Layer(W, 1, 1, width=1),), (Layer(W, 1, 1, width=2),), "static data of `m`"),
    ((SHARED, SHARED), (SHARED, Pair(W, V)), "`m` and `n` are two objects now"),
    ((SHARED, 1), (SHARED, jnp.ones(2)), "`n` was int32[], weakly typed and is float32[2]"),
]


@pytest.mark.parametrize(("before", "after", "reason"), REASONS)
def test_why_it_was_traced_again(before, after, reason):
    f = st.jit(lambda m, n=0: 0, policy=st.Policy(on_untie="ignore"))
    f(*before)
    assert st.explain(f, *before).retraced == ()
    f(*after)
    explanation = st.explain(f, *after)
    assert explanation.num_traces == 2
    assert any(reason in each for each in explanation.retraced), (reason, explanation.retraced)
    assert reason in str(explanation)


@pytest.mark.slow
def test_why_arguments_outside_modules_had_it_traced_again():
    f = st.jit(lambda net, batch, mode=None: batch["x"] * 2, static_argnames="mode")
    net = Pair(jnp.ones(2), jnp.ones(2))
    f(net, {"x": jnp.ones(3)})
    f(net, {"x": jnp.ones(4)})
    assert st.explain(f, net, {"x": jnp.ones(4)}).retraced == ("`batch['x']` was float32[3] and is float32[4]",)
    f(net, {"x": jnp.ones(4)}, mode="train")
    assert st.explain(f, net, {"x": jnp.ones(4)}).retraced == ("`mode` was missing and is 'train'",)
    jax.clear_caches()
    f(net, {"x": jnp.ones(4)})
    assert st.explain(f, net, {"x": jnp.ones(4)}).retraced == ("`mode` was 'train' and is missing",)
