"""The table of adapters, and the wrapping of a transform with its adapter from the table.

An *adapter* knows how a transform treats its arguments. For a transform that takes a function and options it is a
callable, mostly a class of wrapped functions. For a transform that takes operands as well it is a `TakingOperands`.

    jax.vmap          →  VmapTransform, a class             VmapTransform(jax.vmap, f, policy, options)
    jax.lax.scan      →  SCAN, a `TakingOperands`           SCAN.wrap(jax.lax.scan, policy, options)
    not in the table  →  UnregisteredTransform

`_preserve_identities` imports this file with the first transform that a program wraps. All adapters are imported with
it, and views, so that a program which trains imports nothing later.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

from ..core._node_types import is_module
from ..core._printing import shown
from ..libraries._equinox import name_of
from ..ties import _views as _views
from ..ties._policy_and_context import Policy, PolicyHere, PolicyOption, with_options
from ._adapter_names import NAME_OF_ADAPTER
from ._calls_with_operands import TakingOperands
from ._function_and_options import How, TransformedModule, apply_options, is_of_equinox
from ._option_lists import title_of
from ._transforms_without_adapter import refusal_of
from ._unregistered_transforms import OpaqueTransform, UnregisteredTransform


def _adapter_named(name: str) -> Any:
    """Imports an adapter, by the name of its file and its own name: `_jit.JitTransform`."""
    file, _, attribute = name.partition(".")
    return getattr(importlib.import_module(f"{__package__}.{file}"), attribute)


ADAPTERS: dict[Any, Any] = {transform: _adapter_named(name) for transform, name in NAME_OF_ADAPTER.items()}
"""Transform → its adapter. `register` adds to those of the package."""


def wrap_transform(
    transform: Callable[..., Any], policy: PolicyOption, in_place: bool | None, options: dict[str, Any]
) -> Callable[..., Any]:
    """Wraps a transform, and returns the transform with identities preserved. Implements `preserve_identities`."""
    if policy is not None and not isinstance(policy, (Policy, PolicyHere)):
        raise TypeError(
            f"`policy` is a `sharedtree.Policy`, not {policy!r}. An option of the transform by that name goes with the "
            "function:\n"
            "    preserve_identities(jax.checkpoint)(f, policy=jax.checkpoint_policies.dots_saveable)"
        )
    if not callable(transform):
        raise TypeError(
            f"`preserve_identities` takes a transform, not {shown(transform)}:\n"
            "    sharedtree.preserve_identities(jax.jit)"
        )
    # A partial of a transform is that transform, with more options. With positional arguments it is a transform of its
    # own, since the first of them may be the function.
    while isinstance(transform, functools.partial) and not transform.args:
        options = {**transform.keywords, **options}
        transform = transform.func
    if in_place is not None:
        options["in_place"] = in_place
    # Called for its error alone, on a copy: a wrong `in_place` is refused now, before there is a function.
    with_options({**options}, policy)
    adapter = _adapter_of(transform)
    if isinstance(adapter, TakingOperands):
        return adapter.wrap(transform, policy, options)

    def preserving(*positional: Any, **more: Any) -> Any:
        """Wraps the function that is among the arguments. Without one, returns a decorator."""
        keywords = {**options, **more}
        # Nothing among the arguments could be a function, so the "transform" is probably the user's function.
        is_unregistered = adapter is UnregisteredTransform
        if is_unregistered and positional and not any(map(callable, (*positional, *keywords.values()))):
            raise _no_transform_error(transform, positional[0])
        # Takes the options of the package out of `keywords`, and then those of the adapter.
        chosen_policy = with_options(keywords, policy)
        adapter_options = {
            name: keywords.pop(name) for name in getattr(adapter, "package_options", ()) if name in keywords
        }
        function, bound_options = apply_options(transform, positional, keywords)
        if function is None:
            return functools.partial(preserving, **more)
        if is_unregistered and not callable(function):
            raise _no_transform_error(transform, function)
        bound_options |= adapter_options
        takes_rules = getattr(adapter, "takes_rules", False)
        # As in Equinox, a module becomes a module. With methods such as `defvjp` it has to be a wrapper.
        if is_module(function) and is_of_equinox(transform) and not takes_rules:
            return TransformedModule(function, How(adapter, transform, chosen_policy, bound_options))
        return adapter(transform, function, chosen_policy, bound_options)

    preserving.__name__ = name_of(transform, "transform")
    preserving.__doc__ = f"`{preserving.__name__}`, with identities preserved; see `sharedtree.preserve_identities`."
    return preserving


def _adapter_of(transform: Callable[..., Any]) -> Any:
    """Returns the adapter of a transform: that in the table, or `UnregisteredTransform` if there is none.

    Raises:
        TypeError: if the package refuses the transform (`_transforms_without_adapter`), and the table has no adapter
            for it.
    """
    if not _is_hashable(transform):
        return UnregisteredTransform
    if transform not in ADAPTERS:
        refusal = refusal_of(transform)
        if refusal is not None:
            raise refusal
    return ADAPTERS.get(transform, UnregisteredTransform)


def register(transform: Callable[..., Any], adapter: Any, *, takes_operands: bool) -> None:
    """Adds an adapter to the table. Implements `register_transform`, whose documentation has the arguments."""
    # `preserve_identities` refuses some transforms. A refused transform may get an adapter of its own. It is an error
    # if it gets none, or if it is passed as the adapter of another transform.
    is_adapter_missing = adapter is None and not takes_operands and _is_hashable(transform)
    transform_to_refuse = transform if is_adapter_missing else adapter
    is_unregistered = _is_hashable(transform_to_refuse) and transform_to_refuse not in ADAPTERS
    refusal = refusal_of(transform_to_refuse) if is_unregistered else None
    if refusal is not None:
        raise refusal
    if _is_hashable(adapter) and adapter in ADAPTERS:
        # The adapter is itself a transform in the table. Its adapter serves both.
        registered = ADAPTERS[adapter]
        if takes_operands and not isinstance(registered, TakingOperands):
            raise TypeError(
                f"`{title_of(adapter)}` takes no operands beside the function, so it is no model for a transform that "
                "does. Write an adapter:\n"
                "    sharedtree.register_transform(transform, adapter, takes_operands=True)"
            )
        adapter = registered
    elif takes_operands and callable(adapter):
        # Nobody can see whether the adapter writes back what the function changed. If it did not, changes would be lost
        # in silence, so `in_place=True` is an error.
        adapter = TakingOperands(adapter, writes=False)
    elif adapter is None and not takes_operands:
        adapter = OpaqueTransform
    elif not callable(adapter):
        raise TypeError(
            f"An adapter is None, a registered transform or a callable, not {adapter!r}. Of a transform that takes "
            "operands beside the function, it is one of the latter two:\n"
            "    sharedtree.register_transform(transform, adapter, takes_operands=True)"
        )
    ADAPTERS[transform] = adapter


def _no_transform_error(transform: Callable[..., Any], argument: Any) -> TypeError:
    """Makes the error for a function in the place of a transform: `preserve_identities(f)(x)`."""
    return TypeError(
        f"`{title_of(transform)}` was given {shown(argument)}, where a transform is given a function. "
        "`preserve_identities` takes a transform, not the function that is to be transformed:\n"
        "    f = sharedtree.preserve_identities(jax.jit)(f)"
    )


def _is_hashable(obj: Any) -> bool:
    """Returns True if an object can be a key of the table."""
    try:
        hash(obj)
    except TypeError:
        return False
    return True
