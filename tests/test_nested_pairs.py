"""Every transform inside of every other, on a tied model, against vanilla JAX on a dictionary with one entry a weight.

Each transform is a layer: it makes of a function of `(model, x)` another one, and looks at the model on both sides of
itself. The innermost one changes the model, and each gradient does. The model goes in and out as a value, as the
dictionary does in vanilla JAX, or it is written in place.

All are traced, and their programs are to be the same text, in which each tied leaf goes once into each transform.
Where they are not, they are run, uncompiled, for that takes longer.
"""

import itertools
import os
import re
from collections import Counter, OrderedDict

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


def parameters():
    n = jnp.arange(12.0).reshape(SHAPE) / 12
    return in_order(n + 0.1, n - 0.3, 1 - n)


def net(weight, bias, scale):
    """A weight in two layers with other attributes, and a layer in two places, which is also in a list."""
    block = Mutable(scale=scale)
    embed, decoder = Mutable(weight=weight), Mutable(weight=weight, bias=bias)
    return Mutable(embed=embed, decoder=decoder, first=block, blocks=[block])


def values(model):
    return in_order(model.embed.weight, model.decoder.bias, model.first.scale)


def in_order(weight, bias, scale):
    """As the model has them, while a `dict` sorts its keys."""
    return OrderedDict(weight=weight, bias=bias, scale=scale)


def require_tied(model):
    assert model.embed.weight is model.decoder.weight
    assert model.first is model.blocks[0]
    return model


def forward(weight, again, bias, scale, x):
    # Few kinds of operations, since each is compiled for each shape where it runs outside of `jit`.
    h = scale * (weight * x)
    return (scale * h * again + bias * bias).sum()


def changed(p, x):
    """Each kind of tie: an array that is bound in two places, and one in a layer that is in two places."""
    return in_order(p["weight"] * 0.9 + x, p["bias"] + x, p["scale"] - 0.1)


def on_model(model, x):
    require_tied(model)
    return forward(model.embed.weight, model.decoder.weight, model.decoder.bias, model.blocks[0].scale, x)


def on_value(model, x):
    return on_model(model, x), net(**changed(values(model), x))


def on_dictionary(p, x):
    return forward(p["weight"], p["weight"], p["bias"], p["scale"], x), changed(p, x)


def on_what_is_written(model, x):
    y = on_model(model, x)
    assign(model, **changed(values(model), x))
    return y


def assign(model, weight, bias, scale):
    model.embed.weight = model.decoder.weight = weight
    model.decoder.bias = bias
    model.blocks[0].scale = scale


def squares(leaves):
    return sum((leaf * leaf).sum() for leaf in leaves)


def stepped(tree, model, gradient):
    return tree.map(lambda w, g: w - 0.1 * g, model, gradient)


def layers(lib, scan, cond, tree, check):
    """How each transform is used, of the library or of JAX, which has its functions elsewhere."""

    def layer(use):
        def of(f):
            def run(m, x):
                y, m = use(f, check(m), x)
                return y + squares(tree.leaves(check(m))), m

            return run

        return of

    def through_grad(f, m, x):
        gradient, m = lib.grad(f, has_aux=True)(m, x)
        return squares(tree.leaves(check(gradient))), stepped(tree, m, gradient)

    def through_vmap(f, m, x):
        ys, m = lib.vmap(f, in_axes=(0, None))(m, x)
        return ys.sum(), m

    def through_scan(f, m, x):
        m, ys = scan(lambda m, x: f(check(m), x)[::-1], m, jnp.stack([x, -x]))
        return ys.sum(), m

    def through_jvp(f, m, x):
        tangents = check(tree.map(lambda w: 0.5 * w, m)), jnp.ones_like(x)
        y, rate = lib.jvp(lambda m, x: f(m, x)[0], (m, x), tangents)
        return y, stepped(tree, m, tree.map(lambda w: w * rate, m))

    def through_vjp(f, m, x):
        y, pull = lib.vjp(lambda m, x: f(m, x)[0], m, x)
        by_model, by_x = pull(jnp.full_like(y, 0.5))
        return y + by_x.sum(), stepped(tree, m, check(by_model))

    return {
        "jit": layer(lambda f, m, x: lib.jit(f)(m, x)),
        "grad": layer(through_grad),
        "vmap": layer(through_vmap),
        "checkpoint": layer(lambda f, m, x: lib.checkpoint(f)(m, x)),
        "scan": layer(through_scan),
        "cond": layer(lambda f, m, x: cond(x.sum() > 0, f, lambda m, x: f(m, 2 * x), m, x)),
        "jvp": layer(through_jvp),
        "vjp": layer(through_vjp),
    }


