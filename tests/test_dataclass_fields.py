"""Dataclasses that are read and built field by field come out as vanilla JAX has them, and so do those that are not."""

import abc
import dataclasses
import functools
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given

import sharedtree as st
from sharedtree.core import _classes_in_native_walk
from sharedtree.core._pack_and_unpack import native
from sharedtree.core._walk import Rules
from sharedtree.libraries._dataclasses import fields_of
from tests.in_jax import assert_as_in_jax
from tests.kinds import LyingDict
from tests.strategies import pools_of_classes
from tests.walks import RULES, assert_alike, knows, natively

W, V, X, Y = jnp.ones(2), jnp.zeros(3), jnp.ones(4), jnp.ones(5)
STATIC = {"static": True}
T = TypeVar("T")


def registered(cls=None, **options):
    if cls is None:
        return functools.partial(registered, **options)
    return jax.tree_util.register_dataclass(dataclasses.dataclass(cls, **options))


@registered
class Plain:
    a: Any
    n: int = dataclasses.field(metadata=STATIC)
    b: Any


@registered(frozen=True)
class Frozen:
    a: Any
    n: int = dataclasses.field(metadata=STATIC)


@registered(slots=True)
class Slots:
    n: int = dataclasses.field(metadata=STATIC)
    a: Any
    b: Any = None


@registered
class Keywords:
    n: int = dataclasses.field(metadata=STATIC, kw_only=True)
    a: Any
    b: Any = dataclasses.field(kw_only=True, default=5)


@registered
class Defaults:
    a: Any = None
    b: list = dataclasses.field(default_factory=list)
    n: tuple = dataclasses.field(metadata=STATIC, default=())


@registered
class Inherits(Plain):
    c: Any


@registered
class OfType(Generic[T], metaclass=abc.ABCMeta):
    a: T


@registered
class Empty:
    pass


@registered
class NamedSelf:
    self: Any
    cls: Any


@functools.partial(jax.tree_util.register_dataclass, data_fields=["b", "self"], meta_fields=["n", "a"])
@dataclasses.dataclass
class Reordered:
    a: str
    self: Any
    n: int
    b: Any


class SlotsBelow:
    __slots__ = ("other",)


@registered(slots=True)
class SlotsUnderSlots(SlotsBelow):
    a: Any


READ = {
    "plain": lambda: Plain(W, 1, [X, V]),
    "frozen": lambda: Frozen(W, (1, "a")),
    "slots": lambda: Slots(1, W, V),
    "keywords only": lambda: Keywords(W, n=3, b=V),
    "defaults": lambda: Defaults(),
    "a decorated subclass": lambda: Inherits(W, 1, V, X),
    "generic and abstract": lambda: OfType(W),
    "no fields": lambda: Empty(),
    "fields with awkward names": lambda: NamedSelf(W, V),
    "another order": lambda: Reordered("a", W, 1, V),
    "slots under slots": lambda: SlotsUnderSlots(W),
    "a mutable static value": lambda: Plain(W, [1, {"a": 2}], V),
    "a long static value": lambda: Frozen(W, tuple(range(5_000))),
}


# --- what is left to the registered functions, as are the classes of `CHANGES` --------------------------------------


@registered
class WithInitVar:
    a: Any
    scale: dataclasses.InitVar[int] = 1


class Undecorated(Plain):
    pass


jax.tree_util.register_dataclass(Undecorated, ["a", "b"], ["n"])


@dataclasses.dataclass
class Drops:
    a: Any
    x: int = 7


jax.tree_util.register_dataclass(Drops, ["a"], [], drop_fields=["x"])


@functools.partial(jax.tree_util.register_dataclass, data_fields=["a"], meta_fields=[])
@dataclasses.dataclass
class NotInitialised:
    a: Any
    made: list = dataclasses.field(init=False, default_factory=list)


class Calls(type):
    def __call__(cls, *args, **kwargs):
        obj = super().__call__(*args, **kwargs)
        obj.called = True
        return obj


@registered
class OwnCall(metaclass=Calls):
    a: Any


@registered
class SlotsBase:
    __slots__ = ("a",)
    a: Any


@registered
class SlotsAndDictionary(SlotsBase):
    b: Any


@registered
class OfAnException(Exception):
    a: Any


class OwnDictionary:
    @property
    def __dict__(self):
        return {"a": 5}


@registered
class HidesAttributes(OwnDictionary):
    a: Any


