"""Of which kind a value is that a `Module` is to hold, and which values no module can hold.

There are four kinds. Those of the first three are children of the module; the last is part of its structure:

    parameter   marked by `st.parameter`: traced, and trainable
    state       marked by `st.state_field`: traced, and nothing in it is trainable
    sub-tree    not marked, but an array, a module, or a container of these: traced; modules in it say for themselves
                what of them is trainable, and of bare arrays nothing is
    static      anything else
"""

import collections
import types
from collections.abc import Iterator, MappingView
from typing import Any, Literal

import jax
import numpy as np

from ..core._by_identity import IdentitySet
from ..core._errors import UnregisteredTypeError
from ..core._node_types import PYTHON_NUMBERS, carries_identity, is_traced, node_type_of
from ..core._printing import shown

Kind = Literal["parameter", "state", "sub-tree", "static"]

PARAMETER: Kind = "parameter"
STATE: Kind = "state"
SUBTREE: Kind = "sub-tree"
STATIC: Kind = "static"

MARKED = frozenset({PARAMETER, STATE})
ALL_KINDS: frozenset[Any] = frozenset({PARAMETER, STATE, SUBTREE, STATIC})


class Marked:
    """A value on its way from `st.parameter` or `st.state_field` to the attribute that it is assigned to."""

    __slots__ = ("kind", "value")

    def __init__(self, kind: Kind, value: Any) -> None:
        self.kind: Kind = kind
        self.value = value


def require_markable(value: Any, kind: Kind, what: str) -> None:
    """Raises if a value can be no parameter and no state: it is no array, no number, no module and no container.

    Raises:
        UnregisteredTypeError: with the value's class.
    """
    if value is None or type(value) in PYTHON_NUMBERS or is_array(value) or is_traced(value, "jax"):
        return
    if node_type_of(value) is not None:
        kind_of_value(value, what)
        return
    require_no_hidden_children(value, what)
    raise UnregisteredTypeError(
        f"{what} is {_NAMES[kind]}, and {shown(value)} is nothing that JAX could trace: no array, no number, no module "
        "and no container of these. What is not traced needs no mark, and an attribute loses its mark when it is "
        "deleted:\n    del module.attribute\n    module.attribute = value",
        ("",),
    )


_NAMES: dict[Kind, str] = {PARAMETER: "a parameter", STATE: "state"}


def require_no_hidden_children(value: Any, what: str) -> None:
    """Raises if an object that is no node holds arrays or modules where no pytree could hold them.

    Raises:
        UnregisteredTypeError: with the fix.
    """
    cls: Any = type(value)
    if isinstance(value, MappingView) or (isinstance(value, Iterator) and cls.__module__ in ("builtins", "itertools")):
        raise UnregisteredTypeError(
            f"{what} is assigned a `{cls.__name__}`, which is no container of its own, so no pytree can hold what it "
            "gives. Make it a list:\n    module.attribute = list(value)",
            ("",),
        )
    if isinstance(value, (set, frozenset)) and _hidden_child(value) is not None:
        raise UnregisteredTypeError(
            f"{what} is assigned a `{cls.__name__}` of arrays or modules, which has no order, so it is no pytree and "
            "nothing in it can be seen. Make it a list:\n    module.attribute = list(value)",
            ("",),
        )
    if isinstance(value, types.MethodType) and _is_jax_or_module(value.__self__):
        raise UnregisteredTypeError(
            f"{what} is assigned a method of a `{type(value.__self__).__name__}`, which holds that very object, so a "
            "transform or a copy would go on with the old one. Make it a property:\n"
            "    @property\n"
            "    def attribute(self):\n"
            "        return self.method",
            ("",),
        )
    if isinstance(value, type) or callable(value):
        return
    held = _hidden_child(value)
    if held is not None:
        raise UnregisteredTypeError(
            f"{what} is assigned a `{cls.__name__}`, which holds an array or a module as `{held}`, but is not a "
            "registered pytree node, so nothing inside it can be seen. Let the class be a module, too:\n"
            f"    class {cls.__name__}(sharedtree.Module): ...\n"
            "or register it with JAX:\n"
            f"    jax.tree_util.register_pytree_node({cls.__name__}, flatten, unflatten)",
            ("",),
        )


