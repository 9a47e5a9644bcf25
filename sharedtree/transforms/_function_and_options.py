"""The arguments of a transform: one is the function, others are options, and some transforms take operands.

An *operand* is an argument of the function that is passed to the transform itself, as in `jax.lax.scan(f, init, xs)`.
A transform with operands needs an adapter of its own, and is an error here. (An *adapter* makes a function under a
transform, with identities preserved. The *vanilla* transform is JAX's or Equinox's own.)

    jax.vmap(f, 0)            apply_options(jax.vmap, (f, 0), {})           f, {"in_axes": 0}
    jax.grad(fun=f)           apply_options(jax.grad, (), {"fun": f})       f, {}
    jax.jit(donate_argnums=0) apply_options(jax.jit, (), {…})               None, {"donate_argnums": 0}

A module under one of Equinox's transforms is a module again. The leaves of `equinox.filter_vmap(layer)` are the
leaves of the layer. So if a model holds it, training the model trains the layer. `TransformedModule` does the same with
identities preserved. It holds the layer, the transform and the options, and applies the transform anew in each call.
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import equinox as eqx
import equinox.internal
import jax
import jax.custom_batching
import jax.experimental

from ..core._jax_internals import api_boundary
from ..core._static_values import Static
from ..libraries._equinox import name_of
from ..ties._policy_and_context import PolicyOption
from ._option_lists import title_of


def apply_options(
    transform: Callable[..., Any], positional: Sequence[Any], options: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Separates the function from the options, by the signature of the transform.

    Args:
        transform: the vanilla transform.
        positional: positional arguments: the function, and perhaps options, as in `jax.vmap(f, 0)`.
        options: keyword arguments. The function may be among them, as in `jax.grad(fun=f)`.

    Returns:
        The function, and all options by name. The function is None if there is none yet.

    Raises:
        TypeError: if the transform takes operands, or would not accept the arguments.
    """
    try:
        signature = inspect.signature(transform)
    except (ValueError, TypeError):
        # The parameters are unknown. The first argument is the function, and more positional ones may be operands.
        if len(positional) > 1:
            _refuse_operands(transform)
        return (positional[0] if positional else None), options
    first, *later_parameters = signature.parameters.values() or (None,)
    # A signature `(*args, **kwargs)` says as little as no signature.
    if first is None or first.kind not in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD):
        if len(positional) > 1:
            _refuse_operands(transform)
        return (positional[0] if positional else None), options
    # The function is passed by keyword: take it out of the options.
    if first.name in options and first.kind is first.POSITIONAL_OR_KEYWORD and not positional:
        positional, options = [options[first.name]], {k: v for k, v in options.items() if k != first.name}
    # There is no function yet, only options.
    if not positional:
        return None, options
    # Refuse operands. Options have defaults. A parameter without a default that gets no argument by keyword is an
    # operand, as `init` of `jax.lax.scan(f, init, xs)`.
    option_parameters = [p for p in later_parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    has_operand = any(p.default is p.empty and p.name not in options for p in option_parameters)
    if has_operand or _takes_any_operands(transform, later_parameters):
        _refuse_operands(transform)
    # Name the options that were passed by position. `bind` raises if there are too many, or one is there twice.
    if len(positional) > 1:
        signature.bind(*positional, **options)
    options_by_position = {p.name: value for p, value in zip(option_parameters, positional[1:], strict=False)}
    return positional[0], {**options_by_position, **options}


def _takes_any_operands(transform: Callable[..., Any], parameters: Sequence[inspect.Parameter]) -> bool:
    """Returns True if a transform of JAX or Equinox has a parameter like `*operands` of `jax.lax.cond`.

    Returns False for all other transforms, since a user's transform may pass its `*args` on as options.
    """
    package = str(getattr(transform, "__module__", "")).partition(".")[0]
    return package in ("jax", "equinox") and any(p.kind is p.VAR_POSITIONAL for p in parameters)


def _refuse_operands(transform: Callable[..., Any]) -> NoReturn:
    """Raises the error for a transform that takes operands and has no adapter.

    Raises:
        TypeError: with two fixes: to pass a `Dag`, or to register an adapter.
    """
    raise TypeError(
        f"`{title_of(transform)}` is called with a function and its arguments at once, and sharedtree does not know "
        "how it passes these to the function.\n"
        "Call it without `preserve_identities`, with a `sharedtree.Dag` for each model. In a Dag, a tied array is one "
        "leaf, so ties survive any transform. As with `jax.vjp`:\n"
        "    jax.vjp(lambda dag: f(dag.tree), sharedtree.Dag(model))"
    )


def in_code(title: str, options: str, function: str = "") -> str:
    """Writes code that applies a transform with identities preserved, for messages.

        jax.jit             sharedtree.jit(f, in_place=True)
        my_transform        sharedtree.preserve_identities(my_transform, in_place=True)
        jax.lax.scan        functools.partial(sharedtree.scan, in_place=True)

    Args:
        title: name of the transform in errors.
        options: options as code. May be empty.
        function: the function as code. Empty if it is not known: then the code has `f`, or no function.
    """
    package, _, name = title.rpartition(".")
    # `sharedtree.transforms`. It imports this file, so this file cannot import it.
    public_module = sys.modules[__name__.rpartition(".")[0]]
    ready_made = getattr(public_module, name, None) if package in ("jax", "jax.lax", "equinox") else None
    # The package offers no such transform by name.
    if ready_made is None:
        options_after_title = f", {options}" if options else ""
        # The title of a lambda is no code.
        title = title if all(part.isidentifier() for part in title.split(".")) else "transform"
        return f"sharedtree.preserve_identities({title}{options_after_title}){function and f'({function})'}"
    first, *later_parameters = inspect.signature(ready_made).parameters.values()
    has_required_option = any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in later_parameters)
    # A transform without operands, such as `jit`. Its function has the default None, since `jit(in_place=True)` is a
    # decorator.
    if first.default is None and not has_required_option:
        return f"sharedtree.{name}({function or 'f'}{options and f', {options}'})"
    # A transform with operands, such as `scan`. The operands are not known here.
    return f"functools.partial(sharedtree.{name}{options and f', {options}'})"


