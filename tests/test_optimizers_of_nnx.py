"""Optimizers of Flax NNX whose filter by path is asked about a path through a view, or which were made before a tie."""

import contextlib
import functools
import warnings

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import sharedtree as st

TOKENS = jnp.array([1, 2])


class Model(nnx.Module):
    """`head` comes before `tokens` in the order of names, and after `embed`."""

    def __init__(self, name, seed=0):
        rngs = nnx.Rngs(seed)
        setattr(self, name, nnx.Embed(5, 3, rngs=rngs))
        self.head = nnx.Linear(3, 5, rngs=rngs)
        self.name = name

    def __call__(self, tokens):
        return self.head(getattr(self, self.name)(tokens))


def model(name="tokens"):
    return st.tie(Model(name), lambda m: (getattr(m, name).embedding, m.head.kernel), through=jnp.transpose)


def loss(model):
    return (model(TOKENS) ** 2).sum()


def by_name(name="tokens"):
    return lambda path, value: name in path


def trained(net, wrt, around=lambda step: step):
    """One step of NNX's optimizer. Returns the change of the embedding."""
    before, optimizer = net.tokens.embedding[...], nnx.Optimizer(net, optax.sgd(1.0), wrt=wrt)

    def step(net, optimizer):
        optimizer.update(net, st.grad(loss, wrt=wrt)(net))

    around(step)(net, optimizer)
    return net.tokens.embedding[...] - before


STEPS = {
    "eager": lambda step: step,
    "st.jit": lambda step: st.jit(step, in_place=True),
    "nnx.jit": nnx.jit,
}
steps = pytest.mark.parametrize("around", STEPS.values(), ids=STEPS)


@steps
def test_a_filter_that_nnx_asks_about_the_view_is_warned_of_once(around):
    # Both `st.jit`, which sees the optimizer, and `st.grad` could warn.
    with pytest.warns(st.UntiedWarning, match=r"`\.tokens\.embedding` and `\.head\.kernel\.of\[0\]`") as record:
        change = trained(model(), by_name(), around)
    assert "does not train it" in str(record[0].message)
    assert len(record) == 1
    np.testing.assert_array_equal(change, jnp.zeros((5, 3)))


@steps
def test_the_fix_trains_both_uses(around):
    wrt = [by_name(), lambda path, value: path in [("head", "kernel", "of", 0)]]
    net = model()
    expected = -st.grad(loss)(net).tokens.embedding[...]
    np.testing.assert_allclose(trained(net, wrt, around), expected, rtol=1e-6)


def test_the_optimizer_of_this_library_needs_no_warning():
    wrt, net = by_name(), model()
    tx = st.optimizer(optax.sgd(1.0), wrt=wrt)
    gradient = st.grad(loss, wrt=wrt)(net)
    updates, _ = tx.update(gradient, tx.init(net), net)
    np.testing.assert_array_equal(updates.tokens.embedding[...], -gradient.tokens.embedding[...])


AGREEING = {
    "a class": nnx.Param,
    "a function of a leaf": lambda leaf: leaf.ndim > 1,
    "a path of both": lambda path, value: path != ("head", "bias"),
    "a path of none": by_name("bias"),
    "a path that the function cannot bear": lambda path, value: path[2] is None if len(path) > 2 else 1 / 0,
}


@pytest.mark.parametrize("name", AGREEING)
def test_filters_that_agree_are_silent(name):
    if name.startswith("a path that"):
        with pytest.raises(ZeroDivisionError):
            st.grad(loss, wrt=AGREEING[name])(model())
    else:
        st.grad(loss, wrt=AGREEING[name])(model())


def test_a_name_before_that_of_the_view_is_silent():
    st.grad(loss, wrt=by_name("embed"))(model("embed"))


def test_a_filter_that_selects_the_view_only_is_warned_of():
    wrt = lambda path, value: path[0] == "head"
    with pytest.warns(st.UntiedWarning, match="expects a gradient of it"):
        st.grad(loss, wrt=wrt)(model())
    wrt = nnx.All(wrt, lambda path, value: path not in [("head", "kernel", "of", 0)])
    np.testing.assert_array_equal(trained(model(), wrt), jnp.zeros((5, 3)))


@pytest.mark.parametrize("cls", [nnx.Optimizer, nnx.ModelAndOptimizer])
def test_a_traced_step_tells_of_the_filter_that_the_optimizer_alone_has(cls):
    net, optax_sgd = model(), optax.sgd(1.0)
    optimizer = cls(net, optax_sgd, wrt=by_name())

    def step(net, optimizer):
        gradient = st.grad(loss, wrt=nnx.Param)(net)
        optimizer.update(*[gradient] if cls is nnx.ModelAndOptimizer else [net, gradient])

    with pytest.warns(st.UntiedWarning, match=r"\.step`"):
        st.jit(step, in_place=True)(net, optimizer)


