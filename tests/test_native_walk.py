"""The native walk does what the walk in Python does: the same leaves, the same structure, the same numbers, or nothing.

The walk in Python is the oracle, and so is what the tests of every other file say of it.
"""

import collections
import dataclasses
import functools
import gc
import subprocess
import sys
import threading
import types
import weakref
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as hst

import sharedtree as st
from sharedtree import _native_classes, _native_walk, _node_types, _walk
from sharedtree._graph import Tags, build, pack, walk
from sharedtree._native_walk import native
from sharedtree._node_types import dict_descriptor
from sharedtree._statics import Static
from sharedtree._structure import Given, Node, Update, intern
from sharedtree._walk import Rules
from tests.deep import Link, in_a_thread, link
from tests.garbage import collect_all
from tests.kinds import KINDS
from tests.strategies import Layer, Mutable, Pair, Point, Record, arguments, dags, pools
from tests.walks import in_python

pytestmark = pytest.mark.skipif(native is None, reason="the native walk is not in use")

RULES = [
    Rules(),
    Rules(arrays=False),
    Rules(containers=True),
    Rules(convention="any"),
    Rules(convention="equinox"),
    Rules(values=True),
    Rules(inside=False),
    Rules(inside=False, containers=True),
]


def assert_alike(trees, rules):
    """Both walks over several trees in one crossing; the native one twice, for the first time it only asks Python."""
    expected, tags = [], _walk.Tags()
    for tree in trees:
        base = len(tags.objects)
        leaves, records, root = _walk.walk(tree, tags, rules)
        expected.append((leaves, intern(records, root, base)))
    for _ in range(2):
        own = Tags()
        for tree, (leaves, structure) in zip(trees, expected, strict=True):
            found, its = pack(tree, own, rules)
            assert its is structure
            assert len(found) == len(leaves)
            assert all(a is b for a, b in zip(found, leaves, strict=True))
        assert len(own.objects) == len(tags.objects)
        assert all(a is b for a, b in zip(own.objects, tags.objects, strict=True))
        assert [own.number_of(obj) for obj in own.objects] == [tags.number_of(obj) for obj in tags.objects]
    for leaves, structure in expected if rules.inside and not rules.values else ():
        if structure.base == 0:
            assert_built_alike(structure, leaves)


def assert_built_alike(structure, leaves):
    for records in (structure.records, native.compile(structure.records)):
        assert_built_as_in_python(structure, leaves, records)


def assert_built_as_in_python(structure, leaves, records):
    one, other = [], []
    _walk.build(structure.records, leaves, one)
    build(records, leaves, other)
    for a, b, (_, children) in zip(one, other, structure.records, strict=True):
        assert type(a) is type(b)
        if isinstance(a, eqx.Module):
            assert list(vars(a)) == list(vars(b))
        assert (a is b) <= (not children or type(a) is tuple)
    again = [_walk.walk(table[structure.root], _walk.Tags()) for table in (one, other)]
    assert again[0][1:] == again[1][1:]
    assert all(a is b for a, b in zip(again[0][0], again[1][0], strict=True))


def knows(tree, rules=_walk.DEFAULT_RULES):
    """Whether the native walk knows a tree again, so that no test passes because everything is left to Python."""
    return native.walk(tree, Tags(), rules, _native_walk._entries) is not None


@pytest.mark.parametrize("rules", RULES, ids=str)
@given(trees=arguments())
def test_several_trees_in_one_crossing(rules, trees):
    assert_alike(trees, rules)


@given(tree=dags())
def test_a_tree_is_known_again(tree):
    _, structure = st.tree.flatten(tree)
    assert structure is not None
    assert knows(tree)


