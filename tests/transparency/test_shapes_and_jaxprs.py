"""Every kind of leaf, in every place, through what traces and computes nothing."""

import functools

import equinox as eqx
import jax
import pytest

import sharedtree as st
from tests.transparency.leaves import UNTRACEABLE, apart, each_mixed, put
from tests.transparency.outcome import LEAVES, PLACES, differing, differing_alone


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


SHAPES, JAXPR = shapes(eqx.filter_eval_shape), jaxpr_of_equinox(eqx.filter_make_jaxpr)
WAYS = {  # ours, vanilla, vanilla for Equinox's modules
    "eval_shape": (shapes(st.eval_shape), shapes(jax.eval_shape), SHAPES),
    "filter_eval_shape": (shapes(st.preserve_identities(eqx.filter_eval_shape)), SHAPES, SHAPES),
    "make_jaxpr": (jaxpr(st.make_jaxpr), jaxpr(jax.make_jaxpr), combined),
    "filter_make_jaxpr": (jaxpr_of_equinox(st.preserve_identities(eqx.filter_make_jaxpr)), JAXPR, JAXPR),
}


@pytest.mark.parametrize(
    ("way", "place"), [(way, place) for way in WAYS for place in PLACES if "filter" not in way or place != "deque"]
)
def test_what_comes_out_is_what_vanilla_says(way, place):
    module = PLACES[place].module
    ours, vanilla, vanilla_of_equinox = WAYS[way]
    # A module that is returned twice is two for vanilla, and one for us.
    f = each_mixed(module, slice(2) if "jaxpr" in way else slice(3))
    both = functools.partial(vanilla_of_equinox if module == "equinox" else vanilla, f), functools.partial(ours, f)
    # What JAX refuses in a registered class is static with us.
    fits = [leaf for leaf in LEAVES if module != "jax" or leaf not in UNTRACEABLE]
    alone = put(place, [leaf for leaf in fits if leaf in apart(eqx.filter_jit if "filter" in way else jax.jit, place)])
    together = put(place, [leaf for leaf in fits if leaf not in alone])
    wrong = differing_alone(alone, *both)
    assert wrong | (differing(together, *both) if together else {}) == {}
