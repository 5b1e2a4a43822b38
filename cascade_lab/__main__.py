"""`python -m cascade_lab` is the `cascade-lab` command."""

import sys

from cascade_lab.cli import main

sys.exit(main())
