"""What is said about models that cannot be saved is what their users can do, and it works."""

import json
import re
import sys
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import sharedtree as st

from .isomorphic import assert_isomorphic


def advice(tree):
    with pytest.raises(st.errors.UnserialisableError) as caught:
        st.to_bytes(tree)
    return str(caught.value)


def run(text, **names):
    """Runs the code in a message, which is what is in backticks and calls or assigns something."""
    for code in re.findall("`([^`]*)`", text):
        if code.startswith("sharedtree.") or " = " in code:
            exec(code, names)
    return names


def ways(text, path, model, anew):
    """What each of the ways that a message ends with makes of a model that is saved, and of one that is made anew."""
    for way in re.findall("made anew.*:\n((?:    .*\n?)+)", text):
        saving, loading = way.splitlines()
        exec(saving.strip(), {"sharedtree": st, "path": path, "model": model})
        names = {"sharedtree": st, "path": path, "model": anew}
        exec(loading.strip(), names)
        yield names["model"]


@pytest.fixture
def library(monkeypatch):
    """A module that says that it lies in site-packages, with what is written as its authors wrote it."""
    module = types.ModuleType("some_library")
    module.__file__ = jax.__file__.replace("jax/__init__.py", "some_library.py")
    monkeypatch.setitem(sys.modules, "some_library", module)
    exec(
        "import equinox as eqx, jax, jax.numpy as jnp\n"
        "def closing(w):\n"
        "    return lambda x: w * x\n"
        "def closing_over_nothing():\n"
        "    def inner(x):\n"
        "        return x\n"
        "    return inner\n"
        "class Stateless:\n"
        "    pass\n"
        "class Constant(tuple):\n"
        "    pass\n"
        "jax.tree_util.register_pytree_node(Constant, lambda it: ((), it), lambda it, _: it)\n"
        "class Flow(eqx.Module):\n"
        "    w: jax.Array\n"
        "    tied: jax.Array\n"
        "    other: object\n",
        module.__dict__,
    )
    return module


def test_users_of_a_library_save_its_arrays(library, tmp_path):
    w = jnp.arange(3.0)
    for make in (lambda: library.closing(w), library.closing_over_nothing, library.Stateless, library.Constant):
        other = make()
        trained, anew = library.Flow(w, w, other), library.Flow(jnp.zeros(3), jnp.zeros(3), other)
        anew = st.tie(anew, lambda flow: (flow.w, flow.tied))
        text = advice(trained)
        assert "made by `some_library`" in text
        assert "Move it" not in text
        assert "dataclass" not in text
        found = list(ways(text, tmp_path / "flow.safetensors", trained, anew))
        # What is left out may not hold what is saved.
        assert len(found) == (1 if "holds an array" in text else 2)
        for back in found:
            assert back.w is back.tied
            assert back.w.tolist() == [0, 1, 2]
            assert back.other is other


def test_one_call_leaves_out_all_that_cannot_be_saved_and_nothing_else(library, tmp_path):
    other, mask = library.closing_over_nothing(), library.closing(jnp.ones(2))

    def flow(start):
        return library.Flow(jnp.arange(start, start + 3.0), jnp.arange(start, start + 2.0), other)

    def models(start):
        first, second = flow(start), flow(start + 1)
        return (
            ([first, second, first], ["other"]),
            ([first, mask, lambda x: x], ["other", "[1]", "[2]"]),
            # By its name alone, what can be saved would be left out as well.
            ([first, library.Flow(second.w, mask, 3.0)], ["[0].other", "[1].tied"]),
            ({"a": first, "other": [second, mask]}, ["other", "['other'][1]"]),
        )

    for (model, entries), (anew, _) in zip(models(1.0), models(8.0), strict=True):
        text = advice(model)
        assert f"leave_out={json.dumps(entries)}" in text
        back = next(ways(text, tmp_path / "model.safetensors", model, anew))
        numbers = [leaf.tolist() for leaf in jax.tree.leaves(eqx.filter(back, eqx.is_array))]
        assert numbers == [leaf.tolist() for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_array))]


def test_what_cannot_be_left_out_is_not_said_to_be(library):
    other = library.closing_over_nothing()
    for model in ({other}, jax.tree_util.Partial(jnp.add, other), [other] * 21, library.Flow(other, other, {other: 1})):
        assert "leave_out" not in advice(model)


