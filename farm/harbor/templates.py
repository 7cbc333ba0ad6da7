"""The scripts in the task folders that the farm writes. They run in Harbor's machines, where there is no farm."""

from __future__ import annotations

TEST_SH = """\
#!/bin/bash
# Puts the tests in place, whatever the agent did to their files, runs them and writes the reward.
mkdir -p /logs/verifier
cd {workdir} || exit 1
{remove}cp -R /tests/files/. . || exit 1
exec python3 -I /tests/grade.py
"""

# Beside copies of the farm's own parsers.py and verdict.py: what it says is what the farm's grader says.
GRADE_PY = '''\
"""Runs eval.sh, judges its log, writes /logs/verifier/reward.txt and ctrf.json."""

import json
import os
import secrets
import subprocess
import sys

sys.path.insert(0, "/tests")
from parsers import PARSERS
from verdict import judge, marked

LOGS = "/logs/verifier"
with open("/tests/eval.sh") as file:
    script = file.read()
with open("/tests/expected.json") as file:
    expected = json.load(file)
word, status_word = secrets.token_hex(8), secrets.token_hex(8)
command = ["bash", "-c", marked(script, word)]
if len(script) > 60000:  # more than one argument may hold, with the markers and in bytes
    with open("/tmp/farm-eval.sh", "w") as file:
        file.write(command[2])
    command = ["bash", "/tmp/farm-eval.sh"]
run = subprocess.run(
    command,
    stdin=subprocess.DEVNULL,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    env={**os.environ, "FARM_TEST_WORD": status_word},
)
log = run.stdout.decode(errors="replace")
verdict = judge(
    log,
    expected=expected["fail_to_pass"] + expected["pass_to_pass"],
    parse=PARSERS[expected["log_parser"]],
    word=word,
    status_word=status_word if expected["checked"] else None,
    exit_code=run.returncode,
    timed_out=False,
)
print(log)
names = {"PASSED": "passed", "FAILED": "failed", "MISSING": "skipped"}
found = verdict.statuses.items()
tests = [{"name": name, "status": names.get(status, "other"), "duration": 0} for name, status in found]
kinds = ("passed", "failed", "skipped", "pending", "other")
counts = {kind: sum(test["status"] == kind for test in tests) for kind in kinds}
summary = {"tests": len(tests), **counts, "start": 0, "stop": 0}
with open(LOGS + "/ctrf.json", "w") as file:
    json.dump({"results": {"tool": {"name": "rollout-farm"}, "summary": summary, "tests": tests}}, file)
with open(LOGS + "/reward.txt", "w") as file:
    file.write("1" if verdict.resolved else "0")
'''

SOLVE_SH = """\
#!/bin/bash
cd {workdir} && git apply --whitespace=nowarn /solution/gold.patch
"""

# The commit is the one that the farm makes of these files: same author, date, message and modes.
DOCKERFILE = """\
FROM python:{python}-slim
RUN apt-get update && apt-get install -y --no-install-recommends git && rm -rf /var/lib/apt/lists/*
{tools}COPY repo/ {workdir}/
WORKDIR {workdir}
RUN {commit}
"""
PYTEST = "RUN pip install --no-cache-dir pytest=={version}\n"
COMMIT = (
    "git init -q -b main . && git config core.fileMode false && git config user.name Agent"
    " && git config user.email agent@localhost"
    " && printf '__pycache__/\\n*.py[co]\\n.pytest_cache/\\n.hypothesis/\\n*.egg-info/\\n' > .git/info/exclude"
    " && git -c core.autocrlf=false add -A -f ."
    " && GIT_AUTHOR_NAME='Rollout Farm' GIT_AUTHOR_EMAIL=farm@localhost GIT_COMMITTER_NAME='Rollout Farm'"
    " GIT_COMMITTER_EMAIL=farm@localhost GIT_AUTHOR_DATE='1700000000 +0000' GIT_COMMITTER_DATE='1700000000 +0000'"
    " git commit -q --allow-empty -m base"
)

# ---------------------------------------------------------------------------------------- rows of SWE-bench

ROW_DOCKERFILE = """\
FROM {image}
COPY strip.sh /tmp/strip.sh
RUN bash /tmp/strip.sh && rm /tmp/strip.sh
WORKDIR {workdir}
"""

# SWE-bench's images have a Python for this beside the one of the repository. The package comes over the network.
ROW_TEST_SH = """\
#!/bin/bash
mkdir -p /logs/verifier
python=python3
[ -x /opt/miniconda3/bin/python ] && python=/opt/miniconda3/bin/python
"$python" -m venv /opt/swebench && /opt/swebench/bin/pip install --quiet swebench=={version} || exit 1
exec /opt/swebench/bin/python -I /tests/grade.py
"""

ROW_GRADE_PY = '''\
"""Runs the row's eval script and has SWE-bench judge its log; writes /logs/verifier/reward.txt."""

import json
import subprocess

from swebench.harness.grading import get_eval_report
from swebench.harness.utils import make_test_spec

LOGS = "/logs/verifier"
with open("/tests/config.json") as file:
    row = json.load(file)
spec = make_test_spec(row)
with open(LOGS + "/eval.sh", "w") as file:
    file.write(spec.eval_script)
with open(LOGS + "/test_output.txt", "wb") as log:
    subprocess.run(["bash", LOGS + "/eval.sh"], stdout=log, stderr=subprocess.STDOUT)
prediction = {"instance_id": row["instance_id"], "model_name_or_path": "agent", "model_patch": "in the work tree"}
report = get_eval_report(spec, prediction, LOGS + "/test_output.txt", True)[row["instance_id"]]
with open(LOGS + "/report.json", "w") as file:
    json.dump(report, file)
with open(LOGS + "/reward.txt", "w") as file:
    file.write("1" if report["resolved"] else "0")
'''
