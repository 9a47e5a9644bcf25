"""Random DAGs of treeo's trees, and what is known of them without asking the library.

`trees()` draws models of a dataclass with traced, static and opaque fields and of a class with all mixins, over lists,
dictionaries, tuples and arrays, with trees, arrays and containers shared at random. `partition` and `twin` are the
oracle: they walk by what this file knows of its own classes.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from hypothesis import strategies as hst

from sharedtree.compat import treeo as to


class Branch(to.Tree, to.Extensions):
    """Two traced fields and a static one."""

    left: Any = to.node()
    right: Any = to.node()

    def __init__(self, left: Any, right: Any, name: str = "branch") -> None:
        self.left = left
        self.right = right
        self.name = name


class Weight(to.KindMixin):
    """A kind of field."""


# treeo's `apply` compares trees by `==`, which fails on dataclasses of arrays.
@dataclass(eq=False)
class Layer(to.Tree, to.Extensions):
    """A dataclass with fields of every sort."""

    weight: Any = Weight.node()
    parts: Any = to.node()
    width: int = to.static(1)
    log: Any = to.static(None, opaque=True)


TREES = (Branch, Layer)
Path = tuple[Any, ...]


def children(obj: Any) -> list[tuple[Any, Any]]:
    """The traced fields of a tree, the items of a container; nothing for a leaf."""
    match obj:
        case Branch():
            return [("left", obj.left), ("right", obj.right)]
        case Layer():
            return [("parts", obj.parts), ("weight", obj.weight)]
        case dict():
            return sorted(obj.items())
        case list() | tuple():
            return list(enumerate(obj))
        case _:
            return []


def paths(tree: Any) -> list[tuple[Path, Any]]:
    """Every path of a tree, in JAX's order, with what is there."""
    found: list[tuple[Path, Any]] = []
    stack: list[tuple[Path, Any]] = [((), tree)]
    while stack:
        path, obj = stack.pop()
        found.append((path, obj))
        stack.extend(((*path, key), child) for key, child in reversed(children(obj)))
    return found


def is_array(obj: Any) -> bool:
    return isinstance(obj, jax.Array)


def partition(tree: Any, containers: bool = True) -> frozenset[frozenset[Path]]:
    """Which paths hold one object, of those that carry identity inside a module; lists and dictionaries if asked."""
    kinds = (*TREES, list, dict) if containers else TREES
    classes: dict[int, set[Path]] = {}
    for path, obj in paths(tree):
        if is_array(obj) or isinstance(obj, kinds):
            classes.setdefault(id(obj), set()).add(path)  # alive in `tree`
    return frozenset(map(frozenset, classes.values()))


def unique_arrays(tree: Any) -> list[jax.Array]:
    """The distinct arrays, in order of their first path."""
    found = {id(obj): obj for _, obj in reversed(paths(tree)) if is_array(obj)}  # alive in `tree`
    return [found[i] for i in dict.fromkeys(id(obj) for _, obj in paths(tree) if is_array(obj))]  # likewise


def remade(tree: Any, once: bool) -> Any:
    """A tree of new objects: one for each object (`once`), or one for each path, so that nothing is shared."""
    made: dict[int, Any] = {}

    def visit(obj: Any) -> Any:
        if not once or id(obj) not in made:  # alive in `tree`
            made[id(obj)] = new(obj)  # likewise
        return made[id(obj)]  # likewise

    def new(obj: Any) -> Any:
        match obj:
            case Branch():
                return Branch(visit(obj.left), visit(obj.right), obj.name)
            case Layer():
                parts, weight = visit(obj.parts), visit(obj.weight)
                return Layer(weight, parts, obj.width, obj.log)
            case dict():
                return {key: visit(value) for key, value in obj.items()}
            case list() | tuple():
                return type(obj)([visit(value) for value in obj])
            case _:
                return jnp.array(obj, copy=True) if is_array(obj) else obj

    return visit(tree)


def twin(tree: Any) -> Any:
    """The same tree with nothing shared."""
    return remade(tree, once=False)


@hst.composite
def trees(draw: Any, max_nodes: int = 7) -> Any:
    """A tree over a pool of objects, any of which may occur in any later one, several times."""
    pool: list[Any] = [jnp.full((2,), draw(hst.integers(-3, 3)) / 2) for _ in range(draw(hst.integers(1, 3)))]

    def pick() -> Any:
        return pool[draw(hst.integers(0, len(pool) - 1))]

    def array() -> Any:
        return draw(hst.sampled_from([obj for obj in pool if is_array(obj)]))

    for _ in range(draw(hst.integers(1, max_nodes))):
        match draw(hst.sampled_from(["branch", "branch", "layer", "layer", "list", "dict", "tuple", "none"])):
            case "branch":
                node = Branch(pick(), pick(), draw(hst.sampled_from(["one", "two"])))
            case "layer":
                node = Layer(array(), pick(), draw(hst.integers(1, 2)), draw(hst.sampled_from(["log", "other", None])))
            case "list":
                node = [pick() for _ in range(draw(hst.integers(0, 2)))]
            case "dict":
                node = {name: pick() for name in draw(hst.sampled_from([(), ("b",), ("b", "a")]))}
            case "tuple":
                node = (pick(), pick())
            case _:
                node = None
        if len(paths(node)) < 200:
            pool.append(node)
    return Branch(pool[-1], [pick(), pick()])
