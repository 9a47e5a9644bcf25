"""A module that is differentiated as an argument, and that the function also holds: half a gradient, which is said."""

import functools
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import sharedtree as st


class Layer(eqx.Module):
    w: jax.Array

    def penalty(self, model, x):
        return (self.w * model.w * x).sum()

    def __call__(self, model, x):
        return self.penalty(model, x)


class Net(eqx.Module):
    layer: Layer
    other: Layer

    @property
    def w(self):
        return self.layer.w + self.other.w


def layer():
    return Layer(jnp.array([2.0, 3.0]))


def closure(model):
    def loss(argument, x):
        return (model.w * argument.w * x).sum()

    return loss


def default(model):
    def loss(argument, x, held=model):
        return (held.w * argument.w * x).sum()

    return loss


def keyword_default(model):
    def loss(argument, x, *, held=model):
        return (held.w * argument.w * x).sum()

    return loss


def penalty(held, argument, x):
    return (held.w * argument.w * x).sum()


def penalty_of_held(argument, x, held):
    return (held.w * argument.w * x).sum()


HOLDING = {
    "closure": closure,
    "default": default,
    "keyword default": keyword_default,
    "partial": lambda model: functools.partial(penalty, model),
    "partial by name": lambda model: functools.partial(penalty_of_held, held=model),
    "method": lambda model: model.penalty,
    "module": lambda model: model,
    "wrapped": lambda model: st.checkpoint(closure(model)),
    "partial of a method": lambda model: functools.partial(model.penalty),
}
GRADIENTS = {
    "grad": lambda f, model, x: st.grad(f)(model, x),
    "value_and_grad": lambda f, model, x: st.value_and_grad(f)(model, x)[1],
    "filter_grad": lambda f, model, x: st.filter_grad(f)(model, x),
    "vjp": lambda f, model, x: st.vjp(f, model, x)[1](jnp.ones(()))[0],
    "filter_vjp": lambda f, model, x: st.filter_vjp(f, model, x)[1](jnp.ones(()))[0],
    "jacrev": lambda f, model, x: st.jacrev(f)(model, x),
    "jacfwd": lambda f, model, x: st.jacfwd(f)(model, x),
    "under jit": lambda f, model, x: st.jit(st.grad(f))(model, x),
    "in a step": lambda f, model, x: st.jit(lambda m, x: st.grad(f)(m, x))(model, x),
    "under Equinox's": lambda f, model, x: st.filter_jit(st.filter_grad(f))(model, x),
    "under two": lambda f, model, x: st.checkpoint(lambda m: st.jit(lambda m: st.grad(f)(m, x))(m))(model),
    "under vmap": lambda f, model, x: st.vmap(st.grad(f), in_axes=(None, 0))(model, x[None]),
}
X = jnp.array([1.0, 5.0])


def caught(call):
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        result = call()
    return result, [str(w.message) for w in record if w.category is st.UntiedWarning]


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("holding", HOLDING)
@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.sampled(every=3)
def test_half_a_gradient_is_said(gradient, holding):
    model = layer()
    half, messages = caught(lambda: GRADIENTS[gradient](HOLDING[holding](model), model, X))
    # It is the half that vanilla JAX has for what is closed over.
    np.testing.assert_allclose(np.ravel(half.w), model.w * X)
    (message,) = messages
    name = "argument" if holding not in ("method", "module", "partial of a method") else "model"
    assert f"`{name}` is differentiated, and the function also has the same `Layer`" in message
    assert "sharedtree.copy(" in message


@pytest.mark.parametrize("jit", [jax.jit, eqx.filter_jit])
@pytest.mark.parametrize("holding", [closure, default, keyword_default])
def test_half_a_gradient_of_what_was_compiled_is_said(holding, jit):
    """Methods and modules are left out: JAX cannot hash them, and Equinox copies them."""
    model = layer()
    half, messages = caught(lambda: st.grad(jit(holding(model)))(model, X))
    np.testing.assert_allclose(half.w, model.w * X)
    assert len(messages) == 1


@pytest.mark.parametrize("holding", HOLDING)
def test_the_fix_is_silent_and_the_gradient_is_that_of_a_constant(holding):
    model = layer()
    f = HOLDING[holding](model)
    _, (message,) = caught(lambda: st.grad(f)(model, X))
    code = next(line.strip() for line in message.split("\n") if line.startswith("    "))
    names = {"f": f, "model": model, "argument": model, "functools": functools, "sharedtree": st}
    exec(code, names)
    # If it is the name in the closure, the function is made with it.
    f = HOLDING[holding](names["model"]) if code.startswith("model = ") else names["f"]
    gradient, messages = caught(lambda: st.grad(f)(model, X))
    assert not messages
    np.testing.assert_allclose(gradient.w, model.w * X)


