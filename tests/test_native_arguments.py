"""What is wrong or rare is an error, or left to Python, wherever the native part is asked; nothing is half done."""

import collections
import functools
import types
import weakref

import jax
import pytest

import sharedtree as st
from sharedtree.core import _pack_and_unpack, _walk
from sharedtree.core._node_types import node_type_of
from sharedtree.core._pack_and_unpack import Tags, flags_of, native
from sharedtree.core._walk import Rules
from sharedtree.libraries import _nnx_layouts
from sharedtree.transforms._leaf_groups import LeafGroup
from tests.kinds import Free, Slots, W, made
from tests.strategies import Layer, Pair, Record
from tests.walks import WRONG_CALLS, WRONG_TREES, natively, with_records, wrong_records

pytestmark = natively


class Reluctant:
    """A key that is equal to none, and says so by raising."""

    def __hash__(self):
        return 1

    def __eq__(self, other):
        raise LookupError


WRONG = {
    "walk": WRONG_TREES,
    "build": WRONG_TREES,
    "call": WRONG_CALLS,
    "recipe": [(), (5, (), 0)],
    "Program": [(), ([], None, 0, False, False), ((1,), None, 0, False, False), (((),), None, 0, False, False)],
    "count_contexts": [("one",)],
    "learn": [((),), (1,)],
    "take_over": [(), (1,), ("walk",), ("weather", 1), ("modules", 1, 2, 3, 4), ("calls", *[int] * 11)],
    "LeafSelection": [(), (1, 2, 3, 4)],
    "group_of": [(1,), (1, 2)],
    "group_parts": [(1,)],
    "hold": [(1,), ((1,),)],
    "write_back": [((),)],
}


@pytest.mark.parametrize(("name", "arguments"), [(name, each) for name, wrong in WRONG.items() for each in wrong])
def test_wrong_arguments_are_errors(name, arguments):
    with pytest.raises((TypeError, ValueError)):
        getattr(native, name)(*arguments)


def test_records_that_do_not_fit():
    for records in wrong_records():
        with pytest.raises((TypeError, IndexError, StopIteration)):
            native.build(with_records(records), [W], [], [W], [])
    assert native.build(with_records(()), [], [], None, None) is None


@pytest.mark.parametrize("begin", [(-1, None), (10**4, None), ("ARGUMENTS", None), ("FIELDS", None), ("LIST", 5)])
def test_programs_that_cannot_run(begin):
    """Of a shape that is not built or that there is not, without its class or with one that nobody knows."""
    shape = getattr(native, begin[0]) if isinstance(begin[0], str) else begin[0]
    with pytest.raises(ValueError, match="built"):
        native.Program(((shape, begin[1], None, (), (), None, None),), None, 0, False, False)


def test_what_has_no_program():
    for wrong in (5, types.SimpleNamespace(program=5), with_records(5)):
        with pytest.raises((AttributeError, TypeError)):
            native.build(wrong, [], [], None, None)


def test_wrong_tags_are_errors():
    tags = Tags()
    for wrong in (lambda: tags.add(W), lambda: tags.add(), lambda: tags.forget("a"), lambda: tags.forget(None)):
        with pytest.raises(TypeError):
            wrong()
    assert tags.objects == []


def test_a_structure_that_has_died():
    tree = Pair(W, [W, "dead"])
    structure = st.tree.structure(tree)
    known = {key: entry for key, entry in _pack_and_unpack._entries.items() if entry() is structure}
    assert native.walk(tree, Tags(), flags_of(Rules()), known)[1] is structure
    dead = weakref.ref(Reluctant())
    assert dead() is None
    assert native.walk(tree, Tags(), flags_of(Rules()), dict.fromkeys(known, dead)) is None


def test_many_classes_of_static_values():
    values = [type(f"Class{i}", (), {})() for i in range(200)]
    tree = [Layer(W, value, None) for value in values]
    structure = st.tree.structure(tree)
    assert st.tree.structure(tree) is structure
    assert [each.activation for each in st.tree.unflatten(structure, [W])] == values


def test_arguments_nested_deeply():
    f = st.jit(lambda tree: tree)
    for depth in (10, 100, 5_000):
        pair = Pair(W, [W])
        tree = functools.reduce(lambda inner, _: [inner], range(depth), pair)
        found = functools.reduce(lambda outer, _: outer[0], range(depth), f(tree))
        assert found is pair


def test_results_of_many_leaves():
    model = [Pair(W + i, i) for i in range(200)]
    f = st.jit(lambda model: st.tree.map(lambda x: x * 2, model))
    for _ in range(3):
        assert [float(each.first[0]) for each in f(model)] == [2.0 * (i + 1) for i in range(200)]


