"""What a file may name: the allow-list, and how a name on it becomes an object.

The text of a name is judged first. Only then is the name looked up, in the dictionaries of classes and of modules that
are imported already: a file imports nothing. What is found is judged again: a class must be one of the kinds that can
be rebuilt without calling it, and what a package was trusted for must be defined in that package, so that `os.system`
does not come in through a module that imports it.
"""

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

from ...core._locks import Lock
from ...core._node_types import is_choice
from ...core._printing import printable
from ._allow_list import (
    CLASSES,
    FUNCTIONS,
    IF_TRUSTED,
    INSTANCES,
    KEPT_BACK,
    NAMES_ONLY,
    PACKAGES,
    ROW_OF,
)
from ._buildable_classes import is_rebuildable, kind_of
from ._public_names import (
    CHILD,
    MAIN,
    NamelessError,
    find,
    home_of,
    import_name,
    is_inside,
    is_well_formed,
    leads_to,
    module_to_import,
    name_of,
    namespaces,
    root_of,
)

Trusted = str | type | Callable[..., Any]
"""What can be trusted: a class, a function, a name (`"my_models:Encoder"`), or a package (`"my_models"`)."""

Use = Literal["class", "function", "method"]
"""What a file uses a name as. A `method` is a function that the file has bound to an instance of the class."""


class Verdict(NamedTuple):
    """What a name led to; or why it is not allowed or not found; and which module has to be imported first, if any."""

    obj: Any = None
    why: str = ""
    allowed: bool = True
    not_imported: str = ""

    @property
    def found(self) -> bool:
        """Whether it led to an object that the file may have."""
        return not self.why


class _NotImportedError(Exception):
    """The module of a name has to be imported before the name can be looked up."""

    def __init__(self, module: str) -> None:
        super().__init__(f"`{module}` is not imported")
        self.module = module


# `sharedtree.linen` imports Flax, which no file may do.
_OURS = frozenset([name for name in INSTANCES - {"sharedtree.linen:TrainState"} if root_of(name) == "sharedtree"])
"""What is in rooms of this package that are imported when they are first used, also by a file."""

UNLISTED = Verdict(None, "not on the allow-list", allowed=False)


