"""Functions with rules of their own: against what the same rules give of arrays given once, summed by hand."""

import copy
import functools
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

import sharedtree as st
from tests.strategies import Pair, Record, dags, partition, unique_arrays

custom_gradient = st.preserve_identities(jax.custom_gradient)

FACTOR = 3.0
"""The rules are wrong by this factor, so that one sees whether they were used."""


class Net(eqx.Module):
    embed: jax.Array
    head: jax.Array
    steps: jax.Array
    act: Callable[..., Any] = jnp.tanh


def tied(w=None):
    w = jnp.array([0.3, -0.7]) if w is None else w
    return Net(w, w, jnp.arange(2))


X = jnp.array([0.5, 2.0])


def value(net, x):
    assert net.embed is net.head
    return net.act(net.embed * x) * net.head


def parts_of_gradient(net, x, y=1.0):
    """The cotangents of `embed`, `head` and `x`."""
    slope = (1 - jnp.tanh(net.embed * x) ** 2) * net.head * y
    return slope * x * FACTOR, jnp.tanh(net.embed * x) * y * FACTOR, slope * net.embed * FACTOR


def sum_by_hand(net, x):
    """The gradient of the tied leaf."""
    embed, head, _ = parts_of_gradient(net, x)
    return embed + head


def product_of_net(net):
    return net.embed * net.head


def value_of_array(w, x):
    return jnp.tanh(w * x) * w


# The same rules as functions of modules, for each of the ways to give them. Those that can be pickled have names.


def forward(f, net, x):
    return f(net, x), (net, {"x": x})


def backward(kept, y):
    net, x = kept[0], kept[1]["x"]
    assert net.embed is net.head
    assert net.act is jnp.tanh
    embed, head, dx = parts_of_gradient(net, x, y)
    return Net(embed, head, None, None), dx


def pushed(primals, tangents):
    (net, x), (dot, x_dot) = primals, tangents
    assert net.embed is net.head
    assert dot.embed is dot.head
    assert dot.steps is dot.act is None
    dots = dot.embed, jnp.zeros_like(x) if x_dot is None else x_dot
    return value(net, x), FACTOR * jax.jvp(value_of_array, (net.embed, x), dots)[1]


def of_net(dot, out, net, x):
    assert dot.embed is dot.head
    return FACTOR * jax.jvp(lambda w: value_of_array(w, x), (net.embed,), (dot.head,))[1]


def of_x(dot, out, net, x):
    return FACTOR * jax.jvp(lambda x: value_of_array(net.embed, x), (x,), (dot,))[1]


def with_rules(wrap, f, method, *rules):
    made = wrap(f)
    getattr(made, method)(*rules)
    return made


def by_vjp():
    made = st.custom_vjp(value)
    # Of the wrapped function itself.
    made.defvjp(functools.partial(forward, made), backward)
    return made


MAKERS = {
    "custom_vjp": by_vjp,
    "custom_jvp": lambda: with_rules(st.custom_jvp, value, "defjvp", pushed),
    "custom_jvp, one for each": lambda: with_rules(st.custom_jvp, value, "defjvps", of_net, of_x),
    "custom_gradient": lambda: custom_gradient(lambda net, x: (value(net, x), lambda y: backward((net, {"x": x}), y))),
}


def made_by(kind, change=lambda f: f):
    """(model, x) → the value, under rules."""
    return change(MAKERS[kind]())


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.slow
def test_under_our_transforms(kind):
    f, net = made_by(kind), tied()
    want, other = (sum_by_hand(net, x) for x in (X, 2 * X))
    loss = lambda net, x: f(net, x).sum()
    for transformed in (st.grad(loss), st.jit(st.grad(loss)), st.grad(st.jit(loss))):
        got = transformed(net, X)
        assert got.embed is got.head
        assert got.steps is got.act is None
        np.testing.assert_allclose(got.embed, want, rtol=1e-6)
    np.testing.assert_allclose(f(net, X), value_of_array(net.embed, X), rtol=1e-6)
    several = st.vmap(st.grad(loss), in_axes=(None, 0))(net, jnp.stack([X, 2 * X]))
    np.testing.assert_allclose(several.head, jnp.stack([want, other]), rtol=1e-6)
    _, ys = st.scan(lambda net, x: (net, st.grad(loss)(net, x)), net, jnp.stack([X, 2 * X]))
    np.testing.assert_allclose(ys.head, jnp.stack([want, other]), rtol=1e-6)


