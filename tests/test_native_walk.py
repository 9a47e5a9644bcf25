"""The native walk does what the walk in Python does: the same leaves, the same structure, the same numbers, or nothing.

The walk in Python is the oracle, and so is what the tests of every other file say of it.
"""

import collections
import copy
import dataclasses
import functools
import gc
import subprocess
import sys
import types
import weakref
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import sharedtree as st
from sharedtree.core import _classes_in_native_walk, _node_types, _pack_and_unpack, _walk
from sharedtree.core._class_attributes import dict_descriptor
from sharedtree.core._pack_and_unpack import Tags, build, native, pack, walk, walk as walk_natively
from sharedtree.core._static_values import Static
from sharedtree.core._structure import Given, Node, Update, intern
from sharedtree.core._walk import Rules
from tests.deep import Link, chain, free, in_a_thread
from tests.garbage import collect_all
from tests.kinds import KINDS, ByContent, FrozenSlots, LyingDict, Noted as Odd, made
from tests.processes import HANGS
from tests.strategies import Layer, Mutable, Pair, Record, arguments
from tests.threads import at_once
from tests.walks import RULES, assert_alike, knows, natively, with_records

pytestmark = natively


@pytest.mark.parametrize("rules", RULES, ids=str)
@given(trees=arguments())
def test_several_trees_in_one_crossing(rules, trees):
    assert_alike(trees, rules)


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


class Cached(eqx.Module):
    weight: Any

    @functools.cached_property
    def answer(self):
        return 42


class Lying(eqx.Module):
    weight: Any

    def __getattribute__(self, name):
        return None if name == "weight" else super().__getattribute__(name)


def cached():
    m = Cached(W)
    m.__dict__["answer"] = 42
    return m


def with_attributes_of_a_subclass():
    m = made(Odd, weight=W, note=1)
    dict_descriptor(Odd).__set__(m, LyingDict(weight=W, note=1))
    return m


class Colliding:
    """A key that says it is the text `note`, and has its hash."""

    def __hash__(self):
        return hash("note")

    def __eq__(self, other):
        return other == "note"


NODES = KINDS | {
    "texts": lambda: ["a", b"b", "\ud800", "x" * 10_000],
    "empty": lambda: [[], (), {}],
    "a large dict": lambda: {f"name{i}": i for i in range(500)},
    "a large unsorted dict": lambda: {f"name{i * 7919 % 500}": i for i in range(500)},
    "a large unsorted dict without order": lambda: {**{f"name{i * 7919 % 500}": i for i in range(500)}, 2: W},
    "odd texts": lambda: {chr(0xDFFF): 1, "b": 2, "a": 3, chr(0xD800): 4, "\U0001f600": 5},
    "a dict without order": lambda: {2: W, "a": 3},
    "a dict by None": lambda: {None: W},
    "a namedtuple that lies": lambda: Named(W, W),
    "a dictionary of a subclass": lambda: LyingDict(a=W),
    "functions": lambda: [Pair(jax.nn.relu, jnp.sin), Pair(lambda x: x, len)],
    "numpy texts": lambda: [Pair(np.array(["a"]), np.array([1.0])), Mutable(a=np.array(["a"]), b=np.array([1.0]))],
    "dictionaries by tuples of tuples": lambda: [{((2,),): W, ((1,),): 1}, collections.OrderedDict({((1,),): W, 1: 1})],
    "attributes in another order": lambda: made(Layer, width=3, parts=1, activation=2, weight=W),
    "half surrogates in another order": lambda: made(Record, name="\ud800", right=W, left=W),
    "half surrogates in slots": lambda: FrozenSlots(W, "\ud800"),
    "attributes beyond": cached,
    "attributes that are not what is there": lambda: Lying(W),
    "a marker": lambda: jax.tree.map(lambda x: x, made(Layer, weight=W)),
    "a wrapper": lambda: eqx.module_update_wrapper(Wrapped(jnp.add)),
    "a state": lambda: eqx.nn.make_with_state(eqx.nn.BatchNorm)(2, "batch", mode="ema")[0],
    "shapes": lambda: [jax.ShapeDtypeStruct((2,), jnp.float32)],
    "a key": lambda: [jax.random.key(0)],
    "a class": lambda: Pair(int, jnp.float32),
    "attributes of a subclass": with_attributes_of_a_subclass,
    "odd names": lambda: (lambda m: (m.__dict__.update({Colliding(): 5}), m)[1])(made(Odd, weight=W)),
}

