"""treex and treeo get what they need and nobody else sees it; what cannot work says so, and leaves nothing."""

import importlib.util
import json
import pathlib
import textwrap
import tomllib

import pytest

import sharedtree as st
from sharedtree.compat._import_hook import NEEDED
from tests import processes

needs_treex = pytest.mark.skipif(importlib.util.find_spec("treex") is None, reason="treex is not installed")

STATE = """
def state():
    import sys, jax, numpy, builtins
    flax = sys.modules.get("flax")
    return {
        "jax": [name for name in ("tree_map", "tree_multimap", "tree_leaves", "tree_flatten") if hasattr(jax, name)],
        "jax.tree_util": sorted(vars(jax.tree_util)),
        "numpy": hasattr(numpy.lib, "arraysetops"),
        "core": sorted(name for name in vars(jax.core) if not name.startswith("__")),
        "lax_numpy": hasattr(sys.modules["jax._src.numpy.lax_numpy"], "ndarray"),
        "zeros": flax is not None and hasattr(flax.linen.linear, "zeros"),
        "flax": flax is not None and sorted((k, repr(v)) for k, v in flax.config._values.items() if k != "_values"),
        "import": builtins.__import__.__module__,
        "finders": [type(finder).__module__ for finder in sys.meta_path],
        "modules": sorted(name for name in sys.modules if name.partition(".")[0] in ("treex", "treeo")),
    }
"""


def run(code):
    """What a new process prints last, as JSON."""
    printed = processes.run(STATE + textwrap.dedent(code), options=("-W", "error"))
    return json.loads(printed.splitlines()[-1])


ATTEMPT = """
import importlib, importlib.metadata, json, sys
import sharedtree
try:
    import optax, flax.linen  # which have finders of their own
except ImportError:
    pass

def attempt(name):
    # The error of an import, and what state it left.
    before = state()
    try:
        importlib.import_module("sharedtree.compat." + name)
    except sharedtree.errors.CompatibilityError as error:
        text = str(error)
    else:
        text = "nothing was raised"
    after = state()
    return text, sorted(key for key in before if before[key] != after[key])
"""


INSTALL = "pip install --no-deps treex==0.6.9 treeo==0.0.10"

RELEASES = [
    # What is imported, what is installed, what is said; first what is absent, last what its own dependencies ask for.
    ("treex", {}, "`treex` is not installed."),
    ("treeo", {}, "`treeo` is not installed."),
    ("treex", {"treex": "0.5.0", "treeo": "0.0.10"}, "`treex` 0.5.0 is installed, but it is 0.6.9"),
    ("treex", {"treex": "0.7.0", "treeo": "0.0.10"}, "`treex` 0.7.0 is installed, but it is 0.6.9"),
    ("treex", {"treex": "0.6.9", "treeo": "0.2.2"}, "`treeo` 0.2.2 is installed, but it is 0.0.10"),
    ("treeo", {"treeo": "0.2.2"}, "`treeo` 0.2.2 is installed, but it is 0.0.10"),
    ("treex", {"treex": "0.6.9", "treeo": "0.0.9"}, "`treeo` 0.0.9 is installed, but it is 0.0.10"),
    ("treex", {"treex": "0.6.9", "treeo": "0.0.10", "flax": "0.4.2"}, "`flax` 0.4.2 is installed, which is too old"),
    ("treex", {"treex": "0.6.9", "treeo": "0.0.10", "flax": "0.12.8", "optax": "0.0.9"}, "`optax` 0.0.9 is installed"),
]


@pytest.mark.slow
def test_other_releases_and_none():
    cases = [(name, installed) for name, installed, _ in RELEASES]
    outcomes = run(
        ATTEMPT
        + f"""
found, outcomes = importlib.metadata.version, []
for name, installed in {cases!r}:
    def version(name):
        if name in installed:
            return installed[name]
        if name in ("treex", "treeo"):
            raise importlib.metadata.PackageNotFoundError(name)
        return found(name)
    importlib.metadata.version = version
    outcomes.append(attempt(name))
print(json.dumps(outcomes))
"""
    )
    for (_, installed, said), (text, changed) in zip(RELEASES, outcomes, strict=True):
        assert text.startswith(said)
        assert "\n    pip install 'typing-extensions>=4' 'flax>=0.12.8' 'optax>=0.2.8' " in text or not installed
        assert INSTALL in text
        assert not changed


