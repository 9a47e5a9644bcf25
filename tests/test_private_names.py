"""No error names a class that is private to the package, whoever raises it: users know their own classes and arrays."""

import re
import warnings

import jax
import jax.numpy as jnp
import pytest

import sharedtree as st
from tests.kinds import Noted

PRIVATE = re.compile(r"sharedtree\.[\w.]*\b_\w+|\b(Packed|Structure\(|Round|Attending|Sorted|Group\(|LeafPath)")
SPEC = jax.sharding.PartitionSpec


def model(array=None, static=0):
    array = jnp.ones((1, 2)) if array is None else array
    return Noted([array, array], static)


RESULTS = {
    "other keys": lambda m: {"b": m},
    "more keys": lambda m: {"a": m, "b": m},
    "another container": lambda m: [m],
    "no container": lambda m: m,
    "an array": lambda m: {"a": jnp.ones(2)},
    "an array beside": lambda m: {"a": m, "b": jnp.ones(2)},
    "none": lambda m: None,
    "a function": lambda m: abs,
    "another shape": lambda m: {"a": model(jnp.ones(3))},
    "another type": lambda m: {"a": model(jnp.ones((1, 2), int))},
    "another static value": lambda m: {"a": model(static=1)},
    "another static value of any text": lambda m: {"a": model(static="x" * 200)},
}
PREFIXES = {
    "a tuple": lambda label: (label, label),
    "a longer tuple": lambda label: (label, label, label),
    "keys": lambda label: {"a": label},
    "keys for an array": lambda label: (label, {"a": label}),
    "a module": lambda label: Noted([label, label], 0),
    "another module": lambda label: Noted([label], 0),
    "a module for an array": lambda label: (label, Noted(label, 0)),
    "a text": lambda label: "text",
    "a model": lambda label: model(),
}


def differentiated(f):
    return st.grad(lambda m: jax.tree.leaves(f(m))[0].sum())(model())


def custom_vjp(fwd, bwd):
    ruled = st.custom_vjp(right)
    ruled.defvjp(fwd, bwd)
    return lambda: differentiated(ruled)


def custom_jvp(rule):
    ruled = st.custom_jvp(right)
    ruled.defjvp(rule)
    return lambda: differentiated(ruled)


def right(m):
    return {"a": m}


def of_a_result(wrong):
    """Calls in which a function returns something else than it should."""
    first, carry = model(), {"a": model()}
    jump = lambda m: wrong(m["a"])
    yield lambda: st.scan(lambda c, _: (jump(c), None), carry, length=2)
    yield lambda: st.scan(lambda c, _: jump(c), carry, length=2)
    yield lambda: st.while_loop(lambda c: False, jump, carry)
    yield lambda: st.while_loop(jump, lambda c: c, carry)
    yield lambda: st.fori_loop(0, 2, lambda _, c: jump(c), carry)
    yield lambda: st.associative_scan(lambda a, _: jump(a), carry)
    for in_place in (False, True):
        yield lambda in_place=in_place: st.cond(True, right, wrong, first, in_place=in_place)
        yield lambda in_place=in_place: st.switch(jnp.array(0), [wrong, right], first, in_place=in_place)
        yield lambda in_place=in_place: st.grad(wrong, has_aux=True, in_place=in_place)(first)
        yield lambda in_place=in_place: st.value_and_grad(wrong, in_place=in_place)(first)
        yield lambda in_place=in_place: st.vmap(wrong, in_place=in_place)(first)
        yield lambda in_place=in_place: st.jit(wrong, in_place=in_place)(first)
    yield lambda: st.jacrev(wrong, has_aux=True)(first)
    yield lambda: st.jacfwd(wrong, has_aux=True)(first)
    yield lambda: st.vjp(right, first)[1](wrong(first))
    yield lambda: st.linearize(right, first)[1](wrong(first))
    yield lambda: st.jvp(right, (first,), (wrong(first),))
    yield lambda: st.vjp(wrong, first, has_aux=True)
    yield lambda: st.linear_transpose(right, first)(wrong(first))
    yield custom_vjp(lambda m: (wrong(m), None), lambda _, ct: (ct["a"],))
    yield custom_vjp(wrong, lambda _, ct: (ct["a"],))
    yield custom_vjp(lambda m: (right(m), None), lambda _, ct: (wrong(ct["a"]),))
    yield custom_vjp(lambda m: (right(m), None), lambda _, ct: wrong(ct["a"]))
    yield custom_jvp(lambda primals, tangents: (wrong(*primals), wrong(*tangents)))
    yield custom_jvp(lambda primals, tangents: (right(*primals), wrong(*tangents)))
    yield custom_jvp(lambda primals, tangents: wrong(*primals))
    yield lambda: st.eval_shape(wrong, first)


