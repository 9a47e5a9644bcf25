"""The optimizer says so if its model has lost its ties, wherever that was."""

import functools
import gc
import inspect
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import sharedtree as st
from tests.messages import warnings_of


class Net(eqx.Module):
    embed: jax.Array
    head: jax.Array
    act: object = eqx.field(static=True, default=jax.nn.relu)


def tied(n=3):
    w = jnp.arange(1.0, n + 1.0)
    return Net(w, w)


def loss(net):
    return (3 * net.embed - net.head**2).sum()  # the two paths pull in opposite directions


def copied(net):
    return jax.tree.map(jnp.copy, net)


def step_with(tx):
    def step(net, state):
        gradient = st.grad(loss)(net)
        updates, state = tx.update(gradient, state, net)
        return st.apply_updates(net, updates), state

    return step


@pytest.mark.parametrize(
    ("around", "tx"),
    [(eqx.filter_jit, optax.sgd(0.1)), (jax.jit, optax.adam(0.1)), (eqx.filter_jit, optax.sgd(0.1, momentum=0.9))],
    ids=["sgd", "adam", "momentum"],
)
def test_a_vanilla_jit_around_a_step_that_keeps_ties(around, tx):
    """The oracle is the step itself: under a vanilla jit it computes something else, and that was never said."""
    tx = st.optimizer(tx)
    net = tied()
    state = tx.init(net)
    step = step_with(tx)
    right, _ = step(*step(net, state))
    with pytest.warns(st.UntiedWarning, match=r"`model\.embed` and `model\.head` are two objects") as record:
        wrong, state = around(lambda *args: step(*step(*args)))(net, state)
    assert len(record) == 1
    assert record[0].filename == __file__
    assert record[0].lineno == step.__code__.co_firstlineno
    assert "`step_with.<locals>.step`" in str(record[0].message)
    assert not jnp.allclose(wrong.embed, right.embed)


def test_the_policy_and_an_eager_loop_is_told_once():
    net, tx = tied(), st.optimizer(optax.sgd(0.1))
    state = tx.init(net)
    with st.Context(st.Policy(on_untie="error")), pytest.raises(st.errors.UntiedError) as caught:
        step_with(tx)(copied(net), state)
    assert caught.value.paths == ("model.embed", "model.head")
    with st.Context(st.Policy(on_untie="ignore")):
        step_with(tx)(copied(net), state)

    def train():
        net, tx = tied(), st.optimizer(optax.adam(0.1))
        state = tx.init(net)
        for _ in range(4):
            updates, state = tx.update(st.grad(loss)(net), state, net)
            net = optax.apply_updates(net, updates)

    assert len(warnings_of(train)) == 1


def test_the_states_slots_tell_where_init_was_not_seen():
    net = tied()
    state = st.optimizer(optax.adam(0.1)).init(net)
    other = st.optimizer(optax.adam(0.1))
    loose = copied(net)
    (text,) = warnings_of(other.update, loose, state, loose)
    assert "were one in the optimizer's state" in text
    assert not warnings_of(other.update, loose, state, loose)
    assert not warnings_of(st.optimizer(optax.adam(0.1)).update, loose, optax.adam(0.1).init(loose), loose)


def test_models_in_containers_and_plain_dictionaries_of_parameters():
    net = tied()
    for params in (net, {"net": net}, (net, jnp.ones(2)), {"a": net.embed, "b": net.embed}):
        tx = st.optimizer(optax.sgd(0.1))
        state = tx.init(params)
        loose = copied(params)
        assert not warnings_of(tx.update, params, state, params)
        (message,) = warnings_of(tx.update, loose, state, loose)
        # Modules need no policy.
        assert ("Policy" in message) == (params is not net and "a" in params)
        assert ("    step = sharedtree.jit(step)" in message) != ("Policy" in message)
    # A gradient alone tells, too.
    tx = st.optimizer(optax.sgd(0.1))
    state = tx.init(net)
    assert not warnings_of(tx.update, st.grad(loss)(net), state)
    assert len(warnings_of(tx.update, jax.grad(lambda net: loss(net))(eqx.filter(net, eqx.is_array)), state)) == 1


def of_dict(params):
    return (3 * params["embed"] - params["head"] ** 2).sum()


