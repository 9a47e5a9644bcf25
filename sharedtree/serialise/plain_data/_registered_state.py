"""Functions that say what stands for the instances of a class in a state. The idea is `flax.serialization`'s."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from ...tree._dag import Dag

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