@given(pool=pools(), data=hst.data())
def test_trees_that_are_changed_between_two_walks(pool, data):
    top = Pair(pool[-1], list(pool))
    changeable = [obj for obj in pool if isinstance(obj, (list, dict, Mutable, Record))]
    assert_alike([top], Rules())
    for _ in range(3 if changeable else 0):
        obj = data.draw(hst.sampled_from(changeable))
        before = pool[: [each is obj for each in pool].index(True)]  # so that no cycle arises
        new = data.draw(hst.sampled_from([None, 7, "text", *before]))
        match obj:
            case list():
                obj[:1] = [new]
            case dict():
                obj["new" if data.draw(hst.booleans()) else "b"] = new
            case Mutable():
                vars(obj)[data.draw(hst.sampled_from(["a", "x", "other"]))] = new
            case Record():
                if data.draw(hst.booleans()):
                    obj.left = new
                else:
                    obj.name = data.draw(hst.sampled_from(["one", 1, True, 1.0]))
        assert_alike([top], Rules())


# --- kinds of nodes, one by one ------------------------------------------------------------------------------------

W = jnp.ones(2)


class Named(NamedTuple):
    a: Any
    b: Any

    def __iter__(self):
        return iter((1, 2, 3))


class Wrapped(eqx.Module):
    function: Any

    @property
    def __wrapped__(self):
        return self.function


class Odd(eqx.Module):
    weight: Any
    note: Any = eqx.field(static=True)


class Cached(eqx.Module):
    weight: Any

    @functools.cached_property
    def answer(self):
        return 42


class Dictionary(dict):
    """Claims to have what it lacks."""

    def __getitem__(self, name):
        return 5


def with_attributes(cls, attributes):
    obj = object.__new__(cls)
    for name, value in attributes.items():
        object.__setattr__(obj, name, value)
    return obj


def cached():
    m = Cached(W)
    m.__dict__["answer"] = 42
    return m


def with_attributes_of_a_subclass():
    m = with_attributes(Odd, {"weight": W, "note": 1})
    dict_descriptor(Odd).__set__(m, Dictionary(weight=W, note=1))
    return m


class Colliding:
    """A key that says it is the text `note`, and has its hash."""

    def __init__(self, action=lambda: None):
        self.action = action

    def __hash__(self):
        return hash("note")

    def __eq__(self, other):
        self.action()
        return other == "note"


NODES = {
    "nothing": lambda: None,
    "a leaf": lambda: W,
    "a number": lambda: 3,
    "numbers": lambda: [1, 1.5, True, 2j, np.float32(1), np.int8(2)],
    "texts": lambda: ["a", b"b", "\ud800", "x" * 10_000],
    "empty": lambda: [[], (), {}, None],
    "a tuple": lambda: ((W, W), (W,)),
    "a list twice": lambda: (lambda x: [x, x])([W]),
    "a sorted dict": lambda: {"a": W, "b": 1},
    "an unsorted dict": lambda: {"b": W, "a": 1, "c": {"z": 1, "y": W}},
    "a large dict": lambda: {f"name{i}": i for i in range(500)},
    "a large unsorted dict": lambda: {f"name{i * 7919 % 500}": i for i in range(500)},
    "a large unsorted dict without order": lambda: {**{f"name{i * 7919 % 500}": i for i in range(500)}, 2: W},
    "odd texts": lambda: {chr(0xDFFF): 1, "b": 2, "a": 3, chr(0xD800): 4, "\U0001f600": 5},
    "a dict by numbers": lambda: {2: W, 1: 3},
    "a dict without order": lambda: {2: W, "a": 3},
    "a dict by None": lambda: {None: W},
    "an ordered dict": lambda: collections.OrderedDict(b=W, a=1),
    "a default dict": lambda: collections.defaultdict(list, b=W, a=1),
    "a deque": lambda: collections.deque([W, 1], 5),
    "a namedtuple": lambda: Named(W, W),
    "a point": lambda: Point(1, W),
    "a partial": lambda: jax.tree_util.Partial(jnp.sin, W),
    "a dictionary of a subclass": lambda: Dictionary(a=W),
    "functions": lambda: Pair(jax.nn.relu, jnp.sin),
    "a lambda": lambda: Pair(lambda x: x, len),
    "a numpy text": lambda: Pair(np.array(["a"]), np.array([1.0])),
    "a numpy text under JAX's convention": lambda: [np.array([1.0])],
    "a module": lambda: eqx.nn.MLP(2, 2, 2, 1, key=jax.random.key(0)),
    "attributes in another order": lambda: with_attributes(
        Layer, {"width": 3, "parts": 1, "activation": 2, "weight": W}
    ),
    "attributes missing": lambda: with_attributes(Layer, {"weight": W}),
    "nothing set": lambda: object.__new__(Layer),
    "attributes beyond": cached,
    "a marker": lambda: jax.tree.map(lambda x: x, with_attributes(Layer, {"weight": W})),
    "a wrapper": lambda: eqx.module_update_wrapper(Wrapped(jnp.add)),
    "a state": lambda: eqx.nn.make_with_state(eqx.nn.BatchNorm)(2, "batch", mode="ema")[0],
    "shapes": lambda: [jax.ShapeDtypeStruct((2,), jnp.float32)],
    "a key": lambda: [jax.random.key(0)],
    "a class": lambda: Pair(int, jnp.float32),
    "attributes of a subclass": with_attributes_of_a_subclass,
    "odd names": lambda: (lambda m: (m.__dict__.update({Colliding(): 5}), m)[1])(with_attributes(Odd, {"weight": W})),
}

