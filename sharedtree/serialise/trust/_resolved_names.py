"""Resolves all names of a file at once: to an object each, or to one error that lists every name at fault.

`audit` gets the same judgements as a list. Most of this file is the text of errors: what to import, what to trust, what
to rename, as calls that run. Nothing of the file is built meanwhile, and nothing is imported.
"""

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ...core._errors import StructureMismatchError, UntrustedTypeError
from ...core._printing import printable
from ._allow_list import CLASSES, FUNCTIONS, IF_TRUSTED, NAMES_ONLY, PACKAGES, ROW_OF
from ._public_names import CHILD, MAIN, find, home_of, library_of, module_to_import, namespace, root_of
from ._trusted_names import Trust, Use, Verdict

Name = tuple[Use, str]
"""What a file uses a name as, and the name. The name of a class comes before those of its methods."""

Paths = Mapping[Name, tuple[str, ...]]
"""Where in the tree each name is used: the first few paths."""


class Request(NamedTuple):
    """One name a file asks for.

    Attributes:
        name: `module:qualname`.
        kind: `"class"`, `"function"` or `"method"`.
        paths: the first few paths in the tree; in a shared part, through the part's first path.
        allowed: True if the allow-list has it.
        found: True if it leads to an object.
        why: the reason if it is not allowed or not found; otherwise empty.
        not_imported: the module that has to be imported before the file is loaded, for loading imports nothing; empty
            if none has to be.
    """

    name: str
    kind: Use
    paths: tuple[str, ...]
    allowed: bool
    found: bool
    why: str
    not_imported: str = ""


# ---- A name is checked against the allow-list first, then resolved ----


def judge_all(names: Iterable[Name], paths: Paths, trust: Trust, main: str | None = None) -> tuple[Request, ...]:
    """Returns the verdict on each name, in the order of the file, for `audit`.

    Args:
        names: the names in the file.
        paths: where each is used.
        trust: the allow-list.
        main: the writing program's module, as others import it.
    """
    requests: list[Request] = []
    for (kind, name), verdict in _verdicts({key: key[1] for key in names}, trust, main).items():
        first_paths = paths.get((kind, name), ())
        requests.append(
            Request(name, kind, first_paths, verdict.allowed, verdict.found, verdict.why, verdict.not_imported)
        )
    return tuple(requests)


def resolve_all(
    names: Iterable[Name],
    paths: Callable[[], Paths],
    trust: Trust,
    renames: Mapping[str, Any],
    main: str | None = None,
) -> dict[tuple[str, ...], Any]:
    """Returns the object of each class and function a file names.

    Args:
        names: the names in the file.
        paths: works out where each is used, for errors.
        trust: the allow-list.
        renames: old name → new name, class or function.
        main: the writing program's module, as others import it.

    Raises:
        UntrustedTypeError: if names are not allowed or not imported. All of them are listed.
        StructureMismatchError: if a name leads nowhere.
    """
    current_names: dict[Name, Any] = {(kind, name): _renamed(kind, name, renames) for kind, name in names}
    verdicts = _verdicts(current_names, trust, main)
    faults: dict[Name, Verdict] = {}
    for (kind, name), verdict in verdicts.items():
        # The fault of a class is not repeated for each of its methods.
        is_of_faulty_class = kind == "method" and not verdicts["class", name.rpartition(".")[0]].found
        if verdict.why and not is_of_faulty_class:
            faults[kind, name] = verdict
    refused = {key: verdict for key, verdict in faults.items() if verdict.not_imported or not verdict.allowed}
    if refused:
        raise _error_for_refused(refused, paths(), current_names, main, renames)
    if faults:
        raise _error_for_missing(faults, current_names, main, renames)
    return {key: verdict.obj for key, verdict in verdicts.items() if key[0] != "method"}


def _error_for_missing(
    faults: Mapping[Name, Verdict], current_names: Mapping[Name, Any], main: str | None, renames: Mapping[str, Any]
) -> StructureMismatchError:
    """Returns the error for names that lead nowhere.

    Its advice is the likeliest of three: a name in another program, another version of a library, a renamed class.
    """
    lines = ["The file names what is not there:"]
    lines += [f"    `{current_names[key]}`: {printable(verdict.why)}" for key, verdict in faults.items()]
    moved = _moved([current_names[key] for key in faults], main)
    libraries = [library_of(root_of(current_names[key])) for key in faults]
    if len(moved) == len(faults):
        lines += ["What programs define has other names for others. If these are meant, say so:"]
        lines += [_call([], {key[1]: moved[current_names[key]] for key in faults}, renames)]
    elif all(libraries):
        versions = dict.fromkeys([f"{library.name} {library.version}" for library in libraries if library])
        lines += [f"Another version wrote the file than is installed, {', '.join(versions)}. Update:"]
        lines += [updating(name) for name in dict.fromkeys([library.name for library in libraries if library])]
    else:
        first = next(key[1] for key, library in zip(faults, libraries, strict=True) if library is None)
        lines += ["Install what is missing. If something was renamed or moved, say how:"]
        lines += [f"    renames={{{renames_as_code(renames, {first: 'new_module:NewName'})}}}"]
    return StructureMismatchError("\n".join(lines))


