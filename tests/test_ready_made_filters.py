"""`st.filter_…` is `eqx.filter_…`, with one array for a tied one: against Equinox on a model that holds it once."""

import inspect

import equinox as eqx
import jax
import jax.export
import jax.numpy as jnp
import pytest

import sharedtree as st
from sharedtree.transforms import _signatures

ONCE = st.Dag({"a": jnp.arange(3.0)})
TIED = st.Dag({"a": ONCE.tree["a"], "b": ONCE.tree["a"]})


def product(dag, text="text"):
    assert text == "text"
    return dag.tree["a"] * dag.tree.get("b", dag.tree["a"])


CALLS = {
    **dict.fromkeys(["filter_jit", "filter_checkpoint"], lambda transform, dag: transform(product)(dag)),
    "filter_vmap": lambda transform, dag: transform(lambda dag: (product(dag), 1), out_axes=(0, 0))(dag),
    "filter_grad": lambda transform, dag: transform(lambda *args: product(*args).sum())(dag, "text"),
    "filter_value_and_grad": lambda transform, dag: transform(lambda *args: product(*args).sum())(dag, "text"),
    "filter_vjp": lambda transform, dag: transform(product, dag)[1](jnp.ones(3)),
    "filter_jvp": lambda transform, dag: transform(product, (dag,), (dag,)),
    "filter_eval_shape": lambda transform, dag: transform(product, dag, "text"),
}


@pytest.mark.parametrize("name", CALLS)
def test_as_equinox_on_one_copy(name):
    want, found = CALLS[name](getattr(eqx, name), ONCE), CALLS[name](getattr(st, name), TIED)
    assert eqx.tree_equal(st.tree.leaves(want), st.tree.leaves(found))


@pytest.mark.parametrize(("name", "vanilla"), [("jit", jax.jit), ("grad", jax.grad), ("filter_vmap", eqx.filter_vmap)])
def test_what_help_shows(name, vanilla):
    ours, (_, *options) = inspect.signature(getattr(st, name)).parameters, inspect.signature(vanilla).parameters
    added = {"function", "policy", "in_place"} | ({"wrt"} if name == "grad" else set())
    assert ours.keys() == {*options, *added}
    doc = inspect.getdoc(getattr(st, name))
    assert all(part in doc for part in ("Args:", "Example:", "See `preserve_identities`"))


OPERANDS = {
    **{name: getattr(jax, name) for name in ("vjp", "jvp", "linearize", "linear_transpose", "eval_shape")},
    **{name: getattr(jax, name) for name in ("custom_vjp", "custom_jvp")},
    **{name: getattr(eqx, name) for name in ("filter_vjp", "filter_jvp", "filter_eval_shape")},
    **{name: getattr(jax.lax, name) for name in ("scan", "while_loop", "fori_loop", "map", "associative_scan")},
    **{name: getattr(jax.lax, name) for name in ("cond", "switch")},
    "export": jax.export.export,
}


def test_help_lists_the_options_of_what_takes_operands():
    """Vanilla's, in their order, and ours: nothing is hidden behind `**options` that vanilla does not hide."""
    for name, vanilla in OPERANDS.items():
        (_, *ours), (_, *options) = (inspect.signature(f).parameters.values() for f in (getattr(st, name), vanilla))
        own = {each.name for each in ours} - {each.name for each in options}
        assert own == {"policy", "in_place"}, name
        assert [each.name for each in ours if each.name not in own] == [each.name for each in options], name
    assert [*inspect.signature(st.device_put).parameters][1:] == [*inspect.signature(jax.device_put).parameters][1:]
    assert {"data", *inspect.signature(st.load).parameters} - {"path"} == {*inspect.signature(st.from_bytes).parameters}
    rules = inspect.signature(st.custom_vjp(abs).defvjp).parameters
    assert rules.keys() == inspect.signature(jax.custom_vjp(abs).defvjp).parameters.keys()
    assert not any(" at 0x" in str(inspect.signature(getattr(st, name))) for name in OPERANDS)


