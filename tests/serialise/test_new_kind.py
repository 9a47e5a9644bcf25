"""A new kind of node is one row: the exercise of the documentation, done in a copy of the package."""

import json
import pathlib
import re
import shutil

import pytest

import sharedtree
from tests.processes import program, run

ROOT = pathlib.Path(sharedtree.__file__).parent
PAGE = ROOT.parent / "docs" / "developing" / "node_kind.md"

PROGRAM = program("fractions_in_files")


@pytest.fixture
def package(tmp_path):
    """A copy of the package, in which the row that the page shows is the last of its file."""
    (block,) = re.findall(r"```python\n(import fractions.*?)```", PAGE.read_text(), re.DOTALL)
    row = block.partition("row = ")[2].strip()
    copy = tmp_path / "sharedtree"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tests").symlink_to(ROOT.parent / "tests")
    file = copy / "serialise" / "values" / "_kinds_of_values.py"
    text = file.read_text().replace("import collections\n", "import collections\nimport fractions\n", 1)
    file.write_text(text.replace("\nROWS = (\n", f"\nROWS = (\n    {row},\n", 1))
    return tmp_path


@pytest.mark.slow
def test_a_new_kind_is_one_row(package):
    printed = run(PROGRAM, cwd=package, PYTHONPATH=str(package), JAX_PLATFORMS="cpu")
    loaded, inspected, audited, refused, operands = json.loads(printed)
    assert loaded == "{'rate': Fraction(1, 2), Fraction(1, 2): [Fraction(1, 2)]}"
    assert "['rate']  Fraction(1, 2)" in inspected
    assert "[Fraction(1, 2)]  list" in inspected
    assert audited == "The file refers to no classes and no functions."
    assert len(refused) == 5
    assert "ZeroDivisionError" in refused[0]
    assert operands == ["child", "child"]


def test_without_the_row_it_is_refused():
    from fractions import Fraction

    with pytest.raises(sharedtree.errors.UnserialisableError, match="Fraction"):
        sharedtree.to_bytes(Fraction(1, 2))
