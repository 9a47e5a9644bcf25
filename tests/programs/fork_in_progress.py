"""Forks in a `progress` function, whose child raises an error or goes on."""

import os
import pathlib
import signal
import sys
import warnings

import numpy as np

import sharedtree as st

warnings.simplefilter("ignore")  # JAX's, of forks
signal.alarm(3600)  # if it hangs
how, what = sys.argv[1:]
tree = [np.arange(3 * 2**20), np.ones(10)]
st.save("old", tree)
children = []


def progress(done, total):
    if children:
        return
    children.append(os.fork())
    if children[0]:
        os.waitpid(children[0], 0)
    elif how == "raises":
        raise SystemExit(3)


work = {
    "save": lambda: st.save("model", tree, progress=progress),
    "stream": lambda: st.save(open("model", "ab"), tree, progress=progress),  # noqa: SIM115
    "load": lambda: st.load("old", progress=progress),
    "verify": lambda: st.verify("old", progress=progress),
}
try:
    work[what]()
except BaseException as error:
    if children != [0]:
        raise
    with open("child", "w") as file:
        file.write(f"{type(error).__name__}: {error}")
    os._exit(0)
if children == [0]:
    pathlib.Path("went on").touch()
    os._exit(0)
# A thread that reads ends in the child with its error, and the child with it, for it has no other.
if what in ("save", "stream") or os.path.exists("child"):
    child = pathlib.Path("child").read_text()
    assert child.startswith("SystemExit: 3" if how == "raises" else "RuntimeError: `progress` forked"), child
if what in ("save", "stream"):
    assert (st.load("model")[0] == tree[0]).all()
assert set(os.listdir()) - {"child"} == {"old", *(["model"] if what in ("save", "stream") else [])}
print("well")
