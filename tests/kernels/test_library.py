"""The compiled library: what it asks of torch, its builds for several instruction sets, and what happens without it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from quant_kernels.library import library_path

needs_library = pytest.mark.skipif(library_path() is None, reason="the library was not built")

# Entries of torch's stable ABI that came after 2.10, the oldest version that the library promises to load under.
NEWER = (
    r"torch_dtype_float8_e8m0fnu|torch_dtype_float4_e2m1fn_x2|torch_from_blob|torch_tag_|torch_library_def_with_tags"
    r"|torch_exception_|torch_new_stable_ivalue|torch_stream_native_handle|aoti_torch_get_current_cuda_stream"
)


@needs_library
@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_only_the_old_stable_abi_is_asked_for() -> None:
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", str(library_path())], check=True, capture_output=True, text=True
    )
    wanted = [line.split()[-1] for line in listed.stdout.splitlines()]
    torch_entries = [name for name in wanted if re.match(r"(aoti_)?torch_", name)]
    assert torch_entries, "a library without torch's entries registers nothing"
    assert not [name for name in torch_entries if re.match(NEWER, name)]
    assert not [name for name in wanted if name.startswith(("_ZN2at", "_ZN3c10", "_ZN5torch", "_ZNK2at", "_ZNK3c10"))]
    assert not [name for name in wanted if name.startswith("Py") and name != "PyModule_Create2"]


CODE = """
import json, torch, quant_kernels as qk
from quant_kernels.library import cpu_isa
g = torch.Generator().manual_seed(0)
words = torch.randint(-2**31, 2**31, (64, 512), generator=g, dtype=torch.int64).to(torch.int32)
found = {}
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    w = torch.where(words.view(torch.float32).isfinite(), words.view(torch.float32), 0).to(dtype)
    for name in ("ptpc_fp8", "mxfp4", "mxfp8", "per_block_fp8", "nvfp4"):
        q = qk.quantize(w, name)
        r = qk.requantize(q.data, q.scale, source=q.key, target="mxfp4", second_scale=q.second_scale)
        d = qk.dequantize(q, dtype).nan_to_num(7)
        parts = [p.contiguous().view(torch.uint8).flatten().tolist() for p in (q.data, q.scale, r.data, d)]
        found[f"{dtype} {name}"] = [hash(bytes(part)) for part in parts]
print(json.dumps([cpu_isa(), found]))
"""


def run_with(**environment: str) -> tuple[str, object, str]:
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": "0", **environment},
    )
    isa, found = json.loads(done.stdout.splitlines()[-1])
    return isa, found, done.stderr


@needs_library
def test_every_instruction_set_gives_the_same_bytes() -> None:
    _, wanted, said = run_with(QUANT_KERNELS_BACKEND="reference")
    assert said.count("plain torch") <= 1
    for limit in ("baseline", "avx2", "avx512"):
        isa, found, _ = run_with(QUANT_KERNELS_CPU_ISA=limit)
        assert isa in {"baseline", "avx2", "avx512"}
        assert found == wanted, isa


def test_without_the_library_the_log_says_so_once(tmp_path: object) -> None:
    code = """
import logging, pathlib, quant_kernels.library as library
logging.basicConfig()
library.library_path = lambda: None
import torch, quant_kernels as qk
for _ in range(3):
    qk.quantize(torch.ones(4, 32), "mxfp4")
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=str(tmp_path))
    assert done.stderr.count("no compiled library") == 1


def test_a_library_that_cannot_be_loaded_is_reported() -> None:
    code = """
import logging, pathlib, tempfile, quant_kernels.library as library
logging.basicConfig()
broken = pathlib.Path(tempfile.mkdtemp()) / "_C.abi3.so"
broken.write_bytes(b"no library")
library.library_path = lambda: broken
import torch, quant_kernels as qk
print(qk.quantize(torch.ones(4, 32), "mxfp4").data.shape)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stderr.count("cannot be loaded") == 1
    assert "[4, 16]" in done.stdout


def test_self_test_passes() -> None:
    from quant_kernels import selftest

    report = selftest.run("cpu")
    assert report.passed, report.verdict
    assert sum(each.compared for each in report.comparisons) > 1e8
    assert "all" in report.verdict


def test_self_test_sees_a_wrong_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    from quant_kernels import selftest

    original = selftest.dequantize
    calls = []

    def wrong(*arguments: object, **options: object) -> object:
        calls.append(1)
        found = original(*arguments, **options)
        return found + 1 if len(calls) % 2 else found

    monkeypatch.setattr(selftest, "dequantize", wrong)
    monkeypatch.setattr(selftest, "_quantizers", lambda: iter(()))
    report = selftest.run("cpu")
    assert not report.passed
    assert "DIFFERS" in report.verdict
    assert any(each.examples for each in report.comparisons)
