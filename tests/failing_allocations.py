"""Lets each allocation of the native walk fail in turn. It may crash, so it is a process of its own.

`python -m tests.failing_allocations` fails if an outcome is neither a MemoryError nor what it is when there is memory,
or if what comes after does not work. Exits with 77 where the interpreter cannot make allocations fail.

JAX itself crashes when the memory for a bound method is missing, so what the native walk calls gets all the memory that
it wants. Between two such calls is a *stretch*; allocations fail in one stretch at a time.
"""

import functools
import itertools
import sys
import types
from collections.abc import Callable
from typing import Any

import equinox as eqx
from jax import tree_util as jtu

from sharedtree.core import _classes_in_native_walk, _node_types, _pack_and_unpack, _static_values, _structure, _walk
from sharedtree.core._call_arguments import Arguments
from sharedtree.core._pack_and_unpack import Tags, build, pack
from sharedtree.core._structure import Structure, intern
from sharedtree.core._walk import Rules
from sharedtree.ties._policy_and_context import Policy
from sharedtree.transforms._caller_side import SINGLE_GROUP, CallPattern, CallSettings, Plan
from sharedtree.transforms._leaf_groups import LeafGroup, LeafSelection
from tests.kinds import KINDS, W
from tests.strategies import Pair

try:
    import _testcapi
except ImportError:
    sys.exit(77)

native: Any = _pack_and_unpack.native
RULES = Rules()


class Shortage:
    """Which allocations fail: from the `first` one on, up to the one before `stop` (0: for ever), in one stretch."""

    def __init__(self) -> None:
        self.stretch, self.first, self.stop = 0, 0, 0
        self.num_stretches = -1  # that began; -1 where nothing is to fail
        self.num_calls = 0  # under way that have all the memory that they want, each in the one before

    def begin(self, stretch: int, first: int, stop: int) -> None:
        self.stretch, self.first, self.stop, self.num_stretches = stretch, first, stop, 0
        self.num_calls = 1
        self.go_on()

    def pause(self) -> None:
        self.num_calls += 1
        _testcapi.remove_mem_hooks()

    def go_on(self) -> None:
        self.num_calls -= 1
        if self.num_stretches >= 0 and self.num_calls == 0:
            self.num_stretches += 1
            if self.num_stretches == self.stretch + 1:
                _testcapi.set_nomemory(self.first, self.stop)

    def end(self) -> tuple[bool, bool]:
        """Whether the stretch was reached, and whether it had fewer allocations than the first that was to fail."""
        is_reached, is_past = self.num_stretches > self.stretch, self.num_stretches > self.stretch + 1
        try:
            is_past = is_past or has_memory()
        except MemoryError:
            is_past = False
        _testcapi.remove_mem_hooks()
        self.num_stretches = -1
        return is_reached, is_past


def has_memory() -> bool:
    """Whether an allocation succeeds."""
    try:
        return bool(bytearray(1))
    except MemoryError:
        return False


shortage = Shortage()


