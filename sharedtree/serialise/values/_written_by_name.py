"""Objects that are written by name, such as functions, and the errors for objects that cannot be written.

A name leads to code, not to data. If a function with a weight in a closure cell were written by its name, the weight
would be lost, and the loaded function would have another weight. So an object is searched for arrays before it is
written by name:

    def scaled(w):
        def scale(x):
            return w * x
        return scale

    find_held_array(scaled(jnp.ones(3)))  # SearchResult("closure cell `w`", is_array=True)

Code is not searched: globals, modules, and classes with their attributes.

A name is `module:qualname`. Its *home* is the module in which the object was defined, and its *root* the top-level
package of the home.

Words: the *parts* of an object are all that it directly holds: items, attributes, closure cells, children. A *token* is
an instance that a library uses as a constant to stand for a choice, and whose class has no name.
"""

import collections
import contextlib
import functools
import itertools
import json
import re
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core as jex_core

from ...core._by_identity import IdentityDict, IdentitySet
from ...core._class_attributes import loaded
from ...core._errors import UnserialisableError
from ...core._node_types import RefusalError, node_type_of
from ...core._printing import printable
from ...transforms._function_transform import FunctionTransform
from ..arrays._placing import is_array
from ..trust._allow_list import FUNCTIONS, NAMES_ONLY, PACKAGES, TOKENS
from ..trust._public_names import (
    MAIN,
    NamelessError,
    find,
    home_of,
    is_in_site_packages,
    name_of,
    program_name,
    root_of,
    verified_name_of,
)

# Packages whose callable objects are functions: compiled, cached, or with custom derivatives.
_PACKAGES_OF_FUNCTIONS = PACKAGES | NAMES_ONLY | {"builtins", "functools"}


class Named:
    """The classes and functions named in the file of one tree.

    Attributes:
        objects: name → class or function.
        main: module name by which other programs import the running program. None as long as the file names nothing in
            it.
    """

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.main: str | None = None
        # Object → the atom that names it.
        self._atoms: IdentityDict[list[str]] = IdentityDict()
        # Class of an Equinox module → name of the token that stands for all its instances. None if there is no token.
        self._token_names: dict[type, str | None] = {}

    def atom(self, tag: str, obj: Any, name: str | None = None) -> list[str]:
        """Returns the atom that names an object, such as `["function", "jax.nn:relu"]`. Adds the name to the file's.

        Args:
            tag: `class` or `function`.
            obj: the object.
            name: its name. Default: found by `name_of`.

        Raises:
            NamelessError: if no name is passed, and no name leads to the object.
        """
        atom = self._atoms.get(obj)
        if atom is None:
            name = self.add(obj, name)
            atom = self._atoms[obj] = [tag, name]
        return atom

    def add(self, obj: Any, name: str | None = None) -> str:
        """Adds an object to the named objects of the file. Returns its name in the file.

        Args:
            obj: the object.
            name: its name. Default: found by `name_of`.

        Raises:
            NamelessError: if no name is passed, and no name leads to the object.
        """
        name = name or name_of(obj)
        # In the running program the module is `__main__`. The file has the name by which other programs can import it.
        if name.startswith(f"{MAIN}:") and self._program is not None:
            self.main = self._program
            name = self.main + name.removeprefix(MAIN)
        self.objects[name] = obj
        return name

    @functools.cached_property
    def _program(self) -> str | None:
        """Module name by which other programs import the running program. None if they cannot import it."""
        return program_name()

    def atom_of_module(self, obj: Any) -> list[str] | None:
        """Returns the atom for an Equinox module written by name. None if it must be taken apart.

        Two sorts of modules are written by name. With `@equinox.filter_jit` and the like, a module takes the place of
        the function that it wraps, so the function's name leads to the module. And some libraries use modules as
        tokens: for each of its tokens, lineax makes a class without a name, and one instance with a name.
        """
        # The first sort: a module in the place of a function. It must hold no array, which its name would lose.
        # `verified_name_of` returns the name that the object has for itself, if this name leads to it, or else None.
        atom = self._atoms.get(obj)
        attributes = object.__getattribute__(obj, "__dict__")
        if atom is not None or (
            "__qualname__" in attributes and verified_name_of(obj) is not None and not find_held_array(obj)
        ):
            return atom or self.atom("function", obj, verified_name_of(obj))
        # The second sort: a token. A module with attributes, or of a class with a name, is no token.
        cls = type(obj)
        if cls not in self._token_names:
            self._token_names[cls] = None if attributes or verified_name_of(cls) is not None else _name_of_token(cls)
        name = self._token_names[cls]
        if name is None:
            return None
        # `obj` may be a copy of the token, made by unflattening. Its atom names the token itself.
        return self._atoms.setdefault(obj, self.atom("function", find(name), name))

    def atom_of_function(self, obj: Any) -> list[str]:
        """Returns the atom for a function, or for another object, neither a node nor a value.

        Raises:
            RefusalError: if no name leads to the object, or if it may hold data lost by the name.
        """
        atom = self._atoms.get(obj)
        if atom is not None:
            return atom
        try:
            name = name_of(obj)
        except NamelessError as error:
            # The two errors after this one are for functions. They say how to keep an array, or how to give a name.
            if not callable(obj) or _is_callable_instance(obj):
                raise _refusal(obj, type(obj)) from error
            require_no_array(obj)
            raise
        # Written by name are functions of `FUNCTIONS`, and callable objects of packages whose callables are functions.
        # An instance of a user's class may hold data, which would be lost without notice.
        if name not in FUNCTIONS and not (callable(obj) and root_of(type(obj).__module__) in _PACKAGES_OF_FUNCTIONS):
            raise _refusal(obj, type(obj))
        require_no_array(obj)
        return self.atom("function", obj, name)


