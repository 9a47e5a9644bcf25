"""`vjp`, `jvp`, `linearize`, `linear_transpose` and Equinox's, and the functions that they return."""

import gc
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as hst

import sharedtree as st
from tests.strategies import MODULES, Layer, Mutable, Pair, Record, dags, is_array, paths, twin
from tests.threads import at_once

filter_vjp, filter_jvp = st.preserve_identities(eqx.filter_vjp), st.preserve_identities(eqx.filter_jvp)
float0 = jax.dtypes.float0

W, V = np.array([1.0, 2.0], np.float32), np.array([3.0, -1.0], np.float32)


def model(w=W, v=V):
    """One layer at two paths, its weight at a third; and what cannot be differentiated."""
    w, v = jnp.asarray(w), jnp.asarray(v)
    layer = Layer(w, jax.nn.relu, [v, 7], width=2)
    return Pair(layer, Mutable(layer=layer, w=w, n=jnp.arange(2), k=3))


def f(m):
    """Some of the result is tied, some is static, some is an integer."""
    assert m.first is m.second.layer
    assert m.first.weight is m.second.w
    a = m.first.weight * m.second.w * m.second.layer.weight
    b = jnp.sin(m.first.parts[0]) * m.second.w
    layer = Layer(a, "static", m.second.n)
    return {"pair": Pair(layer, [layer, b, a]), "bare": b.sum()}


def single(w, v):
    """The same of the two weights, in vanilla JAX."""
    a, b = w**3, jnp.sin(v) * w
    return a, b, b.sum()


def cotangent(a, b, bare):
    layer = Layer(a, None, None)
    return {"pair": Pair(layer, [layer, b, a]), "bare": bare}


def require_like_the_model(g, w, v):
    assert type(g) is Pair
    assert g.first is g.second.layer
    assert g.first.weight is g.second.w
    assert (g.second.n, g.second.k, g.first.activation, g.first.parts[1], g.first.width) == (None, None, None, None, 2)
    np.testing.assert_allclose(g.first.weight, w, rtol=1e-5)
    np.testing.assert_allclose(g.first.parts[0], v, rtol=1e-5)


def require_like_the_result(out, a, b, bare, *, static, n):
    layer, again = out["pair"].first, out["pair"].second[0]
    assert layer is again
    assert layer.weight is out["pair"].second[2]
    assert layer.activation == static
    np.testing.assert_array_equal(layer.parts, n)
    for got, want in ((layer.weight, a), (out["pair"].second[1], b), (out["bare"], bare)):
        np.testing.assert_allclose(got, want, rtol=1e-5)


COTANGENT = jnp.array([0.5, -1.0]), jnp.array([2.0, 3.0]), jnp.array(0.25)
TANGENT = jnp.array([1.0, -2.0]), jnp.array([0.5, 0.25])


@pytest.mark.parametrize("vjp", [st.vjp, filter_vjp], ids=["vjp", "filter_vjp"])
def test_vjp(vjp):
    out, pullback = vjp(f, model())
    require_like_the_result(out, *single(W, V), static="static", n=[0, 1])
    want = jax.vjp(single, W, V)[1](COTANGENT)
    for _ in range(2):
        (gradient,) = pullback(cotangent(*COTANGENT))
        require_like_the_model(gradient, *want)
    assert not hasattr(pullback, "with_refs")


def test_jvp_and_linearize():
    want = jax.jvp(single, (W, V), TANGENT)[1]
    out, pushforward = st.linearize(f, model())
    # Of what is not differentiated there is nothing, or JAX's zeros.
    zeros = tangent_of(*TANGENT)
    zeros.second.n, zeros.second.k = np.zeros(2, float0), np.zeros((), float0)
    for primals, tangent in (
        st.jvp(f, (model(),), (tangent_of(*TANGENT),)),
        st.jvp(f, (model(),), (zeros,)),
        filter_jvp(f, (model(),), (tangent_of(*TANGENT),)),
        *((out, pushforward(tangent_of(*TANGENT))) for _ in range(2)),
    ):
        require_like_the_result(primals, *single(W, V), static="static", n=[0, 1])
        require_like_the_result(tangent, *want, static=None, n=None)
    _, tangent = filter_jvp(f, (model(),), (tangent_of(TANGENT[0], None),))
    want = jax.jvp(single, (W, V), (TANGENT[0], 0 * TANGENT[1]))[1]
    require_like_the_result(tangent, *want, static=None, n=None)


