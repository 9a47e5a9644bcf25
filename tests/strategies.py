"""Random DAGs for property tests, and what is known of them without asking the library.

`dags()` draws trees of Equinox modules, a hand-registered mutable class, a registered dataclass and plain containers,
with modules, arrays and containers shared at random. `occurrences`, `partition` and `twin` are the oracle: they walk a
tree by what this file knows of its own classes.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as hst


class Pair(eqx.Module):
    first: Any
    second: Any


class Layer(eqx.Module):
    weight: Any
    activation: Any
    parts: Any
    width: int = eqx.field(static=True, default=3)


@jax.tree_util.register_pytree_node_class
class Mutable:
    """A hand-written module as users write them: attributes, and auxiliary data with a list."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def tree_flatten(self) -> tuple[Any, Any]:
        return list(vars(self).values()), list(vars(self))

    @classmethod
    def tree_unflatten(cls, names: Any, children: Any) -> "Mutable":
        obj = object.__new__(cls)
        vars(obj).update(zip(names, children, strict=True))
        return obj


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Record:
    left: Any
    right: Any
    name: str = dataclasses.field(metadata={"static": True}, default="record")


class Node:
    """A class of another file, which says by itself what its children are."""

    def node_children(self) -> list[tuple["Key", Any]]:
        raise NotImplementedError

    def with_node_children(self, new: list[Any]) -> Any:
        raise NotImplementedError


class Point(NamedTuple):
    x: Any
    y: Any


Key = str | int
Path = tuple[Key, ...]

MODULES = (Pair, Layer, Mutable, Record, Node)
MUTABLE_CONTAINERS = (list, dict, collections.OrderedDict)


def children(obj: Any) -> list[tuple[Key, Any]]:
    """The children of a node, in JAX's order; nothing for a leaf."""
    match obj:
        case Node():
            return obj.node_children()
        case Pair():
            return [("first", obj.first), ("second", obj.second)]
        case Layer():
            return [("weight", obj.weight), ("activation", obj.activation), ("parts", obj.parts)]
        case Mutable():
            return list(vars(obj).items())
        case Record():
            return [("left", obj.left), ("right", obj.right)]
        case collections.OrderedDict():
            return list(obj.items())
        case dict():
            return sorted(obj.items())
        case Point():
            return [("x", obj.x), ("y", obj.y)]
        case list() | tuple():
            return list(enumerate(obj))
        case _:
            return []


def with_children(obj: Any, new: list[Any]) -> Any:
    """A node like `obj` with other children."""
    match obj:
        case Node():
            return obj.with_node_children(new)
        case Pair():
            return Pair(*new)
        case Layer():
            return Layer(*new, width=obj.width)
        case Mutable():
            return Mutable(**dict(zip(vars(obj), new, strict=True)))
        case Record():
            return Record(*new, name=obj.name)
        case collections.OrderedDict():
            return collections.OrderedDict(zip(obj, new, strict=True))
        case dict():
            return dict(zip(sorted(obj), new, strict=True))
        case Point():
            return Point(*new)
        case _:
            return type(obj)(new)


def is_array(obj: Any) -> bool:
    return isinstance(obj, (jax.Array, np.ndarray))


def carries_identity(obj: Any) -> bool:
    return is_array(obj) or isinstance(obj, (*MODULES, *MUTABLE_CONTAINERS))


def paths(tree: Any, inside: bool = True) -> Iterator[tuple[Path, Any, bool]]:
    """Every path of a tree, with what is there, and whether that is inside a module."""
    stack: list[tuple[Path, Any, bool]] = [((), tree, inside)]
    while stack:
        path, obj, within = stack.pop()
        yield path, obj, within
        within = within or isinstance(obj, MODULES)
        stack.extend(((*path, key), child, within) for key, child in reversed(children(obj)))


def occurrences(tree: Any, inside: bool = True) -> dict[Path, Any]:
    """The occurrences of objects that carry identity: inside modules all of them, outside only modules."""
    return {
        path: obj
        for path, obj, within in paths(tree, inside)
        if (within and carries_identity(obj)) or isinstance(obj, MODULES)
    }


def partition(tree: Any, inside: bool = True) -> frozenset[frozenset[Path]]:
    """Which paths hold one object."""
    found = occurrences(tree, inside)
    classes: dict[int, set[Path]] = {}
    for path, obj in found.items():
        classes.setdefault(id(obj), set()).add(path)  # alive in `tree`
    return frozenset(frozenset(each) for each in classes.values())


