"""Where a file may have no object of Flax NNX: where something looks at the object while it is loaded.

A variable of NNX answers to every name that is in its metadata, and asks hooks there whenever it is compared, iterated
over or unpacked; both are of the file's making. So none of NNX's objects may be what is hashed, what a treedef
describes, or in the auxiliary data that an unflatten function is given.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from ._names import home_of
from ._nesting import children_of, walked_of

_WITH_TYPE = frozenset({"object", "wrapper", "registered", "enum"})


def is_below_nnx(cls: Any) -> bool:
    """Whether a class is one of NNX's, or inherits from one, of whatever version.

    But for `PytreeState`, which is two flags, and is in the treedefs that the definition of a graph has.
    """
    if (home_of(cls), cls.__qualname__) == ("flax.nnx.pytreelib", "PytreeState"):
        return False
    return any(f"{home_of(base)}.".startswith("flax.nnx.") for base in type.__getattribute__(cls, "__mro__"))


def first_touched(nodes: Sequence[list[Any]], classes: Iterable[Any]) -> int | None:
    """The first node that hashes, describes or hands on an object of NNX, at whatever depth; None if none does.

    Args:
        nodes: those of a manifest.
        classes: the class of each of its types.
    """
    are_of_nnx = [is_below_nnx(cls) for cls in classes]
    if not any(are_of_nnx):
        return None
    holds = [False] * len(nodes)
    for i, node in enumerate(nodes):
        if any(type(child) is int and holds[child] for child in walked_of(node)):
            return i
        is_one = node[0] in _WITH_TYPE and are_of_nnx[node[1]]
        holds[i] = is_one or any(type(child) is int and holds[child] for child in children_of(node))
    return None