_MOST_LOOKED_AT = 1_000


def _hidden_child(value: Any) -> str | None:
    """Where an object that is no node has an array or a module: in an attribute, or in containers in one.

    None if it has none, or none among the first thousand things that are looked at.
    """
    seen = IdentitySet()
    stack = [*_attributes_of(value), *_items_of(value)]
    while stack and len(seen) < _MOST_LOOKED_AT:
        path, part = stack.pop()
        if _is_jax_or_module(part):
            return path.removeprefix(".")
        if seen.add(part):
            stack += [(path + step, item) for step, item in _items_of(part)]
    return None


def _attributes_of(value: Any) -> list[tuple[str, Any]]:
    slots = [name for base in type(value).__mro__ for name in _slots_of(base)]
    found = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return [(f".{name}", part) for name, part in (found | getattr(value, "__dict__", {})).items()]


def _slots_of(cls: type) -> list[str]:
    return [name for name, held in vars(cls).items() if isinstance(held, types.MemberDescriptorType)]


def _items_of(value: Any) -> list[tuple[str, Any]]:
    """What is in a container of Python's, or in one that was derived from one."""
    if isinstance(value, (dict, collections.UserDict, collections.ChainMap, types.MappingProxyType)):
        return [(f"[{shown(key)}]", part) for key, part in value.items()]
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        value = value.ravel().tolist()
    if isinstance(value, (list, tuple, set, frozenset, collections.deque, collections.UserList)):
        return [(f"[{i}]", part) for i, part in enumerate(value)]
    return []


def is_array(value: Any) -> bool:
    """Whether a value is an array that JAX can trace, or stands for one."""
    is_one = carries_identity(value) or hasattr(type(value), "__jax_array__")
    return is_one and is_traced(value, "jax")


def _is_child(value: Any) -> bool:
    """Whether a value that is no container has to be seen: an array, or a module."""
    if is_array(value):
        return True
    node_type = node_type_of(value)
    return node_type is not None and not node_type.is_plain


def _is_jax_or_module(value: Any) -> bool:
    return isinstance(value, jax.Array) or (_is_child(value) and not carries_identity(value))


def is_container(value: Any) -> bool:
    """Whether a value is a plain container."""
    node_type = node_type_of(value)
    return value is not None and node_type is not None and node_type.is_plain


def kind_of_value(value: Any, what: str | None = None) -> Kind:
    """The kind of a value that is not marked.

    Args:
        value: the value.
        what: what it is assigned to, if it is to be checked.
    """
    if value is None or _is_child(
        value
    ):  # None is a node without children, and there to be filled, as an empty list is
        return SUBTREE
    if not is_container(value):
        if what is not None:
            require_no_hidden_children(value, what)
        return STATIC
    holds_children, holds_others, can_be_filled = False, False, False
    seen = IdentitySet()
    stack: list[Any] = [value]
    while stack:
        part = stack.pop()
        if type(part) is Marked:
            raise UnregisteredTypeError(
                f"{what or 'An attribute'} is a container with {_NAMES[part.kind]} in it. A mark belongs to an "
                "attribute, for it is the attribute that keeps it. Mark the container:\n"
                "    module.attribute = sharedtree.parameter(value)",
                ("",),
            )
        if _is_child(part):
            holds_children = True
        elif not is_container(part):
            holds_others = holds_others or part is not None
            if what is not None:
                require_no_hidden_children(part, what)
        elif seen.add(part):
            node_type = node_type_of(part)
            assert node_type is not None
            can_be_filled = can_be_filled or node_type.is_mutable
            stack.extend(node_type.take_apart(part)[0])
    # A list that is empty yet, or a dictionary of None, is there to be filled.
    return SUBTREE if holds_children or (can_be_filled and not holds_others) else STATIC
