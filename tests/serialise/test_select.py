"""Paths that look the same: nothing is picked among what they lead to."""

import dataclasses
import math

import jax.numpy as jnp
import pytest

import sharedtree as st

from .containers import file_of
from .drafts import Draft
from .test_grammar import Registered


@dataclasses.dataclass(frozen=True)
class Short:
    """A key that looks like each other one in print."""

    number: int

    def __repr__(self):
        return "Short()"


LONG = "a" * 500


ALIKE = [
    ({Short(1): jnp.ones(2), Short(2): jnp.zeros(2)}, "[Short]"), ({Short(1): 1, Short(2): 2}, "[Short]"),
    ({math.nan: 1, float("nan"): 2}, None), ({LONG + "1": 1, LONG + "2": 2}, None),
    ({Short(1): {"a": 1}, Short(2): {"a": 2}}, "[Short]['a']"),
    ([{Short(1): (1, 2), Short(2): (1, 3)}], "[0][Short][1]"),
]  # fmt: skip


def test_nothing_is_picked_among_paths_that_look_the_same():
    for tree, path in ALIKE:
        data = st.to_bytes(tree)
        if path is None:
            (path,) = {line.path for line in list(st.inspect(data).lines)[1:]}
        with pytest.raises(st.StructureMismatchError, match="2 things") as error:
            st.load(data, select=path, trusted=["tests"])
        assert error.value.paths == (path,)


def test_what_one_path_leads_to_is_one_thing():
    array = jnp.ones(2)
    tree = {Short(1): [array, 1, (2, 3)], Short(2): [array, 1, 5]}
    data = st.to_bytes(tree)
    assert st.load(data, select="[Short][0]", trusted=["tests"]).tolist() == [1, 1]
    assert st.load(data, select="[Short][1]", trusted=["tests"]) == 1  # equal values are one
    assert st.load(data, select="[Short][2][1]", trusted=["tests"]) == 3  # only one has it
    with pytest.raises(st.StructureMismatchError):
        st.load(data, select="[Short][2]", trusted=["tests"])


def test_one_text_can_be_cut_into_steps_in_several_ways():
    draft = Draft(st.to_bytes(Registered(Registered(1, 2), 3)))
    assert draft.manifest["nodes"][1][4] == [".a", ".b"]
    draft.manifest["nodes"][1][4] = [".a", ".a.b"]
    data = draft.file(with_digests=True)
    with pytest.raises(st.StructureMismatchError, match=r"2 things at `\.a\.b`"):
        st.load(data, select=".a.b", trusted=["tests"])
    assert st.load(data, select=".a.a", trusted=["tests"]) == 1
    draft.manifest["nodes"][1][4] = [".a.c", ".a"]
    data = draft.file(with_digests=True)
    assert st.load(data, select=".a.c.b", trusted=["tests"]) == 2


def test_a_path_can_be_given_as_it_was_printed():
    draft = Draft(st.to_bytes(Registered(1, 2)))
    draft.manifest["nodes"][0][4] = [".a\x1b", ".b"]
    data = draft.file(with_digests=True)
    assert st.load(data, select=".a\x1b", trusted=["tests"]) == 1
    assert st.load(data, select=".a\\x1b", trusted=["tests"]) == 1
    draft.manifest["nodes"][0][4] = [".a\x1b", ".a\\x1b"]
    with pytest.raises(st.StructureMismatchError, match="2 things"):
        st.load(draft.file(with_digests=True), select=".a\\x1b", trusted=["tests"])


def test_a_long_path_through_much_sharing_is_found_in_a_moment():
    nodes = [["tuple", [["int", "1"], ["int", "2"]]]]
    nodes += [["tuple", [number, number]] for number in range(300)]
    data = file_of(nodes)
    assert st.load(data) is not None
    assert st.load(data, select="[1]" * 301) == 2
    with pytest.raises(st.StructureMismatchError, match="nothing at"):
        st.load(data, select="[0]" * 302)
