"""What a piece of work depends on, as a digest: the source it can reach and the values it was made with.

Found by reading the source, so nobody has to keep a list of files beside an experiment:

* a function reaches the functions, methods and constants of its own module that it names, and theirs in turn;
* a name that comes from this project's packages reaches that whole module and all that the module imports, lazily or
  not, by name in a string (``"farm.sandbox.bubblewrap:BubblewrapProvider"``) or as a file beside it;
* the name of one of the project's commands in a string (``"farm"``) reaches the command's module;
* nothing is reached against the layers: that ``farm plan`` hands over to the twin makes no run depend on the twin.

Comments, docstrings and layout do not count. It errs on the side of doing work again: a name that only looks like a
reference counts as one.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass
from functools import lru_cache
from pathlib import Path
from types import FunctionType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("farm", "trainer", "harness")  # each may use those before it
COMMANDS = {"farm": "farm.cli", "trainer": "trainer.cli"}

_DOTTED = re.compile(rf"(?:{'|'.join(PACKAGES)})(?:\.\w+)+")
_FILE = re.compile(r"[\w-]+\.\w+")
_LEFT_BY_READERS = "derived"  # a folder that appears beside a log when it is read
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclass(slots=True)
class Reached:
    """What a function reaches. ``names``: every name, attribute and string in its code, for the caller to match."""

    code: list[str] = field(default_factory=list)
    modules: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    paths: dict[str, Path] = field(default_factory=dict)  # module constants that are paths

    @property
    def runs_a_command(self) -> bool:
        return not self.names.isdisjoint(COMMANDS)

    def digest(self) -> str:
        """Over the function's own code and every module it reaches."""
        modules = self.modules | {COMMANDS[name] for name in COMMANDS if name in self.names}
        return short_digest([sorted(self.code), closure_digest(frozenset(modules))])


