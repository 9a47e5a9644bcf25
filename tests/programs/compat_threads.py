"""Imports treex in eight threads at once, and does what asks for names when it is called."""

import importlib
import importlib.util
import inspect
import json
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy
from flax import linen as nn

from sharedtree.errors import CompatibilityError

sys.setswitchinterval(1e-6)


def at_once(work):
    barrier, found = threading.Barrier(8), []

    def called(i):
        barrier.wait()
        try:
            found.append(work(i))
        except Exception as error:
            found.append(repr(error))

    threads = [threading.Thread(target=called, args=(i,)) for i in range(8)]
    [thread.start() for thread in threads]
    [thread.join(120) for thread in threads]
    return found


def load(i):
    module = importlib.import_module("sharedtree.compat." + ("treex", "treeo")[i % 2])
    return module.Tree if i % 2 else module.Linear


loaded = at_once(load)
import treeo
import treex

from sharedtree.compat import treex as tx

facts = {"threads": len(loaded) == 8 and set(loaded) == {treex.Linear, treeo.Tree}}

model = tx.Sequential(tx.Linear(3), tx.Linear(2)).init(0, numpy.ones((1, 2)))
with ThreadPoolExecutor(4) as pool:
    texts = list(pool.map(lambda _: model.tabulate(), range(4)))
facts["another thread"] = "Total Parameters" in texts[0]
again = importlib.reload(importlib.import_module("treex.regularizers.l1l2"))
facts["a module that is imported later"] = float(again.L2(1.0)(parameters=[1.0, 2.0])) == 5.0
facts["source"] = "class Linear" in inspect.getsource(tx.Linear)
facts["pickle"] = pickle.loads(pickle.dumps(tx.Linear)) is tx.Linear

# No module is run twice under two names.
for name in ("treex.types", "treex.nn.linear", "treeo.tree"):
    try:
        __import__(f"sharedtree.compat.{name}", fromlist=["x"])
    except CompatibilityError as error:
        facts[name] = f"    import {name}".startswith(str(error).splitlines()[-1])
import treex.types

from sharedtree.compat.treex import types

facts["types"] = types is treex.types and types.Parameter is tx.Parameter


# What stands in for it while it is replaced gives the same classes.
def standing_in(name):
    spec = importlib.util.find_spec("sharedtree.compat." + name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


first, second = standing_in("treex"), standing_in("treeo")
facts["standing in"] = first is not treex and first.Linear is treex.Linear and second.Tree is treeo.Tree


# The modules that users bring: in pickles, in threads, and of classes that ask for more.
class Net(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.width, kernel_init=nn.initializers.ones)(x)


model = tx.FlaxModule(Net(3)).init(0, jnp.ones((1, 2)))
again = pickle.loads(pickle.dumps(model))
facts["of the user"] = type(again.module.value) is type(model.module.value)
facts["and works"] = again(jnp.ones((1, 2))).tolist() == [[2.0] * 3]
for i in range(20):

    class New(nn.Module):
        width: int

    found = at_once(lambda _: type(tx.FlaxModule(New(3)).module.value))
    facts[f"of the user, in threads, {i}"] = len(found) == 8 and len(set(found)) == 1


class Asking(nn.Module):
    def __init_subclass__(cls, *, needed, **kwargs):
        super().__init_subclass__(**kwargs)


try:
    tx.FlaxModule(Asking())
except TypeError as error:
    facts["asking"] = str(error).startswith("`Asking` cannot be used in treex")
print(json.dumps(facts))
