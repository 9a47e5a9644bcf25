"""The classes whose instances are what they have as attributes, declared or not: treeo's, NNX's, and `Module`s.

Each library has a file of its own, which says what is written of an instance and what comes from elsewhere. Here is
only asked whose a class is.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ..._attribute_kinds import KINDS_SLOT
from ..._nnx_internals import NODES
from . import _mutable_modules, _nnx_objects, _treeo_trees
from ._nnx_objects import step_of as step_of

Finish = Callable[[Any, dict[str, Any]], Any]
"""(an instance, its attributes as a file has them) → the instance, checked and completed, or one that is equal."""


class Library(Protocol):
    """What a library's file says of its classes.

    Attributes:
        IS_OPEN: whether the attributes of an instance are nowhere declared, so that one that is unknown is no mistake.
    """

    IS_OPEN: bool

    def is_of_attributes(self, cls: Any, /) -> bool:
        """Whether a class is one of this library's whose instances are all in their attributes."""
        ...

    def declared_fields(self, cls: Any, /) -> tuple[str, ...]:
        """The attributes that a class declares."""
        ...

    def may_have(self, cls: Any, name: str, /) -> bool | None:
        """Whether an attribute that is not declared may have a name; None if the library has no rule of its own."""
        ...

    def may_stay_unset(self, cls: Any, name: str, /) -> bool:
        """Whether instances need not have a field."""
        ...

    def default_of(self, cls: Any, name: str, /) -> Callable[[], Any] | None:
        """What makes the default of a field that a file lacks; None if it has none, or is one of a dataclass."""
        ...

    def written(self, obj: Any, attributes: dict[str, Any], /) -> dict[str, Any]:
        """The attributes of an instance as they are written: those that JAX traces come first, in JAX's order.

        Raises:
            RefusalError: if it cannot be saved.
        """
        ...

    def static_attributes(self, aux: Any, /) -> dict[str, Any]:
        """The attributes that JAX does not trace, of the auxiliary data that the flatten function gives."""
        ...

    def finisher(self, cls: Any, new_names: Mapping[str, str | None], /) -> Finish | None:
        """What is done with an instance whose attributes were set as a file has them; None if nothing is.

        Args:
            cls: its class.
            new_names: the name of each attribute in the file → the name it has now, or None if it was dropped.
        """
        ...


_LIBRARIES: tuple[Library, ...] = (_mutable_modules, _nnx_objects, _treeo_trees)

_OWN_ENTRIES: dict[Library, frozenset[str]] = {
    _mutable_modules: frozenset({KINDS_SLOT}),
    _nnx_objects: frozenset({NODES, _nnx_objects.STATE}),
    _treeo_trees: frozenset({_treeo_trees.METADATA}),
}


def is_of_attributes(cls: type) -> bool:
    """Whether the instances of a class are all in their attributes."""
    return any(library.is_of_attributes(cls) for library in _LIBRARIES)


def library_of(cls: type) -> Library:
    """Whose a class of this kind is."""
    return next(library for library in _LIBRARIES if library.is_of_attributes(cls))


def own_entries(cls: type) -> frozenset[str]:
    """The names under which a file has what a library itself keeps in each instance: kinds, marks, metadata.

    They stand among the names of attributes, but those who write classes know nothing of them.
    """
    return _OWN_ENTRIES[library_of(cls)]


def reassign_of(cls: type) -> Callable[[Any, Mapping[str, Any]], None] | None:
    """What gives an instance other attributes as an assignment would; None if they are set as a file's are."""
    return _mutable_modules.reassign if library_of(cls) is _mutable_modules else None
