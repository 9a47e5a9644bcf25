"""Everything that a training run holds, saved and loaded again: values, sharing, sizes, memory, errors."""

import collections
import dataclasses
import enum
import functools
import pathlib
import subprocess
import sys
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
from hypothesis import given

import sharedtree as st

from . import strategies
from .isomorphic import assert_isomorphic
from .tied import ROOT, Tied, through_file

HERE = __name__


# --- what a training run holds -------------------------------------------------------------------------------------


def test_a_model_with_ties(path, getkey):
    model = Tied()
    loaded = through_file(path, model, trusted=HERE)
    assert_isomorphic(model, loaded)
    assert loaded.blocks[0] is loaded.blocks[2]
    assert loaded.embed.weight is loaded.head.weight
    assert loaded.blocks[0].activation is jax.nn.relu
    np.testing.assert_array_equal(eqx.filter_jit(loaded)(3), eqx.filter_jit(model)(3))


def test_each_distinct_array_is_written_once(path, getkey):
    model = Tied()
    st.save(path, model)
    distinct = {id(x): x for x in jax.tree.leaves(model) if eqx.is_array(x)}  # alive in `model`
    tensors = safetensors.numpy.load_file(path)
    assert len(tensors) == len(distinct)
    assert sum(t.nbytes for t in tensors.values()) == sum(x.nbytes for x in distinct.values())
    assert {"embed.weight", "blocks[0].layers[0].bias", "blocks[1].weight"} <= tensors.keys()
    np.testing.assert_array_equal(tensors["embed.weight"], model.head.weight)


OPTIMIZERS = {
    "adam": lambda: optax.adam(1e-3),
    "adamw": lambda: optax.adamw(1e-3, weight_decay=0.1),
    "adamw of bf16 moments": lambda: optax.adamw(1e-3, mu_dtype=jnp.bfloat16),
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adafactor": lambda: optax.adafactor(1e-3),
    "lion": lambda: optax.lion(1e-3),
    "lamb": lambda: optax.lamb(1e-3),
    "rmsprop": lambda: optax.rmsprop(1e-3, centered=True),
    "adagrad": lambda: optax.adagrad(1e-3),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.add_noise(0.1, 0.5, 3), optax.adam(1e-3)),
    "schedule": lambda: optax.adam(optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100)),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-3), 4).gradient_transformation(),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
    "masked": lambda: optax.masked(optax.adam(1e-3), lambda tree: jax.tree.map(lambda x: jnp.ndim(x) > 1, tree)),
    "partition": lambda: optax.partition(
        {"a": optax.adam(1e-3), "b": optax.set_to_zero()},
        lambda tree: jax.tree.map(lambda x: "a" if jnp.ndim(x) > 1 else "b", tree),
    ),
    "lbfgs": lambda: optax.lbfgs(memory_size=2),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-3), 3),
    "ema": lambda: optax.ema(0.9),
    "prodigy": lambda: optax.contrib.prodigy(),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(1e-3),
    "lookahead": lambda: optax.lookahead(optax.sgd(0.1), 5, 0.5),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_states(name, path):
    import optax.contrib

    params = {"w": jnp.ones((4, 3)), "b": jnp.zeros(3)}
    tx = OPTIMIZERS[name]()
    if name == "lookahead":
        params = optax.LookaheadParams.init_synced(params)
        state = tx.init(params)
        _, state = tx.update(jax.tree.map(jnp.ones_like, params.fast), state, params)
    else:
        state = tx.init(params)
        more = {}
        if name == "lbfgs":
            more = {
                "value": jnp.float32(1),
                "grad": params,
                "value_fn": lambda p: sum(jnp.sum(x**2) for x in p.values()),
            }
        _, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params, **more)
    loaded = through_file(path, {"state": state, "params": params}, trusted=HERE)
    assert_isomorphic({"state": state, "params": params}, loaded)
    assert jax.tree.structure(loaded["state"]) == jax.tree.structure(state)


def test_the_optimizer_of_sharedtree(path, getkey):
    model = Tied()
    tx = st.optimizer(optax.adam(1e-3))
    state = tx.init(model)
    loaded_model, loaded_state = through_file(path, (model, state), trusted=HERE)
    assert_isomorphic((model, state), (loaded_model, loaded_state))
    st.assert_same_sharing(state, loaded_state)


class Normed(eqx.Module):
    norm: eqx.nn.BatchNorm
    again: eqx.nn.BatchNorm
    spectral: eqx.nn.SpectralNorm
    drop: eqx.nn.Dropout
    count: eqx.nn.StateIndex

    def __init__(self, key):
        a, b = jax.random.split(key)
        self.norm = self.again = eqx.nn.BatchNorm(3, "batch", mode="batch")
        self.spectral = eqx.nn.SpectralNorm(eqx.nn.Linear(3, 3, key=a), "weight", key=b)
        self.drop = eqx.nn.Dropout(0.5)
        self.count = eqx.nn.StateIndex(jnp.array(0))

    def __call__(self, x, state, key):
        state = state.set(self.count, state.get(self.count) + 1)
        x, state = self.norm(x, state)
        x, state = self.spectral(x, state)
        return self.drop(x, key=key), state


