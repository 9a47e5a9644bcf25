"""The public name of a class, a function or another object in a module, proved by identity.

A name has two parts, the module and the qualname in it:

    jax.nn:relu             not the private module in which JAX keeps it
    equinox.nn:MLP          not equinox.nn._mlp:MLP

`core/_class_attributes.py` looks names up. This file finds the name by which an object can be looked up again.

Words: the *home* of an object is the module in its `__module__`. A *space* is the dictionary of a module. The *root* of
a name is its top-level package. `MAIN` is `"__main__"`, and `CHILD` the name of the main module in a spawned process.
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
    candidate_namespaces,
    find as find,
    home_of as home_of,
    is_inside as is_inside,
    is_instance as is_instance,
    is_well_formed as is_well_formed,
    leads_to as leads_to,
    namespace,
    namespaces as namespaces,
    root_of as root_of,
    verified_name_of as verified_name_of,
)
from ...core._locks import Lock
from ...core._node_types import Naming, RefusalError
from ._allow_list import CLASSES, FUNCTIONS, NAMES_ONLY, PACKAGES

# Id of an object → the object, and the name that was found for it. The entry keeps the object alive, so that no other
# object gets its id.
_lock = Lock()
_found_names: dict[int, tuple[Any, str]] = {}


# ---- Object → name ----


class NamelessError(RefusalError):
    """An object has no name by which it could be found again."""


def name_of(obj: Any) -> str:
    """Returns the best name that leads to an object.

    A name that the object states itself comes first, if it leads to the object. Otherwise, of the names under which
    modules of its package hold it, that with the fewest private parts, then the shortest.

    Raises:
        NamelessError: if no name leads to the object.

    Cost: the first time a look into each loaded module of the object's package, later a few dictionary look-ups.
    """
    entry = _found_names.get(id(obj))
    # Modules can be changed, so the name is checked again.
    if entry is not None and entry[0] is obj and leads_to(entry[1], obj):
        return entry[1]
    name = verified_name_of(obj)
    if name is None:
        spaces = candidate_namespaces(obj).items()
        names: list[str] = []
        for module, space in spaces:
            # A copy, since another thread may change the module's dictionary.
            names += [f"{module}:{key}" for key, value in list(space.items()) if value is obj]
        # If its own package has no name for it, another package may, and that name may be on the allow-list: `types`
        # has classes of `builtins`, and Flax has initialisers that a function of JAX made.
        name = best_name(obj, names) or best_name(obj, CLASSES | FUNCTIONS)
    if name is None:
        raise _nameless_error(obj)
    with _lock:
        _found_names[id(obj)] = (obj, name)
    return name


def _nameless_error(obj: Any) -> NamelessError:
    """Returns the error for an object without a name: what it is, and what its author can do."""
    qualname, home = getattr(obj, "__qualname__", "") or "", home_of(obj)
    is_class, is_lambda, is_local = isinstance(obj, type), "<lambda>" in qualname, "<locals>" in qualname
    fact = f"{'a class' if is_class else 'something'} that `{home}:{qualname or '?'}` does not lead back to"
    if is_lambda and not is_local:
        fact, fix = "a lambda, which has no name to be found by", "Give it one: write it with `def` at module level."
    elif is_local and is_class:
        fact, fix = "a class defined inside a function", "Move the class to module level."
    elif is_local:
        fact = "a lambda inside a function" if is_lambda else "a function defined inside a function"
        fix = "Move it to module level; what it closes over goes into `functools.partial` or into a module's fields."
    # For example, `equinox.internal.str2jax` makes a class on each call.
    elif root_of(home) in PACKAGES:
        fix = "A library made it on the fly. Leave out what holds it, and make that anew after loading."
    elif is_class:
        fix = f"Let the module `{home}` hold this very class under the name `{qualname}`."
    else:
        fix = f"Let the module `{home}` hold this very object under a name of its own."
    return NamelessError(fact, fix)


def _why_nameless(obj: Any) -> str | None:
    """Returns the reason why an object has no name; None if it has one."""
    try:
        name_of(obj)
    except NamelessError as error:
        return error.reason
    return None


def _may_be_value(cls: Any) -> bool:
    """Returns True if a class itself may be written as a value, by its name, provided that it has one.

    Classes of known libraries and of `builtins` must be on the allow-list. Others have to be trusted when the file is
    loaded.
    """
    if cls.__module__.partition(".")[0] not in PACKAGES | NAMES_ONLY | {"builtins"}:
        return True
    return _why_nameless(cls) is None and name_of(cls) in CLASSES


NAMING = Naming(_why_nameless, _may_be_value)
"""Functions about names that the files in `sharedtree/libraries/` call when an instance is written."""


# ---- The running program: `__main__` included ----


def program_name() -> str | None:
    """Returns the name of the module by which other programs can import the running one; None if there is none.

    While `python train.py` runs, its class `Net` is `__main__:Net`. For a program that imports `train`, the same class
    is `train:Net`. Only the latter name is of use to others, so it is the one in saved files.

    The name is that of a top-level module that Python would import from the very script that is running, or the one
    that `python -m package.train` states. Notebooks and `python -c` have no script, so there is no name. Nothing is
    imported to find out.

    Cost: a search of Python's path.
    """
    space = namespace(sys.modules.get(MAIN))
    script, spec = space.get("__file__"), space.get("__spec__")
    if type(script) is not str:
        return None
    # With `python -m package.train`, the spec has that name. Otherwise there is no spec.
    spec_name = getattr(spec, "name", None)
    if type(spec_name) is str and spec_name != MAIN:
        return spec_name if _is_path_of(getattr(spec, "origin", None), script) else None
    name = os.path.basename(script).removesuffix(".py")
    # A script may be called like a known library. Its classes must not be taken for that library's. A script that is
    # called like a module of the standard library could never be trusted.
    if not name.isidentifier() or name in PACKAGES | NAMES_ONLY | sys.stdlib_module_names | {MAIN}:
        return None
    try:
        found_spec: Any = importlib.util.find_spec(name)
    # Users can install finders, which may raise anything. For a loaded module without a spec, Python raises
    # `ValueError`.
    except Exception:  # noqa: BLE001
        return None
    return name if _is_path_of(getattr(found_spec, "origin", None), script) else None


def _is_path_of(origin: Any, script: str) -> bool:
    """Returns True if the `origin` of a spec is a path, and leads to the same file as `script`."""
    return type(origin) is str and os.path.realpath(origin) == os.path.realpath(script)


# ---- Advice on what to import ----


def module_to_import(module: str, *, is_allowed: bool = True) -> str | None:
    """Returns the module that the user has to import before names of `module` can be looked up.

    That is the public beginning of its name: `flax.nnx.nn` for `flax.nnx.nn._linear`. If that is imported already, it
    is `module` itself. None if `module` is imported, or if it is of a known library whose public beginning is.

    Nothing is imported to find out. Parts below a loaded package are looked for in its folders, by Python's own finder,
    without asking the finders of the program or reading an attribute of the package, which may be lazy.

    Args:
        module: name of the module.
        is_allowed: True if its top-level package is on the allow-list. Only then the finders of the program are asked
            for that package. Otherwise the package is taken to exist.

    Raises:
        LookupError: if the module does not exist. Its text is the reason.
    """
    if module in sys.modules:
        return None
    # `public` is the beginning of the name before the first private part, and at least the first part.
    parts = module.split(".")
    num_public = next((i for i, part in enumerate(parts) if part.startswith("_")), len(parts)) or 1
    public = ".".join(parts[:num_public])
    if public in sys.modules and root_of(module) in PACKAGES:
        return None
    target = module if public in sys.modules else public
    # Does the module exist? Without running code, Python can only look inside packages that are imported already. So
    # this looks for the longest beginning of the name that is imported, and one part more.
    num_loaded = next(i for i in range(len(parts)) if ".".join(parts[: i + 1]) not in sys.modules)
    missing = ".".join(parts[: num_loaded + 1])
    is_installed = _is_in_loaded_package(missing) if num_loaded else not is_allowed or _is_installed(missing)
    if not is_installed:
        raise LookupError(f"there is no module `{missing}`" if num_loaded else f"`{missing}` is not installed")
    return target


def _is_installed(package: str) -> bool:
    """Returns True if a top-level package, which is not loaded, can be imported. Asks all finders of the program."""
    # Users can install finders, which may raise anything.
    try:
        return importlib.util.find_spec(package) is not None
    except Exception:  # noqa: BLE001
        return False


def _is_in_loaded_package(module: str) -> bool:
    """Returns True if a module, which is not loaded, is in a folder of the loaded package above it.

    True also if the package lies in a zip archive, where nothing is looked for.
    """
    # `importlib.util.find_spec` would read the `__path__` of the package by `getattr`.
    folders: Any = namespace(sys.modules.get(module.rpartition(".")[0])).get("__path__", ())
    for folder in folders:
        if not os.path.isdir(folder):
            return True
        # A finder of our own, so that no finder of the program is asked. It has the same kinds of files as Python's.
        # For a folder without an `__init__`, it returns a spec without a loader.
        if importlib.machinery.FileFinder(folder, *_KINDS_OF_FILES).find_spec(module) is not None:
            return True
    return False


_KINDS_OF_FILES: Any = (
    (importlib.machinery.ExtensionFileLoader, importlib.machinery.EXTENSION_SUFFIXES),
    (importlib.machinery.SourceFileLoader, importlib.machinery.SOURCE_SUFFIXES),
    (importlib.machinery.SourcelessFileLoader, importlib.machinery.BYTECODE_SUFFIXES),
)
"""The loaders of Python, with the suffixes of their files."""


def is_in_site_packages(package: str) -> bool:
    """Returns True if a loaded package lies in a folder of `pip`'s, so that somebody else has written it."""
    file: Any = namespace(sys.modules.get(package)).get("__file__")
    if type(file) is not str:
        return False
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    place = pathlib.Path(_canonical_path(file))
    return any(folder in place.parents for folder in map(pathlib.Path, map(_canonical_path, folders)))


class Library(NamedTuple):
    """A known library as it is installed: the name by which `pip` knows it, and its version."""

    name: str
    version: str


# The beginning of a version, without a suffix such as `+cpu`.
_VERSION = re.compile(r"[0-9][0-9a-z.]*")


def library_of(package: str) -> Library | None:
    """Returns the known library that a loaded package is; None for a package that the user may have written.

    The version is the package's `__version__`. `package` may come from a file, so no metadata of an installation is
    read for it.
    """
    version: Any = namespace(sys.modules.get(package)).get("__version__")
    if package not in PACKAGES or type(version) is not str or not is_in_site_packages(package):
        return None
    numbers = _VERSION.match(version)
    return None if numbers is None else Library(package, numbers[0])


def _canonical_path(path: str) -> str:
    """Returns the path by which two spellings of one path can be compared."""
    return os.path.normcase(os.path.realpath(path))
