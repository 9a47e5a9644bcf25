"""Finds the node type of an object: how it comes apart and is put together again, and which of its leaves are traced.

    node_type_of([1])     the list's, from a table          node_type_of(eqx_module)     by the row of Equinox
    node_type_of(1)       None: a leaf                      node_type_of(partial)        by JAX's registry

There are four kinds: the plain containers; classes that a library's row takes apart, as Equinox modules are, field by
field; every other class in JAX's registry, by the flatten function that its author registered; and the classes of
`register_node`, which JAX does not know.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax import tree_util as jtu

from ._class_attributes import built_in_base
from ._errors import UnregisteredTypeError
from ._jax_internals import rebuild_registered, unflatten_of
from ._library_rows import (
    convention_by_library,
    native_layout_of,
    node_type_by_library,
    role_by_library,
    writes_back_by_library,
)
from ._plain_containers import (
    PLAIN,
    KeyEntries,
    NodeType,
    is_namedtuple,
    maker_of_namedtuple,
    namedtuple_type,
)
from ._traced_leaves_and_identity import TRACED_NUMBERS, carries_identity, is_traced


def node_type_of(obj: Any) -> NodeType | None:
    """Looks up the node type of an object's class. None if it is a leaf. Cost: two or three dictionary look-ups."""
    cls: type = type(obj)
    plain = PLAIN.get(cls)
    if plain is not None:
        return plain
    if cls in _COMMON_LEAVES:
        return None
    node_type = node_types_by_class.get(cls)
    if node_type is not None:
        return node_type
    new_type = _new_node_type(cls, obj)
    return None if new_type is None else _remembered(new_type)


def _remembered(node_type: NodeType) -> NodeType:
    """Enters a node type into the table for the next instance, and returns the one that is there from now on."""
    # The table keeps its classes alive. JAX's registry does so for ever anyway; but a namedtuple is in no registry, and
    # a program may make new ones without end.
    if node_type.is_plain:
        return node_type
    # Several threads may come here with the same class. `setdefault` lets one of them win for all.
    return node_types_by_class.setdefault(node_type.cls, node_type)


def node_type_of_class(cls: type) -> NodeType:
    """Finds the node type of a class of which there is no instance at hand.

    Raises:
        UnregisteredTypeError: if neither JAX nor sharedtree know the class.
    """
    node_type = PLAIN.get(cls) or node_types_by_class.get(cls)
    if node_type is None:
        if is_namedtuple(cls):
            # JAX's registry answers for an instance only, so one is made of Nones.
            node_type = _new_node_type(cls, tuple.__new__(cls, [None] * len(getattr(cls, "_fields", ()))))
        else:
            node_type = node_type_by_library(cls) or (_registered_type(cls) if is_in_jax_registry(cls) else None)
    if node_type is None:
        name = cls.__qualname__
        raise UnregisteredTypeError(
            f"`{name}` was a pytree node where this was pickled, but it is not registered here. Import the module that "
            f"registers it first, or register it:\n    jax.tree_util.register_pytree_node({name}, flatten, unflatten)",
            ("",),
        )
    return node_type if cls in PLAIN else _remembered(node_type)


def is_module(obj: Any) -> bool:
    """Tells whether an object is a module, which carries identity wherever it is."""
    node_type = node_type_of(obj)
    return node_type is not None and not node_type.is_plain


def is_value_of_variable(obj: Any) -> bool:
    """Tells whether an object directly in an NNX `Variable` is its value, which carries no identity there.

    A `jax.Ref` in a variable is an object of its own, and so is any node.
    """
    if node_type_of(obj) is not None or isinstance(obj, jax.Ref):
        return False
    return carries_identity(obj) and is_traced(obj, "variable")


