"""`sharedtree.Module`s come out of the native walk as out of the walk in Python, and are built alike."""

import collections
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, strategies as hst

import sharedtree as st
from sharedtree.core._walk import Rules
from sharedtree.libraries import _sharedtree_module, _sharedtree_module_kinds
from tests.kinds import Free
from tests.strategies import Pair, Point
from tests.walks import RULES, assert_alike, knows, natively

pytestmark = natively

W = jnp.ones(2)


class Cached(st.Module):
    def __init__(self, weight):
        self.weight = weight

    @functools.cached_property
    def total(self):
        return self.weight.sum()


class WithProperty(st.Module):
    def __init__(self, weight):
        self.weight = weight

    @property
    def first(self):
        return self.weight

    def __getattribute__(self, name):
        return object.__getattribute__(self, name)


def in_another_order():
    module = Free(a=W, b="text", c=W)
    vars(module)["a"] = vars(module).pop("a")
    return module


def past_its_assignments(module, name, value):
    vars(module)[name] = value
    return module


def with_a_cache():
    module = Cached(W)
    assert module.total == 2
    return module


def filled_later():
    module = Free(table={"size": 2}, queue=collections.deque([1]), pair=Point(1, [2]), a=W)
    module.table["w"] = W
    module.queue.append(W)
    module.pair.y.append(W)
    return module


# Whether the native walk reads it by itself.
TREES: dict[str, tuple[Any, bool]] = {
    "marked": (lambda: Free(a=st.parameter(W), b=st.state_field(1), c="text"), True),
    "modules in modules": (lambda: Free(a=[Free(b=W), Pair(W, Free())], c=jax.nn.relu), True),
    "tied": (lambda: (lambda inner: Free(a=inner, b=[inner, inner]))(Free(w=W)), True),
    "empty": (Free, True),
    "static tuples": (lambda: Free(a=W, b=(1, "a", None, 2.0, True), c=()), True),
    "static bytes and a class": (lambda: Free(a=W, b=b"x", c=int, d=1j), True),
    "a static list": (lambda: Free(a=W, b=[1, 2]), False),
    "a nested static tuple": (lambda: Free(a=W, b=((1,),)), False),
    "a static set": (lambda: Free(a=W, b=frozenset({1})), True),
    "filled later": (filled_later, False),
    "other names": (lambda: past_its_assignments(Free(a=W, b="text"), "c", W), False),
    "another order": (in_another_order, False),
    "no kinds": (lambda: past_its_assignments(object.__new__(Free), "a", W), False),
    "no text": (lambda: past_its_assignments(Free(a=W), 1, "x"), False),
    "a cache": (with_a_cache, False),
    "a property": (lambda: WithProperty(W), True),
}


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("name", TREES)
def test_alike(name, rules):
    tree = TREES[name][0]()
    assert_alike([tree, [tree, W]], rules)


@pytest.mark.parametrize("name", TREES)
def test_known_again_and_read_by_itself(name, monkeypatch):
    make, is_read = TREES[name]
    tree = make()
    structure = st.tree.structure(tree)
    assert knows(tree)
    calls = []
    present = _sharedtree_module_kinds.present_kinds
    asked = lambda module: calls.append(module) or present(module)  # noqa: E731
    monkeypatch.setattr(_sharedtree_module_kinds, "present_kinds", asked)
    assert st.tree.structure(tree) is structure
    assert bool(calls) is not is_read


names = hst.sampled_from(["a", "b", "c", "d"])


@hst.composite
def histories(draw):
    """Modules, each with a few assignments, deletions and detours."""
    pool: list[Any] = [W, jnp.zeros(3), Free(), 1, 2.5, "text", None, (1, 2), jax.nn.relu]
    for _ in range(draw(hst.integers(1, 6))):
        module = Free()
        for _ in range(draw(hst.integers(0, 6))):
            name, value = draw(names), draw(hst.sampled_from(pool))
            how = draw(hst.sampled_from(["assign", "parameter", "state", "list", "delete", "past"]))
            try:
                if how == "assign":
                    setattr(module, name, value)
                elif how == "list":
                    setattr(module, name, [value, draw(hst.sampled_from(pool))])
                elif how == "delete":
                    delattr(module, name)
                elif how == "past":
                    vars(module)[name] = value
                else:
                    setattr(module, name, (st.parameter if how == "parameter" else st.state_field)(value))
            except (st.errors.UnregisteredTypeError, AttributeError):
                continue
        pool.append(module)
    return pool[-1]


@pytest.mark.parametrize("rules", [Rules(), Rules(convention="equinox"), Rules(convention="outside")], ids=str)
@given(tree=histories())
def test_whatever_was_done_to_them(rules, tree):
    assert_alike([tree, [tree]], rules)


def test_a_class_that_is_changed_is_left_to_its_functions():
    class Changed(st.Module):
        def __init__(self):
            self.weight = W

    assert _sharedtree_module.native_layout_of(Changed) is not None
    module = Changed()
    structure = st.tree.structure(module)
    Changed._sharedtree_kinds = property(lambda self: _sharedtree_module_kinds.NO_KINDS)
    assert _sharedtree_module.native_layout_of(Changed) is None
    # Its functions find none, so that the kind of what is there follows from the value; it is the same.
    assert st.tree.structure([module]) is not structure
    assert st.tree.leaves([module])[0] is W


@pytest.mark.parametrize(("slot", "value"), [("names", 3), ("names", ()), ("are_static", None), ("are_static", b"")])
def test_kinds_that_were_tampered_with(slot, value):
    module = Free(tampered=W, **{slot: "text"})
    kinds = _sharedtree_module_kinds.stored_kinds(module)
    before = getattr(kinds, slot)
    setattr(kinds, slot, value)
    try:
        assert len(st.tree.leaves(module)) == 1
        assert st.tree.map(lambda x: x, module).tampered is W
    finally:
        setattr(kinds, slot, before)


def test_something_else_in_the_slot():
    module = Free(a=W)
    _sharedtree_module_kinds.store_kinds(module, "text")
    with pytest.raises(AttributeError):
        st.tree.leaves(module)
