"""What is said about models that cannot be saved is what their users can do, and it works."""

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
        ways = text.split(" Or save the arrays alone")
        # What is left out is not written, so an array that it holds is none of its own.
        assert ("leave_out=" in ways[0]) == ("holds an array" not in text)
        for way in ways if "leave_out=" in ways[0] else ways[1:]:
            saving, _, loading = re.split("(, and (?:take|put))", way, maxsplit=1)
            path = tmp_path / "flow.safetensors"
            run(saving, sharedtree=st, path=path, model=trained)
            back = run(loading, sharedtree=st, path=path, model=anew)["model"]
            assert back.w is back.tied
            assert back.w.tolist() == [0, 1, 2]
            assert back.other is other


def test_arrays_that_jax_does_not_see_are_not_said_to_be_saved(library):
    model = library.Stateless()
    model.w = jnp.ones(3)
    text = advice(model)
    assert "    The tree is a `some_library.Stateless`" in text
    assert "JAX sees nothing of what it holds" in text
    assert "sharedtree.tree.leaves" not in text
    assert "leave" not in text
    assert "are not among them" in advice([jnp.ones(3), model])
    assert "are not among them" not in advice([jnp.ones(3), library.Stateless()])


def test_who_wrote_it_is_told_to_change_it():
    def local(x):
        return x

    assert "Move it to module level" in advice([local])
    assert "make its class a dataclass" in advice([type("Own", (), {"__module__": __name__})()])


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

    def make(seed):
        return flows.masked_autoregressive_flow(jax.random.key(seed), base_dist=distributions.Normal(jnp.zeros(2)))

    trained, anew = make(0), make(1)
    saving, _, loading = advice(trained).partition(" Or save the arrays alone")[2].partition(", and put them")
    path = tmp_path / "flow.safetensors"
    run(saving, sharedtree=st, path=path, model=trained)
    back = run(loading, sharedtree=st, path=path, model=anew)["model"]
    assert eqx.tree_equal(eqx.filter(back, eqx.is_array), eqx.filter(trained, eqx.is_array))
