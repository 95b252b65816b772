"""Tests on a real CUDA device: `make test-gpu`. Without one they fail, since a skipped test proves nothing."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def device():
    if not torch.cuda.is_available():
        pytest.fail("these tests need a CUDA device")
    torch.backends.cuda.matmul.allow_tf32 = False
    return torch.device("cuda", 0)
