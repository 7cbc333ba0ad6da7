"""Harbor task folders as their authors write them, for tests. On pytest's path (pyproject.toml)."""

from __future__ import annotations

from pathlib import Path

TOML = """\
schema_version = "1.4"
[task]
name = "demo/count-lines"
[metadata]
difficulty = "easy"
[metadata.rollout_farm]
image = "host"
[agent]
timeout_sec = 50.0
[verifier]
timeout_sec = 20.0
[verifier.env]
WANTED = "3"
[environment]
cpus = 1
memory_mb = 512
storage_mb = 64
workdir = "/app"
network_mode = "no-network"
[environment.env]
GREETING = "hello"
[solution.env]
COUNT = "3"
"""
# The machine is graded: a file outside of any repository, and a program that must still run.
TEST = """\
#!/bin/bash
cd /app
[ "$(cat /app/count.txt 2>/dev/null)" = "$WANTED" ] && count=1 || count=0
[ "$(cat /tmp/greeting 2>/dev/null)" = hello ] && greeting=0.5 || greeting=0
[ -x /tests/tool ] || exit 1
echo "count $count greeting $greeting"
reward=$(python3 -c "print(($count + $greeting) / 1.5)")
echo "{\\"reward\\": $reward, \\"count\\": $count}" > /logs/verifier/reward.json
"""
SOLVE = '#!/bin/bash\necho "$COUNT" > count.txt\necho "$GREETING" > /tmp/greeting\n'


def write_folder(
    root: Path, *, toml: str = TOML, test: str | None = TEST, solve: str | None = SOLVE, dockerfile: str | None = None
) -> Path:
    """A task whose reward is 1 when both things are there, a fraction for one of them."""
    files = {
        "task.toml": toml,
        "instruction.md": "Write 3 to /app/count.txt and $GREETING to /tmp/greeting.\n",
        "tests/tool": "#!/bin/sh\n",
        "tests/test.sh": test,
        "solution/solve.sh": solve,
        "environment/Dockerfile": dockerfile,
    }
    for name, text in files.items():
        if text is not None:
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            path.chmod(0o755 if name in ("tests/tool", "tests/test.sh", "solution/solve.sh") else 0o644)
    return root
