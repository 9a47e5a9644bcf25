"""The table of adapters, and the wrapping of a transform with its adapter from the table.

An *adapter* knows how a transform treats its arguments. For a transform of a function and options, it is a callable: it
gets the transform, the function, the policy and the options, and returns the function under the transform. Mostly it is
a class of such functions. *Operands* are arguments of the function that are passed to the transform itself, as in
`jax.lax.scan(f, init, xs)`. For a transform with operands, the adapter is a `TakingOperands`.

    jax.vmap          →  VmapTransform, a class             VmapTransform(jax.vmap, f, policy, options)
    jax.lax.scan      →  SCAN, a `TakingOperands`           SCAN.wrap(jax.lax.scan, policy, options)
    not in the table  →  UnregisteredTransform

`_preserve_identities` imports this file with the first transform that a program wraps. It imports all adapters, and
views, so that nothing has to be imported later, in the middle of training.
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
    """Imports an adapter and returns it.

    Args:
        name: the file in this folder and the adapter in it, as in `_jit.JitTransform`.
    """
    file, _, attribute = name.partition(".")
    return getattr(importlib.import_module(f"{__package__}.{file}"), attribute)


ADAPTERS: dict[Any, Any] = {transform: _adapter_named(name) for transform, name in NAME_OF_ADAPTER.items()}
"""Transform → its adapter: first those of the package. `register` adds the user's."""


def wrap_transform(
    transform: Callable[..., Any], policy: PolicyOption, in_place: bool | None, options: dict[str, Any]
) -> Callable[..., Any]:
    """Returns a transform with identities preserved. Implements `preserve_identities`.

    Args:
        transform: the vanilla transform, or a `functools.partial` of it.
        policy: what counts as sharing. None for the policy in force at each call.
        in_place: True or False to replace the `in_place` of the policy. None to leave it as it is.
        options: options of the transform, bound in advance. `in_place` is added to them.

    Returns:
        For a transform with operands, a function with the parameters of the transform. For all others, a function that
        takes the user's function and further options.

    Raises:
        TypeError: if the transform, the policy or `in_place` is of a wrong type, or the package refuses the transform.
    """
    if policy is not None and not isinstance(policy, (Policy, PolicyHere)):
        raise TypeError(
            f"`policy` must be a `sharedtree.Policy`, but is {shown(policy)}. To give the transform its own option "
            "`policy`, pass it in the second call, together with the function:\n"
            "    preserve_identities(jax.checkpoint)(f, policy=jax.checkpoint_policies.dots_saveable)"
        )
    if not callable(transform):
        raise TypeError(
            f"`preserve_identities` takes a transform, not {shown(transform)}:\n"
            "    sharedtree.preserve_identities(jax.jit)"
        )
    # `functools.partial(jax.jit, inline=True)` is `jax.jit` with one more option. A partial with positional arguments
    # counts as a transform by itself, since the first of these arguments may be the function.
    while isinstance(transform, functools.partial) and not transform.args:
        options = {**transform.keywords, **options}
        transform = transform.func
    if in_place is not None:
        options["in_place"] = in_place
    # `with_options` takes `policy` and `in_place` out of a dict of options. It is called here for its error alone, on a
    # copy: a wrong `in_place` is refused now, before there is a function.
    with_options({**options}, policy)
    adapter = _adapter_of(transform)
    # These adapters find the function among the operands themselves.
    if isinstance(adapter, TakingOperands):
        return adapter.wrap(transform, policy, options)

    def preserving(*positional: Any, **more: Any) -> Any:
        """Wraps the function that is among the arguments. Without a function, returns a decorator.

        Args:
            positional: the function, and perhaps options, as in `jax.vmap(f, 0)`.
            more: further options. The function may be among them, as in `jax.grad(fun=f)`.
        """
        keywords = {**options, **more}
        # `preserve_identities(f)(x)`: nothing among the arguments could be a function, so the "transform" is probably
        # the user's function.
        is_unregistered = adapter is UnregisteredTransform
        if is_unregistered and positional and not any(map(callable, (*positional, *keywords.values()))):
            raise _no_transform_error(transform, positional[0])
        # Two kinds of options are not the transform's, and are taken out of `keywords`: those of the package (`policy`
        # and `in_place`), which become a policy, and those that the adapter adds.
        chosen_policy = with_options(keywords, policy)
        adapter_options = {
            name: keywords.pop(name) for name in getattr(adapter, "package_options", ()) if name in keywords
        }
        # Separates the function from the options, by the signature of the transform. None if there is no function.
        function, bound_options = apply_options(transform, positional, keywords)
        if function is None:
            # The decorator. A later call of it gets the function, and adds `options` again.
            return functools.partial(preserving, **more)
        if is_unregistered and not callable(function):
            raise _no_transform_error(transform, function)
        bound_options |= adapter_options
        # True if functions under the transform have methods such as `defvjp`, which a module would not have.
        takes_rules = getattr(adapter, "takes_rules", False)
        # As in Equinox, a module becomes a module. It applies the transform in each call, with what `How` holds.
        if is_module(function) and is_of_equinox(transform) and not takes_rules:
            return TransformedModule(function, How(adapter, transform, chosen_policy, bound_options))
        return adapter(transform, function, chosen_policy, bound_options)

    preserving.__name__ = name_of(transform, "transform")
    preserving.__doc__ = f"`{preserving.__name__}`, with identities preserved; see `sharedtree.preserve_identities`."
    return preserving


