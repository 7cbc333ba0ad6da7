"""The micro policy's tokenizer: a small BPE in which a digit, a name or an operator is one token wherever it stands.

What an edit copies has the *same* token in a listing and in a command: an operator takes the space after it along
(``+ ``), ``and``, ``or`` and ``in`` the spaces around them, a word of two letters or more the space after it; a space
before any of these is a token of its own. That is what lets a small model copy. The fixed parts of the usual commands
are one token each, so that an episode takes a third of the ids it would take otherwise. Training runs until every piece
in the given texts is one token; its result follows from them alone.
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
_PIECES = "|".join(
    (
        r"sed -i 's\||\|' \*\.py|python3 -IS t|git checkout -q \.|cat \*\.py",
        r"\n *|\t",
        r" (?:and|or|in|not in) ",
        r"[A-Za-z]{2,} (?!(?:and|or|in|not in) )|[A-Za-z]+",
        r"(?://|[-+*<>=!]=|[-+*%<>=]) ?|, |[0-9]| +|[^A-Za-z0-9\s]|\s",
    )
)


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
