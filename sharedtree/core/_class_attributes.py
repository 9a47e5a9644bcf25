"""Reads attributes of classes and modules without running code, and finds public names that lead to an object.

Everything is read from `__dict__`: no metaclass, no descriptor and no `__getattr__` of a lazy module is called, and
nothing is imported. For the same reason `is_instance` takes the place of `isinstance`, which reads `obj.__class__`:
`importlib.util.LazyLoader` makes modules that are executed when any attribute is read.

A *name* is `module:qualname`: `equinox.nn:Linear`, `__main__:Model`, `pkg.mod:Outer.Inner`. It *leads to* an object if
looking it up gives this very object. Objects are not believed when they state their own name: `jax.nn.relu` says that
it is from a private module of JAX, and the default activation of `equinox.nn.MLP` says that it is `<lambda>`. Among
several names that lead to an object, the public and short one is taken: `jax.nn:relu`.

The *home* of an object is the module that its `__module__` names.
"""

import contextlib
import dataclasses
import sys
import types
from collections.abc import Iterable, Mapping
from typing import Any

ABSENT: Any = object()
"""Returned by `inherited` for a name that no class has."""


def is_instance(obj: Any, cls: type) -> bool:
    """Returns True if an object is an instance of a class, by its type alone. Runs no code of the object."""
    return issubclass(type(obj), cls)


def inherited(cls: type, name: str) -> Any:
    """Returns an attribute as it stands in the `__dict__` of a class, or of the first base with it; else `ABSENT`."""
    return next((base.__dict__[name] for base in cls.__mro__ if name in base.__dict__), ABSENT)


