"""Objects that hold arrays where nobody looks: of classes that are not registered, alone or in plain containers.

Where a tree is asked about (its ties, its leaves, its size), such an object would be one static leaf, and the answer
would be that of an empty model. So it is an error there, whether the object can be called or not. In the field of a
module, in a `Partial` and as an argument of a transform it stays what the library says, a static value: normalisers
with arrays and `__call__` are ordinary. A plain function is a leaf for JAX, whatever its closure holds, and stays one.
"""

import functools
import itertools
import types
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import tree_util as jtu

from ._by_identity import IdentitySet
from ._errors import UnregisteredTypeError
from ._node_types import how_to_register, node_type_of
from ._static_values import Static
from ._structure import Node, Path, Record, Structure

_ARRAYS = (jax.Array, np.ndarray, jax.Ref)
_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, np.ufunc, np.generic, np.dtype)
_PLACES = (jax.sharding.Mesh, jax.sharding.Sharding, jax.sharding.PartitionSpec)  # a mesh has an array of devices
_NUMBERS_AND_TEXTS = frozenset({bool, int, float, complex, str, bytes, type(None)})
_CONTAINERS = (tuple, list, deque, set, frozenset)

MAX_OBJECTS = 1_000
"""How many objects are looked at for arrays. What holds more, and no array among these, is taken for no model."""


def require_all_seen(structure: Structure) -> None:
    """Raises if an object that holds arrays stands in a tree, outside modules, and cannot be taken apart.

    The answer is kept with the structure, so that a tree of a known structure costs one look into a dict.

    Raises:
        UnregisteredTypeError: naming the class, the path, and what would mend it.
    """
    if _SEEN not in structure.plans:
        require_all_seen_in(structure.records, structure.root, structure.base)
        structure.plans[_SEEN] = True


_SEEN = "all arrays outside modules are seen"


def require_all_seen_in(records: Sequence[Record], root: int, base: int = 0) -> None:
    """As `require_all_seen`, of records of which the first has the number `base`."""
    stack: list[tuple[int, Path]] = [(root, ())]
    visited: set[int] = set()
    while stack:
        number, path = stack.pop()
        if number < base or number in visited:  # an earlier tree of a `Context` was looked at when it was flattened
            continue
        visited.add(number)
        op, children = records[number - base]
        if type(op) is Static and holds_array(op.peek()):
            _raise_hidden(op.peek(), jtu.keystr(path))
        if type(op) is Node and op.type.is_plain:
            steps = zip(op.keys, children, strict=True)
            stack.extend([(child, (*path, key)) for key, child in reversed(list(steps))])


def holds_array(obj: Any) -> bool:
    """Whether an object holds an array: in its attributes and slots, and what these hold; in the parts of a partial.

    Nothing of the object's class is called, so properties are not looked at.
    """
    if type(obj) in _NUMBERS_AND_TEXTS or isinstance(obj, (*_CODE, *_PLACES)) or _wraps_function(obj):
        return False
    seen = IdentitySet([obj])
    waiting = deque([obj])
    num_objects = 0
    while waiting and num_objects < MAX_OBJECTS:
        num_objects += 1
        for part in _parts_of(waiting.popleft()):
            if isinstance(part, _ARRAYS):
                return True
            if type(part) not in _NUMBERS_AND_TEXTS and not isinstance(part, (*_CODE, *_PLACES)) and seen.add(part):
                waiting.append(part)
    return False


def _wraps_function(obj: Any) -> bool:
    """Whether it is a function that was wrapped, as `jax.jit` and decorators do. What else it has are caches."""
    return "__wrapped__" in (_attributes_of(obj) or {})


def _attributes_of(obj: Any) -> dict[str, Any] | None:
    try:
        found = object.__getattribute__(obj, "__dict__")
    except AttributeError:
        return None
    return found if type(found) is dict else None


def _parts_of(obj: Any) -> Iterable[Any]:
    if isinstance(obj, types.MethodType):
        return (obj.__self__,)
    if isinstance(obj, functools.partial):
        return (obj.func, *obj.args, *obj.keywords.values())
    if isinstance(obj, _CONTAINERS):
        return list(obj)
    if isinstance(obj, dict):
        return list(dict.values(obj))
    slots = [
        member.__get__(obj)
        for base in type(obj).__mro__
        for member in vars(base).values()
        if type(member) is types.MemberDescriptorType and _is_set(member, obj)
    ]
    return itertools.chain(list((_attributes_of(obj) or {}).values()), slots)


def _is_set(slot: Any, obj: Any) -> bool:
    try:
        slot.__get__(obj)
    except AttributeError:
        return False
    return True


def _raise_hidden(obj: Any, text: str) -> None:
    place = f" at `{text}`" if text else ""
    if isinstance(obj, functools.partial):
        raise UnregisteredTypeError(
            f"A `functools.partial`{place} holds arrays, but it is no pytree node, so they cannot be seen.\n"
            "JAX has a partial that is one:\n"
            "    jax.tree_util.Partial(partial.func, *partial.args, **partial.keywords)",
            (text,),
        )
    owner = obj.__self__ if isinstance(obj, types.MethodType) else obj
    if owner is not obj and node_type_of(owner) is not None:
        raise UnregisteredTypeError(
            f"A method of a `{type(owner).__name__}`{place} holds the arrays of the object that it is bound to, but it "
            "is no pytree node, so they cannot be seen.\n"
            "Give that object, or a partial that is a node:\n"
            "    jax.tree_util.Partial(method.__func__, method.__self__)",
            (text,),
        )
    name = type(owner).__name__
    raise UnregisteredTypeError(
        f"`{name}`{place} holds arrays, but it is not a registered pytree node, so they cannot be seen.\n"
        f"{how_to_register(name)}",
        (text,),
    )
