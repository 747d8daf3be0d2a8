"""`python -m omni_bus` is `omni-bus`."""

import sys

from omni_bus.cli import main

sys.exit(main())
