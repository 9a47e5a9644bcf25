"""treex and treeo get what they need and nobody else sees it; what cannot work says so, and leaves nothing."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import textwrap
import tomllib

import pytest

import sharedtree as st
from sharedtree.compat._importing import NEEDED

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


def run(code, *, path=None, expect=0):
    """What a new process prints last, as JSON; or all that it wrote, if it is to fail."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", STATE + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **({"PYTHONPATH": str(path)} if path else {})},
    )
    assert done.returncode == expect, done.stderr
    return done.stderr if expect else json.loads(done.stdout.splitlines()[-1])


def installed(folder, **versions):
    """A folder that says that these releases are installed, to whoever finds it first."""
    for name, version in versions.items():
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder


def refusal(code, path=None):
    """The error of an import, and what state it left."""
    return run(
        f"""
        import json, sharedtree
        try:
            import optax, flax.linen  # which have finders of their own
        except ImportError:
            pass
        before = state()
        try:
        {textwrap.indent(textwrap.dedent(code), "    " * 3).strip().join(["    ", ""])}
        except sharedtree.CompatibilityError as error:
            text = str(error)
        else:
            text = "nothing was raised"
        after = state()
        print(json.dumps([text, sorted(key for key in before if before[key] != after[key])]))
        """,
        path=path,
    )


# What is installed ----------------------------------------------------------------------------------------------------

WANTED = {"treex": "0.6.9", "treeo": "0.0.10"}
INSTALL = "pip install --no-deps treex==0.6.9 treeo==0.0.10"


@pytest.mark.parametrize("name", ["treex", "treeo"])
def test_absent(name):
    text, changed = refusal(
        f"""
        import importlib.metadata
        found = importlib.metadata.version
        def version(name):
            if name in ("treex", "treeo"):
                raise importlib.metadata.PackageNotFoundError(name)
            return found(name)
        importlib.metadata.version = version
        from sharedtree.compat import {name}
        """
    )
    assert text.startswith(f"`{name}` is not installed.")
    assert INSTALL in text
    assert not changed