def _verdicts(current_names: Mapping[Name, Any], trust: Trust, main: str | None) -> dict[Name, Verdict]:
    """Judges every name. A method is judged by the verdict on its class, which comes before it."""
    verdicts: dict[Name, Verdict] = {}
    for (kind, name), current_name in current_names.items():
        if kind == "method":
            verdict = trust.resolve_method(name, verdicts["class", name.rpartition(".")[0]])
        else:
            verdict = (
                trust.resolve(current_name, kind, main) if isinstance(current_name, str) else Verdict(current_name)
            )
        verdicts[kind, name] = verdict
    return verdicts


def _renamed(kind: Use, name: str, renames: Mapping[str, Any]) -> Any:
    """Returns the current name of a class or a function, or the object `renames` has for it."""
    current_name = renames.get(name, name) if kind != "method" else name
    if current_name is None:
        raise StructureMismatchError(f"`renames` drops `{name}`, but only fields can be dropped. Give its new name.")
    if kind == "class" and not isinstance(current_name, str | type):
        raise TypeError(f"`renames` gives the class `{name}` the new name {current_name!r}, which is no class.")
    return current_name


def _is_loaded(name: str) -> bool:
    """Returns True if a name leads to something in a loaded module."""
    with contextlib.suppress(LookupError):
        return find(name) is not None
    return False


# Each name may be looked up in each loaded module, and a file may have any number of names.
_MOST_MOVED = 1_000


def _moved(names: Iterable[str], main: str | None) -> dict[str, str]:
    """Finds the writing program's classes and functions in loaded modules: file's name → current name.

    A name is left out if several modules have it, or if the running program has it: then it is where the file says.
    """
    # The names that the program defined and that are not in the running one, by the first part of their qualnames.
    names_by_first_part: dict[str, list[tuple[str, str]]] = {}
    for name in itertools.islice(names, _MOST_MOVED):
        module, _, qualname = name.partition(":")
        if module in (MAIN, CHILD, main) and not _is_loaded(f"{MAIN}:{qualname}"):
            names_by_first_part.setdefault(qualname.partition(".")[0], []).append((qualname, name))
    # Where loaded modules outside the libraries define the same qualname.
    candidates: dict[str, list[str]] = {}
    for module, module_object in list(sys.modules.items()) if names_by_first_part else ():
        if root_of(module) not in PACKAGES | NAMES_ONLY | {MAIN, CHILD} | sys.stdlib_module_names:
            first_parts = namespace(module_object).keys() & names_by_first_part.keys()
            for qualname, name in [pair for first in first_parts for pair in names_by_first_part[first]]:
                candidate = f"{module}:{qualname}"
                if _is_loaded(candidate) and home_of(find(candidate)) == module and callable(find(candidate)):
                    candidates.setdefault(name, []).append(candidate)
    # Several candidates: that in a module called like the program is the likely one.
    stem = (main or "").rpartition(".")[2]
    moved: dict[str, str] = {}
    for name, candidates_of_name in candidates.items():
        in_module_of_that_name = [
            candidate for candidate in candidates_of_name if _last_part_of_module(candidate) == stem
        ]
        likely = in_module_of_that_name or candidates_of_name
        if len(likely) == 1:
            moved[name] = likely[0]
    return moved


def _last_part_of_module(name: str) -> str:
    return name.partition(":")[0].rpartition(".")[2]


