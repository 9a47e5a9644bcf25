"""Files that a release wrote are read for ever, to the same values, with every version of the dependencies."""

import pathlib
import sys

import pytest
import safetensors

import sharedtree as st

from ..golden import models, program
from ..golden.make import make
from .drafts import Draft
from .isomorphic import assert_isomorphic

FOLDER = pathlib.Path(models.__file__).parent / "files"
PROGRAM, WITHOUT = FOLDER / "program.safetensors", FOLDER / "left_out.safetensors"
FILES = sorted(set(FOLDER.glob("*.safetensors")) - {PROGRAM, WITHOUT})
FAMILIES = {
    "atoms", "containers", "equinox_state", "functions", "jax_arrays", "keys", "mlp", "numpy_arrays", "optimizer_state",
    "tied_model",
}  # fmt: skip


def test_none_is_missing():
    assert {path.stem for path in FILES} == FAMILIES
    assert sum(path.stat().st_size for path in FILES) < 100_000


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_golden_files(path):
    expected = models.FAMILIES[path.stem]()
    for options in ({}, {"mmap": True}):
        assert_isomorphic(expected, st.load(path, trusted=models.__name__, **options))
    assert_isomorphic(expected, st.load(path, like=expected))
    assert st.verify(path).num_arrays == len(st.inspect(path).arrays)
    assert st.inspect(path).metadata == {"family": path.stem}
    assert all(request.found for request in st.audit(path, trusted=models.__name__).requests)
    with safetensors.safe_open(path, framework="numpy") as file:
        assert len(list(file.keys())) == st.verify(path).num_arrays


def test_the_file_of_a_program(monkeypatch):
    """It says which module was the running program."""
    for trusted in ([program.Net, program.double], ["program:Net", "program:double"], "program"):
        if type(trusted) is not list or type(trusted[0]) is str:  # by its own name, as a program beside it would
            monkeypatch.setitem(sys.modules, "program", program)
            monkeypatch.setattr(program, "__name__", "program")
            for each in (program.Net, program.double):
                monkeypatch.setattr(each, "__module__", "program")
        loaded = st.load(PROGRAM, trusted=trusted)
        assert_isomorphic(program.make(), loaded)
        assert loaded["net"].w is loaded["net"].tied
    assert st.audit(PROGRAM).allow_list == ("program:Net", "program:double")
    with pytest.raises(st.errors.UntrustedTypeError, match="program:Net"):
        st.load(PROGRAM)
    assert Draft(PROGRAM.read_bytes()).manifest["main"] == "program"


def test_the_file_without_what_was_left_out():
    """What it lacks, a template has."""
    expected = models.FAMILIES["tied_model"]()
    loaded = st.load(WITHOUT, like=expected)
    assert_isomorphic(expected, loaded)
    assert loaded["model"].blocks[1] is expected["model"].blocks[1]
    with pytest.raises(st.errors.StructureMismatchError, match="activation"):
        st.load(WITHOUT, trusted=models.__name__)
    assert "main" not in Draft(WITHOUT.read_bytes()).manifest


def test_none_is_trusted_by_itself():
    for name in ("containers", "functions", "tied_model"):
        with pytest.raises(st.errors.UntrustedTypeError, match=f"{models.__name__}:"):
            st.load(FOLDER / f"{name}.safetensors")


def test_what_is_written_today_is_the_same(tmp_path):
    """If this fails, `save` writes something else. If that is meant, `FORMAT` counts up and has files of its own."""
    make(tmp_path / "now")
    for name in ("atoms", "numpy_arrays", "jax_arrays", "tied_model", "keys", "left_out", "program"):
        then, now = (Draft((folder / f"{name}.safetensors").read_bytes()) for folder in (FOLDER, tmp_path / "now"))
        assert then.manifest["format"] == now.manifest["format"] == 1
        for draft in (then, now):
            del draft.header["__metadata__"], draft.manifest["library"]
        assert (now.header, now.manifest, now.data) == (then.header, then.manifest, then.data), name
