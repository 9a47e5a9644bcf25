"""Every kind of leaf, in every place, through what traces and computes nothing, and to the host and back."""

import equinox as eqx
import jax
import jax.experimental
import numpy as np
import pytest

import sharedtree as st
from tests.transparency.outcome import LEAVES, PLACES, outcome, separate
from tests.transparency.test_leaves import CONSTANTS, UNTRACEABLE, mixture_with


def shapes(transform):
    return lambda f, tree: transform(f, tree)


def jaxpr(transform):
    def made(f, tree):
        program, shape = transform(f, return_shape=True)(tree)
        return str(program), shape

    return made


def jaxpr_of_equinox(transform):
    def made(f, tree):
        program, shape, others = transform(f)(tree)
        return str(program), shape, others

    return made


def combined(f, tree):
    program, shape, others = eqx.filter_make_jaxpr(f)(tree)
    return str(program), eqx.combine(shape, others)


WAYS = {  # ours, vanilla, vanilla for Equinox's modules
    "eval_shape": (shapes(st.eval_shape), shapes(jax.eval_shape), shapes(eqx.filter_eval_shape)),
    "filter_eval_shape": (
        shapes(st.preserve_identities(eqx.filter_eval_shape)),
        shapes(eqx.filter_eval_shape),
        shapes(eqx.filter_eval_shape),
    ),
    "make_jaxpr": (jaxpr(st.make_jaxpr), jaxpr(jax.make_jaxpr), combined),
    "filter_make_jaxpr": (
        jaxpr_of_equinox(st.preserve_identities(eqx.filter_make_jaxpr)),
        jaxpr_of_equinox(eqx.filter_make_jaxpr),
        jaxpr_of_equinox(eqx.filter_make_jaxpr),
    ),
}


@pytest.mark.parametrize("leaf", LEAVES)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", WAYS)
def test_what_comes_out_is_what_vanilla_says(way, place, leaf):
    put, module = PLACES[place].put, PLACES[place].module
    if module == "jax" and leaf in UNTRACEABLE:
        pytest.skip("JAX refuses it; with us it is static in any module")
    ours, vanilla, vanilla_of_equinox = WAYS[way]
    tree = separate(put(LEAVES[leaf]()))
    mixture = mixture_with(CONSTANTS[module])
    # A module that is returned twice is two for vanilla, and one for us.
    f = (lambda tree: mixture(tree)[:2]) if "jaxpr" in way else mixture
    want = outcome(lambda: (vanilla_of_equinox if module == "equinox" else vanilla)(f, tree))
    assert outcome(lambda: ours(f, tree)) == want


ARRAYS = ("float array", "int array", "bool array", "bf16", "weak scalar", "numpy array", "numpy ints")


@pytest.mark.parametrize("leaf", ARRAYS)
@pytest.mark.parametrize("place", [place for place in PLACES if place != "deque"])
@pytest.mark.parametrize("transform", [jax.pure_callback, jax.experimental.io_callback])
def test_callbacks_hand_over_what_vanilla_does(transform, place, leaf):
    tree = separate(PLACES[place].put(LEAVES[leaf]()))
    dynamic, static = eqx.partition(tree, lambda x: isinstance(x, (jax.Array, np.ndarray)))
    found = []

    def host(tree):
        found.append([(type(x), x.dtype, x.shape) for x in jax.tree.leaves(tree) if hasattr(x, "dtype")])
        return tree

    want = outcome(lambda: eqx.combine(transform(host, dynamic, dynamic), static))
    assert outcome(lambda: st.preserve_identities(transform)(host, tree, tree)) == want
    assert found[0] == found[-1] != []
