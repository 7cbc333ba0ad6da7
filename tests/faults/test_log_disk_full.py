"""A disk that fills up: a clear error, nothing half, and the log goes on once there is room."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from farm.log_bench import synthetic
from farm.policy_log import PolicyLog
from farm.trajectory_log import DirectoryLog
from farm.types import Cursor

# RLIMIT_FSIZE makes every write beyond it fail, as a full disk does, and needs no mount.
_LIMITED = """
import resource, sys
from farm.errors import FarmError
from farm.log_bench import synthetic
from farm.policy_log import PolicyLog
from farm.trajectory_log import DirectoryLog
log, policies = DirectoryLog(sys.argv[1]), PolicyLog(sys.argv[2])
small = [synthetic(n, turns=2, context=20, output=5) for n in range(8)]
assert log.append_many(small) == [True] * 8
resource.setrlimit(resource.RLIMIT_FSIZE, (15_000, 15_000))
def write(folder):
    (folder / "model.safetensors").write_bytes(bytes(50_000))
for attempt in (
    lambda: log.append(synthetic(9, turns=20, context=200, output=50)),
    lambda: log.seal(),
    lambda: policies.publish(0, write, consumed_groups=0),
):
    try:
        attempt()
    except FarmError as error:
        print(error.kind, str(error).count("\\n"), "no space left" in str(error))
    else:
        print("it fitted")
assert log.append(synthetic(10, turns=1, context=2, output=1))
"""


def test_a_full_disk_is_a_clear_error_and_the_log_goes_on(tmp_path: Path) -> None:
    folder, policies = tmp_path / "log", tmp_path / "policies"
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED, str(folder), str(policies)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["disk_full 0 True"] * 3
    assert [p.name for p in folder.iterdir() if p.name.endswith((".tmp", ".parquet"))] == []
    assert list((folder / "open" / "tmp").iterdir()) == []
    assert not list(policies.glob(".step*"))
    assert PolicyLog(policies).versions() == []
    with DirectoryLog(folder) as log:
        assert list(log.read(Cursor())) == []
        assert len(log.landed()) == 9
        log.seal()
        assert len(list(log.read(Cursor()))) == 9
        assert log.append(synthetic(9, turns=20, context=200, output=50))