@pytest.mark.parametrize(
    ("name", "versions", "said"),
    [
        ("treex", {"treex": "0.5.0", "treeo": "0.0.10"}, "`treex` 0.5.0 is installed, but it is 0.6.9"),
        ("treex", {"treex": "0.7.0", "treeo": "0.0.10"}, "`treex` 0.7.0 is installed, but it is 0.6.9"),
        ("treex", {"treex": "0.6.9", "treeo": "0.2.2"}, "`treeo` 0.2.2 is installed, but it is 0.0.10"),
        ("treeo", {"treeo": "0.2.2"}, "`treeo` 0.2.2 is installed, but it is 0.0.10"),
        # What its own dependencies ask for.
        ("treex", {"treex": "0.6.9", "treeo": "0.0.9"}, "`treeo` 0.0.9 is installed, but it is 0.0.10"),
        (
            "treex",
            {"treex": "0.6.9", "treeo": "0.0.10", "flax": "0.4.2"},
            "`flax` 0.4.2 is installed, which is too old",
        ),
        (
            "treex",
            {"treex": "0.6.9", "treeo": "0.0.10", "flax": "0.12.0", "optax": "0.0.9"},
            "`optax` 0.0.9 is installed",
        ),
    ],
    ids=lambda value: "-".join(f"{k}{v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_another_release(name, versions, said, tmp_path):
    text, changed = refusal(f"from sharedtree.compat import {name}", installed(tmp_path, **versions))
    assert text.startswith(said)
    assert "pip install 'sharedtree[treex]'" in text
    assert INSTALL in text
    assert not changed


def test_what_it_says_to_install_is_what_the_package_declares():
    project = tomllib.loads((pathlib.Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    lowest = dict(requirement.split(">=") for requirement in project["optional-dependencies"]["treex"])
    declared = {name: tuple(map(int, version.split("."))) for name, version in lowest.items()}
    assert declared == {name.lower(): version for name, version in NEEDED["treex"].items()}


def test_an_error_of_the_package():
    assert issubclass(st.CompatibilityError, ImportError)
    assert issubclass(st.CompatibilityError, st.SharedTreeError)


# What the libraries have ----------------------------------------------------------------------------------------------


@needs_treex
@pytest.mark.parametrize(
    ("remove", "name", "since"),
    [
        ("del jax.tree_util.tree_leaves", "jax.tree_leaves", "JAX 0.6.0"),
        ("del jax.tree_util.tree_unflatten", "jax.tree_unflatten", "JAX 0.6.0"),
        ("import numpy; del numpy.isin", "numpy.lib.arraysetops.isin", "NumPy 2.0"),
        ("import jax.nn; del jax.nn.initializers.orthogonal", "flax.linen.recurrent.orthogonal", "Flax 0.6.5"),
    ],
    ids=lambda value: value if " " not in value else "",
)
def test_a_name_that_nothing_can_stand_in_for(remove, name, since):
    text, changed = refusal(f"import jax; {remove}; from sharedtree.compat import treex")
    assert text.startswith(f"`treex` needs `{name}`, which is gone since {since}.")
    assert "pip install '" in text
    assert changed in ([], ["jax.tree_util"])  # from which the test removed it


@needs_treex
def test_names_that_a_library_still_has_are_its_own():
    assert run(
        """
        import json, jax
        jax.tree_leaves = own = lambda *args: "own"
        from sharedtree.compat import treex as tx
        print(json.dumps(tx.optimizer.jax.tree_leaves is own))
        """
    )


# Who sees it ----------------------------------------------------------------------------------------------------------


@needs_treex
@pytest.mark.parametrize("name", ["treex", "treeo"])
def test_the_real_package_and_nothing_else_changed(name):
    before, after, facts = run(
        f"""
        import json, sys, threading, optax, flax.linen, jax, numpy, sharedtree
        import {"yaml, rich.console, rich.table, rich.text, einops, typing_extensions"}
        before, seen, stop = state(), [], threading.Event()
        def look():
            while not stop.is_set():
                seen.append((hasattr(jax, "tree_map"), hasattr(numpy.lib, "arraysetops"), type(jax).__name__))
        watchers = [threading.Thread(target=look) for _ in range(3)]
        sys.setswitchinterval(1e-5)
        [watcher.start() for watcher in watchers]
        from sharedtree.compat import {name} as package
        stop.set()
        [watcher.join() for watcher in watchers]
        import {name}
        import sharedtree.compat.{name} as other
        from importlib.metadata import distribution
        facts = [
            package is {name} is other is sys.modules["{name}"],
            package.__spec__.name == "{name}",
            str(distribution("{name}").locate_file("{name}/__init__.py")) == package.__file__,
            set(seen) == {{(False, False, "module")}},
            type(sys.modules["jax"]).__name__ == type(sys.modules["flax"]).__name__ == "module",
            "unfreeze" not in dir(type(flax.linen.Dense(1).init(jax.random.key(0), jax.numpy.ones(1)))),
        ]
        print(json.dumps([before, state(), facts]))
        """
    )
    assert all(facts), facts
    assert after.pop("finders") == ["sharedtree.compat._importing", *before.pop("finders")]
    assert name in after.pop("modules")
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
        from sharedtree._node_types import AUX_FORMS
        works = tx.Linear(2).init(0, numpy.ones((1, 1))).kernel.shape == (1, 2)
        print(json.dumps([before, after, works and len(AUX_FORMS) == 1]))
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
    text, changed = refusal(
        """
        import treeo
        class Mine(treeo.Tree):
            pass
        from sharedtree.compat import treex
        """
    )
    assert text.startswith("`__main__.Mine` was made of a `treeo` that was imported without what JAX no longer has")
    assert "    from sharedtree.compat import treeo" in text


@needs_treex
def test_eight_threads_import_it_at_once():
    assert run(
        """
        import json, sys, threading, importlib
        sys.setswitchinterval(1e-6)
        barrier, found = threading.Barrier(8), []
        def load(name):
            barrier.wait()
            module = importlib.import_module("sharedtree.compat." + name)
            found.append(module.Linear if name == "treex" else module.Tree)
        threads = [threading.Thread(target=load, args=(("treex", "treeo")[i % 2],)) for i in range(8)]
        [thread.start() for thread in threads]
        [thread.join(120) for thread in threads]
        import treex, treeo
        print(json.dumps(len(found) == 8 and set(found) == {treex.Linear, treeo.Tree}))
        """
    )


@needs_treex
def test_names_asked_for_at_call_time_in_another_thread_and_from_modules_imported_later():
    assert run(
        """
        import json, threading, inspect, numpy, pickle, importlib
        from concurrent.futures import ThreadPoolExecutor
        from sharedtree.compat import treex as tx
        model = tx.Sequential(tx.Linear(3), tx.Linear(2)).init(0, numpy.ones((1, 2)))
        with ThreadPoolExecutor(4) as pool:
            texts = list(pool.map(lambda _: model.tabulate(), range(4)))
        again = importlib.reload(importlib.import_module("treex.regularizers.l1l2"))
        loss = again.L2(1.0)(parameters=[1.0, 2.0])
        print(json.dumps([
            "Total Parameters" in texts[0], float(loss) == 5.0, "class Linear" in inspect.getsource(tx.Linear),
            pickle.loads(pickle.dumps(tx.Linear)) is tx.Linear,
        ]))
        """
    ) == [True, True, True, True]


@needs_treex
def test_no_module_is_run_twice_under_two_names():
    assert run(
        """
        import json, sys
        from sharedtree import CompatibilityError
        from sharedtree.compat import treex as tx
        errors = []
        for name in ("treex.types", "treex.nn.linear", "treeo.tree"):
            try:
                __import__(f"sharedtree.compat.{name}", fromlist=["x"])
            except CompatibilityError as error:
                errors.append(f"    import {name}".startswith(str(error).splitlines()[-1]))
        from sharedtree.compat.treex import types
        import treex.types
        print(json.dumps([errors, types is treex.types, types.Parameter is tx.Parameter]))
        """
    ) == [[True, True, True], True, True]


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


# Flax -----------------------------------------------------------------------------------------------------------------


@needs_treex
def test_a_linen_module_that_the_user_brings():
    import jax
    import jax.numpy as jnp
    from flax import linen as nn

    from sharedtree.compat import treex as tx

    class Net(nn.Module):
        width: int

        @nn.compact
        def __call__(self, x, training: bool):
            x = nn.BatchNorm(use_running_average=not training)(nn.Dense(self.width)(x))
            return nn.Dropout(0.5, deterministic=not training)(x)

    x = jnp.arange(6.0).reshape(3, 2)
    net = Net(4)
    model = tx.FlaxModule(net).init(0, x)
    assert isinstance(model.module.value, Net)
    vanilla = net.init(jax.random.key(0), x, training=False)
    assert type(vanilla) is dict
    assert jax.tree.map(jnp.shape, model.params_) == jax.tree.map(jnp.shape, vanilla["params"])
    variables = {"params": model.params_, "batch_stats": model.batch_stats_}
    assert jnp.array_equal(model.eval()(x), net.apply(variables, x, training=False))
    before = model.batch_stats_["BatchNorm_0"]["mean"]
    model(x)  # in training, so the statistics move
    assert not jnp.array_equal(before, model.batch_stats_["BatchNorm_0"]["mean"])
    shared = {"a": model, "b": model}
    out = st.jit(lambda both, x: (both["a"](x), both)[1])(shared, x)
    assert out["a"] is out["b"]


@needs_treex
def test_what_is_no_linen_module_is_refused():
    from flax import nnx

    from sharedtree.compat import treex as tx

    for wrong in (nnx.Linear(2, 3, rngs=nnx.Rngs(0)), lambda x: x, None):
        with pytest.raises(TypeError, match=r"takes a module of `flax\.linen`, not `\w+`.\n    tx\.FlaxModule\("):
            tx.FlaxModule(wrong)


@needs_treex
def test_the_modules_that_users_bring_in_threads_in_pickles_and_in_classes_that_ask_for_more():
    done = run(
        """
        import json, pickle, sys, threading, jax.numpy as jnp, numpy as np
        from flax import linen as nn
        from sharedtree.compat import treex as tx
        class Net(nn.Module):
            width: int
            @nn.compact
            def __call__(self, x):
                return nn.Dense(self.width, kernel_init=nn.initializers.ones)(x)
        model = tx.FlaxModule(Net(3)).init(0, jnp.ones((1, 2)))
        again = pickle.loads(pickle.dumps(model))
        facts = [type(again.module.value) is type(model.module.value), again(jnp.ones((1, 2))).tolist() == [[2.0] * 3]]
        sys.setswitchinterval(1e-6)
        for _ in range(20):
            class New(nn.Module):
                width: int
            barrier, found, errors = threading.Barrier(8), [], []
            def make(New=New):
                barrier.wait()
                try:
                    found.append(type(tx.FlaxModule(New(3)).module.value))
                except Exception as error:
                    errors.append(repr(error))
            threads = [threading.Thread(target=make) for _ in range(8)]
            [thread.start() for thread in threads]
            [thread.join() for thread in threads]
            facts += [len(set(found)) == 1, not errors]
        class Asking(nn.Module):
            def __init_subclass__(cls, *, needed, **kwargs):
                super().__init_subclass__(**kwargs)
        try:
            tx.FlaxModule(Asking())
        except TypeError as error:
            facts.append(str(error).startswith("`Asking` cannot be used in treex"))
        print(json.dumps(facts))
        """
    )
    assert len(done) == 43
    assert all(done), done


@needs_treex
def test_what_stands_in_for_it_while_it_is_replaced_gives_the_same_classes():
    assert run(
        """
        import json, importlib.util
        def standing_in(name):
            spec = importlib.util.find_spec("sharedtree.compat." + name)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
        import sharedtree.compat
        tx, to = standing_in("treex"), standing_in("treeo")
        import treex, treeo
        print(json.dumps(tx is not treex and tx.Linear is treex.Linear and to.Tree is treeo.Tree))
        """
    )
