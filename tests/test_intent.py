"""S7: a tie that is lost inside a transform, or between two calls, is never silent; one that was untied is.

What `untie` says belongs to the objects that it was said of: nothing else is excused, and none of them reported.
"""

import copy
import gc

import equinox as eqx
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sharedtree as st
from sharedtree.ties import _leaf_notes
from tests.messages import warnings_of
from tests.models import BiasedNet
from tests.strategies import Layer, Mutable, Pair, Point, copy_dag, dags, twin
from tests.threads import at_once


def tied(start=0.0):
    w = jnp.arange(start, start + 4.0).reshape(2, 2)
    return BiasedNet(w, w, jnp.arange(2.0))


def vanilla(tree):
    return jax.tree.map(lambda x: 2 * x, tree)


def ours(tree):
    return st.tree.map(lambda x: 2 * x, tree)


def replaced(net):
    return eqx.tree_at(lambda net: net.head, net, net.head + 1)


def through(transform):
    """A call of the function below another transform, which it crosses on the way in and on the way out."""

    def call(f, net):
        if transform is st.vmap:
            return st.vmap(f, in_axes=None, out_axes=None, axis_size=2)(net)
        if transform is st.grad:
            return st.grad(lambda net: (net.embed.sum(), f(net)), has_aux=True)(net)[1]
        return transform(f)(net)

    return call


def twice(f, *args):
    """The warnings of the first call; a cached one has none."""
    found = warnings_of(f, *args)
    assert not warnings_of(f, *args)
    return found


MEANT = {
    "untie": st.untie,
    "a part": lambda net: st.untie(net, lambda net: net.head),
    "st.tree.map": lambda net: ours(st.untie(net)),
    "st.tree.at": lambda net: st.tree.at(lambda net: net.head, st.untie(net), jnp.zeros((2, 2))),
    "st.apply_updates": lambda net: st.apply_updates(st.untie(net), vanilla(st.untie(net))),
    "said last": lambda net: st.untie(vanilla(net)),
    "said last of a part": lambda net: st.untie(vanilla(net), lambda net: net.head),
    "put back": lambda net: st.retie(vanilla(net), like=net),
    "a part that stays": lambda net: BiasedNet(net.embed, 2 * net.bias, net.bias),
    "arrays of its own": lambda net: Pair(2 * net.embed, 3 * net.head),
    "nodes only": lambda net: jax.tree.map(lambda x: x, net),
    "in a larger one": lambda net: Pair(ours(st.untie(net)), 1),
    "as part of a larger one": lambda net: ours(st.untie(Pair(net, jnp.ones(2)))).first,
    "said again": lambda net: st.untie(vanilla(st.untie(net))),
}
# Vanilla functions do not hand on what was said of leaves.
SAID_BEFORE = {
    "jax.tree.map": lambda net: vanilla(st.untie(net)),
    "eqx.tree_at": lambda net: replaced(st.untie(net)),
    "eqx.apply_updates": lambda net: eqx.apply_updates(st.untie(net), st.untie(net)),
    "by hand": lambda net: BiasedNet(*[2 * x for x in jax.tree.leaves(st.untie(net))]),
}


def test_what_is_meant_is_quiet():
    for name, f in MEANT.items():
        assert not twice(st.jit(f), tied()), name
    for name, f in SAID_BEFORE.items():
        assert len(twice(st.jit(f), tied())) == 1, name
        assert not twice(st.jit(lambda net, f=f: st.untie(f(net))), tied()), name


@pytest.mark.parametrize("transform", [st.jit, st.checkpoint, st.vmap, st.grad])
def test_the_intent_leaves_every_transform_with_the_objects_that_its_results_become(transform):
    for name in ("st.tree.map", "st.tree.at", "in a larger one"):
        f = MEANT[name]
        assert not twice(lambda net, f=f: through(transform)(f, net), tied()), name
        call = st.jit(lambda net, f=f: ours(through(transform)(f, net)))
        assert not warnings_of(call.eval_shape, tied()), name


