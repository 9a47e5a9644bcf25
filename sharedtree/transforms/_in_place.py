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
from ..core._native_walk import native, write_natively
from ..core._node_types import node_type_of
from ..core._pack_and_unpack import Rules, Tags, walk
from ..core._plain_containers import Inherited
from ..core._static_kinds import Incomparable
from ..core._static_values import Static, key_of
from ..core._structure import Node
from ..core._traced_leaves_and_identity import is_traced
from ..core._trees_taken_apart import Walked
from ._caller_side import Call
from ._inconsistent_sharing import raise_inconsistent
from ._pass_through import Unchanged

IsTaken = Callable[[int], bool]
"""Whether the caller's buffers of a record are donated, so that even what is unchanged must come back."""


def rules_for_state(rules: Rules, received: Walked, is_taken: IsTaken, *, deeply: bool = False) -> Rules:
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
    result: Any, received: Walked, rules: Rules, is_taken: IsTaken, own: Container[int] | None = None
) -> Walked:
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


def walked_together(trees: Iterable[tuple[Any, Inherited]], rules: Rules, keys: Sequence[str]) -> Walked:
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
    return Walked(records, len(records) - 1, [*tags.objects, None])


def conventions(received: Walked, rules: Rules) -> dict[int, Inherited]:
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
        self.pending: list[Any] = []

    def update(self, number: int, content: Any) -> Any:
        """Notes that an object is to get the content of another of its class; returns that object."""
        target = self._call.objects[number]
        is_written = any(written is target for written in self.pending[::2])
        for cut in self._call.cuts:
            for each in (*cut.containers, *(cut.modules if is_written else ())):
                if cut.fates.tree.objects[each] is target:
                    why = (
                        f"Inside they were two, and a `{type(target).__name__}` was changed that would have to be "
                        "written back into both as one.\n"
                    )
                    raise_inconsistent(cut.fates, each, self._title, why)
        if is_written:
            self._raise_parted(target)
        keep_static_objects(target, content, self._call.tree, number)
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


def keep_static_objects(target: Any, content: Any, tree: Walked, number: int) -> None:
    """Puts the static objects that an object has into its new content, where they are equal to what that has.

    A trace has copies of them, or those of the first model that it was made for.

    Args:
        target: The caller's object.
        content: Another object of its class; it is changed.
        tree: What the caller's side packed.
        number: Of the object in `tree`.
    """
    node = tree.node(number)
    assert node is not None
    leaves = [op for child in tree.records[number][1] if type(op := tree.records[child][0]) is Static]
    statics = [node.aux, *leaves]
    if any(static.objects for static in statics) or not any(static.has_objects for static in statics):
        return
    node_type = node_type_of(content)
    assert node_type is not None
    children, aux = node_type.take_apart(content)
    leaves = [child for child in children if node_type_of(child) is None and not is_traced(child, "jax")]
    new = IdentitySet([*_parts_of_containers(aux), *leaves])
    before = _content(target)
    now = _content(content)
    places: Iterable[Any] = range(min(len(now), len(before))) if isinstance(now, list) else now.keys() & before.keys()
    for place in places:
        if now[place] is not before[place] and now[place] in new and _are_alike(now[place], before[place]):
            if isinstance(content, (list, dict, collections.deque)):
                content[place] = before[place]
            else:
                object.__setattr__(content, str(place), before[place])


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
