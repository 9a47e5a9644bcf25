"""Every transform inside of every other, on a tied model, against vanilla JAX on a dictionary with one entry a weight.

Each transform is a layer: it makes of a function `(model, x) → number` another one, and looks at the model on both
sides of itself. The layers of vanilla JAX are written again, over the dictionary, which goes in and out as a value.

Both are traced, and their programs are to be the same text, in which each tied leaf goes once into each transform.
Where they are not, they are run, uncompiled, for that takes longer.
"""

import itertools
import os
import re
from collections import Counter, OrderedDict

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

import sharedtree as st
from tests.strategies import Mutable

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
NAMES = ("jit", "grad", "vmap", "checkpoint", "scan", "cond", "jvp", "vjp")

# Two axes before the last one, so that `vmap` within `vmap` finds one for each.
SHAPE = (2, 2, 3)
X = jnp.array([0.3, -0.2, 0.5])


class Embedding(eqx.Module):
    weight: jax.Array


class Decoder(eqx.Module):
    weight: jax.Array
    bias: jax.Array


class Block(eqx.Module):
    scale: jax.Array


class Net(eqx.Module):
    """A weight in two layers of two classes, and a layer in two places, which is also in a list."""

    embed: Embedding
    decoder: Decoder
    first: Block
    blocks: list


def parameters():
    n = jnp.arange(12.0).reshape(SHAPE) / 12
    return in_order(n + 0.1, n - 0.3, 1 - n)


def net(weight, bias, scale):
    block = Block(scale)
    return Net(Embedding(weight), Decoder(weight, bias), block, [block])


def mutable_net(weight, bias, scale):
    block = Mutable(scale=scale)
    embed, decoder = Mutable(weight=weight), Mutable(weight=weight, bias=bias)
    return Mutable(embed=embed, decoder=decoder, first=block, blocks=[block])


def values(model):
    return in_order(model.embed.weight, model.decoder.bias, model.first.scale)


def in_order(weight, bias, scale):
    """As the model has them, while a `dict` sorts its keys."""
    return OrderedDict(weight=weight, bias=bias, scale=scale)


def for_each(f, *dictionaries):
    return in_order(*map(f, *[p.values() for p in dictionaries]))


def require_tied(model):
    assert model.embed.weight is model.decoder.weight
    assert model.first is model.blocks[0]
    return model


def forward(weight, again, bias, scale, x):
    # Few kinds of operations, since each is compiled for each shape where it runs outside of `jit`.
    h = scale * (weight * x)
    return (scale * h * again + bias * bias).sum()


def squares(leaves):
    return sum((leaf * leaf).sum() for leaf in leaves)


def on_model(model, x):
    require_tied(model)
    return forward(model.embed.weight, model.decoder.weight, model.decoder.bias, model.blocks[0].scale, x)


def on_dictionary(p, x):
    return forward(p["weight"], p["weight"], p["bias"], p["scale"], x)


def layers(lib, scan, cond, tree, check):
    """How each transform is used, of the library or of JAX, which has its functions elsewhere."""

    def layer(use):
        def of(f):
            def run(m, x):
                check(m)
                return use(f, m, x)

            return run

        return of

    def through_scan(f, m, x):
        def body(carry, x):
            return tree.map(lambda w: 0.9 * w, check(carry)), f(carry, x)

        last, ys = scan(body, m, jnp.stack([x, -x]))
        return ys.sum() + squares(tree.leaves(check(last)))

    def through_jvp(f, m, x):
        y, rate = lib.jvp(f, (m, x), (check(tree.map(lambda w: 0.5 * w, m)), jnp.ones_like(x)))
        return y + rate

    def through_vjp(f, m, x):
        y, pull = lib.vjp(f, m, x)
        by_model, by_x = pull(jnp.full_like(y, 0.5))
        return y + squares(tree.leaves(check(by_model))) + by_x.sum()

    return {
        "jit": layer(lambda f, m, x: lib.jit(f)(m, x)),
        "grad": layer(lambda f, m, x: squares(tree.leaves(check(lib.grad(f)(m, x))))),
        "vmap": layer(lambda f, m, x: lib.vmap(f, in_axes=(0, None))(m, x).sum()),
        "checkpoint": layer(lambda f, m, x: lib.checkpoint(f)(m, x)),
        "scan": layer(through_scan),
        "cond": layer(lambda f, m, x: cond(x.sum() > 0, f, lambda m, x: f(m, 2 * x), m, x)),
        "jvp": layer(through_jvp),
        "vjp": layer(through_vjp),
    }


