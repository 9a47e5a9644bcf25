"""What is written by its name, and what cannot be written at all.

A name says where code lies. Under the name of a function that holds a weight, in a closure cell say, no weight would be
written, and whoever looks the name up gets a weight of their own. So an object is searched before it becomes a name:

    def scaled(w):
        def scale(x):
            return w * x
        return scale

    held_array(scaled(jnp.ones(3)))  # Held("closure cell `w`", is_array=True)

What is code is no part of an object: globals, modules, and classes with their attributes.
"""

import collections
import contextlib
import functools
import itertools
import json
import re
import textwrap
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
    import_name,
    is_in_site_packages,
    name_of,
    root_of,
    verified_name_of,
)

# The packages whose callable objects are functions: compiled, cached, or with a derivative of their own.
_OF_FUNCTIONS = PACKAGES | NAMES_ONLY | {"builtins", "functools"}


class Named:
    """The classes and functions that one tree is written with.

    Attributes:
        objects: each by its name.
        main: the module that the running program is to others, once a name of it was written.
    """

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.main: str | None = None
        self._atoms: IdentityDict[list[str]] = IdentityDict()
        self._tokens: dict[type, str | None] = {}  # of classes of modules: the name of the object that stands for it

    def atom(self, tag: str, obj: Any, name: str | None = None) -> list[str]:
        """What is written for an object, by its name."""
        atom = self._atoms.get(obj)
        if atom is None:
            name = self.add(obj, name)
            atom = self._atoms[obj] = [tag, name]
        return atom

    def add(self, obj: Any, name: str | None = None) -> str:
        """Notes that an object is written by its name, and returns that as others have it. Raises `NamelessError`."""
        name = name or name_of(obj)
        if name.startswith(f"{MAIN}:") and self._program is not None:
            self.main = self._program
            name = self.main + name.removeprefix(MAIN)
        self.objects[name] = obj
        return name

    @functools.cached_property
    def _program(self) -> str | None:
        return import_name()

    def atom_of_module(self, obj: Any) -> list[str] | None:
        """What is written for a module of Equinox that is a name; None if it is to be taken apart.

        One may have taken the place of the function that it wraps, as with `@equinox.filter_jit`. Then the module has
        the name, which its function has not. What else has a `__qualname__` has it from what it wraps. Others stand for
        a choice, and are all in their class: lineax makes a class for each, to which no name leads, but to an instance.
        """
        known = self._atoms.get(obj)
        attributes = object.__getattribute__(obj, "__dict__")
        if known is not None or (
            "__qualname__" in attributes and verified_name_of(obj) is not None and not held_array(obj)
        ):
            return known or self.atom("function", obj, verified_name_of(obj))
        cls = type(obj)
        if cls not in self._tokens:
            self._tokens[cls] = None if attributes or verified_name_of(cls) is not None else _token_of(cls)
        name = self._tokens[cls]
        if name is None:
            return None
        return self._atoms.setdefault(obj, self.atom("function", find(name), name))

    def atom_of_function(self, obj: Any) -> list[str]:
        """What is written for an object of no class that is known. Raises `RefusalError` if its name is not enough."""
        known = self._atoms.get(obj)
        if known is not None:
            return known
        try:
            name = name_of(obj)
        except NamelessError as error:
            if not callable(obj) or _is_instance_of_own_class(obj):
                raise _refusal_of(obj, type(obj)) from error
            require_no_array(obj)
            raise
        # Nothing is lost with a name: an instance of a user's class may hold data, and nobody would notice.
        if name not in FUNCTIONS and not (callable(obj) and root_of(type(obj).__module__) in _OF_FUNCTIONS):
            raise _refusal_of(obj, type(obj))
        require_no_array(obj)
        return self.atom("function", obj, name)


def _token_of(cls: type) -> str | None:
    """The name of an object of the very class, of those that stand for a choice."""
    for name in TOKENS:
        with contextlib.suppress(LookupError):
            if type(find(name)) is cls:
                return name
    return None


def _is_instance_of_own_class(obj: Any) -> bool:
    if isinstance(obj, types.GenericAlias):  # `list[int]` passes on the name of `list`
        return True
    return not isinstance(obj, types.FunctionType | types.BuiltinFunctionType) and not hasattr(obj, "__qualname__")


# --- what holds an array ----------------------------------------------------------------------------------------------

# How many objects are looked at. Nobody knows what one holds that leads to more.
MAX_OBJECTS = 10_000
_HOLD_NOTHING = frozenset({bool, int, float, complex, str, bytes, type(None), types.CodeType, types.FrameType})
_CONTAINERS = (types.CellType, tuple, dict, list, types.MappingProxyType, set, frozenset, collections.deque)


class Held(NamedTuple):
    """The nearest array that an object holds; or if there were too many objects, the first that was not looked at."""

    way: str
    is_array: bool


