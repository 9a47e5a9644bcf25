"""Finds arrays in objects of unregistered classes, where flattening would not see them.

    st.count_parameters({"a": Layer(weight)})      # `Layer` is no pytree node: an error, instead of 0

Some functions answer questions about a tree: its ties, its leaves, its size. To them an unregistered object is one
static leaf. If it holds arrays, they would answer as if the model were empty. So these functions raise an error for
such an object if it is the whole tree or stands in plain containers, whether or not it can be called.

Elsewhere, an unregistered object with arrays remains a static value: in a field of a module, in a `Partial`, and as an
argument of a transform. There it is ordinary, for example a normaliser with arrays and a `__call__`. A plain function
is never searched: JAX takes it for a leaf, whatever its closure holds.
"""

import contextlib
import functools
import types
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import jax
import numpy as np
from jax import tree_util as jtu

from ._by_identity import IdentitySet
from ._errors import UnregisteredTypeError
from ._node_types import how_to_register, node_type_of
from ._static_values import Static
from ._structure import Node, Path, Record, Structure

# Finding an instance of one of these ends the search.
_ARRAYS = (jax.Array, np.ndarray, jax.Ref)
_NUMBERS_AND_TEXTS = frozenset({bool, int, float, complex, str, bytes, type(None)})
_CONTAINERS: tuple[Any, ...] = (tuple, list, deque, set, frozenset)
_CLASSES_OF_ITEMS = frozenset({*_CONTAINERS, dict})
"""Built-in containers. Instances have items and no attributes. A subclass may have both."""

_NEVER_ENTERED = (
    *(type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, np.ufunc, np.generic, np.dtype),
    # A mesh holds an array of devices, which is no parameter.
    *(jax.sharding.Mesh, jax.sharding.Sharding, jax.sharding.PartitionSpec),
)

_ALL_SEEN = "all arrays outside modules are seen"
"""Key in `Structure.plans`. A structure without hidden arrays has an entry there, with the value True."""

MAX_SEARCHED = 1_000
"""The number of objects after which a search gives up. If so many objects hold no array, this is no model."""


def refuse_hidden_arrays(structure: Structure) -> None:
    """Raises an error if an unregistered object with arrays is the root of a tree, or stands in plain containers.

    If the tree has no such object, this answer is stored in `structure.plans`, the table of results about the
    structure. So a second tree of the same structure costs one dictionary lookup, and is not searched again.

    Raises:
        UnregisteredTypeError: It names the class and the path, and how to register the class.
    """
    if _ALL_SEEN not in structure.plans:
        refuse_hidden_arrays_in_records(structure.records, structure.root, structure.base)
        structure.plans[_ALL_SEEN] = True


def refuse_hidden_arrays_in_records(records: Sequence[Record], root: int, base: int = 0) -> None:
    """Does the same as `refuse_hidden_arrays` for a tree without a `Structure` so far. Stores nothing.

    Args:
        records: The records of a tree.
        root: The number of the root's record.
        base: The number of the first record. It is 0, unless the tree was flattened in a `Context` after other trees.
            Lower numbers belong to the other trees, already searched.

    Raises:
        UnregisteredTypeError: It names the class and the path, and how to register the class.
    """
    stack: list[tuple[int, Path]] = [(root, ())]
    visited: set[int] = set()
    while stack:
        number, path = stack.pop()
        if number < base or number in visited:
            continue
        visited.add(number)
        op, children = records[number - base]
        if type(op) is Static and holds_array(op.peek()):
            _raise_unregistered(op.peek(), jtu.keystr(path))
        # The walk does not go on below a module. There, an unregistered object is an ordinary static value.
        if type(op) is Node and op.type.is_plain:
            steps = list(zip(op.keys, children, strict=True))
            stack.extend([(child, (*path, key)) for key, child in reversed(steps)])


