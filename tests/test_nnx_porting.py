"""The table in `docs/from_nnx.md`: what replaces each function of Flax NNX gives what that function gives.

Each row is done twice, with two models that begin alike: once by NNX, once by what the page says. Values and the state
of the model must be equal afterwards.
"""

import functools
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec

import sharedtree as st
from tests.nnx_layers import assert_equal

pytest.importorskip("flax", minversion="0.12.1")
nnx: Any = pytest.importorskip("flax.nnx")

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "from_nnx.md"


X = jnp.sin(jnp.arange(12.0)).reshape(4, 3)


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


def forward(model, x):
    return model(x)


def loss(model, x):
    return (model(x) ** 2).mean()


def axes_of(model):
    """What is a prefix of a model: an axis for each variable, which only parameters have."""
    return jax.tree.map(
        lambda variable: 0 if isinstance(variable, nnx.Param) else None,
        model,
        is_leaf=lambda node: isinstance(node, nnx.Variable),
    )


class Small(nnx.Module):
    def __init__(self, weight):
        self.weight = nnx.Param(weight)
        self.scale = nnx.BatchStat(jnp.array(2.0))
        self.again = self.weight

    def __call__(self, x):
        return (x * self.weight[...] * self.scale[...] + self.again[...]).sum()


def stacked():
    """A model whose parameters are two models'."""
    return Small(jnp.array([[1.0, 2.0], [3.0, -1.0]]))


def small():
    return Small(jnp.array([1.0, 2.0]))


def linear():
    return nnx.Linear(3, 2, rngs=nnx.Rngs(0))


S = jnp.array([0.5, -2.0])


def vmap_of_nnx(model):
    axes = nnx.StateAxes({nnx.Param: 0, ...: None})
    return nnx.vmap(lambda model, x: model(x), in_axes=(axes, None))(model, S)


def scan_of_nnx(model):
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def run(model, x):
        return model, model(x)

    return run(model, jnp.stack([X, 2 * X]))[1]


def with_own_rule(custom_vjp):
    """A rule of one's own, which is not what JAX would make of it."""
    f = custom_vjp(lambda model, x: model(x).sum())
    f.defvjp(
        lambda model, x: (model(x).sum(), (model, x)),
        lambda kept, g: (st.tree.map(lambda leaf: 2 * g * jnp.ones_like(leaf), kept[0]), g * kept[1]),
    )
    return f


def params(gradient):
    return nnx.state(gradient, nnx.Param)


def tangents(model):
    """Ones in the shape of a model, tied as it is."""
    return st.tree.map(jnp.ones_like, model)


def train(value_and_grad, jit, model):
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @jit
    def step(model, optimizer, x):
        value, gradient = value_and_grad(loss)(model, x)
        optimizer.update(model, gradient)
        return value

    return [step(model, optimizer, X) for _ in range(2)]


def sharded(shard_map, model):
    def scale(model, x):
        model.scale[...] *= 2
        return x * model.weight[...]

    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    whole, split = PartitionSpec(), PartitionSpec("i")
    return shard_map(scale, mesh=mesh, in_specs=(whole, split), out_specs=split)(model, S)


def update(jit, model):
    def double(model):
        nnx.update(model, jax.tree.map(lambda leaf: 2 * leaf, nnx.state(model, nnx.Param)))

    jit(double)(model)


def split_of_nnx(model):
    graphdef, state = nnx.split(model)

    @jax.jit
    def run(state, x):
        model = nnx.merge(graphdef, state)
        return model(x), nnx.state(model)

    out, state = run(state, X)
    nnx.update(model, state)
    return out


def rngs_of_nnx(model):
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0, None))
    def draw(rngs, x):
        return rngs.dropout.uniform(x.shape)

    return draw(model, S)


def rngs_of_ours(model):
    draw = nnx.split_rngs(splits=3)(st.vmap(lambda r, x: r.dropout.uniform(x.shape), in_axes=(0, None), in_place=True))
    return draw(model, S)


def rngs():
    return nnx.Rngs(dropout=0)


def in_place(name, **options):
    return functools.partial(getattr(st, name), in_place=True, **options)


# Where only the transform is another one, with `in_place=True`: what makes the model, and what is done with it.
ALIKE = {
    "jit": (net, lambda jit, m: jit(forward)(m, X)),
    "value_and_grad": (small, lambda value_and_grad, m: value_and_grad(loss)(m, S)[0]),
    "vmap": (stacked, lambda vmap, m: vmap(forward, in_axes=(None, 0))(m, jnp.stack([S, 2 * S]))),
    "cond": (net, lambda cond, m: cond(jnp.array(True), forward, lambda m, x: x, m, X)),
    "switch": (small, lambda switch, m: switch(1, [lambda m, x: x.sum(), forward], m, S)),
    "while_loop": (net, lambda loop, m: loop(lambda c: c[0].calls[...] < 2, lambda c: (c[0], c[0](c[1])), (m, X))[1]),
    "fori_loop": (net, lambda loop, m: loop(0, 2, lambda i, c: (c[0], c[0](c[1])), (m, X))[1]),
    "pmap": (stacked, lambda pmap, m: pmap(forward, in_axes=(None, 0))(m, S[None])),
    "shard_map": (small, sharded),
}
SELECTING = {"value_and_grad": {"wrt": nnx.Param}}


