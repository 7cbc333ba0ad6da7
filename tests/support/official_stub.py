"""Stands in for the grading process, with the same protocol and none of its packages. The patch says what to do.

Run as ``python official_stub.py [--no-hello] MEMORY``."""

import json
import os
import struct
import sys
import time
from pathlib import Path

HEAD = struct.Struct(">I")


def send(message: object) -> None:
    body = json.dumps(message).encode()
    sys.stdout.buffer.write(HEAD.pack(len(body)) + body)
    sys.stdout.buffer.flush()


def main() -> None:
    if "--no-hello" in sys.argv:
        print("ImportError: what it needs is not there", file=sys.stderr, flush=True)
        sys.exit(1)
    while head := sys.stdin.buffer.read(HEAD.size):
        request = json.loads(sys.stdin.buffer.read(HEAD.unpack(head)[0]))
        told = {"ok": True, "rss_bytes": 1 << 20, "value": {"version": "5.stub", "pid": os.getpid()}}
        patch = request.get("patch") or ""
        if request["op"] == "grade":
            told["value"] = {
                "report": {"resolved": patch == "good", "patch_successfully_applied": True, "pid": os.getpid()},
                "statuses": {},
            }
        if request["op"] == "spec":
            told["value"] = {"eval_script": request["row"]["eval_script"]}
        if patch == "hang":
            time.sleep(60)
        elif patch == "die":
            print("killed by a stray byte", file=sys.stderr, flush=True)
            os._exit(3)
        elif patch == "die once" and not Path(request["log"]).exists():
            Path(request["log"]).touch()
            os._exit(3)
        elif patch == "garbage":
            sys.stdout.buffer.write(b"\0\0\0\5hello")
            sys.stdout.buffer.flush()
            continue
        elif patch == "huge":
            sys.stdout.buffer.write(b"\xff\xff\xff\xff" + b"x" * (1 << 20))
            sys.stdout.buffer.flush()
            time.sleep(60)
        elif patch == "grown":
            told["rss_bytes"] = 8 << 30
        elif patch == "refuse":
            told = {"ok": False, "rss_bytes": 1 << 20, "kind": "official", "error": "KeyError: 'no_such_parser'"}
        elif patch == "memory":
            told = {"ok": False, "rss_bytes": 1 << 20, "kind": "memory", "error": "out of memory"}
        send(told)


if __name__ == "__main__":
    main()
