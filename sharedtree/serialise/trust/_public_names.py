"""The public name of a class, a function or another object in a module, proved by identity.

A name has two parts, the module and the qualname in it:

    jax.nn:relu             not the private module in which JAX keeps it
    equinox.nn:MLP          not equinox.nn._mlp:MLP

`core/_class_attributes.py` looks names up. Here an object gets the name by which it will be found again.
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

# Id → the object and its name. The entry keeps its object alive, so the id is not used again.
_lock = Lock()
_proved: dict[int, tuple[Any, str]] = {}


# ---- Names: public path proved by identity at save ----


class NamelessError(RefusalError):
    """An object has no name by which it could be found again."""


def name_of(obj: Any) -> str:
    """Returns a name that leads back to an object: that with the fewest private parts, then the shortest.

    Raises:
        NamelessError: if no name gives the object back.

    Cost: the first time a look into each loaded module of the object's package, later a few dictionary look-ups.
    """
    proof = _proved.get(id(obj))
    # Modules can be changed, so a name is proved again before it is used again.
    if proof is not None and proof[0] is obj and leads_to(proof[1], obj):
        return proof[1]
    # First the name that the object itself says, then any under which a module holds it.
    name = verified_name_of(obj)
    if name is None:
        spaces = candidate_namespaces(obj).items()
        names: list[str] = []
        for module, space in spaces:
            # Another thread may import something meanwhile, hence the copy.
            names += [f"{module}:{key}" for key, value in list(space.items()) if value is obj]
        # The object may be held by a package other than its own: `types` holds classes of `builtins`, and Flax holds
        # initialisers that a function of JAX made.
        name = best_name(obj, names) or best_name(obj, CLASSES | FUNCTIONS)
    if name is None:
        raise _nameless(obj)
    with _lock:
        _proved[id(obj)] = (obj, name)
    return name


def _nameless(obj: Any) -> NamelessError:
    """Returns the error for an object without a name: its nature, and a fix for its author."""
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
    elif root_of(home) in PACKAGES:  # as `equinox.internal.str2jax` makes classes
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
    """Returns True if a class may be written by name as a value. Classes of known packages must be on the list."""
    if cls.__module__.partition(".")[0] not in PACKAGES | NAMES_ONLY | {"builtins"}:
        return True
    return _why_nameless(cls) is None and name_of(cls) in CLASSES


NAMING = Naming(_why_nameless, _may_be_value)
"""What the rows of `libraries/` ask about a value when an instance is written."""


# ---- The running program: `__main__` included ----


def import_name() -> str | None:
    """Returns the running program's module as others would import it; None if there is no such name.

    What `train.py` defines is `__main__:Net` while `python train.py` runs, and `train:Net` to everyone who imports it.
    Under the first name no other program would find it, so files have the second, if there is one: a top-level module
    that Python would take from the very file of the program. Nothing is imported to find out.

    Notebooks and `python -c` have no file. With `python -m`, Python knows the name. Looks through Python's path.
    """
    space = namespace(sys.modules.get(MAIN))
    file, spec = space.get("__file__"), space.get("__spec__")
    if type(file) is not str:
        return None
    # `python -m package.train` says its name in the spec.
    spec_name = getattr(spec, "name", None)
    if type(spec_name) is str and spec_name != MAIN:
        return spec_name if _is_file(getattr(spec, "origin", None), file) else None
    name = os.path.basename(file).removesuffix(".py")
    # A file must not be taken for one of a library, and what is named like the standard library cannot be trusted.
    if not name.isidentifier() or name in PACKAGES | NAMES_ONLY | sys.stdlib_module_names | {MAIN}:
        return None
    try:
        found_spec: Any = importlib.util.find_spec(name)
    # Finders may be anyone's and raise anything. A module without a spec is a `ValueError`.
    except Exception:  # noqa: BLE001
        return None
    return name if _is_file(getattr(found_spec, "origin", None), file) else None


def _is_file(origin: Any, file: str) -> bool:
    return type(origin) is str and os.path.realpath(origin) == os.path.realpath(file)


# ---- Loading imports nothing: which module the user has to import ----


def module_to_import(module: str) -> str | None:
    """Returns the module the user has to import before names of a module can be looked up.

    That is the nearest public module of its name: `flax.nnx` for `flax.nnx.nn._linear`. None if it is imported already.
    Nothing is imported to find out.

    Raises:
        LookupError: if the module does not exist. Its text is the reason.
    """
    if module in sys.modules:
        return None
    # `public` is the longest beginning of the name without a private part, and at least the first part.
    parts = module.split(".")
    num_public = next((i for i, part in enumerate(parts) if part.startswith("_")), len(parts)) or 1
    public = ".".join(parts[:num_public])
    if public in sys.modules and root_of(module) in PACKAGES:
        return None
    target = module if public in sys.modules else public
    # Where a module below an imported package is, Python can say without running anything. So only the first part that
    # is not imported can be looked for.
    num_loaded = next(i for i in range(len(parts)) if ".".join(parts[: i + 1]) not in sys.modules)
    missing = ".".join(parts[: num_loaded + 1])
    try:
        is_installed = importlib.util.find_spec(missing) is not None
    # Finders may be anyone's and raise anything. What is below a module that is no package is an `ImportError`.
    except Exception:  # noqa: BLE001
        is_installed = False
    if not is_installed:
        raise LookupError(f"there is no module `{missing}`" if num_loaded else f"`{missing}` is not installed")
    return target


def is_in_site_packages(package: str) -> bool:
    """Returns True if a loaded package lies where `pip` puts packages, so that its user did not write it."""
    file: Any = namespace(sys.modules.get(package)).get("__file__")
    if type(file) is not str:
        return False
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    place = pathlib.Path(_real(file))
    return any(folder in place.parents for folder in map(pathlib.Path, map(_real, folders)))


class Library(NamedTuple):
    """A known library as it is installed. `pip` knows it by the name of its package."""

    name: str
    version: str


_VERSION = re.compile(r"[0-9][0-9a-z.]*")


def library_of(package: str) -> Library | None:
    """Returns the library a loaded package belongs to; None for what users may have written themselves.

    The name comes from a file, so no metadata of an installation is read for it: the loaded package says its version.
    """
    version: Any = namespace(sys.modules.get(package)).get("__version__")
    if package not in PACKAGES or type(version) is not str or not is_in_site_packages(package):
        return None
    numbers = _VERSION.match(version)
    return None if numbers is None else Library(package, numbers[0])


def _real(folder: str) -> str:
    return os.path.normcase(os.path.realpath(folder))