def test_a_cached_result_is_as_meant_as_the_first():
    f = st.jit(MEANT["st.tree.map"])
    use = st.jit(lambda net: net.embed.sum())
    use(tied(2.0))
    for _ in range(2):
        loose = f(tied(1.0))
        for each in (loose, ours(loose), st.copy(loose)):
            assert not warnings_of(use, each)


def test_in_place_and_beside_the_tree_that_it_was_made_of_and_in_another_thread():
    def part(trainer):
        trainer.net = ours(st.untie(trainer.net))

    trainer, use = Mutable(net=tied()), st.jit(lambda trainer: trainer.net.embed.sum())
    use(trainer)
    assert not twice(st.jit(part, in_place=True), trainer)
    assert not warnings_of(use, trainer)
    assert not warnings_of(st.jit(lambda student, teacher: ours(student)), st.untie(tied()), tied())

    def work(i):
        net = tied(float(i))
        for _ in range(50):
            loose = st.untie(net)
            assert all(map(_leaf_notes.is_noted, jax.tree.leaves(loose)))
        use(Mutable(net=st.device_put(loose, jax.devices()[0])))

    at_once(work)


def test_a_gradient_of_what_is_meant():
    use = st.jit(lambda net: net.embed.sum())
    gradient = lambda net: st.grad(lambda net: (jnp.arange(4.0).reshape(2, 2) * (net.embed + net.head)).sum())(net)
    use(gradient(tied()))
    assert not warnings_of(use, gradient(st.untie(tied())))


NOT_MEANT = {
    "the teacher of an untied student": lambda a, b: (st.untie(a), vanilla(b)),
    "both mapped": lambda a, b: (vanilla(st.untie(a)), vanilla(b)),
    "only the teacher comes back": lambda a, b: (st.untie(a), None)[1] or vanilla(b),
    "the twin itself, replaced": lambda a, b: (st.untie(b), replaced(b)),
    "the twin itself, mapped": lambda a, b: (vanilla(st.untie(b)), vanilla(b)),
    "only the twin, replaced": lambda a, b: (a, st.untie(b) and replaced(b)),
    "a tie beside": lambda a, b: (a, vanilla(st.untie(b, lambda net: net.bias))),
    "said twice of the student": lambda a, b: (st.untie(a), st.untie(a), vanilla(b)),
}


@pytest.mark.parametrize("transform", [st.jit, st.vmap, st.checkpoint, st.grad])
def test_lost_inside(transform):
    doubled = lambda net: eqx.apply_updates(net, net)
    rebuilt = lambda net: BiasedNet(2 * net.embed, 2 * net.head, net.bias)
    for lose, keeping in (
        (vanilla, "sharedtree.tree.map(f, model)"),
        (replaced, "sharedtree.tree.at(where, model, new)"),
        (doubled, "sharedtree.apply_updates(model, updates)"),
        (lambda net: {"new": Pair(0, vanilla(net))}, "sharedtree.tree.map(f, model)"),
        (rebuilt, "sharedtree.retie(model, like=before)"),
    ):
        (text,) = warnings_of(lambda net, lose=lose: through(transform)(lambda net: lose(net), net), tied())
        assert "`net.embed` and `net.head`" in text
        # Outside a compiled function some arrays are concrete, and do not know what made them.
        by_hand = "sharedtree.retie(model, like=before)"
        offered = {keeping} if transform in (st.jit, st.checkpoint) else {keeping, by_hand}
        assert any(f"    model = {each}" in text for each in offered)
        assert len(text.splitlines()) <= 8


def test_lost_between_two_calls():
    traces = []
    f = st.jit(lambda net: traces.append(1) or net.embed.sum())
    f(tied())
    # What vanilla functions do outside any transform.
    loose = jax.tree.map(jnp.copy, tied())
    (text,) = twice(f, loose)
    assert "earlier call" in text
    f(tied())
    assert len(traces) == 2


