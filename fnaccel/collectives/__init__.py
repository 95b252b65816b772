"""Collectives over pytrees: one call, a few flat buffers, and no hang when ranks disagree.

Every function takes `over=` (a mesh axis or a process group, by default the whole world) and `world=`.
"""

from fnaccel.collectives.broadcasting import broadcast as broadcast
from fnaccel.collectives.gathering import gather as gather
from fnaccel.collectives.objects import broadcast_objects as broadcast_objects
from fnaccel.collectives.objects import gather_objects as gather_objects
from fnaccel.collectives.padding import concatenate as concatenate
from fnaccel.collectives.padding import pad_across_processes as pad_across_processes
from fnaccel.collectives.reduction import any_process as any_process
from fnaccel.collectives.reduction import reduce as reduce
from fnaccel.collectives.splitting import split_between_processes as split_between_processes
