"""Tests on a real CUDA device: `make test-gpu`. Without one they fail, since a skipped test proves nothing."""

import pytest
import torch

OF_TORCH = [
    "ignore:The CUDA Graph is empty:UserWarning",  # as torch.compile makes its pool of memory
    "ignore:TypedStorage is deprecated:UserWarning",  # as it chooses kernels
]


def pytest_collection_modifyitems(items):
    for item in items:
        for text in OF_TORCH:
            item.add_marker(pytest.mark.filterwarnings(text))


@pytest.fixture(autouse=True, scope="session")
def device():
    if not torch.cuda.is_available():
        pytest.fail("these tests need a CUDA device")
    torch.backends.cuda.matmul.allow_tf32 = False
    return torch.device("cuda", 0)
