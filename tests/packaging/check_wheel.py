"""Check what the one wheel in a folder holds (`make wheel`): nothing missing, nothing that does not belong."""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = re.compile(
    r"quant_(spec|kernels)/([\w/]+/)?(\w+\.py|py\.typed|[\w.\-]+\.so|\w+\.schema\.json|\w+\.(h|cu|cpp))"
    r"|quant_spec/page/page\.(css|js)"
    r"|quant_spec-[\w.+]+\.dist-info/.+"
)
TAG = re.compile(r"quant_spec-[\w.+]+-cp310-abi3-\w+\.whl")


def expected() -> set[str]:
    """Names that the repository's own files must have in a wheel."""
    sources = [path for package in ("quant_spec", "quant_kernels") for path in (ROOT / package).rglob("*.py")]
    names = {path.relative_to(ROOT).as_posix() for path in sources}
    names |= {f"quant_spec/schemas/{path.name}" for path in (ROOT / "schemas").glob("*.schema.json")}
    names |= {"quant_spec/page/page.css", "quant_spec/page/page.js"}
    return names | {"quant_spec/py.typed", "quant_kernels/py.typed"}


def defects(wheel: Path) -> list[str]:
    """What is wrong with a wheel, one line a defect."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        points = [archive.read(name).decode() for name in names if name.endswith("/entry_points.txt")]
    found = [f"missing: {name}" for name in sorted(expected() - names)]
    found += [f"does not belong: {name}" for name in sorted(names) if not ALLOWED.fullmatch(name)]
    if not TAG.fullmatch(wheel.name):
        found.append(f"named {wheel.name}; one abi3 wheel is to serve CPython 3.10 and later")
    if not any(name.endswith(".so") for name in names):
        found.append("no compiled kernels (*.so)")
    if not any(name.endswith("/licenses/LICENSE") for name in names):
        found.append("no licence text")
    if not any("quant-spec = quant_kernels.cli:main" in text for text in points):
        found.append("no quant-spec command")
    return found


def main(folder: str) -> int:
    """Print the wheel's defects; return their number, or 1 if there is not exactly one wheel."""
    wheels = sorted(Path(folder).glob("*.whl"))
    if len(wheels) != 1:
        sys.stderr.write(f"{folder}: expected one wheel, found {[wheel.name for wheel in wheels]}\n")
        return 1
    found = defects(wheels[0])
    sys.stdout.write("\n".join([f"{wheels[0].name}: {len(found)} defects", *found]) + "\n")
    return len(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
