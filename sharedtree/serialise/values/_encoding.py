"""DAG → manifest and arrays, by a walk over the objects.

The walk follows objects, not treedefs, so static fields are part of it. What was met before is the same node again.
Nothing recurses, and nothing stops at the first object that cannot be written: all of them are listed in one error.
"""

import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ...core import __version__
from ...core._by_identity import IdentityDict
from ...core._errors import CycleError
from ...core._library_rows import RefusalError
from ...core._printing import printable
from ...ties._views import View
from ..arrays._placing import describe, is_array
from ..trust._buildable_classes import kind_of
from ._all_kinds_of_nodes import (
    TAKERS,
    extend_digests,
    first_touched,
    key_sizes,
    nan_among_keys,
    nested_too_deeply,
    steps,
)
from ._atoms import ENCODERS, LEFT_OUT
from ._instances import Instances
from ._kinds_of_instances import take_enum, take_registered
from ._kinds_of_jax_values import take_other
from ._kinds_of_values import BoundMethod, CompiledFunction, function_of, name_of_method, take_bound_method
from ._left_out_values import Key, LeaveOut, put_back
from ._manifest import FORMAT
from ._nodes import MAX_NAME, Apart, Collisions, Manifest, Node, TypeEntry
from ._paths import path_to
from ._written_by_name import Named, Problem, problem_at, unserialisable

_MAX_KEYS = 64  # a path with more keys is too long to be a name


class Encoded(NamedTuple):
    """A DAG as a manifest and arrays.

    Attributes:
        manifest: what `json.dumps` takes.
        arrays: one array for each entry of the manifest's `arrays`, JAX's or NumPy's, not copied. Of typed PRNG keys,
            the raw data.
        named: each name in the manifest, and the class or function that it led to.
    """

    manifest: dict[str, Any]
    arrays: list[Any]
    named: dict[str, Any]

    @property
    def names(self) -> list[str]:
        """The name of the tensor of each array."""
        return [entry["tensor"] for entry in self.manifest["arrays"]]


