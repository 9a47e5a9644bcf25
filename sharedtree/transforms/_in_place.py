"""`Policy(in_place=True)`: what a function changed in its arguments is written back into the caller's objects.

Beside the result leaves what was changed: each object that no longer has the parts with which it was received, whether
it is still in the arguments or was taken out of them, for whoever holds it sees what became of it. What did not change
is named by its number and nothing more. On the caller's side the content is built anew, and only once everything has
been built is any of it written. So the caller's objects change all together or, if anything raises, not at all.

    counter.n += 1                        leaves    ((Update(0, Counter(0)),), result)      with the leaf n
"""

import collections
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, NoReturn

from ..core._by_identity import IdentityDict, IdentitySet
from ..core._call_arguments import LeafPath
from ..core._errors import InconsistentSharingError
from ..core._flat_dags import FlatDag
from ..core._native_walk import native, write_natively
from ..core._node_types import node_type_of
from ..core._pack_and_unpack import Rules, Tags, walk
from ..core._plain_containers import Inherited
from ..core._static_kinds import Incomparable, objects_with_identity, with_new_parts
from ..core._static_values import Static, key_of
from ..core._structure import Node
from ..core._traced_leaves_and_identity import is_traced
from ._caller_side import Call
from ._inconsistent_sharing import raise_inconsistent
from ._pass_through import Unchanged

IsTaken = Callable[[int], bool]
"""Whether the caller's buffers of a record are donated, so that even what is unchanged must come back."""


def rules_for_state(rules: Rules, received: FlatDag, is_taken: IsTaken, *, deeply: bool = False) -> Rules:
    """Rules under which received objects are named if they are unchanged, and updated otherwise.

    Args:
        rules: the rules otherwise.
        received: what the function received, as it is now.
        is_taken: see there.
        deeply: whether what holds something that was changed counts as changed, too.
    """
    own = Unchanged(received, containers=rules.containers)
    is_same = own.is_unchanged if deeply else own.is_itself
    given: IdentityDict[int] = IdentityDict()
    updated: IdentityDict[int] = IdentityDict()
    for number in own.numbers:
        obj = received.objects[number]
        if not is_taken(number) and is_same(number):
            given[obj] = number
        elif type(received.records[number][0]) is Node:
            updated[obj] = number
    return rules._replace(given=given, updated=updated, received=received.records)


def with_changes(
    result: Any, received: FlatDag, rules: Rules, is_taken: IsTaken, own: Container[int] | None = None
) -> FlatDag:
    """What a function changed and what it returned, as one tree: a tuple of which the result is the last.

    Args:
        result: what the function returned.
        received: what it received, as it is now.
        rules: of the transform.
        is_taken: see there.
        own: the records of what is written to; None for all.
    """
    rules = rules_for_state(rules, received, is_taken)
    updated = rules.updated or IdentityDict[int]()
    if own is not None:
        updated = IdentityDict(item for item in updated.items() if item[1] in own)
        rules = rules._replace(updated=updated)
    around = conventions(received, rules)
    changed: dict[Inherited, list[Any]] = {}
    for number in updated.values():
        changed.setdefault(around[number], []).append(received.objects[number])
    return walked_together(
        [*((tuple(each), name) for name, each in changed.items()), (result, rules.convention)],
        rules,
        [*[IN_PLACE] * len(changed), ""],
    )


IN_PLACE = " in place of "
"""How JAX's messages are to call what was changed, before its path."""


def walked_together(trees: Iterable[tuple[Any, Inherited]], rules: Rules, keys: Sequence[str]) -> FlatDag:
    """Several trees as one, each with the convention that holds around it.

    Args:
        trees: with their conventions.
        rules: for all of them.
        keys: how their paths begin.
    """
    tags, records, roots = Tags(), list[Any](), list[int]()
    for tree, convention in trees:
        _, more, root = walk(tree, tags, rules._replace(convention=convention))
        records += more
        roots.append(root)
    whole = node_type_of(())
    assert whole is not None
    records.append((Node(whole, Static(None), tuple(map(LeafPath, keys))), tuple(roots)))
    return FlatDag(records, len(records) - 1, [*tags.objects, None])


def conventions(received: FlatDag, rules: Rules) -> dict[int, Inherited]:
    """The convention around each received record, on the first path to it, as a walk has it."""
    found: dict[int, Inherited] = {}
    stack: list[tuple[int, Inherited]] = [(received.root, rules.convention)]
    while stack:
        number, around = stack.pop()
        if number not in found:
            found[number] = around
            node = received.node(number)
            if node is not None:
                inner: Inherited = node.type.inherits(around, containers=rules.containers)
                stack.extend((child, inner) for child in reversed(received.records[number][1]))
    return found