def _error_for_refused(
    refused: Mapping[Name, Verdict],
    paths: Paths,
    current_names: Mapping[Name, Any],
    main: str | None,
    renames: Mapping[str, Any],
) -> UntrustedTypeError:
    """Returns the error for names that are refused or not imported.

    It lists each name with its first path, then says what to import, and the call that trusts the rest.
    """
    lines = ["The file names classes or functions that nobody allowed it to name, and nothing was loaded:"]
    if all(verdict.not_imported for verdict in refused.values()):
        lines = ["The file names classes or functions of modules that are not imported, and nothing was loaded:"]
    first_paths = [paths.get(key, ("",))[0] for key in refused]
    for ((kind, name), verdict), path in zip(refused.items(), first_paths, strict=True):
        place = f"`{printable(path)}`" if path else "the root"
        current_name = _current_name_of((kind, name), current_names)
        known_as = f" that is called `{current_name}` now" if current_name != name else ""
        lines += [f"    `{name}`, a {kind}{known_as}, at {place}: {printable(verdict.why)}"]
    names = [name for _, name in refused]
    standard = [name for name in names if root_of(name) in sys.stdlib_module_names]
    if standard:
        lines += ["No model needs names like these; do not load the file unless you wrote it: " + ", ".join(standard)]
    lines += imports([verdict.not_imported for verdict in refused.values()])
    # What the user can trust, with the name that the file has for it. The whole standard library cannot be trusted.
    file_names: dict[str, str] = {}
    for key, verdict in refused.items():
        if verdict.not_imported:
            continue
        current_name = _current_name_of(key, current_names)
        if root_of(current_name) not in sys.stdlib_module_names:
            file_names[current_name] = key[1]
    if file_names:
        # The printed call replaces the user's, so it must also trust what that one trusted. An object in `renames` is
        # trusted anyway.
        for key, current_name in current_names.items():
            is_trusted_name = key[0] != "method" and key not in refused and type(current_name) is str
            if is_trusted_name and not _is_listed(current_name):
                file_names[current_name] = key[1]
        lines += _how_to_trust(file_names, _moved(file_names, main), main, renames)
    return UntrustedTypeError("\n".join(lines), first_paths, names)


# ---- Loading imports nothing: the lines that say what to import ----


def imports(modules: Iterable[str]) -> list[str]:
    """Returns the lines of an error about missing imports. Empty texts are passed over."""
    lines = _import_lines(modules)
    return ["Loading imports nothing. Import this, then load again:", *lines] if lines else []


def _import_lines(modules: Iterable[str]) -> list[str]:
    """Returns an `import` statement for each module, sorted and indented."""
    lines: dict[str, None] = {}
    for module in sorted(filter(None, modules)):
        row = ROW_OF.get(root_of(module))
        home = row.imported_from if row is not None else ""
        # treex by itself fails on today's JAX, also where only a part of it is wanted.
        name = f"{home}.{root_of(module)}" if home else module
        lines[f"    import {name}"] = None
    return list(lines)


def _module_to_import(module: str) -> str:
    """Returns the module to import for names of a module; empty if that is done, or there is none."""
    try:
        return module_to_import(module) or ""
    except LookupError:
        return ""


# ---- The calls that errors print: `trusted=` and `renames=` ----


def _current_name_of(key: Name, current_names: Mapping[Name, Any]) -> str:
    """Returns the name that is looked up for a name of the file.

    It differs from the file's name if `renames` has a new one for it or, for a method, for its class.
    """
    kind, name = key
    if kind != "method":
        current = current_names[key]
        return current if isinstance(current, str) else _stated_name(current)
    owner, _, last = name.rpartition(".")
    current = current_names.get(("class", owner), owner)
    return f"{current if isinstance(current, str) else _stated_name(current)}.{last}"


def _stated_name(obj: Any) -> str:
    return f"{home_of(obj)}:{getattr(obj, '__qualname__', '?')}"


def _is_listed(name: str) -> bool:
    """Returns True if every file may name something of a name's package."""
    return root_of(name) in PACKAGES | NAMES_ONLY | sys.stdlib_module_names or name in CLASSES | FUNCTIONS


def call_without_template(names: Iterable[Name], main: str | None, renames: Mapping[str, Any]) -> str:
    """Returns the call that loads a file with these names without the template that trusted them."""
    return f"sharedtree.load(path{options_beside(names, main, renames, Trust())})"


def options_beside(names: Iterable[Name], main: str | None, renames: Mapping[str, Any], trust: Trust) -> str:
    """Returns the options a call needs beside the path to load a file with these names.

    Args:
        names: the names in the file.
        main: the writing program's module, as others import it.
        renames: the call's `renames`. They stay.
        trust: the call's allow-list.
    """
    # Name that must be trusted → name that the file has for it.
    file_names: dict[str, str] = {}
    for kind, name in names:
        current_name = renames.get(name, name)
        if kind != "method" and isinstance(current_name, str) and not trust.allows(current_name, kind, main):
            file_names[current_name] = name
    moved = _moved(file_names, main)
    texts = _as_code([current_name for current_name in file_names if current_name not in moved], main)
    return _options(
        texts, {file_names[current_name]: moved_name for current_name, moved_name in moved.items()}, renames
    )


def updating(library: str) -> str:
    """Returns the line of an error about updating a library."""
    oldest = OLDEST.get(library)
    requirement = library if oldest is None else f"'{library}>={oldest}'"
    return f"    pip install --upgrade {requirement}"


