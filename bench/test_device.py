"""The measurements on a device run, here with small sizes on whatever device there is."""

import json
import pathlib
import subprocess
import sys


def test_all_parts_run(tmp_path):
    results = tmp_path / "results.json"
    command = [sys.executable, "-m", "bench.device", "--quick", "--out", str(results)]
    subprocess.run(command, cwd=pathlib.Path(__file__).parent.parent, check=True)
    parts = json.loads(results.read_text())
    assert {name.partition(",")[0] for name in parts} == {"device", "dispatch", "donation", "pass-through", "files"}
    (tied,) = parts["donation, sharedtree.jit"].values()
    (untied,) = parts["donation, equinox.filter_jit, untied twin"].values()
    assert tied["parameters"] < untied["parameters"]
