"""What a file may name: the allow-list, and how a name on it becomes an object.

A name is judged in three steps, each under a heading of `Trust`:

    "my_models:Encoder"     1. its text is checked against the allow-list
                            2. it is resolved through `vars(module)`, and loading imports nothing
                            3. the object is judged: a class of which kind, a function defined where?

The text comes first, so a name that is not allowed is never looked up. The object is judged again because a name says
little about it: a trusted package that imports `os` would otherwise let a file name `os.system`.
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
    """Result of judging one name.

    Attributes:
        obj: the class or the function; None if there is none or it may not be used.
        why: the reason for that, to be printed; empty if the object may be used.
        allowed: False if the allow-list refuses the name or its object. True also for an allowed name that leads
            nowhere.
        not_imported: the module that has to be imported before the name can be looked up; empty if none has to be.
    """

    obj: Any = None
    why: str = ""
    allowed: bool = True
    not_imported: str = ""

    @property
    def found(self) -> bool:
        """Returns True if the name led to an object the file may have."""
        return not self.why


class _NotImportedError(Exception):
    """The module of a name has to be imported before the name can be looked up."""

    def __init__(self, module: str) -> None:
        super().__init__(f"`{module}` is not imported")
        self.module = module


# `sharedtree.linen` is left out: it imports Flax, which no file may do.
_OURS = frozenset([name for name in INSTANCES - {"sharedtree.linen:TrainState"} if root_of(name) == "sharedtree"])
"""Names in lazy modules of this package. These are the only modules that a file can cause to be imported."""

# The verdict on every name whose text is not on the list.
UNLISTED = Verdict(None, "not on the allow-list", allowed=False)


class Trust:
    """Allow-list of one call: the built-in list, the additions of `trust`, and those of the call.

    Args:
        trusted: the entries of the call.
        objects: more trusted classes and functions, by name: those of a template.
    """

    def __init__(self, trusted: Trusted | Iterable[Trusted] = (), objects: Mapping[str, Any] | None = None) -> None:
        """Puts the entries into tables: packages, names, objects and former names."""
        entries = _entries(trusted)
        with _lock:
            entries = [*_process_wide, *entries]
        texts = [entry for entry in entries if isinstance(entry, str)]
        # What the running program defines has two names, `__main__:Net` and `train:Net`. They are the same code, so who
        # trusts one trusts the other.
        self._program = import_name()
        texts += [self._in_main(text) for text in texts]
        packages = [text for text in dict.fromkeys(texts) if ":" not in text]
        self._names = {text for text in texts if ":" in text}
        # Of libraries that the user named, no more is allowed than the list has for those who trust them.
        self._libraries = {root_of(package) for package in packages} & (PACKAGES | NAMES_ONLY)
        self._packages = [package for package in packages if root_of(package) not in self._libraries]
        # Name → the trusted object. Such a name needs no look-up.
        self._objects = dict(objects or {})
        self._objects |= {self._in_main(name): obj for name, obj in self._objects.items()}
        for obj in [entry for entry in entries if not isinstance(entry, str)]:
            self._objects[f"{home_of(obj)}:{getattr(obj, '__qualname__', '?')}"] = obj
            # Without a name that is proved, a file can name the object only as the object calls itself.
            with contextlib.suppress(NamelessError):
                self._objects[name_of(obj)] = obj
        # Qualname → id → name of the trusted objects with that qualname. `_objects` keeps them alive, so the ids hold.
        self._names_by_qualname: dict[str, dict[int, str]] = {}
        for name, obj in self._objects.items():
            if root_of(name) not in PACKAGES | NAMES_ONLY:
                self._names_by_qualname.setdefault(name.partition(":")[2], {})[id(obj)] = name
        # Former name → class, for classes that were trusted as such, and for those of trusted packages.
        self._former = {name: obj for obj in self._objects.values() for name in _former_names_of(obj)}
        self._former_in_packages: dict[str, type] = {}
        # The modules that were searched for former names, and the length of `sys.modules` at that time.
        self._searched: set[str] = set()
        self._num_modules = 0

    def allows(self, name: str, kind: Use, main: str | None = None) -> bool:
        """Returns True if the text of a name is on the list, or a trusted class says that it was its name.

        Nothing is looked up.

        Args:
            name: `module:qualname`.
            kind: its use in the file.
            main: the writing program's module, as others import it.
        """
        for spelling in self._spellings(name, main):
            if spelling in self._former or self._has_listed_text(spelling, kind):
                return True
        return False

    def resolve(self, name: str, kind: Use, main: str | None = None) -> Verdict:
        """Judges the name of a class or a function, and finds its object if it is allowed.

        Args:
            name: `module:qualname`.
            kind: its use in the file.
            main: the writing program's module, as others import it.
        """
        verdicts: list[Verdict] = []
        for spelling in self._spellings(name, main):
            verdicts.append(self._judge(spelling, kind))
            if verdicts[-1].found:
                return verdicts[-1]
        # Of several failures, the one that the user can do most about is reported: an allowed name that leads nowhere
        # before a refused object, and that before a text that is not on the list.
        return min(verdicts, key=lambda verdict: (not verdict.allowed, verdict is UNLISTED))

    def resolve_method(self, name: str, owner: Verdict) -> Verdict:
        """Judges the name of a method by the verdict on its class.

        If the class no longer has the method, it is no fault.

        Args:
            name: `module:Class.method`.
            owner: the verdict on the class.
        """
        if not owner.found:
            return owner._replace(why=f"its class: {owner.why}")
        refusal = self._refusal_of_method(name, owner.obj)
        return Verdict(None, refusal, allowed=False) if refusal else owner

    def _judge(self, name: str, kind: Use) -> Verdict:
        """Judges one spelling of a name: its text, then where it leads, then the object."""
        # 1. The text.
        if not self._has_listed_text(name, kind):
            return Verdict(self._former[name]) if name in self._former else UNLISTED
        # 2. Where it leads.
        try:
            obj = self._objects[name] if name in self._objects else self._find(name)
        except _NotImportedError as error:
            return Verdict(None, str(error), not_imported=error.module)
        except LookupError as error:
            return Verdict(None, str(error))
        # 3. The object.
        refusal = self._refusal(name, kind, obj)
        return Verdict(None, refusal, allowed=False) if refusal else Verdict(obj)

    # ---- 1. A name is checked against the allow-list first ----

    def _has_listed_text(self, name: str, kind: Use) -> bool:
        """Returns True if the text of a name is on the list. Nothing is looked up or imported."""
        if not is_well_formed(name):
            return False
        # Names that are listed one by one, by us or by the user.
        if name in self._objects or name in self._names or name in FUNCTIONS or name in CLASSES:
            return True
        # Classes of known libraries that only who trusts the library may load.
        module, _, qualname = name.partition(":")
        is_kept_back = any(name == entry or is_inside(module, entry) for entry in KEPT_BACK)
        if kind == "class" and is_kept_back and root_of(module) not in self._libraries:
            return False
        # Known libraries: any class goes on to the judgement of its object. Of functions, only public methods do.
        if root_of(module) in PACKAGES:
            return kind == "class" or (ROW_OF[root_of(module)].has_methods and "." in qualname and _is_public(name))
        # Packages that the user trusts.
        if self._package_of(module) is not None:
            return True
        # Methods of a trusted class.
        owner = name.rpartition(".")[0]
        return kind == "function" and (owner in self._objects or owner in self._names)

    def _package_of(self, module: str) -> str | None:
        """Returns the trusted package a module is in; None if there is none."""
        return next((package for package in self._packages if is_inside(module, package)), None)

    def _spellings(self, name: str, main: str | None) -> Iterable[str]:
        """Returns the names a name may stand for. Each of them is judged by its own text, as if the file had it.

        What a program defines is in `__main__` while it runs, and in another module for everyone else. So `__main__`
        says little about where something is, and a trusted object with the same qualname in its own module is meant,
        too.
        """
        module, _, qualname = name.partition(":")
        if module not in (MAIN, CHILD, main, self._program):
            return (name,)
        in_main = f"{MAIN}:{qualname}"
        is_the_program = module in (MAIN, CHILD) or (module == self._program and module not in sys.modules)
        names = [in_main] if is_the_program else [name, in_main]
        # The qualname may be that of a trusted object, or of a method of a trusted class.
        owner, dot, method = qualname.rpartition(".")
        for trusted_qualname, suffix in ((qualname, ""), (owner, dot + method)):
            # Two trusted objects with one qualname are ambiguous, and neither is meant.
            trusted_names = self._names_by_qualname.get(trusted_qualname, {}).values()
            names += [trusted_name + suffix for trusted_name in trusted_names if len(trusted_names) == 1]
        return dict.fromkeys(names)

    def _in_main(self, text: str) -> str:
        """Returns the name in `__main__` for a name in the running program's module.

        Returns other texts unchanged.
        """
        module, colon, qualname = text.partition(":")
        return MAIN + colon + qualname if module in (self._program, CHILD) else text

    # ---- 2. Then it is resolved through `vars(module)`. Loading imports nothing ----

    def _find(self, name: str) -> Any:
        """Returns the object of an allowed name, from modules that are imported already.

        Raises:
            _NotImportedError: if its module has to be imported first.
            LookupError: if it is not there. Its text is the reason.
        """
        module = name.partition(":")[0]
        # Our lazy modules are the one exception to "loading imports nothing".
        if name in _OURS and module not in sys.modules:
            importlib.import_module(module)
        try:
            return find(name)
        except LookupError:
            former = self._class_of_former_name(name)
        if former is not None:
            return former
        required_module = module_to_import(module) if module != MAIN else None
        if required_module is not None:
            raise _NotImportedError(required_module)
        raise LookupError(f"`{module}` holds nothing of that name")

    def _class_of_former_name(self, name: str) -> type | None:
        """Returns the class that says in `__sharedtree_names__` that this was its name; None if there is none.

        It must be trusted itself, or be defined in a trusted package.
        """
        if name in self._former or self._package_of(name.partition(":")[0]) is None:
            return self._former.get(name)
        # A file can have any number of names that lead nowhere, so each module is searched once for all of them.
        if len(sys.modules) != self._num_modules:
            self._num_modules = len(sys.modules)
            loaded = {key: space for package in self._packages for key, space in namespaces(package).items()}
            spaces: list[list[Any]] = [list(loaded[key].values()) for key in loaded if key not in self._searched]
            self._searched.update(loaded)
            for cls in [obj for space in spaces for obj in space if _former_names_of(obj)]:
                # A trusted package may import classes of others, which it cannot speak for.
                for former_name in _former_names_of(cls) if self._package_of(home_of(cls)) else ():
                    self._former_in_packages.setdefault(former_name, cls)
        return self._former_in_packages.get(name)

    # ---- 3. Classes must be registered pytree nodes, dataclasses, namedtuples or enums; functions have a stricter list

    def _refusal(self, name: str, kind: Use, obj: Any) -> str:
        """Returns the reason against using the object of an allowed name; empty if there is none.

        Args:
            name: the name. Its text is on the list.
            kind: its use in the file.
            obj: the object of that name.
        """
        cls: Any = obj
        is_listed = kind == "function" and name in FUNCTIONS
        if kind == "class" and not isinstance(obj, type):
            return "it is not a class"
        # What the user named or passed as an object is trusted without further questions.
        if name in self._objects:
            return ""
        if kind == "function" and not is_listed and not callable(obj):
            return "it cannot be called"
        if is_listed or name in self._names or name in CLASSES:
            return ""
        # From here on, the name is allowed because of the package it is in.
        if kind == "class" and not is_rebuildable(cls) and not is_choice(cls):
            return "it is neither a registered pytree node nor a dataclass, a namedtuple or an enum"
        if kind == "function" and isinstance(obj, type):
            return "it is a class, not a function"
        # In a trusted package: only what is defined there, or `os.system` could come in through an `import os`.
        home, package = home_of(obj), self._package_of(name.partition(":")[0])
        if package is not None:
            return "" if is_inside(home, package) else f"it is defined in `{home}`"
        # In a known library: classes of the kinds that its row has.
        if kind == "class":
            is_trusted = root_of(home) in self._libraries and _is_one_of(cls, IF_TRUSTED)
            is_allowed = is_trusted or _is_of_a_library(cls)
            return "" if is_allowed else "of this library, classes are allowed one by one"
        # Outside of packages, the text of a function's name was allowed only if it is a method's: there is its class.
        owner = find(name.rpartition(".")[0])
        refusal_by_home = "" if home == home_of(owner) else f"it is defined in `{home}`"
        return self._refusal_of_method(name, owner) or refusal_by_home

    def _refusal_of_method(self, name: str, owner: type) -> str:
        """Returns the reason why a file may not have a method of a class it may name; an empty text if it may.

        A class without the method is no reason.
        """
        method = name.rpartition(".")[2]
        # The base class that defines the method, and its function. A metaclass could run code in `getattr`, so only the
        # dictionaries of the classes are read.
        base, function = owner, None
        for base in type.__getattribute__(owner, "__mro__"):
            function = type.__getattribute__(base, "__dict__").get(method)
            if function is not None:
                break
        if function is None:
            return ""
        function = function.__func__ if isinstance(function, classmethod) else function
        if kind_of(owner) is None:
            return "its class has no instances that can be rebuilt"
        if name in self._names or self._is_trusted_object(function):
            return ""
        home = home_of(base)
        # The base must be trusted, of a library whose methods are allowed, or of the package that the class is in.
        if not self._is_trusted_object(base) and self._package_of(home) is None:
            if root_of(home) in PACKAGES:
                if not ROW_OF[root_of(home)].has_methods or kind_of(base) != "module" or not _is_public(method):
                    return "methods of this class are not on the allow-list"
            elif root_of(home) != root_of(home_of(owner)):
                return f"it is defined in `{home}`"
        # A class may hold a function of elsewhere under the name of a method.
        return "" if root_of(home_of(function)) == root_of(home) else f"it is defined in `{home_of(function)}`"

    def _is_trusted_object(self, obj: Any) -> bool:
        """Returns True if an object itself is trusted, whatever its name."""
        return any(trusted is obj for trusted in self._objects.values())


def _is_of_a_library(cls: type) -> bool:
    """Returns True if a class is data of a known library. Every file may name it."""
    row = ROW_OF.get(root_of(home_of(cls)))
    is_data = row is not None and (kind_of(cls) in row.kinds or ("enum" in row.kinds and is_choice(cls)))
    return is_data or _is_one_of(cls, INSTANCES)


def _is_one_of(cls: type, names: frozenset[str]) -> bool:
    """Returns True if one of some names leads to a class. Names of other libraries are not looked up."""
    root = root_of(home_of(cls))
    return any(root_of(name) == root and leads_to(name, cls) for name in names)


def _is_public(method: str) -> bool:
    """Returns True for `__call__` and for names without a leading underscore."""
    last = method.rpartition(".")[2]
    return last == "__call__" or not last.startswith("_")


def _former_names_of(obj: Any) -> tuple[str, ...]:
    """Returns the names a class says it had before. They are read without calling its metaclass."""
    names = type.__getattribute__(obj, "__dict__").get("__sharedtree_names__", ()) if isinstance(obj, type) else ()
    return (names,) if isinstance(names, str) else tuple(names)


def trust(*trusted: Trusted) -> None:
    """Allows every file this process loads to name some classes, functions or packages.

    Args:
        *trusted: classes; functions; names such as `"my_models:Encoder"`; packages such as `"my_models"`, which stands
            for the classes and functions defined in it. `"__main__"` stands for the running program.

    Raises:
        ValueError: if a text is neither a name nor a package, or a package is part of Python's standard library.
        TypeError: if something else is given.

    Limitations: there is no way to take trust back. Prefer `trusted=` of a single call where you can. The functions of
    the libraries sharedtree knows are allowed one by one; to name the library allows no more of them. Of classes,
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


# What `trust` added for this process. It is read and changed only under the lock.
_lock = Lock()
_process_wide: list[Any] = []


def _entries(trusted: Any) -> list[Any]:
    """Returns the user's trusted entries as a list.

    Raises:
        TypeError: if something in it is neither a text nor callable.
        ValueError: if a text is neither a name nor a package, or is a package of the standard library.
    """
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
        # The standard library has `os`, `subprocess` and `pickle`: no package of it can be trusted as a whole.
        if isinstance(entry, str) and ":" not in entry and root_of(entry) in sys.stdlib_module_names:
            raise ValueError(
                f"`{entry}` is part of Python's standard library, which cannot be trusted as a whole: a file could "
                f'then name any function of it. Name the classes one by one:\n    trusted=["{entry}:SomeClass"]'
            )
    return entries
