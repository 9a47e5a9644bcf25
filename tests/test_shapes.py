"""`eval_shape`, `make_jaxpr` and their Equinox counterparts, `named_call`: tracing without computing, ties included."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import sharedtree as st
from tests.strategies import Layer, Mutable, Pair, dags, occurrences, partition, paths

filter_eval_shape = st.preserve_identities(eqx.filter_eval_shape)
filter_make_jaxpr = st.preserve_identities(eqx.filter_make_jaxpr)


def tied():
    layer = Layer(jnp.arange(6.0).reshape(2, 3), jax.nn.relu, [jnp.ones(3)], width=5)
    return Pair(layer, {"again": layer, "weight": layer.weight})


def struct(shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def transposed(model):
    return st.tree.map(jnp.transpose, model)


def test_what_jax_has_jitted():
    def repeated(x, times):
        return jax.tree.map(lambda leaf: jnp.stack([leaf] * times), x)

    f = jax.jit(repeated, static_argnums=1)
    x = [jnp.ones(2)]
    assert st.eval_shape(f, x, 3) == jax.eval_shape(f, x, 3) == [struct((3, 2))]
    w = jnp.ones((2, 3))
    model = Pair(w, [w])
    assert st.eval_shape(jax.jit(transposed), model).first == struct((3, 2))
    with pytest.raises(ValueError, match=r"(?s)`repeated` has static arguments.*Use `sharedtree.jit`"):
        st.eval_shape(f, model, 3)
    with pytest.raises(ValueError, match="incompatible|broadcast"):
        st.eval_shape(jax.jit(lambda m: m.first + jnp.ones(7)), model)
    shapes = st.eval_shape(st.jit(repeated, static_argnums=1), st.untie(model), 3)
    assert shapes.second == [struct((3, 2, 3))]
    assert st.eval_shape(st.jit(lambda n, m: m.first.weight[:n], static_argnums=0), 1, tied()) == struct((1, 3))


@pytest.mark.parametrize("evaluate", [st.eval_shape, filter_eval_shape])
@given(tree=dags())
def test_whatever_goes_in_comes_out_with_its_sharing(evaluate, tree):
    shapes = evaluate(lambda m: m, tree)
    again = evaluate(lambda m: m, shapes)  # shapes are arguments like others
    for each in (shapes, again):
        there = {path: obj for path, obj, _ in paths(each)}
        classes = {}
        for path in occurrences(tree):
            classes.setdefault(id(there[path]), set()).add(path)  # alive in `there`
        assert {frozenset(each) for each in classes.values()} == partition(tree)
    for path, obj in occurrences(tree).items():
        if isinstance(obj, (jax.Array, np.ndarray)):
            assert there[path] == struct(obj.shape, obj.dtype)


def test_arguments_outside_modules_follow_the_transform():
    assert st.eval_shape(lambda x, n: x * n, 2.0, n=3) == jax.eval_shape(lambda x, n: x * n, 2.0, n=3)
    assert st.eval_shape(fun := lambda args, fun=1: args + fun, args=1.5).shape == ()
    assert fun(1) == 2
    made = filter_eval_shape(eqx.nn.MLP, 2, 3, 4, 1, key=jax.random.key(0))
    want = eqx.filter_eval_shape(eqx.nn.MLP, 2, 3, 4, 1, key=jax.random.key(0))
    assert eqx.tree_equal(made, want)
    assert filter_eval_shape(made, struct((2,))) == struct((3,))  # the function is a module of shapes
    one = filter_eval_shape(lambda x: (x, "text", [x]), struct((2,)))
    assert one == (struct((2,)), "text", [struct((2,))])


def test_it_is_traced_once():
    count = 0

    def f(m):
        nonlocal count
        count += 1
        return m

    for _ in range(3):
        st.eval_shape(f, tied())
        st.make_jaxpr(f)(tied())
    assert count == 2
    st.eval_shape(f, st.untie(tied()))
    assert count == 3


def test_the_jaxpr_has_each_leaf_once():
    jaxpr, shapes = st.make_jaxpr(transposed, return_shape=True)(tied())
    assert [v.shape for v in jaxpr.in_avals] == [(2, 3), (3,)]
    assert [v.shape for v in jaxpr.out_avals] == [(3, 2), (3,)]
    assert shapes.first is shapes.second["again"]
    assert shapes.first.weight is shapes.second["weight"]
    assert shapes.first.weight.shape == (3, 2)
    assert len(st.make_jaxpr(lambda a, b: a.first.weight + b.weight)(tied(), tied().first).in_avals) == 4
    model = tied()
    both = st.make_jaxpr(lambda a, b: (a, b, b))(model, b=model.first)
    assert (len(both.in_avals), len(both.out_avals)) == (2, 2)

    def size(m):
        shapes = st.eval_shape(transposed, m)
        assert shapes.first is shapes.second["again"]
        return m.first.weight.sum() * shapes.first.weight.shape[0]

    assert len(st.make_jaxpr(st.grad(size))(tied()).in_avals) == 2
    assert len(st.make_jaxpr(st.jit(transposed))(tied()).out_avals) == 2


@given(tree=dags())
def test_a_jaxpr_without_ties_is_vanillas(tree):
    dag = st.Dag(tree)
    ours, vanilla = (make(lambda d: d)(dag) for make in (st.make_jaxpr, jax.make_jaxpr))
    assert str(ours) == str(vanilla)


def test_options_of_make_jaxpr():
    @st.make_jaxpr(static_argnums=(0,), return_shape=True)
    def f(n, model):
        return model.first.weight * n

    jaxpr, shape = f(3, tied())
    assert (len(jaxpr.in_avals), shape.shape) == (2, (2, 3))
    assert "3.0" in str(jaxpr)
    assert "psum" in str(st.make_jaxpr(lambda m: jax.lax.psum(m.first.weight, "i"), axis_env=[("i", 2)])(tied()))


def test_equinoxs_jaxpr_comes_with_two_modules():
    def f(m, name):
        return transposed(m), name

    jaxpr, shapes, others = filter_make_jaxpr(f)(tied(), "text")
    assert (len(jaxpr.in_avals), len(jaxpr.out_avals)) == (2, 2)
    (shapes, no_name), (others, name) = shapes, others
    assert (no_name, name) == (None, "text")
    assert shapes.first is shapes.second["again"]
    assert shapes.first.weight is shapes.second["weight"]
    assert (shapes.first.activation, others.first.activation) == (None, jax.nn.relu)
    assert (shapes.first.weight.shape, others.first.weight) == ((3, 2), None)

    layer = eqx.nn.LayerNorm(2)
    ours, vanilla = (make(layer)(jnp.ones(2)) for make in (filter_make_jaxpr, eqx.filter_make_jaxpr))
    assert str(ours[0]) == str(vanilla[0])


def test_nothing_is_written_back_whatever_the_policy():
    def f(m):
        m.x = m.y = m.x * 2
        return m.x

    model = Mutable(x=jnp.ones(2), y=None)
    x = model.x
    for policy in (st.Policy(), st.Policy(in_place=True)):
        with st.Context(policy):
            assert st.eval_shape(f, model).shape == (2,)
            assert filter_eval_shape(f, model).shape == (2,)
            assert len(st.make_jaxpr(f)(model).out_avals) == 1
            assert len(filter_make_jaxpr(f)(model)[0].out_avals) == 1
        assert (model.x is x, model.y) == (True, None)
    for options, many in (({}, 2), ({"policy": st.Policy(containers=True)}, 1)):
        shapes = st.eval_shape(lambda p: p, {"a": x, "b": x}, **options)
        assert len({id(leaf) for leaf in shapes.values()}) == many  # alive in `shapes`
        assert len(st.make_jaxpr(lambda p: p, **options)({"a": x, "b": x}).in_avals) == many


def test_lost_ties_are_reported_once_and_errors_leave_nothing_behind():
    def f(m):
        return jax.tree.map(lambda x: x * 2, m)

    w = jnp.ones(2)
    for make in (st.eval_shape, lambda f, m: st.make_jaxpr(f)(m)):
        g = lambda m: f(m)
        with pytest.warns(st.UntiedWarning, match=r"`m.first` and `m.second`"):
            make(g, Pair(w, w))
    with pytest.raises(ZeroDivisionError):
        st.eval_shape(lambda m: 1 / 0, tied())
    assert st.eval_shape(lambda m: m.first.weight, tied()) == struct((2, 3))


def test_named_call_hands_on_the_very_objects():
    model = tied()
    f = st.preserve_identities(jax.named_call)(lambda m, scale=1: (m, m.first.weight * scale), name="name")
    same, scaled = f(model, scale=2)
    assert same is model
    np.testing.assert_allclose(scaled, 2 * model.first.weight)
    assert "name" in st.jit(lambda m: f(m)[1]).lower(model).as_text(debug_info=True)
    inside = st.jit(lambda m: f(m)[0].first is m.second["again"] and 1)(model)
    assert inside == 1