STATICS = {
    "texts": ("a", "a" * 5000, "\ud800", ""),
    "numbers": (1, 2**80, -(2**63), True, 1.0, -0.0, 0.0, float("nan"), 1j),
    "tuples": ((3, 3), (3, (3, True)), ()),
    "deep": functools.reduce(lambda x, _: (x,), range(40), 1),
    "a tuple twice, and so on": functools.reduce(lambda x, _: (x, x), range(60), ()),
    "a tuple ten times, and so on": functools.reduce(lambda x, _: (x,) * 10, range(12), (1.5,)),
    "lists, and so on": functools.reduce(lambda x, _: [x, x], range(40), []),
    "a long tuple": tuple(range(5000)),
    "a long list": list(range(5000)),
    "a list": [1, 2],
    "a dict": {"a": [1]},
    "dtypes": (np.dtype("float32"), jnp.float32),
    "an array": np.arange(3),
    "a set": {1, 2},
    "a partial": functools.partial(len, [1]),
    "a namespace": types.SimpleNamespace(a=1),
    "a spec": jax.sharding.PartitionSpec("a"),
    "a module": eqx.nn.Identity(),
    "a slice": slice(1, 2),
}


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("name", NODES)
def test_kinds_of_nodes(name, rules):
    tree = NODES[name]()
    assert_alike([tree, [tree, NODES[name]()], tree], rules)


@pytest.mark.parametrize("name", STATICS)
def test_static_values(name):
    value = STATICS[name]
    for each in (value, *(value[:20] if isinstance(value, tuple) else ())):
        assert_alike([with_attributes(Odd, {"weight": W, "note": each})], Rules())
        if "and so on" not in name:
            assert_alike([Pair(W, each)], Rules())


@pytest.mark.parametrize(
    ("one", "other"), [(1, True), (0.0, -0.0), (1, 1.0), ("1", 1), ((), []), ((1,), [1]), (2**80, 2**81)]
)
def test_static_values_that_look_alike_differ(one, other):
    for make in (lambda x: Odd(W, x), lambda x: Pair(W, x), lambda x: Mutable(**{str(x) + type(x).__name__: W})):
        for _ in range(3):
            assert st.tree.structure(make(one)) is not st.tree.structure(make(other))


class Equal:
    """Static, and equal to each other one."""

    def __eq__(self, other):
        return type(other) is Equal

    def __hash__(self):
        return 1


def test_static_values_that_are_equal_but_not_the_same_stay_in_their_trees():
    one, other = Odd(W, Equal()), Odd(W, Equal())
    for tree in (one, other, one):
        assert walk(tree, Tags())[1][-1][0].aux.peek()[1][0][1] is tree.note
    assert st.tree.structure(one) is st.tree.structure(other)