LEFT = {
    "an InitVar": lambda: WithInitVar(W),
    "an undecorated subclass": lambda: Undecorated(W, 1, V),
    "a dropped field": lambda: Drops(W, 8),
    "a field that is not initialised": lambda: NotInitialised(W),
    "its own __call__": lambda: OwnCall(W),
    "slots and a dictionary": lambda: SlotsAndDictionary(W, V),
    "an exception": lambda: OfAnException(W),
    "another dictionary": lambda: HidesAttributes(W),
}


# --- instances that are not as their class says ----------------------------------------------------------------------


@registered
class Cached:
    a: Any
    n: int = dataclasses.field(metadata=STATIC, default=4)

    @functools.cached_property
    def twice(self):
        return (self.a, self.a)


@registered
class Sibling:
    n: int
    a: Any


def with_dictionary(attributes):
    obj = object.__new__(Cached)
    obj.__dict__ = attributes
    return obj


def cached():
    obj = Cached(W)
    assert obj.twice
    return obj


def without(obj, name):
    delattr(obj, name)
    return obj


def as_another(obj, cls):
    obj.__class__ = cls
    return obj


INSTANCES = {
    "an attribute more": cached,
    "a field less, with a default": lambda: without(Cached(W, 5), "n"),
    "one more and one less": lambda: without(cached(), "n"),
    "a field less": lambda: without(Cached(W, 5), "a"),
    "a slot less": lambda: without(Slots(1, W, V), "a"),
    "nothing": lambda: object.__new__(OfType),
    "another order": lambda: with_dictionary({"n": 1, "a": W}),
    "names that are not interned": lambda: with_dictionary({"".join(map(chr, [97])): W, "".join(map(chr, [110])): 5}),
    "a dictionary of a subclass": lambda: with_dictionary(LyingDict(a=W, n=1)),
    "a key that is no text": lambda: with_dictionary({"a": W, 5: 1}),
    "a class of the same layout": lambda: as_another(Cached(W), Sibling),
}

ALL = READ | LEFT | INSTANCES


@pytest.mark.parametrize("make", ALL.values(), ids=ALL)
def test_a_dataclass_is_what_it_is_in_jax(make):
    assert_as_in_jax(make())
    assert_as_in_jax([make()])


def test_which_dataclasses_are_read_field_by_field():
    assert [name for name, make in READ.items() if fields_of(type(make())) is None] == []
    assert [name for name, make in LEFT.items() if fields_of(type(make())) is not None] == []
    assert [cls for cls in (int, list, jax.tree_util.Partial, st.Dag) if fields_of(cls) is not None] == []


@natively
@pytest.mark.parametrize("name", sorted(ALL.keys() - {"nothing", "a field less", "a slot less"}))
def test_both_walks_agree_and_what_is_common_is_known_again(name):
    tree = ALL[name]()
    for rules in RULES:
        assert_alike([tree, [tree, ALL[name]()], tree], rules)
    if name in READ and "value" not in name:
        _, structure = st.tree.flatten(tree)
        assert knows(tree), structure


@natively
def test_hooks_are_not_needed(monkeypatch):
    """Where a class is read field by field, JAX is not asked for its instances."""
    tree = [make() for name, make in READ.items() if "mutable" not in name]
    leaves, structure = st.tree.flatten(tree)

    def fail(*_):
        raise AssertionError

    monkeypatch.setattr(Plain, "__init__", fail)
    monkeypatch.setattr(Slots, "__init__", fail)
    found, same = st.tree.flatten(tree)
    assert same is structure
    assert all(a is b for a, b in zip(found, leaves, strict=True))
    assert type(st.tree.unflatten(structure, leaves)[0]) is Plain


MADE = {
    "plain": lambda pick, static: Plain(pick(), static, pick()),
    "frozen": lambda pick, static: Frozen(pick(), static),
    "slots": lambda pick, static: Slots(static, pick(), pick()),
    "reordered": lambda pick, static: Reordered(static, pick(), static, pick()),
    "cached": lambda pick, static: Cached(pick(), static),
    "cached, with the value": lambda pick, static: (lambda made: (made.twice, made)[1])(Cached(pick(), static)),
    "left": lambda pick, static: Undecorated(pick(), static, pick()),
    "other": None,
}


@natively
@given(pool=pools_of_classes(MADE))
def test_random_dags(pool):
    assert_alike([Plain(pool[-1], "top", list(pool)), pool[-1]], Rules())


