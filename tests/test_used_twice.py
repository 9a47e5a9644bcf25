"""S5's exception: one model as two arguments of which one is differentiated. The oracle is Equinox on two models."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, strategies as hst

import sharedtree as st
from tests.laws import assert_gradient, floats
from tests.strategies import Layer, Pair, dags, python_numbers, twin


def td(q, target):
    """Every path of both counts, each with a weight of its own."""
    both = zip(floats(q), floats(target), strict=True)
    return sum((i + 1) * (jnp.sin(x) * jnp.cos(y)).sum() for i, (x, y) in enumerate(both))


CALLS = {
    "eager": lambda q, target: st.grad(td)(q, target),
    "under jit": lambda q, target: st.jit(st.grad(td))(q, target),
    "inside a function under jit": lambda q, target: st.jit(lambda q, target: st.grad(td)(q, target))(q, target),
    "by keyword": lambda q, target: st.grad(td)(q, target=target),
    "the second": lambda q, target: st.grad(lambda target, q: td(q, target), argnums=1)(target, q),
    "with a value": lambda q, target: st.value_and_grad(td)(q, target)[1],
    "Equinox's": lambda q, target: st.preserve_identities(eqx.filter_grad)(td)(q, target),
    "in containers": lambda q, target: st.grad(lambda a, b: td(a["q"], b["q"]))({"q": q}, {"q": target})["q"],
}


@given(model=dags(), call=hst.sampled_from(sorted(CALLS)))
@pytest.mark.slow
def test_one_model_used_twice_is_cut_and_said_once(model, call):
    assume(floats(model) and not python_numbers([model]))
    with pytest.warns(st.UntiedWarning) as caught:
        gradient = CALLS[call](model, model)
    (text,) = [str(each.message) for each in caught]
    assert "which is the same module" in text
    assert "sharedtree.untie(" in text
    assert "argnums=(0, 1)" in text
    assert_gradient(model, gradient, eqx.filter_grad(td)(twin(model), twin(model)))


@given(dag=dags())
def test_a_copy_of_the_second_is_silent(dag):
    assume(floats(dag) and not python_numbers([dag]))
    gradient = st.grad(td)(dag, st.untie(dag))
    assert_gradient(dag, gradient, eqx.filter_grad(td)(twin(dag), twin(dag)))


class Q(eqx.Module):
    body: eqx.nn.Linear
    head: eqx.nn.Linear

    def __call__(self, x):
        return self.head(jnp.tanh(self.body(x)))


def q_network(seed, body=None):
    keys = jax.random.split(jax.random.key(seed))
    return Q(body or eqx.nn.Linear(2, 3, key=keys[0]), eqx.nn.Linear(3, 1, key=keys[1]))


X = jnp.array([0.5, -1.0])


def error_of(q, target):
    return ((q(X) - 0.9 * target(X) - 1.0) ** 2).sum()


@pytest.mark.slow
def test_hard_updates_at_some_step_train_as_two_models_do():
    """Right after an update `q` and `target` are one object, then the step has made another `q`."""

    def step(grad, tree_map):
        def of(q, target):
            return tree_map(lambda w, g: w if g is None else w - 0.1 * g, q, grad(error_of)(q, target))

        return of

    ours = st.jit(step(st.grad, st.tree.map))
    theirs = eqx.filter_jit(
        step(eqx.filter_grad, lambda f, *trees: jax.tree.map(f, *trees, is_leaf=lambda x: x is None))
    )
    q, target = q_network(0), q_network(1)
    for i in range(6):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            q, expected = ours(q, target), theirs(twin(q), twin(target))
        for got, want in zip(jax.tree.leaves(q), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-6)
        # Once, where the step is traced for a model that is used twice.
        assert [each.category for each in caught] == [st.UntiedWarning] * (i == 3)
        if i in (2, 4):
            target = q


@pytest.mark.slow
def test_of_modules_that_share_a_part_the_part_is_cut():
    q = q_network(0)
    target = q_network(1, body=q.body)
    with pytest.warns(
        st.UntiedWarning, match=r"`q.body` lacks what flows through `target.body`, which is the same module"
    ):
        gradient = st.grad(error_of)(q, target)
    expected = eqx.filter_grad(error_of)(q, target)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.allclose(a, b)), gradient, expected))
    with pytest.raises(st.errors.UntiedError) as error, st.Context(st.Policy(on_untie="error")):
        st.grad(error_of)(q, target)
    assert error.value.paths == ("q.body", "target.body")
    with st.Context(st.Policy(on_untie="ignore")):
        st.grad(error_of)(q, target)


def test_a_part_of_the_model_may_be_selected():
    q = q_network(0)
    with pytest.warns(st.UntiedWarning, match="lacks what flows through"):
        gradient = st.grad(error_of, wrt=lambda path, _: "head" in path)(q, q)
    expected = eqx.filter_grad(error_of)(q, twin(q))
    np.testing.assert_allclose(gradient.head.weight, expected.head.weight, rtol=1e-6)
    assert gradient.body.weight is None


def swapped(pair):
    return Pair(pair.second, pair.first)


PAIR = Pair(Layer(jnp.ones(2), None, None), Layer(jnp.zeros(2), None, None))


ERRORS = {
    "a third argument": (lambda: st.grad(lambda q, t, u: 0.0)(PAIR, PAIR, PAIR), "u.first.weight"),
    "another path": (lambda: st.grad(lambda q, t: 0.0)(PAIR, swapped(PAIR)), "t.second.weight"),
    "another path, too": (lambda: st.grad(lambda q, t: 0.0)(PAIR, Pair(PAIR.first, PAIR.first)), "t.second.weight"),
    "another class": (lambda: st.grad(lambda q, t: 0.0)(PAIR, Layer(PAIR, None, None)), "t.weight.first.weight"),
    "another place": (lambda: st.grad(lambda q, t: 0.0)([PAIR], {"t": PAIR}), "t['t'].first.weight"),
    "donated": (lambda: st.jit(lambda q, t: 0.0, donate_argnums=0)(PAIR, PAIR), "t.first.weight"),
    "mapped": (lambda: st.vmap(lambda q, t: 0.0, in_axes=(0, None))(PAIR, PAIR), "t.first.weight"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_else_is_treated_in_two_ways_is_the_error(name):
    call, path = ERRORS[name]
    with pytest.raises(st.errors.InconsistentSharingError) as error:
        call()
    assert path in error.value.paths


class Counter(st.Module):
    def __init__(self):
        self.w = jnp.array([1.0, 2.0])
        self.calls = jnp.zeros(())

    def count(self):
        self.calls = self.calls + 1
        return self.w


@pytest.mark.filterwarnings("ignore:A tie was cut")
def test_in_place_one_side_may_change_it_and_not_both():
    for change in (lambda q, t: q.count() @ t.w, lambda q, t: q.w @ t.count()):
        model = Counter()
        gradient = st.grad(change, in_place=True)(model, model)
        np.testing.assert_array_equal(gradient.w, model.w)
        assert model.calls == 1
    model = Counter()
    with pytest.raises(
        st.errors.InconsistentSharingError, match="the `Counter` with this leaf became two. One of them was changed"
    ):
        st.grad(lambda q, t: q.count() @ t.count(), in_place=True)(model, model)
    assert model.calls == 0