def encode(tree: Any, leave_out: Iterable[str] = ()) -> Encoded:
    """Takes a DAG apart into a manifest and arrays.

    Arrays are aliased, not copied; everything else is copied. What is called or lies as `leave_out` says is not taken.

    Raises:
        CycleError: if an object contains itself.
        UnserialisableError: if something cannot be written. Everything that cannot is listed.
        ValueError: if `leave_out` has what leads nowhere.

    Cost: one walk over the nodes; about 3 µs for each node and 5 µs for each array.

    Limitations: two NumPy views of one buffer are two arrays. Sharing of NumPy scalars, numbers and texts is not kept;
    they have no identity. An instance of a subclass of `numpy.ndarray` other than `numpy.memmap` is refused.

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
        num_before = len(left_out.objects)
        raise unserialisable(problems, lambda more: _num_left_out(tree, [*entries, *more], num_before))
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


def _num_left_out(tree: Any, entries: Sequence[str], num_before: int) -> int | None:
    """How many values entries leave out of a tree, beyond some; None if the rest cannot be written either."""
    walk = _Walk(LeaveOut(entries))
    walk.run(tree)
    return None if walk.all_problems() else len(walk.left_out.objects) - num_before


def names_in(tree: Any) -> dict[str, Any]:
    """The classes and functions that a tree holds, by name. What cannot be written is passed over.

    Raises:
        CycleError: if an object contains itself.
    """
    walk = _Walk()
    walk.run(tree)
    owners = [entry["name"] for entry in walk.types]
    methods = {
        name: function_of(obj)
        for node, obj in zip(walk.nodes, walk.alive, strict=True)
        if (name := name_of_method(owners, walk.nodes, node)) is not None
    }
    return {**walk.named, **methods}


def like_in(template: Any, manifest: Manifest, new_step: Any) -> Mapping[Key, Any]:
    """What a template has in the places of what was left out of a file; `new_step` is as for `put_back`."""
    walk = _Walk()
    walk.opened = {}
    whole = walk.written(walk.run(template))
    return put_back(manifest, whole, functools.partial(walk.open_node, whole), new_step)


class _Frame:
    __slots__ = ("build", "children", "done", "keys", "obj")

    def __init__(self, obj: Any, apart: Apart) -> None:
        self.obj = obj
        self.children, self.keys, self.build = apart[:3]
        self.done: list[Any] = []


class _Ranking:
    """Tells the members of sets apart: by a walk of its own, which sees each of them once, and digests of its nodes."""

    def __init__(self) -> None:
        self.walk: _Walk | None = None
        self.digests: list[str] = []

    def rank(self, member: Any) -> str:
        assert self.walk is not None
        written = self.walk._visit(member)  # what has a node has it already; the rest are atoms
        return f"node {self.digests[written]}" if type(written) is int else json.dumps(written)


_OPEN = -1
_PENDING: Any = object()


class _Walk:
    def __init__(self, left_out: LeaveOut | None = None) -> None:
        self.types: list[dict[str, Any]] = []
        self.entries: list[dict[str, Any]] = []
        self.nodes: list[Node] = []
        self.alive: list[Any] = []  # the object of each of `nodes`
        self.arrays: list[Any] = []
        self.problems: list[Problem] = []
        self._named = Named()
        self.named = self._named.objects
        self._collisions = Collisions()
        self._instances = Instances(self.types, self._named)
        self._memo: IdentityDict[int] = IdentityDict()  # object → node
        self._frames: list[_Frame] = []
        self._tensors: set[str] = set()
        self._type_numbers: dict[Any, int] = {}  # of classes whose types list no fields
        self._ranking: _Ranking | None = _Ranking()
        self.left_out = left_out or LeaveOut(())
        self._leaves_out = bool(self.left_out)
        self.opened: dict[int, _Frame] | None = None  # how each node came apart, if somebody wants to know
        self._num_open_views = 0
        self._only_in_views: set[int] = set()  # nodes to which no path has led that goes through no view

    def run(self, tree: Any) -> Any:
        child = self._visit(tree)
        frames = self._frames
        while frames:
            frame = frames[-1]
            done, children = frame.done, frame.children
            if child is not _PENDING:
                done.append(child)
            if len(done) == len(children):
                node = self._built(frame)
                frames.pop()
                self._num_open_views -= type(frame.obj) is View
                child = self._add(frame.obj, node)
                if self.opened is not None:
                    self.opened[child] = frame
            else:
                child = self._visit(children[len(done)])
        return child

    def all_problems(self) -> list[Problem]:
        """What cannot be written; if all of it can, what is wrong with the whole."""
        names = [*self.named, *(name for entry in self.types for key in _LISTS for name in entry.get(key, ()))]
        for number, size in key_sizes(self.nodes).items():
            self._collisions.add_size(list(self.alive[number]), size)
        if self._collisions.are_too_many():
            self.problems.append(Problem("", "a tree in which too many keys have one hash", _OTHER_HASHES))
        for name in names:
            if len(name) > MAX_NAME:
                what = f"a tree that uses the name `{name[:80]}...` of {len(name):,} characters"
                self.problems.append(Problem("", what, "Choose a shorter one."))
        if self.problems:
            return self.problems
        if self.left_out.objects:
            faults = self.left_out.faults(self.written(len(self.nodes) - 1), self._memo)
            if faults:
                return faults
        classes = [self.named[entry["name"]] for entry in self.types]
        deep = nested_too_deeply(self.nodes)
        if deep is not None:
            kind = self.nodes[deep][0]
            what = f"a `{kind}` nested so deeply, or shared so often, that Python could not free it or hash it"
            return [Problem("", what, "Hold its parts in one list or tuple instead of inside one another.")]
        unequal = nan_among_keys(self.nodes)
        if unequal is not None:
            what = f"a `{self.nodes[unequal][0]}` with a NaN as a key, or in one, which is equal to nothing"
            where = path_to(self.written(len(self.nodes) - 1), unequal)
            return [Problem(where, what, "Take another key, `None` say, or hold pairs in a list.")]
        touched = first_touched(self.nodes, classes)
        if touched is not None:
            node = self.nodes[touched]
            holder = self.types[node[1]]["name"] if node[0] == "registered" else node[0]
            place = "an object of Flax NNX, or a `Module`, as a key or in its auxiliary data"
            what = f"a tree with a `{holder}` that has {place}"
            return [Problem("", what, _AS_CHILD)]
        return []

    def written(self, root: Any) -> Manifest:
        """What has been written so far, as a reader has it."""
        lists = [[tuple(entry.get(key, ())) for key in _LISTS] for entry in self.types]
        types = [
            TypeEntry(entry["name"], entry["kind"], fields, missing, extra)
            for entry, (fields, missing, extra) in zip(self.types, lists, strict=True)
        ]
        return Manifest("", tuple(types), (), self.nodes, root, {}, ())

    def open_node(self, whole: Manifest, number: int) -> Iterator[tuple[Any, str]]:
        """What the object of a node holds, each with what leads to it; `whole` is all that was written."""
        frame = None if self.opened is None else self.opened.get(number)
        if frame is not None:
            # With a number in the place of each child but the keys, the node says by itself what leads to which.
            written = zip(frame.done, frame.keys, strict=True)
            marks = [done if key.startswith("<") else [LEFT_OUT, str(i)] for i, (done, key) in enumerate(written)]
            for mark, step in steps(whole, frame.build(marks)):
                if type(mark) is list and mark[0] == LEFT_OUT:
                    yield frame.children[int(mark[1])], step

    @property
    def main(self) -> str | None:
        """The module that was the running program, if anything of it is named."""
        return self._named.main

    def path(self, upto: int | None = None) -> str:
        """Where the walk is."""
        return "".join([frame.keys[len(frame.done)] for frame in self._frames[:upto]])

    def _built(self, frame: _Frame) -> Node:
        try:
            return frame.build(frame.done)
        except RefusalError as error:  # of what its children turned out to be
            self.problems.append(Problem(self.path(-1), error.reason, error.fix))
            return ["marker"]

    def _add(self, obj: Any, node: Node) -> int:
        number = len(self.nodes)
        self.nodes.append(node)
        self._memo[obj] = number
        self.alive.append(obj)
        if self._num_open_views:
            self._only_in_views.add(number)
        return number

    def _visit(self, obj: Any) -> Any:
        """How an object is written; or, if its children come first, opens a frame."""
        if self._leaves_out and self._frames:
            frame = self._frames[-1]
            atom = self.left_out.atom_for(obj, frame.keys[len(frame.done)], self.path)
            if atom is not None:
                return atom
        cls = type(obj)
        encode_atom = ENCODERS.get(cls)
        if encode_atom is not None:
            return encode_atom(obj)
        known = self._memo.get(obj)
        if known is not None:
            if known == _OPEN:
                self._raise_cycle(obj)
            if known in self._only_in_views and not self._num_open_views:
                self._name_by_own_place(known)
            return known
        try:
            apart = self._apart(obj, cls)
        except RefusalError as error:
            self.problems.append(problem_at(self.path(), [frame.obj for frame in self._frames], obj, error))
            return None
        if type(apart) is not Apart:
            return apart
        self._memo[obj] = _OPEN
        self._frames.append(_Frame(obj, apart))
        self._num_open_views += cls is View
        return _PENDING

    def _apart(self, obj: Any, cls: Any) -> Any:
        if is_array(cls):
            return self._array(obj)
        take = TAKERS.get(cls)
        if take is not None:
            apart = take(obj)
            try:
                if apart.hashed:
                    self._collisions.add(apart.hashed)
            except ValueError as error:
                what = f"a `{cls.__name__}` in which {error}, so that it would take long to build"
                raise RefusalError(what, _OTHER_HASHES) from None
            return self._in_order(obj, apart) if cls in (set, frozenset) else apart
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
        other = take_other(obj)
        return self._named.atom_of_function(obj) if other is None else other

    def _in_order(self, members: Any, apart: Apart) -> Apart:
        """A set whose members come in an order that is the same in every process."""
        ranking = self._ranking
        if ranking is None or all(type(member) in ENCODERS for member in members):
            return apart
        if ranking.walk is None:
            ranking.walk = _Walk()
            ranking.walk._ranking = None  # it needs no order itself
        try:
            ranking.walk.run(members)
        except CycleError:  # this walk comes to it, too, and can say where
            self._ranking = None
            return apart
        extend_digests(ranking.digests, ranking.walk.nodes, ranking.walk.types, ranking.walk.entries)
        return apart._replace(children=sorted(apart.children, key=ranking.rank))

    def _array(self, obj: Any) -> int:
        entry, data = describe(obj, "")
        entry["tensor"] = self._tensor_name()
        self.entries.append(entry)
        self.arrays.append(data)
        return self._add(obj, ["array", len(self.entries) - 1])

    def _name_by_own_place(self, number: int) -> None:
        """Names the tensors at and below a node anew, which was reached through a view before.

        Readers of other libraries look for `embed.weight`, and not for the place of a layer that is computed from it.
        """
        stack = [(number, self.path())]
        while stack:
            below, path = stack.pop()
            self._only_in_views.discard(below)
            node = self.nodes[below]
            if node[0] == "array":
                entry = self.entries[node[1]]
                self._tensors.discard(entry["tensor"])
                entry["tensor"] = self._unique_name(path)
            else:
                parts = steps(self.written(below), node)
                stack.extend((child, path + step) for child, step in parts if type(child) is int)

    def _tensor_name(self) -> str:
        return self._unique_name(self.path() if len(self._frames) <= _MAX_KEYS else f"array{len(self.entries)}")

    def _unique_name(self, path: str) -> str:
        name = path.removeprefix(".") or "value"
        if name.startswith("sharedtree") or name == "__metadata__":
            name = "." + name
        unique, count = name, 1
        while unique in self._tensors:
            count += 1
            unique = f"{name}~{count}"
        self._tensors.add(unique)
        return unique

    def _simple_type(self, cls: Any, kind: str) -> int:
        known = self._type_numbers.get(cls)
        if known is None:
            name = self._named.add(cls)
            known = self._type_numbers[cls] = len(self.types)
            self.types.append({"name": name, "kind": kind})
        return known

    def _raise_cycle(self, obj: Any) -> Any:
        start = next(i for i, frame in enumerate(self._frames) if frame.obj is obj)
        paths = self.path(start), self.path()
        shown = [printable(path) for path in paths]
        raise CycleError(
            f"A `{type(obj).__name__}` contains itself: it sits at `{shown[0]}` and again, within itself, at "
            f"`{shown[1]}`.\nA DAG has no cycles. Break the cycle before you save:\n    tree{shown[1]} = None",
            paths,
        )


_LISTS = ("fields", "missing", "extra")  # of names, in a type
_OTHER_HASHES = "Give their class a `__hash__` that tells them apart, or hold pairs in a list."
_AS_CHILD = (
    "Let it be a child, which JAX sees. In place of a treedef save the tree, and take its structure after loading."
)
