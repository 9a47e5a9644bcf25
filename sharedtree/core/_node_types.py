"""Which kind of node an object is, how it comes apart and is put together again, and which of its leaves it traces.

Three kinds are known: the plain containers; classes that a library's row takes apart, as Equinox modules are, field by
field; and every other class in JAX's registry, through the flatten function that its author registered. `register_node`
adds a fourth: classes that JAX does not know.
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
    """The node type of an object's class; None if the object is a leaf. Cost: a dictionary look-up."""
    cls: type = type(obj)
    plain = PLAIN.get(cls)
    if plain is not None:
        return plain
    if cls in _COMMON_LEAVES:
        return None
    known = node_types_by_class.get(cls)
    if known is not None:
        return known
    found = _find(cls, obj)
    return None if found is None else _kept(found)


def _kept(node_type: NodeType) -> NodeType:
    """The one that is known from now on. What JAX's registry holds lives for ever, but a namedtuple is in none."""
    if node_type.is_plain:
        return node_type
    # Of several threads that find it at once, one is right for all.
    return node_types_by_class.setdefault(node_type.cls, node_type)


def node_type_of_class(cls: type) -> NodeType:
    """The node type of a class of which there is no instance yet.

    Raises:
        UnregisteredTypeError: if it is none that JAX or sharedtree know.
    """
    known = PLAIN.get(cls) or node_types_by_class.get(cls)
    if known is None:
        if is_namedtuple(cls):
            known = _find(cls, tuple.__new__(cls, [None] * len(getattr(cls, "_fields", ()))))
        else:
            known = node_type_by_library(cls) or (_registered_type(cls) if is_in_jax_registry(cls) else None)
    if known is None:
        name = cls.__qualname__
        raise UnregisteredTypeError(
            f"`{name}` was a pytree node where this was pickled, but it is not registered here. Import the module that "
            f"registers it first, or register it:\n    jax.tree_util.register_pytree_node({name}, flatten, unflatten)",
            ("",),
        )
    return known if cls in PLAIN else _kept(known)


def is_module(obj: Any) -> bool:
    """Whether an object carries identity wherever it is."""
    node_type = node_type_of(obj)
    return node_type is not None and not node_type.is_plain


def is_value_of_variable(obj: Any) -> bool:
    """Whether what is directly in a variable is its value, and not an object that it refers to."""
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
    for tell in when_registered:
        tell()


def require_registered(tree: Any) -> None:
    """Raises if `tree` as a whole is an object that holds attributes but cannot be taken apart.

    Raises:
        UnregisteredTypeError: naming the class and the registrations that would mend it.
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
    """The two ways to make a class a node, as code."""
    return (
        "Register the class with JAX:\n"
        f"    jax.tree_util.register_pytree_node({name}, flatten, unflatten)\n"
        "or, to keep it a leaf for JAX, with sharedtree only:\n"
        f"    sharedtree.register_node({name}, flatten, unflatten)"
    )


# --- the three kinds ---------------------------------------------------------------------------------------------

when_registered: list[Callable[[], None]] = []
"""Told when a class is registered that JAX does not know."""

node_types_by_class: dict[type, NodeType] = {}  # filled once a class, by a single assignment, which threads cannot tear


_COMMON_LEAVES = TRACED_NUMBERS | {str, bytes, np.ndarray}


def is_in_jax_registry(cls: type) -> bool:
    if cls is jtu.Partial or is_namedtuple(cls):
        return True
    # NumPy warns if some of its scalars are made of nothing.
    if issubclass(cls, np.generic):
        return False
    built_in: Any = built_in_base(cls)
    try:
        blank = built_in.__new__(cls)
    except TypeError:  # of a layout that only its own constructor can make; JAX knows those in `PLAIN`
        return False
    return not jtu.all_leaves([blank])


def _find(cls: type, obj: Any) -> NodeType | None:
    by_library = node_type_by_library(cls)
    if by_library is not None:
        return by_library
    flat = jtu.default_registry.flatten_one_level(obj)
    if flat is None:
        return None
    if is_namedtuple(cls) and flat[1] is cls:  # not registered by its author for something else
        return namedtuple_type(cls)
    return _registered_type(cls)


class AuxConversion(NamedTuple):
    """Another form of what a class's own flatten has as auxiliary data.

    Attributes:
        seen: auxiliary data → what stands for it in a structure, where it is compared by type and value.
        given: the inverse, for the class's own unflatten.
    """

    seen: Callable[[Any], Any]
    given: Callable[[Any], Any]


AUX_CONVERSIONS: dict[type, AuxConversion] = {}
"""Base class → the form for its classes. Empty unless `sharedtree.compat` has imported treeo."""


def _registered_type(cls: type) -> NodeType:
    form = next((form for base, form in AUX_CONVERSIONS.items() if issubclass(cls, base)), None)

    def take_apart_in_form(obj: Any) -> tuple[Sequence[Any], Any]:
        children, aux = jtu.default_registry.flatten_one_level(obj)
        assert form is not None
        return tuple(children), form.seen(aux)

    def put_together(aux: Any, children: Sequence[Any]) -> Any:
        return rebuild_registered(cls, aux if form is None else form.given(aux), children)

    return NodeType(
        cls,
        is_plain=False,
        is_mutable=False,
        convention=None if issubclass(cls, jtu.Partial) else convention_by_library(cls) or "jax",
        take_apart=_take_apart_registered if form is None else take_apart_in_form,
        put_together=put_together,
        keys_of=lambda obj: tuple(key for key, _ in jtu.default_registry.flatten_one_level_with_keys(obj)[0]),
        names_children=form is None and native_layout_of(cls) is None,
        writes_back=writes_back_by_library(cls),
        roles=role_by_library(cls),
    )


def is_registered(node_type: NodeType) -> bool:
    """Whether JAX's registry takes its instances apart."""
    return node_type.take_apart is _take_apart_registered


def _take_apart_registered(obj: Any) -> tuple[Sequence[Any], Any]:
    children, aux = jtu.default_registry.flatten_one_level(obj)
    return tuple(children), aux


def maker_of(cls: type, aux: Any, num_children: int) -> Callable[[tuple[Any, ...]], Any]:
    """What puts instances of a class in JAX's registry together, as a function of the children alone."""
    return maker_of_namedtuple(cls) if is_namedtuple(cls) else unflatten_of(cls, aux, num_children)
