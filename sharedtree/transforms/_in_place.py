"""`Policy(in_place=True)`: what a function changed in its arguments is written back into the caller's objects.

The changed objects go out beside the result: each object that no longer has the parts with which it was received. It
may be in the arguments still, or the function may have taken it out of them: whoever holds it outside sees the change.
In the structure that goes out, an unchanged object is a `Given` with the number of its record in the arguments, and a
changed one is an `Update` with this number and the new content:

    counter.n += 1                        goes out   ((Update(0, Counter(0)),), result)      with the leaf n

The caller's side first builds all new contents, and then writes them. So the caller's objects change all together or,
after an error, not at all.
"""

import collections
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, NoReturn

from ..core._by_identity import IdentityDict, IdentitySet
from ..core._call_arguments import LeafPath
from ..core._errors import InconsistentSharingError
from ..core._node_types import LocalConvention, is_traced, node_type_of
from ..core._pack_and_unpack import Rules, Tags, native, walk, write_natively
from ..core._static_values import Incomparable, Static, key_of, objects_with_identity, with_new_parts
from ..core._structure import FlatDag, Node
from ._caller_side import Call, leave
from ._leaf_groups import LeafGroup
from ._leaf_labels import raise_inconsistent
from ._pass_through import ReceivedObjects

IsTaken = Callable[[int], bool]
"""Returns True for a record whose buffers the caller donated. Such an object is packed even if it is unchanged."""

IN_PLACE = " in place of "
"""What JAX's messages print before the path of a changed object."""

# ---- On the function's side: what was changed ----


def rules_for_state(rules: Rules, received: FlatDag, is_taken: IsTaken, *, deeply: bool = False) -> Rules:
    """Returns rules under which unchanged objects become `Given`, and the contents of changed ones `Update`.

    Which objects changed is in two fields of the rules, `given` and `updated`: received object → its record.

    Args:
        rules: rules for everything else.
        received: what the function received, with the objects as they are now.
        is_taken: see `IsTaken`.
        deeply: True if an object that holds a changed one counts as changed.
    """
    objects = ReceivedObjects(received, containers=rules.containers)
    is_unchanged = objects.is_deeply_unchanged if deeply else objects.is_unchanged
    given: IdentityDict[int] = IdentityDict()
    updated: IdentityDict[int] = IdentityDict()
    for record in objects.records:
        obj = received.objects[record]
        if not is_taken(record) and is_unchanged(record):
            given[obj] = record
        elif type(received.records[record][0]) is Node:
            updated[obj] = record
    return rules._replace(given=given, updated=updated, received=received.records)


def with_changes(
    result: Any, received: FlatDag, rules: Rules, is_taken: IsTaken, writable: Container[int] | None = None
) -> FlatDag:
    """Flattens the objects that a function changed, and its result, as one tuple. The result is the last entry.

    Args:
        result: what the function returned.
        received: what it received, with the objects as they are now.
        rules: how results are packed.
        is_taken: see `IsTaken`.
        writable: records of the objects that are written back. Other changed objects go out only in the result, as new
            objects. None to write all of them back.
    """
    rules = rules_for_state(rules, received, is_taken)
    updated = rules.updated or IdentityDict[int]()
    if writable is not None:
        updated = IdentityDict(item for item in updated.items() if item[1] in writable)
        rules = rules._replace(updated=updated)
    # A convention says which leaves are traced, and is that of the module around an object. Changed objects under one
    # convention are walked as one tuple.
    convention_of = conventions(received, rules)
    changed: dict[LocalConvention, list[Any]] = {}
    for record in updated.values():
        changed.setdefault(convention_of[record], []).append(received.objects[record])
    trees: list[tuple[Any, LocalConvention]] = [(tuple(objects), convention) for convention, objects in changed.items()]
    return walked_together([*trees, (result, rules.convention)], rules, [*[IN_PLACE] * len(changed), ""])


