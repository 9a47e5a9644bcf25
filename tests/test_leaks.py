"""A tracer in a static value is refused wherever a result or state goes out, also where an equal value is known."""

import dataclasses

import jax.numpy as jnp
import pytest

import sharedtree as st
from tests.calls import CALLS_IN_PLACE
from tests.kinds import Noted
from tests.strategies import Mutable


@dataclasses.dataclass(frozen=True)
class Named:
    """Equal by name, whatever else it holds."""

    name: str
    cache: object = dataclasses.field(default=None, compare=False)


@pytest.mark.parametrize("run", CALLS_IN_PLACE.values(), ids=CALLS_IN_PLACE)
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
