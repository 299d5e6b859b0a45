"""Check every schema of the repository against the metaschema that it names (a CI step)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from jsonschema import SchemaError
from jsonschema.validators import validator_for

SCHEMAS = Path(__file__).resolve().parents[2] / "schemas"


def main() -> int:
    """Print one line a schema; return 1 when any is invalid or there is none at all."""
    paths = sorted(SCHEMAS.glob("*.schema.json"))
    wrong = not paths
    for path in paths:
        schema = json.loads(path.read_text("utf-8"))
        # No default: a schema that names no draft, or an unknown one, is refused.
        validator = validator_for(schema, default=None)
        try:
            if validator is None:
                message = f"unknown $schema: {schema.get('$schema')!r}"
            else:
                validator.check_schema(schema)
                message = "valid"
        except SchemaError as error:
            message = f"invalid at {error.json_path}: {error.message}"
        wrong |= message != "valid"
        sys.stdout.write(f"{path.name}: {message}\n")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
