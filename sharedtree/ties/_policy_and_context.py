"""`Policy`, what to do about sharing, and `Context`, the thread-local scope that several packs and unpacks share.

A pack tags each object with a number; an unpack makes one instance a number. Ordinarily each call of
`sharedtree.tree.flatten` starts afresh. Inside a `Context` they go on counting, so that an object which occurs in two
trees, flattened one after the other, is one object again when both are unflattened.
"""

import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any, Literal, Self

from ..core._errors import ContextMismatchError
from ..core._native_walk import native
from ..core._pack_and_unpack import Rules, Tags, pack, unpack, walked
from ..core._structure import Structure
from ..core._trees_taken_apart import Walked


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """What counts as sharing, and what to do when it is lost.

    Attributes:
        arrays: arrays carry identity. If False only modules and mutable containers do.
        containers: outside modules, too, mutable containers (lists, dicts) and the arrays reached through one carry
            identity, in the arguments and in the results of transforms. For models that are dicts of arrays, as Linen's
            and Haiku's are. Bare arguments and arrays only below tuples stay values.
        on_untie: what to do when a tie enters a transform and does not leave it, or was lost between two calls or on
            its way to an optimizer: `"warn"` (`UntiedWarning`), `"error"` (`UntiedError`) or `"ignore"`. Checked when
            a function is traced, never on a cached call, and in each `update` of `sharedtree.optimizer`.
        in_place: True: what the function changed in its arguments is written back into the caller's objects, all or
            nothing. Costs one output for each leaf that changed. False: it is meant to be lost. None, the default: it
            is lost, and a `LostChangeWarning` says so of objects that are used as state: those of Flax NNX and treex,
            and `sharedtree.Module`.
        pass_through: under `jax.jit`, a module that the function returns unchanged comes back as the caller's own
            object, without an output or a copy. Donating it later donates the original.

    Example:
        >>> import sharedtree as st
        >>> st.Policy(on_untie="error").on_untie
        'error'
    """

    arrays: bool = True
    containers: bool = False
    on_untie: Literal["warn", "error", "ignore"] = "warn"
    in_place: bool | None = None
    pass_through: bool = True

    def __post_init__(self) -> None:
        if self.on_untie not in ("warn", "error", "ignore"):
            raise ValueError(f'`on_untie` is "warn", "error" or "ignore", not {self.on_untie!r}.')

    @property
    def rules(self) -> Rules:
        """How to walk what is inside a module under this policy, and what outside is an object."""
        return _rules_of(self.arrays, self.containers)


@dataclasses.dataclass(frozen=True, slots=True)
class PolicyHere:
    """The policy of the thread at each call, but in place or not, whatever that one says.

    Attributes:
        in_place: as in `Policy`.
    """

    in_place: bool


PolicyOption = Policy | PolicyHere | None
"""What counts as sharing, as it was said when a function was wrapped. None stands for the policy of the thread."""


@functools.cache
def _rules_of(arrays: bool, containers: bool) -> Rules:
    return Rules(arrays=arrays, containers=containers)


class Context:
    """A scope in which flattens share their tags and unflattens share their instances.

    Contexts belong to the thread that entered them and nest: the innermost counts. What is flattened in one Context is
    unflattened, in the same order, in the same or in another one; a Context that has begun to unflatten the trees of
    one does not accept those of a second.

    Args:
        policy: the policy inside the scope, also of transforms that were given none of their own. Default: that of
            the enclosing scope.

    Raises:
        ContextMismatchError: on unflattening a structure whose earlier trees were not unflattened in this Context, or
            that was made by another Context than those were.

    Example:
        >>> import sharedtree as st
        >>> import jax.numpy as jnp
        >>> shared = [jnp.ones(2)]
        >>> with st.Context():
        ...     leaves1, structure1 = st.tree.flatten({"a": shared})
        ...     leaves2, structure2 = st.tree.flatten({"b": shared})
        >>> len(leaves1), len(leaves2)
        (1, 0)
        >>> with st.Context():
        ...     first = st.tree.unflatten(structure1, leaves1)
        ...     second = st.tree.unflatten(structure2, leaves2)
        >>> first["a"] is second["b"]
        True

    Limitations: everything that was flattened or unflattened is kept alive until the Context is garbage.
    """

    def __init__(self, policy: Policy | None = None) -> None:
        self.policy = current_policy() if policy is None else policy
        self._tags = Tags()
        self._table: list[Any] = []
        self._mark = object()
        self._maker: object | None = None

    def __enter__(self) -> Self:
        _count(1)  # before it is there, as in `__exit__` after it is gone: to count too many costs time only
        _active.stack.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _active.stack.pop()
        _count(-1)

    def _pack(self, tree: Any, rules: Rules) -> tuple[list[Any], Structure]:
        before = len(self._tags.objects)
        try:
            return pack(tree, self._tags, rules, maker=self._mark)
        except BaseException:
            self._tags.forget(before)
            raise

    def _unpack(self, structure: Structure, leaves: Any) -> Any:
        if structure.base == 0:
            self._table, self._maker = [], structure.maker
        if self._maker is not structure.maker or structure.base != len(self._table):
            raise ContextMismatchError(
                "The structure continues a sequence of trees that were flattened in one Context, and this Context has "
                "not unflattened the trees before it, or has unflattened those of another.\n"
                "Unflatten all of them, in the order in which they were flattened, inside one:\n"
                "    with sharedtree.Context():\n"
                "        trees = [sharedtree.tree.unflatten(structure, leaves) for leaves, structure in flattened]"
            )
        return unpack(structure, leaves, self._table)