@pytest.mark.parametrize("static", [[1], {"a": [1]}, ([1],)])
def test_a_static_value_that_is_changed_in_place(static):
    model = Odd(W, static)
    before = st.tree.structure(model)
    assert st.tree.structure(model) is before
    (static if type(static) is list else static["a"] if type(static) is dict else static[0]).append(2)
    after = st.tree.structure(model)
    assert after is not before
    assert_alike([model], Rules())


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
def test_every_kind_is_known_again():
    """Of the key that the walk in Python writes and the native one nothing differs; half surrogates are in no key."""
    statics = {
        f"static {name}": functools.partial(with_attributes, Odd, {"weight": W, "note": value})
        for name, value in STATICS.items()
    }
    unknown = set()
    for name, make in (NODES | KINDS | statics).items():
        tree = make()
        held = pack(tree, Tags())
        if not knows(tree):
            unknown.add(name)
        del held
    halves = {"dictionaries by half surrogates", "statics, half surrogates"}
    assert unknown == halves | {"texts", "odd texts", "static texts"}


def test_a_class_that_is_built_before_it_is_walked():
    class Late(eqx.Module):
        a: Any
        b: int = eqx.field(static=True)

    @jax.tree_util.register_pytree_node_class
    class Other(Mutable):
        pass

    tree = [Late((W, None), 5), Other(x=W), collections.deque([W], 3)]
    leaves, records, root = _walk.walk(tree, _walk.Tags())
    table = []
    build(records, leaves, table)
    built = table[root]
    assert (type(built[0]), built[0].a, built[0].b) == (Late, (W, None), 5)
    assert type(built[1]) is Other
    assert built[1].x is built[2][0] is W


def test_objects_of_the_other_side():
    """As `_walk.build` has it: `Given` is an object by its number, `Update` writes new content into one."""
    node = st.tree.structure([W]).records[-1][0]
    leaf = st.tree.structure(W).records[0][0]
    records = [(leaf, ()), (Given(7), ()), (Update(8, node), (0, 1)), (node, (2, 2))]
    outcomes = []
    for each in (_walk.build, build):
        table, calls = [], []
        each(
            records,
            [W],
            table,
            lambda n: ("given", n),
            lambda n, content: calls.append((n, content)) or {"now": content},
        )
        outcomes.append((table, calls))
        assert table[3][0] is table[3][1] is table[2]
    assert outcomes[0] == outcomes[1]
    assert outcomes[1][0][1:3] == [("given", 7), {"now": [W, ("given", 7)]}]
    for wrong in (lambda n: 1 / 0, None):
        with pytest.raises((ZeroDivisionError, TypeError, AssertionError)):
            build(records, [W], [], wrong, wrong)


# --- sizes -----------------------------------------------------------------------------------------------------------


def chain(depth):
    m = link(W, None)
    for _ in range(depth - 1):
        m = link(W, m)
    return m


@pytest.mark.slow
def test_a_deep_model():
    def walked():
        m = chain(90_000)
        first, second = st.tree.flatten(m), st.tree.flatten(m)
        built = st.tree.unflatten(*reversed(second))
        same = first[1] is second[1] and knows(m)
        outcome = same, type(built) is Link, len(second[0])
        while m is not None:  # a chain freed at its end would be freed by recursion
            m, built = m.next, built.next
        return outcome

    assert in_a_thread(walked, 300) == (True, True, 1)


@pytest.mark.slow
def test_a_model_that_is_too_deep():
    def walked():
        m = chain(100_001)
        try:
            for _ in range(2):
                with pytest.raises(st.DepthError):
                    st.tree.flatten(m)
        finally:
            while m is not None:
                m = m.next
        return True

    assert in_a_thread(walked, 300)


@pytest.mark.slow
def test_a_million_leaves():
    leaf = object.__new__(Link)
    wide = [1.0] * 1_000_000 + [W, W, leaf]
    for _ in range(2):
        leaves, structure = st.tree.flatten(wide)
        assert len(leaves) == 1_000_001
        assert structure.num_leaves == 1_000_001
    built = st.tree.unflatten(structure, leaves)
    assert built[-3] is built[-2] is W


