# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels of gdn. Install gdn-core to call them; this package is its backend ``cuda``."""

from __future__ import annotations

from gdn_cuda import _C

__version__ = _C.version()

__all__ = ["__version__", "prepare", "provider"]

_NATIVE = (
    "fused_sigmoid_gating_delta_rule_update",
    "fused_sigmoid_gating_delta_rule_update_spec",
    "fused_sigmoid_gating_delta_rule_update_replay",
    "fused_gdn_decode_post_conv_mtp",
    "fused_gdn_decode_post_conv_mtp_replay",
)


def prepare(device: int = 0) -> None:
    """Load the kernels for a device, as its first call would: needed before a CUDA graph captures that first call.

    Args:
        device: the device's number, as in ``cuda:0``.

    Raises:
        RuntimeError: no kernel can run there; the message says why.

    Example:
        >>> import gdn_cuda
        >>> if gdn_cuda.provider.availability() is None:
        ...     gdn_cuda.prepare(0)
    """
    _C.prepare_device(device)


class _Provider:
    """What gdn-core asks of a backend; see `gdn_core.backends()`."""

    name = "cuda"
    version = __version__
    device_types = ("cuda",)

    def __init__(self) -> None:
        self.ops = {name: getattr(_C, name) for name in _NATIVE}

    def availability(self) -> str | None:
        """Say why no call can run here, or return None when one can."""
        return _C.launch_problem() or None

    def level(self) -> str | None:
        """Return the compute capability of the first device, such as "9.0"."""
        devices = _C.query_driver().devices
        return f"{devices[0].capability_major}.{devices[0].capability_minor}" if devices else None

    def details(self) -> dict[str, str]:
        """Return the devices, the driver's version, and what the device code was compiled by and for."""
        driver = _C.query_driver()
        details = {}
        for i, device in enumerate(driver.devices):
            code = _C.code_for(device.capability_major, device.capability_minor)
            details[f"device {i}"] = (
                f"{device.name}, runs code for {code}" if code else f"{device.name}, no code for it"
            )
        if driver.version:
            details["driver supports CUDA"] = f"{driver.version // 1000}.{driver.version % 1000 // 10}"
        compiler, major, minor = _C.device_compiler()
        if compiler:
            details["compiled by"] = f"{compiler} of CUDA {major}.{minor}"
        return details


provider = _Provider()