@pytest.mark.parametrize("jit", [st.jit, jax.jit, st.preserve_identities(eqx.filter_jit)])
def test_a_step_on_a_plain_dictionary_is_told_of_the_policy_that_keeps_its_ties(jit):
    """Whichever `jit` is around it: the ready-made one alone changes nothing."""
    tx = st.optimizer(optax.sgd(0.1, momentum=0.9))
    w = jnp.arange(1.0, 4.0)
    params = {"embed": w, "head": w}

    def step(params, state):
        gradient = st.grad(of_dict, policy=st.Policy(containers=True))(params)
        updates, state = tx.update(gradient, state, params)
        return st.apply_updates(params, updates), state

    state = tx.init(params)
    right, _ = step(params, state)
    (message,) = warnings_of(jit(step), params, state)
    (fix,) = [line for line in message.splitlines() if line.startswith("    step = ")]
    names = {"sharedtree": st, "step": step}
    exec(fix.strip(), names)
    assert not warnings_of(names["step"], params, state)
    new, _ = names["step"](params, state)
    assert new["embed"] is new["head"]
    assert jnp.allclose(new["embed"], right["embed"])


def test_what_untie_made_is_never_reported():
    tx = st.optimizer(optax.adam(0.1))
    net = tied()
    state = tx.init(net)
    loose = st.untie(net)
    assert not warnings_of(tx.update, loose, state, loose)
    stepped = st.tree.map(lambda x: 2 * x, loose)
    assert not warnings_of(tx.update, stepped, state, stepped)
    assert not warnings_of(
        eqx.filter_jit(lambda net, state: tx.update(st.untie(net), state, st.untie(net))), net, state
    )
    assert not warnings_of(tx.update, st.untie(copied(net)), state, st.untie(copied(net)))


def test_sharings_that_init_saw_are_all_known():
    tx = st.optimizer(optax.sgd(0.1))
    net, loose, other = tied(), copied(tied()), tied(5)
    states = [tx.init(each) for each in (net, loose, other)]
    for each, state in zip((net, loose, other), states, strict=True):
        assert not warnings_of(tx.update, each, state, each)
    seen_untied = st.optimizer(optax.sgd(0.1))
    assert not warnings_of(seen_untied.update, tied(), seen_untied.init(copied(tied())), tied())
    # The shapes of the leaves are no matter, only the tree is.
    assert not warnings_of(tx.update, copied(other), states[1], copied(other))


def test_entries_of_an_optimizer_state_do_not_count():
    tx = st.optimizer(optax.lookahead(optax.sgd(0.1), 2, 0.5))
    params = optax.LookaheadParams.init_synced(tied())
    state = tx.init(params)
    for _ in range(3):
        gradient = st.grad(lambda d: loss(d.tree))(st.Dag(params.fast)).tree
        updates, state = tx.update(gradient, state, params)
        params = st.apply_updates(params, updates)
    assert params.fast.embed is params.fast.head


def test_one_warning_for_one_loss():
    """For a shared layer, and where a tie is lost before the trace sees the optimizer, or in a loop after it."""
    layer = eqx.nn.MLP(2, 2, 2, 3, key=jax.random.key(0))
    tx = st.optimizer(optax.adam(0.1))
    params = st.tree.filter([layer, layer], eqx.is_array)
    state = tx.init(params)
    (text,) = warnings_of(tx.update, copied(params), state, copied(params))
    assert "`model[0]` and `model[1]`" in text

    def before(tx, net, state):
        net = jax.tree.map(lambda x: 2 * x, net)
        updates, state = tx.update(net, state, net)
        return st.apply_updates(net, updates), state

    def after(tx, net, state):
        updates, state = tx.update(st.grad(loss)(net), state, net)
        return optax.apply_updates(net, updates), state

    for step, times in ((before, 1), (after, 3)):
        tx = st.optimizer(optax.sgd(0.1))
        jitted = st.jit(functools.partial(step, tx))

        def train(net, state, times=times, jitted=jitted):
            for _ in range(times):
                net, state = jitted(net, state)

        net = tied()
        assert len(warnings_of(train, net, tx.init(net))) == 1


def test_no_array_is_kept_and_memory_is_bounded():
    tx = st.optimizer(optax.sgd(0.1))
    net = tied()
    reference = weakref.ref(net.embed)
    tx.init(net)
    del net
    gc.collect()
    assert reference() is None
    for n in range(50):
        tx.init({str(n): jnp.ones(1)})
    held = [cell.cell_contents for cell in inspect.unwrap(tx.init).__closure__]
    (memory,) = [each for each in held if "InitialTies" in str(type(each))]
    assert len(memory._initial_sharings) <= 16


def test_a_model_with_ties_of_its_own_is_another_model():
    """It has lost nothing: it is not what `init` saw minus ties."""
    v, w = jnp.ones(2), jnp.zeros(2)
    tx = st.optimizer(optax.sgd(0.1))
    state = tx.init({"a": w, "b": w, "c": v})
    other = {"a": v, "b": w, "c": w}
    assert warnings_of(tx.update, other, state, other) == []
    lost = {"a": w, "b": jnp.copy(w), "c": v}
    assert len(warnings_of(tx.update, lost, state, lost)) == 1
