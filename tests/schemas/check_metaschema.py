"""Checks that the files in `schemas/` are valid JSON schemas and those that the code renders; `--write` renders them.

Run by continuous integration, and by hand after a format or a document class has changed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError

from quant_spec.schema import DRAFT, FILES, render_files

FOLDER = Path(__file__).resolve().parents[2] / "schemas"


def problems(folder: Path = FOLDER) -> list[str]:
    """What is wrong with the schema files."""
    found = [f"{path}: missing" for path in (folder / f"{kind}.schema.json" for kind in FILES) if not path.exists()]
    for path in sorted(folder.glob("*.schema.json")):
        schema = json.loads(path.read_text("utf-8"))
        if schema.get("$schema") != DRAFT:
            found.append(f"{path}: $schema is not {DRAFT}")
        try:
            Draft202012Validator.check_schema(schema)
        except SchemaError as error:
            found.append(f"{path}: {error.message}")
    for name, text in render_files().items():
        path = folder / name
        if path.exists() and path.read_text("utf-8") != text:
            found.append(f"{path}: not what the code renders; run tests/schemas/check_metaschema.py --write")
    return found


def main() -> int:
    if "--write" in sys.argv[1:]:
        for name, text in render_files().items():
            (FOLDER / name).write_text(text, "utf-8")
    found = problems()
    sys.stdout.write("".join(f"{line}\n" for line in found) or "schemas: valid and up to date\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
