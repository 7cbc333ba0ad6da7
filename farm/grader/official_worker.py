"""The process in which ``swebench`` lives: requests in on standard input, answers out on standard output.

Importing ``swebench.harness.grading`` takes seconds and 160 MB, and its log parsers run regular expressions over text
that a policy had a hand in. So it is done once, here, in a process of its own that may be killed at any time; nothing
of it is imported by the farm. ``farm.grader.official`` is the other end.

A frame is its length (4 bytes, big-endian) and a JSON object. A request has ``op`` and what the operation needs; an
answer has ``ok``, ``rss_bytes`` (peak) and ``value``, or ``error`` and ``kind``. The process ends when its standard
input does. What ``swebench`` prints goes to standard error.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import struct
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

HEAD = struct.Struct(">I")
MAX_FRAME_BYTES = 256 << 20
VERSIONS = ("5.",)  # of swebench: what it takes and gives changed with every major one


def hello(_: Mapping[str, Any]) -> dict[str, Any]:
    """Import what grading needs; the version of ``swebench``."""
    from importlib.metadata import version

    import swebench.harness.grading
    import swebench.harness.reporting
    import swebench.harness.utils  # noqa: F401

    return {"version": version("swebench")}


def spec(request: Mapping[str, Any]) -> dict[str, Any]:
    """``row`` -> the eval script as the official harness runs it."""
    return {"eval_script": _spec(request["row"]).eval_script}


def grade(request: Mapping[str, Any]) -> dict[str, Any]:
    """``row``, ``patch``, ``model``, ``log`` -> the official report of this instance, and the status of each expected
    test as the log gives it."""
    from swebench.harness.grading import get_eval_report, get_logs_eval

    made = _spec(request["row"])
    prediction = {
        "instance_id": made.instance_id,
        "model_name_or_path": request["model"],
        "model_patch": request["patch"],
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "test_output.txt"
        path.write_text(request["log"], errors="replace")
        report = get_eval_report(made, prediction, str(path), True)
        statuses, _ = get_logs_eval(made, str(path))
    expected = {*made.FAIL_TO_PASS, *made.PASS_TO_PASS}
    return {
        "report": report[made.instance_id],
        "statuses": {test: status for test, status in statuses.items() if test in expected},
    }


def classify(request: Mapping[str, Any]) -> dict[str, Any]:
    """``log`` -> the reason of an infrastructure failure that it shows for certain, or None."""
    from swebench.harness.infra_failure import classify_text

    found = classify_text(request["log"])
    return {"reason": found[0] if found and found[1] == "environment" else None}


def run_report(request: Mapping[str, Any]) -> dict[str, Any]:
    """``predictions`` (by instance id), ``instance_ids`` (of the whole data set), ``run_id``, ``at`` (a folder that
    holds the official ``logs/run_evaluation`` tree) -> the path of the official run report, written into ``at``."""
    from swebench.harness.reporting import make_run_report

    rows = [{"instance_id": name} for name in request["instance_ids"]]
    before = Path.cwd()
    os.chdir(request["at"])  # the official tree is found relative to the working folder
    try:
        path = make_run_report(request["predictions"], rows, request["run_id"], None, ".")
        return {"path": str(Path(path).resolve())}
    finally:
        os.chdir(before)


OPERATIONS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "hello": hello,
    "spec": spec,
    "grade": grade,
    "classify": classify,
    "run_report": run_report,
}


def _spec(row: Mapping[str, Any]) -> Any:
    from swebench.harness.utils import make_test_spec

    return make_test_spec(dict(row))


def read_frame(stream: BinaryIO) -> dict[str, Any] | None:
    """The next request; None at the end of the stream."""
    head = stream.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    (length,) = HEAD.unpack(head)
    body = stream.read(length)
    if len(body) < length:
        return None
    request: dict[str, Any] = json.loads(body)
    return request


def frame(message: Mapping[str, Any]) -> bytes:
    """``message`` as it travels."""
    body = json.dumps(message).encode()
    return HEAD.pack(len(body)) + body


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """What the operation gives, or why it could not."""
    try:
        value = OPERATIONS[request["op"]](request)
        told: dict[str, Any] = {"ok": True, "value": value}
    except MemoryError:
        told = {"ok": False, "kind": "memory", "error": "out of memory"}
    except ImportError as error:
        told = {"ok": False, "kind": "import", "error": f"{type(error).__name__}: {error}"}
    except Exception as error:  # whatever the package raises on a row or a log
        told = {"ok": False, "kind": "official", "error": f"{type(error).__name__}: {error}"[:2000]}
    return {**told, "rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def main(memory_bytes: int) -> None:
    """Answer until standard input ends. ``memory_bytes``: more than this is refused by the kernel."""
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever the package prints is not an answer
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        while (request := read_frame(sys.stdin.buffer)) is not None:
            answers.write(frame(answer(request)))
            answers.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