STATICS = {
    "texts": ("a", "a" * 5000, "\ud800", ""),
    "numbers": (1, 2**80, -(2**63), True, 1.0, -0.0, 0.0, float("nan"), 1j),
    "tuples": ((3, 3), (3, (3, True)), ()),
    "a tuple twice, and so on": functools.reduce(lambda x, _: (x, x), range(60), ()),
    "a tuple ten times, and so on": functools.reduce(lambda x, _: (x,) * 10, range(12), (1.5,)),
    "lists, and so on": functools.reduce(lambda x, _: [x, x], range(40), []),
    "a long tuple": tuple(range(5000)),
    "a long list": list(range(5000)),
    "a list": [1, 2],
    "a dict": {"a": [1]},
    "half surrogates in a dict": {"a": "\ud800", "\udfff": 1},
    "dtypes": (np.dtype("float32"), jnp.float32),
    "an array": np.arange(3),
    "a set": {1, 2},
    "a partial": functools.partial(len, [1]),
    "a namespace": types.SimpleNamespace(a=1),
    "a spec": jax.sharding.PartitionSpec("a"),
    "a module": eqx.nn.Identity(),
    "a slice": slice(1, 2),
}


UNORDERED = ("dictionaries by numbers", "a large unsorted dict without order", "a dict without order")
"""With keys of several types, which have no order."""


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("name", NODES)
def test_kinds_of_nodes(name, rules):
    tree = NODES[name]()
    if rules.convention in ("any", "outside") and name in UNORDERED:
        for walk in (_walk.walk, walk_natively):
            with pytest.raises(ValueError, match="Comparator raised exception"):  # JAX's own, outside modules
                walk(tree, Tags(), rules)
    else:
        assert_alike([tree, [tree, NODES[name]()], tree], rules)


@pytest.mark.parametrize("name", STATICS)
def test_static_values(name):
    value = STATICS[name]
    for each in (value, *(value[:20] if isinstance(value, tuple) else ())):
        assert_alike([made(Odd, weight=W, note=each)], Rules())
        if "and so on" not in name:
            assert_alike([Pair(W, each)], Rules())


def test_static_values_that_are_equal_but_not_the_same_stay_in_their_trees():
    one, other = Odd(W, ByContent(1)), Odd(W, ByContent(1))
    for tree in (one, other, one):
        assert walk(tree, Tags())[1][-1][0].aux.peek()[1][0][1] is tree.note
    assert st.tree.structure(one) is st.tree.structure(other)


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
def test_every_kind_is_known_again():
    """Of the key that the walk in Python writes and the native one nothing differs; half surrogates are in no key."""
    statics = {f"static {name}": functools.partial(made, Odd, weight=W, note=value) for name, value in STATICS.items()}
    unknown = set()
    for name, make in (NODES | statics).items():
        tree = make()
        held = pack(tree, Tags())
        if not knows(tree):
            unknown.add(name)
        del held
    halves = {name for name in NODES | statics if "half surrogates" in name}
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


@pytest.mark.parametrize("register", [jax.tree_util.register_pytree_node, st.register_node])
def test_a_class_that_is_registered_after_it_was_met(register):
    class Late:
        pass

    tree = [Pair(W, Late()), W]
    assert_alike([tree, [tree]], Rules())
    register(Late, lambda _: ([], None), lambda *_: Late())
    assert_alike([tree, [tree]], Rules())
    assert Late in [op.type.cls for op, _ in st.tree.structure(tree).records if type(op) is Node]


def test_a_name_that_cannot_be_compared():
    class Incomparable(Colliding):
        __hash__ = Colliding.__hash__

        def __eq__(self, other):
            raise LookupError

    module = made(Odd, weight=W)
    vars(module)[Incomparable()] = 5
    for walked in (_walk.walk, walk):
        with pytest.raises(LookupError):
            walked(module, Tags())


def test_objects_of_the_other_side():
    """As `_walk.build` has it: `Given` is an object by its number, `Update` writes new content into one."""
    node = st.tree.structure([W]).records[-1][0]
    leaf = st.tree.structure(W).records[0][0]
    records = ((leaf, ()), (Given(7), ()), (Update(8, node), (0, 1)), (node, (2, 2)))
    for builder, form in ((_walk.build, records), (build, intern(records, 3))):
        table, calls = [], []
        change = lambda n, content, calls=calls: calls.append((n, content)) or {"now": content}
        builder(form, [W], table, lambda n: ("given", n), change)
        assert table[1:3] == [("given", 7), {"now": [W, ("given", 7)]}]
        assert calls == [(8, [W, ("given", 7)])]
        assert table[3][0] is table[3][1] is table[2]
        for wrong in (lambda n: 1 / 0, None):
            with pytest.raises((ZeroDivisionError, TypeError, AssertionError)):
                builder(form, [W], [], wrong, wrong)


