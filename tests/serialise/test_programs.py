"""What a program defines is found by other programs: whoever saves, and whoever loads, as users run Python."""

import importlib.util
import os
import pathlib
import subprocess
import sys
import textwrap
import types

import pytest

import sharedtree as st
from tests.processes import HANGS, ROOT

from .containers import file_of
from .drafts import Draft

TRAIN = """
import dataclasses, enum
import equinox as eqx, jax, jax.numpy as jnp
import sharedtree as st

class Mode(enum.Enum):
    FAST = 1

def act(x):
    return 2 * x

class Net(eqx.Module):
    w: jax.Array
    tied: jax.Array
    act: object
    mode: Mode
    class Inner(eqx.Module):
        n: int
    inner: Inner
    bound: object = None
    def double(self):
        return 2 * self.w

def make():
    w = jnp.arange(3.0)
    return Net(w, w, act, Mode.FAST, Net.Inner(3), Net(w, w, act, Mode.FAST, Net.Inner(4)).double)

def check(net, home):
    assert net.w is net.tied and net.inner.n == 3
    assert type(net) is home.Net and net.act is home.act and net.mode is home.Mode.FAST
    assert type(net.inner) is home.Net.Inner and net.bound().tolist() == [0, 2, 4]
    print("fine")
"""

ALL = "[home.Net, home.act, home.Mode, home.Net.Inner]"

SAVE = """
if __name__ == "__main__":
    st.save("net.safetensors", make())
"""


def new_python(folder, *arguments):
    """What a program prints that is run in a folder, in a new process that has imported nothing."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def write(path, code):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(code))


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder with a program, and with what it saved."""
    folder = tmp_path_factory.mktemp("project")
    write(folder / "train.py", TRAIN + SAVE)
    new_python(folder, "train.py")
    return folder


@pytest.fixture(scope="module")
def old(project, python):
    """What a notebook saves, or what versions before this one wrote: all is in `__main__`."""
    code = f"import sys; sys.argv = ['']; exec({TRAIN!r}); st.save('old.safetensors', make())"
    python(project, "-c", code)
    return project / "old.safetensors"


def names_in(path):
    return {request.name for request in st.audit(path).requests if not request.allowed}


@pytest.mark.slow
def test_what_is_written(project, old):
    manifest = Draft((project / "net.safetensors").read_bytes()).manifest
    assert manifest["main"] == "train"
    own = {"Net", "act", "Mode", "Net.Inner", "Net.double"}
    assert names_in(project / "net.safetensors") == {f"train:{name}" for name in own}
    manifest = Draft(old.read_bytes()).manifest
    assert "main" not in manifest
    assert names_in(old) == {f"__main__:{name}" for name in own}


def loading(options):
    """Code that loads each file that the program is given with each of some options, and checks what comes."""
    calls = [f"home.check(home.st.load(path, {option}), home)" for option in options]
    return "\n".join(["import sys", "for path in sys.argv[1:]:", *[f"    {call}" for call in calls], ""])


AS_MAIN = "import sys; home = sys.modules['__main__']\n"
ANYHOW = [f"trusted={ALL}", "like=home.make()"]


def test_another_program_loads(python, project):
    path = str(project / "net.safetensors")
    write(project / "eval.py", "import train as home\n" + loading(ANYHOW))
    assert python(project, "eval.py", path) == 2 * "fine\n"
    for trusted in ("'train'", "['train:Net', 'train:act', 'train:Mode', 'train:Net.Inner']"):
        code = f"import sys, sharedtree as st, train\nnet = st.load(sys.argv[1], trusted={trusted})\n"
        assert python(project, "-c", code + "train.check(net, train)", path) == "fine\n"


def test_the_program_itself_loads_and_does_not_run_twice(python, project, old):
    python(project, "-c", "import train; train.st.save('imported.safetensors', train.make())")
    assert "main" not in Draft((project / "imported.safetensors").read_bytes()).manifest
    options = [ALL, "'__main__'", "'train'", "['train:Net', '__main__:act', 'train:Mode', '__main__:Net.Inner']"]
    code = "print('runs')\n" + AS_MAIN + loading([f"trusted={option}" for option in options])
    write(project / "again" / "train.py", TRAIN + code + "assert 'train' not in sys.modules\n")
    paths = [str(path) for path in (project / "net.safetensors", old, project / "imported.safetensors")]
    assert python(project / "again", "train.py", *paths) == "runs\n" + 12 * "fine\n"


def test_classes_of_the_same_name_that_were_given(python, project, old):
    """A copy of the classes elsewhere: a package to which the file was moved, the reader's own."""
    paths = [str(project / "net.safetensors"), str(old)]
    write(project / "moved" / "models" / "train.py", TRAIN)
    assert python(project / "moved", "-c", "import models.train as home\n" + loading(ANYHOW), *paths) == 4 * "fine\n"
    write(project / "own" / "eval.py", TRAIN + AS_MAIN + loading([*ANYHOW, "trusted='__main__'"]))
    assert python(project / "own", "eval.py", *paths) == 6 * "fine\n"


