"""Finds, checks and runs treex and treeo.

A finder on `sys.meta_path` answers for these two names only. It asks the finders after itself, and wraps the loader
that they return. The wrapper gives each module the builtins of `_library_views` before the module runs. `sys.modules`
gets the modules under their own names. The finder stays, since treex imports some of its modules later.

Two parts of these modules are replaced as soon as they have run. Global contexts become contexts of each thread, see
the end of this file. Metadata that was compared by identity is compared by content, see `_treeo_metadata`.
"""

import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import itertools
import re
import sys
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

from ..core._errors import CompatibilityError
from ..core._locks import Lock
from ._library_views import BUILTINS
from ._names_jax_dropped import require_all
from ._treeo_metadata import compare_by_content, compare_in_one_form, forget

VERSIONS = {"treex": "0.6.9", "treeo": "0.0.10"}
"""The supported releases: the last one of treex, and the one of treeo that it needs."""

# Lowest versions of the libraries that each package needs. The extra `treex` of sharedtree has the same ones.
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
# Libraries whose dropped names each package uses.
_LIBRARIES = {"treeo": ("jax",), "treex": ("jax", "numpy", "flax")}

_REQUIREMENTS = [f"'{name}>={'.'.join(map(str, lowest))}'" for name, lowest in NEEDED["treex"].items()]
_HOW_TO_INSTALL = (
    "Install what the two need, and then the two without their dependencies, which would be releases of years ago:\n"
    f"    pip install {' '.join(_REQUIREMENTS)}\n"
    f"    pip install --no-deps {' '.join(f'{name}=={version}' for name, version in VERSIONS.items())}"
)

_CONTEXTS = {
    "treeo.tree": ("_CONTEXT", "_COMPACT_CONTEXT"),
    "treex.module": ("_INIT_CONTEXT",),
    "treex.contexts": ("_CONTEXT",),
}
"""Module → its global variables that hold a context: settings that hold for the body of a `with` statement."""

# Only one thread checks and imports at a time.
_lock = Lock()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the two packages and their modules, by asking the finders after itself on `sys.meta_path`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Returns the spec of a module, with a loader that gives the module its builtins. None for other packages.

        Raises:
            CompatibilityError: for a submodule such as `sharedtree.compat.treex.types`.
        """
        package, _, submodule = fullname.removeprefix(f"{__package__}.").partition(".")
        if package in VERSIONS and fullname.startswith(f"{__package__}.") and submodule:
            # Python would run the file a second time under this name, and the classes would differ from the first ones.
            raise CompatibilityError(
                f"`{fullname}` is `{package}.{submodule}`, which has one name only.\nOnce `{__package__}.{package}` is "
                f"imported:\n    import {package}.{submodule}"
            )
        if fullname.partition(".")[0] not in VERSIONS:
            return None
        # The finders after this one. Another import hook may have been put before it since.
        for finder in [*itertools.dropwhile(lambda entry: entry is not self, sys.meta_path)][1:]:
            find_spec = getattr(finder, "find_spec", None)
            spec = None if find_spec is None else find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """Loads modules as another loader does, but with the builtins of `_library_views`.

    Args:
        loader: the other loader.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        # `copy` makes an object without attributes and asks it for `__setstate__`. There, `self._loader` would lead
        # here again, without end.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        # Python sets `__builtins__` itself, unless it is set already.
        module.__dict__["__builtins__"] = BUILTINS
        self._loader.exec_module(module)
        if module.__name__ in _REPAIRS:
            _REPAIRS[module.__name__](module)


_finder = _Finder()


def load(name: str) -> types.ModuleType:
    """Imports the real package and returns it. From then on, `import` finds it under its own name.

    Args:
        name: `"treex"` or `"treeo"`.

    Raises:
        CompatibilityError: if the package is absent or another release, if a library needed by it is absent or too old,
            or if a library has dropped the replacement of one of the names. Nothing is imported then.
    """
    with _lock:
        if not _has_our_builtins(name):
            _check(name)
            # An earlier `import treex` fails half-way on today's JAX, and leaves some of its modules.
            _remove(_modules_of_earlier_import())
            if _finder not in sys.meta_path:
                sys.meta_path.insert(0, _finder)
            modules_before = _imported()
            try:
                importlib.import_module(name)
            except BaseException:
                _remove(_imported() - modules_before)
                if not modules_before:
                    sys.meta_path.remove(_finder)
                raise
    # Not taken from `sys.modules`, where another thread may still be running it. The import statement waits for that.
    return importlib.import_module(name)


def _imported() -> set[str]:
    """Returns the names of all modules of the two packages in `sys.modules`."""
    return {name for name in list(sys.modules) if name.partition(".")[0] in VERSIONS}


def _has_our_builtins(name: str) -> bool:
    """Returns True if a module was imported by `load`, and not by an import statement before."""
    module = sys.modules.get(name)
    return module is not None and module.__dict__.get("__builtins__") is BUILTINS