# --- objects that answer back --------------------------------------------------------------------------------------


class Hostile:
    """Does something whenever it is taken apart."""

    def __init__(self, action, children):
        self.action, self.children = action, children


def take_apart(obj):
    obj.action(obj)
    return tuple(obj.children), None


jax.tree_util.register_pytree_node(Hostile, take_apart, lambda _, children: Hostile(lambda _: None, children))


def collect(_):
    gc.collect()


def flatten_something_else(_):
    st.tree.flatten(Pair([W, W], "else"))


def drop_children(obj):
    obj.siblings.clear()
    gc.collect()


ACTIONS = [collect, flatten_something_else, drop_children]


@pytest.mark.slow
@pytest.mark.parametrize("action", ACTIONS)
def test_a_flatten_function_that_does_something(action):
    for _ in range(3):
        hostile = Hostile(action, [Pair(jnp.ones(3), [1, 2])])
        siblings = [hostile, *(Pair(jnp.full(2, i), [object()]) for i in range(50)), {"b": 1, "a": jnp.ones(1)}]
        hostile.siblings = siblings
        leaves, structure = st.tree.flatten(siblings)
        assert structure.num_leaves == len(leaves)
        for each in leaves:
            repr(each)


def test_a_flatten_function_that_flattens_in_the_same_context():
    again = []

    def nested(obj):
        if len(again) < 5:
            again.append(None)
            st.tree.flatten([obj.children, Pair(jnp.zeros(1), 1)])

    with st.Context():
        hostile = Hostile(nested, [Pair(W, W)])
        for _ in range(3):
            st.tree.flatten([hostile, hostile, W])


def test_a_flatten_function_that_gives_other_children_each_time():
    count = iter(range(1_000))
    hostile = Hostile(lambda obj: setattr(obj, "children", [jnp.ones(1)] * (next(count) % 3)), [])
    for _ in range(20):
        leaves, structure = st.tree.flatten([hostile, W])
        assert structure.num_leaves == len(leaves)
    hostile.action = lambda _: None
    assert_alike([[hostile, W]], Rules())


@pytest.mark.parametrize("error", [ValueError, MemoryError, RecursionError])
def test_a_flatten_function_that_raises(error):
    def fail(_):
        raise error("from the flatten function")

    with pytest.raises(error, match="from the flatten function"):
        st.tree.flatten([W, Hostile(fail, [])])


def test_an_interrupt_is_raised_once():
    calls = []

    def interrupt(_):
        calls.append(None)
        raise KeyboardInterrupt

    hostile = Hostile(lambda _: None, [])
    st.tree.flatten([hostile])
    hostile.action = interrupt
    with pytest.raises(KeyboardInterrupt):
        st.tree.flatten([hostile])
    assert len(calls) == 1


@pytest.mark.parametrize("result", [None, 3, (), ((), None, 1), [[], None]])
def test_a_registered_node_that_comes_apart_into_something_else(result):
    class Strange:
        pass

    st.register_node(Strange, lambda _: result, lambda *_: Strange())
    if isinstance(result, list):
        return
    with pytest.raises((TypeError, ValueError)):
        st.tree.flatten([Strange()])


def test_an_attribute_name_that_changes_the_attributes():
    m = with_attributes(Odd, {"weight": W})
    attributes = object.__getattribute__(m, "__dict__")
    key = Colliding(lambda: attributes.update(weight=jnp.zeros(2)))
    attributes[key] = 5
    for _ in range(3):
        leaves, structure = st.tree.flatten([m])
        assert structure.num_leaves == len(leaves)


def test_a_class_that_changes_under_an_object():
    class One(eqx.Module):
        a: Any

    class Two(eqx.Module):
        b: Any

    m = One(W)
    st.tree.flatten([m])
    object.__setattr__(m, "__class__", Two)
    assert_alike([[m]], Rules())


# --- what is kept --------------------------------------------------------------------------------------------------