def test_unroll_of_a_loop_is_handed_on():
    ours, vanilla = (
        str(jax.make_jaxpr(lambda x, loop=loop: loop(0, 4, lambda i, c: 2 * c, x, unroll=2))(1.0))
        for loop in (st.fori_loop, jax.lax.fori_loop)
    )
    assert "unroll=2" in vanilla
    assert "unroll=2" in ours


@pytest.mark.parametrize(
    ("vanilla", "told"),
    [
        (jax.jit, _signatures.Compiling),
        (eqx.filter_jit, _signatures.FilterCompiling),
        (jax.checkpoint, _signatures.Rematerialising),
        (eqx.filter_checkpoint, _signatures.Rematerialising),
        *[(t, _signatures.Argnums) for t in (jax.grad, jax.value_and_grad, jax.jacfwd, jax.jacrev, jax.hessian)],
        *[(t, _signatures.Argnums) for t in (eqx.filter_grad, eqx.filter_value_and_grad)],
        (jax.vmap, _signatures.Vectorising),
        (eqx.filter_vmap, _signatures.Vectorising),
        (jax.pmap, _signatures.Parallelising),
        (jax.shard_map, _signatures.Sharding),
        (jax.make_jaxpr, _signatures.Tracing),
        (jax.lax.scan, _signatures.Scanning),
        (jax.vjp, _signatures.Pulling),
        (jax.linearize, _signatures.Linearising),
        (jax.linear_transpose, _signatures.Transposing),
        (jax.device_put, _signatures.Placing),
        (jax.export.export, _signatures.Exporting),
    ],
)
def test_type_checkers_know_all_options(vanilla, told):
    _, *options = inspect.signature(vanilla).parameters.values()
    names = {each.name for each in options if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)}
    spelt_out = {"init", "xs", "length", "reverse", "unroll", "has_aux", "device"}  # in the functions' own types
    assert names <= told.__annotations__.keys() | spelt_out


def checked(pair, is_checked, *, limit=3.0):
    total = pair["a"].sum()
    if is_checked:
        total = eqx.error_if(total, total > limit, "too large")
    return total


@pytest.mark.parametrize("donate", ["none", "all", "all-except-first"])
@pytest.mark.parametrize("checks", [(False, True), (True, False, True), (False, False, True, True)])
def test_an_error_of_equinox_is_raised_as_equinox_raises_it_whatever_was_called_before(checks, donate):
    """Whether a program can raise one is known of each program, and not of the function."""
    ours, vanilla = st.filter_jit(checked, donate=donate), eqx.filter_jit(checked, donate=donate)
    for is_checked in checks:
        for transformed in (ours, vanilla):
            model = {"a": jnp.arange(2.0)}
            assert float(transformed(model, is_checked)) == 1
            if is_checked:
                with pytest.raises(eqx.EquinoxRuntimeError, match="too large"):
                    transformed({"a": jnp.arange(9.0)}, is_checked)


def test_an_error_of_equinox_for_some_shapes_only():
    def f(x):
        return eqx.error_if(x, x.sum() > 3, "too large") if x.ndim else x

    for transformed in (st.filter_jit(f), eqx.filter_jit(f)):
        assert transformed(jnp.asarray(9.0)) == transformed(jnp.asarray(9.0)) == 9
        with pytest.raises(eqx.EquinoxRuntimeError, match="too large"):
            transformed(jnp.arange(9.0))


@pytest.mark.parametrize("calls_host", [False, True])
def test_donated_leaves_of_a_program_that_calls_the_host_are_donated(calls_host):
    def f(kept, model):
        total = model["a"] + kept["a"]
        return {"a": eqx.error_if(total, total.sum() < 0, "negative") if calls_host else total}

    for transformed in (eqx.filter_jit(f, donate="all-except-first"), st.filter_jit(f, donate="all-except-first")):
        kept, model = {"a": jnp.ones(3)}, {"a": jnp.ones(3)}
        transformed(kept, model)
        assert model["a"].is_deleted()
        assert not kept["a"].is_deleted()


@pytest.mark.filterwarnings("ignore:backend and device argument:DeprecationWarning")
def test_the_device_of_filter_jit_moves_an_unchanged_module():
    net = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    for transform in (eqx.filter_jit, st.filter_jit):
        out = transform(lambda net: net, device=jax.devices()[0])(net)
        assert out is not net
        assert out.weight.committed
