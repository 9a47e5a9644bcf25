"""Solvers of other packages over tied models: Optimistix, Lineax; training in a scan; a sweep by vmap.

The oracle is vanilla JAX on the parameters with one copy of the tied weight, by hand. Diffrax is in `tests/examples`.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharedtree as st

optax = pytest.importorskip("optax")


class Field(eqx.Module):
    """A network of two layers, of which the second is the first one transposed."""

    encode: jax.Array
    decode: jax.Array
    bias: jax.Array

    def __call__(self, y):
        assert self.encode is self.decode
        return self.decode.T @ jnp.tanh(self.encode @ y + self.bias) - y


def weights():
    w, b = jax.random.normal(jax.random.key(0), (3, 2)), jnp.array([0.1, -0.2, 0.3])
    return 0.5 * w, b


def tied(weight=None, bias=None):
    w, b = weights() if weight is None else (weight, bias)
    return Field(w, w, b)


def by_hand(parameters, y):
    """The same with one copy of the weight, in a tuple."""
    w, b = parameters
    return w.T @ jnp.tanh(w @ y + b) - y


def is_tied(field):
    return field.encode is field.decode


def assert_is(field, parameters, rtol=1e-5):
    """A model, or something like it, has one copy of each weight and these values."""
    assert is_tied(field)
    np.testing.assert_allclose(field.encode, parameters[0], rtol=rtol, atol=1e-6)
    np.testing.assert_allclose(field.bias, parameters[1], rtol=rtol, atol=1e-6)


XS = jax.random.normal(jax.random.key(1), (12, 2))


def targets():
    w, b = weights()
    return jax.vmap(lambda x: by_hand((w + 0.1, b - 0.1), x))(XS)


def residuals(dag, args):
    return jax.vmap(dag.tree)(XS) - args


def residuals_by_hand(parameters, args):
    return jax.vmap(lambda x: by_hand(parameters, x))(XS) - args


@pytest.mark.slow
def test_a_least_squares_fit_and_its_derivative():
    """How the fitted model depends on the data: implicit differentiation, under `st.jit` and in a model's own class."""
    optx = pytest.importorskip("optimistix")

    def fitted(function, start, data):
        solver = optx.LevenbergMarquardt(rtol=1e-7, atol=1e-7)
        return optx.least_squares(function, solver, start, args=data, max_steps=200).value

    @st.jit
    def fit_and_gradient(field, data):
        def of_data(data):
            found = fitted(residuals, st.Dag(field), data).tree
            return (found.encode**2).sum(), found

        gradient, found = st.grad(of_data, has_aux=True)(data)
        return found, gradient

    found, gradient = fit_and_gradient(tied(), targets())
    w, b = weights()
    assert_is(found, (w + 0.1, b - 0.1), rtol=1e-3)
    want = jax.jit(jax.grad(lambda data: (fitted(residuals_by_hand, weights(), data)[0] ** 2).sum()))(targets())
    np.testing.assert_allclose(gradient, want, rtol=1e-3, atol=1e-4)


class Gram(eqx.Module):
    """W Wᵀ + diagonal, where W is given as two factors that are one array."""

    left: jax.Array
    right: jax.Array
    diagonal: jax.Array

    def __call__(self, x):
        assert self.left is self.right
        return self.left @ (self.right.T @ x) + self.diagonal * x


def gram():
    w, b = weights()
    return Gram(w, w, jnp.exp(b))


B = jnp.array([1.0, 2.0, -1.0])


@pytest.mark.slow
def test_a_linear_solve():
    lx = pytest.importorskip("lineax")

    @st.jit
    @st.value_and_grad
    def loss(gram):
        dag = st.Dag(gram)
        operator = lx.FunctionLinearOperator(
            lambda x: dag.tree(x), jax.eval_shape(lambda: B), lx.positive_semidefinite_tag
        )
        return (lx.linear_solve(operator, B, lx.CG(rtol=1e-6, atol=1e-6)).value ** 2).sum()

    def loss_by_hand(parameters):
        w, d = parameters
        return (jnp.linalg.solve(w @ w.T + jnp.diag(d), B) ** 2).sum()

    value, gradient = loss(gram())
    parameters = (gram().left, gram().diagonal)
    want, by_hand = jax.value_and_grad(loss_by_hand)(parameters)
    np.testing.assert_allclose(value, want, rtol=1e-4)
    assert gradient.left is gradient.right
    np.testing.assert_allclose(gradient.left, by_hand[0], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(gradient.diagonal, by_hand[1], rtol=1e-3, atol=1e-4)


STEPS = 10
RATES = (1e-2, 1e-1)


def loss_of(field, batch):
    xs, ys = batch
    return ((jax.vmap(field)(xs) - ys) ** 2).mean()


def batches():
    picks = jax.random.randint(jax.random.key(2), (STEPS, 4), 0, len(XS))
    return XS[picks], targets()[picks]


TX = optax.inject_hyperparams(optax.adam)(learning_rate=0.0)


def with_rate(state, rate):
    return state._replace(hyperparams=state.hyperparams | {"learning_rate": rate})


@functools.cache
def trained_by_hand(rate):
    """The parameters, the optimizer's state and the losses."""

    def step(carry, batch):
        parameters, state = carry
        loss, gradient = jax.value_and_grad(lambda p: loss_of(functools.partial(by_hand, p), batch))(parameters)
        updates, state = TX.update(gradient, state, parameters)
        return (optax.apply_updates(parameters, updates), state), loss

    (parameters, state), losses = jax.lax.scan(step, (weights(), with_rate(TX.init(weights()), rate)), batches())
    return parameters, state, losses


def training(count):
    """(model, state, batches) → the same after as many steps, and the losses."""

    def iteration(carry, batch):
        count["traces"] += 1
        field, state = carry
        loss, gradient = st.value_and_grad(loss_of)(field, batch)
        assert is_tied(field)
        assert is_tied(gradient)
        updates, state = st.optimizer(TX).update(gradient, state, field)
        return (st.apply_updates(field, updates), state), loss

    return lambda field, state, batches: st.scan(iteration, (field, state), batches)


@pytest.mark.slow
def test_a_sweep_over_learning_rates():
    """Stacked models and optimizer states as operands of one vmap, in which a tied weight is mapped once."""
    tx, rates, count = st.optimizer(TX), jnp.array(RATES), {"traces": 0}
    fields, states = st.vmap(lambda rate: (tied(), with_rate(tx.init(tied()), rate)))(rates)
    assert is_tied(fields)
    assert fields.encode.shape == (len(RATES), 3, 2)
    sweep = st.jit(st.vmap(training(count), in_axes=(0, 0, None)))
    for _ in range(2):
        (trained, _), losses = sweep(fields, states, batches())
    assert count["traces"] == 1
    assert is_tied(trained)
    for i, rate in enumerate(RATES):
        parameters, _, losses_by_hand = trained_by_hand(rate)
        np.testing.assert_allclose(trained.decode[i], parameters[0], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(losses[i], losses_by_hand, rtol=1e-4)