class Changes:
    """Content that is to be written into the caller's objects, collected first and written at once.

    Args:
        call: the caller's side.
        title: what the transform is called.

    Attributes:
        pending: each object that is to be written to, followed by another with its new content.
    """

    def __init__(self, call: Call, title: str) -> None:
        self._call = call
        self._title = title
        self._statics = CallersStatics(call.tree)
        self.pending: list[Any] = []

    def update(self, number: int, content: Any) -> Any:
        """Notes that an object is to get the content of another of its class; returns that object."""
        target = self._call.objects[number]
        is_written = any(written is target for written in self.pending[::2])
        for cut in self._call.cuts:
            for each in (*cut.containers, *(cut.modules if is_written else ())):
                if cut.outcomes.tree.objects[each] is target:
                    why = (
                        f"Inside they were two, and a `{type(target).__name__}` was changed that would have to be "
                        "written back into both as one.\n"
                    )
                    raise_inconsistent(cut.outcomes, each, self._title, why)
        if is_written:
            self._raise_parted(target)
        self._statics.put_into(content, target)
        self.pending += target, content
        return target

    def _raise_parted(self, target: Any) -> NoReturn:
        """Raises because a function parted a container, so that a loop was given it twice, and changed both."""
        tree, kind = self._call.tree, type(target).__name__
        parts = [number for number in sorted(tree.first_paths) if tree.objects[number] is target]
        paths = [tree.text(number) for number in parts]
        treatments = [f"number {i} inside" for i in range(1, len(parts) + 1)]
        lines = [f"    `{path}`: {treatment}" for path, treatment in zip(paths, treatments, strict=True)]
        raise InconsistentSharingError(
            f"`{self._title}` cut a `{kind}` that is in several places, for the function parted them, and more than "
            "one was changed:\n" + "\n".join(lines) + "\n"
            "They cannot be written back into one. Let the function keep them one, or give each place its own before "
            "the call:\n"
            "    model = sharedtree.untie(model)",
            paths,
            treatments,
        )

    def commit(self) -> None:
        """Writes everything. If one object refuses, those already written get their content back."""
        if not write_natively(self.pending):
            write(self.pending)


class CallersStatics:
    """The static objects in a caller's arguments, which take their places again in what is written back.

    A trace that serves many calls has copies of them, or the equal ones of the first model that it was made for. They
    are found again by their content, wherever the function put them:

        m.config, m.spare = m.spare, m.config           what the trace has for each is equal to one of the caller's

    Args:
        tree: What the caller's side packed.

    Cost: the statics of all arguments are read once, when the first is looked for.
    """

    def __init__(self, tree: FlatDag) -> None:
        self._tree = tree
        self._by_content: dict[Any, Any] | None = None

    def put_into(self, content: Any, target: Any) -> None:
        """Replaces static objects in new content, which is changed, by equal ones of the caller's.

        Args:
            content: An object of the class of `target`, built from what the trace has.
            target: The caller's object, to which the content is written. What it has in a place goes before others.
        """
        if self._tree.structure.objects:  # those of this very call already
            return
        node_type = node_type_of(content)
        assert node_type is not None
        children, aux = node_type.take_apart(content)
        leaves = [child for child in children if node_type_of(child) is None and not is_traced(child, "jax")]
        if not any(objects_with_identity(value) for value in (aux, *leaves)):
            return
        statics = IdentitySet([*_parts_of_containers(aux), *leaves])
        before, now = _content(target), _content(content)
        places: Iterable[Any] = range(len(now)) if isinstance(now, list) else now.keys()
        for place in places:
            value = now[place]
            if value not in statics or not objects_with_identity(value):
                continue
            there = place < len(before) if isinstance(before, list) else place in before
            is_kept = there and (value is before[place] or _are_alike(value, before[place]))
            own = before[place] if is_kept else self._with_own(value, IdentityDict())
            if own is value:
                continue
            if isinstance(content, (list, dict, collections.deque)):
                content[place] = own
            else:
                object.__setattr__(content, str(place), own)

    def _with_own(self, value: Any, done: IdentityDict[Any]) -> Any:
        """A static value with the caller's objects in it; `done` has the parts that were met."""
        if value not in done:
            done[value] = value  # until it is known
            own = self._own(value) if any(obj is value for obj in objects_with_identity(value)) else None
            done[value] = with_new_parts(value, lambda part: self._with_own(part, done)) if own is None else own
        return done[value]

    def _own(self, value: Any) -> Any:
        """The caller's first object with the content of another one; None if there is none."""
        try:
            key = key_of(value)[0]
        except Incomparable:
            return None
        if self._by_content is None:
            self._by_content = {}
            for obj in self._objects():
                self._by_content.setdefault(key_of(obj)[0], obj)
        return self._by_content.get(key)

    def _objects(self) -> Iterable[Any]:
        for number, (op, _) in enumerate(self._tree.records):
            if type(op) is Static and op.has_objects:
                yield from objects_with_identity(self._tree.objects[number])
            elif type(op) is Node and op.aux.has_objects:
                _, aux = op.type.take_apart(self._tree.objects[number])
                yield from objects_with_identity(aux)


def _parts_of_containers(value: Any) -> Iterable[Any]:
    """A value, and what tuples, lists and dictionaries in it hold."""
    stack, entered = [value], IdentitySet()
    while stack:
        part = stack.pop()
        if entered.add(part):
            yield part
            if isinstance(part, (tuple, list)):
                stack.extend(part)
            elif isinstance(part, dict):
                stack.extend(part.values())


def _are_alike(value: Any, other: Any) -> bool:
    if type(value) is not type(other):
        return False
    try:
        # A `Static` would also copy both, and this is asked on each call.
        return key_of(value)[0] == key_of(other)[0]
    except Incomparable:
        return False


def write(pending: Sequence[Any]) -> None:
    """Writes what is pending, all or nothing, in Python."""
    undo: list[tuple[Any, Any]] = []
    try:
        for target, content in zip(pending[::2], pending[1::2], strict=True):
            before = _content(target)
            undo.append((target, before))
            new = _without_kept(_content(content), before)
            gone = [name for name in _carried(target) if name not in new]
            _write(target, new)
            for name in gone:
                object.__delattr__(target, name)
    except BaseException:
        for target, before in reversed(undo):
            _write(target, before)
        raise


def _without_kept(new: Any, before: Any) -> Any:
    """Puts what an object has in the place of what C marked as unchanged in its new content."""
    if native is not None and isinstance(new, dict):
        for name in [name for name, value in new.items() if value is native.KEPT]:
            new[name] = before[name]
    return new


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
