"""`python -m korch.cli`."""

import sys

from korch.cli import main

sys.exit(main())
