"""What is looked at while a file is loaded, and what a file may not have there: objects that answer as the file says.

A variable of NNX answers to every name that is in its metadata, and NNX's objects and `Module`s have whatever
attributes a file says, `keys` among them, which `dict(aux)` would call. So none of them may be what is hashed, what a
treedef describes, or in the auxiliary data that an unflatten function is given.

A `Dag` takes its model apart when it is made. So its model is bounded as what is hashed is. `Module`s may be in it,
which are taken apart without a question to them, but nothing of NNX.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..._dag import Dag
from ...module import Module
from ..trust._names import home_of
from ._kinds import TYPED, children_of, walked_of
from ._nodes import Child, Node

_MODULE, _NNX = 1, 2


def has_dags(classes: Sequence[Any]) -> bool:
    """Whether `Dag` is one of the classes. A metaclass is not asked whether they are equal."""
    return any(cls is Dag for cls in classes)


def walked_in(classes: Sequence[Any]) -> Callable[[Node], Iterable[Child]]:
    """Gives the children of a node that are looked at, where the types have these classes."""
    if not has_dags(classes):
        return walked_of
    return lambda node: node[3] if _is_dag(node, classes) else walked_of(node)


def _is_dag(node: Node, classes: Sequence[Any]) -> bool:
    return node[0] == "registered" and classes[node[1]] is Dag


def first_touched(nodes: Sequence[Node], classes: Sequence[Any]) -> int | None:
    """The first node of a manifest that hashes, describes or hands on such an object, at whatever depth; None if none
    does. `classes` has the class of each type.
    """
    answering = list(map(_how_it_answers, classes))
    if not any(answering):
        return None
    holds = [0] * len(nodes)
    for i, node in enumerate(nodes):
        if any(type(child) is int and holds[child] for child in walked_of(node)):
            return i
        own = answering[node[1]] if node[0] in TYPED else 0
        holds[i] = max([own, *(holds[child] for child in children_of(node) if type(child) is int)])
        if holds[i] == _NNX and _is_dag(node, classes):
            return i
    return None


def _how_it_answers(cls: Any) -> int:
    """Whether a class is a `Module`, or one of NNX's, of whatever version, or inherits from one; 0 if it is neither."""
    # Two flags, which are in the treedefs that the definition of a graph has.
    if (home_of(cls), cls.__qualname__) == ("flax.nnx.pytreelib", "PytreeState"):
        return 0
    bases = type.__getattribute__(cls, "__mro__")
    if any(f"{home_of(base)}.".startswith("flax.nnx.") for base in bases):
        return _NNX
    return _MODULE if any(base is Module for base in bases) else 0
