"""A file's word imports what is installed, and nothing that merely lies where Python would find it."""

import contextlib
import importlib
import importlib.util
import json
import os
import pathlib
import site
import subprocess
import sys
import tomllib
import types
import zipfile

import pytest

import sharedtree as st
from sharedtree.core import _current_directory
from sharedtree.serialise.trust import _public_names
from sharedtree.serialise.trust._public_names import ElsewhereError, import_installed
from tests.serialise.process import HANGS

from .containers import written

ROOT = pathlib.Path(st.__file__).parents[1]


@pytest.fixture
def site_packages(tmp_path, monkeypatch):
    """A site-packages folder of this interpreter's, last on the path."""
    folder = tmp_path / "lib" / "site-packages"
    folder.mkdir(parents=True)
    known = site.getsitepackages()
    monkeypatch.setattr(site, "getsitepackages", lambda: [*known, str(folder)])
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    yield folder
    for name in [name for name in sys.modules if name.startswith("forged")]:
        del sys.modules[name]
    importlib.invalidate_caches()


@pytest.fixture
def here(tmp_path, monkeypatch, site_packages):
    """The current directory, first on the path."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    return folder


RUNS = "import pathlib, sys; ran = True\n"


def as_module(folder, name):
    (folder / f"{name}.py").write_text(RUNS)


def as_package(folder, name):
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(RUNS)


def as_namespace(folder, name):
    (folder / name).mkdir()
    (folder / name / "part.py").write_text(RUNS)


def record(site_packages, name, root, pth=None, *, editable=True):
    """The metadata of an install, as pip writes it."""
    metadata = site_packages / f"{name}-9.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Name: {name}\nVersion: 9\n")
    url = {"url": root.as_uri(), "dir_info": {"editable": True} if editable else {}}
    (metadata / "direct_url.json").write_text(json.dumps(url))
    (metadata / "RECORD").write_text(f"_{name}.pth,,\n{name}-9.dist-info/METADATA,,\n")
    (site_packages / f"_{name}.pth").write_text(f"# a comment\nimport os\n{pth or root}\n")


def refused(name):
    with pytest.raises(ElsewhereError) as caught:
        import_installed(name)
    assert caught.value.package == name.partition(".")[0]
    assert not any(module.partition(".")[0] == caught.value.package for module in sys.modules)
    assert not any(isinstance(finder, _public_names._Guard) for finder in sys.meta_path)
    return caught.value.place


@pytest.mark.parametrize("make", [as_module, as_package])
def test_what_is_installed_is_imported(site_packages, here, make):
    (here / "forged").mkdir()  # a folder of data; the installed package goes before it
    make(site_packages, "forged")
    import_installed("forged")
    assert sys.modules["forged"].ran
    assert sys.modules["forged"].__file__.startswith(str(site_packages))


@pytest.mark.parametrize("make", [as_module, as_package, as_namespace])
@pytest.mark.parametrize("is_installed_too", [True, False])
def test_what_lies_in_the_current_directory_is_not(site_packages, here, make, is_installed_too):
    make(here, "forged")
    if is_installed_too:  # the folders of a namespace are joined
        (as_namespace if make is as_namespace else as_module)(site_packages, "forged")
    assert refused("forged").startswith(str(here))
    record(here, "forged", here)  # metadata that lies beside it does not count
    assert refused("forged").startswith(str(here))


def test_each_folder_of_a_namespace_has_to_be_one(site_packages, here, monkeypatch):
    """Also the last; that the first one has to be is tried above."""
    as_namespace(site_packages, "forged")
    as_namespace(here, "forged")
    others = [place for place in sys.path if place not in ("", str(here))]
    monkeypatch.setattr(sys, "path", [*others, str(here)])
    assert refused("forged").startswith(str(here))


def test_zip_files_are_no_site_packages(tmp_path, here, site_packages, monkeypatch):
    for path in (here / "forged.zip", site_packages / "forged.egg"):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("forged/__init__.py", RUNS)
        monkeypatch.setattr(sys, "path", [str(path), *sys.path])
        assert str(path) in refused("forged")


def test_frozen_modules_are_none_either():
    if "__hello__" in sys.modules:
        pytest.skip("loaded")
    spec = importlib.util.find_spec("__hello__")
    spec.name = "forged"
    with pytest.raises(ElsewhereError, match="frozen"):
        _public_names._require_installed("forged", spec, importlib.machinery.FrozenImporter)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows wants a privilege for links")
@pytest.mark.parametrize("layout", ["", "src"])
def test_editable_installs(tmp_path, here, site_packages, monkeypatch, layout):
    root = tmp_path / "project"
    (root / layout).mkdir(parents=True)
    as_package(root / layout, "forged_package")
    record(site_packages, "forged_package", root, pth=root / layout)
    monkeypatch.setattr(sys, "path", [*sys.path, str(root / layout)])
    import_installed("forged_package")
    (site_packages / "forged").symlink_to(root / layout / "forged_package")  # as flit makes them
    import_installed("forged")
    (here / "forged_too").symlink_to(root / layout / "forged_package")
    assert refused("forged_too").startswith(str(here))


@pytest.mark.parametrize(
    "wrong", ["another name", "not editable", "below the root", "above the root", "another url", "no record"]
)
def test_what_is_no_editable_install_of_the_package(tmp_path, site_packages, monkeypatch, wrong):
    root = tmp_path / "project"
    place = {"below the root": root / "downloads", "above the root": tmp_path}.get(wrong, root)
    (root / "downloads").mkdir(parents=True)
    as_module(place, "forged")
    if wrong != "no record":
        name = "another" if wrong == "another name" else "forged"
        record(site_packages, name, root, editable=wrong != "not editable")
    if wrong == "another url":
        url = {"url": "https://example.org/forged", "dir_info": {"editable": True}}
        (site_packages / "forged-9.dist-info" / "direct_url.json").write_text(json.dumps(url))
    monkeypatch.setattr(sys, "path", [str(place), *sys.path])
    assert refused("forged").startswith(str(place))


@pytest.mark.parametrize("is_installed", [True, False])
def test_import_hooks_of_editable_installs(tmp_path, site_packages, monkeypatch, is_installed):
    """As setuptools makes them: a finder in site-packages that knows where the package lies."""
    root = tmp_path / "project"
    (root / "python").mkdir(parents=True)
    as_package(root / "python", "forged")
    record(site_packages, "forged", root, pth=tmp_path / "nothing")

    class Finder:
        @classmethod
        def find_spec(cls, name, path=None, target=None):
            if name == "forged":
                return importlib.util.spec_from_file_location(name, root / "python" / "forged" / "__init__.py")
            return None

    hook = types.ModuleType("forged_hook")
    hook.__file__ = str((site_packages if is_installed else tmp_path) / "forged_hook.py")
    Finder.__module__ = "forged_hook"
    monkeypatch.setitem(sys.modules, "forged_hook", hook)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    with contextlib.nullcontext() if is_installed else pytest.raises(ElsewhereError):
        import_installed("forged")


def test_what_it_imports_is_held_to_the_same(site_packages, here):
    (site_packages / "forged").mkdir()
    (site_packages / "forged" / "__init__.py").write_text(
        "try:\n    import forged_helper\nexcept ImportError:\n    helper = None\n"
    )
    as_module(here, "forged_helper")
    with pytest.raises(ElsewhereError, match="forged_helper"):
        import_installed("forged")
    assert "forged_helper" not in sys.modules
    import forged_helper  # once it is loaded, by whoever runs the program, it is used

    import_installed("forged")
    assert sys.modules["forged"].forged_helper is forged_helper


def test_the_standard_library_comes_from_itself(site_packages, here, monkeypatch):
    for name in ("sndhdr", "mailbox", "this"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (site_packages / "forged.py").write_text("import mailbox")
    as_module(here, "mailbox")
    with pytest.raises(ElsewhereError, match="mailbox"):
        import_installed("forged")
    (here / "mailbox.py").unlink()
    importlib.invalidate_caches()
    import_installed("forged")


def test_namespaces_that_are_loaded(site_packages, here):
    as_namespace(site_packages, "forged")
    import forged

    import_installed("forged.part")
    as_namespace(here, "forged")  # from now on it has two folders
    (here / "forged" / "another.py").write_text(RUNS)
    importlib.invalidate_caches()
    assert len(list(forged.__path__)) == 2
    with pytest.raises(ElsewhereError):
        import_installed("forged.another")
    assert "forged.another" not in sys.modules


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
        record(folder, name, folder)
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


PROGRAM = f"""
import glob, sys
import sharedtree as st
names = {LIBRARIES!r}
assert not set(names) & set(sys.modules)
audit = st.audit("all.safetensors")
there = {{request.name.partition(":")[0]: request for request in audit.requests}}
assert audit.elsewhere == (there["optax"],) or len(audit.elsewhere) > 1
for request in audit.elsewhere:
    assert request.allowed and not request.found and "download" in request.elsewhere, request
