"""A `jax.Ref` in what is differentiated: a place and not a value, whose gradient could only be another place.

Equinox's transforms hand it to the function beside what they differentiate, and its gradient is None. So it is here in
modules of Equinox's. JAX refuses it, or fails with an error of its own, when the function reads or writes it.

    Net(w, count=Ref)     grad of Equinox's: Net(g, count=None)       `jax.grad`: an error
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import tree_util as jtu
from jax.core import Tracer

from .._jax_internals import ConcreteArray
from .._structure import LEAF
from .._text import listed
from .._with_respect_to import Filter, Place, selection
from ._crossed import Graph, Names
from ._differentiated import Differentiated
from ._in_place import conventions

_REFUSING = ("jax.grad", "jax.value_and_grad", "jax.jacrev", "jax.hessian")


def is_reference(leaf: Any) -> bool:
    """Whether a leaf is a `jax.Ref`, or stands for one."""
    # Asking `jax.Ref` about something else takes as long as everything else that is done with a leaf.
    if type(leaf) is ConcreteArray:
        return False
    return type(leaf) is jax.Ref or (isinstance(leaf, Tracer) and isinstance(leaf, jax.Ref))


def handed_beside(graph: Graph) -> frozenset[int]:
    """The ids of the references in modules of Equinox's. They are alive in the graph."""
    found = {number: leaf for number, leaf in graph.leaves.items() if is_reference(leaf)}
    around = conventions(graph, "jax") if found else {}
    return frozenset([id(leaf) for number, leaf in found.items() if around.get(number) == "equinox"])


def forbid_references(
    seen: Sequence[Any], positions: Sequence[int], arguments: Callable[[], Sequence[Any]], names: Names, title: str
) -> None:
    """Raises if a transform would be given a reference in a module. Of one outside modules it says what is wrong.

    Args:
        seen: the differentiated arguments as the transform sees them.
        positions: their positions.
        arguments: they themselves.
        names: for paths.
        title: of the transform.

    Raises:
        TypeError: as JAX's, with the path and the fix.
    """
    if title not in _REFUSING:
        return

    def is_module(item: Any) -> bool:
        return type(item) is Differentiated

    texts: list[str] = []
    for position, tree in zip(positions, seen, strict=True):
        for path, item in jtu.tree_flatten_with_path(tree, is_leaf=is_module)[0]:
            if is_module(item) and [op for op, _ in item.structure.records] != [LEAF]:
                within = [key for key, leaf in item.keyed() if is_reference(leaf)]
                texts += [f"{names.text(position, path)}{key}" for key in within]
    if not texts:
        return
    classes: dict[str, None] = {}

    def ask(place: Place) -> bool:
        if is_reference(place.leaf):
            classes.setdefault("jax.Ref" if place.variable is None else type(place.variable).__name__)
        return True

    for argument in arguments():
        selection(argument, Filter(ask), "")
    several = f"({', '.join(classes)})" if len(classes) > 1 else ", ".join(classes)
    what = "is a `jax.Ref`" if len(texts) == 1 else "are `jax.Ref`s"
    raise TypeError(
        f"`{title}` cannot differentiate with respect to {listed(texts)}, which {what}: a place, not a value. In "
        "modules of Equinox's it is handed to the function beside what is differentiated. In others this has to be "
        "said:\n"
        f"    sharedtree.{title.removeprefix('jax.')}(f, wrt=lambda path, value: not isinstance(value, {several}))"
    )
