"""Renderers: messages to token ids and back, append-only."""

from __future__ import annotations

from importlib import import_module

from farm.errors import UsageError
from farm.protocols import Renderer

RENDERERS = {
    "micro": "farm.render.micro:MicroRenderer",
    "chat": "farm.render.chat:ChatRenderer",
}


def make_renderer(name: str, model_path: str) -> Renderer:
    """The renderer called ``name`` with the tokenizer of the model folder ``model_path``.

    Raises UsageError on an unknown name or an unreadable tokenizer.
    """
    if name not in RENDERERS:
        raise UsageError(f"renderer {name!r} is unknown: choose one of {', '.join(sorted(RENDERERS))}")
    module, _, cls = RENDERERS[name].partition(":")
    renderer: Renderer = getattr(import_module(module), cls)(model_path)
    return renderer
