"""A gradient that lacks a part, because the function has the module that is differentiated in another way, too.

    def loss(model, x):
        return model(x).sum() + penalty(net)        # `net` is the model: the penalty has no gradient

    st.grad(loss)(net, x)

What a function closes over is no argument, so inside there are two objects. JAX takes the second for a constant, which
is often meant (a frozen copy to stay close to) and often not, so it is said. Only what is held directly counts, in a
closure, a global variable, a default, a partial, or as the object of a method: what these hold may be anything, such as
a trainer.

Under `st.jit(st.grad(loss))(net, x)` the gradient's argument is what `jit` has made of `net`. So what the functions
that are being traced were given is kept beside what their callers gave.
"""

import collections
import contextlib
import dis
import functools
import inspect
import re
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
from jax import tree_util as jtu
from jax.core import Tracer

from ...core._by_identity import IdentityDict, IdentitySet
from ...core._errors import SharedTreeError
from ...core._jax_internals import belongs_to
from ...core._node_types import is_module, node_type_of
from ...core._pack_and_unpack import Rules, walked
from ...core._trees_taken_apart import Walked
from ...core._warning_source import report_untied
from ...ties._policy_and_context import Policy
from .._argument_names import Names
from .._caller_side import Call

_handed_over: ContextVar[tuple[tuple[Walked, Walked], ...]] = ContextVar("handed_over", default=())
"""Of each function that is being traced, the outermost first: what its caller gave, and what the function got."""


@contextlib.contextmanager
def handing_over(given: Walked, got: Walked) -> Iterator[None]:
    """For as long as a function is traced, knows what it got for each object that its caller gave, by their numbers."""
    token = _handed_over.set((*_handed_over.get(), (given, got)))
    try:
        yield
    finally:
        _handed_over.reset(token)


def _forms_of(module: Any) -> list[Any]:
    """A module, and what became of it in each function that is being traced and was given it."""
    forms = [module]
    for given, got in _handed_over.get():
        same = zip(given.objects, got.objects, strict=True)
        forms += [inside for outside, inside in same if any(outside is form for form in forms)]
    return forms


class _Held(NamedTuple):
    """A module that a function has besides its arguments.

    Attributes:
        module: the module.
        name: what it is called there.
        where: how the function has it, in words.
        untied: code by which the function gets another one, with a hole for what the argument is called. Without such
            code, the argument gets another one.
    """

    module: Any
    name: str
    where: str
    untied: str


def report_closed_over(
    function: Callable[..., Any], call: Call, differentiated: Collection[int], names: Names, policy: Policy
) -> None:
    """Warns if the function holds a module that is differentiated as an argument.

    Args:
        function: the user's.
        call: of the transform.
        differentiated: the leaves that are, by their numbers.
        names: of the function.
        policy: what to do.

    Raises:
        UntiedError: under `Policy(on_untie="error")`.

    Cost: a look at each cell, default and global variable; only if one is a module, a look at each object of the call
        and of those around it.
    """
    if policy.on_untie == "ignore":
        return
    tree = call.tree
    for held in _held_by(function, len(call.arguments.args), call.arguments.kwargs):
        forms = _forms_of(held.module)
        numbers = [number for number, obj in enumerate(tree.objects) if any(obj is form for form in forms)]
        if not any(not tree.below(number).reached.isdisjoint(differentiated) for number in numbers):
            continue
        path = tree.text(numbers[0])
        what = (
            f"`{path}` is differentiated, and it is the very `{type(held.module).__name__}` that the function has "
            f"{held.where}. That is no argument, so inside they are two, and the gradient lacks what flows through the "
            "second."
        )
        whose, root = ("the function", path) if held.untied else ("the argument", re.split(r"[.[]", path)[0])
        fix = (
            f"Use `{path}` in its place, so that the gradient is whole. If it is a constant, give {whose} objects of "
            f"its own:\n    {(held.untied or '{0} = sharedtree.copy({0})').format(root)}"
        )
        report_untied(policy.on_untie, names.definition, what, fix, (path,), verb="cut")


