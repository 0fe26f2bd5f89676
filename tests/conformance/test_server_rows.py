"""Tests the rows of parameter servers."""

from tests.conformance.row_checks import row_checks
from tests.conformance.rows import ROWS

TestServerRows = row_checks([row for row in ROWS if row.servers is not None])