class Tagged:
    """Static, and equal to itself only."""

    def __call__(self):
        return None


def test_nothing_of_a_model_is_kept():
    tag = Tagged()
    ref = weakref.ref(tag)
    for _ in range(3):
        st.tree.flatten(Odd(W, tag))
        st.Dag([Pair(W, tag)])
    del tag
    gc.collect()
    assert ref() is None


def test_a_static_object_at_the_address_of_one_that_is_gone():
    found = set()
    for i in range(200):
        structure = st.tree.structure(Odd(W, Tagged()))
        assert structure.records[-1][0].aux.peek()[1][0][1] is not None
        found.add(id(structure))
        tag = Tagged()
        held = st.tree.structure(Odd(W, tag))
        assert held.records[-1][0].aux.peek()[1][0][1] is tag, i


def test_keys_do_not_grow_without_bound():
    for _ in range(2):
        tree = Odd(W, 2**80)
        held = st.tree.structure(tree)
        for i in range(_native_walk.MAX_KEYS + 10):
            st.tree.structure(Odd(W, 2**80 + i - i))
        assert len(_native_walk._entries) <= _native_walk.MAX_KEYS
        assert st.tree.structure(tree) is held


@pytest.mark.parametrize("kind", ["a module", "an unsorted dict", "a default dict", "a partial", "attributes missing"])
def test_no_references_are_lost_or_left(kind):
    tree = NODES[kind]()
    leaves, structure = st.tree.flatten(tree)
    held = [tree, *leaves, *(op for op, _ in structure.records), type(tree)]
    collect_all()
    before = [sys.getrefcount(each) for each in held]
    for _ in range(500):
        st.tree.flatten(tree)
        st.tree.unflatten(structure, leaves)
    collect_all()
    assert [sys.getrefcount(each) for each in held] == before


def test_none_and_the_like_are_counted():
    """Compiled with the headers of a later Python, in which they live for ever, and loaded by one that counts them."""
    structure = st.tree.structure(W)
    collect_all()  # else what other tests left may go meanwhile
    before = [sys.getrefcount(each) for each in (None, True, False)]
    for _ in range(10_000):
        tags = Tags()
        tags.number_of(W)
        tags.forget(0)
        native.walk(W, tags, Rules(is_leaf=callable), {})
        native.build(structure.records, [None], [], None, None)
    after = [sys.getrefcount(each) for each in (None, True, False)]
    assert all(abs(a - b) < 1_000 for a, b in zip(before, after, strict=True))


def test_tags_that_hold_themselves_are_collected():
    tags = Tags()
    inner = [Tagged()]
    ref = weakref.ref(inner[0])
    tags.add(inner, tag=True)
    inner.append(tags)
    del tags, inner
    gc.collect()
    assert ref() is None


def test_tags_are_collected_with_what_refers_to_them():
    class Holder:
        pass

    holder = Holder()
    holder.tags = Tags()
    walk([holder], holder.tags, Rules(convention="any"))
    holder.tags.add(holder, tag=True)
    ref = weakref.ref(holder)
    del holder
    gc.collect()
    assert ref() is None


@pytest.mark.parametrize(
    "arguments", [(), (1, 2, 3, 4), ([], Tags, Rules(), {}), ([], Tags(), (), {}), ([], Tags(), Rules(), None)]
)
def test_wrong_arguments_are_errors(arguments):
    with pytest.raises(TypeError):
        native.walk(*arguments)
    with pytest.raises(TypeError):
        native.build(*arguments)


def test_wrong_records_are_errors():
    leaf = st.tree.structure(W).records[0][0]
    node = st.tree.structure([W]).records[-1][0]
    for records in ([1], [(leaf,)], [(leaf, [])], [(1, ())], [(node, (5,))], [(node, ("a",))]):
        with pytest.raises((TypeError, IndexError)):
            native.build(records, [W], [], None, None)
    with pytest.raises(StopIteration):
        native.build([(leaf, ())], [], [], None, None)


