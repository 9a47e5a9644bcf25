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

import contextlib
import dis
import functools
import inspect
import re
import types
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

from ...core._call_arguments import Arguments
from ...core._flat_dags import FlatDag
from ...core._node_types import is_module
from ...core._warning_source import report_untied
from ...ties._policy_and_context import Policy
from .._argument_names import Names
from .._caller_side import Call

_handed_over: ContextVar[tuple[tuple[FlatDag, FlatDag], ...]] = ContextVar("handed_over", default=())
"""Of each function that is being traced, the outermost first: what its caller gave, and what the function got."""


@contextlib.contextmanager
def handing_over(given: FlatDag, got: FlatDag) -> Iterator[None]:
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
        where: how the function has it, in words.
        untied: code by which the function gets another one, with a hole for what the argument is called. Without such
            code, the argument gets another one.
    """

    module: Any
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
    for held in _held_by(function, call.arguments):
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


def _held_by(function: Any, arguments: Arguments) -> Iterator[_Held]:
    """The modules that a function holds directly, through partials, methods and wrappers."""
    num_args, keywords = len(arguments.args), set(arguments.kwargs)
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
                    yield _Held(value, f"as argument {i} of a partial", code)
            for name, value in function.keywords.items():
                if is_module(value) and name not in keywords:
                    code = f"f = functools.partial(f, {name}=sharedtree.untie({{}}))"
                    yield _Held(value, f"as `{name}` of a partial", code)
            num_args += len(function.args)
            keywords |= set(function.keywords)
            function = function.func
        elif isinstance(function, types.MethodType) or _is_method_of_equinox(function):
            if is_module(function.__self__):
                code = f"f = sharedtree.untie({{}}).{function.__func__.__name__}"
                yield _Held(function.__self__, "as the object of the method", code)
            num_args += 1
            function = function.__func__
        elif isinstance(function, types.FunctionType):
            yield from _in_function(function, num_args, keywords)
            yield from _in_globals(function)
            function = function.__dict__.get("__wrapped__", function)
        elif is_module(function) and not hasattr(type(function), "__wrapped__"):
            yield _Held(function, "as what is called", "f = sharedtree.untie({})")
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
                yield _Held(modules[name], f"as the global variable `{name}`", "")


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
            yield _Held(value, f"as `{name}` in its closure", f"{name} = sharedtree.untie({{}})")
    defaults = function.__defaults__ or ()
    positional = code.co_varnames[: code.co_argcount]
    by_name = dict(zip(positional[len(positional) - len(defaults) :], defaults, strict=True))
    by_name = {name: value for name, value in by_name.items() if name not in positional[:num_args]}
    for name, value in (by_name | (function.__kwdefaults__ or {})).items():
        if is_module(value) and name not in keywords:
            yield _Held(
                value, f"as the default of `{name}`", f"f = functools.partial(f, {name}=sharedtree.untie({{}}))"
            )
