"""A `Context` in tasks, threads, pools and generators: who is under its policy, until when, and what remains of it."""

import asyncio
import concurrent.futures
import contextlib
import contextvars
import gc
import subprocess
import sys
import threading
import weakref

import jax
import jax.numpy as jnp
import pytest

import sharedtree as st
from sharedtree.core._pack_and_unpack import native
from sharedtree.ties import _policy_and_context
from sharedtree.ties._policy_and_context import DEFAULT, current_policy
from tests.strategies import Pair

POLICIES = [st.Policy(on_untie=on_untie, in_place=in_place) for on_untie in ("warn", "error") for in_place in (0, 1)]
ONE, TWO = st.Policy(on_untie="error"), st.Policy(on_untie="ignore")


def num_entered():
    return 0 if native is None else native.count_contexts(0)


@pytest.fixture(autouse=True)
def nothing_remains():
    assert current_policy() is DEFAULT
    gc.collect()  # of other tests
    before = num_entered()
    assert before == 0
    yield
    assert current_policy() is DEFAULT
    assert num_entered() == before
    assert not [entry for entry in _policy_and_context._entered.get() if entry.context is not None]


def in_thread(function):
    """What a function returns in a thread of its own; its error is raised here."""
    found = []

    def run():
        try:
            found.append((function(), None))
        except BaseException as error:
            found.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    ((value, error),) = found
    if error is not None:
        raise error
    return value


def under(policy):
    """A generator that is under a policy between two steps."""
    with st.Context(policy):
        yield
        yield


# --- tasks ------------------------------------------------------------------------------------------------------------


def test_no_call_is_under_the_policy_of_another_task():
    """Each of 16 tasks calls twenty times under a policy of its own, and others enter and leave meanwhile."""
    w = jnp.ones(1)
    unties = lambda model: jax.tree.map(lambda x: x + 1, model)

    def outcome():
        try:
            st.jit(unties)(Pair(w, w))
        except st.errors.UntiedError:
            return "error"
        return "ignore"

    async def work(number):
        wrong = 0
        for step in range(20):
            policy = (ONE, TWO)[(number + step) % 2]
            with st.Context(policy):
                await asyncio.sleep(0)
                wrong += outcome() != policy.on_untie
                await asyncio.sleep(0)
                wrong += current_policy() is not policy
            wrong += current_policy() is not DEFAULT
            for _ in range(number % 3):
                await asyncio.sleep(0)
        return wrong

    async def main():
        return await asyncio.gather(*[work(number) for number in range(16)])

    assert asyncio.run(main()) == [0] * 16


def test_transforms_in_tasks_take_the_policy_of_their_task():
    class Counter(st.Module):
        def __init__(self):
            self.count = st.state_field(jnp.zeros(()))

    def add(model):
        model.count = model.count + 1

    step = st.jit(add)

    async def work(in_place):
        model = Counter()
        for _ in range(10):
            with st.Context(st.Policy(in_place=in_place)):
                await asyncio.sleep(0)
                step(model) if in_place else st.jit(add, in_place=False)(model)
                await asyncio.sleep(0)
        return float(model.count)

    async def main():
        return await asyncio.gather(*[work(bool(number % 2)) for number in range(16)])

    assert asyncio.run(main()) == [0.0, 10.0] * 8


def test_what_begins_inside_inherits_while_it_lasts():
    async def main():
        left, read = asyncio.Event(), []

        async def outlives():
            read.append(current_policy())
            await left.wait()
            read.append(current_policy())
            with st.Context(TWO):
                read.append(current_policy())
            read.append(current_policy())

        with st.Context(ONE):
            task = asyncio.create_task(outlives())
            assert await asyncio.to_thread(current_policy) is ONE
            await asyncio.sleep(0)
        left.set()
        await task
        return read

    read = asyncio.run(main())
    assert [policy is expected for policy, expected in zip(read, (ONE, DEFAULT, TWO, DEFAULT), strict=True)] == [
        True
    ] * 4


def test_a_task_that_outlives_a_block_keeps_nothing_of_it_alive():
    async def main():
        left = asyncio.Event()

        async def outlives():
            await left.wait()

        array = jnp.arange(3.0)
        with st.Context(ONE) as context:
            st.tree.flatten([array])
            task = asyncio.create_task(outlives())
            await asyncio.sleep(0)
        references = weakref.ref(context), weakref.ref(array)
        del context, array
        gc.collect()
        found = [reference() for reference in references]
        left.set()
        await task
        return found

    assert asyncio.run(main()) == [None, None]


