"""`Policy(in_place=True)`: what a function changed in its arguments is written back into the caller's objects.

The function's copies of its arguments are packed again when it returns, each naming the object it was made from. What
did not change is named and nothing more; what did is built anew on the caller's side, and only once everything has
been built is any of it written. So the caller's objects change all together or, if anything raises, not at all.
"""

import collections
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from jax import tree_util as jtu

from .._graph import Rules, Tags, pack
from .._native_walk import write_natively
from .._node_types import Inherited, carries_identity, node_type_of
from .._packed import LeafPath, Packed
from .._structure import LEAF, Node, Path, edges
from ._crossed import Argument, Graph, Names, is_container
from ._packing import Call, pack_tree
from ._passing_through import Unchanged


def rules_for_state(rules: Rules, received: Graph, is_taken: Callable[[int], bool]) -> Rules:
    """Rules under which received objects are named if they are unchanged, and updated otherwise.

    Args:
        rules: the rules otherwise.
        received: what the function received; keeps it alive.
        is_taken: whether the caller's buffers of a record are donated, so that even what is unchanged must come back.
    """
    return _rules_for(rules, received, is_taken, Unchanged(received).is_unchanged)


def packed_changes(
    result: Any, rules: Rules, received: Graph, is_taken: Callable[[int], bool]
) -> tuple[Sequence[Packed], Any]:
    """What a function changed and what it returned, packed so that only what itself changed is written to.

    An object whose parts are the very parts it was received with need not be written to, whatever became of these. So
    the changed objects are packed side by side, those around which one convention holds together, and all others are
    named.

    Args:
        result: what the function returned.
        rules: the rules otherwise.
        received: what it received; keeps it alive.
        is_taken: as for `rules_for_state`.
    """
    rules = _rules_for(rules, received, is_taken, Unchanged(received).is_itself)
    tags = Tags()
    around = conventions(received, rules.convention)
    changed: dict[Inherited, list[Any]] = {}
    for number in rules.updated.values():
        changed.setdefault(around[number], []).append(received.objects[number])
    state = [Packed(*pack(tuple(each), tags, rules._replace(convention=name))) for name, each in changed.items()]
    return state, pack_tree(result, tags, rules, "result")


def pack_detached(
    received: Graph, tags: Tags, rules: Rules, updated: Collection[int], names: Names
) -> list[tuple[int, Argument]]:
    """Packs what a function changed and then took out of its arguments, for whoever holds it sees what became of it.

    Args:
        received: what the function received; keeps it alive.
        tags: with which the arguments were packed again.
        rules: as for them.
        updated: the numbers of the objects that may have been changed.
        names: for paths.

    Returns:
        The outermost of these objects, by their numbers, each with the path at which it came in.
    """
    if not updated:
        return []
    own, around = Unchanged(received), conventions(received, rules.convention)
    roots = [((LeafPath(names.text(a.position, a.path)),), a.structure.root) for a in received.modules]
    paths: dict[int, Path] = {}
    for number, path in edges(received.records, roots):
        paths.setdefault(number, path)
    found: list[tuple[int, Argument]] = []
    for number in sorted(updated, reverse=True):  # what holds others comes after them
        obj = received.objects[number]
        if tags.number_of(obj) is None and not own.is_itself(number):
            name = jtu.keystr(paths[number])
            packed = Packed(*pack(obj, tags, rules._replace(convention=around[number]), name))
            found.append((number, Argument(name, (), packed)))
    return found


def conventions(received: Graph, outside: Inherited) -> dict[int, Inherited]:
    """The convention around each received record, on the first path to it, as a walk has it."""
    records = received.records
    found: dict[int, Inherited] = {}
    around_roots = [
        (argument.structure.root, "any" if is_container(argument.packed) else outside) for argument in received.modules
    ]
    stack: list[tuple[int, Any]] = around_roots[::-1]
    while stack:
        number, around = stack.pop()
        if number not in found:
            found[number] = around
            op, children = records[number]
            if type(op) is Node:
                stack += [(child, op.type.inherits(around)) for child in reversed(children)]
    return found


def _rules_for(rules: Rules, received: Graph, is_taken: Callable[[int], bool], is_same: Callable[[int], bool]) -> Rules:
    given: dict[int, int] = {}
    updated: dict[int, int] = {}
    for number, ((op, _), obj) in enumerate(zip(received.records, received.objects, strict=True)):
        is_object = op.type.carries_identity if type(op) is Node else op is LEAF and carries_identity(obj)
        if is_object and not is_taken(number) and is_same(number):
            given[id(obj)] = number  # alive in `received`
        elif is_object and type(op) is Node:
            updated[id(obj)] = number  # as above
    return rules._replace(given=given, updated=updated)


class InPlace:
    """Content that is to be written into the caller's objects, collected first and written at once.

    Args:
        call: the caller's side.

    Attributes:
        pending: each object that is to be written to, followed by another with its new content.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self.pending: list[Any] = []

    def update(self, number: int, content: Any) -> Any:
        """Notes that an object is to get the content of another of its class; returns that object."""
        target = self._call.tags.objects[number]
        for cuts in self._call.cuts:
            cuts.require_one(target, is_written=any(written is target for written in self.pending[::2]))
        self.pending += target, content
        return target

    def commit(self) -> None:
        """Writes everything. If one object refuses, those already written get their content back."""
        if not write_natively(self.pending):
            write(self.pending)


def write(pending: Sequence[Any]) -> None:
    """Writes what is pending, all or nothing, in Python."""
    undo: list[tuple[Any, Any]] = []
    try:
        for target, content in zip(pending[::2], pending[1::2], strict=True):
            undo.append((target, _content(target)))
            new = _content(content)
            gone = [name for name in _carried(target) if name not in new]
            _write(target, new)
            for name in gone:
                object.__delattr__(target, name)
    except BaseException:
        for target, before in reversed(undo):
            _write(target, before)
        raise


def _content(obj: Any) -> Any:
    if isinstance(obj, (list, collections.deque)):
        return list(obj)
    if isinstance(obj, dict):
        return dict(obj)
    attributes = dict(getattr(obj, "__dict__", {}))
    for cls in type(obj).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(obj, name):
                attributes[name] = getattr(obj, name)
    return attributes


def _carried(obj: Any) -> Iterable[str]:
    """The attributes that the function received with an object: what its class's flatten hands over."""
    node_type = node_type_of(obj)
    assert node_type is not None
    if node_type.is_plain:
        return ()
    children, aux = node_type.take_apart(obj)
    return _content(node_type.put_together(aux, children))


def _write(obj: Any, content: Any) -> None:
    if isinstance(obj, list):
        obj[:] = content
    elif isinstance(obj, collections.deque):
        obj.clear()
        obj.extend(content)
    elif isinstance(obj, dict):
        for name in [name for name in obj if name not in content]:
            del obj[name]
        obj.update(content)  # what stays keeps its place
    else:
        for name, value in content.items():
            object.__setattr__(obj, name, value)  # frozen classes too: the caller asked for it