def wrapped_init(cls):
    init = cls.__init__

    @functools.wraps(init)
    def twice(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.beyond = 1

    cls.__init__ = twice


def forged_init(cls):
    namespace = {}
    exec("def __init__(self, a, b):\n self.a = a\n self.b = b\n self.forged = 1", namespace)
    cls.__init__ = namespace["__init__"]


def other_code(cls):
    def __init__(self, a, b):
        self.a = b
        self.b = a

    cls.__init__.__code__ = __init__.__code__


def own_new(cls, *_, **__):
    obj = object.__new__(cls)
    obj.new = 1
    return obj


def another_field(cls):
    dataclasses.fields(cls)[0].init = False


def setting(name, value):
    return lambda cls: setattr(cls, name, value)


NO_SLOTS, BOTH = (False,), (False, True)
CHANGES = {
    # With slots there is no room for what these set.
    "__post_init__": (setting("__post_init__", lambda self: setattr(self, "post", 1)), NO_SLOTS),
    "__new__": (setting("__new__", own_new), NO_SLOTS),
    "wrapped __init__": (wrapped_init, NO_SLOTS),
    "forged __init__": (forged_init, NO_SLOTS),
    "__setattr__": (setting("__setattr__", lambda self, name, x: object.__setattr__(self, name, [x])), BOTH),
    "__getattribute__": (
        setting("__getattribute__", lambda self, name: Y if name == "a" else object.__getattribute__(self, name)),
        BOTH,
    ),
    "a property": (setting("a", property(lambda self: Y, lambda self, value: None)), BOTH),
    "other code": (other_code, BOTH),
    "another field": (another_field, BOTH),
}


@pytest.mark.parametrize("is_met", [False, True], ids=["new", "met"])
@pytest.mark.parametrize(("change", "with_slots"), CHANGES.values(), ids=list(CHANGES))
def test_a_class_that_is_changed(change, with_slots, is_met):
    """Of one that was met the change is seen when the next structure is made, and from then on."""
    for slots in with_slots:

        @registered(slots=slots)
        class Changed:
            a: Any
            b: Any

        obj = Changed(W, V)
        if is_met:
            assert_as_in_jax(obj)
            if native is not None:
                assert Changed in _classes_in_native_walk._layouts_in_use
        change(Changed)
        for tree in ([obj], obj, [obj, X], Changed(W, V)):
            assert_as_in_jax(tree)
        assert Changed not in _classes_in_native_walk._layouts_in_use
        assert fields_of(Changed) is None
        if native is not None:
            for rules in RULES:
                assert_alike([obj, [obj, Changed(W, V)], obj], rules)


def test_more_fields_than_fit_and_two_classes_of_one_name():
    fields = [(f"field{i}", Any, dataclasses.field(default=i)) for i in range(300)]
    for count, are_read in ((300, False), (255, True)):
        cls = jax.tree_util.register_dataclass(dataclasses.make_dataclass("Wide", fields[:count]))
        assert (fields_of(cls) is not None) == are_read
        assert_as_in_jax(cls())
    for order in ((int, str), (str, int)):

        @registered
        class Same:
            a: order[0]
            b: order[1] = dataclasses.field(metadata=STATIC)

        assert_as_in_jax([Same(W, 1), Same(V, 2)])


def test_the_classes_of_flax():
    struct = pytest.importorskip("flax.struct")

    @struct.dataclass
    class Decorated:
        a: Any
        n: int = struct.field(pytree_node=False)
        b: Any = None

    class Inherited(struct.PyTreeNode):
        a: Any
        apply: Any = struct.field(pytree_node=False, default=jnp.sin)

    for obj in (Decorated(W, 1, [X, Y]), Inherited(W), Inherited(Decorated(W, 2)), Decorated(W, [1])):
        assert fields_of(type(obj)) is not None
        assert_as_in_jax([obj, V])
        if native is not None:
            assert_alike([obj, (obj, obj)], Rules())


@natively
@pytest.mark.parametrize("meta", [["a", "b"], ["b", "a"]], ids=str)
@pytest.mark.parametrize("data", [["w", "v"], ["v", "w"]], ids=str)
def test_fields_that_are_registered_in_another_order(data, meta):
    """What two instances have in fields of the same sort is not taken for one another's."""

    @functools.partial(jax.tree_util.register_dataclass, data_fields=data, meta_fields=meta)
    @dataclasses.dataclass
    class Ordered:
        a: int
        w: Any
        b: int
        v: Any

    objects = [Ordered(1, W, 2, V), Ordered(2, W, 1, V), Ordered(2, V, 1, W)]
    for _ in range(3):
        for obj in objects:
            assert_alike([obj], Rules())
            leaves, structure = st.tree.flatten(obj)
            made = st.tree.unflatten(structure, leaves)
            assert (made.a, made.b) == (obj.a, obj.b)
            assert made.w is obj.w
            assert made.v is obj.v
    assert all(map(knows, objects))
