"""Types for type checkers: the transforms, their options, and the functions that they return.

There are four sorts of classes:

- Classes that begin with `Like`, such as `LikeJit`: signatures of the vanilla transforms. A checker cannot tell whether
  a transform is `jax.jit`, but it can compare signatures. So each of these classes describes a signature that no other
  transform of JAX has. `preserve_identities` has an overload for each.
- Classes of options, named by what the transform does: `Compiling` has the options of `jax.jit`. They have the options
  of all supported versions of JAX. A version without an option refuses it itself.
- Transforms with identities preserved, such as `Jit`, the type of `sharedtree.jit`.
- Functions that these return, such as `Jitted`.

    preserve_identities(jax.jit)     `jax.jit` returns a `jax.stages.Wrapped`, so it is a `LikeJit`
                                     the overload for `LikeJit` returns a `Jit`
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Protocol, Self, TypedDict, TypeVar, Unpack, overload

import jax

from ..ties._policy_and_context import PolicyOption

# P: parameters of a function. Q: those of a method without `self`. A: its first argument. R: its result. X: its
# auxiliary data.
P = ParamSpec("P")
Q = ParamSpec("Q")
# The bound lets a checker infer `Any` for the parameter of a lambda.
A = TypeVar("A", bound=Any)
R = TypeVar("R")
X = TypeVar("X")
R_co = TypeVar("R_co", covariant=True)


class Jitted(Protocol, Generic[P, R_co]):
    """A function under `sharedtree.jit`. Its methods compile it ahead of time, as those of `jax.jit` do."""

    __name__: str
    __wrapped__: Callable[..., Any]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...  # noqa: D102
    # As an attribute of a class, it binds to an instance as a method does.
    @overload
    def __get__(self, instance: None, owner: Any = None) -> Self: ...
    @overload
    def __get__(self: "Jitted[Concatenate[Any, Q], R_co]", instance: Any, owner: Any = None) -> Callable[Q, R_co]: ...
    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Any: ...  # noqa: D102
    def trace(self, *args: P.args, **kwargs: P.kwargs) -> Any: ...  # noqa: D102
    def eval_shape(self, *args: P.args, **kwargs: P.kwargs) -> Any: ...  # noqa: D102
    def clear_cache(self) -> None: ...  # noqa: D102


class _Unlike:
    """A class without instances. It tells `LikeGrad` from `LikeValueAndGrad`.

    `jax.grad` is annotated to return a plain `Callable`. A function of this type may return anything, so a checker
    accepts `jax.grad` as a transform whose functions return an `_Unlike`. `jax.value_and_grad` is annotated to return
    functions with a pair as their result. A pair is no `_Unlike`, so `jax.value_and_grad` is no `LikeGrad`.
    """


_Pair = tuple[Any, Any]
"""What a function under `jax.value_and_grad` returns."""


class LikeJit(Protocol):
    """Transforms that return functions with the method `lower`: `jax.jit`."""

    def __call__(self, fun: Callable[..., Any], /) -> jax.stages.Wrapped: ...  # noqa: D102


class LikeCheckpoint(Protocol):
    """Transforms with the option `prevent_cse`: `jax.checkpoint`."""

    def __call__(self, fun: Callable[..., Any], *, prevent_cse: bool = ...) -> Callable[..., Any]: ...  # noqa: D102


class LikeGrad(Protocol):
    """Transforms with the option `reduce_axes` that return functions with any result: `jax.grad`."""

    def __call__(self, fun: Callable[..., Any], *, reduce_axes: Sequence[Any] = ...) -> Callable[..., _Unlike]: ...  # noqa: D102


class LikeValueAndGrad(Protocol):
    """Transforms with the option `reduce_axes` that return functions with a pair as result: `jax.value_and_grad`."""

    def __call__(self, fun: Callable[..., Any], *, reduce_axes: Sequence[Any] = ...) -> Callable[..., _Pair]: ...  # noqa: D102


class Usual(TypedDict, total=False):
    """Options that this package adds to every transform. The classes below add those of one vanilla transform."""

    policy: PolicyOption
    in_place: bool | None


class Scanning(Usual, total=False):
    """The experimental option of `jax.lax.scan`. Its other options are parameters of `sharedtree.scan`."""

    _split_transpose: bool


class Compiling(Usual, total=False):
    """Options of `jax.jit`."""

    in_shardings: Any
    out_shardings: Any
    static_argnums: int | Sequence[int] | None
    static_argnames: str | Iterable[str] | None
    donate_argnums: int | Sequence[int] | None
    donate_argnames: str | Iterable[str] | None
    keep_unused: bool
    device: Any
    backend: str | None
    inline: Any
    abstracted_axes: Any
    compiler_options: dict[str, Any] | None


class FilterCompiling(Compiling, total=False):
    """Options of `equinox.filter_jit`, which passes options of `jax.jit` on to it."""

    donate: str


class Rematerialising(TypedDict, total=False):
    """Options of `jax.checkpoint`. `policy` is JAX's checkpoint policy, or a `Policy` of this package.

    It is no subclass of `Usual`, where `policy` cannot be JAX's.
    """

    prevent_cse: Any
    concrete: bool
    policy: Any
    in_place: bool | None
    static_argnums: int | Sequence[int]
    static_argnames: str | Iterable[str]


class Differentiating(Usual, total=False):
    """Options of `jax.grad`, `jax.value_and_grad` and Jacobians that do not change the type of the result.

    `wrt` is an option of this package.
    """

    holomorphic: bool
    allow_int: bool
    reduce_axes: Sequence[Any]
    wrt: Any


class Argnums(Differentiating, total=False):
    """All options of `jax.grad`, `jax.value_and_grad` and Jacobians, with those that change the type of the result."""

    argnums: int | Sequence[int]
    has_aux: bool


class Vectorising(Usual, total=False):
    """Options of `jax.vmap` and `equinox.filter_vmap`."""

    in_axes: Any
    out_axes: Any
    axis_name: Any
    axis_size: int | None
    spmd_axis_name: Any
    sum_match: bool


class Parallelising(Usual, total=False):
    """Options of `jax.pmap`."""

    axis_name: Any
    in_axes: Any
    out_axes: Any
    static_broadcasted_argnums: int | Iterable[int]
    devices: Sequence[Any] | None
    backend: str | None
    axis_size: int | None
    donate_argnums: int | Iterable[int]
    global_arg_shapes: Any


class Sharding(Usual, total=False):
    """Options of `jax.shard_map`."""

    out_specs: Any
    in_specs: Any
    mesh: Any
    axis_names: Any
    check_vma: bool


class Tracing(Usual, total=False):
    """Options of `jax.make_jaxpr`."""

    static_argnums: int | Iterable[int]
    axis_env: Any
    return_shape: bool
    abstracted_axes: Any


class Linearising(Usual, total=False):
    """Options of `jax.linearize`, without `has_aux`, on which the type of the result depends."""

    in_nzs: Any


class Pulling(Linearising, total=False):
    """Options of `jax.vjp`, without `has_aux`, on which the type of the result depends."""

    reduce_axes: Sequence[Any]
    saveable_args: Any


class Transposing(Usual, total=False):
    """Options of `jax.linear_transpose`."""

    reduce_axes: Sequence[Any]


class Placing(TypedDict, total=False):
    """Options of `jax.device_put`. `sharedtree.device_put` takes none of this package's."""

    src: Any
    donate: Any
    may_alias: Any