def holds_array(obj: Any) -> bool:
    """Returns True if an object holds an array: in its attributes, slots or items, or in those of its parts, and so on.

    The search is breadth first and ends after `MAX_SEARCHED` objects, with False. It does not look into properties, and
    calls no code of the user's classes.
    """
    # A function wrapped by `jax.jit` or another decorator may hold arrays in its caches. Such a function
    # is no model.
    if _is_opaque(obj) or "__wrapped__" in (_attributes_of(obj) or {}):
        return False
    # Each object is queued once, so a cycle ends, and the search is bounded even in a graph of a whole program.
    queue = deque([obj])
    queued = IdentitySet([obj])
    num_searched = 0
    while queue and num_searched < MAX_SEARCHED:
        num_searched += 1
        for part in _parts_of(queue.popleft()):
            if isinstance(part, _ARRAYS):
                return True
            # `queued.add` returns True for a new object.
            if not _is_opaque(part) and queued.add(part):
                queue.append(part)
    return False


def _is_opaque(obj: Any) -> bool:
    """Returns True for objects never searched: numbers, texts, functions, classes, Python modules and meshes."""
    return type(obj) in _NUMBERS_AND_TEXTS or isinstance(obj, _NEVER_ENTERED)


def _parts_of(obj: Any) -> Iterable[Any]:
    """Returns the objects directly in an object: items of a container, values of a dict, attributes and slots."""
    if isinstance(obj, types.MethodType):
        return (obj.__self__,)
    if isinstance(obj, functools.partial):
        return (obj.func, *obj.args, *obj.keywords.values())
    # The lists below are copies, because another thread may change the container while the caller iterates. An instance
    # of a subclass may have attributes besides its items, and its class an `__iter__` of its own, which is not called.
    container = next((cls for cls in _CONTAINERS if isinstance(obj, cls)), None)
    items = [] if container is None else list(container.__iter__(obj))
    if isinstance(obj, dict):
        items = list(dict.values(obj))
    if type(obj) in _CLASSES_OF_ITEMS:
        return items
    return [*items, *(_attributes_of(obj) or {}).values(), *_slot_values(obj)]


def _attributes_of(obj: Any) -> dict[str, Any] | None:
    """Returns an object's `__dict__`, without calling code of its class. None if it has none."""
    try:
        attributes = object.__getattribute__(obj, "__dict__")
    except AttributeError:
        return None
    return attributes if type(attributes) is dict else None


def _slot_values(obj: Any) -> list[Any]:
    """Returns the values of all slots that are set, including the slots declared by base classes."""
    values: list[Any] = []
    for base in type(obj).__mro__:
        for member in vars(base).values():
            if type(member) is types.MemberDescriptorType:
                # A slot that was never set raises `AttributeError`.
                with contextlib.suppress(AttributeError):
                    values.append(member.__get__(obj))
    return values


def _raise_unregistered(obj: Any, path: str) -> NoReturn:
    """Raises the error for an unregistered object with arrays, with the fix for its kind."""
    place = f" at `{path}`" if path else ""
    # A `functools.partial`: JAX's `Partial` is a node and can take its place.
    if isinstance(obj, functools.partial):
        raise UnregisteredTypeError(
            f"A `functools.partial`{place} holds arrays, but is no pytree node, so nothing can see them.\n"
            "Use JAX's partial, which is a pytree node:\n"
            "    jax.tree_util.Partial(partial.func, *partial.args, **partial.keywords)",
            (path,),
        )
    # A method of a node: the user should pass the node.
    is_method = isinstance(obj, types.MethodType)
    owner = obj.__self__ if is_method else obj
    if is_method and node_type_of(owner) is not None:
        raise UnregisteredTypeError(
            f"A method of a `{type(owner).__name__}`{place} holds the arrays of its object, but is no pytree node, so "
            "nothing can see them.\n"
            "Pass the object itself, or a partial that is a pytree node:\n"
            "    jax.tree_util.Partial(method.__func__, method.__self__)",
            (path,),
        )
    # Any other object, or a method of such an object: its class should be registered.
    name = type(owner).__name__
    raise UnregisteredTypeError(
        f"`{name}`{place} holds arrays, but is not a registered pytree node, so nothing can see them.\n"
        f"{how_to_register(name)}",
        (path,),
    )