def register_node(
    cls: type,
    flatten: Callable[[Any], tuple[Iterable[Any], Any]],
    unflatten: Callable[[Any, Sequence[Any]], Any],
    *,
    keys: Callable[[Any], Iterable[Any]] | None = None,
    convention: Literal["equinox", "jax"] = "jax",
) -> None:
    """Teaches sharedtree a node type that JAX does not know.

    Classes in JAX's own registry need no registration here. A class registered here is a module inside every
    sharedtree function and transform; vanilla JAX still sees its instances as leaves.

    Args:
        cls: the class; its subclasses are not included.
        flatten: takes an instance and returns its children and its auxiliary data, one level deep. The children may
            be any objects; the auxiliary data is compared by type and value, and may be mutable or unhashable.
        unflatten: takes the auxiliary data and the children and returns a new instance. It should not call
            `__init__`, and it must take whatever objects the transforms put in place of the children.
        keys: takes an instance and returns one key entry for each child (`jax.tree_util.GetAttrKey("weight")`), for
            paths. Default: positions.
        convention: which leaves are traced: `"jax"`, whatever `jax.jit` accepts, or `"equinox"`, arrays only.

    Raises:
        ValueError: if the class is a plain container, or JAX or sharedtree already know it.

    Example:
        >>> import sharedtree as st
        >>> import jax.numpy as jnp
        >>> class Pair:
        ...     def __init__(self, a, b):
        ...         self.a, self.b = a, b
        >>> st.register_node(Pair, lambda p: ((p.a, p.b), None), lambda aux, children: Pair(*children))
        >>> w = jnp.ones(3)
        >>> [tie.paths for tie in st.ties(Pair(w, w))]
        [('[0]', '[1]')]
    """
    if cls in PLAIN or cls in node_types_by_class or is_in_jax_registry(cls):
        raise ValueError(
            f"`{cls.__qualname__}` is already a registered node. Leave out the call of `register_node`: "
            "sharedtree reads JAX's registry."
        )

    def take_apart(obj: Any) -> tuple[Sequence[Any], Any]:
        children, aux = flatten(obj)
        return tuple(children), aux

    def keys_of(obj: Any) -> KeyEntries:
        if keys is not None:
            return tuple(keys(obj))
        return tuple([jtu.SequenceKey(i) for i in range(len(take_apart(obj)[0]))])

    node_types_by_class[cls] = NodeType(cls, False, False, convention, take_apart, unflatten, keys_of)
    for callback in registration_callbacks:
        callback()


def require_registered(tree: Any) -> None:
    """Raises an error if `tree` itself is an instance of a class that nobody registered.

    A leaf is fine, and so is an object without attributes: only an object that holds attributes looks like a model.

    Raises:
        UnregisteredTypeError: with the class, and the two ways to register it as code.
    """
    if node_type_of(tree) is not None or is_traced(tree, "jax") or callable(tree):
        return
    if not hasattr(tree, "__dict__") or isinstance(tree, type):
        return
    name = type(tree).__name__
    raise UnregisteredTypeError(
        f"`{name}` is not a registered pytree node, so nothing inside it can be seen.\n{how_to_register(name)}", ("",)
    )


def how_to_register(name: str) -> str:
    """Writes the two ways to make a class a node, as code.

    Args:
        name: the name of the class.
    """
    return (
        "Register the class with JAX:\n"
        f"    jax.tree_util.register_pytree_node({name}, flatten, unflatten)\n"
        "or, to keep it a leaf for JAX, with sharedtree only:\n"
        f"    sharedtree.register_node({name}, flatten, unflatten)"
    )


# --- how a node type is found -----------------------------------------------------------------------------------------

registration_callbacks: list[Callable[[], None]] = []
"""Called after each call of `register_node`, since instances of the class were leaves before."""

node_types_by_class: dict[type, NodeType] = {}
"""The node types of all modules seen so far, and of the classes of `register_node`. Each entry is one assignment, which
threads cannot tear."""


_COMMON_LEAVES = TRACED_NUMBERS | {str, bytes, np.ndarray}
"""Classes of leaves that are worth a look-up, because asking JAX's registry takes longer."""