OLDEST = {"flax": "0.12.1"}
"""Library → its oldest version whose instances have the attributes that files have."""


def renames_as_code(renames: Mapping[str, Any], more: Mapping[str, str | None]) -> str:
    """Returns the inside of `renames={...}`: what the call had, which its replacement must not lose, and more.

    Args:
        renames: the call's `renames`.
        more: old name → new name, to be added.
    """
    pairs = {**renames, **more}
    # What the running program defines is in `renames` under two names, of which the user wrote one. Print it once.
    new_in_program = {qualname: new for module, _, qualname, new in _parts_of_renames(pairs) if module in (MAIN, CHILD)}
    texts: list[str] = []
    for module, _, qualname, new in _parts_of_renames(pairs):
        if module in (MAIN, CHILD) or qualname not in new_in_program or new_in_program[qualname] is not new:
            text = f'"{printable(new)}"' if isinstance(new, str) else "None" if new is None else _as_attribute(new)
            texts.append(f'"{module}:{printable(qualname)}": {text}')
    return ", ".join(texts)


def _parts_of_renames(renames: Mapping[str, Any]) -> list[tuple[str, str, str, Any]]:
    """Returns the entries of `renames` as (module, colon, qualname, new name)."""
    return [(*old.partition(":"), new) for old, new in renames.items()]


def _as_attribute(obj: Any) -> str:
    """Returns the expression by which a user's program refers to an object."""
    module, _, qualname = _stated_name(obj).partition(":")
    return qualname if module == MAIN else f"{module}.{qualname}"


def _as_code(names: Sequence[str], main: str | None) -> list[str]:
    """Returns the expression to write in `trusted=` for each name of a file.

    Args:
        names: the names.
        main: the writing program's module, as others import it.
    """
    texts: list[str] = []
    for name in names:
        module, _, qualname = name.partition(":")
        # What the writing program defined may not be importable here, and a text needs no import.
        text = f'"{name}"' if module == main else f"{module}.{qualname}"
        texts.append(f'"{root_of(name)}"' if name in IF_TRUSTED else qualname if _is_of_program(name, main) else text)
    return texts


def _is_of_program(name: str, main: str | None) -> bool:
    """Returns True if a name means something the running program defines."""
    module, _, qualname = name.partition(":")
    return module in (MAIN, CHILD) or (module == main and _is_loaded(f"{MAIN}:{qualname}"))


def _how_to_trust(
    file_names: Mapping[str, str], moved: Mapping[str, str], main: str | None, renames: Mapping[str, Any]
) -> Iterator[str]:
    """Returns the lines of an error about trusting names.

    Args:
        file_names: name → name in the file.
        moved: name → its current name, for names that moved.
        main: the writing program's module, as others import it.
        renames: the call's `renames`. They stay.
    """
    names = [name for name in file_names if name not in moved]
    texts = _as_code(names, main)
    qualnames_in_program = [name.partition(":")[2] for name in names if _is_of_program(name, main)]
    absent = [qualname for qualname in qualnames_in_program if not _is_loaded(f"{MAIN}:{qualname}")]
    if absent:
        listed = ", ".join([f"`{qualname}`" for qualname in dict.fromkeys(absent)])
        yield f"The program that wrote the file has what the one that runs now does not have: {listed}."
        yield "Import that from the file that defines it. If you trust it, say so:"
    else:
        yield "If you trust them, say so:"
    other_modules = [name.partition(":")[0] for name in names if not _is_of_program(name, main)]
    yield from _import_lines([_module_to_import(module) for module in other_modules])
    yield _call(texts, {file_names[name]: moved_name for name, moved_name in moved.items()}, renames)
    roots = dict.fromkeys(map(root_of, file_names))
    if not moved and not absent and (PACKAGES | NAMES_ONLY).isdisjoint(roots):
        yield _call([f'"{root}"' for root in roots], {}, renames)


def _call(trusted: Iterable[str], moved: Mapping[str, str], renames: Mapping[str, Any]) -> str:
    """Returns the call that loads a file, with what is trusted, and with renames for what moved."""
    return f"    sharedtree.load(path{_options(trusted, moved, renames)})"


def _options(trusted: Iterable[str], moved: Mapping[str, str], renames: Mapping[str, Any]) -> str:
    """Returns the options of that call as text, each after a comma; empty if there are none."""
    texts = [*dict.fromkeys(trusted), *(f'"{new}"' for new in moved.values())]
    more = {old: new for old, new in moved.items() if old != new}
    options = [f"trusted=[{', '.join(texts)}]"] * bool(texts)
    options += [f"renames={{{renames_as_code(renames, more)}}}"] * bool(renames or more)
    return "".join(f", {option}" for option in options)