def test_a_task_inside_ends_its_own_and_not_that_of_who_began_it():
    shared = st.Context(ONE)

    async def main():
        entered, left = asyncio.Event(), asyncio.Event()

        async def inner():
            with shared:
                entered.set()
                await left.wait()
                assert current_policy() is ONE
            assert current_policy() is DEFAULT

        with shared:
            task = asyncio.create_task(inner())
            await entered.wait()
            with st.Context(TWO):
                assert current_policy() is TWO
            assert current_policy() is ONE
        assert current_policy() is DEFAULT
        left.set()
        await task

    asyncio.run(main())


def test_a_cancelled_task_leaves():
    async def main():
        async def waits():
            with st.Context(ONE):
                await asyncio.Event().wait()

        task = asyncio.create_task(waits())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_an_asynchronous_generator_that_the_loop_closes():
    async def main():
        async def steps():
            with st.Context(ONE):
                yield 1
                yield 2

        generator = steps()
        await anext(generator)
        closing = asyncio.create_task(generator.aclose())
        await closing
        assert current_policy() is DEFAULT

    asyncio.run(main())


# --- threads ----------------------------------------------------------------------------------------------------------

INHERITS = getattr(sys.flags, "thread_inherit_context", 0)


@pytest.mark.skipif(bool(INHERITS), reason="Python is asked to let threads inherit contexts")
def test_threads_and_pools_inherit_nothing():
    with concurrent.futures.ThreadPoolExecutor(2) as pool, st.Context(ONE):
        assert in_thread(current_policy) is DEFAULT
        assert {policy is DEFAULT for policy in pool.map(lambda _: current_policy(), range(8))} == {True}
        assert pool.submit(contextvars.copy_context().run, current_policy).result() is ONE

        async def main():
            return await asyncio.get_running_loop().run_in_executor(pool, current_policy)

        assert asyncio.run(main()) is DEFAULT


def test_a_pool_whose_threads_enter():
    barrier = threading.Barrier(4)

    def work(number):
        with st.Context(POLICIES[number]):
            barrier.wait()
            inside = current_policy() is POLICIES[number]
            barrier.wait()
        return inside and current_policy() is DEFAULT

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [True] * 4
        assert list(pool.map(work, reversed(range(4)))) == [True] * 4


@pytest.mark.parametrize("end", ["close", "drop", "collect"])
def test_a_generator_that_ends_in_another_thread(end):
    """Nothing of the other thread ends with it, and nobody is under its policy afterwards."""

    def ends(holder):
        with st.Context(TWO):
            if end == "close":
                holder[0].close()
            holder.clear()
            if end == "collect":
                gc.collect()
            assert current_policy() is TWO
        assert current_policy() is DEFAULT
        return num_entered()

    generator = under(ONE)
    next(generator)
    assert current_policy() is ONE
    holder = [generator]
    if end == "collect":
        holder.append(holder)
    del generator
    before = num_entered()
    assert in_thread(lambda: ends(holder)) == max(before - 1, 0)
    assert current_policy() is DEFAULT


def test_a_generator_that_began_in_a_thread_that_is_gone():
    generator = under(ONE)
    in_thread(lambda: next(generator))
    assert current_policy() is DEFAULT
    with st.Context(TWO):
        generator.close()
        assert current_policy() is TWO
    assert num_entered() == 0


@pytest.mark.parametrize("where", ["here", "in another thread"])
def test_a_context_that_nobody_can_leave_is_taken_off_when_it_is_collected(where):
    def enters():
        context = st.Context(ONE)
        context.__enter__()
        return weakref.ref(context)

    context = in_thread(enters)
    assert current_policy() is DEFAULT
    gc.collect() if where == "here" else in_thread(gc.collect)
    assert context() is None
    assert num_entered() == 0
    scope = contextvars.copy_context()
    context = scope.run(enters)
    assert scope.run(current_policy) is ONE
    assert num_entered() == (native is not None)
    gc.collect()
    assert context() is not None
    del scope
    gc.collect() if where == "here" else in_thread(gc.collect)
    assert context() is None


# --- one Context entered twice ----------------------------------------------------------------------------------------


def test_one_context_entered_twice_in_sequence_and_nested():
    context = st.Context(ONE)
    for _ in range(2):
        with context, st.Context(TWO):
            assert current_policy() is TWO
            with context:
                assert current_policy() is ONE
                with context:
                    assert current_policy() is ONE
            assert current_policy() is TWO
        assert num_entered() == 0
    with pytest.raises(RuntimeError, match="left more often than it was entered"):
        context.__exit__()


