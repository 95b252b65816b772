"""The kit for tests of training code: rank pools, a raw-PyTorch oracle, counters, tolerances.

It is imported when it is first used. Nothing in the library depends on it.
"""

from fnaccel.testing.counting import CollectiveCounter as CollectiveCounter
from fnaccel.testing.counting import CollectiveCounts as CollectiveCounts
from fnaccel.testing.counting import count_collectives as count_collectives
from fnaccel.testing.oracle import OracleResult as OracleResult
from fnaccel.testing.oracle import oracle_run as oracle_run
from fnaccel.testing.pool import RankPool as RankPool
from fnaccel.testing.pool import RankPools as RankPools
from fnaccel.testing.tolerances import TOLERANCES as TOLERANCES
from fnaccel.testing.tolerances import Tolerance as Tolerance
from fnaccel.testing.tolerances import assert_close as assert_close
from fnaccel.testing.tolerances import differences as differences
from fnaccel.testing.tolerances import tolerance as tolerance
