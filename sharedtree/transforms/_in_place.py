"""`Policy(in_place=True)`: a function's changes of its arguments are written back into the caller's objects.

An object has changed if its parts are no longer those that the function received. The function's side packs the changed
objects and the result as one tuple. Changed objects that the function has taken out of its arguments are packed, too,
since the caller may still hold them.

The packed arguments have one *record* for each object: its operation (`LEAF`, a static value, or a `Node` with its
class) and the numbers of its children's records. A variable `record` holds the number. In the packed tuple, a `Given`
stands for an unchanged object, with the number of its record. An `Update` stands for a changed object, with this number
and the new content:

    counter.n += 1                        packed   ((Update(0, Counter(0)),), result)      with the leaf n

The caller's side first builds all new contents, and then writes them. So the caller's objects change all together or,
after an error, not at all.

A *static* value is a part of an object, but no array: a string, a config, a function. JAX may run an earlier trace
for a call. Then the new contents have the static values of the earlier call, and the caller's are put in their place.

A *convention* says which leaves are traced. The library of the nearest module around a leaf decides it: Equinox traces
arrays only, for example.
"""

import collections
import contextlib
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

from ..core._by_identity import IdentityDict, IdentitySet
from ..core._call_arguments import LeafPath
from ..core._class_attributes import own_attributes
from ..core._errors import InconsistentSharingError
from ..core._node_types import LocalConvention, is_traced, node_type_of
from ..core._pack_and_unpack import Rules, Tags, native, walk, write_natively
from ..core._printing import code_that_unties, listed
from ..core._static_values import Incomparable, Static, irreplaceable_objects, key_of, with_new_parts
from ..core._structure import FlatDag, Node
from ._caller_side import Call, build_from_groups
from ._leaf_groups import LeafGroup
from ._leaf_labels import raise_inconsistent
from ._pass_through import ReceivedObjects

IsTaken = Callable[[int], bool]
"""(record) → True if the object is packed even if it is unchanged.

An example is an object whose buffers the caller donated. They are gone after the call, so the caller's object needs the
new arrays.
"""

IN_PLACE = " in place of "
"""The text with which the path of a changed object begins in JAX's messages."""

# ---- On the function's side: what was changed ----


def rules_for_changes(rules: Rules, received: FlatDag, is_taken: IsTaken, *, deeply: bool = False) -> Rules:
    """Compares the received objects with their records. Returns rules that pack the result of the comparison.

    The field `given` of the rules has the unchanged objects, which are packed as a `Given`. The field `updated` has the
    changed ones, which are packed as an `Update`. Both are dictionaries: object → its record.

    Args:
        rules: rules for everything else.
        received: the arguments of the function, with the objects as they are now.
        is_taken: see `IsTaken`.
        deeply: True if an object counts as changed, too, when an object below it has changed.
    """
    objects = ReceivedObjects(received, containers=rules.containers)
    is_unchanged = objects.is_deeply_unchanged if deeply else objects.is_unchanged
    unchanged: IdentityDict[int] = IdentityDict()
    changed: IdentityDict[int] = IdentityDict()
    for record in objects.records:
        obj = received.objects[record]
        if not is_taken(record) and is_unchanged(record):
            unchanged[obj] = record
        # A node that has changed, or is taken. A leaf that is taken is packed as any other leaf.
        elif type(received.records[record][0]) is Node:
            changed[obj] = record
    return rules._replace(given=unchanged, updated=changed, received=received.records)