def tangent_of(w, v):
    layer = Layer(w, None, [v, None], width=2)
    return Pair(layer, Mutable(layer=layer, w=w, n=None, k=None))


def linear(m):
    return {"pair": Pair(2 * m.first.weight + m.second.w, [m.second.layer.parts[0] * m.second.n, m.second.n])}


@pytest.mark.parametrize("abstract", [False, True])
def test_linear_transpose(abstract):
    m = model()
    if abstract:
        m = st.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if eqx.is_inexact_array(x) else x, m)
    transpose = st.linear_transpose(lambda m: linear(m)["pair"].first + linear(m)["pair"].second[0], m)
    require_like_the_model(transpose(TANGENT[0])[0], 3 * TANGENT[0], TANGENT[0] * np.arange(2))
    transpose = st.linear_transpose(linear, m)
    gradient = transpose({"pair": Pair(TANGENT[0], [TANGENT[1], None])})[0]
    require_like_the_model(gradient, 3 * TANGENT[0], TANGENT[1] * np.arange(2))


def test_filter_jvp_with_further_arguments():
    m, x = model(), jnp.array([2.0, 3.0])
    tangents = (tangent_of(*TANGENT),)
    _, tangent = filter_jvp(lambda m, scale: m.first.weight * scale.first, (m,), tangents, scale=Pair(x, "static"))
    np.testing.assert_allclose(tangent, TANGENT[0] * x)
    _, tangent = filter_jvp(lambda m, other: m.second.w * other.first, (m,), tangents, other=Pair(m.second.w, 1))
    np.testing.assert_allclose(tangent, TANGENT[0] * W)  # an array is cut between the two
    with pytest.raises(st.errors.InconsistentSharingError, match=r"(?s)`other\.weight`: not differentiated") as caught:
        filter_jvp(lambda m, other: m.first.weight, (m,), tangents, other=m.first)
    assert caught.value.treatments == ("differentiated", "differentiated", "differentiated", "not differentiated")


@hst.composite
def operands(draw):
    """A DAG, and perhaps a module of it beside it."""
    m = draw(dags(max_nodes=5))
    return (m, m.first) if isinstance(m.first, MODULES) and draw(hst.booleans()) else (m,)


def float_paths(trees):
    return [path for path, obj, _ in paths(trees) if is_array(obj) and jnp.issubdtype(obj.dtype, jnp.floating)]


def values_at(trees, at):
    by_path = {path: obj for path, obj, _ in paths(trees)}
    return [by_path[path] for path in at]


def mixed(values):
    """Something of all values in which no two play the same part."""
    total = sum([(i + 1.0) * jnp.sin(x).sum() for i, x in enumerate(values)], start=jnp.array(0.5))
    return [total * jnp.cos(x) for x in values], total**2


def random_like(tree):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=np.shape(x)), jnp.float32), tree)


def require_close(got, want):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


def require_same_ties(got, objects):
    for i, a in enumerate(objects):
        for j, b in enumerate(objects):
            assert (got[i] is got[j]) == (a is b)


@given(operands())
def test_cotangents_are_summed_over_the_paths(args):
    at = float_paths(args)
    objects = values_at(args, at)
    want, vanilla = jax.vjp(lambda *values: mixed(values), *values_at(twin(args), at))
    out, pullback = st.vjp(lambda *models: mixed(values_at(models, at)), *args)
    require_close(jax.tree.leaves(out), jax.tree.leaves(want))
    ct = random_like(want)
    sums = {}
    for obj, each in zip(objects, vanilla(ct), strict=True):
        sums[id(obj)] = sums.get(id(obj), 0) + each  # alive in `args`
    got = values_at(pullback(ct), at)
    require_close(got, [sums[id(obj)] for obj in objects])
    require_same_ties(got, objects)