def test_lost_although_an_untied_model_of_the_class_is_there():
    loose = pair(jnp.ones((2, 2)), jnp.zeros((2, 2)))
    for f in (lambda net, ema: (vanilla(net), ema), lambda net, ema: (vanilla(net), vanilla(ema))):
        assert len(warnings_of(st.jit(f), tied(), loose)) == 1
    f = st.jit(lambda net, ema: 0)
    f(tied(), loose)
    assert len(warnings_of(f, jax.tree.map(jnp.copy, tied()), loose)) == 1


def test_a_tied_namedtuple_of_the_users_own_counts():
    w = jnp.ones(2)
    (text,) = warnings_of(st.jit(lambda m: Pair(vanilla(m.first), 1)), Pair(Point(w, w), 1))
    assert ".first.x" in text
    kept = st.apply_updates(Point(w, w), Point(w, w))
    assert kept.x is kept.y
    with pytest.raises(st.errors.SharingMismatchError):
        st.apply_updates(Point(w, w), Point(w + 1, w + 1))


def test_aliases_between_arguments_and_in_optimizer_states_do_not_count():
    def step(net, ema, state):
        times = lambda k, net: st.tree.map(lambda x: x * k, net)
        return times(2, net), times(3, ema), Pair(times(2, net), optax.LookaheadParams(times(3, net), times(4, net)))

    net = tied()
    f = st.jit(step)
    assert not warnings_of(f, *f(net, net, Pair(net, optax.LookaheadParams(net, net))))


def test_eager_transforms_remember_nothing():
    f = st.grad(lambda net: net.embed.sum())
    for _ in range(3):
        f(tied())
    assert not list(f._shared.history.seen_arguments._traces_of.items())


@pytest.mark.parametrize(("name", "f"), NOT_MEANT.items(), ids=NOT_MEANT)
def test_no_other_model_is_excused(name, f):
    found = warnings_of(st.jit(f), tied(), tied(9.0))
    assert found
    assert any("`b.embed` and `b.head`" in text or "`a.embed` and `a.head`" in text for text in found)
    if "teacher" in name:
        assert "`b.embed` and `b.head`" in found[0]


def test_one_warning_for_all_paths_of_a_tie_or_for_the_part_that_stays_tied():
    assert not warnings_of(st.jit(lambda a, b: (ours(st.untie(a)), ours(b))), tied(), tied(9.0))
    w = jnp.arange(3.0)
    three = BiasedNet(w, w, w)
    (text,) = warnings_of(st.jit(lambda net: vanilla(net)).trace, three)
    assert "`net.embed`, `net.head` and `net.bias` were" in text
    (text,) = warnings_of(st.jit(lambda net: replaced(st.untie(net, lambda net: net.bias))), three)
    assert "`net.embed` and `net.head` were" in text
    assert not warnings_of(st.jit(lambda net: ours(st.untie(net, lambda net: net.bias))), three)


def test_a_tie_that_is_put_back_and_lost_again():
    def f(net):
        return st.retie(st.untie(net), like=net)

    net = st.jit(f)(tied())
    assert net.embed is net.head
    assert warnings_of(st.jit(lambda net: replaced(net)), net)
    assert warnings_of(st.jit(lambda net: vanilla(net)), st.retie(st.untie(net), like=net))


def test_one_warning_for_a_shared_module_with_many_leaves_all_lost_or_some():
    model = eqx.nn.MLP(2, 2, 2, depth=3, key=jax.random.key(0))
    both = Pair(model, model)
    f = st.jit(lambda state: jax.tree.map(lambda x: 2 * x if eqx.is_array(x) else x, state))
    (text,) = warnings_of(f.trace, both)
    assert "`state.first` and `state.second` were one object" in text
    assert "`result.first` and `result.second`" in text
    scale = lambda mlp: eqx.tree_at(lambda m: [x.weight for x in m.layers], mlp, replace_fn=lambda x: 2 * x)
    (text,) = warnings_of(st.jit(lambda state: Pair(scale(state.first), scale(state.second))).trace, both)
    assert "`state.first` and `state.second`" in text


