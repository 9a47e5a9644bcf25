"""The records of a structure, compiled for the native `build`: the same objects, and nothing else changes."""

import collections
import copy
import dataclasses
import gc
import pickle
import subprocess
import sys
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sharedtree as st
from sharedtree import _walk
from sharedtree._graph import build, unpack
from sharedtree._native_walk import native
from sharedtree._structure import Given, Structure, Update
from tests.garbage import collect_all
from tests.strategies import Mutable, Pair
from tests.test_native_walk import NODES, Odd

pytestmark = pytest.mark.skipif(native is None, reason="the native walk is not in use")

W = jnp.ones(2)


@pytest.mark.parametrize("name", sorted(NODES.keys() - {"a dictionary of a subclass"}))
def test_a_structure_that_is_built_often(name):
    leaves, structure = st.tree.flatten(NODES[name]())
    for _ in range(4):
        expected, table = [], []
        _walk.build(structure.records, leaves, expected)
        built = unpack(structure, leaves, table)
        assert [type(each) for each in table] == [type(each) for each in expected]
        assert _walk.walk(built, _walk.Tags())[1:] == _walk.walk(expected[structure.root], _walk.Tags())[1:]


def test_it_is_made_once():
    leaves, structure = st.tree.flatten(Pair([W, "only here"], 1))
    assert structure.program is None
    unpack(structure, leaves)
    program = structure.program
    assert type(program).__name__ == "Program"
    unpack(structure, leaves)
    assert structure.program is program


def test_a_structure_with_a_program_is_copied_and_pickled():
    leaves, structure = st.tree.flatten(Pair([W, "pickled"], 1))
    for _ in range(3):
        unpack(structure, leaves)
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


def test_objects_of_the_other_side():
    """As `_walk.build` has it: `Given` is an object by its number, `Update` writes new content into one."""
    node = st.tree.structure([W]).records[-1][0]
    leaf = st.tree.structure(W).records[0][0]
    program = native.compile(((leaf, ()), (Given(7), ()), (Update(8, node), (0, 1)), (node, (2, 2))))
    table, calls = [], []
    build(
        program, [W], table, lambda n: ("given", n), lambda n, content: calls.append((n, content)) or {"now": content}
    )
    assert table[1:3] == [("given", 7), {"now": [W, ("given", 7)]}]
    assert calls == [(8, [W, ("given", 7)])]
    assert table[3][0] is table[3][1] is table[2]
    with pytest.raises(ZeroDivisionError):
        build(program, [W], [], lambda n: 1 / 0, None)


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
    program = native.compile(structure.records)
    for runs in (structure.records, program):
        table[:] = [0] * 3
        with pytest.raises(IndexError):
            build(runs, leaves, table)


def test_a_function_that_takes_the_program_away():
    class Takes:
        pass

    holder = []
    jax.tree_util.register_pytree_node(
        Takes, lambda _: ((), None), lambda *_: holder.clear() or gc.collect() or Takes()
    )
    leaves, structure = st.tree.flatten([Takes(), Pair(W, Takes()), [W] * 3])
    holder.append(native.compile(structure.records))
    table = []
    build(holder[0], leaves, table)
    assert holder == []
    assert len(table) == len(structure.records)


def test_wrong_arguments_are_errors():
    leaf = st.tree.structure(W).records[0][0]
    node = st.tree.structure([W]).records[-1][0]
    for wrong in (5, [], [(leaf, ())], (1,), ((leaf,),), ((leaf, []),), ((1, ()),)):
        with pytest.raises((TypeError, IndexError)):
            native.compile(wrong)
    with pytest.raises(StopIteration):
        native.build(native.compile(((leaf, ()),)), [], [], None, None)
    for records in (((node, (5,)),), ((node, ("a",)),), ((node, (-1,)),)):
        with pytest.raises((TypeError, IndexError)):
            native.build(native.compile(records), [W], [], None, None)
    with pytest.raises(TypeError):
        type(native.compile(()))()
    assert native.build(native.compile(()), [], [], None, None) is None