OURS = layers(st, st.scan, st.cond, st.tree, require_tied)
VANILLA = layers(jax, jax.lax.scan, jax.lax.cond, jax.tree, lambda p: p)


def operands(jaxpr):
    """How many inputs and outputs the transforms have that are equations with functions of their own."""
    found = Counter()
    for eqn in jaxpr.eqns:
        inner = [
            each for each in jax.tree.leaves(list(eqn.params.values()), is_leaf=has_equations) if has_equations(each)
        ]
        if inner:
            found[eqn.primitive.name, len(eqn.invars), len(eqn.outvars)] += 1
        for each in inner:
            found += operands(getattr(each, "jaxpr", each))
    return found


def has_equations(obj):
    return hasattr(obj, "eqns")


def evaluated(jaxpr):
    """What a jaxpr gives, with nothing of it compiled, for that takes longer."""
    with jax.disable_jit():
        return jaxpr_as_fun(jaxpr)(*jax.tree.leaves((parameters(), X)))


def is_run(outer, inner):
    """Whether a pair is run as it stands, not only traced: daily, each transform inside and outside of two others."""
    return THOROUGH or (NAMES.index(outer) + NAMES.index(inner)) % 4 == 0


def traced(f):
    return jax.make_jaxpr(f)(parameters(), X)


def require_same_program(ours, theirs):
    texts = [re.sub(r"name=\w+", "", str(jaxpr)) for jaxpr in (ours, theirs)]
    if texts[0] == texts[1]:
        return
    for one, other in zip(evaluated(ours), evaluated(theirs), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-5)
    assert operands(ours.jaxpr) == operands(theirs.jaxpr)


PAIRS = list(itertools.product(NAMES, NAMES))


@pytest.mark.parametrize(("outer", "inner"), PAIRS)
def test_as_a_value(outer, inner):
    run = OURS[outer](OURS[inner](on_model))
    theirs = traced(VANILLA[outer](VANILLA[inner](on_dictionary)))
    require_same_program(traced(lambda p, x: run(net(**p), x)), theirs)
    if is_run(outer, inner):
        model = net(**parameters())
        np.testing.assert_allclose(run(model, X), evaluated(theirs)[0], rtol=2e-5)
        require_tied(model)


def written_by_model(model, x):
    """Changes each kind of tie: an array that is bound in two places, and one in a layer that is in two places."""
    y = on_model(model, x)
    assign(model, model.decoder.weight * 0.9 + x, model.decoder.bias + x, model.first.scale - 0.1)
    return y


def written_by_dictionary(p, x):
    return on_dictionary(p, x), in_order(p["weight"] * 0.9 + x, p["bias"] + x, p["scale"] - 0.1)


def assign(model, weight, bias, scale):
    model.embed.weight = model.decoder.weight = weight
    model.decoder.bias = bias
    model.blocks[0].scale = scale


def stepped(p, gradient):
    return for_each(lambda w, g: w - 0.1 * g, p, gradient)


def after(p):
    return squares(p.values())


def step(model, gradient):
    require_tied(gradient)
    assign(model, **stepped(values(model), values(gradient)))


def writing(use):
    """A layer that looks at the model again when the transform has written into it."""

    def of(f):
        def run(m, x):
            require_tied(m)
            holders = m.embed, m.decoder, m.first, m.blocks
            y = use(f, m, x)
            assert all(
                one is other for one, other in zip(holders, (m.embed, m.decoder, m.first, m.blocks), strict=True)
            )
            return y + after(values(require_tied(m)))

        return run

    return of


def threading(use):
    """The same of vanilla JAX: the dictionary comes back with the result."""

    def of(f):
        def run(p, x):
            y, p = use(f, p, x)
            return y + after(p), p

        return run

    return of


