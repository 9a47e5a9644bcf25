"""What a file may name: the allow-list, and how a name on it becomes an object.

A name in a file is judged in three steps, each under a heading of `Trust`:

    "my_models:Encoder"     1. its text is checked against the allow-list
                            2. it is resolved through `vars(module)`, and loading imports nothing
                            3. the object is judged: a class of which kind, a function defined where?

The text comes first, so a name that is not allowed is never looked up. The object is judged as well, since a name says
little about it. For example, if a trusted package imports `system` from `os`, a file could name it `package:system`.

Words:

- The *home* of an object is the module in its `__module__`. The *root* of a name or module is its top-level package.
- A *known library* is one with a row in the allow-list. A *trusted* class, function, name or package is one that the
  user has passed in `trusted` or to `trust`.
- What the running program defines is in `__main__`, called `MAIN` here, and in the main module of a spawned process
  (`CHILD`). For a program that imports it, the same is in `train`, say. All names of one thing are its *spellings*.
- A class can list names that it had before in `__sharedtree_names__`: its *former* names.
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
    is_inside,
    is_instance,
    is_well_formed,
    leads_to,
    module_to_import,
    name_of,
    namespaces,
    program_name,
    root_of,
)

Trusted = str | type | Callable[..., Any]
"""One entry of the user's `trusted`: a class, a function, a name `"my_models:Encoder"` or a package `"my_models"`."""

Use = Literal["class", "function", "method"]
"""The use of a name in a file. A `"method"` is a function that the file binds to an instance of the class."""


class Verdict(NamedTuple):
    """Result of judging one name.

    Attributes:
        obj: the class or the function; None if `why` has a reason. For a method, the class.
        why: the reason why the file may not use the name, to be printed; empty if it may.
        allowed: False if the text of the name, or its object, is refused. True also for an allowed name that leads
            nowhere.
        not_imported: the module that the user has to import before the name can be looked up; empty if there is none.
    """

    obj: Any = None
    why: str = ""
    allowed: bool = True
    not_imported: str = ""

    @property
    def found(self) -> bool:
        """Returns True if the name leads to an object that the file may use."""
        return not self.why


class _NotImportedError(Exception):
    """A name cannot be looked up before the user has imported its module. Raised and caught in this file only."""

    def __init__(self, module: str) -> None:
        super().__init__(f"`{module}` is not imported")
        self.module = module


# Without `sharedtree.linen`: its module imports Flax, and no file may cause that.
_IMPORTED_ON_DEMAND = frozenset(
    [name for name in INSTANCES - {"sharedtree.linen:TrainState"} if root_of(name) == "sharedtree"]
)
"""Names of classes of this package. Only their modules are imported because a file names something in them."""

# The verdict on every name whose text is not allowed. It is recognised by identity.
UNLISTED = Verdict(None, "not on the allow-list", allowed=False)


