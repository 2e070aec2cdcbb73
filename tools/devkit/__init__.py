# SPDX-License-Identifier: Apache-2.0
"""What tools/dev.py is made of. Standard library only: it runs before anything is installed."""
