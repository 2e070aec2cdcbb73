# SPDX-License-Identifier: Apache-2.0
"""The CUDA backend of gdn-core. This release finds the driver and its devices, and has no kernel yet."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from gdn_cuda import _C

__version__ = _C.version()

__all__ = ["__version__", "provider"]


class CudaProvider:
    """What gdn-core asks of a backend; see `gdn_core.backends()`."""

    name = "cuda"
    version = __version__
    device_types: tuple[str, ...] = ("cuda",)
    ops: Mapping[str, Callable[..., None]] = MappingProxyType({})

    def availability(self) -> str | None:
        """Say why no call can run here; None would mean that one can."""
        driver = _C.query_driver()
        return driver.problem or f"gdn-cuda {self.version} has no kernel yet ({driver.devices[0].name} is there)"

    def level(self) -> str | None:
        """Return the compute capability of the first device, such as "9.0"."""
        devices = _C.query_driver().devices
        return f"{devices[0].capability_major}.{devices[0].capability_minor}" if devices else None

    def details(self) -> dict[str, str]:
        """Return the driver's version and each device's name."""
        driver = _C.query_driver()
        details = {f"device {i}": device.name for i, device in enumerate(driver.devices)}
        if driver.version:
            details["driver supports CUDA"] = f"{driver.version // 1000}.{driver.version % 1000 // 10}"
        return details


provider = CudaProvider()
