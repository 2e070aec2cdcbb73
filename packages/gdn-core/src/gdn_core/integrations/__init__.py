# SPDX-License-Identifier: Apache-2.0
"""Put gdn's operations behind other libraries' models. Nothing here is imported by `import gdn_core`."""
