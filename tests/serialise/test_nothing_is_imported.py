"""A file imports nothing, whoever is trusted: what it names is looked up in what is imported, and the rest is said."""

import importlib
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tomllib
import types

import pytest

import sharedtree as st
from sharedtree.core import _current_directory
from tests.processes import HANGS, program

from .containers import file_of, written

ROOT = pathlib.Path(st.__file__).parents[1]

LIBRARIES = ("chex", "diffrax", "flax", "lineax", "optax", "optimistix")
STATE = "optax:ScaleByScheduleState"


@pytest.fixture
def forged(tmp_path):
    """A folder with a file that names a class of each library, and the libraries, forged, beside it."""
    folder = tmp_path / "download"
    folder.mkdir()
    for name in LIBRARIES:
        code = f"open('ran_{name}', 'w').close()\nfrom typing import NamedTuple\n"
        code += "class ScaleByScheduleState(NamedTuple):\n    count: int = 0\n"
        (folder / f"{name}.py").write_text(code)
    write(folder / "all.safetensors", [f"{name}:Foo" for name in LIBRARIES if name != "optax"] + [STATE])
    write(folder / "state.safetensors", [STATE])
    return folder


def write(path, names):
    nodes = [["tuple", [["class", name] for name in names]]]
    manifest = {"format": 1, "library": "", "types": [], "arrays": [], "nodes": nodes, "root": 0}
    path.write_bytes(written({}, json.dumps(manifest)))


def run(*arguments, cwd, **environment):
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True, text=True, timeout=HANGS,
    )  # fmt: skip


@pytest.mark.slow
def test_libraries_beside_a_file_are_not_run(forged):
    for name in LIBRARIES:
        write(forged / f"{name}.safetensors", [f"{name}:ScaleByScheduleState"])
    done = run("-c", program("libraries_beside_a_file"), *LIBRARIES, cwd=forged)
    assert done.returncode == 0, done.stderr


# What one program saves, and what another one is told that has imported only sharedtree.
SAVED = {
    "import optax": "optax.adam(0.1).init({'w': jnp.ones(2)})",
    "import optax; import optax.contrib": "optax.contrib.schedule_free(optax.sgd(0.1), 0.1).init({'w': jnp.ones(2)})",
    "import jax.scipy.special": "jax.tree_util.Partial(jax.scipy.special.expit, jnp.ones(2))",
}