def short_digest(value: Any) -> str:
    """The first 16 hex digits of the SHA-256 of ``value`` as canonical JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]


# ------------------------------------------------------------------------------------------ functions


def reached(function: Callable[..., Any]) -> Reached:
    """What ``function`` reaches from its own module. Raises TypeError for what has no source (a built-in)."""
    if not isinstance(function, FunctionType):
        raise TypeError(f"{function!r} is not a function with source")
    module = sys.modules[function.__module__]
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    defined, imported = _definitions(tree), dict(_imported(tree))
    line = function.__code__.co_firstlineno
    found = Reached()
    todo: list[ast.AST] = [n for n in ast.walk(tree) if isinstance(n, _FUNCTIONS) and _first_line(n) == line]
    seen: set[int] = set()
    while todo:
        node = todo.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        found.code.append(_dump(node))
        found.modules |= {name for name in _modules_of(node) if _source(name)}
        found.names |= {*_names(node), *_strings(node)}
        for name in _names(node):
            found.modules |= {m for m in imported.get(name, ()) if _source(m)}
            if name in defined:
                todo += defined[name]
                if isinstance(value := vars(module).get(name), Path):
                    found.paths[name] = value
    return found


def _first_line(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> int:
    decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
    return min([node.lineno, *(d.lineno for d in decorators)])


def _definitions(tree: ast.Module) -> dict[str, list[ast.AST]]:
    """Name -> the top-level definitions and the methods called so."""
    found: dict[str, list[ast.AST]] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            # The class itself counts with its fields; its methods only where they are named.
            members = [m for m in node.body if isinstance(m, ast.FunctionDef | ast.AsyncFunctionDef)]
            for member in members:
                found.setdefault(member.name, []).append(member)
            found.setdefault(node.name, []).extend(m for m in node.body if m not in members)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, []).append(node)
    return found


def _imported(tree: ast.Module) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Name in this module -> the modules it may come from."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (alias.asname or alias.name.partition(".")[0]), (alias.name,)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield alias.asname or alias.name, (f"{node.module}.{alias.name}", node.module)


def _names(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, ast.Attribute):
            yield part.attr


# -------------------------------------------------------------------------------------------- modules


def closure(names: Iterable[str]) -> set[Path]:
    """The source files (and the data files beside them that they name) of the modules and of all they import."""
    todo, files = list(names), set[Path]()
    while todo:
        name = todo.pop()
        source = _source(name)
        if source is None or source in files:
            continue
        files.add(source)
        modules, beside = _references(source)
        files |= beside
        parents = name.split(".")
        todo += [".".join(parents[:i]) for i in range(1, len(parents))]
        todo += modules
    return files


@lru_cache
def closure_digest(names: frozenset[str]) -> str:
    """Digest of :func:`closure`: the code without comments, docstrings and layout; other files by their bytes."""
    return short_digest(sorted((str(f.relative_to(ROOT)), _file_digest(f)) for f in closure(names)))


@lru_cache
def _references(source: Path) -> tuple[frozenset[str], frozenset[Path]]:
    if source.suffix != ".py":
        return frozenset(), frozenset()
    tree = ast.parse(source.read_text(encoding="utf-8"))
    layer = PACKAGES.index(source.relative_to(ROOT).parts[0])
    below = {name for name in _modules_of(tree) if name.partition(".")[0] in PACKAGES[: layer + 1]}
    beside = {source.parent / t for t in _strings(tree) if _FILE.fullmatch(t) and (source.parent / t).is_file()}
    # A script beside the module that is run rather than imported brings along what it imports.
    scripts = {".".join(f.relative_to(ROOT).with_suffix("").parts) for f in beside if f.suffix == ".py"}
    return frozenset(below) | scripts, frozenset(f for f in beside if f.suffix != ".py")


def _strings(tree: ast.AST) -> Iterator[str]:
    return (n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str))


def _modules_of(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
    for text in _strings(tree):
        if found := _DOTTED.match(text):
            yield found.group()


def _source(name: str) -> Path | None:
    """The file of one of the project's modules; None for any other name."""
    if name.partition(".")[0] not in PACKAGES:
        return None
    path = ROOT.joinpath(*name.split("."))
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)


@lru_cache
def _file_digest(path: Path) -> str:
    if path.suffix != ".py":
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return hashlib.sha256(_dump(ast.parse(path.read_text(encoding="utf-8"))).encode()).hexdigest()


def _dump(node: ast.AST) -> str:
    for part in ast.walk(node):
        if isinstance(part, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            part, clean=False
        ):
            part.body = part.body[1:]
    return ast.dump(node)


# --------------------------------------------------------------------------------------------- values


def captured(function: Callable[..., Any]) -> dict[str, Any]:
    """The variables that a nested function took with it from where it was made."""
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}


def plain(value: Any) -> Any:
    """``value`` as JSON, a path as the digest of what lies there. Raises TypeError for what can't be told apart."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return {"content": tree_digest(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = [plain(item) for item in value]
        return sorted(items, key=repr) if isinstance(value, set | frozenset) else items
    if isinstance(value, FunctionType):
        return {"code": reached(value).digest(), "with": plain(captured(value))}
    if is_dataclass(value) and not isinstance(value, type):
        return {name: plain(getattr(value, name)) for name in value.__dataclass_fields__}
    raise TypeError(f"a {type(value).__name__} ({value!r}) has no digest")


def tree_digest(path: Path) -> str | None:
    """Digest of a file, or of all files below a folder with their names; None when nothing is there. What reading a
    log leaves beside it does not count."""
    if path.is_file():
        return _bytes_digest(path)
    if not path.is_dir():
        return None
    found = (f for f in path.rglob("*") if f.is_file())
    files = sorted(f for f in found if _LEFT_BY_READERS not in f.relative_to(path).parts)
    return short_digest([[str(f.relative_to(path)), _bytes_digest(f)] for f in files])


def _bytes_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