def _held_by(function: Any, num_args: int, keywords: Collection[str]) -> Iterator[_Held]:
    """The modules that a function holds directly, through partials, methods and wrappers.

    Args:
        function: the user's.
        num_args: how many arguments it is called with by position.
        keywords: the names of the others.
    """
    keywords = set(keywords)
    seen: list[Any] = []
    while not any(function is known for known in seen):
        seen.append(function)
        if isinstance(function, functools.partial):
            for i, value in enumerate(function.args):
                if is_module(value):
                    parts = [f"f.args[{place}]" for place in range(len(function.args))]
                    parts[i] = "sharedtree.untie({})"
                    parts += ["**f.keywords"] if function.keywords else []
                    code = f"f = functools.partial(f.func, {', '.join(parts)})"
                    yield _Held(value, f"args[{i}]", f"as argument {i} of a partial", code)
            for name, value in function.keywords.items():
                if is_module(value) and name not in keywords:
                    code = f"f = functools.partial(f, {name}=sharedtree.untie({{}}))"
                    yield _Held(value, name, f"as `{name}` of a partial", code)
            num_args += len(function.args)
            keywords |= set(function.keywords)
            function = function.func
        elif isinstance(function, types.MethodType) or _is_method_of_equinox(function):
            if is_module(function.__self__):
                code = f"f = sharedtree.untie({{}}).{function.__func__.__name__}"
                yield _Held(function.__self__, "self", "as the object of the method", code)
            num_args += 1
            function = function.__func__
        elif isinstance(function, types.FunctionType):
            yield from _in_function(function, num_args, keywords)
            yield from _in_globals(function)
            function = function.__dict__.get("__wrapped__", function)
        elif is_module(function) and not hasattr(type(function), "__wrapped__"):
            yield _Held(function, "self", "as what is called", "f = sharedtree.untie({})")
            function = inspect.getattr_static(type(function), "__call__", function)
            num_args += 1
        else:  # a transform with identities preserved, for one
            wrapped = inspect.getattr_static(function, "__wrapped__", None)
            function = function if wrapped is None else getattr(function, "__wrapped__", function)


def _in_globals(function: types.FunctionType) -> Iterator[_Held]:
    """The modules in global variables that a function reads, also in functions that are written in it."""
    codes = [function.__code__]
    for code in codes:
        codes += [part for part in code.co_consts if isinstance(part, types.CodeType)]
        # Attributes are among the names, too, and to tell them apart takes longer than to look.
        modules = {name: function.__globals__.get(name) for name in code.co_names}
        modules = {name: value for name, value in modules.items() if value is not None and is_module(value)}
        if modules:
            read = {each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}
            for name in [name for name in modules if name in read]:
                yield _Held(modules[name], name, f"as the global variable `{name}`", "")


def _is_method_of_equinox(function: Any) -> bool:
    """Whether this is what Equinox makes of a method of a module: a module itself."""
    return is_module(function) and {"__self__", "__func__"} <= getattr(function, "__dict__", {}).keys()