class Trust:
    """Allow-list of one call: the built-in list, what `trust` has added for the process, and what the call adds.

    Args:
        trusted: the user's entries for this call.
        objects: name → class or function, for those that the call's template uses. They are trusted as well.

    Raises:
        TypeError, ValueError: for an unusable entry, as `trust`.
    """

    def __init__(self, trusted: Trusted | Iterable[Trusted] = (), objects: Mapping[str, Any] | None = None) -> None:
        """Sorts the entries into tables: packages, names, objects and former names."""
        entries = _entries(trusted)
        with _lock:
            entries = [*_process_wide, *entries]
        texts = [entry for entry in entries if isinstance(entry, str)]
        # `__main__:Net` and `train:Net` are one class of the running program. Who trusts one name trusts the other.
        self._program = program_name()
        texts += [self._in_main(text) for text in texts]
        packages = [text for text in dict.fromkeys(texts) if ":" not in text]
        self._names = {text for text in texts if ":" in text}
        # Known libraries that the user trusts. The allow-list says what that allows. It is not everything, as it is for
        # other packages.
        self._libraries = {root_of(package) for package in packages} & (PACKAGES | NAMES_ONLY)
        self._packages = [package for package in packages if root_of(package) not in self._libraries]
        # Name → the trusted object. These names are not looked up.
        self._objects = dict(objects or {})
        self._objects |= {self._in_main(name): obj for name, obj in self._objects.items()}
        for obj in [entry for entry in entries if not isinstance(entry, str)]:
            self._objects[f"{home_of(obj)}:{getattr(obj, '__qualname__', '?')}"] = obj
            # Also by the name that leads to it, if there is one. Otherwise files have the name that it states itself.
            with contextlib.suppress(NamelessError):
                self._objects[name_of(obj)] = obj
        # Qualname → id → name, for trusted objects outside of known libraries. One object may have several names, so
        # the number of ids says how many objects have the qualname. `_objects` keeps them alive, so that ids are not
        # reused.
        self._names_by_qualname: dict[str, dict[int, str]] = {}
        for name, obj in self._objects.items():
            if root_of(name) not in PACKAGES | NAMES_ONLY:
                self._names_by_qualname.setdefault(name.partition(":")[2], {})[id(obj)] = name
        # Former name → class: for trusted classes, and for classes found so far in trusted packages.
        self._former = {name: obj for obj in self._objects.values() for name in _former_names_of(obj)}
        self._former_in_packages: dict[str, type] = {}
        # The modules that were searched for former names, and how many modules were loaded at that time.
        self._searched: set[str] = set()
        self._num_modules = 0

    def allows(self, name: str, kind: Use, main: str | None = None) -> bool:
        """Returns True if the text of a name is allowed, or it is a former name of a trusted class.

        Nothing is looked up, so the object may still be refused.

        Args:
            name: `module:qualname`.
            kind: its use in the file.
            main: module of the program that wrote the file, as others import it.
        """
        for spelling in self._spellings(name, main):
            if spelling in self._former or self._has_listed_text(spelling, kind):
                return True
        return False

    def resolve(self, name: str, kind: Use, main: str | None = None) -> Verdict:
        """Judges the name of a class or a function. Returns the verdict, with the object if the file may use it.

        Args:
            name: `module:qualname`.
            kind: its use in the file.
            main: module of the program that wrote the file, as others import it.
        """
        verdicts: list[Verdict] = []
        for spelling in self._spellings(name, main):
            verdicts.append(self._judge(spelling, kind))
            if verdicts[-1].found:
                return verdicts[-1]
        # Of several failures, returns the one that the user can mend most easily. An allowed name that leads nowhere
        # comes first, then a refused object, then a text that is not allowed.
        return min(verdicts, key=lambda verdict: (not verdict.allowed, verdict is UNLISTED))

    def resolve_method(self, name: str, owner: Verdict) -> Verdict:
        """Judges the name of a method by the verdict on its class.

        Returns the verdict on the class if the file may use the method. A method that the class no longer has is not
        refused here.

        Args:
            name: `module:Class.method`.
            owner: the verdict on the class.
        """
        if not owner.found:
            return owner._replace(why=f"its class: {owner.why}")
        refusal = self._reason_against_method(name, owner.obj)
        return Verdict(None, refusal, allowed=False) if refusal else owner

    def _judge(self, name: str, kind: Use) -> Verdict:
        """Judges one spelling of a name: its text, then where it leads, then the object."""
        # 1. The text. A trusted class that formerly had the name needs no look-up.
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
        refusal = self._reason_against(name, kind, obj)
        return Verdict(None, refusal, allowed=False) if refusal else Verdict(obj)

    # ---- 1. The text of a name ----

    def _has_listed_text(self, name: str, kind: Use) -> bool:
        """Returns True if the text of a name is allowed. Nothing is looked up or imported.

        Args:
            name: one spelling of the name.
            kind: its use in the file.
        """
        if not is_well_formed(name):
            return False
        # Names that are allowed one by one, by the built-in list or by the user.
        if name in self._objects or name in self._names or name in FUNCTIONS or name in CLASSES:
            return True
        # Classes of known libraries that are refused unless the user trusts the library.
        module, _, qualname = name.partition(":")
        is_kept_back = any(name == entry or is_inside(module, entry) for entry in KEPT_BACK)
        if kind == "class" and is_kept_back and root_of(module) not in self._libraries:
            return False
        # Other names of known libraries. The text of any class is allowed, and step 3 judges the object. Of functions,
        # only the texts of public methods are: they have a dot in the qualname.
        if root_of(module) in PACKAGES:
            return kind == "class" or (ROW_OF[root_of(module)].has_methods and "." in qualname and _is_public(name))
        # Names in packages that the user trusts.
        if self._package_of(module) is not None:
            return True
        # Methods of a class that the user trusts.
        owner = name.rpartition(".")[0]
        return kind == "function" and (owner in self._objects or owner in self._names)

    def _package_of(self, module: str) -> str | None:
        """Returns the trusted package in which a module is; None if there is none. Known libraries do not count."""
        return next((package for package in self._packages if is_inside(module, package)), None)

    def _spellings(self, name: str, main: str | None) -> Iterable[str]:
        """Returns the spellings of a name, itself included. Each is judged as if the file had it.

        There are several only for a name of a program: in `__main__`, in the running program's module, or in that of
        the program that wrote the file. `__main__:Net` may be meant as `__main__:Net` here, or as `models:Net` if that
        is a trusted class.

        Args:
            name: the name in the file.
            main: module of the program that wrote the file, as others import it.
        """
        module, _, qualname = name.partition(":")
        if module not in (MAIN, CHILD, main, self._program):
            return (name,)
        in_main = f"{MAIN}:{qualname}"
        # If the running program's module was imported as well, its classes exist twice, and the file means either.
        is_only_in_main = module in (MAIN, CHILD) or (module == self._program and module not in sys.modules)
        names = [in_main] if is_only_in_main else [name, in_main]
        # The qualname may be that of a trusted object, `Net`, or of a method of a trusted class, `Net.encode`.
        owner, dot, method = qualname.rpartition(".")
        for trusted_qualname, suffix in ((qualname, ""), (owner, dot + method)):
            # If several trusted objects have the qualname, none of them is meant.
            trusted_names = self._names_by_qualname.get(trusted_qualname, {}).values()
            names += [trusted_name + suffix for trusted_name in trusted_names if len(trusted_names) == 1]
        return dict.fromkeys(names)

    def _in_main(self, text: str) -> str:
        """Returns the text in `__main__` for one in the running program's module; any other text as it is.

        While `train.py` runs, `train:Net` gives `__main__:Net`, and `train` gives `__main__`.
        """
        module, colon, qualname = text.partition(":")
        return MAIN + colon + qualname if module in (self._program, CHILD) else text

    # ---- 2. The look-up, by `find` of `core/_class_attributes.py`. Loading imports nothing ----

    def _find(self, name: str) -> Any:
        """Returns the object of an allowed name, from modules that are imported already.

        If the name leads nowhere, but is a former name of a class, returns the class.

        Raises:
            _NotImportedError: if the user has to import its module first.
            LookupError: if there is no such object. The text is the reason.
        """
        module = name.partition(":")[0]
        # The one exception to "loading imports nothing".
        if name in _IMPORTED_ON_DEMAND and module not in sys.modules:
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
        """Returns the class with this former name; None if there is none.

        Only trusted classes count, and, for a name in a trusted package, the classes that such packages define.
        """
        if name in self._former or self._package_of(name.partition(":")[0]) is None:
            return self._former.get(name)
        # A file can have any number of names that lead nowhere. So each module is searched once for all former names,
        # and again only for modules that were loaded since.
        if len(sys.modules) != self._num_modules:
            self._num_modules = len(sys.modules)
            loaded = {key: space for package in self._packages for key, space in namespaces(package).items()}
            spaces: list[list[Any]] = [list(loaded[key].values()) for key in loaded if key not in self._searched]
            self._searched.update(loaded)
            for cls in [obj for space in spaces for obj in space if _former_names_of(obj)]:
                # A trusted package may have imported classes of other packages. Those are not trusted.
                for former_name in _former_names_of(cls) if self._package_of(home_of(cls)) else ():
                    self._former_in_packages.setdefault(former_name, cls)
        return self._former_in_packages.get(name)

    # ---- 3. The object. A class must be one whose instances can be rebuilt ----

    def _reason_against(self, name: str, kind: Use, obj: Any) -> str:
        """Returns the reason why a file may not use the object of an allowed name; an empty text if it may.

        Args:
            name: one spelling of the name. Its text is allowed.
            kind: its use in the file.
            obj: the object to which it leads.
        """
        # The same object, as a class, for the type checker.
        cls: Any = obj
        is_listed = kind == "function" and name in FUNCTIONS
        if kind == "class" and not is_instance(obj, type):
            return "it is not a class"
        # What the user passed as an object is trusted without further questions.
        if name in self._objects:
            return ""
        if kind == "function" and not is_listed and not callable(obj):
            return "it cannot be called"
        # So is what the user or the built-in list named.
        if is_listed or name in self._names or name in CLASSES:
            return ""
        # From here on, the text of the name was allowed because of the package it is in, or the class it is in.
        if kind == "class" and not is_rebuildable(cls) and not is_choice(cls):
            return "it is neither a registered pytree node nor a dataclass, a namedtuple or an enum"
        if kind == "function" and is_instance(obj, type):
            return "it is a class, not a function"
        # In a trusted package: only what is defined in it, or `from os import system` would bring in `os.system`.
        home, package = home_of(obj), self._package_of(name.partition(":")[0])
        if package is not None:
            return "" if is_inside(home, package) else f"it is defined in `{home}`"
        # In a known library: classes of the kinds that its row allows, and single classes.
        if kind == "class":
            is_trusted = root_of(home) in self._libraries and _is_one_of(cls, IF_TRUSTED)
            is_allowed = is_trusted or _is_data_of_library(cls)
            return "" if is_allowed else "of this library, classes are allowed one by one"
        # A function is left. Step 1 allows its text only if it is a method, so its class exists.
        owner = find(name.rpartition(".")[0])
        refusal_by_home = "" if home == home_of(owner) else f"it is defined in `{home}`"
        return self._reason_against_method(name, owner) or refusal_by_home

    def _reason_against_method(self, name: str, owner: type) -> str:
        """Returns the reason why a file may not use a method; an empty text if it may.

        A method that the class does not have is not refused here.

        Args:
            name: `module:Class.method`.
            owner: its class. The file may use it.
        """
        method = name.rpartition(".")[2]
        # 1. The base class that defines the method, and its function. A metaclass could run code in `getattr`, so the
        # dictionaries of the classes are read instead.
        base, function = owner, None
        for base in type.__getattribute__(owner, "__mro__"):
            function = type.__getattribute__(base, "__dict__").get(method)
            if function is not None:
                break
        if function is None:
            return ""
        function = function.__func__ if is_instance(function, classmethod) else function
        # 2. The class.
        if kind_of(owner) is None:
            return "its class has no instances that can be rebuilt"
        if name in self._names or self._is_trusted_object(function):
            return ""
        # 3. The base class that defines the method. One of these must hold: it is trusted; it is a neural-network
        # module of a known library, the allow-list allows public methods of this library, and the method is public; it
        # is of the same top-level package as the class.
        home = home_of(base)
        if not self._is_trusted_object(base) and self._package_of(home) is None:
            if root_of(home) in PACKAGES:
                if not ROW_OF[root_of(home)].has_methods or kind_of(base) != "module" or not _is_public(method):
                    return "methods of this class are not on the allow-list"
            elif root_of(home) != root_of(home_of(owner)):
                return f"it is defined in `{home}`"
        # 4. The function. A class may hold one of another package under the name of a method.
        return "" if root_of(home_of(function)) == root_of(home) else f"it is defined in `{home_of(function)}`"

    def _is_trusted_object(self, obj: Any) -> bool:
        """Returns True if the user trusts this very object, under any name."""
        return any(trusted is obj for trusted in self._objects.values())