def is_in_jax_registry(cls: type) -> bool:
    """Tells whether JAX takes instances of a class apart. Not for the classes in `PLAIN`."""
    if cls is jtu.Partial or is_namedtuple(cls):
        return True
    # NumPy warns if some of its scalars are made by a bare `__new__`. None of them is a node.
    if issubclass(cls, np.generic):
        return False
    # JAX has no public question about a class, only about objects. So an instance is made without `__init__`; JAX looks
    # at its class alone.
    built_in: Any = built_in_base(cls)
    try:
        blank = built_in.__new__(cls)
    except TypeError:  # of a layout that only its own constructor can make; JAX knows those in `PLAIN`
        return False
    return not jtu.all_leaves([blank])


def _new_node_type(cls: type, obj: Any) -> NodeType | None:
    """Makes the node type of a class that was not seen before. None if its instances are leaves.

    Args:
        cls: the class.
        obj: an instance. JAX's registry may take it apart, one level deep.
    """
    by_library = node_type_by_library(cls)
    if by_library is not None:
        return by_library
    flat = jtu.default_registry.flatten_one_level(obj)
    if flat is None:
        return None
    # For a namedtuple JAX's auxiliary data is the class, unless its author registered a flatten function for it.
    if is_namedtuple(cls) and flat[1] is cls:
        return namedtuple_type(cls)
    return _registered_type(cls)


class AuxConversion(NamedTuple):
    """Replacement for the auxiliary data that a class's own flatten function returns.

    A structure compares auxiliary data by type and value. The replacement is such that this is right: the fields are in
    one order, for example, and a wrapper without `==` is replaced by what it holds.

    Attributes:
        to_structure: auxiliary data → its replacement in a structure.
        from_structure: the inverse, for the class's own unflatten function.
    """

    to_structure: Callable[[Any], Any]
    from_structure: Callable[[Any], Any]


AUX_CONVERSIONS: dict[type, AuxConversion] = {}
"""Base class → the conversion for its classes. Empty unless `sharedtree.compat` has imported treeo."""


def _registered_type(cls: type) -> NodeType:
    """Makes the node type of a class in JAX's registry, by the functions that its author registered."""
    conversion = next((entry for base, entry in AUX_CONVERSIONS.items() if issubclass(cls, base)), None)

    def take_apart_and_convert(obj: Any) -> tuple[Sequence[Any], Any]:
        children, aux = jtu.default_registry.flatten_one_level(obj)
        assert conversion is not None
        return tuple(children), conversion.to_structure(aux)

    def put_together(aux: Any, children: Sequence[Any]) -> Any:
        return rebuild_registered(cls, aux if conversion is None else conversion.from_structure(aux), children)

    return NodeType(
        cls,
        is_plain=False,
        is_mutable=False,
        convention=None if issubclass(cls, jtu.Partial) else convention_by_library(cls) or "jax",
        take_apart=_take_apart_registered if conversion is None else take_apart_and_convert,
        put_together=put_together,
        keys_of=lambda obj: tuple(key for key, _ in jtu.default_registry.flatten_one_level_with_keys(obj)[0]),
        names_children=conversion is None and native_layout_of(cls) is None,
        writes_back=writes_back_by_library(cls),
        roles=role_by_library(cls),
    )


def is_registered(node_type: NodeType) -> bool:
    """Tells whether the functions in JAX's registry take the instances apart, with nothing added."""
    return node_type.take_apart is _take_apart_registered


def _take_apart_registered(obj: Any) -> tuple[Sequence[Any], Any]:
    children, aux = jtu.default_registry.flatten_one_level(obj)
    return tuple(children), aux


def maker_of(cls: type, aux: Any, num_children: int) -> Callable[[tuple[Any, ...]], Any]:
    """Makes a function that puts instances of a class in JAX's registry together from the children alone.

    Args:
        cls: the class, or a namedtuple.
        aux: the auxiliary data of all of them.
        num_children: how many children each has.
    """
    return maker_of_namedtuple(cls) if is_namedtuple(cls) else unflatten_of(cls, aux, num_children)
