"""A gradient that lacks a part, because the function also holds the differentiated module outside its arguments.

    def loss(model, x):
        return model(x).sum() + penalty(net)        # `net` is the model: the penalty has no gradient

    st.grad(loss)(net, x)

A transform calls the function with copies of its arguments. `net` in the closure is no argument, so it is not copied,
and the traced function sees two models: the copy, and `net`, which JAX takes for a constant. Some users mean that (a
frozen copy to stay close to) and some do not, so we warn. A module counts only if the function holds it directly: in
its closure, a global variable, a default, a partial, or as the object of a method. Modules inside other objects, such
as a trainer, do not count.

Under `st.jit(st.grad(loss))(net, x)`, `st.grad` receives the copy of `net` that `jit` has made. So while functions are
traced, we keep the objects of each traced function beside those of its caller.

A *record* is the number of an object in a flat DAG: the flattened arguments of a call, or a part of them.
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
from ...core._errors import report_untied
from ...core._node_types import is_module
from ...core._structure import FlatDag
from ...ties._policy_and_context import Policy
from .._argument_names import Names
from .._caller_side import Call

# ---- The arguments of the functions that are being traced ----


class _TracedCall(NamedTuple):
    """Arguments of one call of a transform.

    Attributes:
        outside: the arguments with the caller's objects.
        inside: the same arguments with the copies that the function receives. A record has the same number in both.
    """

    outside: FlatDag
    inside: FlatDag


_traced_calls: ContextVar[tuple[_TracedCall, ...]] = ContextVar("traced_calls", default=())
"""The calls of all functions that are being traced, the outermost first."""


@contextlib.contextmanager
def relating_arguments(outside: FlatDag, inside: FlatDag) -> Iterator[None]:
    """Surrounds the trace of a function. Meanwhile `_copies_of` finds the copies of the caller's objects.

    Args:
        outside: the arguments with the caller's objects.
        inside: the same arguments with the copies that the function receives.
    """
    token = _traced_calls.set((*_traced_calls.get(), _TracedCall(outside, inside)))
    try:
        yield
    finally:
        _traced_calls.reset(token)


def _copies_of(module: Any) -> list[Any]:
    """Returns a module, followed by its copies in the functions that are being traced with it as an argument."""
    copies = [module]
    # From the outermost call inwards: an inner call copies the copy that the outer call has made.
    for call in _traced_calls.get():
        objects = zip(call.outside.objects, call.inside.objects, strict=True)
        copies += [inside for outside, inside in objects if any(outside is copy for copy in copies)]
    return copies


# ---- The warning ----


class _HeldModule(NamedTuple):
    """A module in a function's closure, defaults and so on.

    Attributes:
        module: the module.
        place: where the function holds the module, in words, such as "as `net` in its closure".
        code: code that makes the function hold a copy, with a `{}` for the name of the argument. Empty for a global
            variable: then the warning advises a copy of the argument.
    """

    module: Any
    place: str
    code: str


def report_closed_over(
    function: Callable[..., Any], call: Call, differentiated: Collection[int], names: Names, policy: Policy
) -> None:
    """Warns of each differentiated module that comes in twice: as an argument, and as an object held by the function.

    Inside the function these are two modules, and the gradient has only the part of the argument.

    Args:
        function: the user's function.
        call: the call of the transform.
        differentiated: records of the differentiated leaves.
        names: names of the function and its arguments.
        policy: its `on_untie` makes the warning an error, or suppresses it.

    Raises:
        UntiedError: under `Policy(on_untie="error")`.

    Cost: one look at each closure variable, default and global variable. If one of them is a module, also one look at
        each object in the arguments of this call and of the calls around it.
    """
    if policy.on_untie == "ignore":
        return
    tree = call.tree
    for held in _modules_held_by(function, call.arguments):
        # Where the arguments have the module.
        copies = _copies_of(held.module)
        records = [record for record, obj in enumerate(tree.objects) if any(obj is copy for copy in copies)]
        # `reached` is the set of all records below. The module counts if one of its leaves is differentiated.
        if not any(not tree.below(record).reached.isdisjoint(differentiated) for record in records):
            continue
        path = tree.text(records[0])
        message = (
            f"`{path}` is differentiated, and the function also has the same `{type(held.module).__name__}` "
            f"{held.place}, which is not. Inside the function they are two objects, so the gradient misses a term."
        )
        # If there is code for the function's module, it gets the whole path. Otherwise the code copies the argument.
        # Its name is the path up to the first `.` or `[`.
        owner, name = ("the function", path) if held.code else ("the argument", re.split(r"[.[]", path)[0])
        fix = (
            f"For the whole gradient, use the module only through `{path}` inside the function. If the other one is "
            f"meant as a constant, give {owner} a copy:\n"
            f"    {(held.code or '{0} = sharedtree.copy({0})').format(name)}"
        )
        report_untied(policy.on_untie, names.definition, message, fix, (path,), verb="cut")


# ---- The modules that a function holds ----


def _modules_held_by(function: Any, arguments: Arguments) -> Iterator[_HeldModule]:
    """Yields the modules that a function holds, also those in its partials, methods and wrappers.

    Args:
        function: the function.
        arguments: the arguments of the call. A default is left out if an argument replaces it.
    """
    # The arguments with which the current layer of the function is called.
    num_args, keywords = len(arguments.args), set(arguments.kwargs)
    # Each round looks at one layer and goes on to the function that this layer wraps. If it wraps none, `function`
    # stays the same. Then it has been visited, and the loop ends. Wrappers that wrap each other end it, too.
    visited: list[Any] = []
    while not any(function is earlier for earlier in visited):
        visited.append(function)
        if isinstance(function, functools.partial):
            # The fix makes a partial with the same arguments, except for a copy in place of the module.
            for i, value in enumerate(function.args):
                if is_module(value):
                    parts = [f"f.args[{position}]" for position in range(len(function.args))]
                    parts[i] = "sharedtree.copy({})"
                    parts += ["**f.keywords"] if function.keywords else []
                    code = f"f = functools.partial(f.func, {', '.join(parts)})"
                    yield _HeldModule(value, f"as argument {i} of a partial", code)
            # A keyword argument of the call replaces the one in the partial.
            for name, value in function.keywords.items():
                if is_module(value) and name not in keywords:
                    code = f"f = functools.partial(f, {name}=sharedtree.copy({{}}))"
                    yield _HeldModule(value, f"as `{name}` of a partial", code)
            num_args += len(function.args)
            keywords |= set(function.keywords)
            function = function.func
        elif isinstance(function, types.MethodType) or _is_equinox_method(function):
            if is_module(function.__self__):
                code = f"f = sharedtree.copy({{}}).{function.__func__.__name__}"
                yield _HeldModule(function.__self__, "as `self`", code)
            # The object of the method is its first argument.
            num_args += 1
            function = function.__func__
        elif isinstance(function, types.FunctionType):
            yield from _modules_in_closure_and_defaults(function, num_args, keywords)
            yield from _modules_in_globals(function)
            # `functools.wraps` stores the wrapped function.
            function = function.__dict__.get("__wrapped__", function)
        elif is_module(function) and not hasattr(type(function), "__wrapped__"):
            # A callable module. The next layer is the `__call__` of its class, with the module as first argument.
            yield _HeldModule(function, "as `self` of its `__call__`", "f = sharedtree.copy({})")
            function = inspect.getattr_static(type(function), "__call__", function)
            num_args += 1
        else:
            # A wrapper of another class, such as a function returned by `preserve_identities`. Some classes compute
            # attributes that they lack (`__getattr__`), so a static look-up tells whether `__wrapped__` exists.
            wrapped = inspect.getattr_static(function, "__wrapped__", None)
            function = function if wrapped is None else getattr(function, "__wrapped__", function)


def _is_equinox_method(function: Any) -> bool:
    """Returns True for a bound method of an Equinox module. Equinox wraps such a method in a module of its own."""
    return is_module(function) and {"__self__", "__func__"} <= getattr(function, "__dict__", {}).keys()


def _modules_in_closure_and_defaults(
    function: types.FunctionType, num_args: int, keywords: Collection[str]
) -> Iterator[_HeldModule]:
    """Yields the modules in the closure of a function, and in the defaults of parameters that a call leaves out.

    Args:
        function: the function.
        num_args: number of positional arguments in the call.
        keywords: names of the keyword arguments in the call.
    """
    code = function.__code__
    # The closure.
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:
            # The variable has no value yet.
            continue
        if is_module(value):
            yield _HeldModule(value, f"as `{name}` in its closure", f"{name} = sharedtree.copy({{}})")
    # The defaults. Those of positional parameters belong to the last parameters, and are used if the call has fewer
    # arguments.
    defaults = function.__defaults__ or ()
    positional = code.co_varnames[: code.co_argcount]
    default_of = dict(zip(positional[len(positional) - len(defaults) :], defaults, strict=True))
    default_of = {name: value for name, value in default_of.items() if name not in positional[:num_args]}
    for name, value in (default_of | (function.__kwdefaults__ or {})).items():
        if is_module(value) and name not in keywords:
            yield _HeldModule(
                value, f"as the default of `{name}`", f"f = functools.partial(f, {name}=sharedtree.copy({{}}))"
            )


def _modules_in_globals(function: types.FunctionType) -> Iterator[_HeldModule]:
    """Yields the modules in the global variables read by a function, or by functions defined in its body."""
    codes = [function.__code__]
    # The list grows during the loop: the code of a function defined inside is a constant of the code around it.
    for code in codes:
        codes += [part for part in code.co_consts if isinstance(part, types.CodeType)]
        # `co_names` has the names of global variables and of attributes. Only the instructions tell which name is
        # which, and reading these is slow. So it is done only if a global variable of such a name is a module.
        modules = {name: function.__globals__.get(name) for name in code.co_names}
        modules = {name: value for name, value in modules.items() if value is not None and is_module(value)}
        if modules:
            instructions = dis.get_instructions(code)
            read_names = {instruction.argval for instruction in instructions if instruction.opname == "LOAD_GLOBAL"}
            for name in [name for name in modules if name in read_names]:
                yield _HeldModule(modules[name], f"as the global variable `{name}`", "")