def test_one_context_in_two_threads_at_once():
    context, inside, left = st.Context(ONE), threading.Event(), threading.Event()

    def work():
        with st.Context(TWO), context:
            inside.set()
            assert left.wait(60)
            return current_policy()

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with context:
            other = pool.submit(work)
            assert inside.wait(60)
        assert current_policy() is DEFAULT
        left.set()
        assert other.result() is ONE
        assert pool.submit(current_policy).result() is DEFAULT


@pytest.mark.parametrize("first", [0, 1])
def test_generators_with_one_context_end_each_their_own(first):
    """Though the protocol says only which Context is left, the block that ends is known by its frame."""
    context = st.Context(ONE)

    def steps():
        with context:
            yield

    generators = [steps(), steps()]
    next(generators[0])
    with st.Context(TWO):
        next(generators[1])
        generators[first].close()
        assert current_policy() is (ONE if first == 0 else TWO)
        generators[1 - first].close()
        assert current_policy() is TWO


def test_a_generator_closed_in_a_thread_that_is_in_the_same_context():
    context = st.Context(ONE)

    def steps():
        with context:
            yield

    generator = steps()
    next(generator)

    def closes():
        with context:
            generator.close()
            return current_policy()

    assert in_thread(closes) is ONE
    assert current_policy() is DEFAULT


def test_exit_stacks_and_functions_that_enter():
    with contextlib.ExitStack() as stack:
        for policy in (ONE, TWO, ONE):
            stack.enter_context(st.Context(policy))
            assert current_policy() is policy
    context = st.Context(ONE)
    with contextlib.ExitStack() as stack:
        stack.enter_context(context)
        stack.enter_context(st.Context(TWO))
        stack.enter_context(context)
        assert current_policy() is ONE


# --- generators -------------------------------------------------------------------------------------------------------


def test_generators_closed_later_or_out_of_order():
    one, two = under(ONE), under(TWO)
    next(one)
    next(two)
    assert current_policy() is TWO  # a generator has the scope of its consumer
    one.close()
    assert current_policy() is TWO
    two.close()
    assert current_policy() is DEFAULT
    with st.Context(ONE):
        later = under(TWO)
        next(later)
    assert current_policy() is TWO
    with st.Context(ONE):
        later.close()
        assert current_policy() is ONE


def test_entries_that_have_ended_do_not_add_up():
    for _ in range(50):
        generator = under(ONE)
        contextvars.copy_context().run(next, generator)
        with st.Context(TWO):
            generator.close()
    assert len(_policy_and_context._entered.get()) == 0
    generators = [under(ONE) for _ in range(50)]
    for generator in generators:
        next(generator)
    for generator in generators:
        in_thread(generator.close)
    with st.Context(TWO):
        assert len(_policy_and_context._entered.get()) == 1


# --- what a Context shares --------------------------------------------------------------------------------------------


def test_tasks_and_threads_inside_share_what_was_flattened():
    w = jnp.ones(2)

    async def main():
        with st.Context():
            sizes = [len(st.tree.flatten([w])[0])]
            sizes.append(len((await asyncio.to_thread(st.tree.flatten, [w]))[0]))
            sizes.append(await asyncio.create_task(flattened()))
        return sizes

    async def flattened():
        return len(st.tree.flatten([w])[0])

    assert asyncio.run(main()) == [1, 0, 0]


def test_two_threads_that_flatten_at_once_in_one_context_are_an_error():
    inside, go_on = threading.Event(), threading.Event()

    @jax.tree_util.register_pytree_node_class
    class Waiting:
        def tree_flatten(self):
            inside.set()
            assert go_on.wait(60)
            return (), None

        @classmethod
        def tree_unflatten(cls, aux, children):
            return cls()

    context = st.Context()

    def flatten(tree):
        with context:
            return len(st.tree.flatten(tree)[0])

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(flatten, [Waiting(), jnp.ones(2)])
        assert inside.wait(60)
        try:
            with pytest.raises(st.errors.ContextMismatchError, match="Two threads flatten or unflatten"):
                flatten([jnp.ones(3)])
        finally:
            go_on.set()
        assert waiting.result() == 1
    assert flatten([jnp.ones(3)]) == 1


@pytest.mark.slow
def test_a_context_that_is_open_at_the_end_of_the_process():
    code = """if True:
        import sharedtree as st
        def steps():
            with st.Context(st.Policy(on_untie="error")):
                yield
        generator = steps()
        next(generator)
        st.Context().__enter__()
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
