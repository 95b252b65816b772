"""Starting processes: what `fnaccel launch` does, and the variables it sets for `fa.start`."""

from fnaccel.launch.job import Job as Job
from fnaccel.launch.supervise import launch as launch