def walked_together(trees: Iterable[tuple[Any, LocalConvention]], rules: Rules, keys: Sequence[str]) -> FlatDag:
    """Flattens several trees as one tuple, with the ties between them. Each tree has a convention of its own.

    Args:
        trees: the trees, each with the convention around it, which says which leaves are traced.
        rules: how they are packed. Their convention is not read.
        keys: for each tree, the beginning of its paths.
    """
    # `tags` number the objects. All walks share them, so an object in two trees is one record.
    tags, records, roots = Tags(), list[Any](), list[int]()
    for tree, convention in trees:
        _, records_of_tree, root = walk(tree, tags, rules._replace(convention=convention))
        records += records_of_tree
        roots.append(root)
    tuple_type = node_type_of(())
    assert tuple_type is not None
    # The tuple itself, which is no object of anybody's: None stands for it.
    records.append((Node(tuple_type, Static(None), tuple(map(LeafPath, keys))), tuple(roots)))
    return FlatDag(records, len(records) - 1, [*tags.objects, None])


def conventions(received: FlatDag, rules: Rules) -> dict[int, LocalConvention]:
    """Returns, for each record, the convention around it on its first path. It says which leaves are traced there.

    Args:
        received: what the function received.
        rules: the rules, with the convention around the root.
    """
    convention_of: dict[int, LocalConvention] = {}
    stack: list[tuple[int, LocalConvention]] = [(received.root, rules.convention)]
    while stack:
        record, convention = stack.pop()
        if record not in convention_of:
            convention_of[record] = convention
            node = received.node(record)
            if node is not None:
                inner: LocalConvention = node.type.convention_below(convention, containers=rules.containers)
                stack.extend((child, inner) for child in reversed(received.records[record][1]))
    return convention_of


# ---- On the caller's side: writing back ----


def commit_changes(call: Call, transform: str, *trees: Sequence[LeafGroup]) -> list[Any]:
    """Builds what a transform returned, and writes the changes in it into the caller's objects, all or nothing.

    Args:
        call: the call.
        transform: name of the transform, for errors.
        trees: for each tree, all of its leaf groups.

    Returns:
        The trees. Where they have a changed or unchanged object of the caller's, it is the very object.

    Raises:
        InconsistentSharingError: if a changed object cannot be written back. See `Changes.update`.
    """
    changes = Changes(call, transform)
    built = [leave(groups, call.objects.__getitem__, changes.update) for groups in trees]
    changes.commit()
    return built


class Changes:
    """New contents for the caller's objects. They are collected first, and then written all at once.

    Args:
        call: the call.
        title: name of the transform, for errors.

    Attributes:
        pending: what is to be written, flat: target, content, target, content. A target is an object of the caller's,
            and its content is another object of its class.
    """

    def __init__(self, call: Call, title: str) -> None:
        self._call = call
        self._title = title
        self._statics = CallersStatics(call.tree)
        self.pending: list[Any] = []

    def update(self, record: int, content: Any) -> Any:
        """Adds new content for the caller's object with this record, to be written later. Returns that object.

        An object was *split* if a transform treats it in two ways, so that it was two pieces inside the function.

        Args:
            record: record of the object.
            content: an object of its class. Its static objects are replaced by the caller's.

        Raises:
            InconsistentSharingError: if the object is a container that was split, or a module of which two pieces were
                changed.
        """
        target = self._call.objects[record]
        # True if another piece of this object was changed. The targets are the entries at even places.
        is_pending = any(obj is target for obj in self.pending[::2])
        for cut in self._call.cuts:
            # A container that was split cannot be written to at all. A module that was split can, with one piece of it.
            for split_record in (*cut.containers, *(cut.modules if is_pending else ())):
                if cut.outcomes.tree.objects[split_record] is target:
                    reason = (
                        f"Inside they were two, and a `{type(target).__name__}` was changed that would have to be "
                        "written back into both as one.\n"
                    )
                    raise_inconsistent(cut.outcomes, split_record, self._title, reason)
        # No cut of the call split the object, so a loop did, when its body returned two objects for it.
        if is_pending:
            self._raise_split_container(target)
        self._statics.put_into(content, target)
        self.pending += target, content
        return target

    def _raise_split_container(self, target: Any) -> NoReturn:
        """Raises the error for a container that a loop carries as two, and of which both changed.

        The body of the loop once returned two objects where it had received one, so the carry was packed again.
        """
        tree, kind = self._call.tree, type(target).__name__
        records = [record for record in sorted(tree.first_paths) if tree.objects[record] is target]
        paths = [tree.text(record) for record in records]
        treatments = [f"number {i} inside" for i in range(1, len(records) + 1)]
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
        # C writes all or, if it cannot write one of them, nothing.
        if not write_natively(self.pending):
            write(self.pending)


