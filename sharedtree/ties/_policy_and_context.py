"""`Policy` sets the rules for sharing. `Context` is a scope in which several packs and unpacks share their numbers.

A pack tags each object with a number, and an unpack makes one instance for each number. Ordinarily each call of
`sharedtree.tree.flatten` counts from zero. Inside a `Context` the calls go on counting. So an object that occurs in two
trees, flattened one after the other, is one object again when both are unflattened.

An *entry* is one `with` block of a Context. The open blocks are an immutable tuple of entries in a context variable,
so a task inherits the entries of the code that started it. A `with` block may end anywhere: in the consumer of a
generator, in a thread whose garbage collector closes a generator, or after blocks that began later. So its end does not
reset the variable to an earlier value. The entry is marked as ended, in every tuple that holds it, and readers skip
ended entries.

with a:                         (a)
    task = create_task(...)     (a)         the task sees (a), too
    with b:                     (a, b)
end of the block of `a`         (ended)     the task sees (ended) from now on
"""

import contextvars
import dataclasses
import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, Literal, Self, TypeVar

from ..core._errors import ContextMismatchError
from ..core._pack_and_unpack import Rules, Tags, flat_dag_of, native, pack, unpack
from ..core._structure import FlatDag, Structure

ResultType = TypeVar("ResultType")


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """Rules for sharing: which objects carry identity, and what to do when a tie is lost.

    Attributes:
        arrays: True if arrays carry identity. If False, only modules and mutable containers do.
        containers: True if mutable containers (lists, dicts) and the arrays reached through one carry identity outside
            modules, too, in the arguments and in the results of transforms. For models that are dicts of arrays, as
            Linen's and Haiku's are. Bare arguments and arrays only below tuples stay values.
        on_untie: what to do when a tie enters a transform and does not leave it, or was lost between two calls or on
            its way to an optimizer: `"warn"` (`UntiedWarning`), `"error"` (`UntiedError`) or `"ignore"`. Checked when
            a function is traced, never on a cached call, and in each `update` of `sharedtree.optimizer`.
        in_place: True writes the changes that a function makes in its arguments back into the caller's objects, all or
            nothing. That costs one output for each changed leaf. False drops them on purpose. None, the default, drops
            them, with a `LostChangeWarning` for objects that are used as state: those of Flax NNX and treex, and
            `sharedtree.Module`.
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
        """Rules for a walk under this policy."""
        return _rules_of(self.arrays, self.containers)


@dataclasses.dataclass(frozen=True, slots=True)
class PolicyHere:
    """Stands for the policy in force at each call, with another value of `Policy.in_place`.

    Attributes:
        in_place: the other value.
    """

    in_place: bool


PolicyOption = Policy | PolicyHere | None
"""The policy that was passed when a function was wrapped. None stands for the policy in force at each call."""


@functools.cache
def _rules_of(arrays: bool, containers: bool, is_exact: bool = False) -> Rules:
    """Returns the rules for a walk, the same object for equal arguments."""
    return Rules(arrays=arrays, containers=containers, is_exact=is_exact)


# Adds a number to the count of open Contexts in the C extension, and returns the count. While the count is zero, C does
# not ask Python for the policy in force.
_count: Callable[[int], int] = (lambda _: 0) if native is None else native.count_contexts


class _Entry:
    """One `with` block of a Context.

    Args:
        context: the Context.
        frame: address of the frame that entered the Context.

    Attributes:
        context: the Context. None once the block has ended: a task that outlives the block keeps the entry, and must
            not keep alive all leaves that the Context holds.
        frame: the address.
    """

    __slots__ = ("context", "frame")

    context: "Context | None"

    def __init__(self, context: "Context", frame: int) -> None:
        self.frame = frame
        # The count rises before readers can see the entry, and falls after the entry has ended. While the count is too
        # high, C asks for the policy in vain, which only costs time. If it were too low, C would miss the policy.
        self.context = None
        _count(1)
        self.context = context

    def end(self) -> None:
        """Marks the block as ended."""
        self.context = None
        _count(-1)

    def __del__(self, count: Callable[[int], int] = _count) -> None:
        # The entry is garbage although its block has not ended. Its Context is garbage, too, so the block never will
        # end. `count` is a default argument because module globals may be gone when the interpreter exits.
        if self.context is not None:
            count(-1)


# A new thread has no entries. With `-X thread_inherit_context`, the default of Python 3.14 without the GIL, it inherits
# those of the thread that starts it, like every other context variable. We accept that as the program's choice: such a
# thread looks exactly like a call of `asyncio.to_thread`, which must have the entries.
_entered: contextvars.ContextVar[tuple[_Entry, ...]] = contextvars.ContextVar("sharedtree.Context", default=())


def _open_entries() -> tuple[_Entry, ...]:
    """Returns the entries of this thread or task that have not ended, the innermost last."""
    return tuple([entry for entry in _entered.get() if entry.context is not None])


def _innermost() -> "Context | None":
    """Returns the innermost open Context of this thread or task. None if no Context is open."""
    for entry in reversed(_entered.get()):
        # Read once, since another thread may end the entry at any time.
        context = entry.context
        if context is not None:
            return context
    return None


class Context:
    """A scope in which flattens share their tags and unflattens share their instances.

    Contexts nest, and the innermost one counts. Trees that were flattened in one Context must be unflattened in the
    same order, in that Context or in another one. A Context that has begun to unflatten the trees of one Context does
    not accept those of a second.

    A scope belongs to a thread or to an asyncio task. A task that begins inside it, or a call of `asyncio.to_thread`,
    is in it until the block ends. A new thread and the threads of a pool are not. A generator has no scope of its own:
    a Context that it entered and has not left is also in force in the code that consumes it. There, pass the policy to
    the transform: `st.jit(f, policy=...)`. A block may end in another thread or task than it began in, or out of order.

    Args:
        policy: the policy inside the scope. It also holds for transforms without a policy. Default: the policy of the
            enclosing scope.

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
        """Takes the policy of the enclosing scope now, not on entry."""
        self.policy = current_policy() if policy is None else policy
        # Numbers of the objects that were packed in this Context.
        self._tags = Tags()
        # The instances that were unpacked in this Context, by number.
        self._table: list[Any] = []
        # Stands for this Context in the structures that it makes (`Structure.context_mark`).
        self._mark = object()
        # The mark of the Context whose structures this one unpacks.
        self._context_mark: object | None = None
        # Open entries of this Context, the latest last.
        self._entries: dict[_Entry, None] = {}
        # The identifier of the thread that packs or unpacks in this Context, under the key "thread", or nothing.
        self._user: dict[str, int] = {}

    def __enter__(self) -> Self:
        # `_claimed_entry` says what keeps the frame alive.
        entry = _Entry(self, id(sys._getframe(1)))
        self._entries[entry] = None
        _entered.set((*_open_entries(), entry))
        return self

    def __exit__(self, *_: object) -> None:
        # `_claimed_entry` says what keeps the frame alive.
        self._claimed_entry(id(sys._getframe(1))).end()
        # Drops the ended entry from this tuple. Tasks with an older tuple skip the entry.
        _entered.set(_open_entries())

    def _claimed_entry(self, frame: int) -> _Entry:
        """Removes the entry whose block ends from `_entries`, and returns it.

        This is the entry made in the same frame, by the same `with`. If another function entered the Context, such as
        `ExitStack.enter_context`, it is the innermost entry of this thread or task. If this thread or task has none, it
        is the latest entry of all.

        Args:
            frame: address of the frame in which the block ends.

        Raises:
            RuntimeError: if the Context has no open entry.
        """
        # The frame of a `with` lives until its block ends, so no other open block has its address. The frame of a
        # function that entered the Context and returned is dead, and a new frame may get its address. Then one entry
        # of this Context is confused with another, as it would be without addresses.
        entries = list(reversed(self._entries.copy()))
        from_same_frame = [entry for entry in entries if entry.frame == frame]
        from_this_task = [entry for entry in reversed(_entered.get()) if entry.context is self]
        # A lock could deadlock, since the garbage collector may close a generator, and so call this method, at any
        # time. Popping from a dict is one step, so each entry is claimed once.
        for entry in [*from_same_frame, *from_this_task, *entries]:
            if self._entries.pop(entry, "taken") != "taken":
                return entry
        raise RuntimeError("A `sharedtree.Context` is left more often than it was entered.")

    def _alone(self, step: Callable[[], ResultType]) -> ResultType:
        """Runs a function that packs or unpacks, and returns its result, unless another thread does so at the moment.

        Raises:
            ContextMismatchError: if another thread packs or unpacks in this Context.
        """
        # A lock would be held while flatten functions of users run, which may wait for anything.
        thread = threading.get_ident()
        # A flatten function of a user may itself flatten.
        if self._user.get("thread") == thread:
            return step()
        if self._user.setdefault("thread", thread) != thread:
            raise ContextMismatchError(
                "Two threads flatten or unflatten in one Context at the same time.\n"
                "The order in which trees are flattened, and are to be unflattened, would depend on chance. Give each "
                "thread a Context of its own:\n"
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
        """Packs a tree, and goes on counting where the last pack ended. If it fails, the count is as before."""
        num_tags = len(self._tags.objects)
        try:
            return pack(tree, self._tags, rules, context_mark=self._mark)
        except BaseException:
            # A failed pack leaves no tags: later structures would refer to objects that are in no earlier tree.
            self._tags.forget(num_tags)
            raise

    def _unpacked(self, structure: Structure, leaves: Any) -> Any:
        """Unpacks a structure, if it begins a sequence of trees or comes next in the sequence that was begun.

        Raises:
            ContextMismatchError: if the structure belongs to another sequence, or an earlier tree was not unpacked.
        """
        # `base` is the number of objects in all earlier trees of the sequence.
        if structure.base == 0:
            self._table, self._context_mark = [], structure.context_mark
        if self._context_mark is not structure.context_mark or structure.base != len(self._table):
            raise ContextMismatchError(
                "The tree is unflattened out of order: other trees were flattened before it in the same "
                "`sharedtree.Context`, and they are not unflattened yet in this one.\n"
                "A tree may refer to objects of the trees before it. Unflatten all of them in one Context, in the "
                "order in which they were flattened:\n"
                "    with sharedtree.Context():\n"
                "        trees = [sharedtree.tree.unflatten(structure, leaves) for leaves, structure in flattened]"
            )
        return unpack(structure, leaves, self._table)


def current_policy(option: PolicyOption = None) -> Policy:
    """Returns the policy in force: that of the option, else of the innermost Context, else the default.

    Args:
        option: the policy of a wrapped function. None if it was wrapped without a policy.
    """
    if option is None:
        # Mostly no Context is open, so the test for entries saves a call.
        context = _innermost() if _entered.get() else None
        return DEFAULT if context is None else context.policy
    return option if isinstance(option, Policy) else with_in_place(current_policy(), option.in_place)


# Callers compare policies by identity, so equal arguments must give the same object. There are few policies.
@functools.cache
def with_in_place(policy: Policy, in_place: bool | None) -> Policy:
    """Returns the policy with another `in_place`."""
    return policy if policy.in_place is in_place else dataclasses.replace(policy, in_place=in_place)


def with_options(options: dict[str, Any], policy: PolicyOption) -> PolicyOption:
    """Removes `policy` and `in_place` from the options of a transform, and returns one policy made of both.

    `jax.checkpoint` has its own option `policy`. It is of another type, and stays in the options.

    Args:
        options: the options of a transform. Changed.
        policy: the policy if the options have none.

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
            f"`in_place` must be True, False or None, not {in_place!r}. It holds for all arguments. None leaves it to "
            "the policy:\n"
            "    sharedtree.jit(f, in_place=True)"
        )
    return with_in_place(policy, in_place) if isinstance(policy, Policy) else PolicyHere(in_place)


DEFAULT = Policy()


IsLeaf = Callable[..., bool] | None


def rules_here(is_leaf: IsLeaf = None, *, takes_path: bool = False) -> Rules:
    """Returns the rules for a walk of a whole tree, as if it were inside a module. So arrays in lists can be tied.

    The rules are those of the policy of this thread or task.

    Args:
        is_leaf: decides which nodes count as leaves, as in `jax.tree.flatten`.
        takes_path: True if `is_leaf` takes the path, too.
    """
    rules = current_policy().rules
    return rules if is_leaf is None else rules._replace(is_leaf=is_leaf, is_leaf_takes_path=takes_path)


def pack_alone(tree: Any, is_leaf: IsLeaf = None, *, takes_path: bool = False) -> tuple[list[Any], Structure]:
    """Packs a whole tree under `rules_here`, outside of any Context."""
    return pack(tree, Tags(), rules_here(is_leaf, takes_path=takes_path))


def walk_alone(tree: Any, is_leaf: IsLeaf = None) -> FlatDag:
    """Walks a whole tree under `rules_here`, outside of any Context."""
    return flat_dag_of(tree, rules_here(is_leaf))


def exact_rules_here(is_leaf: IsLeaf = None, *, takes_path: bool = False) -> Rules:
    """Returns rules like `rules_here`, for a tree that is rebuilt with its very static values, not with equal ones."""
    policy = current_policy()
    rules = _rules_of(policy.arrays, policy.containers, is_exact=True)
    return rules if is_leaf is None else rules._replace(is_leaf=is_leaf, is_leaf_takes_path=takes_path)


def pack_exactly(tree: Any, is_leaf: IsLeaf = None, *, takes_path: bool = False) -> tuple[list[Any], Structure]:
    """Packs a whole tree under `exact_rules_here`, outside of any Context."""
    return pack(tree, Tags(), exact_rules_here(is_leaf, takes_path=takes_path))


def walk_exactly(tree: Any, is_leaf: IsLeaf = None, *, takes_path: bool = False) -> FlatDag:
    """Walks a whole tree under `exact_rules_here`, outside of any Context."""
    return flat_dag_of(tree, exact_rules_here(is_leaf, takes_path=takes_path))


def pack_here(tree: Any, is_leaf: IsLeaf = None) -> tuple[list[Any], Structure]:
    """Packs a whole tree under `rules_here`, in the innermost Context of this thread or task if one is open."""
    # Mostly no Context is open, so the test for entries saves a call.
    context = _innermost() if _entered.get() else None
    return pack_alone(tree, is_leaf) if context is None else context._pack(tree, rules_here(is_leaf))


def unpack_here(structure: Structure, leaves: Any) -> Any:
    """Unpacks a tree that `pack_here` packed.

    Raises:
        ContextMismatchError: if the trees that were packed before it in its Context were not unpacked in this one.
    """
    if structure.context_mark is None:
        return unpack(structure, leaves)
    context = _innermost()
    if context is None:
        if structure.base == 0:
            return unpack(structure, leaves)
        # An empty Context raises the error for a structure that continues a sequence.
        context = Context()
    return context._unpack(structure, leaves)
