"""The public names that are imported when they are first used: files, pictures, plain data, reports.

A program that only trains does not pay for them: they are two of five modules of the package. Whatever is wrong with
such a module is raised by the first use of its names as it would have been by `import sharedtree`.

A program that runs for days, and must save with the version that it began with whatever is installed meanwhile, imports
`sharedtree.serialise` when it begins. What trains comes as a whole, with the first transform that is wrapped: the first
`@st.jit` imports every adapter (`transforms/_adapters.py`), so that none can come from a newer version an hour later.

    st.save  →  `__getattr__("save")`  →  `sharedtree.serialise.save`, and from then on an attribute like any other
"""

# Python lets nobody import this while it ends, when a program may save its model for the first time.
import concurrent.futures.thread as _thread  # noqa: F401
import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

_ROOMS = {
    "serialise": (
        *("Exported", "audit", "export", "from_bytes", "inspect", "load", "orbax", "save", "to_bytes"),
        *("trust", "verify"),
    ),
    "show": ("draw", "summary"),
    "transforms._device_put": ("device_put", "with_sharding_constraint"),
    "transforms.checks._explain": ("explain",),
    "tree._plain_data": ("StateReport", "load_state", "register_state", "state"),
}

# Modules that import another library. `dir` does not list them, for `help` uses all that it lists, and the library may
# not be installed.
_NEEDING_OTHERS = ("linen",)

_NAME = __name__.partition(".")[0]
_PACKAGE = sys.modules[_NAME]

ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}
"""Public name → the room that it is in."""

_RECIPES = {
    "convert": (
        "Equinox and Flax read their own files, and a short function makes the ties again: "
        "docs/file_contents.md, “Files of Equinox and Flax”."
    ),
}
"""Name that readers look for → how it is done without, and the page of the documentation that shows it."""


def later(name: str) -> Any:
    """What a name of the package stands for that nobody has used yet. It is an attribute of the package from then on.

    Raises:
        AttributeError: if there is no such name. Of one that a recipe replaces, it says where that is.
    """
    if name in _ROOMS or name in _NEEDING_OTHERS:
        return importlib.import_module(f"{_NAME}.{name}")
    if name in _RECIPES:
        message = f"module {_NAME!r} has no attribute {name!r}. {_RECIPES[name]}"
        raise AttributeError(message, name=name, obj=_PACKAGE)
    if name not in ROOM_OF:
        raise AttributeError(f"module {_NAME!r} has no attribute {name!r}", name=name, obj=_PACKAGE)
    found = getattr(importlib.import_module(f"{_NAME}.{ROOM_OF[name]}"), name)
    setattr(_PACKAGE, name, found)
    return found


def later_in(package: str, file_of: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a room, some of whose names are imported when they are first used.

    Args:
        package: the name of the room.
        file_of: name → the file in the room that has it.
    """

    def later_here(name: str) -> Any:
        if name not in file_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])
        found = getattr(importlib.import_module(f"{package}.{file_of[name]}"), name)
        setattr(sys.modules[package], name, found)
        return found

    return later_here


def names() -> list[str]:
    """Those that `dir` lists: what has been used and what has not."""
    return sorted({*vars(_PACKAGE), *ROOM_OF, *(room for room in _ROOMS if "." not in room)})