@given(operands(), hst.booleans())
def test_tangents_are_those_of_all_paths(args, linearized):
    at = float_paths(args)
    objects = values_at(args, at)
    random = random_like({str(id(obj)): obj for obj in objects})  # alive in `args`
    each = [random[str(id(obj))] for obj in objects]  # as above
    # A linear map exists before its tangents: a number in a module is static to it, and cannot have one.
    bare = st.tree.filter(args, eqx.is_inexact_array if linearized else eqx.is_inexact_array_like)
    tangents = st.tree.map(lambda x: random.get(str(id(x)), 0.0), bare)  # as above
    want = jax.jvp(lambda *values: mixed(values), tuple(values_at(twin(args), at)), tuple(each))

    def of_models(*models):
        return mixed(values_at(models, at))

    if linearized:
        out, pushforward = st.linearize(of_models, *args)
        got = out, pushforward(*tangents)
    else:
        got = st.jvp(of_models, args, tangents)
    require_close(jax.tree.leaves(got), jax.tree.leaves(want))


@given(dags())
def test_there_and_back_again(m):
    """The identity maps cotangents and tangents to themselves, ties included."""
    out, pullback = st.vjp(lambda m: m, m)
    at = float_paths(m)
    require_same_ties(values_at(out, at), values_at(m, at))
    ones = st.tree.map(jnp.ones_like, st.tree.filter(m, eqx.is_inexact_array_like))
    (back,) = pullback(ones)
    assert st.same_sharing(back, st.jvp(lambda m: m, (m,), (ones,))[1])
    require_close(st.tree.leaves(back), [np.ones_like(x) for x in st.tree.leaves(back)])


def test_cotangents_of_a_tied_result_add_up_unless_they_are_one():
    x, one, two = jnp.array([1.0, 2.0]), jnp.array([1.0, 10.0]), jnp.array([2.0, 20.0])

    def doubled(m):
        y = 2 * m.first
        return Pair(y, [y, m.second])

    _, pullback = st.vjp(doubled, Pair(x, jnp.ones(2)))
    np.testing.assert_array_equal(pullback(Pair(one, [one, one]))[0].first, 2 * one)
    np.testing.assert_array_equal(pullback(Pair(one, [two, one]))[0].first, 2 * (one + two))
    np.testing.assert_array_equal(pullback(Pair(one, [one, two]))[0].second, two)
    layer = Pair(x, x)
    _, pullback = st.vjp(lambda m: Pair(m, m), layer)
    np.testing.assert_array_equal(pullback(Pair(Pair(one, one), Pair(one, one)))[0].first, one)
    np.testing.assert_array_equal(pullback(Pair(Pair(one, two), Pair(one, two)))[0].first, one + two)
    np.testing.assert_array_equal(pullback(Pair(Pair(one, two), Pair(2 * one, two)))[0].first, 3 * one + two)
    with pytest.raises(
        st.errors.SharingMismatchError, match=r"`cotangent.first.first` and `cotangent.first.second` are added up"
    ):
        pullback(Pair(Pair(one, jnp.array(1.0)), Pair(one, one)))


def test_what_two_operands_share_has_one_gradient_but_not_outside_modules():
    w = jnp.array([1.0, 2.0])
    m = Pair(w, w)
    _, pullback = st.vjp(lambda m, again, x: m.second * again.first * x, m, m, w)
    whole, again, bare = pullback(jnp.ones(2))
    assert whole is again
    np.testing.assert_allclose(whole.first, 2 * w**2)
    np.testing.assert_allclose(bare, w**2)
    # Gradients that are one array by accident are two.
    (g,) = st.vjp(lambda m: m.first + m.second, Pair(jnp.ones(2), jnp.ones(2)))[1](jnp.ones(2))
    assert g.first is not g.second


def test_auxiliary_data_share_with_the_value():
    m = model()

    def with_aux(m):
        y = Pair(m.second.layer, 2 * m.second.w)
        return y, {"y": y, "layer": m.first, "text": Pair("text", m.second.n)}

    def require(out, aux):
        assert aux["y"] is out
        assert aux["layer"] is out.first
        assert aux["text"].first == "text"
        np.testing.assert_array_equal(aux["text"].second, [0, 1])

    for vjp in (st.vjp, filter_vjp):
        out, pullback, aux = vjp(with_aux, m, has_aux=True)
        require(out, aux)
        ct = st.tree.map(jnp.ones_like, st.tree.filter(out, eqx.is_inexact_array))
        require_like_the_model(pullback(ct)[0], [3.0, 3.0], [1.0, 1.0])
    out, tangent, aux = st.jvp(with_aux, (m,), (tangent_of(*TANGENT),), has_aux=True)
    require(out, aux)
    np.testing.assert_allclose(tangent.second, 2 * TANGENT[0])
    out, pushforward, aux = st.linearize(with_aux, m, has_aux=True)
    require(out, aux)
    np.testing.assert_allclose(pushforward(tangent_of(*TANGENT)).second, 2 * TANGENT[0])


