"""The linear product's kernels for GPUs without tensor cores of NVIDIA's kind, run on the host. Needs g++ alone."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
import torch

import quant_kernels as qk
from quant_kernels import activations

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
FLAGS = ("-std=c++20", "-DQK_EMULATE", "-O1", "-ffp-contract=off", "-w", "-pthread", "-shared", "-fPIC")
FORMATS = {"ptpc_fp8": 0, "mxfp8": 1, "mxfp4": 2}  # enum WeightFormat of csrc/linear.h
ACTIVATIONS = {"": 0, activations.PER_TOKEN: 1, activations.MXFP8: 2, activations.MXFP4: 3}  # enum Activation
ELEMENTS = {torch.float16: 1, torch.bfloat16: 2}  # enum Element of csrc/job.h


class LinearJob(ctypes.Structure):
    """`LinearJob` of csrc/linear.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "w", "scale", "bias", "y")),
        *((name, ctypes.c_int64) for name in ("x_stride", "w_stride", "scale_stride", "n", "k")),
        *((name, ctypes.c_int32) for name in ("m", "element", "format", "activation")),
        *((name, ctypes.c_int32) for name in ("row_groups", "splits", "chunks")),
        *((name, ctypes.c_void_p) for name in ("ready_x", "factors")),
    )


@pytest.fixture(scope="module")
def kernels(root: Path, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    csrc, here = root / "quant_kernels" / "csrc", root / "tests" / "kernels" / "emulate"
    path = tmp_path_factory.mktemp("linear") / "linear.so"
    sources = (str(here / "linear.cpp"), "-x", "c++", str(csrc / "linear.cu"))
    subprocess.run(["g++", *FLAGS, f"-I{csrc}", f"-I{here}", *sources, "-o", str(path)], check=True)
    library = ctypes.CDLL(str(path))
    library.qk_test_linear.restype = ctypes.c_char_p
    return library


def product(
    kernels: ctypes.CDLL, x: torch.Tensor, q: qk.QuantizedTensor, name: str, word: str, bias: torch.Tensor
) -> torch.Tensor:
    n, k = q.shape
    y = torch.full((x.shape[0], n), torch.nan, dtype=x.dtype)
    job = LinearJob(
        x.data_ptr(), q.data.data_ptr(), q.scale.data_ptr(), bias.data_ptr(), y.data_ptr(),
        x.stride(0), q.data.stride(0), q.scale.stride(0), n, k,
        x.shape[0], ELEMENTS[x.dtype], FORMATS[name], ACTIVATIONS[word],
    )  # fmt: skip
    assert kernels.qk_test_linear(ctypes.byref(job)) is None
    return y


@pytest.mark.parametrize("dtype", ELEMENTS, ids=str)
@pytest.mark.parametrize("word", ACTIVATIONS)
@pytest.mark.parametrize("name", FORMATS)
def test_within_the_bound(kernels: ctypes.CDLL, name: str, word: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for m, n, k in ((1, 9, 1120), (8, 5, 96), (3, 17, 2144)):
        q = qk.quantize(torch.randn(n, k, generator=generator), name)
        # Rows of very different size: each has its own factor.
        x = (torch.randn(m, k, generator=generator) * 2.0 ** torch.arange(-6, m - 6)[:, None]).to(dtype)
        bias = torch.randn(n, generator=generator).to(dtype)
        found = product(kernels, x, q, name, word, bias).double()
        rounded = activations.round_activation(x.float(), word).double()
        weight = qk.dequantize(q, torch.float32).double()
        wanted = rounded @ weight.T + bias.double()
        unit = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype]
        bound = unit * wanted.abs() + (k + 8) * 2.0**-24 * (rounded.abs() @ weight.abs().T) + 1e-30
        assert ((found - wanted).abs() <= 1.01 * bound).all()


@pytest.mark.parametrize("name", FORMATS)
def test_special_values(kernels: ctypes.CDLL, name: str) -> None:
    """NaN in a weight's row or a token reaches their results alone; zeros stay zeros; great values do not overflow."""
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    weight[2, 5] = torch.nan
    q = qk.quantize(weight, name)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    x[1, 7], x[2], x[3] = torch.nan, 0.0, 2.0**100
    y = product(kernels, x, q, name, "", torch.zeros(6).bfloat16())
    nan = y.isnan()
    assert nan[:, 2].all()
    assert nan[1].all()
    others = [0, 1, 3, 4, 5]
    assert (y[2, others] == 0).all()
    assert y[0, others].isfinite().all()
    wanted = x[3].double() @ qk.dequantize(q, torch.float32).double().T
    torch.testing.assert_close(y[3, others].double(), wanted[others], rtol=2.0**-8, atol=0)
