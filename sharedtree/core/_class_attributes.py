"""Reads attributes of classes and modules without running code, and finds public names that lead to an object.

Everything is read from `__dict__`: no metaclass, no descriptor and no `__getattr__` of a lazy module is called, and
nothing is imported.

A *name* is `module:qualname`: `equinox.nn:Linear`, `__main__:Model`, `pkg.mod:Outer.Inner`. Objects are not believed
when they state their own name: `jax.nn.relu` says that it is from a private module of JAX, and the default activation
of `equinox.nn.MLP` says that it is `<lambda>`. A name counts only if looking it up gives the very object. Among several
such names the public and short one is taken: `jax.nn:relu`.
"""

import dataclasses
import sys
import types
from collections.abc import Iterable, Mapping
from typing import Any

ABSENT: Any = object()
"""Returned by `inherited` for a name that no class has."""


def inherited(cls: type, name: str) -> Any:
    """Returns an attribute as it is in the `__dict__` of the class, or of the first base to have it; else `ABSENT`."""
    return next((base.__dict__[name] for base in cls.__mro__ if name in base.__dict__), ABSENT)


def is_data_descriptor(value: Any) -> bool:
    """Returns True for a class attribute that takes precedence over an instance attribute of the same name."""
    return hasattr(type(value), "__set__") or hasattr(type(value), "__delete__")


def dataclass_fields(cls: Any) -> tuple[dataclasses.Field[Any], ...]:
    """Returns the fields of a dataclass, in order, without `ClassVar`s and `InitVar`s; `()` for any other class."""
    return dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()


def dataclass_entries(cls: Any) -> dict[str, dataclasses.Field[Any]]:
    """Returns name → field of a dataclass, `ClassVar`s and `InitVar`s included; empty for any other class."""
    return getattr(cls, "__dataclass_fields__", {})


# The flag `Py_TPFLAGS_HEAPTYPE`, which `copyreg` tests for the same purpose.
_DEFINED_IN_PYTHON = 1 << 9


def built_in_base(cls: type) -> type:
    """Returns the first class in the `__mro__` that is not defined in Python, such as `object` or `tuple`.

    It determines the memory layout of the instances.
    """
    return next(base for base in cls.__mro__ if not base.__flags__ & _DEFINED_IN_PYTHON)


def dict_descriptor(cls: type) -> Any:
    """Returns the descriptor with which to read and set the `__dict__` of instances.

    It bypasses the `__getattribute__` and `__setattr__` of the class, which on Equinox modules take four times longer.

    Raises:
        TypeError: If instances have no `__dict__`.
    """
    for base in cls.__mro__:
        descriptor = base.__dict__.get("__dict__")
        if descriptor is not None:
            return descriptor
    raise TypeError(f"`{cls.__qualname__}` has no `__dict__`; Equinox modules must have one.")


def namespace(module: Any) -> Mapping[str, Any]:
    """Returns the dictionary of a module, without running a lazy module's code; empty for any other object."""
    if not isinstance(module, types.ModuleType):
        return {}
    try:
        return object.__getattribute__(module, "__dict__")
    except AttributeError:
        return {}


def loaded(module: str, name: str) -> Any:
    """Returns an attribute of a module; None if it is missing or the module has not been imported.

    A class of a module that nobody has imported has no instances, so `loaded(...) or ()` is safe in `issubclass`.
    """
    return namespace(sys.modules.get(module)).get(name)


_METHODS_OF_TOOLS = frozenset({"_asdict", "for_json", "getdoc", "to_dict", "to_json", "to_numpy", "tolist"})


def is_protocol_name(name: Any) -> bool:
    """Returns True for names that some program looks up as an attribute of any object, to call what it finds.

    Python does so with `__names__`, notebooks with `_repr_html_` and `_ipython_display_`, JSON encoders with `tolist`,
    IPython's `?` with `getdoc`, Matplotlib with `to_numpy`. If the instances of a class may have any attribute, a file
    could put a function under such a name, and the program would call it.
    """
    if type(name) is not str:
        return False
    is_enclosed = name.startswith("_") and name.endswith("_") and name.strip("_") != ""
    return is_enclosed or name in _METHODS_OF_TOOLS or name.startswith(("_repr_", "_ipython_", "__array", "__jax"))


# --- names of objects in modules --------------------------------------------------------------------------------------

MAIN = "__main__"