def test_integers_outside_modules_have_the_zeros_of_vanilla_jax():
    policy = st.Policy(containers=True)
    params = {"a": jnp.ones(2), "n": jnp.arange(2)}
    zeros = np.zeros(2, float0)
    _, pullback = st.vjp(lambda p: p["a"], params, policy=policy)
    assert pullback(params["a"])[0]["n"].dtype == float0
    st.jvp(lambda p: p["a"], (params,), ({"a": params["a"], "n": zeros},), policy=policy)


def test_functions_that_cross_jit_and_vmap():
    pullback, vanilla = st.vjp(f, model())[1], jax.vjp(single, W, V)[1]
    want = vanilla(COTANGENT)
    require_like_the_model(st.jit(lambda p, ct: p(ct)[0])(pullback, cotangent(*COTANGENT)), *want)
    require_like_the_model(st.jit(pullback)(cotangent(*COTANGENT))[0], *want)
    for jit in (jax.jit, st.jit):
        again = jit(lambda p: p)(pullback)
        require_like_the_model(again(cotangent(*COTANGENT))[0], *want)
    stacked = [jnp.stack([x, 2 * x]) for x in COTANGENT]
    (gradients,) = st.vmap(pullback)(cotangent(*stacked))
    require_like_the_model(gradients, *jax.vmap(vanilla)(tuple(stacked)))
    pushforward = st.jit(lambda m: st.linearize(f, m)[1])(model())
    tangent = pushforward(tangent_of(*TANGENT))
    require_like_the_result(tangent, *jax.jvp(single, (W, V), TANGENT)[1], static=None, n=None)


def test_a_function_that_outlives_the_model_and_is_called_by_many_threads():
    w = jnp.array([1.0, 2.0])
    m = Pair(w, [w])

    def g(m):
        return jnp.sin(m.first) * m.second[0]

    _, pullback = st.vjp(g, m)
    gone = weakref.ref(m)
    del m, g
    gc.collect()
    assert gone() is None
    for gradient in at_once(lambda _: pullback(jnp.ones(2))[0]):
        assert gradient.first is gradient.second[0]
        np.testing.assert_allclose(gradient.first, np.sin(w) + w * np.cos(w), rtol=1e-6)


def test_without_modules_all_is_vanilla():
    value, pullback = st.vjp(jnp.sin, 1.0)
    assert type(pullback) is type(jax.vjp(jnp.sin, 1.0)[1])
    assert value == jnp.sin(1.0)
    assert pullback(1.0) == jax.vjp(jnp.sin, 1.0)[1](1.0)
    assert st.jvp(jnp.sin, (1.0,), (2.0,)) == jax.jvp(jnp.sin, (1.0,), (2.0,))
    assert type(st.linearize(jnp.sin, 1.0)[1]) is type(jax.linearize(jnp.sin, 1.0)[1])
    assert st.linear_transpose(lambda x: 2 * x, 1)(3) == (6,)


def test_without_ties_values_are_vanilla():
    m = Record(jnp.asarray(2.0), 1.5)  # both are weakly typed

    def g(m):
        return Mutable(a=m.left * m.right, b=m.left.astype(jnp.bfloat16))

    out, pullback = st.vjp(g, m)
    want, vanilla = jax.vjp(g, m)
    for got, wanted in (
        (out, want),
        (pullback(want), vanilla(want)),
        (st.jvp(g, (m,), (m,)), jax.jvp(g, (m,), (m,))),
        (st.linearize(g, m)[1](m), jax.linearize(g, m)[1](m)),
    ):
        assert jax.tree.structure(got) == jax.tree.structure(wanted)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            assert type(a) is type(b)
            assert jax.typeof(a) == jax.typeof(b)
            np.testing.assert_array_equal(a, b)