OFFERED = """
import re, sys, sharedtree

def line_offered(**options):
    try:
        sharedtree.load(path, **options)
    except sharedtree.SharedTreeError as error:
        global message
        message = str(error)
        return re.findall(r"^    (sharedtree\\.load\\(path, .*\\))$", str(error), re.MULTILINE)[0]
"""


def test_the_line_in_the_message_works(python, project, old):
    """Wherever the classes are now, the first line that a message offers is run as it stands."""
    write(project / "moved" / "models" / "train.py", TRAIN)
    for folder, module in ((project, "train"), (project / "moved", "models.train")):
        code = OFFERED + f"import {module} as home\n"
        code += "for path in sys.argv[1:]:\n"
        code += "    for options in ({}, {'trusted': '__main__'}, {'trusted': home.Mode}, {'trusted': 'elsewhere'}):\n"
        code += "        line = line_offered(**options)\n"
        code += f'        assert path != sys.argv[2] or \'"__main__:Net": "{module}:Net"\' in line, line\n'
        code += "        home.check(eval(line), home)\n"
        assert python(folder, "-c", code, str(project / "net.safetensors"), str(old)) == 8 * "fine\n"


def test_the_message_where_nothing_of_the_name_is_loaded(python, project, old):
    code = OFFERED + textwrap.dedent("""
        new, path = sys.argv[1:]
        try:
            sharedtree.load(path)
        except sharedtree.errors.UntrustedTypeError as error:
            assert "Import that from the file that defines it" in str(error)
        of_old = line_offered()
        path = new
        line = line_offered()
        assert "train" not in sys.modules
        exec(re.findall("^    (import train)$", message, re.MULTILINE)[0])
        net = eval(line)
        home = sys.modules["train"]
        home.check(net, home)
        path = sys.argv[2]
        Net, act, Mode = home.Net, home.act, home.Mode
        home.check(eval(of_old), home)
        """)
    assert python(project, "-c", code, str(project / "net.safetensors"), str(old)) == 2 * "fine\n"


def test_renames_by_either_name(python, project):
    code = TRAIN.replace("class Net(", "class Model(").replace("tied", "shared")
    for before, after in (("Net.I", "Model.I"), ("Net(w", "Model(w"), ("home.Net", "home.Model")):
        code = code.replace(before, after)
    write(project / "renamed" / "layers.py", code)
    options = []
    for module in ("__main__", "train"):
        new = {"Net": "layers:Model", "Net.Inner": "layers:Model.Inner", "Net.tied": "shared"}
        new |= {"act": "layers:act", "Mode": "layers:Mode"}
        options.append(f"trusted='layers', renames={ {f'{module}:{key}': value for key, value in new.items()} }")
    code = "import layers as home\n" + loading(options)
    assert python(project / "renamed", "-c", code, str(project / "net.safetensors")) == 2 * "fine\n"


SPAWNED = """
import multiprocessing, sys
def work(path):
    home = sys.modules[Net.__module__]
    assert Net.__module__ == "__mp_main__"
    check(st.load(path, trusted=[home.Net, home.act, home.Mode, home.Net.Inner]), home)
    check(st.load(path, trusted="__main__"), home)
    check(st.load(path, trusted="train"), home)
    st.save(path.replace(".safe", "_child.safe"), make())
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        for path in sys.argv[1:]:
            pool.apply(work, (path,))
"""


@pytest.mark.slow
def test_spawned_processes(project, old, tmp_path):
    paths = [tmp_path / "net.safetensors", tmp_path / "old.safetensors"]
    for path, source in zip(paths, (project / "net.safetensors", old), strict=True):
        path.write_bytes(source.read_bytes())
    write(tmp_path / "train.py", TRAIN + SPAWNED)
    assert new_python(tmp_path, "train.py", *map(str, paths)) == 6 * "fine\n"
    child = tmp_path / "net_child.safetensors"
    assert Draft(child.read_bytes()).manifest == Draft(paths[0].read_bytes()).manifest
    code = "import sys, train; train.check(train.st.load(sys.argv[1], trusted='train'), train)"
    assert new_python(tmp_path, "-c", code, str(child)) == "fine\n"


def test_modules_that_are_run(python, tmp_path):
    """`python -m`: Python knows the name."""
    write(tmp_path / "models" / "__init__.py", "")
    write(tmp_path / "models" / "train.py", TRAIN + SAVE)
    write(tmp_path / "models" / "__main__.py", TRAIN + SAVE)
    for module, name in (("models.train", "models.train"), ("models", "models.__main__")):
        python(tmp_path, "-m", module)
        assert Draft((tmp_path / "net.safetensors").read_bytes()).manifest["main"] == name
        code = f"import {name} as home; home.check(home.st.load('net.safetensors', trusted={ALL}), home)"
        assert python(tmp_path, "-c", code) == "fine\n"


