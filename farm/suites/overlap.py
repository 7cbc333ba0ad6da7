"""Do training and benchmark tasks share repositories? Names are brought to one form, then names and contents compared.

Pure. Data sets spell the same repository as ``owner/repo``, a URL, a mirror (``swesmith/owner__repo.1a2b3c4d``), an
image, an instance id or a bare name, so comparing strings misses real overlaps. Other repositories of the same owner,
plug-ins and dependencies are not overlaps.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

# Earlier and alternative names of repositories, as far as known.
ALIASES = {
    "birkenfeld/sphinx": "sphinx-doc/sphinx",
    "hpk42/pytest": "pytest-dev/pytest",
    "kennethreitz/requests": "psf/requests",
    "mitsuhiko/flask": "pallets/flask",
    "pycqa/astroid": "pylint-dev/astroid",
    "pycqa/pylint": "pylint-dev/pylint",
    "pydata/xray": "pydata/xarray",
    "requests/requests": "psf/requests",
    "sklearn": "scikit-learn/scikit-learn",
    "spulec/moto": "getmoto/moto",
    "tiangolo/fastapi": "fastapi/fastapi",
    "xray/xray": "pydata/xarray",
}
# Names and folders that many unrelated projects have: alone they are no evidence.
_COMMON = frozenset(
    {
        "api",
        "app",
        "backend",
        "cli",
        "client",
        "common",
        "core",
        "demo",
        "docs",
        "examples",
        "framework",
        "lib",
        "models",
        "packages",
        "plugins",
        "project",
        "python",
        "scripts",
        "sdk",
        "server",
        "site",
        "src",
        "test",
        "testing",
        "tests",
        "tools",
        "utils",
        "website",
    }
)
_SOURCE_FOLDERS = ("src", "lib", "python")
_VENDOR_FOLDERS = ("_vendor", "vendor", "vendored", "third_party", "extern", "_external")
_SHORTEST_COMMIT = 12  # hex digits that two commits must share to count as equal

_IMAGE = re.compile(r"(?:sweb\.eval|swesmith)\.[a-z0-9_]+\.(.+)$")
_COMMIT = re.compile(r"\.[0-9a-f]{7,40}(?:\..*)?$")
_NUMBER = re.compile(r"-(?:\d+|[0-9a-f]{40}(?:-v.*)?)$")
_COPY = re.compile(r"[-_.](?:fork|mirror|clone|copy)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class RepoRef:
    """One task's repository. ``name`` in any spelling; ``base_commit`` and ``paths`` (of the gold patch) if known."""

    name: str
    base_commit: str = ""
    paths: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """``train`` is the benchmark repository ``bench`` (or a copy). ``reason``: same, alias, bare name, fork, commit,
    paths, vendored; ``detail`` is for people."""

    train: RepoRef
    bench: str
    reason: str
    detail: str


def canonical(name: str) -> str:
    """``owner/repo`` in lower case, or ``repo`` where the spelling has no owner. Aliases are not resolved."""
    text = name.strip().lower().rstrip("/")
    text = re.sub(
        r"^(?:[a-z+]+://)?(?:[^/@]+@)?[a-z0-9-]+(?:\.[a-z0-9-]+)*\.[a-z]{2,}(?::\d+)?[/:](?=[^/]+/)", "", text
    )
    text = re.sub(r"[?#].*$", "", text).removesuffix(".git")
    image = _IMAGE.search(text)
    if image:
        return _joined(image[1].partition(":")[0].replace("_1776_", "__", 1).replace("_s_", "__", 1))
    parts = text.partition(":")[0].split("/")
    if "__" in parts[-1]:
        return _joined(parts[-1].removeprefix("instance_"))
    if parts[-1].endswith("_final"):
        return parts[-1].removesuffix("_final")
    return "/".join(parts[:2])


def _joined(text: str) -> str:
    """``owner__repo`` with a commit, an issue number or a bug's name behind it."""
    owner, _, repo = text.partition("__")
    return f"{owner}/{_NUMBER.sub('', _COMMIT.sub('', repo))}"


def overlap(train: Iterable[RepoRef], bench: Iterable[RepoRef]) -> list[Overlap]:
    """All training refs that share a repository with the benchmark, each with the strongest reason, in order."""
    known = _Bench(bench)
    return [found for ref in train for found in known.matches(ref)]


class _Bench:
    """The benchmark's repositories, by everything they can be known by."""

    def __init__(self, refs: Iterable[RepoRef]) -> None:
        paths: dict[str, list[str]] = defaultdict(list)
        self.commits: dict[str, str] = {}
        for ref in refs:
            repo = ALIASES.get(canonical(ref.name), canonical(ref.name))
            paths[repo] += ref.paths
            if len(ref.base_commit) >= _SHORTEST_COMMIT:
                self.commits[ref.base_commit[:_SHORTEST_COMMIT].lower()] = repo
        self.repos = list(paths)
        self.roots = {repo: root for repo, files in paths.items() if (root := _main_root(files))}

    def matches(self, ref: RepoRef) -> list[Overlap]:
        found = {}
        for repo, reason, detail in (*self._by_content(ref), *self._by_name(ref.name)):  # later ones are stronger
            found[repo] = Overlap(train=ref, bench=repo, reason=reason, detail=detail)
        return list(found.values())

    def _by_name(self, name: str) -> Iterable[tuple[str, str, str]]:
        given = canonical(name)
        meant = ALIASES.get(given, given)
        if meant in self.repos:
            reason = "same" if meant == given else "alias"
            yield meant, reason, f"{name} is {meant}"
            return
        bare = _COPY.sub("", meant.rpartition("/")[2])
        for repo in self.repos:
            if bare == repo.rpartition("/")[2] and bare not in _COMMON:
                reason = "fork" if "/" in meant else "bare name"
                yield repo, reason, f"{name} has the name of {repo}"

    def _by_content(self, ref: RepoRef) -> Iterable[tuple[str, str, str]]:
        for repo, root in self.roots.items():
            inside = [path for path in ref.paths if _root(path) == root]
            vendored = [path for path in ref.paths if any(f"/{v}/{root}/" in f"/{path}" for v in _VENDOR_FOLDERS)]
            if 2 * len(inside) >= len(ref.paths) > 0:
                yield repo, "paths", f"{inside[0]} lies in {root}/ like the files of {repo}"
            elif vendored:
                yield repo, "vendored", f"{vendored[0]} is a copy of {repo}"
        commit = ref.base_commit[:_SHORTEST_COMMIT].lower()
        if len(commit) == _SHORTEST_COMMIT and commit in self.commits:
            yield self.commits[commit], "commit", f"base commit {commit} is one of {self.commits[commit]}"


def _root(path: str) -> str:
    """The package a file belongs to: its first folder that isn't just a place for sources; "" if there is none."""
    folders = path.split("/")[:-1]
    while folders and folders[0] in _SOURCE_FOLDERS:
        folders = folders[1:]
    return folders[0] if folders and folders[0] not in _COMMON else ""


def _main_root(paths: list[str]) -> str:
    """The package that more than half of ``paths`` belong to, or ""."""
    roots = Counter(_root(path) for path in paths)
    root, count = roots.most_common(1)[0] if roots else ("", 0)
    return root if 2 * count > len(paths) else ""
