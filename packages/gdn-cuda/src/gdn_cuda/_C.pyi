# SPDX-License-Identifier: Apache-2.0
# Made by tools/check_stubs.py --write from the compiled module.
"""The CUDA driver and its devices, as seen by gdn-cuda."""



def version() -> str: ...

class Device:
    @property
    def name(self) -> str: ...

    @property
    def capability_major(self) -> int: ...

    @property
    def capability_minor(self) -> int: ...

class DriverInfo:
    @property
    def problem(self) -> str: ...

    @property
    def version(self) -> int: ...

    @property
    def devices(self) -> list[Device]: ...

def query_driver() -> DriverInfo:
    """Ask the CUDA driver for its version and devices."""
