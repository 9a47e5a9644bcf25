"""JAX's own errors about carries and exported programs name what vanilla JAX names: the parameter, the argument."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sharedtree as st


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Net:
    weight: Any


W = jnp.ones(2)

CARRIES = {"array": W, "dict": {"a": W}, "module": Net(W), "module in a list": [Net(W)]}


def halved(state):
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float16), state)


LOOPS = {
    "scan": lambda jax, init: jax.scan(lambda state, x: (halved(state), None), init, None, length=2),
    "while_loop": lambda jax, init: jax.while_loop(lambda carry: True, lambda state: halved(state), init),
    "fori_loop": lambda jax, init: jax.fori_loop(0, 2, lambda i, state: halved(state), init),
    "in another": lambda jax, init: jax.scan(
        lambda init, x: (jax.while_loop(lambda c: True, lambda state: halved(state), init), None), init, None, length=2
    ),
}


@pytest.mark.parametrize("carry", CARRIES)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_carry(loop, carry):
    with pytest.raises(TypeError) as want:
        LOOPS[loop](jax.lax, CARRIES[carry])
    with pytest.raises(TypeError) as found:
        LOOPS[loop](st, CARRIES[carry])
    # JAX calls the carry of a `fori_loop` by its own loop's parameter.
    text = str(want.value).replace("loop_carry[1]", "state").replace("carry component state has", "carry state has")
    assert str(found.value).replace("carry component state has", "carry state has") == text


OTHERS = {"shape": jnp.ones(3), "rank": jnp.ones(()), "dtype": jnp.arange(2)}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("make", [lambda leaf: leaf, Net, lambda leaf: {"a": [leaf]}], ids=["array", "Net", "dict"])
def test_the_argument_of_a_program(make, other):
    f = lambda first, x: jax.tree.map(lambda leaf: 2 * leaf, (first, x))
    with pytest.raises(ValueError) as want:
        jax.export.export(jax.jit(lambda *args: jax.tree.leaves(f(*args))))([1.0], [W]).call([1.0], [OTHERS[other]])
    with pytest.raises(ValueError) as found:
        st.export(f)(1.0, make(W)).call(1.0, make(OTHERS[other]))
    place = jax.tree_util.keystr(jax.tree_util.tree_flatten_with_path(make(W))[0][0][0])
    assert str(found.value) == str(want.value).replace("args[1][0]", f"x{place}")
