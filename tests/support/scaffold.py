"""A scaffold as the farm meets it: a program that knows nothing but OpenAI's chat API and the session's addresses.

Run as ``python scaffold.py COURSE``."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

BASE, TOKEN, SESSION = (os.environ[name] for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "FARM_SESSION_URL"))


def call(url: str, body: object = None, token: str = TOKEN) -> dict:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=30) as answer:
        return json.loads(answer.read())


def status_of(url: str, body: object = None, token: str = TOKEN) -> tuple[int, str]:
    try:
        call(url, body, token)
        return 200, ""
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["error"]["code"]


def ask(messages: list, **more: object) -> dict:
    answer = call(f"{BASE}/chat/completions", {"model": "policy", "messages": messages, "temperature": 0.123, **more})
    return answer["choices"][0]["message"]


def work(course: str) -> None:
    task = call(f"{SESSION}/task")
    chat = [{"role": "system", "content": "You fix things."}, {"role": "user", "content": task["problem_statement"]}]
    while True:
        reply = ask(chat)
        if reply["content"].strip() == "submit":
            return
        if course == "drops" and reply["content"].startswith("badly"):
            chat.append({"role": "user", "content": "Write a command."})
            continue
        done = call(f"{SESSION}/exec", {"command": reply["content"]})
        chat += [
            {**reply, "function_call": None},
            {"role": "user", "content": f"{done['returncode']}: {done['output']}"},
        ]


def main(course: str) -> None:
    if course in ("plain", "drops", "endless"):
        work(course)
    elif course == "crashes":
        sys.exit("Traceback: a defect of the scaffold")
    elif course == "hangs":
        subprocess.Popen(["sleep", "600"])
        time.sleep(600)
    elif course == "hides":
        subprocess.Popen(["setsid", "--fork", "bash", "-c", "setsid sleep 600 & echo $$ $! > family; wait"])
        while not Path("family").exists():
            time.sleep(0.01)
        print("hidden", flush=True)
        time.sleep(600)
    elif course == "leaves":
        subprocess.Popen(["sleep", "600"])
        subprocess.Popen(["setsid", "--fork", "sleep", "600"])
    elif course == "probes":
        chat = [{"role": "user", "content": "x"}]
        url = f"{BASE}/chat/completions"
        found = [
            status_of(url, {"messages": chat}, token="wrong"),
            status_of(url, {"messages": chat, "stream": True}),
            status_of(url, {"messages": []}),
            status_of(url, {"messages": [{"role": "nobody"}]}),
            status_of(url, [1]),
            status_of(f"{SESSION}/exec", {"command": 3}),
            status_of(f"{BASE}/models"),
        ]
        codes = [code for code, _ in found]
        sys.exit(0 if codes == [401, 400, 400, 400, 400, 400, 200] else f"{found}")


main(sys.argv[1])