def _remove(names: set[str]) -> None:
    """Removes modules from `sys.modules`, and the changes made for them elsewhere."""
    forget(sys.modules.get("treeo.tree") if "treeo.tree" in names else None)
    for name in names:
        sys.modules.pop(name, None)


def _modules_of_earlier_import() -> set[str]:
    """Returns the names of modules left in `sys.modules` by an `import treex` before `load`.

    Raises:
        CompatibilityError: if a program has made classes with the earlier `treeo`.
    """
    names = {name for name in _imported() if not _has_our_builtins(name)}
    tree = getattr(sys.modules.get("treeo.tree"), "Tree", None) if "treeo.tree" in names else None
    if tree is None:
        return names
    # Classes that are not used any more must not count.
    gc.collect()
    for cls in _subclasses(tree):
        if cls.__module__.partition(".")[0] not in VERSIONS:
            raise CompatibilityError(
                f"`{cls.__module__}.{cls.__qualname__}` was made of a `treeo` that was imported without what JAX no "
                "longer has, and would know nothing of this one.\nImport this one first, before anything that uses "
                "treeo:\n    from sharedtree.compat import treeo"
            )
    return names


def _subclasses(cls: type) -> list[type]:
    """Returns the subclasses of a class, those of its subclasses, and so on."""
    subclasses: list[type] = []
    for subclass in cls.__subclasses__():
        subclasses += [subclass, *_subclasses(subclass)]
    return subclasses


def _check(name: str) -> None:
    """Returns if everything needed by a package is installed.

    Raises:
        CompatibilityError: otherwise. The message says what to install.
    """
    # The packages themselves.
    for package in ("treeo",) if name == "treeo" else ("treex", "treeo"):
        version = _version_of(package, f"`{package}` is not installed.")
        if version != VERSIONS[package]:
            raise CompatibilityError(
                f"`{package}` {version} is installed, but it is {VERSIONS[package]} that works on today's JAX.\n"
                f"{_HOW_TO_INSTALL}"
            )
    # The libraries that they need. The numbers of a version are compared, without endings such as `rc1`.
    for distribution, lowest in NEEDED[name].items():
        version = _version_of(distribution, f"`{name}` needs `{distribution}`, which is not installed.")
        if tuple(int(number) for number in re.findall(r"\d+", version)) < lowest:
            raise CompatibilityError(
                f"`{distribution}` {version} is installed, which is too old: on today's JAX `{name}` needs at least "
                f"{'.'.join(map(str, lowest))}.\n{_HOW_TO_INSTALL}"
            )
    # The replacements of dropped names.
    require_all(_LIBRARIES[name])


def _version_of(distribution: str, absent: str) -> str:
    """Returns the installed version of a distribution.

    Raises:
        CompatibilityError: if it is not installed. The message begins with `absent`.
    """
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        raise CompatibilityError(f"{absent}\n{_HOW_TO_INSTALL}") from None


# --- a context for each thread ----------------------------------------------------------------------------------------
#
# treeo and treex keep three settings in global variables: how a tree is flattened, which layer is being built, and
# which random key comes next. A `with` statement replaces such a variable and restores it at its end. While one thread
# filters a model, `jax.jit` in any other thread would flatten the same model into `FieldInfo`s. The classes of these
# settings derive from `threading.local`, so it was intended that each thread has its own.


class PerThread:
    """Stands in a global variable for the innermost context of the current thread. Attributes are those of the context.

    Args:
        cls: class of the contexts. Its `__enter__` and `__exit__` are replaced: they make a context the innermost one
            of the current thread, and do not touch the global variable.
    """

    def __init__(self, cls: Any) -> None:
        """Replaces the methods of the class."""
        thread_data = threading.local()

        def stack() -> list[Any]:
            """Returns the contexts of the current thread, the innermost last. The first is a default one."""
            if not hasattr(thread_data, "stack"):
                thread_data.stack = [cls()]
            return thread_data.stack

        def leave(context: Any, *_: object) -> None:
            """Removes a context from the stack."""
            contexts = stack()
            for i in reversed(range(len(contexts))):
                if contexts[i] is context:
                    del contexts[i]
                    return
            # A generator can enter a context in one thread and end in another, where there is nothing to remove.

        cls.__enter__ = lambda context: stack().append(context)
        cls.__exit__ = leave
        # `self._innermost = ...` would set an attribute of the context.
        object.__setattr__(self, "_innermost", lambda: stack()[-1])

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_innermost")(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "_innermost")(), name, value)


def _separate_threads(module: Any) -> None:
    """Gives each thread its own contexts in a module of `_CONTEXTS`."""
    for name in _CONTEXTS[module.__name__]:
        setattr(module, name, PerThread(type(getattr(module, name))))


def _repair_tree(module: Any) -> None:
    """Repairs the module `treeo.tree`."""
    _separate_threads(module)
    compare_in_one_form(module)


_REPAIRS: dict[str, Callable[[Any], Any]] = {
    "treeo.types": compare_by_content,
    "treeo.tree": _repair_tree,
    **dict.fromkeys([name for name in _CONTEXTS if name != "treeo.tree"], _separate_threads),
}
"""Module → function that changes it once it has run."""
