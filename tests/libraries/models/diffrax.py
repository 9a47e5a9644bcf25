"""A system of two equations with one field."""

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp


class Field(eqx.Module):
    weight: jax.Array
    bias: jax.Array

    def __call__(self, t, y, args):
        return jnp.tanh(y @ self.weight) + self.bias


TRUSTED = [Field]


def make(w, b):
    field = Field(w, b)
    return diffrax.MultiTerm(diffrax.ODETerm(field), diffrax.ODETerm(field))


def loss(terms, x):
    solution = diffrax.diffeqsolve(
        terms, diffrax.Heun(), 0.0, 1.0, 0.25, x, stepsize_controller=diffrax.ConstantStepSize(), max_steps=8
    )
    return (solution.ys**2).sum()


def places(terms):
    return terms.terms[0].vector_field, terms.terms[1].vector_field


def bias(terms):
    return terms.terms[0].vector_field.bias
