"""Starting processes for `fnaccel launch`, and the environment variables for `fa.start`."""

from fnaccel.launch.job import Job as Job
from fnaccel.launch.supervise import launch as launch