class _Active(threading.local):
    def __init__(self) -> None:
        self.stack: list[Context] = []


_active = _Active()


# So that C need not ask for the policy as long as there is no `Context` in any thread.
_count: Callable[[int], None] = (lambda _: None) if native is None else native.count_contexts


def current_policy(given: PolicyOption = None) -> Policy:
    """The policy of the innermost Context of this thread, or the default one, as far as none was given."""
    if given is None:
        return _active.stack[-1].policy if _active.stack else DEFAULT
    return given if isinstance(given, Policy) else _with_in_place(current_policy(), given.in_place)


# Callers compare policies by identity, so the same one comes back each time. There are only so many.
@functools.cache
def _with_in_place(policy: Policy, in_place: bool) -> Policy:
    return policy if policy.in_place is in_place else dataclasses.replace(policy, in_place=in_place)


def with_options(options: dict[str, Any], policy: PolicyOption) -> PolicyOption:
    """What counts as sharing, by the options `policy` and `in_place`, which are taken out of the others.

    `jax.checkpoint` has an option `policy` of its own, which is of another type and stays.

    Args:
        options: of a transform, ours among them.
        policy: what was said before.

    Raises:
        TypeError: if `in_place` is no bool.
    """
    if isinstance(options.get("policy"), Policy):
        policy = options.pop("policy")
    in_place = options.pop("in_place", None)
    if in_place is None:
        return policy
    if not isinstance(in_place, bool):
        raise TypeError(
            f"`in_place` is True, False or None, which leaves it to the policy, not {in_place!r}. It is not said of "
            "each argument: what the function changed is written back wherever it is.\n"
            "    sharedtree.jit(f, in_place=True)"
        )
    return _with_in_place(policy, in_place) if isinstance(policy, Policy) else PolicyHere(in_place)


DEFAULT = Policy()


IsLeaf = Callable[[Any], bool] | None


def rules_here(is_leaf: IsLeaf = None) -> Rules:
    """How to walk a whole tree as inside under the policy of this thread."""
    rules = current_policy().rules
    return rules if is_leaf is None else rules._replace(is_leaf=is_leaf)


def pack_alone(tree: Any, is_leaf: IsLeaf = None) -> tuple[list[Any], Structure]:
    """Packs a whole tree as inside, by itself."""
    return pack(tree, Tags(), rules_here(is_leaf))


def walk_alone(tree: Any, is_leaf: IsLeaf = None) -> Walked:
    """Walks a whole tree as inside, by itself."""
    return walked(tree, rules_here(is_leaf))


def pack_here(tree: Any, is_leaf: IsLeaf = None) -> tuple[list[Any], Structure]:
    """Packs a whole tree as inside, in the innermost Context of this thread if there is one."""
    return _active.stack[-1]._pack(tree, rules_here(is_leaf)) if _active.stack else pack_alone(tree, is_leaf)


def unpack_here(structure: Structure, leaves: Any) -> Any:
    """The inverse of `pack_here`."""
    if structure.maker is None:
        return unpack(structure, leaves)
    if not _active.stack:
        if structure.base == 0:
            return unpack(structure, leaves)
        return Context()._unpack(structure, leaves)
    return _active.stack[-1]._unpack(structure, leaves)
