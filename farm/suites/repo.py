"""Git repositories made in memory: files in, a work tree with a valid ``.git`` out, without running git.

One commit on ``main`` holds all files. Its objects lie in a single pack, which costs two files instead of one per
object, and the index carries no file times: git compares contents the first time it looks and then fills them in. The
same files give the same commit id on every machine.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Mapping
from functools import lru_cache

from farm.errors import FarmError
from farm.harbor.folder import unchanged
from farm.suites import sdist
from farm.types import FolderFiles, ImageFiles, InlineFiles, SdistFiles, Task

_COMMIT, _TREE, _BLOB = 1, 2, 3  # object types as packs number them
_NAMES = {_COMMIT: b"commit", _TREE: b"tree", _BLOB: b"blob"}
_WHO = b"Rollout Farm <farm@localhost> 1700000000 +0000"
_MESSAGE = b"base\n"
_FILE_MODE, _TREE_MODE = b"100644", b"40000"
_STATIC = {
    ".git/HEAD": b"ref: refs/heads/main\n",
    # File modes are not carried by ``Sandbox.write_files``, so git must not look at them.
    ".git/config": (
        b"[core]\n\trepositoryformatversion = 0\n\tfilemode = false\n\tbare = false\n\tlogallrefupdates = false\n"
        b"[gc]\n\tauto = 0\n[user]\n\tname = Agent\n\temail = agent@localhost\n"
    ),
    # What running the code leaves behind is not part of the agent's change.
    ".git/info/exclude": b"__pycache__/\n*.py[co]\n.pytest_cache/\n.hypothesis/\n*.egg-info/\n",
}


def make_repo(files: Mapping[str, str | bytes]) -> tuple[str, dict[str, bytes]]:
    """The commit's id (40 hex digits) and everything to write: relative path -> bytes, ``.git/*`` included.

    Paths are relative with ``/`` between parts; text is written as UTF-8. Raises ValueError on a path that git would
    refuse (absolute, empty or dotted parts, inside ``.git``, a file where a folder is).
    """
    contents = {path: text.encode() if isinstance(text, str) else text for path, text in files.items()}
    objects: dict[bytes, tuple[int, bytes]] = {}
    blobs = {path: _put(objects, _BLOB, data) for path, data in contents.items()}
    tree = _put_tree(objects, blobs)
    body = b"tree %b\nauthor %b\ncommitter %b\n\n%b" % (tree.hex().encode(), _WHO, _WHO, _MESSAGE)
    commit = _put(objects, _COMMIT, body).hex()
    pack, index = _pack(objects)
    pack_name = f".git/objects/pack/pack-{pack[-20:].hex()}"
    made = contents | _STATIC
    made[".git/refs/heads/main"] = f"{commit}\n".encode()
    made[".git/index"] = _stage(blobs, contents)
    made[f"{pack_name}.pack"] = pack
    made[f"{pack_name}.idx"] = index
    return commit, made


def workspace_files(task: Task) -> dict[str, bytes]:
    """The files to write into the sandbox before the agent starts: absolute path -> bytes; {} if the image has them.

    Raises FarmError (kind ``task``, not retryable) when the repository is not the one the task names, and UsageError
    when a source distribution has not been fetched.
    """
    match task.workspace:
        case ImageFiles():
            return {}
        case InlineFiles(files=files):
            commit, made = make_repo(files)
        case SdistFiles() as source:
            commit, made = _sdist_repo(source)
        case FolderFiles(repository=""):
            return {}
        case FolderFiles() as source:
            commit, made = _folder_repo(source)
    if commit != task.base_commit:
        raise FarmError(
            f"{task.instance_id}: the repository is {commit}, the task says {task.base_commit}",
            kind="task",
            retryable=False,
        )
    return {f"{task.workdir}/{path}": data for path, data in made.items()}


@lru_cache(maxsize=16)
def _sdist_repo(source: SdistFiles) -> tuple[str, dict[str, bytes]]:
    return make_repo(sdist.work_tree(source))


@lru_cache(maxsize=16)
def _folder_repo(source: FolderFiles) -> tuple[str, dict[str, bytes]]:
    return make_repo(unchanged(source.folder, source.digest).files(source.repository))


def _put(objects: dict[bytes, tuple[int, bytes]], kind: int, body: bytes) -> bytes:
    digest = hashlib.sha1(b"%b %d\0" % (_NAMES[kind], len(body)) + body, usedforsecurity=False).digest()
    objects[digest] = (kind, body)
    return digest


def _put_tree(objects: dict[bytes, tuple[int, bytes]], blobs: Mapping[str, bytes]) -> bytes:
    """The id of the tree of all ``blobs`` (path -> id), subtrees first."""
    entries: dict[str, bytes] = {}
    folders: dict[str, dict[str, bytes]] = {}
    for path, digest in blobs.items():
        head, slash, rest = path.partition("/")
        if head in ("", ".", "..") or head.lower() == ".git" or "\0" in head or (slash and not rest):
            raise ValueError(f"{path!r} is not a path inside a repository")
        if slash:
            folders.setdefault(head, {})[rest] = digest
        else:
            entries[head] = digest
    if clash := entries.keys() & folders.keys():
        raise ValueError(f"{min(clash)!r} is both a file and a folder")
    rows = [(name.encode(), _FILE_MODE, digest) for name, digest in entries.items()]
    rows += [(name.encode() + b"/", _TREE_MODE, _put_tree(objects, inner)) for name, inner in folders.items()]
    rows.sort()  # git sorts a folder as if its name ended in a slash
    return _put(
        objects, _TREE, b"".join(b"%b %b\0%b" % (mode, name.rstrip(b"/"), digest) for name, mode, digest in rows)
    )


def _pack(objects: Mapping[bytes, tuple[int, bytes]]) -> tuple[bytes, bytes]:
    """The pack file and its index, version 2 each."""
    parts = [struct.pack(">4sII", b"PACK", 2, len(objects))]
    place = 12
    rows = []
    for digest, (kind, body) in objects.items():
        entry = _size(kind, len(body)) + zlib.compress(body, 1)
        rows.append((digest, zlib.crc32(entry), place))
        parts.append(entry)
        place += len(entry)
    rows.sort()
    pack = _sealed(b"".join(parts))
    heads = [row[0][0] for row in rows]
    counts = [0] * 256
    for head in heads:
        counts[head] += 1
    total, fanout = 0, []
    for count in counts:
        total += count
        fanout.append(total)
    index = b"".join(
        (
            struct.pack(">4sI256I", b"\377tOc", 2, *fanout),
            *(row[0] for row in rows),
            struct.pack(f">{len(rows)}I", *(row[1] for row in rows)),
            struct.pack(f">{len(rows)}I", *(row[2] for row in rows)),
            pack[-20:],
        )
    )
    return pack, _sealed(index)


def _size(kind: int, size: int) -> bytes:
    """The head of an object in a pack: its type and the length of its body, seven bits a byte after the first four."""
    byte, size = kind << 4 | size & 15, size >> 4
    head = bytearray()
    while size:
        head.append(byte | 0x80)
        byte, size = size & 0x7F, size >> 7
    head.append(byte)
    return bytes(head)


def _stage(blobs: Mapping[str, bytes], contents: Mapping[str, bytes]) -> bytes:
    """The index (version 2). The size is true, so that a changed length is seen at once; the times are zero, so that
    everything else is compared by content."""
    parts = [struct.pack(">4sII", b"DIRC", 2, len(blobs))]
    for name, path in sorted((path.encode(), path) for path in blobs):
        fixed = struct.pack(
            ">6I4I20sH", 0, 0, 0, 0, 0, 0, 0o100644, 0, 0, len(contents[path]), blobs[path], min(len(name), 0xFFF)
        )
        parts.append(fixed + name + b"\0" * (8 - (len(fixed) + len(name)) % 8))
    return _sealed(b"".join(parts))


def _sealed(data: bytes) -> bytes:
    return data + hashlib.sha1(data, usedforsecurity=False).digest()
