"""The public name of a class, a function or another object that a module holds, proved by identity.

What a name is, and how one is looked up, is said in `core/_class_attributes.py`.
"""

import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import site
import sys
import sysconfig
from typing import Any, NamedTuple

from ...core._class_attributes import (
    CHILD as CHILD,
    MAIN as MAIN,
    best_name,
    find as find,
    home_of as home_of,
    is_inside as is_inside,
    is_well_formed as is_well_formed,
    leads_to as leads_to,
    namespace,
    namespaces as namespaces,
    root_of as root_of,
    spaces_of,
    verified_name_of as verified_name_of,
)
from ...core._locks import Lock
from ...core._node_types import Naming, RefusalError
from ._allow_list import CLASSES, FUNCTIONS, NAMES_ONLY, PACKAGES

_lock = Lock()
_proved: dict[int, tuple[Any, str]] = {}  # id → (the object, kept alive here; its name)


class NamelessError(RefusalError):
    """An object has no name by which it could be found again."""


def name_of(obj: Any) -> str:
    """The name of an object that some loaded module holds: that with the fewest private parts, then the shortest.

    Raises:
        NamelessError: if no name gives the object back.

    Cost: the first time a look into each loaded module of the object's package, later a few dictionary look-ups.
    """
    known = _proved.get(id(obj))  # the entry keeps its object alive, so an equal id is the same object
    if known is not None and known[0] is obj and leads_to(known[1], obj):  # modules can be changed
        return known[1]
    name = verified_name_of(obj)
    if name is None:
        spaces = spaces_of(obj).items()
        held = [f"{module}:{key}" for module, space in spaces for key, each in list(space.items()) if each is obj]
        # `types` holds classes of `builtins`, and Flax initialisers that a function of JAX made.
        name = best_name(obj, held) or best_name(obj, CLASSES | FUNCTIONS)
    if name is None:
        raise _nameless(obj)
    with _lock:
        _proved[id(obj)] = (obj, name)  # alive in the entry itself, and in its module
    return name


def _nameless(obj: Any) -> NamelessError:
    said, home = getattr(obj, "__qualname__", "") or "", home_of(obj)
    is_class, is_lambda, is_local = isinstance(obj, type), "<lambda>" in said, "<locals>" in said
    what = f"{'a class' if is_class else 'something'} that `{home}:{said or '?'}` does not lead back to"
    if is_lambda and not is_local:
        what, fix = "a lambda, which has no name to be found by", "Give it one: write it with `def` at module level."
    elif is_local and is_class:
        what, fix = "a class defined inside a function", "Move the class to module level."
    elif is_local:
        what = "a lambda inside a function" if is_lambda else "a function defined inside a function"
        fix = "Move it to module level; what it closes over goes into `functools.partial` or into a module's fields."
    elif root_of(home) in PACKAGES:  # as `equinox.internal.str2jax` makes classes
        fix = "A library made it on the fly. Leave out what holds it, and make that anew after loading."
    elif is_class:
        fix = f"Let the module `{home}` hold this very class under the name `{said}`."
    else:
        fix = f"Let the module `{home}` hold this very object under a name of its own."
    return NamelessError(what, fix)


def _why_nameless(obj: Any) -> str | None:
    try:
        name_of(obj)
    except NamelessError as error:
        return error.reason
    return None


def _may_be_value(cls: Any) -> bool:
    if cls.__module__.partition(".")[0] not in PACKAGES | NAMES_ONLY | {"builtins"}:
        return True
    return _why_nameless(cls) is None and name_of(cls) in CLASSES


NAMING = Naming(_why_nameless, _may_be_value)
"""What rows of libraries ask, when an instance is written."""


# --- the running program ----------------------------------------------------------------------------------------------


def import_name() -> str | None:
    """The name by which others would import the file of the running program; None if there is none.

    What `train.py` defines is `__main__:Net` while `python train.py` runs, and `train:Net` to everyone who imports it.
    Under the first name no other program would find it, so files have the second, if there is one: a top-level module
    that Python would take from the very file of the program. Nothing is imported to find out.

    Notebooks and `python -c` have no file. With `python -m`, Python knows the name. Looks through Python's path.
    """
    space = namespace(sys.modules.get(MAIN))
    file, spec = space.get("__file__"), space.get("__spec__")
    if type(file) is not str:
        return None
    said = getattr(spec, "name", None)
    if type(said) is str and said != MAIN:
        return said if _is_file(getattr(spec, "origin", None), file) else None
    name = os.path.basename(file).removesuffix(".py")
    # A file must not be taken for one of a library, and what is named like the standard library cannot be trusted.
    if not name.isidentifier() or name in PACKAGES | NAMES_ONLY | sys.stdlib_module_names | {MAIN}:
        return None
    try:
        found: Any = importlib.util.find_spec(name)
    except Exception:  # noqa: BLE001 -- a finder may be anyone's; a module without a spec is a `ValueError`
        return None
    return name if _is_file(getattr(found, "origin", None), file) else None


def _is_file(origin: Any, file: str) -> bool:
    return type(origin) is str and os.path.realpath(origin) == os.path.realpath(file)


# --- modules ----------------------------------------------------------------------------------------------------------


def module_to_import(module: str) -> str | None:
    """What has to be imported before names of a module can be looked up: the nearest public module of its name.

    None if that is imported already. Nothing is imported to find out.

    Raises:
        LookupError: if there is no such module. Says so.
    """
    if module in sys.modules:
        return None
    parts = module.split(".")
    num_public = next((i for i, part in enumerate(parts) if part.startswith("_")), len(parts)) or 1
    public = ".".join(parts[:num_public])
    if public in sys.modules and root_of(module) in PACKAGES:
        return None
    target = module if public in sys.modules else public
    # Of the first part that is not imported, Python can say where it is without running anything.
    num_loaded = next(i for i in range(len(parts)) if ".".join(parts[: i + 1]) not in sys.modules)
    missing = ".".join(parts[: num_loaded + 1])
    try:
        is_there = importlib.util.find_spec(missing) is not None
    except Exception:  # noqa: BLE001 -- a finder may be anyone's; what is below no package is an `ImportError`
        is_there = False
    if not is_there:
        raise LookupError(f"there is no module `{missing}`" if num_loaded else f"`{missing}` is not installed")
    return target


def is_in_site_packages(package: str) -> bool:
    """Whether a package that is loaded lies where `pip` puts packages, so that whoever uses it did not write it."""
    file: Any = namespace(sys.modules.get(package)).get("__file__")
    if type(file) is not str:
        return False
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    place = pathlib.Path(_real(file))
    return any(folder in place.parents for folder in map(pathlib.Path, map(_real, folders)))


class Library(NamedTuple):
    """A library that files may name much of. `pip` knows it by the name of its package."""

    name: str
    version: str


_VERSION = re.compile(r"[0-9][0-9a-z.]*")


def library_of(package: str) -> Library | None:
    """The library that a package which is loaded belongs to; None for what users may have written themselves.

    Asked of a name in a file, so nothing is read from the disk: the package says its version.
    """
    version: Any = namespace(sys.modules.get(package)).get("__version__")
    if package not in PACKAGES or type(version) is not str or not is_in_site_packages(package):
        return None
    numbers = _VERSION.match(version)
    return None if numbers is None else Library(package, numbers[0])


def _real(folder: str) -> str:
    return os.path.normcase(os.path.realpath(folder))
