"""No lock of the package is held while a user's code runs, and none is found taken in the child of a fork."""

import ast
import pathlib

import jax
import jax.numpy as jnp
import pytest

import sharedtree as st
from sharedtree.core import _locks
from tests.kinds import Noted
from tests.processes import program, run

PACKAGE = pathlib.Path(st.__file__).parent
OF_ONE_CALL = {"serialise/container/_byte_sources.py"}
"""These files have locks for the threads that one call starts and waits for."""


def test_every_lock_is_one_that_a_fork_frees():
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in {"Lock", "RLock", "Condition", "Semaphore", "Event"}:
                found.add(path.relative_to(PACKAGE).as_posix())
    assert found == {"core/_locks.py"} | OF_ONE_CALL


SCRIPT = program("fork_with_locks")


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="the system does not fork")
@pytest.mark.slow
def test_a_child_of_a_fork_finds_no_lock_taken_and_no_room_of_other_threads():
    assert run(SCRIPT).split() == ["0"]


def test_a_lock_that_the_forking_thread_holds_is_left_without_an_error():
    lock = _locks.Lock()
    with lock, lock:
        lock.renew()
    with lock:
        pass


@pytest.fixture
def num_held(monkeypatch):
    """How many locks are held, in a list."""
    held = [0]
    enter, leave = _locks.Lock.__enter__, _locks.Lock.__exit__

    def entered(lock):
        enter(lock)
        held[0] += 1

    def left(lock, *error):
        held[0] -= 1
        leave(lock, *error)

    monkeypatch.setattr(_locks.Lock, "__enter__", entered)
    monkeypatch.setattr(_locks.Lock, "__exit__", left)
    monkeypatch.setattr(Watching, "held", held)
    Watching.seen.clear()
    yield held
    assert held == [0]


class Watching:
    """A static value, whose every method looks whether a lock is held."""

    held = [0]
    seen: list[int] = []

    def __init__(self, number):
        self.number = number

    def __eq__(self, other):
        self.seen.append(self.held[0])
        return type(other) is Watching and self.number == other.number

    def __hash__(self):
        self.seen.append(self.held[0])
        return 7

    def __deepcopy__(self, memo):
        self.seen.append(self.held[0])
        return Watching(self.number)


class Unhashable(Watching):
    __eq__ = Watching.__eq__
    __hash__ = None


@jax.tree_util.register_pytree_node_class
class Node:
    """A class whose registered functions look, too."""

    def __init__(self, *children):
        self.children = children

    def tree_flatten(self):
        Watching.seen.append(Watching.held[0])
        return self.children, Watching(len(self.children))

    @classmethod
    def tree_unflatten(cls, aux, children):
        Watching.seen.append(Watching.held[0])
        return cls(*children)


VALUES = {
    "one": lambda: Watching(1),
    "unhashable": lambda: Unhashable(1),
    "many, shared": lambda: (lambda x: [x, x, {"a": (x,)}])([Watching(i) for i in range(300)]),
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.slow
def test_no_lock_is_held_while_static_values_are_compared(name, num_held):
    make = VALUES[name]
    for _ in range(2):
        model = [Noted(jnp.ones(2), make()), Node(jnp.ones(2))]
        model.append(model[0])
        structure = st.tree.structure(model)
        assert structure == st.tree.structure(model)
        st.tree.unflatten(structure, st.tree.leaves(model))
        st.jit(lambda m: st.tree.map(lambda x: 2 * x, m))(model)
        st.ties(model)
    assert Watching.seen
    assert not any(Watching.seen)


def test_no_lock_is_held_while_options_are_compared(num_held):
    def transform(function, *, option):
        return function

    def function(x):
        return x

    for number in (1, 2, 1, 2):
        st.preserve_identities(transform)(function, option=Watching(number))(jnp.ones(2))
        st.jit(function, static_argnums=())(jnp.ones(2))
        st.jit(lambda x, config: x, static_argnums=1)(jnp.ones(2), Watching(number))
    assert not any(Watching.seen)
