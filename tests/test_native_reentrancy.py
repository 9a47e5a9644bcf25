"""What a user's code may do to a model while the native walk is in it, or builds it: anything.

A walk of what changes meanwhile may end in an error, but not in a crash, and what it gives is consistent in itself.
Afterwards, when the model is left alone, both walks agree on it: nothing of what went wrong is remembered.
"""

import collections
import contextlib
import gc
import itertools
import threading
import weakref
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharedtree as st
from sharedtree.core import _walk
from sharedtree.core._class_attributes import dict_descriptor
from sharedtree.core._pack_and_unpack import Tags, build, flags_of, native
from sharedtree.core._structure import Given, Update, intern
from sharedtree.core._walk import Rules
from sharedtree.ties import _policy_and_context
from tests.strategies import Mutable, Pair, Record
from tests.threads import at_once
from tests.walks import natively

pytestmark = natively


class Model(eqx.Module):
    weight: Any
    parts: Any
    note: Any = eqx.field(static=True)


class Other(eqx.Module):
    parts: Any
    else_: Any


class Attributes(dict):
    """Takes the place of a `__dict__`, and lies."""

    def __getitem__(self, name: str) -> Any:
        raise LookupError(name)


def fresh(value: float = 0.0) -> Any:
    """An array that nobody else has."""
    return np.full(2, value, np.float32)


def new_model() -> Any:
    """Every kind, each object with nobody else to keep it alive."""
    model = object.__new__(Model)
    note = ["\ud800", {"\udfff": [object], "b": 2**80}, jnp.tanh]
    parts = [
        [fresh(), [fresh()], "text", 3],
        {"b": fresh(), "a": {"\ud801": fresh(), "z": 2}, "\udc00": [fresh()]},
        collections.OrderedDict(b=fresh(), a=1),
        (fresh(), (fresh(),)),
        Pair(fresh(), Pair(fresh(), "text")),
        Record(fresh(), [fresh()], "name"),
        Mutable(a=fresh(), b=[fresh()]),
        {f"name{i * 7 % 50}": fresh() for i in range(50)},
    ]
    vars(model).update(weight=fresh(), parts=parts, note=note)
    return model


def attributes_of(model: Any) -> dict[str, Any]:
    return dict_descriptor(type(model)).__get__(model)


def parts_of(model: Any) -> list[Any]:
    return attributes_of(model).get("parts") or []


def clear_all_containers(model):
    for part in parts_of(model):
        if isinstance(part, (list, dict)):
            part.clear()


def clear_statics(model):
    note = attributes_of(model).get("note")
    if isinstance(note, list):
        for part in list(note):
            if isinstance(part, dict):
                part.clear()
        note.clear()


def lengthen(model):
    for part in parts_of(model):
        if isinstance(part, list) and len(part) < 300:
            part[:0] = [fresh() for _ in range(100)]
        elif isinstance(part, dict):
            part.update({f"new{i}": fresh() for i in range(100)})


def replace_the_dictionary(model, cls=dict):
    dict_descriptor(type(model)).__set__(model, cls(weight=fresh(), parts=None, note=1))


def flatten_again(model):
    with contextlib.suppress(Exception):
        st.tree.flatten(model)


def new_parts() -> Any:
    return Pair([fresh(), fresh()], {"b": 1, "a": fresh()})


def fail(error):
    raise error


CHANGES = {
    "clear a list": lambda model: parts_of(model).clear(),
    "clear all containers": clear_all_containers,
    "clear statics": clear_statics,
    "lengthen": lengthen,
    "replace parts": lambda model: attributes_of(model).update(parts=[fresh()]),
    "replace the dictionary": replace_the_dictionary,
    "replace the dictionary by a subclass": lambda model: replace_the_dictionary(model, Attributes),
    "empty the dictionary": lambda model: attributes_of(model).clear(),
    "fill the dictionary": lambda model: attributes_of(model).update({f"new{i}": fresh() for i in range(100)}),
    "change the class": lambda model: object.__setattr__(model, "__class__", Other),
    "flatten something else": lambda _: st.tree.unflatten(*reversed(st.tree.flatten(new_parts()))),
}
ACTIONS = CHANGES | {
    "collect": lambda _: gc.collect(1),
    "flatten again": flatten_again,
    "interrupt": lambda _: fail(KeyboardInterrupt),
    "fail": lambda _: fail(MemoryError),
}


class Hook:
    """Does what it is to do as often as it is called while it is armed."""

    def __init__(self) -> None:
        self.action: Any = None
        self.is_running = False

    def __call__(self, *_: Any) -> None:
        if self.action is not None and not self.is_running:
            self.is_running = True
            try:
                self.action()
            finally:
                self.is_running = False


hook = Hook()


# Registered classes that do it when they are taken apart (the last one unknown to JAX), and put together; and one with
# children that exist only while it is walked, and that do it when they go.
InFlatten, InRegisterNode, InUnflatten, InMadeChildren = (
    type(name, (), {}) for name in ("InFlatten", "InRegisterNode", "InUnflatten", "InMadeChildren")
)


