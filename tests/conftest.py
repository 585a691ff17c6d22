"""What all tests share."""

import re
from typing import Any

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Takes memory addresses out of test ids: pytest-xdist needs the same ids in all processes."""
    parametrize = metafunc.parametrize

    def parametrize_without_addresses(*args, ids: Any = None, **kwargs) -> None:
        def name_of(value: Any) -> Any:
            name = ids(value)
            return re.sub(r" at 0x[0-9a-f]+", "", name) if isinstance(name, str) else name

        parametrize(*args, ids=name_of if callable(ids) else ids, **kwargs)

    metafunc.parametrize = parametrize_without_addresses
