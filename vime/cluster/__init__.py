"""Everything that touches Ray. Ray reads its settings when it is imported, so they stand here, before any module imports it."""

import os

RAY_ENV = {
    # Ray replaces 127.0.0.1 by an outside address unless clusters are switched off; the variable's name is Ray's.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    # Nobody scrapes a run's own Ray; its self-observation costs a few percent of a core.
    "RAY_enable_metrics_collection": "0",
    "RAY_event_stats": "0",
    "RAY_metrics_report_interval_ms": "60000",
}
os.environ.update(RAY_ENV)