def _name_of_token(cls: type) -> str | None:
    """Returns the name of the token (one of `TOKENS`) whose class is `cls`. None if `cls` is the class of no token."""
    for name in TOKENS:
        # `find` raises if the token's module is not imported, or has no such token.
        with contextlib.suppress(LookupError):
            if type(find(name)) is cls:
                return name
    return None


def _is_callable_instance(obj: Any) -> bool:
    """Returns True if an object is no function and has no `__qualname__`, such as an instance with `__call__`."""
    # `list[int]` has all attributes of `list`, also `__qualname__`, but is no class.
    if isinstance(obj, types.GenericAlias):
        return True
    return not isinstance(obj, types.FunctionType | types.BuiltinFunctionType) and not hasattr(obj, "__qualname__")


# --- the search for arrays (when saving only) -------------------------------------------------------------------------

# Most objects that are searched. An object that leads to more is refused, because the rest may hold arrays.
MAX_OBJECTS = 10_000
_CLASSES_HOLDING_NOTHING = frozenset(
    {bool, int, float, complex, str, bytes, type(None), types.CodeType, types.FrameType}
)
_CONTAINERS = (types.CellType, tuple, dict, list, types.MappingProxyType, set, frozenset, collections.deque)


class SearchResult(NamedTuple):
    """Result of a search that did not end well: it found an array, or gave up after `MAX_OBJECTS` objects.

    Attributes:
        route: the way from the object that was searched to the array, or to the last object before giving up, in words:
            "closure cell `w` → [0]".
        is_array: True if an array was found. False if the search gave up.
    """

    route: str
    is_array: bool


class Reached(NamedTuple):
    """An object reached by a search.

    Attributes:
        part: the object.
        holder: position, in the list of reached objects, of the object around it. -1 for the first object.
        step: place in the holder in words, such as "closure cell `w`". Empty for the first object.
    """

    part: Any
    holder: int
    step: str


def find_held_array(obj: Any) -> SearchResult | None:
    """Searches an object for the nearest array or `jax.Ref` in it. The object itself does not count.

    Of the classes of the objects, only the flatten functions are called.

    Returns:
        The way to the array, or to the place where the search gave up. None if everything in the object
        was searched and there is no array.
    """
    reached = [Reached(obj, -1, "")]
    for part in search(reached):
        # `search` yields each part right after appending it to `reached`, and `_route` describes the way to the last
        # one.
        if part is not obj and (is_array(type(part)) or issubclass(type(part), jax.Ref)):
            return SearchResult(_route(reached), True)
    return SearchResult(_route(reached), False) if len(reached) > MAX_OBJECTS else None


def search(reached: list[Reached]) -> Iterator[Any]:
    """Yields an object and everything in it, the nearest first. Stops after `MAX_OBJECTS` objects.

    Values that hold nothing, such as numbers and texts, classes and modules are not yielded, except as first object.

    Args:
        reached: a list with one item, for the object. An item is appended for each other object before it is yielded.
            The list is longer than `MAX_OBJECTS` if the search has given up.
    """
    visited = IdentitySet([reached[0].part])
    yield reached[0].part
    # The list is also the queue of the search, and grows during the loop.
    for number, (holder, _, _) in enumerate(reached):
        for step, part in _parts_of(holder, type(holder)):
            cls = type(part)
            # `add` returns False if the object was visited before.
            if cls in _CLASSES_HOLDING_NOTHING or issubclass(cls, type | types.ModuleType) or not visited.add(part):
                continue
            reached.append(Reached(part, number, step))
            yield part
            if len(reached) > MAX_OBJECTS:
                return