@pytest.mark.slow
def test_a_deep_model_and_one_that_is_too_deep():
    def walked():
        deep, too_deep = chain(90_000), chain(100_001)
        first, second = st.tree.flatten(deep), st.tree.flatten(deep)
        built = st.tree.unflatten(*reversed(second))
        outcome = first[1] is second[1] and knows(deep), type(built) is Link, len(second[0])
        try:
            for _ in range(2):
                with pytest.raises(st.errors.DepthError):
                    st.tree.flatten(too_deep)
        finally:
            for model in (deep, built, too_deep):
                free(model)
        return outcome

    assert in_a_thread(walked, 300) == (True, True, 1)


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


@pytest.mark.parametrize("error", [ValueError, MemoryError, RecursionError, KeyboardInterrupt])
def test_a_flatten_function_that_raises(error):
    """An interrupt is raised once, for the tree is not walked again."""
    raised = []

    class Raising(Mutable):
        is_armed = False

    def take_apart(obj):
        if obj.is_armed:
            raised.append(error)
            raise error("from the flatten function")
        return (), None

    jax.tree_util.register_pytree_node(Raising, take_apart, lambda *_: Raising())
    model = Raising()
    st.tree.flatten([W, model])
    model.is_armed = True
    with pytest.raises(error, match="from the flatten function"):
        st.tree.flatten([W, model])
    assert raised == [error] or error is not KeyboardInterrupt


@pytest.mark.parametrize("result", [None, 3, (), ((), None, 1)])
def test_a_registered_node_that_comes_apart_into_something_else(result):
    class Strange:
        pass

    st.register_node(Strange, lambda _: result, lambda *_: Strange())
    with pytest.raises((TypeError, ValueError)):
        st.tree.flatten([Strange()])


class Tagged:
    """Static, and equal to itself only."""

    def __call__(self):
        return None


def test_a_static_object_at_the_address_of_one_that_is_gone():
    for i in range(200):
        structure = st.tree.structure(Odd(W, Tagged()))
        assert structure.records[-1][0].aux.peek()[1][0][1] is not None
        tag = Tagged()
        held = st.tree.structure(Odd(W, tag))
        assert held.records[-1][0].aux.peek()[1][0][1] is tag, i


def test_tags_that_lead_to_themselves_are_collected():
    class Holder:
        pass

    holder, inner = Holder(), [Tagged()]
    holder.tags, tags = Tags(), Tags()
    walk([holder], holder.tags, Rules(convention="any"))
    for its, obj in ((holder.tags, holder), (tags, inner)):
        its.add(obj, tag=True)
    inner.append(tags)
    references = weakref.ref(holder), weakref.ref(inner[0])
    del holder, inner, its, obj, tags
    gc.collect()
    assert [reference() for reference in references] == [None, None]


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
        with pytest.raises((TypeError, ValueError, AttributeError)):
            native.build(with_records([(leaf, ()), (op, (0,))]), [W], [], None, None)


def test_wrong_descriptions_are_errors():
    class New:
        pass

    right = (New, native.OTHER, False, False, True, native.JAX, False, None, len, (), b"", b"", (), 0, True, ())
    for wrong in (None, (), (5, *right[1:]), (*right[:9], ("a",), *right[10:])):
        with pytest.raises((TypeError, ValueError)):
            native.learn(wrong)
    for _ in range(2):
        assert native.learn(right) is None


@pytest.mark.slow
def test_every_allocation_may_fail():
    command = [sys.executable, "-W", "ignore", "-m", "tests.failing_allocations"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS, check=False)
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


CHANGEABLE = {name: STATICS[name] for name in ("a list", "a dict", "an array", "a set", "a partial", "a namespace")} | {
    "a dataclass": Config(1.0, ["a"]),
    "a frozen one": Frozen(1.0),
    "a dictionary with one": {"config": Config(1.0, []), "other": [Frozen(2.0)]},
    "a tuple with one": (Config(1.0, []), np.ones(2)),
    "a counter": collections.Counter("aab"),
}


@pytest.fixture
def walked(monkeypatch):
    """A list that grows with each walk in Python."""
    walked = []
    monkeypatch.setattr(_walk, "walk", lambda *args, walk=_walk.walk: walked.append(1) or walk(*args))
    return walked


