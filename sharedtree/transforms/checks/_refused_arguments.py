"""Refuses arguments that a transform cannot take: functions, the object of a method, static ones that are shared.

`jax.jit` refuses a function in the place of an array, and so an optimizer, which consists of functions. Its error only
names static arguments as a way out. `equinox.filter_jit` traces the arrays and takes everything else as it is, so we
add its name to the error.

Under `in_place=True` the function must not be a method of a model, nor the model itself. The model would be no
argument, so tracing the function would leave tracers in it.

A static argument must not share an object with a traced one. Inside the function they would be two objects.
"""

import functools
import types
from typing import Any

import equinox as eqx
from jax import tree_util as jtu

from ...core._by_identity import IdentitySet
from ...core._call_arguments import Arguments
from ...core._errors import InconsistentSharingError
from ...core._node_types import node_type_of
from ...core._pack_and_unpack import Tags, walk
from ...core._printing import listed
from ...core._structure import FlatDag
from ...ties._policy_and_context import Policy
from .._argument_names import Names

_REFUSALS = ("as an abstract array", "is not a valid JAX type")
"""Parts of the errors that JAX raises for a value that it cannot take."""


def is_refusal(error: Exception) -> bool:
    """Returns True for JAX's error about a refused value, unless `name_counterpart` has been there already."""
    text = str(error)
    has_counterpart = "sharedtree.preserve_identities(" in text
    return isinstance(error, TypeError) and any(words in text for words in _REFUSALS) and not has_counterpart


def name_counterpart(error: Exception, call: FlatDag, title: str) -> None:
    """Adds Equinox's counterpart of a transform to JAX's error, if JAX refused functions among the arguments.

    Args:
        error: JAX's error. Only its text is changed.
        call: the arguments, without the static ones.
        title: name of the transform.
    """
    counterpart = f"filter_{title.removeprefix('jax.')}"
    text = str(error)
    if not hasattr(eqx, counterpart):
        return
    functions = call.paths_to(lambda leaf: callable(leaf) and repr(type(leaf)) in text)
    if functions:
        predicate = "is a function" if len(functions) == 1 else "are functions"
        error.args = (
            f"{text}\n{listed(functions)} {predicate}. `equinox.{counterpart}` takes the arrays among the arguments as "
            f"`{title}` does, and functions and optimizers as they are:\n"
            f"    f = sharedtree.preserve_identities(equinox.{counterpart})(f)",
        )


def forbid_bound_module(function: Any, policy: Policy, title: str) -> None:
    """Raises under `in_place=True` if the function is a mutable module, or a method of one.

    Args:
        function: the wrapped function, or a partial of it.
        policy: the policy of the call.
        title: name of the transform.

    Raises:
        TypeError: with code for a function that takes the module as an argument. `flax.nnx.jit` also refuses bound
            methods.
    """
    if not policy.in_place:
        return
    module, called = bound_module(function)
    node_type = node_type_of(module)
    is_frozen = getattr(getattr(type(module), "__dataclass_params__", None), "frozen", False)
    if node_type is None or node_type.is_plain or node_type.convention == "equinox" or is_frozen:
        return
    raise TypeError(
        f"`{title}` with `in_place=True` writes back what is changed in arguments. The function is bound to a "
        f"`{type(module).__name__}`, which is none, and would be left with tracers in it. Wrap one that takes it:\n"
        f"    f = lambda model, *args, **kwargs: {called}(*args, **kwargs)"
    )


def bound_module(function: Any) -> tuple[Any, str]:
    """Returns the object to which a function is bound, and how to call the function on it, as code.

    The object is called `model` in the code. If the function is not bound, it is the object itself: a callable module.
    Partials are taken off.
    """
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, types.MethodType):
        return function.__self__, f"model.{function.__name__}"
    return function, "model"


def require_separate(arguments: Arguments, call: FlatDag, names: Names) -> None:
    """Raises if a static argument and a traced one share an object.

    Args:
        arguments: all arguments.
        call: the traced arguments, with the caller's objects.
        names: names of the arguments.

    Raises:
        InconsistentSharingError: with the path in the static argument.
    """
    positional = [names.text(i) for i, name in enumerate(arguments.names) if name is None]
    for text, value in zip([*positional, *arguments.static], arguments.statics, strict=True):
        if node_type_of(value) is not None:
            _require_separate_value(value, text, call)


def _require_separate_value(value: Any, text: str, call: FlatDag) -> None:
    """Raises if a static argument shares an object with traced ones.

    Args:
        value: the static argument.
        text: its name.
        call: the traced arguments.
    """
    tags = Tags()
    _, records, root = walk(value, tags)
    traced_objects = IdentitySet(call.objects)
    for record, path in FlatDag(records, root).edges():
        obj = tags.objects[record]
        # Plain values without identity have no number.
        if obj in traced_objects and tags.number_of(obj) is not None:
            path_text = text + jtu.keystr(path)
            raise InconsistentSharingError(
                f"`{path_text}` is static, but the same `{type(obj).__name__}` is also in an argument that is traced.\n"
                "Inside the function they would be two objects. Pass only one of them, or a copy as the static one:\n"
                "    f(model, copy.deepcopy(config))",
                (path_text,),
                ("static",),
            )
