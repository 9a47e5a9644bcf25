"""Encodes a DAG as a manifest and arrays, by a walk over its objects.

The walk follows objects, not treedefs, so it visits static fields as well. An object that was visited before is the
same node again. Nothing recurses. The walk does not stop at the first object that cannot be written: one error lists
all of them.

An object becomes either a *node*, a list of its kind and its children, or an *atom*, a value that its parent has in
place. `None`, booleans and strings are themselves as atoms; other atoms are lists of texts, such as `["int", "7"]`. A
parent has a number for a child that is a node, so a whole number can only be the number of a node.
"""

import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ...core import __version__
from ...core._by_identity import IdentityDict
from ...core._errors import CycleError
from ...core._node_types import RefusalError
from ...core._printing import printable
from ...ties._views import View
from ..arrays._placing import describe, is_array
from ..trust._buildable_classes import kind_of
from ._all_kinds_of_nodes import (
    TAKERS,
    extend_digests,
    first_beyond_bounds,
    first_with_nan_key,
    first_with_unsafe_object,
    key_sizes,
    steps,
)
from ._atoms import ENCODERS, LEFT_OUT
from ._instances import Instances
from ._kinds_of_values import (
    BoundMethod,
    CompiledFunction,
    function_of_method,
    name_of_method,
    take_bound_method,
    take_by_base_class,
    take_enum,
    take_registered,
)
from ._left_out_values import Key, LeaveOut, find_in_template
from ._manifest import FORMAT
from ._nodes import MAX_NAME, Collisions, Decomposition, Manifest, Node, TypeEntry
from ._paths import path_to
from ._written_by_name import Named, Problem, problem_at, unserialisable

# Most steps of a path that is used as the name of a tensor.
_MAX_STEPS_IN_NAME = 64


class Encoded(NamedTuple):
    """A DAG as a manifest and arrays.

    Attributes:
        manifest: the manifest, ready for `json.dumps`.
        arrays: one JAX or NumPy array for each entry of the manifest's `arrays`, not copied. For typed PRNG keys, the
            raw data.
        named: each name in the manifest → its class or function.
    """

    manifest: dict[str, Any]
    arrays: list[Any]
    named: dict[str, Any]

    @property
    def names(self) -> list[str]:
        """Name of each array's tensor."""
        return [entry["tensor"] for entry in self.manifest["arrays"]]


def encode(tree: Any, leave_out: Iterable[str] = ()) -> Encoded:
    """Takes a DAG apart into a manifest and arrays.

    Arrays are aliased. Everything else is copied.

    Args:
        tree: the DAG.
        leave_out: names of attributes, and paths, whose values are not written.

    Raises:
        CycleError: if an object contains itself.
        UnserialisableError: if something cannot be written. All such objects are listed.
        ValueError: if an entry of `leave_out` matches nothing.

    Cost: one walk over the nodes; about 3 µs for each node and 5 µs for each array.

    Limitations: two NumPy views of one buffer are two arrays. NumPy scalars, numbers and texts have no identity, so
    their sharing is not kept. Instances of subclasses of `numpy.ndarray` are refused, except `numpy.memmap`.

    Example:
        >>> import jax.numpy as jnp
        >>> w = jnp.ones(2)
        >>> encoded = encode({"embed": w, "head": w})
        >>> encoded.names
        ["['embed']"]
        >>> encoded.manifest["nodes"]
        [['array', 0], ['dict', ['embed', 'head'], [0, 0]]]
    """
    entries = (leave_out,) if isinstance(leave_out, str) else tuple(leave_out)
    left_out = LeaveOut(entries)
    walk = _Walk(left_out)
    root = walk.run(tree)
    problems = walk.all_problems()
    if problems:
        num_left_out = len(left_out.objects)
        # The error offers further entries of `leave_out` only if they leave out exactly the problems.
        raise unserialisable(problems, lambda more: _count_left_out(tree, [*entries, *more], num_left_out))
    left_out.require_used()
    manifest = {
        "format": FORMAT,
        "library": f"sharedtree {__version__}",
        "types": walk.types,
        "arrays": walk.entries,
        "nodes": walk.nodes,
        "root": root,
    }
    if walk.main is not None:
        manifest["main"] = walk.main
    return Encoded(manifest, walk.arrays, walk.named)