@given(dag=dags())
def test_residuals_and_gradients_have_the_sharing_of_the_operand(dag):
    seen = []

    @st.custom_vjp
    def f(dag):
        return sum((x**2).sum() for x in unique_arrays(dag) if jnp.issubdtype(x.dtype, np.inexact)) + 0.0

    def fwd(dag):
        seen.append(partition(dag))
        return f(dag), dag

    def bwd(dag, y):
        seen.append(partition(dag))
        once = st.tree.map(lambda x: x * y * FACTOR if eqx.is_inexact_array_like(x) else None, dag)
        return (st.retie(once, like=dag),)

    f.defvjp(fwd, bwd)
    given = Pair(dag, 1.0)
    gradient = st.grad(lambda pair: f(pair.first))(given)
    if any(jnp.issubdtype(x.dtype, np.inexact) for x in unique_arrays(dag)):
        assert set(seen) == {partition(dag)}
    for one, two in zip(*(jax.tree.leaves(t, is_leaf=lambda x: x is None) for t in (gradient.first, dag)), strict=True):
        if eqx.is_inexact_array(two):
            np.testing.assert_allclose(one, FACTOR * two, rtol=1e-6)


def with_bwd(bwd, f=product_of_net, **options):
    made = st.custom_vjp(f)
    made.defvjp(lambda *args: (made(*args), args), bwd, **options)
    return made


def test_two_objects_are_added():
    one, two = jnp.ones(2), jnp.full(2, 2.0)
    for parts, want in (((one, two), 3), ((None, two), 2), ((None, None), 0)):
        f = with_bwd(lambda kept, y, parts=parts: (Net(*parts, None, None),))
        assert st.grad(lambda net, f=f: f(net).sum())(tied()).embed.tolist() == [want, want]


def gradient_of(net, y):
    return st.grad(lambda net: (product_of_net(net) * y).sum())(net)


def in_both(g):
    return Net(g, g, None, None)


SHARES = {
    "by hand": lambda net, y: in_both(net.head * y),
    "the residuals": lambda net, y: net,
    "made of them": lambda net, y: st.tree.map(lambda x: x * y if eqx.is_inexact_array(x) else None, net),
    "the gradient of something else": lambda net, y: in_both(gradient_of(Net(net.head, y, None, None), 1).head),
    "out of another trace": lambda net, y: st.jit(gradient_of)(net, y),
}
WHOLE = {
    "a gradient": gradient_of,
    "made of one": lambda net, y: st.tree.map(lambda g: g * y, gradient_of(net, 1)),
    "a pullback": lambda net, y: st.vjp(product_of_net, net)[1](y)[0],
    "its arrays": lambda net, y: in_both(gradient_of(net, y).head),
}


def by_custom_gradient(bwd):
    return custom_gradient(lambda net: (product_of_net(net), lambda y: bwd(net, y)))


def by_custom_vjp(bwd):
    return with_bwd(lambda kept, y: (bwd(kept[0], y),))


@pytest.mark.parametrize("made", [by_custom_vjp, by_custom_gradient])
@pytest.mark.parametrize("which", [*SHARES, *WHOLE])
def test_one_object_at_two_paths_is_no_half_a_gradient(which, made):
    """It counts once if differentiation made it so; else its author says whether it is each path's share."""
    bwd = (SHARES | WHOLE)[which]

    def gradient(bwd):
        return st.grad(lambda net: made(bwd)(net).sum())(tied())

    once = bwd(tied(), jnp.ones(2)).embed
    if which in SHARES:
        for transform in (lambda f: f, st.jit):
            with pytest.raises(
                st.errors.SharingMismatchError, match="the gradient of each path or already their sum"
            ) as error:
                transform(lambda: gradient(bwd))()
            assert [path.rpartition(".")[2] for path in error.value.paths] == ["embed", "head"]
        shares = gradient(lambda net, y: st.untie(bwd(net, y)))
        np.testing.assert_allclose(shares.head, 2 * once)
        bwd = lambda net, y, rule=bwd: st.retie(rule(net, y), like=net)
    np.testing.assert_allclose(gradient(bwd).head, once)


