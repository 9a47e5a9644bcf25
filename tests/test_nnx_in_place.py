"""Flax NNX's models as they are, under our transforms in place; what they should give is what NNX's own give."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharedtree as st

pytest.importorskip("flax", minversion="0.12.1")
nnx: Any = pytest.importorskip("flax.nnx")
optax: Any = pytest.importorskip("optax")

IN_PLACE = st.Policy(in_place=True)


def ours(transform, *args, **options):
    return st.preserve_identities(transform, policy=IN_PLACE)(*args, **options)


class Net(nnx.Module):
    """State of every kind: running statistics, a counter, a stream of keys, and a tied weight."""

    def __init__(self, rngs):
        self.embed = nnx.Linear(3, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(3, 3, use_bias=False, rngs=rngs)
        self.head.kernel = self.embed.kernel
        self.calls = nnx.Variable(jnp.array(0))

    def __call__(self, x):
        self.calls[...] += 1
        return self.head(self.dropout(self.norm(self.embed(x))))


def net():
    return Net(nnx.Rngs(0))


def assert_same_state(one, two):
    a, b = (nnx.to_pure_dict(nnx.state(each)) for each in (one, two))
    leaves, others = jax.tree.leaves_with_path(a), jax.tree.leaves_with_path(b)
    assert [path for path, _ in leaves] == [path for path, _ in others]
    for (path, x), (_, y) in zip(leaves, others, strict=True):
        x, y = (jax.random.key_data(v) if jnp.issubdtype(v.dtype, jax.dtypes.prng_key) else v for v in (x, y))
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5, err_msg=str(path))
    assert one.head.kernel is one.embed.kernel


def x():
    return jnp.arange(12.0).reshape(4, 3) / 7


def loss(model, x):
    return (model(x) ** 2).mean()


def forward(model, x):
    return model(x)


def grad_with_aux(model, x):
    return loss(model, x), model.calls[...]


CALLS = {
    "jit": (lambda m: ours(jax.jit, forward)(m, x()), lambda m: nnx.jit(forward)(m, x())),
    "jit, twice": (
        lambda m: [ours(jax.jit, forward)(m, x()) for _ in range(2)][-1],
        lambda m: [nnx.jit(forward)(m, x()) for _ in range(2)][-1],
    ),
    "checkpoint": (lambda m: ours(jax.checkpoint, forward)(m, x()), lambda m: nnx.remat(forward)(m, x())),
    "value_and_grad": (
        lambda m: ours(jax.value_and_grad, loss)(m, x())[0],
        lambda m: nnx.value_and_grad(loss)(m, x())[0],
    ),
    "value_and_grad, auxiliary": (
        lambda m: ours(jax.value_and_grad, grad_with_aux, has_aux=True)(m, x())[0],
        lambda m: nnx.value_and_grad(grad_with_aux, has_aux=True)(m, x())[0],
    ),
    "jit of value_and_grad": (
        lambda m: ours(jax.jit, lambda m, x: ours(jax.value_and_grad, loss)(m, x)[0])(m, x()),
        lambda m: nnx.jit(lambda m, x: nnx.value_and_grad(loss)(m, x)[0])(m, x()),
    ),
    "scan": (
        lambda m: ours(jax.lax.scan, lambda m, x: (m, m(x)), m, jnp.stack([x(), 2 * x(), -x()]))[1],
        lambda m: jnp.stack([m(x()), m(2 * x()), m(-x())]),
    ),
    "fori_loop": (
        lambda m: ours(jax.lax.fori_loop, 0, 3, lambda i, c: (c[0], c[0](c[1])), (m, x()))[1],
        lambda m: m(m(m(x()))),
    ),
    "while_loop": (
        lambda m: ours(jax.lax.while_loop, lambda c: c[0].calls[...] < 3, lambda c: (c[0], c[0](c[1])), (m, x()))[1],
        lambda m: m(m(m(x()))),
    ),
    "cond": (
        lambda m: ours(jax.lax.cond, jnp.array(True), forward, lambda m, x: x, m, x()),
        lambda m: m(x()),
    ),
    "switch under jit": (
        lambda m: ours(jax.jit, lambda m, i, x: ours(jax.lax.switch, i, [lambda m, x: x, forward], m, x))(m, 1, x()),
        lambda m: m(x()),
    ),
    "the branch that does nothing": (
        lambda m: ours(jax.lax.cond, jnp.array(False), forward, lambda m, x: x, m, x()),
        lambda m: x(),
    ),
    "jit of scan": (
        lambda m: ours(jax.jit, lambda m, xs: ours(jax.lax.scan, lambda m, x: (m, m(x)), m, xs)[1])(
            m, jnp.stack([x(), 2 * x()])
        ),
        lambda m: jnp.stack([m(x()), m(2 * x())]),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_state_and_value_are_those_of_nnx(name):
    mine, reference = net(), net()
    ours_, theirs = CALLS[name]
    np.testing.assert_allclose(ours_(mine), theirs(reference), rtol=1e-4, atol=1e-5)
    assert_same_state(mine, reference)


def test_vmap_over_models():
    def make():
        return nnx.vmap(lambda key: nnx.BatchNorm(3, rngs=nnx.Rngs(key)), in_axes=0, out_axes=0)(
            jax.random.split(jax.random.key(0), 2)
        )

    def run(model, x):
        return model(x)

    mine, reference = make(), make()
    xs = jnp.stack([x(), 3 * x()])
    np.testing.assert_allclose(
        ours(jax.vmap, run)(mine, xs), nnx.vmap(run, in_axes=0, out_axes=0)(reference, xs), rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(mine.mean[...], reference.mean[...], rtol=1e-4)
    np.testing.assert_allclose(mine.var[...], reference.var[...], rtol=1e-4)


def test_a_training_step_with_an_optimizer():
    def step(model, optimizer, x):
        value, gradient = nnx.value_and_grad(loss)(model, x)
        optimizer.update(model, gradient)
        return value

    def ours_step(model, optimizer, x):
        value, gradient = ours(jax.value_and_grad, loss)(model, x)
        optimizer.update(model, nnx.state(gradient, nnx.Param))
        return value

    mine, reference = net(), net()
    optimizer, other = (nnx.Optimizer(m, optax.adam(1e-2), wrt=nnx.Param) for m in (mine, reference))
    run, run_theirs = ours(jax.jit, ours_step), nnx.jit(step)
    for _ in range(3):
        np.testing.assert_allclose(run(mine, optimizer, x()), run_theirs(reference, other, x()), rtol=1e-4)
    assert_same_state(mine, reference)
    assert int(optimizer.step[...]) == 3


@pytest.mark.parametrize("make", [nnx.Rngs, lambda seed: nnx.Rngs(params=seed, dropout=1)])
def test_streams_of_keys_go_on(make):
    mine, reference = make(0), make(0)

    def draw(rngs):
        return jax.random.key_data(rngs.params()), jax.random.key_data(rngs.dropout())

    for _ in range(2):
        for got, want in zip(ours(jax.jit, draw)(mine), nnx.jit(draw)(reference), strict=True):
            np.testing.assert_array_equal(got, want)
    assert int(mine.params.count[...]) == int(reference.params.count[...])


def test_a_module_in_two_arguments():
    model = net()

    def f(one, two):
        assert one is two
        one.calls[...] += 1
        two.calls[...] += 1

    ours(jax.jit, f)(model, model)
    assert int(model.calls[...]) == 2
