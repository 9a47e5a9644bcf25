"""What is released: one version everywhere, and what an index and an archive are told."""

import pathlib
import re
import tomllib

import sharedtree as st

ROOT = pathlib.Path(__file__).parents[1]


def test_one_version_and_one_day_everywhere():
    changes, citation = (ROOT / "CHANGELOG.md").read_text(), (ROOT / "CITATION.cff").read_text()
    released = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)$", changes, re.MULTILINE)
    assert released[0][0] == st.__version__
    assert re.findall(r'^(?:version|date-released): "(.*)"$', citation, re.MULTILINE) == [*released[0]]


def test_one_licence_and_one_description_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"license: {project['license']}\n" in citation
    assert f'abstract: "{project["description"]}."\n' in citation
    assert not [line for line in project["classifiers"] if line.startswith("License ::")]  # an index refuses both
