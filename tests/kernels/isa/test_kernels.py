"""The compiled kernels for AMD GPUs, interpreted: the same bits as plain torch, under the launchers' own host code."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from amdgcn import Instruction, MemoryFaultError, Options, RaceError
from interpreted import InterpretedGpu
from toolchain import Variant

import quant_kernels as qk
from quant_kernels.checks import NonFiniteError
from quant_kernels.library import reference_backend
from quant_spec import get_format

GFX942, GFX950 = Variant("gfx942", software=False), Variant("gfx950", software=False)
SOFTWARE = Variant("gfx950", software=True)
GPUS = [pytest.param(variant, id=str(variant)) for variant in (GFX942, GFX950)]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FORMATS = ("ptpc_fp8", "mxfp4", "mxfp8", "per_block_fp8", "nvfp4")
E4M3, E2M1 = "v_cvt_pk_fp8_f32", "v_cvt_scalef32_pk_fp4_f32"
# Every run of the suite disturbs the kernels another way.
SHUFFLED = Options(order="shuffled", seed=1)


@functools.cache
def gpu_of(variant: Variant, options: Options = SHUFFLED) -> InterpretedGpu:
    """A GPU whose compiled programs are kept for all tests."""
    return InterpretedGpu(variant, options)


Same = Callable[[object, object], None]


def both(gpu: InterpretedGpu, same: Same, function: Callable[..., object], *arguments: object, **named: object) -> None:
    """Assert that a call gives the same bits on the GPU and in plain torch."""
    with reference_backend():
        wanted = function(*arguments, **named)
    before = gpu.launched.total()
    with gpu.installed():
        found = function(*arguments, **named)
    assert gpu.launched.total() > before, "nothing was launched"
    same(found, wanted)


def odd_values(dtype: torch.dtype, count: int) -> torch.Tensor:
    """Values of every exponent, subnormals, both zeros, infinities and NaN."""
    generator = torch.Generator().manual_seed(0)
    word = torch.int32 if dtype is torch.float32 else torch.int16
    limits = torch.iinfo(word)
    bits = torch.randint(limits.min, limits.max + 1, (count,), generator=generator, dtype=torch.int64)
    bits[:2] = torch.tensor([0, limits.min])
    return bits.to(word).view(dtype)


@functools.cache
def weights(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Weights for every shape of kernel and every way to address one."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    odd = odd_values(dtype, 2048)
    finite = torch.where(odd.isfinite(), odd, 0).to(dtype)
    ordinary = normal(5, 256)
    ordinary[2], ordinary[3] = 0.0, -0.0
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0], dtype=dtype)
    return {
        "ordinary": ordinary,
        "odd": odd.view(8, 256),
        "finite": finite.view(4, 512),
        "ties": torch.cat([ties, -ties, ties / 2, -ties * 2]).repeat(2, 3),
        "stack": normal(2, 33, 64),
        "K = 1024": normal(1, 1024),
        "ragged": normal(3, 141),
        "unaligned": normal(4 * 65 + 1)[1:].view(4, 65)[:, :64],
        "transposed": normal(64, 3).t(),
        "expanded": normal(1, 32).expand(3, 32),
    }


@pytest.mark.parametrize("variant", GPUS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", list(weights(torch.bfloat16)))
def test_quantize(variant: Variant, dtype: torch.dtype, name: str, same: Same) -> None:
    weight = weights(dtype)[name]
    gpu = gpu_of(variant)
    for format_name in FORMATS:
        if get_format(format_name).check_k(weight.shape[-1]):
            both(gpu, same, qk.quantize, weight, format_name)


@pytest.mark.parametrize("variant", [*GPUS, pytest.param(SOFTWARE, id=str(SOFTWARE))])
@pytest.mark.parametrize("format_name", ["mxfp4", "mxfp8"])
def test_scale_roundings(variant: Variant, format_name: str, same: Same) -> None:
    for name in ("odd", "finite", "ties"):
        for rounding in get_format(format_name).scale_roundings:
            weight = weights(torch.bfloat16)[name]
            both(gpu_of(variant), same, qk.quantize, weight, format_name, scale_rounding=rounding)


@pytest.mark.parametrize("variant", GPUS)
def test_rows_of_every_length(variant: Variant, same: Same) -> None:
    """Every shape of a block: from 8 lanes a row to 256, held in registers or read twice."""
    generator = torch.Generator().manual_seed(10)
    gpu = InterpretedGpu(variant, SHUFFLED)
    for k in (256, 1024, 2048, 4096, 8192, 16384, 16640):
        weight = torch.randn(1, k, generator=generator).to(torch.bfloat16)
        both(gpu, same, qk.quantize, weight, "ptpc_fp8")
    assert len(gpu.launched) == 7


@pytest.mark.parametrize("variant", GPUS)
@pytest.mark.parametrize("name", ["ordinary", "odd", "ragged"])
def test_fnuz(variant: Variant, name: str, same: Same) -> None:
    weight = weights(torch.bfloat16)[name]
    both(gpu_of(variant), same, qk.quantize, weight, "ptpc_fp8", fnuz=True)


@pytest.mark.parametrize("variant", GPUS)
@pytest.mark.parametrize("format_name", FORMATS)
def test_dequantize(variant: Variant, format_name: str, same: Same) -> None:
    for name in ("finite", "ordinary"):
        with reference_backend():
            quantized = qk.quantize(weights(torch.bfloat16)[name], format_name)
        for dtype in DTYPES:
            both(gpu_of(variant), same, qk.dequantize, quantized, dtype)


def fp8_sources() -> dict[str, dict[str, object]]:
    """Arguments of `requantize` for FP8 sources."""
    generator = torch.Generator().manual_seed(2)
    codes = torch.arange(256, dtype=torch.uint8).repeat(40 * 160 // 256)
    codes = codes[torch.randperm(codes.numel(), generator=generator)].view(40, 160).view(torch.float8_e4m3fn)

    def scales(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator) + 0.01

    powers = torch.randint(100, 140, (1, 2), generator=generator, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    return {
        "per tensor": {"data": codes, "scale": scales(1), "source": "fp8_e4m3/per_tensor"},
        "per shard": {
            "data": codes,
            "scale": scales(3),
            "source": "fp8_e4m3/per_tensor",
            "shard_rows": (10, 10, 20),
        },
        "per channel": {"data": codes, "scale": scales(40, 1), "source": "fp8_e4m3/per_channel"},
        "blocks": {"data": codes, "scale": scales(1, 2), "source": "fp8_e4m3/block_128x128"},
        "powers of two": {"data": codes, "scale": powers, "source": "fp8_e4m3/block_128x128"},
        "1 x 128": {"data": codes, "scale": scales(40, 2), "source": "fp8_e4m3/block_1x128"},
        "off the grid": {
            "data": codes,
            "scale": scales(1, 3),
            "source": "fp8_e4m3/block_128x128",
            "offset": (50, 100),
        },
    }


@pytest.mark.parametrize("variant", GPUS)
@pytest.mark.parametrize("name", list(fp8_sources()))
def test_requantize_fp8(variant: Variant, name: str, same: Same) -> None:
    for target in ("ptpc_fp8", "mxfp4", "mxfp8", "per_block_fp8"):
        both(gpu_of(variant), same, qk.requantize, **fp8_sources()[name], target=target)


@pytest.mark.parametrize("variant", GPUS)
@pytest.mark.parametrize("source", ["mxfp4", "mxfp8", "nvfp4"])
def test_requantize_groups(variant: Variant, source: str, same: Same) -> None:
    with reference_backend():
        q = qk.quantize(weights(torch.bfloat16)["ordinary"], source)
    for target in ("ptpc_fp8", "mxfp4", "mxfp8", "per_block_fp8"):
        both(
            gpu_of(variant),
            same,
            qk.requantize,
            q.data,
            q.scale,
            source=q.key,
            second_scale=q.second_scale,
            target=target,
        )


@pytest.mark.parametrize("variant", GPUS)
def test_amax(variant: Variant, same: Same) -> None:
    for name in ("stack", "odd", "unaligned"):
        for granularity in ("row", "1x16", "1x32", "128x128", "tensor"):
            both(gpu_of(variant), same, qk.amax, weights(torch.bfloat16)[name], granularity)


@pytest.mark.parametrize("variant", GPUS)
@pytest.mark.parametrize("format_name", FORMATS)
def test_cdna_order(variant: Variant, format_name: str, same: Same) -> None:
    weight = torch.randn(32, 128, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    both(gpu_of(variant), same, qk.quantize, weight, format_name, layout="cdna")


@pytest.mark.parametrize("variant", GPUS)
@pytest.mark.parametrize("format_name", FORMATS)
def test_error_sums(variant: Variant, format_name: str) -> None:
    weight = weights(torch.bfloat16)["ordinary"]
    with reference_backend():
        wanted = qk.quantize(weight, format_name, measure=True)
    with gpu_of(variant).installed():
        found = qk.quantize(weight, format_name, measure=True)
    assert found.sqnr_db == pytest.approx(wanted.sqnr_db, abs=1e-3)


@pytest.mark.parametrize("variant", GPUS)
@pytest.mark.parametrize("format_name", FORMATS)
def test_checked_mode_names_the_bad_rows(variant: Variant, format_name: str) -> None:
    weight = torch.ones(9, 128, dtype=torch.bfloat16)
    weight[4, 100], weight[7, 3] = torch.nan, torch.inf
    with gpu_of(variant).installed(), pytest.raises(NonFiniteError, match=r"first bad rows: 4"):
        qk.quantize(weight, format_name, check=True)


@pytest.mark.parametrize("variant", GPUS)
def test_work_list(variant: Variant, same: Same) -> None:
    generator = torch.Generator().manual_seed(4)
    listed = [torch.randn(n, 64, generator=generator).to(torch.bfloat16) for n in range(1, 13)]
    for format_name in ("ptpc_fp8", "mxfp4", "per_block_fp8"):
        gpu = gpu_of(variant)
        with reference_backend():
            wanted = qk.quantize_many(listed, format_name)
        with gpu.installed():
            found = qk.quantize_many(listed, format_name)
        for first, second in zip(found, wanted, strict=True):
            same(first, second)


HARD = [
    Options(order="backward", quantum=7, seed=5),
    Options(order="shuffled", quantum=40, seed=6, reciprocal_error=-1),
    Options(order="forward", seed=7, reciprocal_error=1),
]


@pytest.mark.parametrize("options", HARD, ids=["backward", "interleaved", "forward"])
@pytest.mark.parametrize("variant", GPUS)
def test_order_of_waves_and_reciprocals_do_not_show(variant: Variant, options: Options, same: Same) -> None:
    gpu = InterpretedGpu(variant, options)
    generator = torch.Generator().manual_seed(8)
    wide = torch.randn(1, 4096, generator=generator).to(torch.bfloat16)
    both(gpu, same, qk.quantize, wide, "ptpc_fp8")
    both(gpu, same, qk.quantize, weights(torch.bfloat16)["ordinary"], "per_block_fp8")
    both(gpu, same, qk.quantize, weights(torch.float32)["finite"], "nvfp4")
    assert gpu.executed["s_barrier"] > 0
    assert gpu.executed["v_rcp_f32"] > 0


def test_hardware_conversions_are_what_runs(same: Same) -> None:
    weight = weights(torch.bfloat16)["ordinary"]
    for variant, call, instruction in (
        (GFX950, {"format": "ptpc_fp8"}, E4M3),
        (GFX950, {"format": "mxfp8"}, E4M3),
        (GFX950, {"format": "mxfp4"}, E2M1),
        (GFX942, {"format": "ptpc_fp8", "fnuz": True}, E4M3),
    ):
        gpu = InterpretedGpu(variant)
        both(gpu, same, qk.quantize, weight, **call)
        assert gpu.executed[instruction] > 0, (variant, instruction)
    gpu = InterpretedGpu(SOFTWARE)
    both(gpu, same, qk.quantize, weight, "mxfp4")
    assert gpu.executed[E2M1] == 0


# ---- the tests' own sharpness ----------------------------------------------------------------------------------------


def without_barrier(instruction: Instruction) -> Instruction:
    if instruction.name != "s_barrier":
        return instruction
    return Instruction("s_nop", "", ("0",), {}, instruction.line, "s_nop 0")


def test_a_removed_barrier_is_seen() -> None:
    weight = torch.randn(2, 4096, generator=torch.Generator().manual_seed(9)).to(torch.bfloat16)
    gpu = InterpretedGpu(GFX950, Options(order="backward"), edit=without_barrier)
    with gpu.installed(), pytest.raises(RaceError, match=r"rows_kernel.*shared byte \d+, touched by"):
        qk.quantize(weight, "ptpc_fp8")
    with reference_backend():
        wanted = qk.quantize(weight, "ptpc_fp8")
    gpu = InterpretedGpu(GFX950, Options(order="backward", detect_races=False), edit=without_barrier)
    with gpu.installed():
        found = qk.quantize(weight, "ptpc_fp8")
    assert not torch.equal(found.data.view(torch.uint8), wanted.data.view(torch.uint8))


def test_a_store_past_the_end_is_seen() -> None:
    def further(instruction: Instruction) -> Instruction:
        if instruction.name != "global_store_dwordx2":
            return instruction
        moved = {**instruction.modifiers, "offset": str(int(instruction.modifiers.get("offset", "0")) + 64)}
        return Instruction(instruction.name, "", instruction.operands, moved, instruction.line, instruction.text)

    gpu = InterpretedGpu(GFX950, edit=further)
    with gpu.installed(), pytest.raises(MemoryFaultError, match=r"store of 8 bytes at 0x\w+ .* lies in no region"):
        qk.quantize(weights(torch.bfloat16)["ordinary"], "ptpc_fp8")


@pytest.mark.parametrize("name", ["v_med3_f32", "v_max_u32", "ds_bpermute_b32"])
def test_a_lost_instruction_is_seen(name: str) -> None:
    """Replace all instructions of a name by a move of their last vector source."""

    def lost(instruction: Instruction) -> Instruction:
        if instruction.name != name:
            return instruction
        operands = (instruction.operands[0], instruction.operands[-1 if name == "ds_bpermute_b32" else 1])
        return Instruction("v_mov_b32", "_e32", operands, {}, instruction.line, f"v_mov_b32_e32 {', '.join(operands)}")

    weight = weights(torch.bfloat16)["ordinary"]
    # Given maxima below the values: codes saturate.
    call = functools.partial(
        qk.quantize, weight, "ptpc_fp8", amax=torch.full((5, 1), 0.5) if name == "v_med3_f32" else None
    )
    with reference_backend():
        wanted = call()
    with InterpretedGpu(GFX950, edit=lost).installed():
        found = call()
    assert not torch.equal(found.data.view(torch.uint8), wanted.data.view(torch.uint8))