def pair():
    x = jnp.array([1.0, 2.0])
    return Pair(x, [x, 3])


GOOD = Pair(W, [W, None])

BAD = {
    "two objects": (Pair(W, [V, None]), ("tangents[0].first", "tangents[0].second[0]")),
    "None for a leaf": (Pair(W, [None, None]), ("tangents[0].second[0]",)),
    "an array for what is static": (Pair(W, [W, W]), ("tangents[0].second[1]",)),
    "another number": (Pair(W, [W, 4]), ("tangents[0].second[1]",)),
    "another class": (Record(W, [W, None]), ("tangents[0]",)),
    "another length": (Pair(W, [W]), ("tangents[0].second",)),
    "a tuple for a list": (Pair(W, (W, None)), ("tangents[0].second",)),
    "an array for the module": (W, ("tangents[0]",)),
    "a container around it": ([GOOD], ("tangents[0]",)),
}


def test_tangents_and_cotangents_of_another_shape():
    _, pushforward = st.linearize(lambda m: m.first, pair())
    _, pullback = st.vjp(lambda m: {"out": m}, pair())
    transpose = st.linear_transpose(lambda m: {"out": m}, pair())
    forward = {"jvp": lambda bad: st.jvp(lambda m: m.first, (pair(),), (bad,)), "linearize": pushforward}
    backward = {"vjp": lambda bad: pullback({"out": bad}), "linear_transpose": lambda bad: transpose({"out": bad})}
    for case, (bad, where) in BAD.items():
        for name, run in (forward | ({} if case == "two objects" else backward)).items():
            paths = where if name in forward else tuple(p.replace("tangents[0]", "cotangent['out']") for p in where)
            with pytest.raises(st.errors.SharingMismatchError) as caught:
                run(bad)
            assert caught.value.paths == paths, (case, name)
            assert all(f"`{path}`" in str(caught.value) for path in paths), (case, name)
    np.testing.assert_array_equal(pushforward(GOOD), W)
    for back in (pullback, transpose):
        for good in (GOOD, Pair(W, [W, 3])):
            np.testing.assert_array_equal(back({"out": good})[0].first, W)
        with pytest.raises(TypeError):
            back({"out": GOOD}, {"out": GOOD})


def test_operands_that_are_missing_or_swapped():
    m, other = pair(), Record(W, 2.0)

    def g(m, other):
        return m.first * other.left

    with pytest.raises(st.errors.SharingMismatchError, match=r"`tangents` .* a `tuple` with 2 children"):
        st.jvp(g, (m, other), (GOOD,))
    with pytest.raises(st.errors.SharingMismatchError, match=r"must be a `Pair`.* but is a `Record`"):
        st.jvp(g, (m, other), (other, GOOD))
    with pytest.raises(st.errors.SharingMismatchError, match=r"`tangents` .* a `tuple` with 2 children"):
        st.linearize(g, m, other)[1](GOOD)
    with pytest.raises(TypeError, match="not as a `Pair` and a `Pair`"):
        filter_jvp(g, m, GOOD)
    with pytest.raises(TypeError, match="two-element tuple, but got type .*Pair"):
        st.vjp(lambda m: m, m, has_aux=True)


def test_a_tie_that_is_lost_inside():
    m = pair()
    for run in (lambda g: st.vjp(g, m), lambda g: st.linearize(g, m), lambda g: st.jvp(g, (m,), (GOOD,))):
        with pytest.warns(st.UntiedWarning, match=r"(?s)\.first.*\.second\[0\]"):
            run(lambda m: jax.tree.map(lambda x: 2 * x, m))
    meant, _ = st.vjp(lambda m: st.untie(m), m)
    st.jit(lambda m: m)(meant)


def test_a_tracer_in_a_static_leaf():
    with pytest.raises(st.errors.StaticTracerError):
        st.vjp(lambda m: Layer(m.first, lambda: m.first, 3), pair())
    m = Mutable(x=jnp.ones(2))
    _, pullback = st.vjp(lambda m: m, m)
    m.me = m
    with pytest.raises(st.errors.CycleError):
        pullback(m)