def held_array(obj: Any) -> Held | None:
    """The nearest array that an object, which is none itself, holds. Of classes only flatten functions are called."""
    found: list[tuple[Any, int, str]] = [(obj, -1, "")]
    for part in reached(found):
        if part is not obj and (is_array(type(part)) or issubclass(type(part), jax.Ref)):
            return Held(_way(found), True)
    return Held(_way(found), False) if len(found) > MAX_OBJECTS else None


def reached(found: list[tuple[Any, int, str]]) -> Iterator[Any]:
    """The first of `found`, and what it holds, the nearest first: some more than `MAX_OBJECTS` at most.

    It adds each to `found`, with the number of what holds it and what leads to it.
    """
    seen = IdentitySet([found[0][0]])
    yield found[0][0]
    for number, (holder, _, _) in enumerate(found):  # it grows meanwhile
        for step, part in _parts_of(holder, type(holder)):
            cls = type(part)
            if cls in _HOLD_NOTHING or issubclass(cls, type | types.ModuleType) or not seen.add(part):
                continue
            found.append((part, number, step))
            yield part
            if len(found) > MAX_OBJECTS:
                return


def require_no_array(obj: Any) -> None:
    """Raises a `RefusalError` if a name must not stand for an object, which holds an array or too much to look at."""
    held = held_array(obj)
    if held is None:
        return
    said = getattr(obj, "__qualname__", None)
    what = f"`{said}`, a function" if isinstance(said, str) else f"a `{type(obj).__qualname__}`, used as a function"
    too_much = f"an array ({held.way}), and only a name would be written, without the array"
    if not held.is_array:
        too_much = f"more than {MAX_OBJECTS:,} objects, which may be arrays ({held.way})"
    raise RefusalError(
        f"{what} that holds {too_much}",
        "Make it a field: hold it in an `equinox.Module` whose `__call__` does what the function does. Or hand it over "
        "as an argument, with `functools.partial`.",
    )


def _way(found: list[tuple[Any, int, str]]) -> str:
    steps: list[str] = []
    number = len(found) - 1
    while number > 0:
        _, number, step = found[number]
        steps.append(step)
    first = steps[::-1][:8]
    return " → ".join(first if len(first) == len(steps) else [*first, "..."])


def _parts_of(obj: Any, cls: type) -> Iterable[tuple[str, Any]]:
    """What an object holds, and before each part what leads to it, for people."""
    if issubclass(cls, types.FunctionType):
        return _parts_of_function(obj)
    if issubclass(cls, FunctionTransform):  # what else it has are caches
        return ("attribute `__wrapped__`", obj.__wrapped__), ("its options", obj.options)
    inside = _parts_of_container(obj, cls) if issubclass(cls, _CONTAINERS) else ()
    return itertools.chain(inside, _attributes_of(obj, cls), _children(obj))


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        yield from ((f"closure cell `{name}`", part) for _, part in _parts_of_container(cell, types.CellType))
    # The last of them belongs to the last argument. Who sets `__defaults__` may set too many.
    names = reversed(code.co_varnames[: code.co_argcount])
    defaults = itertools.zip_longest(names, reversed(function.__defaults__ or ()))
    for name, part in itertools.chain(defaults, (function.__kwdefaults__ or {}).items()):
        yield f"default of `{name}`", part
    yield from ((f"attribute `{name}`", part) for name, part in list(function.__dict__.items()))


def _parts_of_container(obj: Any, cls: type) -> Iterator[tuple[str, Any]]:
    """What is in a container, past what a subclass does."""
    base: Any = next(base for base in _CONTAINERS if issubclass(cls, base))
    if base is types.CellType:
        with contextlib.suppress(ValueError):  # empty
            yield "cell", obj.cell_contents
    elif base in (dict, types.MappingProxyType):
        for key, value in list(base.items(obj)):
            yield "a key", key
            yield f"[{key!r}]" if type(key) is str and len(key) < 40 else "a value", value
    else:
        yield from [(f"[{i}]", item) for i, item in enumerate(base.__iter__(obj))]


def _attributes_of(obj: Any, cls: type) -> Iterator[tuple[str, Any]]:
    for base in type.__getattribute__(cls, "__mro__"):
        for name, there in type.__getattribute__(base, "__dict__").items():
            if type(there) is types.MemberDescriptorType:  # a slot; of types written in C, what they hold
                try:
                    yield f"attribute `{name}`", there.__get__(obj)
                except AttributeError:  # never set
                    continue
            elif name in ("__dict__", "__self__") and type(there) is types.GetSetDescriptorType:
                value = there.__get__(obj)
                if name == "__self__":
                    yield "attribute `__self__`", value
                elif type(value) is dict:
                    yield from ((f"attribute `{key}`", part) for key, part in list(value.items()))


def _children(obj: Any) -> Iterator[tuple[str, Any]]:
    """What a registered class says that its instances hold."""
    try:
        node_type = node_type_of(obj)
        if node_type is None or node_type.is_plain or node_type.fields:
            return
        children, aux = node_type.take_apart(obj)
        parts = [*((f"child {i}", child) for i, child in enumerate(children)), ("auxiliary data", aux)]
    except Exception:  # noqa: BLE001 -- the class's own code may raise anything, and the attributes were looked at
        return
    yield from parts