CHILD = "__mp_main__"
"""The main program's second name in a process spawned by `multiprocessing`. There it is also `__main__`."""

_MISSING: Any = object()


def is_well_formed(name: str) -> bool:
    """Returns True if a text has the form `module:qualname`, whether or not anything has this name."""
    module, colon, qualname = name.partition(":")
    return bool(colon) and all(part.isidentifier() for part in [*module.split("."), *qualname.split(".")])


def root_of(name: str) -> str:
    """Returns the top-level package of a name or a module."""
    return name.partition(":")[0].partition(".")[0]


def is_inside(module: str, package: str) -> bool:
    """Returns True if a module is a package itself, or a part of it."""
    return module == package or module.startswith(package + ".")


def find(name: str) -> Any:
    """Returns the object of a name, read from the dictionaries of the module and the classes on the way.

    Raises:
        LookupError: If the module is not loaded, lacks the name, or something on the way is no class.
    """
    obj = _look_up(name)
    if obj is _MISSING:
        raise LookupError(name)
    return obj


def leads_to(name: str, obj: Any) -> bool:
    """Returns True if looking a name up gives this very object."""
    return _look_up(name) is obj


def verified_name_of(obj: Any) -> str | None:
    """Returns the best name that leads to an object and ends with its `__qualname__`; None if there is none.

    A decorated function is found by its name, even if the decorator made an Equinox module of it. A wrapper that only
    states the name of the function that it wraps is not found, because that name leads to the function. A global
    variable of another name that happens to hold the object does not count.
    """
    qualname = getattr(obj, "__qualname__", None) or getattr(obj, "__name__", None)
    # Lambdas and local functions say `<lambda>` and `<locals>`.
    if not isinstance(qualname, str) or "<" in qualname or isinstance(obj, types.ModuleType):
        return None
    outermost = qualname.partition(".")[0]
    spaces = spaces_of(obj)
    return best_name(obj, [f"{module}:{qualname}" for module, space in spaces.items() if outermost in space])


def namespaces(package: str) -> dict[str, Mapping[str, Any]]:
    """Returns module name → dictionary for the loaded modules of a package, the package included."""
    # A list, since another thread may import something meanwhile.
    modules, prefix = list(sys.modules.items()), package + "."
    inside = [(name, module) for name, module in modules if name == package or name.startswith(prefix)]
    return {name: namespace(module) for name, module in inside}


def home_of(obj: Any) -> str:
    """Returns the object's `__module__`; for most objects this is the module of their class.

    The main program of a spawned process is always `__main__`.
    """
    home = getattr(obj, "__module__", None)
    home = home if isinstance(home, str) else type(obj).__module__
    return MAIN if home == CHILD and sys.modules.get(CHILD) is sys.modules.get(MAIN) else home


def _look_up(name: str) -> Any:
    """Returns the object of a name; `_MISSING` if there is none."""
    module, _, qualname = name.partition(":")
    outermost, *inner_names = qualname.split(".")
    obj = namespace(sys.modules.get(module)).get(outermost, _MISSING)
    for inner_name in inner_names:
        if not isinstance(obj, type):
            return _MISSING
        obj = type.__getattribute__(obj, "__dict__").get(inner_name, _MISSING)
    return obj.__func__ if isinstance(obj, staticmethod) else obj


def spaces_of(obj: Any) -> dict[str, Mapping[str, Any]]:
    """Returns module name → dictionary for the modules that may have a name for an object: those of its package."""
    package = root_of(home_of(obj))
    # The objects of these packages also have names in another package.
    publishers = {"jaxlib": ("jax", "jaxlib"), "posix": ("os", "posix"), "nt": ("os", "nt")}
    spaces: dict[str, Mapping[str, Any]] = {}
    for publisher in publishers.get(package, (package,)):
        spaces.update(namespaces(publisher))
    return spaces


def best_name(obj: Any, names: Iterable[str]) -> str | None:
    """Returns the most public and shortest of the names that lead to an object; None if none does."""
    home = home_of(obj)

    def rank(name: str) -> tuple[int, int, bool, int, str]:
        """Sorts by the number of private parts, then of parts; then the object's own module, the shorter text first."""
        parts = name.replace(":", ".").split(".")
        private = sum(part.startswith("_") and part != MAIN for part in parts)
        return private, len(parts), name.partition(":")[0] != home, len(name), name

    usable = [name for name in names if leads_to(name, obj) and is_well_formed(name)]
    return min(usable, key=rank, default=None)
