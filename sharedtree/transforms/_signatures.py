"""What type checkers are told: which transforms there are, and what becomes of a function under each.

A checker cannot ask which transform it is looking at, but can compare signatures. So each of the classes that begin
with `Like` describes what no other transform of JAX has, and `preserve_identities` has an overload for each.
"""

from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Protocol, Self, TypeVar, overload

import jax

from .._context import PolicyOption

P = ParamSpec("P")
Q = ParamSpec("Q")
A = TypeVar("A")
R = TypeVar("R")
X = TypeVar("X")
R_co = TypeVar("R_co", covariant=True)


class Jitted(Protocol, Generic[P, R_co]):
    """What `sharedtree.jit` returns: the function, and JAX's ways to compile it ahead of time."""

    __name__: str
    __wrapped__: Callable[..., Any]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...  # noqa: D102
    @overload
    def __get__(self, instance: None, owner: Any = None) -> Self: ...
    @overload
    def __get__(self: "Jitted[Concatenate[Any, Q], R_co]", instance: Any, owner: Any = None) -> Callable[Q, R_co]: ...
    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Any: ...  # noqa: D102
    def trace(self, *args: P.args, **kwargs: P.kwargs) -> Any: ...  # noqa: D102
    def eval_shape(self, *args: P.args, **kwargs: P.kwargs) -> Any: ...  # noqa: D102
    def clear_cache(self) -> None: ...  # noqa: D102


class _Unlike:
    """No value is one: where a transform says `Callable`, its results may be, and nowhere else."""


_Pair = tuple[Any, Any]


class LikeJit(Protocol):
    """What it returns can be lowered."""

    def __call__(self, fun: Callable[..., Any], /) -> jax.stages.Wrapped: ...  # noqa: D102


class LikeCheckpoint(Protocol):
    """It has the option `prevent_cse`."""

    def __call__(self, fun: Callable[..., Any], *, prevent_cse: bool = ...) -> Callable[..., Any]: ...  # noqa: D102


class LikeGrad(Protocol):
    """It has the option `reduce_axes`, and does not say what it returns."""

    def __call__(self, fun: Callable[..., Any], *, reduce_axes: Sequence[Any] = ...) -> Callable[..., _Unlike]: ...  # noqa: D102


class LikeValueAndGrad(Protocol):
    """It has the option `reduce_axes`, and says that it returns a pair."""

    def __call__(self, fun: Callable[..., Any], *, reduce_axes: Sequence[Any] = ...) -> Callable[..., _Pair]: ...  # noqa: D102


class Jit(Protocol):
    """`jax.jit` with identities preserved."""

    @overload
    def __call__(self, function: Callable[P, R], /, **options: Any) -> Jitted[P, R]: ...
    @overload
    def __call__(self, **options: Any) -> Callable[[Callable[P, R]], Jitted[P, R]]: ...


class Checkpoint(Protocol):
    """`jax.checkpoint` with identities preserved."""

    @overload
    def __call__(self, function: Callable[P, R], /, **options: Any) -> Callable[P, R]: ...
    @overload
    def __call__(self, **options: Any) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


class Grad(Protocol):
    """`jax.grad` with identities preserved: without `argnums` the gradient has the type of the first argument."""

    @overload
    def __call__(
        self,
        function: Callable[Concatenate[A, P], Any],
        /,
        *,
        has_aux: Literal[False] = False,
        holomorphic: bool = False,
        allow_int: bool = False,
        wrt: Any = None,
        policy: PolicyOption = None,
        in_place: bool | None = None,
    ) -> Callable[Concatenate[A, P], A]: ...
    @overload
    def __call__(
        self,
        function: Callable[Concatenate[A, P], tuple[Any, X]],
        /,
        *,
        has_aux: Literal[True],
        holomorphic: bool = False,
        allow_int: bool = False,
        wrt: Any = None,
        policy: PolicyOption = None,
        in_place: bool | None = None,
    ) -> Callable[Concatenate[A, P], tuple[A, X]]: ...
    @overload
    def __call__(self, function: Callable[P, Any], /, *positional: Any, **options: Any) -> Callable[P, Any]: ...
    @overload
    def __call__(self, **options: Any) -> Callable[[Callable[P, Any]], Callable[P, Any]]: ...


class ValueAndGrad(Protocol):
    """`jax.value_and_grad` with identities preserved; the gradient as with `Grad`."""

    @overload
    def __call__(
        self,
        function: Callable[Concatenate[A, P], R],
        /,
        *,
        has_aux: bool = False,
        holomorphic: bool = False,
        allow_int: bool = False,
        wrt: Any = None,
        policy: PolicyOption = None,
        in_place: bool | None = None,
    ) -> Callable[Concatenate[A, P], tuple[R, A]]: ...
    @overload
    def __call__(self, function: Callable[P, R], /, *positional: Any, **options: Any) -> Callable[P, tuple[R, Any]]: ...
    @overload
    def __call__(self, **options: Any) -> Callable[[Callable[P, R]], Callable[P, tuple[R, Any]]]: ...


class Mapped(Protocol):
    """What returns a function of the same parameters."""

    @overload
    def __call__(self, function: Callable[P, Any], /, *positional: Any, **options: Any) -> Callable[P, Any]: ...
    @overload
    def __call__(self, **options: Any) -> Callable[[Callable[P, Any]], Callable[P, Any]]: ...


class CustomVjp(Protocol, Generic[P, R_co]):
    """What `sharedtree.custom_vjp` returns: the function, which takes its rules by `defvjp`."""

    __name__: str
    __wrapped__: Callable[..., Any]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...  # noqa: D102
    def __get__(self, instance: Any, owner: type | None = None) -> Callable[..., R_co]: ...  # noqa: D105
    def defvjp(  # noqa: D102
        self, fwd: Callable[..., Any], bwd: Callable[..., Any], *positional: Any, **options: Any
    ) -> None: ...


class CustomJvp(Protocol, Generic[P, R_co]):
    """What `sharedtree.custom_jvp` returns: the function, which takes its rule by `defjvp` or `defjvps`."""

    __name__: str
    __wrapped__: Callable[..., Any]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...  # noqa: D102
    def __get__(self, instance: Any, owner: type | None = None) -> Callable[..., R_co]: ...  # noqa: D105
    def defjvp(  # noqa: D102
        self, jvp: Callable[..., Any], *positional: Any, **options: Any
    ) -> Callable[..., Any]: ...
    def defjvps(self, *jvps: Callable[..., Any] | None) -> None: ...  # noqa: D102


class LikeCustomVjp(Protocol):
    """`jax.custom_vjp` with identities preserved."""

    @overload
    def __call__(self, function: Callable[P, R], /, *positional: Any, **options: Any) -> CustomVjp[P, R]: ...
    @overload
    def __call__(self, **options: Any) -> Callable[[Callable[P, R]], CustomVjp[P, R]]: ...


class LikeCustomJvp(Protocol):
    """`jax.custom_jvp` with identities preserved."""

    @overload
    def __call__(self, function: Callable[P, R], /, *positional: Any, **options: Any) -> CustomJvp[P, R]: ...
    @overload
    def __call__(self, **options: Any) -> Callable[[Callable[P, R]], CustomJvp[P, R]]: ...
