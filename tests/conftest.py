"""Every test runs in float32 unless it asks for float64."""

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

CACHE = Path(__file__).parent.parent / ".pytest_cache" / "jax"


@pytest.fixture(scope="session", autouse=True)
def _compilation_cache() -> None:
    jax.config.update("jax_compilation_cache_dir", str(CACHE))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


@pytest.fixture
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield
