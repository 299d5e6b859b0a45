"""The interpreter on small programs written by hand: lanes, masks, memory, barriers, and everything it must refuse."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from amdgcn import Assembly, HangError, Memory, MemoryFaultError, Options, Program, RaceError, UnsupportedError

TEMPLATE = """
	.amdgcn_target "amdgcn-amd-amdhsa--gfx950"
	.type	probe,@function
probe:
{code}
.Lfunc_end0:
	.amdhsa_kernel probe
		.amdhsa_group_segment_fixed_size {shared}
		.amdhsa_private_segment_fixed_size 8
		.amdhsa_kernarg_size 8
		.amdhsa_user_sgpr_kernarg_segment_ptr 1
		.amdhsa_system_sgpr_workgroup_id_x 1
		.amdhsa_next_free_vgpr 16
{settings}
	.end_amdhsa_kernel
"""
STORE = """
	s_load_dwordx2 s[4:5], s[0:1], 0x0
	v_lshlrev_b32_e32 v15, 2, v0
	s_waitcnt lgkmcnt(0)
	global_store_dword v15, v1, s[4:5]
	s_endpgm
"""


def assemble(code: str, shared: int = 1024, settings: str = "") -> Assembly:
    lines = "\n".join(
        f"\t{line.strip()}" if not line.strip().endswith(":") else line.strip() for line in code.splitlines()
    )
    return Assembly(TEMPLATE.format(code=lines, shared=shared, settings=settings))


def run(
    code: str, *, threads: int = 64, words: int | None = None, options: Options | None = None, shared: int = 1024
) -> np.ndarray:
    """Run one block; return the words that it wrote, one a thread."""
    out = np.zeros(threads if words is None else words, np.uint32)
    memory = Memory()
    address = memory.map("out", out.view(np.uint8), writable=True)
    program = Program(assemble(code, shared).kernel("probe"), options)
    program.run(memory, 1, threads, struct.pack("<Q", address))
    return out


LANE = np.arange(64, dtype=np.uint32)


def test_lanes_have_their_numbers() -> None:
    assert np.array_equal(run("v_mov_b32_e32 v1, v0" + STORE), LANE)
    assert np.array_equal(run("v_mov_b32_e32 v1, v0" + STORE, threads=256), np.arange(256))


def test_inactive_lanes_write_nothing() -> None:
    code = """
        v_mov_b32_e32 v1, 7
        v_cmp_gt_u32_e32 vcc, 10, v0
        s_and_saveexec_b64 s[6:7], vcc
        v_mov_b32_e32 v1, 9
        s_or_b64 exec, exec, s[6:7]
    """
    assert np.array_equal(run(code + STORE), np.where(LANE < 10, 9, 7))


def test_loops_and_counts() -> None:
    code = """
        v_mov_b32_e32 v1, 0
        s_mov_b32 s6, 5
        .LBB0_1:
        v_add_u32_e32 v1, 3, v1
        s_add_i32 s6, s6, -1
        s_cmp_lg_u32 s6, 0
        s_cbranch_scc1 .LBB0_1
    """
    memory, out = Memory(), np.zeros(64, np.uint32)
    program = Program(assemble(code + STORE).kernel("probe"))
    program.run(memory, 1, 64, struct.pack("<Q", memory.map("out", out.view(np.uint8), writable=True)))
    assert (out == 15).all()
    assert program.executed["v_add_u32"] == 5


@pytest.mark.parametrize(
    ("movement", "sources"),
    [
        ("quad_perm:[1,0,3,2]", LANE ^ 1),
        ("row_mirror", LANE // 16 * 16 + 15 - LANE % 16),
        ("row_half_mirror", LANE // 8 * 8 + 7 - LANE % 8),
        ("row_ror:4", LANE // 16 * 16 + (LANE % 16 - 4) % 16),
        ("row_newbcast:3", LANE // 16 * 16 + 3),
    ],
)
def test_moves_between_lanes(movement: str, sources: np.ndarray) -> None:
    code = f"v_mov_b32_dpp v1, v0 {movement} row_mask:0xf bank_mask:0xf"
    assert np.array_equal(run(code + STORE), sources)


def test_shifted_lanes_without_a_source_are_zero() -> None:
    code = "v_mov_b32_dpp v1, v0 row_shr:1 row_mask:0xf bank_mask:0xf bound_ctrl:1"
    assert np.array_equal(run(code + STORE), np.where(LANE % 16 == 0, 0, LANE - 1))
    with pytest.raises(UnsupportedError, match="reads from no active lane"):
        run("v_mov_b32_dpp v1, v0 row_shr:1 row_mask:0xf bank_mask:0xf" + STORE)


def test_permutation_pulls_from_active_lanes() -> None:
    code = "v_lshlrev_b32_e32 v2, 2, v0\nv_xor_b32_e32 v2, 16, v2\nds_bpermute_b32 v1, v2, v0"
    assert np.array_equal(run(code + STORE), LANE ^ 4)
    assert np.array_equal(run("ds_swizzle_b32 v1, v0 offset:0x401f" + STORE), LANE ^ 16)


def test_single_bits_of_scalars() -> None:
    code = """
        s_mov_b32 s10, 0xf0000001
        s_bitset0_b32 s10, 31
        s_bitset1_b32 s10, 36
        s_bitset1_b32 s10, 0
        v_mov_b32_e32 v1, s10
    """
    assert np.array_equal(run(code + STORE), np.full_like(LANE, 0x70000011))


def test_parts_of_words() -> None:
    assert np.array_equal(
        run("v_mov_b32_e32 v2, 0x80ff1234\nv_or_b32_sdwa v1, v2, v0 dst_sel:DWORD dst_unused:UNUSED_PAD "
            "src0_sel:WORD_1 src1_sel:BYTE_0" + STORE),
        0x80FF | LANE,
    )  # fmt: skip
    preserved = "v_mov_b32_e32 v1, 0x11223344\nv_add_u32_sdwa v1, v0, v0 dst_sel:BYTE_1 dst_unused:UNUSED_PRESERVE src0_sel:DWORD src1_sel:DWORD"  # noqa: E501
    assert np.array_equal(run(preserved + STORE), 0x11220044 | (LANE * 2 << 8))


def test_truth_table() -> None:
    code = """
        v_mov_b32_e32 v2, 0xcc
        v_mov_b32_e32 v3, 0xaa
        v_mov_b32_e32 v4, 0xf0
        v_bitop3_b32 v1, v4, v2, v3 bitop3:0x{:x}
    """
    for table in (0x10, 0xC8, 0x96, 0xE8):
        assert (run(code.format(table) + STORE) & 0xFF == table).all()


def test_packed_floats_choose_halves() -> None:
    code = """
        v_mov_b32_e32 v2, 2.0
        v_mov_b32_e32 v3, 4.0
        v_pk_mul_f32 v[4:5], v[2:3], v[2:3] op_sel:[1,0] op_sel_hi:[0,1] neg_lo:[1,0]
        v_mov_b32_e32 v1, v{}
    """
    assert (run(code.format(4) + STORE).view(np.float32) == -8).all()
    assert (run(code.format(5) + STORE).view(np.float32) == 8).all()


EXCHANGE = """
    v_lshlrev_b32_e32 v2, 2, v0
    ds_write_b32 v2, v0
    s_waitcnt lgkmcnt(0)
    s_barrier
    v_xor_b32_e32 v2, 0x100, v2
    ds_read_b32 v1, v2
    s_waitcnt lgkmcnt(0)
