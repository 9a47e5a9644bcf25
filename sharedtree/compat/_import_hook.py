"""How treex and treeo are found, checked and run.

A finder on `sys.meta_path` answers for these two names alone. It takes the answer of those behind it, and gives each
module its builtins before the module runs. Nothing else on the path of an import is changed, and `sys.modules` gets the
modules under their own names. What treeo keeps for the whole process, and what it compares by identity, is mended in
the module once it has run: see `_treeo_thread_contexts` and `_treeo_metadata`. The finder stays, for modules that treex
imports later.
"""

import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import itertools
import re
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

from ..core._errors import CompatibilityError
from ..core._locks import Lock
from ._library_views import BUILTINS
from ._names_jax_dropped import require_all
from ._treeo_metadata import compare_by_content, compare_in_one_form, forget
from ._treeo_thread_contexts import NAMES, separate

VERSIONS = {"treex": "0.6.9", "treeo": "0.0.10"}
"""The releases that this is made for: the last of treex, and the treeo that belongs to it."""

# What they are asked for, as the extra `treex` has it; and the libraries of which they need names.
NEEDED: dict[str, dict[str, tuple[int, ...]]] = {
    "treeo": {"typing-extensions": (4,)},
    "treex": {
        "typing-extensions": (4,),
        "flax": (0, 12, 8),
        "optax": (0, 2, 8),
        "einops": (0, 8),
        "rich": (13,),
        "PyYAML": (6,),
    },
}
_LIBRARIES = {"treeo": ("jax",), "treex": ("jax", "numpy", "flax")}

_NEEDED_BY_BOTH = [f"'{name}>={'.'.join(map(str, lowest))}'" for name, lowest in NEEDED["treex"].items()]
_HOW_TO_INSTALL = (
    "Install what the two need, and then the two without their dependencies, which would be releases of years ago:\n"
    f"    pip install {' '.join(_NEEDED_BY_BOTH)}\n"
    f"    pip install --no-deps {' '.join(f'{name}=={version}' for name, version in VERSIONS.items())}"
)

_AFTER: dict[str, Callable[[Any], Any]] = {
    "treeo.types": compare_by_content,
    "treeo.tree": lambda module: (separate(module), compare_in_one_form(module)),
    **dict.fromkeys([name for name in NAMES if name != "treeo.tree"], separate),
}
"""What is done with a module once it has run."""

_lock = Lock()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds what the finders behind it find, for the two packages."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        own, _, rest = fullname.removeprefix(f"{__package__}.").partition(".")
        if own in VERSIONS and fullname.startswith(f"{__package__}.") and rest:
            # Python would run the same file again under this name, and its classes would be others.
            raise CompatibilityError(
                f"`{fullname}` is `{own}.{rest}`, which has one name only.\nOnce `{__package__}.{own}` is imported:\n"
                f"    import {own}.{rest}"
            )
        if fullname.partition(".")[0] not in VERSIONS:
            return None
        for finder in [*itertools.dropwhile(lambda each: each is not self, sys.meta_path)][1:]:
            find_spec = getattr(finder, "find_spec", None)
            spec = None if find_spec is None else find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """Another loader, but for the builtins of the modules that it runs."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # or a copy, which has no attributes at first, would ask itself for ever
            raise AttributeError(name)
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__["__builtins__"] = BUILTINS
        self._loader.exec_module(module)
        if module.__name__ in _AFTER:
            _AFTER[module.__name__](module)


_finder = _Finder()


def load(name: str) -> types.ModuleType:
    """The real package, imported with what it needs; the one that `import` finds from then on.

    Args:
        name: `"treex"` or `"treeo"`.

    Raises:
        CompatibilityError: if it is absent or another release, if something that it needs is absent, or if a library
            has dropped what would stand in for one of its names. Nothing is imported then.
    """
    with _lock:
        if not _is_ours(name):
            _check(name)
            _remove(_imported_before())
            if _finder not in sys.meta_path:
                sys.meta_path.insert(0, _finder)
            before = _imported()
            try:
                importlib.import_module(name)
            except BaseException:
                _remove(_imported() - before)
                if not before:
                    sys.meta_path.remove(_finder)
                raise
    # Not from `sys.modules`: another thread may still be importing it.
    return importlib.import_module(name)


def _imported() -> set[str]:
    return {name for name in list(sys.modules) if name.partition(".")[0] in VERSIONS}


def _is_ours(name: str) -> bool:
    module = sys.modules.get(name)
    return module is not None and module.__dict__.get("__builtins__") is BUILTINS


def _remove(names: set[str]) -> None:
    forget(sys.modules.get("treeo.tree") if "treeo.tree" in names else None)
    for name in names:
        sys.modules.pop(name, None)


def _imported_before() -> set[str]:
    """What an `import treex` of before has left, which fails half-way on today's JAX.

    Raises:
        CompatibilityError: if somebody has made classes of it.
    """
    names = {name for name in _imported() if not _is_ours(name)}
    tree = getattr(sys.modules.get("treeo.tree"), "Tree", None) if "treeo.tree" in names else None
    if tree is None:
        return names
    gc.collect()  # classes that nobody has any more are no reason
    for cls in _subclasses(tree):
        if cls.__module__.partition(".")[0] not in VERSIONS:
            raise CompatibilityError(
                f"`{cls.__module__}.{cls.__qualname__}` was made of a `treeo` that was imported without what JAX no "
                "longer has, and would know nothing of this one.\nImport this one first, before anything that uses "
                "treeo:\n    from sharedtree.compat import treeo"
            )
    return names


def _subclasses(cls: type) -> list[type]:
    found: list[type] = []
    for below in cls.__subclasses__():
        found += [below, *_subclasses(below)]
    return found


def _check(name: str) -> None:
    """Raises if the package cannot work here."""
    for package in ("treeo",) if name == "treeo" else ("treex", "treeo"):
        version = _version_of(package, f"`{package}` is not installed.")
        if version != VERSIONS[package]:
            raise CompatibilityError(
                f"`{package}` {version} is installed, but it is {VERSIONS[package]} that works on today's JAX.\n"
                f"{_HOW_TO_INSTALL}"
            )
    for distribution, lowest in NEEDED[name].items():
        version = _version_of(distribution, f"`{name}` needs `{distribution}`, which is not installed.")
        if tuple(int(number) for number in re.findall(r"\d+", version)) < lowest:
            raise CompatibilityError(
                f"`{distribution}` {version} is installed, which is too old: on today's JAX `{name}` needs at least "
                f"{'.'.join(map(str, lowest))}.\n{_HOW_TO_INSTALL}"
            )
    require_all(_LIBRARIES[name])


def _version_of(distribution: str, absent: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        raise CompatibilityError(f"{absent}\n{_HOW_TO_INSTALL}") from None
