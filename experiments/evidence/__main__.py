"""`python -m experiments.evidence`."""

import sys

from experiments.evidence.run import main

sys.exit(main())
