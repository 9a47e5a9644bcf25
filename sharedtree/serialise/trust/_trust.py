"""What a file may name: the allow-list, and how a name on it becomes an object.

The text of a name is judged first. Only then is its module imported, if it may be, and the name looked up, in the
dictionaries of modules and classes. What is found is judged again: a class must be one of the kinds that can be
rebuilt without calling it, and what a package was trusted for must be defined in that package, so that `os.system`
does not come in through a module that imports it.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

import equinox as eqx

from ..._errors import CompatibilityError
from ..._printable import printable
from ...compat._importing import import_module
from ._allowed import (
    CLASSES,
    ECOSYSTEM,
    FUNCTIONS,
    IMPORTABLE,
    INSTANCES,
    LIBRARIES,
    NAMES_ONLY,
    NNX,
    RUN_WHEN_IMPORTED,
    STANDARD_LIBRARY,
)
from ._classes import is_name_of_nnx, is_rebuildable, kind_of
from ._installed import ElsewhereError, import_installed
from ._names import NamelessError, find, home_of, is_well_formed, loaded_modules, name_of, namespace

Trusted = str | type | Callable[..., Any]
"""What can be trusted: a class, a function, a name (`"my_models:Encoder"`), or a package (`"my_models"`)."""

Kind = Literal["class", "function", "method"]
"""What a file uses a name as. A `method` is a function that the file has bound to an instance of the class."""


class Verdict(NamedTuple):
    """What became of one name.

    Attributes:
        allowed: whether the file may name it.
        found: whether it led to an object; never if it is not allowed.
        obj: the object, if found.
        why: for names that are not allowed or not found, why.
        elsewhere: if nothing was imported because the package would come from where nothing is installed, the place.
    """

    allowed: bool
    found: bool
    obj: Any
    why: str
    elsewhere: str = ""


class Trust:
    """An allow-list: the built-in one, what `trust` added for this process, and what one call adds.

    Args:
        trusted: classes, functions, names and packages; a single one may stand alone.
        objects: further classes and functions by name, such as those that occur in a template.

    Raises:
        ValueError: if a text is neither a name nor a package, or a package is part of Python's standard library.
        TypeError: if something else is given.
    """

    def __init__(self, trusted: Trusted | Iterable[Trusted] = (), objects: Mapping[str, Any] | None = None) -> None:
        entries = _entries(trusted)
        with _lock:
            entries = [*_process_wide, *entries]
        self._objects: dict[str, Any] = dict(objects or {})  # name → the object, which needs no import
        self._former: dict[str, type] = {}  # former name → the class that says it had it
        self._names: set[str] = set()
        self._packages: set[str] = set()
        self._libraries: set[str] = set()  # libraries that the user named: they come from wherever Python finds them
        for entry in entries:
            if not isinstance(entry, str):
                self._add_object(entry)
            elif ":" in entry:
                self._names.add(entry)
            elif root_of(entry) not in LIBRARIES | NAMES_ONLY:
                self._packages.add(entry)
            else:
                self._libraries.add(root_of(entry))
        for obj in list(self._objects.values()):
            self._add_former_names(obj)

    def allows(self, name: str, kind: Kind) -> bool:
        """Whether the text of a name is on the list. Nothing is imported."""
        if not is_well_formed(name):
            return False
        module = name.partition(":")[0]
        root = module.partition(".")[0]
        if name in self._objects or name in self._names or name in FUNCTIONS or name in CLASSES:
            return True
        owner, _, last = name.rpartition(".")
        if kind == "class" and is_name_of_nnx(name) and "flax" not in self._libraries:
            return False
        if root in LIBRARIES:
            return kind == "class" or (root in ECOSYSTEM and "." in name.partition(":")[2] and _is_public(last))
        package = self._package_of(module)
        if package is not None:
            below = module[len(package) :].split(".")
            return module in sys.modules or RUN_WHEN_IMPORTED.isdisjoint(below)
        return kind == "function" and (owner in self._objects or owner in self._names)  # a method of a trusted class

    def knows_former(self, name: str) -> bool:
        """Whether a class that was trusted as such says that this was its name."""
        return name in self._former

    def resolve(self, name: str, kind: Kind) -> Verdict:
        """Judges a name, and finds its object if it is allowed.

        Args:
            name: the name, as the file has it.
            kind: what the file uses it as.

        Returns:
            The verdict. Only modules that the list covers were imported; those of the built-in list, unless they are
            loaded already, only from where things are installed.
        """
        if kind == "method":
            return self._resolve_method(name)
        moved = self._former.get(name)
        if not self.allows(name, kind):
            if moved is not None:
                return Verdict(True, True, moved, "")
            return Verdict(False, False, None, "not on the allow-list")
        if name in self._objects:
            obj = self._objects[name]
            is_fitting = kind != "class" or isinstance(obj, type)
            return Verdict(True, True, obj, "") if is_fitting else Verdict(False, False, None, "it is not a class")
        module = name.partition(":")[0]
        try:
            why = self._import(name, module)
        except ElsewhereError as error:
            return Verdict(True, False, None, f"{error}; import it first", error.place)
        try:
            obj = find(name)
        except LookupError:
            obj = self._formerly(name)
            if obj is None:
                return Verdict(True, False, None, why or f"`{module}` holds nothing of that name")
        is_dead = kind == "function" and name not in FUNCTIONS and not callable(obj)
        refusal = "it cannot be called" if is_dead else self._refusal(name, module, kind, obj)
        return Verdict(False, False, None, refusal) if refusal else Verdict(True, True, obj, "")

    def refusal_of_method(self, name: str, owner: type) -> str:
        """Why a file may not have a method of a class that it may name; empty if it may, or if there is none.

        Args:
            name: the name of the method, as the file has it.
            owner: the class that the name of its class led to.
        """
        last = name.rpartition(".")[2]
        for base in type.__getattribute__(owner, "__mro__"):
            function = type.__getattribute__(base, "__dict__").get(last)
            if function is not None:
                break
        else:
            return ""
        function = function.__func__ if isinstance(function, classmethod) else function
        if kind_of(owner) is None:
            return "its class has no instances that can be rebuilt"
        if name in self._names or any(obj is function for obj in self._objects.values()):
            return ""
        home = home_of(base)
        if not any(obj is base for obj in self._objects.values()) and self._package_of(home) is None:
            if root_of(home) in LIBRARIES:
                if root_of(home) not in ECOSYSTEM or kind_of(base) != "module" or not _is_public(last):
                    return "methods of this class are not on the allow-list"
            elif root_of(home) != root_of(home_of(owner)):
                return f"it is defined in `{home}`"
        return "" if root_of(home_of(function)) == root_of(home) else f"it is defined in `{home_of(function)}`"

    def _has_methods(self, owner: type) -> bool:
        """Whether the methods of a class of a library may be named."""
        if any(obj is owner for obj in self._objects.values()):
            return True
        return root_of(home_of(owner)) in ECOSYSTEM and kind_of(owner) == "module"

    def _resolve_method(self, name: str) -> Verdict:
        verdict = self.resolve(name.rpartition(".")[0], "class")
        if not verdict.allowed or not verdict.found:
            return verdict._replace(why=f"its class: {verdict.why}")
        refusal = self.refusal_of_method(name, verdict.obj)
        return Verdict(False, False, None, refusal) if refusal else verdict

    def _add_object(self, obj: Any) -> None:
        self._objects[f"{home_of(obj)}:{getattr(obj, '__qualname__', '?')}"] = obj
        with contextlib.suppress(NamelessError):  # then a file can name it only as it calls itself
            self._objects[name_of(obj)] = obj
        self._add_former_names(obj)

    def _add_former_names(self, obj: Any) -> None:
        for name in _former_names_of(obj):
            self._former[name] = obj

    def _package_of(self, module: str) -> str | None:
        return next((p for p in self._packages if _is_inside(module, p)), None)

    def _import(self, name: str, module: str) -> str:
        """Imports the module of an allowed name, if it may be. Why it failed, if it did.

        Raises:
            ElsewhereError: if nobody but the file asks for it, and it is not installed where Python would find it.
        """
        root = module.partition(".")[0]
        if module == "__main__":
            return ""
        if root in LIBRARIES | NAMES_ONLY and name not in FUNCTIONS and name not in self._names:
            modules = [root, module] if module in IMPORTABLE else [root]
        else:
            modules = [module]
        is_the_users = name in self._names or root in self._libraries or self._package_of(module) is not None
        for each in modules:
            if each in sys.modules:
                continue
            try:
                (import_module if is_the_users else import_installed)(each)
            except (KeyboardInterrupt, ElsewhereError):
                raise
            except CompatibilityError as error:
                fact = str(error).partition("\n")[0]
                return f"{fact} What to do is said by the import itself: `from sharedtree.compat import {root}`"
            except BaseException as error:  # noqa: BLE001 -- a module may do anything when it is imported, also exit
                return f"`{each}` cannot be imported: {type(error).__name__}: {printable(str(error))}"
        return ""

    def _formerly(self, name: str) -> Any:
        """The class that a class of the same trusted package says it was called by this name."""
        if name in self._former:
            return self._former[name]
        package = self._package_of(name.partition(":")[0])
        if package is None:
            return None
        for _, module in loaded_modules(package):
            for obj in list(namespace(module).values()):
                if isinstance(obj, type) and name in _former_names_of(obj) and self._package_of(obj.__module__):
                    return obj
        return None

    def _refusal(self, name: str, module: str, kind: Kind, obj: Any) -> str:
        """Why what an allowed name led to may not be used; empty if it may."""
        if kind == "class" and not isinstance(obj, type):
            return "it is not a class"
        if name in self._names:
            return ""
        if name in CLASSES or (kind == "function" and name in FUNCTIONS):
            return ""
        home = home_of(obj)
        package = self._package_of(module)
        if kind == "class":
            if not is_rebuildable(obj) and not issubclass(obj, eqx.Enumeration):
                return "it is neither a registered pytree node nor a dataclass, a namedtuple or an enum"
            if package is not None:
                return "" if _is_inside(home, package) else f"it is defined in `{home}`"
            if _is_of_a_library(obj) or ("flax" in self._libraries and _is_one_of(obj, NNX)):
                return ""
            return "of this library, classes are allowed one by one"
        if isinstance(obj, type):
            return "it is a class, not a function"
        if package is not None:
            return "" if _is_inside(home, package) else f"it is defined in `{home}`"
        owner = self._objects.get(name.rpartition(".")[0]) or _find_or_none(name.rpartition(".")[0])
        if not is_rebuildable(owner) or (root_of(home_of(owner)) in LIBRARIES and not self._has_methods(owner)):
            return "functions of this library are allowed one by one"
        if not callable(obj) or home != home_of(owner):
            return f"it is no method of `{name.rpartition('.')[0]}`"
        return ""


def _is_of_a_library(cls: type) -> bool:
    """Whether a class is one of those that every file may name."""
    root, kind = root_of(home_of(cls)), kind_of(cls)
    if root in ECOSYSTEM and kind in ("module", "namedtuple", "placeholder", "enum"):
        return True
    if root in ECOSYSTEM and issubclass(cls, eqx.Enumeration):
        return True
    if root == "optax" and kind == "namedtuple":
        return True
    return _is_one_of(cls, INSTANCES)


def _is_one_of(cls: type, names: frozenset[str]) -> bool:
    """Whether a class is what one of some names leads to."""
    root = root_of(home_of(cls))
    return any(root_of(name) == root and _find_or_none(name) is cls for name in names)


def _is_public(method: str) -> bool:
    return method == "__call__" or not method.startswith("_")


def root_of(name: str) -> str:
    """The top-level package of a name or a module."""
    return name.partition(":")[0].partition(".")[0]


def trust(*trusted: Trusted) -> None:
    """Allows every file that this process loads to name some classes, functions or packages.

    Args:
        *trusted: classes; functions; names such as `"my_models:Encoder"`; packages such as `"my_models"`, which stands
            for the classes and functions defined in it. `"__main__"` stands for the running program.

    Raises:
        ValueError: if a text is neither a name nor a package, or a package is part of Python's standard library.
        TypeError: if something else is given.

    Limitations: there is no way to take trust back. Prefer `trusted=` of a single call where you can. The functions of
    the libraries that sharedtree knows are allowed one by one; to name the library allows no more of them, but then
    it may come from wherever Python finds it, and not only from where it is installed. Of classes, `"flax"` allows
    the layers, variables, metrics and graph definitions of Flax NNX.

    Example:
        >>> import collections, sharedtree.serialise.trust._trust as t
        >>> Point = collections.namedtuple("Point", "x y", module="shapes")
        >>> t.trust(Point)
        >>> t.Trust().allows("shapes:Point", "class")
        True
    """
    entries = _entries(trusted)
    with _lock:
        _process_wide.extend(entries)


_lock = threading.Lock()
_process_wide: list[Any] = []  # only read and changed under `_lock`


def _entries(trusted: Any) -> list[Any]:
    if isinstance(trusted, str | type) or (callable(trusted) and not isinstance(trusted, Iterable)):
        trusted = (trusted,)
    entries = list(trusted)
    for entry in entries:
        if isinstance(entry, str):
            _check_text(entry)
        elif not callable(entry):
            raise TypeError(
                f"`{entry!r}` is a `{type(entry).__name__}`, and cannot be trusted. Give a class, a function, a name "
                'such as `"my_models:Encoder"`, or a package such as `"my_models"`.'
            )
    return entries


def _check_text(text: str) -> None:
    module, colon, qualname = text.partition(":")
    if not all(part.isidentifier() for part in [*module.split("."), *(qualname.split(".") if colon else [])]):
        raise ValueError(
            f'`"{printable(text)}"` is neither a package (`"my_models"`) nor a name (`"my_models:Encoder"`).'
        )
    if not colon and module.partition(".")[0] in STANDARD_LIBRARY:
        raise ValueError(
            f"`{module}` is part of Python's standard library, which cannot be trusted as a whole: a file could then "
            "name any function of it. Name the classes one by one:\n"
            f'    trusted=["{module}:SomeClass"]'
        )


def _former_names_of(obj: Any) -> tuple[str, ...]:
    names = type.__getattribute__(obj, "__dict__").get("__sharedtree_names__", ()) if isinstance(obj, type) else ()
    return (names,) if isinstance(names, str) else tuple(names)


def _is_inside(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def _find_or_none(name: str) -> Any:
    try:
        return find(name) if is_well_formed(name) else None
    except LookupError:
        return None