class Trust:
    """An allow-list: the built-in one, what `trust` added for this process, and what one call adds.

    `objects` are further classes and functions by name, such as those that occur in a template.
    """

    def __init__(self, trusted: Trusted | Iterable[Trusted] = (), objects: Mapping[str, Any] | None = None) -> None:
        entries = _entries(trusted)
        with _lock:
            entries = [*_process_wide, *entries]
        texts = [entry for entry in entries if isinstance(entry, str)]
        # What the running program defines has two names, and who trusts one trusts the other: it is the same code.
        self._program = import_name()
        texts += [self._in_main(text) for text in texts]
        packages = [text for text in dict.fromkeys(texts) if ":" not in text]
        self._names = {text for text in texts if ":" in text}
        # Of libraries that the user named, no more is allowed than the list has for those who trust them.
        self._libraries = {root_of(package) for package in packages} & (PACKAGES | NAMES_ONLY)
        self._packages = [package for package in packages if root_of(package) not in self._libraries]
        self._objects = dict(objects or {})  # name → the object, which needs no import
        self._objects |= {self._in_main(name): obj for name, obj in self._objects.items()}
        for obj in [entry for entry in entries if not isinstance(entry, str)]:
            self._objects[f"{home_of(obj)}:{getattr(obj, '__qualname__', '?')}"] = obj
            with contextlib.suppress(NamelessError):  # then a file can name it only as it calls itself
                self._objects[name_of(obj)] = obj
        # qualname → the id of an object, which is alive in `_objects` → a name that it has there
        self._given: dict[str, dict[int, str]] = {}
        for name, obj in self._objects.items():
            if root_of(name) not in PACKAGES | NAMES_ONLY:
                self._given.setdefault(name.partition(":")[2], {})[id(obj)] = name  # alive in `_objects`
        self._former = {name: obj for obj in self._objects.values() for name in _former_names_of(obj)}
        self._former_in_packages: dict[str, type] = {}
        self._searched: set[str] = set()  # the modules in which former names were looked for
        self._num_modules = 0  # how many were loaded then

    def allows(self, name: str, kind: Use, main: str | None = None) -> bool:
        """Whether the text of a name is on the list, or a class that was trusted as such says that it was its name.

        `main` is the module that was the running program when the file was written.
        """
        return any(each in self._former or self._covers(each, kind) for each in self._spellings(name, main))

    def resolve(self, name: str, kind: Use, main: str | None = None) -> Verdict:
        """Judges the name of a class or a function, and finds its object if it is allowed."""
        verdicts: list[Verdict] = []
        for each in self._spellings(name, main):
            verdicts.append(self._resolve(each, kind))
            if verdicts[-1].found:
                return verdicts[-1]
        return min(verdicts, key=lambda verdict: (not verdict.allowed, verdict is UNLISTED))

    def _spellings(self, name: str, main: str | None) -> Iterable[str]:
        """The names that a name may stand for, each of which is judged as if the file had it, by its own text.

        What a program defines is in `__main__` while it runs, and elsewhere for everyone else. So `__main__` says
        little about where something is, and what the user gave and is called the same in its own module is meant.
        """
        module, _, qualname = name.partition(":")
        if module not in (MAIN, CHILD, main, self._program):
            return (name,)
        in_main = f"{MAIN}:{qualname}"
        is_the_program = module in (MAIN, CHILD) or (module == self._program and module not in sys.modules)
        names = [in_main] if is_the_program else [name, in_main]
        first, dot, rest = qualname.rpartition(".")
        for given, more in ((qualname, ""), (first, dot + rest)):
            own = self._given.get(given, {}).values()
            names += [each + more for each in own if len(own) == 1]
        return dict.fromkeys(names)

    def _in_main(self, text: str) -> str:
        """The name that something in a module has if that module is the running program; else the text as it is."""
        module, colon, qualname = text.partition(":")
        return MAIN + colon + qualname if module in (self._program, CHILD) else text

    def _resolve(self, name: str, kind: Use) -> Verdict:
        if not self._covers(name, kind):
            return Verdict(self._former[name]) if name in self._former else UNLISTED
        try:
            obj = self._objects[name] if name in self._objects else self._find(name)
        except _NotImportedError as error:
            return Verdict(None, str(error), not_imported=error.module)
        except LookupError as error:
            return Verdict(None, str(error))
        refusal = self._refusal(name, kind, obj)
        return Verdict(None, refusal, allowed=False) if refusal else Verdict(obj)

    def resolve_method(self, name: str, owner: Verdict) -> Verdict:
        """Judges the name of a method by what the name of its class led to. A method that is not there is no fault."""
        if not owner.found:
            return owner._replace(why=f"its class: {owner.why}")
        refusal = self._refusal_of_method(name, owner.obj)
        return Verdict(None, refusal, allowed=False) if refusal else owner

    def _covers(self, name: str, kind: Use) -> bool:
        """Whether the text of a name is on the list. Nothing is imported."""
        if not is_well_formed(name):
            return False
        if name in self._objects or name in self._names or name in FUNCTIONS or name in CLASSES:
            return True
        module, _, qualname = name.partition(":")
        is_kept_back = any(name == each or is_inside(module, each) for each in KEPT_BACK)
        if kind == "class" and is_kept_back and root_of(module) not in self._libraries:
            return False
        if root_of(module) in PACKAGES:
            return kind == "class" or (ROW_OF[root_of(module)].has_methods and "." in qualname and _is_public(name))
        if self._package_of(module) is not None:
            return True
        owner = name.rpartition(".")[0]
        return kind == "function" and (owner in self._objects or owner in self._names)  # a method of a trusted class

    def _package_of(self, module: str) -> str | None:
        return next((package for package in self._packages if is_inside(module, package)), None)

    def _find(self, name: str) -> Any:
        """The object of an allowed name.

        Raises:
            _NotImportedError: if its module has to be imported first.
            LookupError: if it is not there. Says why.
        """
        module = name.partition(":")[0]
        if name in _OURS and module not in sys.modules:
            importlib.import_module(module)
        try:
            return find(name)
        except LookupError:
            former = self._formerly(name)
        if former is not None:
            return former
        needed = module_to_import(module) if module != MAIN else None
        if needed is not None:
            raise _NotImportedError(needed)
        raise LookupError(f"`{module}` holds nothing of that name")

    def _formerly(self, name: str) -> type | None:
        """The class that says it was called by this name: one that was trusted as such, or one of a trusted package."""
        if name in self._former or self._package_of(name.partition(":")[0]) is None:
            return self._former.get(name)
        # A file can name much that is not there, so each module is searched once.
        if len(sys.modules) != self._num_modules:
            self._num_modules = len(sys.modules)
            loaded = {key: space for package in self._packages for key, space in namespaces(package).items()}
            spaces: list[list[Any]] = [list(loaded[key].values()) for key in loaded if key not in self._searched]
            self._searched.update(loaded)
            for cls in [each for space in spaces for each in space if _former_names_of(each)]:
                for former in _former_names_of(cls) if self._package_of(home_of(cls)) else ():
                    self._former_in_packages.setdefault(former, cls)
        return self._former_in_packages.get(name)

    def _refusal(self, name: str, kind: Use, obj: Any) -> str:
        """Why what an allowed name led to may not be used; empty if it may."""
        cls: Any = obj
        is_listed = kind == "function" and name in FUNCTIONS
        if kind == "class" and not isinstance(obj, type):
            return "it is not a class"
        if name in self._objects:
            return ""
        if kind == "function" and not is_listed and not callable(obj):
            return "it cannot be called"
        if is_listed or name in self._names or name in CLASSES:
            return ""
        if kind == "class" and not is_rebuildable(cls) and not is_choice(cls):
            return "it is neither a registered pytree node nor a dataclass, a namedtuple or an enum"
        if kind == "function" and isinstance(obj, type):
            return "it is a class, not a function"
        home, package = home_of(obj), self._package_of(name.partition(":")[0])
        if package is not None:
            return "" if is_inside(home, package) else f"it is defined in `{home}`"
        if kind == "class":
            is_trusted = root_of(home) in self._libraries and _is_one_of(cls, IF_TRUSTED)
            is_allowed = is_trusted or _is_of_a_library(cls)
            return "" if is_allowed else "of this library, classes are allowed one by one"
        # Outside of packages, the text of a function's name was allowed only if it is a method's: there is its class.
        owner = find(name.rpartition(".")[0])
        what = "" if home == home_of(owner) else f"it is defined in `{home}`"
        return self._refusal_of_method(name, owner) or what

    def _refusal_of_method(self, name: str, owner: type) -> str:
        """Why a file may not have a method of a class that it may name; empty if it may, or if there is none."""
        last = name.rpartition(".")[2]
        bases = {
            base: type.__getattribute__(base, "__dict__").get(last) for base in type.__getattribute__(owner, "__mro__")
        }
        base, function = next(((base, held) for base, held in bases.items() if held is not None), (owner, None))
        if function is None:
            return ""
        function = function.__func__ if isinstance(function, classmethod) else function
        if kind_of(owner) is None:
            return "its class has no instances that can be rebuilt"
        if name in self._names or self._is_given(function):
            return ""
        home = home_of(base)
        if not self._is_given(base) and self._package_of(home) is None:
            if root_of(home) in PACKAGES:
                if not ROW_OF[root_of(home)].has_methods or kind_of(base) != "module" or not _is_public(last):
                    return "methods of this class are not on the allow-list"
            elif root_of(home) != root_of(home_of(owner)):
                return f"it is defined in `{home}`"
        return "" if root_of(home_of(function)) == root_of(home) else f"it is defined in `{home_of(function)}`"

    def _is_given(self, obj: Any) -> bool:
        return any(each is obj for each in self._objects.values())