def test_one_module_at_two_paths_is_no_half_a_gradient():
    layer = tied()
    f = with_bwd(
        lambda kept, y: (lambda g: (Pair(g, {"n": g}),))(Net(y, None, None, None)),
        lambda two: two.first.embed * two.second["n"].head,
    )
    with pytest.raises(st.errors.SharingMismatchError, match="the gradient of each path or already their sum") as error:
        st.grad(lambda two: f(two).sum())(Pair(layer, {"n": layer}))
    assert error.value.paths == ("cotangents[0].first", "cotangents[0].second['n']")


def test_one_module_as_two_operands():
    def f(one, two):
        assert one is two
        return one.embed * two.head

    net = tied()
    y = jnp.full(2, 5.0)
    for back, want in (((y, 1 * y), 10), ((y, None), 5), ((y, jnp.ones(2)), 6)):

        def bwd(kept, _, back=back):
            assert kept[0] is kept[1]
            return tuple(None if g is None else Net(g, None, None) for g in back)

        made = with_bwd(bwd, f)
        assert st.grad(lambda net, made=made: made(net, net).sum())(net).embed.tolist() == [want, want]


def test_none_for_all_of_an_operand_and_for_a_part_of_it():
    f = with_bwd(lambda kept, y: (None, y), lambda net, x: net.embed * x)
    gradient, dx = st.grad(lambda net, x: f(net, x).sum(), argnums=(0, 1))(tied(), X)
    assert gradient.embed.tolist() == [0, 0]
    assert dx.tolist() == [1, 1]
    g = with_bwd(lambda kept, y: (Pair(None, {"n": Net(y, None, None)}),), lambda two: two.second["n"].embed)
    gradient = st.grad(lambda two: g(two).sum())(Pair(tied(), {"n": tied()}))
    assert gradient.second["n"].head.tolist() == [1, 1]
    assert gradient.first.head.tolist() == [0, 0]


def test_the_cotangent_of_a_tied_result_is_tied():
    def bwd(kept, y):
        assert y["two"].first is y["two"].second
        assert y["two"].first.embed is y["two"].first.head
        assert y["two"].first.steps is y["two"].first.act is None
        np.testing.assert_allclose(y["two"].first.embed, [1 + 10 + 100 + 1000] * 2)
        return (Net(y["two"].first.embed, None, None),)

    def f(net):
        return {"two": Pair(net, net)}

    made = with_bwd(bwd, f)

    def loss(net):
        two = made(net)["two"]
        assert two.first is two.second
        return (two.first.embed + 10 * two.first.head + 100 * two.second.embed + 1000 * two.second.head).sum()

    assert st.grad(loss)(tied()).head.tolist() == [1111, 1111]


def untied_result(two):
    return Record(two.first * 1, two.second * 1)


def ruled(kind, f, back):
    """A function of one model, under a rule that makes its cotangent of that of the result."""
    if kind == "custom_gradient":
        return custom_gradient(lambda model: (f(model), back))
    return with_rules(st.custom_vjp, f, "defvjp", lambda model: (f(model), None), lambda kept, y: (back(y),))


@pytest.mark.parametrize("kind", ["custom_vjp", "custom_gradient"])
def test_cotangents_that_happen_to_be_equal_are_two(kind):
    # JAX has one tracer for the cotangents of both terms of a sum.
    f = ruled(kind, untied_result, lambda y: Pair(y.left, y.right))
    bare = st.custom_vjp(lambda two: (two.first * 1, two.second * 1))
    bare.defvjp(lambda two: (bare(two), None), lambda kept, y: (Pair(*y),))
    want = jax.grad(lambda w: (w * 1 + w * 1).sum())(X)
    for loss in (
        lambda two: f(two).left.sum() + f(two).right.sum(),
        lambda two: sum(jax.tree.leaves(f(two))).sum(),
        lambda two: sum(bare(two)).sum(),
    ):
        for transformed in (st.grad(loss), st.jit(st.grad(loss))):
            np.testing.assert_allclose(transformed(Pair(X, X)).first, want)


