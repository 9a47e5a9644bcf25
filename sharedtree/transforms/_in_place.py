"""`Policy(in_place=True)`: a function's changes of its arguments are written back into the caller's objects.

An object has changed if its parts are no longer the received ones. The function's side packs the changed objects and
the result as one tuple. Objects that the function has taken out of its arguments are packed, too, since the caller may
still hold them.

The packed arguments have one *record* for each object: its operation (`LEAF`, a static value, or a `Node` with its
class) and the numbers of its children's records. A variable `record` holds the number. In the packed tuple, an
unchanged object is a `Given` with the number of its record, and a changed object is an `Update` with this number and
the new content:

    counter.n += 1                        packed   ((Update(0, Counter(0)),), result)      with the leaf n

The caller's side first builds all new contents, and then writes them. So the caller's objects change all together or,
after an error, not at all.

A *static* value is a part of an object, but no array: a string, a config, a function. JAX may run an earlier trace
for a call. Then the new contents have the static values of the earlier call, and the caller's are put in their place.
"""

import collections
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, NoReturn

from ..core._by_identity import IdentityDict, IdentitySet
from ..core._call_arguments import LeafPath
from ..core._errors import InconsistentSharingError
from ..core._node_types import Inherited, is_traced, node_type_of
from ..core._pack_and_unpack import Rules, Tags, native, walk, write_natively
from ..core._static_values import Incomparable, Static, key_of, objects_with_identity, with_new_parts
from ..core._structure import FlatDag, Node
from ._caller_side import Call, leave
from ._leaf_groups import LeafGroup
from ._leaf_labels import raise_inconsistent
from ._pass_through import ReceivedObjects

IsTaken = Callable[[int], bool]
"""(record) → True if the caller donated the object's buffers. Then it is packed even if it is unchanged.

A donated buffer is gone after the call, so the caller's object needs the new array.
"""

IN_PLACE = " in place of "
"""The text that begins the path of a changed object in JAX's messages."""

# ---- On the function's side: what was changed ----


def rules_for_state(rules: Rules, received: FlatDag, is_taken: IsTaken, *, deeply: bool = False) -> Rules:
    """Returns rules to pack an unchanged object as a `Given`, and a changed one as an `Update`.

    The unchanged objects are in the field `given` of the rules, the changed ones in `updated`: object → its record.

    Args:
        rules: rules for everything else.
        received: the arguments of the function, with the objects as they are now.
        is_taken: see `IsTaken`.
        deeply: True if a holder of a changed object counts as changed.
    """
    objects = ReceivedObjects(received, containers=rules.containers)
    is_unchanged = objects.is_deeply_unchanged if deeply else objects.is_unchanged
    unchanged: IdentityDict[int] = IdentityDict()
    changed: IdentityDict[int] = IdentityDict()
    for record in objects.records:
        obj = received.objects[record]
        if not is_taken(record) and is_unchanged(record):
            unchanged[obj] = record
        # A leaf that is taken has no content to update. It is packed as any leaf.
        elif type(received.records[record][0]) is Node:
            changed[obj] = record
    return rules._replace(given=unchanged, updated=changed, received=received.records)


def flatten_with_changes(
    result: Any, received: FlatDag, rules: Rules, is_taken: IsTaken, writable: Container[int] | None = None
) -> FlatDag:
    """Packs the objects changed by a function, and its result, as one tuple. The result is the last entry.

    Args:
        result: the result of the function.
        received: its arguments, with the objects as they are now.
        rules: how results are packed.
        is_taken: see `IsTaken`.
        writable: records of the objects to be written back. Other changed objects are packed only if they are in the
            result, as new objects. None to write all changed objects back.

    Returns:
        The flat DAG (records and objects) of the tuple.
    """
    rules = rules_for_state(rules, received, is_taken)
    updated = rules.updated or IdentityDict[int]()
    if writable is not None:
        updated = IdentityDict((obj, record) for obj, record in updated.items() if record in writable)
        rules = rules._replace(updated=updated)
    # A convention says which leaves are traced. It is that of the library of the nearest module around an object. One
    # walk has one convention around its root, so there is a tuple of changed objects for each convention.
    convention_of = conventions(received, rules)
    objects_of: dict[Inherited, list[Any]] = {}
    for record in updated.values():
        objects_of.setdefault(convention_of[record], []).append(received.objects[record])
    trees: list[tuple[Any, Inherited]] = [(tuple(objects), convention) for convention, objects in objects_of.items()]
    keys = [*[IN_PLACE] * len(objects_of), ""]
    return flatten_together([*trees, (result, rules.convention)], rules, keys)


