"""DAG → manifest and arrays, by a walk over the objects.

The walk follows objects, not treedefs, so static fields are part of it. What was met before is the same node again.
Nothing recurses, and nothing stops at the first object that cannot be written: all of them are listed in one error.
"""

import enum
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ..._errors import CycleError
from ..._printable import printable
from ..._version import __version__
from ..arrays._arrays import describe, is_array
from ..trust._allowed import FUNCTIONS, LIBRARIES, NAMES_ONLY
from ..trust._classes import kind_of
from ..trust._names import NamelessError, RefusalError, name_of, own_name_of
from ._apart import (
    Apart,
    BoundMethod,
    CompiledFunction,
    key_dtype_node,
    take_apart,
    take_apart_registered,
    take_bound_method,
    take_device,
)
from ._atoms import (
    encode_bytes,
    encode_complex,
    encode_dtype,
    encode_float,
    encode_int,
    encode_scalar,
    encode_special,
    encode_str,
)
from ._holding import held_array, require_no_array
from ._instances import Instances
from ._kinds import MAX_NAME
from ._manifest import FORMAT, nested_too_deeply, owner_of_method
from ._nesting import Collisions
from ._refusals import Problem, refusal_of, unserialisable
from ._touched import first_touched

_MAX_KEYS = 64  # a path with more keys is too long to be a name


class Encoded(NamedTuple):
    """A DAG as a manifest and arrays.

    Attributes:
        manifest: what `json.dumps` takes; see the grammar.
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


def encode(tree: Any) -> Encoded:
    """Takes a DAG apart into a manifest and arrays.

    Args:
        tree: any object: modules, containers, arrays and values.

    Returns:
        The manifest and the arrays. Arrays are aliased, not copied; everything else is copied.

    Raises:
        CycleError: if an object contains itself.
        UnserialisableError: if something cannot be written. Everything that cannot is listed.

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
    walk = _Walk()
    root = walk.run(tree)
    if walk.collisions.are_too_many():
        walk.problems.append(Problem("", "a tree in which too many keys have one hash", _OTHER_HASHES))
    walk.problems += [
        Problem("", f"a tree that uses the name `{name[:80]}...` of {len(name):,} characters", "Choose a shorter one.")
        for name in walk.texts()
        if len(name) > MAX_NAME
    ]
    if walk.problems:
        raise unserialisable(walk.problems)
    deep = nested_too_deeply(walk.nodes)
    if deep is not None:
        path = walk.path_of.get(deep, "")
        raise unserialisable(
            [
                Problem(
                    path,
                    f"a `{walk.nodes[deep][0]}` nested so deeply, or shared so often, that Python could not free it or "
                    "hash it",
                    _FLATTER,
                )
            ]
        )
    touched = first_touched(walk.nodes, [walk.named[entry["name"]] for entry in walk.types])
    if touched is not None:
        node = walk.nodes[touched]
        holder = walk.types[node[1]]["name"] if node[0] == "registered" else node[0]
        reason = (
            f"a tree with a `{holder}` that has an object of Flax NNX, or a `Module`, as a key or in its auxiliary data"
        )
        raise unserialisable([Problem("", reason, _AS_CHILD)])
    manifest = {
        "format": FORMAT,
        "library": f"sharedtree {__version__}",
        "types": walk.types,
        "arrays": walk.entries,
        "nodes": walk.nodes,
        "root": root,
    }
    return Encoded(manifest, walk.arrays, walk.named)


def names_in(tree: Any) -> dict[str, Any]:
    """The classes and functions that a tree holds, by name. What cannot be written is passed over.

    Raises:
        CycleError: if an object contains itself.
    """
    walk = _Walk()
    walk.run(tree)
    names = [entry["name"] for entry in walk.types]
    methods: dict[str, Any] = {}
    for number, node in enumerate(walk.nodes):
        if node[0] in ("method", "bound"):
            owner = owner_of_method(names, walk.nodes, node)
            if owner is not None:
                methods[f"{owner}.{node[2]}"] = walk.function_of(number)
    return {**walk.named, **methods}


class _Frame:
    __slots__ = ("build", "children", "done", "keys", "obj")

    def __init__(self, obj: Any, apart: Apart) -> None:
        self.obj = obj
        self.children, self.keys, self.build = apart[:3]
        self.done: list[Any] = []


_OPEN = -1