@pytest.mark.parametrize("name", ["train-model.py", "flax.py", "numpy.py"])
def test_programs_that_nobody_can_import(python, tmp_path, name):
    """Names that are no identifiers, and those that belong to something else."""
    (tmp_path / "program").mkdir()
    write(tmp_path / "program" / name, TRAIN + SAVE)
    path = str(tmp_path / "program" / name)
    if name in ("flax.py", "numpy.py"):  # JAX would import them from there
        code = "import sys, runpy, numpy, flax, jax, sharedtree; sys.path.insert(0, 'program')\n"
        python(tmp_path, "-c", code + "runpy.run_path(sys.argv[1], run_name='__main__')", path)
    else:
        python(tmp_path, path)
    assert "main" not in Draft((tmp_path / "net.safetensors").read_bytes()).manifest


def test_a_file_of_another_name_before_it_on_the_path(python, tmp_path):
    """`train` would be somebody else's: then nothing is said of it."""
    write(tmp_path / "first" / "train.py", "raise SystemExit('was imported')")
    write(tmp_path / "second" / "train.py", "import sys; sys.path.insert(0, '../first')\n" + TRAIN + SAVE)
    python(tmp_path / "second", "train.py")
    assert "main" not in Draft((tmp_path / "second" / "net.safetensors").read_bytes()).manifest


def test_nothing_is_imported_to_save(python, tmp_path):
    write(tmp_path / "train.py", TRAIN + "\nprint('runs')" + SAVE + "    import sys; assert 'train' not in sys.modules")
    assert python(tmp_path, "train.py") == "runs\n"


# --- what a file says of a program ------------------------------------------------------------------------------------


def named(name, main, kind="class", **more):
    changes = {"main": main, **more}
    return file_of([["tuple", [[kind, name]]]], **{key: value for key, value in changes.items() if value is not None})


@pytest.mark.parametrize(
    "data",
    [
        named("train:Net", 1),
        named("train:Net", ["train"]),
        named("train:Net", "other"),
        named("train:Net", "train:Net"),
        named("train:Net", "train", format=0),
        named("train:Net", "train", format=2),
        named("__main__:Net", "__main__"),
        named("__mp_main__:Net", "__mp_main__"),
        file_of([["tuple", [["class", "train:Net"], ["class", "__main__:Net"]]]], main="train"),
        file_of([["tuple", [["int", "1"]]]], main="train"),
    ],
)
def test_the_grammar_of_main(data):
    for look in (st.load, st.inspect, st.audit):
        with pytest.raises(st.errors.FormatError):
            look(data)


def test_it_widens_no_trust(monkeypatch):
    """Each name that one may stand for is judged by its own text: what `__main__` may have, other modules may not."""
    main = types.ModuleType("__main__")
    exec("import os\nfrom os import system\nclass Net: pass", main.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    for module, name, kind in (
        ("os", "system", "function"), ("subprocess", "Popen", "class"), ("posix", "system", "function"),
        ("builtins", "eval", "function"), ("pathlib", "Path.unlink", "function"), ("os", "os.system", "function"),
        ("numpy", "load", "function"), ("train", "system", "function"), ("train", "os.system", "function"),
    ):  # fmt: skip
        for trusted in ("__main__", "train", ["__main__", "__main__:Net"], main.Net, [main.Net, "__main__"]):
            with pytest.raises((st.errors.UntrustedTypeError, st.errors.StructureMismatchError)):
                st.load(named(f"{module}:{name}", module, kind), trusted=trusted)
            requests = st.audit(named(f"{module}:{name}", module, kind), trusted=trusted).requests
            assert not any(request.found for request in requests)
    assert "train" not in sys.modules


def test_two_that_were_given_are_none():
    one, other = (type("Net", (), {"__module__": f"models_{i}"}) for i in range(2))
    data = file_of([["tuple", [["class", "__main__:Net"]]]])
    assert st.load(data, trusted=one) == (one,)
    with pytest.raises(st.errors.UntrustedTypeError):
        st.load(data, trusted=[one, other])


def test_find_spec_is_the_oracle(tmp_path, monkeypatch):
    from sharedtree.serialise.trust._public_names import program_name

    path = tmp_path / "some_program.py"
    path.write_text("")
    main = types.ModuleType("__main__")
    main.__file__ = str(path)
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert program_name() is None
    monkeypatch.syspath_prepend(str(tmp_path))
    assert pathlib.Path(importlib.util.find_spec("some_program").origin) == path
    assert program_name() == "some_program"
    main.__file__ = None
    assert program_name() is None