def flatten_together(trees: Iterable[tuple[Any, Inherited]], rules: Rules, keys: Sequence[str]) -> FlatDag:
    """Packs several trees as one tuple, with the ties between them. Each tree has a convention of its own.

    Args:
        trees: the trees, each with the convention around it.
        rules: how they are packed. Their convention is not read.
        keys: for each tree, the beginning of its paths.

    Returns:
        The flat DAG (records and objects) of the tuple.
    """
    # `tags` number the objects. All walks share them, so an object in two trees is one record.
    tags, records, roots = Tags(), list[Any](), list[int]()
    for tree, convention in trees:
        # `walk` returns the leaves, the records that are new, and the number of the tree's root.
        _, new_records, root = walk(tree, tags, rules._replace(convention=convention))
        records += new_records
        roots.append(root)
    # Last, a record for the tuple itself. There is no such object, so None stands for it.
    tuple_type = node_type_of(())
    assert tuple_type is not None
    records.append((Node(tuple_type, Static(None), tuple(map(LeafPath, keys))), tuple(roots)))
    return FlatDag(records, len(records) - 1, [*tags.objects, None])


def conventions(received: FlatDag, rules: Rules) -> dict[int, Inherited]:
    """Returns, for each record, the convention around it on its first path. It says when a leaf is traced there.

    Args:
        received: the arguments of the function.
        rules: how they were packed, with the convention around the root.
    """
    convention_of: dict[int, Inherited] = {}
    # The first child is on top of the stack, so records come up in the order of their first paths.
    stack: list[tuple[int, Inherited]] = [(received.root, rules.convention)]
    while stack:
        record, convention = stack.pop()
        if record not in convention_of:
            convention_of[record] = convention
            node = received.node(record)
            if node is not None:
                # A module sets the convention for its parts. A plain container passes on the one around it.
                inner: Inherited = node.type.inherits(convention, containers=rules.containers)
                stack.extend((child, inner) for child in reversed(received.records[record][1]))
    return convention_of


# ---- On the caller's side: writing back ----


def commit_changes(call: Call, transform: str, *trees: Sequence[LeafGroup]) -> list[Any]:
    """Builds the results of a transform, and writes the changes in them into the caller's objects, all or nothing.

    Args:
        call: the call.
        transform: name of the transform, for errors.
        trees: for each tree, all of its leaf groups. (A leaf group holds leaves treated alike by the transform.)

    Returns:
        The trees, as the function packed them. A tree of `flatten_with_changes` is a tuple: first the changed objects,
        last the result. An object of the caller's in a tree, changed or not, is the caller's own.

    Raises:
        InconsistentSharingError: if a changed object cannot be written back. See `Changes.update`.
    """
    changes = Changes(call, transform)
    # `leave` builds a tree. For a `Given` it takes the caller's object, and for an `Update` it calls `changes.update`.
    built = [leave(groups, call.objects.__getitem__, changes.update) for groups in trees]
    changes.commit()
    return built