def _in_function(function: types.FunctionType, num_args: int, keywords: Collection[str]) -> Iterator[_Held]:
    """The modules in the closure of a function, and in the defaults that the call leaves as they are."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        if is_module(value):
            yield _Held(value, name, f"as `{name}` in its closure", f"{name} = sharedtree.untie({{}})")
    defaults = function.__defaults__ or ()
    positional = code.co_varnames[: code.co_argcount]
    by_name = dict(zip(positional[len(positional) - len(defaults) :], defaults, strict=True))
    by_name = {name: value for name, value in by_name.items() if name not in positional[:num_args]}
    for name, value in (by_name | (function.__kwdefaults__ or {})).items():
        if is_module(value) and name not in keywords:
            code = f"f = functools.partial(f, {name}=sharedtree.untie({{}}))"
            yield _Held(value, name, f"as the default of `{name}`", code)


# --- what is assigned to such a module --------------------------------------------------------------------------------


class Leak(NamedTuple):
    """Tracers that a function left in a module that is no argument.

    Attributes:
        paths: where, as code: `counter.calls`.
        is_scratch: whether nothing traced was there before, as with an activation that is kept to be looked at.
        where: how the function has the module, in words.
        is_bound: whether the function is the module itself, or a method of it.
    """

    paths: tuple[str, ...]
    is_scratch: bool
    where: str
    is_bound: bool


class HeldState:
    """What is in the modules that a function holds, so that it can be put back if tracers were assigned to them.

    Only of modules whose library writes changes back; those of NNX raise before it comes to that. A function may assign
    what it likes to others, as it may under JAX's transforms.

    Args:
        function: the user's.
        num_args: how many arguments it is called with by position.
        keywords: the names of the others.
        rules: of the transform.

    Cost: for each trace, a look at each cell, default and global variable, and a walk over the modules that count.
    """

    def __init__(self, function: Any, num_args: int, keywords: Collection[str], rules: Rules) -> None:
        self._rules = rules
        self._held: list[tuple[_Held, Walked]] = []
        self._contents: IdentityDict[Any] = IdentityDict()
        for held in _held_by(function, num_args, keywords) if _may_hold(function) else ():
            if not _keeps_tracers(held.module) or any(held.module is other.module for other, _ in self._held):
                continue
            try:
                tree = walked(held.module, rules)
            except SharedTreeError:  # JAX is not asked to take it apart, so what is wrong with it does no harm
                continue
            self._held.append((held, tree))
            for obj in tree.objects:
                if node_type_of(obj) is not None and obj not in self._contents:
                    self._contents[obj] = _content_of(obj)

    def put_back(self, outer: Sequence[Any], result: Any = None) -> list[Leak]:
        """Puts back what was in the modules, where the function has left a tracer of its own trace.

        Args:
            outer: the traces around the function's.
            result: what it returned. If a module is in it, it is left as it is, for its leaves are yet to be read.

        Returns:
            What was left there.
        """
        leaks = [leak for held, before in self._held if (leak := self._leak(held, before, outer)) is not None]
        if leaks:
            try:
                returned = walked(result, self._rules).objects
            except SharedTreeError:  # it is an error where the result is packed
                returned = ()
            if any(obj in self._contents for obj in returned):
                return []
            for obj, content in self._contents.items():
                _put_back(obj, content)
        return leaks

    def _leak(self, held: _Held, before: Walked, outer: Sequence[Any]) -> Leak | None:
        if all(_is_unchanged(obj, self._contents[obj]) for obj in before.objects if obj in self._contents):
            return None
        received = IdentitySet(before.objects)
        try:
            after = walked(held.module, self._rules)
        except SharedTreeError:
            return None
        paths = [
            after.first_paths[number]
            for number in after.leaf_numbers
            if isinstance(leaf := after.objects[number], Tracer)
            and leaf not in received
            and not belongs_to(leaf, outer)
        ]
        known = {before.first_paths[number] for number in before.leaf_numbers}
        changed = [path for path in paths if path in known]
        texts = [held.name + jtu.keystr(path) for path in changed or paths]
        return Leak(tuple(texts), not changed, held.where, held.name == "self") if paths else None


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    """The names that a function reads, also in functions that are written in it: global variables and attributes."""
    inner = [name for part in code.co_consts if isinstance(part, types.CodeType) for name in _names_in(part)]
    return (*code.co_names, *inner)


def _may_hold(function: Any) -> bool:
    """Whether a function may hold a module to which tracers can be assigned.

    Eager transforms call their function each time, so that of a plain function this is told without more.
    """
    if type(function) is not types.FunctionType or function.__dict__:
        return True
    names = function.__globals__
    values = [names[name] for name in _names_in(function.__code__) if name in names]
    values += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:  # not filled yet
            continue
    return any(_keeps_tracers(value) for value in values if not isinstance(value, _NO_MODULES))


_NO_MODULES = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type, jax.Array, int, float, str)


def _keeps_tracers(module: Any) -> bool:
    node_type = node_type_of(module)
    return node_type is not None and node_type.writes_back is True


def _content_of(obj: Any) -> Any:
    """A shallow copy of what can be assigned to an object; None if nothing can."""
    if isinstance(obj, (list, dict, collections.deque)):
        return obj.copy()
    return dict(vars(obj)) if hasattr(obj, "__dict__") else None


def _is_unchanged(obj: Any, content: Any) -> bool:
    """Whether an object holds the very objects that it held."""
    now = obj if isinstance(obj, (list, dict, collections.deque)) else getattr(obj, "__dict__", None)
    if now is None or content is None:
        return True
    if len(now) != len(content):
        return False
    if isinstance(now, dict):
        return all(key in content and content[key] is value for key, value in now.items())
    return all(value is old for value, old in zip(now, content, strict=True))


def _put_back(obj: Any, content: Any) -> None:
    if _is_unchanged(obj, content):
        return
    now = obj if isinstance(obj, (list, dict, collections.deque)) else vars(obj)
    now.clear()
    if isinstance(now, dict):
        now.update(content)
    else:
        now.extend(content)