def flatten_with_changes(
    result: Any, received: FlatDag, rules: Rules, is_taken: IsTaken, writable: Container[int] | None = None
) -> FlatDag:
    """Flattens one tuple: first the objects changed by a function, in tuples of their own, and last its result.

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
    rules = rules_for_changes(rules, received, is_taken)
    updated = rules.updated or IdentityDict[int]()
    if writable is not None:
        updated = IdentityDict((obj, record) for obj, record in updated.items() if record in writable)
        rules = rules._replace(updated=updated)
    # An object is walked under the convention that holds around it. A walk has one convention at its root, so there is
    # a tuple of changed objects for each convention.
    convention_of = conventions(received, rules)
    objects_of: dict[LocalConvention, list[Any]] = {}
    for record in updated.values():
        objects_of.setdefault(convention_of[record], []).append(received.objects[record])
    trees: list[tuple[Any, LocalConvention]] = [
        (tuple(objects), convention) for convention, objects in objects_of.items()
    ]
    # The paths of the result begin with nothing.
    keys = [*[IN_PLACE] * len(objects_of), ""]
    return flatten_together([*trees, (result, rules.convention)], rules, keys)


def flatten_together(trees: Iterable[tuple[Any, LocalConvention]], rules: Rules, keys: Sequence[str]) -> FlatDag:
    """Flattens several trees as one tuple, with the ties between them.

    Args:
        trees: the trees, each with the convention at its root.
        rules: how the trees are packed. `rules.convention` is not read.
        keys: for each tree, the beginning of its paths.

    Returns:
        The flat DAG (records and objects) of the tuple.
    """
    # `tags` number the objects. All walks share `tags`, so an object in two trees is one record.
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


def conventions(received: FlatDag, rules: Rules) -> dict[int, LocalConvention]:
    """Returns a dictionary: record → the convention that holds around it on its first path.

    Args:
        received: the arguments of the function.
        rules: how the arguments were packed. `rules.convention` is the one at their root.
    """
    convention_of: dict[int, LocalConvention] = {}
    # Children are pushed in reverse, so records come off the stack in the order of their first paths.
    stack: list[tuple[int, LocalConvention]] = [(received.root, rules.convention)]
    while stack:
        record, convention = stack.pop()
        if record not in convention_of:
            convention_of[record] = convention
            node = received.node(record)
            if node is not None:
                # A module sets the convention for its parts. A plain container passes on the one around it.
                inner: LocalConvention = node.type.convention_below(convention, containers=rules.containers)
                stack.extend((child, inner) for child in reversed(received.records[record][1]))
    return convention_of


# ---- On the caller's side: writing back ----


def commit_changes(call: Call, transform: str, *trees: Sequence[LeafGroup]) -> list[Any]:
    """Builds the results of a transform, and writes the changes in them into the caller's objects.

    Either all changes are written, or there is an error and none is.

    Args:
        call: the call.
        transform: name of the transform, for errors.
        trees: for each tree, all of its leaf groups. (A leaf group has leaves that the transform treats alike.)

    Returns:
        The trees, as the function packed them. A tree of `flatten_with_changes` is a tuple: first the changed objects,
        last the result. An object of the caller's in a tree, changed or not, is the caller's own.

    Raises:
        InconsistentSharingError: if a changed object cannot be written back. See `Changes.update`.
        Exception: raised by a class whose objects cannot be written to.
    """
    changes = Changes(call, transform)
    # For a `Given`, the caller's object with this record is put into the tree. For an `Update`, `changes.update` is
    # called, which returns the caller's object.
    built = [build_from_groups(groups, call.objects.__getitem__, changes.update) for groups in trees]
    changes.commit()
    return built


class Changes:
    """New contents for the caller's objects. `update` collects them, and `commit` then writes all of them.

    Args:
        call: the call.
        title: name of the transform, for errors.

    Attributes:
        pending: what is to be written: target, content, target, content, and so on. A target is an object of the
            caller's. The content for it is a new object of the same class. The list is flat because C reads it.
    """

    def __init__(self, call: Call, title: str) -> None:
        self._call = call
        self._title = title
        self._statics = CallersStatics(call.tree)
        self.pending: list[Any] = []

    def update(self, record: int, content: Any) -> Any:
        """Adds new content for one of the caller's objects, to be written by `commit`. Returns that object.

        A transform may treat an object in two ways: `grad(f)(q, q)` differentiates `q` in the first place only. Then
        `q` is *split* into two pieces: two objects inside the function, which are one object for the caller.

        Args:
            record: record of the object.
            content: a new object of the same class. Static values in it are replaced by the caller's.

        Raises:
            InconsistentSharingError: if the object is a container that was split, or a module that was split and has
                changes in two pieces.
        """
        target = self._call.objects[record]
        # True if there is new content for this object already, from another piece of it. The targets are the entries at
        # even places.
        is_pending = any(obj is target for obj in self.pending[::2])
        # There is one cut for each treatment that has split objects. It has their records.
        for cut in self._call.cuts:
            # A container that was split cannot be written to. A module can be, as long as only one piece was changed.
            # So the modules are looked at only if another piece has a change already.
            for split_record in (*cut.containers, *(cut.modules if is_pending else ())):
                if cut.outcomes.tree.objects[split_record] is target:
                    reason = (
                        f"Inside the function, the `{type(target).__name__}` with this leaf became two. One of them "
                        "was changed, and the two cannot be written back into one.\n"
                    )
                    raise_inconsistent(cut.outcomes, split_record, self._title, reason)
        # No treatment has split the object, or an error would have been raised above. Without a split, an object comes
        # back once. The only other cause of a second change is the body of a loop: it returned two objects in its
        # place.
        if is_pending:
            self._raise_split_container(target)
        self._statics.put_into(content, target)
        self.pending += target, content
        return target

    def _raise_split_container(self, target: Any) -> NoReturn:
        """Raises the error for a container that a loop has split into two pieces, both of which were changed.

        The body of the loop returned two objects where it had received one. From then on, the loop carried two.

        Args:
            target: the caller's container.

        Raises:
            InconsistentSharingError: always.
        """
        tree, kind = self._call.tree, type(target).__name__
        # The carry was packed again for the loop, so the caller's one object has several records.
        records = [record for record in sorted(tree.first_paths) if tree.objects[record] is target]
        paths = [tree.text(record) for record in records]
        # No treatments split the container. The error takes a text for each path, and these texts number the pieces.
        treatments = [f"object {i} inside the function" for i in range(1, len(records) + 1)]
        lines = [f"    `{path}`: {treatment}" for path, treatment in zip(paths, treatments, strict=True)]
        raise InconsistentSharingError(
            f"{listed(paths)} are one `{kind}`, but the function under `{self._title}` makes several of it, and "
            "changes them:\n"
            + "\n".join(lines)
            + "\nSeveral changes cannot be written back into one object. Let the function keep the tie, or untie the "
            "paths before the call:\n"
            f"{code_that_unties(paths[0], paths[1:])}",
            paths,
            treatments,
        )

    def commit(self) -> None:
        """Writes all pending contents. If one object cannot be written to, the others get their old content back.

        Raises:
            Exception: raised by a class whose objects cannot be written to.
        """
        # Tries it in C. `write_natively` returns False, and has written nothing, if C cannot write to one of the
        # objects.
        if not write_natively(self.pending):
            write(self.pending)


class CallersStatics:
    """The static objects in a caller's arguments, to replace equal objects in new contents.

    The function does not get the caller's static objects, such as configs. It gets copies, or equal objects from the
    call for which it was traced. It may put these anywhere, and they come back in the new contents. There each is
    replaced by the caller's object with equal content:

        m.config, m.spare = m.spare, m.config       the function exchanges two copies, the caller sees its own objects

    The first replacement reads the static objects of all arguments. Later replacements look them up.

    Args:
        tree: the arguments as packed.
    """

    def __init__(self, tree: FlatDag) -> None:
        self._tree = tree
        # Key of a content, from `key_of` → the caller's first object with this content. None until the first
        # replacement.
        self._object_of_content: dict[Any, Any] | None = None

    def put_into(self, content: Any, target: Any) -> None:
        """Replaces static objects in new content by the caller's objects with equal content.

        Args:
            content: an object of the class of `target`, with static values of the trace. It is changed.
            target: the caller's object to which the content will be written. It is only read: if the target has an
                equal value at the same place, this value is preferred.
        """
        # A structure with `objects` was made for this call alone, so the content has the caller's own objects already.
        if self._tree.structure.objects:
            return
        # Most classes have only static values without identity, such as strings and numbers. Then there is nothing to
        # replace. `irreplaceable_objects` lists the objects in a value that have identity: lists and configs, for
        # example.
        node_type = node_type_of(content)
        assert node_type is not None
        children, aux = node_type.take_apart(content)
        static_leaves = [child for child in children if node_type_of(child) is None and not is_traced(child, "jax")]
        if not any(irreplaceable_objects(value) for value in (aux, *static_leaves)):
            return
        # A value in the content is static if it is a part of the auxiliary data, or a leaf that is not traced.
        statics = IdentitySet([*_with_parts(aux), *static_leaves])
        old, new = _content(target), _content(content)
        # A place is an index of a list, a key of a dict, or the name of an attribute.
        both: list[tuple[Any, Any]] = [(old.items, new.items), (old.attributes, new.attributes)]
        for old_values, new_values in both:
            places: Iterable[Any] = range(len(new_values)) if isinstance(new_values, list) else new_values
            for place in places:
                value = new_values[place]
                if value not in statics or not irreplaceable_objects(value):
                    continue
                # Prefer the caller's value at the same place, and then any equal object in the caller's arguments.
                is_in_old = place < len(old_values) if isinstance(old_values, list) else place in old_values
                if is_in_old and (value is old_values[place] or _has_equal_content(value, old_values[place])):
                    callers_value = old_values[place]
                else:
                    callers_value = self._with_callers_objects(value, IdentityDict())
                if callers_value is value:
                    continue
                # Write it into the content.
                if new_values is new.items:
                    content[place] = callers_value
                else:
                    # Frozen classes refuse `setattr`.
                    object.__setattr__(content, str(place), callers_value)

    def _with_callers_objects(self, value: Any, memo: IdentityDict[Any]) -> Any:
        """Returns a static value in which the caller's objects replace all objects with equal content.

        Args:
            value: the static value.
            memo: part of a value → its replacement, for the parts that were seen so far. Extended.
        """
        if value not in memo:
            # For a cycle: if it leads back to this part before the replacement is known, the part itself is taken.
            memo[value] = value
            has_identity = any(obj is value for obj in irreplaceable_objects(value))
            callers_object = self._find_equal_object(value) if has_identity else None
            # The caller has no equal object for the whole value, but may have one for a part of it.
            if callers_object is None:
                callers_object = with_new_parts(value, lambda part: self._with_callers_objects(part, memo))
            memo[value] = callers_object
        return memo[value]

    def _find_equal_object(self, value: Any) -> Any:
        """Returns the caller's first static object with the same content as a value.

        Returns None if there is no such object, or if the value cannot be compared.
        """
        # `key_of` returns a key for the content, and two flags.
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
        """Iterates over the static objects with identity in the caller's arguments."""
        for record, (op, _) in enumerate(self._tree.records):
            # A static leaf, or a node whose auxiliary data has such objects.
            if type(op) is Static and op.has_irreplaceable_objects:
                yield from irreplaceable_objects(self._tree.objects[record])
            elif type(op) is Node and op.aux.has_irreplaceable_objects:
                _, aux = op.type.take_apart(self._tree.objects[record])
                yield from irreplaceable_objects(aux)


