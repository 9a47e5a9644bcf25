"""`pure_callback`, `io_callback` and `debug.callback`: what the host gets, and what comes of its results."""

import gc
import weakref

import equinox as eqx
import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given

import sharedtree as st
from tests.strategies import Layer, Mutable, Pair, arguments, dags, partition
from tests.test_export import check, tied
from tests.test_laws import python_numbers

pure_callback, io_callback, debug_callback = (
    st.preserve_identities(t) for t in (jax.pure_callback, jax.experimental.io_callback, jax.debug.callback)
)
WITH_RESULT = pytest.mark.parametrize("call", [pure_callback, io_callback])
S = jax.ShapeDtypeStruct((2,), jnp.float32)
T = jax.ShapeDtypeStruct((2,), jnp.float32)


def doubled(model):
    assert model.first is model.second["again"]
    assert model.first.weight is model.second["weight"]
    assert isinstance(model.first.weight, jax.Array)
    return st.tree.map(lambda x: 2 * np.asarray(x), model)


@WITH_RESULT
def test_models_go_to_the_host_and_come_back_with_their_ties(call):
    model = tied()
    shapes = st.eval_shape(lambda m: m, model)
    check(call(doubled, shapes, model))
    check(call(lambda *, m: doubled(m), model, m=model))  # arrays promise their shapes, too

    def step(m):
        result = call(doubled, shapes, m)
        assert result.first is result.second["again"]
        return result

    check(st.jit(step)(model))
    jaxpr = st.make_jaxpr(step)(model)
    (eqn,) = [e for e in jaxpr.eqns if "callback" in e.primitive.name]
    assert (len(eqn.invars), len(eqn.outvars)) == (2, 2)


@WITH_RESULT
@given(args=arguments())
def test_sharing_across_arguments(call, args):
    assume(not python_numbers(args))  # values outside, but arrays on the host
    found = []

    def host(*args, last):
        found.append(partition((*args, last), inside=False))
        return np.float32(1)

    *first, last = args
    assert call(host, jax.ShapeDtypeStruct((), jnp.float32), *first, last=last) == 1
    jax.effects_barrier()
    assert found == [partition(args, inside=False)]


@given(tree=dags())
def test_whatever_is_promised_comes_back(tree):
    assume(not python_numbers([tree]))  # which come back as arrays
    tree = Pair(tree, None)
    result = pure_callback(lambda m: m, st.eval_shape(lambda m: m, tree), tree)
    assert partition(result) == partition(tree)
    for one, two in zip(st.tree.leaves(result), st.tree.leaves(tree), strict=True):
        np.testing.assert_array_equal(one, two)


def test_jax_asks_for_as_many_leaves_in_whatever_containers():
    x = jnp.arange(2.0)
    assert jax.tree.structure(pure_callback(lambda: (x, x), [S, S])) == jax.tree.structure([x, x])
    for call in (pure_callback, jax.pure_callback):
        with pytest.raises(Exception, match="(?i)number of outputs|outputs.*mismatch|mismatch"):
            jax.block_until_ready(call(lambda: (x, x, x), [S, S]))


def test_vmap_and_control_flow():
    models = st.tree.map(lambda x: jnp.stack([x, 3 * x]), tied())
    shapes = st.eval_shape(lambda m: m, tied())

    def step(m):
        return pure_callback(doubled, shapes, m, vmap_method="sequential")

    check(st.tree.map(lambda x: x[1], st.vmap(step)(models)), 6.0)
    check(st.preserve_identities(jax.lax.scan)(lambda m, _: (step(m), None), tied(), jnp.ones(3))[0], 8.0)


MISMATCHES = {
    "a layer that was two": (
        lambda: Pair(Layer(S, None, []), Layer(S, None, [])),
        lambda: Pair(*[Layer(np.ones(2, np.float32), None, [])] * 2),
        "`result.first` and `result.second` are one `Layer` in what the callback returned, but two in `result_shape_dt",
    ),
    "a layer that was one": (
        lambda: Pair(*[Layer(S, None, [])] * 2),
        lambda: Pair(Layer(np.ones(2, np.float32), None, []), Layer(np.ones(2, np.float32), None, [])),
        "`result.first` and `result.second` are one `Layer` in `result_shape_dtypes`, but two in what the callback",
    ),
    "an array that was one": (
        lambda: Pair(S, S),
        lambda: Pair(np.ones(2, np.float32), np.ones(2, np.float32)),
        "`result.first` and `result.second` are one array in `result_shape_dtypes`, but two",
    ),
    "another class": (
        lambda: Pair(S, Layer(S, None, [])),
        lambda: Pair(np.ones(2, np.float32), Pair(np.ones(2, np.float32), None)),
        "differ at `result.second`: in `result_shape_dtypes` it is a `Layer`",
    ),
    "another class at the root": (
        lambda: Pair(S, S),
        lambda: Layer(np.ones(2, np.float32), None, []),
        "differ at `result`: in `result_shape_dtypes` it is a `Pair`",
    ),
    "no module": (lambda: [Pair(S, T)], lambda: [np.ones(2, np.float32)], r"differ at `result\[0\]`"),
    "another static value": (
        lambda: Pair(S, 1),
        lambda: Pair(np.ones(2, np.float32), 2),
        "differ at `result.second`: in `result_shape_dtypes` it is",
    ),
    "other static data": (
        lambda: Layer(S, None, [], width=1),
        lambda: Layer(np.ones(2, np.float32), None, [], width=2),
        "differ at `result`: in `result_shape_dtypes` it is a `Layer` with the static data",
    ),
}