def twin(tree: Any, leaf: Callable[[Any], Any] = lambda x: jnp.array(x, copy=True)) -> Any:
    """The same tree with nothing shared: every node and every array is new at every path."""
    if is_array(tree):
        return leaf(tree)
    below = children(tree)
    if not below and not carries_identity(tree):
        return tree
    return with_children(tree, [twin(child, leaf) for _, child in below])


def copy_dag(tree: Any, change: Callable[[Any], Any] = lambda x: jnp.array(x, copy=True)) -> Any:
    """A tree with the same sharing and all objects new."""
    made: dict[int, Any] = {}

    def visit(obj: Any) -> Any:
        below = children(obj)
        if not below and not carries_identity(obj):
            return obj
        if id(obj) in made:  # alive in `tree`
            return made[id(obj)]
        new = change(obj) if is_array(obj) else with_children(obj, [visit(c) for _, c in below])
        if carries_identity(obj):
            made[id(obj)] = new
        return new

    return visit(tree)


def tower(height: int, leaf: Any, cls: Any = Record) -> Any:
    """A DAG of `height` nodes and 2**height paths to its leaf. Not of Equinox, whose `__init__` walks all of them."""
    for _ in range(height):
        leaf = cls(leaf, leaf)
    return leaf


def unique_arrays(*trees: Any) -> list[Any]:
    """The distinct arrays in modules, in order of their first occurrence."""
    found: dict[int, Any] = {}
    for tree in trees:
        for path, obj, within in paths(tree):
            del path
            if within and is_array(obj):
                found.setdefault(id(obj), obj)  # alive in `trees`
    return list(found.values())


def keys(obj: Any) -> list[str]:
    """How paths print the children of a node."""
    names = [name for name, _ in children(obj)]
    match obj:
        case Mutable():
            return [f"[<flat index {i}>]" for i in range(len(names))]
        case Point():
            return [".x", ".y"]
        case list() | tuple() | dict():
            return [f"[{name!r}]" for name in names]
        case _:
            return [f".{name}" for name in names]


def paths_by_object(tree: Any) -> list[list[str]]:
    """The printed paths of each object. Objects inside a shared one have a path through its first occurrence only."""
    paths_of: dict[int, list[str]] = {}
    alive = []

    def visit(obj: Any, path: str) -> None:
        is_new = id(obj) not in paths_of  # kept in `alive`
        if carries_identity(obj):
            alive.append(obj)
            paths_of.setdefault(id(obj), []).append(path)
        if is_new:
            for key, (_, child) in zip(keys(obj), children(obj), strict=True):
                visit(child, path + key)

    visit(tree, "")
    return list(paths_of.values())


def node_at(tree: Any, path: Path) -> Any:
    """The object at a path of `paths`."""
    for key in path:
        tree = dict(children(tree))[key]
    return tree


def python_numbers(modules: Iterable[Any]) -> int:
    """How many Python numbers are traced: those in classes of JAX's convention, once for each distinct node."""
    count = 0
    seen = set()
    stack: list[tuple[Any, Any]] = [(module, None) for module in modules]
    while stack:
        obj, owner = stack.pop()
        if isinstance(obj, (*MODULES, list, dict)):
            if id(obj) in seen:  # alive in `modules`
                continue
            seen.add(id(obj))
        if isinstance(obj, MODULES):
            owner = obj
        if type(obj) in (bool, float) and not isinstance(owner, eqx.Module):
            count += 1
        stack.extend((child, owner) for _, child in children(obj))
    return count


STATICS = ("text", None, True, jax.nn.relu, 2.5)


@hst.composite
def arrays(draw: Any) -> Any:
    shape = draw(hst.sampled_from([(), (2,), (2, 1)]))
    value = draw(hst.integers(-3, 3))
    kind = draw(hst.sampled_from(["float", "float", "float", "int", "numpy"]))
    if kind == "int":
        return jnp.full(shape, value, jnp.int32)
    make = np.full if kind == "numpy" else jnp.full
    return make(shape, value / 2, np.float32)


