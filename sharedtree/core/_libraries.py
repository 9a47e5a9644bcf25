"""What the walk asks of libraries, which it does not know: a row for each, entered by the files of `libraries/`.

A row answers for its own classes and says None of all others. A class is asked of once, when it is first met, and what
can be changed in a class is asked again whenever a structure with its instances is new.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from ._plain_containers import Convention, NodeType


class NativeLayout(NamedTuple):
    """How the native walk reads and makes the instances of a class, past the functions in JAX's registry.

    Attributes:
        shape: the name that the native walk has for classes of this kind.
        fields: all names in their order, which of them are static, of each its place among the traced or the static
            ones, the traced names, and the static ones; as far as the shape asks for them.
        facts: whatever else has to go on holding of the class.
    """

    shape: str
    fields: tuple[Any, ...] = ((), b"", b"", (), ())
    facts: Any = None


def _nothing(_: Any) -> None:
    return None


class Library(NamedTuple):
    """What one library says of its classes.

    Attributes:
        name: as users know it.
        node_type_of: class → how its instances come apart, where that is not what JAX's registry says.
        convention_of: class in JAX's registry → which leaves its instances trace, where that is not JAX's own.
        native_layout_of: class → how the native walk reads its instances; None leaves it to the registered functions.
        introduce: tells the native walk of the library, before it is told of the first of its classes.
        parts_of_frozen: static value that nobody changes → what it holds.
        marker: the class of what stands for an attribute that was never set.
        held_anyway: classes of which keeping an instance keeps nothing else alive.
    """

    name: str
    node_type_of: Callable[[Any], NodeType | None] = _nothing
    convention_of: Callable[[Any], Convention | None] = _nothing
    native_layout_of: Callable[[Any], NativeLayout | None] = _nothing
    introduce: Callable[[Any], None] = _nothing
    parts_of_frozen: Callable[[Any], Iterable[Any] | None] = _nothing
    marker: type | None = None
    held_anyway: tuple[type, ...] = ()


LIBRARIES: list[Library] = []
"""In the order in which they are asked."""


def node_type_by_library(cls: Any) -> NodeType | None:
    """How the instances of a class come apart, if a library says so."""
    return next((found for library in LIBRARIES if (found := library.node_type_of(cls)) is not None), None)


def convention_by_library(cls: Any) -> Convention | None:
    """Which leaves the instances of a class trace, if a library says so."""
    return next((found for library in LIBRARIES if (found := library.convention_of(cls)) is not None), None)


def native_layout_of(cls: Any) -> tuple[Library, NativeLayout] | None:
    """How the native walk reads the instances of a class, and who says so."""
    found = ((library, library.native_layout_of(cls)) for library in LIBRARIES)
    return next(((library, layout) for library, layout in found if layout is not None), None)


def parts_of_frozen(value: Any) -> Iterable[Any] | None:
    """What a static value holds, if a library says that nobody changes it."""
    return next((parts for library in LIBRARIES if (parts := library.parts_of_frozen(value)) is not None), None)
