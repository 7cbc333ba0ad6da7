"""Files from the person's own package index, without running anything that is in them.

pip asks a source distribution's build back end for its metadata as soon as it has downloaded it, and so runs code of
the package on this machine. Here pip is only asked for its configuration. The pages are read by the simple repository
API (PEP 503, HTML), and a file counts only when it has the pinned digest, wherever it came from.

Honoured: ``index-url``, ``extra-index-url``, ``find-links``, ``no-index``, ``cert``, ``proxy``, ``timeout``, from pip's
files and environment, and names and passwords in URLs. Not: keyrings, client certificates.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import re
import ssl
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

from farm.errors import FarmError

DEFAULT_INDEX = "https://pypi.org/simple"

_PIP_S = 60.0
_PAGE_BYTES = 32 << 20
_FILE_BYTES = 256 << 20
_SETTING = re.compile(r"(?P<section>[\w:.-]+)\.(?P<key>[\w-]+)=(?P<value>'.*'|\".*\")")
_SECTIONS = ("global", "download", ":env:")  # the later one wins


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageIndexes:
    """Where to look: ``indexes`` have a page per project, ``places`` are pages or folders with files of any project."""

    indexes: tuple[str, ...] = (DEFAULT_INDEX,)
    places: tuple[str, ...] = ()
    cert: str | None = None
    proxy: str | None = None
    timeout_s: float = 15.0

    @classmethod
    def from_pip(cls) -> PackageIndexes:
        """As pip is configured here. Raises ``FarmError`` when pip can't be asked."""
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_S, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            raise FarmError(f"pip does not tell its configuration: {error}", kind="pip") from error
        return cls.parse(done.stdout)

    @classmethod
    def parse(cls, listing: str) -> PackageIndexes:
        """From what ``pip config list`` prints."""
        found: dict[str, dict[str, str]] = {section: {} for section in _SECTIONS}
        for line in listing.splitlines():
            match = _SETTING.fullmatch(line.strip())
            if match and match["section"] in found:
                found[match["section"]][match["key"]] = str(ast.literal_eval(match["value"]))
        given = {key: value for section in _SECTIONS for key, value in found[section].items()}
        indexes = (given.get("index-url", DEFAULT_INDEX), *given.get("extra-index-url", "").split())
        no_index = given.get("no-index", "").lower() in {"1", "true", "yes", "on"}
        return cls(
            indexes=() if no_index else indexes,
            places=tuple(given.get("find-links", "").split()),
            cert=given.get("cert"),
            proxy=given.get("proxy"),
            timeout_s=float(given.get("timeout") or given.get("default-timeout") or 15.0),
        )

    def fetch(self, name: str, version: str, sha256: str) -> bytes:
        """The source distribution with this digest. Raises ``FarmError`` when no index has it."""
        tried: list[str] = []
        for page in self._pages(name):
            try:
                for url in self._links(page):
                    if _is_sdist(url, name, version):
                        data = self._read(url, _FILE_BYTES)
                        if hashlib.sha256(data).hexdigest() == sha256:
                            return data
                        tried.append(f"{_bare(url)} has another digest")
            except (OSError, ValueError) as error:  # this one is down or has no such project: another may have it
                tried.append(f"{_bare(page)}: {error}")
        raise FarmError(
            f"no package index has the source distribution {name}=={version} with SHA-256 {sha256}; "
            f"tried: {'; '.join(tried)[:500] or 'none is configured'}; check pip's configuration (`pip config list`)",
            kind="no_sdist",
        )

    def _pages(self, name: str) -> list[str]:
        project = re.sub(r"[-_.]+", "-", name).lower()
        return [*(f"{index.rstrip('/')}/{project}/" for index in self.indexes), *self.places]

    def _links(self, page: str) -> Iterator[str]:
        folder = _local(page)
        if folder is not None and folder.is_dir() and not (folder / "index.html").exists():
            yield from (path.absolute().as_uri() for path in sorted(folder.iterdir()))
            return
        if folder is not None:
            page = (folder / "index.html" if folder.is_dir() else folder).absolute().as_uri()
        parser = _Links()
        parser.feed(self._read(page, _PAGE_BYTES).decode("utf-8", "replace"))
        for link in parser.found:
            yield urllib.parse.urldefrag(urllib.parse.urljoin(parser.base or page, link)).url

    def _read(self, url: str, limit: int) -> bytes:
        """Raises ``OSError`` for what can't be read, ``ValueError`` for what is too long or no URL."""
        request = urllib.request.Request(_bare(url), headers={"Accept": "text/html, */*;q=0.1"})
        parts = urllib.parse.urlsplit(url)
        if parts.username is not None:
            login = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
            request.add_unredirected_header("Authorization", f"Basic {base64.b64encode(login.encode()).decode()}")
        with self._opener().open(request, timeout=self.timeout_s) as answer:
            data: bytes = answer.read(limit + 1)
        if len(data) > limit:
            raise ValueError(f"is longer than {limit} bytes")
        return data

    def _opener(self) -> urllib.request.OpenerDirector:
        handlers: list[urllib.request.BaseHandler] = [
            urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=self.cert))
        ]
        if self.proxy:
            handlers.append(urllib.request.ProxyHandler({"http": self.proxy, "https": self.proxy}))
        return urllib.request.build_opener(*handlers)


class _Links(HTMLParser):
    """The links of a page, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.base: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        target = dict(attrs).get("href")
        if target and tag == "a":
            self.found.append(target)
        elif target and tag == "base" and self.base is None:
            self.base = target


def _is_sdist(url: str, name: str, version: str) -> bool:
    """Old releases spell the name of the project in their file names in any way."""
    file = urllib.parse.unquote(urllib.parse.urlsplit(url).path.rpartition("/")[2])
    stem, dash, rest = file.removesuffix(".tar.gz").rpartition("-")
    same = re.sub(r"[-_.]+", "-", stem).lower() == re.sub(r"[-_.]+", "-", name).lower()
    return file.endswith(".tar.gz") and bool(dash) and rest == version and same


def _local(page: str) -> Path | None:
    """The path of a ``file:`` URL or of a bare path; None for what is elsewhere."""
    parts = urllib.parse.urlsplit(page)
    if parts.scheme == "file":
        return Path(urllib.request.url2pathname(parts.path))
    return Path(page).expanduser() if not parts.scheme else None


def _bare(url: str) -> str:
    """Without name and password: for the request line, and for messages."""
    parts = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
