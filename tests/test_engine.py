"""Which walk is in use, and that what cannot be used is left alone, with one warning."""

import errno
import hashlib
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from packaging import tags

import sharedtree
from sharedtree.core import _native_or_python
from sharedtree.core._pack_and_unpack import native
from tests.processes import program, run

pytestmark = pytest.mark.slow
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no compiler")

ROOT = pathlib.Path(sharedtree.__file__).parent
REPORT = program("engine_report")


def report(folder=ROOT.parent, word=""):
    """What a new process says: the engine, what it flattens, its warnings."""
    return run(REPORT, cwd=folder, PYTHONPATH=str(folder), SHAREDTREE_NATIVE=word).splitlines()


@pytest.fixture
def checkout(tmp_path):
    """A copy of the package, without its compiled part."""
    shutil.copytree(ROOT, tmp_path / "sharedtree", ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.draft"))
    return tmp_path


OTHER_SOURCE = "it was compiled from another version of its source"
FLATTENED = "[Array([1., 1.], dtype=float32)] Structure(3 records, 1 leaves)"


NATIVE = ["native walk", FLATTENED, "[]"]
CORE = "sharedtree/core"
NOT_COMPILED = ["walk in Python (not compiled)", FLATTENED, "[]"]


def test_it_can_be_turned_off():
    assert report(word="OFF") == ["walk in Python (SHAREDTREE_NATIVE=OFF)", FLATTENED, "[]"]


def test_without_a_compiled_part_for_this_interpreter(checkout):
    for suffix in (f".cpython-{sys.version_info[0]}{sys.version_info[1] + 1}-x86_64-linux-gnu.so", ".pyd"):
        (checkout / CORE / f"_native{suffix}").write_bytes(b"for whom it may concern")
    assert report(checkout) == NOT_COMPILED
    (checkout / CORE / "_native.abi3.so").mkdir()
    engine, *others = report(checkout)
    assert engine.startswith("walk in Python (")
    assert others == NOT_COMPILED[1:]


def assert_refused(checkout, reason):
    """It walks in Python, with one warning, which says why."""
    engine, flattened, warnings = report(checkout)
    assert engine.startswith(f"walk in Python ({reason}")
    assert flattened == FLATTENED
    assert warnings.count("The native part of sharedtree cannot be used: ") == 1
    assert warnings.count(reason) == 1


def digest_of(checkout):
    total = hashlib.sha256()
    for file in source_files(checkout):
        total.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return total.hexdigest()


def source_files(checkout):
    return sorted((checkout / CORE).glob("_native*.[ch]"))


def whole_library():
    if native is None:
        pytest.skip("there is no compiled part to cut")
    return (ROOT / "core" / "_native.abi3.so").read_bytes()


def part_of_library(fraction):
    return lambda _: whole_library()[: int(len(whole_library()) * fraction)]


# What does not say that it was compiled from the source is not loaded; what does may still be no library, and whatever
# is raised where it is loaded, or begins to walk, is the reason.
UNUSABLE = {
    "not a library": (".abi3.so", lambda digest: b"not a library", OTHER_SOURCE),
    "the beginning of a library": (".abi3.so", lambda digest: b"\x7fELF" + digest, "ImportError: "),
    "a thousandth of it": (".abi3.so", part_of_library(0.001), "the end of its file is missing"),
    "most of it": (".abi3.so", part_of_library(0.99), "the end of its file is missing"),
    "Python that fails": (".py", lambda digest: b'"""%s"""\n1 / 0' % digest, "ZeroDivisionError: "),
    "Python of another": (".py", lambda digest: b'"""%s"""\nbuilt_from = "another"' % digest, OTHER_SOURCE),
    "Python without more": (".py", lambda digest: b'"""%s"""\nbuilt_from = __doc__' % digest, "AttributeError: "),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_a_compiled_part_that_cannot_be_used(checkout, name):
    suffix, content, reason = UNUSABLE[name]
    (checkout / CORE / f"_native{suffix}").write_bytes(content(digest_of(checkout).encode()))
    assert_refused(checkout, reason)


@pytest.mark.skipif(native is None, reason="there is no compiled part to copy")
@pytest.mark.parametrize("file", source_files(ROOT.parent), ids=lambda file: file.name)
def test_each_file_of_the_source_counts(checkout, monkeypatch, file):
    shutil.copy(ROOT / "core" / "_native.abi3.so", checkout / CORE)
    builder = builder_of(checkout, monkeypatch)
    assert builder.digest() == digest_of(checkout)
    assert builder.is_current(builder.TARGET)
    with (checkout / CORE / file.name).open("a") as changed:
        changed.write("/* changed */\n")
    assert not builder.is_current(builder.TARGET)
    assert_refused(checkout, OTHER_SOURCE)


@pytest.mark.skipif(native is None, reason="there is no compiled part to copy")
def test_a_package_that_lacks_its_source(checkout):
    """As an installed wheel does, which has the digest instead. It is the source that counts where there are both."""
    shutil.copy(ROOT / "core" / "_native.abi3.so", checkout / CORE)
    described, digest = checkout / CORE / "_native_source.py", digest_of(checkout)
    described.write_text("DIGEST = 'of another version'")
    assert report(checkout) == NATIVE
    for file in source_files(checkout):
        file.unlink()
    assert_refused(checkout, OTHER_SOURCE)
    described.write_text(f"DIGEST = {digest!r}")
    assert report(checkout) == NATIVE
    described.write_text("")
    assert_refused(checkout, "AttributeError: ")
    described.unlink()
    assert_refused(checkout, "neither its source nor `_native_source.py` is there to tell whether it fits")
    (checkout / CORE / "_native.c").mkdir()
    assert_refused(checkout, "IsADirectoryError: ")


def test_the_warning_as_an_error(checkout):
    """Who asks for that gets it, once."""
    (checkout / CORE / "_native.abi3.so").write_bytes(b"not a library")
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", "import sharedtree"]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "SHAREDTREE_NATIVE": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=checkout, env=environment)
    assert done.stderr.count("RuntimeWarning: ") == 1
    assert "RuntimeWarning: The native part of sharedtree cannot be used" in done.stderr
    assert OTHER_SOURCE in done.stderr


@pytest.mark.skipif(native is None, reason="the native walk is not in use")
def test_a_second_import_of_the_package_walks_in_python():
    again = program("second_import")
    assert run(again).splitlines() == [
        "walk in Python (it serves an earlier import of the package)",
        "Structure(2 records, 1 leaves) [Array([1., 1.], dtype=float32)]",
    ]


def builder_of(checkout, monkeypatch):
    """`hatch_build.py` of a checkout, as hatchling imports it."""
    monkeypatch.delenv("SHAREDTREE_NATIVE", raising=False)
    shutil.copy(ROOT.parent / "hatch_build.py", checkout)
    spec = importlib.util.spec_from_file_location("hatch_build", checkout / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


FAILING = ["no-such-compiler", "false", "true"]  # the last one writes nothing, and says that it worked


@pytest.mark.parametrize("compiler", [*FAILING, None])
def test_compiling_in_a_checkout(checkout, compiler):
    shutil.copy(ROOT.parent / "hatch_build.py", checkout)
    stale = checkout / CORE / "_native.abi3.so"
    stale.write_bytes(b"from an earlier build")
    environment = {**os.environ, "SHAREDTREE_NATIVE": ""} | ({} if compiler is None else {"CC": compiler})
    command = [sys.executable, "hatch_build.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=checkout, env=environment)
    if done.returncode == 0:
        assert compiler is None
        assert report(checkout) == NATIVE
    else:
        assert "The native walk was not compiled:" in done.stderr
        assert "So the one in Python is used." in done.stderr
        assert not stale.exists()
    assert not list(checkout.rglob("*.draft"))


@pytest.mark.parametrize("compiler", FAILING)
@pytest.mark.parametrize("is_switched_off", [False, True])
def test_what_was_compiled_from_this_source_stays(checkout, monkeypatch, capsys, compiler, is_switched_off):
    """A build that comes to nothing takes nothing away."""
    builder = builder_of(checkout, monkeypatch)
    monkeypatch.setenv("CC", compiler)
    if is_switched_off:
        monkeypatch.setenv("SHAREDTREE_NATIVE", "0")
    builder.TARGET.write_bytes(f"as if compiled, {digest_of(checkout)}".encode())
    before = contents(checkout)
    assert builder.compiled() is False
    assert contents(checkout) == before
    assert ("was compiled from this source before, and stays" in capsys.readouterr().err) is not is_switched_off


READ_ONLY = OSError(errno.EROFS, "Read-only file system")


def make_read_only(monkeypatch, folder):
    """Nothing in a folder can be written, renamed or removed. A superuser can do that where the mode forbids it."""

    def forbidding(name, do):
        def may(self, *args, **kwargs):
            if folder in self.parents:
                raise READ_ONLY
            return do(self, *args, **kwargs)

        monkeypatch.setattr(pathlib.Path, name, may)

    for name in ("unlink", "replace", "rename", "write_text", "write_bytes", "mkdir", "touch"):
        forbidding(name, getattr(pathlib.Path, name))


@pytest.mark.parametrize("has_old", [False, True])
@pytest.mark.parametrize("compiler", [*FAILING, None])
def test_a_checkout_that_is_read_only(checkout, monkeypatch, capsys, compiler, has_old):
    """Neither by hand nor for an editable install is that an exception, whichever step is the first to fail."""
    builder = builder_of(checkout, monkeypatch)
    if compiler is not None:
        monkeypatch.setenv("CC", compiler)
    if has_old:
        builder.TARGET.write_bytes(b"of another version")
    before = contents(checkout)
    make_read_only(monkeypatch, checkout)
    assert builder.compiled() is False
    data = {"artifacts": [], "force_include": {}}
    hook = builder.CompileHook()
    hook.initialize("editable", data)
    hook.finalize("editable", data, "")
    assert data == {"artifacts": [], "force_include": {}}
    assert "The native walk was not compiled:" in capsys.readouterr().err
    after = contents(checkout)
    assert {path: after[path] for path in before} == before


@needs_compiler
def test_a_checkout_that_is_compiled(checkout, monkeypatch):
    """No process meets a moment without the file, and an editable install takes it where nothing can be written."""
    builder = builder_of(checkout, monkeypatch)
    assert builder.compiled()
    first = builder.TARGET.read_bytes()
    met, run = [], subprocess.run

    def compiling(*args, **options):
        met.append(builder.TARGET.read_bytes())
        return run(*args, **options)

    with monkeypatch.context() as watched:
        watched.setattr(builder.subprocess, "run", compiling)
        assert builder.compiled("-O1")
    assert met == [first]
    make_read_only(monkeypatch, checkout)
    data = {"artifacts": [], "force_include": {}}
    builder.CompileHook().initialize("editable", data)
    assert data["artifacts"] == [f"{CORE}/_native.abi3.so"]
    assert data["pure_python"] is False


@pytest.mark.parametrize("compiler", ["false", "no such compiler", "off", pytest.param(None, marks=needs_compiler)])
def test_a_wheel_is_built_beside_the_checkout(checkout, tmp_path_factory, monkeypatch, compiler):
    """What it gets works without the source, and an older file that is found there is told by the digest."""
    builder = builder_of(checkout, monkeypatch)
    if compiler == "off":
        monkeypatch.setenv("SHAREDTREE_NATIVE", "off")
    elif compiler is not None:
        monkeypatch.setenv("CC", compiler)
    builder.TARGET.write_bytes(b"of another version")
    before = contents(checkout)
    hook, data = builder.CompileHook(), {"artifacts": [], "force_include": {}}
    with monkeypatch.context() as read_only:
        make_read_only(read_only, checkout)
        hook.initialize("standard", data)
    assert contents(checkout) == before
    assert data["artifacts"] == []
    assert ("tag" in data) is (compiler is None)

    installed = tmp_path_factory.mktemp("installed")
    shutil.copytree(
        ROOT, installed / "sharedtree", ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.[ch]", "*.draft")
    )
    for file, place in data["force_include"].items():
        shutil.copy(file, installed / place)
    hook.finalize("standard", data, "")
    assert not any(pathlib.Path(file).parent.exists() for file in data["force_include"])
    if compiler is None:
        assert report(installed) == NATIVE
    else:
        if compiler == "false":
            assert_refused(installed, "it was not compiled when this was built: false ended with 1")
        else:
            assert report(installed) == NOT_COMPILED
        (installed / CORE / "_native.abi3.so").write_bytes(b"from an earlier version")
        assert_refused(installed, OTHER_SOURCE)


MACS = {  # what Python says of itself, the processor that is there: where what is compiled runs at the earliest
    ("macosx-10.9-universal2", "x86_64"): (10, 9),
    ("macosx-10.13-x86_64", "x86_64"): (10, 13),
    ("macosx-10.15-universal2", "arm64"): (11, 0),
    ("macosx-11.0-arm64", "arm64"): (11, 0),
    ("macosx-14.4-arm64", "arm64"): (14, 0),
    ("macosx-26-x86_64", "arm64"): (26, 0),
}


@pytest.mark.parametrize(("said", "here"), MACS)
def test_a_wheel_for_macos_is_named_for_one_processor(checkout, monkeypatch, said, here):
    """As installers look for it, and the compiler is told the same."""
    builder, oldest, asked = builder_of(checkout, monkeypatch), MACS[said, here], []
    monkeypatch.setattr(builder.sys, "platform", "darwin")
    monkeypatch.setattr(builder.sysconfig, "get_platform", lambda: said)
    monkeypatch.setattr(builder.platform, "machine", lambda: here)
    monkeypatch.setattr(builder.subprocess, "run", lambda command, **_: asked.append(command) or sys.exit())
    kind = said.split("-")[2].replace("universal2", here)
    assert builder.platform_tag() == next(tags.mac_platforms(oldest, kind))
    with pytest.raises(SystemExit):
        builder.compiled()
    (command,) = asked
    assert "-mmacosx-version-min={}.{}".format(*oldest) in command
    assert ("-arch" in command) is (kind != here)


WORDS = {"0": 1, "false": 1, "no": 1, "off": 1, "": 0, "1": 0, "true": 0, "yes": 0, "on": 0, "2": 0, "00": 0, "none": 0}


def test_words_that_switch_it_off(checkout, monkeypatch):
    """The same for who builds it and for who uses it."""
    builder = builder_of(checkout, monkeypatch)
    for word in (*WORDS, "False", "FALSE", "oFf", "NO", " no ", "0\n"):
        is_off = bool(WORDS[word.strip().lower()])
        monkeypatch.setenv("SHAREDTREE_NATIVE", word)
        assert builder.is_switched_off() is is_off, word
        assert (_native_or_python._load()[1] == f"SHAREDTREE_NATIVE={word.strip()}") is is_off, word
