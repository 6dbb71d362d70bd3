"""What is looked at before a start, by itself. The faults that it finds are in tests/faults."""

from __future__ import annotations

import os

import pytest

from eagle3lib import preflight


def test_secrets_do_not_reach_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789abcdef")
    monkeypatch.setenv("SGLANG_HS_DUMP_DIR", "/somewhere")
    environment = preflight.engine_environment({})
    assert "HF_TOKEN" not in environment and "SGLANG_HS_DUMP_DIR" not in environment
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(preflight.PLUGIN_DIR)