def _is_of_a_library(cls: type) -> bool:
    """Whether a class is one of those that every file may name."""
    row = ROW_OF.get(root_of(home_of(cls)))
    is_data = row is not None and (kind_of(cls) in row.kinds or ("enum" in row.kinds and is_choice(cls)))
    return is_data or _is_one_of(cls, INSTANCES)


def _is_one_of(cls: type, names: frozenset[str]) -> bool:
    """Whether a class is what one of some names leads to."""
    root = root_of(home_of(cls))
    return any(root_of(name) == root and leads_to(name, cls) for name in names)


def _is_public(method: str) -> bool:
    last = method.rpartition(".")[2]
    return last == "__call__" or not last.startswith("_")


def _former_names_of(obj: Any) -> tuple[str, ...]:
    names = type.__getattribute__(obj, "__dict__").get("__sharedtree_names__", ()) if isinstance(obj, type) else ()
    return (names,) if isinstance(names, str) else tuple(names)


def trust(*trusted: Trusted) -> None:
    """Allows every file that this process loads to name some classes, functions or packages.

    Args:
        *trusted: classes; functions; names such as `"my_models:Encoder"`; packages such as `"my_models"`, which stands
            for the classes and functions defined in it. `"__main__"` stands for the running program.

    Raises:
        ValueError: if a text is neither a name nor a package, or a package is part of Python's standard library.
        TypeError: if something else is given.

    Limitations: there is no way to take trust back. Prefer `trusted=` of a single call where you can. The functions of
    the libraries that sharedtree knows are allowed one by one; to name the library allows no more of them. Of classes,
    `"flax"` allows the layers, variables, metrics and graph definitions of Flax NNX.

    Example:
        >>> import collections, sharedtree as st
        >>> from sharedtree.serialise.trust._trusted_names import Trust
        >>> Point = collections.namedtuple("Point", "x y", module="shapes")
        >>> st.trust(Point)
        >>> Trust().allows("shapes:Point", "class")
        True
    """
    entries = _entries(trusted)
    with _lock:
        _process_wide.extend(entries)


_lock = Lock()
_process_wide: list[Any] = []  # only read and changed under `_lock`


def _entries(trusted: Any) -> list[Any]:
    """What is to be trusted, if all of it can be."""
    if isinstance(trusted, str | type) or (callable(trusted) and not isinstance(trusted, Iterable)):
        trusted = (trusted,)
    entries = list(trusted) if isinstance(trusted, Iterable) else [trusted]
    for entry in entries:
        if not isinstance(entry, str) and not callable(entry):
            raise TypeError(
                f"`{entry!r}` is a `{type(entry).__name__}`, and cannot be trusted. Give a class, a function, a name "
                'such as `"my_models:Encoder"`, or a package such as `"my_models"`.'
            )
        if isinstance(entry, str) and not is_well_formed(entry if ":" in entry else f"{entry}:_"):
            raise ValueError(
                f'`"{printable(entry)}"` is neither a package (`"my_models"`) nor a name (`"my_models:Encoder"`).'
            )
        if isinstance(entry, str) and ":" not in entry and root_of(entry) in sys.stdlib_module_names:
            raise ValueError(
                f"`{entry}` is part of Python's standard library, which cannot be trusted as a whole: a file could "
                f'then name any function of it. Name the classes one by one:\n    trusted=["{entry}:SomeClass"]'
            )
    return entries
