"""The records of a structure, compiled for the native `build`: the same objects, and nothing else changes."""

import collections
import copy
import dataclasses
import gc
import pickle
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sharedtree as st
from sharedtree.core._classes_in_native_walk import _compile
from sharedtree.core._pack_and_unpack import build, unpack
from sharedtree.core._structure import Structure
from tests.kinds import Noted as Odd
from tests.strategies import Mutable, Pair
from tests.walks import natively

pytestmark = natively

W = jnp.ones(2)


def test_a_structure_with_a_program_is_copied_and_pickled():
    leaves, structure = st.tree.flatten(Pair([W, "pickled"], 1))
    assert structure.program is None
    programs = [(unpack(structure, leaves), structure.program)[1] for _ in range(3)]
    assert programs[0] is programs[2] is not None
    for other in (copy.copy(structure), copy.deepcopy(structure), pickle.loads(pickle.dumps(structure))):
        assert other is structure


def test_a_program_goes_with_its_structure():
    class Holder:
        pass

    holder = Holder()
    leaves, structure = st.tree.flatten(Odd(W, holder))
    for _ in range(3):
        unpack(structure, leaves)
    refs = weakref.ref(structure), weakref.ref(holder)
    del structure, holder
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


def test_each_mutable_static_value_is_a_copy():
    leaves, structure = st.tree.flatten([Odd(W, [1]), Pair(W, [{"a": {1}}, jnp.sin]), Mutable(x=1)])
    built = [unpack(structure, leaves) for _ in range(4)]
    assert len({id(each[0].note) for each in built}) == 4  # alive in `built`
    built[3][0].note.append(2)
    assert [each[0].note for each in built[:3]] == [[1]] * 3


def test_a_key_that_changes_what_is_built():
    """The hash of a dictionary's key is a user's own."""

    class Key:
        def __init__(self, number):
            self.number = number

        def __hash__(self):
            if table:
                table.clear()
                gc.collect()
            return hash(self.number)

        def __eq__(self, other):
            return type(other) is Key and other.number == self.number

        def __lt__(self, other):
            return self.number < other.number

    table = []
    leaves, structure = st.tree.flatten([{Key(i): jnp.full(2, i) for i in range(3)}, {Key(i): 1 for i in range(3)}])
    table[:] = [0] * 3
    with pytest.raises(IndexError):
        build(structure, leaves, table)


def test_a_function_that_takes_the_program_away():
    class Takes:
        pass

    def take(*_):
        structure.program = None
        gc.collect()
        return Takes()

    jax.tree_util.register_pytree_node(Takes, lambda _: ((), None), take)
    leaves, structure = st.tree.flatten([Takes(), Pair(W, Takes()), [W] * 3])
    table = []
    build(structure, leaves, table)
    assert structure.program is None
    assert len(table) == len(structure.records)


def test_the_wrong_number_of_leaves():
    leaves, structure = st.tree.flatten(Pair([W, W + 1], 1))
    for _ in range(3):
        with pytest.raises(ValueError, match="2 traced leaves"):
            unpack(structure, leaves[:1])


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Fields:
    a: Any
    b: Any


def test_a_program_made_before_a_class_is_left_to_jax():
    leaves, structure = st.tree.flatten([Fields(W, 1), collections.OrderedDict(a=Fields(2, 3))])
    _compile(structure)
    made = []
    init = Fields.__init__

    def __init__(self, **fields):
        made.append(self)
        init(self, **fields)

    Fields.__init__ = __init__
    build(structure, leaves, [])
    assert made == []
    assert isinstance(st.tree.structure([Fields(a=1, b=2), Fields(a=1, b=2)]), Structure)
    made.clear()
    table = []
    build(structure, leaves, table)
    assert [type(each) for each in made] == [Fields, Fields]
    assert vars(table[structure.root][0]) == {"a": W, "b": 1}