class CallersStatics:
    """The static objects in a caller's arguments, which take their places again in what is written back.

    A trace that serves many calls has copies of static objects, or equal objects of the model in the first call. New
    content has these, wherever the function put them. Each is replaced by the caller's object with equal content:

        m.config, m.spare = m.spare, m.config           the trace has copies of two objects, and exchanges the copies

    The first replacement reads the static objects of all arguments. Later ones look up what it read.

    Args:
        tree: the arguments as packed.
    """

    def __init__(self, tree: FlatDag) -> None:
        self._tree = tree
        self._object_of_content: dict[Any, Any] | None = None

    def put_into(self, content: Any, target: Any) -> None:
        """Replaces static objects in new content by equal ones of the caller's.

        Args:
            content: an object of the class of `target`, built from what the trace has. It is changed.
            target: the caller's object that will get the content. If its object at one place equals the new one there,
                it keeps that object.
        """
        # A structure with `objects` was made for this call alone, so the content has the caller's own objects already.
        if self._tree.structure.objects:
            return
        node_type = node_type_of(content)
        assert node_type is not None
        children, aux = node_type.take_apart(content)
        # The static leaves among the children.
        leaves = [child for child in children if node_type_of(child) is None and not is_traced(child, "jax")]
        if not any(objects_with_identity(value) for value in (aux, *leaves)):
            return
        # An attribute of the content is static if it occurs in the auxiliary data, or is a leaf that is not traced.
        statics = IdentitySet([*_with_parts(aux), *leaves])
        old, new = _content(target), _content(content)
        places: Iterable[Any] = range(len(new)) if isinstance(new, list) else new.keys()
        for place in places:
            value = new[place]
            if value not in statics or not objects_with_identity(value):
                continue
            is_in_old = place < len(old) if isinstance(old, list) else place in old
            if is_in_old and (value is old[place] or _has_equal_content(value, old[place])):
                callers_value = old[place]
            else:
                callers_value = self._with_callers_objects(value, IdentityDict())
            if callers_value is value:
                continue
            if isinstance(content, (list, dict, collections.deque)):
                content[place] = callers_value
            else:
                # Frozen classes refuse `setattr`.
                object.__setattr__(content, str(place), callers_value)

    def _with_callers_objects(self, value: Any, memo: IdentityDict[Any]) -> Any:
        """Returns a static value in which the caller's objects stand for equal ones.

        Args:
            value: the static value.
            memo: part → what stands for it, for parts that were met before. Extended.
        """
        if value not in memo:
            # A cycle that leads back here ends with the part itself.
            memo[value] = value
            has_identity = any(obj is value for obj in objects_with_identity(value))
            callers_object = self._find(value) if has_identity else None
            if callers_object is None:
                callers_object = with_new_parts(value, lambda part: self._with_callers_objects(part, memo))
            memo[value] = callers_object
        return memo[value]

    def _find(self, value: Any) -> Any:
        """Returns the caller's first static object whose content equals that of a value. None if there is none."""
        try:
            key = key_of(value)[0]
        except Incomparable:
            return None
        if self._object_of_content is None:
            self._object_of_content = {}
            for obj in self._objects():
                self._object_of_content.setdefault(key_of(obj)[0], obj)
        return self._object_of_content.get(key)

    def _objects(self) -> Iterable[Any]:
        """Iterates over the static objects in the arguments for which an equal object is no substitute."""
        for record, (op, _) in enumerate(self._tree.records):
            if type(op) is Static and op.has_objects:
                yield from objects_with_identity(self._tree.objects[record])
            elif type(op) is Node and op.aux.has_objects:
                _, aux = op.type.take_apart(self._tree.objects[record])
                yield from objects_with_identity(aux)


