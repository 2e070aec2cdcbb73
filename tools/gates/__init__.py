# SPDX-License-Identifier: Apache-2.0
"""The gates of tools/check_wheel.py: each looks at a finished file, and says what is wrong and what to do."""
