"""Which walk is in use, and that what cannot be used is left alone, with one warning."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

import sharedtree
from sharedtree._native_walk import native

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(sharedtree.__file__).parent
REPORT = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import sharedtree as st
    from sharedtree._engine import engine
import jax.numpy as jnp
w = jnp.ones(2)
print(engine())
print(*st.tree.flatten([w, {"a": w}]))
print([str(each.message) for each in caught if "native" in str(each.message)])
"""


def report(environment=None, folder=None):
    """What a new process says: the engine, what it flattens, its warnings."""
    path = {} if folder is None else {"PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", REPORT],
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
        env={**os.environ, **path, **(environment or {})},
    )
    return done.stdout.splitlines()


@pytest.fixture
def checkout(tmp_path):
    """A copy of the package, without its compiled part."""
    shutil.copytree(ROOT, tmp_path / "sharedtree", ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.draft"))
    return tmp_path


FLATTENED = "[Array([1., 1.], dtype=float32)] Structure(3 records, 1 leaves)"


def test_it_can_be_turned_off():
    assert report({"SHAREDTREE_NATIVE": "0"}) == ["walk in Python (SHAREDTREE_NATIVE=0)", FLATTENED, "[]"]


def test_without_the_compiled_part(checkout):
    assert report({"SHAREDTREE_NATIVE": ""}, checkout) == ["walk in Python (not compiled)", FLATTENED, "[]"]


def assert_refused(checkout, reason):
    """It walks in Python, with one warning, which says why."""
    engine, flattened, warnings = report({"SHAREDTREE_NATIVE": ""}, checkout)
    assert engine.startswith(f"walk in Python ({reason}")
    assert flattened == FLATTENED
    assert warnings.count("The native part of sharedtree cannot be used: ") == 1
    assert warnings.count(reason) == 1


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"not a library"])
def test_a_compiled_part_that_is_broken(checkout, content):
    (checkout / "sharedtree" / "_native.abi3.so").write_bytes(content)
    assert_refused(checkout, "ImportError: ")


@pytest.mark.skipif(native is None, reason="there is no compiled part to cut")
@pytest.mark.parametrize("fraction", [0.001, 0.5, 0.99])
def test_a_compiled_part_that_is_cut_off(checkout, fraction):
    whole = (ROOT / "_native.abi3.so").read_bytes()
    (checkout / "sharedtree" / "_native.abi3.so").write_bytes(whole[: int(len(whole) * fraction)])
    assert_refused(checkout, "the end of its file is missing")


def test_a_folder_in_its_place(checkout):
    (checkout / "sharedtree" / "_native.abi3.so").mkdir()
    engine, flattened, warnings = report({"SHAREDTREE_NATIVE": ""}, checkout)
    assert engine.startswith("walk in Python (")
    assert (flattened, warnings) == (FLATTENED, "[]")


@pytest.mark.parametrize(("source", "reason"), [("", "AttributeError: "), ("1 / 0", "ZeroDivisionError: ")])
def test_a_file_in_python_in_its_place(checkout, source, reason):
    (checkout / "sharedtree" / "_native.py").write_text(source)
    assert_refused(checkout, reason)


@pytest.mark.parametrize(
    "suffix", [f".cpython-{sys.version_info[0]}{sys.version_info[1] + 1}-x86_64-linux-gnu.so", ".pyd"]
)
def test_a_compiled_part_for_another_interpreter(checkout, suffix):
    (checkout / "sharedtree" / f"_native{suffix}").write_bytes(b"for whom it may concern")
    assert report({"SHAREDTREE_NATIVE": ""}, checkout) == ["walk in Python (not compiled)", FLATTENED, "[]"]


@pytest.mark.parametrize("entry", ["PyInit__other", "PyInit__native"])
def test_a_library_that_is_no_such_module(checkout, entry):
    """Another one's, or one whose start fails, as one for a later Python does."""
    source = checkout / "other.c"
    source.write_text(f"void *{entry}(void) {{ return 0; }}")
    target = checkout / "sharedtree" / "_native.abi3.so"
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no compiler")
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(target)], check=True)
    assert_refused(checkout, "ImportError: " if entry == "PyInit__other" else "SystemError: ")


@pytest.mark.skipif(native is None, reason="there is no compiled part to copy")
def test_a_checkout_that_lacks_its_source(checkout):
    """As an installed wheel does."""
    shutil.copy(ROOT / "_native.abi3.so", checkout / "sharedtree")
    (checkout / "sharedtree" / "_native.c").unlink()
    assert report({"SHAREDTREE_NATIVE": ""}, checkout) == ["native walk", FLATTENED, "[]"]


@pytest.mark.skipif(native is None, reason="there is no compiled part to copy")
def test_a_source_that_cannot_be_read(checkout):
    shutil.copy(ROOT / "_native.abi3.so", checkout / "sharedtree")
    (checkout / "sharedtree" / "_native.c").unlink()
    (checkout / "sharedtree" / "_native.c").mkdir()
    assert_refused(checkout, "IsADirectoryError: ")


@pytest.mark.skipif(native is None, reason="the native walk is not in use")
def test_a_second_import_of_the_package_walks_in_python():
    again = """
import sys, jax.numpy as jnp
import sharedtree
before = sharedtree.tree.flatten([jnp.ones(2)])
for name in [name for name in sys.modules if name.partition(".")[0] == "sharedtree"]:
    del sys.modules[name]
import sharedtree
from sharedtree._engine import engine
print(engine())
leaves, structure = sharedtree.tree.flatten([jnp.ones(2)])
print(structure, sharedtree.tree.unflatten(structure, leaves))
"""
    done = subprocess.run([sys.executable, "-c", again], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "walk in Python (it serves an earlier import of the package)",
        "Structure(2 records, 1 leaves) [Array([1., 1.], dtype=float32)]",
    ]


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false", None])
def test_compiling_in_a_checkout(checkout, compiler):
    shutil.copy(ROOT.parent / "hatch_build.py", checkout)
    stale = checkout / "sharedtree" / "_native.abi3.so"
    stale.write_bytes(b"from an earlier build")
    environment = {**os.environ, "SHAREDTREE_NATIVE": ""} | ({} if compiler is None else {"CC": compiler})
    command = [sys.executable, "hatch_build.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=checkout, env=environment)
    if done.returncode == 0:
        assert compiler is None
        assert report({"SHAREDTREE_NATIVE": ""}, checkout) == ["native walk", FLATTENED, "[]"]
    else:
        assert "The native walk was not compiled, so the one in Python is used:" in done.stderr
        assert not stale.exists()
    assert not list(checkout.rglob("*.draft"))