def test_arrays_that_jax_does_not_see_are_not_said_to_be_saved(library):
    model = library.Stateless()
    model.w = jnp.ones(3)
    text = advice(model)
    assert "    The tree is a `some_library.Stateless`" in text
    assert "JAX cannot see into it" in text
    assert "sharedtree.tree.leaves" not in text
    assert "leave" not in text


def test_who_wrote_it_is_told_to_change_it():
    def local(x):
        return x

    assert "Move it to module level" in advice([local])
    assert "make its class a dataclass" in advice([type("Own", (), {"__module__": __name__})()])


@pytest.mark.slow
def test_a_train_state(tmp_path, monkeypatch):
    nn = pytest.importorskip("flax.linen")
    TrainState = pytest.importorskip("flax.training.train_state").TrainState
    model = nn.Dense(2)
    params = model.init(jax.random.key(0), jnp.ones((1, 2)))["params"]

    Own = type("Own", (TrainState,), {"__module__": __name__})
    monkeypatch.setitem(globals(), "Own", Own)
    for cls in (TrainState, Own):
        state = cls.create(apply_fn=model.apply, params=params, tx=optax.adam(0.1))
        changed = state.apply_gradients(grads=params)
        text = advice({"a": [changed]})
        line = next(line for line in text.splitlines() if "made by the program" in line)
        ways = line.split(" Or save the rest")
        assert len(ways) == 2
        for way in ways:
            saving, _, loading = re.split("(, and (?:take|put))", way, maxsplit=1)
            path = tmp_path / "state.safetensors"
            run(saving, sharedtree=st, path=path, state=changed)
            back = run(loading, sharedtree=st, path=path, state=state)["state"]
            assert type(back) is cls
            assert (back.apply_fn, back.tx) == (state.apply_fn, state.tx)
            assert_isomorphic(
                [changed.params, changed.opt_state, changed.step], [back.params, back.opt_state, back.step]
            )


def test_partitioned_parameters_of_linen():
    nn = pytest.importorskip("flax.linen")
    init = nn.initializers.ones
    for cls, boxed in ((nn.LogicallyPartitioned, nn.with_logical_partitioning), (nn.Partitioned, nn.with_partitioning)):
        params = nn.Dense(2, kernel_init=boxed(init, ("embed", "mlp"))).init(jax.random.key(0), jnp.ones((1, 2)))
        data = st.to_bytes(params)
        with pytest.raises(st.errors.UntrustedTypeError, match=r'trusted=\["flax"\]'):
            st.from_bytes(data)
        back = st.from_bytes(data, trusted=["flax"])
        kernel = back["params"]["kernel"]
        assert type(kernel) is cls
        assert kernel.names == ("embed", "mlp")
        assert_isomorphic(nn.unbox(params), nn.unbox(back))


def test_models_of_penzai(tmp_path):
    pz = pytest.importorskip("penzai.pz")
    penzai = pytest.importorskip("penzai")
    simple_mlp = pytest.importorskip("penzai.models.simple_mlp")
    model = simple_mlp.MLP.from_config(name="mlp", init_base_rng=jax.random.key(0), feature_sizes=[2, 3])
    text = advice(model)
    line = next(line for line in text.splitlines() if "variable of Penzai" in line)
    names = run(line, sharedtree=st, penzai=penzai, path=tmp_path / "model.safetensors", model=model)
    x = pz.nx.wrap(jnp.ones(2)).tag("features")
    assert (names["model"](x).unwrap("features") == model(x).unwrap("features")).all()


def test_flows_of_flowjax(tmp_path):
    flows = pytest.importorskip("flowjax.flows")
    distributions = pytest.importorskip("flowjax.distributions")

    def make(make_flow, seed):
        return make_flow(jax.random.key(seed), base_dist=distributions.Normal(jnp.zeros(2)))

    for make_flow in (flows.masked_autoregressive_flow, flows.block_neural_autoregressive_flow):
        trained, anew = make(make_flow, 0), make(make_flow, 1)
        assert "leave_out" in advice(trained)
        for back in ways(advice(trained), tmp_path / "flow.safetensors", trained, anew):
            assert eqx.tree_equal(eqx.filter(back, eqx.is_array), eqx.filter(trained, eqx.is_array))
