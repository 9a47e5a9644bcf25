"""What continuous integration may gate on: counts, never a clock. Traces, jaxpr inputs, calls, code, ids and bytes."""

import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import sharedtree as st
from sharedtree.core._pack_and_unpack import native
from tests.counting import Counting, counted
from tests.garbage import collect_all, no_collection
from tests.strategies import Pair
from tests.walks import natively


class Linear(eqx.Module):
    """Three records: two leaves and the module."""

    weight: jax.Array
    bias: jax.Array
    size: int = eqx.field(static=True, default=2)


class Block(eqx.Module):
    """Eight arrays."""

    attention: tuple
    feedforward: list
    norm: jax.Array
    scale: jax.Array


class Stack(eqx.Module):
    layers: list
    tail: object = None


def linear(value=0.0):
    return Linear(jnp.full((2, 2), value), jnp.full(2, value))


def block(value=0.0):
    return Block((linear(value), linear(value)), [linear(value)], jnp.full(3, value), jnp.full(4, value))


def add_one(model):
    return st.tree.map(lambda x: x + 1, model)


# Traces ---------------------------------------------------------------------------------------------------------------


def test_one_trace_a_structure_whatever_the_objects():
    def shared():
        w, x = jnp.ones(2), jnp.zeros(2)
        # Untied first, or the second would be warned of.
        return [Pair(w, [jnp.ones(2)]), Pair(x, [x]), *[Pair(w, (None,) * i) for i in range(12)]]

    function, traces = counted(add_one)
    f = st.jit(function)
    for _ in range(3):
        for model in shared():
            result = f(f(model))
            assert (result.first[0], len(result.second)) == (model.first[0] + 2, len(model.second))
    assert len(traces) == 14


# Jaxprs ---------------------------------------------------------------------------------------------------------------


def test_each_tied_leaf_is_one_input_and_one_output():
    tied = Stack([block()] * 50)
    jaxpr = st.jit(add_one).trace(tied).jaxpr
    assert (len(jaxpr.in_avals), len(jaxpr.out_avals), len(jaxpr.eqns)) == (8, 8, 8)
    vanilla = jax.make_jaxpr(lambda model: jax.tree.map(lambda x: x + 1, model))(tied)
    assert len(vanilla.in_avals) == 400
    w = jnp.ones((2, 2))
    model = Stack([Linear(w, jnp.zeros(2)) for _ in range(5)], {"head": w, "more": [w, jnp.ones(3)]})
    jaxpr = st.jit(add_one).trace(model).jaxpr
    assert len(jaxpr.in_avals) == len(jaxpr.out_avals) == 1 + 5 + 1
    assert len(st.jit(lambda a, b: (add_one(a), b)).trace(model, model).jaxpr.in_avals) == 7
    gradient = st.jit(st.grad(lambda model: sum(jnp.sum(layer.norm**2) for layer in model.layers)))
    jaxpr = gradient.trace(tied).jaxpr
    assert len(jaxpr.in_avals) == len(jaxpr.out_avals) == 8


# Python calls ---------------------------------------------------------------------------------------------------------


def calls_of(function, *args):
    """The names of the Python functions that a call enters."""
    names = []

    def note(frame, event, _):
        if event == "call":
            names.append(frame.f_code.co_name)

    with no_collection():
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            function(*args)
        finally:
            sys.setprofile(before)
    return names


def rebuild(model):
    return st.tree.map(lambda x: x, model)


def warm_calls(model, function=rebuild):
    """The calls of the fourth call, for XLA's sake of a function that computes nothing."""
    f = st.jit(function)
    for _ in range(3):
        f(model)
    return calls_of(f, model)


MOST_CALLS = 19
"""Of the wrapper. What is asked of each leaf or node is asked in C."""


@pytest.mark.slow
@natively
def test_python_calls_are_the_same_for_all_models():
    w, one = jnp.ones(2), block()
    models = [
        *[Stack([block(i) for i in range(count)]) for count in (12, 102)],
        *[Stack([linear(i) for i in range(count)]) for count in (12, 52)],
        *[Stack([one] * count) for count in (2, 400)],
        Stack([block(), Stack([block(), w]), Pair(block(), [jnp.ones(2), {"a": w}])]),
        Stack([Pair(w, jnp.ones(2)) for _ in range(100)]),
        Stack([Pair(eqx.nn.Dropout(0.1), jnp.ones(2)) for _ in range(100)]),
    ]
    for function in (rebuild, add_one):
        first, *others = [warm_calls(model, function) for model in models]
        assert all(each == first for each in others)
        assert len(first) <= MOST_CALLS


