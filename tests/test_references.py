"""A `jax.Ref` in what is differentiated: in modules of Equinox's as Equinox has it, in others an error with the fix."""

import dataclasses
import inspect
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharedtree as st
from tests.kinds import Free


class Net(eqx.Module):
    weight: Any
    count: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Data:
    weight: Any
    count: Any


def reference(dtype=jnp.float32):
    return jax.new_ref(jnp.zeros((), dtype))


def loss(net):
    """It counts how often it was computed, with what depends on the parameters."""
    net.count[...] = net.count[...] + jax.lax.stop_gradient(net.weight[0]).astype(net.count.dtype)
    return (net.weight**3).sum()


def read(net):
    return (net.weight**3).sum() + net.count[...]


def untouched(net):
    return (net.weight**3).sum()


filtered = st.preserve_identities(eqx.filter_grad)
REVERSE = {
    "grad": lambda f, net: st.grad(f)(net),
    "value_and_grad": lambda f, net: st.value_and_grad(f)(net)[1],
    "jacrev": lambda f, net: st.jacrev(f)(net),
    "vjp": lambda f, net: st.vjp(f, net)[1](jnp.ones(()))[0],
    "filter_grad": lambda f, net: filtered(f)(net),
    "under jit": lambda f, net: st.jit(st.grad(f))(net),
    "a filter": lambda f, net: st.grad(f, wrt=...)(net),
    "one of several": lambda f, net: st.grad(lambda nets: f(nets[1]))([net, net])[1],
}


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("f", [loss, read, untouched])
@pytest.mark.parametrize("how", REVERSE)
def test_in_a_module_of_equinox_it_is_handed_to_the_function(how, f):
    """The oracle is Equinox's own transform."""
    for dtype in (jnp.float32, jnp.int32):
        net = Net(jnp.arange(1.0, 4.0), reference(dtype))
        expected = eqx.filter_grad(f)(net)
        after = np.asarray(net.count[...])
        net.count[...] = jnp.zeros((), dtype)
        found = REVERSE[how](f, net)
        assert found.count is None
        np.testing.assert_allclose(found.weight, expected.weight, rtol=1e-6)
        np.testing.assert_array_equal(net.count[...], after)


@pytest.mark.parametrize("transform", [st.hessian, st.jacfwd])
def test_forward_it_has_no_derivative_either(transform):
    net = Net(jnp.arange(1.0, 4.0), reference())
    vanilla = {st.hessian: eqx.filter_hessian, st.jacfwd: eqx.filter_jacfwd}[transform]
    found, expected = transform(untouched)(net), vanilla(untouched)(net)
    assert found.count is None
    inner = (found.weight, expected.weight)
    if transform is st.hessian:
        inner = tuple(each.weight for each in inner)
    np.testing.assert_allclose(*inner, rtol=1e-6)


def test_one_that_is_in_a_constant_too_is_one():
    """What is not differentiated has no treatment that could differ."""
    count = reference()
    net, other = Net(jnp.ones(3), count), Net(jnp.ones(3), count)

    def both(net, other):
        other.count[...] = other.count[...] + 2.0
        net.count[...] = net.count[...] * 3.0
        return (net.weight * other.weight).sum()

    gradient = st.grad(both)(net, other)
    assert (gradient.count, float(count[...])) == (None, 6.0)


OTHERS = {
    "a dataclass": (Data, lambda net: net, "net.count"),
    "a mutable module": (lambda w, count: Free(weight=w, count=count), lambda net: net, "net.count"),
    "in one of Equinox's": (Data, lambda net: Net(net, None), "net.weight.count"),
    "in a list": (Data, lambda net: [net], "net[0].count"),
    "in a Dag": (Net, st.Dag, "net.count"),
}
REFUSING = {"grad": st.grad, "value_and_grad": st.value_and_grad, "jacrev": st.jacrev, "hessian": st.hessian}


@pytest.mark.parametrize("f", [loss, untouched])
@pytest.mark.parametrize("name", REFUSING)
@pytest.mark.parametrize("how", OTHERS)
def test_in_other_modules_it_is_an_error_with_its_path(how, name, f):
    cls, wrap, path = OTHERS[how]
    own = cls(jnp.arange(1.0, 4.0), reference())
    given = wrap(own)

    def g(net):
        inner = {"in a list": lambda: net[0], "in a Dag": lambda: net.tree, "in one of Equinox's": lambda: net.weight}
        return f(inner.get(how, lambda: net)())

    with pytest.raises(TypeError, match=f"with respect to which `jax.{name}` cannot differentiate") as caught:
        REFUSING[name](g)(given)
    assert f"`{path}` is a `jax.Ref`, with respect to which" in str(caught.value)
    fix = str(caught.value).splitlines()[-1]
    assert fix.startswith(f"    sharedtree.{name}(f, wrt=")
    if name == "hessian" and f is loss:
        return  # a reference cannot hold what is mapped
    transformed = eval(fix.strip(), {"sharedtree": st, "jax": jax, "f": g})
    transformed(given)
    np.testing.assert_array_equal(own.count[...], 0.0 if f is untouched else 1.0)


def test_it_is_refused_only_where_it_is_differentiated():
    net = Data(jnp.arange(1.0, 4.0), reference())
    gradient = st.grad(lambda weight, net: (weight * net.weight).sum() + net.count[...])(jnp.ones(3), net)
    np.testing.assert_array_equal(gradient, net.weight)


def test_several_are_named_by_their_paths_and_variables():
    nnx = pytest.importorskip("flax.nnx")
    # The option has had two names.
    option = "ref" if "ref" in inspect.signature(nnx.Variable.__init__).parameters else "use_ref"

    class Layer(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(jnp.ones(2))
            self.mean = nnx.BatchStat(jnp.zeros(()), **{option: True})

    with pytest.raises(TypeError, match="with respect to which `jax.grad` cannot") as caught:
        st.grad(lambda pair: (pair[0].weight[...] ** 2).sum())((Layer(), Data(jnp.ones(2), reference())))
    text = str(caught.value)
    assert "`pair[0].mean" in text
    assert "`pair[1].count` are `jax.Ref`s" in text
    assert "not isinstance(value, (BatchStat, jax.Ref))" in text


def test_outside_modules_jax_says_what_is_wrong():
    def raised(call):
        try:
            call()
        except Exception as error:
            return type(error), str(error)
        return None

    f = lambda count: count[...] * 2.0
    assert raised(lambda: st.grad(f)(reference())) == raised(lambda: jax.grad(f)(reference()))