def require_no_array(obj: Any) -> None:
    """Checks that an object, which is to be written by name, holds no array.

    Args:
        obj: a function, or another callable object.

    Raises:
        RefusalError: if the object holds an array, which its name would lose, or more than `MAX_OBJECTS` objects, of
            which some may be arrays.
    """
    result = find_held_array(obj)
    if result is None:
        return
    qualname = getattr(obj, "__qualname__", None)
    is_function = isinstance(qualname, str)
    noun = f"`{qualname}`, a function" if is_function else f"a `{type(obj).__qualname__}`, used as a function"
    contents = f"an array ({result.route}), and only a name would be written, without the array"
    if not result.is_array:
        contents = f"more than {MAX_OBJECTS:,} objects, which may be arrays ({result.route})"
    raise RefusalError(
        f"{noun} that holds {contents}",
        "Make it a field: hold it in an `equinox.Module` whose `__call__` does what the function does. Or hand it over "
        "as an argument, with `functools.partial`.",
    )


def _route(reached: list[Reached]) -> str:
    """Returns the way from the first to the last of the reached objects in words: "closure cell `w` → [0]".

    Of a longer way, returns the first 8 steps.
    """
    steps: list[str] = []
    number = len(reached) - 1
    while number > 0:
        _, number, step = reached[number]
        steps.append(step)
    # The steps were collected from the last object to the first.
    shown = steps[::-1][:8]
    return " → ".join(shown if len(shown) == len(steps) else [*shown, "..."])


def _parts_of(obj: Any, cls: type) -> Iterable[tuple[str, Any]]:
    """Returns the parts of an object, each as a pair of its place in words, such as "attribute `w`", and the part.

    Args:
        obj: the object.
        cls: its class, `type(obj)`.
    """
    if issubclass(cls, types.FunctionType):
        return _parts_of_function(obj)
    # A function that this library transformed. Its other attributes are caches.
    if issubclass(cls, FunctionTransform):
        return ("attribute `__wrapped__`", obj.__wrapped__), ("its options", obj.options)
    items = _parts_of_container(obj, cls) if issubclass(cls, _CONTAINERS) else ()
    return itertools.chain(items, _parts_in_attributes(obj, cls), _parts_by_flattening(obj))


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yields the objects in a function's closure cells, defaults and attributes: see `_parts_of`."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        yield from ((f"closure cell `{name}`", part) for _, part in _parts_of_container(cell, types.CellType))
    # The last default belongs to the last argument. A program can set more defaults than there are arguments.
    names = reversed(code.co_varnames[: code.co_argcount])
    defaults = itertools.zip_longest(names, reversed(function.__defaults__ or ()))
    for name, part in itertools.chain(defaults, (function.__kwdefaults__ or {}).items()):
        yield f"default of `{name}`", part
    yield from ((f"attribute `{name}`", part) for name, part in list(function.__dict__.items()))


def _parts_of_container(obj: Any, cls: type) -> Iterator[tuple[str, Any]]:
    """Yields the items of a container, and the keys of a mapping: see `_parts_of`.

    They are read by the methods of the built-in class, so that no code of a subclass runs.
    """
    # The built-in class.
    base: Any = next(container for container in _CONTAINERS if issubclass(cls, container))
    if base is types.CellType:
        # An empty cell raises.
        with contextlib.suppress(ValueError):
            yield "cell", obj.cell_contents
    elif base in (dict, types.MappingProxyType):
        for key, value in list(base.items(obj)):
            yield "a key", key
            yield f"[{key!r}]" if type(key) is str and len(key) < 40 else "a value", value
    else:
        yield from [(f"[{i}]", item) for i, item in enumerate(base.__iter__(obj))]


def _parts_in_attributes(obj: Any, cls: type) -> Iterator[tuple[str, Any]]:
    """Yields the attributes in slots and the `__dict__` of an object: see `_parts_of`. No code of its class runs."""
    for base in type.__getattribute__(cls, "__mro__"):
        for name, descriptor in type.__getattribute__(base, "__dict__").items():
            # A slot, or a member of a type written in C. One that was never set raises.
            if type(descriptor) is types.MemberDescriptorType:
                try:
                    yield f"attribute `{name}`", descriptor.__get__(obj)
                except AttributeError:
                    continue
            # `__self__` is the object of a method that is written in C.
            elif name in ("__dict__", "__self__") and type(descriptor) is types.GetSetDescriptorType:
                value = descriptor.__get__(obj)
                if name == "__self__":
                    yield "attribute `__self__`", value
                elif type(value) is dict:
                    yield from ((f"attribute `{key}`", part) for key, part in list(value.items()))