def test_wrong_operations_are_errors():
    """Made by hand, as nothing in the package makes them."""
    leaf = st.tree.structure(W).records[0][0]
    dictionary, module = (_node_types.node_type_of(each) for each in ({}, Pair(W, W)))
    blank, untyped = Node.__new__(Node), Node(dictionary, Static(()), ())
    untyped.type = 5
    unset = Node(dictionary, Static.__new__(Static), ())
    typed = Node((5,), Static(()), ())
    unnamed = Node(module, Static((("first",), ("no pair",))), ("first",))
    unheld = Node(dictionary, Static(()), ())
    unheld.aux = Static.__new__(Static)
    unheld.aux._is_mutable = False
    for op in (blank, untyped, unset, typed, unnamed, unheld, unset.aux, Update(1, blank)):
        with pytest.raises((TypeError, ValueError, AttributeError, SystemError)):
            native.build([(leaf, ()), (op, (0,))], [W], [], None, None)


def test_auxiliary_data_of_another_form_is_left_to_python():
    leaf = st.tree.structure(W).records[0][0]
    table = []
    native.build([(leaf, ()), (Node(_node_types.node_type_of({}), Static("a"), ()), (0,))], [W], table, None, None)
    assert table[1]["a"] is W
    with pytest.raises((TypeError, ValueError)):
        native.build([(Node(_node_types.node_type_of(Pair(W, W)), Static("abc"), ()), ())], [], [], None, None)


def test_wrong_descriptions_are_errors():
    class New:
        pass

    right = (New, native.OTHER, False, False, True, native.JAX, True, None, len, (), b"", b"", (), ())
    for wrong in (None, (), (5, *right[1:]), (*right[:9], ("a",), *right[10:])):
        with pytest.raises((TypeError, ValueError)):
            native.learn(wrong)
    for _ in range(2):
        assert native.learn(right) is None
    assert native.start() is False


def test_wrong_tags_are_errors():
    tags = Tags()
    for wrong in (lambda: tags.add(W), lambda: tags.add(), lambda: tags.forget("a"), lambda: tags.forget(None)):
        with pytest.raises(TypeError):
            wrong()
    assert tags.objects == []