def test_one_warning_in_the_trace_around_it_between_calls_and_for_two_results():
    @st.jit
    def outer(net):
        return ours(st.jit(lambda net: vanilla(net))(net)), st.checkpoint(lambda net: net)(net)

    use = st.jit(lambda net: net.embed.sum())
    use(tied())
    with pytest.warns(st.UntiedWarning) as record:
        loose, _ = outer(tied())
    assert len(record) == 1
    assert not warnings_of(use, loose)
    assert len(warnings_of(st.jit(lambda net: (vanilla(net), vanilla(net))), tied())) == 1


def test_a_model_returned_twice_beside_a_module_of_its_shape_without_ties():
    x, y, z = jnp.zeros(()), jnp.zeros(()), jnp.zeros(())
    model = Pair(Pair(x, x), Pair(y, z))
    both = lambda model: (ours(model), [copy_dag(model)])
    assert not warnings_of(st.jit(both).eval_shape, model)
    assert len(warnings_of(st.jit(lambda model: (ours(model), vanilla(model))).eval_shape, model)) == 1


@hypothesis.given(dags())
def test_every_maximal_tie_is_reported_once_and_nothing_else(dag):
    model = Pair(dag, 1)
    # A zero-size array has no bytes, but it is a leaf.
    expected = [tie for tie in st.ties(model) if tie.nbytes or tie.kind == "array"]
    found = warnings_of(st.jit(lambda model: twin(model)).eval_shape, model)
    assert len(found) == bool(expected)
    if expected:
        count = len(expected)
        assert found[0].startswith("A tie was lost" if count == 1 else f"{count} ties were lost")
        assert len(found[0].splitlines()) <= 8
        with pytest.raises(st.errors.UntiedError) as error:
            st.jit(lambda model: twin(model), policy=st.Policy(on_untie="error")).eval_shape(model)
        for tie in expected:
            assert {f"model{path}" for path in tie.paths[:2]} <= set(error.value.paths), tie
    doubled = lambda m: st.tree.map(lambda x: x * 2, m)
    twice = lambda m: (doubled(m), [copy_dag(m)])  # a module of the same shape without ties is in both
    for kept in (doubled, st.untie, lambda m: st.untie(twin(m)), copy_dag, twice):
        assert not warnings_of(st.jit(lambda model, kept=kept: kept(model)).eval_shape, model)


def pair(a, b):
    return BiasedNet(a, b, jnp.arange(2.0))


W = jnp.arange(4.0).reshape(2, 2)
SPECIAL = jnp.array([[jnp.nan, 1.0], [0.0, 2.0]])
BIG = jnp.arange(2**19, dtype=jnp.float32).reshape(2**9, 2**10)
LAYER = Layer(jnp.arange(2.0), None, {"a": jnp.zeros(3)})
MODELS = Pair(LAYER, LAYER)


def keys(seed):
    return jax.random.split(jax.random.key(seed), 2)


def parted(change):
    return Pair(LAYER, jax.tree.map(change, LAYER))


def of_type(dtype, make):
    values = np.array([[0, 1], [1, 1]]).astype(dtype)
    return pair(make(values), make(values)), pair(*[jnp.array(values)] * 2), True