@pytest.mark.parametrize("parent", [False, True], ids=["", "compared"])
@pytest.mark.parametrize("names", [("child", "name", "parent"), ("name", "parent", "child")], ids=str)
def test_a_config_with_a_link_to_its_parent(names, parent, walked):
    """The link is not compared, so it may lead back, and the config is known by its address all the same."""
    fields = [(name, Any, dataclasses.field(compare=name != "parent" or parent)) for name in names]
    config = dataclasses.make_dataclass("Config", fields, frozen=True)
    inner = config(child=None, name="inner", parent=None)
    outer = config(child=inner, name="outer", parent=None)
    object.__setattr__(inner, "parent", outer)
    model = eqx.nn.Lambda(outer)
    if parent:
        with pytest.raises(st.errors.DepthError, match="contains itself"):
            st.tree.structure(model)
        return
    structure = st.tree.structure(model)
    walked.clear()
    assert st.tree.structure(model) is structure
    assert not walked


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
@pytest.mark.parametrize("config", CHANGEABLE.values(), ids=list(CHANGEABLE))
def test_what_can_change_or_has_an_equality_of_its_own_is_known_again_by_content(config, walked):
    models = [[Odd(W, config), Odd(W, config), Odd(jnp.ones(1), copy.deepcopy(config))] for _ in range(3)]
    structures = {st.tree.structure(model) for model in models}
    assert len(structures) == 1
    # What is put together again has the static objects of its own model, so each model is walked once for that.
    models = [st.tree.map(lambda x: x + 1, model) for model in models]
    walked.clear()
    for _ in range(3):
        models = [st.tree.map(lambda x: x + 1, model) for model in models]
    assert not walked
    assert {st.tree.structure(model) for model in models} == structures


def test_a_static_value_that_leads_to_its_own_structure_goes_with_it():
    def make():
        held = []
        for config in (lambda: held, functools.partial(lambda: held)):
            model = Odd(W, config)
            held.append(st.tree.structure(model))
            assert st.tree.structure(model) in held
        return [weakref.ref(structure) for structure in held]

    collect_all()
    before = len(_pack_and_unpack._entries), len(_classes_in_native_walk._tokens.alive)
    references = make()
    gc.collect()
    assert not any(reference() for reference in references)
    assert (len(_pack_and_unpack._entries), len(_classes_in_native_walk._tokens.alive)) == before


def test_keys_that_are_given_up_keep_nothing(monkeypatch):
    monkeypatch.setattr(_pack_and_unpack, "MAX_KEYS", len(_pack_and_unpack._entries) + 3)
    structures = []
    for _ in range(8):
        function = types.FunctionType((lambda: None).__code__, {})
        structures.append((st.tree.structure(Odd(W, function)), weakref.ref(function)))
        assert len(_pack_and_unpack._entries) <= _pack_and_unpack.MAX_KEYS
    for structure, function in structures:
        assert function() is not None  # which the structure holds by itself
        assert st.tree.structure(Odd(W, function())) is structure


BY_VALUE = {
    "a long tuple": lambda: tuple(str(i) for i in range(2000)),
    "a long text": lambda: "text " * 2000,
    "a large number": lambda: 2**100 + 1,
    "a complex number": lambda: complex(1, 2),
    "bytes": lambda: bytes(range(200)),
}


@pytest.mark.parametrize("make", BY_VALUE.values(), ids=list(BY_VALUE))
def test_values_that_are_made_anew_are_known_again_and_keep_nothing(make, walked):
    """By content, whatever object they are."""

    class Named(Mutable):
        pass

    jax.tree_util.register_pytree_node(Named, lambda n: ((n.x,), make()), lambda aux, xs: Named(x=xs[0]))
    structure = st.tree.structure([Named(x=W), Named(x=W)])
    assert st.tree.structure([Named(x=W), Named(x=W)]) is structure
    walked.clear()
    for _ in range(5):
        assert st.tree.structure([Named(x=W), Named(x=W)]) is structure
    assert not walked
    assert len(structure.pins) == 1


def test_structures_met_by_many_threads_while_keys_are_given_up(monkeypatch):
    monkeypatch.setattr(_pack_and_unpack, "MAX_KEYS", 8)

    def work(seed):
        for i in range(300):
            tree = [W, (None,) * (seed + i % 50), str(i)]
            assert st.tree.unflatten(st.tree.structure(tree), [W]) == tree

    at_once(work, 4)
