"""Python numbers in modules of whose leaves all are traced, under rules: as in vanilla JAX, values and gradients.

JAX gives rules objects of classes of its own for numbers (`jax._src.literals.TypedFloat`).
"""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharedtree as st
from sharedtree.core._jax_internals import TYPED_NUMBERS


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Scaled:
    w: Any
    k: Any


FACTOR = 3.0
"""The rules are wrong by this factor, so that one sees whether they were used."""


def grown(model):
    """A result that holds the number as it is."""
    return Scaled(2 * model.w, model.k)


def value(model):
    return model.w * model.k


# Functions of a model, each with its pullback, which is kept for in a module that holds the number, and pushforward.
FUNCTIONS = {
    "grown": (grown, *(lambda m, y: Scaled(2 * FACTOR * y.w, FACTOR * y.k),) * 2),
    "value": (
        value,
        lambda m, y: Scaled(FACTOR * y * m.k, FACTOR * y * m.w),
        lambda m, dot: FACTOR * (dot.w * m.k + m.w * dot.k),
    ),
}


def by_vjp(wrap, f, pullback, pushforward):
    g = wrap(jax.custom_vjp)(f)
    g.defvjp(lambda m: (g(m), m), lambda m, y: (pullback(m, y),))
    return g


def by_jvp(wrap, f, pullback, pushforward):
    g = wrap(jax.custom_jvp)(f)
    g.defjvp(lambda ms, dots: (g(*ms), pushforward(*ms, *dots)))
    return g


def by_gradient(wrap, f, pullback, pushforward):
    return wrap(jax.custom_gradient)(lambda m: (f(m), lambda y: (pullback(m, y),)))


def put_in_by_vjp(wrap):
    """The number becomes part of a module in the function."""
    f = wrap(jax.custom_vjp)(lambda model, k: Scaled(model.w, model.k * k))
    f.defvjp(lambda m, k: (Scaled(m.w, k), m), lambda m, y: (Scaled(FACTOR * y.w, y.k), FACTOR * y.k))
    return lambda model: f(model, model.k)


def ruled(name, make, wrap):
    """(model) → a number, through a function under a rule."""
    f = put_in_by_vjp(wrap) if name == "put in" else make(wrap, *FUNCTIONS[name])
    return f if name == "value" else lambda model: value(f(model))


RULES = [*((name, make) for name in FUNCTIONS for make in (by_vjp, by_jvp, by_gradient)), ("put in", by_vjp)]
vanilla = lambda transform: transform


def typed(tree):
    """The leaves, each with its type."""
    return [(np.asarray(leaf).tolist(), jax.typeof(jnp.asarray(leaf))) for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize(("name", "make"), RULES)
@pytest.mark.sampled(every=3)
def test_values_and_gradients_are_those_of_vanilla(name, make):
    ours, theirs = ruled(name, make, st.preserve_identities), ruled(name, make, vanilla)
    for w, k in ((2.0, 5.0), (-0.0, 0.5), (1.5, -0.0)):
        expected = jax.value_and_grad(theirs)(Scaled(w, k))
        found = st.value_and_grad(ours)(Scaled(w, k))
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        assert typed(found) == typed(expected)
    gradient = jax.grad(theirs)(Scaled(2.0, 5.0))
    assert typed(st.jit(st.grad(ours))(Scaled(2.0, 5.0))) == typed(gradient)
    assert typed(st.grad(st.jit(ours))(Scaled(2.0, 5.0))) == typed(gradient)
    for k in (2.5, -0.0, 3, True):
        model = Scaled(jnp.array([1.0, 2.0]), k)
        assert typed(ours(model)) == typed(theirs(model))


def test_the_classes_of_numbers_that_jax_gives_to_rules_are_known():
    """Fails where JAX has moved them. They are traced where numbers are."""
    seen: set[type] = set()
    f = jax.custom_vjp(lambda *xs: xs[0])
    f.defvjp(lambda *xs: (seen.update(map(type, xs)), (xs[0], None))[1], lambda _, y: (y, None, None))
    jax.grad(f)(2.0, 3, 1j)
    assert seen <= TYPED_NUMBERS | {int, float, complex}
    for cls in TYPED_NUMBERS:
        number = cls(2, np.dtype("float32"))
        assert st.tree.leaves(Scaled(1.0, number))[1] is number
        assert st.tree.leaves(eqx.nn.Lambda(number)) == []