def test_an_optimizer_of_ones_own_is_left_alone():
    class Own(nnx.Optimizer):
        def __init__(self):
            self.rate = nnx.OptState(jnp.array(0.1))

    def fail(net, optimizer):
        raise ValueError("mine")

    for function in (lambda net, optimizer: net(TOKENS), fail):
        with contextlib.nullcontext() if function is not fail else pytest.raises(ValueError, match="mine"):
            st.jit(function, in_place=True)(model(), Own())


def test_a_filter_that_only_nnx_takes_is_left_alone():
    net = model()
    for wrt in (lambda path, value, more=(): 1, lambda *path_and_value: "tokens"):
        optimizer = nnx.Optimizer(net, optax.sgd(1.0), wrt=wrt)
        st.jit(lambda net, optimizer: net(TOKENS), in_place=True)(net, optimizer)


def test_policies():
    with pytest.raises(st.errors.UntiedError) as caught:
        st.grad(loss, wrt=by_name(), policy=st.Policy(on_untie="error"))(model())
    assert caught.value.paths == (".tokens.embedding", ".head.kernel.of[0]")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        st.grad(loss, wrt=by_name(), policy=st.Policy(on_untie="ignore"))(model())
        st.jit(lambda m, o: None, policy=st.Policy(on_untie="ignore"))(
            net := model(), nnx.Optimizer(net, optax.sgd(1.0), wrt=by_name())
        )


def test_an_array_of_a_module_counts_as_well():
    class Bare(nnx.Module):
        def __init__(self):
            self.z = jnp.ones((2, 3))
            self.a = st.View(jnp.transpose, self.z)

    with pytest.warns(st.UntiedWarning, match=r"`\.z` and `\.a\.of\[0\]`"):
        st.grad(lambda m: (m.a[...] ** 2).sum(), wrt=lambda path, value: path == ("z",))(Bare())


# --- an optimizer from before the tie ---------------------------------------------------------------------------------


class Square(nnx.Module):
    def __init__(self):
        self.a, self.b = nnx.Param(jnp.ones((2, 2))), nnx.Param(jnp.full((2, 2), 2.0))

    def __call__(self, _):
        return self.a[...] @ self.b[...]


UNTIED = {
    "a view that comes first": (lambda: Model("tokens"), lambda m: (m.tokens.embedding, m.head.kernel), jnp.transpose),
    "a view that comes last": (lambda: Model("embed"), lambda m: (m.embed.embedding, m.head.kernel), jnp.transpose),
    "a tie": (Square, lambda m: (m.a, m.b), None),
}


@pytest.mark.parametrize("cls", [nnx.Optimizer, nnx.ModelAndOptimizer])
@pytest.mark.parametrize("name", UNTIED)
def test_an_optimizer_made_before_the_tie_is_named(name, cls):
    make, where, through = UNTIED[name]
    untied = make()
    optimizer = cls(untied, optax.adam(0.1), wrt=nnx.Param)
    tied = st.tie(untied, where, through=through)
    if cls is nnx.ModelAndOptimizer:
        optimizer.model = tied

    @functools.partial(st.jit, in_place=True)
    def step(net, optimizer):
        gradient = st.grad(loss)(net)
        optimizer.update(*[gradient] if cls is nnx.ModelAndOptimizer else [net, gradient])

    with pytest.raises((ValueError, TypeError)) as caught:
        step(tied, optimizer)
    (note,) = [note for note in caught.value.__notes__ if "before the model was tied" in note]
    assert ("`.b`" if through is None else "`.head.kernel`") in note or "`.tokens.embedding`" in note
    step(tied, cls(tied, optax.adam(0.1), wrt=nnx.Param))


def test_other_errors_of_a_step_get_no_note():
    @functools.partial(st.jit, in_place=True)
    def step(net, optimizer):
        raise ValueError("mine")

    net = model()
    for cls in (nnx.Optimizer, nnx.ModelAndOptimizer, lambda *_, **__: None):
        optimizer = cls(net, optax.adam(0.1), wrt=nnx.Param)
        with pytest.raises(ValueError, match="mine") as caught:
            step(net, optimizer)
        assert not getattr(caught.value, "__notes__", ())


class Shared(nnx.Module):
    def __init__(self):
        self.a = nnx.Dict(kernel=nnx.Param(jnp.ones(2)))
        self.kernel = self.a.kernel


def test_an_error_of_the_step_stays_as_it_is_if_the_optimizer_fits():
    """The slot of `.a.kernel` ends like the further path `.kernel`."""

    def fail(model, optimizer):
        raise ValueError("on purpose")

    model = Shared()
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    without_state = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    without_state.opt_state = nnx.static(3)
    for argument in (optimizer, without_state):
        with pytest.raises(ValueError, match=r"^on purpose$") as caught:
            st.jit(fail, in_place=True)(model, argument)
        assert not [note for note in getattr(caught.value, "__notes__", ()) if "slot" in note]
