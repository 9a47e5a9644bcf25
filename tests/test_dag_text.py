"""What a Dag prints: each tie once, with its number, on a line or on lines that end."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import sharedtree as st
from tests import strategies as dags
from tests.strategies import paths_by_object


@given(dags.dags())
def test_each_tie_stands_once_and_its_number_at_each_place(tree):
    text = repr(st.Dag(tree))
    ties = [paths for paths in paths_by_object(tree) if len(paths) > 1]
    marks = re.findall(r"#\d+", text)
    assert len(set(marks)) == len(ties)
    assert len(marks) == sum(map(len, ties))
    assert sorted(marks.count(mark) for mark in set(marks)) == sorted(map(len, ties))
    assert list(dict.fromkeys(marks)) == [f"#{i}" for i in range(1, len(ties) + 1)]


def test_on_one_line_and_on_several():
    w = jnp.ones((2, 3))
    assert repr(st.Dag({"a": w, "b": (w,), "c": [None, 1, "text"]})) == (
        "Dag({'a': #1 float32[2,3], 'b': (#1,), 'c': [None, 1, 'text']})"
    )
    layer = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    lines = repr(st.Dag(eqx.nn.Sequential([layer, layer, eqx.nn.Dropout(0.5), layer, eqx.nn.Identity()]))).splitlines()
    assert lines == [
        "Dag(",
        "  Sequential(",
        "    layers=(",
        "      #1 Linear(weight=float32[2,2], bias=float32[2]),",
        "      #1,",
        "      Dropout(p=0.5, inference=False),",
        "      #1,",
        "      Identity(),",
        "    ),",
        "  )",
        ")",
    ]
    assert repr(st.Dag([w, w])) == "Dag([#1 float32[2,3], #1])"
    assert repr(st.Dag(w)) == "Dag(float32[2,3])"


@pytest.mark.slow
def test_it_ends_however_large_or_deep_the_model_is():
    deep = np.ones(1)
    for _ in range(20_000):
        deep = [deep]
    for tree in (deep, [[np.ones(1)] * 50 for _ in range(500)], dags.tower(200, jnp.ones(2))):
        text = repr(st.Dag(tree))
        assert len(text.splitlines()) <= 203
    assert "sharedtree.summary(dag)" in text


def test_texts_are_escaped_and_have_no_address():
    text = repr(st.Dag({"\x1b[2J": jnp.ones(1), "f": eqx.nn.MLP(2, 2, 2, 1, key=jax.random.key(0))}))
    assert "\x1b" not in text
    assert " at 0x" not in text


def test_a_dag_that_a_transform_made_prints_without_being_built():
    dag = jax.jit(lambda d: d)(st.Dag({"a": jnp.ones(2)}))
    assert repr(dag) == "Dag({'a': float32[2]})"
    assert repr(jax.tree.map(lambda _: object, dag)) == "Dag({'a': <class 'object'>})"
