"""The plain data that represents each kind of object in a state, and how the object is made from it again.

A *state* is nested plain data: dicts, lists and tuples of arrays, numbers, strings and None. The *form* of an object
lists its parts, and the container that holds their states:

    Linear(weight=w, bias=None, name="out")   a dict by field name, the static fields too
    {"b": x, "a": y}                          a dict with the same keys, in the same order
    ScaleByAdamState(count, mu, nu)           a dict by field name, as of every namedtuple
    [x, y]   (x, y)   deque([x, y])           a list, a tuple, a list
    nnx.Param(w)                              no container: the state of `w`

Functions that a user registered work as in the last row: the state of what `to_state` returns is the state of the
object. The idea is that of `flax.serialization`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from jax import tree_util as jtu

from ...core._node_types import (
    PYTHON_NUMBERS,
    NodeType,
    carries_identity,
    is_namedtuple,
    name_in,
    node_type_of,
    plain_form_of,
)
from .._dag import Dag

T = TypeVar("T")


class Functions(NamedTuple):
    """The two functions that were registered for a class.

    Attributes:
        to_state: instance → an object that represents it in the state.
        from_state: (instance of the model, the loaded object from the state) → the new instance.
    """

    to_state: Callable[[Any], Any]
    from_state: Callable[[Any, Any], Any]


# Class → its functions. `register_state` adds to them.
_registered: dict[type, Functions] = {Dag: Functions(lambda dag: dag.tree, lambda _, tree: Dag(tree))}


def functions_of(cls: type) -> Functions | None:
    """Returns the functions of a class, or of its nearest base class that has some. None if there are none."""
    return next((_registered[base] for base in cls.__mro__ if base in _registered), None)


def register_state(
    cls: type[T],
    to_state: Callable[[T], Any],
    from_state: Callable[[T, Any], T],
    override: bool = False,
) -> None:
    """Registers two functions, by which `state` and `load_state` convert the instances of a class.

    Classes that are no pytrees need them, because without them the state of an instance is `()`. They are also useful
    for classes whose fields describe them badly. A subclass without functions of its own uses those of the nearest
    class in its method resolution order. Registered functions win over the fields of a class.

    Args:
        cls: the class.
        to_state: takes an instance and returns what represents it in the state: a dict, a list, an array, any tree. It
            need not convert what it puts in there: `state` goes on with the parts.
        from_state: takes an instance of the model, and what `to_state` returned for it, with the loaded values in place
            of the model's. Returns the new instance. It must not change the instance that it gets.
        override: True to replace functions that the class has already.

    Raises:
        ValueError: if the class has functions, and `override` is false.
        TypeError: if `cls` is no class.

    Example:
        >>> import sharedtree as st
        >>> class Schedule:
        ...     def __init__(self, start):
        ...         self.start = start
        >>> st.register_state(Schedule, lambda s: {"start": s.start}, lambda _, loaded: Schedule(loaded["start"]))
        >>> st.state([Schedule(0.1)])
        [{'start': 0.1}]
        >>> st.load_state([Schedule(0.1)], [{"start": 0.2}])[0].start
        0.2
    """
    if not isinstance(cls, type):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"`register_state` needs a class, and `{type(cls).__name__}` is none.")
    functions = Functions(to_state, from_state)
    if override:
        _registered[cls] = functions
    elif _registered.setdefault(cls, functions) is not functions:
        raise ValueError(
            f"`register_state` was called for `{cls.__name__}` before. To replace the functions given then:\n"
            f"    sharedtree.register_state({cls.__name__}, to_state, from_state, override=True)"
        )


_PLAIN_LEAVES = PYTHON_NUMBERS | {str, bytes, type(None)}


class Form(NamedTuple):
    """The parts of an object, and the container for their states. A part is a child or a static attribute.

    Attributes:
        kind: the container that holds the states of the parts. `"whole"`: none, because the object has one part, and
            the state of the part is the state of the object.
        names: for `"dict"`, the key of each part. For `"list"`, `"tuple"` and `"whole"` nobody reads them.
        keys: the key entry of each part in paths. Empty if the path of the part is the path of the object.
        parts: the parts, children first.
        num_static: the number of static parts, which are the last ones.
        put_together: makes a new object of new parts.
        is_object: True if two occurrences of the object are a tie, unless it is in a static attribute.
        is_mutable: True for a plain container that can be mutated, such as a dict.
    """

    kind: Literal["dict", "list", "tuple", "whole"]
    names: tuple[Any, ...]
    keys: tuple[Any, ...]
    parts: tuple[Any, ...]
    num_static: int
    put_together: Callable[[Sequence[Any]], Any]
    is_object: bool
    is_mutable: bool = False

    def holding(self, states: Sequence[Any]) -> Any:
        """Puts the states of the parts into a new container, which is the state of the object."""
        if self.kind == "whole":
            return states[0]
        if self.kind == "dict":
            return dict(zip(self.names, states, strict=True))
        return list(states) if self.kind == "list" else tuple(states)


def is_state_leaf(obj: Any) -> bool:
    """Returns True for an object that stands in a state itself: an array, a number, a string, bytes or None."""
    return type(obj) in _PLAIN_LEAVES or isinstance(obj, np.generic) or carries_identity(obj)


def form_of(obj: Any) -> Form | None:
    """Returns the form of an object. None for an object without parts: a leaf, or an object that no state can hold.

    It calls registered functions and flatten functions.
    """
    functions = functions_of(type(obj))
    if functions is None and is_state_leaf(obj):
        return None
    node_type = node_type_of(obj)
    is_object = node_type is not None and node_type.carries_identity
    if functions is not None:
        # If the class is registered again before the object is made, the old pair of functions is used for both.
        from_state = functions.from_state

        def from_part(new: Sequence[Any]) -> Any:
            return from_state(obj, new[0])

        # The only part has neither a name nor a key: its path is the path of the object.
        part = functions.to_state(obj)
        return Form("whole", (), (), (part,), num_static=0, put_together=from_part, is_object=is_object)
    if node_type is None:
        return None
    if node_type.is_plain:
        return _plain_form(obj, node_type)
    return _attribute_form(obj, node_type) or _keyed_form(obj, node_type)


def _plain_form(obj: Any, node_type: NodeType) -> Form:
    """Returns the form of a plain container: the entries of a dict, or the items of a sequence."""
    if isinstance(obj, dict):
        mapping: dict[Any, Any] = obj
        names = tuple(mapping)

        def fill_copy(new: Sequence[Any]) -> Any:
            # A copy has the class, the order and the default factory of the dict.
            filled = mapping.copy()
            filled.update(zip(names, new, strict=True))
            return filled

        keys = tuple([jtu.DictKey(name) for name in names])
        parts = tuple(mapping.values())
        return Form("dict", names, keys, parts, num_static=0, put_together=fill_copy, is_object=True, is_mutable=True)
    children, aux = node_type.take_apart(obj)
    kind: Any = "dict" if is_namedtuple(node_type.cls) else "tuple" if node_type.cls is tuple else "list"
    names = tuple(getattr(node_type.cls, "_fields", ()))
    return _of_children(kind, names, obj, node_type, children, aux)


def _of_children(kind: Any, names: Any, obj: Any, node_type: NodeType, children: Sequence[Any], aux: Any) -> Form:
    """Returns a form with the children of a node as its parts. A new object gets the auxiliary data of the node."""

    def put_together(new: Sequence[Any]) -> Any:
        return node_type.put_together(aux, new)

    keys, is_object = node_type.keys_of(obj), node_type.carries_identity
    return Form(kind, names, keys, tuple(children), 0, put_together, is_object, node_type.is_mutable)


def _attribute_form(obj: Any, node_type: NodeType) -> Form | None:
    """Returns the form of a module whose static attributes have names, so that they are parts, too.

    Returns None if no library knows the names.
    """
    if node_type.cls is jtu.Partial:
        children, function = node_type.take_apart(obj)
        return _named_form(
            ("args", "keywords"),
            children,
            {"func": function},
            lambda new, statics: node_type.put_together(statics["func"], new),
        )
    # The support code for each library answers for its classes.
    form = plain_form_of(obj, node_type)
    if form is None or form.kind == "dict":
        return None if form is None else _named_form(form.names, form.children, form.statics, form.make)
    # A list, or the value of a variable of NNX. Neither has static attributes.
    make = form.make

    def put_together(new: Sequence[Any]) -> Any:
        return make(new, {})

    children = tuple(form.children)
    return Form(form.kind, (), form.keys, children, num_static=0, put_together=put_together, is_object=True)


def _named_form(
    names: Sequence[str],
    children: Sequence[Any],
    statics: Mapping[str, Any],
    make: Callable[[Sequence[Any], Mapping[str, Any]], Any],
) -> Form:
    """Returns the form of an object with fields, as a dict: first the children, then the static attributes.

    Args:
        names: the name of each child.
        children: the children.
        statics: the static attributes by name.
        make: (new children, new static attributes by name) → a new object.
    """

    def put_together(new: Sequence[Any]) -> Any:
        return make(list(new[: len(names)]), dict(zip(statics, new[len(names) :], strict=True)))

    all_names = (*names, *statics)
    keys = tuple([jtu.GetAttrKey(name) for name in all_names])
    parts = (*children, *statics.values())
    return Form("dict", all_names, keys, parts, len(statics), put_together, is_object=True)


def _keyed_form(obj: Any, node_type: NodeType) -> Form:
    """Returns the form of any other registered class: its children by their keys, or by `"0"`, `"1"` and so on."""
    children, aux = node_type.take_apart(obj)
    names = tuple([name_in(key) for key in node_type.keys_of(obj)])
    # Two keys may have one name, and a flatten function may give too few keys.
    if len(set(names)) != len(children):
        names = tuple([str(i) for i in range(len(children))])
    form = _of_children("dict", names, obj, node_type, children, aux)
    if len(form.keys) != len(children):
        return form._replace(keys=tuple([jtu.SequenceKey(i) for i in range(len(children))]))
    return form
