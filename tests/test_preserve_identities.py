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


@pytest.mark.parametrize("name", APPLIED)
def test_ways_to_apply_it(name):
    f = APPLIED[name]
    result = f(tied())
    assert result.first is result.second[0]
    assert result.first[0] == 2
    assert (f.__name__, f.__doc__, f.__wrapped__) == ("double", "Doubles.", double)
    assert inspect.signature(f) == inspect.signature(double)
    assert "double" in repr(f)


def test_aot_stages():
    f = st.jit(lambda m, k: (st.tree.map(lambda x: x * k, m), m), static_argnums=1)
    lowered = f.lower(tied(), 3)
    assert "stablehlo" in lowered.as_text()
    compiled = lowered.compile()
    assert compiled.cost_analysis() is not None
    model = tied()
    for call in (compiled, f.trace(model, 3).lower().compile()):
        new, same = call(model)  # without the static argument, as JAX's
        assert new.first is new.second[0]
        assert new.first[0] == 3
        assert same is model
    shapes, _ = f.eval_shape(model, 3)
    assert shapes.first.shape == (2,)
    abstract = st.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), model)
    assert len(f.trace(abstract, 3).jaxpr.in_avals) == 1
    assert f.eval_shape(abstract, 3)[0].first is not None


def test_a_compiled_call_with_static_arguments_and_another_placement():
    f = st.jit(lambda m, k, x: (m, x * k), static_argnums=1)
    model, x = tied(), jnp.ones(2)
    compiled = f.lower(model, 2, x).compile()
    committed = jax.device_put(x, jax.devices()[0])
    same, doubled = compiled(model, committed)
    assert same.first.committed == jax.jit(lambda w, x: (w, x * 2))(model.first, committed)[0].committed
    assert same.first is same.second[0]
    assert doubled[0] == 2


def test_in_place_with_donation():
    policy = st.Policy(in_place=True)

    def f(model):
        model.count = model.count + 1

    model = Mutable(x=jnp.ones(2), count=jnp.zeros(2))
    st.preserve_identities(jax.jit, policy=policy)(f, donate_argnums=0)(model)
    np.testing.assert_array_equal(model.x, [1, 1])
    np.testing.assert_array_equal(model.count, [1, 1])


class Holder(eqx.Module):
    value: object = eqx.field(static=True)


@dataclasses.dataclass
class Unregistered:
    x: object


LEAKS = {
    "static field": lambda m: Pair(0, Holder(m.first)),
    "closure": lambda m: Layer(m.first, lambda: m.first, None),
    "partial": lambda m: Layer(m.first, functools.partial(jnp.add, m.first), None),
    "unregistered": lambda m: Layer(m.first, Unregistered(m.first), None),
    "auxiliary list": lambda m: Holder([m.first]),
    "method": lambda m: Layer(None, Unregistered(m.first).__eq__, None),
}


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
@pytest.mark.parametrize("kind", LEAKS)
def test_a_tracer_in_a_static_place_of_the_result(kind):
    for transform in (st.jit, st.vmap, st.checkpoint, st.preserve_identities(lambda f: jax.jit(jax.vmap(f)))):
        with pytest.raises(st.StaticTracerError, match="result") as caught:
            transform(LEAKS[kind])(tied())
        assert caught.value.paths[0].startswith("result")


def test_tracers_of_enclosing_traces_may_stay():
    @st.jit
    def outer(model):
        inner = st.vmap(lambda x: Layer(x * 2, lambda: model.first, None))(jnp.ones((2, 2)))
        return inner.weight, inner.activation()

    np.testing.assert_array_equal(outer(tied())[1], [1, 1])


def test_a_static_number_that_changes_on_every_call():
    f = st.jit(lambda m: m.first * m.second)
    for i in range(3):
        f(Pair(jnp.ones(2), i))
    with pytest.warns(st.RetraceWarning, match=r"m\.second") as record:
        f(Pair(jnp.ones(2), 3))
    assert len(record) == 1
    f(Pair(jnp.ones(2), 4))

    g = st.jit(lambda m: m.weight * m.width)
    for i in range(3):
        g(Layer(jnp.ones(2), None, None, width=i))
    with pytest.warns(st.RetraceWarning, match="static field"):
        g(Layer(jnp.ones(2), None, None, width=3))

    k = st.preserve_identities(eqx.filter_jit)(lambda m: m.first * m.second)
    for i in range(3):
        k(Pair(jnp.ones(2), i))
    with pytest.warns(st.RetraceWarning):
        k(Pair(jnp.ones(2), 3))

    h = st.jit(lambda m: m.first.x * 2)
    for i in range(6):
        h(Pair(Mutable(x=float(i)), None))  # traced in such classes


def test_jax_names_leaves_by_their_paths():
    info = str(st.jit(lambda m: m.first + m.second[0]).trace(tied()).jaxpr.jaxpr.debug_info.arg_names)
    assert "m.first" in info


def test_a_module_as_the_function_of_filter_jit():
    """Equinox traces the arrays of a module that it jits; so here, each once."""
    w = jnp.ones(2)

    class Twice(eqx.Module):
        a: jax.Array
        b: jax.Array

        def __call__(self, x):
            assert self.a is self.b
            return self.a * x + self.b

    f = st.preserve_identities(eqx.filter_jit)(Twice(w, w))
    np.testing.assert_array_equal(f(jnp.float32(2)), [3, 3])
    text = f.lower(jnp.float32(2)).as_text() if hasattr(f, "lower") else None
    if text is not None:
        main = next(line for line in text.splitlines() if "@main" in line)
        assert main.split("->")[0].count("tensor<2xf32>") == 1


def test_results_that_eager_jax_returns_as_one_object():
    """What is two objects inside is two outside, though eager JAX makes one array of them."""
    aux = st.grad(lambda m: (m.first.sum(), Pair(m.first, jax.lax.stop_gradient(m.first))), has_aux=True)(
        Pair(jnp.ones(2), None)
    )[1]
    assert partition(aux) == frozenset({frozenset({()}), frozenset({("first",)}), frozenset({("second",)})})