class Changes:
    """New contents for the caller's objects. `update` collects them, and `commit` writes them all at once.

    Args:
        call: the call.
        title: name of the transform, for errors.

    Attributes:
        pending: the contents to be written: target, content, target, content, and so on. A target is an object of the
            caller's. Its content is a new object of the same class. C takes them in one flat list.
    """

    def __init__(self, call: Call, title: str) -> None:
        self._call = call
        self._title = title
        self._statics = CallersStatics(call.tree)
        self.pending: list[Any] = []

    def update(self, record: int, content: Any) -> Any:
        """Adds new content for one of the caller's objects, to be written by `commit`. Returns that object.

        A transform may treat an object in two ways: `grad(f)(q, q)` differentiates `q` in the first place only. Then
        `q` is *split* into two pieces, two objects inside the function, and is one object for the caller still.

        Args:
            record: record of the object.
            content: a new object of its class. Its static values are replaced by the caller's.

        Raises:
            InconsistentSharingError: if the object is a split container, or a module with changes in two pieces.
        """
        target = self._call.objects[record]
        # True if another piece of this object was changed. The targets are the entries at even places.
        is_pending = any(obj is target for obj in self.pending[::2])
        # A cut has the records that one treatment split.
        for cut in self._call.cuts:
            # A container that was split cannot be written to at all. A module can, if only one piece of it was changed.
            for split_record in (*cut.containers, *(cut.modules if is_pending else ())):
                if cut.outcomes.tree.objects[split_record] is target:
                    reason = (
                        f"Inside they were two, and a `{type(target).__name__}` was changed that would have to be "
                        "written back into both as one.\n"
                    )
                    raise_inconsistent(cut.outcomes, split_record, self._title, reason)
        # No treatment split the object. So a loop did, when its body returned two objects for it.
        if is_pending:
            self._raise_split_container(target)
        self._statics.put_into(content, target)
        self.pending += target, content
        return target

    def _raise_split_container(self, target: Any) -> NoReturn:
        """Raises the error for a container split into two by a loop, if both pieces were changed.

        The body of the loop returned two objects where it had received one. From then on, the loop carried two.

        Args:
            target: the caller's container.
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
        """Writes all pending contents. If one object cannot be written, the others get their old content back."""
        # `write_natively` returns False if C cannot write one of the objects. Then it has written nothing.
        if not write_natively(self.pending):
            write(self.pending)


class CallersStatics:
    """The static objects in a caller's arguments. They replace their copies in new contents.

    A trace that serves many calls has copies of static objects, or equal objects of the model in the first call. These
    are in the new contents, wherever the function put them. Each is replaced by the caller's object with equal content:

        m.config, m.spare = m.spare, m.config           the trace exchanges two copies, the caller's objects are written

    The first replacement reads the static objects of all arguments. Later replacements look them up.

    Args:
        tree: the arguments as packed.
    """

    def __init__(self, tree: FlatDag) -> None:
        self._tree = tree
        # Key of a content → the first object with this content. None until the first replacement.
        self._object_of_content: dict[Any, Any] | None = None

    def put_into(self, content: Any, target: Any) -> None:
        """Replaces static objects in new content by the caller's objects with equal content.

        Args:
            content: an object of the class of `target`, built with static values of the trace. It is changed.
            target: the caller's object for this content. It is only read. If an attribute of it
                equals the new one, the caller's value of this attribute is taken.
        """
        # A structure with `objects` was made for this call alone, so the content has the caller's own objects already.
        if self._tree.structure.objects:
            return
        # Most classes have only static values without identity, such as strings and numbers. Nothing to replace then.
        # `objects_with_identity` lists the objects in a value for which an equal object is no substitute, such as lists
        # and configs.
        node_type = node_type_of(content)
        assert node_type is not None
        children, aux = node_type.take_apart(content)
        static_leaves = [child for child in children if node_type_of(child) is None and not is_traced(child, "jax")]
        if not any(objects_with_identity(value) for value in (aux, *static_leaves)):
            return
        # An attribute of the content is static if it occurs in the auxiliary data, or is a leaf that is not traced.
        statics = IdentitySet([*_with_parts(aux), *static_leaves])
        old, new = _content(target), _content(content)
        # Places are the indices of a list, the keys of a dict, and the names of attributes.
        places: Iterable[Any] = range(len(new)) if isinstance(new, list) else new.keys()
        for place in places:
            value = new[place]
            if value not in statics or not objects_with_identity(value):
                continue
            # Prefer the caller's value at the same place, and then any equal object in the caller's arguments.
            is_in_old = place < len(old) if isinstance(old, list) else place in old
            if is_in_old and (value is old[place] or _has_equal_content(value, old[place])):
                callers_value = old[place]
            else:
                callers_value = self._with_callers_objects(value, IdentityDict())
            if callers_value is value:
                continue
            # Write it into the content.
            if isinstance(content, (list, dict, collections.deque)):
                content[place] = callers_value
            else:
                # Frozen classes refuse `setattr`.
                object.__setattr__(content, str(place), callers_value)

    def _with_callers_objects(self, value: Any, memo: IdentityDict[Any]) -> Any:
        """Returns a static value with its objects replaced by the caller's objects with equal content.

        Args:
            value: the static value.
            memo: part → its replacement, for the parts replaced so far. Extended.
        """
        if value not in memo:
            # If a cycle leads back to this part, the part itself is taken.
            memo[value] = value
            has_identity = any(obj is value for obj in objects_with_identity(value))
            callers_object = self._find_equal_object(value) if has_identity else None
            # The caller has no equal object, but may have one for a part of the value.
            if callers_object is None:
                callers_object = with_new_parts(value, lambda part: self._with_callers_objects(part, memo))
            memo[value] = callers_object
        return memo[value]

    def _find_equal_object(self, value: Any) -> Any:
        """Returns the caller's first static object with content equal to a value's. None if there is none."""
        # `key_of` returns the key of a content, and two flags.
        try:
            key, _, _ = key_of(value)
        except Incomparable:
            return None
        if self._object_of_content is None:
            self._object_of_content = {}
            for obj in self._objects():
                key_of_obj, _, _ = key_of(obj)
                self._object_of_content.setdefault(key_of_obj, obj)
        return self._object_of_content.get(key)

    def _objects(self) -> Iterable[Any]:
        """Iterates over the static objects with identity in the arguments (`objects_with_identity`)."""
        for record, (op, _) in enumerate(self._tree.records):
            # A static leaf, or a node whose auxiliary data has such objects.
            if type(op) is Static and op.has_objects:
                yield from objects_with_identity(self._tree.objects[record])
            elif type(op) is Node and op.aux.has_objects:
                _, aux = op.type.take_apart(self._tree.objects[record])
                yield from objects_with_identity(aux)


def _with_parts(value: Any) -> Iterable[Any]:
    """Iterates over a value and all objects in its tuples, lists and values of dictionaries. Each object comes once."""
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


def _has_equal_content(left: Any, right: Any) -> bool:
    """Returns True if two static values are of one class and have equal content. False if they cannot be compared."""
    if type(left) is not type(right):
        return False
    try:
        # `key_of` returns the key of a content, and two flags. `Static(left) == Static(right)` would say the same, but
        # copies both values, and this runs on each call.
        return key_of(left)[0] == key_of(right)[0]
    except Incomparable:
        return False


def write(pending: Sequence[Any]) -> None:
    """Writes new contents into objects, all or nothing.

    `write_natively` does the same in C. This function is its specification, and writes all that C cannot.

    Args:
        pending: target, content, target, content, and so on, as in `Changes`.

    Raises:
        Exception: raised by a class whose object cannot be written to. All objects have their old content then.
    """
    # Each target that was written to, with its old content.
    written: list[tuple[Any, Any]] = []
    try:
        for target, source in zip(pending[::2], pending[1::2], strict=True):
            old = _content(target)
            written.append((target, old))
            new = _with_kept_values(_content(source), old)
            # The function removed the attributes that it received and that the new content lacks. It never received
            # attributes that a flatten omits, such as caches. These stay.
            removed = [name for name in _names_in_flatten(target) if name not in new]
            _write(target, new)
            for name in removed:
                object.__delattr__(target, name)
    except BaseException:
        # Undo, in reverse order.
        for target, old in reversed(written):
            _write(target, old)
        raise


def _with_kept_values(new: Any, old: Any) -> Any:
    """Replaces the mark `KEPT` in a new content by the old values, and returns the new content.

    C builds contents with this mark for an unchanged static value. They are then written by C or, if it cannot,
    by `write`.

    Args:
        new: the new content, as `_content` returns it. It is changed.
        old: the old content.
    """
    if native is not None and isinstance(new, dict):
        for name in [name for name, value in new.items() if value is native.KEPT]:
            new[name] = old[name]
    return new


def _content(obj: Any) -> Any:
    """Copies the content of an object.

    Returns:
        The items of a container, as a list or dict. For other objects a dict of the attributes, including slots.
    """
    if isinstance(obj, (list, collections.deque)):
        return list(obj)
    if isinstance(obj, dict):
        return dict(obj)
    attributes = dict(getattr(obj, "__dict__", {}))
    for cls in type(obj).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        # `__slots__ = "name"` is one slot.
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(obj, name):
                attributes[name] = getattr(obj, name)
    return attributes


def _names_in_flatten(obj: Any) -> Iterable[str]:
    """Returns the names of the attributes of a copy, made of an object by a flatten and an unflatten.

    The function receives a copy like this, so these are the attributes it may have removed. A plain container has none.
    """
    node_type = node_type_of(obj)
    assert node_type is not None
    if node_type.is_plain:
        return ()
    children, aux = node_type.take_apart(obj)
    return _content(node_type.put_together(aux, children))


def _write(obj: Any, content: Any) -> None:
    """Puts content into an object. A container then has these items only, other objects keep further attributes.

    Args:
        obj: the object.
        content: the content, as `_content` returns it.
    """
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