# --- what cannot be written -------------------------------------------------------------------------------------------


class Problem(NamedTuple):
    """One object that cannot be written."""

    path: str
    reason: str
    fix: str
    is_made_anew: bool = False  # whether a library makes it, so that its user can have another one


def _refusal_of(obj: Any, cls: Any) -> RefusalError:
    """Why an object of an unknown class cannot be written."""
    name = f"{cls.__module__}.{cls.__qualname__}"
    if isinstance(obj, dict | list | tuple | set | frozenset | str | bytes | int | float | complex):
        base = next(b.__name__ for b in cls.__mro__ if b.__module__ == "builtins")
        return RefusalError(f"a `{name}`, a subclass of `{base}`", f"Make it a plain one: `{base}(...)`.")
    if isinstance(obj, jex_core.Jaxpr | jex_core.ClosedJaxpr):  # pyright: ignore[reportPrivateImportUsage]
        return RefusalError(
            "a function that JAX has traced (a jaxpr), which has no form that lasts",
            "Keep the function itself, and trace it again after loading.",
        )
    if isinstance(obj, types.ModuleType):
        return RefusalError("a module of Python", "Leave it out, and import it where it is used.")
    if name.startswith("flax.") and cls.__name__ == "HashableMapping":  # those of a flax that is known are no problem
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
    """The refusal of an object, which or the holders of which, the root first, may be of another's library.

    Who wrote a class can make it a dataclass, and who wrote a closure can make what it holds a field. Who only uses
    them can save what the model has of its own, its arrays, and put that into a model that the library makes anew.
    """
    state = loaded("flax.training.train_state", "TrainState")
    if state is not None and any(isinstance(holder, state) for holder in holders):
        return Problem(path, error.reason, _TRAIN_STATE)
    variable = loaded("penzai.core.variables", "Parameter")
    if variable is not None and isinstance(obj, variable):
        return Problem(path, error.reason, _PENZAI)
    is_function = isinstance(obj, types.FunctionType)
    library = root_of(home_of(obj if is_function else type(obj)))
    # What is said of the classes of libraries that are known is said to their users.
    if not is_in_site_packages(library) or (library in PACKAGES | NAMES_ONLY and not is_function):
        return Problem(path, error.reason, error.fix)
    fix = f"It is made by `{library}`."
    if not holders:  # nothing is left of the tree without it, and `sharedtree.tree` sees no array in it
        fix = (
            f"It is made by `{library}`, and JAX sees nothing of what it holds. Save the arrays that `{library}` gives "
            "of it, in a dictionary, say, and put them into one that is made anew, as that library's guide says."
        )
    return Problem(path, error.reason, fix, is_made_anew=True)


_MOST_LEFT_OUT = 20


def unserialisable(problems: list[Problem], can_leave_out: Callable[[list[str]], int | None]) -> UnserialisableError:
    """One error for everything that cannot be written.

    `can_leave_out` tells of entries of `leave_out` how many values they leave out, or None if a tree without those
    cannot be written either.
    """
    count = "One object" if len(problems) == 1 else f"{len(problems)} objects"
    lines = [f"{count} in the tree cannot be saved, and nothing was written:"]
    facts: dict[str, list[str]] = {}
    for path, reason, fix, _ in problems:
        place = f"`{printable(path)}`" if path else "The tree"
        facts.setdefault(fix, []).append(f"{place} is {printable(reason)}.")
    for fix, told in facts.items():
        lines.append(textwrap.indent("\n".join([*told, f"    {printable(fix)}"]), "    "))
    paths = [problem.path for problem in problems]
    if all(paths) and any(problem.is_made_anew for problem in problems):
        names = [match[1] if (match := _ATTRIBUTE.fullmatch(path)) else path for path in paths]
        ways = [entries for entries in (list(dict.fromkeys(names)), paths) if len(entries) <= _MOST_LEFT_OUT]
        # A name that others have, too, would leave out more than has to be.
        are_paths = all(path[0] in ".[" for path in paths)  # members of sets have none
        entries = next((each for each in ways if are_paths and can_leave_out(each) == len(paths)), None)
        if entries is not None:
            lines += ["Take what cannot be saved from a model that is made anew, with all that it holds:"]
            lines += [f"    sharedtree.save(path, model, leave_out=[{', '.join(map(_in_code, entries))}])"]
            lines += ["    model = sharedtree.load(path, like=model)"]
        lines += ["Save only the arrays that JAX sees, and put them into a model that is made anew:"]
        lines += ["    sharedtree.save(path, sharedtree.tree.leaves(model))"]
        lines += ["    model = sharedtree.tree.unflatten(sharedtree.tree.structure(model), sharedtree.load(path))"]
    return UnserialisableError("\n".join(lines), paths, [p.reason for p in problems])


_ATTRIBUTE = re.compile(r".*\.([^\W\d]\w*)", re.DOTALL)


def _in_code(entry: str) -> str:
    return printable(json.dumps(entry, ensure_ascii=False))
