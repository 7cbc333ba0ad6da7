from __future__ import annotations

import pytest

from farm.errors import UsageError
from trainer.buckets import TensorInfo, plan_buckets
from trainer.shapes import hf_shapes, known_model, parameters


def infos(*sizes: int) -> list[TensorInfo]:
    return [TensorInfo(name=f"t{i}", dtype="bfloat16", shape=(n,)) for i, n in enumerate(sizes)]


def test_portions_are_filled_in_order_and_a_large_tensor_stands_alone() -> None:
    buckets = plan_buckets(infos(3, 3, 3, 50, 1, 1), max_bytes=12)
    assert [[t.name for t in bucket.tensors] for bucket in buckets] == [["t0", "t1"], ["t2"], ["t3"], ["t4", "t5"]]
    assert [bucket.bytes for bucket in buckets] == [12, 6, 100, 4]
    assert [bucket.number for bucket in buckets] == [0, 1, 2, 3]
    assert plan_buckets([]) == []


def test_the_reference_model_in_buckets_of_512_mib() -> None:
    hf = known_model("qwen3-30b-a3b")
    buckets = plan_buckets(TensorInfo(name=n, dtype="bfloat16", shape=s) for n, s in hf_shapes(hf).items())
    assert sum(bucket.bytes for bucket in buckets) == 2 * parameters(hf)
    assert 114 <= len(buckets) <= 130
    # The embedding (593 MiB) and the output layer are larger than a bucket; no other tensor is.
    assert [b.number for b in buckets if b.bytes > 512 << 20] == [0, len(buckets) - 1]


def test_impossible_plans_are_refused() -> None:
    with pytest.raises(UsageError, match="bucket size is 0 bytes; allowed: 1 or more"):
        plan_buckets(infos(1), max_bytes=0)
    with pytest.raises(UsageError, match="t0 is there twice"):
        plan_buckets([*infos(1), *infos(1)])
