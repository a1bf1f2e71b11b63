"""What every test may use."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def shared_schemas() -> Path:
    """The official JSON Schemas and example messages, where this checkout stands beside them."""
    folder = HERE.parent.parent / "shared" / "spec"
    if not (folder / "schema").is_dir():
        pytest.skip("the official schemas are not beside this checkout")
    return folder
