"""Forks while another thread holds every lock of the package."""

import os
import signal
import sys
import threading
import warnings

import jax.numpy as jnp
import optax

import sharedtree as st
from sharedtree.core import _locks, _recursion_limit as under_way

warnings.simplefilter("ignore")

model = st.tie([jnp.ones(2), jnp.ones(2)], lambda m: (m[0], m[1]))
taken, done = threading.Event(), threading.Event()


def hold():
    with under_way.restoring_limit():
        assert under_way.make_room(900)
        for lock in list(_locks._all_locks):
            lock.__enter__()
        taken.set()
        done.wait()


found = sys.getrecursionlimit()
threading.Thread(target=hold, daemon=True).start()
taken.wait()
assert not under_way.CAN_RAISE_LIMIT or sys.getrecursionlimit() > found
child = os.fork()
if child == 0:
    signal.alarm(300)  # ends a child that waits for ever
    statics = [str(i) for i in range(500)]
    dag = st.Dag([st.tree.map(lambda x: x, model), (statics, {"a": statics})])
    assert dag.tree[0][0] is dag.tree[0][1]
    st.optimizer(optax.sgd(0.1)).init(model)
    st.preserve_identities(lambda f: f)(lambda m: m)(dag)
    st.from_bytes(st.to_bytes(model))
    for lock in list(_locks._all_locks):
        with lock:
            pass
    assert sys.getrecursionlimit() == found
    with under_way.restoring_limit():
        assert under_way.make_room(500)
    os._exit(0 if sys.getrecursionlimit() == found else 2)
print(os.waitpid(child, 0)[1])
done.set()
