"""What stands in a class or a module under a name, as it was written there; and public names, proved by identity.

No metaclass, no descriptor and no `__getattr__` of a lazy module is asked, and nothing is imported.

A *name* is `module:qualname`: `equinox.nn:Linear`, `__main__:Model`, `pkg.mod:Outer.Inner`. What an object says about
itself is not believed: `jax.nn.relu` says it is from a private module of JAX, and the default activation of
`equinox.nn.MLP` says that it is `<lambda>`. A name counts only if looking it up gives the very object. Among the names
that do, the public and short one is taken: `jax.nn:relu`.
"""

import dataclasses
import sys
import types
from collections.abc import Iterable, Mapping
from typing import Any

ABSENT: Any = object()


def inherited(cls: type, name: str) -> Any:
    """What a class has under a name, or the first of its bases that has it; `ABSENT` if none does."""
    return next((base.__dict__[name] for base in cls.__mro__ if name in base.__dict__), ABSENT)


def is_data_descriptor(value: Any) -> bool:
    """Whether a value in a class answers for an attribute even where the instance has one of that name."""
    return hasattr(type(value), "__set__") or hasattr(type(value), "__delete__")


def dataclass_fields(cls: Any) -> tuple[dataclasses.Field[Any], ...]:
    """The fields that the instances of a dataclass have, in order; none if it is no dataclass."""
    return dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()


def dataclass_entries(cls: Any) -> dict[str, dataclasses.Field[Any]]:
    """All that a dataclass declares, by name: what no instance has, too, such as `ClassVar`s; empty if it is none."""
    return getattr(cls, "__dataclass_fields__", {})


_DEFINED_IN_PYTHON = 1 << 9  # `Py_TPFLAGS_HEAPTYPE`, as `copyreg` asks for it


def built_in_base(cls: type) -> type:
    """The first of its bases that was not defined in Python, which determines how its instances are laid out."""
    return next(base for base in cls.__mro__ if not base.__flags__ & _DEFINED_IN_PYTHON)


def dict_descriptor(cls: type) -> Any:
    """Reads and sets `obj.__dict__` past the class's own methods, which on Equinox modules cost four times more."""
    for base in cls.__mro__:
        descriptor = base.__dict__.get("__dict__")
        if descriptor is not None:
            return descriptor
    raise TypeError(f"`{cls.__qualname__}` has no `__dict__`; Equinox modules must have one.")


def namespace(module: Any) -> Mapping[str, Any]:
    """The dictionary of a module, read without running a lazy module's code."""
    if not isinstance(module, types.ModuleType):
        return {}
    try:
        return object.__getattribute__(module, "__dict__")
    except AttributeError:
        return {}


def loaded(module: str, name: str) -> Any:
    """What a module holds under a name; None if it is not loaded, so that nothing can be of it."""
    return namespace(sys.modules.get(module)).get(name)


_ASKED = frozenset({"_asdict", "for_json", "getdoc", "to_dict", "to_json", "to_numpy", "tolist"})


def is_asked_of_all(name: Any) -> bool:
    """Whether programs ask any object for an attribute of this name, and call what they get.

    Python does so with `__names__`, notebooks with `_repr_html_` and `_ipython_display_`, what makes JSON with
    `tolist`, IPython's `?` with `getdoc`, Matplotlib with `to_numpy`. Where a class lets its instances have any
    attribute, a file could put a function there.
    """
    if type(name) is not str:
        return False
    is_enclosed = name.startswith("_") and name.endswith("_") and name.strip("_") != ""
    return is_enclosed or name in _ASKED or name.startswith(("_repr_", "_ipython_", "__array", "__jax"))


# --- names of objects that modules hold -------------------------------------------------------------------------------

MAIN = "__main__"
CHILD = "__mp_main__"
"""What a process that `multiprocessing` has spawned calls the program that spawned it; it is `__main__` there, too."""

_MISSING: Any = object()


def is_well_formed(name: str) -> bool:
    """Whether a text has the form of a name. Says nothing about what it names."""
    module, colon, qualname = name.partition(":")
    return bool(colon) and all(part.isidentifier() for part in [*module.split("."), *qualname.split(".")])


def root_of(name: str) -> str:
    """The top-level package of a name or a module."""
    return name.partition(":")[0].partition(".")[0]


def is_inside(module: str, package: str) -> bool:
    """Whether a module is a package, or a part of it."""
    return module == package or module.startswith(package + ".")


def find(name: str) -> Any:
    """What the dictionary of the module, and then of each class on the way, holds under a name.

    Raises:
        LookupError: if the module is not loaded, or lacks the name, or something on the way is not a class.
    """
    found = _look_up(name)
    if found is _MISSING:
        raise LookupError(name)
    return found


def leads_to(name: str, obj: Any) -> bool:
    """Whether looking a name up gives an object."""
    return _look_up(name) is obj


def verified_name_of(obj: Any) -> str | None:
    """The name that an object says it has, if looking it up gives the object; None if not.

    A decorated function has its name, also if an Equinox module took its place. What wraps something else says the name
    of that, and is not found by it; a global variable that happens to refer to it is no name of its own.
    """
    said = getattr(obj, "__qualname__", None) or getattr(obj, "__name__", None)
    if not isinstance(said, str) or "<" in said or isinstance(obj, types.ModuleType):
        return None
    first = said.partition(".")[0]
    return best_name(obj, [f"{module}:{said}" for module, space in spaces_of(obj).items() if first in space])


def namespaces(package: str) -> dict[str, Mapping[str, Any]]:
    """The dictionaries of the loaded modules of a package, the package included."""
    inside = package + "."
    modules = [(name, each) for name, each in list(sys.modules.items()) if name == package or name.startswith(inside)]
    return {name: namespace(each) for name, each in modules}


def home_of(obj: Any) -> str:
    """The module that an object says it is from; for most objects that of their class. Empty if it does not say."""
    home = getattr(obj, "__module__", None)
    home = home if isinstance(home, str) else type(obj).__module__
    return MAIN if home == CHILD and sys.modules.get(CHILD) is sys.modules.get(MAIN) else home


def _look_up(name: str) -> Any:
    module, _, qualname = name.partition(":")
    first, *rest = qualname.split(".")
    found = namespace(sys.modules.get(module)).get(first, _MISSING)
    for part in rest:
        if not isinstance(found, type):
            return _MISSING
        found = type.__getattribute__(found, "__dict__").get(part, _MISSING)
    return found.__func__ if isinstance(found, staticmethod) else found


def spaces_of(obj: Any) -> dict[str, Mapping[str, Any]]:
    """The dictionaries of the modules that may hold an object."""
    root = root_of(home_of(obj))
    roots = {"jaxlib": ("jax", "jaxlib"), "posix": ("os", "posix"), "nt": ("os", "nt")}.get(root, (root,))
    return {module: space for each in roots for module, space in namespaces(each).items()}


def best_name(obj: Any, names: Iterable[str]) -> str | None:
    """Of the names that lead to an object, the most public and shortest."""
    home = home_of(obj)

    def rank(name: str) -> tuple[int, int, bool, int, str]:
        parts = name.replace(":", ".").split(".")
        private = sum(part.startswith("_") and part != MAIN for part in parts)
        return private, len(parts), name.partition(":")[0] != home, len(name), name

    return min((name for name in names if leads_to(name, obj) and is_well_formed(name)), key=rank, default=None)
