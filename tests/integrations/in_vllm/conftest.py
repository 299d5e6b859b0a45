"""These tests run inside vLLM's own environment, by `make test-vllm`; elsewhere they are not collected."""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