def test_what_happens_to_be_equal_can_be_mapped_with_what_is_not():
    f = st.custom_vjp(lambda two: Pair(two.first * 1, two.second * 1))
    f.defvjp(lambda two: (f(two), two), lambda two, y: (st.tree.map(lambda dy, p: dy * p, y, two),))
    g = st.custom_jvp(lambda two: Pair(two.first**2, two.second**2))
    g.defjvp(lambda p, t: (g(*p), st.tree.map(lambda dot, x: 2 * dot * x, t[0], p[0])))
    want = jax.jvp(lambda x: x**2, (X,), (X,))[1]
    for transform in (lambda f: f, st.jit):
        got = transform(st.grad(lambda two: sum(jax.tree.leaves(f(two))).sum()))(Pair(X, 2 * X))
        np.testing.assert_allclose(got.first, X)
        np.testing.assert_allclose(got.second, 2 * X)
        moved = transform(lambda x, dx: st.jvp(lambda x: g(Pair(x, x * 1)), (x,), (dx,))[1])(X, X)
        np.testing.assert_allclose(moved.first, want)
        np.testing.assert_allclose(moved.second, want)


def one_leaf(parts, w):
    """The gradient of vanilla JAX for a rule that gives the sum of these cotangents, each of the leaf's type."""
    vanilla = jax.custom_vjp(lambda w: w * w)
    parts = [jnp.asarray(part, w.dtype) for part in parts]
    vanilla.defvjp(lambda w: (w * w, None), lambda _, y: (functools.reduce(lambda a, b: a + b, parts),))
    return jax.grad(lambda w: vanilla(w).sum())(w)


NUMBER, HALF = jnp.float32(3), jnp.ones(2, jnp.bfloat16)
THIRD, HALF_THIRD = jnp.full(2, 1 / 3, jnp.float32), jnp.full(2, 1 / 3, jnp.bfloat16)
# A leaf, and what a rule gives for its two places. Python has one object for some equal numbers, and two for others.
OF_OTHER_TYPES = [
    (NUMBER, float("1.5"), float("1.5")),
    (NUMBER, *(np.float32(1.5),) * 2),
    (NUMBER, *(1.5,) * 2),
    (NUMBER, *(int("300"),) * 2),
    (NUMBER, np.int32(3), 4.5),
    (NUMBER, True, jnp.float32(2)),
    *((leaf, *parts) for leaf in (X, HALF) for parts in ((THIRD, HALF_THIRD), (HALF_THIRD, THIRD))),
    (X, jnp.full(2, 3), jnp.array([True, False])),
]


def test_cotangents_of_any_type_are_added_at_each_path_in_that_of_the_leaf():
    for leaf, *parts in OF_OTHER_TYPES:
        f = ruled("custom_vjp", lambda two: (two.first * two.second).sum(), lambda y, parts=parts: Pair(*parts))
        got = st.grad(f)(Pair(leaf, leaf)).first
        want = one_leaf(parts, leaf)
        assert got.dtype == want.dtype == leaf.dtype
        np.testing.assert_array_equal(got, want)
    _, pullback = st.vjp(lambda two: Pair(*[two.first * 1] * 2), Pair(NUMBER, NUMBER))
    assert pullback(Pair(float("1.5"), float("1.5")))[0].first == 3
    # Of the same integers, for two leaves, and where one has no gradient.
    gradient = st.jit(st.grad(f))
    for right in (2 * X, jnp.arange(2)):
        got = gradient(Pair(X, right))
        np.testing.assert_allclose(got.first, one_leaf(parts[:1], X))
        if right.dtype == X.dtype:
            np.testing.assert_allclose(got.second, one_leaf(parts[1:], X))
        else:
            assert got.second is None


def test_equal_numbers_are_one_tangent():
    w = jnp.float32(3)
    for one, two in ((0.5, float("0.5")), (np.float32(0.5), np.float32(0.5)), (float("nan"), float("nan"))):
        want = np.asarray(jax.jvp(lambda w: w * w, (w,), (jnp.float32(one),))[1])
        np.testing.assert_allclose(st.jvp(lambda pair: pair.first**2, (Pair(w, w),), (Pair(one, two),))[1], want)
        f = st.custom_jvp(lambda pair: pair)
        f.defjvp(lambda p, t, one=one, two=two: (f(*p), Pair(one, two)))
        np.testing.assert_allclose(st.jvp(f, (Pair(w, w),), (Pair(w, w),))[1].first, one)
    with pytest.raises(st.errors.SharingMismatchError, match="2 objects"):
        st.jvp(lambda two: two.first, (Pair(w, w),), (Pair(0.5, 1.5),))


