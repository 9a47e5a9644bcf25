"""Ties of arrays in plain containers without `Policy(containers=True)`: the transform that undoes them says so."""

import functools
import re
import threading
import warnings
import weakref
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sharedtree as st
from sharedtree.ties import _leaf_notes
from tests.garbage import collect_all

POLICY = st.Policy(containers=True)


def where(p: Any) -> Any:
    return p["embed"]["w"], p["head"]["w"]


def loose() -> Any:
    return {"embed": {"w": jnp.arange(1.0, 4)}, "head": {"w": jnp.zeros(3), "b": jnp.ones(3)}}


def tied() -> Any:
    return st.tie(loose(), where)


def loss(p: Any) -> Any:
    return jnp.sum((p["embed"]["w"] * p["head"]["w"] + p["head"]["b"] - 1.5) ** 2)


def said(function: Any, *args: Any) -> list[str]:
    """The warnings that a call gives about ties of values."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*args)
    assert all(each.category is st.UntiedWarning for each in caught)
    return [str(each.message) for each in caught if "are one array" in str(each.message)]


def told(tree: Any) -> list[str]:
    """The warnings when a function of these values is traced."""
    return said(lambda tree: st.eval_shape(lambda t: t, tree), tree)


# --- who is told ------------------------------------------------------------------------------------------------------

TRANSFORMS = {
    "jit": lambda f: st.jit(f),
    "grad": lambda f: st.grad(lambda params: loss(f(params))),
    "value_and_grad": lambda f: st.value_and_grad(lambda params: loss(f(params))),
    "vmap": lambda f: st.vmap(f),
    "checkpoint": lambda f: st.checkpoint(f),
    "filter_jit": lambda f: st.preserve_identities(eqx.filter_jit)(f),
    "unregistered": lambda f: st.preserve_identities(lambda g: jax.jit(g))(f),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=list(TRANSFORMS))
def test_a_transform_that_meets_a_tied_value_twice_says_so(transform):
    (message,) = said(transform(lambda params: st.untie(params)), tied())
    assert "`params['embed']['w']` and `params['head']['w']`" in message
    assert "sharedtree.Policy(containers=True)" in message
    assert "sharedtree.Dag(params)" in message
    w = jnp.ones(3)  # an alias by accident
    for params in (loose(), {"embed": {"w": w}, "head": {"w": w, "b": w}}, st.untie(tied())):
        assert told(params) == []
    with st.Context(POLICY):
        assert said(transform(lambda params: params), tied()) == []


def test_it_is_said_when_the_function_is_traced_and_by_policy():
    f = st.jit(lambda p: loss(p))
    assert len(said(f, tied())) == 1
    assert said(f, tied()) == []
    with pytest.raises(st.errors.UntiedError) as caught:
        st.jit(loss, policy=st.Policy(on_untie="error"))(tied())
    assert caught.value.paths == ("p['embed']['w']", "p['head']['w']")
    assert said(st.jit(loss, policy=st.Policy(on_untie="ignore")), tied()) == []


def test_a_tie_that_is_made_inside_is_missed_in_the_result():
    made = st.jit(lambda p: st.tie(p, where))
    (message,) = said(made, loose())
    assert "`result['embed']['w']` and `result['head']['w']`" in message
    assert said(st.jit(lambda p: loss(st.tie(p, where))), loose()) == []
    out = st.jit(lambda p: st.tie(p, where), policy=POLICY)(loose())
    assert out["embed"]["w"] is out["head"]["w"]


def same(params: Any) -> Any:
    return params


def stacked(params: Any) -> Any:
    return st.tree.map(lambda x: x[None], params)


def with_rules(transform: Any) -> Any:
    function = transform(lambda p: loss(p))
    if transform is st.custom_vjp:
        function.defvjp(lambda p: (loss(p), p), lambda p, _: (p,))
    else:
        function.defjvp(lambda p, t: (loss(*p), loss(*t)))
    return function


MESH = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("d",))
SPEC = jax.sharding.PartitionSpec()

CALLED = {
    "jax.jit": lambda p: st.jit(lambda p: loss(p))(p),
    "jax.grad": lambda p: st.grad(lambda p: loss(p))(p),
    "jax.value_and_grad": lambda p: st.value_and_grad(lambda p: loss(p))(p),
    "jax.jacfwd": lambda p: st.jacfwd(lambda p: loss(p))(p),
    "jax.jacrev": lambda p: st.jacrev(lambda p: loss(p))(p),
    "jax.hessian": lambda p: st.hessian(lambda p: loss(p))(p),
    "jax.vmap": lambda p: st.vmap(lambda p: loss(p))(stacked(p)),
    "jax.pmap": lambda p: st.pmap(lambda p: loss(p))(stacked(p)),
    "jax.shard_map": lambda p: st.shard_map(lambda p: loss(p), mesh=MESH, in_specs=SPEC, out_specs=SPEC)(p),
    "jax.checkpoint": lambda p: st.checkpoint(lambda p: loss(p))(p),
    "jax.eval_shape": lambda p: st.eval_shape(lambda p: loss(p), p),
    "jax.make_jaxpr": lambda p: st.make_jaxpr(lambda p: loss(p))(p),
    "jax.vjp": lambda p: st.vjp(lambda p: loss(p), p),
    "jax.jvp": lambda p: st.jvp(lambda p: loss(p), (p,), (p,)),
    "jax.linearize": lambda p: st.linearize(lambda p: loss(p), p),
    "jax.linear_transpose": lambda p: st.preserve_identities(jax.linear_transpose)(lambda p: p["embed"]["w"], p),
    "jax.lax.scan": lambda p: st.scan(lambda c, p: (c, loss(p)), 0.0, stacked(p)),
    "jax.lax.while_loop": lambda p: st.while_loop(lambda _: False, same, p),
    "jax.lax.fori_loop": lambda p: st.fori_loop(0, 2, lambda _, p: p, p),
    "jax.lax.map": lambda p: st.map(lambda p: loss(p), stacked(p)),
    "jax.lax.associative_scan": lambda p: st.associative_scan(lambda a, _: a, p),
    "jax.lax.cond": lambda p: st.cond(True, same, same, p),
    "jax.lax.switch": lambda p: st.switch(0, [same, same], p),
    "jax.custom_vjp": lambda p: with_rules(st.custom_vjp)(p),
    "jax.custom_jvp": lambda p: with_rules(st.custom_jvp)(p),
    "equinox.filter_jit": lambda p: st.filter_jit(lambda p: loss(p))(p),
    "equinox.filter_grad": lambda p: st.filter_grad(lambda p: loss(p))(p),
    "equinox.filter_value_and_grad": lambda p: st.filter_value_and_grad(lambda p: loss(p))(p),
    "equinox.filter_vmap": lambda p: st.filter_vmap(lambda p: loss(p))(stacked(p)),
    "equinox.filter_checkpoint": lambda p: st.filter_checkpoint(lambda p: loss(p))(p),
    "equinox.filter_eval_shape": lambda p: st.filter_eval_shape(lambda p: loss(p), p),
    "equinox.filter_make_jaxpr": lambda p: st.preserve_identities(eqx.filter_make_jaxpr)(lambda p: loss(p))(p),
    "equinox.filter_vjp": lambda p: st.filter_vjp(lambda p: loss(p), p),
    "equinox.filter_jvp": lambda p: st.filter_jvp(lambda p: loss(p), (p,), (p,)),
}
"""What its user calls → a call of ours."""


@pytest.mark.parametrize("title", CALLED)
def test_the_transform_that_was_called_is_named(title):
    messages = said(CALLED[title], tied())
    assert messages
    for message in messages:
        assert f"but 2 arrays inside `{title}`, each with its own gradient" in message
        name = title.rpartition(".")[2]
        (code,) = re.findall(r"^    inner = (.*)$", message, re.MULTILINE)
        assert re.search(rf"sharedtree\.{name}\b|preserve_identities\({re.escape(title)}\b", code)
        assert callable(
            eval(
                code,
                {"sharedtree": st, "jax": jax, "equinox": eqx, "functools": functools, "f": loss, "policy": POLICY},
            )
        )


RESULTS = {
    "jit": lambda f: st.jit(f, policy=POLICY),
    "vmap": lambda f: st.vmap(f, policy=POLICY),
    "checkpoint": lambda f: st.checkpoint(policy=POLICY)(f),
    "aux of grad": lambda f: (
        lambda p: st.grad(lambda q: (loss(q), f(q)), has_aux=True, policy=POLICY)(p)[1]  # noqa: E731
    ),
    "gradient": lambda _: st.grad(loss, policy=POLICY),
}


@pytest.mark.parametrize("transform", RESULTS.values(), ids=list(RESULTS))
def test_what_was_tied_stays_so_in_the_results_of_transforms(transform):
    """Under the policy, on the first call as on cached ones. An alias by accident is nothing to warn of."""
    accident = loose()
    accident["head"]["w"] = accident["embed"]["w"]
    for params, count in [(tied(), 1), (accident, 0)]:
        step = transform(lambda p: st.tree.map(lambda x: x + 1, p))
        for _ in range(3):
            out = step(params)
            assert out["embed"]["w"] is out["head"]["w"]
            assert len(told(out)) == count
        assert len(told(st.jit(lambda dag: dag)(st.Dag(out)).tree)) == count


def test_arguments_count_by_themselves_and_so_do_values_below_tuples():
    params = tied()
    assert said(st.jit(lambda a, b: a["w"] + b["w"]), params["embed"], params["head"]) == []
    both = st.tie((jnp.ones(2), jnp.zeros(2)), lambda t: t)
    (message,) = said(st.jit(lambda t: t[0] + t[1]), both)
    assert "Policy" not in message  # it would not help
    assert "sharedtree.Dag(t)" in message


class Head(eqx.Module):
    w: jax.Array


def test_a_tie_between_a_module_and_a_dict_beside_it_counts():
    tree = st.tie({"w": jnp.ones(3), "head": Head(jnp.zeros(3))}, lambda t: (t["w"], t["head"].w))
    (message,) = said(st.jit(lambda t: t["w"] + t["head"].w), tree)
    assert "`t['head'].w` and `t['w']`" in message
    assert said(st.jit(lambda t: t["w"] + t["head"].w, policy=POLICY), tree) == []
    inside = st.tie([Head(jnp.ones(3)), Head(jnp.zeros(3))], lambda t: (t[0].w, t[1].w))
    assert said(st.jit(lambda t: t[0].w + t[1].w), inside) == []


# --- who hands the note on --------------------------------------------------------------------------------------------

HANDED_ON = {
    "map": lambda p: st.tree.map(lambda x: 2 * x, p),
    "map_with_path": lambda p: st.tree.map_with_path(lambda _, x: 2 * x, p),
    "at": lambda p: st.tree.at(lambda p: p["embed"]["w"], p, jnp.ones(3)),
    "at a function": lambda p: st.tree.at(lambda p: p["embed"]["w"], p, replace_fn=lambda x: x + 1),
    "filter": lambda p: st.tree.filter(p, eqx.is_array),
    "partition and combine": lambda p: st.tree.combine(*st.tree.partition(p, eqx.is_inexact_array)),
    "flatten and unflatten": lambda p: st.tree.unflatten(st.tree.structure(p), [x + 1 for x in st.tree.leaves(p)]),
    "apply_updates": lambda p: st.apply_updates(p, st.tree.map(jnp.ones_like, p)),
    "optimizer": lambda p: st.apply_updates(p, (tx := st.optimizer(optax.sgd(0.1))).update(p, tx.init(p), p)[0]),
    "retie": lambda p: st.retie(jax.tree.map(lambda x: 2 * x, p), like=p),
    "tie": lambda p: st.tie(p, where),
    "device_put": lambda p: st.device_put(p, jax.devices()[0]),
    "Dag": lambda p: jax.tree.map(lambda x: 2 * x, st.Dag(p)).tree,
    "whole layers": lambda p: st.tie(st.untie(p) | {"more": {"w": jnp.ones(3)}}, lambda p: (p["embed"], p["more"])),
}


@pytest.mark.parametrize("make", HANDED_ON.values(), ids=list(HANDED_ON))
def test_the_note_is_handed_on(make):
    assert len(told(make(tied()))) == 1
    if make not in (HANDED_ON["tie"], HANDED_ON["whole layers"]):
        assert told(make(loose())) == []


def test_a_structure_that_nobody_else_holds_hands_the_note_on():
    """Equal structures are one object, so another test's could have heard of the tie."""
    for how, take in (("structure", st.tree.structure), ("flatten", lambda p: st.tree.flatten(p)[1])):
        for time in ("once", "again"):
            first, second = f"embed for {how} {time}", f"head for {how} {time}"
            params = st.tie({first: jnp.arange(3.0), second: jnp.ones(3)}, lambda p: (p[first], p[second]))
            assert len(told(st.tree.unflatten(take(params), [jnp.zeros(3)]))) == 1


