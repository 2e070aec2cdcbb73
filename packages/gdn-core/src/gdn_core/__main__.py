# SPDX-License-Identifier: Apache-2.0
"""`python -m gdn_core` is the `gdn` command."""

import sys

from gdn_core.cli import main

if __name__ == "__main__":
    sys.exit(main())