def test_symbolic_zeros():
    def f(net, x):
        return net.embed * x, net

    made = st.custom_vjp(f)

    def fwd(net, x):
        assert type(net.embed) is CustomVJPPrimal
        assert net.embed is net.head
        assert net.embed.perturbed
        assert not net.steps.perturbed
        assert not x.perturbed
        return made(Net(net.embed.value, net.head.value, net.steps.value), x.value), x.value

    def bwd(x, y):
        assert type(y[1].embed) is SymbolicZero
        assert y[1].steps is None
        return Net(y[0] * x, y[1].head, None), None

    made.defvjp(fwd, bwd, symbolic_zeros=True)
    np.testing.assert_allclose(st.grad(lambda net: made(net, X)[0].sum())(tied()).embed, X)

    g = st.custom_jvp(lambda net, x: net.embed * x)

    @functools.partial(g.defjvp, symbolic_zeros=True)
    def rule(primals, tangents):
        assert type(tangents[1]) is SymbolicZero
        return g(*primals), tangents[0].embed * primals[1]

    np.testing.assert_allclose(st.grad(lambda net: g(net, X).sum())(tied()).embed, X)


def test_a_symbolic_zero_for_a_whole_module():
    f = st.custom_vjp(lambda net, x: (x, net.embed * net.head))
    # The first result does not reach the loss, so its cotangent is a symbolic zero.
    f.defvjp(
        lambda net, x: ((x.value, net.embed.value * net.head.value), None),
        lambda _, y: (y[0], y[1]),
        symbolic_zeros=True,
    )
    scalar = jnp.float32(2)
    gradient = st.grad(lambda net, x: f(net, x)[1], argnums=(0, 1))(Net(scalar, scalar, jnp.arange(2)), scalar + 1)
    assert (gradient[0].embed, gradient[0].head, gradient[1]) == (0, 0, 1)


def test_options_of_the_rules():
    f = st.custom_vjp(value)
    f.defvjp(lambda net, x: (f(net, x), net), lambda net, y: (Net(y, None, None), None), optimize_remat=True)
    loss = lambda net: f(net, X).sum()
    assert st.grad(loss)(tied()).embed.tolist() == [1, 1]
    assert st.grad(st.checkpoint(loss))(tied()).embed.tolist() == [1, 1]
    with pytest.raises(NotImplementedError, match="symbolic zeros"):
        f.defvjp(value, value, symbolic_zeros=True, optimize_remat=True)


@pytest.mark.parametrize("options", [{"nondiff_argnums": (0, 2)}, {"nondiff_argnames": ("g", "own")}])
def test_arguments_that_are_not_differentiated(options):
    own = tied()

    def f(g, net, own, x=2.0):
        assert own.embed is own.head
        return g(net.embed) * x

    made = st.custom_vjp(f, **options)

    def bwd(g, other, kept, y):
        assert g is jnp.sin
        assert other is own
        return Net(y * kept, y * kept, None), None

    def fwd(g, net, other, x):
        assert other is own
        return made(g, net, other, x), x

    made.defvjp(fwd, bwd)
    loss = lambda net: made(jnp.sin, net, own=own).sum()
    assert st.grad(loss)(tied()).embed.tolist() == [4, 4]  # the default is an argument, too; both paths
    jvp = st.custom_jvp(**options)(f)

    @jvp.defjvp
    def rule(g, other, primals, tangents):
        assert g is jnp.sin
        assert other.embed is other.head
        (net, x), (dot, _) = primals, tangents
        assert dot.embed is dot.head
        return jvp(g, net, other, x), dot.embed * 7

    net = tied()
    assert st.grad(lambda net: jvp(jnp.sin, net, own).sum())(net).embed.tolist() == [7, 7]
    assert st.grad(lambda both: jvp(jnp.sin, *both).sum())((net, own))[0].embed.tolist() == [7, 7]
    with pytest.raises(st.errors.InconsistentSharingError, match="is static"):
        jvp(jnp.sin, net, net)


