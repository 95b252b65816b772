"""Data: how a loader is shared between ranks, and the position that a run has in it.

`shard` describes, `open_epoch` reads. Index arithmetic is in `fnaccel.data.order`.
"""

from typing import TYPE_CHECKING

from fnaccel import _lazy
from fnaccel.data.batch import Batch as Batch
from fnaccel.data.batch import Window as Window
from fnaccel.data.cut import Rows as Rows
from fnaccel.data.cut import Shared as Shared
from fnaccel.data.cut import cut as cut
from fnaccel.data.cut import join as join
from fnaccel.data.cut import register_batch as register_batch
from fnaccel.data.cut import rows_of as rows_of
from fnaccel.data.cut import split_sizes as split_sizes
from fnaccel.data.lengths import steps_per_epoch as steps_per_epoch
from fnaccel.data.loaders import Grouped as Grouped
from fnaccel.data.loaders import Indexed as Indexed
from fnaccel.data.loaders import Stream as Stream
from fnaccel.data.loaders import classify as classify
from fnaccel.data.loaders import reader as reader
from fnaccel.data.seeding import set_seed as set_seed
from fnaccel.data.shard import Shards as Shards
from fnaccel.data.shard import in_windows as in_windows
from fnaccel.data.shard import open_epoch as open_epoch
from fnaccel.data.shard import open_on as open_on
from fnaccel.data.shard import shard as shard

if TYPE_CHECKING:
    from fnaccel.data.mixing import mix as mix
else:  # a copy of fnaccel may lack it
    __getattr__, __dir__, __all__ = _lazy.attach(__name__, {"fnaccel.data.mixing": "mix"})