def _count_left_out(tree: Any, entries: Sequence[str], num_without: int) -> int | None:
    """Returns how many values more than `num_without` are left out of a tree with these entries of `leave_out`.

    Returns:
        None if the rest of the tree still cannot be written.
    """
    walk = _Walk(LeaveOut(entries))
    walk.run(tree)
    return None if walk.all_problems() else len(walk.left_out.objects) - num_without


def names_in(tree: Any) -> dict[str, Any]:
    """Returns the classes, functions and methods that a file of a tree would name: name → object.

    Objects that cannot be written are skipped.

    Raises:
        CycleError: if an object contains itself.
    """
    walk = _Walk()
    walk.run(tree)
    owners = [entry["name"] for entry in walk.types]
    methods: dict[str, Any] = {}
    for node, obj in zip(walk.nodes, walk.objects, strict=True):
        name = name_of_method(owners, walk.nodes, node)
        if name is not None:
            methods[name] = function_of_method(obj)
    return {**walk.named, **methods}


def find_left_out_values(template: Any, manifest: Manifest, new_step: Any) -> Mapping[Key, Any]:
    """Finds the values that were left out of a file, at the same paths of a template.

    Args:
        manifest: the file.
        template: the template.
        new_step: (node, step in the file) → step in the template. None if the attribute is dropped.

    Returns:
        Atom in the file → value in the template.
    """
    walk = _Walk()
    walk.frames_by_node = {}
    template_manifest = walk.manifest_of(walk.run(template))
    return find_in_template(manifest, template_manifest, functools.partial(walk.open_node, template_manifest), new_step)


class _Frame:
    """An object on the path from the root to the place of the walk.

    Attributes:
        obj: the object.
        children: its children.
        steps: the step of a path to each child.
        build: makes the node from `written`, once all children are in it.
        written: for each child that was written so far, the number of its node, or its atom.
    """

    __slots__ = ("build", "children", "obj", "steps", "written")

    def __init__(self, obj: Any, decomposition: Decomposition) -> None:
        self.obj = obj
        self.children, self.steps, self.build = decomposition[:3]
        self.written: list[Any] = []


class _MemberOrder:
    """Sort keys for the members of sets of which some member is no atom.

    A key is made of a member's contents, so it is the same in every process. Numbers of nodes are not, because they
    depend on the order in which a set gives its members.

    Attributes:
        walk: a second walk, which visits all members of all sets, each of them once.
        digests: digest of each of its nodes.
    """

    def __init__(self) -> None:
        self.walk: _Walk | None = None
        self.digests: list[str] = []

    def sort_key(self, member: Any) -> str:
        """Returns the key of a member that the second walk has visited."""
        assert self.walk is not None
        # The second walk finds the node of a member by identity. Other members are atoms, which it writes again.
        written = self.walk._visit(member)
        return f"node {self.digests[written]}" if type(written) is int else json.dumps(written)


# Number of the node of an object whose children are not all written. If such an object is visited, it contains itself.
_UNFINISHED = -1
# Result of a visit to an object whose children must be written first.
_PENDING: Any = object()


