"""Arguments that a transform cannot take as they are given: functions, what a function is bound to, and static ones.

`jax.jit` refuses a function, or an optimizer, which is several of them, where it takes an array. What it says then
names static arguments only. Its counterpart in Equinox traces what is an array and takes everything else as it is.

A method of a model, or the model itself, as the function under `in_place=True` would change the model while it is
traced, and leave tracers in it: what is bound to a function is no argument.

A static argument that shares an object with a traced one would be another object inside the function.
"""

import functools
import types
from typing import Any

import equinox as eqx
from jax import tree_util as jtu

from ...core._by_identity import IdentitySet
from ...core._call_arguments import Arguments
from ...core._errors import InconsistentSharingError
from ...core._flat_dags import FlatDag
from ...core._node_types import node_type_of
from ...core._pack_and_unpack import Tags, walk
from ...core._printing import listed
from ...ties._policy_and_context import Policy
from .._argument_names import Names

_REFUSALS = ("as an abstract array", "is not a valid JAX type")
"""What JAX says of a value that it cannot take."""


def is_refusal(error: Exception) -> bool:
    """Whether JAX has refused a value, and nobody has said more of it yet."""
    text = str(error)
    is_known = "sharedtree.preserve_identities(" in text
    return isinstance(error, TypeError) and any(words in text for words in _REFUSALS) and not is_known


def name_counterpart(error: Exception, call: FlatDag, title: str) -> None:
    """Adds to a refusal of JAX's, if functions among the arguments are what it refused, which transform takes them.

    Args:
        error: the refusal. It stays the error that it is.
        call: the arguments that are not static.
        title: of the transform.
    """
    counterpart = f"filter_{title.removeprefix('jax.')}"
    text = str(error)
    if not hasattr(eqx, counterpart):
        return
    functions = call.paths_to(lambda leaf: callable(leaf) and repr(type(leaf)) in text)
    if functions:
        be = "is a function" if len(functions) == 1 else "are functions"
        error.args = (
            f"{text}\n{listed(functions)} {be}. `equinox.{counterpart}` takes the arrays among the arguments as "
            f"`{title}` does, and functions and optimizers as they are:\n"
            f"    f = sharedtree.preserve_identities(equinox.{counterpart})(f)",
        )


def forbid_bound_module(function: Any, policy: Policy, title: str) -> None:
    """Raises if the function is a module that can be changed, or a method of one, and what is changed is written back.

    Args:
        function: what is wrapped; a partial of it, too.
        policy: under which it will be called.
        title: what the transform is called.

    Raises:
        TypeError: with the function that takes the module as an argument. As `flax.nnx.jit` does for bound methods.
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
    """What a function, or a partial of it, is bound to, or is itself; and how it is called on `model` in code."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, types.MethodType):
        return function.__self__, f"model.{function.__name__}"
    return function, "model"


def require_separate(arguments: Arguments, call: FlatDag, names: Names) -> None:
    """Raises if a static argument holds an object that is also in one that is traced.

    Args:
        arguments: all of them.
        call: those that are traced, with the caller's objects.
        names: of the arguments.
    """
    static = [names.text(i) for i, name in enumerate(arguments.names) if name is None]
    for text, value in zip([*static, *arguments.static], arguments.statics, strict=True):
        if node_type_of(value) is not None:
            _require_apart(value, text, call)


def _require_apart(value: Any, text: str, call: FlatDag) -> None:
    own = Tags()
    _, records, root = walk(value, own)
    known = IdentitySet(call.objects)
    for number, path in FlatDag(records, root).edges():
        obj = own.objects[number]
        if obj in known and own.number_of(obj) is not None:
            where = text + jtu.keystr(path)
            raise InconsistentSharingError(
                f"`{where}` is static, but the same `{type(obj).__name__}` is also in an argument that is traced.\n"
                "Inside the function they would be two objects. Pass only one of them, or a copy as the static one:\n"
                "    f(model, copy.deepcopy(config))",
                (where,),
                ("static",),
            )