def of_a_result_or_an_argument_when_it_runs(wrong):
    """Calls of a program with other arguments than it was made for."""
    given = wrong(model())
    yield lambda: st.jit(lambda m: m["a"]).lower(right(model())).compile()(given)
    yield lambda: st.jit(lambda m, n: m["a"]).lower(right(model()), model()).compile()(given, model())
    yield lambda: st.export(st.jit(lambda m: m["a"]))(right(model())).call(given)


def of_a_prefix(prefix):
    """Calls with a prefix that does not fit."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    axes, specs = prefix(0), prefix(SPEC())
    shardings = prefix(jax.sharding.NamedSharding(mesh, SPEC()))
    for f in (lambda m: m, lambda m: (m, jnp.ones(2)), lambda m: (m, model())):
        for in_place in (False, True):
            own = {"in_place": in_place}
            yield lambda own=own, f=f: st.vmap(f, out_axes=axes, **own)(model())
            yield lambda own=own, f=f: st.jit(f, out_shardings=shardings, **own)(model())
            shard = {"mesh": mesh, **own}
            yield lambda shard=shard, f=f: st.shard_map(f, in_specs=SPEC(), out_specs=specs, **shard)(model())
    yield lambda: st.vmap(lambda m, n: m, in_axes=axes)(model(), jnp.ones(1))
    yield lambda: st.jit(lambda m, n: m, in_shardings=shardings)(model(), jnp.ones(1))
    yield lambda: st.shard_map(lambda m, n: m, mesh=mesh, in_specs=specs, out_specs=SPEC())(model(), jnp.ones(1))
    yield lambda: st.device_put(model(), shardings)


def traced(call):
    """What fails when it is traced needs no compiling where it does not."""
    return lambda: jax.eval_shape(lambda: (call(), 0.0)[1])


def assert_nothing_private_is_said(calls, *, at_least):
    texts = []
    for call in calls:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                call()
            except Exception as error:
                texts.append(str(error))
    assert len(texts) >= at_least
    assert [text for text in texts if PRIVATE.search(text)] == []


def some_daily(names, daily):
    return [pytest.param(name, marks=[pytest.mark.slow] * (name not in daily)) for name in names]


DAILY = {"other keys", "an array", "none", "a function", "another shape", "another static value"}


@pytest.mark.parametrize("name", some_daily(RESULTS, DAILY))
def test_results_and_arguments_of_another_kind(name):
    wrong = RESULTS[name]
    calls = [*map(traced, of_a_result(wrong)), *of_a_result_or_an_argument_when_it_runs(wrong)]
    assert_nothing_private_is_said(calls, at_least=26)


@pytest.mark.parametrize("name", some_daily(PREFIXES, {"a tuple", "keys", "a module", "a model"}))
def test_prefixes_that_do_not_fit(name):
    assert_nothing_private_is_said(map(traced, of_a_prefix(PREFIXES[name])), at_least=7)


def test_a_carry_with_other_keys_names_both():
    with pytest.raises(st.errors.SharingMismatchError, match=r"`init`: when an iteration begins .*\('net',\)") as error:
        st.scan(lambda c, _: ({"other": c["net"]}, None), {"net": model()}, length=2)
    assert error.value.paths == ("init",)
    assert "('other',)" in str(error.value)
    assert "eqx.field" in str(error.value)