def _adapter_of(transform: Callable[..., Any]) -> Any:
    """Returns the adapter of a transform: from the table, or `UnregisteredTransform` if the table has none.

    Raises:
        TypeError: if the package refuses the transform (`_transforms_without_adapter`). A transform in the table is not
            refused: the user may have registered an adapter.
    """
    # What is not hashable, such as some callable objects, cannot be in the table.
    if not _is_hashable(transform):
        return UnregisteredTransform
    if transform not in ADAPTERS:
        # An error that says what to write instead, or None.
        refusal = refusal_of(transform)
        if refusal is not None:
            raise refusal
    return ADAPTERS.get(transform, UnregisteredTransform)


def register(transform: Callable[..., Any], adapter: Any, *, takes_operands: bool) -> None:
    """Adds a transform to the table, with its adapter. Implements `register_transform`.

    Args:
        transform: the transform.
        adapter: None if the transform treats all arguments alike. Or a transform in the table, whose adapter then
            serves both. Or a function that is the adapter.
        takes_operands: True if the transform takes operands beside the function.

    Raises:
        TypeError: if the adapter is none of these or does not fit `takes_operands`, or if the package refuses the
            transform or the adapter.
    """
    # `preserve_identities` refuses some transforms. A refused transform may get an adapter of its own. It is an error
    # if it gets none, or if it is passed as the adapter of another transform.
    is_adapter_missing = adapter is None and not takes_operands and _is_hashable(transform)
    candidate = transform if is_adapter_missing else adapter
    # With an adapter in the table, a transform is not refused any more.
    can_be_refused = _is_hashable(candidate) and candidate not in ADAPTERS
    # An error that says what to write instead, or None.
    refusal = refusal_of(candidate) if can_be_refused else None
    if refusal is not None:
        raise refusal
    # Each branch puts into `adapter` what the table gets.
    if _is_hashable(adapter) and adapter in ADAPTERS:
        # The user passed a transform in the table, such as `jax.vmap`. Its adapter serves both.
        registered = ADAPTERS[adapter]
        if takes_operands and not isinstance(registered, TakingOperands):
            raise TypeError(
                f"`{title_of(transform)}` takes a function and its arguments at once (`takes_operands=True`), but "
                f"`{title_of(adapter)}` takes only the function. So the two cannot be treated alike.\n"
                f"{_WRITE_AN_ADAPTER}"
            )
        adapter = registered
    elif takes_operands and callable(adapter):
        # Under `in_place=True`, changes of the arguments are written back into the caller's objects. Nobody can see
        # whether a user's adapter does so. If it did not, changes would be lost in silence. So the transform refuses
        # `in_place=True`.
        adapter = TakingOperands(adapter, writes=False)
    elif adapter is None and not takes_operands:
        # All that is known of the transform is that it treats all arguments alike.
        adapter = OpaqueTransform
    elif not callable(adapter):
        # Without operands, an adapter of None says that the transform treats all arguments alike.
        if takes_operands:
            raise TypeError(
                f"`adapter` is {adapter!r}, and must be a function that says how the transform passes arguments on.\n"
                f"{_WRITE_AN_ADAPTER}"
            )
        raise TypeError(
            f"`adapter` must be None, a registered transform or a callable, not {adapter!r}:\n"
            "    sharedtree.register_transform(transform, adapter)"
        )
    ADAPTERS[transform] = adapter


_WRITE_AN_ADAPTER = (
    "Write such a function, an adapter (docs/adapters.md has an example), and register it:\n"
    "    sharedtree.register_transform(transform, adapter, takes_operands=True)"
)


def _no_transform_error(transform: Callable[..., Any], argument: Any) -> TypeError:
    """Makes the error for a function in the place of a transform: `preserve_identities(f)(x)`.

    Args:
        transform: the object passed to `preserve_identities`, `f`.
        argument: the first argument of the result, `x`.
    """
    return TypeError(
        f"`{title_of(transform)}` was passed as a transform, but called with {shown(argument)} instead of a function. "
        "Pass the transform first, and then the function:\n"
        "    f = sharedtree.preserve_identities(jax.jit)(f)"
    )


def _is_hashable(obj: Any) -> bool:
    """Returns True if an object can be a key of the table."""
    try:
        hash(obj)
    except TypeError:
        return False
    return True