def transform_named(name: str) -> Any:
    """Finds a transform by its public name, such as `jax.lax.scan`. The reverse of `public_name`."""
    module, _, attribute = name.rpartition(".")
    # The module is imported already: the package imports all modules of which `public_name` returns names.
    return getattr(sys.modules[module], attribute)


class How:
    """A transform with its options: how to wrap a function. It is the static part of a `TransformedModule`.

    Two objects of this class are equal if their adapters, transforms and policies are equal, and their options are
    equal by type and value.

    Args:
        adapter: (transform, function, policy, options) → the function under the transform, with identities preserved.
        transform: the vanilla transform.
        policy: what carries identity. None for the policy in force at each call.
        options: options of the transform.

    Raises:
        Incomparable: if an option cannot be compared.
    """

    __slots__ = ("_key", "adapter", "options", "policy", "transform")

    def __init__(
        self, adapter: Callable[..., Any], transform: Callable[..., Any], policy: PolicyOption, options: dict[str, Any]
    ) -> None:
        """Makes the key by which two objects of this class are compared."""
        self.adapter = adapter
        self.transform = transform
        self.policy = policy
        self.options = options
        # The options are sorted, since their order makes no difference.
        sorted_options = tuple([(name, options[name]) for name in sorted(options)])
        self._key = Static((adapter, transform, policy, sorted_options))

    def applied_to(self, function: Callable[..., Any]) -> Any:
        """Returns the function under the transform, with identities preserved. Each call makes a new wrapper."""
        return self.adapter(self.transform, function, self.policy, self.options)

    def __eq__(self, other: object) -> bool:
        return type(other) is How and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return name_of(self.transform, self.transform)


def is_of_equinox(transform: Callable[..., Any]) -> bool:
    """Returns True for Equinox's transforms.

    These make a module of a module, and two equal functions of two equal ones.
    """
    return str(getattr(transform, "__module__", "")).partition(".")[0] == "equinox"


class TransformedModule(eqx.Module):
    """A module under one of Equinox's transforms, with identities preserved. Its leaves are the leaves of the module.

    Attributes:
        function: the module that is transformed.
        how: the transform and its options.
    """

    function: Any
    how: How = eqx.field(static=True)

    @property
    def __wrapped__(self) -> Any:
        return self.function

    def wrapper(self) -> Any:
        """Returns the module under the transform, as a function. Each call makes a new function."""
        return self.how.applied_to(self.function)

    # `api_boundary` removes the frames of JAX and of this package from the tracebacks of errors.
    @api_boundary
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.wrapper()(*args, **kwargs)

    @api_boundary
    def lower(self, /, *args: Any, **kwargs: Any) -> Any:
        """Traces a call and translates it for the compiler, without running it, as `equinox.filter_jit(f).lower` does.

        Raises:
            AttributeError: under other transforms than `equinox.filter_jit`.
        """
        return self.wrapper().lower(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        # A module in a class body is a method, as in Equinox. `Partial` is a pytree, so its leaves are seen.
        return self if instance is None else jax.tree_util.Partial(self, instance)