# What is there at the second call, what was there at the first, and whether a tie was lost between them.
BETWEEN = {
    "equal": (pair(W, W + 0), None, True),
    "moved": (jax.device_put(tied(), jax.devices()[0]), None, True),
    "a deep copy, which keeps the tie": (copy.deepcopy(tied()), None, False),
    "another value": (pair(W, W + 1), None, False),
    "zeros": (pair(jnp.zeros((2, 2)), jnp.zeros((2, 2))), None, False),
    "one number": (pair(W.at[1, 1].set(0), W), None, False),
    "untied": (st.untie(tied()), None, False),
    "untied later": (st.untie(jax.tree.map(jnp.copy, tied())), None, False),
    "untied later, a part": (st.untie(jax.tree.map(jnp.copy, tied()), lambda net: net.head), None, False),
    "nan, by its bytes": (pair(SPECIAL, SPECIAL + 0), None, True),
    "the sign of a zero": (pair(SPECIAL, SPECIAL.at[1, 0].set(-0.0)), None, False),
    **{f"{dtype}": of_type(dtype, jnp.array) for dtype in (np.int8, np.bool_, jnp.bfloat16, np.complex64)},
    **{f"{dtype} of NumPy": of_type(dtype, np.copy) for dtype in (np.int8, np.bool_, jnp.bfloat16, np.complex64)},
    "keys": (pair(keys(0), keys(0)), pair(*[keys(0)] * 2), True),
    "other keys": (pair(keys(0), keys(1)), pair(*[keys(0)] * 2), False),
    "after the first megabyte": (pair(BIG, BIG.at[-1, -1].set(0)), pair(BIG, BIG), True),
    "in the first megabyte": (pair(BIG, BIG.at[100, 0].set(0)), pair(BIG, BIG), False),
    "one wide row": (pair(BIG.reshape(1, -1), BIG.reshape(1, -1) + 0), pair(*[BIG.reshape(1, -1)] * 2), True),
    "a module": (parted(jnp.copy), MODELS, True),
    "a module, all of it changed": (parted(lambda x: x.at[0].set(7)), MODELS, False),
    "a module, a part changed": (parted(lambda x: jnp.where(x.size == 3, 1.0, x)), MODELS, False),
}


@pytest.mark.parametrize("name", BETWEEN)
@pytest.mark.sampled(every=5)
def test_only_what_is_still_equal_in_value_was_lost(name):
    loose, before, is_lost = BETWEEN[name]
    one, two = st.jit(lambda net: 1), st.jit(lambda net: 2)
    for use in (one, two):
        use(tied() if before is None else before)
    assert [len(warnings_of(use, loose)) for use in (one, two)] == [is_lost, 0]  # of one loss both are told once


def test_what_cannot_be_compared_is_no_warning():
    w = jnp.arange(4.0).reshape(2, 2)
    use = st.jit(lambda net: net.embed + net.head)
    use(tied())
    abstract = jax.ShapeDtypeStruct((2, 2), jnp.float32)
    use.eval_shape(pair(abstract, jax.ShapeDtypeStruct((2, 2), jnp.float32)))
    assert not warnings_of(jax.jit(lambda w: use(pair(w, w + 0))), w)
    gone = w + 0
    gone.delete()
    with pytest.raises((RuntimeError, ValueError), match="deleted"):
        use(pair(w, gone))


def test_notes_keep_nothing_alive_and_are_swept():
    gc.collect()
    loose = st.untie(tied())
    number = id(loose.head)
    assert _leaf_notes.is_noted(loose.head)
    del loose
    gc.collect()
    reference = _leaf_notes._untied._references.get(number)
    assert reference is None or reference() is None
    for _ in range(3_000):
        _leaf_notes.note([jnp.float32(1)])
    assert len(_leaf_notes._untied._references) < 2_900


@pytest.mark.filterwarnings("error")
def test_one_model_as_two_arguments_has_lost_nothing_where_one_comes_back():
    w, u = jnp.ones(2), jnp.zeros(2)
    tied_and_not = Pair(Pair(w, w), Pair(u, w + 1))
    for both in (lambda f: st.jit(lambda one, two: f(one)), lambda f: st.jit(lambda one, two: (f(one), f(two)))):
        both(ours)(tied_and_not, tied_and_not)
        with pytest.raises(st.UntiedWarning, match=r"`one.first.first` and `one.first.second` were one object"):
            both(vanilla)(tied_and_not, tied_and_not)