@pytest.mark.slow
def test_every_allocation_may_fail():
    command = [sys.executable, "-W", "ignore", "-m", "tests.failing_allocations"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode == 77:
        pytest.skip("this interpreter cannot make allocations fail")
    assert done.returncode == 0, done.stderr
    assert "survived" in done.stdout


@dataclasses.dataclass
class Config:
    scale: float
    names: list


@dataclasses.dataclass(frozen=True)
class Frozen:
    scale: float


class Configured(eqx.Module):
    weight: jax.Array
    config: Any = eqx.field(static=True)


CONFIGS = {
    "a dataclass": lambda: Config(1.0, ["a"]),
    "a frozen one": lambda: Frozen(1.0),
    "an array": lambda: np.arange(3),
    "a set": lambda: {1, 2},
    "a partial": lambda: functools.partial(max, key=abs),
    "a dictionary with one": lambda: {"config": Config(1.0, []), "other": [Frozen(2.0)]},
    "a tuple with one": lambda: (Config(1.0, []), np.ones(2)),
    "a counter": lambda: collections.Counter("aab"),
}


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
@pytest.mark.parametrize("make", CONFIGS.values(), ids=list(CONFIGS))
def test_what_can_change_or_has_an_equality_of_its_own_is_known_again_by_content(make, monkeypatch):
    walked = []
    monkeypatch.setattr(_walk, "walk", lambda *args, walk=_walk.walk: walked.append(1) or walk(*args))
    config = make()
    models = [[Configured(jnp.ones(2), config)] * 3 + [Configured(jnp.ones(1), make()), config] for _ in range(3)]
    structures = {st.tree.structure(model) for model in models}
    assert len(structures) == 1
    walked.clear()
    for _ in range(3):
        models = [st.tree.map(lambda x: x + 1, model) for model in models]  # what can change is copied
    assert not walked
    assert {st.tree.structure(model) for model in models} == structures


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
def test_a_static_value_that_changes_is_another_structure():
    config, array = Config(1.0, ["a"]), np.arange(3)
    model = Configured(jnp.ones(2), (config, {"array": array}))
    seen = [st.tree.structure(model)]
    for change in (lambda: setattr(config, "scale", 2.0), lambda: config.names.append(1), lambda: array.fill(0)):
        change()
        with in_python():
            expected = st.tree.structure(model)
        for _ in range(2):
            assert st.tree.structure(model) is expected
        assert expected not in seen
        seen.append(expected)
    config.names.pop(), setattr(config, "scale", 1.0), array.__setitem__(slice(None), np.arange(3))
    assert st.tree.structure(model) is seen[0]


def test_tokens_go_with_the_last_structure():
    collect_all()
    before = len(_native_classes._tokens.alive)
    structure = st.tree.structure(Configured(jnp.ones(2), Config(3.0, ["only here"])))
    assert len(_native_classes._tokens.alive) == before + 1
    del structure
    gc.collect()
    assert len(_native_classes._tokens.alive) == before


def test_a_static_value_that_leads_to_its_own_structure_goes_with_it():
    def make():
        held = []
        for config in (lambda: held, functools.partial(lambda: held)):
            model = Configured(jnp.ones(2), config)
            held.append(st.tree.structure(model))
            assert st.tree.structure(model) in held
        return [weakref.ref(structure) for structure in held]

    collect_all()
    before = len(_native_walk._entries), len(_native_classes._tokens.alive)
    references = make()
    gc.collect()
    assert not any(reference() for reference in references)
    assert (len(_native_walk._entries), len(_native_classes._tokens.alive)) == before


def test_keys_that_are_given_up_keep_nothing(monkeypatch):
    monkeypatch.setattr(_native_walk, "MAX_KEYS", len(_native_walk._entries) + 3)
    structures = []
    for _ in range(8):
        function = types.FunctionType((lambda: None).__code__, {})
        structures.append((st.tree.structure(Configured(jnp.ones(2), function)), weakref.ref(function)))
        assert len(_native_walk._entries) <= _native_walk.MAX_KEYS
    for structure, function in structures:
        assert function() is not None  # which the structure holds by itself
        assert st.tree.structure(Configured(jnp.ones(2), function())) is structure


BY_VALUE = {
    "a long tuple": lambda: tuple(str(i) for i in range(2000)),
    "a long text": lambda: "text " * 2000,
    "a large number": lambda: 2**100 + 1,
    "a complex number": lambda: complex(1, 2),
    "bytes": lambda: bytes(range(200)),
}


@pytest.mark.parametrize("make", BY_VALUE.values(), ids=list(BY_VALUE))
def test_values_that_are_made_anew_are_known_again_and_keep_nothing(make, monkeypatch):
    """By content, whatever object they are."""

    class Named(Mutable):
        pass

    jax.tree_util.register_pytree_node(Named, lambda n: ((n.x,), make()), lambda aux, xs: Named(x=xs[0]))
    structure = st.tree.structure([Named(x=W), Named(x=W)])
    assert st.tree.structure([Named(x=W), Named(x=W)]) is structure
    walked = []
    monkeypatch.setattr(_walk, "walk", lambda *args, walk=_walk.walk: walked.append(1) or walk(*args))
    for _ in range(5):
        assert st.tree.structure([Named(x=W), Named(x=W)]) is structure
    assert not walked
    assert len(structure.pins) == 1


def test_structures_met_by_many_threads_while_keys_are_given_up(monkeypatch):
    monkeypatch.setattr(_native_walk, "MAX_KEYS", 8)
    interval = sys.getswitchinterval()
    errors = []

    def work(seed):
        try:
            for i in range(300):
                tree = [W, (None,) * (seed + i % 50), str(i)]
                assert st.tree.unflatten(st.tree.structure(tree), [W]) == tree
        except BaseException as error:
            errors.append(error)

    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert not errors, errors[0]
