# SPDX-License-Identifier: Apache-2.0
"""Messages that a person should see once, not once a call."""

from __future__ import annotations

import logging
import threading

logger = logging.getLogger("gdn_core")

_seen: set[str] = set()
_lock = threading.Lock()


def log_once(level: int, message: str) -> None:
    """Log ``message`` at ``level`` the first time it comes up in this process."""
    with _lock:
        if message in _seen:
            return
        _seen.add(message)
    logger.log(level, message)


def forget() -> None:
    """Let every message be logged again (for tests)."""
    with _lock:
        _seen.clear()
