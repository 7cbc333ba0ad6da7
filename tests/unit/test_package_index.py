"""farm/suites/package_index.py against an index that is served, or lies, here."""

from __future__ import annotations

import base64
import hashlib
import io
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from farm.errors import FarmError
from farm.suites import pypi, sdist
from farm.suites.package_index import DEFAULT_INDEX, PackageIndexes

SDIST = b"a source distribution"
DIGEST = hashlib.sha256(SDIST).hexdigest()


def make_index(folder: Path, data: bytes = SDIST) -> Path:
    """A simple repository with one project, whose files are elsewhere in it."""
    (folder / "simple" / "some-project").mkdir(parents=True)
    (folder / "files").mkdir()
    (folder / "files" / "some_project-1.0.tar.gz").write_bytes(data)
    (folder / "simple" / "some-project" / "index.html").write_text(
        "<!DOCTYPE html><a href='../../files/some_project-1.0-py3-none-any.whl'>wheel</a>"
        "<a href='../../files/some_project-1.0.post1.tar.gz'>later</a>"
        f"<a href='../../files/some_project-1.0.tar.gz#sha256={DIGEST}'>sdist</a>"
    )
    return folder / "simple"


@contextmanager
def served(folder: Path, login: str | None = None) -> Iterator[str]:
    class Handler(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = login and f"Basic {base64.b64encode(login.encode()).decode()}"
            if wanted and self.headers["Authorization"] != wanted:
                self.send_error(401)
            else:
                super().do_GET()

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_a_served_index_also_one_with_a_password(tmp_path: Path) -> None:
    make_index(tmp_path)
    with served(tmp_path, "someone:p@ss") as host:
        found = PackageIndexes(indexes=(f"http://someone:p%40ss@{host}/simple/",)).fetch("Some.Project", "1.0", DIGEST)
        assert found == SDIST
        with pytest.raises(FarmError, match="401") as caught:
            PackageIndexes(indexes=(f"http://someone:other@{host}/simple",)).fetch("some-project", "1.0", DIGEST)
    assert "someone" not in str(caught.value), "no password in a message"


def test_an_index_and_a_folder_of_files_on_disk(tmp_path: Path) -> None:
    index = make_index(tmp_path)
    assert PackageIndexes(indexes=(index.as_uri(),)).fetch("some_project", "1.0", DIGEST) == SDIST
    assert PackageIndexes(indexes=(), places=(str(tmp_path / "files"),)).fetch("some-project", "1.0", DIGEST) == SDIST


def test_only_the_digest_decides_whichever_index_it_is(tmp_path: Path) -> None:
    other, right = make_index(tmp_path / "a", b"altered"), make_index(tmp_path / "b")
    missing = (tmp_path / "none").as_uri()
    indexes = PackageIndexes(indexes=(missing, other.as_uri(), right.as_uri()))
    assert indexes.fetch("some-project", "1.0", DIGEST) == SDIST
    with pytest.raises(FarmError, match=r"no package index has .*some-project==1\.0.* another digest.*pip config list"):
        PackageIndexes(indexes=(other.as_uri(),)).fetch("some-project", "1.0", DIGEST)
    with pytest.raises(FarmError, match="no package index has"):
        indexes.fetch("some-project", "1.0.post2", DIGEST)
    with pytest.raises(FarmError, match="none is configured"):
        PackageIndexes(indexes=()).fetch("some-project", "1.0", DIGEST)


def test_pips_own_configuration() -> None:
    assert PackageIndexes.parse("") == PackageIndexes(indexes=(DEFAULT_INDEX,))
    given = PackageIndexes.parse(
        ":env:.index-url='https://env/simple'\n"
        "global.index-url='https://file/simple'\nglobal.extra-index-url='\\nhttps://b/simple\\nhttps://c/simple'\n"
        "download.find-links='/wheels'\nglobal.cert='/c.pem'\nglobal.timeout='60'\ninstall.proxy='http://no'\n"
        'global.proxy="http://it\'s:80"\nnot a setting\n'
    )
    assert given == PackageIndexes(
        indexes=("https://env/simple", "https://b/simple", "https://c/simple"),
        places=("/wheels",),
        cert="/c.pem",
        proxy="http://it's:80",
        timeout_s=60.0,
    )
    assert PackageIndexes.parse("global.no-index='true'\n").indexes == ()


def test_what_pip_says_here_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "https://mine/simple")
    assert PackageIndexes.from_pip().indexes[0] == "https://mine/simple"


def test_no_code_of_a_package_runs_when_it_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The distribution's build back end would leave a file behind."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, text in {
            "pyproject.toml": "[build-system]\nrequires = []\nbuild-backend = 'evil'\nbackend-path = ['.']\n",
            "evil.py": f"open({str(tmp_path / 'ran')!r}, 'w')\n",
        }.items():
            member = tarfile.TarInfo(f"some_project-1.0/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    data = packed.getvalue()
    dataset = tmp_path / "dataset"
    dataset.mkdir()
    (dataset / "requirements.txt").write_text(f"some-project==1.0 --hash=sha256:{hashlib.sha256(data).hexdigest()}\n")
    (dataset / "sources.json").write_text('{"some-project": {"repo": "r", "remove": [], "tasks": 0, "modules": {}}}')
    monkeypatch.setattr(pypi, "DATASET", dataset)
    monkeypatch.setenv("ROLLOUT_FARM_CACHE", str(tmp_path / "cache"))
    indexes = PackageIndexes(indexes=(make_index(tmp_path / "index", data).as_uri(),))
    assert pypi.fetch(indexes) == 1
    assert pypi.fetch(indexes) == 0
    assert "evil.py" in sdist.files(hashlib.sha256(data).hexdigest())
    assert not (tmp_path / "ran").exists()
    assert [path.suffix for path in sdist.cache_dir().iterdir()] == [".gz"]
