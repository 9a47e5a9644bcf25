"""A `jax.ShapeDtypeStruct` that a function returns or a module holds, under Equinox's transforms and `grad`."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import sharedtree as st
from tests.transparency.outcome import outcome

STRUCT = jax.ShapeDtypeStruct((2,), jnp.float32)
X = jnp.arange(2.0)


class Net(eqx.Module):
    weight: Any
    count: Any = 3


RETURNED = {
    "bare": lambda x: STRUCT,
    "tuple": lambda x: (x, STRUCT),
    "module": lambda x: Net(STRUCT),
    "module with arrays": lambda x: Net(x, STRUCT),
    "mixed": lambda x: {"a": STRUCT, "b": Net(STRUCT, x)},
}

CALLS = {
    "filter_jit": (lambda f: eqx.filter_jit(f)(X), lambda f: st.filter_jit(f)(X)),
    "filter_eval_shape": (lambda f: eqx.filter_eval_shape(f, X), lambda f: st.filter_eval_shape(f, X)),
    "filter_make_jaxpr": (
        lambda f: eqx.filter_make_jaxpr(f)(X)[1:],
        lambda f: st.preserve_identities(eqx.filter_make_jaxpr)(f)(X)[1:],
    ),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", RETURNED)
def test_returned(name, call):
    theirs, ours = CALLS[call]
    want, found = outcome(lambda: theirs(RETURNED[name])), outcome(lambda: ours(RETURNED[name]))
    assert want == found, (want, found)


ARGUMENTS = {"module": Net(STRUCT, X), "module with a number": Net(X, STRUCT), "list": [Net(X, STRUCT), X]}

GRADIENTS = {
    "grad": (eqx.filter_grad, st.grad),
    "value_and_grad": (eqx.filter_value_and_grad, st.value_and_grad),
    "filter_grad": (eqx.filter_grad, st.filter_grad),
    "filter_value_and_grad": (eqx.filter_value_and_grad, st.filter_value_and_grad),
    "filter_vjp": (lambda f: lambda m: eqx.filter_vjp(f, m)[1](1.0), lambda f: lambda m: st.filter_vjp(f, m)[1](1.0)),
}


@pytest.mark.parametrize("transform", GRADIENTS)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_no_gradient(name, transform):
    theirs, ours = GRADIENTS[transform]
    f = lambda tree: sum((leaf**2).sum() for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array))
    want, found = outcome(lambda: theirs(f)(ARGUMENTS[name])), outcome(lambda: ours(f)(ARGUMENTS[name]))
    assert want == found, (want, found)
    # An array in the same place, before and after, has a gradient.
    full = jax.tree.map(lambda leaf: X + 1 if leaf is STRUCT else leaf, ARGUMENTS[name])
    wrapped = ours(f)
    assert outcome(lambda: wrapped(full)) == outcome(lambda: theirs(f)(full))
    assert outcome(lambda: wrapped(ARGUMENTS[name])) == want