def _is_data_of_library(cls: type) -> bool:
    """Returns True if a class is data of a known library: its kind is allowed as a whole, or it is listed.

    Every file may have instances of it.
    """
    row = ROW_OF.get(root_of(home_of(cls)))
    is_data = row is not None and (kind_of(cls) in row.kinds or ("enum" in row.kinds and is_choice(cls)))
    return is_data or _is_one_of(cls, INSTANCES)


def _is_one_of(cls: type, names: frozenset[str]) -> bool:
    """Returns True if one of the names leads to a class. Only names of the class's own library are looked up."""
    root = root_of(home_of(cls))
    return any(root_of(name) == root and leads_to(name, cls) for name in names)


def _is_public(method: str) -> bool:
    """Returns True if the last part of a name has no leading underscore, or is `__call__`."""
    last = method.rpartition(".")[2]
    return last == "__call__" or not last.startswith("_")


def _former_names_of(obj: Any) -> tuple[str, ...]:
    """Returns the former names of a class; `()` for other objects. No code of its metaclass runs."""
    names = type.__getattribute__(obj, "__dict__").get("__sharedtree_names__", ()) if is_instance(obj, type) else ()
    return (names,) if isinstance(names, str) else tuple(names)


def trust(*trusted: Trusted) -> None:
    """Allows all files that this process loads from now on to use some classes, functions or packages.

    Args:
        *trusted: classes; functions; names such as `"my_models:Encoder"`; packages such as `"my_models"`. A package
            stands for the classes and functions that are defined in it. `"__main__"` stands for the running program.

    Raises:
        ValueError: if a text is neither a name nor a package, or a package is part of Python's standard library.
        TypeError: if an entry is neither a text nor a class nor a function.

    Limitations: there is no way to take trust back. If you can, prefer the option `trusted=` of a single call. For
    libraries that sharedtree knows, such as JAX, there is a list of allowed functions. To trust such a library as a
    whole allows no further functions. But it may allow further classes: `"flax"` allows the layers, variables, metrics
    and graph definitions of Flax NNX.

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


# The entries that `trust` has added for this process. They are read and changed only under the lock.
_lock = Lock()
_process_wide: list[Any] = []


def _entries(trusted: Any) -> list[Any]:
    """Returns the user's entries as a list, after checking each. A single entry makes a list of one.

    Raises:
        TypeError: if something in it is neither a text nor callable.
        ValueError: if a text is neither a name nor a package, or is a package of the standard library.
    """
    # A text and a class may be iterable, but are single entries.
    if isinstance(trusted, str | type) or (callable(trusted) and not isinstance(trusted, Iterable)):
        trusted = (trusted,)
    entries = list(trusted) if isinstance(trusted, Iterable) else [trusted]
    for entry in entries:
        if not isinstance(entry, str) and not callable(entry):
            raise TypeError(
                f"`{entry!r}` is a `{type(entry).__name__}`, and cannot be trusted. Give a class, a function, a name "
                'such as `"my_models:Encoder"`, or a package such as `"my_models"`.'
            )
        # `is_well_formed` asks for `module:qualname`, so a package gets some qualname.
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
