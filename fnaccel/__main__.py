"""`python -m fnaccel`: the same as `fnaccel`."""

import sys

from fnaccel.cli.main import main

sys.exit(main())