def test_what_was_not_promised(caplog):
    for promised, returned, text in MISMATCHES.values():
        with pytest.raises(Exception, match=f"(?s)SharingMismatchError: `jax.pure_callback` joins .*{text}"):
            jax.block_until_ready(st.tree.leaves(pure_callback(returned, promised())))
    promised, returned, text = MISMATCHES["a layer that was two"]
    with pytest.raises(Exception, match=f"(?s)SharingMismatchError: .*{text}"):
        jax.block_until_ready(st.tree.leaves(st.jit(lambda: pure_callback(returned, promised()))()))
    check(pure_callback(doubled, st.eval_shape(lambda m: m, tied()), tied()))


def test_an_array_that_is_one_in_the_result_only():
    x = np.ones(2, np.float32)
    result = pure_callback(lambda: Pair(x, [x]), Pair(S, [T]))
    assert result.first is not result.second[0]
    np.testing.assert_array_equal(result.second[0], x)


def test_debug_callback_in_one_call_and_in_two():
    seen = []

    def host(word, m, *, scale=None):
        seen.append((word, m.first is m.second["again"], m.first.weight is m.second["weight"], scale))

    @st.jit
    def f(m):
        debug_callback(host, "one", m)
        debug_callback(host, "one", m, ordered=True, scale=2)
        return m.first.weight

    f(tied())
    jax.effects_barrier()
    assert sorted(seen, key=str) == [("one", True, True, 2), ("one", True, True, None)]
    del seen[:]
    debug_callback(host, "eager", tied())
    jax.effects_barrier()
    assert seen == [("eager", True, True, None)]
    with pytest.raises(TypeError):
        debug_callback("no function", tied())
    try:
        jax.debug.callback(ordered=True)
    except TypeError:
        return  # this JAX has only the form in one call
    del seen[:]
    call = debug_callback(ordered=True)
    st.jit(lambda m: call(host, "two", m))(tied())
    jax.effects_barrier()
    assert seen == [("two", True, True, None)]


def test_a_program_keeps_the_function():
    """It runs when whoever traced it is gone."""
    seen = []

    def compiled():
        def host(m):
            seen.append(m.first is m.second["again"])
            return np.asarray(m.first.weight)

        return st.jit(lambda m: pure_callback(host, S, m)), weakref.ref(host)

    f, host = compiled()
    f(tied())
    gc.collect()
    f(tied(3.0))
    assert seen == [True, True]
    assert host() is not None
    program = f.lower(tied()).compile()
    del f
    jax.clear_caches()
    gc.collect()
    np.testing.assert_allclose(program(tied(3.0)), [0.0, 3.0])


def test_an_eager_callback_is_compiled_once():
    class Host:
        def scaled(self, m):
            return np.asarray(m.first.weight)

    host, compiled = Host(), []
    jax.monitoring.register_event_duration_secs_listener(listener := lambda name, *_, **__: compiled.append(name))
    try:
        for _ in range(2):
            before = [name for name in compiled if "backend_compile" in name]
            pure_callback(host.scaled, S, tied())
        assert [name for name in compiled if "backend_compile" in name] == before != []
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)


def test_what_is_changed_on_the_host_stays_there():
    def host(m):
        m.x = 2 * np.asarray(m.x)
        return m.x

    model = Mutable(x=jnp.ones(2))
    with st.Context(st.Policy(in_place=True)):
        np.testing.assert_allclose(pure_callback(host, S, model, in_place=False), [2, 2])
        for call in (lambda: pure_callback(host, S, model), lambda: debug_callback(host, model)):
            with pytest.raises(ValueError, match="in_place=False"):
                call()
    for call, *operands in ((pure_callback, S), (io_callback, S), (debug_callback,)):
        with pytest.raises(ValueError, match="nothing could be written back in place"):
            call(host, *operands, model, in_place=True)
    np.testing.assert_allclose(model.x, [1, 1])


def test_errors_of_the_function_come_as_jaxs(caplog):
    def host(m):
        raise ValueError("from the host")

    for run in (lambda: pure_callback(host, S, tied()), st.jit(lambda: pure_callback(host, S, tied()))):
        with pytest.raises(Exception, match="from the host"):
            jax.block_until_ready(run())
    with pytest.raises(st.errors.CycleError):
        knot = [jnp.ones(2)]
        knot.append(knot)
        pure_callback(host, S, Mutable(x=knot))
    with pytest.raises(ValueError, match="do not support JVP"):
        st.grad(lambda m: pure_callback(host, jax.ShapeDtypeStruct((), "float32"), m))(tied())
    check(pure_callback(doubled, st.eval_shape(lambda m: m, tied()), tied()))


def test_tied_values_are_reported():
    tree = st.tie({"a": jnp.ones(2), "b": jnp.ones(2)}, lambda t: (t["a"], t["b"]))
    with pytest.warns(st.UntiedWarning, match="under `jax.pure_callback` they are 2"):
        pure_callback(lambda t: np.ones(2, np.float32), S, tree)


def test_a_model_that_is_the_function():
    linear = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    np.testing.assert_allclose(pure_callback(linear, S, jnp.ones(2)), linear(jnp.ones(2)), rtol=1e-6)