def guarded_hook(*_: Any) -> None:
    """What a finaliser raises is printed and goes no further."""
    with contextlib.suppress(BaseException):
        hook()


class Going(list):
    """A leaf that does it when it is freed."""

    __del__ = guarded_hook


def take_apart_made(_: Any) -> Any:
    going = fresh()
    # Nobody else keeps it.
    weakref.finalize(going, guarded_hook)
    return ([Pair(going, Going()), (Going(),)], Going()), None


jax.tree_util.register_pytree_node(InFlatten, lambda _: (hook() or (), None), lambda *_: InFlatten())
jax.tree_util.register_pytree_node(InUnflatten, lambda _: ((), None), lambda *_: hook() or InUnflatten())
jax.tree_util.register_pytree_node(InMadeChildren, take_apart_made, lambda *_: InMadeChildren())
st.register_node(InRegisterNode, lambda _: (hook() or (), None), lambda *_: InRegisterNode())


class InComparison:
    """A static value that does it when it is compared or hashed."""

    def __eq__(self, other: object) -> bool:
        hook()
        return type(other) is InComparison

    def __hash__(self) -> int:
        hook()
        return 1


class KeyWithHook:
    """A key that does it when it is looked for, and takes itself for the text `note`."""

    def __hash__(self) -> int:
        return hash("note")

    def __eq__(self, other: object) -> bool:
        hook()
        return self is other