OURS = layers(st, st.scan, st.cond, st.tree, require_tied)
VANILLA = layers(jax, jax.lax.scan, jax.lax.cond, jax.tree, lambda p: p)


def step(model, gradient):
    assign(model, **stepped(jax.tree, values(model), values(require_tied(gradient))))


def grad_writing(f, m, x):
    gradient = st.grad(f, in_place=True)(m, x)
    step(m, gradient)
    return squares(st.tree.leaves(gradient))


# What `jvp` and `vjp` do to their operands is not written back, so these two change the model by what comes out.


def jvp_writing(f, m, x):
    y, rate = st.jvp(f, (m, x), (st.tree.map(lambda w: 0.5 * w, m), jnp.ones_like(x)), in_place=False)
    step(m, st.tree.map(lambda w: w * rate, m))
    return y


def vjp_writing(f, m, x):
    y, pull = st.vjp(f, m, x, in_place=False)
    by_model, by_x = pull(jnp.full_like(y, 0.5))
    step(m, by_model)
    return y + by_x.sum()


WRITING = {
    "jit": lambda f, m, x: st.jit(f, in_place=True)(m, x),
    "grad": grad_writing,
    "vmap": lambda f, m, x: st.vmap(f, in_axes=(0, None), in_place=True)(m, x).sum(),
    "checkpoint": lambda f, m, x: st.checkpoint(f, in_place=True)(m, x),
    "scan": lambda f, m, x: st.scan(lambda m, x: (m, f(m, x)), m, jnp.stack([x, -x]), in_place=True)[1].sum(),
    "cond": lambda f, m, x: st.cond(x.sum() > 0, f, lambda m, x: f(m, 2 * x), m, x, in_place=True),
    "jvp": jvp_writing,
    "vjp": vjp_writing,
}


def writing(name, f):
    """A layer that looks at the model again when the transform has written into it."""

    def run(m, x):
        holders = m.embed, m.decoder, m.first, m.blocks
        y = WRITING[name](f, require_tied(m), x)
        assert all(one is other for one, other in zip(holders, (m.embed, m.decoder, m.first, m.blocks), strict=True))
        return y + squares(values(require_tied(m)).values())

    return run


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
    require_same_values(evaluated(ours), evaluated(theirs))
    assert operands(ours.jaxpr) == operands(theirs.jaxpr)


def require_same_values(found, expected):
    for one, other in zip(jax.tree.leaves(found), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize(("outer", "inner"), [*itertools.product(NAMES, NAMES)])
@pytest.mark.slow
def test_pairs(outer, inner):
    theirs = traced(VANILLA[outer](VANILLA[inner](on_dictionary)))
    expected = evaluated(theirs) if is_run(outer, inner) else None

    run = OURS[outer](OURS[inner](on_value))
    require_same_program(traced(lambda p, x: returned(*run(net(**p), x))), theirs)
    if expected:
        model = net(**parameters())
        y, after = run(model, X)
        require_same_values((y, values(require_tied(after))), expected)
        require_same_values(values(require_tied(model)), parameters().values())

    write = writing(outer, writing(inner, on_what_is_written))

    def on_copies(p, x):
        copied = net(**p)
        return returned(write(copied, x), copied)

    # Nor does any of what is written back come out twice.
    require_same_program(traced(on_copies), theirs)
    if expected:
        model = net(**parameters())
        other = Mutable(embed=model.embed, blocks=model.blocks)
        require_same_values((write(model, X), values(require_tied(model))), expected)
        assert (model.embed, model.blocks) == (other.embed, other.blocks)
        np.testing.assert_array_equal(other.blocks[0].scale, model.first.scale)


def returned(y, model):
    return y, values(model)
