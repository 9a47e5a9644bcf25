"""Planned calls with nodes that are not what most are: they make their children, or answer for them themselves."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest

import sharedtree as st
from tests.strategies import Pair


@jax.tree_util.register_pytree_node_class
class Quaternion:
    """Kept in two arrays, one array for JAX, made anew each time."""

    def __init__(self, real, imaginary):
        self.real, self.imaginary = real, imaginary

    def tree_flatten(self):
        return (jnp.concatenate([self.real, self.imaginary]),), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(children[0][:1], children[0][1:])


@jax.tree_util.register_pytree_node_class
class Empty:
    """Has a list to show, a new one each time, and no leaves."""

    def tree_flatten(self):
        return ([],), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls()


@pytest.mark.parametrize("make", [lambda: Quaternion(jnp.ones(1), jnp.ones(3)), Empty])
def test_a_tie_of_nodes_that_make_their_children(make):
    f = st.jit(lambda m: Pair(m.first, m.second))
    f(Pair(make(), make()))
    for _ in range(3):
        one = make()
        result = f(Pair(one, one))
        assert result.first is result.second


class Iterable(NamedTuple):
    a: Any
    b: Any

    def __iter__(self):
        return iter((jnp.zeros(2), jnp.zeros(2)))


class Twice(NamedTuple):
    a: Any
    b: Any

    def __iter__(self):
        x = jnp.full(2, 7.0)
        return iter((x, x))


class Batch(NamedTuple):
    a: Any
    b: Any

    def __len__(self):
        return self.a.shape[0]

    def __getitem__(self, i):
        return Batch(tuple.__getitem__(self, 0)[i], tuple.__getitem__(self, 1)[i])


@pytest.mark.parametrize("cls", [Iterable, Twice, Batch])
def test_namedtuples_with_methods_of_their_own(cls):
    f = st.jit(lambda m: m.first.a + m.first.b.sum())
    g = st.jit(lambda m: st.tree.map(lambda x: x + 1, m))
    model = Pair(cls(jnp.full(3, 1.0), jnp.full(3, 2.0)), None)
    for _ in range(4):
        np.testing.assert_array_equal(f(model), np.full(3, 7.0))
        first = g(model).first
        assert type(first) is cls
        assert [tuple.__getitem__(first, i)[0] for i in (0, 1)] == [2, 3]


def test_a_tracer_beside_a_module_that_is_passed_through():
    evaluate = st.jit(lambda net, x: (net, (net.first * x).sum()))
    net = Pair(jnp.ones(2), None)
    for _ in range(4):
        np.testing.assert_array_equal(jax.grad(lambda x: evaluate(net, x)[1])(jnp.ones(2)), np.ones(2))
        assert evaluate(net, jnp.ones(2))[0] is net


def test_a_bare_array_where_there_was_a_reference():
    add = st.jit(lambda a, b: a[...] + b[...])
    for _ in range(3):
        np.testing.assert_array_equal(add(jax.new_ref(jnp.ones(2)), jax.new_ref(jnp.ones(2))), np.full(2, 2.0))
    np.testing.assert_array_equal(add(jnp.ones(2), jnp.ones(2)), np.full(2, 2.0))


class Layer(eqx.Module):
    weight: jax.Array
    bias: jax.Array
    act: Any = eqx.field(static=True)


def test_a_trace_cannot_change_a_slice_of_the_caller():
    bounds = slice([1], None)
    st.jit(lambda m: m.act.start.append(2) or m.weight)(Layer(jnp.ones(2), jnp.ones(2), bounds))
    assert bounds == slice([1], None)
