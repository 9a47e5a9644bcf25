"""How the golden files of version 1 of the format were made. They are never made again: that is what they are for.

python -m tests.golden.make_v1 FOLDER
"""

import pathlib
import sys

import sharedtree as st

from .models import FAMILIES


def make(folder: pathlib.Path) -> None:
    """Saves each family to a file. What is there already is left alone."""
    folder.mkdir(exist_ok=True)
    for name, family in FAMILIES.items():
        path = folder / f"{name}.safetensors"
        if not path.exists():
            st.save(path, family(), metadata={"family": name})


if __name__ == "__main__":
    make(pathlib.Path(sys.argv[1]))
