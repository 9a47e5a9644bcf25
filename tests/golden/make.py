"""How the golden files of version 1 of the format were made. They are never made again: that is what they are for.

python -m tests.golden.make FOLDER
"""

import pathlib
import subprocess
import sys

import sharedtree as st

from .models import FAMILIES

LEFT_OUT = ("activation", "['method'].__self__.blocks[1]")


def make(folder: pathlib.Path) -> None:
    """Saves each family to a file; a model without two of its values; and what a program defines that saves it itself.

    What is there already is left alone.
    """
    folder.mkdir(exist_ok=True)
    for name, family in FAMILIES.items():
        path = folder / f"{name}.safetensors"
        if not path.exists():
            st.save(path, family(), metadata={"family": name})
    without, by_program = folder / "left_out.safetensors", folder / "program.safetensors"
    if not without.exists():
        st.save(without, FAMILIES["tied_model"](), leave_out=LEFT_OUT)
    if not by_program.exists():
        subprocess.run([sys.executable, pathlib.Path(__file__).parent / "program.py", by_program], check=True)


if __name__ == "__main__":
    make(pathlib.Path(sys.argv[1]))