"""


@pytest.mark.parametrize("order", ["forward", "backward", "shuffled"])
@pytest.mark.parametrize("quantum", [None, 1, 3])
def test_waves_exchange_through_shared_memory(order: str, quantum: int | None) -> None:
    found = run(EXCHANGE + STORE, threads=128, options=Options(order=order, quantum=quantum, seed=2))
    assert np.array_equal(found, np.arange(128) ^ 64)


def test_a_missing_barrier_is_a_race() -> None:
    code = EXCHANGE.replace("s_barrier", "s_nop 0") + STORE
    with pytest.raises(RaceError, match=r"wave \d (reads|writes) shared byte"):
        run(code, threads=128, options=Options(order="backward", quantum=2))
    unseen = Options(detect_races=False)
    assert not np.array_equal(run(code, threads=128, options=unseen), np.arange(128) ^ 64)


def test_waves_that_end_do_not_hold_a_barrier() -> None:
    code = """
        v_mov_b32_e32 v1, 1
        v_readfirstlane_b32 s6, v0
        s_cmp_lt_u32 s6, 64
        s_cbranch_scc0 .LBB0_2
        s_barrier
        .LBB0_2:
    """
    assert (run(code + STORE, threads=128) == 1).all()


def test_memory_is_bounded() -> None:
    with pytest.raises(MemoryFaultError, match=r"store of 4 bytes at .* lies in no region; nearest is out"):
        run("v_mov_b32_e32 v1, v0" + STORE, words=63)
    with pytest.raises(MemoryFaultError, match="read-only"):
        run("v_mov_b32_e32 v2, 0\nglobal_store_dword v2, v0, s[0:1]\ns_endpgm")
    with pytest.raises(MemoryFaultError, match="the block has 16 bytes"):
        run("v_lshlrev_b32_e32 v2, 2, v0\nds_read_b32 v1, v2" + STORE, shared=16)
    with pytest.raises(MemoryFaultError, match="private memory of 8 bytes"):
        run("scratch_load_dword v1, off, off offset:8" + STORE)


def test_private_memory_belongs_to_a_lane() -> None:
    code = "scratch_store_dword off, v0, off offset:4\nscratch_load_dword v1, off, off offset:4"
    assert np.array_equal(run(code + STORE), LANE)


def test_atomic_operations() -> None:
    code = """
        s_load_dwordx2 s[4:5], s[0:1], 0x0
        v_mov_b32_e32 v2, 0
        v_mov_b32_e32 v3, 1
        global_atomic_add v1, v2, v3, s[4:5] sc0
        v_mov_b32_e32 v4, v0
        global_atomic_umax v2, v4, s[4:5] offset:4
        s_endpgm
    """
    assert run(code).tolist()[:2] == [64, 63]


def test_nothing_starts_as_zero() -> None:
    assert (run("v_mov_b32_e32 v1, v9" + STORE) != 0).all()
    assert (run("v_mov_b32_e32 v1, s77" + STORE) != 0).all()
    assert (run("v_mov_b32_e32 v2, 0\nds_read_b32 v1, v2" + STORE) != 0).all()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("v_exp_f32_e32 v1, v0", "unknown instruction v_exp_f32: v_exp_f32_e32 v1, v0"),
        ("v_mov_b32_e32 v1, flat_scratch_lo", "operand flat_scratch_lo"),
        ("v_mul_f32_e64 v1, v0, v0 mul:2", "modifier mul"),
        ("v_add_u32_e64 v1, -v0, v0", "sign modifier on an integer"),
        ("v_mov_b32_dpp v1, v0 row_bcast:7 row_mask:0xf bank_mask:0xf", "lane movement"),
        ("ds_ordered_count v1, v0", "unknown instruction ds_ordered_count"),
        ("s_cbranch_scc0 .LBB9_9", "unknown label"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(code: str, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        Program(assemble(code + STORE).kernel("probe"))


def test_an_unknown_instruction_is_refused_at_the_latest_when_it_is_reached() -> None:
    kernel = assemble("s_branch .LBB0_2\nv_exp_f32_e32 v1, v0\n.LBB0_2:\nv_sin_f32_e32 v1, v0" + STORE).kernel("probe")
    with pytest.raises(
        UnsupportedError, match=r"probe, line \d+, v_sin_f32_e32 v1, v0: .*unknown instruction v_sin_f32"
    ):
        Program(kernel, lazy=True).run(Memory(), 1, 64, bytes(8))


@pytest.mark.parametrize(
    "setting", ["amdhsa_float_denorm_mode_32 0", "amdhsa_float_round_mode_32 3", "amdhsa_fp16_overflow 1"]
)
def test_modes_that_change_arithmetic_are_refused(setting: str) -> None:
    kernel = assemble(STORE, settings=f"\t\t.{setting}").kernel("probe")
    with pytest.raises(UnsupportedError, match=setting.split(maxsplit=1)[0]):
        Program(kernel)


def test_an_endless_loop_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amdgcn.machine.INSTRUCTION_LIMIT", 1000)
    with pytest.raises(HangError, match="wave 0 executed 1000 instructions"):
        run(".LBB0_1:\ns_branch .LBB0_1" + STORE)
