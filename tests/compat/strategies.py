"""Random DAGs of treeo's trees, of which `tests/strategies.py` knows what is in them.

`trees()` draws models of a dataclass with traced, static and opaque fields and of a class with all mixins, over lists,
dictionaries, tuples and arrays, with trees, arrays and containers shared at random.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from hypothesis import strategies as hst

from sharedtree.compat import treeo as to
from tests.strategies import Node, is_array, paths


class Branch(to.Tree, to.Extensions, Node):
    """Two traced fields and a static one."""

    left: Any = to.node()
    right: Any = to.node()

    def __init__(self, left: Any, right: Any, name: str = "branch") -> None:
        self.left = left
        self.right = right
        self.name = name

    def node_children(self) -> list[tuple[str, Any]]:
        return [("left", self.left), ("right", self.right)]

    def with_node_children(self, new: list[Any]) -> "Branch":
        return Branch(*new, self.name)


class Weight(to.KindMixin):
    """A kind of field."""


# treeo's `apply` compares trees by `==`, which fails on dataclasses of arrays.
@dataclass(eq=False)
class Layer(to.Tree, to.Extensions, Node):
    """A dataclass with fields of every sort."""

    weight: Any = Weight.node()
    parts: Any = to.node()
    width: int = to.static(1)
    log: Any = to.static(None, opaque=True)

    def node_children(self) -> list[tuple[str, Any]]:
        return [("parts", self.parts), ("weight", self.weight)]

    def with_node_children(self, new: list[Any]) -> "Layer":
        parts, weight = new
        return Layer(weight, parts, self.width, self.log)


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
        if len([*paths(node)]) < 200:
            pool.append(node)
    return Branch(pool[-1], [pick(), pick()])
