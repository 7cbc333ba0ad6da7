"""The micro policy's tokenizer: a small BPE in which a word, digit or operator is one token wherever it stands.

Spaces are tokens of their own, so that a word has the *same* token with and without a space before it: that is what
lets a small model copy from a listing into a command. Training runs until every word of the suite is one token; it sees
only the given texts and its result follows from them alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Split
from tokenizers.trainers import BpeTrainer

PAD, UNKNOWN, TASK, ACT, END, OBSERVATION = "<|pad|>", "<|unk|>", "<|task|>", "<|act|>", "<|end|>", "<|obs|>"
SPECIAL = (PAD, UNKNOWN, TASK, ACT, END, OBSERVATION)
MAX_VOCABULARY = 700

_ALPHABET = ["\n", "\t", *map(chr, range(32, 127))]
_PIECES = r"\n|\t| +|[A-Za-z]+|[0-9]|//|[-+*<>=!]=|[^A-Za-z0-9\s]|\s"


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A tokenizer whose words are those of ``texts``; other text falls back to smaller pieces and single characters."""
    tokenizer = Tokenizer(BPE(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = Split(Regex(_PIECES), behavior="isolated")
    tokenizer.decoder = Fuse()
    trainer = BpeTrainer(
        vocab_size=MAX_VOCABULARY,
        min_frequency=1,
        special_tokens=list(SPECIAL),
        initial_alphabet=_ALPHABET,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write ``tokenizer.json`` and the ``tokenizer_config.json`` by which transformers loads it."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 512,
        "pad_token": PAD,
        "unk_token": UNKNOWN,
        "eos_token": END,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
