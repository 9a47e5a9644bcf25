"""What `flax.serialization` does with state dicts, done by `state` and `load_state`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization, struct

import sharedtree as st


class Point(NamedTuple):
    x: Any
    y: Any


@struct.dataclass
class Params:
    weight: Any
    steps: int = 0
    name: str = struct.field(pytree_node=False, default="params")


def test_a_dataclass_is_a_dict_by_field_name():
    params = Params(2.5, 3)
    assert st.state(params) == {**serialization.to_state_dict(params), "name": "params"}
    assert st.load_state(params, {"weight": params.weight, "steps": 4, "name": ()}) == params.replace(steps=4)


def test_wrong_and_missing_fields_are_named_with_their_path():
    model = {"outer": [Params(1)]}
    too_many = {"weight": 1, "steps": 0, "name": "", "more": 1}
    for state, path in ((too_many, ".more"), ({"weight": 1, "name": ""}, ".steps")):
        with pytest.raises(st.StructureMismatchError) as caught:
            st.load_state(model, {"outer": [state]})
        assert caught.value.paths == (f"['outer'][0]{path}",)


def test_a_namedtuple_is_a_dict_by_field_name():
    assert st.state(Point(1, 2)) == serialization.to_state_dict(Point(1, 2)) == {"x": 1, "y": 2}
    assert st.load_state(Point(1, 2), {"x": 3, "y": 4}) == Point(3, 4)


def test_a_list_by_index_is_a_list_and_its_length_is_checked():
    assert st.load_state([1, (2, 3)], serialization.to_state_dict([4, (5, 6)])) == [4, (5, 6)]
    assert st.load_state(list(range(12)), serialization.to_state_dict(list(range(12))[::-1])) == list(range(12))[::-1]
    with pytest.raises(st.StructureMismatchError, match="the model has 2 entries, the state 3"):
        st.load_state([1, 2], serialization.to_state_dict([1, 2, 3]))


def test_a_partial_keeps_its_function():
    partial = jax.tree_util.Partial(jax.lax.add, 1, y=2)
    state = {"args": {"0": 3}, "keywords": {"y": 4}}
    assert serialization.to_state_dict(partial) == {"args": {"0": 1}, "keywords": {"y": 2}}
    loaded, report = st.load_state(partial, state, strict=False)
    assert (loaded.func, loaded.args, loaded.keywords) == (jax.lax.add, (3,), {"y": 4})
    assert list(report.left) == [".func"]


def test_keys_that_are_one_as_strings_stay_two():
    model = {1: "number", "1": "text"}
    with pytest.raises(ValueError, match="unique string representation"):
        serialization.to_state_dict(model)
    assert st.state(model) == model
    assert st.load_state(model, {1: "a", "1": "b"}) == {1: "a", "1": "b"}


def test_registered_functions():
    class Celsius:
        def __init__(self, degrees):
            self.degrees = degrees

    st.register_state(Celsius, lambda c: {"degrees": c.degrees}, lambda _, new: Celsius(new["degrees"]))
    with pytest.raises(ValueError, match="`Celsius` has functions for its state already"):
        st.register_state(Celsius, lambda c: 0, lambda c, _: c)
    assert st.state([Celsius(3)]) == [{"degrees": 3}]
    assert st.load_state([Celsius(3)], [{"degrees": 4}])[0].degrees == 4
    st.register_state(Celsius, lambda c: c.degrees, lambda _, new: Celsius(new), override=True)
    assert st.state([Celsius(3)]) == [3]


@pytest.mark.parametrize(
    "array",
    [
        np.ones(2, jnp.bfloat16),
        np.ones((2, 1), np.complex64),
        np.float32(3),
        np.int64(2**40),
        np.zeros((0, 3), np.int8),
        np.array(True),
    ],
    ids=lambda x: f"{x.dtype}{x.shape}",
)
def test_arrays_and_scalars_through_the_bytes_of_flax(array):
    model = {"a": array, "b": {"c": 1j, "d": 2, "e": "text", "f": None}}
    stored = serialization.msgpack_restore(serialization.msgpack_serialize(st.state(model)))
    loaded = st.load_state(model, stored)
    assert loaded["b"] == model["b"]
    assert loaded["a"].dtype == array.dtype
    np.testing.assert_array_equal(loaded["a"], array)


def test_the_train_state_of_an_optimizer():
    params = {"w": jnp.ones(2)}
    tx = optax.adam(0.1)
    before = tx.init(params)
    _, after = tx.update(params, before, params)
    loaded = st.load_state(before, serialization.to_state_dict(after))
    assert type(loaded[0]) is type(before[0])
    assert all(a is b for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(after), strict=True))
