"""The kinds of values in a `Module`, and errors for values that it cannot hold.

There are four kinds. Values of the first three are children of the module. A static value is part of its structure:

    parameter   marked by `st.parameter`: traced, and trainable
    state       marked by `st.state_field`: traced, and nothing in it is trainable
    sub-tree    an array, a module or a container of these, without a mark: traced. In it, modules decide by their own
                marks, and bare arrays are not trainable.
    static      anything else

In this file, `head` is the beginning of an error's sentence: the attribute that gets the value, in words.
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

# The two kinds that only a mark can give.
MARKED = frozenset({PARAMETER, STATE})
ALL_KINDS: frozenset[Any] = frozenset({PARAMETER, STATE, SUBTREE, STATIC})


class Marked:
    """A value with the mark of `st.parameter` or `st.state_field`. An assignment to an attribute takes the mark off."""

    __slots__ = ("kind", "value")

    def __init__(self, kind: Kind, value: Any) -> None:
        self.kind: Kind = kind
        self.value = value


def require_markable(value: Any, kind: Kind, head: str) -> None:
    """Checks that a value can be marked: None, an array, a number, a module, or a container of these.

    Raises:
        UnregisteredTypeError: if it cannot.
    """
    if value is None or type(value) in PYTHON_NUMBERS or is_array(value) or is_traced(value, "jax"):
        return
    if node_type_of(value) is not None:
        # For its errors about values in a container.
        kind_of_value(value, head)
        return
    require_no_hidden_children(value, head)
    raise UnregisteredTypeError(
        f"{head} is {_NAMES[kind]}, and {shown(value)} is nothing that JAX could trace: no array, no number, no module "
        "and no container of these. What is not traced needs no mark, and an attribute loses its mark when it is "
        "deleted:\n    del module.attribute\n    module.attribute = value",
        ("",),
    )


# In errors.
_NAMES: dict[Kind, str] = {PARAMETER: "a parameter", STATE: "state"}


def require_no_hidden_children(value: Any, head: str) -> None:
    """Checks that an object that is no node holds no arrays or modules, which nobody would see there.

    Raises:
        UnregisteredTypeError: for views of dictionaries and for iterators, for sets and other objects with arrays or
            modules in them, and for methods of modules. The message has a fix.
    """
    cls: Any = type(value)
    if isinstance(value, MappingView) or (isinstance(value, Iterator) and cls.__module__ in ("builtins", "itertools")):
        raise UnregisteredTypeError(
            f"{head} is assigned a `{cls.__name__}`, which is no container of its own, so no pytree can hold what it "
            "gives. Make it a list:\n    module.attribute = list(value)",
            ("",),
        )
    if isinstance(value, (set, frozenset)) and _hidden_child(value) is not None:
        raise UnregisteredTypeError(
            f"{head} is assigned a `{cls.__name__}` of arrays or modules, which has no order, so it is no pytree and "
            "nothing in it can be seen. Make it a list:\n    module.attribute = list(value)",
            ("",),
        )
    if isinstance(value, types.MethodType) and _is_jax_or_module(value.__self__):
        raise UnregisteredTypeError(
            f"{head} is assigned a method of a `{type(value.__self__).__name__}`, which holds that very object, so a "
            "transform or a copy would go on with the old one. Make it a property:\n"
            "    @property\n"
            "    def attribute(self):\n"
            "        return self.method",
            ("",),
        )
    # A function may close over arrays. JAX treats these as constants, so they are allowed.
    if isinstance(value, type) or callable(value):
        return
    held = _hidden_child(value)
    if held is not None:
        raise UnregisteredTypeError(
            f"{head} is assigned a `{cls.__name__}`, which holds an array or a module as `{held}`, but is not a "
            "registered pytree node, so nothing inside it can be seen. Let the class be a module, too:\n"
            f"    class {cls.__name__}(sharedtree.Module): ...\n"
            "or register it with JAX:\n"
            f"    jax.tree_util.register_pytree_node({cls.__name__}, flatten, unflatten)",
            ("",),
        )


_MOST_LOOKED_AT = 1_000
"""The largest number of objects to search for arrays and modules in one value."""


def _hidden_child(value: Any) -> str | None:
    """Finds an array or a module in an object that is no node: in an attribute or an item, or in containers in these.

    Returns:
        Its path as code, such as `layers[0]`. None if the first thousand objects have none.
    """
    seen = IdentitySet()
    stack = [*_attributes_of(value), *_items_of(value)]
    while stack and len(seen) < _MOST_LOOKED_AT:
        path, part = stack.pop()
        if _is_jax_or_module(part):
            return path.removeprefix(".")
        # `add` returns False if the part was seen before.
        if seen.add(part):
            stack += [(path + step, item) for step, item in _items_of(part)]
    return None


def _attributes_of(value: Any) -> list[tuple[str, Any]]:
    """Returns the attributes of an object in slots and in its `__dict__`, each with its step: `.name`."""
    slots = [name for base in type(value).__mro__ for name in _slots_of(base)]
    in_slots = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return [(f".{name}", part) for name, part in (in_slots | getattr(value, "__dict__", {})).items()]


def _slots_of(cls: type) -> list[str]:
    """Returns the names of the slots that a class itself declares."""
    return [name for name, held in vars(cls).items() if isinstance(held, types.MemberDescriptorType)]


def _items_of(value: Any) -> list[tuple[str, Any]]:
    """Returns the items of a container of Python or of a class derived from one, each with its step: `[key]`."""
    if isinstance(value, (dict, collections.UserDict, collections.ChainMap, types.MappingProxyType)):
        return [(f"[{shown(key)}]", part) for key, part in value.items()]
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        value = value.ravel().tolist()
    if isinstance(value, (list, tuple, set, frozenset, collections.deque, collections.UserList)):
        return [(f"[{i}]", part) for i, part in enumerate(value)]
    return []


def is_array(value: Any) -> bool:
    """Returns True for an array that JAX can trace, or an object that converts to one by `__jax_array__`."""
    is_one = carries_identity(value) or hasattr(type(value), "__jax_array__")
    return is_one and is_traced(value, "jax")


def _is_child(value: Any) -> bool:
    """Returns True for an array or a module, which has to be a child of the module that holds it."""
    if is_array(value):
        return True
    node_type = node_type_of(value)
    return node_type is not None and not node_type.is_plain


def _is_jax_or_module(value: Any) -> bool:
    """Returns True for a JAX array or a module. A NumPy array may be hidden, as a constant."""
    return isinstance(value, jax.Array) or (_is_child(value) and not carries_identity(value))


def is_container(value: Any) -> bool:
    """Returns True for a plain container other than None."""
    node_type = node_type_of(value)
    return value is not None and node_type is not None and node_type.is_plain


def kind_of_value(value: Any, head: str | None = None) -> Kind:
    """Returns the kind of a value without a mark: sub-tree or static.

    Args:
        value: the value.
        head: the beginning of errors; None to skip the checks of static values.

    Raises:
        UnregisteredTypeError: if a container holds a marked value, or, with a head, if an object in the value hides
            arrays or modules.
    """
    # None is a node without children. Like an empty list, it may be replaced by an array later.
    if value is None or _is_child(value):
        return SUBTREE
    if not is_container(value):
        if head is not None:
            require_no_hidden_children(value, head)
        return STATIC
    holds_children, holds_others, can_be_filled = False, False, False
    seen = IdentitySet()
    stack: list[Any] = [value]
    while stack:
        part = stack.pop()
        if type(part) is Marked:
            raise UnregisteredTypeError(
                f"{head or 'An attribute'} is a container with {_NAMES[part.kind]} in it. A mark belongs to an "
                "attribute, for it is the attribute that keeps it. Mark the container:\n"
                "    module.attribute = sharedtree.parameter(value)",
                ("",),
            )
        if _is_child(part):
            holds_children = True
        elif not is_container(part):
            holds_others = holds_others or part is not None
            if head is not None:
                require_no_hidden_children(part, head)
        elif seen.add(part):
            node_type = node_type_of(part)
            assert node_type is not None
            can_be_filled = can_be_filled or node_type.is_mutable
            stack.extend(node_type.take_apart(part)[0])
    # A list that is still empty, or a dictionary of None, will probably get arrays or modules.
    return SUBTREE if holds_children or (can_be_filled and not holds_others) else STATIC
