"""What an outer transform was told, and an inner one was not: `in_place` and `containers`. Against plain Python."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import sharedtree as st
from tests.strategies import Mutable


class Counter(st.Module):
    def __init__(self):
        self.w = jnp.array([1.0, 2.0])
        self.count = jnp.zeros(())


class NNXCounter(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.array([1.0, 2.0]))
        self.count = nnx.Variable(jnp.zeros(()))


def plain():
    return Mutable(w=jnp.array([1.0, 2.0]), count=jnp.zeros(()))


MODELS = {"Module": Counter, "NNX": NNXCounter, "plain": plain}


def value(leaf):
    return leaf[...] if isinstance(leaf, nnx.Variable) else leaf


def add_one(model):
    if isinstance(model.count, nnx.Variable):
        model.count[...] += 1
    else:
        model.count = model.count + 1


def made():
    """A new function, which nobody has traced yet."""

    def loss(model, x):
        add_one(model)
        return (value(model.w) * x).sum()

    return loss


INNER = {
    "grad": lambda f, model, x, **told: st.grad(f, **told)(model, x),
    "value_and_grad": lambda f, model, x, **told: st.value_and_grad(f, **told)(model, x),
    "jit": lambda f, model, x, **told: st.jit(f, **told)(model, x),
    "vmap": lambda f, model, x, **told: st.vmap(f, in_axes=(None, 0), **told)(model, x).sum(),
    "checkpoint": lambda f, model, x, **told: st.checkpoint(f, **told)(model, x),
    "Equinox's": lambda f, model, x, **told: st.preserve_identities(eqx.filter_grad, **told)(f)(model, x),
    "cond": lambda f, model, x, **told: st.cond(True, f, f, model, x, **told),
}
OUTER = {
    "jit": lambda f, *args: st.jit(f, in_place=True)(*args),
    "checkpoint": lambda f, *args: st.checkpoint(f, in_place=True)(*args),
    "by a policy": lambda f, *args: st.jit(f, policy=st.Policy(in_place=True))(*args),
}


IN_CODE = {
    "Equinox's": "sharedtree.filter_grad(f, in_place={})",
    "cond": "functools.partial(sharedtree.cond, in_place={})",
    "vmap": "sharedtree.vmap(f, in_axes=(None, 0), in_place={})",
}


def run(outer, inner, f, model, **told):
    """The warnings of an inner transform under an outer one."""

    def step(model, x):
        INNER[inner](f, model, x, **told)
        return jnp.zeros(())

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        OUTER[outer](step, model, jnp.ones(2))
    return caught


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("outer", OUTER)
def test_what_an_inner_transform_was_not_told_is_said(outer, inner, kind):
    loss = made()
    (warning,) = run(outer, inner, loss, MODELS[kind]())
    assert warning.category is st.errors.LostChangeWarning
    assert (warning.filename, warning.lineno) == (__file__, loss.__code__.co_firstlineno)
    place = "[<flat index 1>]" if kind == "plain" else ".count"  # it was registered without keys
    assert f"`{'operands[0]' if inner == 'cond' else 'model'}{place}`" in str(warning.message)
    # A batch that is scaled must not be written back, and with the axis None nothing can be.
    for told in (True, False):
        code = IN_CODE.get(inner, f"sharedtree.{inner}(f, in_place={{}})").format(told)
        is_offered = not told or (kind != "plain" and inner != "vmap")
        assert (f"    inner = {code}\n" in f"{warning.message}\n") == is_offered
    assert ("    return result, " in str(warning.message)) == (kind == "plain")
    for told in ({"in_place": False}, {"policy": st.Policy(in_place=False)}):
        model = MODELS[kind]()
        assert not run(outer, inner, made(), model, **told)
        assert value(model.count) == 0


@pytest.mark.parametrize("kind", MODELS)
def test_what_loses_nothing_is_silent(kind):
    def returns_it(model, x):
        add_one(model)
        return (value(model.w) * x).sum(), model

    def returns_the_change(model, x):
        add_one(model)
        return (value(model.w) * x).sum(), value(model.count)

    def changes_nothing(model, x):
        return (value(model.w) * x).sum()

    def has_aux(f):
        return lambda model, x: st.grad(f, has_aux=True)(model, x)[0]

    def steps(model, x):
        for f in (has_aux(returns_it), has_aux(returns_the_change), st.grad(changes_nothing)):
            f(model, x)
        # Nor is what an inner transform does within one that was told that it is not in place.
        st.jit(lambda model, x: st.grad(made())(model, x), in_place=False)(model, x)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        st.jit(steps, in_place=True)(MODELS[kind](), jnp.ones(2))
        if kind == "plain":
            # Where nothing is in place around it, an object of no library that keeps state is scratch.
            st.grad(made())(MODELS[kind](), jnp.ones(2))
            st.jit(st.grad(made()))(MODELS[kind](), jnp.ones(2))
        model = MODELS[kind]()
        st.jit(st.grad(made(), in_place=True), in_place=True)(model, jnp.ones(2))
    assert value(model.count) == 1


def test_dropout_with_one_mask_is_said():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.linear, self.dropout = nnx.Linear(4, 4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def dropped(net, x):
        return net.dropout(net.linear(x)).sum()

    net = Net(nnx.Rngs(0))
    with pytest.warns(st.errors.LostChangeWarning, match="dropped"):
        st.jit(lambda net, x: st.grad(dropped)(net, x), in_place=True)(net, jnp.ones((2, 4)))
    before = int(net.dropout.rngs.count[...])
    st.jit(lambda net, x: st.grad(dropped, in_place=True)(net, x), in_place=True)(net, jnp.ones((2, 4)))
    assert int(net.dropout.rngs.count[...]) == before + 1


# `containers`

CONTAINERS = st.Policy(containers=True)


def of_dict(params, x):
    return (params["embed"] * params["head"] * x).sum()


def tied_dict():
    w = jnp.array([1.0, 2.0])
    return {"embed": w, "head": w}


DIFFERENTIATE = {
    "grad": lambda f, params, x, **told: st.grad(f, **told)(params, x),
    "under jit": lambda f, params, x, **told: st.jit(st.grad(f, **told), **told)(params, x),
    "vjp": lambda f, params, x, **told: st.vjp(f, params, x, **told)[1](jnp.ones(()))[0],
    "mapped": lambda f, params, x, **told: st.grad(f, **told)(st.tree.map(lambda w: 1 * w, params), x),
}


@pytest.mark.parametrize("inner", DIFFERENTIATE)
@pytest.mark.parametrize("outer", [st.jit, st.checkpoint])
def test_what_an_outer_policy_made_one_is_said_where_an_inner_one_parts_it(outer, inner):
    def step(params, x, **told):
        def f(params, x):
            return of_dict(params, x)

        return DIFFERENTIATE[inner](f, params, x, **told)["embed"]

    x = jnp.ones(2)
    with pytest.warns(st.UntiedWarning, match=r"`params\['embed'\]` and `params\['head'\]` are one array") as caught:
        outer(step, policy=CONTAINERS)(tied_dict(), x)
    assert all("sharedtree.Policy(containers=True)" in str(each.message) for each in caught)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Told so, the gradient is that of both paths, as vanilla JAX has it for the one array.
        gradient = outer(lambda *args: step(*args, policy=CONTAINERS), policy=CONTAINERS)(tied_dict(), x)
        whole = jax.grad(lambda w: of_dict({"embed": w, "head": w}, x))(jnp.array([1.0, 2.0]))
        np.testing.assert_array_equal(gradient, whole)
        # Values are values where nobody made them one, and what was made one inside says nothing of it outside.
        outer(step)(tied_dict(), x)
        outer(step, policy=CONTAINERS)({"embed": jnp.ones(2), "head": jnp.zeros(2)}, x)
        returned = outer(lambda params: params, policy=CONTAINERS)(tied_dict())
        assert returned["embed"] is returned["head"]
        step(returned, x)
