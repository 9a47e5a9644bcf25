"""`Policy`, what to do about sharing, and `Context`, a scope that several packs and unpacks share.

A pack tags each object with a number; an unpack makes one instance a number. Ordinarily each call of
`sharedtree.tree.flatten` starts afresh. Inside a `Context` they go on counting, so that an object which occurs in two
trees, flattened one after the other, is one object again when both are unflattened.

Which Contexts are entered is an immutable tuple of entries in a context variable, so a task has the entries of whoever
began it. A block may end anywhere: in the consumer of a generator, in the thread whose collector closes one, or after
others that began later. So its end resets nothing to what was there before. It marks its own entry as ended, wherever
that is seen, and whoever reads skips those that have ended.

with a:                         (a)
    task = create_task(...)     (a)         the task sees (a), too
    with b:                     (a, b)
leaving `a`                     (ended)     as does the task from now on
"""

import contextvars
import dataclasses
import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, Literal, Self, TypeVar

from ..core._errors import ContextMismatchError
from ..core._pack_and_unpack import Rules, Tags, native, pack, unpack, walked
from ..core._structure import FlatDag, Structure

ResultType = TypeVar("ResultType")


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
    """The policy of the thread or task at each call, but in place or not, whatever that one says.

    Attributes:
        in_place: as in `Policy`.
    """

    in_place: bool


PolicyOption = Policy | PolicyHere | None
"""What counts as sharing, as it was said when a function was wrapped. None stands for the policy at each call."""


@functools.cache
def _rules_of(arrays: bool, containers: bool, is_exact: bool = False) -> Rules:
    return Rules(arrays=arrays, containers=containers, is_exact=is_exact)


# So that C need not ask for the policy as long as there is no `Context` in any thread: adds to its count of entered
# Contexts, and returns it.
_count: Callable[[int], int] = (lambda _: 0) if native is None else native.count_contexts


class _Entry:
    """A Context that was entered and not left.

    Args:
        context: the Context.
        frame: the address of the frame in which it was entered.
    """

    # What has ended holds nothing: a task that outlives the block keeps its entry, and must not keep all leaves.
    __slots__ = ("context", "frame")

    context: "Context | None"

    def __init__(self, context: "Context", frame: int) -> None:
        self.frame = frame
        # Counted before it can be seen, and taken off after it has ended: to count too many costs time only.
        self.context = None
        _count(1)
        self.context = context

    def end(self) -> None:
        self.context = None
        _count(-1)

    def __del__(self, count: Callable[[int], int] = _count) -> None:
        # The Context is garbage, too, so nobody can leave it any more.
        if self.context is not None:
            count(-1)


# A thread begins with no entries. With `-X thread_inherit_context`, the default of Python 3.14 without the GIL, it has
# those of the thread that starts it, as it has every other context variable. That is then what the program asks for:
# nothing tells such a thread from a call of `asyncio.to_thread`, which is to have them.
_entered: contextvars.ContextVar[tuple[_Entry, ...]] = contextvars.ContextVar("sharedtree.Context", default=())


def _not_ended() -> tuple[_Entry, ...]:
    return tuple([entry for entry in _entered.get() if entry.context is not None])


def _innermost() -> "Context | None":
    for entry in reversed(_entered.get()):
        context = entry.context  # read once, for another thread may end it
        if context is not None:
            return context
    return None


