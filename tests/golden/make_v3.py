"""How the golden file of version 3 of the format was made. It is never made again: that is what it is for.

python -m tests.golden.make_v3 FOLDER
"""

import pathlib
import sys

import sharedtree as st

from .models import FAMILIES

LEFT_OUT = ("activation", "['method'].__self__.blocks[1]")


def make(folder: pathlib.Path) -> None:
    """Saves a model without its activation and one of its arrays. What is there already is left alone."""
    folder.mkdir(exist_ok=True)
    path = folder / "left_out.safetensors"
    if not path.exists():
        st.save(path, FAMILIES["tied_model"](), leave_out=LEFT_OUT)


if __name__ == "__main__":
    make(pathlib.Path(sys.argv[1]))