class _Walk:
    """One walk over a tree, with everything that it has written.

    Attributes:
        types: entries of `types` in the manifest.
        entries: entries of `arrays`.
        nodes: the nodes. Children stand before their parents.
        objects: the object of each node. The list keeps them alive, because objects are looked up by identity.
        arrays: the arrays.
        problems: objects that cannot be written.
        named: name → class or function.
        left_out: the option `leave_out`.
        frames_by_node: number of a node → how its object was taken apart. None if that is not kept.
    """

    def __init__(self, left_out: LeaveOut | None = None) -> None:
        self.types: list[dict[str, Any]] = []
        self.entries: list[dict[str, Any]] = []
        self.nodes: list[Node] = []
        self.objects: list[Any] = []
        self.arrays: list[Any] = []
        self.problems: list[Problem] = []
        self._named = Named()
        self.named = self._named.objects
        self._collisions = Collisions()
        self._instances = Instances(self.types, self._named)
        self._node_numbers: IdentityDict[int] = IdentityDict()
        self._frames: list[_Frame] = []
        self._tensors: set[str] = set()
        # Registered classes and enums, whose types list no fields.
        self._type_numbers: dict[Any, int] = {}
        self._member_order: _MemberOrder | None = _MemberOrder()
        self.left_out = left_out or LeaveOut(())
        self._leaves_out = bool(self.left_out)
        self.frames_by_node: dict[int, _Frame] | None = None
        self._num_open_views = 0
        # Numbers of the nodes that have so far been reached through views only.
        self._only_in_views: set[int] = set()

    def run(self, tree: Any) -> Any:
        """Writes a tree. Returns the number of its node, or its atom. Returns None if it cannot be written.

        `_visit` opens a frame for an object that is taken apart. The loop visits the children of the frame on top. When
        all of them are written, the frame's own node is added, and its number is the next child of the frame below.
        """
        # The node or atom that was just written, or `_PENDING` if a frame was opened instead.
        child = self._visit(tree)
        frames = self._frames
        while frames:
            frame = frames[-1]
            written, children = frame.written, frame.children
            if child is not _PENDING:
                written.append(child)
            if len(written) == len(children):
                node = self._build_node(frame)
                frames.pop()
                self._num_open_views -= type(frame.obj) is View
                child = self._add_node(frame.obj, node)
                if self.frames_by_node is not None:
                    self.frames_by_node[child] = frame
            else:
                child = self._visit(children[len(written)])
        return child

    def all_problems(self) -> list[Problem]:
        """Returns the objects that cannot be written. If there are none, checks the tree as a whole.

        These checks find nesting without bound, a NaN as a key, and the like. The first that fails gives the result.
        The list is empty if the tree can be written. Call this once, after `run`.
        """
        names = [*self.named, *(name for entry in self.types for key in _LISTS for name in entry.get(key, ()))]
        # Keys with the same hash were counted during the walk as if each had one part. Keys that are nodes have more.
        for number, size in key_sizes(self.nodes).items():
            self._collisions.correct_size(list(self.objects[number]), size)
        if self._collisions.are_too_many():
            self.problems.append(Problem("", "a tree in which too many keys have one hash", _OTHER_HASHES))
        for name in names:
            if len(name) > MAX_NAME:
                reason = f"a tree that uses the name `{name[:80]}...` of {len(name):,} characters"
                self.problems.append(Problem("", reason, "Choose a shorter one."))
        if self.problems:
            return self.problems
        # Without problems so far, the tree was written completely, and can be checked as a whole.
        if self.left_out.objects:
            # The last node is the root: a root that is an atom has no children to leave out.
            problems = self.left_out.find_problems(self.manifest_of(len(self.nodes) - 1), self._node_numbers)
            if problems:
                return problems
        classes = [self.named[entry["name"]] for entry in self.types]
        number = first_beyond_bounds(self.nodes)
        if number is not None:
            kind = self.nodes[number][0]
            reason = f"a `{kind}` nested so deeply, or shared so often, that Python could not free it or hash it"
            return [Problem("", reason, "Hold its parts in one list or tuple instead of inside one another.")]
        number = first_with_nan_key(self.nodes)
        if number is not None:
            reason = f"a `{self.nodes[number][0]}` with a NaN as a key, or in one, which is equal to nothing"
            path = path_to(self.manifest_of(len(self.nodes) - 1), number)
            return [Problem(path, reason, "Take another key, `None` say, or hold pairs in a list.")]
        number = first_with_unsafe_object(self.nodes, classes)
        if number is not None:
            node = self.nodes[number]
            holder = self.types[node[1]]["name"] if node[0] == "registered" else node[0]
            place = "an object of Flax NNX, or a `Module`, as a key or in its auxiliary data"
            reason = f"a tree with a `{holder}` that has {place}"
            return [Problem("", reason, _AS_CHILD)]
        return []

    def manifest_of(self, root: Any) -> Manifest:
        """Returns the types and nodes that were written so far, as a parsed manifest. It has no arrays and no names."""
        lists = [[tuple(entry.get(key, ())) for key in _LISTS] for entry in self.types]
        types = [
            TypeEntry(entry["name"], entry["kind"], fields, missing, extra)
            for entry, (fields, missing, extra) in zip(self.types, lists, strict=True)
        ]
        return Manifest("", tuple(types), (), self.nodes, root, {}, ())

    def open_node(self, manifest: Manifest, number: int) -> Iterator[tuple[Any, str]]:
        """Yields the children of a node's object, each with the step that it has in a file, but no keys of mappings.

        Args:
            manifest: everything that was written.
            number: number of the node. Nothing is yielded for an array, which has no children.
        """
        frame = None if self.frames_by_node is None else self.frames_by_node.get(number)
        if frame is not None:
            # The steps of a node in a file can differ from those of the walk, and so can the order of the children. So
            # the node is built again, with a mark in the place of each child that says its position in the walk. Keys
            # stay, because they are part of the steps. An atom that no other child of this node can be serves as mark.
            pairs = zip(frame.written, frame.steps, strict=True)
            marks = [child if step.startswith("<") else [LEFT_OUT, str(i)] for i, (child, step) in enumerate(pairs)]
            for mark, step in steps(manifest, frame.build(marks)):
                if type(mark) is list and mark[0] == LEFT_OUT:
                    yield frame.children[int(mark[1])], step

    @property
    def main(self) -> str | None:
        """Name by which others import the running program. None if the tree uses no name of it."""
        return self._named.main

    def path(self, num_frames: int | None = None) -> str:
        """Returns the path to the child that the walk is at, which is the next child of the frame on top.

        Args:
            num_frames: how many frames from the root the path goes through. -1 for all but the last, which gives the
                path to the object of the frame on top. Default: all of them.
        """
        return "".join([frame.steps[len(frame.written)] for frame in self._frames[:num_frames]])

    def _build_node(self, frame: _Frame) -> Node:
        """Returns the node of an object whose children are written.

        If the object is refused, adds a problem, and returns a node that takes its place.
        """
        try:
            return frame.build(frame.written)
        # Some objects are refused only now, because of the kinds of their children.
        except RefusalError as error:
            self.problems.append(Problem(self.path(-1), error.reason, error.fix))
            return ["marker"]

    def _add_node(self, obj: Any, node: Node) -> int:
        number = len(self.nodes)
        self.nodes.append(node)
        self._node_numbers[obj] = number
        self.objects.append(obj)
        if self._num_open_views:
            self._only_in_views.add(number)
        return number

    def _visit(self, obj: Any) -> Any:
        """Returns the atom of an object, the number of its node, or `_PENDING` after opening a frame for it.

        An object that was visited before, or is an array, has a node at once. For an object that cannot be written,
        adds a problem, and returns None. This is the atom of Python's `None`, so the walk can go on.

        Raises:
            CycleError: if the object is one of those that are being written, so that it contains itself.
        """
        if self._leaves_out and self._frames:
            frame = self._frames[-1]
            atom = self.left_out.leave_out_if_matched(obj, frame.steps[len(frame.written)], self.path)
            if atom is not None:
                return atom
        cls = type(obj)
        encode_atom = ENCODERS.get(cls)
        if encode_atom is not None:
            return encode_atom(obj)
        number = self._node_numbers.get(obj)
        if number is not None:
            if number == _UNFINISHED:
                self._raise_cycle(obj)
            if number in self._only_in_views and not self._num_open_views:
                self._name_by_own_place(number)
            return number
        try:
            decomposition = self._take_apart(obj, cls)
        except RefusalError as error:
            self.problems.append(problem_at(self.path(), [frame.obj for frame in self._frames], obj, error))
            return None
        # The object was not taken apart: it is an array, whose node was added, or it was written as an atom (a name).
        if type(decomposition) is not Decomposition:
            return decomposition
        self._node_numbers[obj] = _UNFINISHED
        self._frames.append(_Frame(obj, decomposition))
        self._num_open_views += cls is View
        return _PENDING

    def _take_apart(self, obj: Any, cls: Any) -> Any:
        """Takes an object apart that is no plain atom. Arrays, classes and functions are written at once.

        Returns:
            A `Decomposition`, the number of an array's node, or an atom.

        Raises:
            RefusalError: if the object cannot be written.
        """
        if is_array(cls):
            return self._write_array(obj)
        take = TAKERS.get(cls)
        if take is not None:
            decomposition = take(obj)
            try:
                if decomposition.keys:
                    self._collisions.add(decomposition.keys)
            except ValueError as error:
                reason = f"a `{cls.__name__}` in which {error}, so that it would take long to build"
                raise RefusalError(reason, _OTHER_HASHES) from None
            return self._sort_members(obj, decomposition) if cls in (set, frozenset) else decomposition
        if isinstance(obj, type):
            return self._named.atom("class", obj)
        kind = kind_of(cls)
        if kind == "enum":
            return take_enum(obj, self._simple_type(cls, kind))
        if kind == "module":
            atom = self._named.atom_of_module(obj)
            if atom is not None:
                return atom
        if cls is CompiledFunction:
            raise RefusalError(
                "a function that `equinox.filter_jit` compiled, which cannot be rebuilt",
                "Save what it wraps, and wrap that again after loading.",
            )
        if cls is BoundMethod:
            bound = take_bound_method(obj)
            if bound is not None:
                return bound
        if kind == "registered":
            return take_registered(obj, self._simple_type(cls, kind))
        if kind is not None:
            return self._instances.take_apart(obj, cls)
        jax_or_numpy_value = take_by_base_class(obj)
        return self._named.atom_of_function(obj) if jax_or_numpy_value is None else jax_or_numpy_value

    def _sort_members(self, members: Any, decomposition: Decomposition) -> Decomposition:
        """Returns the decomposition of a set, with its children in an order that is the same in every process.

        The order is that of digests of the members' contents. A second walk writes the members to get the digests.

        Args:
            members: the set.
            decomposition: the set, taken apart.
        """
        order = self._member_order
        # Sets of atoms are sorted by their texts when the node is built. In the second walk, `order` is None.
        if order is None or all(type(member) in ENCODERS for member in members):
            return decomposition
        if order.walk is None:
            order.walk = _Walk()
            # Digests of sets do not depend on their order, so the second walk sorts nothing.
            order.walk._member_order = None
        try:
            order.walk.run(members)
        # The first walk will get to the same cycle, and raise an error with the path from the root.
        except CycleError:
            self._member_order = None
            return decomposition
        extend_digests(order.digests, order.walk.nodes, order.walk.types, order.walk.entries)
        return decomposition._replace(children=sorted(decomposition.children, key=order.sort_key))

    def _write_array(self, obj: Any) -> int:
        """Adds an array, its entry and its node. Returns the number of the node."""
        # The name of the tensor is made after `describe`, which may refuse the array.
        entry, data = describe(obj, "")
        entry["tensor"] = self._tensor_name()
        self.entries.append(entry)
        self.arrays.append(data)
        return self._add_node(obj, ["array", len(self.entries) - 1])

    def _name_by_own_place(self, number: int) -> None:
        """Names the tensors at and below a node anew, which was reached through a view before.

        Readers of other libraries look for `embed.weight`, not for the place of a layer that is computed from it.
        """
        stack = [(number, self.path())]
        while stack:
            number_below, path = stack.pop()
            self._only_in_views.discard(number_below)
            node = self.nodes[number_below]
            if node[0] == "array":
                entry = self.entries[node[1]]
                self._tensors.discard(entry["tensor"])
                entry["tensor"] = self._unique_name(path)
            else:
                children = steps(self.manifest_of(number_below), node)
                stack.extend((child, path + step) for child, step in children if type(child) is int)

    def _tensor_name(self) -> str:
        """Returns the name of a new tensor: its path, or `array7` for the eighth array if the path is long."""
        is_short = len(self._frames) <= _MAX_STEPS_IN_NAME
        return self._unique_name(self.path() if is_short else f"array{len(self.entries)}")

    def _unique_name(self, path: str) -> str:
        """Returns the name of the tensor at a path. A repeated name gets `~2`, `~3`."""
        name = path.removeprefix(".") or "value"
        # Files use these names for other things.
        if name.startswith("sharedtree") or name == "__metadata__":
            name = "." + name
        unique, count = name, 1
        while unique in self._tensors:
            count += 1
            unique = f"{name}~{count}"
        self._tensors.add(unique)
        return unique

    def _simple_type(self, cls: Any, kind: str) -> int:
        """Returns the number of the type of a class that lists no fields: a registered class or an enum."""
        number = self._type_numbers.get(cls)
        if number is None:
            name = self._named.add(cls)
            number = self._type_numbers[cls] = len(self.types)
            self.types.append({"name": name, "kind": kind})
        return number

    def _raise_cycle(self, obj: Any) -> Any:
        """Raises the error for an object that contains itself.

        The object is that of a frame, and the walk has got to it again as a child of the frame on top.
        """
        start = next(i for i, frame in enumerate(self._frames) if frame.obj is obj)
        paths = self.path(start), self.path()
        shown = [printable(path) for path in paths]
        raise CycleError(
            f"A `{type(obj).__name__}` contains itself: it sits at `{shown[0]}` and again, within itself, at "
            f"`{shown[1]}`.\nA DAG has no cycles. Break the cycle before you save:\n    tree{shown[1]} = None",
            paths,
        )


# Keys of an entry of `types` that have lists of names.
_LISTS = ("fields", "missing", "extra")
_OTHER_HASHES = "Give their class a `__hash__` that tells them apart, or hold pairs in a list."
_AS_CHILD = (
    "Let it be a child, which JAX sees. In place of a treedef save the tree, and take its structure after loading."
)
