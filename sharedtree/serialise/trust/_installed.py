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
from typing import Any

from ...compat._importing import import_module
from ._names import namespace


class ElsewhereError(Exception):
    """A package would come from a place that is no installation. It is no `ImportError`, which packages swallow.

    Attributes:
        package: its name.
        place: where it lies.
    """

    def __init__(self, package: str, place: str) -> None:
        super().__init__(f"`{package}` would come from `{place}`")
        self.package = package
        self.place = place


def import_installed(module: str) -> None:
    """Imports a module, and whatever it imports in this thread, from where things are installed.

    Args:
        module: a dotted name.

    Raises:
        ElsewhereError: if a package would come from elsewhere. Nothing of that package was run.
        BaseException: whatever the module raises.

    Cost: that of the import, and a look at the metadata of packages that are not in site-packages.
    """
    guard = _Guard()
    sys.meta_path.insert(0, guard)
    try:
        import_module(module)
    finally:
        sys.meta_path.remove(guard)


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
    folders = list(_folders_of(spec, len(below)))
    if not folders:
        raise ElsewhereError(package, spec.origin or "an unknown place")
    for folder in folders:
        if not _is_installed(package, folder, finder):
            raise ElsewhereError(package, spec.origin if spec.has_location and spec.origin else folder)


def _folders_of(spec: importlib.machinery.ModuleSpec, depth: int) -> Iterator[str]:
    """The folders in which the parts of a module's top-level package lie."""
    parts = [os.fspath(part) for part in spec.submodule_search_locations or ()]
    if spec.has_location and spec.origin is not None:
        is_package = spec.submodule_search_locations is not None
        parts.append(os.path.dirname(spec.origin) if is_package else spec.origin)
    for part in parts:
        yield str(pathlib.Path(part).parents[depth])


def _is_installed(package: str, folder: str, finder: Any) -> bool:
    place, sites = _real(folder), _site_folders()
    if package in sys.stdlib_module_names:
        return place in _standard_folders() or place in sites
    if place in sites:
        return True
    for root, listed in _editable_installs(package, sites):
        # An import hook may add folders below the root; whatever is on the path must be listed.
        is_hook = finder is not importlib.machinery.PathFinder and _lies_in(finder, sites)
        if place == root or place in listed or (is_hook and pathlib.Path(place).is_relative_to(root)):
            return True
    return False


def _site_folders() -> set[str]:
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    # On Windows, `site` counts the folder of the interpreter itself.
    return {_real(folder) for folder in folders} - {_real(sys.prefix), _real(sys.base_prefix)}


def _standard_folders() -> set[str]:
    folders = {os.path.dirname(os.__file__), sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    folders |= {os.path.join(folder, "lib-dynload") for folder in folders}
    return {_real(folder) for folder in [*folders, os.path.join(sys.base_prefix, "DLLs")]}


def _editable_installs(package: str, sites: set[str]) -> Iterator[tuple[str, set[str]]]:
    """Of each editable install of a package: its folder, and the folders that its `.pth` files put on the path."""
    for folder in sites:
        with contextlib.suppress(OSError):
            for entry in pathlib.Path(folder).glob("*.dist-info"):
                if _normal(entry.name.partition("-")[0]) == _normal(package):
                    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
                        yield _editable_root(entry), _listed_folders(entry)


def _editable_root(metadata: pathlib.Path) -> str:
    record = json.loads((metadata / "direct_url.json").read_text(encoding="utf-8"))
    url = urllib.parse.urlsplit(record["url"])
    if url.scheme != "file" or record["dir_info"]["editable"] is not True:
        raise ValueError(record)
    return _real(urllib.request.url2pathname(url.path))


def _listed_folders(metadata: pathlib.Path) -> set[str]:
    record = (metadata / "RECORD").read_text(encoding="utf-8")
    listed: set[str] = set()
    for name in [line.partition(",")[0] for line in record.splitlines()]:
        if name.endswith(".pth") and "/" not in name:
            lines = (metadata.parent / name).read_text(encoding="utf-8").splitlines()
            listed |= {_real(os.path.join(metadata.parent, line.strip())) for line in lines if _is_folder(line)}
    return listed


def _is_folder(line: str) -> bool:
    """Whether a line of a `.pth` file is a folder; others are comments, and code."""
    return bool(line.strip()) and not line.startswith(("#", "import ", "import\t"))


def _lies_in(finder: Any, sites: set[str]) -> bool:
    cls = finder if isinstance(finder, type) else type(finder)
    file = namespace(sys.modules.get(cls.__module__)).get("__file__")
    return isinstance(file, str) and _real(os.path.dirname(file)) in sites


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _real(folder: str) -> str:
    return os.path.normcase(os.path.realpath(folder))