def test_states_of_equinox(path, getkey):
    model, state = eqx.nn.make_with_state(Normed)(getkey())

    @eqx.filter_jit
    def step(model, state, xs, key):
        run = jax.vmap(model, axis_name="batch", in_axes=(0, None, None), out_axes=(0, None))
        return run(xs, state, key)

    xs = jax.random.normal(getkey(), (5, 3))
    _, state = step(model, state, xs, getkey())
    loaded, loaded_state = through_file(path, (model, state), trusted=HERE)
    assert_isomorphic((model, state), (loaded, loaded_state))
    assert int(loaded_state.get(loaded.count)) == 1
    key = getkey()
    (out, after), (expected, expected_after) = step(loaded, loaded_state, xs, key), step(model, state, xs, key)
    np.testing.assert_array_equal(out, expected)
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(expected_after), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys(impl, path):
    key = jax.random.key(3, impl=impl)
    tree = {"typed": key, "split": jax.random.split(key, (2, 3)), "raw": jax.random.PRNGKey(1), "same": key}
    loaded = through_file(path, tree, trusted=HERE)
    assert_isomorphic(tree, loaded)
    assert jax.random.key_impl(loaded["typed"]) == impl
    assert loaded["typed"] is loaded["same"]
    np.testing.assert_array_equal(jax.random.normal(loaded["typed"], 4), jax.random.normal(key, 4))


class Phase(enum.Enum):
    WARM = 1
    COLD = "c"


class Metrics(NamedTuple):
    loss: Any
    best: float = float("inf")


@dataclasses.dataclass(frozen=True)
class Config:
    rate: float
    path: pathlib.Path
    phase: Phase
    shape: tuple[int, ...] = (1, 2)
    more: dict = dataclasses.field(default_factory=dict)


def test_a_whole_run(path, getkey):
    model = Tied()
    arrays = eqx.filter(model, eqx.is_array)
    shared = {"a": 1}
    run = {
        "model": model,
        "ema": arrays,
        "state": optax.adam(1e-3).init(arrays),
        "step": 12345,
        "tokens": 2**70,
        "metrics": Metrics(jnp.float32(0.5), -0.0),
        "history": collections.deque([1.0, float("nan"), float("inf")], maxlen=100),
        "config": Config(1e-3, pathlib.Path("runs") / "a", Phase.COLD, more=shared),
        "shared": shared,
        "order": collections.OrderedDict(b=1, a=2),
        "seen": {"x", "y"},
        "key": getkey(),
        "schedule": functools.partial(jnp.clip, min=0.0),
        "counts": collections.defaultdict(int, {"a": 1}),
    }
    loaded = through_file(path, run, trusted=HERE)
    assert_isomorphic(run, loaded)
    assert list(loaded) == list(run)
    assert loaded["ema"].embed.weight is loaded["model"].embed.weight
    assert loaded["config"].more is loaded["shared"]
    assert loaded["counts"]["new"] == 0


@given(strategies.trees())
def test_any_tree_through_bytes(tree):
    assert_isomorphic(tree, st.from_bytes(st.to_bytes(tree), trusted=strategies.__name__))


def test_saving_what_was_loaded_gives_the_same_file(getkey):
    """As long as there are no sets, whose order is nobody's, and once each object has its attributes in their order."""
    model = Tied()
    arrays = eqx.filter(model, eqx.is_array)
    run = {"model": model, "state": optax.adam(1e-3).init(arrays), "key": getkey(), "config": Metrics(1)}
    data = st.to_bytes(st.from_bytes(st.to_bytes(run), trusted=[Tied, Metrics]))
    assert st.to_bytes(st.from_bytes(data, trusted=[Tied, Metrics])) == data


# --- trust ---------------------------------------------------------------------------------------------------------


def test_a_class_of_ones_own(path, getkey):
    model = Tied()
    st.save(path, {"model": model})
    with pytest.raises(st.UntrustedTypeError, match=f"{Tied.__module__}:Tied") as raised:
        st.load(path)
    assert raised.value.names == (f"{Tied.__module__}:Tied",)
    assert raised.value.paths == ("['model']",)
    for trusted in (Tied, [Tied], f"{Tied.__module__}:Tied", Tied.__module__, st.audit(path).allow_list):
        assert_isomorphic({"model": model}, st.load(path, trusted=trusted))
    assert_isomorphic({"model": model}, st.load(path, like={"model": model}))


def test_in_a_new_process(path, getkey):
    """What is loaded depends on nothing that this process knows."""
    model = Tied()
    st.save(path, model)
    code = f"""
import numpy as np, sharedtree as st
model = st.load({str(path)!r}, trusted={Tied.__module__!r})
assert model.embed.weight is model.head.weight and model.blocks[0] is model.blocks[2]
print(float(model(3).sum()).hex())
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert float.fromhex(run.stdout) == float(model(3).sum())