@hst.composite
def nodes(draw: Any, pool: list[Any]) -> Any:
    """A new node over objects of the pool."""

    def pick() -> Any:
        return pool[draw(hst.integers(0, len(pool) - 1))]

    kind = draw(hst.sampled_from(["pair", "pair", "layer", "mutable", "record", "list", "dict", "tuple", "other"]))
    match kind:
        case "pair":
            return Pair(pick(), pick())
        case "layer":
            return Layer(pick(), draw(hst.sampled_from(STATICS)), pick(), width=draw(hst.integers(1, 2)))
        case "mutable":
            return Mutable(a=pick(), b=pick()) if draw(hst.booleans()) else Mutable(x=draw(hst.sampled_from(STATICS)))
        case "record":
            return Record(pick(), pick(), name=draw(hst.sampled_from(["one", "two"])))
        case "list":
            return [pick() for _ in range(draw(hst.integers(0, 3)))]
        case "dict":
            return {name: pick() for name in draw(hst.sampled_from([(), ("b",), ("b", "a")]))}
        case "tuple":
            return tuple(pick() for _ in range(draw(hst.integers(0, 2))))
        case _:
            choice = draw(hst.integers(0, 2))
            if choice == 0:
                return Point(pick(), pick())
            if choice == 1:
                return collections.OrderedDict(z=pick(), y=pick())
            return None


def _is_small(tree: Any) -> bool:
    return sum(1 for _ in zip(range(400), paths(tree), strict=False)) < 400


@hst.composite
def pools(draw: Any, max_nodes: int = 8) -> list[Any]:
    """Objects built on one another; any of them may occur in any later one, several times."""
    pool: list[Any] = draw(hst.lists(arrays(), min_size=1, max_size=3))
    for _ in range(draw(hst.integers(1, max_nodes))):
        node = draw(nodes(pool))
        if _is_small(node):
            pool.append(node)
    return pool


@hst.composite
def pools_of_classes(draw: Any, makers: dict[str, Callable[[Callable[[], Any], Any], Any] | None]) -> list[Any]:
    """Objects built on one another: those of this file, and those of other classes.

    A maker is called with a function that picks an object of the pool, and with a static value. None stands for a node
    of this file.
    """
    pool = draw(pools(4))

    def pick() -> Any:
        return pool[draw(hst.integers(0, len(pool) - 1))]

    for _ in range(draw(hst.integers(1, 6))):
        static = draw(hst.sampled_from([1, True, 1.0, "text", (1, 2), None, [1]]))
        make = makers[draw(hst.sampled_from(sorted(makers)))]
        pool.append(draw(nodes(pool)) if make is None else make(pick, static))
    return pool


@hst.composite
def dags(draw: Any, max_nodes: int = 8) -> Any:
    """A module over a random pool."""
    pool = draw(pools(max_nodes))
    return Pair(pool[-1], [pool[draw(hst.integers(0, len(pool) - 1))], pool[draw(hst.integers(0, len(pool) - 1))]])


@hst.composite
def arguments(draw: Any) -> tuple[Any, ...]:
    """Several arguments that share objects: modules, plain containers of modules, bare arrays."""
    pool = draw(pools())
    modules = [obj for obj in pool if isinstance(obj, MODULES)] or [Pair(pool[0], pool[0])]

    def argument() -> Any:
        module = modules[draw(hst.integers(0, len(modules) - 1))]
        match draw(hst.sampled_from(["module", "module", "tuple", "dict", "array"])):
            case "tuple":
                return (module, modules[draw(hst.integers(0, len(modules) - 1))])
            case "dict":
                return {"m": module, "x": pool[0]}
            case "array":
                return pool[0]
            case _:
                return module

    return tuple(argument() for _ in range(draw(hst.integers(1, 3))))


def mutate(draw: Any, tree: Any) -> None:
    """Changes one thing in place, in a module or in a mutable container, so that no cycle arises."""
    found = [obj for _, obj, _ in paths(tree) if isinstance(obj, (*MODULES, list, dict))]
    obj = found[draw(hst.integers(0, len(found) - 1))]
    pool = [x for _, x, _ in paths(tree) if not any(inner is obj for _, inner, _ in paths(x))]
    pool += [jnp.ones(3), np.ones(2, np.float32), np.float32(2), 3, 3.0, True, None, "text", [], {}, (), jnp.tanh]
    new = pool[draw(hst.integers(0, len(pool) - 1))]
    match obj:
        case list():
            if obj and draw(hst.booleans()):
                obj[draw(hst.integers(0, len(obj) - 1))] = new
            elif obj and draw(hst.booleans()):
                obj.pop()
            else:
                obj.append(new)
        case dict():
            obj[draw(hst.sampled_from(["a", "b", "z"]))] = new
        case Layer() if draw(hst.booleans()):
            object.__setattr__(obj, "width", draw(hst.sampled_from([1, True, 1.0, 2, "1"])))
        case Record() if draw(hst.booleans()):
            obj.name = draw(hst.sampled_from(["one", "two", "other"]))
        case _:
            names = [name for name in vars(obj) if name not in ("width", "name")]
            if names:
                object.__setattr__(obj, names[draw(hst.integers(0, len(names) - 1))], new)
