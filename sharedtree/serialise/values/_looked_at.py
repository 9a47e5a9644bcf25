"""What is looked at while a file is loaded, and what a file may not have there: objects that answer as the file says.

A variable of NNX answers to every name that is in its metadata, and NNX's objects and `Module`s have whatever
attributes a file says, `keys` among them, which `dict(aux)` would call. So none of them may be what is hashed, what a
treedef describes, or in the auxiliary data that an unflatten function is given.

A `Dag` takes its model apart only when somebody uses it; a comparison with a template does. So beside a template its
model is bounded as what is hashed is.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..._dag import Dag
from ...module import Module
from ..trust._names import home_of
from ._kinds import TYPED, children_of, walked_of
from ._nodes import Child, Node


def first_touched(nodes: Sequence[Node], classes: Sequence[Any]) -> int | None:
    """The first node of a manifest that hashes, describes or hands on such an object, at whatever depth; None if none
    does. `classes` has the class of each type.
    """
    are_theirs = list(map(_answers_as_a_file_says, classes))
    if not any(are_theirs):
        return None
    holds = [False] * len(nodes)
    for i, node in enumerate(nodes):
        if any(type(child) is int and holds[child] for child in walked_of(node)):
            return i
        is_one = node[0] in TYPED and are_theirs[node[1]]
        holds[i] = is_one or any(type(child) is int and holds[child] for child in children_of(node))
    return None


def _answers_as_a_file_says(cls: Any) -> bool:
    """Whether a class is a `Module`, or is one of NNX's or inherits from one, of whatever version."""
    # Two flags, which are in the treedefs that the definition of a graph has.
    if (home_of(cls), cls.__qualname__) == ("flax.nnx.pytreelib", "PytreeState"):
        return False
    bases = type.__getattribute__(cls, "__mro__")
    return any(base is Module or f"{home_of(base)}.".startswith("flax.nnx.") for base in bases)


def compared_of(classes: Sequence[Any]) -> Callable[[Node], Iterable[Child]]:
    """Gives the children of a node that are hashed or walked beside a template: those of each `Dag`, too."""
    are_dags = [cls is Dag for cls in classes]
    return lambda node: node[3] if node[0] == "registered" and are_dags[node[1]] else walked_of(node)
