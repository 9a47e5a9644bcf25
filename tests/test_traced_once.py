"""Whoever wraps a function, it is traced as often as under vanilla JAX; and what is let go of is freed at once."""

import functools
import gc
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as hst

import sharedtree as st
from tests.garbage import collect_all, no_collection
from tests.strategies import Mutable, Pair

TRANSFORMS = {"jit": jax.jit, "checkpoint": jax.checkpoint, "filter_jit": eqx.filter_jit}
EACH = [pytest.param(transform, id=name) for name, transform in TRANSFORMS.items()]


class Counting:
    """Makes functions of every kind that count how often they are traced."""

    def __init__(self):
        self.count = 0

    def step(self, x):
        self.count += 1
        return jax.tree.map(lambda leaf: leaf * 2, x)

    def __call__(self, x):
        return self.step(x)

    def function(self):
        return lambda x: self.step(x)

    def partial(self):
        return functools.partial(lambda y, x: self.step(x), 1)


class Equal(Counting):
    """All alike, says a user's `==`; none the less each is a function of its own."""

    def __eq__(self, other):
        return True

    def __hash__(self):
        return 1


class Unhashable(Counting):
    __hash__ = None

    def __eq__(self, other):
        # Python 3.11's `inspect.signature` asks whether it is `type` or `object`.
        assert isinstance(other, type)
        return False


def test_functions_are_compared_by_identity():
    both, unhashable = (Equal(), Equal()), Unhashable()
    for _ in range(2):
        for f in both:
            st.jit(f)(jnp.ones(2))
        st.checkpoint(unhashable)(jnp.ones(2))
    assert [f.count for f in (*both, unhashable)] == [1, 1, 1]


KINDS = {
    "function": lambda counting: counting.function(),
    "partial": lambda counting: counting.partial(),
    "bound method, held": lambda counting: counting.step,
    "object": lambda counting: counting,
}


def traces(transform, counting, functions):
    """How often functions of this kind are traced when each is wrapped and called."""
    for f in functions:
        transform(f)(jnp.ones(2))
    return counting.count


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("transform", EACH)
@pytest.mark.parametrize("make", [*KINDS.values(), lambda counting: st.jit(counting.function())])
def test_wrapping_the_same_function_again_is_no_new_trace(transform, make):
    counting, ours = Counting(), st.preserve_identities(transform)
    assert traces(ours, counting, [make(counting)] * 5) == 1
    # Each a new one, at the place in memory of the one before perhaps.
    for_us, for_vanilla = Counting(), Counting()
    assert traces(ours, for_us, (make(for_us) for _ in range(5))) <= traces(
        transform, for_vanilla, (make(for_vanilla) for _ in range(5))
    )


def test_a_callable_module_is_traced_once_and_when_it_changes():
    counting = Counting()

    class Layer(eqx.Module):
        weight: jax.Array

        def __call__(self, x):
            return counting.step(x) * self.weight

    layer = Layer(jnp.ones(2))
    for _ in range(3):
        st.preserve_identities(eqx.filter_jit)(layer)(jnp.ones(2))
        st.preserve_identities(eqx.filter_jit)(layer.__call__)(jnp.ones(2))
    assert counting.count == 2

    @jax.tree_util.register_pytree_node_class
    class Scaled(Mutable):
        def __call__(self, x):
            return self.weight * x * self.scale

    mutable = Scaled(weight=jnp.ones(2), scale=1.0)
    filter_jit = st.preserve_identities(eqx.filter_jit)
    assert filter_jit(mutable)(jnp.ones(2))[0] == 1
    mutable.scale = 3.0
    mutable.weight = jnp.ones(2) * 2
    assert filter_jit(mutable)(jnp.ones(2))[0] == 6


def test_options_that_differ_are_not_confused():
    def f(model, flag):
        assert isinstance(flag, int) or not static
        return model if flag is not None else None

    static = False
    model = Pair(jnp.ones(2), jnp.ones(2))
    assert st.jit(f)(model, 1) is model
    static = True
    assert st.jit(f, static_argnums=1)(model, 1) is model
    donated = st.jit(f, static_argnums=1, donate_argnums=0)(model, 1)
    assert donated is not model
    assert model.first.is_deleted()
    model = Pair(jnp.ones(2), jnp.ones(2))
    kept = st.jit(f, static_argnums=[1])(model, 1), st.jit(f, static_argnums=[1], inline=True)(model, 1)
    assert kept == (model, model)


def test_explain_and_warnings_are_those_of_the_function():
    def f(model):
        return jax.tree.map(lambda x: x + 1, model)

    w = jnp.arange(2.0)
    with pytest.warns(st.UntiedWarning):
        st.jit(f)(Pair(w, w))
    st.jit(f)(Pair(w, w))
    with pytest.warns(st.UntiedWarning, match="earlier call"):
        st.jit(f)(Pair(w, jnp.arange(2.0)))
    assert st.explain(st.jit(f), Pair(w, w)).num_traces == 2
    assert "two objects now" in str(st.explain(st.jit(f), Pair(w, w)))
    assert st.explain(st.jit(f, donate_argnums=0), Pair(w, w)).num_traces == 0