def test_results_that_are_modules():
    f = st.custom_jvp(lambda net: {"net": net, "y": net.embed})
    f.defjvp(
        lambda primals, dots: (f(*primals), {"net": Net(dots[0].embed, dots[0].head, None), "y": 2 * dots[0].embed})
    )
    nothing, none = (st.custom_jvp(lambda net: {"net": net, "y": net.embed}) for _ in range(2))
    nothing.defjvp(lambda primals, tangents: (nothing(*primals), None))
    none.defjvps(None)
    for g, want in ((f, 3), (nothing, 0), (none, 0)):
        gradient = st.grad(lambda net, g=g: (g(net)["net"].embed + g(net)["y"]).sum())(tied())
        assert gradient.embed.tolist() == [want, want]
    each = st.custom_jvp(lambda net, x: Pair(net, x))
    each.defjvps(lambda dot, out, net, x: Pair(dot, None), lambda dot, out, net, x: Pair(None, 5 * dot))
    loss = lambda net, x: (each(net, x).first.head + each(net, x).second).sum()
    gradients = st.grad(loss, argnums=(0, 1))(tied(), X)
    assert gradients[0].embed.tolist() == [1, 1]
    assert gradients[1].tolist() == [5, 5]


def test_a_bare_cotangent_of_the_only_operand():
    f = custom_gradient(lambda net: (net.embed * net.head, lambda y: Net(y, 2 * y, None)))
    assert st.grad(lambda net: f(net).sum())(tied()).embed.tolist() == [3, 3]
    assert jax.grad(custom_gradient(lambda x: (x * 2, lambda y: 5 * y)))(1.0) == 5


def test_what_equinox_has_of_its_own_is_refused_with_what_takes_its_modules():
    for transform, name in (
        (eqx.filter_custom_vjp, "custom_vjp"),
        (eqx.filter_custom_jvp, "custom_jvp"),
        (eqx.filter_pmap, "pmap"),
    ):
        with pytest.raises(TypeError, match=rf"    f = sharedtree\.{name}\(f\)"):
            st.preserve_identities(transform)(lambda net: net.embed)


def test_it_looks_like_the_function():
    class Scale(eqx.Module):
        by: jax.Array

        @st.custom_vjp
        def __call__(self, net):
            """Scales."""
            return self.by * net.embed

    Scale.__call__.defvjp(lambda self, net: (self(net), None), lambda _, y: (None, Net(y, None, None)))
    scale = Scale(jnp.array(3.0))
    assert scale(tied()).tolist() == pytest.approx([0.9, -2.1])
    assert st.grad(lambda net: scale(net).sum())(tied()).embed.tolist() == [1, 1]
    f = st.custom_vjp(value)
    assert (f.__name__, f.__wrapped__) == ("value", value)
    assert vars(Scale)["__call__"].__doc__ == "Scales."


def test_a_tied_leaf_is_one_operand():
    f = by_vjp()
    jaxpr = jax.make_jaxpr(lambda w, x: f(tied(w), x))(jnp.ones(2), X)
    (call,) = [eqn for eqn in jaxpr.jaxpr.eqns if eqn.primitive.name.startswith("custom_vjp_call")]
    assert len(call.invars) == 3  # with the integers


class Product:
    """Something to call that can be copied."""

    def __call__(self, net, x):
        return net.embed * net.head * x


def pickled(f):
    return pickle.loads(pickle.dumps(f))


def test_copies_have_the_rules():
    net = tied()
    want = sum_by_hand(net, X)
    for kind in ("custom_vjp", "custom_jvp"):
        for change in (copy.copy, copy.deepcopy, lambda f: copy.deepcopy([f])[0], pickled):
            f = made_by(kind, change)
            np.testing.assert_allclose(st.grad(lambda net, f=f: f(net, X).sum())(net).embed, want, rtol=1e-6)
    made = st.custom_vjp(Product())
    assert copy.deepcopy(made).rules_given is None
    made.defvjp(functools.partial(forward, made), backward)
    again = copy.deepcopy(made)
    assert again.rules_given[0].args[0] is again is not made
    np.testing.assert_allclose(again(net, X), net.embed * net.head * X)


