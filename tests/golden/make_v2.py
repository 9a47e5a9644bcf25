"""How the golden file of version 2 of the format was made. It is never made again: that is what it is for.

python -m tests.golden.make_v2 FOLDER
"""

import pathlib
import subprocess
import sys


def make(folder: pathlib.Path) -> None:
    """Runs the program, which saves what it defines. What is there already is left alone."""
    folder.mkdir(exist_ok=True)
    path, program = folder / "program.safetensors", pathlib.Path(__file__).parent / "program.py"
    if not path.exists():
        subprocess.run([sys.executable, program, path], check=True)


if __name__ == "__main__":
    make(pathlib.Path(sys.argv[1]))