class TextWithHook(str):
    """A key of a dictionary that does it when it is sorted."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __lt__(self, other: Any) -> bool:
        hook()
        return str.__lt__(self, other)

    def __eq__(self, other: object) -> bool:
        hook()
        return str.__eq__(self, other)


class Meta(type):
    """Of a class that does it when its attributes are asked for."""

    def __getattr__(cls, name: str) -> Any:
        hook()
        raise AttributeError(name)


class OfMeta(metaclass=Meta):
    """A leaf."""


def static(value: Any) -> Any:
    model = new_model()
    attributes_of(model)["note"] = value
    return model


def with_odd_key() -> Any:
    model = new_model()
    attributes = attributes_of(model)
    del attributes["note"]
    attributes[KeyWithHook()] = 5
    return model


PLACES = {
    "flatten": InFlatten,
    "flatten of register_node": InRegisterNode,
    "unflatten": InUnflatten,
    "children that go": InMadeChildren,
    "a static value": lambda: static(InComparison()),
    "a static value in containers": lambda: static((InComparison(), [InComparison()])),
    "an attribute's name": with_odd_key,
    "keys that are sorted": lambda: {TextWithHook("b"): fresh(), TextWithHook("a"): fresh()},
    "a class": OfMeta,
    "in the middle of a list": lambda: [fresh(), InFlatten(), fresh()],
    "in the middle of a dictionary": lambda: {"a": fresh(), "b": InFlatten(), "c": fresh()},
    "in the middle of a class": lambda: Mutable(a=fresh(), b=InFlatten(), c=fresh()),
}


@contextlib.contextmanager
def armed(action: Any) -> Any:
    hook.action = action
    try:
        yield
    finally:
        hook.action = None


def flatten_and_back(model: Any) -> None:
    leaves, structure = st.tree.flatten(model)
    assert structure.num_leaves == len(leaves)
    for leaf in leaves:
        repr(leaf)
    st.tree.unflatten(structure, leaves)


def assert_agree(model: Any) -> None:
    """Both walks, of a model that is left alone. Some of its leaves may be new each time."""
    try:
        leaves, records, root = _walk.walk(model, _walk.Tags())
    except Exception as error:  # noqa: BLE001 -- whatever the walk in Python says
        with pytest.raises(type(error)):
            st.tree.flatten(model)
        return
    structure = intern(records, root)
    for _ in range(2):
        found, its = st.tree.flatten(model)
        assert its is structure
        assert len(found) == len(leaves)


def assert_survives(make: Any, act: Any) -> None:
    for again in range(3):
        model = make()
        if again:
            # Known to the native walk when it is changed.
            with contextlib.suppress(st.SharedTreeError):
                st.tree.flatten(model)
        with armed(lambda: act(model)), contextlib.suppress(Exception, KeyboardInterrupt):
            flatten_and_back(model)
        if type(model) is not Model or "parts" not in attributes_of(model):
            continue
        assert_agree(model)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("action", ACTIONS.values(), ids=list(ACTIONS))
def test_a_model_that_is_changed_while_it_is_walked(place, action):
    for at in (0, 4):

        def make(at=at):
            model = new_model()
            attributes_of(model)["parts"].insert(at, PLACES[place]())
            return model

        assert_survives(make, action)


@pytest.mark.parametrize("action", ACTIONS.values(), ids=list(ACTIONS))
def test_in_one_context(action):
    def make():
        model = new_model()
        attributes_of(model)["parts"][1:1] = [InFlatten(), InMadeChildren()]
        return model

    for _ in range(3):
        model = make()
        with st.Context(), armed(lambda model=model: action(model)):
            for _ in range(3):
                with contextlib.suppress(Exception, KeyboardInterrupt):
                    flatten_and_back([model, model, new_parts()])


@pytest.mark.slow
@pytest.mark.parametrize("action", CHANGES.values(), ids=list(CHANGES))
def test_garbage_that_is_collected_in_the_middle(action):
    """Until Python 3.12 any allocation may collect; later ones do so between two instructions of Python."""
    threshold = gc.get_threshold()
    calls = 0

    def act(phase: str, _: Any) -> None:
        nonlocal calls
        calls += hook.action is not None
        gc.disable()
        try:
            if calls < 50:
                hook()
        finally:
            gc.enable()

    for allocations in (1, 2, 3, 5, 8):
        calls = 0
        gc.callbacks.append(act)
        gc.set_threshold(allocations)
        try:
            assert_survives(new_model, action)
            assert_survives(lambda: Pair(new_model(), InFlatten()), lambda pair: action(pair.first))
        finally:
            gc.callbacks.remove(act)
            gc.set_threshold(*threshold)


@pytest.mark.parametrize("action", ACTIONS.values(), ids=list(ACTIONS))
def test_objects_of_the_other_side_that_do_something(action):
    model = new_model()
    leaves, structure = st.tree.flatten(model)
    node = structure.records[-1][0]
    records = (*structure.records, (Given(1), ()), (Update(2, node), structure.records[-1][1]))
    made = intern(records, len(records) - 1)
    for _ in range(3):
        table: list[Any] = []
        with armed(lambda: action(model)), contextlib.suppress(Exception, KeyboardInterrupt):
            build(made, leaves, table, hook, lambda _, content: hook())
        assert len(table) >= len(structure.records)


class Turning:
    """Comes apart into another note each time, as told."""


turns: list[Any] = []
st.register_node(Turning, lambda _: ((), turns.pop(0)()), lambda *_: Turning())


def test_what_an_interrupted_walk_found_is_not_remembered():
    """The first walk saw `a` and the second saw `b`, and whether that is the same is not known."""
    a, b, interrupted = lambda: "a", lambda: "b", lambda: fail(KeyboardInterrupt)
    turns[:] = [a, b, b, interrupted, *[a] * 8]
    with contextlib.suppress(KeyboardInterrupt):
        st.tree.flatten([Turning()])
    del turns[:-8]
    structure = st.tree.structure([Turning()])
    assert structure.records[0][0].aux.peek() == "a"
    turns.clear()


def test_a_table_that_is_cleared_while_it_is_built():
    leaves, structure = st.tree.flatten([[fresh()], InUnflatten(), [fresh()], (fresh(),)])
    for _ in range(3):
        table: list[Any] = []
        with armed(table.clear), pytest.raises(IndexError):
            build(structure, leaves, table)


def test_tags_that_are_forgotten_while_they_are_used():
    model = [fresh(), [fresh()], InFlatten(), InMadeChildren(), [fresh()], fresh()]
    for start in (0, 1, 2):
        for _ in range(3):
            tags = Tags()
            tags.add(model[0], tag=True)
            with armed(lambda tags=tags, start=start: tags.forget(start)), contextlib.suppress(Exception):
                native.walk(model, tags, flags_of(Rules()), {})
            assert all(tags.number_of(obj) in (None, i) for i, obj in enumerate(tags.objects))


@pytest.mark.slow
def test_eight_threads_that_change_what_they_walk():
    """Each outcome is consistent in itself, and none is remembered for what it is not."""
    model = new_model()
    parts = attributes_of(model)["parts"]
    parts.insert(2, InFlatten())
    static_values = [1, True, 1.0, "text", [1], (1, 2)]
    walks = iter(range(4))
    stop = threading.Event()

    def work(i: int) -> None:
        if i < 4:
            for step in itertools.takewhile(lambda _: not stop.is_set(), itertools.count(i)):
                attributes_of(model)["note"] = static_values[step % len(static_values)]
                parts[0][:] = [fresh(step)] * (step % 4)
                parts[1][f"name{step % 5}"] = [fresh()]
                parts[1].pop(f"name{(step + 2) % 5}", None)
                attributes_of(parts[-4])["second"] = fresh() if step % 2 else [fresh()]
            return
        try:
            for _ in range(15):
                with contextlib.suppress(RuntimeError, ValueError, KeyError, IndexError):
                    flatten_and_back(model)
        finally:
            if next(walks) == 3:
                stop.set()

    at_once(work)
    for value in static_values:
        attributes_of(model)["note"] = value
        assert_agree(model)


def test_another_way_while_the_policy_is_asked_for(monkeypatch):
    f = st.jit(lambda x: x + 1, in_place=True)
    x = jnp.ones(2)
    f(x)
    ask = _policy_and_context.with_in_place

    def asked(policy, in_place):
        f.settings = None
        return ask(policy, in_place)

    monkeypatch.setattr(_policy_and_context, "with_in_place", asked)
    assert [f(x).tolist() for _ in range(3)] == [[2, 2]] * 3