class Exporting(Usual, total=False):
    """Options of `jax.export.export`."""

    platforms: Sequence[str] | None
    disabled_checks: Sequence[Any]
    _override_lowering_rules: Any


class Jit(Protocol):
    """`jax.jit` with identities preserved."""

    @overload
    def __call__(self, function: Callable[P, R], /, **options: Unpack[Compiling]) -> Jitted[P, R]: ...
    @overload
    def __call__(self, **options: Unpack[Compiling]) -> Callable[[Callable[P, R]], Jitted[P, R]]: ...


class FilterJit(Protocol):
    """`equinox.filter_jit` with identities preserved."""

    @overload
    def __call__(self, function: Callable[P, R], /, **options: Unpack[FilterCompiling]) -> Jitted[P, R]: ...
    @overload
    def __call__(self, **options: Unpack[FilterCompiling]) -> Callable[[Callable[P, R]], Jitted[P, R]]: ...


class Checkpoint(Protocol):
    """`jax.checkpoint` with identities preserved."""

    @overload
    def __call__(self, function: Callable[P, R], /, **options: Unpack[Rematerialising]) -> Callable[P, R]: ...
    @overload
    def __call__(self, **options: Unpack[Rematerialising]) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


class Grad(Protocol):
    """`jax.grad` with identities preserved. Without `argnums`, the gradient has the type of the first argument."""

    # The overloads, in order: without `argnums` and without auxiliary data; without `argnums` and with auxiliary data;
    # with any options; without a function, so that it returns a decorator.
    @overload
    def __call__(
        self,
        function: Callable[Concatenate[A, P], Any],
        /,
        *,
        has_aux: Literal[False] = False,
        **options: Unpack[Differentiating],
    ) -> Callable[Concatenate[A, P], A]: ...
    @overload
    def __call__(
        self,
        function: Callable[Concatenate[A, P], tuple[Any, X]],
        /,
        *,
        has_aux: Literal[True],
        **options: Unpack[Differentiating],
    ) -> Callable[Concatenate[A, P], tuple[A, X]]: ...
    @overload
    def __call__(
        self, function: Callable[P, Any], /, *positional: Any, **options: Unpack[Argnums]
    ) -> Callable[P, Any]: ...
    @overload
    def __call__(self, **options: Unpack[Argnums]) -> Callable[[Callable[P, Any]], Callable[P, Any]]: ...