@pytest.mark.parametrize(
    "lines", [pytest.param(each, marks=[pytest.mark.slow] * (i > 0)) for i, each in enumerate(SAVED)]
)
@pytest.mark.slow
def test_the_lines_that_help(lines, tmp_path):
    saving = f"import jax, jax.numpy as jnp, sharedtree as st; {lines}; st.save('a.safetensors', {SAVED[lines]})"
    done = run("-c", saving, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = run("-c", program("lines_that_help"), lines, cwd=tmp_path)
    assert done.stdout in ("tuple\n", "Partial\n", "ScheduleFreeState\n"), done.stderr


@pytest.mark.slow
def test_layers_of_flax_nnx(tmp_path):
    """`import flax` does not bring `flax.nnx`, and the message says what does."""
    if importlib.util.find_spec("flax") is None:
        pytest.skip("Flax is not installed")
    code = "import sharedtree as st\nfrom flax import nnx\nst.save('a.safetensors', nnx.Linear(1, 1, rngs=nnx.Rngs(0)))"
    assert run("-c", code, cwd=tmp_path).returncode == 0
    code = program("nnx_after_flax")
    done = run("-c", code, cwd=tmp_path)
    assert done.stdout == "Linear\n", done.stderr


def test_what_is_not_there_is_not_told_to_be_imported(tmp_path):
    """A module that the installed version lacks, and a private one of a module that is imported."""
    for name, told in (
        ("equinox.gone:Model", "there is no module `equinox.gone`"),
        ("equinox._gone:Model", "`equinox._gone` holds nothing of that name"),
        ("my_gone_package.sub:Model", "`my_gone_package` is not installed"),
    ):
        write(tmp_path / "a.safetensors", [name])
        with pytest.raises(st.errors.StructureMismatchError, match=told):
            st.load(tmp_path / "a.safetensors", trusted="my_gone_package")


@pytest.mark.slow
def test_the_command_line_runs_nothing_of_the_current_directory(forged, tmp_path):
    path = f"{ROOT}{os.pathsep}."
    done = run("-Bmsharedtree.__main__", "audit", "--json", "state.safetensors", cwd=forged, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    (request,) = json.loads(done.stdout)["requests"]
    assert (request["allowed"], request["found"], request["not_imported"]) == (True, False, "optax")
    # Everything that the command line might import.
    names = "equinox jax jaxlib numpy safetensors rich tqdm argparse json zlib zlib_ng"
    for name in names.split():
        (forged / f"{name}.py").write_text(f"raise SystemExit('ran {name}')")
    st.save(forged / "model.safetensors", {"a": [1, "x"]})
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["sharedtree"].partition(":")
    assert (module, function) == ("sharedtree.__main__", "main")
    script = tmp_path / "sharedtree"  # what installers write
    script.write_text(f"import sys\nfrom {module} import {function}\nsys.exit({function}())\n")
    for command in (["-m", "sharedtree"], [str(script)]):
        done = run(*command, "show", "model.safetensors", cwd=forged)
        assert "ran" not in done.stderr
        assert done.returncode == 0, done.stderr
        assert "['a']" in done.stdout
    assert not list(forged.glob("ran_*"))


@pytest.mark.parametrize(
    ("argv", "orig_argv", "is_dropped"),
    [
        (["-m", "show"], ["python", "-m", "sharedtree", "show"], True),
        (["-m", "show", "x"], ["python", "-B", "-m", "sharedtree", "show", "x"], True),
        (["-m"], ["python", "-msharedtree"], True),
        (["-m"], ["python", "-Bmsharedtree.__main__"], True),
        (["-m"], ["python", "-m", "sharedtree.tree"], False),
        (["-m", "sharedtree"], ["python", "-m", "program", "sharedtree"], False),
        (["-m", "-m", "sharedtree"], ["python", "-m", "program", "-m", "sharedtree"], False),
        (["-c", "-m", "sharedtree"], ["python", "-c", "code", "-m", "sharedtree"], False),
        (["sharedtree"], ["python", "sharedtree"], False),
        ([], [], False),
        (["-m"], [], False),
    ],
)
def test_when_the_current_directory_is_left_out(monkeypatch, argv, orig_argv, is_dropped):
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", argv)
        patch.setattr(sys, "orig_argv", orig_argv)
        patch.setattr(sys, "path", [os.getcwd(), *sys.path])
        before = list(sys.path)
        importlib.reload(_current_directory)
        assert sys.path == before[is_dropped:], orig_argv


@pytest.fixture
def lazy(tmp_path, monkeypatch):
    """A lazy module, a package, that is in `sys.modules` and held by two others under names of classes."""
    (tmp_path / "lazy_package").mkdir()
    (tmp_path / "lazy_package" / "__init__.py").write_text("ran = True")
    (tmp_path / "lazy_package" / "part.py").write_text("raise RuntimeError('ran')")
    (tmp_path / "lazy_package" / "folder").mkdir()
    folder = [str(tmp_path / "lazy_package")]
    spec = importlib.util.spec_from_file_location(
        "lazy_package", tmp_path / "lazy_package" / "__init__.py", submodule_search_locations=folder
    )
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "lazy_package", module)
    for name in ("my_package", "another"):
        holder = types.ModuleType(name)
        holder.__dict__.update(Held=module, answers=AnswersAll())
        monkeypatch.setitem(sys.modules, name, holder)
    return module


class AnswersAll:
    """An object that runs code for each attribute, as the proxies of some libraries do."""

    def __getattribute__(self, name):
        pytest.fail(f"was asked for {name}")

    def __call__(self):
        pytest.fail("was called")


def namings(name):
    """Files that name something, in each place where a file has names."""
    for use in ("class", "function"):
        yield file_of([["tuple", [[use, name]]]])
    for kind in ("registered", "enum"):
        yield file_of([["tuple", []]], types=[{"name": name, "kind": kind}])
    yield file_of([["tuple", []]], types=[{"name": name, "kind": "module", "fields": []}])


@pytest.mark.parametrize("trusted", [(), "my_package", "lazy_package"])
@pytest.mark.parametrize(
    "name",
    [
        "my_package:Held",
        "my_package:Held.part",
        "my_package:answers",
        "my_package:nothing",
        "__main__:Held",
        "__main__:Held.part",
        "__main__:answers",
        "lazy_package:Class",
        "lazy_package.part:Class",
        "lazy_package.folder:Class",
        "lazy_package.gone:Class",
    ],
)
def test_no_lazy_module_is_loaded(lazy, name, trusted):
    before = set(sys.modules)
    for data in namings(name):
        with pytest.raises(st.SharedTreeError):
            pytest.fail(repr(st.from_bytes(data, trusted=trusted)))
        str(st.audit(data, trusted=trusted))
    assert object.__getattribute__(lazy, "__class__") is not types.ModuleType
    assert "ran" not in object.__getattribute__(lazy, "__dict__")
    assert set(sys.modules) == before


class AsksOnlyForTrusted:
    """A finder of a program, which must not see the texts of a file that nobody trusts."""

    def __init__(self):
        self.asked = []

    def find_spec(self, name, path=None, target=None):
        self.asked.append(name)


def test_finders_see_no_text_of_a_file(monkeypatch):
    finder = AsksOnlyForTrusted()
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    for name in ("nowhere.deep:Class", "nowhere:Class", "equinox.nowhere:Class", "json.nowhere:Class"):
        for data in namings(name):
            with pytest.raises(st.SharedTreeError):
                st.from_bytes(data)
            str(st.audit(data))
    assert not [name for name in finder.asked if "nowhere" in name]
    with pytest.raises(st.errors.UntrustedTypeError, match="import nowhere\n"):
        st.from_bytes(next(namings("nowhere:Class")))