def jitted(model):
    return st.jit(forward, in_place=True)(model, S)


# What is replaced: what makes the model, NNX's way, ours.
ROWS = {
    **{
        name: (
            build,
            functools.partial(call, getattr(nnx, name)),
            functools.partial(call, in_place(name, **SELECTING.get(name, {}))),
        )
        for name, (build, call) in ALIKE.items()
    },
    "jit_partial": (small, lambda m: nnx.jit_partial(forward, m, graph=True, graph_updates=False)(S), jitted),
    "cached_partial": (small, lambda m: nnx.cached_partial(nnx.jit(forward), m)(S), jitted),
    "grad": (
        small,
        lambda m: nnx.grad(loss)(m, S),
        lambda m: params(st.grad(loss, wrt=nnx.Param, in_place=True)(m, S)),
    ),
    "DiffState": (
        small,
        lambda m: nnx.grad(loss, argnums=nnx.DiffState(0, nnx.BatchStat))(m, S),
        lambda m: nnx.state(st.grad(loss, argnums=0, wrt=nnx.BatchStat, in_place=True)(m, S), nnx.BatchStat),
    ),
    "StateAxes": (stacked, vmap_of_nnx, lambda m: st.vmap(forward, in_axes=(axes_of(m), None), in_place=True)(m, S)),
    "scan": (net, scan_of_nnx, lambda m: st.scan(lambda m, x: (m, m(x)), m, jnp.stack([X, 2 * X]), in_place=True)[1]),
    "remat": (
        small,
        lambda m: nnx.grad(nnx.remat(loss))(m, S),
        lambda m: params(st.grad(st.remat(loss, in_place=True), wrt=nnx.Param, in_place=True)(m, S)),
    ),
    "eval_shape": (small, lambda m: nnx.state(nnx.eval_shape(small)), lambda m: nnx.state(st.eval_shape(small))),
    "make_jaxpr": (
        linear,
        lambda m: len(nnx.make_jaxpr(forward, graph_updates=False)(m, X).jaxpr.invars),
        lambda m: len(st.make_jaxpr(forward)(m, X).jaxpr.invars),
    ),
    "jvp": (
        small,
        lambda m: nnx.jvp(forward, (m, S), (tangents(m), jnp.ones(2)), graph_updates=False),
        lambda m: st.jvp(forward, (m, S), (tangents(m), jnp.ones(2))),
    ),
    "vjp": (
        small,
        lambda m: nnx.vjp(forward, m, S, graph_updates=False)[1](jnp.array(1.0))[1],
        lambda m: st.vjp(forward, m, S)[1](jnp.array(1.0))[1],
    ),
    "custom_vjp": (
        linear,
        lambda m: params(nnx.grad(with_own_rule(nnx.custom_vjp(graph_updates=False)), graph_updates=False)(m, X)),
        lambda m: params(st.grad(with_own_rule(st.custom_vjp), wrt=nnx.Param, in_place=True)(m, X)),
    ),
    "Optimizer": (
        net,
        lambda m: train(nnx.value_and_grad, nnx.jit, m),
        lambda m: train(in_place("value_and_grad", wrt=nnx.Param), in_place("jit"), m),
    ),
    "update": (small, lambda m: update(nnx.jit, m), lambda m: update(in_place("jit"), m)),
    "split": (net, split_of_nnx, lambda m: st.jit(forward, in_place=True)(m, X)),
    "split_rngs": (rngs, rngs_of_nnx, rngs_of_ours),
    "clone": (small, lambda m: nnx.state(nnx.clone(m)), lambda m: nnx.state(st.copy(m))),
    "find_duplicates": (
        small,
        lambda m: [[".".join(map(str, path)) for path in paths] for paths in nnx.find_duplicates(m)],
        lambda m: [[path.removeprefix(".") for path in tie.paths] for tie in st.ties(m)],
    ),
}


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("name", ROWS)
def test_row(name):
    build, theirs, ours = ROWS[name]
    mine, reference = build(), build()
    assert_equal(ours(mine), theirs(reference))
    assert_equal(nnx.state(mine), nnx.state(reference))
    assert nnx.graphdef(mine) == nnx.graphdef(reference)


def test_the_page_has_these_rows():
    page = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `nnx\.(\w+)", page, re.MULTILINE)
    assert len(rows) == len(set(rows))
    assert set(rows) == set(ROWS)