def _parts_by_flattening(obj: Any) -> Iterator[tuple[str, Any]]:
    """Yields the children and the auxiliary data from the flatten function of a registered class.

    Yields nothing for other objects, and nothing if the flatten function raises. Yields nothing for plain containers
    and for instances of classes with fields, because `_parts_of` yields their items and attributes.
    """
    try:
        node_type = node_type_of(obj)
        if node_type is None or node_type.is_plain or node_type.fields:
            return
        children, aux = node_type.take_apart(obj)
        parts = [*((f"child {i}", child) for i, child in enumerate(children)), ("auxiliary data", aux)]
    except Exception:  # noqa: BLE001 -- the class's own code may raise anything, and the attributes were looked at
        return
    yield from parts


# --- objects that cannot be written -----------------------------------------------------------------------------------


class Problem(NamedTuple):
    """An object that cannot be written.

    Attributes:
        path: path of the object. Empty for the root, and for a problem of the whole tree.
        reason: the description of the object, in words to follow "is", such as "a bound method of a `Thread`".
        fix: advice to the user, in sentences. Empty if `unserialisable` has a fix for the whole tree.
        library: name of the library that made the object, and makes another one with each new model. Empty if another
            fix is needed.
    """

    path: str
    reason: str
    fix: str
    library: str = ""


def _refusal(obj: Any, cls: Any) -> RefusalError:
    """Returns the error for an object forbidden in files. Reason and fix depend on its class.

    Args:
        obj: the object.
        cls: its class, `type(obj)`.
    """
    name = f"{cls.__module__}.{cls.__qualname__}"
    if isinstance(obj, dict | list | tuple | set | frozenset | str | bytes | int | float | complex):
        base = next(ancestor.__name__ for ancestor in cls.__mro__ if ancestor.__module__ == "builtins")
        return RefusalError(f"a `{name}`, a subclass of `{base}`", f"Make it a plain one: `{base}(...)`.")
    if isinstance(obj, jex_core.Jaxpr | jex_core.ClosedJaxpr):  # pyright: ignore[reportPrivateImportUsage]
        return RefusalError(
            "a function that JAX has traced (a jaxpr), which has no form that lasts",
            "Keep the function itself, and trace it again after loading.",
        )
    if isinstance(obj, types.ModuleType):
        return RefusalError("a module of Python", "Leave it out, and import it where it is used.")
    # With flax 0.12.1 or newer, such objects are recognised before they get here.
    if name.startswith("flax.") and cls.__name__ == "HashableMapping":
        return RefusalError(
            "part of a module of Flax NNX, and this version of flax keeps those in a way that is not known here",
            "Install flax 0.12.1 or newer: `pip install -U flax`. Or save what the model holds: "
            "`sharedtree.save(path, sharedtree.state(model))`.",
        )
    fix = (
        "If it is data, make its class a dataclass or register it (`jax.tree_util.register_pytree_node`, "
        "`sharedtree.register_node`). A file, a lock, a generator and the like: leave it out."
    )
    if root_of(cls.__module__) in PACKAGES:
        fix = "Leave it out, and make it anew after loading."
    return RefusalError(f"a `{name}`, which cannot be rebuilt without calling it", fix)


# Fixes for objects below a `TrainState` of Flax, and for variables of Penzai.
_TRAIN_STATE = (
    "The functions of a `TrainState` are made by the program. Leave them out, "
    '`sharedtree.save(path, state, leave_out=["apply_fn", "tx"])`, and take them from a new state: '
    "`state = sharedtree.load(path, like=state)`. Or save the rest, "
    '`sharedtree.save(path, {"step": state.step, "params": state.params, "opt_state": state.opt_state})`, and put it '
    "into a new state: `state = state.replace(**sharedtree.load(path))`."
)
_PENZAI = (
    "It is a variable of Penzai, which is changed in place. Save frozen ones, "
    "`sharedtree.save(path, penzai.pz.unbind_params(model, freeze=True))`, and bind them again: "
    "`model, params = sharedtree.load(path, trusted=['penzai'])`, "
    "`model = penzai.pz.bind_variables(model, [each.unfreeze_as_copy() for each in params])`."
)


