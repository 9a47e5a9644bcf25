"""Rules whose results misfit: what JAX says of them, with its custom derivatives of today and of tomorrow.

The oracle is vanilla JAX on the same function and rules: the same values, or an error of the same class. With a module
the message is ours, and its class is also that of JAX's.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharedtree as st
from tests.transparency.outcome import Raised, Returned, outcome, vec

custom_gradient = st.preserve_identities(jax.custom_gradient)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    weight: Any
    count: Any = 3


@pytest.fixture(params=[False, True], ids=["", "custom_vjp3"], autouse=True)
def _implementation(request):
    """Runs a test with each of the two implementations of `jax.custom_vjp`."""
    before = jax.config.jax_custom_vjp3
    jax.config.update("jax_custom_vjp3", request.param)
    yield
    jax.config.update("jax_custom_vjp3", before)


def product(x, y):
    return (x * y).sum()


FLOATS = (vec(), vec() + 1)
WITH_INTEGERS = (vec(), jnp.arange(3))

COTANGENTS = {
    "right": lambda residuals, g: (g * FLOATS[1], g * FLOATS[0]),
    "a list": lambda residuals, g: [g * FLOATS[1], g * FLOATS[0]],
    "None": lambda residuals, g: None,
    "an array": lambda residuals, g: g,
    "a dict": lambda residuals, g: {"a": g},
    "too few": lambda residuals, g: (g * FLOATS[1],),
    "too many": lambda residuals, g: (g, g, g),
    "too many, None": lambda residuals, g: (g * FLOATS[1], g * FLOATS[0], None),
    "zeros as None": lambda residuals, g: (None, None),
    "one zero as None": lambda residuals, g: (None, g * FLOATS[0]),
    "the other zero as None": lambda residuals, g: (g * FLOATS[1], None),
    "float0": lambda residuals, g: (g * FLOATS[1], np.zeros(3, jax.dtypes.float0)),
    "scalars": lambda residuals, g: (g, g),
    "another shape": lambda residuals, g: (jnp.ones(4), jnp.ones(3)),
    "another dtype": lambda residuals, g: (jnp.ones(3, jnp.float16), g * FLOATS[0]),
    "integers": lambda residuals, g: (jnp.ones(3, int), g * FLOATS[0]),
    "Python floats": lambda residuals, g: (1.0, g * FLOATS[0]),
    "NumPy's": lambda residuals, g: (np.ones(3), np.ones(3)),
    "a string": lambda residuals, g: ("text", g * FLOATS[0]),
    "another tree": lambda residuals, g: ((g * FLOATS[1],), g * FLOATS[0]),
}


def with_backward(namespace, backward, f=product):
    ruled = namespace.custom_vjp(f)
    ruled.defvjp(lambda *args: (f(*args), None), backward)
    return ruled


def agree(want, found):
    """Whether two outcomes are the same, as far as errors go of the same class."""
    if type(want) is type(found) is Raised:
        return isinstance(found.error, type(want.error))
    return want == found


@pytest.mark.sampled(every=7)
@pytest.mark.parametrize("name", COTANGENTS)
@pytest.mark.parametrize("args", [FLOATS, WITH_INTEGERS], ids=["floats", "integers"])
def test_cotangents(name, args):
    call = lambda namespace: namespace.vjp(with_backward(namespace, COTANGENTS[name]), *args)[1](jnp.float32(1))
    want, found = outcome(lambda: call(jax)), outcome(lambda: call(st))
    assert agree(want, found), (want, found)
    if type(want) is Raised and "`" not in str(found.error):
        assert found == want


TREES = {
    "right": lambda residuals, g: ({"a": g * FLOATS[1], "b": g * FLOATS[0]},),
    "bare": lambda residuals, g: {"a": g * FLOATS[1], "b": g * FLOATS[0]},
    "an array for all": lambda residuals, g: (g,),
    "None for all": lambda residuals, g: (None,),
    "a key is missing": lambda residuals, g: ({"a": g * FLOATS[1]},),
    "None for one": lambda residuals, g: ({"a": None, "b": g * FLOATS[0]},),
    "a list": lambda residuals, g: ([g * FLOATS[1], g * FLOATS[0]],),
    "scalars": lambda residuals, g: ({"a": g, "b": g},),
    "deeper": lambda residuals, g: ({"a": {"c": g * FLOATS[1]}, "b": g * FLOATS[0]},),
}


@pytest.mark.parametrize("name", TREES)
def test_cotangents_of_a_tree(name):
    tree = {"a": FLOATS[0], "b": FLOATS[1]}
    f = lambda tree: product(tree["a"], tree["b"])
    call = lambda namespace: namespace.grad(with_backward(namespace, TREES[name], f))(tree)
    want, found = outcome(lambda: call(jax)), outcome(lambda: call(st))
    assert want == found, (want, found)


OF_MODULES = {
    "right": lambda layer, g: (dataclasses.replace(layer, weight=2 * g * layer.weight, count=None),),
    "a tuple": lambda layer, g: ((2 * g * layer.weight, None),),
    "bare": lambda layer, g: dataclasses.replace(layer, count=None),
    "too many": lambda layer, g: (layer, None),
    "another shape": lambda layer, g: (dataclasses.replace(layer, weight=jnp.ones(4), count=None),),
    "deeper": lambda layer, g: (dataclasses.replace(layer, weight={"a": layer.weight}, count=None),),
}


@pytest.mark.parametrize("name", OF_MODULES)
def test_cotangents_of_modules(name):
    layer, rule = Layer(vec()), OF_MODULES[name]

    def gradient(namespace):
        f = namespace.custom_vjp(lambda layer: (layer.weight**2).sum())
        f.defvjp(lambda layer: (f(layer), layer), rule)
        return namespace.grad(f, allow_int=True)(layer)

    want, found = outcome(lambda: gradient(jax)), outcome(lambda: gradient(st))
    assert type(want) is type(found), (want, found)
    if type(want) is Raised:
        assert isinstance(found.error, type(want.error)), (want, found)
    else:
        np.testing.assert_array_equal(gradient(st).weight, gradient(jax).weight)


NOT_DIFFERENTIATED = {
    "right": lambda n, residuals, g: (n * g * FLOATS[1], n * g * FLOATS[0]),
    "too many": lambda n, residuals, g: (None, n * g * FLOATS[1], n * g * FLOATS[0]),
    "too few": lambda n, residuals, g: (n * g * FLOATS[1],),
    "scalars": lambda n, residuals, g: (g, g),
    "another tree": lambda n, residuals, g: ((g * FLOATS[1],), g * FLOATS[0]),
}


@pytest.mark.parametrize("name", NOT_DIFFERENTIATED)
@pytest.mark.parametrize("options", [{"nondiff_argnums": (0,)}, {"nondiff_argnames": "n"}], ids=str)
def test_arguments_that_are_not_differentiated(name, options):
    def gradient(namespace):
        f = namespace.custom_vjp(lambda n, x, y: n * product(x, y), **options)
        f.defvjp(lambda n, x, y: (n * product(x, y), None), NOT_DIFFERENTIATED[name])
        return namespace.grad(f, argnums=(1, 2))(2, *FLOATS)

    want, found = outcome(lambda: gradient(jax)), outcome(lambda: gradient(st))
    assert agree(want, found), (want, found)


FORWARD = {
    "right": lambda x, y: (product(x, y), None),
    "a list": lambda x, y: [product(x, y), None],
    "no pair": lambda x, y: product(x, y),
    "three": lambda x, y: (product(x, y), None, None),
    "None": lambda x, y: None,
    "another shape": lambda x, y: (x * y, None),
    "another tree": lambda x, y: ((product(x, y),), None),
    "another dtype": lambda x, y: (jnp.int32(1), None),
}


@pytest.mark.parametrize("name", FORWARD)
def test_forward_rules(name):
    def gradient(namespace):
        f = namespace.custom_vjp(product)
        f.defvjp(FORWARD[name], COTANGENTS["right"])
        return namespace.grad(f)(*FLOATS)

    want, found = outcome(lambda: gradient(jax)), outcome(lambda: gradient(st))
    assert agree(want, found), (want, found)


TANGENTS = {
    "right": lambda value, tangents: (value, tangents[0].sum()),
    "a list": lambda value, tangents: [value, tangents[0].sum()],
    "no pair": lambda value, tangents: value,
    "three": lambda value, tangents: (value, value, value),
    "None": lambda value, tangents: (value, None),
    "another tree": lambda value, tangents: (value, (value, value)),
    "another shape": lambda value, tangents: (value, jnp.ones(3)),
    "another dtype": lambda value, tangents: (value, jnp.float16(1)),
    "an integer": lambda value, tangents: (value, 0),
    "a Python float": lambda value, tangents: (value, 1.0),
    "a string": lambda value, tangents: (value, "text"),
    "a value of another shape": lambda value, tangents: (jnp.ones(3), jnp.ones(3)),
    "a value of another tree": lambda value, tangents: ((value,), (value,)),
}


@pytest.mark.parametrize("name", TANGENTS)
def test_tangents(name):
    def derivative(namespace):
        f = namespace.custom_jvp(product)
        f.defjvp(lambda primals, tangents: TANGENTS[name](product(*primals), tangents))
        return namespace.jvp(f, FLOATS, FLOATS)

    want, found = outcome(lambda: derivative(jax)), outcome(lambda: derivative(st))
    assert want == found, (want, found)


def test_an_array_is_no_tangent_of_a_module():
    """As a cotangent it stands for each path. A tied leaf of a result has one tangent, and no sum over its paths."""

    def derivative(namespace, layer):
        f = namespace.custom_jvp(lambda layer: {"out": layer})
        f.defjvp(lambda primals, tangents: ({"out": primals[0]}, {"out": tangents[0].weight}))
        return namespace.jvp(f, (layer,), (layer,))

    w = vec()
    with pytest.raises(TypeError, match="equal container"):
        derivative(jax, Layer(w, w + 1))
    for layer in (Layer(w, w + 1), Layer(w, w)):
        with pytest.raises(TypeError, match="must be a `Layer` with 2 children, but is a traced leaf"):
            derivative(st, layer)


@pytest.mark.parametrize("name", COTANGENTS)
def test_cotangents_of_custom_gradient(name):
    def gradient(custom_gradient):
        f = custom_gradient(lambda x, y: (product(x, y), lambda g: COTANGENTS[name](None, g)))
        return jax.grad(f, argnums=(0, 1))(*FLOATS)

    want, found = outcome(lambda: gradient(jax.custom_gradient)), outcome(lambda: gradient(custom_gradient))
    assert agree(want, found), (want, found)


def test_the_rule_is_used():
    """The rules here are right by chance of the function; this one is wrong by a factor."""
    assert outcome(lambda: st.grad(with_backward(st, lambda _, g: (7 * g * FLOATS[1], None)))(*FLOATS)) == Returned(
        jax.tree.structure(0), outcome(lambda: 7 * FLOATS[1]).leaves
    )
