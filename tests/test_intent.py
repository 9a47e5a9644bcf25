"""What `untie` says belongs to the objects that it was said of: nothing else is excused, and none of them reported."""

import copy
import gc
import threading
import warnings

import equinox as eqx
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharedtree as st
from sharedtree import _untying
from tests.strategies import Layer, Pair, copy_dag, dags, twin
from tests.test_threads import at_once


class Net(eqx.Module):
    embed: jax.Array
    head: jax.Array
    bias: jax.Array


def tied(start=0.0):
    w = jnp.arange(start, start + 4.0).reshape(2, 2)
    return Net(w, w, jnp.arange(2.0))


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


def warnings_of(f, *args):
    """The names that each `UntiedWarning` of a call speaks of."""
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        f(*args)
    assert {w.category for w in record} <= {st.UntiedWarning}
    return [str(w.message) for w in record]


def twice(f, *args):
    """The warnings of the first call; a cached one has none."""
    found = warnings_of(f, *args)
    assert not warnings_of(f, *args)
    return found


# What is meant -------------------------------------------------------------------------------------------------------

MEANT = {
    "untie": st.untie,
    "a part": lambda net: st.untie(net, lambda net: net.head),
    "st.tree.map": lambda net: ours(st.untie(net)),
    "st.tree.at": lambda net: st.tree.at(lambda net: net.head, st.untie(net), jnp.zeros((2, 2))),
    "st.apply_updates": lambda net: st.apply_updates(st.untie(net), vanilla(st.untie(net))),
    "jax.tree.map": lambda net: vanilla(st.untie(net)),
    "eqx.tree_at": lambda net: replaced(st.untie(net)),
    "eqx.apply_updates": lambda net: eqx.apply_updates(st.untie(net), st.untie(net)),
    "said last": lambda net: st.untie(vanilla(net)),
    "said last of a part": lambda net: st.untie(vanilla(net), lambda net: net.head),
    "put back": lambda net: st.retie(vanilla(net), like=net),
    "a part that stays": lambda net: Net(net.embed, 2 * net.bias, net.bias),
    "arrays of its own": lambda net: Pair(2 * net.embed, 3 * net.head),
    "nodes only": lambda net: jax.tree.map(lambda x: x, net),
    "in a larger one": lambda net: Pair(vanilla(st.untie(net)), 1),
    "as part of a larger one": lambda net: vanilla(st.untie(Pair(net, jnp.ones(2)))).first,
    "untied and updated by hand": lambda net: Net(*[2 * x for x in jax.tree.leaves(st.untie(net))]),
}


def test_what_is_meant_is_quiet():
    for name, f in MEANT.items():
        assert not twice(st.jit(f), tied()), name


@pytest.mark.parametrize("transform", [st.jit, st.checkpoint, st.vmap, st.grad])
def test_the_intent_leaves_every_transform_with_the_objects_that_its_results_become(transform):
    for name in ("st.tree.map", "eqx.tree_at", "in a larger one"):
        f = MEANT[name]
        assert not twice(lambda net, f=f: through(transform)(f, net), tied()), name
        for outside in (ours, vanilla):
            call = st.jit(lambda net, f=f, outside=outside: outside(through(transform)(f, net)))
            assert not warnings_of(call.eval_shape, tied()), name


def test_a_cached_result_is_as_meant_as_the_first():
    f = st.jit(MEANT["st.tree.map"])
    use = st.jit(lambda net: net.embed.sum())
    use(tied(2.0))
    for _ in range(2):
        loose = f(tied(1.0))
        for each in (loose, ours(loose), st.copy(loose)):
            assert not warnings_of(use, each)


def test_in_place_too():
    class Trainer:
        def __init__(self, net):
            self.net = net

    jax.tree_util.register_pytree_node(Trainer, lambda t: ((t.net,), None), lambda _, c: Trainer(*c))
    trainer = Trainer(tied())

    @st.preserve_identities(jax.jit, policy=st.Policy(in_place=True))
    def part(trainer):
        trainer.net = ours(st.untie(trainer.net))

    use = st.jit(lambda trainer: trainer.net.embed.sum())
    use(trainer)
    assert not twice(part, trainer)
    assert not warnings_of(use, trainer)


def test_outside_transforms_and_in_another_thread():
    use = st.jit(lambda net: net.embed.sum())
    use(tied())
    loose = st.untie(tied())
    found = []
    thread = threading.Thread(target=lambda: found.append(warnings_of(use, st.device_put(loose, jax.devices()[0]))))
    thread.start()
    thread.join()
    assert found == [[]]


