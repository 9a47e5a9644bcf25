"""Everything that a training run holds, saved and loaded again: values, sharing, and each array once."""

import collections
import functools
import pathlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import sharedtree as st

from .isomorphic import assert_isomorphic
from .strategies import Color, Pair, Slotted
from .tied import Tied, through_file


def test_a_whole_run(path):
    model = Tied()
    arrays = eqx.filter(model, eqx.is_array)
    shared = {"a": 1}
    run = {
        "model": model,
        "ema": arrays,
        "state": optax.adam(1e-3).init(arrays),
        "tied state": st.optimizer(optax.adam(1e-3)).init(model),
        "step": 12345,
        "tokens": 2**70,
        "metrics": Pair(jnp.float32(0.5), -0.0),
        "history": collections.deque([1.0, float("nan"), float("inf")], maxlen=100),
        "config": Slotted(pathlib.Path("runs") / "a", [Color.RED, shared]),
        "shared": shared,
        "order": collections.OrderedDict(b=1, a=2),
        "seen": {"x", "y"},
        "key": jax.random.key(0),
        "schedule": functools.partial(jnp.clip, min=0.0),
        "counts": collections.defaultdict(int, {"a": 1}),
    }
    loaded = through_file(path, run)
    assert_isomorphic(run, loaded)
    assert list(loaded) == list(run)
    assert loaded["ema"].embed.weight is loaded["model"].embed.weight
    assert loaded["model"].blocks[0] is loaded["model"].blocks[2]
    st.assert_same_sharing(run["tied state"], loaded["tied state"])
    assert loaded["config"].b[1] is loaded["shared"]
    assert loaded["counts"]["new"] == 0


def test_the_size_of_a_file(path):
    """Each array is written once, and little besides."""
    model = Tied(width=64)
    big = {"a": np.zeros(2**24, np.uint8), "b": np.ones((1000, 77), np.float32), "model": model}
    big["again"] = [big["a"], model]
    unique = {id(x): x.nbytes for x in jax.tree.leaves(big) if eqx.is_array(x)}  # alive in `big`
    st.save(path, big)
    assert path.stat().st_size <= sum(unique.values()) * 1.001 + 2**16


def test_saving_what_was_loaded_gives_the_same_file():
    """As long as there are no sets, whose order is nobody's, and once each object has its attributes in their order."""
    model = Tied()
    arrays = eqx.filter(model, eqx.is_array)
    run = {"model": model, "state": optax.adam(1e-3).init(arrays), "key": jax.random.key(0), "pair": Pair(1)}
    data = st.to_bytes(st.from_bytes(st.to_bytes(run), trusted=[Tied, Pair]))
    assert st.to_bytes(st.from_bytes(data, trusted=[Tied, Pair])) == data
