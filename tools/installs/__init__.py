# SPDX-License-Identifier: Apache-2.0
"""What tools/check_install.py is made of."""
