from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from headrace.profile.parts import OWN_KERNELS, TITLES, part_of_kernel, part_of_operation, part_of_range

ROOT = Path(__file__).resolve().parents[2]
GPU_KERNELS = ROOT / "src" / "headrace" / "kernels" / "gpu"
RESULTS = ROOT / "benchmarks" / "results"

FORMER_KERNELS = {"_chunk": "other"}  # in records of older commits, under a name that no longer exists


def launched_kernels() -> set[str]:
    """Names of the functions that some code launches: name[grid](...)."""
    found: set[str] = set()
    for path in GPU_KERNELS.glob("*.py"):
        text = path.read_text()
        jitted = set(re.findall(r"@triton\.jit[^\n]*\n(?:@[^\n]*\n)*def (\w+)\(", text))
        found |= {name for name in jitted if re.search(rf"\b{name}\[", text)}
    return found


def recorded_kernels() -> set[str]:
    names: set[str] = set()
    for path in RESULTS.glob("*h200.jsonl"):
        for line in path.read_text().splitlines():
            names |= set(json.loads(line).get("kernel_shares") or {})
    return names


def test_every_kernel_that_we_launch_has_a_part() -> None:
    launched = launched_kernels()
    assert len(launched) > 20
    assert launched - set(OWN_KERNELS) == set()


def test_the_table_names_no_kernel_that_does_not_exist() -> None:
    assert set(OWN_KERNELS) - launched_kernels() == set()


def test_no_two_kernels_share_a_name() -> None:
    text = "\n".join(path.read_text() for path in GPU_KERNELS.glob("*.py"))
    for name in OWN_KERNELS:
        assert len(re.findall(rf"^def {name}\(", text, re.MULTILINE)) == 1, name


def test_every_kernel_of_the_recorded_runs_has_a_part() -> None:
    names = recorded_kernels()
    assert len(names) > 30
    unknown = {name for name in names if part_of_kernel(name) == "other"}
    assert unknown == set(FORMER_KERNELS) & names


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "gemm"),
        ("nvjet_sm90_qqtst_128x128_128x6_4x2_h_bz_ovscale_TNT", "gemm"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>", "gemm"),
        ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90", "prefill_attention"),
        ("void flash::flash_fwd_splitkv_combine_kernel", "decode_attention"),
        ("_decode", "decode_attention"),
        ("_rope_and_store", "cache"),
        ("void vllm::reshape_and_cache_flash_kernel", "cache"),
        ("void vllm::rms_norm_kernel<c10::BFloat16>", "elementwise"),
        ("triton_red_fused_add_mean_mul_pow_rsqrt_2", "elementwise"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "collectives"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("Memset (Device)", "copies"),
        ("_gumbel_sample_kernel", "sampling"),
        ("void at::native::elementwise_kernel<128, 4>", "other"),
    ],
)
def test_a_kernel_belongs_to_its_part(name: str, part: str) -> None:
    assert part_of_kernel(name) == part


def test_operations_of_a_cpu_belong_to_their_parts() -> None:
    assert part_of_range("headrace.op.add_rms_norm") == "elementwise"
    assert part_of_range("headrace.op.paged_attention.decode") == "decode_attention"
    assert part_of_range("headrace.op.rope_and_store") == "cache"
    assert part_of_range("headrace.sample") == "sampling"
    assert part_of_range("headrace.execute") is None
    assert part_of_range("another range") is None
    assert part_of_operation("mkl::_mkl_linear") == "gemm"
    assert part_of_operation("aten::addmm") == "gemm"
    assert part_of_operation("aten::index_select") is None


def test_every_part_has_a_title_and_a_colour() -> None:
    from headrace.profile.picture import COLOURS

    assert set(COLOURS) == set(TITLES)
