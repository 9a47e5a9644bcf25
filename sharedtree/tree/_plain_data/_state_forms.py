"""What stands in a state for each kind of object, and how the object is put together again.

A *state* is nested plain data: dicts, lists and tuples of arrays, numbers, strings and None. The form of an object says
into which parts it comes apart, and what holds their states:

    Linear(weight=w, bias=None, name="out")   a dict by field name, the static fields too
    {"b": x, "a": y}                          a dict with the same keys, in the same order
    ScaleByAdamState(count, mu, nu)           a dict by field name, as of every namedtuple
    [x, y]   (x, y)   deque([x, y])           a list, a tuple, a list
    nnx.Param(w)                              no container: the state of `w`

The last row is how registered functions work, too: what `to_state` returns stands for the object, whatever it is. That
idea is `flax.serialization`'s.
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
    """What a class was registered with."""

    to_state: Callable[[Any], Any]
    from_state: Callable[[Any, Any], Any]


_registered: dict[type, Functions] = {Dag: Functions(lambda dag: dag.tree, lambda _, tree: Dag(tree))}


def functions_of(cls: type) -> Functions | None:
    """The functions of the nearest class in the method resolution order that has some."""
    return next((_registered[base] for base in cls.__mro__ if base in _registered), None)


def register_state(
    cls: type[T],
    to_state: Callable[[T], Any],
    from_state: Callable[[T, Any], T],
    override: bool = False,
) -> None:
    """Says what stands for the instances of a class in a state.

    Needed for classes that are no pytrees, which would be `()`, and useful where fields are a poor description. The
    functions hold for subclasses that have none of their own: those of the nearest class in the method resolution order
    are used, before anything else that is known of the class.

    Args:
        cls: the class.
        to_state: takes an instance and returns what stands for it, one level deep: a dict, a list, an array, any tree.
            What is in there is converted in turn.
        from_state: takes an instance of the model and what `to_state` returns for it, with all parts loaded, and
            returns the new instance. It must not change the instance that it is given.
        override: whether functions that the class has may be replaced.

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
            f"`{cls.__name__}` has functions for its state already. To replace them, say so:\n"
            f"    sharedtree.register_state({cls.__name__}, to_state, from_state, override=True)"
        )


_PLAIN_LEAVES = PYTHON_NUMBERS | {str, bytes, type(None)}


class Form(NamedTuple):
    """How an object comes apart.

    Attributes:
        kind: what holds the states of the parts; "whole" if the state of the only part is that of the object.
        names: for a dict, the key of each part.
        keys: the key entry of each part in paths.
        parts: the parts.
        num_static: how many of them, the last ones, are no children but static.
        put_together: new parts → a new object.
        is_object: whether two occurrences, if they are not static, are a tie.
        is_mutable: whether it is a container that can be mutated.
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
        """The state of the object, given those of its parts."""
        if self.kind == "whole":
            return states[0]
        if self.kind == "dict":
            return dict(zip(self.names, states, strict=True))
        return list(states) if self.kind == "list" else tuple(states)


def is_state_leaf(obj: Any) -> bool:
    """Whether an object is kept in a state as it is: an array, a number, a string or None."""
    return type(obj) in _PLAIN_LEAVES or isinstance(obj, np.generic) or carries_identity(obj)


def form_of(obj: Any) -> Form | None:
    """The form of an object; None of a leaf and of what is no state."""
    functions = functions_of(type(obj))
    if functions is None and is_state_leaf(obj):
        return None
    node_type = node_type_of(obj)
    is_object = node_type is not None and node_type.carries_identity
    if functions is not None:
        # A local name, so that one who registers others meanwhile changes nothing here.
        from_state = functions.from_state
        return Form("whole", (), (), (functions.to_state(obj),), 0, lambda new: from_state(obj, new[0]), is_object)
    if node_type is None:
        return None
    if node_type.is_plain:
        return _plain_form(obj, node_type)
    return _attribute_form(obj, node_type) or _keyed_form(obj, node_type)


def _plain_form(obj: Any, node_type: NodeType) -> Form:
    if isinstance(obj, dict):
        found: dict[Any, Any] = obj
        names = tuple(found)

        def filled(new: Sequence[Any]) -> Any:
            made = found.copy()  # of the same class, with the same order and the same factory
            made.update(zip(names, new, strict=True))
            return made

        keys = tuple([jtu.DictKey(name) for name in names])
        return Form("dict", names, keys, tuple(found.values()), 0, filled, True, True)
    children, aux = node_type.take_apart(obj)
    kind: Any = "dict" if is_namedtuple(node_type.cls) else "tuple" if node_type.cls is tuple else "list"
    names = tuple(getattr(node_type.cls, "_fields", ()))
    return _of_children(kind, names, obj, node_type, children, aux)


def _of_children(kind: Any, names: Any, obj: Any, node_type: NodeType, children: Sequence[Any], aux: Any) -> Form:
    def put_together(new: Sequence[Any]) -> Any:
        return node_type.put_together(aux, new)

    keys, is_object = node_type.keys_of(obj), node_type.carries_identity
    return Form(kind, names, keys, tuple(children), 0, put_together, is_object, node_type.is_mutable)


def _attribute_form(obj: Any, node_type: NodeType) -> Form | None:
    """Of classes whose static attributes have names as well."""
    if node_type.cls is jtu.Partial:
        children, function = node_type.take_apart(obj)
        return _named_form(
            ("args", "keywords"),
            children,
            {"func": function},
            lambda new, statics: node_type.put_together(statics["func"], new),
        )
    form = plain_form_of(obj, node_type)
    if form is None or form.kind == "dict":
        return None if form is None else _named_form(form.names, form.children, form.statics, form.make)
    make = form.make
    return Form(form.kind, (), form.keys, tuple(form.children), 0, lambda new: make(new, {}), True)


def _named_form(
    names: Sequence[str],
    children: Sequence[Any],
    static: Mapping[str, Any],
    make: Callable[[Sequence[Any], Mapping[str, Any]], Any],
) -> Form:
    def put_together(new: Sequence[Any]) -> Any:
        return make(list(new[: len(names)]), dict(zip(static, new[len(names) :], strict=True)))

    every = (*names, *static)
    keys = tuple([jtu.GetAttrKey(name) for name in every])
    return Form("dict", every, keys, (*children, *static.values()), len(static), put_together, True)


def _keyed_form(obj: Any, node_type: NodeType) -> Form:
    """Of every other class: what its author says are its children, by their keys."""
    children, aux = node_type.take_apart(obj)
    names = tuple([name_in(key) for key in node_type.keys_of(obj)])
    if len(set(names)) != len(children):
        names = tuple([str(i) for i in range(len(children))])
    form = _of_children("dict", names, obj, node_type, children, aux)
    if len(form.keys) != len(children):
        return form._replace(keys=tuple([jtu.SequenceKey(i) for i in range(len(children))]))
    return form