class Context:
    """A scope in which flattens share their tags and unflattens share their instances.

    Contexts nest: the innermost counts. What is flattened in one Context is unflattened, in the same order, in the same
    or in another one; a Context that has begun to unflatten the trees of one does not accept those of a second.

    A scope belongs to a thread or to an asyncio task. A task that begins inside it, or a call of `asyncio.to_thread`,
    is in it until the block ends; a new thread and the threads of a pool are not. A generator has no scope of its own:
    a Context that it entered and has not left is also that of whoever consumes it. There, give the policy to the
    transform: `st.jit(f, policy=...)`. A block may end in another thread or task than it began in, or out of order.

    Args:
        policy: the policy inside the scope, also of transforms that were given none of their own. Default: that of
            the enclosing scope.

    Raises:
        ContextMismatchError: on unflattening a structure whose earlier trees were not unflattened in this Context, or
            that was made by another Context than those were; or if two threads use one Context at the same time.

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
        self._entries: dict[_Entry, None] = {}  # those that have not ended, the latest last
        self._user: dict[str, int] = {}  # the thread that packs or unpacks here, if one does

    def __enter__(self) -> Self:
        entry = _Entry(self, id(sys._getframe(1)))  # for who keeps the frame alive, see `_claimed_entry`
        self._entries[entry] = None
        _entered.set((*_not_ended(), entry))
        return self

    def __exit__(self, *_: object) -> None:
        self._claimed_entry(id(sys._getframe(1))).end()  # for who keeps the frame alive, see `_claimed_entry`
        # Who holds a copy of the tuple skips what has ended; here it can go.
        _entered.set(_not_ended())

    def _claimed_entry(self, frame: int) -> _Entry:
        """Takes out the entry that ends.

        That is the one that was made in the same frame, by the same `with`. If the Context was entered by another
        function, such as that of an `ExitStack`, it is the innermost one here, or else the latest anywhere.

        Args:
            frame: the address of the frame in which the Context is left.

        Raises:
            RuntimeError: if there is none.
        """
        # The frame of a `with` lives until its block ends, so no other block that has not ended has its address. That
        # of a function that entered the Context and returned is dead, and another may have its address: then one entry
        # of this Context is taken for another one, which is what would be done without an address, too.
        entries = list(reversed(self._entries.copy()))
        same_frame = [entry for entry in entries if entry.frame == frame]
        here = [entry for entry in reversed(_entered.get()) if entry.context is self]
        # No lock, for the collector may close a generator, and so come here, at any time. To take an entry out of a
        # dictionary is one step, so only one can do it.
        for entry in [*same_frame, *here, *entries]:
            if self._entries.pop(entry, "taken") != "taken":
                return entry
        raise RuntimeError("A `sharedtree.Context` is left more often than it was entered.")

    def _alone(self, step: Callable[[], ResultType]) -> ResultType:
        """Packs or unpacks, while no other thread does.

        Raises:
            ContextMismatchError: if one does.
        """
        # A lock would be held while flatten functions of users run, which may wait for anything.
        thread = threading.get_ident()
        if self._user.get("thread") == thread:  # a flatten function flattens
            return step()
        if self._user.setdefault("thread", thread) != thread:
            raise ContextMismatchError(
                "Two threads flatten or unflatten in one Context at the same time.\n"
                "The order in which trees are flattened, and are to be unflattened, would be left to chance. "
                "Give each thread a Context of its own:\n"
                "    with sharedtree.Context():\n"
                "        leaves, structure = sharedtree.tree.flatten(model)"
            )
        try:
            return step()
        finally:
            self._user.clear()

    def _pack(self, tree: Any, rules: Rules) -> tuple[list[Any], Structure]:
        return self._alone(lambda: self._packed(tree, rules))

    def _unpack(self, structure: Structure, leaves: Any) -> Any:
        return self._alone(lambda: self._unpacked(structure, leaves))

    def _packed(self, tree: Any, rules: Rules) -> tuple[list[Any], Structure]:
        before = len(self._tags.objects)
        try:
            return pack(tree, self._tags, rules, maker=self._mark)
        except BaseException:
            self._tags.forget(before)
            raise

    def _unpacked(self, structure: Structure, leaves: Any) -> Any:
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


def current_policy(given: PolicyOption = None) -> Policy:
    """The policy of the innermost Context of this thread or task, or the default one, as far as none was given."""
    if given is None:
        context = _innermost() if _entered.get() else None  # mostly there is none
        return DEFAULT if context is None else context.policy
    return given if isinstance(given, Policy) else with_in_place(current_policy(), given.in_place)


# Callers compare policies by identity, so the same one comes back each time. There are only so many.
@functools.cache
def with_in_place(policy: Policy, in_place: bool | None) -> Policy:
    """The policy that differs only in `in_place`."""
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
    return with_in_place(policy, in_place) if isinstance(policy, Policy) else PolicyHere(in_place)


DEFAULT = Policy()


IsLeaf = Callable[..., bool] | None


def rules_here(is_leaf: IsLeaf = None, *, takes_path: bool = False) -> Rules:
    """How to walk a whole tree as inside under the policy of this thread or task."""
    rules = current_policy().rules
    return rules if is_leaf is None else rules._replace(is_leaf=is_leaf, is_leaf_takes_path=takes_path)


def pack_alone(tree: Any, is_leaf: IsLeaf = None, *, takes_path: bool = False) -> tuple[list[Any], Structure]:
    """Packs a whole tree as inside, by itself."""
    return pack(tree, Tags(), rules_here(is_leaf, takes_path=takes_path))


def walk_alone(tree: Any, is_leaf: IsLeaf = None) -> FlatDag:
    """Walks a whole tree as inside, by itself."""
    return walked(tree, rules_here(is_leaf))


def exact_rules_here(is_leaf: IsLeaf = None, *, takes_path: bool = False) -> Rules:
    """The same for a tree that is put together again from its own static values. See `Rules.is_exact`."""
    policy = current_policy()
    rules = _rules_of(policy.arrays, policy.containers, is_exact=True)
    return rules if is_leaf is None else rules._replace(is_leaf=is_leaf, is_leaf_takes_path=takes_path)


def pack_exactly(tree: Any, is_leaf: IsLeaf = None, *, takes_path: bool = False) -> tuple[list[Any], Structure]:
    """Packs a whole tree as inside, by itself, for what is put together again with its own static values."""
    return pack(tree, Tags(), exact_rules_here(is_leaf, takes_path=takes_path))


def walk_exactly(tree: Any, is_leaf: IsLeaf = None, *, takes_path: bool = False) -> FlatDag:
    """Walks a whole tree as inside, by itself, for what is put together again with its own static values."""
    return walked(tree, exact_rules_here(is_leaf, takes_path=takes_path))


def pack_here(tree: Any, is_leaf: IsLeaf = None) -> tuple[list[Any], Structure]:
    """Packs a whole tree as inside, in the innermost Context of this thread or task if there is one."""
    context = _innermost() if _entered.get() else None  # mostly there is none
    return pack_alone(tree, is_leaf) if context is None else context._pack(tree, rules_here(is_leaf))


def unpack_here(structure: Structure, leaves: Any) -> Any:
    """The inverse of `pack_here`."""
    if structure.maker is None:
        return unpack(structure, leaves)
    context = _innermost()
    if context is None:
        if structure.base == 0:
            return unpack(structure, leaves)
        context = Context()
    return context._unpack(structure, leaves)