class Watching(type(st.jit(add_one))):
    """Overrides both steps that C may do, with nothing of its own."""

    def call_in_python(self, args, kwargs, policy):
        return super().call_in_python(args, kwargs, policy)

    def leave(self, result, call, policy):
        return super().leave(result, call, policy)


class Stated(Watching):
    calls_natively = True
    finishes_natively = True


class Inheriting(Stated):
    """Overrides nothing, so what its base states holds."""


class OverridingAgain(Stated):
    def leave(self, result, call, policy):
        return super().leave(result, call, policy)


class Mixin:
    def leave(self, result, call, policy):
        return super().leave(result, call, policy)


class ByMixin(Mixin, Stated):
    """Overrides by its base, which comes before the one that states something."""


@pytest.mark.parametrize(
    ("adapter", "calls", "finishes"),
    [
        (type(st.jit(add_one)), True, True),
        (Watching, False, False),
        (Stated, True, True),
        (Inheriting, True, True),
        (OverridingAgain, True, False),
        (ByMixin, True, False),
    ],
)
def test_an_adapter_says_whether_c_may_do_its_calls(adapter, calls, finishes):
    assert (adapter.calls_natively, adapter.finishes_natively) == (calls, finishes)
    f = adapter(jax.jit, lambda model: add_one(model), None, {})
    for _ in range(3):
        f(linear())
    names = calls_of(f, linear())
    if native is not None:
        assert ("call_in_python" in names, "leave" in names) == (not calls, not (calls and finishes))


@natively
def test_a_registered_class_is_flattened_once_an_object_and_built_once():
    model = [Counting(jnp.ones(2), jnp.ones(2)) for _ in range(5)]
    model += [model[0]] * 20
    model = Stack(model)  # before counting: Equinox flattens what it is given
    f = st.jit(add_one)
    for _ in range(4):
        f(model)
    Counting.counts.clear()
    result = f(model)
    assert Counting.counts == {"flatten": 5, "unflatten": 5}
    assert all(layer is result.layers[0] for layer in result.layers[5:])


# Bytes ----------------------------------------------------------------------------------------------------------------


def live():
    """The arrays that are alive now, by where they lie; whoever holds them sees to it that nothing new lies there."""
    collect_all()
    return {array.unsafe_buffer_pointer(): array for array in jax.live_arrays() if array.size}


def sizes_of_new(before):
    """The sizes in bytes of the arrays that are alive now and were not before."""
    return [array.nbytes for place, array in live().items() if place not in before]


def tied_model():
    w = jnp.full((100, 10), 1.0)
    one = Pair(w, jnp.full(50, 1.0))
    return Stack([one, one, Pair(w, jnp.full(25, 1.0))], {"head": w})


UNIQUE_BYTES = 4 * (1000 + 50 + 25)


def leaves_by_hand(model):
    one, _, other = model.layers
    return [one.first, one.second, other.second]


def test_steps_hold_each_unique_buffer_once():
    """Plans and call sites hold no array, and each buffer that is donated is given away once."""
    donating, kept = st.jit(add_one, donate_argnums=0), st.jit(add_one)
    before = live()
    model, other = tied_model(), tied_model()
    for _ in range(6):
        old = model, other
        model, other = donating(model), kept(other)
        assert all(x.is_deleted() for x in leaves_by_hand(old[0]))
        assert not any(x.is_deleted() for x in leaves_by_hand(old[1]))
    del old
    added = sizes_of_new(before)
    assert sum(added) == 2 * UNIQUE_BYTES
    assert len(added) == 6
    for each in (model, other):
        assert each.layers[0] is each.layers[1]
        assert each.layers[2].first is each.tail["head"] is each.layers[0].first
        assert [float(x.ravel()[0]) for x in leaves_by_hand(each)] == [7] * 3
    del model, other, each
    assert sizes_of_new(before) == []


def test_arguments_and_outputs_of_the_compiled_step_have_the_size_of_the_unique_leaves():
    stats = st.jit(add_one, donate_argnums=0).lower(tied_model()).compile().memory_analysis()
    assert stats.argument_size_in_bytes == stats.alias_size_in_bytes == UNIQUE_BYTES


def test_what_passes_through_is_no_output_and_no_copy():
    model = tied_model()
    f = st.jit(lambda model, x: (model, x + 1))
    jaxpr = f.trace(model, jnp.zeros(3)).jaxpr
    assert len(jaxpr.out_avals) == 1
    before = live()
    for _ in range(4):
        same, _ = f(model, jnp.zeros(3))
        assert same is model
    assert sum(sizes_of_new(before)) <= 4 * 3
