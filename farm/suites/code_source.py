"""Code to make tasks from: a pinned source distribution or a commit of a git folder, as files and a layout.

Either becomes an archive that the cache knows by its digest, and is from then on the same thing. Nothing of it is run
here, and git only reads objects: no checkout, no hooks, no filters.
"""

from __future__ import annotations

import ast
import hashlib
import io
import re
import subprocess
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from farm.errors import UsageError
from farm.suites import sdist
from farm.suites.overlap import canonical
from farm.suites.package_index import PackageIndexes
from farm.suites.pypi import WORKDIR, Source

_PINNED = re.compile(r"(?P<name>[\w.-]+)==(?P<version>[\w.!+-]+)#sha256=(?P<sha256>[0-9a-f]{64})")
_TEST_FILE = re.compile(r"(?:test_.*|.*_test)\.py")
_TEST_FOLDERS = frozenset({"test", "tests"})
_NOT_CODE = frozenset(
    {"benchmark", "benchmarks", "doc", "docs", "example", "examples", "scripts", "setup.py", "tasks.py"}
)
_REPOSITORY = re.compile(r"https?://(?:www\.)?(?:github|gitlab)\.com/([\w.-]+/[\w.-]+?)(?:\.git)?(?:[/#?\s].*)?$")
_GIT_S = 120.0
_MOST_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """``source`` names the archive in the cache and says what is hidden from the agent; ``origin`` is how a person
    spelled it, so that it can be had again. ``modules`` and ``tests`` are paths of Python files."""

    source: Source
    origin: str
    files: Mapping[str, bytes]
    modules: tuple[str, ...]
    tests: tuple[str, ...]


def open_source(spec: str, indexes: PackageIndexes | None = None) -> Code:
    """The code that ``spec`` names: ``NAME==VERSION#sha256=HEX`` or ``PATH[@COMMIT]``. Raises UsageError when it can't
    be had or holds no tests, FarmError when no index has the distribution."""
    pinned = _PINNED.fullmatch(spec)
    if pinned:
        name, version, sha256 = pinned["name"], pinned["version"], pinned["sha256"]
        if not sdist.is_cached(sha256):
            sdist.store(sha256, (indexes or PackageIndexes.from_pip()).fetch(name, version, sha256))
        files = sdist.files(sha256)
        repo = _repository(files.get("PKG-INFO", b"").decode(errors="replace")) or name.lower()
        return _code(spec, name, version, sha256, repo, files)
    if re.fullmatch(r"[\w.-]+==.*", spec):
        raise UsageError(f"{spec}: a source distribution must be pinned by its hash: NAME==VERSION#sha256=HEX")
    folder, _, commit = spec.partition("@")
    path = Path(folder)
    if not path.is_dir():
        raise UsageError(f"{spec}: no such folder; give a git folder, PATH[@COMMIT], or NAME==VERSION#sha256=HEX")
    named = f"{commit or 'HEAD'}^{{commit}}"
    commit = _git(path, "rev-parse", "--verify", "--end-of-options", named, spec=spec).decode().strip()
    name = path.resolve().name
    data = _archive(path, commit, name, spec)
    sha256 = hashlib.sha256(data).hexdigest()
    if not sdist.is_cached(sha256):
        sdist.store(sha256, data)
    return _code(f"{path.resolve()}@{commit}", name, commit[:12], sha256, _origin(path) or name, sdist.files(sha256))


def _code(origin: str, name: str, version: str, sha256: str, repo: str, files: Mapping[str, bytes]) -> Code:
    tests = tuple(sorted(path for path in files if _is_test(path) and _readable(files[path])))
    if not tests:
        raise UsageError(f"{origin}: holds no test files (test_*.py or *_test.py), so nothing can grade a task")
    hidden = tuple(sorted({_hidden(path) for path in tests}))
    modules = tuple(
        sorted(
            path
            for path, data in files.items()
            if path.endswith(".py") and not path.startswith(hidden) and not _is_aside(path) and _readable(data)
        )
    )
    in_src = any(path.startswith("src/") for path in modules)
    source = Source(
        package=name,
        version=version,
        sha256=sha256,
        repo=repo,
        remove=hidden,
        python_path=f"{WORKDIR} {WORKDIR}/src" if in_src else WORKDIR,
    )
    return Code(source=source, origin=origin, files=files, modules=modules, tests=tests)


def _is_test(path: str) -> bool:
    return bool(_TEST_FILE.fullmatch(PurePosixPath(path).name)) and not _is_aside(path)


def _is_aside(path: str) -> bool:
    return PurePosixPath(path).parts[0].lower() in _NOT_CODE or PurePosixPath(path).name in ("setup.py", "conftest.py")


def _hidden(path: str) -> str:
    """What hides a test file: the outermost folder of tests that it is in, or itself."""
    parts = PurePosixPath(path).parts
    for depth, part in enumerate(parts[:-1], 1):
        if part.lower() in _TEST_FOLDERS:
            return "/".join(parts[:depth]) + "/"
    return path


def _readable(data: bytes) -> bool:
    try:
        ast.parse(data.decode())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _repository(metadata: str) -> str:
    """``owner/repo`` by the links of a distribution's metadata, or ""."""
    head = metadata.partition("\n\n")[0]
    links = [line for line in head.splitlines() if line.startswith(("Home-page:", "Project-URL:", "Download-URL:"))]
    names = [canonical(match[1]) for line in links if (match := _REPOSITORY.search(line))]
    return max(names, key=names.count) if names else ""


def _origin(path: Path) -> str:
    try:
        url = _git(path, "remote", "get-url", "origin", spec=str(path)).decode().strip()
    except UsageError:
        return ""
    return canonical(url) if re.match(r"(?:https?|ssh|git)://|git@", url) else ""


def _archive(path: Path, commit: str, name: str, spec: str) -> bytes:
    """All regular files of a commit as an uncompressed tar that depends on nothing but their names and contents."""
    listing = _git(path, "ls-tree", "-r", "-z", "--full-tree", commit, spec=spec).split(b"\0")
    entries = [(*head.split(), name_) for head, _, name_ in (line.partition(b"\t") for line in listing if line)]
    blobs = [(digest, file) for mode, _, digest, file in entries if mode in (b"100644", b"100755")]
    asked = b"".join(digest + b"\n" for digest, _ in blobs)
    answer = io.BytesIO(_git(path, "cat-file", "--batch", spec=spec, given=asked))
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for _, file in blobs:
            size = int(answer.readline().split()[-1])
            member = tarfile.TarInfo(f"{name}/{file.decode(errors='surrogateescape')}")
            member.size = size
            archive.addfile(member, io.BytesIO(answer.read(size)))
            answer.read(1)
    if buffer.tell() > _MOST_BYTES:
        raise UsageError(f"{spec}: {buffer.tell()} bytes are too much to make tasks from (at most {_MOST_BYTES})")
    return buffer.getvalue()


def _git(path: Path, *arguments: str, spec: str, given: bytes = b"") -> bytes:
    command = ["git", "-C", str(path), "-c", "safe.directory=*", "-c", "core.fsmonitor=false", *arguments]
    try:
        done = subprocess.run(command, input=given, capture_output=True, timeout=_GIT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", b"") or b""
        reason = said.decode(errors="replace").strip().splitlines()[-1:] or [str(error)]
        raise UsageError(f"{spec}: git can't read it ({reason[0][:200]}); give a git folder or PATH@COMMIT") from error
    return done.stdout
