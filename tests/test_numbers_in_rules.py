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
from sharedtree._jax_internals import TYPED_NUMBERS


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Scaled:
    w: Any
    k: Any


FACTOR = 3.0
"""The rules are wrong by this factor, so that one sees whether they were used."""


def grown(model):
    """A result that holds the number as it is."""
    return type(model)(2 * model.w, model.k)


def value(model):
    return model.w * model.k


def grown_by_vjp(wrap):
    f = wrap(jax.custom_vjp)(grown)
    f.defvjp(lambda model: (f(model), None), lambda _, y: (type(y)(2 * FACTOR * y.w, FACTOR * y.k),))
    return lambda model: value(f(model))


def grown_by_jvp(wrap):
    f = wrap(jax.custom_jvp)(grown)
    f.defjvp(lambda primals, dots: (f(*primals), type(dots[0])(2 * FACTOR * dots[0].w, FACTOR * dots[0].k)))
    return lambda model: value(f(model))


def grown_by_gradient(wrap):
    f = wrap(jax.custom_gradient)(lambda m: (grown(m), lambda y: (type(y)(2 * FACTOR * y.w, FACTOR * y.k),)))
    return lambda model: value(f(model))


def value_by_vjp(wrap):
    """The number is kept for the rule, in a module."""
    f = wrap(jax.custom_vjp)(value)
    f.defvjp(lambda m: (f(m), m), lambda m, y: (type(m)(FACTOR * y * m.k, FACTOR * y * m.w),))
    return f


def value_by_jvp(wrap):
    f = wrap(jax.custom_jvp)(value)
    f.defjvp(lambda ms, dots: (f(*ms), FACTOR * (dots[0].w * ms[0].k + ms[0].w * dots[0].k)))
    return f


def value_by_gradient(wrap):
    return wrap(jax.custom_gradient)(lambda m: (value(m), lambda y: (type(m)(FACTOR * y * m.k, FACTOR * y * m.w),)))


def put_in_by_vjp(wrap):
    """The number becomes part of a module in the function."""
    f = wrap(jax.custom_vjp)(lambda model, k: type(model)(model.w, model.k * k))
    f.defvjp(lambda m, k: (type(m)(m.w, k), m), lambda m, y: (type(m)(FACTOR * y.w, y.k), FACTOR * y.k))
    return lambda model: value(f(model, model.k))


RULES = [
    grown_by_vjp,
    grown_by_jvp,
    grown_by_gradient,
    value_by_vjp,
    value_by_jvp,
    value_by_gradient,
    put_in_by_vjp,
]
by_name = lambda f: f.__name__
vanilla = lambda transform: transform


def typed(tree):
    """The leaves, each with its type."""
    return [(np.asarray(leaf).tolist(), jax.typeof(jnp.asarray(leaf))) for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("make", RULES, ids=by_name)
def test_values_and_gradients_are_those_of_vanilla(make):
    ours, theirs = make(st.preserve_identities), make(vanilla)
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
