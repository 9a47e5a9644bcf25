"""A tracer in a static value is refused wherever a result or state goes out, also where an equal value is known."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import sharedtree as st
from tests.strategies import Mutable


@dataclasses.dataclass(frozen=True)
class Named:
    """Equal by name, whatever else it holds."""

    name: str
    cache: object = dataclasses.field(default=None, compare=False)


class Holder(eqx.Module):
    weight: jax.Array
    config: object = eqx.field(static=True)


IN_PLACE = {
    "jit": lambda f, m: st.jit(f, in_place=True)(m),
    "vmap": lambda f, m: st.vmap(f, in_place=True)(m),
    "grad": lambda f, m: st.grad(lambda m: f(m).sum(), in_place=True)(m),
    "checkpoint": lambda f, m: st.checkpoint(f, in_place=True)(m),
    "cond": lambda f, m: st.cond(True, f, lambda m: m.a, m, in_place=True),
    "switch": lambda f, m: st.switch(0, [f, lambda m: m.a], m, in_place=True),
    "scan, carried": lambda f, m: st.scan(lambda m, _: (m, f(m)), m, length=2, in_place=True),
    "scan, scanned": lambda f, m: st.scan(lambda _, m: (None, f(m)), None, m, in_place=True),
    "map": lambda f, m: st.map(f, m, in_place=True),
    "fori_loop": lambda f, m: st.fori_loop(0, 2, lambda i, m: (f(m), m)[1], m, in_place=True),
    "while_loop": lambda f, m: st.while_loop(lambda m: m.a[0] < 9, lambda m: (f(m), m)[1], m, in_place=True),
}


@pytest.mark.parametrize("run", IN_PLACE.values(), ids=IN_PLACE)
def test_state_with_a_tracer_in_a_static_value_is_not_written(run):
    m = Mutable(a=jnp.ones(2), config=None)

    def leak(m):
        a = m.a * 2
        m.config = lambda: a
        return a

    with pytest.raises(st.StaticTracerError, match="in the closure of"):
        run(leak, m)
    assert m.config is None
    run(lambda m: m.a, m)


@pytest.mark.parametrize("run", IN_PLACE.values(), ids=IN_PLACE)
def test_a_tie_that_state_lost_is_reported(run):
    w = jnp.array([1.0, 2.0])

    def untie(m):
        m.a, m.b = m.a * 2, m.b * 2
        return m.a

    with pytest.warns(st.UntiedWarning, match="were one object"):
        run(untie, Mutable(a=w, b=w, config=None))


def test_what_a_condition_changes_goes_nowhere():
    def below(m):
        a = m.a * 2
        m.config = lambda: a
        return a[0] < 9

    m = Mutable(a=jnp.ones(2), config=None)

    def double(m):
        m.a = 2 * m.a
        return m

    assert st.while_loop(below, double, m, in_place=True) is m
    assert m.a.tolist() == [8, 8]
    assert m.config is None


@pytest.mark.parametrize("transform", [st.jit, st.vmap, st.checkpoint])
@pytest.mark.parametrize("is_known", [True, False])
def test_a_static_value_that_equals_a_known_one(transform, is_known):
    known = st.Dag(Holder(jnp.ones(2), Named("a"))) if is_known else None
    with pytest.raises(st.StaticTracerError, match="attribute `cache`") as error:
        transform(lambda m: Holder(m.weight, Named("a", m.weight * 2)))(Holder(jnp.ones(2), Named("a")))
    # While the error is held, nothing else gets its value.
    result = transform(lambda m: Holder(m.weight * 2, Named("a")))(Holder(jnp.ones(2), Named("a")))
    assert result.config.cache is None
    assert st.tree.map(lambda x: x, Holder(jnp.ones(2), Named("a"))).config.cache is None
    del known, error


@pytest.mark.parametrize("around", [lambda dag: dag, lambda dag: [Holder(dag, "x")]])
def test_inside_a_dag(around):
    def f(m):
        a = m.weight * 2
        return around(st.Dag(Holder(m.weight, lambda: a)))

    with pytest.raises(st.StaticTracerError, match="in a `Dag`"):
        st.jit(f)(Holder(jnp.ones(2), None))
