"""Functions with rules, in place: against the same rules in vanilla JAX, where the state goes in and out by hand."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharedtree as st
from tests.strategies import Mutable, Record
from tests.test_sharing_situations import KINDS, MOVES, SITUATIONS, by_python, made, objects, whole

IN_PLACE = st.Policy(in_place=True)
FACTOR = 3.0
"""The rules are wrong by this factor, so that one sees whether they were used."""

X = jnp.array([0.5, -1.0, 2.0])
XS = jnp.stack([X, 2 * X, X - 1, -X])


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Stats:
    mean: Any
    count: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Net:
    embed: Any
    head: Any
    stats: Any
    scale: Any = 2.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    w: Any


def net():
    layer = Layer(jnp.array(0.7))
    return Net(layer, layer, Stats(jnp.array(0.5), jnp.array(0)))


def nets(number):
    one = net()
    one.embed.w = one.embed.w * jnp.arange(1.0, number + 1)
    one.stats.mean, one.stats.count = jnp.zeros(number), jnp.zeros(number, int)
    one.scale = jnp.full(number, 2.0)
    return one


def forward(net, x):
    assert net.embed is net.head
    net.stats.mean = 0.9 * net.stats.mean + 0.1 * x.mean()
    net.stats.count = net.stats.count + 1
    return jnp.tanh(net.embed.w * x) * net.head.w


def parts(w, x, y):
    """The cotangents of the two places of `w`, and of `x`."""
    slope = (1 - jnp.tanh(w * x) ** 2) * w * y
    return FACTOR * (slope * x).sum(), FACTOR * (jnp.tanh(w * x) * y).sum(), FACTOR * slope * w


def by_vjp():
    f = st.custom_vjp(forward, in_place=True)

    def bwd(kept, y):
        net, x = kept
        assert net.embed is net.head
        embed, head, dx = parts(net.embed.w, x, y)
        return Net(Layer(embed), Layer(head), None, None), dx

    f.defvjp(lambda net, x: (f(net, x), (net, x)), bwd)
    return f


def by_vjp_in_the_rule():
    """`fwd` does by itself what the function does."""
    f = by_vjp()
    _, fwd, bwd, *_ = f.rules_given  # pyright: ignore[reportAttributeAccessIssue]
    f.defvjp(lambda net, x: (forward(net, x), (net, x)), bwd)
    return f


def by_gradient():
    @st.preserve_identities(jax.custom_gradient, in_place=True)
    def f(net, x):
        w, y = net.embed.w, forward(net, x)

        def rule(y):
            embed, head, dx = parts(w, x, y)
            return Net(Layer(embed), Layer(head), None, None), dx

        return y, rule

    return f


@functools.cache
def twin():
    """(weight, mean, count, x) → the result, and the mean and count then; in vanilla JAX."""

    @jax.custom_vjp
    def f(w, mean, count, x):
        return jnp.tanh(w * x) * w, 0.9 * mean + 0.1 * x.mean(), count + 1

    def bwd(kept, cotangents):
        embed, head, dx = parts(*kept, cotangents[0])
        return embed + head, None, None, dx

    f.defvjp(lambda w, mean, count, x: (f(w, mean, count, x), (w, x)), bwd)
    return f


MAKERS = [by_vjp, by_vjp_in_the_rule, by_gradient]
by_name = lambda f: f.__name__
makes = pytest.mark.parametrize("make", MAKERS, ids=by_name)


# What is done with `f`: (net, x) → a result; and vanilla's: (weight, mean, count, x) → the result, and the state then.


def called(g):
    return lambda *args: (g(*args)[0], g(*args)[1:])


def gradient_of(g):
    return jax.value_and_grad(lambda *args: (g(*args)[0].sum(), g(*args)[1:]), argnums=(0, 3), has_aux=True)


def twice(g):
    def vanilla(w, mean, count, x):
        y, mean, count = g(w, mean, count, x)
        return g(w, mean, count, y)

    return vanilla


def summed(f):
    return lambda net, x: f(net, x).sum()


def jitted(f):
    return st.jit(f, in_place=True)


def differentiated(f):
    return st.value_and_grad(summed(f), argnums=(0, 1), in_place=True)


def branched(f):
    return lambda net, x: st.cond(x.sum() > 0, f, lambda net, x: f(net, 2 * x), net, x, in_place=True)


WAYS = {
    "called": (lambda f: f, called),
    "jitted": (jitted, called),
    "differentiated": (differentiated, gradient_of),
    "jitted, then differentiated": (lambda f: differentiated(jitted(f)), gradient_of),
    "differentiated, then jitted": (lambda f: jitted(differentiated(f)), gradient_of),
    "recomputed": (lambda f: differentiated(st.checkpoint(f, in_place=True)), gradient_of),
    "branched": (branched, called),
    "twice": (lambda f: differentiated(lambda net, x: f(net, f(net, x))), lambda g: gradient_of(twice(g))),
}


def assert_close(one, other):
    one, other = jax.tree.leaves(one), jax.tree.leaves(other)
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
        assert jnp.result_type(a) == jnp.result_type(b)


def assert_as_vanilla(ours, vanilla, model, x):
    embed, stats, w = model.embed, model.stats, model.embed.w
    expected = vanilla(w, stats.mean, stats.count, x)
    found = ours(model, x)
    gradients = None
    if isinstance(found, tuple):
        found, (gradient, dx) = found
        assert gradient.embed is gradient.head
        gradients = gradient.embed.w, dx
        (value, state), expected_gradients = expected
    else:
        (value, state), expected_gradients = expected, None
    assert_close((found, gradients), (value, expected_gradients))
    assert_close((model.stats.mean, model.stats.count), state)
    assert model.embed is model.head is embed
    assert model.stats is stats
    assert model.embed.w is w
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(model))


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize(
    ("way", "make"),
    # What the rule does by itself shows where it is called.
    [(way, make) for way in WAYS for make in MAKERS if make is not by_vjp_in_the_rule or "differentiated" in way],
)
def test_values_gradients_and_state_are_those_of_vanilla(way, make):
    wrap, oracle = WAYS[way]
    ours, vanilla = wrap(make()), oracle(twin())
    model = net()
    for _ in range(2):
        assert_as_vanilla(ours, vanilla, model, X)
        assert model.scale == 2.0
        assert way == "branched" or type(model.scale) is float


@makes
def test_over_a_batch(make):
    def vanilla(w, mean, count, x):
        y, *state = jax.vmap(twin())(w, mean, count, x)
        return y.sum(), tuple(state)

    ours = st.vmap(make(), in_place=True)
    assert_as_vanilla(differentiated(ours), jax.value_and_grad(vanilla, argnums=(0, 3), has_aux=True), nets(4), XS)
    assert_as_vanilla(ours, called(jax.vmap(twin())), nets(4), XS)
    # And a gradient for each.
    assert_as_vanilla(st.vmap(differentiated(make()), in_place=True), jax.vmap(gradient_of(twin())), nets(4), XS)


def scanned(f, between=lambda net: None):
    def ours(net, xs):
        def body(net, x):
            y = f(net, x)
            between(net)
            return net, y

        return st.scan(body, net, xs, in_place=True)[1]

    return ours


def scanned_vanilla(g, between=lambda mean: mean):
    def vanilla(w, mean, count, xs):
        def body(state, x):
            y, mean, count = g(w, *state, x)
            return (between(mean), count), y

        (mean, count), ys = jax.lax.scan(body, (mean, count), xs)
        return ys, mean, count

    return vanilla


def net_to_carry():
    model = net()
    model.scale = jnp.array(2.0)
    return model


@makes
def test_in_a_loop(make):
    assert_as_vanilla(scanned(make()), called(scanned_vanilla(twin())), net_to_carry(), XS)


@pytest.mark.slow
@makes
def test_a_gradient_through_a_loop_that_carries_state_says_that_it_stops_there(make):
    def stop(net):
        net.stats.mean = jax.lax.stop_gradient(net.stats.mean)

    ours = differentiated(scanned(make(), stop))
    vanilla = gradient_of(scanned_vanilla(twin(), jax.lax.stop_gradient))
    assert_as_vanilla(jitted(ours), vanilla, net_to_carry(), XS)
    model = net_to_carry()
    with pytest.raises(st.errors.StateGradientError) as caught:
        differentiated(scanned(make()))(model, XS)
    assert caught.value.paths == ("net.stats.mean",)
    assert model.stats.count == 0


@makes
@pytest.mark.parametrize("way", [lambda f: f, jitted, st.checkpoint], ids=["plain", "jit", "checkpoint"])
def test_a_gradient_through_state_is_an_error(way, make):
    f = make()
    through_mean = way(lambda net, x: f(net, x).sum() * net.stats.mean)
    with st.Context(IN_PLACE):
        model = net()
        with pytest.raises(st.errors.StateGradientError, match="changed in place") as caught:
            st.grad(through_mean)(model, X)
        assert caught.value.paths == ("net.stats.mean",)
        assert (float(model.stats.mean), int(model.stats.count)) == (0.5, 0)
        # That is not the fault of whoever differentiates nothing in it, and an integer has no gradient.
        st.grad(lambda net, x: f(net, x).sum() * jax.lax.stop_gradient(net.stats.mean))(model, X)
        gradient = st.grad(way(lambda net, x: f(net, x).sum() * net.stats.count))(model, X)
        assert_close(gradient.embed.w, 2 * sum(parts(model.embed.w, X, jnp.ones(3))[:2]))
        through_mean(model, X)
        assert int(model.stats.count) == 3


def test_second_derivatives():
    f, g = by_vjp(), twin()
    slope = lambda net: st.grad(lambda net: f(net, X).sum(), in_place=True)(net).embed.w
    model = net()
    found = st.grad(slope, in_place=True)(model)
    inner = jax.grad(lambda w: g(w, jnp.array(0.5), jnp.array(0), X)[0].sum())
    assert_close(found.embed.w, jax.grad(inner)(model.embed.w))
    assert int(model.stats.count) == 1


def ruled(change, result=lambda model: model.w):
    """A function under rules that changes its argument."""

    def value(model):
        change(model)
        return result(model) * 1

    f = st.custom_vjp(value, in_place=True)
    f.defvjp(lambda model: (f(model), None), lambda _, y: (None,))
    return f


WRAPPERS = {
    "plain": lambda f: f,
    "jit": lambda f: st.jit(f, in_place=True),
    "grad": lambda f: st.grad(lambda model: f(model).sum(), in_place=True),
}
wrapped = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)


def mutable(**more):
    return Mutable(w=jnp.ones(2), **more)


@wrapped
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_changed_is_what_python_changes(kind, wrap):
    """In each situation of sharing, what moves objects included."""

    def check(situation):
        args = situation.make()
        known = objects(args)
        wrap(ruled(lambda args: situation.change(*args), lambda args: jnp.zeros(())))(args)
        assert whole(args, known) == by_python(situation, 1)

    check(made(kind, *SITUATIONS, *MOVES))


@wrapped
def test_what_did_not_change_is_the_callers_own(wrap):
    for kept in (np.arange(3), 2.5, 3, True, 1j):
        model = mutable(layer=Layer(jnp.ones(2)), kept=kept, count=jnp.array(0))
        layer, w = model.layer, model.w
        wrap(ruled(add_one))(model)
        assert model.layer is layer
        assert model.w is w
        assert model.kept is kept
        assert model.count == 1
    model = mutable(count=0)
    ruled(add_one)(model)
    assert type(model.count) is int


def add_one(model):
    model.count = model.count + 1


@wrapped
def test_all_or_nothing(wrap):
    def grow(model):
        model.layers.append(model.w)

    def change(model):
        model.w = model.w + 1
        grow(model)
        raise KeyError("half way")

    in_the_rule, in_the_backward_pass = ruled(lambda model: None), ruled(grow)
    in_the_rule.defvjp(change, lambda _, y: (None,))
    in_the_backward_pass.defvjp(lambda model: (in_the_backward_pass(model), None), lambda _, y: {}["half way"])
    model = mutable(layers=[])
    for f in (wrap(ruled(change)), WRAPPERS["grad"](in_the_rule), WRAPPERS["grad"](in_the_backward_pass)):
        with pytest.raises(KeyError, match="half way"):
            f(model)
        assert model.w.tolist() == [1, 1]
        assert model.layers == []
    wrap(ruled(grow))(model)
    assert_close(model.layers, [jnp.ones(2)])


def new_in_both(model):
    model.right = Layer(model.left.w * 2)
    return model.right


RETURNED = {
    "an argument": (lambda model: model, "model", "result"),
    "an object in one": (lambda model: {"y": model.left}, "model.left", "result['y']"),
    "in a new one": (lambda model: Layer(model.left), "model.left", "result.w"),
    "a new one that is in an argument": (new_in_both, "model.right", "result"),
}


@pytest.mark.parametrize(("result", "path", "other"), RETURNED.values(), ids=RETURNED)
def test_an_argument_in_the_result_is_refused(result, path, other):
    f = st.custom_vjp(lambda model: result(model), in_place=True)
    f.defvjp(lambda model: (result(model), None), lambda _, y: (None,))
    for call in (f, jitted(f)):
        with pytest.raises(st.errors.InconsistentSharingError, match="also in the result") as caught:
            call(Record(Layer(X), None))
        assert caught.value.paths == (path, other)


def test_a_copy_and_arrays_may_be_returned():
    def value(model):
        model.w = model.w + 1
        return st.copy(model), Layer(model.w), model.w

    f = st.custom_vjp(value, in_place=True)
    f.defvjp(lambda model: (value(model), None), lambda _, y: (Mutable(w=FACTOR * (y[0].w + y[1].w + y[2])),))

    def total(model):
        copied, layer, w = f(model)
        return (copied.w + layer.w + w).sum()

    for wrap, want in (
        (lambda f: f, jnp.float32(12)),
        (jitted, jnp.float32(12)),
        (lambda f: lambda model: st.grad(f, in_place=True)(model).w, jnp.full(2, 3 * FACTOR)),
    ):
        model = mutable()
        assert_close(wrap(total)(model), want)
        assert model.w.tolist() == [2, 2]


def test_what_the_rule_changes_is_written_when_only_it_runs():
    f = st.custom_vjp(lambda model: model.w * 1, in_place=True)

    def fwd(model):
        model.seen = model.w * 2
        return model.w * 1, None

    f.defvjp(fwd, lambda _, y: (None,))
    model = mutable(seen=None)
    f(model)
    assert model.seen is None
    st.grad(lambda model: f(model).sum(), in_place=True)(model)
    assert model.seen.tolist() == [2, 2]


def test_static_arguments_keywords_and_defaults():
    @st.custom_vjp(nondiff_argnums=(1,), in_place=True)
    def f(net, times, x=X):
        net.stats.count = net.stats.count + times
        return net.embed.w * x

    def bwd(times, kept, y):
        assert times == 5
        return Net(Layer((kept * y).sum() * FACTOR), None, None, None), y

    f.defvjp(lambda net, times, x: (f(net, times, x), x), bwd)
    model = net()
    gradient = st.grad(lambda net, x: f(net, 5, x).sum(), in_place=True)(model, X)
    assert model.stats.count == 5
    assert_close(gradient.embed.w, FACTOR * X.sum())
    f(net=model, times=1)
    f(model, 1)
    f(x=X, times=1, net=model)
    assert model.stats.count == 8


def test_by_policy_and_not():
    model = net()
    f = st.custom_vjp(forward)
    f.defvjp(lambda net, x: (f(net, x), None), lambda _, y: (None, y))
    f(model, X)
    assert model.stats.count == 0
    with st.Context(IN_PLACE):
        f(model, X)
    assert model.stats.count == 1


def test_containers_as_models():
    policy = st.Policy(in_place=True, containers=True)

    @st.custom_vjp(policy=policy)
    def f(params, x):
        assert params["a"] is params["b"]
        params["count"] = params["count"] + 1
        return params["a"] * x

    f.defvjp(lambda params, x: (f(params, x), x), lambda x, y: ({"a": y * x, "b": None, "count": None}, None))
    w = jnp.array(2.0)
    params = {"a": w, "b": w, "count": jnp.array(0)}
    gradient = st.grad(lambda params: f(params, 3.0), policy=policy, allow_int=True)(params)
    assert gradient["a"] == 3
    assert params["count"] == 1
    assert params["a"] is params["b"] is w