class _Walk:
    def __init__(self) -> None:
        self.types: list[dict[str, Any]] = []
        self.entries: list[dict[str, Any]] = []
        self.nodes: list[list[Any]] = []
        self.arrays: list[Any] = []
        self.problems: list[Problem] = []
        self.named: dict[str, Any] = {}
        self.path_of: dict[int, str] = {}  # of nodes of rare kinds, for errors
        self.collisions = Collisions()
        self._memo: dict[int, int] = {}  # id → node; `_alive` and `_frames` keep the objects alive
        self._alive: list[Any] = []
        self._frames: list[_Frame] = []
        self._tensors: set[str] = set()
        self._type_numbers: dict[Any, int] = {}
        self._instances = Instances(self.types, self.named)
        self._name_atoms: dict[int, list[str]] = {}  # id → atom; `named` keeps the objects alive

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
                child = self._add(frame.obj, node)
            else:
                child = self._visit(children[len(done)])
        return child

    def function_of(self, number: int) -> Any:
        """The function of the method that was written as a node."""
        method = self._alive[number]
        own: Any = object.__getattribute__(method, "__dict__") if type(method) is BoundMethod else None
        return method.__func__ if own is None else own["__func__"]

    def texts(self) -> Iterator[str]:
        """The names of classes, functions and fields."""
        yield from self.named
        for entry in self.types:
            for key in ("fields", "missing", "extra"):
                yield from entry.get(key, ())

    def path(self, upto: int | None = None) -> str:
        """Where the walk is."""
        return "".join([frame.keys[len(frame.done)] for frame in self._frames[:upto]])

    def _built(self, frame: _Frame) -> list[Any]:
        try:
            return frame.build(frame.done)
        except RefusalError as error:  # of what its children turned out to be
            self.problems.append(Problem(self.path(-1), error.reason, error.fix))
            return ["marker"]

    def _add(self, obj: Any, node: list[Any]) -> int:
        number = len(self.nodes)
        self.nodes.append(node)
        self._memo[id(obj)] = number  # alive in `_alive`
        self._alive.append(obj)
        return number

    def _visit(self, obj: Any) -> Any:
        """How an object is written; or, if its children come first, opens a frame."""
        cls = type(obj)
        atom = _ATOMS.get(cls)
        if atom is not None:
            return atom(obj)
        known = self._memo.get(id(obj))  # alive: see `_memo`
        if known is not None:
            return known if known != _OPEN else self._raise_cycle(obj)
        try:
            apart = self._apart(obj, cls)
        except (RefusalError, NamelessError) as error:
            self.problems.append(Problem(self.path(), error.reason, error.fix))
            return None
        if type(apart) is not Apart:
            return apart
        self._memo[id(obj)] = _OPEN  # alive in its frame
        self._frames.append(_Frame(obj, apart))
        return _PENDING

    def _apart(self, obj: Any, cls: Any) -> Any:
        if is_array(cls):
            return self._array(obj)
        apart = take_apart(obj)
        if apart is not None:
            if apart.hashed:
                self._count_collisions(cls.__name__, apart.hashed)
            return apart
        if cls is bytearray:
            return self._add(obj, ["bytearray", encode_bytes(obj)[1]])
        if isinstance(obj, type):
            return self._name("class", obj)
        kind = kind_of(cls)
        if kind == "enum":
            return self._enum(obj, cls)
        if kind == "module" and self._is_decorated(obj):
            return self._name("function", obj, own_name_of(obj))
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
            return take_apart_registered(obj, self._simple_type(cls, "registered"))
        if kind is not None:
            return self._instances.take_apart(obj, cls)
        return self._other(obj, cls)

    def _count_collisions(self, kind: str, keys: Sequence[Any]) -> None:
        try:
            self.collisions.add(keys)
        except ValueError as error:
            raise RefusalError(
                f"a `{kind}` in which {error}, so that it would take long to build", _OTHER_HASHES
            ) from None

    def _other(self, obj: Any, cls: Any) -> Any:
        if isinstance(obj, np.generic | np.dtype):
            try:
                return encode_scalar(obj) if isinstance(obj, np.generic) else encode_dtype(obj)
            except TypeError:
                dtype = obj.dtype if isinstance(obj, np.generic) else obj
                raise RefusalError(
                    f"a NumPy value of the dtype `{dtype}`", "Keep its parts, as numbers, texts or tuples."
                ) from None
        if isinstance(obj, jax.Device):
            return take_device(obj)
        key_dtype = key_dtype_node(obj)
        if key_dtype is not None:
            return self._add(obj, key_dtype)
        if isinstance(obj, jax.Ref):
            raise RefusalError(
                "a `jax.Ref`, which is memory and not a value", "Save what it holds: `ref[...]`, or `jax.freeze(ref)`."
            )
        known = self._name_atoms.get(id(obj))  # alive in `named`
        if known is not None:
            return known
        try:
            name = name_of(obj)
        except NamelessError as error:
            if not callable(obj) or _is_instance_of_own_class(obj):
                raise refusal_of(obj, cls) from error
            require_no_array(obj)
            raise
        if name not in FUNCTIONS and not _is_all_in_its_name(obj, cls):
            raise refusal_of(obj, cls)
        require_no_array(obj)
        return self._name("function", obj, name)

    def _name(self, tag: str, obj: Any, name: str | None = None) -> list[str]:
        atom = self._name_atoms.get(id(obj))  # alive in `named`
        if atom is None:
            name = name or name_of(obj)
            self.named[name] = obj
            atom = self._name_atoms[id(obj)] = [tag, name]  # alive in `named`
        return atom

    def _is_decorated(self, obj: Any) -> bool:
        """Whether a module took the place of the function that it wraps, as with `@equinox.filter_jit`.

        Then the module has the name, which its function has not. What else has a `__qualname__` has it from what it
        wraps, and is taken apart.
        """
        if id(obj) in self._name_atoms:  # alive in `named`
            return True
        attributes = object.__getattribute__(obj, "__dict__")
        return "__qualname__" in attributes and own_name_of(obj) is not None and held_array(obj) is None

    def _array(self, obj: Any) -> int:
        entry, data = describe(obj, "")
        entry["tensor"] = self._tensor_name()
        self.entries.append(entry)
        self.arrays.append(data)
        return self._add(obj, ["array", len(self.entries) - 1])

    def _tensor_name(self) -> str:
        name = self.path().removeprefix(".") if len(self._frames) <= _MAX_KEYS else f"array{len(self.entries)}"
        name = name or "value"
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
            name = name_of(cls)
            self.named[name] = cls
            known = self._type_numbers[cls] = len(self.types)
            self.types.append({"name": name, "kind": kind})
        return known

    def _enum(self, obj: Any, cls: Any) -> int:
        number = self._simple_type(cls, "enum")
        name = obj._name_  # noqa: SLF001 -- `name` may be a member's name
        if name is None or cls.__members__.get(name) is not obj:
            if not isinstance(obj, enum.Flag) or type(obj._value_) is not int:  # noqa: SLF001
                raise RefusalError(f"a `{cls.__qualname__}` that is no member of its class", "Use one of its members.")
            return self._add(obj, ["enum", number, encode_int(obj._value_)])  # noqa: SLF001
        return self._add(obj, ["enum", number, encode_str(name)])

    def _raise_cycle(self, obj: Any) -> Any:
        start = next(i for i, frame in enumerate(self._frames) if frame.obj is obj)
        paths = self.path(start), self.path()
        shown = [printable(path) for path in paths]
        raise CycleError(
            f"A `{type(obj).__name__}` contains itself: it sits at `{shown[0]}` and again, within itself, at "
            f"`{shown[1]}`.\nA DAG has no cycles. Break the cycle before you save:\n    tree{shown[1]} = None",
            paths,
        )


