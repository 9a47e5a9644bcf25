"""The public name of a class, a function or another object that a module holds, proved by identity.

What a name is, and how one is looked up, is said in `core/_class_attributes.py`.

Of imports that a file asks for, and no user, only what is installed comes in. `import chex` takes the first `chex` on
Python's path, and the path often begins with the current directory, where a `chex.py` may lie beside the file that
names `chex:Foo`. So each package that has to be imported for a name of the built-in list is looked for first, without
running it, and every folder that holds a part of it must be one of these:

- a site-packages folder of this interpreter;
- the folder of an editable install of that very package, as a site-packages folder records it: `direct_url.json` of its
  metadata, or a `.pth` file or an import hook that the install put there.

What else the package imports meanwhile is held to the same, and what it takes from the standard library must come from
there: a `toolz.py` or a `sqlite3.py` in the current directory would be no better than a `chex.py`. Modules that are
loaded already are used as they are. Metadata that lies elsewhere is not even read.
"""

import contextlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import site
import sys
import sysconfig
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ...compat._import_hook import import_module
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
    own_name_of as own_name_of,
    root_of as root_of,
    spaces_of,
)
from ...core._library_rows import Naming, RefusalError
from ...core._locks import Lock
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
    name = own_name_of(obj)
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


class ElsewhereError(Exception):
    """A package would come from a place that is no installation. It is no `ImportError`, which packages swallow."""

    def __init__(self, package: str, place: str) -> None:
        super().__init__(f"`{package}` would come from `{place}`")
        self.package = package
        self.place = place


def import_installed(module: str) -> None:
    """Imports a module, and whatever it imports in this thread, from where things are installed.

    Raises:
        ElsewhereError: if a package would come from elsewhere. Nothing of that package was run.
        BaseException: whatever the module raises.
    """
    guard = _Guard()
    sys.meta_path.insert(0, guard)
    try:
        import_module(module)
    finally:
        sys.meta_path.remove(guard)


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


class _Guard(importlib.abc.MetaPathFinder):
    """Stands before the other finders, and judges what they find for one thread."""

    stays_first = True

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        """What the other finders find. It is used as it is here, so nothing else is imported than was judged."""
        if threading.get_ident() != self._thread:
            return None
        for finder in list(sys.meta_path):
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                _require_installed(fullname, spec, finder)
                return spec
        return None


def _require_installed(name: str, spec: importlib.machinery.ModuleSpec, finder: Any) -> None:
    package, *below = name.split(".")
    # A package with an `__init__.py` says itself where its modules are. Of one without, others may add to the folders.
    if below and namespace(sys.modules.get(package)).get("__file__") is not None:
        return
    if spec.loader in (importlib.machinery.BuiltinImporter, importlib.machinery.FrozenImporter):
        if package in sys.stdlib_module_names:
            return
        raise ElsewhereError(package, f"{spec.origin} into the interpreter")
    parts = [os.fspath(part) for part in spec.submodule_search_locations or ()]
    file = spec.origin if spec.has_location else None
    if file is not None:
        parts.append(file if spec.submodule_search_locations is None else os.path.dirname(file))
    if not parts:
        raise ElsewhereError(package, spec.origin or "an unknown place")
    for part in parts:
        folder = str(pathlib.Path(part).parents[len(below)])  # in which the top-level package lies
        if not _is_installed(package, folder, finder):
            raise ElsewhereError(package, file or folder)


def _is_installed(package: str, folder: str, finder: Any) -> bool:
    place = _real(folder)
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    # On Windows, `site` counts the folder of the interpreter itself.
    sites = {_real(each) for each in folders} - {_real(sys.prefix), _real(sys.base_prefix)}
    if place in sites:
        return True
    if package in sys.stdlib_module_names:
        folders = [os.path.dirname(os.__file__), sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
        folders += [os.path.join(each, "lib-dynload") for each in folders]
        return place in {_real(each) for each in [*folders, os.path.join(sys.base_prefix, "DLLs")]}
    # An import hook that an install put there may add folders below the root; whatever is on the path must be listed.
    hook = finder if isinstance(finder, type) else type(finder)
    file: Any = namespace(sys.modules.get(hook.__module__)).get("__file__")
    is_hook = isinstance(file, str) and _real(os.path.dirname(file)) in sites
    for root, listed in _editable_installs(package, sites):
        if place == root or place in listed or (is_hook and pathlib.Path(place).is_relative_to(root)):
            return True
    return False


def _editable_installs(package: str, sites: set[str]) -> Iterator[tuple[str, set[str]]]:
    """Of each editable install of a package: its folder, and the folders that its `.pth` files put on the path."""
    context = importlib.metadata.DistributionFinder.Context(name=package, path=sorted(sites))
    for found in importlib.metadata.MetadataPathFinder.find_distributions(context):
        # Where something is missing or malformed, it is no editable install.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            record: Any = json.loads(found.read_text("direct_url.json") or "")
            files: Any = found.files
            url = urllib.parse.urlsplit(record["url"])
            if url.scheme == "file" and record["dir_info"]["editable"] is True:
                paths = [file.locate() for file in files if file.suffix == ".pth" and len(file.parts) == 1]
                lines = [line for path in paths for line in filter(str.strip, path.read_text("utf-8").splitlines())]
                # Other lines are comments, and code.
                folders = [line.strip() for line in lines if not line.startswith(("#", "import ", "import\t"))]
                root = _real(urllib.request.url2pathname(url.path))
                yield root, {_real(str(found.locate_file(folder))) for folder in folders}


def _real(folder: str) -> str:
    return os.path.normcase(os.path.realpath(folder))