def test_the_wrong_number_of_leaves():
    leaves, structure = st.tree.flatten(Pair([W, W + 1], 1))
    for _ in range(3):
        with pytest.raises(ValueError, match="2 traced leaves"):
            unpack(structure, leaves[:1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["a module", "a default dict", "a partial", "attributes missing", "a namedtuple"])
def test_no_references_are_lost_or_left(kind):
    leaves, structure = st.tree.flatten(NODES[kind]())
    unpack(structure, leaves)
    held = [*leaves, *(op for op, _ in structure.records), structure, structure.records, None, True]
    collect_all()
    before = [sys.getrefcount(each) for each in held]
    for _ in range(300):
        program = native.compile(structure.records)
        for _ in range(3):
            build(program, leaves, [])
    del program
    collect_all()
    after = [sys.getrefcount(each) for each in held]
    assert after[:-2] == before[:-2]
    assert all(abs(a - b) < 100 for a, b in zip(after[-2:], before[-2:], strict=True))


FAIL_EACH = """
import sys
try:
    import _testcapi
except ImportError:
    sys.exit(77)
import dataclasses
import jax, jax.numpy as jnp, equinox as eqx
import sharedtree as st
from sharedtree import _native_walk
from sharedtree._graph import Tags, Rules
native, entries = _native_walk.native, _native_walk._entries
def registered(**options):
    def register(cls):
        return jax.tree_util.register_dataclass(dataclasses.dataclass(cls, **options))
    return register
@registered()
class Plain:
    a: object
    b: object
    n: int = dataclasses.field(metadata=dict(static=True))
@registered(slots=True, frozen=True)
class Slots:
    a: object
    n: int = dataclasses.field(metadata=dict(static=True))
m = [eqx.nn.MLP(2, 2, 2, 3, key=jax.random.key(0)), {"b": 1, "a": (1, "x")}]
m += [Plain(jnp.ones(1), Slots(jnp.ones(2), 1), 5), jax.tree_util.Partial(jnp.sin, 1)]
try:
    from flax import nnx
except ImportError:
    pass
else:
    m += [nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.List([nnx.Param(jnp.ones(1)) for _ in range(12)])]
leaves, structure = st.tree.flatten(m)
program = native.compile(structure.records)
def walked():
    tags = Tags()
    found = native.walk(m, tags, Rules(), entries)
    if found is None:
        assert tags.objects == []
        raise MemoryError
    assert found[1] is structure
for function, least in (
    (walked, 10),
    (lambda: native.compile(structure.records), 10),
    (lambda: native.build(program, leaves, [], None, None), 50),
    (lambda: native.build(structure.records, leaves, [], None, None), 50),
):
    function()
    for n in range(1, 100_000):
        failed = False
        _testcapi.set_nomemory(n, n + 1)
        try:
            function()
        except MemoryError:
            failed = True
        _testcapi.remove_mem_hooks()
        if not failed:
            break
    assert n > least, n
assert st.tree.structure(st.tree.unflatten(structure, leaves)) is structure
print("survived")
"""


@pytest.mark.slow
def test_every_allocation_may_fail():
    done = subprocess.run([sys.executable, "-c", FAIL_EACH], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode == 77:
        pytest.skip("this interpreter cannot make allocations fail")
    assert done.returncode == 0, done.stderr
    assert "survived" in done.stdout


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Fields:
    a: Any
    b: Any


def test_a_program_made_before_a_class_is_left_to_jax():
    leaves, structure = st.tree.flatten([Fields(W, 1), collections.OrderedDict(a=Fields(2, 3))])
    program = native.compile(structure.records)
    made = []
    init = Fields.__init__

    def __init__(self, **fields):
        made.append(self)
        init(self, **fields)

    Fields.__init__ = __init__
    build(program, leaves, [])
    assert made == []
    assert isinstance(st.tree.structure([Fields(a=1, b=2), Fields(a=1, b=2)]), Structure)
    made.clear()
    table = []
    build(program, leaves, table)
    assert [type(each) for each in made] == [Fields, Fields]
    assert vars(table[structure.root][0]) == {"a": W, "b": 1}