_PENDING: Any = object()

_OTHER_HASHES = "Give their class a `__hash__` that tells them apart, or hold pairs in a list."

_AS_CHILD = (
    "Let it be a child, which JAX sees. In place of a treedef save the tree, and take its structure after loading."
)
_FLATTER = "Hold its parts in one list or tuple instead of inside one another."

_ATOMS: dict[type, Callable[[Any], Any]] = {
    type(None): lambda obj: obj,
    bool: lambda obj: obj,
    str: encode_str,
    int: encode_int,
    float: encode_float,
    complex: encode_complex,
    bytes: encode_bytes,
    type(Ellipsis): encode_special,
    type(NotImplemented): encode_special,
}


def _is_all_in_its_name(obj: Any, cls: type) -> bool:
    """Whether nothing is lost with a name: an instance of a user's class may hold data, and nobody would notice."""
    return callable(obj) and (cls.__module__.partition(".")[0] in _OF_FUNCTIONS)


_OF_FUNCTIONS = LIBRARIES | NAMES_ONLY | {"builtins", "functools"}
"""The packages whose callable objects are functions: compiled, cached, or with a derivative of their own."""


def _is_instance_of_own_class(obj: Any) -> bool:
    if isinstance(obj, types.GenericAlias):  # `list[int]` passes on the name of `list`
        return True
    return not isinstance(obj, types.FunctionType | types.BuiltinFunctionType) and not hasattr(obj, "__qualname__")
