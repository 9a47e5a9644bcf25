"""A tracer in a static value is refused wherever a result or state goes out, also where an equal value is known."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import sharedtree as st
from tests.kinds import Noted
from tests.strategies import Mutable


@dataclasses.dataclass(frozen=True)
class Named:
    """Equal by name, whatever else it holds."""

    name: str
    cache: object = dataclasses.field(default=None, compare=False)


# How a transform calls a function of a model that changes it in place, and returns an array.
IN_PLACE = {
    "jit": lambda f, m: st.jit(f, in_place=True)(m),
    "vmap": lambda f, m: st.vmap(f, in_place=True)(m),
    "grad": lambda f, m: st.grad(lambda m: f(m).sum(), in_place=True)(m),
    "value_and_grad": lambda f, m: st.value_and_grad(lambda m: f(m).sum(), in_place=True)(m),
    "shard_map": lambda f, m: st.shard_map(f, mesh=mesh(), in_specs=P(), out_specs=P(), in_place=True)(m),
    "pmap": lambda f, m: st.pmap(f, in_place=True)(m),
    "checkpoint": lambda f, m: st.checkpoint(f, in_place=True)(m),
    "cond": lambda f, m: st.cond(True, f, lambda m: m.a, m, in_place=True),
    "switch": lambda f, m: st.switch(0, [f, lambda m: m.a], m, in_place=True),
    "scan, carried": lambda f, m: st.scan(lambda m, _: (m, f(m)), m, length=1, in_place=True),
    "scan, scanned": lambda f, m: st.scan(lambda _, m: (None, f(m)), None, m, in_place=True),
    "map": lambda f, m: st.map(f, m, in_place=True),
    "fori_loop": lambda f, m: st.fori_loop(0, 1, lambda i, m: (f(m), m)[1], m, in_place=True),
    "while_loop": lambda f, m: st.while_loop(
        lambda c: c[0] < 1, lambda c: (c[0] + 1 + 0 * f(c[1]).sum(), c[1]), (0.0, m), in_place=True
    ),
}


def mesh():
    return jax.make_mesh((1,), ("i",))


@pytest.mark.parametrize("run", IN_PLACE.values(), ids=IN_PLACE)
@pytest.mark.sampled(every=3)
def test_state_with_a_tracer_in_a_static_value_is_not_written_and_a_lost_tie_is_reported(run):
    w = jnp.array([[1.0, 2.0]])
    m = Mutable(a=w, b=w, config=None)

    def leak(m):
        a = m.a * 2
        m.config = lambda: a
        return a

    with pytest.raises(st.errors.StaticTracerError, match="in the closure of"):
        run(leak, m)
    assert m.config is None

    def untie(m):
        m.a, m.b = m.a * 2, m.b * 2
        return m.a

    with pytest.warns(st.UntiedWarning, match="were one object"):
        run(untie, m)


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
    known = st.Dag(Noted(jnp.ones(2), Named("a"))) if is_known else None
    with pytest.raises(st.errors.StaticTracerError, match="attribute `cache`") as error:
        transform(lambda m: Noted(m.weight, Named("a", m.weight * 2)))(Noted(jnp.ones(2), Named("a")))
    # While the error is held, nothing else gets its value.
    result = transform(lambda m: Noted(m.weight * 2, Named("a")))(Noted(jnp.ones(2), Named("a")))
    assert result.note.cache is None
    assert st.tree.map(lambda x: x, Noted(jnp.ones(2), Named("a"))).note.cache is None
    del known, error


@pytest.mark.parametrize("around", [lambda dag: dag, lambda dag: [Noted(dag, "x")]])
def test_inside_a_dag(around):
    def f(m):
        a = m.weight * 2
        return around(st.Dag(Noted(m.weight, lambda: a)))

    with pytest.raises(st.errors.StaticTracerError, match="in a `Dag`"):
        st.jit(f)(Noted(jnp.ones(2), None))