@pytest.mark.slow
def test_nothing_is_kept_alive():
    f = by_vjp()
    gradient = jax.jit(jax.grad(lambda w, x: f(tied(w), x).sum()))
    array = jnp.array([0.1, 0.2])
    gradient(array, X)
    f(tied(array), X)
    jax.grad(lambda w: f(tied(w), X).sum())(array)
    gone = weakref.ref(array)
    del array
    gc.collect()
    assert gone() is None
    with jax.checking_leaks():
        st.grad(st.jit(lambda net: f(net, X).sum()))(tied())


def test_a_tie_that_is_lost_warns():
    made = with_bwd(lambda kept, y: (None,), lambda two: Pair(jnp.array(1.0), jax.tree.map(lambda x: x * 1, two)))
    with pytest.warns(st.UntiedWarning, match="test_rules"):
        made(Pair(X, X))


def test_second_derivatives():
    f = st.custom_jvp(lambda net: net.embed * net.head)
    f.defjvp(lambda primals, tangents: (f(*primals), 2 * primals[0].embed * tangents[0].embed))
    g = lambda w: f(Net(w, w, None)).sum()
    assert jax.grad(jax.grad(g))(3.0) == 2
    assert jax.jvp(jax.grad(g), (3.0,), (1.0,))[1] == 2


def raised(run):
    with pytest.raises(Exception) as caught:  # noqa: PT011 -- what it is, the caller asks
        run()
    text = str(caught.value)
    assert not any(word in text for word in ("Packed", "Operand", "PyTreeDef")), text
    return caught.value


def refused(bwd, f=product_of_net, *more, model=None):
    made = with_bwd(bwd, f)
    of_first = lambda net: jax.tree.leaves(made(net, *more))[0].sum()
    return raised(lambda: st.grad(of_first)(tied() if model is None else model))


def test_cotangents_of_another_shape():
    for back, what in (((), "0 cotangents"), ((None, None), "2 cotangents"), (tied(), "a `Net`")):
        error = refused(lambda kept, y, back=back: back)
        assert type(error) is st.errors.SharingMismatchError
        assert isinstance(error, TypeError)
        assert f"returned {what}, but `product_of_net` has 1 differentiated argument." in str(error)
    for back, path in (
        (Pair(X, X), "cotangents[0]"),
        (Net(Pair(X, X), X, None), "cotangents[0].embed"),
        (Net(X, "text", None), "cotangents[0].head"),
        ({"embed": X}, "cotangents[0]"),
    ):
        error = refused(lambda kept, y, back=back: (back,))
        assert isinstance(error, st.errors.SharingMismatchError)
        assert error.paths == (path,)
        assert f"`{path}`" in str(error)
    error = refused(lambda kept, y: (Net(X, jnp.ones(3), None),))
    assert error.paths == ("cotangents[0].embed", "cotangents[0].head")
    assert "(2,) and (3,)" in str(error)
    assert "net.embed" in str(refused(lambda kept, y: (Net(jnp.ones(3), None, None),)))
    # Beside modules, and around them.
    error = refused(lambda kept, y: ((y, y), y), lambda net, x: net["n"].embed * x, X, model={"n": tied()})
    assert error.paths == ("cotangents[0]",)
    assert refused(lambda kept, y: (None, (y, y)), lambda net, x: net.embed * x, X).paths == ("cotangents[1]",)


def test_a_forward_rule_that_returns_another_structure():
    cases = [
        (lambda net: Pair(net, net), lambda net: Pair(net, eqx.tree_at(lambda n: n.head, net, X)), "`Net`"),
        (lambda net: Pair(net.embed, net.embed), lambda net: Pair(net.embed, net.embed * 1), "array"),
        (lambda net: Pair(net.embed, net.embed * 1), lambda net: Pair(net.embed, net.embed), "array"),
        (lambda net: Pair(net.embed, 1), lambda net: Pair(net.embed, 2), "static value"),
        (lambda net: Pair(net.embed, net), lambda net: Pair(net.embed, (net,)), "`tuple`"),
        (lambda net: (net, net.embed), lambda net: (Pair(net, 1), net.embed), "`Pair`"),
        (lambda net: [net, net.embed], lambda net: (net, net.embed), "`tuple`"),
    ]
    quiet = st.Policy(on_untie="ignore")
    for f, other, what in cases:
        vjp, jvp = st.custom_vjp(f, policy=quiet), st.custom_jvp(f, policy=quiet)
        vjp.defvjp(lambda net, other=other: (other(net), None), lambda kept, y: (None,))
        jvp.defjvp(lambda primals, tangents, other=other: (other(*primals), None))
        for made in (vjp, jvp):
            loss = st.jit(lambda net, made=made: jax.tree.leaves(made(net))[0].sum())
            error = raised(lambda loss=loss: st.grad(loss)(tied()))
            assert isinstance(error, st.errors.SharingMismatchError), error
            assert what in str(error)


