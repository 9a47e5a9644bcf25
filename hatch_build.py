"""Compiles the C files of `sharedtree/core/` with the platform's C compiler; without one, the wheel is pure Python.

A wheel is built without a change of the checkout, which may be read-only. It gets what was compiled, and in any case
`_native_source.py`, the digest of the C files that its other files belong to: a wheel has no C files, and a compiled
file that is left from another version is recognised by the digest that it contains.

An editable install, and a checkout in which this is run by hand, `python hatch_build.py`, get the compiled file beside
the source. It takes the place of the one before in one step, so that no process ever loads half of it, and only once it
is there: if nothing comes of it, what was compiled from this very source stays.

What is compiled uses the limited API, so one file serves Python 3.11 and all later ones. On macOS it is for one kind of
processor, also where Python itself is for two. On Windows nothing is compiled.
"""

import contextlib
import hashlib
import os
import pathlib
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand, where hatchling need not be installed
    BuildHookInterface = object

ROOT = pathlib.Path(__file__).parent
FOLDER = ROOT / "sharedtree" / "core"
TARGET = FOLDER / "_native.abi3.so"

# The same words as in `sharedtree/core/_native_or_python.py`, which is not imported without JAX.
OFF = ("0", "false", "no", "off")


class CompileHook(BuildHookInterface):
    """Adds the compiled walk to the wheel and names the wheel accordingly, or leaves both as they are."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it builds a wheel; `version` is "standard" or "editable"."""
        if version == "editable":
            is_native = compiled() or is_current(TARGET)
            build_data["artifacts"] += [TARGET.relative_to(ROOT).as_posix()] if is_native else []
        else:
            self._folder = pathlib.Path(tempfile.mkdtemp(prefix="sharedtree-"))
            described = self._folder / "_native_source.py"
            added = {described: "sharedtree/core/_native_source.py"}
            target = self._folder / TARGET.name
            reason = failure(target=target)
            is_native = reason == ""
            described.write_text(
                f'"""Written when the wheel was built."""\n\nDIGEST = "{digest()}"\nFAULT = {reason or ""!r}\n'
            )
            if is_native:
                added[target] = TARGET.relative_to(ROOT).as_posix()
            build_data["force_include"] |= {str(file): place for file, place in added.items()}
        if is_native:
            build_data["pure_python"] = False
            build_data["tag"] = f"cp311-abi3-{platform_tag()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called by hatchling after it has built a wheel."""
        if version != "editable":
            shutil.rmtree(self._folder, ignore_errors=True)


def digest() -> str:
    """SHA-256 of all C files, by name. `sharedtree/core/_native_or_python.py` computes the same."""
    total = hashlib.sha256()
    for file in sorted(FOLDER.glob("_native*.[ch]")):
        total.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return total.hexdigest()


def is_current(compiled_file: pathlib.Path) -> bool:
    """Whether a file was compiled from these C files."""
    try:
        return digest().encode() in compiled_file.read_bytes()
    except OSError:
        return False


def is_switched_off() -> bool:
    """Whether the environment asks for the walk in Python."""
    return os.environ.get("SHAREDTREE_NATIVE", "").strip().lower() in OFF


def platform_tag() -> str:
    """Where what is compiled runs, as the name of a wheel says it: `linux_x86_64`, `macosx_11_0_arm64`."""
    if sys.platform == "darwin":
        (major, minor), processor = _macos()
        return f"macosx_{major}_{minor}_{processor}"
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


def _macos() -> tuple[tuple[int, int], str]:
    """The oldest macOS that what is compiled runs on, as installers count them, and its kind of processor."""
    _, version, processor = sysconfig.get_platform().split("-")
    major, minor = (int(number) for number in [*version.split("."), "0"][:2])
    if processor not in ("arm64", "x86_64"):  # universal2
        processor = platform.machine()
    # Since 11 a version has one number; and with 11 began the other processors.
    oldest = (10, 0) if processor == "x86_64" else (11, 0)
    return max(oldest, (major, 0 if major >= 11 else minor)), processor


def compiled(flags: str = "-O3", target: pathlib.Path = TARGET) -> bool:
    """Compiles the walk, and returns whether that worked. Says why not on the standard error."""
    return failure(flags, target) == ""


def failure(flags: str = "-O3", target: pathlib.Path = TARGET) -> str | None:
    """Compiles the walk: why a compiler failed, "" if none did, None if there is none or nobody asked for it."""
    if is_switched_off() or sysconfig.get_config_var("Py_GIL_DISABLED") or os.name != "posix":
        return None
    reason = _failure(flags, target)
    if reason is None:
        return ""
    sys.stderr.write(f"The native walk was not compiled:\n{reason}\n")
    if target.exists() and is_current(target):
        sys.stderr.write(f"{target} was compiled from this source before, and stays.\n")
    else:
        sys.stderr.write("So the one in Python is used.\n")
        with contextlib.suppress(OSError):  # whoever imports the package is warned of it
            target.unlink()
    return reason if shutil.which(_compiler()[0]) else None


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")


def _failure(flags: str, target: pathlib.Path) -> str | None:
    """Compiles the walk into a file, all or nothing; why not, if not."""
    compiler = _compiler()
    linking = ["-shared"]
    if sys.platform == "darwin":
        (major, minor), processor = _macos()
        linking = ["-bundle", "-undefined", "dynamic_lookup", f"-mmacosx-version-min={major}.{minor}"]
        # An option of clang alone, and other compilers make what runs here.
        linking += ["-arch", processor] if processor != platform.machine() else []
    # In the same folder, where it can be renamed, and where a compiler that counts lines leaves its own files.
    draft = target.with_name(f"_native.{os.getpid()}.draft")
    command = [
        *compiler,
        *shlex.split(flags),
        "-std=c11",
        "-fPIC",
        "-fvisibility=hidden",
        *linking,
        f'-DSHAREDTREE_BUILT_FROM="{digest()}"',
        f"-I{sysconfig.get_path('include')}",
        *(str(file) for file in sorted(FOLDER.glob("_native*.c"))),
        "-o",
        str(draft),
    ]
    try:
        outcome = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if outcome.returncode != 0:
            return outcome.stderr or f"{shlex.join(compiler)} ended with {outcome.returncode}"
        if not is_current(draft):
            return f"{shlex.join(compiler)} wrote nothing that could be used"
        draft.replace(target)
    except OSError as error:
        return str(error)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()
    return None


if __name__ == "__main__":
    sys.exit(0 if compiled(*sys.argv[1:]) else 1)
