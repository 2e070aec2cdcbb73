# SPDX-License-Identifier: Apache-2.0
"""What tools/check_workflows.py reads, and looks at in jobs."""