def problem_at(path: str, holders: Sequence[Any], obj: Any, error: RefusalError) -> Problem:
    """Returns the problem of a refused object, with a fix for the user.

    The fix in `error` is for the author of the object's class or function, who can make the class a dataclass, or use a
    field instead of a closure. If a library has made the object, its user can do neither. But the user can save the
    arrays, and put them into a new model that the library makes.

    Args:
        path: path of the object.
        holders: the objects above it, the root first. Empty for the root.
        obj: the object.
        error: the refusal, with a fix for the author of the object's class.
    """
    state = loaded("flax.training.train_state", "TrainState")
    if state is not None and any(isinstance(holder, state) for holder in holders):
        return Problem(path, error.reason, _TRAIN_STATE)
    variable = loaded("penzai.core.variables", "Parameter")
    if variable is not None and isinstance(obj, variable):
        return Problem(path, error.reason, _PENZAI)
    is_function = isinstance(obj, types.FunctionType)
    library = root_of(home_of(obj if is_function else type(obj)))
    # If the code is the user's own, the user is its author. For libraries that this package knows, `error` has a fix
    # for users already, unless the object is a function.
    if not is_in_site_packages(library) or (library in PACKAGES | NAMES_ONLY and not is_function):
        return Problem(path, error.reason, error.fix)
    fix = ""
    # The object is the whole tree. So nothing remains without it, and `sharedtree.tree` sees no array in it.
    if not holders:
        fix = (
            f"JAX cannot see into it. Save its arrays, which `{library}` can give you, for "
            "example in a dict. To load, make a new one and put the arrays into it, as the library's guide says."
        )
    return Problem(path, error.reason, fix, library)


_MOST_LEFT_OUT = 20
"""Most entries of `leave_out` that an error offers as a fix."""


def unserialisable(problems: list[Problem], can_leave_out: Callable[[list[str]], int | None]) -> UnserialisableError:
    """Returns one error for all refused objects.

    Args:
        problems: the objects, at least one.
        can_leave_out: entries of `leave_out` → number of values that they leave out of the tree, or None if the rest of
            the tree cannot be written even then. Each call walks over the tree.
    """
    count = "One object" if len(problems) == 1 else f"{len(problems)} objects"
    lines = [f"{count} in the tree cannot be saved, and nothing was written:"]
    # Objects with the same fix are listed together.
    reasons_by_fix: dict[str, list[str]] = {}
    for problem in problems:
        place = f"`{printable(problem.path)}`" if problem.path else "The tree"
        maker = f", made by `{problem.library}`" if problem.library else ""
        reasons_by_fix.setdefault(problem.fix, []).append(f"{place} is {printable(problem.reason)}{maker}.")
    for fix, reasons in reasons_by_fix.items():
        lines += [f"    {reason}" for reason in reasons]
        lines += [f"        {printable(fix)}"] if fix else []
    paths = [problem.path for problem in problems]
    if all(paths) and any(problem.library for problem in problems):
        # `leave_out` is offered if names of attributes leave out these objects and nothing more. If not, because other
        # objects have an attribute of the same name, paths are tried: "[0].act" → "act", else "[0].act". Members of
        # sets have steps such as "{0}", which no entry can have.
        names = [match[1] if (match := _ATTRIBUTE.fullmatch(path)) else path for path in paths]
        candidates = [entries for entries in (list(dict.fromkeys(names)), paths) if len(entries) <= _MOST_LEFT_OUT]
        are_paths = all(path[0] in ".[" for path in paths)
        entries_that_suffice = (entries for entries in candidates if are_paths and can_leave_out(entries) == len(paths))
        entries = next(entries_that_suffice, None)
        if entries is not None:
            lines += ["Leave this out of the file, and take it from a model that is made anew:"]
            lines += [f"    sharedtree.save(path, model, leave_out=[{', '.join(map(_in_code, entries))}])"]
            lines += ["    model = sharedtree.load(path, like=model)"]
        lines += ["Or save only the arrays, and put them into a model that is made anew:"]
        lines += ["    sharedtree.save(path, sharedtree.tree.leaves(model))"]
        lines += ["    model = sharedtree.tree.unflatten(sharedtree.tree.structure(model), sharedtree.load(path))"]
    return UnserialisableError("\n".join(lines), paths, [p.reason for p in problems])


# A path that ends in an attribute, and the name of this attribute.
_ATTRIBUTE = re.compile(r".*\.([^\W\d]\w*)", re.DOTALL)


def _in_code(entry: str) -> str:
    """Returns an entry of `leave_out` as a string in code."""
    return printable(json.dumps(entry, ensure_ascii=False))