def test_of_what_has_no_ties():
    use = st.jit(lambda net: net.embed.sum())
    use(tied())
    loose = jax.tree.map(jnp.copy, tied())
    assert not warnings_of(use, st.untie(loose))
    assert not warnings_of(st.jit(lambda net: use(net)), st.untie(loose))
    use = st.jit(lambda net: net.embed.sum())
    use(tied())
    assert not warnings_of(use, st.untie(jax.tree.map(jnp.copy, tied()), lambda net: net.head))


def test_a_twin_beside_the_tree_that_it_was_made_of():
    teacher = tied()
    student = st.untie(teacher)
    assert not warnings_of(st.jit(lambda student, teacher: ours(student)), student, teacher)


def test_a_gradient_of_what_is_meant():
    use = st.jit(lambda net: net.embed.sum())
    gradient = lambda net: st.grad(lambda net: (jnp.arange(4.0).reshape(2, 2) * (net.embed + net.head)).sum())(net)
    use(gradient(tied()))
    assert not warnings_of(use, gradient(st.untie(tied())))


# What is not ---------------------------------------------------------------------------------------------------------

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


def test_no_other_model_is_excused():
    for name, f in NOT_MEANT.items():
        found = warnings_of(st.jit(f), tied(), tied(9.0))
        assert found, name
        assert any("`b.embed` and `b.head`" in text or "`a.embed` and `a.head`" in text for text in found), name
        if "teacher" in name:
            assert "`b.embed` and `b.head`" in found[0]


def test_a_teacher_that_keeps_its_ties_is_no_doubt():
    assert not warnings_of(st.jit(lambda a, b: (vanilla(st.untie(a)), ours(b))), tied(), tied(9.0))


def test_a_part_that_stays_tied_is_lost_all_the_same():
    w = jnp.arange(3.0)
    three = Net(w, w, w)
    (text,) = warnings_of(st.jit(lambda net: vanilla(st.untie(net, lambda net: net.bias))), three)
    assert "`net.embed` and `net.head` were" in text
    assert not warnings_of(st.jit(lambda net: ours(st.untie(net, lambda net: net.bias))), three)


def test_a_tie_that_is_put_back_and_lost_again():
    def f(net):
        return st.retie(st.untie(net), like=net)

    net = st.jit(f)(tied())
    assert net.embed is net.head
    assert warnings_of(st.jit(lambda net: replaced(net)), net)
    assert warnings_of(st.jit(lambda net: vanilla(net)), st.retie(st.untie(net), like=net))


# One warning for one tie ---------------------------------------------------------------------------------------------


class State(eqx.Module):
    model: eqx.nn.MLP
    ema: eqx.nn.MLP


def mlp(depth):
    return eqx.nn.MLP(2, 2, 2, depth, key=jax.random.key(0))


def test_one_warning_for_a_shared_module_with_many_leaves_all_lost_or_some():
    model = mlp(3)
    f = st.jit(lambda state: jax.tree.map(lambda x: 2 * x if eqx.is_array(x) else x, state))
    (text,) = warnings_of(f.trace, State(model, ema=model))
    assert "`state.model` and `state.ema` were one object" in text
    assert "`result.model` and `result.ema`" in text
    scale = lambda mlp: eqx.tree_at(lambda m: [x.weight for x in m.layers], mlp, replace_fn=lambda x: 2 * x)
    (text,) = warnings_of(st.jit(lambda state: State(scale(state.model), scale(state.ema))).trace, State(model, model))
    assert "`state.model` and `state.ema`" in text


def test_one_warning_for_all_paths_of_a_tie_and_for_each_tie_one_in_the_other():
    w = jnp.arange(3.0)
    (text,) = warnings_of(st.jit(lambda net: vanilla(net)).trace, Net(w, w, w))
    assert "`net.embed`, `net.head` and `net.bias` were" in text
    x, y = jnp.zeros(()), jnp.zeros(())
    model = Pair(x, Layer(y, "text", Pair(y, Pair(x, x))))
    texts = warnings_of(st.jit(lambda model: twin(model)).eval_shape, model)
    assert len(texts) == 2
    assert any(
        "`model.first`, `model.second.parts.second.first` and `model.second.parts.second.second`" in text
        for text in texts
    )


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


