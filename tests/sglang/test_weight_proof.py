"""The digests of weights on GPUs are those of SGLang's own kernel, which Triton interprets here."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import real_sglang
import torch
from safetensors.torch import save_file

from trainer.megatron.proof import digest_of_words

_SGLANGS = """
import json, sys, torch
from safetensors.torch import load_file
from sglang.kernels.ops.memory import gpu_tensor_hash as theirs

class OnGpu(torch.Tensor):
    is_cuda = True

def words(tensor):  # theirs insists on a GPU
    raw = tensor.as_subclass(torch.Tensor).reshape(-1).view(torch.uint8)
    return torch.cat([raw, raw.new_zeros(-raw.numel() % 4)]).view(torch.uint32)

theirs._as_uint32_words = words
tensors = load_file(sys.argv[1])
print(json.dumps({name: f"{theirs.gpu_tensor_hash(t.as_subclass(OnGpu)):016x}" for name, t in tensors.items()}))
"""


def test_the_digest_of_words_is_sglangs(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = {
        f"{size}-{dtype}": torch.randn(size, generator=generator).to(dtype)
        for size in (1, 7, 300, 8192, 20_001)
        for dtype in (torch.float32, torch.bfloat16)
    }
    save_file(tensors, tmp_path / "tensors.safetensors")
    done = subprocess.run(
        [
            "env", f"PYTHONPATH={real_sglang.SHIM}", "SGLANG_USE_CPU_ENGINE=1", "TRITON_INTERPRET=1",
            real_sglang.PYTHON, "-c", _SGLANGS, str(tmp_path / "tensors.safetensors"),
        ],
        check=False, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = json.loads(done.stdout.splitlines()[-1])
    assert theirs == {name: digest_of_words(tensor) for name, tensor in tensors.items()}
