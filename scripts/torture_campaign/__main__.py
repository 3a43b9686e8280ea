"""`python -m scripts.torture_campaign`: see scripts/torture."""

import sys

from scripts.torture_campaign.cli import main

sys.exit(main())