def _with_parts(value: Any) -> Iterable[Any]:
    """Iterates over a value and its parts: the entries of tuples and lists and the values of dicts, also nested ones.

    Each object comes once.
    """
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

    `write_natively` does the same in C, for most classes. This function is its specification, and is for all classes.

    Args:
        pending: target, content, target, content, and so on. See `Changes.pending`.

    Raises:
        Exception: raised by a class whose objects cannot be written to. All targets then have their old contents again.
    """
    # Each target so far, with its old content.
    written: list[tuple[Any, Any]] = []
    try:
        for target, source in zip(pending[::2], pending[1::2], strict=True):
            old = _content(target)
            written.append((target, old))
            new = _with_kept_values(_content(source), old)
            # If the function received an attribute and the new content lacks it, the function has removed it. Other
            # attributes stay: a flatten omits them, such as a cache, so the function never received them.
            removed = [name for name in _names_in_flatten(target) if name not in new.attributes]
            _write(target, new)
            for name in removed:
                object.__delattr__(target, name)
    except BaseException:
        # Give the targets their old contents back, in reverse order. A target that refused to be written to refuses
        # this, too, and the others get theirs all the same.
        for target, old in reversed(written):
            with contextlib.suppress(Exception):
                _write(target, old)
                for name in _content(target).attributes.keys() - old.attributes.keys():
                    object.__delattr__(target, name)
        raise


class _Content(NamedTuple):
    """Copy of the content of an object.

    Attributes:
        items: the items of a list or `deque` as a list, or those of a dict as a dict. An empty dict for other objects.
        attributes: the attributes, including slots. An instance of a subclass of a container may have some, too.
    """

    items: Any
    attributes: dict[str, Any]


def _with_kept_values(new: _Content, old: _Content) -> _Content:
    """Replaces each mark `KEPT` in a new content by the old value, and returns the new content.

    C builds contents in which this mark stands for an unchanged static value. `write` gets these contents if C cannot
    write them.

    Args:
        new: the new content, as `_content` returns it. It is changed.
        old: the old content.
    """
    if native is not None:
        for new_values, old_values in ((new.items, old.items), (new.attributes, old.attributes)):
            if isinstance(new_values, dict):
                for name in [name for name, value in new_values.items() if value is native.KEPT]:
                    new_values[name] = old_values[name]
    return new


def _content(obj: Any) -> _Content:
    """Returns a copy of the content of an object."""
    items: Any = {}
    if isinstance(obj, (list, collections.deque)):
        items = list(obj)
    elif isinstance(obj, dict):
        items = dict(obj)
    # `defaultdict` and `deque` have attributes of C, which do not change.
    attributes = dict(own_attributes(obj))
    for cls in type(obj).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        # `__slots__ = "name"` is one slot.
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                # A slot that was never set raises. `getattr` would ask a `__getattr__` of the class.
                with contextlib.suppress(AttributeError):
                    attributes[name] = object.__getattribute__(obj, name)
    return _Content(items, attributes)


def _names_in_flatten(obj: Any) -> Iterable[str]:
    """Returns the names of the attributes that an object keeps when it is flattened and unflattened.

    The function has received a copy made in this way. So it may have removed these attributes, and no others. Empty for
    a plain container.
    """
    node_type = node_type_of(obj)
    assert node_type is not None
    if node_type.is_plain:
        return ()
    children, aux = node_type.take_apart(obj)
    return _content(node_type.put_together(aux, children)).attributes


def _write(obj: Any, content: _Content) -> None:
    """Puts content into an object. A container loses all other items. Attributes besides those of the content stay.

    Args:
        obj: the object.
        content: the content, as `_content` returns it.
    """
    if isinstance(obj, list):
        obj[:] = content.items
    elif isinstance(obj, collections.deque):
        obj.clear()
        obj.extend(content.items)
    elif isinstance(obj, dict):
        for name in [name for name in obj if name not in content.items]:
            del obj[name]
        # `update` keeps the places of the keys that stay. It appends new keys.
        obj.update(content.items)
    for name, value in content.attributes.items():
        # Not `setattr`, which a frozen class refuses. With `in_place=True`, the caller asked to write to it.
        object.__setattr__(obj, name, value)