def test_a_write_that_fails_takes_all_back():
    st.tree.flatten([{}])  # what the native part has not met is left to Python
    first, second = [1, 2], {Reluctant(): 1}
    before = list(second.items())
    with pytest.raises(LookupError):
        native.write_back([first, [3], second, {Reluctant(): 2}])
    assert first == [1, 2]
    assert list(second.items()) == before


def test_writes_that_are_left_to_python():
    class Own(dict):
        pass

    pair, other = Pair(W, 1), Pair(W, 2)
    object.__setattr__(pair, "__dict__", Own(pair.__dict__))
    assert native.write_back([[], {}]) is False
    assert native.write_back([Own(), Own()]) is False
    assert native.write_back([pair, other]) is False
    assert pair.second == 1
    # What is not there is no content.
    for full, empty in ((Slots(W, 1), object.__new__(Slots)), (Free(w=W), made(Free, w=W))):
        assert native.write_back([full, empty]) is native.write_back([empty, full]) is False
        assert full.w is W


def test_layouts_that_make_no_sense():
    """Python then walks over such objects."""
    nnx = pytest.importorskip("flax.nnx")
    if _nnx_layouts.nnx() is None:
        pytest.skip("the registered functions of this version are called")

    def wrong(layout):
        yield layout._replace(places=layout.places[:-1])
        yield layout._replace(marks=layout.marks + b"\0")
        yield layout._replace(places=[*layout.places])
        for change in (str, lambda place: min(place, 0), lambda place: place + 1 if place >= 0 else place):
            yield layout._replace(places=tuple([change(place) for place in layout.places]))
        nodes, statics, marks = layout.form
        for form in ((), (nodes, statics), (None, statics, marks), (nodes + statics, (), marks)):
            yield layout._replace(form=form)

    class Two(nnx.Module):
        def __init__(self):
            self.a, self.b = nnx.Param(W), nnx.Param(W + 1)

    own = _nnx_layouts.layout_of.__code__
    for i, each in enumerate(wrong(_nnx_layouts.layout_of(Two()))):
        model = type(f"Two{i}", (Two,), {})()
        _nnx_layouts._wrong = each
        try:
            _nnx_layouts.layout_of.__code__ = (lambda obj: _wrong).__code__  # noqa: F821 -- in that file
            leaves, structure = st.tree.flatten([model, model])
        finally:
            _nnx_layouts.layout_of.__code__ = own
            del _nnx_layouts._wrong
        assert structure.records == _walk.walk([model, model], _walk.Tags(), Rules())[1]
        one, two = st.tree.unflatten(structure, leaves)
        assert one is two
        assert (one.b[...] == 2).all()


def test_a_hand_without_its_parts():
    blank = LeafGroup.__new__(LeafGroup)
    with pytest.raises(AttributeError):
        native.group_parts(blank)
    with pytest.raises(AttributeError):
        jax.tree.leaves(blank)
    assert isinstance(native.group_of, types.BuiltinFunctionType)


def test_keys_of_what_nobody_visits():
    layer = node_type_of(Pair(W, W))
    for wrong in ([object()], [(5, 1, ())], [(layer, 1)], [(layer, "one", ())], [2**80]):
        with pytest.raises((TypeError, ValueError, OverflowError)):
            native.key_of(wrong, 0, 0)
    for wrong in ([(layer, 2, "no names")], [(None, 0, "\ud800")]):
        with pytest.raises((ValueError, UnicodeError)):
            native.key_of(wrong, 0, 0)
    with pytest.raises(TypeError):
        native.key_of(None, 0, 0)
    with pytest.raises(TypeError):
        native.key_of([], Rules(), 0)


def test_auxiliary_data_of_another_form_is_written_out():
    """So what a class says otherwise than the native walk reads it has a key of its own."""
    nnx = pytest.importorskip("flax.nnx")
    linear = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    objects = [linear, nnx.Param(W), {"a": W}, Record(W, W, "name"), Slots(W, 1), Free(a=W), collections.deque()]
    objects += [collections.OrderedDict(), collections.defaultdict(), linear._pytree__state]
    keys = set()
    for obj in objects:
        st.tree.structure(obj)
        for aux in ((), (1, 2), (("a",), ("b",), ()), (("a", 1), ("b", 2)), ((1, 2, 3),), "text", ("a" * 5_000,)):
            key, pins, _ = native.key_of([(node_type_of(obj), 1, aux)], flags_of(Rules()), 0)
            keys.add(key)
            assert all(pin is not None for pin in pins)
    assert len(keys) == 7 * len(objects)