def test_equinox_transforms_of_one_function_are_equal():
    traces = []

    def f(x):
        traces.append(1)
        return (x * x).sum()

    x = jnp.arange(3.0)
    ours = {name: st.preserve_identities(getattr(eqx, name)) for name in ("filter_jit", "filter_grad", "filter_vmap")}
    for outer in (ours["filter_jit"], eqx.filter_jit):
        before = len(traces)
        for _ in range(3):
            assert outer(ours["filter_grad"](f))(x)[2] == 4
        assert len(traces) == before + 1
        for _ in range(3):
            assert outer(ours["filter_vmap"](ours["filter_grad"](f)))(x)[2] == 4
        assert len(traces) == before + 2
    assert ours["filter_grad"](f) == ours["filter_grad"](f) != ours["filter_grad"](lambda x: x)
    assert ours["filter_vmap"](f) != ours["filter_vmap"](f, in_axes=1)
    assert st.grad(f) != st.grad(f)


ARGUMENTS = (jnp.ones(2), jnp.ones(3), np.ones(2, np.float32), 1.0, {"a": jnp.ones(2)})
STEPS = hst.one_of(
    hst.tuples(hst.just("wrap"), hst.integers(0, 2)),
    hst.tuples(hst.just("call"), hst.integers(0, 5), hst.integers(0, len(ARGUMENTS) - 1)),
    hst.tuples(hst.just("clear"), hst.integers(0, 5)),
    hst.tuples(hst.just("drop"), hst.integers(0, 5)),
    hst.tuples(hst.just("replace"), hst.integers(0, 2), hst.sampled_from(sorted(KINDS))),
)


def counts(transform, program):
    """How often each function has been traced after each step."""
    every = [Counting() for _ in range(3)]
    functions = [counting.function() for counting in every]
    wrappers, found = [], []
    for what, which, *more in program:
        if what == "wrap":
            wrappers.append(transform(functions[which]))
        elif what == "replace":
            functions[which] = None
            every[which] = Counting()
            functions[which] = KINDS[more[0]](every[which])
        elif wrappers:
            wrapper = wrappers[which % len(wrappers)]
            if what == "call":
                wrapper(ARGUMENTS[more[0]])
            elif what == "clear" and hasattr(wrapper, "clear_cache"):
                wrapper.clear_cache()
            elif what == "drop":
                wrappers.remove(wrapper)
        found.append([counting.count for counting in every])
    return found


@pytest.mark.parametrize("transform", EACH)
@given(program=hst.lists(STEPS, max_size=25))
def test_traces_are_as_many_as_vanillas(transform, program):
    assert counts(st.preserve_identities(transform), program) == counts(transform, program)


@pytest.mark.parametrize("transform", [jax.jit, jax.checkpoint, jax.grad, jax.vmap, eqx.filter_grad, eqx.filter_vmap])
def test_a_wrapper_and_then_its_function_are_freed_by_reference_counting(transform):
    def make():
        return lambda x: jnp.sum(x.first if isinstance(x, Pair) else x)

    with no_collection():
        for args in ((), (jnp.ones(2),), (Pair(jnp.ones(2), jnp.ones(2)),)):
            f = make()
            for _ in range(2):
                wrapper = st.preserve_identities(transform)(f)
                for arg in args * 3:
                    wrapper(arg)
                refs = weakref.ref(wrapper), weakref.ref(f)
                del wrapper
                assert refs[0]() is None
            del f
            assert refs[1]() is None


def test_what_is_known_of_a_function_stays_small():
    def f(x, **options):
        return x

    def wrapped(numbers):
        for n in numbers:
            st.jit(f, static_argnames=f"n{n}")
        collect_all()
        return len(gc.get_objects())

    with no_collection():
        before = wrapped(range(100))
        # Not even one object for each wrapper.
        assert wrapped(range(100, 300)) - before < 200


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_function_that_dies_where_the_stack_is_full_leaves_the_next_one_at_its_place_alone():
    """There Python can call nothing that waits for its end."""

    def plus(k):
        return lambda x: x + k

    def fill_the_stack(held):
        try:
            fill_the_stack(held)
        except RecursionError:
            held.clear()
            raise

    f = plus(1)
    number = id(f)  # compared with that of a later function, never used as a name
    wrapped = st.jit(f)
    assert wrapped(jnp.ones(())) == 2
    held = [f, wrapped]
    del f, wrapped
    with pytest.raises(RecursionError):
        fill_the_stack(held)
    gc.collect()
    others = [plus(2) for _ in range(2000)]
    assert [st.jit(each)(jnp.ones(())) for each in others if id(each) == number] in ([], [3])
    assert [st.jit(each)(jnp.ones(())) for each in others[:5]] == [3] * 5


def test_shardings_that_reach_inside_modules_are_kept_for_so_many_shapes():
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    f = st.jit(lambda m: m.first, in_shardings=(Pair(here, here),))
    jitted = type(jax.jit(lambda x: x))

    def alive():
        return [obj for obj in gc.get_objects() if type(obj) is jitted]

    before = alive()
    for n in range(50):
        assert f.eval_shape(Pair(np.ones(n), np.ones(n))).shape == (n,)
    collect_all()
    assert 0 < len({*map(id, alive())} - {*map(id, before)}) < 40  # alive in `before` and in the process
