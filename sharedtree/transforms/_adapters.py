"""How each transform is wrapped: the table of adapters, and what is done with the one that is found there.

It is imported with the first transform that a program wraps, and all adapters with it, so that nothing which trains is
imported later than that. What `_preserve_identities` says of the two public functions is done here.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

from ..core._node_types import is_module
from ..core._printing import shown
from ..libraries._equinox import name_of
from ..ties._policy_and_context import Policy, PolicyHere, PolicyOption, with_options
from ._adapter_names import NAME_OF_ADAPTER
from ._crossing import TakingOperands
from ._function_and_options import How, TransformedModule, apply_options, is_of_equinox
from ._option_lists import title_of
from ._transforms_without_adapter import refusal_of
from ._unregistered_transforms import OpaqueTransform, UnregisteredTransform


def _adapter_named(name: str) -> Any:
    file, _, attribute = name.partition(".")
    return getattr(importlib.import_module(f"{__package__}.{file}"), attribute)


ADAPTERS: dict[Any, Any] = {transform: _adapter_named(name) for transform, name in NAME_OF_ADAPTER.items()}
"""Transform → its adapter: those of the package, and those that were registered."""


def register(transform: Callable[..., Any], adapter: Any, *, takes_operands: bool) -> None:
    """Enters an adapter into the table, as `register_transform` says."""
    is_plain = adapter is None and not takes_operands and _is_hashable(transform)
    refused = transform if is_plain else adapter
    refusal = refusal_of(refused) if _is_hashable(refused) and refused not in ADAPTERS else None
    if refusal is not None:
        raise refusal
    if _is_hashable(adapter) and adapter in ADAPTERS:
        found = ADAPTERS[adapter]
        if takes_operands and not isinstance(found, TakingOperands):
            raise TypeError(
                f"`{title_of(adapter)}` takes no operands beside the function, so it is no model for a transform that "
                "does. Write an adapter:\n"
                "    sharedtree.register_transform(transform, adapter, takes_operands=True)"
            )
        adapter = found
    elif takes_operands and callable(adapter):
        # Whether it writes back what the function changed cannot be seen, and not to do so would be silent.
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


def wrapped(
    transform: Callable[..., Any], policy: PolicyOption, in_place: bool | None, options: dict[str, Any]
) -> Callable[..., Any]:
    """Wraps a transform, as `preserve_identities` says."""
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
    while isinstance(transform, functools.partial) and not transform.args:
        options = {**transform.keywords, **options}
        transform = transform.func
    if in_place is not None:
        options["in_place"] = in_place
    # What is no `in_place` is refused here, not only when there is a function.
    with_options({**options}, policy)
    adapter = _adapter_of(transform)
    if isinstance(adapter, TakingOperands):
        return adapter.applied(transform, policy, options)

    def preserving(*positional: Any, **more: Any) -> Any:
        own = {**options, **more}
        if adapter is UnregisteredTransform and positional and not any(map(callable, (*positional, *own.values()))):
            raise _is_no_transform(transform, positional[0])
        chosen = with_options(own, policy)
        ours = {name: own.pop(name) for name in getattr(adapter, "own_options", ()) if name in own}
        function, bound = apply_options(transform, positional, own)
        if function is None:
            return functools.partial(preserving, **more)
        if adapter is UnregisteredTransform and not callable(function):
            raise _is_no_transform(transform, function)
        bound |= ours
        takes_rules = getattr(adapter, "takes_rules", False)
        if is_module(function) and is_of_equinox(transform) and not takes_rules:
            return TransformedModule(function, How(adapter, transform, chosen, bound))
        return adapter(transform, function, chosen, bound)

    preserving.__name__ = name_of(transform, "transform")
    preserving.__doc__ = f"`{preserving.__name__}`, with identities preserved; see `sharedtree.preserve_identities`."
    return preserving


def _adapter_of(transform: Callable[..., Any]) -> Any:
    """The adapter that is registered for a transform, or that of an unregistered one.

    Raises:
        TypeError: if it is a transform that is refused, and nobody registered an adapter for it.
    """
    if not _is_hashable(transform):
        return UnregisteredTransform
    if transform not in ADAPTERS:
        refusal = refusal_of(transform)
        if refusal is not None:
            raise refusal
    return ADAPTERS.get(transform, UnregisteredTransform)


def _is_no_transform(transform: Callable[..., Any], given: Any) -> TypeError:
    return TypeError(
        f"`{title_of(transform)}` was given {shown(given)}, where a transform is given a function. "
        "`preserve_identities` takes a transform, not the function that is to be transformed:\n"
        "    f = sharedtree.preserve_identities(jax.jit)(f)"
    )


def _is_hashable(obj: Any) -> bool:
    try:
        hash(obj)
    except TypeError:
        return False
    return True