def with_memory(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with all the memory that it wants."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        shortage.pause()
        try:
            return function(*args, **kwargs)
        finally:
            shortage.go_on()

    return wrapped


def let_others_have_memory() -> None:
    """Before the native walk has met any class, for it keeps what it was told."""
    describe = _classes_in_native_walk._describe_object
    _classes_in_native_walk._describe_object_with_memory = with_memory(
        types.FunctionType(describe.__code__, describe.__globals__)
    )
    describe.__code__ = (lambda obj, number: _describe_object_with_memory(obj, number)).__code__  # noqa: F821 -- in that file
    find_tokens = _classes_in_native_walk._tokens_for
    _classes_in_native_walk._tokens_for_with_memory = with_memory(
        types.FunctionType(find_tokens.__code__, find_tokens.__globals__)
    )
    find_tokens.__code__ = (lambda values, is_exact: _tokens_for_with_memory(values, is_exact)).__code__  # noqa: F821 -- in that file
    remember = _classes_in_native_walk._remember
    _classes_in_native_walk._remember_with_memory = with_memory(
        types.FunctionType(remember.__code__, remember.__globals__)
    )
    remember.__code__ = (lambda *args: _remember_with_memory(*args)).__code__  # noqa: F821 -- in that file
    compiled = _classes_in_native_walk._compile
    _classes_in_native_walk._compile_with_memory = with_memory(
        types.FunctionType(compiled.__code__, compiled.__globals__)
    )
    compiled.__code__ = (lambda structure: _compile_with_memory(structure)).__code__  # noqa: F821 -- in that file
    flatten = with_memory(jtu.default_registry.flatten_one_level)
    registry = types.SimpleNamespace(flatten_one_level=flatten)
    _classes_in_native_walk.jtu = types.SimpleNamespace(default_registry=registry)
    unflatten_of = _structure.maker_of
    _structure.maker_of = with_memory(lambda *args: with_memory(unflatten_of(*args)))
    _node_types.rebuild_registered = with_memory(_node_types.rebuild_registered)
    _static_values.copy_of = with_memory(_static_values.copy_of)
    _static_values.key_of = with_memory(_static_values.key_of)


class Packed:
    """What the walk in Python gives, to compare with."""

    def __init__(self, tree: Any, before: Any) -> None:
        tags = _walk.Tags()
        _walk.walk(before, tags)
        self.base = len(tags.objects)
        self.leaves, records, root = _walk.walk(tree, tags)
        self.structure = intern(records, root, self.base)
        self.objects = tags.objects
        self.numbers = [tags.number_of(obj) for obj in tags.objects]

    def check(self, leaves: Any, structure: Any, tags: Any) -> None:
        """That another walk gave the same."""
        assert [id(leaf) for leaf in leaves] == [id(leaf) for leaf in self.leaves]  # alive in both
        if type(structure) is Structure:
            assert structure is self.structure
        else:
            assert (structure.records, structure.root) == (self.structure.records, self.structure.root)
        assert [id(obj) for obj in tags.objects] == [id(obj) for obj in self.objects]  # alive in both
        assert [tags.number_of(obj) for obj in tags.objects] == self.numbers


def each_failure(prepare: Callable[[], Any], act: Callable[[Any], Any], check: Callable[[Any, Any], None]) -> list[int]:
    """Calls a function with each of its allocations failing: that one, or all from that one on in its stretch.

    `check` gets what was prepared, and what came out, or the error. Returns how many allocations each stretch has.
    """
    counts: list[int] = []
    for stretch in itertools.count():
        for first in itertools.count():
            for stop in (first + 1, 0):
                prepared = prepare()
                outcome = None
                native.drop_spares()
                shortage.begin(stretch, first, stop)
                try:
                    outcome = act(prepared)
                except MemoryError as error:
                    outcome = error
                is_reached, is_past = shortage.end()
                check(prepared, outcome)
            if not is_reached:
                return counts
            if is_past:
                counts.append(first)
                break
    return counts


def failures_of_walk(make: Callable[[], Any], before: Any, known: dict[Any, Any]) -> list[int]:
    """Without memory it raises, or gives None, and has taken back all numbers."""
    trees: list[Any] = []

    def prepare() -> Any:
        trees[:] = [make()]
        tags = Tags()
        _walk.walk(before, tags)
        return tags

    def check(tags: Any, outcome: Any) -> None:
        expected = Packed(trees[0], before)
        if outcome is not None and not isinstance(outcome, MemoryError):
            expected.check(*outcome, tags)
            return
        # Even to make a list shorter takes memory, for a moment.
        assert len(tags.objects) == expected.base or isinstance(outcome, MemoryError)
        tags.forget(expected.base)
        # In spite of all, the same tags serve the same walk.
        expected.check(*pack(trees[0], tags), tags)

    return each_failure(
        prepare, lambda tags: native.walk(trees[0], tags, _pack_and_unpack.flags_of(RULES), known), check
    )


def failures_of_build(tree: Any) -> list[list[int]]:
    """The way back, and to the program, whose steps are made in Python."""
    leaves, structure = pack(tree, Tags())

    def act(table: list[Any]) -> Any:
        build(structure, leaves, table)
        return table

    def check(table: list[Any], outcome: Any) -> None:
        if isinstance(outcome, MemoryError):
            assert len(table) <= len(structure.records)
        else:
            again = pack(outcome[structure.root], Tags())
            assert [id(leaf) for leaf in again[0]] == [id(leaf) for leaf in leaves]  # alive in both
            assert again[1] is structure

    steps = tuple([tuple(_classes_in_native_walk._step(*record)) for record in structure.records])
    program = functools.partial(native.Program, steps, None, structure.root, False, False)
    return [each_failure(list, act, check), each_failure(list, lambda _: program(), lambda *_: None)]


def failures_of_tags() -> list[int]:
    """What Python calls of them."""
    objects = [[] for _ in range(100)]

    def act(_: Any) -> None:
        tags = Tags()
        for i, each in enumerate(objects):
            assert tags.add(each, tag=True) == i
        tags.forget(30)
        assert [tags.number_of(each) for each in objects[29:31]] == [29, None]

    return each_failure(lambda: None, act, lambda *_: None)


def failures_of_call(tree: Any) -> list[int]:
    """A whole call of a function that returns what it gets, in a hand of its own."""
    pair = object.__new__(Pair)  # for Equinox flattens what it is given
    pair.__dict__.update(first=tree, second=W)
    rules, arguments = Rules(convention="outside"), Arguments(("pair",), (pair,), {})
    _, structure = pack(arguments, Tags(), rules)
    structure.plans[()] = Plan(structure, None, tuple(SINGLE_GROUP), (LeafSelection(structure),), (None,), ())
    _, of_result = pack(pair, Tags())
    function = with_memory(lambda hand: LeafGroup(pack(pair, Tags())[0], LeafSelection(of_result)))
    transformed = {tuple(SINGLE_GROUP): function}
    pattern = CallPattern(arguments.aux, None, (), None, donates=True, latest=native.Latest(), functions=transformed)
    settings = CallSettings(Policy(), _pack_and_unpack.flags_of(rules), {1: pattern}, False, True, lambda _: None)

    def check(_: Any, outcome: Any) -> None:
        assert outcome is not None
        if type(outcome) is Pair:
            assert pack(outcome, Tags())[1] is of_result

    return each_failure(lambda: None, lambda _: native.call(settings, (pair,), {}), check)


def new_class() -> Any:
    """An instance of a class that the native walk has not met."""

    class New(eqx.Module):
        weight: Any

    return New(W)


def main() -> None:
    """Every kind in turn."""
    let_others_have_memory()
    others = [[i] for i in range(20)]
    for _ in range(30):
        sys.stdout.write(f"a new class: {failures_of_walk(new_class, (), {})}\n")
    sys.stdout.write(f"tags: {failures_of_tags()}\n")
    for name, make in KINDS.items():
        tree = make()
        pack(tree, Tags())
        known = _pack_and_unpack._entries
        walks = [failures_of_walk(lambda: tree, *args) for args in (((), known), (others, known), ((), {}))]
        sys.stdout.write(f"{name}: {walks}, {failures_of_build(tree)}, {failures_of_call(tree)}\n")


if __name__ == "__main__":
    main()
    sys.stdout.write("survived\n")
