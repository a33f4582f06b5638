"""What bounds the router's patience. All times are in seconds."""

IN_FLIGHT = 64
"""Requests that one engine works on at once; others wait in order."""
ATTEMPTS = 3
"""Engines that one request is given to before it fails."""
FAULTS_IN_A_ROW = 5
"""Failed requests without a good answer between them after which an engine is restarted, well as it may say it is."""

START_SECONDS = 1200.0
"""How long an engine may take to start."""
REQUEST_SECONDS = 600.0
"""How long one engine may work on one request; then it is given to another."""
CONTROL_SECONDS = 600.0
"""How long an engine may take to serve a new version, to retire one, to sleep or to wake."""
CLOSE_SECONDS = 60.0
"""How long a failed engine may take to end before a new one is started in its place."""
HEALTH_EVERY = 10.0
"""Pause between two health checks of an engine."""

BACKOFF, MAX_BACKOFF = 1.0, 60.0
"""Pause before the first restart; doubled with each further one, up to the second."""
FORGIVE_AFTER = 3600.0
"""After this time in health an engine's restarts are counted from 0 again."""
