"""What all tests share."""

import re

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    """Takes memory addresses out of test ids: pytest-xdist needs the same ids in all processes."""
    item._nodeid = re.sub(r" at 0x[0-9a-f]+", "", item.nodeid)
