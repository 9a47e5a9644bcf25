"""What a file may not have where something looks at it during loading: objects that answer as the file says.

A variable of NNX answers to every name that is in its metadata, and NNX's objects and `Module`s have whatever
attributes a file says, `keys` among them, which `dict(aux)` would call. So none of them may be what is hashed, what a
treedef describes, or in the auxiliary data that an unflatten function is given.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from ..._nnx_internals import nnx
from ...module import Module
from ..trust._classes import held
from ..trust._names import home_of
from ._nesting import children_of, walked_of


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


def fault_of_aux(cls: Any, aux: Any) -> str | None:
    """What is wrong with the auxiliary data of a variable or a state of NNX; None if nothing is, or it is of neither.

    A variable asks the hooks in its metadata whenever somebody looks at it; a state answers to its keys. So a name that
    Python or NumPy asks for, such as `__array_interface__`, is none that a file may have, and nothing in metadata may
    be called. Asked when a file is written, too: what is not read is not written.
    """
    table = nnx()
    if table is None:
        return None
    bases = type.__getattribute__(cls, "__mro__")
    states = [state for name in ("State", "FlatState") if (state := held("flax.nnx", name)) is not None]
    if table.variable in bases:
        are_pairs = type(aux) is tuple and all(type(item) is tuple and len(item) == 2 for item in aux)
        if not are_pairs or not all(type(item[0]) is str for item in aux):
            return "metadata that is no tuple of names with values"
        if any(_is_called(item[1]) for item in aux):
            return "metadata that can be called, such as a hook"
        names = [item[0] for item in aux]
    elif any(state in bases for state in states):
        keys: Any = aux if type(aux) in (tuple, list) else [aux]  # or paths of keys
        names = [name for key in keys for name in (key if type(key) in (tuple, list) else [key])]
    else:
        return None
    are_special = [type(name) is str and name.startswith("__") and name.endswith("__") for name in names]
    return "a name that Python itself asks for" if any(are_special) else None


def _is_called(value: Any) -> bool:
    """Whether a value, or one in it, can be called. Types of numbers and meshes can, and do nothing."""
    if type(value) in (tuple, list, set, frozenset):
        return any(map(_is_called, value))
    if type(value) is dict:
        return any(map(_is_called, value.values()))
    return callable(value) and not isinstance(value, (np.generic, type, jax.sharding.Mesh, jax.sharding.AbstractMesh))
