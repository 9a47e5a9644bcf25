"""Where the tests of this folder save to."""

import pytest


@pytest.fixture
def path(tmp_path):
    """The path of a file that does not exist yet, in a folder with nothing else in it."""
    return tmp_path / "model.safetensors"