GLOBAL = layer()


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.sampled(every=3)
def test_a_global_variable_counts_as_a_closure_does(gradient):
    def loss(argument, x):
        return (GLOBAL.w * argument.w * x).sum()

    def in_a_lambda(argument, x):
        return (lambda: (GLOBAL.w * argument.w * x).sum())()

    for f in (loss, in_a_lambda):
        half, (message,) = caught(lambda f=f: GRADIENTS[gradient](f, GLOBAL, X))
        np.testing.assert_allclose(np.ravel(half.w), GLOBAL.w * X)
        code = next(line.strip() for line in message.split("\n") if line.startswith("    "))
        assert code == "argument = sharedtree.copy(argument)"
        exec(code, names := {"argument": GLOBAL, "sharedtree": st})
        half, messages = caught(lambda f=f: GRADIENTS[gradient](f, names["argument"], X))  # noqa: B023
        np.testing.assert_allclose(np.ravel(half.w), GLOBAL.w * X)
        assert not messages


def test_a_global_variable_that_is_not_read_is_silent():
    def loss(argument, x):
        GLOBAL = argument  # noqa: N806 -- another variable of that name
        return (GLOBAL.w * argument.w * x).sum()

    assert not caught(lambda: st.grad(loss)(GLOBAL, X))[1]
    assert not caught(lambda: st.grad(lambda m: m.GLOBAL)(Named(GLOBAL, jnp.ones(()))))[1]


class Named(eqx.Module):
    inner: Layer
    GLOBAL: jax.Array


def test_jvp_and_linearize_are_asked_too():
    model = layer()
    f = closure(model)
    for call in (lambda: st.jvp(f, (model, X), (model, X)), lambda: st.linearize(f, model, X)):
        assert len(caught(call)[1]) == 1
    assert not caught(lambda: st.linear_transpose(lambda m: m.w * model.w, model))[1]


def test_a_part_of_the_argument_is_a_module_that_is_differentiated():
    net = Net(layer(), layer())
    part = net.layer
    _, (message,) = caught(lambda: st.grad(lambda net: (net.w * part.w).sum())(net))
    assert "`net.layer` is differentiated" in message


def test_an_object_of_nnx():
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    assert len(caught(lambda: st.grad(lambda m: (m(X) * model(X)).sum())(model))[1]) == 1


def test_what_is_meant_or_complete_is_silent():
    model, other = layer(), layer()
    holder = {"model": model}

    class Trainer:
        def __init__(self):
            self.model = model

        def loss(self, argument):
            return (self.model.w * argument.w).sum()

    silent = {
        "once": lambda: st.grad(lambda m: (m.w**2).sum())(model),
        "another": lambda: st.grad(lambda m: (m.w * other.w).sum())(model),
        "contained": lambda: st.grad(lambda m: (m.w * holder["model"].w).sum())(model),
        "contained in self": lambda: st.grad(Trainer().loss)(model),
        "not differentiated": lambda: st.grad(lambda x, m: (m.w * model.w * x).sum())(X, model),
        "not chosen": lambda: st.grad(lambda m, x: (m.w * model.w * x).sum(), argnums=1)(model, X),
        "no gradient": lambda: st.jit(lambda m: (m.w * model.w).sum())(model),
        "a default that the call replaces": lambda: st.grad(default(model))(model, X, other),
        "a default that a keyword replaces": lambda: st.grad(keyword_default(model))(model, X, held=other),
    }
    for call in silent.values():
        assert not caught(call)[1]


def test_it_is_said_once_for_a_definition_and_as_the_policy_says():
    model = layer()
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("default")
        for _ in range(3):
            st.grad(closure(model))(model, X)
    assert [w.filename for w in record] == [__file__]
    with st.Context(st.Policy(on_untie="ignore")):
        assert not caught(lambda: st.grad(closure(model))(model, X))[1]
    with st.Context(st.Policy(on_untie="error")), pytest.raises(st.errors.UntiedError, match="in its closure"):
        st.grad(closure(model))(model, X)


def test_inside_jit_the_copy_that_is_closed_over_is_said():
    def step(model, x):
        return st.grad(lambda m: (m.w * model.w * x).sum())(model)

    _, messages = caught(lambda: st.jit(step)(layer(), X))
    assert len(messages) == 1
