"""`python -m tests.zoo`; the sweep is in a module of its own, which its workers import."""

import sys

from .sweep import main

sys.exit(main())
