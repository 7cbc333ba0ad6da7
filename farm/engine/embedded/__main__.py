"""``python -m farm.engine.embedded --model DIR``: serve one model folder on this machine's CPU, one thread."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import gc
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from farm.engine.embedded.config import ModelConfig, ModelFolderError, read_config

_PARENT_CHECK_S = 0.5
_BODY_BYTES = 64 << 20


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m farm.engine.embedded", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder: Qwen3, Qwen3-MoE or Llama")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000, help="0 picks a free one")
    parser.add_argument("--url-file", type=Path, help="written, by rename, once the server answers")
    parser.add_argument("--max-total-tokens", type=int, default=32_768, help="KV budget in tokens")
    parser.add_argument("--context-length", type=int, help="default: the model's")
    parser.add_argument("--max-running-requests", type=int, default=64)
    parser.add_argument("--max-queued-requests", type=int, help="default: no limit; over it: 503")
    parser.add_argument("--chunked-prefill-size", type=int, default=512, help="prompt tokens computed in one step")
    parser.add_argument(
        "--clip-new-tokens", type=int, default=4096, help="most tokens to come that a request counts for at admission"
    )
    parser.add_argument("--weight-version", default="default")
    parser.add_argument("--parent-pid", type=int, help="exit when this process has gone")
    arguments = parser.parse_args(argv)
    for name in (
        "max_total_tokens",
        "context_length",
        "max_running_requests",
        "chunked_prefill_size",
        "clip_new_tokens",
    ):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    return arguments


def _fail(message: str) -> int:
    print(f"embedded engine: {message}", file=sys.stderr)
    return 2


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def _decoder(model: Path) -> Callable[[list[int], bool], str]:
    """(ids, without special tokens) to text by the folder's tokenizer.json; the empty string without one."""
    file = model / "tokenizer.json"
    if not file.exists():
        return lambda _ids, _skip: ""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    return lambda ids, skip: tokenizer.decode(ids, skip_special_tokens=skip)


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM, SIGINT or the parent's end. 0: asked to stop; 1: a defect; 2: could not start."""
    arguments = _parse(argv)
    try:
        listener = _listen(arguments.host, arguments.port)
    except OSError as error:
        where = f"{arguments.host}:{arguments.port}"
        if error.errno == errno.EADDRINUSE:
            return _fail(f"port in use: {where}; choose another --port, or 0 for a free one")
        return _fail(f"can't listen on {where}: {error}")
    with listener:
        try:
            config = read_config(arguments.model)
            os.environ.setdefault("OMP_NUM_THREADS", "1")
            return _serve(arguments, listener, config)
        except ModelFolderError as error:
            return _fail(f"--model {arguments.model}: {error}")


def _serve(arguments: argparse.Namespace, listener: socket.socket, config: ModelConfig) -> int:
    import torch

    from farm.engine.embedded.model import KVStore, load_weights
    from farm.engine.embedded.scheduler import Limits

    torch.set_num_threads(1)
    limits = Limits(
        max_total_tokens=arguments.max_total_tokens,
        context_length=arguments.context_length or config.max_positions,
        max_running=arguments.max_running_requests,
        max_queued=arguments.max_queued_requests,
        chunk_tokens=arguments.chunked_prefill_size,
        clip_new_tokens=arguments.clip_new_tokens,
    )
    needed = KVStore.size_bytes(config, rows=limits.rows, capacity=limits.capacity)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        return _fail(
            f"the KV of 2 x {limits.max_running} sequences of {limits.capacity} tokens may take "
            f"{needed / 2**30:.1f} GiB, this machine has {memory / 2**30:.1f}; lower --context-length or "
            "--max-running-requests"
        )
    weights = load_weights(config, arguments.model)
    try:
        text = _decoder(arguments.model)
    except Exception as error:  # the tokenizers library raises bare Exception
        return _fail(f"{arguments.model / 'tokenizer.json'} can't be read: {error}")
    gc.collect()
    gc.freeze()  # the start-up's objects are never garbage: keep collections short

    async def run() -> int:
        from aiohttp import web

        from farm.engine.embedded.server import EngineServer

        loop = asyncio.get_running_loop()
        stop: asyncio.Future[BaseException | None] = loop.create_future()

        def end(error: BaseException | None = None) -> None:
            if not stop.done():
                stop.set_result(error)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, end)
        engine = EngineServer(
            model_path=arguments.model,
            config=config,
            weights=weights,
            limits=limits,
            version=arguments.weight_version,
            text=text,
            on_defect=end,
        )

        def large_requests(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
            return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=_BODY_BYTES)

        server = web.Server(
            engine.handle,
            request_factory=large_requests,
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=75.0,
        )
        runner = web.ServerRunner(server, shutdown_timeout=1.0)
        await runner.setup()
        await web.SockSite(runner, listener).start()
        host, port = listener.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        _announce(url, arguments.url_file)
        parent = asyncio.create_task(_watch_parent(arguments.parent_pid, end))
        try:
            error = await stop
        finally:
            parent.cancel()
            await runner.cleanup()
        if error is not None:
            import traceback

            traceback.print_exception(error)
            return 1
        return 0

    return asyncio.run(run())


def _announce(url: str, file: Path | None) -> None:
    if file is not None:
        temporary = file.with_name(f"{file.name}.{os.getpid()}")
        temporary.write_text(url)
        temporary.rename(file)
    print(f"embedded engine: serving at {url}", file=sys.stderr, flush=True)


async def _watch_parent(pid: int | None, end: Callable[[], None]) -> None:
    if pid is None:
        return
    child = os.getppid() == pid
    while not (child and os.getppid() != pid):
        with contextlib.suppress(PermissionError):
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                break
        await asyncio.sleep(_PARENT_CHECK_S)
    end()


if __name__ == "__main__":
    sys.exit(main())
