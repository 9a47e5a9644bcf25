"""Imports public names at their first use: those for files, pictures, plain data and reports.

    st.save  →  `__getattr__("save")`  →  `sharedtree.serialise.save`, and from then on an ordinary attribute

A *room* is a subpackage or module of this package. The rooms listed below are two fifths of its modules, and a program
that only trains does not import them. If importing a room fails, the error is raised at the first use of one of its
names, and not by `import sharedtree`.

The code for training is imported as a whole: the first transform that a program wraps imports all adapters
(`transforms/_adapters.py`), so that none of them can come from a newer version an hour later.

A program that runs for days should import `sharedtree.serialise` at its start. Otherwise, if the package is updated
meanwhile, it saves with another version than it began with.
"""

# Saving uses this module. It is imported early, because Python refuses to import it once a program is ending. A program
# may save a model for the first time then.
import concurrent.futures.thread as _thread  # noqa: F401
import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

# Room → its public names.
_ROOMS = {
    "serialise": (
        *("Exported", "audit", "export", "from_bytes", "inspect", "load", "orbax", "save", "to_bytes"),
        *("trust", "verify"),
    ),
    "show": ("draw", "summary"),
    "ties._views": ("View", "unwrap"),
    "transforms._device_put": ("device_put", "with_sharding_constraint"),
    "transforms.checks._explain": ("explain",),
    "tree._plain_data": ("StateReport", "load_state", "register_state", "state"),
}

# Modules of this package that import another library, which may not be installed. `dir` does not list them, because
# `help` imports everything in that list.
_NEEDING_OTHER_LIBRARIES = ("linen",)

# "sharedtree", and the package of this name.
_NAME = __name__.partition(".")[0]
_PACKAGE = sys.modules[_NAME]

ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}
"""Public name → its room."""

_RECIPES = {
    "convert": (
        "Equinox and Flax read their own files, and a short function makes the ties again: "
        "docs/file_contents.md, “Files of Equinox and Flax”."
    ),
}
"""A name that the package does not have, but that users look for → what to do instead, and the page with the code."""


def import_public_name(name: str) -> Any:
    """Imports a public name from its room, and makes it an attribute of the package. `__getattr__` of the package.

    Args:
        name: the name of an object, or of a room, such as "serialise".

    Returns:
        The object, or the room.

    Raises:
        AttributeError: If the package has no such name. For a name in `_RECIPES` the message has the recipe.
        ImportError: If the room cannot be imported.
    """
    # Importing a room makes it an attribute of the package.
    if name in _ROOMS or name in _NEEDING_OTHER_LIBRARIES:
        return importlib.import_module(f"{_NAME}.{name}")
    if name in _RECIPES:
        message = f"module {_NAME!r} has no attribute {name!r}. {_RECIPES[name]}"
        raise AttributeError(message, name=name, obj=_PACKAGE)
    if name not in ROOM_OF:
        raise AttributeError(f"module {_NAME!r} has no attribute {name!r}", name=name, obj=_PACKAGE)
    obj = getattr(importlib.import_module(f"{_NAME}.{ROOM_OF[name]}"), name)
    setattr(_PACKAGE, name, obj)
    return obj


def lazy_getattr_for(package: str, file_of: Mapping[str, str]) -> Callable[[str], Any]:
    """Makes a `__getattr__` for a subpackage that imports some of its names at their first use.

    Args:
        package: the full name of the subpackage, such as "sharedtree.transforms".
        file_of: name → the module with this name in it, relative to the subpackage, such as "checks._explain".
    """

    def import_attribute(name: str) -> Any:
        """Imports a name from its module, and makes it an attribute of the subpackage."""
        if name not in file_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])
        obj = getattr(importlib.import_module(f"{package}.{file_of[name]}"), name)
        setattr(sys.modules[package], name, obj)
        return obj

    return import_attribute


def names_for_dir() -> list[str]:
    """Returns all names of the package, sorted, whether imported yet or not. `__dir__` of the package."""
    return sorted({*vars(_PACKAGE), *ROOM_OF, *(room for room in _ROOMS if "." not in room)})
