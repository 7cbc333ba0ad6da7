"""mini-swe-agent 2.x as the farm's agent: its own loop, unchanged, with the policy and the sandbox of an episode.

    farm rollout --tasks ... --agent external --set renderer.name=chat \\
        --set agent.command="['$PWD/mini-venv/bin/python', '$PWD/examples/mini_swe_agent.py']"

It lives in a virtual environment of its own: ``pip install mini-swe-agent``. Nothing of it knows of the farm but the
two classes below, which speak to the session: ``Policy`` by OpenAI's chat API, ``FarmSandbox`` by ``/exec``.
"""

import json
import os
import re
import urllib.request

from minisweagent.agents.default import DefaultAgent
from minisweagent.exceptions import FormatError, Submitted

BASE, KEY, SESSION = (os.environ[name] for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "FARM_SESSION_URL"))
DONE = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
SYSTEM = "You fix issues in a software repository by shell commands. Think, then give one command in a ```bash block."
INSTANCE = "{{task}}\n\nThe repository is in {{workdir}}. To hand in your change, run: echo " + DONE


def call(url: str, body: object = None) -> dict:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, data, headers)) as answer:
        return json.loads(answer.read())


class Policy:
    """mini-swe-agent's Model."""

    def query(self, messages: list, **_: object) -> dict:
        plain = [{"role": m["role"], "content": m["content"]} for m in messages if m["role"] != "exit"]
        message = call(f"{BASE}/chat/completions", {"model": "policy", "messages": plain})["choices"][0]["message"]
        found = re.findall(r"```bash\s*\n(.*?)\n```", message["content"], re.DOTALL)
        if len(found) != 1:
            raise FormatError({"role": "user", "content": f"Give exactly one ```bash block, not {len(found)}."})
        return {**message, "extra": {"actions": [{"command": found[0]}], "cost": 0.0}}

    def format_message(self, **message: object) -> dict:
        return dict(message)

    def format_observation_messages(self, message: dict, outputs: list, template_vars: object = None) -> list:
        return [
            {"role": "user", "content": f"[exit code {o['returncode']}]\n{o['output']}", "extra": o} for o in outputs
        ]

    def get_template_vars(self, **_: object) -> dict:
        return {}

    def serialize(self) -> dict:
        return {}


class FarmSandbox:
    """mini-swe-agent's Environment."""

    config = None

    def execute(self, action: dict, cwd: str = "") -> dict:
        done = call(f"{SESSION}/exec", {"command": action["command"]})
        lines = done["output"].lstrip().splitlines()
        if lines and lines[0].strip() == DONE and done["returncode"] == 0:
            extra = {"exit_status": "Submitted", "submission": ""}
            raise Submitted({"role": "exit", "content": "", "extra": extra})
        return {"output": done["output"], "returncode": done["returncode"], "exception_info": ""}

    def get_template_vars(self, **_: object) -> dict:
        return {}

    def serialize(self) -> dict:
        return {}


if __name__ == "__main__":
    task = call(f"{SESSION}/task")
    agent = DefaultAgent(Policy(), FarmSandbox(), system_template=SYSTEM, instance_template=INSTANCE, cost_limit=0.0)
    agent.run(task["problem_statement"], workdir=task["workdir"])
