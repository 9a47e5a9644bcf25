"""Templates whose static values or weak types are not the file's."""

import enum
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharedtree as st

from .strategies import Registered


class Kind(enum.Enum):
    A = 1
    B = 2


class Model(eqx.Module):
    weight: jax.Array
    activation: object = jax.nn.relu
    rate: object = 0.5
    size: object = eqx.field(static=True, default=1)


WEIGHT = jnp.ones(2, jnp.float32)

# What a static place may hold, each other than all others.
VALUES = [
    1, 2, True, 1.0, 0.0, -0.0, float("nan"), "a", "b", b"a", None, Kind.A, Kind.B, jax.nn.relu, jax.nn.tanh,
    jnp.float32, (1, 2), (1, 2.0), {"a": 1}, {"a": True}, frozenset({1}), np.float32(1), np.dtype("f4"), 1j, ...,
]  # fmt: skip


def load(held, template):
    """The paths of what strictness refuses, and the report without it."""
    data = st.to_bytes(held)
    paths = ()
    try:
        st.load(data, like=template, trusted=["tests"])
    except st.errors.StructureMismatchError as error:
        paths = error.paths
    _, report = st.load(data, like=template, strict=False, trusted=["tests"])
    return paths, report


@pytest.mark.parametrize("place", ["activation", "size"])
@pytest.mark.slow
def test_static_values_in_modules_are_compared(place):
    values = [value for value in VALUES if place == "activation" or not isinstance(value, np.generic)]
    for i, one in enumerate(values):
        for two in (one, values[i - 1], values[i - 2], values[i - 5]):
            paths, report = load(Model(WEIGHT, **{place: one}), Model(WEIGHT, **{place: two}))
            assert paths == tuple(difference.path for difference in report.differences)
            assert bool(paths) == (one is not two), (one, two)
            assert all(path.startswith(f".{place}") for path in paths), (one, two)
            assert ".weight" in report.loaded


def test_auxiliary_data_of_registered_classes():
    paths, report = load([Registered((WEIGHT,), 1)], [Registered((WEIGHT,), 2)])
    assert paths == ("[0]",)
    assert str(report.differences[0]) == ("`[0]`: the file has the auxiliary data 1, the template the auxiliary data 2")
    assert load([Registered((WEIGHT,), 1)], [Registered((WEIGHT,), 1)])[0] == ()


def test_static_values_elsewhere_are_the_files_and_the_report_has_them():
    held, template = {"run": "a", "step": 7, "on": True}, {"run": "b", "step": 0, "on": False}
    paths, report = load(held, template)
    assert paths == ()
    assert [str(each) for each in report.differences] == ["`['run']`: the file has 'a', the template 'b'"]
    assert report.loaded == ("['on']", "['step']")  # what JAX can trace is loaded, as arrays are
    assert st.load(st.to_bytes(held), like=template) == held


def test_one_value_in_a_module_and_elsewhere():
    shared, other = (1, "a"), (1, "b")
    paths, _ = load([shared, Model(WEIGHT, shared)], [other, Model(WEIGHT, other)])
    assert paths == ("[1].activation[1]",)


@pytest.mark.filterwarnings("ignore")  # Equinox's, of arrays in static fields
def test_values_that_hold_arrays_are_no_differences():
    for array in (np.ones(2), WEIGHT, np.zeros(2, "M8[s]")):
        for value in (functools.partial(jnp.add, array), (array, 1), {"k": [array]}):
            tree = Model(WEIGHT, value, size=value if isinstance(array, np.ndarray) else 1)
            paths, report = load(tree, tree)
            assert paths == ()
            assert report.differences == ()


def test_weak_types():
    weak, strong = jnp.asarray(1.0), jnp.asarray(1.0, jnp.float32)
    for one, two in ((weak, strong), (strong, weak)):
        for template in ({"a": jax.eval_shape(lambda x: x, two)}, {"a": two}):
            paths, report = load({"a": one}, template)
            assert paths == ("['a']",)
            assert "weakly typed" in str(report.differences[0])
            assert report.loaded == ("['a']",)
            assert load({"a": two}, template)[0] == ()


def test_what_is_equal_only_to_itself_is_no_difference():
    """A loaded copy of it never is the template's."""
    for value in (object(), (object(), 1), jax.P("x")):
        tree = [Registered((WEIGHT,), value), Model(WEIGHT, value)]
        assert load(tree, tree)[0] == ()
    state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, axis_name="batch", mode="batch")
    paths, report = load(state, state)
    assert (paths, report.differences) == ((), ())


def test_hostile_values_are_printable():
    text = "\x1b[2J\nREAD ME\u202e"
    _, report = load(Model(WEIGHT, text), Model(WEIGHT, "a"))
    assert all(char.isprintable() or char == "\n" for char in str(report))
    assert "\nREAD ME" not in str(report)
