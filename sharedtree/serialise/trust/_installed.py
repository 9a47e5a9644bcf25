"""Imports that a file asks for, and no user: only of what is installed.

`import chex` takes the first `chex` on Python's path, and the path often begins with the current directory, where a
`chex.py` may lie beside the file that names `chex:Foo`. So each package that has to be imported for a name of the
built-in list is looked for first, without running it, and every folder that holds a part of it must be one of these:

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
import json
import os
import pathlib
import site
import sys
import sysconfig
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

from ...compat._importing import import_module
from ._names import namespace


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
