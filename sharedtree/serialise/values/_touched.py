"""What a file may not have where something looks at it during loading: objects that answer as the file says.

A variable of NNX answers to every name that is in its metadata, and NNX's objects and `Module`s have whatever
attributes a file says, `keys` among them, which `dict(aux)` would call. So none of them may be what is hashed, what a
treedef describes, or in the auxiliary data that an unflatten function is given.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from ...module import Module
from ..trust._names import home_of
from ._kinds import children_of, walked_of


def first_touched(nodes: Sequence[list[Any]], classes: Iterable[Any]) -> int | None:
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
        is_one = node[0] in ("object", "wrapper", "registered", "enum") and are_theirs[node[1]]
        holds[i] = is_one or any(type(child) is int and holds[child] for child in children_of(node))
    return None


def _answers_as_a_file_says(cls: Any) -> bool:
    """Whether a class is a `Module`, or is one of NNX's or inherits from one, of whatever version."""
    # Two flags, which are in the treedefs that the definition of a graph has.
    if (home_of(cls), cls.__qualname__) == ("flax.nnx.pytreelib", "PytreeState"):
        return False
    bases = type.__getattribute__(cls, "__mro__")
    return Module in bases or any(f"{home_of(base)}.".startswith("flax.nnx.") for base in bases)
