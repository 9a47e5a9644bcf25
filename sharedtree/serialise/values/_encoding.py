"""Encodes a DAG as a manifest and arrays, by a walk over its objects.

The walk follows objects, not treedefs, so it visits static fields as well. An object that was visited before is the
same node again. Nothing recurses. The walk does not stop at the first object that cannot be written: one error lists
all of them.

An object becomes either a *node*, a list of its kind and its children, or an *atom*, a value that its parent has in
place. `None`, booleans and strings are themselves as atoms; other atoms are lists of texts, such as `["int", "7"]`. A
parent has a number for a child that is a node, so a whole number can only be the number of a node.

    {"a": w, "b": (w, 7)}      node 0  ["array", 0]
                               node 1  ["tuple", [0, ["int", "7"]]]
                               node 2  ["dict", ["a", "b"], [0, 1]]

Words: a child is *written* once it is the number of a node, or an atom. A *frame* is an object that the walk is in: its
children are being written. A *view* (`View`) is an array computed from other arrays, which are its children.
"""

import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

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
from ._left_out_values import Key, LeaveOut, NewStep, find_in_template
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
        named: each name of a class or function in the manifest → the class or function.
    """

    manifest: dict[str, Any]
    arrays: list[Any]
    named: dict[str, Any]

    @property
    def names(self) -> list[str]:
        """Names of the arrays' tensors, in the order of `arrays`."""
        return [entry["tensor"] for entry in self.manifest["arrays"]]