def grad_writing(f, m, x):
    gradient = require_tied(st.grad(f, in_place=True)(m, x))
    y = squares(st.tree.leaves(gradient))
    step(m, gradient)
    return y


def grad_threading(f, p, x):
    gradient, p = jax.grad(f, has_aux=True)(p, x)
    return after(gradient), stepped(p, gradient)


def vmap_threading(f, p, x):
    ys, p = jax.vmap(f, in_axes=(0, None))(p, x)
    return ys.sum(), p


def scan_threading(f, p, x):
    def body(p, x):
        y, p = f(p, x)
        return p, y

    p, ys = jax.lax.scan(body, p, jnp.stack([x, -x]))
    return ys.sum(), p


# What `jvp` and `vjp` do to their operands is not written back, so these two change the model by what comes out.


def jvp_writing(f, m, x):
    y, rate = st.jvp(f, (m, x), (st.tree.map(lambda w: 0.5 * w, m), jnp.ones_like(x)), in_place=False)
    step(m, st.tree.map(lambda w: w * rate, m))
    return y


def jvp_threading(f, p, x):
    y, rate = jax.jvp(lambda p, x: f(p, x)[0], (p, x), (for_each(lambda w: 0.5 * w, p), jnp.ones_like(x)))
    return y, stepped(p, for_each(lambda w: w * rate, p))


def vjp_writing(f, m, x):
    y, pull = st.vjp(f, m, x, in_place=False)
    step(m, pull(jnp.ones_like(y))[0])
    return y


def vjp_threading(f, p, x):
    y, pull = jax.vjp(lambda p, x: f(p, x)[0], p, x)
    return y, stepped(p, pull(jnp.ones_like(y))[0])


WRITING_LAYERS = {
    "jit": lambda f, m, x: st.jit(f, in_place=True)(m, x),
    "grad": grad_writing,
    "vmap": lambda f, m, x: st.vmap(f, in_axes=(0, None), in_place=True)(m, x).sum(),
    "checkpoint": lambda f, m, x: st.checkpoint(f, in_place=True)(m, x),
    "scan": lambda f, m, x: st.scan(lambda m, x: (m, f(m, x)), m, jnp.stack([x, -x]), in_place=True)[1].sum(),
    "cond": lambda f, m, x: st.cond(x.sum() > 0, f, lambda m, x: f(m, 2 * x), m, x, in_place=True),
    "jvp": jvp_writing,
    "vjp": vjp_writing,
}

THREADING_LAYERS = {
    "jit": lambda f, p, x: jax.jit(f)(p, x),
    "grad": grad_threading,
    "vmap": vmap_threading,
    "checkpoint": lambda f, p, x: jax.checkpoint(f)(p, x),
    "scan": scan_threading,
    "cond": lambda f, p, x: jax.lax.cond(x.sum() > 0, f, lambda p, x: f(p, 2 * x), p, x),
    "jvp": jvp_threading,
    "vjp": vjp_threading,
}


@pytest.mark.parametrize(("outer", "inner"), [pair for pair in PAIRS if not {*pair} <= {"jvp", "vjp"}])
def test_in_place(outer, inner):
    run, expected = written_by_model, written_by_dictionary
    for name in (inner, outer):
        run, expected = writing(WRITING_LAYERS[name])(run), threading(THREADING_LAYERS[name])(expected)

    def on_copies(p, x):
        copied = mutable_net(**p)
        return run(copied, x), values(copied)

    theirs = traced(expected)
    # Nor does any of what is written back come out twice.
    require_same_program(traced(on_copies), theirs)
    if is_run(outer, inner):
        model = mutable_net(**parameters())
        other = Mutable(embed=model.embed, blocks=model.blocks)
        y, *want = evaluated(theirs)
        np.testing.assert_allclose(run(model, X), y, rtol=2e-5)
        require_tied(model)
        assert (model.embed, model.blocks) == (other.embed, other.blocks)
        for mine, value in zip(values(model).values(), want, strict=True):
            np.testing.assert_allclose(mine, value, rtol=2e-5, atol=1e-5)
        np.testing.assert_array_equal(other.blocks[0].scale, model.first.scale)
