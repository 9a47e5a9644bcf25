"""Errors for arguments that a transform cannot take: functions, the object of a method, shared static arguments.

    st.jit(f)(model, optax.adam(1e-3))              # JAX refuses the functions of the optimizer
    st.jit(model.step, in_place=True)(batch)        # the model is no argument, so it cannot be written back
    st.jit(f, static_argnums=1)(model, model)       # traced and static: inside the function they would be two

JAX's error about a function only names static arguments as a way out. `equinox.filter_jit` traces the arrays and leaves
all other arguments unchanged, so we add its name to the error.

Under `in_place=True` the transform must be able to write changes back. The function must not be a method of a model,
nor the callable model itself: tracing such a function would leave tracers in the model.
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
from .._function_and_options import in_code

_REFUSALS = ("as an abstract array", "is not a valid JAX type")
"""Parts of the errors that JAX raises for a value that it cannot take."""


def is_refusal(error: Exception) -> bool:
    """Returns True for JAX's error about a refused value, if `name_counterpart` has not changed its text yet."""
    text = str(error)
    # If transforms are nested, the error passes through each of them. Only the innermost one changes it.
    has_counterpart = "sharedtree.preserve_identities(" in text
    return isinstance(error, TypeError) and any(words in text for words in _REFUSALS) and not has_counterpart


def name_counterpart(error: Exception, call: FlatDag, title: str) -> None:
    """Adds Equinox's counterpart of a transform to the text of JAX's error, if JAX refused a function.

    Does nothing if Equinox has no counterpart, or if no function among the arguments has the type that JAX refused.

    Args:
        error: JAX's error. Its text is changed.
        call: the arguments, without the static ones.
        title: name of the transform, such as `jax.jit`.
    """
    # `jax.jit` → `equinox.filter_jit`.
    counterpart = f"filter_{title.removeprefix('jax.')}"
    text = str(error)
    if not hasattr(eqx, counterpart):
        return
    # JAX's error has the type of the refused value in its text. `paths_to` returns the paths of all such functions.
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
        TypeError: with the fix, as code: a function that takes the module as an argument. `flax.nnx.jit` raises for
            bound methods, too.
    """
    if not policy.in_place:
        return
    module, called = bound_module(function)
    node_type = node_type_of(module)
    # A module that nobody can change is harmless: those of Equinox, and frozen dataclasses.
    is_frozen = getattr(getattr(type(module), "__dataclass_params__", None), "frozen", False)
    if node_type is None or node_type.is_plain or node_type.convention == "equinox" or is_frozen:
        return
    name = type(module).__name__
    function_in_words = (
        f"a `{name}`" if called == "model" else f"`{called.removeprefix('model.')}`, a method of `{name}`"
    )
    raise TypeError(
        f"`{title}` with `in_place=True` cannot wrap {function_in_words}, because the `{name}` that it changes is not "
        "an argument.\n"
        f"Tracers would be left in it. Wrap this function, and pass the `{name}` as its first argument:\n"
        f"    f = lambda model, *args, **kwargs: {called}(*args, **kwargs)"
    )


def forbid_in_place(policy: Policy, title: str) -> None:
    """Raises under `in_place=True`, for a transform that cannot write changes back.

    Args:
        policy: the policy of the call.
        title: name of the transform.

    Raises:
        ValueError: with the fix, as code.
    """
    if policy.in_place:
        raise ValueError(
            f"`{title}` does not support `in_place=True`: it passes on what the function returns, not what "
            "it changes.\n"
            "Let the function return the objects that it changes, as `return result, model`, and switch `in_place` "
            "off:\n"
            f"    inner = {in_code(title, 'in_place=False')}"
        )


def bound_module(function: Any) -> tuple[Any, str]:
    """Finds the object to which a function, or the function of a partial, is bound.

    Returns:
        The object, and code that calls the function on it: `model.step`. If the function is no bound method, the
        function itself and `model`, since it may be a callable module.
    """
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, types.MethodType):
        return function.__self__, f"model.{function.__name__}"
    return function, "model"


def require_separate(arguments: Arguments, call: FlatDag, names: Names) -> None:
    """Raises if a static argument and a traced argument share an object, which would be two inside the function.

    Args:
        arguments: all arguments.
        call: the traced arguments, with the caller's objects.
        names: names of the arguments.

    Raises:
        InconsistentSharingError: with the path of the object in the static argument.
    """
    # Positional arguments without a name in `arguments.names` are static.
    positional = [names.text(i) for i, name in enumerate(arguments.names) if name is None]
    for text, value in zip([*positional, *arguments.static], arguments.statics, strict=True):
        if node_type_of(value) is not None:
            _require_separate_value(value, text, call)


def _require_separate_value(value: Any, text: str, call: FlatDag) -> None:
    """Raises if one static argument shares an object with the traced arguments.

    Args:
        value: the static argument.
        text: its name.
        call: the traced arguments.
    """
    # A record is the number of an object of the walk. `tags` has the objects, and the numbers of those with identity.
    tags = Tags()
    _, records, root = walk(value, tags)
    traced_objects = IdentitySet(call.objects)
    for record, path in FlatDag(records, root).edges():
        obj = tags.objects[record]
        # Values such as numbers and strings carry no identity and have no number. Sharing them means nothing.
        if obj in traced_objects and tags.number_of(obj) is not None:
            path_text = text + jtu.keystr(path)
            raise InconsistentSharingError(
                f"`{path_text}` is static, but the same `{type(obj).__name__}` is also in an argument that is traced.\n"
                "Inside the function they would be two objects. Pass only one of them, or a copy as the static one:\n"
                "    f(model, copy.deepcopy(config))",
                (path_text,),
                ("static",),
            )