assert "ELSEWHERE" in str(audit) and "    import optax" in str(audit)
try:
    st.load("state.safetensors")
except st.errors.UntrustedTypeError as error:
    assert error.names == ("optax:ScaleByScheduleState",)
    assert "optax.py" in str(error) and "import it first" in str(error), error
    fix = str(error).splitlines()[-1].strip()
    assert "trusted" not in str(error)
assert not set(names) & set(sys.modules) and not glob.glob("ran_*")

# What the user names comes from where it is.
assert st.load("chex.safetensors", trusted="chex:ScaleByScheduleState")
assert st.load("state.safetensors", trusted=["optax"])
assert st.audit("diffrax.safetensors", trusted="diffrax").elsewhere == ()
st.trust("lineax")
assert st.load("lineax.safetensors")
import flax
assert st.load("flax.safetensors", like=(flax.ScaleByScheduleState,))
assert "optimistix" not in sys.modules
exec(fix)
assert st.load("state.safetensors")[0] is sys.modules["optax"].ScaleByScheduleState
assert st.audit("state.safetensors").elsewhere == ()
"""


def test_libraries_beside_a_file_are_not_run(forged):
    for name in LIBRARIES:
        write(forged / f"{name}.safetensors", [f"{name}:ScaleByScheduleState"])
    done = run("-c", PROGRAM, cwd=forged)
    assert done.returncode == 0, done.stderr
    assert not (forged / "ran_optimistix").exists()


def test_the_command_line_runs_nothing_of_the_current_directory(forged, tmp_path):
    path = f"{ROOT}{os.pathsep}."
    done = run("-Bmsharedtree.__main__", "audit", "--json", "state.safetensors", cwd=forged, PYTHONPATH=path)
    assert done.returncode == 1, done.stderr
    (request,) = json.loads(done.stdout)["requests"]
    assert (request["allowed"], request["found"], request["elsewhere"]) == (True, False, str(forged / "optax.py"))
    # Everything that the command line might import.
    names = "equinox jax jaxlib numpy safetensors rich tqdm argparse json zlib zlib_ng"
    for name in names.split():
        (forged / f"{name}.py").write_text(f"raise SystemExit('ran {name}')")
    record(forged, "equinox", forged)
    st.save(forged / "model.safetensors", {"a": [1, "x"]})
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["sharedtree"].partition(":")
    assert (module, function) == ("sharedtree.__main__", "main")
    script = tmp_path / "sharedtree"  # what installers write
    script.write_text(f"import sys\nfrom {module} import {function}\nsys.exit({function}())\n")
    for program in (["-m", "sharedtree"], [str(script)]):
        done = run(*program, "show", "model.safetensors", cwd=forged)
        assert "ran" not in done.stderr
        assert done.returncode == 0, done.stderr
        assert "['a']" in done.stdout
    assert not list(forged.glob("ran_*"))


def test_when_the_current_directory_is_left_out(monkeypatch):
    for argv, orig_argv, is_dropped in (
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
    ):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", argv)
            patch.setattr(sys, "orig_argv", orig_argv)
            patch.setattr(sys, "path", [os.getcwd(), *sys.path])
            before = list(sys.path)
            importlib.reload(_current_directory)
            assert sys.path == before[is_dropped:], orig_argv
