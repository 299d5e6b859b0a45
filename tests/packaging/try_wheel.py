"""Install the one wheel of a folder into an environment of its own and use it there (`make wheel`).

The environment sees this one's third-party packages through a path file, so that nothing is downloaded; the checkout
and its editable install are out of its sight.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SMOKE = """
import sys
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

import torch
from safetensors.torch import save_file

import quant_kernels
import quant_spec
from quant_kernels.library import native_on

for package in (quant_spec, quant_kernels):
    assert Path(package.__file__).is_relative_to(sys.prefix), package.__file__
assert quant_spec.__version__ == version("quant-spec")
assert any(entry.name == "online.schema.json" for entry in files("quant_spec.schemas").iterdir())
assert native_on("cpu"), "the wheel's compiled library does not load"
weight = torch.randn(64, 64).bfloat16()
for name in ("ptpc_fp8", "mxfp4"):
    quantized = quant_kernels.quantize(weight, name)
    assert quant_kernels.dequantize(quantized, torch.bfloat16).shape == weight.shape
Path("model").mkdir()
Path("model/config.json").write_text("{}")
save_file({"model.layers.0.mlp.up_proj.weight": weight}, "model/model.safetensors")
"""


def environment(folder: Path, wheel: Path) -> Path:
    """Make the environment with the wheel in it; return its folder of programs."""
    venv.create(folder, with_pip=False, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    command = [sys.executable, "-m", "pip", "--quiet", "--quiet", "install", "--no-deps", "--target", str(site)]
    subprocess.run([*command, str(wheel)], check=True)
    (site / "packages.pth").write_text(f"{sysconfig.get_path('purelib')}\n", "utf-8")
    return folder / "bin"


def main(dist: str) -> int:
    """Use the wheel from Python, from the command line and by the tests of `quant_spec`; return the exit status."""
    wheels = sorted(Path(dist).resolve().glob("*.whl"))
    if len(wheels) != 1:
        sys.stderr.write(f"{dist}: expected one wheel, found {[wheel.name for wheel in wheels]}\n")
        return 1
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        bin_folder = environment(scratch / "env", wheels[0])
        work = scratch / "work"
        # The tests and what they read, but neither package: no import can come from the checkout.
        for folder in ("tests", "docs", "schemas"):
            shutil.copytree(ROOT / folder, work / folder, ignore=shutil.ignore_patterns("_build", "__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", work)
        python = str(bin_folder / "python")
        quantize = ["-m", "quant_kernels.cli", "quantize", "model", "--online-quant-config"]
        quantize += ['{"global_quant_config": "mxfp4"}', "--output", "out", "--report-dir", "."]
        for arguments in (["-c", SMOKE], quantize, ["-m", "pytest", "-q", "tests/spec"]):
            # -P keeps the current folder off the module path.
            status = subprocess.run([python, "-P", *arguments], cwd=work, check=False, env=clean()).returncode
            if status:
                return status
    sys.stdout.write(f"{wheels[0].name}: used from a clean environment\n")
    return 0


def clean() -> dict[str, str]:
    """The process's environment without what could lead Python back to the checkout."""
    return {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "PYTHONHOME"}}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