def encode(tree: Any, leave_out: Iterable[str] = ()) -> Encoded:
    """Takes a DAG apart into a manifest and arrays.

    Arrays are aliased. Everything else is copied.

    Args:
        tree: the root of the DAG.
        leave_out: names of attributes, and paths, whose values are not written. For example `["tx", ".heads[0]"]`.

    Raises:
        CycleError: if an object contains itself.
        UnserialisableError: if something cannot be written. All such objects are listed.
        ValueError: if an entry of `leave_out` is neither a name nor a path, or matches nothing.

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
        # The error offers further entries of `leave_out` only if they leave out exactly the problems. To find out, it
        # calls this function with the further entries.
        num_so_far = len(left_out.objects)
        raise unserialisable(problems, lambda more: _count_left_out(tree, [*entries, *more], num_so_far))
    left_out.require_used()
    manifest = {
        "format": FORMAT,
        "library": f"sharedtree {__version__}",
        "types": walk.types,
        "arrays": walk.array_entries,
        "nodes": walk.nodes,
        "root": root,
    }
    if walk.main is not None:
        manifest["main"] = walk.main
    return Encoded(manifest, walk.arrays, walk.named)


def _count_left_out(tree: Any, entries: Sequence[str], num_so_far: int) -> int | None:
    """Writes a tree once more, with other entries of `leave_out`, and counts how many more values they leave out.

    Args:
        tree: the tree.
        entries: the entries: those of the user, and further ones.
        num_so_far: how many values the user's entries leave out.

    Returns:
        The number of values beyond `num_so_far`. None if the rest of the tree still cannot be written.
    """
    walk = _Walk(LeaveOut(entries))
    walk.run(tree)
    return None if walk.all_problems() else len(walk.left_out.objects) - num_so_far


def names_in(tree: Any) -> dict[str, Any]:
    """Returns the classes, functions and methods that a file of a tree would name, as a dict: name → object.

    Objects that cannot be written are skipped.

    Raises:
        CycleError: if an object contains itself.
    """
    walk = _Walk()
    walk.run(tree)
    # The name of a method is made of the name of its class.
    owners = [entry["name"] for entry in walk.types]
    methods: dict[str, Any] = {}
    for node, obj in zip(walk.nodes, walk.objects, strict=True):
        name = name_of_method(owners, walk.nodes, node)
        if name is not None:
            methods[name] = function_of_method(obj)
    return {**walk.named, **methods}


def find_left_out_values(template: Any, manifest: Manifest, new_step: NewStep) -> Mapping[Key, Any]:
    """Finds the values left out of a file, at the same paths of a template.

    Args:
        template: the template.
        manifest: the manifest of the file.
        new_step: see `NewStep`.

    Returns:
        A dict: atom that takes the place of a value in the file, such as `("left_out", "0")` → value in the template.
        An atom is absent if the template has nothing at its path, or if its path leads through a dropped attribute.

    Raises:
        CycleError: if an object of the template contains itself.
    """
    walk = _Walk(keeps_frames=True)
    template_manifest = walk.manifest_of(walk.run(template))
    return find_in_template(manifest, template_manifest, functools.partial(walk.open_node, template_manifest), new_step)


class _Frame:
    """An object whose children are being written. The frames form the path from the root to the current object.

    Attributes:
        obj: the object.
        children: its children.
        steps: the step of a path to each child, such as `.weight`.
        build: makes the node from `written`, once all children are in it.
        written: for each child that was written so far, the number of its node, or its atom.
    """

    __slots__ = ("build", "children", "obj", "steps", "written")

    def __init__(self, obj: Any, decomposition: Decomposition) -> None:
        self.obj = obj
        self.children, self.steps, self.build = decomposition[:3]
        self.written: list[Any] = []


class _MemberOrder:
    """Sort keys for the members of sets with members that become nodes, such as tuples.

    A sort key is made of a member's contents, so it is the same in every process. The number of a node is not, because
    it depends on the order in which a set gives its members.

    Attributes:
        walk: a second walk, which visits all members of all such sets, each of them once. None before the first set.
        digests: digest of each node of the second walk.
    """

    def __init__(self) -> None:
        self.walk: _Walk | None = None
        self.digests: list[str] = []

    def sort_key(self, member: Any) -> str:
        """Returns the sort key of a member that the second walk has visited."""
        assert self.walk is not None
        # The second walk finds the node of a member by identity. A member without a node is an atom, and is written
        # again.
        written = self.walk._visit(member)
        return f"node {self.digests[written]}" if type(written) is int else json.dumps(written)


# Number of the node of an object whose children are not all written. If such an object is visited, it contains itself.
_UNFINISHED = -1
# Result of a visit to an object whose children must be written first.
_PENDING: Any = object()


class _Walk:
    """One walk over a tree, with everything that it has written.

    Args:
        left_out: the option `leave_out`. Default: nothing is left out.
        keeps_frames: True to keep how each object was taken apart, in `frames_by_node`.

    Attributes:
        types: entries of `types` in the manifest.
        array_entries: entries of `arrays` in the manifest.
        nodes: the nodes. Children stand before their parents.
        objects: the object of each node. The list keeps them alive, because objects are looked up by identity.
        arrays: the arrays.
        problems: refused objects.
        named: name → class or function.
        left_out: the option `leave_out`.
        frames_by_node: number of a node → how its object was taken apart. None if that is not kept.
    """

    def __init__(self, left_out: LeaveOut | None = None, *, keeps_frames: bool = False) -> None:
        self.types: list[dict[str, Any]] = []
        self.array_entries: list[dict[str, Any]] = []
        self.nodes: list[Node] = []
        self.objects: list[Any] = []
        self.arrays: list[Any] = []
        self.problems: list[Problem] = []
        self._named = Named()
        self.named = self._named.objects
        self._collisions = Collisions()
        self._instances = Instances(self.types, self._named)
        # Object → number of its node, or `_UNFINISHED`.
        self._node_numbers: IdentityDict[int] = IdentityDict()
        self._frames: list[_Frame] = []
        self._tensor_names: set[str] = set()
        # Registered class or enum → number of its type, which lists no fields.
        self._type_numbers: dict[Any, int] = {}
        # None if sets are not sorted: in a second walk, and after a cycle was found.
        self._member_order: _MemberOrder | None = _MemberOrder()
        self.left_out = left_out or LeaveOut(())
        self._leaves_out = bool(self.left_out)
        self.frames_by_node: dict[int, _Frame] | None = {} if keeps_frames else None
        # How many of the frames are views.
        self._num_open_views = 0
        # Numbers of the nodes that have so far been reached through views only.
        self._nodes_only_in_views: set[int] = set()

    def run(self, tree: Any) -> Any:
        """Writes a tree. Returns the number of its node, or its atom. Returns None if it cannot be written.

        `_visit` opens a frame for an object that is taken apart. The loop visits the children of the frame on top. When
        all of them are written, the node of the frame's object is added, and its number is written as the next child in
        the frame below.
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
                # A bool counts as 0 or 1.
                self._num_open_views -= type(frame.obj) is View
                child = self._add_node(frame.obj, node)
                if self.frames_by_node is not None:
                    self.frames_by_node[child] = frame
            else:
                child = self._visit(children[len(written)])
        return child

    def all_problems(self) -> list[Problem]:
        """Returns the problems that keep the tree from being written. The list is empty if it can be written.

        These are the objects that were refused during the walk, too many keys with one hash, and names that are too
        long. If there are none, the tree is checked as a whole: for nesting without bound, a NaN as a key, and the
        like. Then the list has the problems of the first check that fails.

        Call this once, after `run`, because it adds to what the walk has counted.
        """
        # All names in the manifest: of classes, functions and attributes.
        names = [*self.named, *(name for entry in self.types for key in _LISTS for name in entry.get(key, ()))]
        # Pairs of keys with the same hash were counted during the walk as if each key had one part. A key that is a
        # node has more parts, so the count is corrected.
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
            # The last node is the root. The root is no atom here, because an atom has no children to leave out.
            problems = self.left_out.find_problems(self.manifest_of(len(self.nodes) - 1), self._node_numbers)
            if problems:
                return problems
        classes = [self.named[entry["name"]] for entry in self.types]
        refused = first_beyond_bounds(self.nodes)
        if refused is not None:
            kind = self.nodes[refused][0]
            reason = f"a `{kind}` nested so deeply, or shared so often, that Python could not free it or hash it"
            return [Problem("", reason, "Hold its parts in one list or tuple instead of inside one another.")]
        refused = first_with_nan_key(self.nodes)
        if refused is not None:
            reason = f"a `{self.nodes[refused][0]}` with a NaN as a key, or in one, which is equal to nothing"
            path = path_to(self.manifest_of(len(self.nodes) - 1), refused)
            return [Problem(path, reason, "Take another key, `None` say, or hold pairs in a list.")]
        refused = first_with_unsafe_object(self.nodes, classes)
        if refused is not None:
            node = self.nodes[refused]
            holder = self.types[node[1]]["name"] if node[0] == "registered" else node[0]
            place = "an object of Flax NNX, or a `Module`, as a key or in its auxiliary data"
            reason = f"a tree with a `{holder}` that has {place}"
            return [Problem("", reason, _AS_CHILD)]
        return []

    def manifest_of(self, root: Any) -> Manifest:
        """Returns the types and nodes that were written so far, as a parsed manifest. It has no arrays and no names.

        Args:
            root: the number of the node, or the atom, that is the root of this manifest.
        """
        types: list[TypeEntry] = []
        for entry in self.types:
            fields, missing, extra = [tuple(entry.get(key, ())) for key in _LISTS]
            types.append(TypeEntry(entry["name"], entry["kind"], fields, missing, extra))
        return Manifest("", tuple(types), (), self.nodes, root, {}, ())

    def open_node(self, manifest: Manifest, number: int) -> Iterator[tuple[Any, str]]:
        """Yields the children of a node's object, each with the step that a file has for it. Keys are not yielded.

        The walk must have been made with `keeps_frames`. Otherwise nothing is yielded.

        Args:
            manifest: everything that was written.
            number: number of the node. Nothing is yielded for an array, which has no children.
        """
        frame = None if self.frames_by_node is None else self.frames_by_node.get(number)
        if frame is not None:
            # The steps of a node in a file can differ from the steps of the walk, and the order of the children can,
            # too. So the node is built again, with a mark in the place of each child: an atom with the child's position
            # in the walk, such as ["left_out", "3"]. The template leaves nothing out, so no child of it has such an
            # atom. Keys (their steps begin with "<") stay, because the steps to their values are made of them.
            pairs = zip(frame.written, frame.steps, strict=True)
            marks = [child if step.startswith("<") else [LEFT_OUT, str(i)] for i, (child, step) in enumerate(pairs)]
            for mark, step in steps(manifest, frame.build(marks)):
                if type(mark) is list and mark[0] == LEFT_OUT:
                    yield frame.children[int(mark[1])], step

    @property
    def main(self) -> str | None:
        """Name of the module by which other programs import the running one. None if the tree names nothing in it."""
        return self._named.main

    def path(self, num_frames: int | None = None) -> str:
        """Returns the path to the object that is visited now: the next child of the frame on top.

        Args:
            num_frames: end of the slice of frames, from the root on, through which the path goes. Default: all of them.
                `path(i)` is the path to the object of the frame i, and `path(-1)` to that of the frame on top.
        """
        return "".join([frame.steps[len(frame.written)] for frame in self._frames[:num_frames]])

    def _build_node(self, frame: _Frame) -> Node:
        """Returns the node of an object whose children are written.

        If the object is refused, adds a problem, and returns a `marker` node in its place, so that the walk can go on.
        """
        try:
            return frame.build(frame.written)
        # Some objects are refused only now, because of the kinds of their children.
        except RefusalError as error:
            self.problems.append(Problem(self.path(-1), error.reason, error.fix))
            return ["marker"]

    def _add_node(self, obj: Any, node: Node) -> int:
        """Adds the node of an object. Returns its number."""
        number = len(self.nodes)
        self.nodes.append(node)
        self._node_numbers[obj] = number
        self.objects.append(obj)
        if self._num_open_views:
            self._nodes_only_in_views.add(number)
        return number

    def _visit(self, obj: Any) -> Any:
        """Visits one object. Takes it apart and opens a frame, unless it is already written or has no children.

        Returns:
            - The atom of a value, or of a class or function.
            - The number of the node of an array, or of an object that was visited before.
            - `_PENDING` if a frame was opened.
            - None after adding a problem, if the object cannot be written. None is also the atom of Python's `None`, so
              the walk can go on.

        Raises:
            CycleError: if the object is that of a frame, so that it contains itself.
        """
        # 1. An object that the user leaves out. The root cannot be left out.
        if self._leaves_out and self._frames:
            frame = self._frames[-1]
            atom = self.left_out.leave_out_if_matched(obj, frame.steps[len(frame.written)], self.path)
            if atom is not None:
                return atom
        # 2. A plain value, such as a number or a text.
        cls = type(obj)
        encode_atom = ENCODERS.get(cls)
        if encode_atom is not None:
            return encode_atom(obj)
        # 3. An object that was visited before.
        number = self._node_numbers.get(obj)
        if number is not None:
            if number == _UNFINISHED:
                self._raise_cycle(obj)
            # So far, it was reached only through views, and its tensors are named by a path through a view.
            if number in self._nodes_only_in_views and not self._num_open_views:
                self._rename_tensors_below(number)
            return number
        # 4. A new object.
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
        """Takes apart an object that is no plain value. Arrays, classes and functions are written at once.

        The order of the questions matters, because an object can fit several.

        Returns:
            A `Decomposition`, the number of an array's node, or the atom of a class, a function or a NumPy scalar.

        Raises:
            RefusalError: if the object cannot be written.
        """
        if is_array(cls):
            return self._write_array(obj)
        take = TAKERS.get(cls)
        if take is not None:
            decomposition = take(obj)
            # `add` raises if too many of the keys have the same hash.
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
            return take_enum(obj, self._type_without_fields(cls, kind))
        # A module that takes the place of a function, or that a library uses as a constant, is written by name.
        if kind == "module":
            atom = self._named.atom_of_module(obj)
            if atom is not None:
                return atom
        if cls is CompiledFunction:
            raise RefusalError(
                "a function that `equinox.filter_jit` compiled, which cannot be rebuilt",
                "Save what it wraps, and wrap that again after loading.",
            )
        # `take_bound_method` returns None if the method cannot be found by its name. Then the bound method, which is a
        # module, is taken apart like any other.
        if cls is BoundMethod:
            bound = take_bound_method(obj)
            if bound is not None:
                return bound
        if kind == "registered":
            return take_registered(obj, self._type_without_fields(cls, kind))
        if kind is not None:
            return self._instances.take_apart(obj, cls)
        jax_or_numpy_value = take_by_base_class(obj)
        return self._named.atom_of_function(obj) if jax_or_numpy_value is None else jax_or_numpy_value

    def _sort_members(self, members: Any, decomposition: Decomposition) -> Decomposition:
        """Returns the decomposition of a set, with its children in an order that is the same in every process.

        The order is that of digests of the members' contents. A second walk writes the members to get the digests. The
        set is returned as it was taken apart if all members are plain values, or if a member contains itself.

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
            # The digest of a set does not depend on the order of its members, so the second walk sorts nothing.
            order.walk._member_order = None
        try:
            order.walk.run(members)
        # This walk will get to the same cycle, and raise the error with the path from the root.
        except CycleError:
            self._member_order = None
            return decomposition
        extend_digests(order.digests, order.walk.nodes, order.walk.types, order.walk.array_entries)
        return decomposition._replace(children=sorted(decomposition.children, key=order.sort_key))

    def _write_array(self, obj: Any) -> int:
        """Adds an array, its entry and its node. Returns the number of the node.

        Raises:
            RefusalError: if no file can have the array: see `describe`.
        """
        # `describe` returns the entry, and the array to store. It may refuse the array, so the tensor is named after
        # it.
        entry, data = describe(obj, "")
        entry["tensor"] = self._tensor_name()
        self.array_entries.append(entry)
        self.arrays.append(data)
        return self._add_node(obj, ["array", len(self.array_entries) - 1])

    def _rename_tensors_below(self, number: int) -> None:
        """Gives new names to the tensors at and below a node that was reached only through views before.

        The new names are the paths below the current path, which leads through no view. If `head.weight` is a view of
        `embed.weight`, other programs look for the name `embed.weight`, not for a path through the view.

        Args:
            number: number of the node.
        """
        stack = [(number, self.path())]
        while stack:
            number_below, path = stack.pop()
            # A node with a place of its own keeps its name. Each node is renamed once, by its first path.
            if number_below not in self._nodes_only_in_views:
                continue
            self._nodes_only_in_views.remove(number_below)
            node = self.nodes[number_below]
            if node[0] == "array":
                entry = self.array_entries[node[1]]
                self._tensor_names.discard(entry["tensor"])
                entry["tensor"] = self._unique_name(path)
            else:
                children = list(steps(self.manifest_of(number_below), node))
                # The last child goes on the stack first, so that the first path in flatten order gives the name.
                stack.extend((child, path + step) for child, step in reversed(children) if type(child) is int)

    def _tensor_name(self) -> str:
        """Returns the name of a new tensor: its path, or `array7` for the eighth array if the path is long."""
        is_short = len(self._frames) <= _MAX_STEPS_IN_NAME
        return self._unique_name(self.path() if is_short else f"array{len(self.array_entries)}")

    def _unique_name(self, path: str) -> str:
        """Returns the name of the tensor at a path. A repeated name gets `~2`, `~3`."""
        name = path.removeprefix(".") or "value"
        # A file uses these names for its own contents, so a tensor gets a dot before such a name.
        if name.startswith("sharedtree") or name == "__metadata__":
            name = "." + name
        unique, count = name, 1
        while unique in self._tensor_names:
            count += 1
            unique = f"{name}~{count}"
        self._tensor_names.add(unique)
        return unique

    def _type_without_fields(self, cls: Any, kind: str) -> int:
        """Returns the number of the type of a class that lists no fields: a registered class or an enum."""
        number = self._type_numbers.get(cls)
        if number is None:
            name = self._named.add(cls)
            number = self._type_numbers[cls] = len(self.types)
            self.types.append({"name": name, "kind": kind})
        return number

    def _raise_cycle(self, obj: Any) -> NoReturn:
        """Raises `CycleError` for the object of a frame that the walk has reached again below that frame."""
        start = next(i for i, frame in enumerate(self._frames) if frame.obj is obj)
        paths = self.path(start), self.path()
        shown = [printable(path) for path in paths]
        place = f"at `{shown[0]}`" if shown[0] else "at the root"
        raise CycleError(
            f"A `{type(obj).__name__}` contains itself: it sits {place} and again, within itself, at `{shown[1]}`.\n"
            f"A DAG has no cycles. Break the cycle before you save:\n    tree{shown[1]} = None",
            paths,
        )


# Keys of an entry of `types` whose values are lists of names.
_LISTS = ("fields", "missing", "extra")
_OTHER_HASHES = "Give their class a `__hash__` that tells them apart, or hold pairs in a list."
_AS_CHILD = (
    "Let it be a child, which JAX sees. In place of a treedef save the tree, and take its structure after loading."
)
