"""Function transformers of which nothing is known but that: what they do with arguments and results is theirs.

They may hand back what the function returned, something like the arguments, or both, in any nesting; so the arguments
are marked as such (see `_likes`). And what they do to each argument is hidden, unless they were registered as treating
all alike.
"""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

from ..._context import Policy, current_policy
from ..._jax_internals import api_boundary
from .._calling import calling
from .._function import FunctionTransform
from .._in_place import InPlace
from .._likes import as_entered, as_operands, unpack_likes
from .._packing import Call
from .._prefixes import has_modules
from .._treatments import Treatment


class OpaqueTransform(FunctionTransform):
    """A transform that treats all arguments alike, and of which nothing else is known."""

    def check_options(self) -> None:
        """Refuses options that reach inside a module: how they are to be translated is not known."""
        for name, option in self.options.items():
            if has_modules(option):
                raise TypeError(
                    f"`{name}` of `{self.transform_name}` reaches inside a module, and no adapter says how to "
                    "translate it to the leaves that the transform sees. Give one value for the whole module, or say "
                    "which known transform has the same options:\n"
                    "    sharedtree.register_transform(transform, jax.vmap)"
                )
        super().check_options()

    @api_boundary
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        policy = current_policy(self.policy)
        call = self.executable(self.pack(args, kwargs, policy))
        named = {name: as_operands(value) for name, value in call.kwargs.items()}
        with calling(self.names, call):
            result = self.transformed(policy)(*map(as_operands, call.args), **named)
        return self.finish(result, call, policy)

    def finish(
        self, result: Any, call: Call, policy: Policy, used: Callable[[Call], Sequence[Any]] | None = None
    ) -> Any:
        """As the base, for results in which anything may be nested in anything."""
        arguments = call.modules
        if not policy.in_place:
            return unpack_likes(result, arguments, statics=True)
        changes = InPlace(call)
        _, result = unpack_likes(
            result, arguments, statics=True, given=lambda _: call.tags.objects.__getitem__, update=changes.update
        )
        changes.commit()
        return result

    def inner(self, policy: Policy) -> Callable[..., Any]:
        """As the base, for arguments that are marked."""
        run = super().inner(policy)

        def inner(*args: Any, **kwargs: Any) -> Any:
            return run(*map(as_entered, args), **{name: as_entered(value) for name, value in kwargs.items()})

        functools.update_wrapper(inner, run)
        return inner


class UnregisteredTransform(OpaqueTransform):
    """A transform that nothing is known about: what it does to each argument is hidden, so none may be tied to another.

    Ties inside one argument are kept, those of arrays between arguments are cut. A vmap with `in_axes=(0, None)` hidden
    in a lambda would otherwise map one occurrence of a module and not the other, and silently compute something else.
    """

    def pack(self, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy) -> Call:
        """As the base; refuses mutation, whose results would have no place."""
        if policy.in_place:
            raise ValueError(
                f"`in_place=True` adds to what a function returns, which `{self.transform_name}` may not "
                "stand: it is not registered. Say that it is a plain function transformer:\n"
                "    sharedtree.register_transform(transform)"
            )
        return super().pack(args, kwargs, policy)

    def treatments(self, num_args: int, keywords: Collection[str]) -> Sequence[Treatment]:
        """Each argument might be treated in its own way."""
        return (
            Treatment(
                lambda position: position,
                describe=lambda position: f"in `{self.names.text(position)}`, whose treatment is not known",
                is_known=False,
                advice=lambda _: (
                    "The transform is not registered, so it may treat these arguments differently without "
                    "a way to tell. If it treats all arguments alike, say so, once:\n"
                    "    sharedtree.register_transform(transform)\n"
                    "or, if it is some other transform with options of its own:\n"
                    "    sharedtree.register_transform(transform, jax.vmap)\n"
                ),
            ),
        )
