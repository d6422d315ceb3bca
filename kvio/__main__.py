"""``python -m kvio``."""

import sys

from kvio.cli.main import main

sys.exit(main())
