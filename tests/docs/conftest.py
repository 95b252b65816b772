"""The fixture of tests that read pages."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader, TensorDataset

import fnaccel as fa
import fnaccel.testing
import fnaccel.track
from tests.docs.names import VALUES
from tests.tiny_models import Net, batch_of, loss_fn


@pytest.fixture(scope="module")
def things():
    """The modules and values that pages write names of."""
    with fa.start() as world:
        train_step = fa.train_step(loss_fn, model=fa.distribute(Net, "local"), optimizer=fa.sgd(0.1))
        shards = fa.shard(DataLoader(TensorDataset(*batch_of(8)), batch_size=4))
        values = (world, train_step, train_step.init(), shards, next(iter(shards)))
        yield {"fa": fa, "fnaccel": fa, **dict(zip(VALUES, values, strict=True))}
