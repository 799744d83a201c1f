"""``python -m engine_client`` is the ``engine-client`` command."""

from __future__ import annotations

import sys

from engine_client.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