def is_data_descriptor(value: Any) -> bool:
    """Returns True for a class attribute with precedence over an instance attribute of the same name.

    A property is such an attribute, and a method is not.
    """
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

    Instances have the memory layout of this class, and besides perhaps slots and a `__dict__`.
    """
    return next(base for base in cls.__mro__ if not base.__flags__ & _DEFINED_IN_PYTHON)


def dict_descriptor(cls: type) -> Any:
    """Returns the descriptor of the `__dict__` of instances of an Equinox module class.

    `descriptor.__get__(instance)` reads it, and `descriptor.__set__(instance, new_dict)` sets it. This bypasses the
    `__getattribute__` and `__setattr__` of the class. On Equinox modules they take four times longer.

    Raises:
        TypeError: If instances have no `__dict__`.
    """
    for base in cls.__mro__:
        descriptor = base.__dict__.get("__dict__")
        if descriptor is not None:
            return descriptor
    raise TypeError(f"`{cls.__qualname__}` has no `__dict__`; Equinox modules must have one.")


def own_attributes(obj: Any) -> dict[str, Any]:
    """Returns the `__dict__` of an instance; an empty one if it has none.

    This bypasses the `__getattr__` of the class, which may answer for another object. That of a Flax NNX variable
    answers for the value in it: a typed PRNG key has a `__dict__`, and the variable has none.
    """
    try:
        return object.__getattribute__(obj, "__dict__")
    except AttributeError:
        return {}


def namespace(module: Any) -> Mapping[str, Any]:
    """Returns the dictionary of a module, without running the code of a lazy module; an empty one for other objects."""
    if not is_instance(module, types.ModuleType):
        return {}
    try:
        return object.__getattribute__(module, "__dict__")
    except AttributeError:
        return {}


def loaded(module: str, name: str) -> Any:
    """Returns the attribute `name` of a module; None if it is missing, or if the module has not been imported.

    `issubclass(cls, loaded(...) or ())` is False for None. That is right: if nobody has imported the module of a class,
    there are no subclasses.
    """
    return namespace(sys.modules.get(module)).get(name)


_METHODS_OF_TOOLS = frozenset({"_asdict", "for_json", "getdoc", "to_dict", "to_json", "to_numpy", "tolist"})


def is_protocol_name(name: Any) -> bool:
    """Returns True for the name of a protocol: programs look it up on any object, and call the result.

    Python does so with `__names__`, notebooks with `_repr_html_` and `_ipython_display_`, JSON encoders with `tolist`,
    IPython's `?` with `getdoc`, Matplotlib with `to_numpy`. If the instances of a class may have any attribute, a file
    could put a function under such a name, and the program would call it.
    """
    if type(name) is not str:
        return False
    # Underscores on both sides, but not only underscores.
    is_enclosed = name.startswith("_") and name.endswith("_") and name.strip("_") != ""
    return is_enclosed or name in _METHODS_OF_TOOLS or name.startswith(("_repr_", "_ipython_", "__array", "__jax"))


# --- names of objects in modules --------------------------------------------------------------------------------------

MAIN = "__main__"

CHILD = "__mp_main__"
"""Second name of the module `__main__` in a process spawned by `multiprocessing`."""

_MISSING: Any = object()


def is_well_formed(name: str) -> bool:
    """Returns True if a text has the form `module:qualname`, whether or not anything has this name."""
    module, colon, qualname = name.partition(":")
    return bool(colon) and all(part.isidentifier() for part in [*module.split("."), *qualname.split(".")])


def root_of(name: str) -> str:
    """Returns the top-level package of a name, or of a module given by its own name: "jax.nn:relu" → "jax"."""
    return name.partition(":")[0].partition(".")[0]


def is_inside(module: str, package: str) -> bool:
    """Returns True if a module is a package itself, or is inside of the package. Both are given by name."""
    return module == package or module.startswith(package + ".")


def find(name: str) -> Any:
    """Returns the object to which a name leads, read from the dictionaries of the module and of outer classes.

    Raises:
        LookupError: If there is none: the module is not loaded, or something in it is missing or is no class.
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

    For example, in a module of its own:

        @eqx.filter_jit                 a module of Equinox: found, because the name `f` leads to it
        def f(x): ...
        g = functools.wraps(f)(h)       `g` states the name `f`: not found, because the name `f` leads to another object
        k = f                           the name `k` does not count, because it is not the `__qualname__`
    """
    qualname = getattr(obj, "__qualname__", None) or getattr(obj, "__name__", None)
    # Lambdas and local functions say `<lambda>` and `<locals>`.
    if not isinstance(qualname, str) or "<" in qualname or isinstance(obj, types.ModuleType):
        return None
    # For example "Outer.Inner" → "Outer".
    outermost = qualname.partition(".")[0]
    spaces = candidate_namespaces(obj)
    return best_name(obj, [f"{module}:{qualname}" for module, space in spaces.items() if outermost in space])


def namespaces(package: str) -> dict[str, Mapping[str, Any]]:
    """Returns module name → dictionary of the module, for the loaded modules of a package and the package itself."""
    # The list is a copy, because another thread may import something meanwhile.
    modules, prefix = list(sys.modules.items()), package + "."
    inside = [(name, module) for name, module in modules if name == package or name.startswith(prefix)]
    return {name: namespace(module) for name, module in inside}


def home_of(obj: Any) -> str:
    """Returns the home of an object: its `__module__`. Most instances get it from their class.

    For the main program of a spawned process it is always `__main__`, and not `CHILD`. A module has the home of its
    class. Runs no `__getattr__` of a module, and no `__getattribute__` that was written in Python.
    """
    home: Any = None
    if not is_instance(obj, types.ModuleType):
        bases = type.__getattribute__(type(obj), "__mro__")
        namespaces_of_bases = [type.__getattribute__(base, "__dict__") for base in bases]
        reading = next(names["__getattribute__"] for names in namespaces_of_bases if "__getattribute__" in names)
        # The functions in C are different for classes, methods and others. They find `__module__` in dictionaries.
        if not is_instance(reading, types.FunctionType):
            home = getattr(obj, "__module__", None)
        else:
            generic = type.__getattribute__ if is_instance(obj, type) else object.__getattribute__
            with contextlib.suppress(AttributeError):
                home = generic(obj, "__module__")
    home = home if is_instance(home, str) else type(obj).__module__
    return MAIN if home == CHILD and sys.modules.get(CHILD) is sys.modules.get(MAIN) else home


def _look_up(name: str) -> Any:
    """Returns the object to which a name leads; `_MISSING` if there is none."""
    # For example "pkg.mod:Outer.Inner" → "pkg.mod", "Outer", ["Inner"].
    module, _, qualname = name.partition(":")
    outermost, *inner_names = qualname.split(".")
    obj = namespace(sys.modules.get(module)).get(outermost, _MISSING)
    for inner_name in inner_names:
        if not is_instance(obj, type):
            return _MISSING
        obj = type.__getattribute__(obj, "__dict__").get(inner_name, _MISSING)
    # A static method stands in the dictionary of its class as a `staticmethod`, which holds the function.
    return obj.__func__ if is_instance(obj, staticmethod) else obj


def candidate_namespaces(obj: Any) -> dict[str, Mapping[str, Any]]:
    """Returns module name → dictionary, for the loaded modules in which an object may have a name.

    These are the modules of its package. For objects of a few packages, also those of another package: the objects of
    `jaxlib` have their public names in `jax`.
    """
    package = root_of(home_of(obj))
    # Package of an object → the packages in which its objects have names. Objects of any other package have names only
    # in the package itself.
    publishers = {"jaxlib": ("jax", "jaxlib"), "posix": ("os", "posix"), "nt": ("os", "nt")}
    spaces: dict[str, Mapping[str, Any]] = {}
    for publisher in publishers.get(package, (package,)):
        spaces.update(namespaces(publisher))
    return spaces


def best_name(obj: Any, names: Iterable[str]) -> str | None:
    """Returns the most public and shortest one of those names that lead to an object; None if none does."""
    home = home_of(obj)

    def rank(name: str) -> tuple[int, int, bool, int, str]:
        """Returns a sort key: fewer private parts first, then fewer parts, then the home, then the shorter text."""
        parts = name.replace(":", ".").split(".")
        num_private = sum(part.startswith("_") and part != MAIN for part in parts)
        is_elsewhere = name.partition(":")[0] != home
        return num_private, len(parts), is_elsewhere, len(name), name

    usable = [name for name in names if leads_to(name, obj) and is_well_formed(name)]
    return min(usable, key=rank, default=None)
