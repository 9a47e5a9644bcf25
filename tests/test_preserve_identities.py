"""The wrapper itself: how it is applied, what it passes on, and how errors come through."""

import dataclasses
import functools
import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharedtree as st
from tests.models import StaticField
from tests.strategies import Layer, Mutable, Pair, partition


def tied():
    w = jnp.ones(2)
    return Pair(w, [w])


def double(model: Pair, by: float = 2.0) -> Pair:
    """Doubles."""
    return st.tree.map(lambda x: x * by, model)


APPLIED = {
    "called": st.preserve_identities(jax.jit)(double),
    "with options": st.preserve_identities(jax.jit)(double, inline=True),
    "bound first": st.preserve_identities(jax.jit, inline=True)(double),
    "without a function": st.preserve_identities(jax.jit)(inline=True)(double),
    "partial": st.preserve_identities(functools.partial(jax.jit, inline=True))(double),
    "partial of partial": st.preserve_identities(functools.partial(functools.partial(jax.jit), inline=True))(double),
    "ready made": st.jit(double),
    "ready made with options": st.jit(inline=True)(double),
    "unknown": st.preserve_identities(lambda f: jax.jit(jax.checkpoint(f)))(double),
}


def test_ways_to_apply_it():
    for name, f in APPLIED.items():
        result = f(tied())
        assert result.first is result.second[0], name
        assert result.first[0] == 2
        assert (f.__name__, f.__doc__, f.__wrapped__) == ("double", "Doubles.", double)
        assert inspect.signature(f) == inspect.signature(double)
        assert "double" in repr(f)
    for transform in (st.grad, st.value_and_grad, st.vmap, st.checkpoint):
        assert inspect.signature(transform(double)) == inspect.signature(double)


def test_aot_stages():
    f = st.jit(lambda m, k, x: (st.tree.map(lambda w: w * k, m), m, x * k), static_argnums=1)
    model, x = tied(), jnp.ones(2)
    lowered = f.lower(model, 3, x)
    assert "stablehlo" in lowered.as_text()
    compiled = lowered.compile()
    assert compiled.cost_analysis() is not None
    for call in (compiled, f.trace(model, 3, x).lower().compile()):
        new, same, tripled = call(model, x)  # without the static argument, as JAX's
        assert new.first is new.second[0]
        assert new.first[0] == tripled[0] == 3
        assert same is model
    committed = jax.device_put(x, jax.devices()[0])
    _, same, _ = compiled(model, committed)
    assert same.first.committed == jax.jit(lambda w, x: (w, x * 3))(model.first, committed)[0].committed
    assert same.first is same.second[0]
    abstract = st.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), model)
    for each in (model, abstract):
        assert f.eval_shape(each, 3, x)[0].first.shape == (2,)
        assert len(f.trace(each, 3, x).jaxpr.in_avals) == 2


@dataclasses.dataclass
class Unregistered:
    x: object


LEAKS = {
    "static field": lambda m: Pair(0, StaticField(m.first)),
    "closure": lambda m: Layer(m.first, lambda: m.first, None),
    "partial": lambda m: Layer(m.first, functools.partial(jnp.add, m.first), None),
    "unregistered": lambda m: Layer(m.first, Unregistered(m.first), None),
    "auxiliary list": lambda m: StaticField([m.first]),
    "method": lambda m: Layer(None, Unregistered(m.first).__eq__, None),
}


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
@pytest.mark.parametrize(
    "transform", [st.jit, st.vmap, st.checkpoint, st.preserve_identities(lambda f: jax.jit(jax.vmap(f)))]
)
def test_a_tracer_in_a_static_place_of_the_result(transform):
    for kind, leaks in LEAKS.items():
        with pytest.raises(st.errors.StaticTracerError, match="result") as caught:
            transform(leaks)(tied())
        assert caught.value.paths[0].startswith("result"), kind


def test_tracers_of_enclosing_traces_may_stay():
    @st.jit
    def outer(model):
        inner = st.vmap(lambda x: Layer(x * 2, lambda: model.first, None))(jnp.ones((2, 2)))
        return inner.weight, inner.activation()

    np.testing.assert_array_equal(outer(tied())[1], [1, 1])


def test_a_static_number_that_changes_on_every_call():
    filter_jit = st.preserve_identities(eqx.filter_jit)
    for f, make, said in (
        (st.jit(lambda m: m.first * m.second), lambda k: Pair(jnp.ones(2), k), r"m\.second"),
        (st.jit(lambda m: m.weight * m.width), lambda k: Layer(jnp.ones(2), None, None, width=k), "static field"),
        (filter_jit(lambda m: m.first * m.second), lambda k: Pair(jnp.ones(2), k), r"m\.second"),
    ):
        for k in range(3):
            f(make(k))
        with pytest.warns(st.RetraceWarning, match=said) as record:
            f(make(3))
        assert len(record) == 1
        f(make(4))
    in_traced_class = st.jit(lambda m: m.first.x * 2)
    for k in range(6):
        in_traced_class(Pair(Mutable(x=float(k)), None))


def test_jax_names_leaves_by_their_paths():
    info = str(st.jit(lambda m: m.first + m.second[0]).trace(tied()).jaxpr.jaxpr.debug_info.arg_names)
    assert "m.first" in info


def test_a_module_as_the_function_of_filter_jit():
    """Equinox traces the arrays of a module that it jits; so here, each once."""
    w = jnp.ones(2)

    class Twice(Pair):
        def __call__(self, x):
            assert self.first is self.second
            return self.first * x + self.second

    f = st.preserve_identities(eqx.filter_jit)(Twice(w, w))
    np.testing.assert_array_equal(f(jnp.float32(2)), [3, 3])
    main = next(line for line in f.lower(jnp.float32(2)).as_text().splitlines() if "@main" in line)
    assert main.split("->")[0].count("tensor<2xf32>") == 1


def test_results_that_eager_jax_returns_as_one_object():
    """What is two objects inside is two outside, though eager JAX makes one array of them."""
    aux = st.grad(lambda m: (m.first.sum(), Pair(m.first, jax.lax.stop_gradient(m.first))), has_aux=True)(
        Pair(jnp.ones(2), None)
    )[1]
    assert partition(aux) == frozenset({frozenset({()}), frozenset({("first",)}), frozenset({("second",)})})


def named_loss(net):
    return net.first.sum()


def test_compiled_programs_have_the_name_of_the_wrapped_function():
    gradient = st.filter_grad(named_loss)
    gradient.__name__ = "gradient_of_loss"
    for function, name in ((double, "double"), (gradient, "gradient_of_loss")):
        assert f"jit_{name}" in st.filter_jit(function).lower(tied()).as_text()


def test_explaining_a_call_without_arguments_runs_the_function_no_more_often_than_calling_it():
    calls = []
    f = st.vmap(lambda: calls.append(None), axis_size=2)
    f()
    num_calls = len(calls)
    calls.clear()
    st.explain(f)
    assert len(calls) <= num_calls
