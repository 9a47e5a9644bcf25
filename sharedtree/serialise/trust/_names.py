"""The public name of a class, a function or another object that a module holds, proved by identity.

A *name* is `module:qualname`: `equinox.nn:Linear`, `__main__:Model`, `pkg.mod:Outer.Inner`. What an object says about
itself is not believed: `jax.nn.relu` says it is from a private module of JAX, and the default activation of
`equinox.nn.MLP` says that it is `<lambda>`. A name counts only if looking it up gives the very object. Among the names
that do, the public and short one is taken: `jax.nn:relu`.

Looking up reads the dictionaries of modules and classes. `getattr` on a module can run its `__getattr__`, and that may
import anything.
"""

import sys
import threading
import types
from collections.abc import Iterator, Mapping
from typing import Any

from ._allowed import CLASSES, FUNCTIONS, LIBRARIES

_SHARED_ROOTS = {"jaxlib": ("jax", "jaxlib"), "posix": ("os", "posix"), "nt": ("os", "nt")}

_MISSING: Any = object()

_lock = threading.Lock()
_proved: dict[int, tuple[Any, str]] = {}  # id → (the object, kept alive here; its name)


class RefusalError(Exception):
    """An object cannot be written. The text says why, the fix says what to do."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.fix = fix


class NamelessError(RefusalError):
    """An object has no name by which it could be found again."""


def is_well_formed(name: str) -> bool:
    """Whether a text has the form of a name. Says nothing about what it names."""
    module, colon, qualname = name.partition(":")
    return bool(colon) and all(part.isidentifier() for part in [*module.split("."), *qualname.split(".")])


def find(name: str) -> Any:
    """The object of a name, in modules that are loaded already.

    Args:
        name: a name, `module:qualname`.

    Returns:
        What the dictionary of the module, and then of each class on the way, holds under the name.

    Raises:
        LookupError: if the module is not loaded, or lacks the name, or something on the way is not a class.
    """
    found = _lookup_name(name)
    if found is _MISSING:
        raise LookupError(name)
    return found


def name_of(obj: Any) -> str:
    """The name of an object, proved by looking it up.

    Args:
        obj: a class, a function, or anything else that some loaded module holds.

    Returns:
        The name with the fewest private parts, and of those the shortest.

    Raises:
        NamelessError: if no name gives the object back.

    Cost: the first time a look into each loaded module of the object's package, later a few dictionary look-ups.
    """
    known = _proved.get(id(obj))  # the entry keeps its object alive, so an equal id is the same object
    if known is not None and known[0] is obj and _lookup_name(known[1]) is obj:  # modules can be changed
        return known[1]
    home = home_of(obj)
    name = min(_candidates(obj, home), key=lambda name: _rank(name, home), default=None)
    if name is None:
        raise _nameless(obj)
    with _lock:
        _proved[id(obj)] = (obj, name)  # alive in the entry itself, and in its module
    return name


def own_name_of(obj: Any) -> str | None:
    """The name that an object says it has, if looking it up gives the object; None if not.

    A decorated function has its name, also if an Equinox module took its place. What wraps something else says the name
    of that, and is not found by it; a global variable that happens to refer to it is no name of its own.
    """
    home = home_of(obj)
    return min(_said_names(obj, home), key=lambda name: _rank(name, home), default=None)


def namespace(module: Any) -> Mapping[str, Any]:
    """The dictionary of a module, read without running a lazy module's code."""
    if not isinstance(module, types.ModuleType):
        return {}
    try:
        return object.__getattribute__(module, "__dict__")
    except AttributeError:
        return {}


def loaded_modules(root: str) -> Iterator[tuple[str, types.ModuleType]]:
    """The loaded modules of a package, the package included."""
    inside = root + "."
    for name, module in list(sys.modules.items()):
        if (name == root or name.startswith(inside)) and isinstance(module, types.ModuleType):
            yield name, module


def home_of(obj: Any) -> str:
    """The module that an object says it is from; for most objects that of their class. Empty if it does not say."""
    home = getattr(obj, "__module__", None)
    return home if isinstance(home, str) else type(obj).__module__


def _lookup_name(name: str) -> Any:
    module, _, qualname = name.partition(":")
    return _lookup(sys.modules.get(module), qualname)


def _lookup(module: Any, qualname: str) -> Any:
    first, *rest = qualname.split(".")
    found = namespace(module).get(first, _MISSING)
    for part in rest:
        if not isinstance(found, type):
            return _MISSING
        found = type.__getattribute__(found, "__dict__").get(part, _MISSING)
    return found.__func__ if isinstance(found, staticmethod) else found


def _candidates(obj: Any, home: str) -> set[str]:
    names = _said_names(obj, home)
    if not names:
        for name, module in _modules_of(home):
            names |= {f"{name}:{key}" for key, value in list(namespace(module).items()) if value is obj}
    # `types` holds classes of `builtins`, and Flax initialisers that a function of JAX made.
    names = names or {name for name in CLASSES | FUNCTIONS if _lookup_name(name) is obj}
    return {name for name in names if is_well_formed(name)}


def _said_names(obj: Any, home: str) -> set[str]:
    said = getattr(obj, "__qualname__", None) or getattr(obj, "__name__", None)
    if not isinstance(said, str) or "<" in said or isinstance(obj, types.ModuleType):
        return set()
    names = {f"{name}:{said}" for name, module in _modules_of(home) if _lookup(module, said) is obj}
    return {name for name in names if is_well_formed(name)}


def _modules_of(home: str) -> list[tuple[str, types.ModuleType]]:
    root = home.partition(".")[0]
    return [pair for each in _SHARED_ROOTS.get(root, (root,)) for pair in loaded_modules(each)]


def _rank(name: str, home: str) -> tuple[int, int, bool, int, str]:
    parts = name.replace(":", ".").split(".")
    private = sum(part.startswith("_") and part != "__main__" for part in parts)
    return private, len(parts), name.partition(":")[0] != home, len(name), name


def _nameless(obj: Any) -> NamelessError:
    said = getattr(obj, "__qualname__", "") or ""
    home = home_of(obj)
    if "<lambda>" in said and "<locals>" not in said:
        return NamelessError(
            "a lambda, which has no name to be found by", "Give it one: write it with `def` at module level."
        )
    if isinstance(obj, type):
        if "<locals>" in said:
            return NamelessError("a class defined inside a function", "Move the class to module level.")
        if home.partition(".")[0] in LIBRARIES:  # as `equinox.internal.str2jax` makes them, for lineax's solvers say
            return NamelessError(
                f"a class that `{home}:{said}` does not lead back to",
                "A library made it on the fly. Leave out what holds it, and make that anew after loading; of a "
                "`lineax.Solution` save its `value`.",
            )
        return NamelessError(
            f"a class that `{home}:{said}` does not lead back to",
            f"Let the module `{home}` hold this very class under the name `{said}`.",
        )
    if "<locals>" in said:
        what = "a lambda inside a function" if "<lambda>" in said else "a function defined inside a function"
        return NamelessError(
            what,
            "Move it to module level; what it closes over goes into `functools.partial` or into a module's fields.",
        )
    if home.partition(".")[0] in LIBRARIES:
        return NamelessError(
            f"something that `{home}:{said or '?'}` does not lead back to",
            "A library made it on the fly. Leave out what holds it, and make that anew after loading.",
        )
    return NamelessError(
        f"something that `{home}:{said or '?'}` does not lead back to",
        f"Let the module `{home}` hold this very object under a name of its own.",
    )
