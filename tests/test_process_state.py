"""No call leaves the process other than it was: recursion limit, warning filters, options, handlers, environment."""

import gc
import inspect
import locale
import logging
import os
import random
import signal
import socket
import sys
import threading
import warnings

import flax.serialization  # noqa: F401 -- it draws random numbers when it is imported, and sets what it likes
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint  # noqa: F401 -- likewise
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import sharedtree as st
from sharedtree.core._recursion_limit import CAN_RAISE_LIMIT, MAX_FLATTENED, active, raised_depths
from tests.deep import chain, free, in_a_thread, link, lists, room
from tests.processes import program, run

W = jnp.array(1.0)

before_python_3_12 = pytest.mark.skipif(not CAN_RAISE_LIMIT, reason="Python counts the recursion of C apart")


def process_state():
    """What a program sets for all of its process, by name."""
    signals = [each for each in signal.valid_signals() if each not in (signal.SIGKILL, signal.SIGSTOP)]
    umask = os.umask(0)
    os.umask(umask)
    return {
        "recursion limit": sys.getrecursionlimit(),
        "warning filters": (list(warnings.filters), warnings.showwarning, warnings.formatwarning),
        "jax.config": dict(jax.config.values),
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "umask": umask,
        "path": (list(sys.path), list(sys.meta_path), list(sys.path_hooks)),
        "hooks": (sys.excepthook, sys.unraisablehook, sys.displayhook, sys.breakpointhook, threading.excepthook),
        "tracing": (sys.gettrace(), sys.getprofile()),
        "switch interval": sys.getswitchinterval(),
        "garbage": (gc.isenabled(), gc.get_threshold(), gc.get_debug(), list(gc.callbacks), gc.get_freeze_count() > 0),
        "signals": {each: signal.getsignal(each) for each in signals},
        "locale": locale.setlocale(locale.LC_ALL),
        "random numbers": (random.getstate(), [np.asarray(each).tolist() for each in np.random.get_state()]),
        "NumPy": (np.geterr(), np.get_printoptions()),
        "logging": (logging.root.level, list(logging.root.handlers), logging.root.manager.disable),
        "streams": (sys.stdin, sys.stdout, sys.stderr),
        "sockets": socket.getdefaulttimeout(),
        "stack of threads": threading.stack_size(),
        "calls under way": (active.num_calls, dict(raised_depths)),
    }


def test_the_comparison_notices(monkeypatch):
    before, limit, handler = process_state(), sys.getrecursionlimit(), signal.getsignal(signal.SIGUSR1)
    logs = jax.config.jax_log_compiles
    warnings.simplefilter("ignore")  # pytest puts them back
    try:
        sys.setrecursionlimit(limit + 1)
        jax.config.update("jax_log_compiles", not logs)
        signal.signal(signal.SIGUSR1, lambda *_: None)
        monkeypatch.setenv("SHAREDTREE_TESTS", "1")
        after = process_state()
    finally:
        sys.setrecursionlimit(limit)
        jax.config.update("jax_log_compiles", logs)
        signal.signal(signal.SIGUSR1, handler)
    changed = [name for name in before if before[name] != after[name]]
    assert changed == ["recursion limit", "warning filters", "jax.config", "environment", "signals"]


def first(tree):
    return st.tree.leaves(tree)[0]


def with_rules(tree):
    @st.custom_vjp
    def f(tree):
        return first(tree)

    f.defvjp(lambda tree: (first(tree), tree), lambda tree, g: (st.tree.map(lambda x: g, tree),))
    return st.grad(f)(tree)


def with_tangents(tree):
    @st.custom_jvp
    def f(tree):
        return first(tree)

    f.defjvp(lambda primals, tangents: (first(primals[0]), first(tangents[0])))
    return f(tree)


def optimised(tree):
    tx = st.optimizer(optax.adam(0.1))
    state = tx.init(tree)
    updates, _ = tx.update(st.tree.map(jnp.ones_like, tree), state, tree)
    return st.apply_updates(tree, updates)