class ValueAndGrad(Protocol):
    """`jax.value_and_grad` with identities preserved. Gradients have the same types as under `Grad`."""

    # With `has_aux=True`, R is the pair of the value and the auxiliary data.
    @overload
    def __call__(
        self, function: Callable[Concatenate[A, P], R], /, *, has_aux: bool = False, **options: Unpack[Differentiating]
    ) -> Callable[Concatenate[A, P], tuple[R, A]]: ...
    @overload
    def __call__(
        self, function: Callable[P, R], /, *positional: Any, **options: Unpack[Argnums]
    ) -> Callable[P, tuple[R, Any]]: ...
    @overload
    def __call__(self, **options: Unpack[Argnums]) -> Callable[[Callable[P, R]], Callable[P, tuple[R, Any]]]: ...


class Vmap(Protocol):
    """`jax.vmap` and `equinox.filter_vmap` with identities preserved."""

    @overload
    def __call__(
        self, function: Callable[P, Any], /, *positional: Any, **options: Unpack[Vectorising]
    ) -> Callable[P, Any]: ...
    @overload
    def __call__(self, **options: Unpack[Vectorising]) -> Callable[[Callable[P, Any]], Callable[P, Any]]: ...


class Pmap(Protocol):
    """`jax.pmap` with identities preserved."""

    @overload
    def __call__(
        self, function: Callable[P, Any], /, *positional: Any, **options: Unpack[Parallelising]
    ) -> Callable[P, Any]: ...
    @overload
    def __call__(self, **options: Unpack[Parallelising]) -> Callable[[Callable[P, Any]], Callable[P, Any]]: ...


class ShardMap(Protocol):
    """`jax.shard_map` with identities preserved."""

    @overload
    def __call__(self, function: Callable[P, Any], /, **options: Unpack[Sharding]) -> Callable[P, Any]: ...
    @overload
    def __call__(self, **options: Unpack[Sharding]) -> Callable[[Callable[P, Any]], Callable[P, Any]]: ...


class Jacobian(Protocol):
    """`jax.jacfwd`, `jacrev` and `hessian` with identities preserved."""

    @overload
    def __call__(
        self, function: Callable[P, Any], /, *positional: Any, **options: Unpack[Argnums]
    ) -> Callable[P, Any]: ...
    @overload
    def __call__(self, **options: Unpack[Argnums]) -> Callable[[Callable[P, Any]], Callable[P, Any]]: ...


class MakeJaxpr(Protocol):
    """`jax.make_jaxpr` with identities preserved."""

    @overload
    def __call__(
        self, function: Callable[P, Any], /, *positional: Any, **options: Unpack[Tracing]
    ) -> Callable[P, Any]: ...
    @overload
    def __call__(self, **options: Unpack[Tracing]) -> Callable[[Callable[P, Any]], Callable[P, Any]]: ...


class CustomVjp(Protocol, Generic[P, R_co]):
    """A function under `sharedtree.custom_vjp`. Its method `defvjp` sets the rules."""

    __name__: str
    __wrapped__: Callable[..., Any]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...  # noqa: D102
    def __get__(self, instance: Any, owner: type | None = None) -> Callable[..., R_co]: ...  # noqa: D105
    def defvjp(  # noqa: D102
        self,
        fwd: Callable[..., Any],
        bwd: Callable[..., Any],
        symbolic_zeros: bool = False,
        optimize_remat: bool = False,
        generic_batching: bool = False,
    ) -> None: ...


class CustomJvp(Protocol, Generic[P, R_co]):
    """A function under `sharedtree.custom_jvp`. Its methods `defjvp` and `defjvps` set the rule."""

    __name__: str
    __wrapped__: Callable[..., Any]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...  # noqa: D102
    def __get__(self, instance: Any, owner: type | None = None) -> Callable[..., R_co]: ...  # noqa: D105
    def defjvp(self, jvp: Callable[..., Any], symbolic_zeros: bool = False) -> Callable[..., Any]: ...  # noqa: D102
    def defjvps(self, *jvps: Callable[..., Any] | None) -> None: ...  # noqa: D102


class CustomVjpDecorator(Protocol):
    """`jax.custom_vjp` with identities preserved. It returns a `CustomVjp`. Without a function, returns a decorator."""

    @overload
    def __call__(
        self,
        function: Callable[P, R],
        /,
        nondiff_argnums: Sequence[int] = ...,
        nondiff_argnames: Sequence[str] = ...,
        **options: Unpack[Usual],
    ) -> CustomVjp[P, R]: ...
    @overload
    def __call__(
        self, *, nondiff_argnums: Sequence[int] = ..., nondiff_argnames: Sequence[str] = ..., **options: Unpack[Usual]
    ) -> Callable[[Callable[P, R]], CustomVjp[P, R]]: ...


class CustomJvpDecorator(Protocol):
    """`jax.custom_jvp` with identities preserved. It returns a `CustomJvp`. Without a function, returns a decorator."""

    @overload
    def __call__(
        self,
        function: Callable[P, R],
        /,
        nondiff_argnums: Sequence[int] = ...,
        nondiff_argnames: Sequence[str] = ...,
        **options: Unpack[Usual],
    ) -> CustomJvp[P, R]: ...
    @overload
    def __call__(
        self, *, nondiff_argnums: Sequence[int] = ..., nondiff_argnames: Sequence[str] = ..., **options: Unpack[Usual]
    ) -> Callable[[Callable[P, R]], CustomJvp[P, R]]: ...
