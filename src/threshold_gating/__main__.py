"""`python -m threshold_gating` is the command `tg`."""

from threshold_gating.cli import main

raise SystemExit(main())