def test_a_forward_rule_that_returns_another_type():
    def f(net):
        return net, Pair(net.embed, net.head + 1)

    made = st.custom_vjp(f)
    made.defvjp(lambda net: ((net, Pair(net.embed, jnp.ones(3))), None), lambda kept, y: (None,))
    assert "32[3])" in str(raised(lambda: st.grad(st.jit(lambda net: made(net)[0].embed.sum()))(tied())))
    made.defvjp(lambda net: 1.0, lambda kept, y: (None,))
    assert "must produce a pair" in str(raised(lambda: st.grad(lambda net: made(net)[0].embed.sum())(tied())))


def test_tangents_that_are_not_tied():
    f = st.custom_jvp(lambda net: net)
    f.defjvp(lambda primals, tangents: (f(*primals), Net(tangents[0].embed, tangents[0].embed * 1, None)))
    loss = lambda net: f(net).embed.sum()
    error = raised(lambda: st.grad(loss)(tied()))
    assert isinstance(error, st.errors.SharingMismatchError)
    assert error.paths == ("tangent.embed", "tangent.head")
    f.defjvp(lambda primals, tangents: (f(*primals), tangents[0]))
    assert st.grad(loss)(tied()).embed.tolist() == [1, 1]
    twice = st.custom_jvp(lambda net: Pair(net, net))
    twice.defjvp(lambda primals, tangents: (twice(*primals), Pair(tangents[0], None)))
    error = raised(lambda: st.grad(lambda net: twice(net).first.embed.sum())(tied()))
    assert error.paths == ("tangent.first.embed", "tangent.second.embed")


def test_logs_of_a_backward_pass():
    f = jax.custom_vjp(lambda dag: product_of_net(dag.tree))
    if not hasattr(jax.custom_vjp, "defvjp_with_logs"):
        return
    f.defvjp_with_logs(lambda dag: (f(dag), dag), lambda dag, y: ((jax.tree.map(lambda w: 2 * w * y, dag),), {"y": y}))
    value, pullback = st.vjp(lambda net: f(st.Dag(net)), tied())
    for again in (pullback, st.jit(lambda pullback: pullback)(pullback)):
        (cotangent,), logs = again.with_logs(jnp.ones_like(value))
        assert cotangent.embed is cotangent.head
        assert cotangent.embed.tolist() == pullback(jnp.ones_like(value))[0].embed.tolist()
        assert logs["y"].tolist() == [1, 1]


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)])
def test_a_rule_for_batches(axes):
    """Against the same product under plain `vmap`; the rule is wrong by a factor, so that one sees that it was used."""

    def product(net, x):
        y = net.embed * net.head * x
        return Pair(y, y)

    f = st.preserve_identities(custom_vmap)(product)

    @f.def_vmap
    def rule(size, batched, net, x):
        assert size == 4
        assert net.embed is net.head
        assert [batched[0].embed, batched[0].head, batched[1]] == [axes[0] == 0, axes[0] == 0, axes[1] == 0]
        y = FACTOR * st.vmap(product, in_axes=axes)(net, x).first
        return Pair(y, y), Pair(True, True)

    w = jnp.ones((4, 2) if axes[0] == 0 else 2)
    net, x = Net(w, w, jnp.arange(4)), jnp.arange(4.0) if axes[1] == 0 else 2.0
    found = st.vmap(f, in_axes=axes)(net, x)
    assert found.first is found.second
    assert np.array_equal(found.first, FACTOR * st.vmap(product, in_axes=axes)(net, x).first)
    f.def_vmap(lambda size, batched, net, x: (Pair(net.embed, net.embed), Pair(True, False)))
    assert raised(lambda: st.vmap(f, in_axes=axes)(net, x)).paths == (".first", ".second")
