"""The document, the table and the suite are one."""

from __future__ import annotations

import table


def test_the_document_is_the_table() -> None:
    assert table.DOCUMENT.read_text() == table.render(), "python tests/faults/table.py writes docs/faults.md anew"


def test_there_are_at_least_25_faults_and_each_has_a_test_of_its_own() -> None:
    import test_fault_before
    import test_fault_capture
    import test_fault_server

    assert sum(len(faults) for _, _, faults in table.PARTS) >= 25
    assert set(test_fault_before.DO) == set(table.BEFORE)
    assert set(test_fault_server.TESTED) == set(table.SERVER)
    assert set(test_fault_capture.TESTED) == set(table.CAPTURE) | set(table.PLUGIN)
