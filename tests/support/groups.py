"""Which tests of a parallel run go to one process, by their node ids: the files, but for those that share a server."""

from __future__ import annotations

import re

GROUPS = {
    "radosgw": re.compile(r"radosgw|s3/test_ceph|_on_ceph\.py|TestAppendOnlyHeads", re.IGNORECASE),
    "processes": re.compile(
        r"proofs/test_kill|provider/test_real_engine|s3/test_command_line|server/test_command_line", re.IGNORECASE
    ),
}
"""A test that is not listed starts what it needs once more: slower, and as right."""


def group_of(nodeid: str) -> str:
    """The name of a group, or the file."""
    return next((name for name, tests in GROUPS.items() if tests.search(nodeid)), nodeid.partition("::")[0])