def test_notes_are_weak_and_seen_in_every_thread():
    params = tied()
    found: list[Any] = []
    leaves = jax.tree.leaves(params)
    noted = weakref.ref(leaves[0])
    thread = threading.Thread(target=lambda: found.extend([_leaf_notes.is_tied_value(leaf) for leaf in leaves]))
    thread.start()
    thread.join()
    assert found == [True, False, True]
    del params
    leaves.clear()
    collect_all()
    assert noted() is None


def test_notes_end_with_what_was_noted():
    notes, leaves = _leaf_notes._Notes(), [jnp.ones(2), jnp.zeros(2)]
    notes.add(leaves)
    del leaves[0]
    collect_all()
    assert notes
    assert notes.places([jnp.ones(2), leaves[0]]) == (1,)
    del leaves[0]
    collect_all()
    assert not notes
    assert notes._references == {}


# --- the fixes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        lambda params, updates: st.apply_updates(params, updates),
        lambda params, updates: st.optimizer(optax.sgd(0.1)).update(updates, (optax.EmptyState(),) * 2, params),
        lambda params, updates: st.tree.map(jnp.add, params, updates),
    ],
)
def test_the_fix_for_a_gradient_taken_path_by_path_sums(use):
    params = tied()
    gradient = jax.grad(loss)(params)  # one part for each path
    with pytest.raises(st.errors.SharingMismatchError) as caught:
        use(params, gradient)
    message = str(caught.value)
    codes = re.findall(r"^    (.*)$", message, re.MULTILINE)
    (first,) = [code for code in codes if "sharedtree.grad(" in code]
    assert "Policy(containers=True)" in first
    assert any("sharedtree.tree.map(" in code for code in codes)
    for other in [code for code in codes if "retie" in code]:  # it is no advice for gradients
        assert codes.index(first) < codes.index(other)
        assert message.index("at these paths are equal") < message.index(other)
    names: dict[str, Any] = {"sharedtree": st, "loss": loss, "model": params, "first_tree": params}
    exec(first, names)  # noqa: S102
    summed = names.get("updates", names.get("gradient", names.get("second_tree")))
    use(params, summed)
    expected = gradient["embed"]["w"] + gradient["head"]["w"]
    np.testing.assert_allclose(summed["head"]["w"], expected, rtol=1e-6)


def test_the_step_that_was_undone_in_silence():
    """Without the policy it warns, and the eager one is refused; with it, it trains one weight."""
    tx = st.optimizer(optax.sgd(0.1))

    def step(params, state):
        updates, state = tx.update(st.grad(loss)(params), state, params)
        return st.apply_updates(params, updates), state

    params = tied()
    state = tx.init(params)
    assert len(said(st.jit(step), params, state)) == 1
    with (
        pytest.warns(st.UntiedWarning, match="are one array"),
        pytest.raises(st.errors.SharingMismatchError, match="policy"),
    ):
        step(params, state)
    with st.Context(POLICY):
        out, _ = st.jit(step)(params, state)
        assert out["embed"]["w"] is out["head"]["w"]
        np.testing.assert_allclose(step(params, state)[0]["head"]["w"], out["head"]["w"], rtol=1e-6)