def test_two_wrapped_functions_are_told_of_one_loss_between_calls_once():
    one, two = st.jit(lambda net: net.embed.sum()), st.jit(lambda net: net.embed.max())
    net = tied()
    one(net)
    two(net)
    loose = jax.tree.map(jnp.copy, net)
    assert len(warnings_of(one, loose)) == 1
    assert not warnings_of(two, loose)


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
    assert len(found) == len(expected), [tie.paths for tie in expected]
    for tie in expected:
        assert any(all(f"`model{path}`" in text for path in tie.paths[:2]) for text in found), tie
    doubled = lambda m: st.tree.map(lambda x: x * 2, m)
    twice = lambda m: (doubled(m), [copy_dag(m)])  # a module of the same shape without ties is in both
    for kept in (doubled, st.untie, lambda m: twin(st.untie(m)), copy_dag, twice):
        assert not warnings_of(st.jit(lambda model, kept=kept: kept(model)).eval_shape, model)


# Between calls -------------------------------------------------------------------------------------------------------


def after_tied(loose, net=None):
    use = st.jit(lambda net: 1)
    use(tied() if net is None else net)
    return bool(warnings_of(use, loose))


def pair(a, b):
    return Net(a, b, jnp.arange(2.0))


def test_only_what_is_still_equal_in_value_was_lost():
    w = jnp.arange(4.0).reshape(2, 2)
    assert after_tied(pair(w, w + 0))
    assert after_tied(jax.device_put(tied(), jax.devices()[0]))
    assert after_tied(copy.deepcopy(tied())) is False  # deepcopy keeps the tie
    assert not after_tied(pair(w, w + 1))
    assert not after_tied(pair(jnp.zeros((2, 2)), jnp.zeros((2, 2))))
    assert not after_tied(pair(w.at[1, 1].set(0), w))


def test_nan_and_signed_zeros_are_compared_as_bytes():
    w = jnp.array([[jnp.nan, 1.0], [0.0, 2.0]])
    assert after_tied(pair(w, w + 0))
    assert not after_tied(pair(w, w.at[1, 0].set(-0.0)))


def test_every_dtype():
    for dtype in (np.int8, np.bool_, jnp.bfloat16, np.complex64):
        values = np.array([[0, 1], [1, 1]]).astype(dtype)
        assert after_tied(pair(jnp.array(values), jnp.array(values)), pair(*[jnp.array(values)] * 2)), dtype
        assert after_tied(pair(values.copy(), values.copy()), pair(*[jnp.array(values)] * 2)), dtype


def test_keys():
    keys = lambda seed: jax.random.split(jax.random.key(seed), 2)
    one = keys(0)
    assert after_tied(pair(keys(0), keys(0)), pair(one, one))
    assert not after_tied(pair(keys(0), keys(1)), pair(one, one))


def test_only_the_first_megabyte_is_compared():
    big = jnp.arange(2**19, dtype=jnp.float32).reshape(2**9, 2**10)
    assert after_tied(pair(big, big.at[-1, -1].set(0)), pair(big, big))
    assert not after_tied(pair(big, big.at[100, 0].set(0)), pair(big, big))
    wide = big.reshape(1, -1)
    assert after_tied(pair(wide, wide + 0), pair(wide, wide))


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


def test_a_module_is_still_equal_if_all_of_it_is():
    layer = Layer(jnp.arange(2.0), None, {"a": jnp.zeros(3)})
    parted = lambda change: Pair(layer, jax.tree.map(change, layer))
    assert after_tied(parted(jnp.copy), Pair(layer, layer))
    assert not after_tied(parted(lambda x: x.at[0].set(7)), Pair(layer, layer))
    assert not after_tied(parted(lambda x: jnp.where(x.size == 3, 1.0, x)), Pair(layer, layer))


# What the notes cost -------------------------------------------------------------------------------------------------


def test_notes_keep_nothing_alive_and_are_swept():
    gc.collect()
    loose = st.untie(tied())
    number = id(loose.head)
    assert _untying.is_noted(loose.head)
    del loose
    gc.collect()
    reference = _untying._notes._references.get(number)
    assert reference is None or reference() is None
    for _ in range(3_000):
        _untying.note([jnp.float32(1)])
    assert len(_untying._notes._references) < 2_900


def test_threads_note_at_once():
    use = st.jit(lambda net: 1)
    use(tied())

    def work(i):
        net = tied(float(i))
        for _ in range(50):
            loose = st.untie(net)
            assert all(map(_untying.is_noted, jax.tree.leaves(loose)))

    at_once(work)