def test_what_it_says_to_install_is_what_the_package_declares():
    assert issubclass(st.errors.CompatibilityError, ImportError)
    assert issubclass(st.errors.CompatibilityError, st.SharedTreeError)
    project = tomllib.loads((pathlib.Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    lowest = dict(requirement.split(">=") for requirement in project["optional-dependencies"]["treex"])
    declared = {name: tuple(map(int, version.split("."))) for name, version in lowest.items()}
    assert declared == {name.lower(): version for name, version in NEEDED["treex"].items()}


GONE = [
    # What the test takes away, from where, what treex needs, and since when that is gone.
    ("jax.tree_util", "tree_leaves", "jax.tree_leaves", "JAX 0.6.0"),
    ("jax.tree_util", "tree_unflatten", "jax.tree_unflatten", "JAX 0.6.0"),
    ("numpy", "isin", "numpy.lib.arraysetops.isin", "NumPy 2.0"),
    ("jax.nn.initializers", "orthogonal", "flax.linen.recurrent.orthogonal", "Flax 0.6.5"),
]


@needs_treex
def test_names_that_nothing_can_stand_in_for():
    outcomes = run(
        ATTEMPT
        + f"""
import numpy, jax.nn
outcomes = []
for module, name, *_ in {GONE!r}:
    there = vars(sys.modules[module])
    held = there.pop(name)
    outcomes.append(attempt("treex"))
    there[name] = held
import jax
jax.tree_leaves = own = lambda *args: "own"  # what a library still has is its own
from sharedtree.compat import treex as tx
print(json.dumps([*outcomes, tx.optimizer.jax.tree_leaves is own]))
"""
    )
    assert outcomes.pop() is True
    for (_, _, name, since), (text, changed) in zip(GONE, outcomes, strict=True):
        assert text.startswith(f"`treex` needs `{name}`, which is gone since {since}.")
        assert "pip install '" in text
        assert not changed


@needs_treex
def test_the_real_package_and_nothing_else_changed():
    before, after, facts = run(
        """
        import json, sys, threading, optax, flax.linen, jax, numpy, sharedtree
        import yaml, rich.console, rich.table, rich.text, einops, typing_extensions
        before, seen, stop = state(), [], threading.Event()
        def look():
            while not stop.is_set():
                seen.append((hasattr(jax, "tree_map"), hasattr(numpy.lib, "arraysetops"), type(jax).__name__))
        watchers = [threading.Thread(target=look) for _ in range(3)]
        sys.setswitchinterval(1e-5)
        [watcher.start() for watcher in watchers]
        from sharedtree.compat import treex as package
        stop.set()
        [watcher.join() for watcher in watchers]
        import treex
        import sharedtree.compat.treex as other
        from importlib.metadata import distribution
        facts = [
            package is treex is other is sys.modules["treex"],
            package.__spec__.name == "treex",
            str(distribution("treex").locate_file("treex/__init__.py")) == package.__file__,
            set(seen) == {(False, False, "module")},
            type(sys.modules["jax"]).__name__ == type(sys.modules["flax"]).__name__ == "module",
            "unfreeze" not in dir(type(flax.linen.Dense(1).init(jax.random.key(0), jax.numpy.ones(1)))),
        ]
        print(json.dumps([before, state(), facts]))
        """
    )
    assert all(facts), facts
    assert after.pop("finders") == ["sharedtree.compat._import_hook", *before.pop("finders")]
    assert "treex" in after.pop("modules")
    assert before.pop("modules") == []
    assert before == after


@needs_treex
def test_an_import_that_fails_half_way_leaves_nothing_and_can_be_tried_again():
    before, after, works = run(
        """
        import json, sys, numpy, optax, flax.linen, yaml, rich.console, einops, sharedtree
        from importlib.abc import MetaPathFinder
        class Fault(MetaPathFinder):
            def find_spec(self, name, path, target=None):
                if name == "yaml":
                    raise RuntimeError("a fault")
        before = state()
        del sys.modules["yaml"]  # which treex.utils imports, in the middle
        sys.meta_path.insert(0, Fault())
        for _ in range(2):
            try:
                from sharedtree.compat import treex
            except RuntimeError as error:
                assert str(error) == "a fault"
            else:
                raise AssertionError
        del sys.meta_path[0]
        after = state()
        from sharedtree.compat import treex as tx
        from sharedtree.core._node_types import AUX_CONVERSIONS
        works = tx.Linear(2).init(0, numpy.ones((1, 1))).kernel.shape == (1, 2)
        print(json.dumps([before, after, works and len(AUX_CONVERSIONS) == 1]))
        """
    )
    assert before == after
    assert works


@needs_treex
def test_what_a_plain_import_left_is_taken_away_first():
    assert run(
        """
        import json, sys
        try:
            import treex
        except ImportError:
            pass
        left = [name for name in sys.modules if name.startswith("treex")]
        old = sys.modules["treeo"]
        from sharedtree.compat import treex as tx, treeo as to
        print(json.dumps(bool(left) and to is not old and issubclass(tx.Module, to.Tree)))
        """
    )


@needs_treex
def test_classes_that_were_made_of_a_plain_treeo_are_not_forgotten():
    text, changed = run(
        ATTEMPT
        + """
import treeo
class Mine(treeo.Tree):
    pass
print(json.dumps(attempt("treex")))
"""
    )
    assert text.startswith("`__main__.Mine` was made of a `treeo` that was imported without what JAX no longer has")
    assert "    from sharedtree.compat import treeo" in text
    assert not changed


@needs_treex
def test_threads_modules_imported_later_and_names_of_submodules():
    """In one process: eight threads import it at once, and then do what asks for names when it is called."""
    facts = run(
        """
        import importlib, importlib.util, inspect, json, pickle, sys, threading
        from concurrent.futures import ThreadPoolExecutor
        import jax.numpy as jnp, numpy
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
        from sharedtree.compat import treex as tx
        import treex, treeo
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
        from sharedtree.compat.treex import types
        import treex.types
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
        """
    )
    assert len(facts) == 33
    assert all(facts.values()), facts


@needs_treex
def test_a_plain_import_in_another_thread_is_waited_for():
    assert run(
        """
        import json, threading, time, importlib, sys, yaml
        from importlib.abc import MetaPathFinder
        from sharedtree.compat import treeo
        class Slow(MetaPathFinder):  # treex.utils imports yaml
            def find_spec(self, name, path, target=None):
                if name == "yaml":
                    started.set()
                    time.sleep(1)
        started = threading.Event()
        del sys.modules["yaml"]
        sys.meta_path.insert(0, Slow())
        other = threading.Thread(target=lambda: importlib.import_module("treex"))
        other.start()
        started.wait()
        from sharedtree.compat import treex as tx
        found = hasattr(tx, "Linear")
        other.join()
        print(json.dumps(found))
        """
    )