def to_a_file(tree):
    st.save("tree.safetensors", tree)
    st.inspect("tree.safetensors")
    st.verify("tree.safetensors")
    st.audit("tree.safetensors")
    return st.load("tree.safetensors", like=tree)


def by_orbax(tree):
    st.orbax.save(os.path.abspath("checkpoint"), tree)
    return st.orbax.load(os.path.abspath("checkpoint"), like=tree)


def on_one_device(tree):
    mesh = Mesh(np.array(jax.devices()[:1]), "d")
    return st.shard_map(lambda tree: tree, mesh=mesh, in_specs=P(), out_specs=P())(tree)


def in_a_context(tree):
    with st.Context(st.Policy(containers=True)):
        return st.jit(lambda tree: tree)(tree)


ROW = jnp.ones(1)

CALLS = {
    "apply_updates, optimizer": optimised,
    "assert_same_sharing, same_sharing": lambda tree: st.assert_same_sharing(tree, tree) or st.same_sharing(tree, tree),
    "associative_scan": lambda tree: st.associative_scan(lambda a, b: a, st.tree.map(lambda x: ROW, tree)),
    "audit, inspect, load, save, verify": to_a_file,
    "checkpoint, remat": lambda tree: st.checkpoint(lambda tree: tree)(tree),
    "cond": lambda tree: st.cond(True, lambda tree: tree, lambda tree: tree, tree),
    "copy, count_parameters": lambda tree: st.count_parameters(st.copy(tree)),
    "custom_jvp": with_tangents,
    "custom_vjp": with_rules,
    "device_put": lambda tree: st.device_put(tree, jax.devices()[0]),
    "draw, summary": lambda tree: st.draw(tree) and st.summary(tree),
    "eval_shape": lambda tree: st.eval_shape(lambda tree: tree, tree),
    "explain": lambda tree: st.explain(st.jit(first), tree),
    "export": lambda tree: st.export(st.jit(first))(tree).call(tree),
    "filter_checkpoint, filter_grad, filter_jit": lambda tree: st.filter_jit(
        st.filter_grad(st.filter_checkpoint(first))
    )(tree),
    "filter_eval_shape, filter_jvp": lambda tree: st.filter_eval_shape(st.filter_jvp, first, (tree,), (tree,)),
    "filter_value_and_grad, filter_vjp": lambda tree: st.filter_vjp(st.filter_value_and_grad(first), tree)[0],
    "filter_vmap": lambda tree: st.filter_vmap(first)(st.tree.map(lambda x: ROW, tree)),
    "fori_loop": lambda tree: st.fori_loop(0, 2, lambda i, tree: tree, tree),
    "from_bytes, to_bytes": lambda tree: st.from_bytes(st.to_bytes(tree), like=tree),
    "grad, wrt": lambda tree: st.grad(first, wrt=lambda path, value: True)(tree),
    "hessian": lambda tree: st.hessian(first)(tree),
    "incremental_update": lambda tree: st.incremental_update(tree, tree, 0.5),
    "inference_mode, unwrap_shared": lambda tree: st.unwrap_shared(st.inference_mode(tree)),
    "jacfwd": lambda tree: st.jacfwd(first)(tree),
    "jacrev": lambda tree: st.jacrev(first)(tree),
    "jit": lambda tree: st.jit(lambda tree: tree)(tree),
    "jit, ahead of time": lambda tree: st.jit(lambda tree: tree).lower(tree).compile()(tree),
    "jit, eval_shape": lambda tree: st.jit(lambda tree: tree).eval_shape(tree),
    "jit, in_place": lambda tree: st.jit(lambda tree: None, in_place=True)(tree),
    "jit, raising": lambda tree: st.jit(lambda tree: 1 / 0)(tree),
    "jit, under jit": lambda tree: jax.jit(lambda _: st.jit(first)(tree))(W),
    "jit, of nothing deep": lambda tree: st.jit(lambda x: st.tree.map(lambda _: x, tree))(W),
    "jvp": lambda tree: st.jvp(first, (tree,), (tree,)),
    "linear_transpose": lambda tree: st.linear_transpose(first, tree)(W),
    "linearize": lambda tree: st.linearize(first, tree)[1](tree),
    "load_state, state": lambda tree: st.load_state(tree, st.state(tree)),
    "make_jaxpr": lambda tree: st.make_jaxpr(first)(tree),
    "make_with_state": lambda tree: st.make_with_state(lambda: tree)(),
    "map": lambda tree: st.map(lambda tree: first(tree), st.tree.map(lambda x: ROW, tree)),
    "orbax": by_orbax,
    "pmap": lambda tree: st.pmap(first)(st.tree.map(lambda x: ROW, tree)),
    "preserve_identities": lambda tree: st.preserve_identities(jax.named_call)(first)(tree),
    "retie": lambda tree: st.retie(st.untie(tree), like=tree),
    "scan": lambda tree: st.scan(lambda tree, x: (tree, x), tree, ROW),
    "shard_map": on_one_device,
    "switch": lambda tree: st.switch(0, [lambda tree: tree, lambda tree: tree], tree),
    "unwrap": lambda tree: st.unwrap([tree, st.View(jnp.negative, first(tree))]),
    "tie, ties, untie": lambda tree: st.ties(st.tie([tree, jnp.ones(())], lambda pair: (first(pair[0]), pair[1]))),
    "tree": lambda tree: st.tree.unflatten(*reversed(st.tree.flatten(tree))),
    "trust": lambda tree: st.trust("tests.deep:Link"),
    "value_and_grad": lambda tree: st.value_and_grad(first)(tree),
    "vjp": lambda tree: st.vjp(lambda tree: tree, tree)[1](tree),
    "vmap": lambda tree: st.vmap(first)(st.tree.map(lambda x: ROW, tree)),
    "while_loop": lambda tree: st.while_loop(lambda tree: False, lambda tree: tree, tree),
    "with_sharding_constraint": lambda tree: st.jit(
        lambda tree: st.with_sharding_constraint(tree, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    )(tree),
    "Context": in_a_context,
    "Dag": lambda tree: jax.jit(lambda dag: dag)(st.Dag(tree)).tree,
}
# What is called when a program is written, not when it runs: these note something in a table of ours, or make a class.
DECLARING = {"parameter", "register_node", "register_state", "register_transform", "state_field"}


def test_each_function_is_called():
    called = {name for names in CALLS for name in names.split(", ")}
    functions = {name for name in st.__all__ if inspect.isroutine(getattr(st, name))}
    assert functions - called == DECLARING


def assert_kept(call, tree):
    """The process is as before after a call, whether it works or not; and JAX can flatten what it could."""
    before = process_state()
    try:
        call(tree)
    except Exception as error:  # noqa: BLE001 -- which errors there are is for other tests to say
        del error
    after = process_state()
    assert [name for name in before if before[name] != after[name]] == []
    assert len(jax.tree.leaves(lists(500, W))) == 1


# Modules and plain containers outside of them; what is too deep for Optax, too.
TREES = {
    "both": lambda: lists(400, chain(400)),
    "deeper": lambda: lists(2_000, W),
    "shallow": lambda: chain(1),
    "modules": lambda: chain(600),
    "lists": lambda: lists(600, W),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", TREES)
@pytest.mark.parametrize("name", CALLS)
def test_the_process_is_as_it_was(name, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    in_a_thread(lambda: assert_kept(CALLS[name], TREES[kind]()), 300)


def test_what_is_deep_is_served_again():
    """The second time nothing is traced, and what comes out was not seen on its way."""

    def calls():
        deep = st.jit(lambda x: lists(900, x))
        lowered = st.jit(lambda x: x).lower(lists(900, W)).compile()
        pullback = st.vjp(lambda x: x, lists(900, link(W, None)))[1]
        before = sys.getrecursionlimit(), room()
        for _ in range(2):
            for call, given in ((deep, W), (lowered, lists(900, W)), (pullback, lists(900, link(W, None)))):
                out = call(given)
                for _ in range(900):
                    (out,) = out
                assert getattr(out, "scale", getattr(out, "weight", out)) is not None
        return before, (sys.getrecursionlimit(), room())

    before, after = in_a_thread(calls)
    assert before == after


@before_python_3_12
def test_there_is_room_while_a_call_is_under_way_and_the_last_thread_to_need_it_puts_the_limit_back():
    """Or the tests above would show nothing."""
    found = sys.getrecursionlimit()
    entered, may_end = threading.Event(), threading.Event()

    def wait(tree):
        entered.set()
        may_end.wait()
        return tree

    results = []
    waiting = st.optimizer(optax.GradientTransformation(wait, lambda *_: None))
    thread = threading.Thread(target=lambda: results.append(waiting.init(lists(900, W))))
    thread.start()
    entered.wait()
    first_needs = sys.getrecursionlimit()
    limits = []
    noting = st.optimizer(
        optax.GradientTransformation(lambda tree: limits.append(sys.getrecursionlimit()), lambda *_: None)
    )
    for depth in (300, 1_000):
        noting.init(lists(depth, W))
        limits.append(sys.getrecursionlimit())
    may_end.set()
    thread.join()
    assert found + 900 <= first_needs
    assert limits[0] == limits[1] == limits[3] == first_needs < limits[2]
    assert sys.getrecursionlimit() == found
    assert len(results) == 1
    noting.init(lists(50, W))
    assert limits[-1] == found


@before_python_3_12
def test_a_limit_that_the_user_sets_meanwhile_stays():
    found = sys.getrecursionlimit()
    try:
        setting = st.optimizer(optax.GradientTransformation(lambda tree: sys.setrecursionlimit(5_000), lambda *_: None))
        setting.init(lists(900, W))
        assert sys.getrecursionlimit() == 5_000
        st.optimizer(optax.sgd(0.1)).init(lists(901, W))
        assert sys.getrecursionlimit() == 5_000
    finally:
        sys.setrecursionlimit(found)


def test_an_endless_recursion_through_calls_ends_in_an_error():
    def deeper(tree):
        return st.jit(deeper)(lists(700, W))

    def call():
        before = sys.getrecursionlimit(), room()
        with pytest.raises(RecursionError):
            deeper(W)
        return before, (sys.getrecursionlimit(), room())

    before, after = in_a_thread(call)
    assert before == after


@pytest.mark.parametrize("depth", [pytest.param(MAX_FLATTENED - 1, marks=pytest.mark.slow), MAX_FLATTENED])
def test_a_model_too_deep_for_optax_is_an_error_before_jax_sees_it(depth):
    def call():
        model = chain(depth)
        before = room()
        try:
            state = st.optimizer(optax.sgd(0.1, momentum=0.9)).init(model)
            outcome = len(st.tree.leaves(state))
        except st.errors.DepthError as error:
            outcome = str(error), error.paths
            state = optax.sgd(0.1, momentum=0.9).init(st.Dag(model))
            assert len(jax.tree.leaves(state)) == 1
        steps = abs(before - room()), len(jax.tree.leaves(lists(500, W)))
        free(model)
        return outcome, steps

    outcome, steps = in_a_thread(call)
    assert steps == (0, 1)
    if depth < MAX_FLATTENED:
        assert outcome == 1
    else:
        message, paths = outcome
        assert f"nested {depth} levels deep" in message
        assert paths == ("",)


@pytest.mark.slow
def test_an_endless_recursion_elsewhere_is_no_crash():
    """It was, once a deep model had raised the limit for good."""
    assert run(program("endless_recursion")) == "an error True\n"