def _with_parts(value: Any) -> Iterable[Any]:
    """Iterates over a value and all that it holds in tuples, lists and values of dictionaries, each object once."""
    stack, visited = [value], IdentitySet()
    while stack:
        part = stack.pop()
        # `add` returns False for an object that is in the set.
        if visited.add(part):
            yield part
            if isinstance(part, (tuple, list)):
                stack.extend(part)
            elif isinstance(part, dict):
                stack.extend(part.values())


def _has_equal_content(value: Any, other: Any) -> bool:
    """Returns True if two values are of one class and have equal keys (`key_of`). False if they cannot be compared."""
    if type(value) is not type(other):
        return False
    try:
        # Comparing two `Static`s would copy both values, and this runs on each call.
        return key_of(value)[0] == key_of(other)[0]
    except Incomparable:
        return False


def write(pending: Sequence[Any]) -> None:
    """Writes new contents into objects, all or nothing.

    `write_natively` does the same in C. This function defines what it does, and is called where it cannot.

    Args:
        pending: targets and contents in turn, as in `Changes`.
    """
    # Each target that was written to, with its old content.
    written: list[tuple[Any, Any]] = []
    try:
        for target, source in zip(pending[::2], pending[1::2], strict=True):
            old = _content(target)
            written.append((target, old))
            new = _with_kept_values(_content(source), old)
            # Attributes that the function received and removed. It never saw others, such as caches. These stay.
            removed = [name for name in _names_in_flatten(target) if name not in new]
            _write(target, new)
            for name in removed:
                object.__delattr__(target, name)
    except BaseException:
        for target, old in reversed(written):
            _write(target, old)
        raise


def _with_kept_values(new: Any, old: Any) -> Any:
    """Puts old values in the place of the mark `KEPT`. Contents may be built in C even if they are written here.

    Args:
        new: the new content, as `_content` returns it. C builds it with the mark for an unchanged static value.
        old: the old content.
    """
    if native is not None and isinstance(new, dict):
        for name in [name for name, value in new.items() if value is native.KEPT]:
            new[name] = old[name]
    return new


def _content(obj: Any) -> Any:
    """Copies what an object holds: the items of a container, as a list or dict, or else the attributes, as a dict."""
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


def _names_in_flatten(obj: Any) -> Iterable[str]:
    """Returns the names of an object's attributes that survive a flatten and an unflatten. A function receives these.

    Plain containers have no attributes.
    """
    node_type = node_type_of(obj)
    assert node_type is not None
    if node_type.is_plain:
        return ()
    children, aux = node_type.take_apart(obj)
    return _content(node_type.put_together(aux, children))


def _write(obj: Any, content: Any) -> None:
    """Puts content into an object, as `_content` returns it. Attributes that are not in the content stay."""
    if isinstance(obj, list):
        obj[:] = content
    elif isinstance(obj, collections.deque):
        obj.clear()
        obj.extend(content)
    elif isinstance(obj, dict):
        for name in [name for name in obj if name not in content]:
            del obj[name]
        # `update` keeps the order of the keys that stay.
        obj.update(content)
    else:
        for name, value in content.items():
            # This writes to frozen classes, too. The caller asked for that.
            object.__setattr__(obj, name, value)
