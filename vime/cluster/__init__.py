"""Everything that touches Ray. Ray reads its settings when it is imported, so they stand here, before any module imports it."""

import os

RAY_ENV = {
    # Ray replaces 127.0.0.1 by an outside address unless clusters are switched off; the variable's name is Ray's.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
}
os.environ.update(RAY_ENV)
