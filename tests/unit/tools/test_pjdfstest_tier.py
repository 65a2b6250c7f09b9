"""What the pjdfstest runner reads: the program's report, and the table of failures that have a reason."""

from __future__ import annotations

import pytest

from tests.tools.pjdfstest_tier import DOCUMENT, explained, judge, parse

REPORT = """\
chmod::enoent                                   ok
link::share_metadata::fifo                  FAILED
\tcalled `Result::unwrap()` on an `Err` value: EOPNOTSUPP
chown::erofs_named                         skipped
\tRemounts are not allowed

Summary: 1 failed, 1 skipped, 1 passed, 0 expected failures, 3 total
"""
TABLE = """\
| test | servers | reason |
|---|---|---|
| `link::share_metadata::fifo` | versitygw | needs a hard link |
"""


def test_a_report_is_read() -> None:
    outcome = parse("versitygw", REPORT)
    assert outcome.passed == {"chmod::enoent"}
    assert outcome.failed == {"link::share_metadata::fifo"}
    assert outcome.skipped == {"chown::erofs_named"}
    assert outcome.complete


def test_a_report_without_a_summary_is_not_complete() -> None:
    assert not parse("versitygw", REPORT.split("\nSummary")[0]).complete


def test_a_reason_counts_for_the_servers_it_names() -> None:
    assert explained(TABLE, "versitygw") == {"link::share_metadata::fifo"}
    assert explained(TABLE, "minio") == frozenset()


@pytest.mark.parametrize(("where", "good"), [("versitygw", True), ("minio", False)])
def test_only_failures_with_a_reason_are_accepted(where: str, good: bool) -> None:
    assert judge(parse(where, REPORT), explained(TABLE, where), bar=40) is good


def test_more_failures_than_the_bar_are_too_many() -> None:
    assert not judge(parse("versitygw", REPORT), explained(TABLE, "versitygw"), bar=0)


def test_every_row_of_the_document_is_understood() -> None:
    text = DOCUMENT.read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    understood = explained(text, "versitygw") | explained(text, "minio") | explained(text, "nfs")
    assert len(understood) == len(rows)
