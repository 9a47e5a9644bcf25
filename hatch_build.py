"""Compiles `sharedtree/_native.c` with the platform's C compiler if there is one; without, the wheel is pure Python.

The compiled file is put beside the source, which serves editable installs too, under another name first, so that no
process ever loads half of it. It uses the limited API, so one file serves Python 3.11 and all later ones.

By hand, in a checkout: `python hatch_build.py`.
"""

import hashlib
import os
import pathlib
import shlex
import subprocess
import sys
import sysconfig
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand, where hatchling need not be installed
    BuildHookInterface = object

ROOT = pathlib.Path(__file__).parent
SOURCE = ROOT / "sharedtree" / "_native.c"
TARGET = ROOT / "sharedtree" / "_native.abi3.so"


class CompileHook(BuildHookInterface):
    """Adds the compiled walk to the wheel and names the wheel accordingly, or leaves both as they are."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it builds a wheel; `version` is "standard" or "editable"."""
        if compiled():
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"cp311-abi3-{platform}"
            build_data["artifacts"].append(TARGET.relative_to(ROOT).as_posix())


def compiled(flags: str = "-O2") -> bool:
    """Compiles the walk, and returns whether that worked. Says why not on the standard error."""
    TARGET.unlink(missing_ok=True)
    if os.environ.get("SHAREDTREE_NATIVE") == "0" or sysconfig.get_config_var("Py_GIL_DISABLED") or os.name != "posix":
        return False
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    linking = ["-bundle", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared"]
    draft = TARGET.with_name(f"_native.{os.getpid()}.draft")
    command = [
        *compiler,
        *shlex.split(flags),
        "-std=c11",
        "-fPIC",
        "-fvisibility=hidden",
        *linking,
        f'-DSHAREDTREE_BUILT_FROM="{digest}"',
        f"-I{sysconfig.get_path('include')}",
        str(SOURCE),
        "-o",
        str(draft),
    ]
    try:
        outcome = subprocess.run(command, capture_output=True, text=True, check=False)
        if outcome.returncode == 0:
            draft.replace(TARGET)
            return True
        reason = outcome.stderr
    except OSError as error:
        reason = str(error)
    finally:
        draft.unlink(missing_ok=True)
    sys.stderr.write(f"The native walk was not compiled, so the one in Python is used:\n{reason}\n")
    return False


if __name__ == "__main__":
    sys.exit(0 if compiled(*sys.argv[1:]) else 1)
